"""What a waiting group finds in the prefix cache, what its admission costs after that, and what is counted of it."""

from __future__ import annotations

from dataclasses import dataclass

from jaxpage.memory import BlockManager
from jaxpage.request import Sequence, SequenceGroup

Hits = list[
    tuple[Sequence, list[int]]
]  # the unfinished sequences of a group, each with the cached blocks it begins with


@dataclass
class PrefixCounts:
    """Tokens. A request is counted once, when it is first admitted; what it finds again after a preemption is counted apart."""

    num_queried: int = 0
    num_hits: int = 0
    num_resumed_hits: int = 0


def find_hits(group: SequenceGroup, manager: BlockManager) -> Hits:
    salt = group.request.params.cache_salt
    return [(s, manager.find(s.token_ids, s.block_digests, salt)) for s in group.unfinished]


def blocks_to_admit(hits: Hits, manager: BlockManager) -> int:
    """Free blocks that the group takes: cached ones count unless somebody uses them, each once for the whole group."""
    new = sum(manager.blocks_for(sequence.num_known_tokens) - len(blocks) for sequence, blocks in hits)
    return new + manager.num_revived(block for _, blocks in hits for block in blocks)


def adopt_hits(group: SequenceGroup, hits: Hits, manager: BlockManager, counts: PrefixCounts) -> None:
    """Begins the block tables of the group. For all sequences before any of them reserves, which may evict cached blocks."""
    for sequence, blocks in hits:
        manager.adopt(sequence.sequence_id, blocks)
        sequence.num_computed_tokens = len(blocks) * manager.block_size
    if manager.prefix_index is None:
        return
    num_hits = sum(sequence.num_computed_tokens for sequence, _ in hits)
    if group.num_cached_tokens is None:
        group.num_cached_tokens = num_hits
        counts.num_queried += sum(sequence.num_known_tokens for sequence, _ in hits)
        counts.num_hits += num_hits
    else:
        counts.num_resumed_hits += num_hits
