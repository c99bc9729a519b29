"""Multi-head attention around the seam `attend`, behind which the device room keeps keys and values in paged memory."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import jax
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxpage.layers.linear import Linear
from jaxpage.layers.norms import RMSNorm
from jaxpage.layers.rope import Angles

LayerPages = Any  # keys and values of one layer: opaque here, given to `attend` and handed on as it returns them


@runtime_checkable
class Attend(Protocol):
    """Write new keys and values, attend with the queries, return the output and the pages."""

    def __call__(
        self,
        q_TNH: jax.Array,
        k_TKH: jax.Array,
        v_TKH: jax.Array,
        layer_pages: LayerPages,
        /,
        *,
        scale: float,
        sliding_window: int | None = None,
    ) -> tuple[jax.Array, LayerPages]:
        """Attend causally to the own sequence: `softmax(scale * q . k) v`, with the softmax in float32.

        Keys come after the rotary embedding. Query head n uses key/value head n // (N / K).
        sliding_window: W positions, the query's own included: a query at p sees keys at p - W < position <= p.
        None: all positions up to p.
        """


class Attention(nnx.Module):
    """Products for queries, keys, values and output; optional norms of queries and keys; optional rotation."""

    def __init__(
        self,
        width: int,
        *,
        num_query_heads: int,
        num_kv_heads: int,
        head_width: int,
        input_bias: bool,
        output_bias: bool,
        head_norm_epsilon: float | None = None,
        input_width: int | None = None,  # where it is not that of the output
        dtype: DTypeLike,
    ):
        num_in = input_width or width
        self.query = Linear(num_in, num_query_heads * head_width, bias=input_bias, dtype=dtype)
        self.key = Linear(num_in, num_kv_heads * head_width, bias=input_bias, dtype=dtype)
        self.value = Linear(num_in, num_kv_heads * head_width, bias=input_bias, dtype=dtype)
        self.output = Linear(num_query_heads * head_width, width, bias=output_bias, dtype=dtype)
        epsilon = head_norm_epsilon
        self.query_norm = None if epsilon is None else RMSNorm(head_width, epsilon=epsilon, dtype=dtype)
        self.key_norm = None if epsilon is None else RMSNorm(head_width, epsilon=epsilon, dtype=dtype)
        self.head_width = head_width

    def __call__(
        self,
        x_TI: Float[Array, "T I"],
        layer_pages: LayerPages,
        attend: Attend,
        *,
        angles: Angles | None = None,
        sliding_window: int | None = None,
    ) -> tuple[Float[Array, "T D"], LayerPages]:
        q_TNH, k_TKH, v_TKH = (self._heads(product(x_TI)) for product in (self.query, self.key, self.value))
        if self.query_norm is not None and self.key_norm is not None:
            q_TNH, k_TKH = self.query_norm(q_TNH), self.key_norm(k_TKH)
        if angles is not None:
            q_TNH, k_TKH = angles.rotate(q_TNH), angles.rotate(k_TKH)
        scale = self.head_width**-0.5
        out_TNH, layer_pages = attend(q_TNH, k_TKH, v_TKH, layer_pages, scale=scale, sliding_window=sliding_window)
        return self.output(out_TNH.reshape(x_TI.shape[0], -1)), layer_pages

    def _heads(self, x: Float[Array, "T X"]) -> Float[Array, "T heads H"]:
        return x.reshape(x.shape[0], -1, self.head_width)
