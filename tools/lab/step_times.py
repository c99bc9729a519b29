"""Times a whole step on a device, and its parts: products, attention, sampler, and the host.

The times serve cost models and GPU checks. Weights and pages are made on the device, from shapes
alone. The sampler computes all rows at once, as on a GPU.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxpage.device.attention import make_attend
from jaxpage.device.compiler_options import compiler_options
from jaxpage.device.executables import compile_ahead
from jaxpage.device.hardware.backends import Backend
from jaxpage.device.inputs.buckets import MIN_ROWS, Bucket, BucketMenu
from jaxpage.device.inputs.step_inputs import TableShape, unpack
from jaxpage.device.sampler import draw
from jaxpage.device.selection_kernels import selection_kernels
from jaxpage.engine.batch_builder import BatchBuilder
from jaxpage.layers.context import AttentionOptions, ForwardContext
from jaxpage.models.base import abstract_model
from jaxpage.models.registry import load_family
from jaxpage.settings.sampling_params import SamplingParams
from jaxpage.step.plan import Row, Sample, StepPlan
from tools.step_shapes import LLAMA_3_8B, StepShapes, step_shapes

MODELS: Mapping[str, Mapping[str, Any]] = {
    "8b": LLAMA_3_8B,
    "1b": {
        **LLAMA_3_8B,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "head_dim": 64,
    },
    "tiny": {
        **LLAMA_3_8B,
        **{"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 512},
        **{"num_attention_heads": 4, "num_key_value_heads": 2},
    },
}
SAMPLING = {  # the sampling of every row
    "greedy": SamplingParams(temperature=0.0),
    "random": SamplingParams(temperature=1.0),
    "top_p": SamplingParams(temperature=1.0, top_p=0.95),
    "top_k_top_p": SamplingParams(temperature=1.0, top_k=50, top_p=0.95),
}
BLOCK_SIZE = 16
CHUNK_ROWS = 16  # rows of a bucket of prompt chunks; one is used
ROUNDS = 5
# The options with which an engine compiles its steps for a GPU
GPU_OPTIONS = compiler_options("gpu")


@dataclass(frozen=True)
class StepCase:
    """A step that decodes `rows` sequences, or computes the last `chunk` tokens of one.

    A sequence has `context` tokens, the new ones included.
    """

    model: str  # a name in MODELS
    rows: int
    context: int
    chunk: int = 0
    sampling: str = "greedy"  # a name in SAMPLING
    num_layers: int | None = None  # None for the model's number

    def __str__(self) -> str:
        work = f"chunk {self.chunk}" if self.chunk else f"decode {self.rows} rows"
        layers = f", {self.num_layers} layers" if self.num_layers else ""
        return f"{self.model}{layers}, {work}, context {self.context}, {self.sampling}"

    @property
    def bucket(self) -> Bucket:
        """Returns the bucket of the step."""
        if self.chunk:
            return Bucket(self.chunk, CHUNK_ROWS, self.chunk)
        num_rows = max(self.rows, MIN_ROWS)
        return Bucket(num_rows, num_rows, 1)

    @property
    def config(self) -> Mapping[str, Any]:
        """Returns the model's config.json, with room for the context."""
        config = MODELS[self.model]
        return {
            **config,
            "max_position_embeddings": max(self.context, config["max_position_embeddings"]),
        }

    @property
    def blocks_per_row(self) -> int:
        """Returns how many blocks a sequence has."""
        return -(-self.context // BLOCK_SIZE)

    @property
    def num_blocks(self) -> int:
        """Returns how many blocks the pool has, the null block included."""
        return 1 + self.blocks_per_row * (1 if self.chunk else self.rows)


@dataclass(frozen=True)
class StepTimes:
    """Holds the times of a step and of its parts, in seconds.

    Each part is timed alone, so their sum is not the step.

    Attributes:
        step: A step on the device, where steps queue up.
        read: A step with the host, which reads the drawn tokens before the next step.
        call: The time until a call returns.
        matmuls: The model without attention.
        attention: The attention of all layers, which write their keys and values first.
        sampler: The sampler.
        bytes_read: The bytes of weights, keys and values that a step reads at least once.
    """

    step: float
    read: float
    call: float
    matmuls: float
    attention: float
    sampler: float
    bytes_read: int

    @property
    def host_gap(self) -> float:
        """Returns the time that reading the drawn tokens adds to a step."""
        return max(0.0, self.read - self.step)


def time_step(
    case: StepCase, *, backend: str = "auto", dtype: str = "bfloat16", round_s: float = 0.1
) -> StepTimes:
    """Compiles and times a case and its parts on JAX's first device.

    Args:
        case: The step.
        backend: The kernel set.
        dtype: The type of weights and pages.
        round_s: The time of each of the rounds whose median counts.
    """
    shapes = step_shapes(
        case.bucket,
        backend=backend,
        config=case.config,
        num_layers=case.num_layers,
        num_blocks=case.num_blocks,
        block_size=BLOCK_SIZE,
        dtype=dtype,
    )
    parts = _Parts(case, shapes, backend, dtype)
    parameters, packed = draw_weights(shapes.arguments[0]), parts.packed
    neutral = jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes.arguments[3])
    state = [jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes.arguments[1])]
    step = compile_ahead(shapes.step, *shapes.arguments)
    called = []

    def run() -> Any:
        began = time.perf_counter()
        output, state[0] = step(parameters, state[0], packed, neutral)
        called.append(time.perf_counter() - began)
        return output.drawn

    queued = _seconds(run, round_s)
    called.clear()  # a call waits where too many are queued
    read = _seconds(lambda: np.asarray(run()), round_s)
    target, hidden = parameters["target"], parts.q_TNH()
    attend = compile_ahead(jax.jit(parts.attention, donate_argnums=0), state[0], packed, hidden)

    def run_attention() -> Any:
        out, state[0] = attend(state[0], packed, hidden)
        return out

    logits = jnp.zeros((case.bucket.num_draws, case.config["vocab_size"]), jnp.float32)
    logits = logits.at[:, ::7].set(1.0)
    matmuls = compile_ahead(jax.jit(parts.matmuls), target, packed)
    sampler = compile_ahead(jax.jit(parts.sampler), logits, packed, neutral)
    return StepTimes(
        step=queued,
        read=read,
        call=statistics.median(called),
        attention=_seconds(run_attention, round_s),
        matmuls=_seconds(lambda: matmuls(target, packed), round_s),
        sampler=_seconds(lambda: sampler(logits, packed, neutral), round_s),
        bytes_read=parts.bytes_read(shapes),
    )


class _Parts:
    """Holds the parts of a case's step as functions to compile, and the step's packed input."""

    def __init__(self, case: StepCase, shapes: StepShapes, backend: str, dtype: str):
        config = (
            case.config
            if case.num_layers is None
            else {**case.config, "num_hidden_layers": case.num_layers}
        )
        family = load_family(config)
        self.case, self.spec = case, family.Spec.from_config(config)
        self.graph, _ = abstract_model(family, self.spec, jnp.dtype(dtype))
        self.tables = TableShape(1, -(-self.spec.max_position_embeddings // BLOCK_SIZE))
        self.backend, self.dtype, self.num_layers = (
            Backend(backend),
            jnp.dtype(dtype),
            shapes.num_layers,
        )
        menu = BucketMenu(decode=(case.bucket,), chunk=(case.bucket,))
        blocks = [range(1, case.num_blocks)]
        builder = BatchBuilder(
            menu,
            table_width=self.tables.width,
            block_size=BLOCK_SIZE,
            blocks=blocks,
            vocab_size=self.spec.vocab_size,
        )
        self.packed = builder.build(self._plan()).packed

    def _plan(self) -> StepPlan:
        case, width = self.case, self.case.blocks_per_row
        new = case.chunk or 1
        tables = [
            tuple(range(1 + row * width, 1 + (row + 1) * width))
            for row in range(1 if case.chunk else case.rows)
        ]
        rows = tuple(
            Row(number, case.context - new, (3,) * new, (table,))
            for number, table in enumerate(tables)
        )
        params = SAMPLING[case.sampling]
        samples = [
            Sample(number, new - 1, number, params, number, 0, case.context)
            for number in range(len(rows))
        ]
        return StepPlan(0, rows, tuple(samples))

    def q_TNH(self) -> jax.Array:
        return jnp.ones(
            (self.case.bucket.num_tokens, self.spec.num_query_heads, self.spec.kv.head_dim),
            self.dtype,
        )

    def attention(self, pages: Any, packed: jax.Array, q_TNH: jax.Array) -> tuple[jax.Array, Any]:
        inputs = unpack(packed, self.case.bucket, self.tables)
        layer_groups = (0,) * self.num_layers
        attend = make_attend(
            inputs, backend=self.backend, bucket=self.case.bucket, layer_groups=layer_groups
        )
        written, options = [], AttentionOptions(scale=q_TNH.shape[2] ** -0.5)
        for layer, layer_pages in enumerate(pages):
            kv_TKH = q_TNH[:, : self.spec.kv.num_kv_heads]
            q_TNH, new = attend(layer, q_TNH, kv_TKH, kv_TKH, layer_pages, options)
            written.append(new)
        return q_TNH, tuple(written)

    def matmuls(self, parameters: Any, packed: jax.Array) -> jax.Array:
        inputs = unpack(packed, self.case.bucket, self.tables)

        def skip(
            layer: int, q: jax.Array, k: Any, v: Any, pages: Any, options: AttentionOptions, /
        ) -> Any:
            return q, pages

        model = nnx.merge(self.graph, parameters)
        hidden_TD, *_ = model(
            inputs.token_ids_T, (None,) * self.num_layers, ForwardContext(inputs.positions_T, skip)
        )
        logits: jax.Array = model.logits(hidden_TD[inputs.draws.drawn_token_R])
        return logits

    def sampler(self, logits: jax.Array, packed: jax.Array, neutral: Any) -> jax.Array:
        with selection_kernels(self.backend):
            return draw(
                logits, unpack(packed, self.case.bucket, self.tables), neutral, by_row=False
            )

    def bytes_read(self, shapes: StepShapes) -> int:
        """Returns the bytes of weights, keys and values that a step reads at least once.

        The embedding counts only where the head is tied to it; keys and values count for what the
        rows see.
        """
        leaves = jax.tree.leaves(shapes.arguments[0])
        weights: int = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
        if not self.spec.tie_word_embeddings:
            weights -= self.spec.vocab_size * self.spec.hidden_size * self.dtype.itemsize
        rows = 1 if self.case.chunk else self.case.rows
        per_block = shapes.pages_bytes // self.case.num_blocks
        return weights + rows * self.case.blocks_per_row * per_block


def random_model(config: Mapping[str, Any], dtype: str) -> nnx.Module:
    """Returns the model that a config.json describes, with random weights made on the device."""
    family = load_family(config)
    graph, shapes = abstract_model(family, family.Spec.from_config(config), jnp.dtype(dtype))
    module: nnx.Module = nnx.merge(graph, draw_weights(shapes))
    return module


def draw_weights(shapes: Any) -> Any:
    """Returns random weights with which values neither vanish nor grow without bound."""
    normal = jax.jit(
        lambda key, shape, dtype: (0.02 * jax.random.normal(key, shape, jnp.float32)).astype(dtype),
        static_argnums=(1, 2),
    )
    leaves, tree = jax.tree.flatten(shapes)
    return jax.tree.unflatten(
        tree,
        [
            normal(jax.random.key(index), leaf.shape, leaf.dtype)
            for index, leaf in enumerate(leaves)
        ],
    )


def _seconds(run: Callable[[], Any], round_s: float) -> float:
    """Times one call, the device's work included.

    The time is the median of rounds, each of so many calls that they take about `round_s`.
    """

    def round_of(count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            last = run()
        jax.block_until_ready(last)
        return (time.perf_counter() - began) / count

    round_of(2)  # the first call may make a CUDA graph
    count = max(1, min(1000, round(round_s / max(round_of(2), 1e-6))))
    return statistics.median(round_of(count) for _ in range(ROUNDS))


def cells(case: StepCase, times: StepTimes) -> list[str]:
    """Returns the cells of a case, in the order of `COLUMNS`."""
    parts = (times.step, times.matmuls, times.attention, times.sampler, times.host_gap, times.call)
    return [
        str(case),
        *(f"{1e3 * part:.3f}" for part in parts),
        f"{times.bytes_read / times.step / 1e9:.0f}",
    ]


COLUMNS = ["step", "ms", "products", "attention", "sampler", "host gap", "call", "GB/s"]


def usual_cases(models: list[str], num_layers: int | None = None) -> Iterator[StepCase]:
    """Yields the usual cases, the most important first."""
    for model in models:
        yield StepCase(model, 2, 1024, num_layers=num_layers)
        yield StepCase(model, 64, 1024, sampling="top_p", num_layers=num_layers)
        yield StepCase(model, CHUNK_ROWS, 2048, chunk=2048, num_layers=num_layers)
        yield StepCase(model, 64, 1024, num_layers=num_layers)
        yield StepCase(model, 2, 8192, sampling="random", num_layers=num_layers)
