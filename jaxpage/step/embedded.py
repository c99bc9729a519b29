"""Defines the parts of a prompt whose input is vectors in place of tokens.

A picture, or vectors that a caller gives, fill some positions of a prompt:

    token_ids   ( t0, t1, <image>, <image>, <image>, t5 )
    spans       start 2, length 3, offset 0, key of the picture

The first layer takes the rows of the source there, and the token table's rows elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
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


@dataclass(frozen=True, eq=False)
class Vectors:
    """Holds vectors that a caller gives.

    Attributes:
        rows: The input of the first layer for each position, of shape [R, D].
    """

    rows: npt.NDArray[np.float32]

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
    def position_offset(self) -> int:
        """Returns what the rotary position of a token after the prompt has more than its place."""
        if self.axes_AT is None:
            return 0
        highest = int(self.axes_AT.max())
        return highest + 1 - int(self.axes_AT.shape[1])
