"""What a waiting group brings along or finds in place, what its admission costs after that, and what is counted of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from jaxpage.memory import BlockManager
from jaxpage.memory.sliding import most_blocks
from jaxpage.scheduling.open_plan import OpenPlan
from jaxpage.step.request import Sequence, SequenceGroup


class Hit(NamedTuple):
    """The blocks that a sequence begins with, cached or pinned by others, and how many of its tokens they hold."""

    sequence: Sequence
    blocks: list[int]
    num_tokens: int


@dataclass
class PrefixCounts:
    """Tokens. A request is counted once, when it is first admitted; what it finds again after a preemption is counted apart."""

    num_queried: int = 0
    num_hits: int = 0
    num_resumed_hits: int = 0

    def note(self, group: SequenceGroup, hits: list[Hit], *, may_hit: bool) -> None:
        """Counts an admission; where nothing is cached or pinned, nobody asks for anything."""
        num_hits = sum(num_tokens for _, _, num_tokens in hits)
        if group.num_cached_tokens is not None:
            self.num_resumed_hits += num_hits
            return
        group.num_cached_tokens = num_hits
        if may_hit and group.request.params.prompt_logprobs is None:  # who scores its prompt asks for nothing
            self.num_queried += sum(sequence.num_known_tokens for sequence, _, _ in hits)
            self.num_hits += num_hits


def held_until(sequence: Sequence, num_tokens: int, manager: BlockManager, max_tokens: int) -> int:
    """Up to which position a sequence has blocks of its own when `num_tokens` tokens are in place: for all that it knows.

    Where a window slides, as many as it ever needs at a time to compute `max_tokens` tokens in a step. It keeps that many while it
    computes, so what it gives up it takes again at once.
    """
    if manager.sliding_window is None:
        return sequence.num_known_tokens
    most = manager.num_passed(num_tokens) + most_blocks(manager.sliding_window, max_tokens, manager.block_size)
    return min(sequence.num_known_tokens, most * manager.block_size)


def admitted_until(hit: Hit, manager: BlockManager, max_tokens: int) -> int:
    """Up to which position a sequence is given blocks when it begins with blocks of others, which it does not give up for itself."""
    if manager.sliding_window is None:
        return hit.sequence.num_known_tokens
    most = len(hit.blocks) + most_blocks(manager.sliding_window, max_tokens, manager.block_size)
    return min(hit.sequence.num_known_tokens, most * manager.block_size)


def beginnings(group: SequenceGroup, manager: BlockManager) -> Iterator[list[Hit]]:
    """What the sequences of a group could begin with, the most tokens first.

    The first is nearly always taken. Where it takes more blocks than there are, one of the others may not: cached blocks may be other
    ones than the pinned, and where a window slides, what is found comes on top of what is ever needed.

    What is found is not computed, and has no logits: a prompt that is scored can begin with what was scored before, and no more.
    """
    salt = group.request.params.cache_salt
    cached, pinned = [], []
    for sequence in group.unfinished:
        known = sequence.token_ids  # of which the last is never found
        if group.num_unscored:
            known = known[: len(group.prompt_logprobs) + 1]
        blocks = manager.find(known, sequence.block_digests, salt)
        cached.append(Hit(sequence, blocks, len(blocks) * manager.block_size))
        pinned.append(Hit(sequence, *manager.find_pinned(known, salt)))
    yield [max(both, key=lambda hit: hit.num_tokens) for both in zip(pinned, cached, strict=True)]
    if manager.pins:
        yield pinned
    if manager.sliding_window is not None:
        yield [Hit(sequence, [], 0) for sequence in group.unfinished]


def blocks_to_admit(hits: list[Hit], manager: BlockManager, max_tokens: int) -> int:
    """Free blocks that the group takes: cached ones count unless somebody uses them, each once for the whole group."""
    num_new = num_revived = 0
    revived: set[int] = set()
    for hit in hits:
        num_new += manager.blocks_for(admitted_until(hit, manager, max_tokens)) - len(hit.blocks)
        num_new += hit.num_tokens % manager.block_size > 0  # the last block is written, and is somebody else's: a copy
        revived.update(hit.blocks[manager.num_passed(hit.num_tokens) :])
    num_revived = manager.num_revived(revived)
    return num_new + num_revived


def admit_with_hits(
    group: SequenceGroup, hits: list[Hit], manager: BlockManager, step: OpenPlan, max_tokens: int, counts: PrefixCounts
) -> None:
    """Begins the block tables of the group."""
    for sequence, blocks, num_tokens in hits:  # all of them before any reserves, which may evict cached blocks
        manager.adopt(sequence.sequence_id, blocks, num_tokens)
        sequence.num_computed_tokens = num_tokens
    for hit in hits:
        stop = admitted_until(hit, manager, max_tokens)
        step.add_copies(manager.reserve(hit.sequence.sequence_id, hit.num_tokens, stop), manager)
    counts.note(group, hits, may_hit=manager.prefix_index is not None or bool(manager.pins))


def is_swapped(group: SequenceGroup, manager: BlockManager) -> bool:
    return any(sequence.sequence_id in manager.swapped for sequence in group.unfinished)


def blocks_to_swap_in(group: SequenceGroup, manager: BlockManager, max_tokens: int) -> int:
    """Free blocks that the group takes when its blocks come back from host memory."""
    return manager.num_swap_in_blocks(_spans(group, manager, max_tokens))


def admit_swapped(group: SequenceGroup, manager: BlockManager, step: OpenPlan, max_tokens: int) -> None:
    """Takes the block tables of the group back from host memory."""
    step.swap_in += manager.swap_in([sequence.sequence_id for sequence in group.unfinished])
    for span in _spans(group, manager, max_tokens):
        step.add_copies(manager.reserve(*span), manager)


def _spans(group: SequenceGroup, manager: BlockManager, max_tokens: int) -> list[tuple[int, int, int]]:
    starts = [(sequence, sequence.num_computed_tokens) for sequence in group.unfinished]
    return [(s.sequence_id, start, held_until(s, start, manager, max_tokens)) for s, start in starts]
