"""Gemma 3n, text (Google, 2025), keeps several hidden states, of which each layer computes one.

Every layer predicts all of them, computes the active one, and corrects all by how far it is from
its prediction (AltUp; Baykal et al., 2023). Layers share pages and have inputs of their own as in
Gemma 4, and a product of low rank next to attention (LAuReL; Menghani et al., 2024):

    states  h0 h1 h2 h3  ── predict ──  p0 p1 p2 p3  ── correct ──  c0 c1 c2 c3
                                        │                  │
                                        └───── layer ──────┘        altup_active_idx 0
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxpage.layers import ACTIVATIONS, ForwardContext, LayerPages, Linear
from jaxpage.layers.norms import mean
from jaxpage.models import gemma, gemma_layers
from jaxpage.models.base import Hidden, Pages, run_layers
from jaxpage.models.config import Fields, layer_windows
from jaxpage.models.parts import Defaults, Scope, mlp, norms

ROPES = {gemma.FULL: ("rope_theta", 1_000_000.0), gemma.SLIDING: ("rope_local_base_freq", 10_000.0)}
MIN_SQUARE = 1e-5  # The least mean of squares of a state that gets the size of another one.


@dataclass(frozen=True)
class StatesForm:
    """Describes the hidden states, and what a layer adds to them.

    Attributes:
        count: The number of hidden states.
        active: The number of the state that layers compute.
        scales_active: True if the layer's own input is gated by the corrected state times a scale.
        low_rank: The rank of the product next to attention.
    """

    count: int
    active: int
    scales_active: bool
    low_rank: int

    @classmethod
    def read(cls, fields: Fields) -> StatesForm:
        """Returns what the fields say."""
        count = fields.integer("altup_num_inputs", 4)
        active = fields.integer("altup_active_idx", 0, minimum=0)
        if active >= count:
            text = f"altup_active_idx = {active} must be below altup_num_inputs = {count}"
            fields.note_wrong(text, altup_active_idx=0, altup_num_inputs=4)
        return cls(
            count,
            active,
            scales_active=fields.flag("altup_correct_scale", True),
            low_rank=fields.integer("laurel_rank", 64),
        )


@dataclass(frozen=True, kw_only=True)
class Gemma3nConfig(gemma_layers.Gemma4LayersConfig):
    """Reads transformers' `Gemma3nTextConfig`; the clip of AltUp is for training.

    Attributes:
        states: The hidden states.
    """

    model_type = "gemma3n_text"
    defaults = Defaults(
        num_kv_heads=2,
        head_dim=256,
        activation=("hidden_activation", gemma.ACTIVATION),
        tied=True,
        attention_bias=False,
    )

    states: StatesForm

    @classmethod
    def read(cls, fields: Fields) -> Gemma3nConfig:
        """Returns what the fields say."""
        types = layer_windows.layer_types(fields, 5)
        places = gemma_layers.find_shared_layers(fields, types, 15)
        widths = _inner_widths(fields, len(types))
        sparsities = _sparsities(fields, len(types))
        return cls.from_fields(
            fields,
            **layer_windows.read_ropes(
                fields, types, fields.integer("head_dim", 256), 32_768, ROPES
            ),
            intermediate_size=max(widths),
            kv=gemma_layers.cache_of_types(types, places, fields.integer("sliding_window", 512)),
            layer_forms=tuple(
                gemma_layers.LayerForm(place, width, sparsity=sparsity)
                for place, width, sparsity in zip(places, widths, sparsities, strict=True)
            ),
            inputs=gemma_layers.InputsForm(
                fields.integer("hidden_size_per_layer_input", 256),
                fields.integer("vocab_size_per_layer_input", 262_144),
            ),
            logit_softcap=fields.optional_number("final_logit_softcapping", 30.0),
            states=StatesForm.read(fields),
        )


def _inner_widths(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """Returns the width of the feed-forward half of each layer."""
    stated = fields.get("intermediate_size", 16_384)
    widths = stated if isinstance(stated, list) else [stated] * num_layers
    if len(widths) != num_layers or not all(type(each) is int and each > 0 for each in widths):
        text = f"intermediate_size must be a width, or one for each of {num_layers} layers, not"
        fields.note_wrong(f"{text} {stated!r}", intermediate_size=64)
        widths = [64] * num_layers
    return tuple(widths)


def _sparsities(fields: Fields, num_layers: int) -> tuple[float, ...]:
    """Returns the share of gates that each layer cuts off; by default the first ten do."""
    # As in the class of transformers.
    num_sparse = 10 if num_layers > 10 else 0
    usual = [0.95] * num_sparse + [0.0] * (num_layers - num_sparse)
    shares = layer_windows.read_by_layer(
        fields,
        "activation_sparsity_pattern",
        usual,
        lambda share: type(share) in (int, float) and 0 <= share < 1,
        "a share below 1",
    )
    return tuple(map(float, shares))


class SparseMLP(nnx.Module):
    """Computes `down(activation(sparse(gate(x))) * up(x))`, where most gates become 0.

    A gate is cut off at a number of standard deviations from the mean of its token's gates, above
    which the rest of a normal distribution would be. So each device needs all gates, and the half
    is not sharded.
    """

    def __init__(self, config: Gemma3nConfig, form: gemma_layers.LayerForm, at: Scope):
        width, inner = config.hidden_size, form.intermediate_size
        self.gate = gemma_layers.whole_projection(width, at, "gate_proj", inner)
        self.up = gemma_layers.whole_projection(width, at, "up_proj", inner)
        self.down = gemma_layers.whole_projection(inner, at, "down_proj", width)
        self.deviations = NormalDist().inv_cdf(form.sparsity)
        self.activation = config.activation

    def __call__(self, x_TD: Float[Array, "T D"]) -> Float[Array, "T D"]:
        """Returns the output of the layer."""
        gate_TF = self.gate(x_TD)
        wide_TF = gate_TF.astype(jnp.float32)
        mean_T1 = mean(wide_TF)
        deviation_T1 = jnp.sqrt(mean(jnp.square(wide_TF - mean_T1)))
        sparse_TF = nnx.relu(wide_TF - (mean_T1 + deviation_T1 * self.deviations))
        gates_TF = ACTIVATIONS[self.activation](sparse_TF.astype(gate_TF.dtype))
        return self.down(gates_TF * self.up(x_TD))


class AltUp(nnx.Module):
    """Predicts all hidden states of a layer, and corrects them by its output."""

    def __init__(self, config: Gemma3nConfig, at: Scope):
        width, count = config.hidden_size, config.states.count
        self.norm = norms.rms_norm(config, at / "router_norm")
        self.router = gemma_layers.whole_projection(width, at, "modality_router", count)
        self.prediction = gemma_layers.whole_projection(count, at, "prediction_coefs", count**2)
        self.correction = gemma_layers.whole_projection(count, at, "correction_coefs", count)
        self.scale = at.vector("correct_output_scale", width, "embed")
        self.active = config.states.active
        # This is `router_input_scale` of transformers.
        self.input_scale = 1 / width

    def _modalities(self, x_TD: Float[Array, "T D"]) -> Float[Array, "T U"]:
        routed_TU = self.router(self.norm(x_TD) * self.input_scale)
        return jnp.tanh(routed_TU.astype(jnp.float32)).astype(x_TD.dtype)

    def predict(self, state_UTD: Float[Array, "U T D"]) -> list[Array]:
        """Returns the predictions, each of which is a state plus a sum of all states."""
        share_TS = self.prediction(self._modalities(state_UTD[self.active]))
        count = len(state_UTD)
        predictions = []
        for index in range(count):
            total_TD = jnp.zeros_like(state_UTD[0])
            for other in range(count):
                share = index * count + other
                total_TD = total_TD + state_UTD[other] * share_TS[:, share : share + 1]
            predictions.append(total_TD + state_UTD[index])
        return predictions

    def correct(self, predictions: list[Array], computed_TD: Float[Array, "T D"]) -> list[Array]:
        """Returns the predictions with a share each of what the active one lacks."""
        share_TU = self.correction(self._modalities(computed_TD)) + 1.0
        lacking_TD = computed_TD - predictions[self.active]
        return [
            lacking_TD * share_TU[:, index : index + 1] + each
            for index, each in enumerate(predictions)
        ]


class Gemma3nLayer(nnx.Module):
    """Computes the active state of a layer, and corrects the predictions of all."""

    def __init__(self, config: Gemma3nConfig, index: int, at: Scope):
        width, rank, laurel = config.hidden_size, config.states.low_rank, at / "laurel"
        form, inputs = config.layer_forms[index], config.inputs
        assert inputs is not None
        self.altup = AltUp(config, at / "altup")
        self.low = gemma_layers.whole_projection(width, laurel, "linear_left", rank)
        self.high = gemma_layers.whole_projection(rank, laurel, "linear_right", width)
        self.post_laurel_norm = norms.rms_norm(config, laurel / "post_laurel_norm")
        self.attention_norm = norms.rms_norm(config, at / "input_layernorm")
        self.attention = gemma_layers.gemma4_attention(config, index, at / "self_attn")
        self.post_attention_norm = norms.rms_norm(config, at / "post_attention_layernorm")
        self.mlp_norm = norms.rms_norm(config, at / "pre_feedforward_layernorm")
        self.mlp = (
            SparseMLP(config, form, at / "mlp")
            if form.sparsity
            else mlp.gated_mlp(config, at / "mlp", width=form.intermediate_size)
        )
        self.post_mlp_norm = norms.rms_norm(config, at / "post_feedforward_layernorm")
        self.input = gemma_layers.GatedInput(config, inputs.width, at)
        self.states = config.states

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
        x_TD = predictions[self.states.active]
        normed_TD = self.attention_norm(x_TD)
        low_rank_TD = normed_TD + self.post_laurel_norm(self.high(self.low(normed_TD)))
        attended_TD, layer_pages = self.attention(normed_TD, layer_pages, context)
        # transformers divides the sum of attention and LAuReL by the root of 2.
        added_TD = (x_TD + self.post_attention_norm(attended_TD) + low_rank_TD) * 0.5**0.5
        computed_TD = added_TD + self.post_mlp_norm(self.mlp(self.mlp_norm(added_TD)))
        states = self.altup.correct(predictions, computed_TD)
        gate_TD = states[self.states.active]
        if self.states.scales_active:
            gate_TD = gate_TD * self.altup.scale[...][None]
        change_TD = self.input(gate_TD, input_TI)
        return jnp.stack([states[0], *(each + change_TD for each in states[1:])]), layer_pages


class Gemma3n(gemma.Gemma2, config=Gemma3nConfig):
    """Gemma 3n, text (Google, 2025), keeps several hidden states, of which each layer computes one.

    Embeddings and logits are those of Gemma 2. Norms store their scales as they are.
    """

    make_norm = staticmethod(norms.rms_norm)

    def make_others(self, config: Any, at: Scope) -> None:
        """Makes what computes the layers' own inputs, and the products for further states."""
        self.inputs = gemma_layers.PerLayerInputs(config, config.inputs, at)

        def projections(name: str) -> list[Linear]:
            width, number = config.hidden_size, range(config.states.count - 1)
            return [
                gemma_layers.whole_projection(width, at / name, str(each), width) for each in number
            ]

        self.entering = nnx.List(projections("altup_projections"))
        self.leaving = nnx.List(projections("altup_unembed_projections"))

    @classmethod
    def make_block(cls, config: Any, index: int, layer: Scope) -> nnx.Module:
        """Returns a layer."""
        return Gemma3nLayer(config, index, layer)

    def __call__(
        self, token_ids_T: Int[Array, "T"], pages: Pages, context: ForwardContext
    ) -> Hidden:
        """Returns hidden states, pages and auxiliary hidden states, which are the active ones."""
        hidden_TD = self.embed(token_ids_T, context)
        # Ids that stand for images and sound have no row of their own.
        is_known_T = token_ids_T < self.config.inputs.vocab_size
        inputs_TLI = self.inputs(jnp.where(is_known_T, token_ids_T, 0), hidden_TD)
        layers = gemma_layers.bind_inputs(self.layers, inputs_TLI)
        made = [_match_size(projection(hidden_TD), hidden_TD) for projection in self.entering]
        state_UTD = jnp.stack([hidden_TD, *made])
        places = self.config.layer_places
        out_TD, pages, aux = run_layers(
            layers, self._merge_streams, state_UTD, pages, context, places
        )
        return out_TD, pages, tuple(each_UTD[self.config.states.active] for each_UTD in aux)

    def _merge_streams(self, state_UTD: Float[Array, "U T D"]) -> Float[Array, "T D"]:
        """Returns the norm of the mean of all states, each with the size of the first one."""
        total_TD = state_UTD[0]
        for projection, each_TD in zip(self.leaving, state_UTD[1:], strict=True):
            total_TD = total_TD + _match_size(projection(each_TD), state_UTD[0])
        return self.norm(total_TD / len(state_UTD))


def _match_size(x_TD: Float[Array, "T D"], other_TD: Float[Array, "T D"]) -> Float[Array, "T D"]:
    """Returns the state with the root mean square of another one."""
    wide_TD = x_TD.astype(jnp.float32)
    size_T1 = jnp.sqrt(mean(jnp.square(other_TD.astype(jnp.float32))))
    rms_T1 = jnp.sqrt(jnp.maximum(mean(jnp.square(wide_TD)), MIN_SQUARE))
    return (wide_TD * size_T1 / rms_T1).astype(x_TD.dtype)
