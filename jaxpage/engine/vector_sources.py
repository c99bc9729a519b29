"""Keeps what takes the place of tokens in the prompts of unfinished requests."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from jaxpage.engine.picture_encoder import PictureEncoder
from jaxpage.engine.vector_fields import NO_SOURCES, Sources
from jaxpage.errors import UnsupportedError
from jaxpage.step.embedded import EmbeddedPrompt, EmbeddedSpan, Picture, Vectors
from jaxpage.step.plan import StepPlan

NOT_ENABLED = "prompt_embeds needs enable_prompt_embeds=True"
NO_PICTURES = "this model takes no pictures, or limit_images is 0"
PLACEHOLDER_ID = 0  # the token id at a position that has a vector of a caller


class VectorSources:
    """Checks vectors of callers, and gives each step the rows that its tokens take.

    Attributes:
        vectors: The shape [1 + n, D] and the type of what takes the place of a token.
        takes_prompt_embeds: True if callers may give vectors.
        encoder: The encoder of pictures; None if the engine takes none.
    """

    def __init__(
        self,
        vectors: jax.ShapeDtypeStruct,
        *,
        takes_prompt_embeds: bool,
        num_axes: int = 0,
        sees_ahead: bool = False,
        max_tokens: int = 0,
        encoder: PictureEncoder | None = None,
    ) -> None:
        """Sets what prompts may have.

        Args:
            vectors: The shape [1 + n, D] and the type of what takes the place of a token.
            takes_prompt_embeds: True if callers may give vectors.
            num_axes: The axes of rotary positions; 0 if these are the tokens' places.
            sees_ahead: True if tokens of pictures see each other both ways.
            max_tokens: The most tokens of a step.
            encoder: The encoder of pictures; None if the engine takes none.
        """
        self.vectors = vectors
        self.takes_prompt_embeds = takes_prompt_embeds
        self.encoder = encoder
        self._num_axes = num_axes
        self._sees_ahead = sees_ahead
        self._max_tokens = max_tokens
        self._held: dict[str, EmbeddedPrompt] = {}  # by id of an unfinished request

    def complete(self, token_ids: Sequence[int], embedded: EmbeddedPrompt) -> EmbeddedPrompt:
        """Returns the vectors of a prompt with their rotary positions; any thread may call it.

        Raises:
            UnsupportedError: The engine takes no pictures.
            ValueError: The vectors do not fit the prompt or the model; the message has the numbers.
        """
        sources = {
            key: Vectors(self._check(source.rows)) if isinstance(source, Vectors) else source
            for key, source in embedded.sources.items()
        }
        embedded = replace(embedded, sources=sources)
        self._check_spans(len(token_ids), embedded)
        pictures = [
            source
            for span in embedded.spans
            # A picture may fill several spans, and counts with the first.
            if not span.offset and isinstance(source := embedded.sources[span.key], Picture)
        ]
        if pictures:
            if self.encoder is None:
                raise UnsupportedError(NO_PICTURES)
            self.encoder.check(pictures)
        if not self._num_axes:
            return replace(embedded, axes_AT=None)
        axes_AT = embedded.axes_AT
        if axes_AT is None and pictures and self.encoder is not None:
            axes_AT = self.encoder.axes_of(token_ids, pictures)
        if axes_AT is not None and axes_AT.shape != (self._num_axes, len(token_ids)):
            raise ValueError(
                f"rotary positions have the shape {axes_AT.shape}; the prompt needs "
                f"{(self._num_axes, len(token_ids))}"
            )
        return replace(embedded, axes_AT=axes_AT)

    def _check_spans(self, num_tokens: int, embedded: EmbeddedPrompt) -> None:
        position = 0
        for span in embedded.spans:
            source = embedded.sources[span.key]
            if span.start < position or span.length < 1 or span.stop > num_tokens:
                raise ValueError(
                    f"vectors take positions {span.start} to {span.stop - 1}; they must be in "
                    f"order, from {position} to {num_tokens - 1}"
                )
            if span.offset < 0 or span.offset + span.length > source.num_rows:
                raise ValueError(
                    f"positions {span.start} to {span.stop - 1} take rows from {span.offset} on, "
                    f"but the source has {source.num_rows}"
                )
            if span.is_whole and (span.length > self._max_tokens or not self._sees_ahead):
                raise ValueError(
                    f"{span.length} tokens that see each other both ways are not possible: the "
                    f"model has {'such' if self._sees_ahead else 'no such'} attention, and a step "
                    f"computes up to {self._max_tokens} tokens (max_num_batched_tokens)"
                )
            position = span.stop

    def prompt_of(self, values: Any) -> tuple[tuple[int, ...], EmbeddedPrompt]:
        """Returns the token ids and the vectors of a prompt that a caller gives as vectors.

        Any thread may call it. `complete` checks the vectors.

        Args:
            values: An array [T, D] of numpy, JAX or PyTorch.

        Raises:
            UnsupportedError: The engine takes no vectors of callers.
            ValueError: The numbers are no floating-point ones.
        """
        if not self.takes_prompt_embeds:
            raise UnsupportedError(NOT_ENABLED)
        # A number alone has no length; `complete` refuses it by its shape.
        rows = np.atleast_1d(self._in_type(values))
        about = f"prompt_embeds {rows.dtype} {rows.shape} "
        # The same bytes in another shape or type are other vectors.
        key = hashlib.sha256(about.encode() + rows.tobytes()).digest()
        spans = (EmbeddedSpan(0, len(rows), key),)
        return (PLACEHOLDER_ID,) * len(rows), EmbeddedPrompt(spans, {key: Vectors(rows)})

    def _in_type(self, values: Any) -> npt.NDArray[Any]:
        """Returns an array in the type of the model's activations."""
        if hasattr(values, "detach"):  # PyTorch; numpy has no bfloat16 of its own
            values = values.detach().float().cpu().numpy()
        rows = np.asarray(values)
        is_float = np.issubdtype(rows.dtype, np.floating) or rows.dtype.name == "bfloat16"
        if not is_float:
            raise ValueError(f"prompt_embeds must have floating-point numbers, got {rows.dtype}")
        # What is too large for the type becomes infinite, and `_check` refuses it with the count.
        with np.errstate(over="ignore"):
            return np.ascontiguousarray(rows.astype(self.vectors.dtype, copy=False))

    def _check(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Returns the rows in the type of the model's activations."""
        rows = self._in_type(values)
        width = self.vectors.shape[1]
        if rows.ndim != 2 or rows.shape[1] != width or not len(rows):
            raise ValueError(
                f"prompt_embeds has the shape {rows.shape}; it must be (T, {width}): a vector of "
                f"the model's width for each of T positions, at least one"
            )
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

    def rows_for(self, plan: StepPlan) -> Sources:
        """Returns the rows [R, 1 or 1 + n, D] of each source that a step takes, by its key."""
        if not plan.takes_vectors:
            return NO_SOURCES
        sources = {
            key: source
            for embedded in self._held.values()
            for key, source in embedded.sources.items()
        }
        needed = {span.key for row in plan.rows for span in row.spans}
        return {key: self._rows_of(key, sources[key]) for key in needed}

    def _rows_of(self, key: bytes, source: Vectors | Picture) -> npt.NDArray[Any]:
        if isinstance(source, Vectors):
            return source.rows[:, None]
        assert self.encoder is not None, "a prompt with a picture was let in"
        return self.encoder.rows_of(key, source)

    def weights_replaced(self) -> None:
        """Gives up what was made with other weights."""
        if self.encoder is not None:
            self.encoder.clear()
