"""Answers the names of vLLM that jaxpage has or does not have.

These are flags of `vllm serve`, fields of requests, keywords of `LLM` and of `SamplingParams`, and
metrics. A name that is not the same is refused with its answer. The page "Coming from vLLM" of the
documentation is made from the same table.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

_FLAG = re.compile(r"--([a-z][a-z-]*[a-z])")


class FlagAnswer(NamedTuple):
    """The answer of jaxpage to a name of vLLM.

    Attributes:
        kind: One of "same", "other name", "always on", "not needed" and "not there".
        text: A sentence without its full stop.
    """

    kind: str
    text: str


@functools.cache
def _table() -> Mapping[str, Any]:
    import tomllib

    with Path(__file__).with_suffix(".toml").open("rb") as file:
        return tomllib.load(file)


@functools.cache
def answers(group: str) -> Mapping[str, FlagAnswer]:
    """Returns the answers by the name of vLLM.

    Args:
        group: "flags" of `vllm serve`, "fields" of requests, "settings" of `LLM` that have other
            answers than their flags, parameters of "sampling", or "metrics" without their prefix.
    """
    return {
        name: FlagAnswer(kind, text)
        for kind, texts in _table()[group].items()
        for text, names in texts.items()
        for name in names.split()
    }


def answer_for_flag(word: str) -> str | None:
    """Returns the answer to a flag that jaxpage does not have; None if vLLM has none either.

    vLLM takes underscores for hyphens, a `--no-` form of switches, and fields of a flag's JSON
    after a dot.
    """
    flag = word.partition(".")[0].replace("_", "-")
    known = answers("flags")
    # `-O3` is a short flag with its value.
    for name in (flag, flag.replace("--no-", "--", 1), flag.rstrip("0123456789")):
        if name in known and known[name].kind != "same":
            return known[name].text
    return None


def answer_for_keyword(group: Literal["settings", "sampling"], name: str) -> FlagAnswer | None:
    """Returns the answer to a keyword of vLLM's `LLM` or `SamplingParams`, or None.

    A setting without an answer of its own has that of its flag, in which flags are keywords.
    """
    if name in answers(group):
        return answers(group)[name]
    answer = answers("flags").get(f"--{name.replace('_', '-')}") if group == "settings" else None
    if answer is None or answer.kind == "same":
        # Flags that are the same and no settings are of the server.
        return answer and FlagAnswer(
            "other name", f"jaxpage serve --{name.replace('_', '-')} has it"
        )
    return answer._replace(text=_FLAG.sub(_as_keyword, answer.text))


def _as_keyword(flag: re.Match[str]) -> str:
    keyword = flag[1].replace("-", "_")
    is_setting = keyword in answers("settings") or keyword in _KEYWORDS
    return keyword if is_setting else flag[0]


# Settings of jaxpage in the answers to flags, which vLLM does not have.
_KEYWORDS = frozenset(
    (
        *("num_blocks", "swap_space_blocks", "prefix_cache_directory", "prefix_cache_disk_bytes"),
        *("new_requests_wait_until", "event_log", "num_scheduler_steps"),
        "tensor_parallel_reduction",
    )
)


def without_neutral(
    group: Literal["settings", "sampling"], known: Mapping[str, Any], values: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns keywords without those of vLLM that ask for what jaxpage does anyway.

    Args:
        group: The keywords are those of "settings" or of "sampling".
        known: The keywords that jaxpage has, which all stay.
        values: The keywords that the caller gave.
    """
    return {
        name: value
        for name, value in values.items()
        if name in known
        or answer_for_keyword(group, name) is None
        or not _asks_nothing(group, name, value)
    }


def _asks_nothing(group: str, name: str, value: Any) -> bool:
    values = _table()["neutral"][group].get(name)
    if value is None:
        return True
    if isinstance(value, bool) and isinstance(values, list) and True in values:
        # For these names false may ask for something.
        return any(value is neutral for neutral in values)
    if value is False or (isinstance(value, str | list | tuple | dict) and not value):
        return True
    return any(
        # In Python 1 equals True, and a number is not what a switch means.
        value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
        for neutral in values or ()
    )
