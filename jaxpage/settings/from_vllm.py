"""Answers flags of `vllm serve`, and fields of requests, that jaxpage has or does not have.

An unknown flag and a field that is not supported are refused with their answer. The page "Coming
from vLLM" of the documentation is made from the same table.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple


class Answer(NamedTuple):
    """The answer of jaxpage to a name of vLLM.

    Attributes:
        kind: One of "same", "other name", "always on", "not needed" and "not there".
        text: A sentence without its full stop.
    """

    kind: str
    text: str


@functools.cache
def answers(what: str) -> Mapping[str, Answer]:
    """Returns the answers by the name of vLLM.

    Args:
        what: "flags" of `vllm serve`, or "fields" of requests.
    """
    with Path(__file__).with_suffix(".toml").open("rb") as file:
        kinds = tomllib.load(file)[what]
    return {
        name: Answer(kind, text)
        for kind, texts in kinds.items()
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
    for name in (flag, flag.replace("--no-", "--", 1)):
        if name in known and known[name].kind != "same":
            return known[name].text
    return None
