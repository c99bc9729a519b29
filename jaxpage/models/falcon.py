"""Falcon (Almazrouei et al., 2023) and Falcon-H1 (TII, 2025).

Falcon computes both halves of a layer in parallel. It has few key/value heads, and LayerNorm; the
models of RefinedWeb (RW) have ALiBi in place of the rotation. Falcon-H1 has attention and Mamba 2
next to each other in each layer, and many factors:

    x ──┬── norm ──┬── mamba ──────────────┐
        │          └── attention ──────────┤
        └──────────────────────────────── (+) ──┬── mlp_norm ── mlp ── (+) ──
                                                └──────────────────────┘
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxpage.layers import ACTIVATIONS, NO_ROTATION, ForwardContext, LayerPages, MambaSpec, Scores
from jaxpage.models.config import Fields, alibi, recurrent_fields
from jaxpage.models.llama import Llama
from jaxpage.models.parts import Decoder, Scope, attention, mlp, norms, recurrences
from jaxpage.models.parts.decoder_config import DecoderConfig, Defaults
from jaxpage.models.parts.names import AttentionNames, ModuleNames, PlainNames


@dataclass(frozen=True, kw_only=True)
class FalconConfig(DecoderConfig):
    """Reads transformers' `FalconConfig`.

    Attributes:
        alibi_slopes: The slopes of ALiBi; None in a model that rotates.
        is_parallel: True if both halves of a layer take its input.
        num_norms: The number of norms of a layer: one, or one for each half.
    """

    model_type = "falcon"
    aliases = {"hidden_size": "n_embed"}
    defaults = Defaults(
        epsilon=("layer_norm_epsilon", 1e-5),
        activation=("activation", "gelu"),
        tied=True,
        all_biases=("bias", False),
    )

    alibi_slopes: tuple[float, ...] | None
    is_parallel: bool
    num_norms: int

    @classmethod
    def read(cls, fields: Fields) -> FalconConfig:
        """Returns what the fields say."""
        num_heads = fields.integer("num_attention_heads")
        width = fields.integer("hidden_size")
        head_dim = fields.divide("hidden_size", "num_attention_heads")
        has_alibi = fields.flag("alibi", False)
        max_length = fields.integer("max_position_embeddings", 2048)
        is_parallel, num_norms = _order(fields)
        return cls.from_fields(
            fields,
            num_kv_heads=_kv_heads(fields, num_heads),
            head_dim=head_dim,
            rope=(NO_ROTATION, max_length) if has_alibi else None,
            intermediate_size=fields.optional_integer("ffn_hidden_size", None) or 4 * width,
            name="transformer",
            alibi_slopes=_slopes(num_heads, head_dim) if has_alibi else None,
            is_parallel=is_parallel,
            num_norms=num_norms,
        )


def _slopes(num_heads: int, head_dim: int) -> tuple[float, ...]:
    """Returns the slopes, which Falcon scales like the scores.

    transformers rounds them to bfloat16, and their products with positions too.
    """
    return tuple(slope * head_dim**-0.5 for slope in alibi.alibi_slopes(num_heads))


def _kv_heads(fields: Fields, num_heads: int) -> int:
    if not fields.flag("new_decoder_architecture", False):
        return 1 if fields.flag("multi_query", True) else num_heads
    count = fields.optional_integer("num_kv_heads", None) or num_heads
    if num_heads % count:
        text = f"num_kv_heads = {count} must divide num_attention_heads = {num_heads}"
        fields.note_wrong(text, num_kv_heads=num_heads, num_attention_heads=num_heads)
        return num_heads
    return count


def _order(fields: Fields) -> tuple[bool, int]:
    """Returns whether the halves of a layer are parallel, and how many norms it has."""
    new = fields.flag("new_decoder_architecture", False)
    is_parallel = fields.flag("parallel_attn", True)
    if new and not is_parallel:
        text = "parallel_attn = false with new_decoder_architecture is not supported"
        fields.note_unsupported(text, parallel_attn=True)
        is_parallel = True
    if not is_parallel:
        return False, 2
    count = fields.optional_integer("num_ln_in_parallel_attn", None) or (2 if new else 1)
    if count > 2 or (count == 2 and not new):
        text = f"num_ln_in_parallel_attn = {count} is not supported for this form"
        fields.note_unsupported(text, num_ln_in_parallel_attn=None)
    return True, count


class Falcon(Llama, config=FalconConfig):
    """Falcon computes both halves of a layer in parallel (Almazrouei et al., 2023)."""

    prefix = "transformer."
    names = ModuleNames(tokens="word_embeddings", layers="h", norm="ln_f")
    attention_names = AttentionNames("dense", fused="query_key_value", module="self_attention")
    mlp_names = PlainNames("dense_h_to_4h", "dense_4h_to_h")
    make_norm = staticmethod(norms.layer_norm)

    @classmethod
    def is_parallel(cls, config: Any) -> bool:
        """Returns whether both halves of a layer take its input."""
        return bool(config.is_parallel)

    @classmethod
    def make_norms(cls, config: Any, index: int, layer: Scope) -> dict[str, Any]:
        """Returns the norms of a layer: one, or one for each half."""
        has_two = config.num_norms == 2
        first, second = "input_layernorm", "post_attention_layernorm"
        if config.is_parallel and has_two:
            # Falcon 40B and 180B name their two norms so; Falcon 11B has one of the older name.
            first, second = "ln_attn", "ln_mlp"
        return {
            "attention_norm": norms.layer_norm(config, layer / first),
            "mlp_norm": norms.layer_norm(config, layer / second) if has_two else None,
        }

    @classmethod
    def make_scores(cls, config: Any, at: Scope) -> Scores:
        """Returns the slopes of ALiBi, which some models have."""
        return Scores(alibi_slopes=config.alibi_slopes)


@dataclass(frozen=True)
class FalconFactors:
    """Holds the factors of a model.

    Attributes:
        embedding: The factor of embeddings.
        mamba: The factors of the input and of the output of Mamba 2.
        attention: The factors of the input and of the output of attention.
        keys: The factor of keys.
        mlp: The factors of the gates and of the output of the feed-forward half.
        logits: The factor of logits.
    """

    embedding: float
    mamba: tuple[float, float]
    attention: tuple[float, float]
    keys: float
    mlp: tuple[float, ...]
    logits: float

    @classmethod
    def read(cls, fields: Fields) -> FalconFactors:
        """Returns what the fields say."""
        return cls(
            keys=fields.number("key_multiplier", 1.0),
            embedding=fields.number("embedding_multiplier", 1.0),
            logits=fields.number("lm_head_multiplier", 1.0),
            mamba=_in_and_out(fields, "ssm"),
            attention=_in_and_out(fields, "attention"),
            mlp=_factors(fields, "mlp_multipliers", 2),
        )


def _in_and_out(fields: Fields, part: str) -> tuple[float, float]:
    """Returns the factors of a part's input and output."""
    into = fields.number(f"{part}_in_multiplier", 1.0)
    return into, fields.number(f"{part}_out_multiplier", 1.0)


def _factors(fields: Fields, name: str, count: int) -> tuple[float, ...]:
    """Returns a list of factors, which are 1 where the field is absent or null."""
    value = fields.get(name, None)
    if value is None:
        return (1.0,) * count
    if (
        isinstance(value, list)
        and len(value) == count
        and all(type(each) in (int, float) for each in value)
    ):
        return tuple(map(float, value))
    fields.note_wrong(f"{name} must have {count} numbers, not {value!r}", **{name: None})
    return (1.0,) * count


@dataclass(frozen=True, kw_only=True)
class FalconH1Config(DecoderConfig):
    """Reads transformers' `FalconH1Config`.

    Attributes:
        recurrent: Mamba 2.
        factors: The factors.
    """

    model_type = "falcon_h1"
    defaults = Defaults(
        num_kv_heads=8, max_length=8192, epsilon=1e-5, attention_bias=False, mlp_bias=False
    )

    recurrent: MambaSpec
    factors: FalconFactors

    @property
    def layer_places(self) -> Sequence[tuple[int, ...]]:
        """Returns for each layer the places of its state and of its keys and values."""
        return [(2 * index, 2 * index + 1) for index in range(self.num_layers)]

    @classmethod
    def read(cls, fields: Fields) -> FalconH1Config:
        """Returns what the fields say."""
        head_dim = fields.head_dim()
        norm = "first" if fields.flag("mamba_norm_before_gate", True) else "gated"
        mamba = recurrent_fields.read_mamba(
            fields,
            fields.optional_integer("mamba_d_ssm", 1024),
            output_bias=fields.flag("projectors_bias", False),
            norm=norm if fields.flag("mamba_rms_norm", False) else "none",
            factors=_factors(fields, "ssm_multipliers", 5),
        )
        num_layers = fields.integer("num_hidden_layers")
        return cls.from_fields(
            fields,
            head_dim=head_dim,
            kv=recurrences.cache_of_states((mamba.state, None) * num_layers, num_layers),
            recurrent=mamba,
            factors=FalconFactors.read(fields),
        )


class FalconMLP(nnx.Module):
    """Computes `factor * down(activation(factor * gate(x)) * up(x))`.

    Attributes:
        gate_up: The product for gates and ups, the gate's columns first.
        down: The product for the output.
        activation: The name of the activation function.
        factors: The factors of the gates and of the output.
    """

    def __init__(self, config: FalconH1Config, at: Scope):
        plain = mlp.gated_mlp(config, at)
        self.gate_up = plain.gate_up
        self.down = plain.down
        self.activation = config.activation
        self.factors = config.factors.mlp

    def __call__(self, x_TD: Float[Array, "T D"]) -> Float[Array, "T D"]:
        """Returns the output of the layer."""
        gate_TF, up_TF = jnp.split(self.gate_up(x_TD), 2, axis=-1)
        of_gates, of_output = self.factors
        return self.down(ACTIVATIONS[self.activation](gate_TF * of_gates) * up_TF) * of_output


class FalconH1Layer(nnx.Module):
    """Adds the outputs of Mamba 2 and of attention to its input, then that of the other half."""

    def __init__(self, config: FalconH1Config, index: int, at: Scope):
        state_place, kv_place = config.layer_places[index]
        # The factor of keys is one of scores.
        scale = config.kv.head_dim**-0.5 * config.factors.keys
        self.norm = norms.rms_norm(config, at / "input_layernorm")
        self.mamba = recurrences.mamba2(config, config.recurrent, state_place, at / "mamba")
        self.attention = attention.grouped_query_attention(
            config, kv_place, at / "self_attn", scores=Scores(scale=scale)
        )
        self.mlp_norm = norms.rms_norm(config, at / "pre_ff_layernorm")
        self.mlp = FalconMLP(config, at / "feed_forward")
        self.factors = config.factors

    def __call__(
        self,
        x_TD: Float[Array, "T D"],
        layer_pages: tuple[LayerPages, LayerPages],
        context: ForwardContext,
    ) -> tuple[Float[Array, "T D"], tuple[LayerPages, LayerPages]]:
        """Returns the output of the layer and its pages."""
        state_pages, kv_pages = layer_pages
        normed_TD = self.norm(x_TD)
        into, out = self.factors.mamba
        scanned_TD, state_pages = self.mamba(normed_TD * into, state_pages, context)
        x_TD = x_TD + scanned_TD * out
        into, out = self.factors.attention
        attended_TD, kv_pages = self.attention(normed_TD * into, kv_pages, context)
        x_TD = x_TD + attended_TD * out
        return x_TD + self.mlp(self.mlp_norm(x_TD)), (state_pages, kv_pages)


class FalconH1(Decoder, config=FalconH1Config):
    """Falcon-H1 (TII, 2025) has attention and Mamba 2 side by side in each layer, and many factors.

    The pages of a layer are two: a state, then keys and values.
    """

    names = ModuleNames(norm="final_layernorm")

    @classmethod
    def make_block(cls, config: Any, index: int, layer: Scope) -> nnx.Module:
        """Returns a layer."""
        return FalconH1Layer(config, index, layer)

    def embed_tokens(self, token_ids_T: jax.Array) -> jax.Array:
        """Returns what vectors may take the place of."""
        return super().embed_tokens(token_ids_T) * self.config.factors.embedding

    def logits(self, hidden_BD: jax.Array) -> jax.Array:
        """Returns the logits in float32."""
        return super().logits(hidden_BD) * self.config.factors.logits
