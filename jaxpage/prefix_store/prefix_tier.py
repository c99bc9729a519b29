"""Moves blocks between the prefix cache and its files.

When a request has finished, its new blocks are written; when a new one arrives, blocks that its
prompt begins with come back. A restored block is an ordinary cached block: the scheduler may find
it, or may need its place for other tokens first.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Protocol

from jaxpage.memory import CachedBlocks, Parent, PrefixIndex
from jaxpage.prefix_store.prefix_files import Contents, PrefixFiles, StoredBlock
from jaxpage.step.events import Events
from jaxpage.step.report import StepReport
from jaxpage.step.request import SequenceGroup
from jaxpage.step.update import WeightsUpdate


class BlockAccess(Protocol):
    """Reads and writes the contents of blocks on the device, as an engine's runner does."""

    def read_blocks(self, blocks: Sequence[int]) -> Sequence[Contents]:
        """Returns the contents of each block."""
        ...

    def write_blocks(self, contents: Sequence[tuple[int, Contents]]) -> None:
        """Writes contents that `read_blocks` returned into these blocks."""
        ...


class PrefixTier(Events):
    """Listens to an engine with one cache group."""

    def __init__(self, cached: CachedBlocks, access: BlockAccess, files: PrefixFiles):
        """Makes the tier of an engine that has computed nothing yet.

        Args:
            cached: The prefix cache of the engine.
            access: Reads and writes the blocks of the engine.
            files: The files, whose key is that of the engine's present weights.
        """
        self._cached = cached
        self._access = access
        self._files = files
        self._is_current = True  # the files were made with the engine's weights

    @property
    def _index(self) -> PrefixIndex:
        return self._cached.index

    def arrived(self, group: SequenceGroup) -> None:
        """Restores the blocks that the prompt begins with, as far as there are empty blocks."""
        if not self._is_current:
            return
        sequence = group.sequences[0]
        salt = group.request.prefix_salt
        size = self._index.block_size
        # The last token is computed in any case: its logits are needed.
        num_blocks = (len(sequence.token_ids) - 1) // size
        content_ids = sequence.content_ids
        digests = self._index.extend(sequence.block_digests, content_ids, salt, num_blocks)[
            :num_blocks
        ]
        matched = self._index.match(digests, content_ids, salt)
        restored: list[tuple[int, Contents]] = []
        parent: Parent = matched[-1] if matched else salt
        blocks = itertools.islice(self._blocks(digests, content_ids), len(matched), None)
        for block in blocks:
            if not self._cached.has_room or (contents := self._files.read(block)) is None:
                break
            place = self._cached.restore(block.digest, parent, block.token_ids)
            restored.append((place, contents))
            parent = place
        self._files.skip_damaged(blocks)  # the rest is computed and can be written again
        if restored:
            self._access.write_blocks(restored)
            self._cached.refresh([*matched, *(place for place, _ in restored)])

    def stepped(self, report: StepReport) -> None:
        """Writes the blocks of finished sequences, which are free but still have their contents."""
        if not self._is_current:
            return
        blocks: dict[int, StoredBlock] = {}
        for group in report.groups:
            if group.finished:
                for sequence in group.sequences:
                    if sequence.finish_reason in ("stop", "length"):
                        blocks |= self._new(sequence.block_digests, sequence.content_ids)
        if blocks:
            contents = self._access.read_blocks(list(blocks))
            for block, content in zip(blocks.values(), contents, strict=True):
                self._files.write(block, content)

    def _new(self, digests: Sequence[bytes], token_ids: Sequence[int]) -> dict[int, StoredBlock]:
        """Returns the sequence's blocks that are cached and have no file, by block id."""
        blocks = {}
        for block in self._blocks(digests, token_ids):
            if (
                not self._files.has(block.digest)
                and (place := self._index.block_of(block.digest)) is not None
            ):
                blocks[place] = block
        return blocks

    def _blocks(self, digests: Sequence[bytes], token_ids: Sequence[int]) -> Iterator[StoredBlock]:
        """Yields a sequence's full blocks."""
        for index, (before, digest) in enumerate(itertools.pairwise([b"", *digests])):
            yield StoredBlock(digest, before, self._index.content(token_ids, index))

    def weights_replaced(self, update: WeightsUpdate) -> None:
        """Stops reading and writing, because the files belong to the old weights."""
        self._is_current = False

    def closed(self) -> None:
        """Waits until all waiting blocks are written."""
        self._files.close()
