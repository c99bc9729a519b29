"""Writes the fields of a step in which vectors take the place of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from jaxpage.step.plan import Row

Sources = Mapping[bytes, npt.NDArray[Any]]  # the rows [R, 1 or 1 + n, D] of each source, by key
NO_SOURCES: Sources = MappingProxyType({})


def place_vectors(
    fields: dict[str, Any],
    rows: tuple[Row, ...],
    sources: Sources,
    vectors: jax.ShapeDtypeStruct | None,
) -> tuple[npt.NDArray[Any]]:
    """Returns the vectors [T, 1 + n, D] at the places of the tokens whose place they take.

    Args:
        fields: The fields of the step, to be written in place.
        rows: The rows of the step.
        sources: The rows of each source.
        vectors: The shape [1 + n, D] and the type of what takes the place of a token.
    """
    assert vectors is not None, "the engine takes no vectors"
    table_TND = np.zeros((len(fields["token_ids_T"]), *vectors.shape), vectors.dtype)
    sees_ahead = fields["last_seen_T"].size > 0
    if sees_ahead:
        fields["last_seen_T"][:] = fields["positions_T"]
    for first, row in zip(fields["query_start"].tolist(), rows, strict=False):
        for span in row.spans:
            begin = first + span.start - row.start
            place = slice(begin, begin + span.length)
            source = sources[span.key]
            table_TND[place, : source.shape[1]] = source[span.offset :][: span.length]
            fields["is_vector_T"][place] = 1
            if span.is_whole and sees_ahead:
                fields["last_seen_T"][place] = span.stop - 1
    return (table_TND,)


def fill_axes(fields: dict[str, Any], rows: tuple[Row, ...]) -> None:
    """Writes the rotary positions of each token on all axes; for texts these are its place."""
    positions_T = fields["positions_T"]
    fields["axes_AT"][:] = positions_T
    for first, row in zip(fields["query_start"].tolist(), rows, strict=False):
        if row.embedded is not None and row.embedded.axes_AT is not None:
            place = slice(first, first + len(row.token_ids))
            fields["axes_AT"][:, place] = row.embedded.rotary_positions(positions_T[place])
