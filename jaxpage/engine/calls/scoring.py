"""Computes the log probabilities of given continuations.

Prompt and continuation are the prompt of a request that draws one token, which is ignored; the
scores are taken from its prompt log probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxpage.engine.calls.prompts import as_list
from jaxpage.errors import WeightsReplaced
from jaxpage.outputs import Logprob, RequestOutput
from jaxpage.settings.sampling_params import SamplingParams

SCORING = SamplingParams(
    temperature=0.0, max_tokens=1, ignore_eos=True, prompt_logprobs=0
)  # the parameters of a request whose prompt is scored


def continuation_logprobs(output: RequestOutput, num_prompt_tokens: int) -> list[Logprob]:
    """Returns the log probability of each token after the first `num_prompt_tokens`, at least one.

    Args:
        output: The output of a request with the parameters `SCORING`.
        num_prompt_tokens: The number of tokens that are not scored.
    """
    entries = (output.prompt_logprobs or [])[num_prompt_tokens:]
    token_ids = output.prompt_token_ids[num_prompt_tokens:]
    return [entry[token_id] for entry, token_id in zip(entries, token_ids, strict=True) if entry]


def scores_of(
    outputs: Sequence[RequestOutput], pairs: Sequence[tuple[list[int], list[int]]], *, single: bool
) -> list[float] | list[list[float]]:
    """Returns the result of `LLM.score`.

    Args:
        outputs: The outputs of the requests.
        pairs: Their prompts and continuations, from `pair_arguments`.
        single: True if the caller gave one prompt and not a list.

    Raises:
        RuntimeError: A step failed.
        WeightsReplaced: The requests were aborted, because the model gets other weights.
    """
    for each in (each for output in outputs for each in output.outputs):
        if each.finish_reason == "error":
            raise RuntimeError(
                "the engine failed during scoring, and its log says why: "
                f"{each.stop_reason or 'a step failed'}"
            )
        if each.finish_reason == "abort":
            raise WeightsReplaced("The request was ended: the model gets other weights")
    scores = [
        [entry.logprob for entry in continuation_logprobs(output, len(prompt))]
        for (prompt, _), output in zip(pairs, outputs, strict=True)
    ]
    return scores[0] if single else scores


def pair_arguments(
    prompts: Any, continuations: Any
) -> tuple[bool, list[tuple[list[int], list[int]]]]:
    """Returns whether one prompt was given and not a list, and each prompt with its continuation.

    Raises:
        TypeError: They are no token ids, or one is a list of prompts and the other is not.
        ValueError: Their numbers differ, or one of them has no tokens.
    """
    prompts = _as_list("prompt_token_ids", prompts)
    continuations = _as_list("continuation_token_ids", continuations)
    kinds = {isinstance(each, list | tuple) for each in (*prompts, *continuations)}
    if len(kinds) > 1:
        raise TypeError(
            "prompt_token_ids and continuation_token_ids must both be lists of token ids, or both "
            "be lists of such lists"
        )
    single = True not in kinds
    prompts, continuations = ([prompts], [continuations]) if single else (prompts, continuations)
    if len(prompts) != len(continuations):
        raise ValueError(f"there are {len(prompts)} prompts and {len(continuations)} continuations")
    pairs = [
        (list(prompt), list(continuation))
        for prompt, continuation in zip(prompts, continuations, strict=True)
    ]
    if any(not prompt or not continuation for prompt, continuation in pairs):
        raise ValueError("a prompt and its continuation must have at least one token each")
    return single, pairs


def _as_list(name: str, argument: Any) -> list[Any]:
    """Returns the argument as a list, arrays in it as lists too.

    Raises:
        TypeError: The argument is a text, has texts, or is no list.
    """
    listed = as_list(argument)
    if isinstance(listed, str) or (
        isinstance(listed, list | tuple) and any(isinstance(each, str) for each in listed)
    ):
        raise TypeError("score takes token ids, and no texts: use those of llm.tokenizer")
    if not isinstance(listed, list | tuple):
        raise TypeError(
            f"{name} must be a list of token ids, or a list of such lists; got {argument!r:.80}"
        )
    return [as_list(each) for each in listed]
