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

from jaxpage.device import kv_pages
from jaxpage.device.buckets import Bucket
from jaxpage.device.executables import compiled
from jaxpage.device.mesh import DeviceMesh, shapes_of
from jaxpage.device.step_inputs import TableShape, empty_inputs, packed_size, unpack
from jaxpage.device.steps import StepOptions, pooled_step
from jaxpage.models import KVSpec, kv_of_shard
from jaxpage.outputs import Pooling

CHUNK_TOKENS = 128
# The positions of the smallest pages. Longer prompts take twice as many, and so on; each size is
# compiled when it is first needed.
LEAST_POSITIONS = 512


class Embedder:
    """Runs prompts through the model and pools their hidden states.

    `compile` may be called on another thread than `embed`, but neither on several threads at once.
    """

    def __init__(
        self,
        options: StepOptions,
        parameters: Any,
        kv: KVSpec,
        block_size: int,
        page_dtype: Any,
        mesh: DeviceMesh,
    ):
        """Prepares the shapes; nothing is compiled yet.

        Args:
            options: The options of the engine's steps.
            parameters: The parameters of the model, for their shapes and places.
            kv: What the layers of the model keep.
            block_size: The slots of a block (S).
            page_dtype: The type of the pages.
            mesh: The devices.
        """
        self._parameters = shapes_of(parameters)
        sharding = options.sharding
        self._options = options._replace(
            drafter=None, layer_groups=(0,) * kv.num_layers * sharding.num_local
        )
        self._kv = kv_of_shard(kv, sharding)
        self._block_size = block_size
        self._page_dtype = page_dtype
        self._mesh = mesh
        self._steps: dict[int, Any] = {}  # by the positions that their pages have
        self._bucket = Bucket(CHUNK_TOKENS, 2, CHUNK_TOKENS)

    def embed(
        self, parameters: Any, token_ids: Sequence[int], pooling: Pooling
    ) -> npt.NDArray[np.float32]:
        """Returns the hidden state [D] after the final norm: of the last token, or the mean of all.

        Args:
            parameters: The parameters of the model on the device.
            token_ids: The tokens of the prompt.
            pooling: "last" or "mean".
        """
        width = self.compile(len(token_ids))
        pages = self._mesh.zeros(self._page_shapes(width))
        total = np.zeros(0, np.float64)
        for start in range(0, len(token_ids), CHUNK_TOKENS):
            part = token_ids[start : start + CHUNK_TOKENS]
            packed = packed_chunk(part, start, self._bucket, TableShape(1, width), self._block_size)
            pooled, pages = self._steps[width](parameters, pages, packed)
            last_D, sum_D = np.asarray(pooled)
            total = sum_D.astype(np.float64) + (total if total.size else 0.0)
        return last_D if pooling == "last" else (total / len(token_ids)).astype(np.float32)

    def compile(self, num_tokens: int) -> int:
        """Compiles the step for prompts of this length if it is not there yet.

        Returns:
            The width of the block table of such a prompt.
        """
        width = self._width(num_tokens)
        if width not in self._steps:
            self._steps[width] = self._compiled(width)
        return width

    def is_compiled(self, num_tokens: int) -> bool:
        """Returns whether the step for prompts of this length is there; any thread may call it."""
        return self._width(num_tokens) in self._steps

    def _width(self, num_tokens: int) -> int:
        positions = LEAST_POSITIONS
        while positions < num_tokens:
            positions *= 2
        return -(-positions // self._block_size)

    def _page_shapes(self, width: int) -> kv_pages.KVPages:
        layers = kv_pages.page_shapes(self._kv, width + 1, self._block_size, self._page_dtype)
        return kv_pages.divided_shapes(layers, self._options.sharding.num_local, self._mesh)

    def _compiled(self, width: int) -> Any:
        tables = TableShape(1, width)
        options = self._options._replace(tables=tables, context=width * self._block_size)

        def step(
            parameters: Any, pages: kv_pages.KVPages, packed: jax.Array
        ) -> tuple[jax.Array, kv_pages.KVPages]:
            return pooled_step(
                parameters, pages, unpack(packed, self._bucket, tables), self._bucket, options
            )

        pages = self._page_shapes(width)
        packed = self._mesh.whole(np.zeros(packed_size(self._bucket, tables), np.int32))
        whole_step = self._mesh.on_each(step, (self._parameters, pages, None), (None, pages))
        step = jax.jit(whole_step, donate_argnums=1)
        return compiled(step, self._parameters, pages, packed, graphs=options.graphs)


def packed_chunk(
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
