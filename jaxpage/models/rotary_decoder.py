"""The decoder that Llama, Mistral, Qwen2 and Qwen3 share: RMS norms first, rotary positions, a gated feed-forward.

The families differ in which biases and norms exist and in what their configs mean; their files say that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxpage.errors import CheckpointError, UnsupportedError
from jaxpage.layers.attention import Attend, Attention, LayerPages
from jaxpage.layers.embedding import Embedding
from jaxpage.layers.mlp import GatedMLP
from jaxpage.layers.norms import RMSNorm
from jaxpage.layers.rope import Angles, Rope
from jaxpage.models.base import Hidden, KVSpec, Pages, run_layers
from jaxpage.models.fields import Fields
from jaxpage.models.weights import Path, Weight, WeightTable

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


def make_attention(spec: RotaryDecoderSpec, *, input_width: int | None = None, dtype: DTypeLike) -> Attention:
    return Attention(
        spec.model_width,
        num_query_heads=spec.num_query_heads,
        num_kv_heads=spec.kv.num_kv_heads,
        head_width=spec.kv.head_width,
        input_bias=spec.attention_input_bias,
        output_bias=spec.attention_output_bias,
        head_norm_epsilon=spec.norm_epsilon if spec.norm_heads else None,
        input_width=input_width,
        dtype=dtype,
    )


def make_mlp(spec: RotaryDecoderSpec, *, dtype: DTypeLike) -> GatedMLP:
    return GatedMLP(
        spec.model_width, spec.feed_forward_width, activation=spec.activation, bias=spec.mlp_bias, dtype=dtype
    )


class DecoderLayer(nnx.Module):
    """`x + attention(norm(x))`, then `x + mlp(norm(x))`. norm_first: without it attention takes x as it is (EAGLE)."""

    def __init__(self, spec: RotaryDecoderSpec, *, norm_first: bool = True, dtype: DTypeLike):
        width, epsilon = spec.model_width, spec.norm_epsilon
        self.attention_norm = RMSNorm(width, epsilon=epsilon, dtype=dtype) if norm_first else None
        self.attention = make_attention(spec, dtype=dtype)
        self.mlp_norm = RMSNorm(width, epsilon=epsilon, dtype=dtype)
        self.mlp = make_mlp(spec, dtype=dtype)

    def __call__(
        self,
        x_TD: Float[Array, "T D"],
        layer_pages: LayerPages,
        attend: Attend,
        angles: Angles,
        sliding_window: int | None,
    ) -> tuple[Float[Array, "T D"], LayerPages]:
        normed_TD = x_TD if self.attention_norm is None else self.attention_norm(x_TD)
        attended_TD, layer_pages = self.attention(
            normed_TD, layer_pages, attend, angles=angles, sliding_window=sliding_window
        )
        x_TD = x_TD + attended_TD
        return x_TD + self.mlp(self.mlp_norm(x_TD)), layer_pages


class RotaryDecoder(nnx.Module):
    """See `models.base.Model`."""

    def __init__(self, spec: RotaryDecoderSpec, *, dtype: DTypeLike):
        self.spec = spec
        self.tokens = Embedding(spec.vocab_size, spec.model_width, dtype=dtype)
        self.layers = nnx.List([DecoderLayer(spec, dtype=dtype) for _ in range(spec.kv.num_layers)])
        self.norm = RMSNorm(spec.model_width, epsilon=spec.norm_epsilon, dtype=dtype)
        self.head = None if spec.tie_word_embeddings else Embedding(spec.vocab_size, spec.model_width, dtype=dtype)

    def __call__(
        self,
        token_ids_T: Int[Array, "T"],
        positions_T: Int[Array, "T"],
        pages: Pages,
        attend: Attend,
        taps: Sequence[int] = (),
    ) -> Hidden:
        angles, windows = self.spec.rope.angles(positions_T), self.spec.kv.sliding_windows
        layers = [
            partial(layer, attend=attend, angles=angles, sliding_window=window)
            for layer, window in zip(self.layers, windows, strict=True)
        ]
        return run_layers(layers, self.norm, self.tokens(token_ids_T), pages, taps)

    def logits(self, hidden_BD: Float[Array, "B D"]) -> Float[Array, "B V"]:
        return (self.head or self.tokens).logits(hidden_BD)


def weights(spec: RotaryDecoderSpec) -> list[Weight]:
    """The names that Llama introduced and the others kept."""
    table = WeightTable(prefix="model.")
    width = spec.model_width
    table.add_embeddings("model.embed_tokens.weight", spec.vocab_size, width, tied=spec.tie_word_embeddings)
    for index in range(spec.kv.num_layers):
        add_layer(table, spec, ("layers", index), f"model.layers.{index}")
    table.add(("norm", "scale"), "model.norm.weight", width)
    return table


def add_layer(
    table: WeightTable,
    spec: RotaryDecoderSpec,
    path: Path,
    name: str,
    *,
    norm_first: bool = True,
    input_width: int | None = None,
) -> None:
    width, feed_forward, head = spec.model_width, spec.feed_forward_width, spec.kv.head_width
    queries, keys = spec.num_query_heads * head, spec.kv.num_kv_heads * head
    attention, mlp = (*path, "attention"), (*path, "mlp")
    if norm_first:
        table.add((*path, "attention_norm", "scale"), f"{name}.input_layernorm.weight", width)
    table.add((*path, "mlp_norm", "scale"), f"{name}.post_attention_layernorm.weight", width)
    bias, output_bias = spec.attention_input_bias, spec.attention_output_bias
    for ours, theirs, num_out in (("query", "q", queries), ("key", "k", keys), ("value", "v", keys)):
        table.add_linear(
            (*attention, ours), f"{name}.self_attn.{theirs}_proj", input_width or width, num_out, bias=bias
        )
    table.add_linear((*attention, "output"), f"{name}.self_attn.o_proj", queries, width, bias=output_bias)
    if spec.norm_heads:
        table.add((*attention, "query_norm", "scale"), f"{name}.self_attn.q_norm.weight", head)
        table.add((*attention, "key_norm", "scale"), f"{name}.self_attn.k_norm.weight", head)
    for part in ("gate", "up"):
        table.add_linear((*mlp, part), f"{name}.mlp.{part}_proj", width, feed_forward, bias=spec.mlp_bias)
    table.add_linear((*mlp, "down"), f"{name}.mlp.down_proj", feed_forward, width, bias=spec.mlp_bias)
