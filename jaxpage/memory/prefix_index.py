"""Indexes the blocks of cached prefixes: found by hash, and confirmed by comparison."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Digest = bytes
_FIRST_VECTOR = 2**32  # numbers from here on stand for vectors
_VECTOR_WORDS = 10  # a key of 32 bytes plus 1, and a place
Parent = int | str | None  # the block before; at the root the prefix salt, None without one


def blake2b_256(content: bytes) -> Digest:
    """Returns a cryptographic hash, so that no caller can choose tokens that collide.

    Even a collision would share nothing, because tokens are compared.
    """
    return hashlib.blake2b(content, digest_size=32).digest()


def has_vectors(content: Sequence[int]) -> bool:
    """Returns whether vectors take the place of any token of a block's content."""
    return max(content) >= _FIRST_VECTOR


def words_of(content: Sequence[int]) -> npt.NDArray[np.uint32]:
    """Returns a block's content as words of 32 bits; no other content has the same ones.

    A token id is a word. A number that stands for a vector (`EmbeddedSpan.content_ids`) is the
    largest word, and ten words at the end.
    """
    vectors = [number for number in content if number >= _FIRST_VECTOR]
    words = np.array([min(number, _FIRST_VECTOR - 1) for number in content], "<u4")
    if not vectors:
        return words
    size = 4 * _VECTOR_WORDS
    ends = np.frombuffer(b"".join(number.to_bytes(size, "little") for number in vectors), "<u4")
    return np.concatenate([words, ends])


class Entry(NamedTuple):
    """The content of a block.

    With the entries of the blocks before it, this is all that its keys and values depend on.

    Attributes:
        digest: The hash of the digest before it and of its own tokens.
        parent: The block before it; for the first block of a sequence the prefix salt.
        token_ids: Its own tokens, as many as the block has slots, and the tokens after it that it
            depends on; see `PrefixIndex`. They are `Sequence.content_ids`.
    """

    digest: Digest
    parent: Parent
    token_ids: tuple[int, ...]


class CacheObserver:
    """Is told which blocks can be found in the cache. This one ignores it."""

    def stored(self, block: int, entry: Entry) -> None:
        """Notes that a block can be found, after the block before it."""

    def removed(self, blocks: list[int]) -> None:
        """Notes that blocks cannot be found any more."""

    def cleared(self) -> None:
        """Notes that no block can be found any more."""


class PrefixIndex:
    """A one-to-one map between digests and blocks, for full and computed blocks.

    A block's digest is the hash of the digest before it (of the salt, at the root) and of its own
    tokens. The digest only finds a candidate. A match has equal tokens, and the block before it is
    the very block that matched before, so a collision shares nothing:

        salt ──▶ [ t0 .. t15 ]  ──▶ [ t16 .. t31 ]  ──▶ [ t32 .. t47 ]
                   block 3            block 9      └──▶ [ t32'.. t47']
                                                          two blocks follow block 9

    The block before a block of the index is in the index, too: a block that is taken out takes the
    blocks after it along.

    Where a drafter reads hidden states, what its layers keep for a token follows from the next
    token, too. The content of a block is then its own tokens and the one after it:

        [ t0 .. t15 ] t16 ──▶ [ t16 .. t31 ] t32

    Attributes:
        block_size: The tokens of a block.
        num_following: The tokens after a block that its content depends on, 0 or 1.
        observer: Is told of every change.
    """

    def __init__(
        self,
        block_size: int,
        hash_function: Callable[[bytes], Digest] = blake2b_256,
        *,
        num_following: int = 0,
    ) -> None:
        """Makes an empty index.

        Args:
            block_size: The tokens of a block.
            hash_function: Makes a digest of bytes.
            num_following: The tokens after a block that its content depends on, 0 or 1.
        """
        self.block_size = block_size
        self.num_following = num_following
        self.observer = CacheObserver()
        self._hash = hash_function
        self._block_of: dict[Digest, int] = {}
        self._entries: dict[int, Entry] = {}  # by block
        self._children: dict[int, set[int]] = {}  # the blocks right after a block; no set is empty

    def __contains__(self, block: int) -> bool:
        """Returns whether a block can be found."""
        return block in self._entries

    def __len__(self) -> int:
        """Returns how many blocks can be found."""
        return len(self._entries)

    def content(self, token_ids: Sequence[int], place: int) -> tuple[int, ...]:
        """Returns the tokens that a sequence's block at this place depends on."""
        start = place * self.block_size
        return tuple(token_ids[start : start + self.block_size + self.num_following])

    def extend(
        self,
        digests: list[Digest],
        token_ids: Sequence[int],
        salt: str | None,
        num_blocks: int,
    ) -> list[Digest]:
        """Adds digests to the list until it has those of a sequence's first `num_blocks` blocks.

        Args:
            digests: The digests that are known.
            token_ids: The tokens of the sequence.
            salt: `Request.prefix_salt`, which has the cache salt and the adapter; or None.
            num_blocks: The number of blocks, all of them full, with the tokens that follow.

        Returns:
            The same list; digests after the first `num_blocks` stay.
        """
        size = self.block_size
        first = len(digests)
        if first >= num_blocks:
            return digests
        parent = digests[-1] if digests else self._root(salt)
        following = self.num_following
        tokens = token_ids[first * size : num_blocks * size + following]
        if has_vectors(tokens):
            for index in range(first, num_blocks):
                parent = self._hash(parent + words_of(self.content(token_ids, index)).tobytes())
                digests.append(parent)
            return digests
        # The byte order is named, so that digests are the same on every machine that shares files.
        content = np.array(tokens, "<u4").tobytes()
        for start in range(0, 4 * (num_blocks - first) * size, 4 * size):
            parent = self._hash(parent + content[start : start + 4 * (size + following)])
            digests.append(parent)
        return digests

    def _root(self, salt: str | None) -> Digest:
        # An empty salt is not the same as none.
        return self._hash(b"no salt" if salt is None else b"salt " + salt.encode())

    def match(
        self,
        digests: Sequence[Digest],
        token_ids: Sequence[int],
        salt: str | None,
    ) -> list[int]:
        """Returns the blocks that hold the longest known prefix of these tokens.

        Args:
            digests: The digests of the first blocks; at most as many blocks are returned.
            token_ids: The tokens of the sequence.
            salt: `Request.prefix_salt`, which has the cache salt and the adapter; or None.
        """
        blocks: list[int] = []
        parent: Parent = salt
        for index, digest in enumerate(digests):
            block = self._block_of.get(digest)
            if block is None or not self._holds(block, parent, self.content(token_ids, index)):
                break
            blocks.append(block)
            parent = block
        return blocks

    def register(
        self,
        block: int,
        digest: Digest,
        parent: Parent,
        token_ids: tuple[int, ...],
    ) -> int | None:
        """Notes the content of a full and computed block.

        Args:
            block: The block.
            digest: The digest of its content.
            parent: The block before it; the salt if there is none.
            token_ids: Its `content`.

        Returns:
            The block that can be found for this content: the block itself, or another one that was
            there first, which the caller takes in place of its own. None if neither can be found,
            because other content has this digest, or because the block before it is not in the
            index any more.
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
        """Takes a block out if it is in, and all blocks after it, which would not be found.

        Returns:
            The blocks that were taken out after it.
        """
        if block not in self._entries:
            return []
        taken = [block]
        for removed in taken:  # the list grows while it is walked
            digest, parent, _ = self._entries.pop(removed)
            del self._block_of[digest]
            taken += self._children.pop(removed, ())
            if removed == block and isinstance(parent, int):
                self._children[parent].discard(block)
                if not self._children[parent]:
                    del self._children[parent]
        self.observer.removed(taken)
        return taken[1:]

    def clear(self) -> None:
        """Takes all blocks out."""
        self._entries.clear()
        self._block_of.clear()
        self._children.clear()
        self.observer.cleared()

    def block_of(self, digest: Digest) -> int | None:
        """Returns the block with this digest, or None.

        Tokens are not compared, so the digest must be that of a sequence that was compared before.
        """
        return self._block_of.get(digest)

    def entry(self, block: int) -> Entry:
        """Returns the content of a block that is in the index."""
        return self._entries[block]

    def check(self) -> None:
        """Asserts that the map is one to one, and that each entry follows from one that is in."""
        blocks = {entry.digest: block for block, entry in self._entries.items()}
        assert self._block_of == blocks, "digests and blocks are not one to one"
        assert len(self._block_of) == len(self._entries), "two blocks have one digest"
        parents = {block: entry.parent for block, entry in self._entries.items()}
        after = {(parent, block) for block, parent in parents.items() if isinstance(parent, int)}
        noted = {
            (parent, block) for parent, children in self._children.items() for block in children
        }
        assert after == noted, "a block after another is lost"
        assert all(self._children.values()), "an empty set of children"
        for block, (digest, parent, token_ids) in self._entries.items():
            size = self.block_size + self.num_following
            assert len(token_ids) == size, f"block {block} is not full"
            if isinstance(parent, int):
                assert parent in self._entries, f"block {parent} before {block} is missing"
                before = self._entries[parent].digest
            else:
                before = self._root(parent)
            content = words_of(token_ids).tobytes()
            assert digest == self._hash(before + content), f"block {block}: wrong digest"
