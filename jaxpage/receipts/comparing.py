"""Says why an engine cannot compute an answer again, and where an answer differs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Any, Literal

from jaxpage.receipts.hashing import hash_weights
from jaxpage.receipts.receipt import AnswerFacts, EngineFacts, Receipt, WeightFacts, logprob_of
from jaxpage.settings.argument_checks import show
from jaxpage.versions import package_version

_NAMES = {
    "code": "source code of jaxpage with the hash",
    "config": "a config.json with the hash",
    "device": "the device",
    "architecture": "the architecture",
    "instructions": "kernels that use",
    "attention": "attention by",
    "eos_token_ids": "the end-of-sequence ids",
    "flags": "the flags",
    "tokenizer": "a tokenizer with the hash",
}
# Another processor with the same instructions may give the same bits, so `verify` computes and
# sees. The version of llguidance counts only with a grammar, and is compared for itself.
_MAY_DIFFER = frozenset({"processor", "llguidance"})
_NAMED_TENSORS = 3


@dataclass(frozen=True)
class Difference:
    """Is the first place in which an answer that was computed again differs from its receipt.

    Attributes:
        output: The place of the output among those of the request.
        computed: Whether the answer was computed "alone" or "among others".
        token: The place of the token in the output; None if all tokens are equal.
        field: The name of what differs: "token_ids", "logprobs", "text", "finish_reason" or
            "stop_reason".
        receipt_value: What the receipt has; None for the end of the output.
        computed_value: What was computed.
        receipt_logprob: The log probability of the token in the receipt; None without a token.
        computed_logprob: That of the token that was computed.
    """

    output: int
    computed: str
    token: int | None
    field: str
    receipt_value: Any
    computed_value: Any
    receipt_logprob: float | None = None
    computed_logprob: float | None = None

    def describe(self) -> str:
        """Returns the difference in words."""
        place = f"output {self.output}, computed {self.computed}"
        if self.token is None:
            return (
                f"{place}: {self.field} is {show(self.receipt_value)} in the receipt, and "
                f"{show(self.computed_value)} here"
            )
        ours = _describe_token(self.computed_value, self.computed_logprob)
        theirs = _describe_token(self.receipt_value, self.receipt_logprob)
        return f"{place}: token {self.token} is {theirs} in the receipt, and {ours} here"


def _describe_token(token_id: int | None, logprob: float | None) -> str:
    if token_id is None or logprob is None:
        return "the end"
    return f"{token_id} with log probability {logprob!r} ({logprob.hex()})"


@dataclass(frozen=True)
class Verification:
    """Says what came of a receipt.

    Attributes:
        result: "equal" if all bits were computed again, "different" if not, "unknown" if this
            machine cannot tell.
        reasons: Why it is not equal, in words; empty for an equal one.
        difference: The first difference; None if nothing was computed, or all is equal.
        num_tokens: The number of tokens that are equal.
    """

    result: Literal["equal", "different", "unknown"]
    reasons: tuple[str, ...] = ()
    difference: Difference | None = None
    num_tokens: int = 0

    def body(self) -> dict[str, Any]:
        """Returns the result as a JSON object, in which numbers that are not finite are texts."""
        return asdict(self, dict_factory=_as_object)


def _as_object(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    return {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in fields
    }


def obstacles(receipt: Receipt, facts: EngineFacts, weights: WeightFacts) -> list[str]:
    """Returns why an engine cannot give the bits of a receipt; an empty list if it can.

    Args:
        receipt: The receipt.
        facts: What the bits of the engine depend on.
        weights: The hashes of its weights, with those of the tensors.
    """
    theirs = receipt.engine.model_dump()
    reasons = [
        f"the receipt was made with {_NAMES.get(name, name)} {show(theirs[name])}, and this "
        f"engine has {show(value)}"
        for name, value in facts.model_dump().items()
        if theirs[name] != value and name not in _MAY_DIFFER
    ]
    has_grammar = receipt.request.params.get("structured_outputs") is not None
    grammars = package_version("llguidance") if has_grammar else None
    if theirs["llguidance"] != grammars:
        reasons.append(
            f"the receipt was made with llguidance {show(theirs['llguidance'])}, and this "
            f"engine has {show(grammars)}"
        )
    if receipt.weights.hash != weights.hash:
        reasons.append(_describe_weights(receipt.weights, weights))
    elif receipt.weights.tensors not in (None, weights.tensors):
        reasons.append("the receipt contradicts itself: its tensors are not those of its hash")
    return reasons


def _describe_weights(theirs: WeightFacts, ours: WeightFacts) -> str:
    begin = (
        f"the weights are not those of the receipt: their hash is {ours.hash}, there {theirs.hash}"
    )
    if theirs.tensors is None or ours.tensors is None:
        return begin
    if hash_weights(theirs.tensors) != theirs.hash:
        return f"{begin}, which contradicts the hashes of its tensors"
    names = [
        name
        for name in sorted({*theirs.tensors, *ours.tensors})
        if theirs.tensors.get(name) != ours.tensors.get(name)
    ]
    shown = ", ".join(map(show, names[:_NAMED_TENSORS]))
    more = f" and {len(names) - _NAMED_TENSORS} more" if len(names) > _NAMED_TENSORS else ""
    return f"{begin}; other tensors: {shown}{more}"


def first_difference(
    receipt: Receipt, answers: Sequence[Mapping[str, Any]], computed: str
) -> Difference | None:
    """Returns the first difference between a receipt and what was computed; None if all is equal.

    Args:
        receipt: The receipt.
        answers: The outputs that were computed; see `answer_facts`.
        computed: How they were computed, in words.
    """
    if len(answers) != len(receipt.outputs):
        return Difference(0, computed, None, "outputs", len(receipt.outputs), len(answers))
    for index, (theirs, ours) in enumerate(zip(receipt.outputs, answers, strict=True)):
        difference = _difference_of_tokens(index, theirs, ours, computed)
        if difference is not None:
            return difference
        for name in ("text", "finish_reason", "stop_reason"):
            value = getattr(theirs, name)
            # In Python True equals 1, and the receipt comes from a stranger.
            if value != ours[name] or type(value) is not type(ours[name]):
                return Difference(index, computed, None, name, value, ours[name])
    return None


def _difference_of_tokens(
    place: int, theirs: AnswerFacts, ours: Mapping[str, Any], computed: str
) -> Difference | None:
    pairs = zip_longest(
        zip(theirs.token_ids, theirs.logprobs, strict=True),
        zip(ours["token_ids"], ours["logprobs"], strict=True),
        fillvalue=(None, None),
    )
    for token, ((their_id, their_bits), (our_id, our_bits)) in enumerate(pairs):
        if (their_id, their_bits) == (our_id, our_bits):
            continue
        return Difference(
            place,
            computed,
            token,
            "logprobs" if their_id == our_id else "token_ids",
            their_id,
            our_id,
            None if their_bits is None else logprob_of(their_bits),
            None if our_bits is None else logprob_of(our_bits),
        )
    return None
