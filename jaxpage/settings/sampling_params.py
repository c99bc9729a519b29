"""Defines `SamplingParams` and `BeamSearchParams`, which say how a request is decoded.

They are immutable, hashable and checked when they are made. Names and bounds are vLLM's, so that
scripts carry over. The checks here need no model: when a request is admitted, its token ids are
checked against the width of the logits, and its lengths against the model.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from jaxpage.settings.argument_checks import (
    check_bool,
    check_float,
    check_int,
    check_items,
    check_text,
    check_token_id,
    names_checked,
    refuse,
)
from jaxpage.settings.field_table import MAX_BAD_WORD_CHARACTERS, MAX_BAD_WORDS, check
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


@dataclass(frozen=True, init=False)
class SamplingParams:
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

    n: int  # samples of the prompt, 1 to 16384
    best_of: int | None  # samples to generate, n to 16384; the n most likely are returned; None: n
    # 0 to 2; 0 (and anything below 1e-5): greedy; 1: the distribution of the model
    temperature: float
    # above 0, to 1: keep the most likely tokens whose probabilities sum up to this; 1: off
    top_p: float
    top_k: int  # keep this many of the most likely tokens; 0 or -1: off
    min_p: float  # 0 to 1: drop tokens below this share of the highest probability; 0: off
    presence_penalty: float  # -2 to 2; subtracted once from the logits of tokens in the output
    frequency_penalty: float  # -2 to 2; subtracted for each time that the token is in the output
    # above 0; divides positive and multiplies negative logits of all known tokens; 1: off
    repetition_penalty: float
    # token id to a bias of -100 to 100, which is added to the logit; at most 1024
    logit_bias: tuple[tuple[int, float], ...]
    allowed_token_ids: TokenIds | None  # only these token ids may be sampled; None: all
    # The tokens are those of the text at the beginning of a text and after a space. Other tokens
    # may make the same text, and the prompt may contain it.
    # texts whose tokens the output does not have in a row; at most 1024, of 256 characters each
    bad_words: tuple[str, ...]
    seed: int | None  # seed of the sampling noise; None or -1: drawn by the engine
    stop: tuple[str, ...]  # the output ends before the first of these texts
    stop_token_ids: TokenIds  # the output ends after the first of these token ids
    ignore_eos: bool  # continue after end-of-sequence tokens
    max_tokens: int | None  # longest output in tokens, at least 1; None: up to max_model_len
    min_tokens: int  # only max_tokens may end the output before this many tokens; 0 to max_tokens
    # 0 to 20: log probabilities of the sampled token and of this many most likely ones; None: none
    logprobs: int | None
    # the same for the prompt tokens, which are then computed without the prefix cache
    prompt_logprobs: int | None
    include_stop_str_in_output: bool  # keep the stop string at the end of the text
    skip_special_tokens: bool  # leave special tokens out of the text
    # one of "json", "json_object", "regex", "choice" and "grammar"; kept as (kind, value as JSON)
    structured_outputs: tuple[str, str] | None
    # at least 0: the most tokens of reasoning, after which its closing marker is forced; None: any
    thinking_token_budget: int | None
    # the texts before and after the reasoning, kept without white space around them, and whether
    # reasoning may begin again later in the answer; None: ("<think>", "</think>", False)
    thinking_markers: ThinkingMarkers | None
    priority: int  # with scheduling_policy="priority": lower is admitted first and preempted last
    # only requests with the same salt share cached prefixes; at most 256 characters
    cache_salt: str | None
    # with scheduling_policy="fair": the user to whom the tokens count; at most 256 characters
    user: str | None
    # "raw": log probabilities are the model's; "processed": they are those of the distribution that
    # a token is drawn from, after masks, biases, penalties, temperature and cuts (greedy: without
    # temperature and cuts). Those of prompt tokens are always raw
    logprobs_mode: LogprobsMode
    # with enable_return_sampling_mask, a temperature above 0 and top_k above 0: return the tokens
    # that each token was drawn from
    return_sampling_mask: bool
    # with enable_return_routed_experts, in models with experts: return the experts of each token;
    # the prompt is then computed without the prefix cache
    return_routed_experts: bool
    # with enable_return_hidden_states: return the last layer's normed hidden state that each token
    # was drawn from
    return_hidden_states: bool

    @names_checked
    def __init__(
        self,
        n: int = 1,
        best_of: int | None = None,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        repetition_penalty: float = 1.0,
        logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] | None = None,
        allowed_token_ids: Collection[int] | None = None,
        bad_words: Collection[str] | None = None,
        seed: int | None = None,
        stop: str | Collection[str] | None = None,
        stop_token_ids: Collection[int] | None = None,
        ignore_eos: bool = False,
        max_tokens: int | None = 16,
        min_tokens: int = 0,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
        structured_outputs: Mapping[str, Any] | tuple[str, str] | None = None,
        thinking_token_budget: int | None = None,
        thinking_markers: tuple[str, str] | ThinkingMarkers | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        user: str | None = None,
        logprobs_mode: LogprobsMode = "raw",
        return_sampling_mask: bool = False,
        return_routed_experts: bool = False,
        return_hidden_states: bool = False,
    ) -> None:
        max_tokens = _check_optional("max_tokens", max_tokens)
        self._store(
            n=check_int("n", n, 1, MAX_SEQUENCES),
            best_of=_optional_int("best_of", best_of, n, MAX_SEQUENCES),
            temperature=_temperature(temperature),
            top_k=max(check("top_k", top_k), 0),
            presence_penalty=check("presence_penalty", presence_penalty),
            frequency_penalty=check("frequency_penalty", frequency_penalty),
            repetition_penalty=check("repetition_penalty", repetition_penalty),
            logit_bias=_logit_bias(logit_bias),
            allowed_token_ids=_check_allowed_token_ids(allowed_token_ids),
            bad_words=_bad_words(bad_words),
            seed=_seed(seed),
            stop=_stop(stop),
            stop_token_ids=_token_ids("stop_token_ids", stop_token_ids),
            max_tokens=max_tokens,
            min_tokens=_min_tokens(min_tokens, max_tokens),
            logprobs=_check_optional("logprobs", logprobs),
            prompt_logprobs=_check_optional("prompt_logprobs", prompt_logprobs),
            include_stop_str_in_output=check(
                "include_stop_str_in_output", include_stop_str_in_output
            ),
            skip_special_tokens=check("skip_special_tokens", skip_special_tokens),
            structured_outputs=check_structured_outputs(structured_outputs),
            thinking_token_budget=_check_optional("thinking_token_budget", thinking_token_budget),
            thinking_markers=_markers(thinking_markers),
            **_check_each(top_p=top_p, min_p=min_p, ignore_eos=ignore_eos, priority=priority),
            cache_salt=_cache_salt(cache_salt),
            user=_check_optional("user", user),
            logprobs_mode=check("logprobs_mode", logprobs_mode),
            return_sampling_mask=check("return_sampling_mask", return_sampling_mask),
            return_routed_experts=check("return_routed_experts", return_routed_experts),
            return_hidden_states=check("return_hidden_states", return_hidden_states),
        )

    def _store(self, **fields: Any) -> None:
        for name, value in fields.items():
            object.__setattr__(self, name, value)

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


@dataclass(frozen=True, init=False)
class BeamSearchParams:
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

    beam_width: int  # beams, 1 to 16384; with the end-of-sequence and stop ids at most 64
    max_tokens: int | None  # longest output in tokens, at least 1; None: up to max_model_len
    length_penalty: float  # score = cumulative log probability / (output tokens ** this)
    early_stopping: bool | Literal["never"]  # when to end the search, see above
    n: int | None  # hypotheses to return, 1 to beam_width, best first; None: beam_width
    ignore_eos: bool  # continue after end-of-sequence tokens
    stop_token_ids: TokenIds  # additional end-of-sequence ids

    @names_checked
    def __init__(
        self,
        beam_width: int,
        max_tokens: int | None = 16,
        length_penalty: float = 1.0,
        early_stopping: bool | Literal["never"] = False,
        n: int | None = None,
        ignore_eos: bool = False,
        stop_token_ids: Collection[int] | None = None,
    ) -> None:
        if not isinstance(early_stopping, bool) and early_stopping != "never":
            refuse("early_stopping", early_stopping, "True, False or 'never'")
        beam_width = check_int("beam_width", beam_width, 1, MAX_SEQUENCES)
        fields = {
            "beam_width": beam_width,
            "max_tokens": _check_optional("max_tokens", max_tokens),
            "length_penalty": check("length_penalty", length_penalty),
            "early_stopping": early_stopping,
            "n": _optional_int("n", n, 1, beam_width),
            "ignore_eos": check("ignore_eos", ignore_eos),
            "stop_token_ids": _token_ids("stop_token_ids", stop_token_ids),
        }
        for name, value in fields.items():
            object.__setattr__(self, name, value)


def _check_each(**fields: Any) -> dict[str, Any]:
    return {name: check(name, value) for name, value in fields.items()}


def _check_optional(name: str, value: Any) -> Any:
    return None if value is None else check(name, value)


def _optional_int(name: str, value: Any, low: int, high: int) -> int | None:
    return None if value is None else check_int(name, value, low, high)


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


def _token_ids(name: str, value: Any) -> TokenIds:
    if value is None:
        return TokenIds()
    return (
        value
        if isinstance(value, TokenIds)
        else TokenIds(dict.fromkeys(check_items(name, value, check_token_id)))
    )


def _check_allowed_token_ids(value: Any) -> TokenIds | None:
    if value is None:
        return None
    return _token_ids("allowed_token_ids", value) or refuse(
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


def _min_tokens(value: Any, max_tokens: int | None) -> int:
    min_tokens: int = check("min_tokens", value)
    if max_tokens is not None and min_tokens > max_tokens:
        refuse("min_tokens", value, f"at most max_tokens ({max_tokens})")
    return min_tokens


def _cache_salt(value: Any) -> str | None:
    if value is None:
        return None
    salt: str = check("cache_salt", value)
    return salt if "\0" not in salt else refuse("cache_salt", value, "free of NUL characters")
