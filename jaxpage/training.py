"""Gives a trainer the forward pass of generation, as a differentiable function: `TrainableModel`.

The layers, the parameters and their names are those of the engine. Attention is computed densely
over whole rows of tokens and not over pages, so log probabilities differ from the engine's in the
last bits: docs/guides/weights.md has measured differences.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxpage.checkpoints import ModelFiles, load_weights
from jaxpage.checkpoints.in_memory import ModelConfig, name_parameters, open_parameters
from jaxpage.errors import UnsupportedError
from jaxpage.layers.context import Attend, AttentionOptions, ForwardContext, Recur, Recurrence
from jaxpage.layers.experts import Experts
from jaxpage.models import abstract, make_model

# A nested dict of arrays; some of them join several arrays of the checkpoint.
Parameters = dict[Any, Any]


@dataclass(frozen=True, eq=False)
class TrainableModel:
    """Computes a model as functions of its parameters, which are a pytree.

    All functions may be jitted and differentiated.

    Attributes:
        dtype: The type of the parameters.
    """

    _files: ModelFiles
    _graph: Any
    dtype: str

    @classmethod
    def load(
        cls, config: ModelConfig, parameters: Mapping[str, Any], *, dtype: str = "float32"
    ) -> tuple[Self, Parameters]:
        """Returns the model, and its parameters in `dtype`.

        Args:
            config: The content of the model's config.json as a dict, or a config of transformers.
            parameters: Arrays under the names of Hugging Face, as for `LLM.from_parameters`; the
                result of `LLM.parameters()` is accepted.
            dtype: The type of the parameters.

        Raises:
            CheckpointError: Something does not fit; the message lists everything.
            UnsupportedError: The weights are quantised, or the model has a mixture of experts,
                whose loop over the routed tokens has no derivative.
        """
        files = open_parameters(config, parameters)
        if files.quantization is not None:
            raise UnsupportedError(
                f"quantised weights ({files.quantization.described}) cannot be trained"
            )
        model = make_model(files.family, files.spec, dtype, None)
        if any(isinstance(module, Experts) for _, module in nnx.iter_modules(model)):
            raise UnsupportedError(
                "mixtures of experts cannot be trained: their loop has no derivative"
            )
        graph, _ = abstract(model)
        return cls(files, graph, dtype), load_weights(files.plan, dtype, jnp.asarray)

    def named(self, parameters: Parameters) -> dict[str, jax.Array]:
        """Returns the parameters by Hugging Face's names, for `LLM.update_parameters`."""
        return name_parameters(self._files.plan, parameters)

    def logits(
        self, parameters: Parameters, token_ids_RC: Int[Array, "R C"]
    ) -> Float[Array, "R C V"]:
        """Returns the float32 logits of rows of C tokens, each from position 0.

        Tokens after the end of a row (padding) change nothing before it. The ids are not checked
        while they are traced.

        Args:
            parameters: The parameters.
            token_ids_RC: The rows, of one length.

        Raises:
            TypeError: The token ids are no rows of integers.
            ValueError: An id is none of the model's.
        """
        token_ids = token_ids_RC
        token_ids_RC = jnp.asarray(token_ids_RC)
        if (
            token_ids_RC.ndim != 2
            or not token_ids_RC.size
            or not jnp.issubdtype(token_ids_RC.dtype, jnp.integer)
        ):
            form = f"shape {token_ids_RC.shape} and dtype {token_ids_RC.dtype}"
            raise TypeError(
                f"token_ids must be integers in rows [R, C], at least one of each; got {form}"
            )
        if not isinstance(token_ids_RC, jax.core.Tracer) and token_ids_RC.is_fully_addressable:
            ids = np.asarray(token_ids)
            vocab_size = self._files.spec.vocab_size
            if (wrong := ids[(ids < 0) | (ids >= vocab_size)]).size:
                raise ValueError(
                    f"token_ids has {wrong[0]}, but the model's token ids are 0 to {vocab_size - 1}"
                )
        num_rows, length = token_ids_RC.shape
        model = nnx.merge(self._graph, parameters)
        positions_T = jnp.tile(jnp.arange(length), num_rows)
        pages = (None,) * self._files.spec.kv.num_layers
        context = ForwardContext(positions_T, dense_attend(num_rows), recur=dense_recur(num_rows))
        hidden_TD, _, _ = model(token_ids_RC.reshape(-1), pages, context)
        logits_RCV: jax.Array = model.logits(hidden_TD).reshape(num_rows, length, -1)
        return logits_RCV

    def log_probabilities(
        self, parameters: Parameters, token_ids_RC: Int[Array, "R C"]
    ) -> Float[Array, "R C-1"]:
        """Returns each token's log probability, from the second on, given those before it.

        They are natural logarithms at temperature 1. The errors are those of `logits`.
        """
        logprobs_RCV = jax.nn.log_softmax(self.logits(parameters, token_ids_RC)[:, :-1])
        return jnp.take_along_axis(logprobs_RCV, jnp.asarray(token_ids_RC)[:, 1:, None], axis=-1)[
            ..., 0
        ]


def dense_attend(num_rows: int) -> Attend:
    """Returns attention over rows of equal length, without pages.

    It computes the definition in float32, with all scores in memory. In place of pages it returns
    the keys and values, for layers that read those of another one.
    """

    def attend(
        layer_index: int,
        q_TNH: jax.Array,
        k_TKH: jax.Array | None,
        v_TKH: jax.Array | None,
        layer_pages: Any,
        options: AttentionOptions,
        /,
    ) -> tuple[jax.Array, Any]:
        if k_TKH is None:
            k_TKH, v_TKH = layer_pages
        assert k_TKH is not None
        sinks = options.sinks
        softcap = options.logit_softcap
        num_kv_heads, head_dim = k_TKH.shape[1:]
        length = len(q_TNH) // num_rows
        q = q_TNH.astype(jnp.float32).reshape(num_rows, length, num_kv_heads, -1, head_dim)
        new_pages = k_TKH, k_TKH if v_TKH is None else v_TKH
        k, v = (
            part.astype(jnp.float32).reshape(num_rows, length, num_kv_heads, head_dim)
            for part in new_pages
        )
        scores = options.scale * jnp.einsum(
            "rqkgh,rckh->rkgqc", q, k, precision=jax.lax.Precision.HIGHEST
        )
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        back = jnp.arange(length)[:, None] - jnp.arange(length)
        if options.alibi_slopes is not None:
            slopes = options.alibi_slopes.reshape(num_kv_heads, -1, 1, 1)
            scores = scores - slopes * back
        seen = (back >= 0) & (back < (options.sliding_window or length))
        if options.attention_chunk is not None:
            chunk_C = jnp.arange(length) // options.attention_chunk
            seen &= chunk_C[:, None] == chunk_C
        scores = jnp.where(seen, scores, -jnp.inf)
        if sinks is not None:
            of_heads = sinks.astype(jnp.float32).reshape(1, num_kv_heads, -1, 1, 1)
            scores = jnp.concatenate(
                [scores, jnp.broadcast_to(of_heads, (*scores.shape[:-1], 1))], axis=-1
            )
        weights = jax.nn.softmax(scores, axis=-1)[..., :length]
        v = v[..., : options.value_width]
        out = jnp.einsum("rkgqc,rckh->rqkgh", weights, v, precision=jax.lax.Precision.HIGHEST)
        return out.reshape(*q_TNH.shape[:2], -1).astype(q_TNH.dtype), (k_TKH, v_TKH)

    return attend


def dense_recur(num_rows: int) -> Recur:
    """Returns the recurrence over rows of equal length, without pages."""

    def recur(
        layer_index: int, x_TE: jax.Array, recurrence: Recurrence, layer_pages: Any, /
    ) -> tuple[jax.Array, Any]:
        lookback = recurrence.state.lookback
        x_RCE = x_TE.reshape(num_rows, -1, x_TE.shape[1])
        padded = jnp.pad(x_RCE, ((0, 0), (lookback, 0), (0, 0)))
        update = recurrence.update
        if update is None or recurrence.state.shape is None:
            length = x_RCE.shape[1]
            inputs = [padded[:, place : place + length] for place in range(1 + lookback)]
            inputs_TWE = jnp.stack(inputs, axis=2).reshape(len(x_TE), 1 + lookback, -1)
            return recurrence.prepare(inputs_TWE), layer_pages

        def token(states: jax.Array, place: jax.Array) -> tuple[jax.Array, jax.Array]:
            inputs_RWE = jax.lax.dynamic_slice_in_dim(padded, place, 1 + lookback, axis=1)
            return update(states, recurrence.prepare(inputs_RWE))

        states = jnp.zeros((num_rows, *recurrence.state.shape))
        _, out_CRO = jax.lax.scan(token, states, jnp.arange(x_RCE.shape[1]))
        return out_CRO.swapaxes(0, 1).reshape(len(x_TE), -1), layer_pages

    return recur
