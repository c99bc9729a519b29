"""Which block holds which tokens behind which others: the cached prefixes, found by hash and confirmed by comparison."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

Digest = bytes
Parent = int | str | None  # the block before; of the first block of a sequence, the salt


def blake2b_256(content: bytes) -> Digest:
    """Cryptographic: no caller can choose tokens that collide. Even then nothing is shared, since tokens are compared."""
    return hashlib.blake2b(content, digest_size=32).digest()


class Entry(NamedTuple):
    """What a block holds. With the entries of the blocks before, all that its keys and values depend on."""

    digest: Digest
    parent: Parent
    token_ids: tuple[int, ...]


class CacheObserver:
    """Is told what can be found of the cache. This one ignores it."""

    def stored(self, block: int, entry: Entry) -> None:
        """A block can be found now, behind the block before it."""

    def removed(self, blocks: list[int]) -> None:
        """Blocks cannot be found any more."""

    def cleared(self) -> None:
        """Nothing can be found any more."""


class PrefixIndex:
    """A one-to-one map between digests and blocks, for full and computed blocks.

    A block's digest is the hash of the digest before it (of the salt, at the root) and of its own tokens. It only finds
    candidates: a match has equal tokens behind the very block that matched before it, so a collision shares nothing.
    The block before a block of the index is always in the index too: a block that is taken out takes those behind it along.
    """

    def __init__(self, block_size: int, hash_function: Callable[[bytes], Digest] = blake2b_256) -> None:
        self.block_size = block_size
        self._hash = hash_function
        self._block_of: dict[Digest, int] = {}
        self._entries: dict[int, Entry] = {}
        self.observer = CacheObserver()
        self._children: dict[int, set[int]] = {}  # the blocks right behind a block, where there are any

    def __contains__(self, block: int) -> bool:
        return block in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def extend(
        self, digests: list[Digest], token_ids: Sequence[int], salt: str | None, num_blocks: int
    ) -> list[Digest]:
        """The digests of the first `num_blocks` blocks of a sequence. Those that are missing in the list are added to it."""
        size = self.block_size
        first = len(digests)
        if first >= num_blocks:
            return digests
        parent = digests[-1] if digests else self._root(salt)
        content = np.array(token_ids[first * size : num_blocks * size], "<u4").tobytes()
        for start in range(0, len(content), 4 * size):
            parent = self._hash(parent + content[start : start + 4 * size])
            digests.append(parent)
        return digests

    def _root(self, salt: str | None) -> Digest:
        return self._hash(b"no salt" if salt is None else b"salt " + salt.encode())

    def match(self, digests: Sequence[Digest], token_ids: Sequence[int], salt: str | None) -> list[int]:
        """The blocks that hold the longest known prefix of these tokens, at most as many as there are digests."""
        size = self.block_size
        blocks: list[int] = []
        parent: Parent = salt
        for start, digest in zip(range(0, len(token_ids), size), digests, strict=False):
            block = self._block_of.get(digest)
            if block is None or not self._holds(block, parent, tuple(token_ids[start : start + size])):
                break
            blocks.append(block)
            parent = block
        return blocks

    def register(self, block: int, digest: Digest, parent: Parent, token_ids: tuple[int, ...]) -> int | None:
        """Notes what a full and computed block holds.

        Returns:
            The block that is known for this content: `block`, or another one that was there first. None: it cannot be known,
            because other content has this digest, or because the block before is not in the index (any more).
        """
        if isinstance(parent, int) and parent not in self._entries:
            return None
        known = self._block_of.setdefault(digest, block)
        if known in self._entries:
            return known if self._holds(known, parent, token_ids) else None
        self._entries[block] = Entry(digest, parent, token_ids)
        if isinstance(parent, int):
            self._children.setdefault(parent, set()).add(block)
        self.observer.stored(block, self._entries[block])
        return block

    def _holds(self, block: int, parent: Parent, token_ids: tuple[int, ...]) -> bool:
        entry = self._entries[block]
        return entry.token_ids == token_ids and entry.parent == parent

    def forget(self, block: int) -> list[int]:
        """Takes a block out, if it is in, and all blocks behind it, which could not be found without it. Returns those behind."""
        if block not in self._entries:
            return []
        taken = [block]
        for one in taken:  # grows while it is walked
            digest, parent, _ = self._entries.pop(one)
            del self._block_of[digest]
            taken += self._children.pop(one, ())
            if one == block and isinstance(parent, int):
                self._children[parent].discard(block)
                if not self._children[parent]:
                    del self._children[parent]
        self.observer.removed(taken)
        return taken[1:]

    def clear(self) -> None:
        self._entries.clear()
        self._block_of.clear()
        self._children.clear()
        self.observer.cleared()

    def block_of(self, digest: Digest) -> int | None:
        """Where the tokens with this digest are. Only for digests that come from a sequence that was compared."""
        return self._block_of.get(digest)

    def entry(self, block: int) -> Entry:
        return self._entries[block]

    def check(self) -> None:
        """Asserts the one-to-one map, full blocks, and that every digest follows from an entry whose own block is in."""
        assert self._block_of == {entry.digest: block for block, entry in self._entries.items()}, "not one to one"
        assert len(self._block_of) == len(self._entries), "two blocks have one digest"
        behind = {(entry.parent, block) for block, entry in self._entries.items() if isinstance(entry.parent, int)}
        assert behind == {(parent, block) for parent, blocks in self._children.items() for block in blocks}, (
            "lost children"
        )
        assert all(self._children.values()), "an empty set of children"
        for block, (digest, parent, token_ids) in self._entries.items():
            assert len(token_ids) == self.block_size, f"block {block} is not full"
            assert not isinstance(parent, int) or parent in self._entries, f"block {parent} before {block} is missing"
            before = self._entries[parent].digest if isinstance(parent, int) else self._root(parent)
            assert digest == self._hash(before + np.array(token_ids, "<u4").tobytes()), f"block {block}: wrong digest"
