"""Decides about admissions: what never fits, what a group begins with, and what stays free.

Every group that is admitted to the queue can run alone, next to the pinned prefixes. So the group
that ranks first, which is never preempted, always comes to its end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from jaxpage.errors import CapacityError
from jaxpage.memory import BlockManager, Counts, Prefix
from jaxpage.scheduling.plan_builder import PlanBuilder
from jaxpage.step.request import Sequence, SequenceGroup

# The share of the pool that an admission leaves free while other requests run, so that it does not
# lead to a preemption at once: the watermark of vLLM's first version, which the PagedAttention
# paper measured. It is never less than one block.
WATERMARK = 0.01


@dataclass(frozen=True)
class Preemption:
    """Says what becomes of a preempted group (PagedAttention, section 4.5).

    No mode compares measured costs, so the same events give the same schedule on every machine.

    Attributes:
        mode: "recompute" computes the tokens of the group again. "swap" moves its blocks to host
            memory and back, as long as host blocks are free. "auto" recomputes a group of one
            sequence and swaps a group of several: a block that several sequences share is moved
            once, but would be computed once for each of them.
        new_wait_until: New groups are admitted when the preempted ones are "readmitted" or, as the
            paper has it literally, "completed".
    """

    mode: Literal["auto", "recompute", "swap"] = "auto"
    new_wait_until: Literal["readmitted", "completed"] = "readmitted"

    def swaps(self, num_sequences: int) -> bool:
        """Returns whether a group of this many sequences is swapped instead of recomputed."""
        return self.mode == "swap" or (self.mode == "auto" and num_sequences > 1)


def spare_blocks(num_usable: int, num_running: int, num_joining: int, *, resumes: bool) -> int:
    """Returns how many blocks of a pool an admission must leave free.

    A group that was preempted leaves a block for every sequence that runs after its admission, its
    own included. Each of them takes at most one block in S tokens, so the group is not preempted
    again as soon as it is back.

    Args:
        num_usable: The number of blocks that the pool can hand out at all.
        num_running: The number of sequences that run.
        num_joining: The number of sequences of the group that is to be admitted.
        resumes: True if the group was preempted before.
    """
    if not num_running:
        return 0
    watermark = max(1, int(num_usable * WATERMARK))
    return max(watermark, num_running + num_joining) if resumes else watermark


def blocks_alone(group: SequenceGroup, manager: BlockManager) -> Counts:
    """Returns how many blocks a group may need when it runs alone, by cache group.

    Blocks of a pinned prefix are there already and do not count. Blocks that the sequences share
    otherwise count for each of them: after a preemption they may share nothing.
    """
    request = group.request
    # The last token is drawn and never computed.
    blocks = manager.max_blocks(request.max_total_tokens - 1)
    num_pinned = 0
    # A prompt that is scored or routed is computed in full, whatever is pinned of it.
    if not request.params.computes_prompt:
        prefix = manager.find_pinned(request.content_ids, request.prefix_salt)
        num_pinned = prefix.num_tokens // manager.block_size
    return tuple(
        # A pinned block that falls out of a window is followed by one of the sequence's own.
        request.num_sequences * count - (num_pinned if tables.sliding_window is None else 0)
        for count, tables in zip(blocks, manager.groups, strict=True)
    )


def refuse_what_never_fits(group: SequenceGroup, manager: BlockManager, max_num_seqs: int) -> None:
    """Raises CapacityError if a group could not run even if it were alone."""
    request = group.request
    name = f"request {request.request_id!r}"
    width = request.num_sequences
    if width > max_num_seqs:
        limit = f"max_num_seqs is {max_num_seqs}"
        raise CapacityError(f"{name} asks for {width} sequences at once; {limit}")
    room = manager.room_next_to_pins
    needs = blocks_alone(group, manager)
    for needed, maximum, tables in zip(needs, room, manager.groups, strict=True):
        if needed > maximum:
            total = tables.pool.num_usable
            pinned = f", of which {total - maximum} are pinned" if maximum < total else ""
            raise CapacityError(
                f"{name} may need {needed} KV blocks ({width} x"
                f" {request.max_total_tokens} tokens in blocks of {manager.block_size});"
                f" the pool has {total}{pinned}. Ask for fewer tokens, or give the engine more"
                " blocks (num_blocks, kv_cache_memory_bytes)"
            )


def refuse_to_crowd_out(
    groups: Iterable[SequenceGroup],
    manager: BlockManager,
    num_tokens: int,
) -> None:
    """Raises CapacityError if one of these groups could not run alone next to the pins any more.

    Args:
        groups: The unfinished groups.
        manager: The owner of the pins, the new one among them.
        num_tokens: The length of the new pin, for the message.
    """
    room = manager.room_next_to_pins
    for group in groups:
        needs = blocks_alone(group, manager)
        for needed, maximum, tables in zip(needs, room, manager.groups, strict=True):
            if needed > maximum:
                raise CapacityError(
                    f"a prefix of {num_tokens} tokens cannot be pinned now: request"
                    f" {group.request.request_id!r} may need {needed} KV blocks, and {maximum} of"
                    f" {tables.pool.num_usable} would be left"
                )


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
        # Such a request cannot use the cache, so it does not count as a query.
        if may_hit and not group.request.params.computes_prompt:
            self.num_queried += sum(sequence.num_known_tokens for sequence, _ in hits)
            self.num_hits += num_hits


def beginnings(group: SequenceGroup, manager: BlockManager) -> Iterator[list[Hit]]:
    """Returns the ways in which a group can begin, the one with the most tokens first.

    The first way is nearly always taken. It may need more blocks than are free where another way
    does not: the cached blocks may be other ones than the pinned blocks, and where a window slides
    the blocks that are found come on top of those that the sequence needs at a time.

    Tokens that are found are not computed, so there are neither logits nor routes for them. A
    prompt that is being scored therefore begins with at most the tokens that were scored before,
    and a sequence whose routes are wanted with those that were routed before.
    """
    salt = group.request.prefix_salt
    cached: list[Hit] = []
    pinned: list[Hit] = []
    for sequence in group.unfinished:
        known = sequence.content_ids
        if group.num_unscored:
            # One token more than those that are scored: the last token is never found.
            known = known[: len(group.prompt_logprobs) + 1]
        if group.request.params.return_routed_experts:
            known = known[: len(sequence.routes) + 1]
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
