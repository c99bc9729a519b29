"""The decoder that Llama, Mistral, Qwen2 and Qwen3 share: RMS norms first, rotary positions, a gated feed-forward.

The families differ in which biases and norms exist and in what their configs mean; their files say that.
"""

from __future__ import annotations

from dataclasses import dataclass

from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxpage.errors import CheckpointError, UnsupportedError
from jaxpage.layers.attention import Attention, query_key_value
from jaxpage.layers.context import ForwardContext, LayerPages
from jaxpage.layers.embedding import token_tables
from jaxpage.layers.linear import Part, linear
from jaxpage.layers.mlp import GatedMLP
from jaxpage.layers.norms import RMSNorm
from jaxpage.layers.rope import Rope
from jaxpage.models.base import Hidden, KVSpec, Pages, run_layers
from jaxpage.models.fields import Fields

prefix = "model."
ignored = ("*rotary_emb.inv_freq",)


@dataclass(frozen=True, kw_only=True)
class RotaryDecoderSpec:
    """The common part of the four families' configs."""

    vocab_size: int
    model_width: int
    feed_forward_width: int
    num_query_heads: int
    max_position_embeddings: int
    kv: KVSpec
    rope: Rope
    norm_epsilon: float
    activation: str
    tie_word_embeddings: bool
    attention_input_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    norm_heads: bool = False  # RMS norms of queries and keys over the head width, before the rotation

    @classmethod
    def _from_fields(
        cls,
        fields: Fields,
        *,
        num_kv_heads: int,
        head_width: int,
        max_position_embeddings: int,
        sliding_windows: tuple[int | None, ...],
        attention_input_bias: bool = False,
        attention_output_bias: bool = False,
        mlp_bias: bool = False,
        norm_heads: bool = False,
    ) -> RotaryDecoderSpec:
        num_layers, num_query_heads = fields.integer("num_hidden_layers"), fields.integer("num_attention_heads")
        if num_query_heads % num_kv_heads:
            raise CheckpointError(
                f"config.json: num_key_value_heads = {num_kv_heads} must divide num_attention_heads = {num_query_heads}"
            )
        rope, length = fields.rope(head_width, max_position_embeddings)
        return cls(
            vocab_size=fields.integer("vocab_size"),
            model_width=fields.integer("hidden_size"),
            feed_forward_width=fields.integer("intermediate_size"),
            num_query_heads=num_query_heads,
            max_position_embeddings=length,
            kv=KVSpec(num_layers, num_kv_heads, head_width, sliding_windows),
            rope=rope,
            norm_epsilon=fields.number("rms_norm_eps", 1e-6),
            activation=fields.activation("hidden_act", "silu"),
            tie_word_embeddings=fields.flag("tie_word_embeddings", False),
            attention_input_bias=attention_input_bias,
            attention_output_bias=attention_output_bias,
            mlp_bias=mlp_bias,
            norm_heads=norm_heads,
        )


def key_value_heads(fields: Fields, default: int | None) -> int:
    """`num_key_value_heads`; null means one per query head."""
    return fields.optional_integer("num_key_value_heads", default) or fields.integer("num_attention_heads")


def head_width_or_quotient(fields: Fields) -> int:
    """`head_dim`; absent or null means the model width over the number of query heads."""
    return fields.optional_integer("head_dim", None) or fields.divided("hidden_size", "num_attention_heads")


def windows_by_layer(fields: Fields) -> tuple[int | None, ...]:
    """Qwen's rule: `layer_types`, else the layers from `max_window_layers` on; nothing unless `use_sliding_window`."""
    num_layers = fields.integer("num_hidden_layers")
    window = fields.optional_integer("sliding_window", 4096)
    if not fields.flag("use_sliding_window", False):
        window = None
    types = fields.get("layer_types", None)
    if types is None:
        first = fields.integer("max_window_layers", 28, least=0)
        return tuple(window if index >= first else None for index in range(num_layers))
    if not isinstance(types, list) or len(types) != num_layers:
        raise CheckpointError(f"config.json: layer_types must name each of the {num_layers} layers, not {types!r}")
    unknown = sorted({str(kind) for kind in types} - {"full_attention", "sliding_attention"})
    if unknown:
        raise UnsupportedError(f"config.json: layer_types {', '.join(unknown)} are not supported")
    if window is None and "sliding_attention" in types:
        raise CheckpointError("config.json: layer_types has sliding_attention, but there is no window in use")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def make_attention(
    spec: RotaryDecoderSpec, layer_index: int, *, name: str, input_width: int | None = None, dtype: DTypeLike
) -> Attention:
    """name: of the checkpoint's module, as for whatever follows. The names are Llama's, which the others kept."""
    width, head = spec.model_width, spec.kv.head_width
    queries, keys = spec.num_query_heads * head, spec.kv.num_kv_heads * head

    def norm(part: str) -> RMSNorm | None:
        if not spec.norm_heads:
            return None
        return RMSNorm(head, name=f"{name}.{part}", epsilon=spec.norm_epsilon, axis=None, dtype=dtype)

    return Attention(
        layer_index,
        query_key_value(input_width or width, queries, keys, name=name, bias=spec.attention_input_bias, dtype=dtype),
        linear(
            queries,
            Part(width, "embed", f"{name}.o_proj"),
            input_axis="heads",
            bias=spec.attention_output_bias,
            dtype=dtype,
        ),
        head_width=head,
        sliding_window=spec.kv.sliding_windows[layer_index],
        rope=spec.rope,
        query_norm=norm("q_norm"),
        key_norm=norm("k_norm"),
    )


def make_mlp(spec: RotaryDecoderSpec, *, name: str, dtype: DTypeLike) -> GatedMLP:
    width, inner, bias = spec.model_width, spec.feed_forward_width, spec.mlp_bias
    gate_up = linear(
        width,
        Part(inner, "ffn", f"{name}.gate_proj"),
        Part(inner, "ffn", f"{name}.up_proj"),
        fused=f"{name}.gate_up_proj",
        input_axis="embed",
        bias=bias,
        dtype=dtype,
    )
    down = linear(inner, Part(width, "embed", f"{name}.down_proj"), input_axis="ffn", bias=bias, dtype=dtype)
    return GatedMLP(gate_up, down, activation=spec.activation)


class DecoderLayer(nnx.Module):
    """`x + attention(norm(x))`, then `x + mlp(norm(x))`. norm_first: without it attention takes x as it is (EAGLE)."""

    def __init__(
        self, spec: RotaryDecoderSpec, layer_index: int, *, name: str, norm_first: bool = True, dtype: DTypeLike
    ):
        def norm(part: str) -> RMSNorm:
            return RMSNorm(spec.model_width, name=f"{name}.{part}", epsilon=spec.norm_epsilon, dtype=dtype)

        self.attention_norm = norm("input_layernorm") if norm_first else None
        self.attention = make_attention(spec, layer_index, name=f"{name}.self_attn", dtype=dtype)
        self.mlp_norm = norm("post_attention_layernorm")
        self.mlp = make_mlp(spec, name=f"{name}.mlp", dtype=dtype)

    def __call__(
        self, x_TD: Float[Array, "T D"], layer_pages: LayerPages, context: ForwardContext
    ) -> tuple[Float[Array, "T D"], LayerPages]:
        normed_TD = x_TD if self.attention_norm is None else self.attention_norm(x_TD)
        attended_TD, layer_pages = self.attention(normed_TD, layer_pages, context)
        x_TD = x_TD + attended_TD
        return x_TD + self.mlp(self.mlp_norm(x_TD)), layer_pages


class RotaryDecoder(nnx.Module):
    """See `models.base.Model`."""

    def __init__(self, spec: RotaryDecoderSpec, *, dtype: DTypeLike):
        width = spec.model_width
        self.tokens, self.head = token_tables(
            spec.vocab_size, width, name="model.embed_tokens", tied=spec.tie_word_embeddings, dtype=dtype
        )
        self.layers = nnx.List(
            DecoderLayer(spec, index, name=f"model.layers.{index}", dtype=dtype) for index in range(spec.kv.num_layers)
        )
        self.norm = RMSNorm(width, name="model.norm", epsilon=spec.norm_epsilon, dtype=dtype)

    def __call__(self, token_ids_T: Int[Array, "T"], pages: Pages, context: ForwardContext) -> Hidden:
        return run_layers(self.layers, self.norm, self.tokens(token_ids_T), pages, context)

    def logits(self, hidden_BD: Float[Array, "B D"]) -> Float[Array, "B V"]:
        return (self.head or self.tokens).logits(hidden_BD)
