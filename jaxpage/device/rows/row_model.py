"""Computes the logits of rows of tokens with the operations of steps, and their derivatives.

Kernels have no derivatives, so a value is the engine's, and its derivative is that of the dense
pass (`dense`), which has the same layers, and the experts that the value's routers chose.

XLA on CPU rounds an operation in another way where it joins it with others, or where it knows a
number while it compiles. So barriers keep what is around a step out of it, as in `layers.routing`.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.custom_derivatives import SymbolicZero
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxpage.device.attention import make_attend, make_layer_kernels, make_rotate_and_write
from jaxpage.device.hardware.backends import Backend
from jaxpage.device.packing import panels_of_weights
from jaxpage.device.pages.kv_pages import KVPages, page_shapes
from jaxpage.device.recurrence import make_recur
from jaxpage.device.rows.dense import dense_logits
from jaxpage.device.rows.division import BLOCK_SIZE, Division, divide_rows
from jaxpage.device.selection_kernels import selection_kernels
from jaxpage.device.steps import SCORED_AT_ONCE
from jaxpage.device.token_logprobs import log_probabilities
from jaxpage.layers.context import ForwardContext
from jaxpage.layers.trace_scope import Routes, TraceScope, adapters_of
from jaxpage.models import KVSpec, abstract

ChosenExperts = tuple[Int[Array, "T X"], ...]  # by router


class RowModel:
    """Computes a model over rows of tokens, each from position 0.

    Attributes:
        shapes: The shapes and types of the parameters, as `abstract` gives them.
        exact: True if values have the bits of steps, False if they are those of the dense pass.
        backend: The kernels.
    """

    def __init__(
        self,
        module: nnx.Module,
        kv: KVSpec,
        backend: Backend,
        page_dtype: DTypeLike,
        *,
        exact: bool = True,
        lora_slot: int = 0,
    ) -> None:
        """Puts weights in panels where the kernels multiply by such; it changes the module.

        Args:
            module: The model.
            kv: What its layers keep.
            backend: The kernels.
            page_dtype: The type of the pages.
            exact: False computes values in the dense pass, too.
            lora_slot: 1 if the module has one slot for adapters, which is that of all tokens; 0 if
                it takes none.
        """
        self.exact = exact
        self._lora_slot = lora_slot
        self._dense_graph, self.shapes = abstract(module)
        self._packings = backend.pack_modules(module)
        self._graph, _ = abstract(module)
        self._kv = kv
        self.backend = backend
        self._page_dtype = page_dtype
        self._by_row = jax.default_backend() == "cpu"
        # Operations that are not compiled together would be rounded in another way.
        # Under `vmap` rows are computed one after another, in the shapes of steps and with their
        # bits.
        self._compute = jax.custom_batching.sequential_vmap(jax.jit(self._compute_steps))

    def logits(self, parameters: Any, token_ids_RC: Int[Array, "R C"]) -> Float[Array, "R C V"]:
        """Returns the logits after each token. They have the bits of steps, and derivatives.

        Raises:
            TypeError: A parameter has another type than the module's, for exact values.
        """
        if self.exact:
            jax.tree.map_with_path(_check_type, self.shapes, parameters)
            logits_TV = _with_dense_derivative(self, parameters, token_ids_RC)
        else:
            logits_TV = self.dense_logits(parameters, token_ids_RC)
        return logits_TV.reshape(*token_ids_RC.shape, -1)

    def dense_logits(
        self,
        parameters: Any,
        token_ids_RC: Int[Array, "R C"],
        chosen: ChosenExperts | None = None,
    ) -> Float[Array, "T V"]:
        """Returns the logits in plain operations of XLA; see `dense.dense_logits`."""
        model = nnx.merge(self._dense_graph, parameters)
        has_adapter = self._lora_slot > 0
        return dense_logits(
            model, self._kv.num_layers, token_ids_RC, chosen, has_adapter=has_adapter
        )

    def log_probabilities(
        self, logits_BV: Float[Array, "B V"], token_ids_B: Int[Array, "B"]
    ) -> Float[Array, "B"]:
        """Returns the log probability of a token of each row, with the bits of the sampler."""
        return _with_derivative_of_softmax(self, logits_BV, token_ids_B)

    def _compute_steps(
        self, parameters: Any, token_ids_RC: jax.Array
    ) -> tuple[jax.Array, ChosenExperts]:
        """Returns the logits [R C, V], and which experts the routers chose."""
        division = divide_rows(*token_ids_RC.shape)
        panels = panels_of_weights(parameters, self._packings)
        model = nnx.merge(self._graph, jax.lax.optimization_barrier(panels))
        step = functools.partial(self._step, model, division)
        shapes = page_shapes(
            self._kv,
            division.num_blocks,
            BLOCK_SIZE,
            self._page_dtype,
            interleaved=self.backend.interleaved,
        )
        pages = jax.tree.map(lambda page: jnp.zeros(page.shape, page.dtype), shapes)
        _, of_steps = jax.lax.scan(step, pages, division.divide(token_ids_RC))
        hidden_TD, *chosen = map(division.join, of_steps)
        return self._logits(model, hidden_TD), tuple(chosen)

    def _step(
        self, model: Any, division: Division, pages: KVPages, tokens: tuple[jax.Array, jax.Array]
    ) -> tuple[KVPages, tuple[jax.Array, ...]]:
        """Returns the pages, and the hidden states of the tokens and their experts."""
        inputs = division.inputs(*tokens, self._lora_slot)
        pages, inputs = jax.lax.optimization_barrier((pages, inputs))
        groups = (0,) * self._kv.num_layers
        attend = make_attend(
            inputs, backend=self.backend, bucket=division.bucket, layer_groups=groups
        )
        recur = make_recur(inputs, layer_groups=groups, by_row=self._by_row)
        rotate_and_write = make_rotate_and_write(inputs, backend=self.backend, layer_groups=groups)
        context = ForwardContext(
            inputs.positions_T, attend, recur=recur, rotate_and_write=rotate_and_write
        )
        routes = Routes()
        with self._scope(inputs.lora_slot_T, routes).open():
            hidden_TD, pages, _ = model(inputs.token_ids_T, pages, context)
        return jax.lax.optimization_barrier((pages, (hidden_TD, *routes.chosen)))

    def _logits(self, model: Any, hidden_TD: jax.Array) -> jax.Array:
        """Returns the logits of hidden states, in the tiles of steps that score."""
        slot_B = jnp.full(SCORED_AT_ONCE, self._lora_slot)

        def of_tile(hidden_BD: jax.Array) -> jax.Array:
            hidden_BD, lora_slot_B = jax.lax.optimization_barrier((hidden_BD, slot_B))
            with self._scope(lora_slot_B).open():
                logits_BV: jax.Array = jax.lax.optimization_barrier(model.logits(hidden_BD))
            return logits_BV

        num_tokens, width = hidden_TD.shape
        padded = jnp.pad(hidden_TD, ((0, -num_tokens % SCORED_AT_ONCE), (0, 0)))
        tiles = jax.lax.map(of_tile, padded.reshape(-1, SCORED_AT_ONCE, width))
        return tiles.reshape(len(padded), -1)[:num_tokens]

    def _scope(self, lora_slot_T: jax.Array, routes: Routes | None = None) -> TraceScope:
        adapters = adapters_of(lora_slot_T, self._lora_slot)
        return TraceScope(make_layer_kernels(self.backend), adapters, routes=routes)

    @functools.partial(jax.jit, static_argnums=0)
    def _log_probabilities(self, logits_BV: jax.Array, token_ids_B: jax.Array) -> jax.Array:
        rows = jax.lax.optimization_barrier((logits_BV, token_ids_B))
        with selection_kernels(self.backend):
            logprobs_B, *_ = log_probabilities(*rows, by_row=self._by_row)
        return jax.lax.optimization_barrier(logprobs_B)


def _check_type(path: Any, shape: jax.ShapeDtypeStruct, array: jax.Array) -> None:
    if jnp.result_type(array) != shape.dtype:
        name = jax.tree_util.keystr(path)
        raise TypeError(
            f"parameters{name} is {jnp.result_type(array)}, but the model computes in "
            f"{shape.dtype}: cast it, or load the model with another dtype"
        )


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _with_dense_derivative(rows: RowModel, parameters: Any, token_ids_RC: jax.Array) -> jax.Array:
    logits_TV, _ = rows._compute(parameters, token_ids_RC)
    return logits_TV


def _differentiate_logits(
    rows: RowModel, primals: tuple[Any, jax.Array], tangents: tuple[Any, Any]
) -> tuple[jax.Array, jax.Array]:
    """Differentiates with respect to the parameters that change; the others may be frozen."""
    parameters, token_ids_RC = primals
    logits_TV, chosen = rows._compute(parameters, token_ids_RC)
    arrays, structure = jax.tree.flatten(parameters)
    changes = dict(enumerate(jax.tree.leaves(tangents[0])))
    changes = {at: change for at, change in changes.items() if not isinstance(change, SymbolicZero)}

    def of_changing(changing: dict[int, jax.Array]) -> jax.Array:
        whole = [changing.get(at, array) for at, array in enumerate(arrays)]
        return rows.dense_logits(jax.tree.unflatten(structure, whole), token_ids_RC, chosen)

    changing = {at: arrays[at] for at in changes}
    _, change_TV = jax.jvp(of_changing, (changing,), (changes,))
    return logits_TV, change_TV


_with_dense_derivative.defjvp(_differentiate_logits, symbolic_zeros=True)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _with_derivative_of_softmax(
    rows: RowModel, logits_BV: jax.Array, token_ids_B: jax.Array
) -> jax.Array:
    return rows._log_probabilities(logits_BV, token_ids_B)


@_with_derivative_of_softmax.defjvp
def _differentiate_log_probabilities(
    rows: RowModel, primals: tuple[jax.Array, jax.Array], tangents: tuple[Any, Any]
) -> tuple[jax.Array, jax.Array]:
    logits_BV, token_ids_B = primals

    def of_logits(logits_BV: jax.Array) -> jax.Array:
        normalised_BV = jax.nn.log_softmax(logits_BV)
        return jnp.take_along_axis(normalised_BV, token_ids_B[:, None], axis=1)[:, 0]

    _, change_B = jax.jvp(of_logits, (logits_BV,), tangents[:1])
    return _with_derivative_of_softmax(rows, logits_BV, token_ids_B), change_B
