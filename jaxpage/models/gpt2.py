"""GPT-2 (Radford et al., 2019): norms first, learned positions, one product for queries, keys and values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxpage.layers.attention import Attend, LayerPages
from jaxpage.layers.embedding import Embedding
from jaxpage.layers.linear import Linear
from jaxpage.layers.mlp import MLP
from jaxpage.layers.norms import LayerNorm
from jaxpage.models.base import Hidden, KVSpec, Pages, run_layers
from jaxpage.models.fields import Fields
from jaxpage.models.weights import Path, Weight, WeightTable

ignored = ("*.attn.bias", "*.attn.masked_bias")  # causal masks that old checkpoints carry

_ALIASES = {
    "n_embd": "hidden_size",
    "n_positions": "max_position_embeddings",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
}


@dataclass(frozen=True, kw_only=True)
class Spec:
    """`GPT2Config`. `reorder_and_upcast_attn` asks for scores in float32, which is always so here."""

    vocab_size: int
    model_width: int
    feed_forward_width: int
    num_query_heads: int
    max_position_embeddings: int
    kv: KVSpec
    activation: str
    norm_epsilon: float
    attention_scales: tuple[float, ...]  # per layer
    tie_word_embeddings: bool

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Spec:
        fields = Fields(config, "gpt2", _ALIASES)
        num_heads, num_layers, width = (fields.integer(name) for name in ("n_head", "n_layer", "n_embd"))
        head_width = fields.divided("n_embd", "n_head")
        scale = head_width**-0.5 if fields.flag("scale_attn_weights", True) else 1.0
        by_layer = fields.flag("scale_attn_by_inverse_layer_idx", False)
        fields.flag("reorder_and_upcast_attn", False)
        return cls(
            vocab_size=fields.integer("vocab_size"),
            model_width=width,
            feed_forward_width=fields.optional_integer("n_inner", None) or 4 * width,
            num_query_heads=num_heads,
            max_position_embeddings=fields.integer("n_positions", 1024),
            kv=KVSpec(num_layers, num_heads, head_width, (None,) * num_layers),
            activation=fields.activation("activation_function", "gelu_new"),
            norm_epsilon=fields.number("layer_norm_epsilon", 1e-5),
            attention_scales=tuple(scale / (index + 1 if by_layer else 1) for index in range(num_layers)),
            tie_word_embeddings=fields.flag("tie_word_embeddings", True),
        )


class FusedAttention(nnx.Module):
    """Attention whose queries, keys and values come out of one product, side by side."""

    def __init__(self, spec: Spec, *, scale: float, dtype: DTypeLike):
        width = spec.model_width
        self.query_key_value = Linear(width, 3 * width, bias=True, dtype=dtype)
        self.output = Linear(width, width, bias=True, dtype=dtype)
        self.head_width = spec.kv.head_width
        self.scale = scale

    def __call__(
        self, x_TD: Float[Array, "T D"], layer_pages: LayerPages, attend: Attend
    ) -> tuple[Float[Array, "T D"], LayerPages]:
        parts = jnp.split(self.query_key_value(x_TD), 3, axis=-1)
        q_TNH, k_TNH, v_TNH = (part.reshape(x_TD.shape[0], -1, self.head_width) for part in parts)
        out_TNH, layer_pages = attend(q_TNH, k_TNH, v_TNH, layer_pages, scale=self.scale)
        return self.output(out_TNH.reshape(x_TD.shape)), layer_pages


class DecoderLayer(nnx.Module):
    """`x + attention(norm(x))`, then `x + mlp(norm(x))`."""

    def __init__(self, spec: Spec, *, scale: float, dtype: DTypeLike):
        width, epsilon = spec.model_width, spec.norm_epsilon
        self.attention_norm = LayerNorm(width, epsilon=epsilon, dtype=dtype)
        self.attention = FusedAttention(spec, scale=scale, dtype=dtype)
        self.mlp_norm = LayerNorm(width, epsilon=epsilon, dtype=dtype)
        self.mlp = MLP(width, spec.feed_forward_width, activation=spec.activation, bias=True, dtype=dtype)

    def __call__(
        self, x_TD: Float[Array, "T D"], layer_pages: LayerPages, attend: Attend
    ) -> tuple[Float[Array, "T D"], LayerPages]:
        attended_TD, layer_pages = self.attention(self.attention_norm(x_TD), layer_pages, attend)
        x_TD = x_TD + attended_TD
        return x_TD + self.mlp(self.mlp_norm(x_TD)), layer_pages


class Model(nnx.Module):
    """See `models.base.Model`."""

    def __init__(self, spec: Spec, *, dtype: DTypeLike):
        width = spec.model_width
        self.tokens = Embedding(spec.vocab_size, width, dtype=dtype)
        self.positions = Embedding(spec.max_position_embeddings, width, dtype=dtype)
        self.layers = nnx.List([DecoderLayer(spec, scale=scale, dtype=dtype) for scale in spec.attention_scales])
        self.norm = LayerNorm(width, epsilon=spec.norm_epsilon, dtype=dtype)
        self.head = None if spec.tie_word_embeddings else Embedding(spec.vocab_size, width, dtype=dtype)

    def __call__(
        self,
        token_ids_T: Int[Array, "T"],
        positions_T: Int[Array, "T"],
        pages: Pages,
        attend: Attend,
        taps: Sequence[int] = (),
    ) -> Hidden:
        hidden_TD = self.tokens(token_ids_T) + self.positions(positions_T)
        layers = [partial(layer, attend=attend) for layer in self.layers]
        return run_layers(layers, self.norm, hidden_TD, pages, taps)

    def logits(self, hidden_BD: Float[Array, "B D"]) -> Float[Array, "B V"]:
        return (self.head or self.tokens).logits(hidden_BD)


def weights(spec: Spec) -> list[Weight]:
    table = WeightTable(prefix="transformer.")
    width = spec.model_width
    table.add_embeddings("transformer.wte.weight", spec.vocab_size, width, tied=spec.tie_word_embeddings)
    table.add(("positions", "table"), "transformer.wpe.weight", spec.max_position_embeddings, width)
    for index in range(spec.kv.num_layers):
        _add_layer(table, spec, ("layers", index), f"transformer.h.{index}")
    table.add_layer_norm(("norm",), "transformer.ln_f", width)
    return table


def _add_layer(table: WeightTable, spec: Spec, path: Path, name: str) -> None:
    width, feed_forward = spec.model_width, spec.feed_forward_width
    table.add_layer_norm((*path, "attention_norm"), f"{name}.ln_1", width)
    table.add_conv1d((*path, "attention", "query_key_value"), f"{name}.attn.c_attn", width, 3 * width)
    table.add_conv1d((*path, "attention", "output"), f"{name}.attn.c_proj", width, width)
    table.add_layer_norm((*path, "mlp_norm"), f"{name}.ln_2", width)
    table.add_conv1d((*path, "mlp", "up"), f"{name}.mlp.c_fc", width, feed_forward)
    table.add_conv1d((*path, "mlp", "down"), f"{name}.mlp.c_proj", feed_forward, width)
