"""Falcon computes both halves of a layer in parallel (Almazrouei et al., 2023).

It has few key/value heads, and LayerNorm. There are models of 7B, 11B, 40B and 180B.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxpage.layers.attention import Attention
from jaxpage.layers.context import ForwardContext, LayerPages
from jaxpage.layers.embedding import token_tables
from jaxpage.layers.linear import Linear, Part, linear
from jaxpage.layers.mlp import MLP
from jaxpage.layers.norms import LayerNorm
from jaxpage.layers.rope import Rope
from jaxpage.models.base import Hidden, KVSpec, Pages, run_layers
from jaxpage.models.config_fields import RefusedField, WrongField
from jaxpage.models.fields import Fields

prefix = "transformer."
ignored = ("*rotary_emb.inv_freq",)


@dataclass(frozen=True, kw_only=True)
class Spec:
    """Holds the fields of transformers' `FalconConfig`.

    Attributes:
        norms: The names of the norms before attention and before the feed-forward half. The second
            is None where that half takes the input of the first.
        parallel: True if both halves start from the layer's input; otherwise the second starts from
            the sum with the first.
    """

    vocab_size: int
    model_width: int
    feed_forward_width: int
    num_query_heads: int
    max_position_embeddings: int
    kv: KVSpec
    rope: Rope
    norms: tuple[str, str | None]
    parallel: bool
    bias: bool
    activation: str
    norm_epsilon: float
    tie_word_embeddings: bool

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Spec:
        """Reads config.json."""
        with Fields(config, "falcon", {"hidden_size": "n_embed"}) as fields:
            if fields.flag("alibi", False):
                text = "alibi = true (biases of scores by distance) is not supported"
                fields.note(RefusedField(text), alibi=False)
            num_heads = fields.integer("num_attention_heads")
            width = fields.integer("hidden_size")
            num_kv_heads = _kv_heads(fields, num_heads)
            norms, parallel = _form(fields)
            if num_heads % num_kv_heads:
                text = (
                    f"num_kv_heads = {num_kv_heads} must divide num_attention_heads = {num_heads}"
                )
                heads = dict.fromkeys(("num_kv_heads", "num_attention_heads"), num_heads)
                fields.note(WrongField(text), **heads)
            head_width = fields.divided("hidden_size", "num_attention_heads")
            rope, longest = fields.rope(head_width, fields.integer("max_position_embeddings", 2048))
            num_layers = fields.integer("num_hidden_layers")
            return cls(
                vocab_size=fields.integer("vocab_size"),
                model_width=width,
                feed_forward_width=fields.optional_integer("ffn_hidden_size", None) or 4 * width,
                num_query_heads=num_heads,
                max_position_embeddings=longest,
                kv=KVSpec(num_layers, num_kv_heads, head_width, (None,) * num_layers),
                rope=rope,
                norms=norms,
                parallel=parallel,
                bias=fields.flag("bias", False),
                activation=fields.activation("activation", "gelu"),
                norm_epsilon=fields.number("layer_norm_epsilon", 1e-5),
                tie_word_embeddings=fields.flag("tie_word_embeddings", True),
            )


def _kv_heads(fields: Fields, num_heads: int) -> int:
    if fields.flag("new_decoder_architecture", False):
        return fields.optional_integer("num_kv_heads", None) or num_heads
    return 1 if fields.flag("multi_query", True) else num_heads


def _form(fields: Fields) -> tuple[tuple[str, str | None], bool]:
    """Returns `Spec.norms` and `Spec.parallel`."""
    new = fields.flag("new_decoder_architecture", False)
    parallel = fields.flag("parallel_attn", True)
    if new and not parallel:
        text = "parallel_attn = false with new_decoder_architecture is not supported"
        fields.note(RefusedField(text), parallel_attn=True)
        parallel = True
    if not parallel:
        return ("input_layernorm", "post_attention_layernorm"), False
    count = fields.optional_integer("num_ln_in_parallel_attn", None) or (2 if new else 1)
    if count > 2 or (count == 2 and not new):
        text = f"num_ln_in_parallel_attn = {count} is not supported for this form"
        fields.note(RefusedField(text), num_ln_in_parallel_attn=None)
    return (("ln_attn", "ln_mlp") if count == 2 else ("input_layernorm", None)), True


class DecoderLayer(nnx.Module):
    """Computes `x + attention(norm(x)) + mlp(norm(x))`, or one half after the other."""

    def __init__(self, spec: Spec, layer_index: int, *, name: str, dtype: DTypeLike):
        width = spec.model_width
        inner = spec.feed_forward_width
        head_width = spec.kv.head_width

        def product(num_in: int, num_out: int, input_axis: str, axis: str, module: str) -> Linear:
            part = Part(num_out, axis, f"{name}.{module}")
            return linear(num_in, part, input_axis=input_axis, bias=spec.bias, dtype=dtype)

        def norm(module: str) -> LayerNorm:
            return LayerNorm(width, name=f"{name}.{module}", epsilon=spec.norm_epsilon, dtype=dtype)

        groups = spec.kv.num_kv_heads if spec.kv.num_kv_heads > 1 else None

        def query_key_value(module: str) -> Linear:
            """Returns the product for queries, keys and values.

            With one group it is as other products are: all queries, the key, the value.
            """
            queries = spec.num_query_heads * head_width
            if groups is not None:
                return product(
                    width, queries + 2 * groups * head_width, "embed", "kv_heads", module
                )
            rows = ((queries, "heads"), (head_width, "kv_heads"), (head_width, "kv_heads"))
            parts = (Part(*each, None) for each in rows)
            return linear(
                width,
                *parts,
                fused=f"{name}.{module}",
                input_axis="embed",
                bias=spec.bias,
                dtype=dtype,
            )

        before_attention, before_mlp = spec.norms
        self.attention_norm = norm(before_attention)
        self.attention = Attention(
            layer_index,
            query_key_value("self_attention.query_key_value"),
            product(width, width, "heads", "embed", "self_attention.dense"),
            head_width=head_width,
            rope=spec.rope,
            num_groups=groups,
        )
        self.mlp_norm = None if before_mlp is None else norm(before_mlp)
        self.mlp = MLP(
            product(width, inner, "embed", "ffn", "mlp.dense_h_to_4h"),
            product(inner, width, "ffn", "embed", "mlp.dense_4h_to_h"),
            activation=spec.activation,
        )
        self.parallel = spec.parallel

    def __call__(
        self, x_TD: Float[Array, "T D"], layer_pages: LayerPages, context: ForwardContext
    ) -> tuple[Float[Array, "T D"], LayerPages]:
        """Returns the output of the layer and its pages."""
        normed_TD = self.attention_norm(x_TD)
        attended_TD, layer_pages = self.attention(normed_TD, layer_pages, context)
        added_TD = x_TD + attended_TD
        fed_TD = (
            normed_TD
            if self.mlp_norm is None
            else self.mlp_norm(x_TD if self.parallel else added_TD)
        )
        return added_TD + self.mlp(fed_TD), layer_pages


class Model(nnx.Module):
    """Computes a Falcon model; see `models.base.Model`."""

    def __init__(self, spec: Spec, *, dtype: DTypeLike):
        width = spec.model_width
        self.tokens, self.head = token_tables(
            spec.vocab_size,
            width,
            name="transformer.word_embeddings",
            tied=spec.tie_word_embeddings,
            dtype=dtype,
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
        return run_layers(self.layers, self.norm, self.tokens(token_ids_T), pages, context)

    def logits(self, hidden_BD: Float[Array, "B D"]) -> Float[Array, "B V"]:
        """Returns the logits in float32."""
        return (self.head or self.tokens).logits(hidden_BD)
