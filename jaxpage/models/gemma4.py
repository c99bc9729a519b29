"""Gemma 4, text (Gemma Team, 2026), has wider heads in full layers; some layers share pages.

The last layers of E2B and E4B have no keys and values: they read those of the last layer before
them that has their type, in its pages. Each layer also takes an input of its own from the token
(`PerLayerInputs`). 26B-A4B has experts next to the feed-forward half of each layer:

    layers   0 sliding   1 full   2 sliding   3 full   4 sliding   5 full     num_kv_shared_layers 2
    pages    0           1        2           3        2           3
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxpage.layers import ExpertsSpec, ForwardContext, LayerPages, Rope
from jaxpage.models import gemma, gemma4_experts, gemma_layers
from jaxpage.models.config import Fields, layer_windows, proportional_rope
from jaxpage.models.parts import Defaults, Scope, mlp, norms

ROPES: dict[str, dict[str, Any]] = {
    gemma.SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    gemma.FULL: {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
        "rope_theta": 1_000_000.0,
    },
}


@dataclass(frozen=True, kw_only=True)
class Gemma4Config(gemma_layers.Gemma4LayersConfig):
    """Reads transformers' `Gemma4TextConfig`.

    Attributes:
        experts: The experts of each layer; None if there are none.
    """

    model_type = "gemma4_text"
    defaults = Defaults(
        activation=("hidden_activation", gemma.ACTIVATION), tied=True, attention_bias=False
    )

    experts: ExpertsSpec | None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Gemma4Config:
        """Returns what a config.json says; `per_layer_config` is refused in other families."""
        config = dict(config)
        by_layer = config.pop("per_layer_config", None)
        with Fields(config, cls.model_type) as fields:
            return cls.read(fields, by_layer)

    @classmethod
    def read(cls, fields: Fields, by_layer: Any = None) -> Gemma4Config:
        """Returns what the fields say; for `by_layer` see `_heads`."""
        bidirectional = fields.get("use_bidirectional_attention", None)
        if bidirectional not in (None, "vision"):
            text = "use_bidirectional_attention (attention to later tokens) is not supported"
            fields.note_unsupported(text, use_bidirectional_attention=None)
        # Whatever the config says, transformers makes the last layer a full one.
        types = (*layer_windows.layer_types(fields, 6)[:-1], gemma.FULL)
        heads = _heads(fields, types, by_layer)
        ropes, max_length = _ropes(fields, heads)
        places = gemma_layers.find_shared_layers(fields, types, 0)
        cache = gemma_layers.cache_of_types(types, places, fields.integer("sliding_window", 512))
        kinds_with_pages = types[: cache["num_layers"]]
        num_kv_heads, head_dim = heads[gemma.SLIDING]
        return cls.from_fields(
            fields,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rope=(ropes[gemma.FULL], max_length),
            kv={**cache, "heads": tuple(heads[kind] for kind in kinds_with_pages)},
            rope_by_layer=tuple(ropes[kind] for kind in types),
            layer_forms=_layer_forms(
                fields, types, places, sees_pictures=bidirectional == "vision"
            ),
            inputs=_inputs(fields),
            logit_softcap=fields.optional_number("final_logit_softcapping", None),
            experts=gemma4_experts.read_experts(fields),
        )


def _padding_id(fields: Fields) -> int:
    """Returns the padding token, for which a config without one has the first token."""
    is_null = fields.get("pad_token_id", 0) is None
    return 0 if is_null else fields.integer("pad_token_id", 0, minimum=0)


def _layer_forms(
    fields: Fields, types: tuple[str, ...], places: tuple[int, ...], *, sees_pictures: bool
) -> tuple[gemma_layers.LayerForm, ...]:
    """Returns what differs from layer to layer; layers that share pages may have a wider half.

    Args:
        fields: The fields of the config.
        types: The type of each layer.
        places: For each layer, the place of the layer whose pages it reads.
        sees_pictures: True if the tokens of a picture see each other both ways in layers with a
            window, and so not in full ones.
    """
    width = fields.integer("intermediate_size")
    wide = 2 * width if fields.flag("use_double_wide_mlp", False) else width
    keys_are_values = fields.flag("attention_k_eq_v", False)
    return tuple(
        gemma_layers.LayerForm(
            place,
            width if place == index else wide,
            keys_are_values=keys_are_values and kind == gemma.FULL,
            sees_ahead=kind == gemma.SLIDING or not sees_pictures,
        )
        for index, (kind, place) in enumerate(zip(types, places, strict=True))
    )


def _heads(fields: Fields, types: tuple[str, ...], by_layer: Any) -> dict[str, tuple[int, int]]:
    """Returns the number of key/value heads, and their width, of each type of layer.

    Args:
        fields: The fields of the config.
        types: The type of each layer.
        by_layer: `per_layer_config`, which transformers 5.24 writes in place of the fields for full
            layers.
    """
    sliding_heads = fields.kv_heads(4), fields.integer("head_dim", 256)
    few = fields.optional_integer("num_global_key_value_heads", None)
    if few is None or not fields.flag("attention_k_eq_v", False):
        few = sliding_heads[0]
    heads = {
        gemma.SLIDING: sliding_heads,
        gemma.FULL: (few, fields.integer("global_head_dim", 512)),
    }
    if by_layer is not None:
        heads = _heads_by_layer(fields, types, by_layer, sliding_heads)
    few = heads[gemma.FULL][0]
    num_heads = fields.integer("num_attention_heads")
    if few != sliding_heads[0] and num_heads % few:
        text = f"num_global_key_value_heads = {few} must divide num_attention_heads = {num_heads}"
        fields.note_wrong(text, num_global_key_value_heads=None)
    return heads


def _heads_by_layer(
    fields: Fields, types: tuple[str, ...], by_layer: Any, default_heads: tuple[int, int]
) -> dict[str, tuple[int, int]]:
    """Returns what `_heads` does; the keys of `by_layer` are the numbers of layers, as in "05"."""
    heads = {gemma.SLIDING: default_heads, gemma.FULL: default_heads}
    changes = {int(layer): each for layer, each in by_layer.items()}
    default = dict(zip(("num_key_value_heads", "head_dim"), default_heads, strict=True))
    alike = True
    for layer, kind in enumerate(types):
        # A change of another field is a third entry, and refused below.
        of_layer = {**default, **changes.get(layer, {})}
        pairs = tuple(of_layer.values())
        if layer == types.index(kind) and len(pairs) == 2:
            heads[kind] = pairs
        alike = alike and pairs == heads[kind]
    if not alike:
        text = "per_layer_config is supported for num_key_value_heads and head_dim alone, alike in"
        fields.note_unsupported(f"{text} all layers of a type", per_layer_config=None)
    return heads


def _ropes(fields: Fields, heads: Mapping[str, tuple[int, int]]) -> tuple[dict[str, Rope], int]:
    """Returns the rotation of each type of layer, and the number of positions."""
    max_length = fields.integer("max_position_embeddings", 131_072)
    stated = fields.get("rope_parameters", None)
    scaling = fields.get("rope_scaling", stated)  # It replaces the other one in transformers too.
    if stated is not None and scaling != stated:
        text = "rope_scaling and rope_parameters contradict each other"
        fields.note_wrong(text, rope_parameters=None, rope_scaling=None)
    stated = scaling or ROPES
    ropes = {}
    for kind, (_, width) in heads.items():
        of_kind = stated.get(kind) if isinstance(stated, dict) else None
        ropes[kind] = proportional_rope.read_rope(
            fields, kind, of_kind if isinstance(of_kind, dict) else {}, width
        )
    return ropes, max_length


def _inputs(fields: Fields) -> gemma_layers.InputsForm | None:
    """Returns what the fields say of the inputs that layers have of their own."""
    width = fields.integer("hidden_size_per_layer_input", 256, minimum=0)
    rows = fields.integer("vocab_size_per_layer_input", 262_144)
    if width and rows < (size := fields.integer("vocab_size")):
        text = f"vocab_size_per_layer_input = {rows} must not be less than vocab_size = {size}"
        fields.note_wrong(text, vocab_size_per_layer_input=size)
    padding_id = _padding_id(fields)
    return gemma_layers.InputsForm(width, rows, padding_id) if width else None


class Gemma4Layer(nnx.Module):
    """Computes attention, the feed-forward half with or without experts, and the layer's input."""

    def __init__(self, config: Gemma4Config, index: int, at: Scope):
        form = config.layer_forms[index]
        self.attention_norm = norms.rms_norm(config, at / "input_layernorm")
        self.attention = gemma_layers.gemma4_attention(config, index, at / "self_attn")
        self.post_attention_norm = norms.rms_norm(config, at / "post_attention_layernorm")
        self.mlp_norm = norms.rms_norm(config, at / "pre_feedforward_layernorm")
        self.mlp = mlp.gated_mlp(config, at / "mlp", width=form.intermediate_size)
        self.post_mlp_norm = norms.rms_norm(config, at / "post_feedforward_layernorm")
        experts, inputs = config.experts, config.inputs
        self.experts = (
            None if experts is None else gemma4_experts.Gemma4Experts(config, experts, at)
        )
        self.input = None if inputs is None else gemma_layers.GatedInput(config, inputs.width, at)
        self.scale = at.vector("layer_scalar", 1)

    def __call__(
        self,
        x_TD: Float[Array, "T D"],
        layer_pages: LayerPages,
        context: ForwardContext,
        *,
        input_TI: Float[Array, "T I"] | None = None,
    ) -> tuple[Float[Array, "T D"], LayerPages]:
        """Returns the output of the layer and its pages; `input_TI` is its input from the token."""
        attended_TD, layer_pages = self.attention(self.attention_norm(x_TD), layer_pages, context)
        added_TD = x_TD + self.post_attention_norm(attended_TD)
        fed_TD = self.mlp(self.mlp_norm(added_TD))
        if self.experts is not None:
            fed_TD = self.experts(added_TD, fed_TD)
        out_TD = added_TD + self.post_mlp_norm(fed_TD)
        if self.input is not None and input_TI is not None:
            out_TD = out_TD + self.input(out_TD, input_TI)
        return out_TD * self.scale[...][None], layer_pages


class Gemma4(gemma.Gemma2, config=Gemma4Config):
    """Gemma 4, text (Gemma Team, 2026), has wider heads in full layers; some layers share pages.

    Embeddings and logits are those of Gemma 2. Norms store their scales as they are.
    """

    make_norm = staticmethod(norms.rms_norm)

    def make_others(self, config: Any, at: Scope) -> None:
        """Makes what computes the inputs that layers have of their own, if they have any."""
        inputs = config.inputs
        self.inputs = None if inputs is None else gemma_layers.PerLayerInputs(config, inputs, at)

    @classmethod
    def make_block(cls, config: Any, index: int, layer: Scope) -> nnx.Module:
        """Returns a layer."""
        return Gemma4Layer(config, index, layer)

    def bind_layers(
        self, token_ids_T: Int[Array, "T"], hidden_TD: Float[Array, "T D"], context: ForwardContext
    ) -> Iterable[Any]:
        """Returns the layers, each with its input from the token."""
        if self.inputs is None:
            return self.layers
        if context.vectors is not None:
            is_vector_T, _ = context.vectors
            # transformers gives pictures the inputs of the padding token.
            token_ids_T = jax.numpy.where(is_vector_T, self.config.inputs.padding_id, token_ids_T)
        return gemma_layers.bind_inputs(self.layers, self.inputs(token_ids_T, hidden_TD))
