"""GPT-2 (Radford et al., 2019) has norms first, and learned positions.

Queries, keys and values come from one product.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxpage.layers.attention import Attention, Projections, Scores
from jaxpage.layers.context import ForwardContext, LayerPages
from jaxpage.layers.embedding import Embedding, token_tables
from jaxpage.layers.linear import Linear, Part, linear
from jaxpage.layers.mlp import MLP
from jaxpage.layers.norms import LayerNorm
from jaxpage.models.base import Hidden, KVSpec, Pages, run_layers
from jaxpage.models.fields import Fields

prefix = "transformer."
# The causal masks that old checkpoints carry.
ignored = ("*.attn.bias", "*.attn.masked_bias", "*.crossattention.bias")

_ALIASES = {
    "n_embd": "hidden_size",
    "n_positions": "max_position_embeddings",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
}


@dataclass(frozen=True, kw_only=True)
class Spec:
    """Holds the fields of transformers' `GPT2Config`.

    `reorder_and_upcast_attn` asks for scores in float32, which they always are here.
    """

    vocab_size: int
    hidden_size: int
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
        """Returns the spec of a config.json."""
        with Fields(config, "gpt2", _ALIASES) as fields:
            num_heads, num_layers, width = (
                fields.integer(name) for name in ("n_head", "n_layer", "n_embd")
            )
            head_dim = fields.divide("n_embd", "n_head")
            scale = head_dim**-0.5 if fields.flag("scale_attn_weights", True) else 1.0
            by_layer = fields.flag("scale_attn_by_inverse_layer_idx", False)
            fields.flag("reorder_and_upcast_attn", False)
            return cls(
                vocab_size=fields.integer("vocab_size"),
                hidden_size=width,
                feed_forward_width=fields.optional_integer("n_inner", None) or 4 * width,
                num_query_heads=num_heads,
                max_position_embeddings=fields.integer("n_positions", 1024),
                kv=KVSpec(num_layers, num_heads, head_dim, (None,) * num_layers),
                activation=fields.activation("activation_function", "gelu_new"),
                norm_epsilon=fields.number("layer_norm_epsilon", 1e-5),
                attention_scales=tuple(
                    scale / (index + 1 if by_layer else 1) for index in range(num_layers)
                ),
                tie_word_embeddings=fields.flag("tie_word_embeddings", True),
            )


class DecoderLayer(nnx.Module):
    """Computes `x + attention(norm(x))`, then `x + mlp(norm(x))`."""

    def __init__(self, spec: Spec, layer_index: int, *, name: str, dtype: DTypeLike):
        width = spec.hidden_size
        inner = spec.feed_forward_width
        epsilon = spec.norm_epsilon

        def conv1d(num_in: int, *axes: str, input_axis: str, module: str) -> Linear:
            parts = [Part(inner if axis == "ffn" else width, axis, None) for axis in axes]
            fused = f"{name}.{module}"
            return linear(
                num_in,
                *parts,
                input_axis=input_axis,
                bias=True,
                dtype=dtype,
                fused=fused,
                transposed=True,
            )

        self.attention_norm = LayerNorm(width, name=f"{name}.ln_1", epsilon=epsilon, dtype=dtype)
        self.attention = Attention(
            layer_index,
            Projections(
                conv1d(
                    width, "heads", "kv_heads", "kv_heads", input_axis="embed", module="attn.c_attn"
                ),
                conv1d(width, "embed", input_axis="heads", module="attn.c_proj"),
            ),
            head_dim=spec.kv.head_dim,
            scores=Scores(scale=spec.attention_scales[layer_index]),
        )
        self.mlp_norm = LayerNorm(width, name=f"{name}.ln_2", epsilon=epsilon, dtype=dtype)
        self.mlp = MLP(
            conv1d(width, "ffn", input_axis="embed", module="mlp.c_fc"),
            conv1d(inner, "embed", input_axis="ffn", module="mlp.c_proj"),
            activation=spec.activation,
        )

    def __call__(
        self, x_TD: Float[Array, "T D"], layer_pages: LayerPages, context: ForwardContext
    ) -> tuple[Float[Array, "T D"], LayerPages]:
        """Returns the output of the layer and its pages."""
        attended_TD, layer_pages = self.attention(self.attention_norm(x_TD), layer_pages, context)
        x_TD = x_TD + attended_TD
        return x_TD + self.mlp(self.mlp_norm(x_TD)), layer_pages


class Model(nnx.Module):
    """Computes a GPT-2 model; see `models.base.Model`."""

    def __init__(self, spec: Spec, *, dtype: DTypeLike):
        width = spec.hidden_size
        self.tokens, self.head = token_tables(
            spec.vocab_size,
            width,
            name="transformer.wte",
            tied=spec.tie_word_embeddings,
            dtype=dtype,
        )
        self.positions = Embedding(
            spec.max_position_embeddings, width, name="transformer.wpe", axis=None, dtype=dtype
        )
        self.layers = nnx.List(
            DecoderLayer(spec, index, name=f"transformer.h.{index}", dtype=dtype)
            for index in range(spec.kv.num_layers)
        )
        self.norm = LayerNorm(
            width, name="transformer.ln_f", epsilon=spec.norm_epsilon, dtype=dtype
        )

    def __call__(
        self, token_ids_T: Int[Array, "T"], pages: Pages, context: ForwardContext
    ) -> Hidden:
        """Returns hidden states, pages and auxiliary hidden states."""
        hidden_TD = self.tokens(token_ids_T) + self.positions(context.positions_T)
        return run_layers(self.layers, self.norm, hidden_TD, pages, context)

    def logits(self, hidden_BD: Float[Array, "B D"]) -> Float[Array, "B V"]:
        """Returns the logits in float32."""
        return (self.head or self.tokens).logits(hidden_BD)
