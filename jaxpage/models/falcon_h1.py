"""Falcon-H1 (TII, 2025) has attention and Mamba 2 side by side in each layer, and many factors.

The pages of a layer are two: a state, then keys and values.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxpage.layers.activations import ACTIVATIONS
from jaxpage.layers.context import ForwardContext, LayerPages
from jaxpage.layers.embedding import token_tables
from jaxpage.layers.mamba import MambaSpec
from jaxpage.models.base import Hidden, KVSpec, Pages, run_layers
from jaxpage.models.config_fields import WrongField
from jaxpage.models.fields import Fields
from jaxpage.models.mamba_config import make_mamba, read_mamba
from jaxpage.models.mlp import LLAMA_NAMES, make_gated_mlp
from jaxpage.models.rotary_decoder import (
    RotaryDecoderSpec,
    ignored,
    key_value_heads,
    make_attention,
    prefix,
    read_head_dim,
)

__all__ = ["Model", "Spec", "ignored", "prefix"]


@dataclass(frozen=True, kw_only=True)
class Spec(RotaryDecoderSpec):
    """Reads transformers' `FalconH1Config`.

    Attributes:
        mamba_factors: The factors of the input and of the output of Mamba 2.
        attention_factors: The factors of the input and of the output of attention.
        mlp_factors: The factors of the gates and of the output of the feed-forward half.
    """

    mamba_factors: tuple[float, float]
    attention_factors: tuple[float, float]
    mlp_factors: tuple[float, ...]

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        """Returns the spec of a config.json."""
        with Fields(config, "falcon_h1") as fields:
            head_dim = read_head_dim(fields)
            norm = "first" if fields.flag("mamba_norm_before_gate", True) else "gated"
            mamba = read_mamba(
                fields,
                fields.optional_integer("mamba_d_ssm", 1024),
                output_bias=fields.flag("projectors_bias", False),
                norm=norm if fields.flag("mamba_rms_norm", False) else "none",
                factors=_factors(fields, "ssm_multipliers", 5),
            )
            spec = cls._from_fields(
                fields,
                num_kv_heads=key_value_heads(fields, 8),
                head_dim=head_dim,
                max_position_embeddings=fields.integer("max_position_embeddings", 8192),
                attention_bias=fields.flag("attention_bias", False),
                epsilon=("rms_norm_eps", 1e-5),
                mlp_bias=fields.flag("mlp_bias", False),
                attention_scale=head_dim**-0.5 * fields.number("key_multiplier", 1.0),
                embedding_scale=fields.number("embedding_multiplier", 1.0),
                logit_scale=fields.number("lm_head_multiplier", 1.0),
                recurrent=mamba,
                mamba_factors=_in_and_out(fields, "ssm"),
                attention_factors=_in_and_out(fields, "attention"),
                mlp_factors=_factors(fields, "mlp_multipliers", 2),
            )
        count = spec.kv.num_layers
        states = (mamba.state, None) * count
        kv = KVSpec(
            2 * count,
            spec.kv.num_kv_heads,
            head_dim,
            (None,) * 2 * count,
            states=states,
            decoder_layers=count,
        )
        return replace(spec, kv=kv)


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
    fields.note(WrongField(f"{name} must have {count} numbers, not {value!r}"), **{name: None})
    return (1.0,) * count


class FalconMLP(nnx.Module):
    """Computes `factor * down(activation(factor * gate(x)) * up(x))`.

    Attributes:
        gate_up: The product for gates and ups, the gate's columns first.
        down: The product for the output.
        activation: The name of the activation function.
        factors: The factors of the gates and of the output.
    """

    def __init__(self, spec: Spec, *, name: str, dtype: DTypeLike):
        plain = make_gated_mlp(
            LLAMA_NAMES,
            spec.hidden_size,
            spec.feed_forward_width,
            module=name,
            bias=spec.mlp_bias,
            activation=spec.activation,
            dtype=dtype,
        )
        self.gate_up = plain.gate_up
        self.down = plain.down
        self.activation = spec.activation
        self.factors = spec.mlp_factors

    def __call__(self, x_TD: Float[Array, "T D"]) -> Float[Array, "T D"]:
        """Returns the output of the layer."""
        gate_TF, up_TF = jnp.split(self.gate_up(x_TD), 2, axis=-1)
        of_gates, of_output = self.factors
        return self.down(ACTIVATIONS[self.activation](gate_TF * of_gates) * up_TF) * of_output


class FalconH1Layer(nnx.Module):
    """Adds the outputs of Mamba 2 and of attention to its input, then that of the other half."""

    def __init__(self, spec: Spec, index: int, *, dtype: DTypeLike):
        assert isinstance(spec.recurrent, MambaSpec)
        name = f"{spec.name}.layers.{index}"
        width = spec.hidden_size
        epsilon = spec.norm_epsilon
        self.norm = spec.form.norm(
            width, name=f"{name}.input_layernorm", epsilon=epsilon, dtype=dtype
        )
        self.mamba = make_mamba(
            spec.recurrent,
            2 * index,
            width=width,
            epsilon=epsilon,
            name=f"{name}.mamba",
            dtype=dtype,
        )
        self.attention = make_attention(spec, 2 * index + 1, name=f"{name}.self_attn", dtype=dtype)
        self.mlp_norm = spec.form.norm(
            width, name=f"{name}.pre_ff_layernorm", epsilon=epsilon, dtype=dtype
        )
        self.mlp = FalconMLP(spec, name=f"{name}.feed_forward", dtype=dtype)
        self.mamba_factors = spec.mamba_factors
        self.attention_factors = spec.attention_factors

    def __call__(
        self, x_TD: Float[Array, "T D"], layer_pages: LayerPages, context: ForwardContext
    ) -> tuple[Float[Array, "T D"], LayerPages]:
        """Returns the output of the layer and its pages."""
        state_pages, kv_pages = layer_pages
        normed_TD = self.norm(x_TD)
        into, out = self.mamba_factors
        scanned_TD, state_pages = self.mamba(normed_TD * into, state_pages, context)
        x_TD = x_TD + scanned_TD * out
        into, out = self.attention_factors
        attended_TD, kv_pages = self.attention(normed_TD * into, kv_pages, context)
        x_TD = x_TD + attended_TD * out
        return x_TD + self.mlp(self.mlp_norm(x_TD)), (state_pages, kv_pages)


class Model(nnx.Module):
    """Computes the model; see `models.base.Model`."""

    def __init__(self, spec: Spec, *, dtype: DTypeLike):
        width = spec.hidden_size
        self.tokens, self.head = token_tables(
            spec.vocab_size,
            width,
            name=f"{spec.name}.embed_tokens",
            tied=spec.tie_word_embeddings,
            dtype=dtype,
        )
        self.layers = nnx.List(
            FalconH1Layer(spec, index, dtype=dtype) for index in range(spec.kv.num_decoder_layers)
        )
        self.norm = spec.form.norm(
            width, name=f"{spec.name}.final_layernorm", epsilon=spec.norm_epsilon, dtype=dtype
        )
        self.embedding_scale = spec.embedding_scale
        self.logit_scale = spec.logit_scale

    def __call__(
        self, token_ids_T: Int[Array, "T"], pages: Pages, context: ForwardContext
    ) -> Hidden:
        """Returns hidden states, pages and auxiliary hidden states."""
        hidden_TD = self.tokens(token_ids_T) * self.embedding_scale
        pairs = tuple(zip(pages[::2], pages[1::2], strict=True))
        output_TD, pairs, entering = run_layers(self.layers, self.norm, hidden_TD, pairs, context)
        return output_TD, tuple(itertools.chain.from_iterable(pairs)), entering

    def logits(self, hidden_BD: Float[Array, "B D"]) -> Float[Array, "B V"]:
        """Returns the logits in float32."""
        return (self.head or self.tokens).logits(hidden_BD) * self.logit_scale
