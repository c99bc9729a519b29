"""Applies the edits of a decoding strategy to sequences and block tables."""

from __future__ import annotations

from collections.abc import MutableMapping

from jaxpage.memory import BlockManager
from jaxpage.step.edits import Append, Drop, Edit, Finish, Fork, Route, Score
from jaxpage.step.request import Sequence, SequenceGroup

Sequences = MutableMapping[int, tuple[SequenceGroup, Sequence]]  # the key is a sequence id


def apply_edit(
    edit: Edit,
    sequences: Sequences,
    block_manager: BlockManager,
) -> SequenceGroup | None:
    """Applies one edit.

    Args:
        edit: What happens to a sequence.
        sequences: All sequences of unfinished groups. A fork is added here, a dropped sequence
            is removed.
        block_manager: The owner of the block tables.

    Returns:
        The group that was changed, or None if its request was aborted and the sequence is gone.
    """
    sequence_id = edit.parent_id if isinstance(edit, Fork) else edit.sequence_id
    if sequence_id not in sequences:
        return None
    group, sequence = sequences[sequence_id]
    is_open = sequence.finish_reason is None
    assert is_open or type(edit) is Drop, f"{edit} comes after the end of its sequence"
    match edit:
        case Append():
            _append(sequence, edit)
        case Score():
            _score(group, edit)
        case Route():
            # Tokens that are computed again after a preemption have the routes that they had.
            sequence.routes[edit.position : edit.position + len(edit.routes)] = edit.routes
        case Fork():
            child = _fork(sequence, edit)
            group.sequences.append(child)
            sequences[child.sequence_id] = (group, child)
            block_manager.fork(edit.parent_id, edit.child_id)
        case Drop():
            if is_open:  # a finished sequence has given its blocks back already
                block_manager.release(sequence_id)
            group.sequences.remove(sequence)
            del sequences[sequence_id]
        case Finish():
            block_manager.release(sequence_id)
            _finish(sequence, edit)
    return group


def _append(sequence: Sequence, edit: Append) -> None:
    sequence.token_ids.append(edit.token_id)
    if edit.text:
        sequence.text += edit.text
    sequence.text_ends.append(len(sequence.text))
    if edit.logprobs is not None:
        sequence.logprobs.append(edit.logprobs)
        sequence.cumulative_logprob += edit.logprobs.logprob


def _score(group: SequenceGroup, edit: Score) -> None:
    is_next = edit.position == 1 + len(group.prompt_logprobs)
    assert is_next, f"{edit} does not follow the scores that are there"
    group.prompt_logprobs += edit.logprobs


def _finish(sequence: Sequence, edit: Finish) -> None:
    sequence.text += edit.text
    sequence.finish_reason = edit.reason
    sequence.stop_reason = edit.stop_reason


def _fork(parent: Sequence, edit: Fork) -> Sequence:
    """Returns a sequence that begins with everything that is known of its parent."""
    return Sequence(
        sequence_id=edit.child_id,
        sample_index=edit.sample_index,
        num_prompt_tokens=parent.num_prompt_tokens,
        token_ids=parent.token_ids.copy(),
        embedded=parent.embedded,
        num_computed_tokens=parent.num_computed_tokens,
        block_digests=parent.block_digests.copy(),
        text=parent.text,
        text_ends=parent.text_ends.copy(),
        logprobs=parent.logprobs.copy(),
        routes=parent.routes.copy(),
        cumulative_logprob=parent.cumulative_logprob,
        weights=parent.weights.copy(),
    )
