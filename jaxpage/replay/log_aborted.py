"""Writes and reads what a request begins with that was aborted and goes on."""

from __future__ import annotations

from typing import Any

from jaxpage.outputs import TokenLogprobs
from jaxpage.step.aborted import ABORT, AbortedRequest
from jaxpage.step.request import Sequence, SequenceGroup


def describe_continued(group: SequenceGroup) -> dict[str, Any]:
    """Returns the fields that an arrival has for such a request; none for others.

    Args:
        group: The group that has arrived.
    """
    is_new = len(group.sequences) == 1 and not group.sequences[0].num_output_tokens
    if is_new and not group.prompt_logprobs:
        return {}
    present = [
        {
            "sequence": sequence.sequence_id,
            "sample_index": sequence.sample_index,
            "token_ids": sequence.output_token_ids,
            "finish_reason": sequence.finish_reason,
        }
        for sequence in group.sequences
    ]
    return {"present": present, "scored": bool(group.prompt_logprobs)}


def read_continued(record: dict[str, Any]) -> AbortedRequest | None:
    """Returns what a recorded request begins with; None if it begins with its prompt alone.

    The log probabilities of a prompt are not in the record, only whether they were there.

    Args:
        record: The arrival.

    Raises:
        LookupError, TypeError: The record is not valid.
    """
    if "present" not in record:
        return None
    prompt = record["prompt_token_ids"]
    sequences = [
        Sequence(
            sequence_id=present["sequence"],
            sample_index=present["sample_index"],
            num_prompt_tokens=len(prompt),
            token_ids=[*prompt, *present["token_ids"]],
            finish_reason=present["finish_reason"] or ABORT,
        )
        for present in record["present"]
    ]
    scores = [TokenLogprobs(token_id, 0.0, 0) for token_id in prompt[1:]]
    return AbortedRequest(sequences, scores if record["scored"] else [])
