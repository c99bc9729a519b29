"""Vectors of prompts, one after another on the engine's thread, each between two of its steps."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from jaxpage.device.embedder import Embedder, Pooling
from jaxpage.engine.admission import PreparedRequest
from jaxpage.engine.engine import Engine
from jaxpage.serving.engine_loop import EngineLoop


async def vectors_of(
    requests: Sequence[PreparedRequest], loop: EngineLoop, embedder: Embedder, pooling: Pooling
) -> AsyncIterator[npt.NDArray[np.float32]]:
    """All are computed with the weights that are in use at the first. Raises what `EngineLoop.snapshot` raises."""
    weights = await loop.snapshot(lambda engine: engine.runner.parameters["target"])

    def vector(_: Engine, request: PreparedRequest) -> npt.NDArray[np.float32]:
        return embedder.embed(weights, request.token_ids, pooling)

    for request in requests:
        yield await loop.snapshot(partial(vector, request=request))
