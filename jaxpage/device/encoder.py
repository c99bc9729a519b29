"""Computes the vectors and scores of texts with an encoder, several texts in a call."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jaxpage.device.embedder import Embedder
from jaxpage.device.encoder_step import (
    HEAD_ROWS,
    alignment_of,
    encoder_step,
    num_rows_of,
    pack_texts,
    score_step,
    size_of_inputs,
)
from jaxpage.device.executables import Executables, compile_ahead
from jaxpage.device.hardware.mesh import DeviceMesh
from jaxpage.device.inputs.buckets import Bucket
from jaxpage.device.steps import StepOptions
from jaxpage.models import EncoderConfig
from jaxpage.outputs import TokenPooling

Vector = npt.NDArray[np.float32]
_HEAD = "head"


def encoder_jobs(
    sizes: Sequence[int],
    max_length: int,
    config: EncoderConfig,
    parameters: Any,
    options: StepOptions,
    mesh: DeviceMesh,
) -> dict[Bucket | str, functools.partial[Any]]:
    """Returns the calls that compile an encoder, by the keys of their executables.

    Args:
        sizes: The sizes of streams; see `stream_sizes`.
        max_length: The tokens of the longest text.
        config: The config of the model.
        parameters: The parameters, for their shapes and places.
        options: The constants of the steps.
        mesh: The device.
    """
    target = parameters["target"]
    jobs: dict[Bucket | str, functools.partial[Any]] = {
        _key(size): functools.partial(compile_encoder, target, size, max_length, options, mesh)
        for size in sizes
    }
    if config.scores_pairs:
        jobs[_HEAD] = functools.partial(compile_head, target, config.hidden_size, options, mesh)
    return jobs


def compile_encoder(
    parameters: Any, num_tokens: int, max_length: int, options: StepOptions, mesh: DeviceMesh
) -> Any:
    """Compiles an encoder for streams of this many tokens."""
    packed = mesh.whole(jax.ShapeDtypeStruct((size_of_inputs(num_tokens),), jnp.int32))
    step = functools.partial(
        encoder_step, num_tokens=num_tokens, max_length=max_length, options=options
    )
    return compile_ahead(
        jax.jit(step), parameters, packed, graphs=options.graphs, backend=options.attention_backend
    )


def compile_head(parameters: Any, width: int, options: StepOptions, mesh: DeviceMesh) -> Any:
    """Compiles the head of an encoder for states of this width."""
    pooled = mesh.whole(jax.ShapeDtypeStruct((HEAD_ROWS, width), jnp.float32))
    step = functools.partial(score_step, options=options)
    return compile_ahead(
        jax.jit(step), parameters, pooled, graphs=options.graphs, backend=options.attention_backend
    )


def _key(num_tokens: int) -> str:
    return f"encode {num_tokens} tokens"


class TextEncoder:
    """Computes what an encoder gives of texts; it has the methods of `Embedder`."""

    def __init__(
        self,
        config: EncoderConfig,
        executables: Executables,
        sizes: Sequence[int],
        maximum: int,
    ):
        """Takes the executables, which are compiled.

        Args:
            config: The config of the model.
            executables: The table of executables.
            sizes: The sizes of streams; see `stream_sizes`.
            maximum: The tokens that several texts fill together, at most.
        """
        self._config = config
        self._executables = executables
        self._sizes = tuple(sizes)
        self._maximum = maximum
        backend = executables.options.attention_backend
        self._alignment = alignment_of(backend, config)

    def compile(self, num_tokens: int) -> int:
        """Returns the size of the stream for a text of this length; all are compiled."""
        return self._size(num_tokens)

    def is_compiled(self, num_tokens: int) -> bool:
        """Returns True: an encoder is compiled at its start."""
        return True

    def batches(self, lengths: Sequence[int]) -> list[list[int]]:
        """Returns which texts are computed together, by their places.

        Texts of similar lengths are: the longest comes first.

        Args:
            lengths: The number of tokens of each text.
        """
        batches: list[list[int]] = []
        room = 0
        for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
            taken = self._align(lengths[place])
            # The largest stream bounds the number of texts, too.
            if taken > room or len(batches[-1]) == num_rows_of(self._size(self._maximum)):
                batches.append([])
                room = max(self._maximum, taken)
            batches[-1].append(place)
            room -= taken
        return batches

    def embed(
        self, parameters: Any, texts: Sequence[Sequence[int]], poolings: Sequence[TokenPooling]
    ) -> list[Vector]:
        """Returns a vector of each text: its pooled states [D], or several in a row, or its scores.

        Args:
            parameters: The parameters of the model on the device.
            texts: The token ids of texts of one batch.
            poolings: The pooling of each text.
        """
        # A stream with room for the tokens, and for as many texts.
        taken = sum(self._align(len(text)) for text in texts)
        size = self._size(max(taken, 8 * len(texts)))
        filled = [
            self._inputs(np.asarray(text, np.int32), pooling)
            for text, pooling in zip(texts, poolings, strict=True)
        ]
        packed, starts = pack_texts(filled, size, self._alignment)
        states_TD = np.asarray(self._executables.executable(_key(size))(parameters, packed))
        states = [
            states_TD[start : start + len(text)] for start, text in zip(starts, texts, strict=True)
        ]
        if self._config.scores_pairs:
            return self._score(parameters, states)
        return [pool(each, pooling) for each, pooling in zip(states, poolings, strict=True)]

    def _size(self, num_tokens: int) -> int:
        """Returns the smallest stream that has room for so many tokens."""
        return next(size for size in self._sizes if size >= num_tokens)

    def _align(self, num_tokens: int) -> int:
        """Returns the tokens that a text takes in a stream, up to where the next may start."""
        return -(-num_tokens // self._alignment) * self._alignment

    def _inputs(
        self, ids: npt.NDArray[np.int32], pooling: TokenPooling
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Returns the token ids, positions and token types of a text."""
        types = np.zeros(len(ids), np.int32)
        if pooling.second_text is not None and self._config.token_types > 1:
            types[pooling.second_text :] = 1
        return ids, self._config.positions_of(ids), types

    def _score(self, parameters: Any, states: Sequence[npt.NDArray[np.float32]]) -> list[Vector]:
        """Returns the scores [Z] of each text."""
        assert self._config.head is not None, "only models with a head score"
        mode = self._config.head.pooling
        pooled = [pool(each, TokenPooling((mode,))) for each in states]
        scores: list[Vector] = []
        for start in range(0, len(pooled), HEAD_ROWS):
            part = pooled[start : start + HEAD_ROWS]
            # The head is compiled for this many texts only.
            rows = np.zeros((HEAD_ROWS, self._config.hidden_size), np.float32)
            rows[: len(part)] = part
            scores += list(
                np.array(self._executables.executable(_HEAD)(parameters, rows))[: len(part)]
            )
        return scores


AnyEmbedder = Embedder | TextEncoder


def pool(states_TD: npt.NDArray[np.float32], pooling: TokenPooling) -> Vector:
    """Returns the states of a text as one vector, or several in a row.

    Args:
        states_TD: The states of its tokens.
        pooling: The way in which they become one. At least the last token counts.
    """
    skipped = min(pooling.num_skipped, len(states_TD) - 1)
    counted = states_TD[skipped:].astype(np.float64)
    weights = np.arange(skipped + 1, len(states_TD) + 1)
    vectors = {
        "cls": lambda: counted[0],
        "max": lambda: counted.max(axis=0),
        "mean": lambda: counted.mean(axis=0),
        "mean_sqrt_len_tokens": lambda: counted.sum(axis=0) / np.sqrt(len(counted)),
        "weightedmean": lambda: weights @ counted / weights.sum(),
        "lasttoken": lambda: counted[-1],
    }
    return np.concatenate([vectors[mode]() for mode in pooling.modes]).astype(np.float32)
