"""What a waiting group brings along or finds in place, what its admission costs after that, and what is counted of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from jaxpage.memory import BlockManager, Counts, Prefix
from jaxpage.scheduling.plan_builder import PlanBuilder
from jaxpage.step.request import Sequence, SequenceGroup


class Hit(NamedTuple):
    """What a sequence begins with: blocks that are cached, or pinned by others."""

    sequence: Sequence
    prefix: Prefix


@dataclass
class PrefixCounts:
    """Tokens. A request is counted once, when it is first admitted; what it finds again after a preemption is counted apart."""

    num_queried: int = 0
    num_hits: int = 0
    num_resumed_hits: int = 0

    def note(self, group: SequenceGroup, hits: list[Hit], *, may_hit: bool) -> None:
        """Counts an admission. Without prefix caching and pins there was no query to count."""
        num_hits = sum(prefix.num_tokens for _, prefix in hits)
        if group.num_cached_tokens is not None:
            self.num_resumed_hits += num_hits
            return
        group.num_cached_tokens = num_hits
        if may_hit and group.request.params.prompt_logprobs is None:  # who scores its prompt asks for nothing
            self.num_queried += sum(sequence.num_known_tokens for sequence, _ in hits)
            self.num_hits += num_hits


def beginnings(group: SequenceGroup, manager: BlockManager) -> Iterator[list[Hit]]:
    """What the sequences of a group could begin with, the most tokens first.

    The first is nearly always taken. Where it takes more blocks than there are, one of the others may not: cached blocks may be other
    ones than the pinned, and where a window slides, what is found comes on top of what is ever needed.

    What is found is not computed, and has no logits: a prompt that is scored can begin with what was scored before, and no more.
    """
    salt = group.request.prefix_salt
    cached, pinned = [], []
    for sequence in group.unfinished:
        known = sequence.token_ids  # of which the last is never found
        if group.num_unscored:
            known = known[: len(group.prompt_logprobs) + 1]
        cached.append(Hit(sequence, manager.find(known, sequence.block_digests, salt)))
        pinned.append(Hit(sequence, manager.find_pinned(known, salt)))
    yield [max(both, key=lambda hit: hit.prefix.num_tokens) for both in zip(pinned, cached, strict=True)]
    if manager.pins:
        yield pinned
    if manager.slides:
        yield [Hit(sequence, manager.nothing) for sequence in group.unfinished]


def blocks_to_admit(hits: list[Hit], manager: BlockManager) -> Counts:
    """Free blocks that the group takes."""
    return manager.num_to_begin([(sequence.num_known_tokens, prefix) for sequence, prefix in hits])


def admit_with_hits(
    group: SequenceGroup, hits: list[Hit], manager: BlockManager, step: PlanBuilder, counts: PrefixCounts
) -> None:
    """Begins the block tables of the group."""
    step.add_copies(manager.begin([(s.sequence_id, s.num_known_tokens, prefix) for s, prefix in hits]), manager)
    for sequence, prefix in hits:
        sequence.num_computed_tokens = prefix.num_tokens
    counts.note(group, hits, may_hit=manager.cached is not None or bool(manager.pins))


def is_swapped(group: SequenceGroup, manager: BlockManager) -> bool:
    return any(manager.is_swapped(sequence.sequence_id) for sequence in group.unfinished)


def blocks_to_swap_in(group: SequenceGroup, manager: BlockManager) -> Counts:
    """Free blocks that the group takes when its blocks come back from host memory."""
    return manager.num_swap_in_blocks(_spans(group))


def admit_swapped(group: SequenceGroup, manager: BlockManager, step: PlanBuilder) -> None:
    """Takes the block tables of the group back from host memory."""
    step.swap_in += manager.swap_in([sequence.sequence_id for sequence in group.unfinished])
    for span in _spans(group):
        step.add_copies(manager.reserve(*span), manager)


def _spans(group: SequenceGroup) -> list[tuple[int, int, int]]:
    return [(s.sequence_id, s.num_computed_tokens, s.num_known_tokens) for s in group.unfinished]
