"""Between the prefix cache and its files: blocks that a request left behind are written, and those that a new one begins with come back.

A restored block is a cached one like any other: the scheduler finds it, or it was needed for something else meanwhile.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from jaxpage.engine.engine import Engine
from jaxpage.memory import PrefixIndex
from jaxpage.memory.cached_blocks import CachedBlocks
from jaxpage.memory.prefix_index import Parent
from jaxpage.prefix_store.prefix_files import Contents, PrefixFiles, StoredBlock
from jaxpage.step.events import Events
from jaxpage.step.report import StepReport
from jaxpage.step.request import SequenceGroup


class PrefixTier(Events):
    """Listens to an engine with one cache group."""

    def __init__(self, engine: Engine, files: PrefixFiles):
        cached = engine.scheduler.block_manager.cached
        assert cached is not None, "there is a prefix cache"
        self._engine, self._files = engine, files
        self._cached: CachedBlocks = cached
        engine.metrics.prefix_files = files.counts

    @property
    def _index(self) -> PrefixIndex:
        return self._cached.index

    @property
    def _is_current(self) -> bool:
        """The key of the files is that of the weights that the engine began with."""
        return not self._engine.weights_version

    def arrived(self, group: SequenceGroup) -> None:
        """Brings the blocks back that the prompt begins with, as far as there are blocks with nothing in them."""
        if not self._is_current:
            return
        (sequence, *_), salt, size = group.sequences, group.request.prefix_salt, self._index.block_size
        num_blocks = (len(sequence.token_ids) - 1) // size
        digests = self._index.extend(sequence.block_digests, sequence.token_ids, salt, num_blocks)[:num_blocks]
        there = self._index.match(digests, sequence.token_ids, salt)
        restored: list[tuple[int, Contents]] = []
        parent: Parent = there[-1] if there else salt
        blocks = itertools.islice(_blocks(digests, sequence.token_ids, size), len(there), None)
        for block in blocks:
            if not self._cached.has_room or (contents := self._files.read(block)) is None:
                break
            place = self._cached.restore(block.digest, parent, block.token_ids)
            restored.append((place, contents))
            parent = place
        self._files.skip_damaged(blocks)  # what is left is computed, and can be written anew
        if restored:
            self._engine.runner.write_blocks(restored)

    def stepped(self, report: StepReport) -> None:
        """Keeps what finished sequences computed. Their blocks are free by now, and not used for anything else yet."""
        if not self._is_current:
            return
        wanted: dict[int, StoredBlock] = {}
        for group in report.groups:
            if group.finished:
                for sequence in group.sequences:
                    if sequence.finish_reason in ("stop", "length"):
                        wanted |= self._new(sequence.block_digests, sequence.token_ids)
        if wanted:
            contents = self._engine.runner.read_blocks(list(wanted))
            for block, own in zip(wanted.values(), contents, strict=True):
                self._files.write(block, own)

    def _new(self, digests: Sequence[bytes], token_ids: Sequence[int]) -> dict[int, StoredBlock]:
        """Those of a sequence's blocks that are cached and have no file."""
        found = {}
        for block in _blocks(digests, token_ids, self._index.block_size):
            if not self._files.has(block.digest) and (place := self._index.block_of(block.digest)) is not None:
                found[place] = block
        return found

    def closed(self) -> None:
        self._files.close()


def _blocks(digests: Sequence[bytes], token_ids: Sequence[int], size: int) -> Iterator[StoredBlock]:
    """A sequence's full blocks."""
    for place, (before, digest) in enumerate(itertools.pairwise([b"", *digests])):
        yield StoredBlock(digest, before, tuple(token_ids[place * size : (place + 1) * size]))
