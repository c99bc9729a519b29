"""Admits a waiting group: finds the blocks that it can begin with, and says what it costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from jaxpage.memory import BlockManager, Counts, Prefix
from jaxpage.scheduling.plan_builder import PlanBuilder
from jaxpage.step.request import Sequence, SequenceGroup


class Hit(NamedTuple):
    """A sequence with the blocks, cached or pinned, that hold its first tokens already."""

    sequence: Sequence
    prefix: Prefix


@dataclass
class PrefixCounts:
    """Counts the tokens that were looked up and found in the prefix cache and among pins.

    Attributes:
        num_queried: The known tokens of all requests at their first admission.
        num_hits: The tokens among them that were found.
        num_resumed_hits: The tokens that requests found when they came back after a preemption.
    """

    num_queried: int = 0
    num_hits: int = 0
    num_resumed_hits: int = 0

    def note(self, group: SequenceGroup, hits: list[Hit], *, may_hit: bool) -> None:
        """Counts the admission of a group.

        Args:
            group: The group that was admitted.
            hits: What its sequences begin with.
            may_hit: False if there is neither a prefix cache nor a pin, so that nothing was asked.
        """
        num_hits = sum(prefix.num_tokens for _, prefix in hits)
        if group.num_cached_tokens is not None:
            self.num_resumed_hits += num_hits
            return
        group.num_cached_tokens = num_hits
        # A request whose prompt is scored cannot use the cache, so it does not count as a query.
        if may_hit and group.request.params.prompt_logprobs is None:
            self.num_queried += sum(sequence.num_known_tokens for sequence, _ in hits)
            self.num_hits += num_hits


def beginnings(group: SequenceGroup, manager: BlockManager) -> Iterator[list[Hit]]:
    """Returns the ways in which a group can begin, the one with the most tokens first.

    The first way is nearly always taken. It may need more blocks than are free where another way
    does not: the cached blocks may be other ones than the pinned blocks, and where a window slides
    the blocks that are found come on top of those that the sequence needs at a time.

    Tokens that are found are not computed, so there are no logits for them. A prompt that is being
    scored therefore begins with at most the tokens that were scored before.
    """
    salt = group.request.prefix_salt
    cached: list[Hit] = []
    pinned: list[Hit] = []
    for sequence in group.unfinished:
        known = sequence.token_ids
        if group.num_unscored:
            # One token more than those that are scored: the last token is never found.
            known = known[: len(group.prompt_logprobs) + 1]
        cached.append(Hit(sequence, manager.find(known, sequence.block_digests, salt)))
        pinned.append(Hit(sequence, manager.find_pinned(known, salt)))
    pairs = zip(pinned, cached, strict=True)
    yield [max(pair, key=lambda hit: hit.prefix.num_tokens) for pair in pairs]
    if manager.pins:
        yield pinned
    if manager.slides:
        yield [Hit(sequence, manager.nothing) for sequence in group.unfinished]


def blocks_to_admit(hits: list[Hit], manager: BlockManager) -> Counts:
    """Returns how many free blocks a group takes that begins with these hits, by cache group."""
    return manager.num_to_begin([(hit.sequence.num_known_tokens, hit.prefix) for hit in hits])


def admit_with_hits(
    group: SequenceGroup,
    hits: list[Hit],
    manager: BlockManager,
    step: PlanBuilder,
    counts: PrefixCounts,
) -> None:
    """Begins the block tables of a group, and counts what it found."""
    new = [(sequence.sequence_id, sequence.num_known_tokens, prefix) for sequence, prefix in hits]
    step.add_copies(manager.begin(new), manager)
    for sequence, prefix in hits:
        sequence.num_computed_tokens = prefix.num_tokens
    counts.note(group, hits, may_hit=manager.cached is not None or bool(manager.pins))


def is_swapped(group: SequenceGroup, manager: BlockManager) -> bool:
    """Returns whether the blocks of a group are in host memory."""
    return any(manager.is_swapped(sequence.sequence_id) for sequence in group.unfinished)


def blocks_to_swap_in(group: SequenceGroup, manager: BlockManager) -> Counts:
    """Returns how many free blocks a swapped group takes when it comes back, by cache group."""
    return manager.num_swap_in_blocks(_spans(group))


def admit_swapped(group: SequenceGroup, manager: BlockManager, step: PlanBuilder) -> None:
    """Moves the blocks of a group back from host memory, and reserves the rest of what it knows."""
    step.swap_in += manager.swap_in([sequence.sequence_id for sequence in group.unfinished])
    for span in _spans(group):
        step.add_copies(manager.reserve(*span), manager)


def _spans(group: SequenceGroup) -> list[tuple[int, int, int]]:
    """Returns the positions of the known tokens that each sequence has to compute."""
    unfinished = group.unfinished
    return [
        (sequence.sequence_id, sequence.num_computed_tokens, sequence.num_known_tokens)
        for sequence in unfinished
    ]
