"""Computes embeddings of whole prompts: their hidden states, pooled into one vector (`LLM.embed`).

A prompt runs by itself, in chunks of one shape, over pages of its own. It touches nothing of the
scheduler, its pool or its steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from jaxpage.device.executables import Executables, compile_ahead
from jaxpage.device.hardware.mesh import DeviceMesh, shapes_of
from jaxpage.device.inputs.buckets import Bucket
from jaxpage.device.inputs.step_inputs import TableShape, empty_inputs, size_when_packed, unpack
from jaxpage.device.pages import kv_pages
from jaxpage.device.steps import pool_step
from jaxpage.models import KVSpec
from jaxpage.models.sharding import kv_of_shard
from jaxpage.outputs import TokenPooling

CHUNK_TOKENS = 128
# The positions of the smallest pages. Longer prompts take twice as many, and so on; each size is
# compiled when it is first needed.
MIN_POSITIONS = 512


class Embedder:
    """Runs prompts through the model and pools their hidden states.

    `compile` may be called on another thread than `embed`, but neither on several threads at once.
    """

    def __init__(
        self,
        executables: Executables,
        parameters: Any,
        kv: KVSpec,
        block_size: int,
        page_dtype: Any,
        mesh: DeviceMesh,
    ):
        """Prepares the shapes; nothing is compiled yet.

        Args:
            executables: The steps of the engine, whose options the embedder shares.
            parameters: The parameters of the model, for their shapes and places.
            kv: What the layers of the model keep.
            block_size: The slots of a block (S).
            page_dtype: The type of the pages.
            mesh: The devices.
        """
        self._parameters = shapes_of(parameters)
        options = executables.options
        sharding = options.sharding
        self._options = options._replace(
            drafter=None, layer_groups=(0,) * kv.num_layers * sharding.num_local
        )
        self._kv = kv_of_shard(kv, sharding)
        self._block_size = block_size
        self._page_dtype = page_dtype
        self._mesh = mesh
        self._steps: dict[int, Any] = {}  # by the positions that their pages have
        # The second row is padding; see `buckets.MIN_ROWS`.
        self._bucket = Bucket(CHUNK_TOKENS, 2, CHUNK_TOKENS)

    def batches(self, lengths: Sequence[int]) -> list[list[int]]:
        """Returns which prompts are computed together, by their places: each is by itself."""
        return [[index] for index in range(len(lengths))]

    def embed(
        self, parameters: Any, prompts: Sequence[Sequence[int]], poolings: Sequence[TokenPooling]
    ) -> list[npt.NDArray[np.float32]]:
        """Returns the vector of each prompt of a batch; see `embed_one`."""
        return [
            self.embed_one(parameters, token_ids, pooling)
            for token_ids, pooling in zip(prompts, poolings, strict=True)
        ]

    def embed_one(
        self, parameters: Any, token_ids: Sequence[int], pooling: TokenPooling
    ) -> npt.NDArray[np.float32]:
        """Returns the hidden states after the final norm as one vector [D], or several in a row.

        Args:
            parameters: The parameters of the model on the device.
            token_ids: The tokens of the prompt.
            pooling: The way in which they become one. At least the last token counts.
        """
        width = self.compile(len(token_ids))
        num_skipped = min(pooling.num_skipped, len(token_ids) - 1)
        pages = self._mesh.zeros(self._page_shapes(width))
        chunks = []
        for start in range(0, len(token_ids), CHUNK_TOKENS):
            part = token_ids[start : start + CHUNK_TOKENS]
            packed = pack_chunk(part, start, self._bucket, TableShape(1, width), self._block_size)
            step = self._steps[width]
            pooled, pages = step(parameters, pages, packed, np.int32(num_skipped))
            chunks.append(np.asarray(pooled))
        first = num_skipped // CHUNK_TOKENS
        vectors = _pool(np.stack(chunks), first, range(num_skipped, len(token_ids)))
        return np.concatenate([vectors[mode] for mode in pooling.modes])

    def compile(self, num_tokens: int) -> int:
        """Compiles the step for prompts of this length if it is not there yet.

        Returns:
            The width of the block table of such a prompt.
        """
        width = self._width(num_tokens)
        if width not in self._steps:
            self._steps[width] = self._compile(width)
        return width

    def is_compiled(self, num_tokens: int) -> bool:
        """Returns whether the step for prompts of this length is there; any thread may call it."""
        return self._width(num_tokens) in self._steps

    def _width(self, num_tokens: int) -> int:
        positions = MIN_POSITIONS
        while positions < num_tokens:
            positions *= 2
        return -(-positions // self._block_size)

    def _page_shapes(self, width: int) -> kv_pages.KVPages:
        layers = kv_pages.page_shapes(
            self._kv,
            width + 1,  # the null block
            self._block_size,
            self._page_dtype,
            interleaved=self._options.attention_backend.interleaved,
        )
        return kv_pages.divide_shapes(layers, self._options.sharding.num_local, self._mesh)

    def _compile(self, width: int) -> Any:
        tables = TableShape(1, width)
        options = self._options._replace(tables=tables, context=width * self._block_size)

        def step(
            parameters: Any, pages: kv_pages.KVPages, packed: jax.Array, num_skipped: jax.Array
        ) -> tuple[jax.Array, kv_pages.KVPages]:
            inputs = unpack(packed, self._bucket, tables)
            return pool_step(parameters, pages, inputs, num_skipped, self._bucket, options)

        pages = self._page_shapes(width)
        packed = self._mesh.whole(np.zeros(size_when_packed(self._bucket, tables), np.int32))
        whole_step = self._mesh.on_each(step, (self._parameters, pages, None, None), (None, pages))
        step = jax.jit(whole_step, donate_argnums=1)
        skipped = self._mesh.whole(np.zeros((), np.int32))
        return compile_ahead(
            step,
            *(self._parameters, pages, packed, skipped),
            graphs=options.graphs,
            backend=options.attention_backend,
        )


def _pool(
    rows_XRD: npt.NDArray[np.float32], first: int, counted: range
) -> dict[str, npt.NDArray[np.float32]]:
    """Returns the vector [D] of each way of pooling, by its name.

    Args:
        rows_XRD: What `pool_step` gave for each chunk.
        first: The chunk with the first token that counts.
        counted: The positions of the tokens that count.
    """
    sum_D, weighted_D = rows_XRD[:, 1:3].sum(axis=0, dtype=np.float64)
    vectors: dict[str, npt.NDArray[Any]] = {
        "cls": rows_XRD[first, 4],
        "max": rows_XRD[:, 3].max(axis=0),
        "mean": sum_D / len(counted),
        "mean_sqrt_len_tokens": sum_D / np.sqrt(len(counted)),
        # Weights count from 1, positions from 0.
        "weightedmean": weighted_D / (sum(counted) + len(counted)),
        "lasttoken": rows_XRD[-1, 0],
    }
    return {mode: vector.astype(np.float32) for mode, vector in vectors.items()}


def pack_chunk(
    token_ids: Sequence[int], start: int, bucket: Bucket, tables: TableShape, block_size: int
) -> npt.NDArray[np.int32]:
    """Packs a step of one sequence whose tokens before `start` are computed.

    Its block table has the blocks from 1 on.
    """
    count = len(token_ids)
    packed, fields = empty_inputs(bucket, tables)
    fields["token_ids_T"][:count] = token_ids
    fields["positions_T"][:count] = np.arange(start, start + count)
    fields["slots_ZT"][0, :count] = block_size + np.arange(start, start + count)
    fields["block_table_ZBM"][0, 0] = np.arange(1, tables.width + 1)
    fields["context_len_B"][0] = start + count
    fields["query_start"][1:] = count
    return packed
