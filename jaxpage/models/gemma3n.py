"""Gemma 3n, text (Google, 2025), keeps several hidden states, of which each layer computes one.

Every layer predicts all of them, computes the active one, and corrects all by how far it is from
its prediction (AltUp; Baykal et al., 2023). Layers share pages and have inputs of their own as in
Gemma 4, and a product of low rank next to attention (LAuReL; Menghani et al., 2024):

    states  h0 h1 h2 h3  ── predict ──  p0 p1 p2 p3  ── correct ──  c0 c1 c2 c3
                                        │                  │
                                        └───── layer ──────┘        altup_active_idx 0
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxpage.layers.activations import ACTIVATIONS
from jaxpage.layers.context import ForwardContext, LayerPages
from jaxpage.layers.linear import Linear
from jaxpage.layers.norms import mean
from jaxpage.layers.parameter import parameter, tensor
from jaxpage.models.base import Hidden, KVSpec, Pages, run_layers
from jaxpage.models.config_fields import WrongField
from jaxpage.models.fields import Fields
from jaxpage.models.gemma import ACTIVATION
from jaxpage.models.gemma4_layer import (
    FULL,
    SLIDING,
    GatedInput,
    Gemma4Spec,
    PerLayerInputs,
    find_shared_layers,
    make_attention,
    make_norm,
    make_product,
)
from jaxpage.models.layer_windows import layer_types
from jaxpage.models.rotary_decoder import (
    RotaryDecoder,
    RotaryDecoderSpec,
    ignored,
    key_value_heads,
    make_mlp,
    prefix,
)

__all__ = ["OVERFLOWS_FLOAT16", "Model", "Spec", "ignored", "prefix"]

OVERFLOWS_FLOAT16 = True
ROPES = {FULL: ("rope_theta", 1_000_000.0), SLIDING: ("rope_local_base_freq", 10_000.0)}
LEAST_SQUARE = 1e-5  # The least mean of squares of a state that gets the size of another one.


@dataclass(frozen=True, kw_only=True)
class Spec(Gemma4Spec):
    """Reads transformers' `Gemma3nTextConfig`; the clip of AltUp is for training.

    Attributes:
        inner_widths: The width of the feed-forward half of each layer.
        sparsities: For each layer, the share of its gates that are cut off; 0 for none.
        low_rank: The rank of the product next to attention.
        num_states: The number of hidden states.
        active: The place of the state that layers compute.
        scales_active: True if the layer's own input is gated by the corrected state times a scale.
    """

    inner_widths: tuple[int, ...] = ()
    sparsities: tuple[float, ...] = ()
    low_rank: int = 0
    num_states: int = 1
    active: int = 0
    scales_active: bool = True

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        """Returns the spec of a config.json."""
        with Fields(config, "gemma3n_text") as fields:
            head_dim = fields.integer("head_dim", 256)
            types = layer_types(fields, 5)
            longest = fields.integer("max_position_embeddings", 32_768)
            ropes, longest = fields.ropes_by_type(head_dim, longest, ROPES)
            places = find_shared_layers(fields, types, 15)
            widths = _inner_widths(fields, len(types))
            spec = cls._from_fields(
                fields,
                num_kv_heads=key_value_heads(fields, 2),
                head_dim=head_dim,
                max_position_embeddings=longest,
                attention_bias=fields.flag("attention_bias", False),
                rope=(ropes[FULL], longest),
                rope_by_layer=tuple(ropes[kind] for kind in types),
                activation=("hidden_activation", ACTIVATION),
                feed_forward_width=max(widths),
                tied=True,
                attention_scale=1.0,
                embedding_scale=math.sqrt(fields.integer("hidden_size")),
                logit_softcap=fields.optional_number("final_logit_softcapping", 30.0),
                layer_types=types,
                places=places,
                input_width=fields.integer("hidden_size_per_layer_input", 256),
                input_vocab_size=fields.integer("vocab_size_per_layer_input", 262_144),
                inner_widths=widths,
                sparsities=_sparsities(fields, len(types)),
                low_rank=fields.integer("laurel_rank", 64),
                scales_active=fields.flag("altup_correct_scale", True),
                **_states(fields),
            )
            window = fields.integer("sliding_window", 512)
            windows = tuple(window if kind == SLIDING else None for kind in types)
            num_with_pages = 1 + max(places)
            kv = KVSpec(
                num_with_pages,
                spec.kv.num_kv_heads,
                head_dim,
                windows[:num_with_pages],
                decoder_layers=len(types),
            )
            return dataclasses.replace(spec, kv=kv)


def _inner_widths(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """Returns the width of the feed-forward half of each layer."""
    stated = fields.get("intermediate_size", 16_384)
    widths = stated if isinstance(stated, list) else [stated] * num_layers
    if len(widths) != num_layers or not all(type(each) is int and each > 0 for each in widths):
        text = f"intermediate_size must be a width, or one for each of {num_layers} layers, not"
        fields.note(WrongField(f"{text} {stated!r}"), intermediate_size=64)
        widths = [64] * num_layers
    return tuple(widths)


def _sparsities(fields: Fields, num_layers: int) -> tuple[float, ...]:
    """Returns the share of gates that each layer cuts off; by default the first ten do."""
    num_sparse = 10 if num_layers > 10 else 0
    usual = [0.95] * num_sparse + [0.0] * (num_layers - num_sparse)
    pattern = fields.get("activation_sparsity_pattern", None)
    shares = usual if pattern is None else pattern
    if (
        not isinstance(shares, list)
        or len(shares) != num_layers
        or not all(type(each) in (int, float) and 0 <= each < 1 for each in shares)
    ):
        text = f"activation_sparsity_pattern must have a share below 1 for each of {num_layers}"
        fields.note(WrongField(f"{text} layers, not {pattern!r}"), activation_sparsity_pattern=None)
        shares = usual
    return tuple(map(float, shares))


def _states(fields: Fields) -> dict[str, Any]:
    """Returns the fields of the spec about the hidden states."""
    count = fields.integer("altup_num_inputs", 4)
    active = fields.integer("altup_active_idx", 0, least=0)
    if active >= count:
        text = f"altup_active_idx = {active} must be below altup_num_inputs = {count}"
        fields.note(WrongField(text), altup_active_idx=0, altup_num_inputs=4)
    return {"num_states": count, "active": active}


class SparseMLP(nnx.Module):
    """Computes `down(activation(sparse(gate(x))) * up(x))`, where most gates become 0.

    A gate is cut off at a number of standard deviations from the mean of its token's gates, above
    which the rest of a normal distribution would be. So each device needs all gates, and the half
    is not divided.
    """

    def __init__(self, spec: Spec, layer_index: int, *, name: str, dtype: DTypeLike):
        inner = spec.inner_widths[layer_index]
        width = spec.hidden_size
        self.gate = make_product(width, inner, f"{name}.gate_proj", dtype)
        self.up = make_product(width, inner, f"{name}.up_proj", dtype)
        self.down = make_product(inner, width, f"{name}.down_proj", dtype)
        self.deviations = NormalDist().inv_cdf(spec.sparsities[layer_index])
        self.activation = spec.activation

    def __call__(self, x_TD: Float[Array, "T D"]) -> Float[Array, "T D"]:
        """Returns the output of the layer."""
        gate_TF = self.gate(x_TD)
        wide_TF = gate_TF.astype(jnp.float32)
        mean_T1 = mean(wide_TF)
        deviation_T1 = jnp.sqrt(mean(jnp.square(wide_TF - mean_T1)))
        sparse_TF = jax.nn.relu(wide_TF - (mean_T1 + deviation_T1 * self.deviations))
        gates_TF = ACTIVATIONS[self.activation](sparse_TF.astype(gate_TF.dtype))
        return self.down(gates_TF * self.up(x_TD))


class AltUp(nnx.Module):
    """Predicts all hidden states of a layer, and corrects them by its output."""

    def __init__(self, spec: Spec, *, name: str, dtype: DTypeLike):
        width = spec.hidden_size
        count = spec.num_states
        self.norm = make_norm(spec, f"{name}.router_norm", dtype)
        self.router = make_product(width, count, f"{name}.modality_router", dtype)
        self.prediction = make_product(count, count**2, f"{name}.prediction_coefs", dtype)
        self.correction = make_product(count, count, f"{name}.correction_coefs", dtype)
        scale = tensor(f"{name}.correct_output_scale", width)
        self.scale = parameter((width,), axes=("embed",), dtype=dtype, sources=[scale])
        self.active = spec.active
        self.input_scale = 1 / width

    def _modalities(self, x_TD: Float[Array, "T D"]) -> Float[Array, "T U"]:
        routed_TU = self.router(self.norm(x_TD) * self.input_scale)
        return jnp.tanh(routed_TU.astype(jnp.float32)).astype(x_TD.dtype)

    def predict(self, state_UTD: Float[Array, "U T D"]) -> list[jax.Array]:
        """Returns the predictions, each of which is a state plus a sum of all states."""
        share_TS = self.prediction(self._modalities(state_UTD[self.active]))
        count = len(state_UTD)
        predictions = []
        for place in range(count):
            total_TD = jnp.zeros_like(state_UTD[0])
            for other in range(count):
                share = place * count + other
                total_TD = total_TD + state_UTD[other] * share_TS[:, share : share + 1]
            predictions.append(total_TD + state_UTD[place])
        return predictions

    def correct(
        self, predictions: list[jax.Array], computed_TD: Float[Array, "T D"]
    ) -> list[jax.Array]:
        """Returns the predictions with a share each of what the active one lacks."""
        share_TU = self.correction(self._modalities(computed_TD)) + 1.0
        lacking_TD = computed_TD - predictions[self.active]
        return [
            lacking_TD * share_TU[:, place : place + 1] + each
            for place, each in enumerate(predictions)
        ]


class Gemma3nLayer(nnx.Module):
    """Computes the active state of a layer, and corrects the predictions of all."""

    def __init__(self, spec: Spec, layer_index: int, *, name: str, dtype: DTypeLike):
        """Makes the layer.

        Args:
            spec: The spec of the model.
            layer_index: The layer's place in its model.
            name: The layer's name in the checkpoint.
            dtype: The type of the parameters.
        """
        width = spec.hidden_size
        self.altup = AltUp(spec, name=f"{name}.altup", dtype=dtype)
        laurel = f"{name}.laurel"
        self.low = make_product(width, spec.low_rank, f"{laurel}.linear_left", dtype)
        self.high = make_product(spec.low_rank, width, f"{laurel}.linear_right", dtype)
        self.behind_low_rank = make_norm(spec, f"{laurel}.post_laurel_norm", dtype)
        self.attention_norm = make_norm(spec, f"{name}.input_layernorm", dtype)
        self.attention = make_attention(spec, layer_index, name=f"{name}.self_attn", dtype=dtype)
        self.post_attention_norm = make_norm(spec, f"{name}.post_attention_layernorm", dtype)
        self.mlp_norm = make_norm(spec, f"{name}.pre_feedforward_layernorm", dtype)
        inner = spec.inner_widths[layer_index]
        self.mlp = (
            SparseMLP(spec, layer_index, name=f"{name}.mlp", dtype=dtype)
            if spec.sparsities[layer_index]
            else make_mlp(spec, name=f"{name}.mlp", inner_width=inner, dtype=dtype)
        )
        self.post_mlp_norm = make_norm(spec, f"{name}.post_feedforward_layernorm", dtype)
        assert spec.input_width is not None
        self.input = GatedInput(spec, spec.input_width, name=name, dtype=dtype)
        self.active = spec.active
        self.scales_active = spec.scales_active

    def __call__(
        self,
        state_UTD: Float[Array, "U T D"],
        layer_pages: LayerPages,
        context: ForwardContext,
        *,
        input_TI: Float[Array, "T I"],
    ) -> tuple[Float[Array, "U T D"], LayerPages]:
        """Returns the states after the layer and its pages; `input_TI` is its own input."""
        predictions = self.altup.predict(state_UTD)
        x_TD = predictions[self.active]
        normed_TD = self.attention_norm(x_TD)
        low_rank_TD = normed_TD + self.behind_low_rank(self.high(self.low(normed_TD)))
        attended_TD, layer_pages = self.attention(normed_TD, layer_pages, context)
        added_TD = (x_TD + self.post_attention_norm(attended_TD) + low_rank_TD) * 0.5**0.5
        computed_TD = added_TD + self.post_mlp_norm(self.mlp(self.mlp_norm(added_TD)))
        states = self.altup.correct(predictions, computed_TD)
        gate_TD = states[self.active]
        if self.scales_active:
            gate_TD = gate_TD * self.altup.scale[...][None]
        given_TD = self.input(gate_TD, input_TI)
        return jnp.stack([states[0], *(each + given_TD for each in states[1:])]), layer_pages


class Model(RotaryDecoder):
    """Computes Gemma 3n; see `models.base.Model`."""

    layer = Gemma3nLayer

    def __init__(self, spec: Spec, *, dtype: DTypeLike):
        super().__init__(spec, dtype=dtype)

        def products(name: str) -> list[Linear]:
            width = spec.hidden_size
            names = (f"{spec.name}.{name}.{place}" for place in range(spec.num_states - 1))
            return [make_product(width, width, each, dtype) for each in names]

        self.inputs = PerLayerInputs(spec, dtype=dtype)
        self.input_vocab_size = spec.input_vocab_size
        self.entering = nnx.List(products("altup_projections"))
        self.leaving = nnx.List(products("altup_unembed_projections"))
        self.places = spec.places
        self.active = spec.active

    def __call__(
        self, token_ids_T: Int[Array, "T"], pages: Pages, context: ForwardContext
    ) -> Hidden:
        """Returns hidden states, pages and auxiliary hidden states, which are the active ones."""
        hidden_TD = self.tokens(token_ids_T) * self.embedding_scale
        # Ids that stand for images and sound have no row of their own.
        known_T = jnp.where(token_ids_T < self.input_vocab_size, token_ids_T, 0)
        inputs_TLI = self.inputs(known_T, hidden_TD)
        layers = [
            functools.partial(layer, input_TI=inputs_TLI[:, number])
            for number, layer in enumerate(self.layers)
        ]
        made = [_match_size(product(hidden_TD), hidden_TD) for product in self.entering]
        state_UTD = jnp.stack([hidden_TD, *made])
        out_TD, pages, aux = run_layers(layers, self._leave, state_UTD, pages, context, self.places)
        return out_TD, pages, tuple(each_UTD[self.active] for each_UTD in aux)

    def _leave(self, state_UTD: Float[Array, "U T D"]) -> Float[Array, "T D"]:
        """Returns the norm of the mean of all states, each with the size of the first one."""
        total_TD = state_UTD[0]
        for product, each_TD in zip(self.leaving, state_UTD[1:], strict=True):
            total_TD = total_TD + _match_size(product(each_TD), state_UTD[0])
        return self.norm(total_TD / len(state_UTD))


def _match_size(x_TD: Float[Array, "T D"], other_TD: Float[Array, "T D"]) -> Float[Array, "T D"]:
    """Returns the state with the root mean square of another one."""
    wide_TD = x_TD.astype(jnp.float32)
    size_T1 = jnp.sqrt(mean(jnp.square(other_TD.astype(jnp.float32))))
    own_T1 = jnp.sqrt(jnp.maximum(mean(jnp.square(wide_TD)), LEAST_SQUARE))
    return (wide_TD * size_T1 / own_T1).astype(x_TD.dtype)
