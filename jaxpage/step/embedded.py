"""Defines the parts of a prompt whose input is vectors in place of tokens.

A picture, or vectors that a caller gives, fill some positions of a prompt:

    token_ids   ( t0, t1, <image>, <image>, <image>, t5 )
    spans       start 2, length 3, offset 0, key of the picture

The first layer takes the rows of the source there, and the token table's rows elsewhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class EmbeddedSpan(NamedTuple):
    """Describes consecutive tokens of a prompt whose input is rows of a source.

    Attributes:
        start: The position of the first token in the prompt.
        length: The number of tokens.
        key: The 32 bytes by which the source is known: a SHA-256 digest of all that its rows
            depend on but the weights.
        offset: The row of the source for the first token.
        is_whole: True if the tokens see each other both ways, so that no step may compute a part
            of them.
    """

    start: int
    length: int
    key: bytes
    offset: int = 0
    is_whole: bool = False

    @property
    def stop(self) -> int:
        """Returns the position after the last token."""
        return self.start + self.length

    def cut(self, start: int, stop: int) -> EmbeddedSpan:
        """Returns the part of the span from position `start` to `stop` - 1."""
        first = max(start, self.start)
        offset = self.offset + first - self.start
        return self._replace(start=first, length=min(stop, self.stop) - first, offset=offset)

    @property
    def content_ids(self) -> list[int]:
        """Returns what stands for the tokens in the prefix cache, in place of their ids.

        The numbers are larger than any token id. What a token of a whole span sees depends on the
        span's end, too.
        """
        key = self.key
        if self.is_whole:
            key = hashlib.sha256(key + b"%d %d" % (self.offset, self.length)).digest()
        # The 1 keeps the number above every token id where a key begins with zeros. Rows that
        # follow each other have numbers that do, so a span that was cut has those of its place in
        # the source.
        first = (1 + int.from_bytes(key, "big") << 32) + self.offset
        return list(range(first, first + self.length))


@dataclass(frozen=True, eq=False)
class Vectors:
    """Holds vectors that a caller gives.

    Attributes:
        rows: What takes the place of the token table's rows, of shape [R, D], in the type of the
            model's activations.
    """

    rows: npt.NDArray[np.generic]

    @property
    def num_rows(self) -> int:
        """Returns the number of positions that the vectors fill."""
        return len(self.rows)


@dataclass(frozen=True, eq=False)
class Picture:
    """Holds a picture as the processor of a model made it.

    Attributes:
        arrays: What the model's encoder takes, under the names of the processor.
        num_rows: The number of positions that the picture fills.
    """

    arrays: Mapping[str, npt.NDArray[np.generic]]
    num_rows: int


@dataclass(frozen=True, eq=False)
class EmbeddedPrompt:
    """Holds what a prompt has in addition to its token ids.

    Attributes:
        spans: The spans, by position; no two have a position in common.
        sources: The source of each key.
        axes_AT: The rotary positions of the prompt's tokens on several axes (time, height, width);
            None where positions have one axis.
    """

    spans: tuple[EmbeddedSpan, ...]
    sources: Mapping[bytes, Vectors | Picture]
    axes_AT: npt.NDArray[np.int32] | None = None

    @property
    def stop(self) -> int:
        """Returns the position after the last one that a span fills."""
        return self.spans[-1].stop if self.spans else 0

    def within(self, start: int, stop: int) -> tuple[EmbeddedSpan, ...]:
        """Returns the spans, and parts of spans, from position `start` to `stop` - 1."""
        return tuple(
            span.cut(start, stop) for span in self.spans if span.start < stop and start < span.stop
        )

    def max_chunk(self, start: int, stop: int) -> int:
        """Returns the last position, at most `stop`, up to which a step may compute from `start`.

        It is not within a span whose tokens see each other both ways.
        """
        for span in self.spans:
            # A step that ends within it computes tokens that cannot see the rest of their span.
            if span.is_whole and span.start < stop < span.stop:
                return max(start, span.start)
        return stop

    def end_of_whole(self, start: int) -> int:
        """Returns the end of the whole span that has this position; the position itself if none."""
        for span in self.spans:
            if span.is_whole and span.start <= start < span.stop:
                return span.stop
        return start

    def rotary_positions(self, positions_T: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Returns the rotary positions [A, T] of tokens at these places of the sequence.

        Those after the prompt go on from the largest one of the prompt, the same on all axes.
        """
        assert self.axes_AT is not None
        length = self.axes_AT.shape[1]
        # The index of later tokens is of no account, but must be within the array.
        of_prompt_AT = self.axes_AT[:, np.minimum(positions_T, length - 1)]
        after_T = positions_T - length + int(self.axes_AT.max()) + 1
        return np.where(positions_T < length, of_prompt_AT, after_T)

    def replace_ids(self, token_ids: Sequence[int]) -> list[int]:
        """Returns a sequence's tokens as the prefix cache compares them.

        Those that a span fills have the span's `content_ids`.
        """
        content_ids = list(token_ids)
        for span in self.spans:
            content_ids[span.start : span.stop] = span.content_ids
        return content_ids

    def text_ids(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """Returns the tokens that no span fills, in order."""
        filled = {index for span in self.spans for index in range(span.start, span.stop)}
        return tuple(token_id for index, token_id in enumerate(token_ids) if index not in filled)
