"""Encodes pictures for steps, and keeps the rows of those that were encoded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxpage.images import LastUsed
from jaxpage.step.embedded import Picture

Rows = npt.NDArray[Any]
Encode = Callable[[int, Mapping[str, npt.NDArray[Any]]], Rows]  # see `Runner.encode`


@dataclass
class EncoderCounts:
    """Counts what an encoder has done since the start.

    Attributes:
        num_encoded: The pictures that were encoded.
        num_found: The pictures whose rows were kept.
        num_bytes: The bytes of the rows that are kept.
    """

    num_encoded: int = 0
    num_found: int = 0
    num_bytes: int = 0


class PictureEncoder:
    """Gives the rows of pictures: those it has kept, or else the encoder's, with the same bits.

    Attributes:
        family: The `VisionFamily`.
        spec: The spec of the encoder.
        max_pictures: The most pictures of a prompt; None for no limit.
        counts: The counts since the start.
    """

    def __init__(
        self,
        family: Any,
        spec: Any,
        encode: Encode,
        *,
        max_pictures: int | None,
        cache_bytes: int,
    ) -> None:
        """Takes the encoder, which is compiled.

        Args:
            family: The `VisionFamily`.
            spec: The spec of the encoder.
            encode: Runs the encoder on the device.
            max_pictures: The most pictures of a prompt; None for no limit.
            cache_bytes: The most bytes of the rows that are kept.
        """
        self.family = family
        self.spec = spec
        self.max_pictures = max_pictures
        self.counts = EncoderCounts()
        self._encode = encode
        self._rows: LastUsed[Rows] = LastUsed(cache_bytes)

    def check(self, pictures: Sequence[Picture]) -> None:
        """Refuses pictures that the encoder does not take; any thread may call it.

        Raises:
            ValueError: There are too many, or one fills another number of positions than it has
                rows.
        """
        if self.max_pictures is not None and len(pictures) > self.max_pictures:
            raise ValueError(
                f"the prompt has {len(pictures)} pictures; limit_images is {self.max_pictures}"
            )
        for picture in pictures:
            calls = self.family.Model.calls(self.spec, picture.arrays)
            num_rows = sum(call.num_rows for call in calls)
            if num_rows != picture.num_rows:
                raise ValueError(
                    f"a picture fills {picture.num_rows} positions of the prompt, but has "
                    f"{num_rows} rows"
                )

    def axes_of(
        self, token_ids: Sequence[int], pictures: Sequence[Picture]
    ) -> npt.NDArray[np.int32]:
        """Returns the rotary positions [A, T] of a prompt with these pictures, in its order."""
        axes_AT: npt.NDArray[np.int32] = self.family.Model.axes_of(self.spec, token_ids, pictures)
        return axes_AT

    def rows_of(self, key: bytes, picture: Picture) -> Rows:
        """Returns the rows [R, 1 + n, D] of a picture.

        Args:
            key: The key of the picture.
            picture: The picture.
        """
        rows = self._rows.get(key)
        if rows is not None:
            self.counts.num_found += 1
            return rows
        calls = self.family.Model.calls(self.spec, picture.arrays)
        parts = [self._encode(call.size, call.make_inputs())[: call.num_rows] for call in calls]
        rows = np.concatenate(parts)
        self.counts.num_encoded += 1
        self._rows.add(key, rows, rows.nbytes)
        self.counts.num_bytes = self._rows.num_bytes
        return rows

    def clear(self) -> None:
        """Gives up all rows, since other weights would give others."""
        self._rows.clear()
        self.counts.num_bytes = 0
