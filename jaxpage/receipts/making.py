"""Makes the receipt of an answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxpage.errors import UnsupportedError
from jaxpage.outputs import CompletionOutput, RequestOutput
from jaxpage.receipts.receipt import (
    FORMAT,
    VERSION,
    EngineFacts,
    WeightFacts,
    bits_of,
    checksum_of,
)
from jaxpage.settings.sampling_params import BeamSearchParams, SamplingParams
from jaxpage.step.request import Request
from jaxpage.versions import package_version

# These parameters change neither tokens nor log probabilities, or have a field of their own.
_LEFT_OUT = frozenset(
    {
        "cache_salt",
        "logprobs",
        "priority",
        "prompt_logprobs",
        "return_hidden_states",
        "return_routed_experts",
        "return_sampling_mask",
        "seed",
        "user",
    }
)


def check_receiptable(
    params: SamplingParams | BeamSearchParams, *, has_adapter: bool, has_vectors: bool
) -> None:
    """Checks that the answer to a request can have a receipt.

    Args:
        params: The parameters.
        has_adapter: True if the request has a LoRA adapter.
        has_vectors: True if the prompt has pictures or vectors.

    Raises:
        UnsupportedError: It can have none.
    """
    if isinstance(params, BeamSearchParams):
        raise UnsupportedError(
            f"receipt is not supported with a beam search (beam_width={params.beam_width}): its "
            "outputs have no log probabilities"
        )
    if has_adapter:
        raise UnsupportedError(
            "receipt is not supported with a LoRA adapter: a receipt has the hashes of the model's "
            "own weights alone"
        )
    if has_vectors:
        raise UnsupportedError(
            "receipt is not supported for prompts with pictures or prompt_embeds: a receipt has "
            "the token ids of the prompt alone"
        )


def sampling_facts(params: SamplingParams, max_tokens: int) -> dict[str, Any]:
    """Returns the parameters that can change an answer, as JSON.

    Args:
        params: The parameters.
        max_tokens: The most tokens that the request could get.
    """
    fields = {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}
    return {name: _as_json(value) for name, value in fields.items() if name not in _LEFT_OUT} | {
        "max_tokens": max_tokens
    }


def _as_json(value: Any) -> Any:
    return [_as_json(item) for item in value] if isinstance(value, tuple) else value


def make_receipt(
    model: str,
    facts: EngineFacts,
    weights: WeightFacts,
    request: Request,
    output: RequestOutput,
) -> dict[str, Any] | None:
    """Returns the receipt of an answer as a JSON object; None if it was cut short.

    Args:
        model: The name of the model.
        facts: What the bits of the engine depend on.
        weights: The hashes of the weights that computed the answer.
        request: The request as it was admitted.
        output: The whole answer, with the log probability of each token.
    """
    if any(output.finish_reason not in ("stop", "length") for output in output.outputs):
        return None
    has_grammar = request.params.structured_outputs is not None
    grammars = package_version("llguidance") if has_grammar else None
    max_tokens = request.max_total_tokens - len(request.prompt_token_ids)
    body = {
        "format": FORMAT,
        "version": VERSION,
        "model": model,
        "engine": {**facts.model_dump(), "llguidance": grammars},
        "weights": weights.model_dump(),
        "request": {
            "prompt_token_ids": list(request.prompt_token_ids),
            "seed": str(request.seed),
            "params": sampling_facts(request.params, max_tokens),
        },
        "outputs": [answer_facts(completion) for completion in output.outputs],
    }
    return {**body, "checksum": checksum_of(body)}


def answer_facts(completion: CompletionOutput) -> Mapping[str, Any]:
    """Returns what a receipt has of an output, which has its log probabilities."""
    assert completion.logprobs is not None, "the request asks for log probabilities"
    logprobs = [
        bits_of(entry[token_id].logprob)
        for token_id, entry in zip(completion.token_ids, completion.logprobs, strict=True)
        if entry is not None
    ]
    return {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "logprobs": logprobs,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
    }
