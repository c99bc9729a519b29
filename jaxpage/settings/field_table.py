"""Lists the parameters of a request, one a line: type and bounds, and all names that it has.

From these lines follow the checks of `SamplingParams`, the fields of the HTTP API with their bounds
and their part in the OpenAPI document, what a beam search and an engine without the setting refuse,
the flags of the command line, what is read of generation_config.json and of GGUF files, the names
in the other APIs, and the tests at the bounds. A line that the engine gets is also a field of
`SamplingParams`, whose module fails to import without it. Fields that are no parameters of the
engine are in serving/wire/fields.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jaxpage.settings.argument_checks import (
    INT32_MAX,
    check_bool,
    check_choice,
    check_float,
    check_int,
    check_text,
)

MAX_N = 128  # sequences of one prompt in an HTTP request: n, best_of, the width of a beam search
MAX_LOGPROBS = 20  # candidates that may be asked for per position
MAX_COMPLETION_LOGPROBS = 5
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
MAX_BAD_WORDS = 1024  # every step reads all of them
MAX_BAD_WORD_CHARACTERS = 256
MAX_CACHE_SALT_CHARACTERS = 256
MAX_USER_CHARACTERS = 256


@dataclass(frozen=True)
class Float:
    """A finite number in [low, high], or in (low, high] with `above_low`."""

    low: float = -math.inf
    high: float = math.inf
    above_low: bool = False

    def check(self, name: str, value: Any) -> float:
        """Returns the value, or raises ValueError."""
        return check_float(name, value, self.low, self.high, above_low=self.above_low)


@dataclass(frozen=True)
class Int:
    """An integer in [low, high]."""

    low: int
    high: int = INT32_MAX

    def check(self, name: str, value: Any) -> int:
        """Returns the value, or raises ValueError."""
        return check_int(name, value, self.low, self.high)


@dataclass(frozen=True)
class Bool:
    """True or false."""

    def check(self, name: str, value: Any) -> bool:
        """Returns the value, or raises ValueError."""
        return check_bool(name, value)


@dataclass(frozen=True)
class Text:
    """A text of `min_characters` to `max_characters`; the engine takes none that is empty."""

    max_characters: int
    min_characters: int = 1

    def check(self, name: str, value: Any) -> str:
        """Returns the value, or raises ValueError."""
        return check_text(name, value, self.max_characters)


@dataclass(frozen=True)
class Choice:
    """One of a few texts."""

    values: tuple[str, ...]

    def check(self, name: str, value: Any) -> str:
        """Returns the value, or raises ValueError."""
        check_choice(name, value, self.values)
        return str(value)


@dataclass(frozen=True)
class Texts:
    """A list of texts that are not empty, or with `or_one` a single one."""

    max_items: int
    max_characters: int
    or_one: bool = False


@dataclass(frozen=True)
class TokenIdList:
    """A list of token ids."""

    min_items: int = 0


Kind = Float | Int | Bool | Text | Choice | Texts | TokenIdList


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class Field:
    """A field of requests.

    Attributes:
        name: Its name in completions and chats, and in `SamplingParams`.
        kind: Its type and bounds; None if serving/wire has a type of its own for it.
        requests: Its name and its kind in each kind of request that has it.
        neutral: The values with which it asks for nothing, besides null, as clients send them.
        elsewhere: More such values, where a request does not honour the field.
        beams: The values that a beam search takes, because they turn the field off; None for all.
        engine: Converts the value for `SamplingParams`; None if the endpoint gives it.
        setting: The setting of the engine without which it refuses the field; empty for none.
        flag: The help of its flag on the command line; empty for none.
        config: True if generation_config.json may give a default.
        gguf: Its name in the metadata of a GGUF file, after "general.sampling.".
        of_draws: True if greedy requests ignore it.
    """

    name: str
    kind: Kind | None = None
    requests: Mapping[str, tuple[str, Kind | None]] | None = None
    neutral: tuple[Any, ...] = ()
    elsewhere: tuple[Any, ...] = ()
    beams: tuple[Any, ...] | None = None
    engine: Callable[[Any], Any] | None = _same
    setting: str = ""
    flag: str = ""
    config: bool = False
    gguf: str = ""
    of_draws: bool = False


def _field(
    name: str,
    kind: Kind | None,
    requests: Mapping[str, str | Kind | tuple[str, Kind] | None] | None = None,
    **columns: Any,
) -> Field:
    """Returns a line of the table.

    Args:
        name: The name of the field.
        kind: Its type and bounds.
        requests: What differs in a kind of request: its name, its kind, or both; None if a
            completion, a chat or a request to /v1/generate ("rollouts") does not have it. Requests
            of other kinds have it if they are here.
        columns: The other columns; see `Field`.
    """
    forms: dict[str, tuple[str, Kind | None]] = {}
    usual = dict.fromkeys(("completions", "chats", "rollouts"), name)
    for request, form in (usual | dict(requests or {})).items():
        if isinstance(form, tuple):
            forms[request] = form
        elif isinstance(form, str):
            forms[request] = (form, kind)
        elif form is not None:
            forms[request] = (name, form)
    return Field(name, kind, forms, **columns)


def _biases(value: Mapping[str, float]) -> dict[int, float]:
    biases = {int(token_id): bias for token_id, bias in value.items()}
    if len(biases) < len(value):
        raise ValueError("logit_bias has the same token id twice, written in two ways")
    return biases


PARAMETERS = (
    _field(
        "max_tokens",
        Int(1),
        {"completions": Int(0)},  # 0 needs echo: the answer is the prompt alone
        engine=None,
        flag="longest output in tokens; default: 200",
    ),
    _field(
        "min_tokens",
        Int(0),
        beams=(0,),
        flag="only --max-tokens ends the text before this many tokens; default: 0",
    ),
    _field(
        "temperature",
        Float(0, 2),
        {"ollama": "temperature", "messages": Float(0, 1), "responses": "temperature"},
        beams=(0,),
        flag="0 to 2; 0: greedy; default: generation_config.json, else 1 (chat: 0.7)",
        config=True,
        gguf="temp",
        of_draws=True,
    ),
    _field(
        "top_p",
        Float(0, 1, above_low=True),
        {"ollama": "top_p", "messages": "top_p", "responses": "top_p"},
        beams=(1,),
        flag="keep the most likely tokens whose probabilities sum up to this; default of chat: 0.9",
        config=True,
        gguf="top_p",
        of_draws=True,
    ),
    _field(
        "top_k",
        Int(-1),  # vLLM writes -1 for off
        {"ollama": Int(0), "messages": Int(0)},
        beams=(0, -1),
        flag="keep this many of the most likely tokens; 0: all",
        config=True,
        gguf="top_k",
        of_draws=True,
    ),
    _field(
        "min_p",
        Float(0, 1),
        {"ollama": "min_p"},
        beams=(0,),
        flag="drop tokens below this share of the highest probability; 0 to 1",
        config=True,
        gguf="min_p",
        of_draws=True,
    ),
    _field(
        "seed",
        Int(-(2**63), 2**64 - 1),
        {"ollama": "seed"},
        # A seed of -1 is a seed like any other, and no request for a random one.
        engine=lambda seed: seed % 2**64,
        flag="seed of the sampling noise; the same seed gives the same text",
    ),
    _field("n", Int(1, MAX_N), flag="samples per prompt (only 1 on the command line)"),
    _field("best_of", Int(1, MAX_N), {"chats": None}, neutral=(1,)),
    _field(
        "presence_penalty",
        Float(-2, 2),
        {"ollama": "presence_penalty"},
        beams=(0,),
        flag="subtracted once from the logits of tokens in the output; -2 to 2",
    ),
    _field(
        "frequency_penalty",
        Float(-2, 2),
        {"ollama": "frequency_penalty"},
        beams=(0,),
        flag="subtracted for each time that the token is in the output; -2 to 2",
    ),
    _field(
        "repetition_penalty",
        Float(0, above_low=True),
        {"ollama": "repeat_penalty"},
        beams=(1,),
        flag="above 1: tokens of the prompt and output become less likely; 1: off",
        config=True,
    ),
    _field(
        "structured_outputs",
        None,
        beams=(),
        engine=None,
        flag='what the output must match: {"regex": ...}, {"json": ...}, {"choice": ...}',
    ),
    _field(
        "thinking_token_budget",
        Int(0),
        beams=(),
        engine=None,
        flag="most tokens of reasoning; then its closing marker is forced",
    ),
    _field("ignore_eos", Bool(), flag="continue after end-of-sequence tokens"),
    _field(
        "include_stop_str_in_output",
        Bool(),
        beams=(False,),
        flag="keep the stop string in the text",
    ),
    _field(
        "skip_special_tokens",
        Bool(),
        beams=(True,),
        flag="leave special tokens out of the text; default: yes",
    ),
    _field(
        "stop",
        Texts(MAX_STOPS, MAX_STOP_CHARACTERS, or_one=True),
        {
            "ollama": Texts(MAX_STOPS, MAX_STOP_CHARACTERS),
            "messages": ("stop_sequences", Texts(MAX_STOPS, MAX_STOP_CHARACTERS)),
        },
        beams=([],),
        flag="stop before this text; repeatable",
    ),
    _field("stop_token_ids", TokenIdList(), flag="stop after any of these tokens"),
    _field("bad_words", Texts(MAX_BAD_WORDS, MAX_BAD_WORD_CHARACTERS), beams=([],)),
    _field("allowed_token_ids", TokenIdList(min_items=1), beams=()),
    _field("logit_bias", None, beams=({},), engine=_biases),
    _field(
        "logprobs",
        Int(0, MAX_LOGPROBS),
        {"completions": Int(0, MAX_COMPLETION_LOGPROBS), "chats": Bool()},
        neutral=(False,),
        beams=(0,),
        engine=None,
    ),
    _field(
        "top_logprobs",
        Int(0, MAX_LOGPROBS),
        {"completions": None, "rollouts": None},
        neutral=(0,),
        engine=None,
    ),
    _field("prompt_logprobs", Int(0, MAX_LOGPROBS), beams=()),
    _field("priority", Int(-(2**31)), {"scores": "priority"}, beams=(0,)),
    _field("cache_salt", Text(MAX_CACHE_SALT_CHARACTERS), {"scores": "cache_salt"}, beams=()),
    _field(
        "user",
        Text(MAX_USER_CHARACTERS, min_characters=0),
        dict.fromkeys(("scores", "vectors", "rankings", "responses"), "user"),
        engine=lambda user: user or None,
    ),
    _field("logprobs_mode", Choice(("raw", "processed")), beams=("raw",)),
    *(
        _field(
            name,
            Bool(),
            {"completions": None, "chats": None},
            neutral=(False,),
            setting=f"enable_{name}",
        )
        for name in ("return_sampling_mask", "return_routed_experts", "return_hidden_states")
    ),
    _field("length_penalty", Float(), {"rollouts": None}, neutral=(1,), engine=None),
    _field("early_stopping", None, {"rollouts": None}, neutral=(False,), engine=None),
)
_BY_NAME = {field.name: field for field in PARAMETERS}
# Lists of these have at most as many items as the model has token ids.
TOKEN_ID_LISTS = frozenset(
    field.name for field in PARAMETERS if isinstance(field.kind, TokenIdList)
)


def forms_in(request: str) -> Iterator[tuple[Field, str, Kind | None]]:
    """Yields each parameter that a kind of request has, with its name and its kind there."""
    for field in PARAMETERS:
        if field.requests and request in field.requests:
            yield field, *field.requests[request]


def names_in(request: str) -> dict[str, str]:
    """Returns the name that a kind of request has for each parameter that it has."""
    return {field.name: name for field, name, _ in forms_in(request)}


def check(name: str, value: Any) -> Any:
    """Returns the value of a parameter in the engine's form.

    Raises:
        ValueError: It has the wrong type or is out of bounds.
    """
    kind = _BY_NAME[name].kind
    assert not isinstance(kind, Texts | TokenIdList | None), f"{name} has checks of its own"
    return kind.check(name, value)
