"""Computes the logits after every token of a prompt, by the engine's own step.

As the embedder does, it runs in chunks of one shape over pages of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from jax.typing import DTypeLike

from jaxpage.device.embedder import pack_chunk
from jaxpage.device.hardware.backends import Backend
from jaxpage.device.hardware.mesh import make_mesh
from jaxpage.device.inputs.buckets import Bucket
from jaxpage.device.inputs.step_inputs import Flags, TableShape, unpack, views
from jaxpage.device.pages.kv_pages import KVPages, page_shapes
from jaxpage.device.steps import StepOptions, logits_step
from jaxpage.models import ModelSpec

STEP_TOKENS = 128
# There are as many rows as tokens, so that the step returns every token's logits.
_BUCKET = Bucket(STEP_TOKENS, STEP_TOKENS, STEP_TOKENS)


def logits_of_prompt(
    spec: ModelSpec,
    graph: Any,
    parameters: Any,
    token_ids: Sequence[int],
    *,
    backend: Backend,
    block_size: int,
    page_dtype: DTypeLike,
) -> npt.NDArray[np.float32]:
    """Returns the logits [T, V] after each token of a prompt.

    Args:
        spec: The model.
        graph: The modules of the model; see `abstract_model`.
        parameters: The parameters of the model on the device.
        token_ids: The tokens of the prompt.
        backend: The kernels.
        block_size: The slots of a block (S).
        page_dtype: The type of the pages.
    """
    width = -(-len(token_ids) // block_size)
    tables = TableShape(1, width)
    options = StepOptions(
        graph,
        spec.vocab_size,
        len(token_ids),
        tables,
        (0,) * spec.kv.num_layers,
        backend,
        sample_by_row=True,
    )

    def step(parameters: Any, pages: KVPages, packed: jax.Array) -> tuple[jax.Array, KVPages]:
        return logits_step(
            {"target": parameters},
            pages,
            unpack(packed, _BUCKET, tables),
            bucket=_BUCKET,
            options=options,
        )

    compiled = jax.jit(step, donate_argnums=1)
    # One block more than the prompt has: block 0 is the null block.
    shapes = page_shapes(
        spec.kv, width + 1, block_size, page_dtype, interleaved=backend.interleaved
    )
    pages = make_mesh().zeros(shapes)
    rows = []
    for start in range(0, len(token_ids), STEP_TOKENS):
        part = token_ids[start : start + STEP_TOKENS]
        packed = pack_chunk(part, start, _BUCKET, tables, block_size)
        fields = views(packed, _BUCKET, tables)
        fields["drawn_token_R"][:] = np.arange(STEP_TOKENS)
        fields["flags"][Flags.DRAWN] = len(part)
        logits_TV, pages = compiled(parameters, pages, packed)
        rows.append(np.asarray(logits_TV)[: len(part)])
    return np.concatenate(rows)
