"""Keeps what takes the place of tokens in the prompts of unfinished requests."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from jaxpage.engine.batch_builder import NO_SOURCES
from jaxpage.errors import UnsupportedError
from jaxpage.step.embedded import EmbeddedPrompt, EmbeddedSpan, Vectors
from jaxpage.step.plan import StepPlan

PLACEHOLDER_ID = 0  # the token id at a position that has a vector of a caller


class VectorSources:
    """Checks vectors of callers, and gives each step the rows that its tokens take.

    Attributes:
        vectors: The shape [1 + n, D] and the type of what takes the place of a token.
        takes_prompt_embeds: True if callers may give vectors.
    """

    def __init__(self, vectors: jax.ShapeDtypeStruct, *, takes_prompt_embeds: bool) -> None:
        self.vectors = vectors
        self.takes_prompt_embeds = takes_prompt_embeds
        self._held: dict[str, EmbeddedPrompt] = {}  # by id of an unfinished request

    def prompt_of(self, values: Any) -> tuple[tuple[int, ...], EmbeddedPrompt]:
        """Returns the token ids and the vectors of a prompt that a caller gives as vectors.

        Any thread may call it.

        Args:
            values: An array [T, D] of numpy, JAX or PyTorch.

        Raises:
            UnsupportedError: The engine takes no vectors of callers.
            ValueError: It is no such array, or has numbers that are not finite.
        """
        if not self.takes_prompt_embeds:
            raise UnsupportedError(NOT_ENABLED)
        rows = self._check(values)
        about = f"prompt_embeds {rows.dtype} {rows.shape} "
        key = hashlib.sha256(about.encode() + rows.tobytes()).digest()
        spans = (EmbeddedSpan(0, len(rows), key),)
        return (PLACEHOLDER_ID,) * len(rows), EmbeddedPrompt(spans, {key: Vectors(rows)})

    def _check(self, values: Any) -> npt.NDArray[Any]:
        """Returns the rows in the type of the model's activations."""
        if hasattr(values, "detach"):  # PyTorch; numpy has no bfloat16 of its own
            values = values.detach().float().cpu().numpy()
        rows = np.asarray(values)
        width = self.vectors.shape[1]
        if rows.ndim != 2 or rows.shape[1] != width or not len(rows):
            raise ValueError(
                f"prompt_embeds has the shape {rows.shape}; it must be (T, {width}): a vector of "
                f"the model's width for each of T positions, at least one"
            )
        is_float = np.issubdtype(rows.dtype, np.floating) or rows.dtype.name == "bfloat16"
        if not is_float:
            raise ValueError(f"prompt_embeds must have floating-point numbers, got {rows.dtype}")
        with np.errstate(over="ignore"):
            rows = np.ascontiguousarray(rows.astype(self.vectors.dtype))
        if num_wrong := int((~np.isfinite(rows.astype(np.float32))).sum()):
            raise ValueError(
                f"prompt_embeds has {num_wrong} numbers of {rows.size} that are not finite in "
                f"{rows.dtype}, the type of the model's activations"
            )
        return rows

    def hold(self, request_id: str, embedded: EmbeddedPrompt) -> None:
        """Keeps the sources of a request that was added."""
        self._held[request_id] = embedded

    def release(self, request_id: str) -> None:
        """Gives up the sources of a request that has ended."""
        self._held.pop(request_id, None)

    def rows_for(self, plan: StepPlan) -> Mapping[bytes, npt.NDArray[Any]]:
        """Returns the rows [R, 1 or 1 + n, D] of each source that a step takes, by its key."""
        if not plan.takes_vectors:
            return NO_SOURCES
        sources = {
            key: source
            for embedded in self._held.values()
            for key, source in embedded.sources.items()
        }
        needed = {span.key for row in plan.rows for span in row.embedded}
        return {key: self._rows_of(sources[key]) for key in needed}

    def _rows_of(self, source: Any) -> npt.NDArray[Any]:
        assert isinstance(source, Vectors)
        return source.rows[:, None]


NOT_ENABLED = "prompt_embeds needs enable_prompt_embeds=True"
