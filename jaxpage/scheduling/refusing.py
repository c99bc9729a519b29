"""Refuses requests and pins for which the pools have no room, however long they wait.

Every group that is admitted to the queue can run alone, next to the pinned prefixes. So the group
that ranks first, which is never preempted, always comes to its end.
"""

from __future__ import annotations

from collections.abc import Iterable

from jaxpage.errors import CapacityError
from jaxpage.memory import BlockManager, Counts
from jaxpage.step.request import SequenceGroup


def blocks_alone(group: SequenceGroup, manager: BlockManager) -> Counts:
    """Returns how many blocks a group may need when it runs alone, by cache group.

    Blocks of a pinned prefix are there already and do not count. Blocks that the sequences share
    otherwise count for each of them: after a preemption they may share nothing.
    """
    request = group.request
    # The last token is drawn and never computed.
    blocks = manager.most_blocks(request.max_total_tokens - 1)
    num_pinned = 0
    # A prompt that is scored is computed in full, whatever is pinned of it.
    if request.params.prompt_logprobs is None:
        prefix = manager.find_pinned(request.prompt_token_ids, request.prefix_salt)
        num_pinned = prefix.num_tokens // manager.block_size
    return tuple(
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
    for needed, most, tables in zip(needs, room, manager.groups, strict=True):
        if needed > most:
            total = tables.pool.num_usable
            pinned = f", of which {total - most} are pinned" if most < total else ""
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
        for needed, most, tables in zip(needs, room, manager.groups, strict=True):
            if needed > most:
                raise CapacityError(
                    f"a prefix of {num_tokens} tokens cannot be pinned now: request"
                    f" {group.request.request_id!r} may need {needed} KV blocks, and {most} of"
                    f" {tables.pool.num_usable} would be left"
                )
