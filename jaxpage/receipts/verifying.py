"""Computes the answer of a receipt again, alone and in a batch of other requests."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

from jaxpage.errors import CapacityError, ReceiptError, UnsupportedError
from jaxpage.outputs import RequestOutput
from jaxpage.receipts.comparing import Difference, Verification, first_difference, obstacles
from jaxpage.receipts.making import answer_facts
from jaxpage.receipts.receipt import EngineFacts, Receipt, WeightFacts, checksum_of
from jaxpage.settings.argument_checks import count
from jaxpage.settings.sampling_params import SamplingParams

NUM_OTHERS = 3  # the requests in the batch besides that of the receipt
# Generates for prompts, each a list of token ids, in one batch.
Generate = Callable[[list[list[int]], list[SamplingParams]], list[RequestOutput]]


def verify(
    receipt: Receipt,
    facts: EngineFacts,
    weights: WeightFacts,
    max_model_len: int,
    generate: Generate,
) -> Verification:
    """Returns whether an engine gives the answer of a receipt, to the last bit.

    Args:
        receipt: The receipt.
        facts: What the bits of the engine depend on.
        weights: The hashes of its weights, with those of the tensors.
        max_model_len: The most tokens of a sequence of the engine.
        generate: Generates in one batch.

    Raises:
        ReceiptError: The parameters of the receipt are none.
    """
    request = receipt.request
    if reasons := obstacles(receipt, facts, weights):
        return Verification("unknown", tuple(reasons))
    max_length = max(len(output.token_ids) for output in receipt.outputs)
    params = _params_of(receipt, max_length)
    num_tokens = len(request.prompt_token_ids) + max_length
    if num_tokens > max_model_len:
        return Verification("unknown", (_describe_room(num_tokens, max_model_len),))
    others = _other_requests(receipt, max_length)
    for computed, batch in (("alone", []), ("among others", others)):
        requests = [(request.prompt_token_ids, params), *batch]
        try:
            outputs = generate([prompt for prompt, _ in requests], [each for _, each in requests])
        # An engine with the same facts has taken the request before, so a refusal is a difference.
        except ValueError as error:
            refusal = f"this engine refuses the request of the receipt: {error}"
            return Verification("different", (refusal,))
        except (CapacityError, UnsupportedError) as error:
            return Verification("unknown", (str(error),))
        answers = [answer_facts(completion) for completion in outputs[0].outputs]
        if difference := first_difference(receipt, answers, computed):
            return _verdict_of(difference, receipt, facts)
    if receipt.checksum != checksum_of(receipt.body()):
        return Verification(
            "different",
            (
                "the answer is equal, but the receipt was changed after it was made: its checksum "
                "is not that of its fields",
            ),
        )
    return Verification(
        "equal", num_tokens=sum(len(output.token_ids) for output in receipt.outputs)
    )


def _params_of(receipt: Receipt, max_length: int) -> SamplingParams:
    """Returns the parameters with which the answer is computed again.

    An output that goes on after the end that it has in the receipt is computed for one more token.

    Raises:
        ReceiptError: The parameters of the receipt are none.
    """
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in receipt.request.params.items()
    }
    try:
        params = SamplingParams(**{**values, "seed": int(receipt.request.seed), "logprobs": 0})
        if params.n != len(receipt.outputs):
            raise ValueError(f"n is {params.n}, for {count(len(receipt.outputs), 'output')}")
        if params.ranks or params.max_tokens is None:
            return params
        return dataclasses.replace(params, max_tokens=min(params.max_tokens, max_length + 1))
    except (TypeError, ValueError) as error:
        raise ReceiptError(f"the parameters of the receipt are wrong: {error}") from None


def _other_requests(receipt: Receipt, max_length: int) -> list[tuple[list[int], SamplingParams]]:
    """Returns requests that share a batch with that of the receipt, made of its tokens."""
    token_ids = receipt.request.prompt_token_ids
    prompts = [token_ids[: len(token_ids) // 2 + 1], token_ids[::-1], token_ids[1:] + token_ids[:1]]
    assert len(prompts) == NUM_OTHERS
    return [
        (prompt, SamplingParams(max_tokens=max(max_length, 1), ignore_eos=True, seed=seed))
        for seed, prompt in enumerate(prompts)
    ]


def _describe_room(num_tokens: int, max_model_len: int) -> str:
    return (
        f"prompt and answer have {num_tokens} tokens, and the engine has room for {max_model_len}: "
        "give --max-model-len"
    )


def _verdict_of(difference: Difference, receipt: Receipt, facts: EngineFacts) -> Verification:
    """Returns the verdict for a difference, which is no proof on some machines."""
    reasons = [difference.describe()]
    if not facts.device.startswith("cpu"):
        doubt = "the bits may depend on the batch"
        if facts.batch_invariant:
            doubt = "batch_invariant has not been tested"
        reasons.append(f"on {facts.device} {doubt}, so this is no proof")
    if receipt.engine.processor != facts.processor:
        reasons.append(
            f"the receipt was made on a {receipt.engine.processor}, and this is a "
            f"{facts.processor}: XLA may compile other sums for it, so this is no proof"
        )
    result: Literal["different", "unknown"] = "different" if len(reasons) == 1 else "unknown"
    return Verification(result, tuple(reasons), difference)
