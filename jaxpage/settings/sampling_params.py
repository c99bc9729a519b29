"""Defines `SamplingParams` and `BeamSearchParams`, which say how a request is decoded.

They are immutable, hashable and checked when they are made. Names and bounds are vLLM's, so that
scripts carry over. The checks here need no model: when a request is admitted, its token ids are
checked against the width of the logits, and its lengths against the model.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from dataclasses import MISSING, dataclass
from typing import Any, Literal

from jaxpage.settings.argument_checks import (
    check_bool,
    check_float,
    check_int,
    check_items,
    check_text,
    check_token_id,
    refuse,
)
from jaxpage.settings.field_table import MAX_BAD_WORD_CHARACTERS, MAX_BAD_WORDS, check
from jaxpage.settings.parameters import (
    CheckedParameters,
    Converted,
    checks_parameters,
    parameter,
    require_fields,
)
from jaxpage.settings.structured_outputs import check_structured_outputs
from jaxpage.settings.token_ids import TokenIds

MAX_SEQUENCES = 16384  # of one request: the bound of n, best_of and beam_width
GREEDY_TEMPERATURE = 1e-5  # a temperature below this means: take the most likely token
MAX_MARKER_CHARACTERS = 256
LogprobsMode = Literal["raw", "processed"]
# The markers before and after the reasoning, and whether it may begin again later in the answer.
ThinkingMarkers = tuple[str, str, bool]
THINK_MARKERS: ThinkingMarkers = ("<think>", "</think>", False)
MAX_BAD_WORDS_CHARACTERS = 65536  # of all words together, because each is tokenized twice


def _temperature(value: Any) -> float:
    temperature = check("temperature", value)
    return 0.0 if temperature < GREEDY_TEMPERATURE else temperature


def _seed(value: Any) -> int | None:
    """Returns a seed in [0, 2**64), or None for None and -1, which ask the engine to draw one.

    Other negative seeds count modulo 2**64.
    """
    if value is None:
        return None
    seed = check("seed", value)
    return None if seed == -1 else seed % 2**64


def _stop(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        return (check_text("stop", value),)
    return check_items("stop", value, check_text)


def _token_ids(value: Any, name: str = "stop_token_ids") -> TokenIds:
    if value is None:
        return TokenIds()
    return (
        value
        if isinstance(value, TokenIds)
        else TokenIds(dict.fromkeys(check_items(name, value, check_token_id)))
    )


def _allowed_token_ids(value: Any) -> TokenIds | None:
    if value is None:
        return None
    return _token_ids(value, "allowed_token_ids") or refuse(
        "allowed_token_ids", value, "a list that is not empty"
    )


def _bad_words(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    words = check_items("bad_words", value, _bad_word, MAX_BAD_WORDS)
    if (total := sum(map(len, words))) > MAX_BAD_WORDS_CHARACTERS:
        refuse(
            "bad_words",
            value,
            f"at most {MAX_BAD_WORDS_CHARACTERS} characters together ({total} are given)",
        )
    return words


def _bad_word(name: str, value: Any) -> str:
    return check_text(name, value, MAX_BAD_WORD_CHARACTERS)


def _markers(value: Any) -> ThinkingMarkers | None:
    if value is None:
        return None
    name = "thinking_markers"
    if not isinstance(value, list | tuple) or len(value) not in (2, 3):
        refuse(name, value, "the texts before and after the reasoning, and optionally True")
    opened, closed, *again = value
    if opened != "":  # an empty one says that every prompt ends within the reasoning
        opened = _marker(f"{name}[0]", opened)
    closed = _marker(f"{name}[1]", closed)
    may_repeat = check_bool(f"{name}[2]", *again) if again else False
    if may_repeat and not opened:
        refuse(name, value, "with a text before the reasoning, because it may begin again")
    return opened, closed, may_repeat


def _marker(name: str, value: Any) -> str:
    marker = check_text(name, value, MAX_MARKER_CHARACTERS).strip()
    return marker or refuse(name, value, "a text that is more than white space")


def _logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    if value is None:
        return ()
    try:
        pairs = [
            (token_id, bias)
            for token_id, bias in (value.items() if isinstance(value, Mapping) else tuple(value))
        ]
    except (TypeError, ValueError):
        refuse("logit_bias", value, "a mapping of token ids to biases")
    biases = {
        check_token_id("logit_bias key", token_id): check_float(
            f"logit_bias[{token_id}]", bias, -100.0, 100.0
        )
        for token_id, bias in pairs
    }
    return tuple(sorted(biases.items()))


def _max_tokens(value: Any) -> int | None:
    return None if value is None else check("max_tokens", value)


def _min_tokens(params: SamplingParams, value: Any) -> int:
    min_tokens: int = check("min_tokens", value)
    if params.max_tokens is not None and min_tokens > params.max_tokens:
        refuse("min_tokens", value, f"at most max_tokens ({params.max_tokens})")
    return min_tokens


def _best_of(params: SamplingParams, value: Any) -> int | None:
    return None if value is None else check_int("best_of", value, params.n, MAX_SEQUENCES)


def _cache_salt(value: Any) -> str | None:
    if value is None:
        return None
    salt: str = check("cache_salt", value)
    return salt if "\0" not in salt else refuse("cache_salt", value, "free of NUL characters")


def _early_stopping(value: Any) -> bool | Literal["never"]:
    if isinstance(value, bool):
        return value
    return (
        "never" if value == "never" else refuse("early_stopping", value, "True, False or 'never'")
    )


def _num_hypotheses(params: BeamSearchParams, value: Any) -> int | None:
    return None if value is None else check_int("n", value, 1, params.beam_width)


# One flat record of more than 20 fields, because its keywords are vLLM's, and scripts carry over.
@checks_parameters
@dataclass(frozen=True)
class SamplingParams(CheckedParameters):
    """Holds the parameters of a request that samples its output, or decodes greedily.

    The fields hold the checked values in one form: lists are tuples without duplicate token ids
    (`stop` and `stop_token_ids` are `()` by default), a temperature below 1e-5 is 0.0, `top_k` is 0
    when off, `seed` is None or in [0, 2**64), `logit_bias` is sorted pairs.

    `structured_outputs` is given as a mapping with one of "json" (a schema, or its text), "regex",
    "choice" (a list of texts), "grammar" (Lark or GBNF) and "json_object" (True).

    Raises:
        ValueError: A parameter has the wrong type or is out of bounds; the message names the
            parameter and its value.
    """

    n: int = parameter(
        1,
        "samples of the prompt, 1 to 16384",
        lambda value: check_int("n", value, 1, MAX_SEQUENCES),
    )
    best_of: int | None = parameter(
        None,
        "samples to generate, n to 16384; the n most likely are returned; None: n",
        bounded=_best_of,
    )
    temperature: float = parameter(
        1.0,
        "0 to 2; 0 (and anything below 1e-5): greedy; 1: the distribution of the model",
        _temperature,
    )
    top_p: float = parameter(
        1.0,
        "above 0, to 1: keep the most likely tokens whose probabilities sum up to this; 1: off",
    )
    top_k: int = parameter(
        0,
        "keep this many of the most likely tokens; 0 or -1: off",
        lambda value: max(check("top_k", value), 0),
    )
    min_p: float = parameter(
        0.0, "0 to 1: drop tokens below this share of the highest probability; 0: off"
    )
    presence_penalty: float = parameter(
        0.0, "-2 to 2; subtracted once from the logits of tokens in the output"
    )
    frequency_penalty: float = parameter(
        0.0, "-2 to 2; subtracted for each time that the token is in the output"
    )
    repetition_penalty: float = parameter(
        1.0,
        "above 0; divides positive and multiplies negative logits of all known tokens; 1: off",
    )
    logit_bias: Converted[
        Mapping[int, float] | tuple[tuple[int, float], ...] | None, tuple[tuple[int, float], ...]
    ] = parameter(
        None,
        "token id to a bias of -100 to 100, which is added to the logit; at most 1024",
        _logit_bias,
    )
    allowed_token_ids: Converted[Collection[int] | None, TokenIds | None] = parameter(
        None, "only these token ids may be sampled; None: all", _allowed_token_ids
    )
    # The tokens are those of the text at the beginning of a text and after a space. Other tokens
    # may make the same text, and the prompt may contain it.
    bad_words: Converted[Collection[str] | None, tuple[str, ...]] = parameter(
        None,
        "texts whose tokens the output does not have in a row; at most 1024, of 256 characters "
        "each",
        _bad_words,
    )
    seed: int | None = parameter(
        None, "seed of the sampling noise; None or -1: drawn by the engine", _seed
    )
    stop: Converted[str | Collection[str] | None, tuple[str, ...]] = parameter(
        None, "the output ends before the first of these texts", _stop
    )
    stop_token_ids: Converted[Collection[int] | None, TokenIds] = parameter(
        None, "the output ends after the first of these token ids", _token_ids
    )
    ignore_eos: bool = parameter(False, "continue after end-of-sequence tokens")
    max_tokens: int | None = parameter(
        16, "longest output in tokens, at least 1; None: up to max_model_len", _max_tokens
    )
    min_tokens: int = parameter(
        0,
        "only max_tokens may end the output before this many tokens; 0 to max_tokens",
        bounded=_min_tokens,
    )
    logprobs: int | None = parameter(
        None,
        "0 to 20: log probabilities of the sampled token and of this many most likely ones; None: "
        "none",
    )
    prompt_logprobs: int | None = parameter(
        None, "the same for the prompt tokens, which are then computed without the prefix cache"
    )
    include_stop_str_in_output: bool = parameter(
        False, "keep the stop string at the end of the text"
    )
    skip_special_tokens: bool = parameter(True, "leave special tokens out of the text")
    structured_outputs: Converted[
        Mapping[str, Any] | tuple[str, str] | None, tuple[str, str] | None
    ] = parameter(
        None,
        'one of "json", "json_object", "regex", "choice" and "grammar"; kept as (kind, value as '
        "JSON)",
        check_structured_outputs,
    )
    thinking_token_budget: int | None = parameter(
        None,
        "at least 0: the most tokens of reasoning, after which its closing marker is forced; None: "
        "any",
    )
    thinking_markers: Converted[
        tuple[str, str] | ThinkingMarkers | None, ThinkingMarkers | None
    ] = parameter(
        None,
        "the texts before and after the reasoning, kept without white space around them, and "
        'whether reasoning may begin again later in the answer; None: ("<think>", "</think>", '
        "False)",
        _markers,
    )
    priority: int = parameter(
        0, 'with scheduling_policy="priority": lower is admitted first and preempted last'
    )
    cache_salt: str | None = parameter(
        None,
        "only requests with the same salt share cached prefixes; at most 256 characters",
        _cache_salt,
    )
    user: str | None = parameter(
        None,
        'with scheduling_policy="fair": the user to whom the tokens count; at most 256 characters',
    )
    logprobs_mode: LogprobsMode = parameter(
        "raw",
        '"raw": log probabilities are the model\'s; "processed": they are those of the distribution '
        "that a token is drawn from, after masks, biases, penalties, temperature and cuts (greedy: "
        "without temperature and cuts). Those of prompt tokens are always raw",
    )
    return_sampling_mask: bool = parameter(
        False,
        "with enable_return_sampling_mask, a temperature above 0 and top_k above 0: return the "
        "tokens that each token was drawn from",
    )
    return_routed_experts: bool = parameter(
        False,
        "with enable_return_routed_experts, in models with experts: return the experts of each "
        "token; the prompt is then computed without the prefix cache",
    )
    return_hidden_states: bool = parameter(
        False,
        "with enable_return_hidden_states: return the last layer's normed hidden state that each "
        "token was drawn from",
    )

    @property
    def greedy(self) -> bool:
        """Returns whether the most likely token is taken instead of a drawn one."""
        return self.temperature == 0.0

    @property
    def ranks(self) -> bool:
        """Returns whether only the most likely of the generated sequences are returned."""
        return self.best_of is not None and self.best_of > self.n

    @property
    def num_logprobs(self) -> int | None:
        """Returns `logprobs`, or 0 where only what comes with them is needed of the tokens."""
        is_needed = self.ranks or self.return_sampling_mask or self.return_hidden_states
        return 0 if self.logprobs is None and is_needed else self.logprobs

    @property
    def computes_prompt(self) -> bool:
        """Returns whether the whole prompt is computed, whatever is cached or pinned of it."""
        return self.prompt_logprobs is not None or self.return_routed_experts

    @functools.cached_property  # every step reads it
    def processes_logits(self) -> bool:
        """Returns whether any parameter changes the logits before temperature and truncation.

        Most requests leave the logits as they are.
        """
        processors = (
            self.logit_bias,
            self.allowed_token_ids,
            self.bad_words,
            self.min_tokens,
        )
        return self.penalises or self.has_masks or any(processors)

    @functools.cached_property  # every step reads it
    def has_masks(self) -> bool:
        """Returns whether the text so far may decide which tokens may come next."""
        return self.structured_outputs is not None or self.thinking_token_budget is not None

    @property
    def penalises(self) -> bool:
        """Returns whether the logits depend on the tokens that are already known."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


require_fields(SamplingParams)


@checks_parameters
@dataclass(frozen=True)
class BeamSearchParams(CheckedParameters):
    """Holds the parameters of a beam search as Hugging Face's `generate(num_beams=...)` has it.

    When `beam_width` hypotheses have ended, `early_stopping` decides whether the search goes on:

    * True ends the search.
    * False ends it if the best running beam, at its current length, scores no better than the
      worst of the hypotheses.
    * "never" ends it only if that beam could not score better at its longest length either. This
      is the same as False if `length_penalty` is not above 0.

    Raises:
        ValueError: A parameter has the wrong type or is out of bounds; the message names the
            parameter and its value.
    """

    beam_width: int = parameter(
        MISSING,
        "beams, 1 to 16384; with the end-of-sequence and stop ids at most 64",
        lambda value: check_int("beam_width", value, 1, MAX_SEQUENCES),
    )
    max_tokens: int | None = parameter(
        16, "longest output in tokens, at least 1; None: up to max_model_len", _max_tokens
    )
    length_penalty: float = parameter(
        1.0, "score = cumulative log probability / (output tokens ** this)"
    )
    early_stopping: bool | Literal["never"] = parameter(
        False, "when to end the search, see above", _early_stopping
    )
    n: int | None = parameter(
        None,
        "hypotheses to return, 1 to beam_width, best first; None: beam_width",
        bounded=_num_hypotheses,
    )
    ignore_eos: bool = parameter(False, "continue after end-of-sequence tokens")
    stop_token_ids: Converted[Collection[int] | None, TokenIds] = parameter(
        None, "additional end-of-sequence ids", _token_ids
    )
