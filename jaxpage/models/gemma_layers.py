"""Makes what the layers of Gemma 3n and Gemma 4 have in common.

Some layers read the pages of another one, heads may be wider in full layers, and each layer may
have its own input, computed from the token.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from flax import nnx
from jaxtyping import Array, Float, Int

from jaxpage.layers import ACTIVATIONS, Attention, Embedding, HeadNorms, Linear, Projections, Scores
from jaxpage.layers.linear import Part, linear
from jaxpage.models.config import Fields
from jaxpage.models.gemma import SLIDING
from jaxpage.models.parts import DecoderConfig, Scope, norms


@dataclass(frozen=True)
class LayerForm:
    """Says what differs from layer to layer.

    Attributes:
        place: The number of the layer whose pages it reads; its own if it writes them.
        intermediate_size: The width of its feed-forward half.
        keys_are_values: True if it has no projection to values, which are the keys before their
            norm.
        sparsity: The share of its gates that are cut off; 0 for none.
        sees_ahead: False if the tokens of a picture see no later ones, in a model in whose layers
            with a window they do.
    """

    place: int
    intermediate_size: int
    keys_are_values: bool = False
    sparsity: float = 0.0
    sees_ahead: bool = True


@dataclass(frozen=True)
class InputsForm:
    """Describes the inputs that layers have of their own.

    Attributes:
        width: The width of an input.
        vocab_size: The number of rows of their table.
        padding_id: The token whose inputs layers get where a vector takes the place of a token.
    """

    width: int
    vocab_size: int
    padding_id: int = 0


@dataclass(frozen=True, kw_only=True)
class Gemma4LayersConfig(DecoderConfig):
    """Holds what the configs of Gemma 4 and of Gemma 3n say.

    Attributes:
        layer_forms: What differs from layer to layer.
        inputs: The inputs that layers have of their own; None if they have none.
        logit_softcap: The soft cap of logits; None for none.
    """

    layer_forms: tuple[LayerForm, ...]
    inputs: InputsForm | None
    logit_softcap: float | None

    @property
    def layer_places(self) -> Sequence[int]:
        """Returns for each layer the place of its pages; see `run_layers`."""
        return [form.place for form in self.layer_forms]

    @property
    def idle_tensors(self) -> tuple[str, ...]:
        """Returns globs over tensors of layers that share pages; published files have them."""
        return tuple(
            f"*layers.{layer}.self_attn.{part}.*"
            for layer, place in enumerate(self.layer_places)
            if place != layer
            for part in ("k_proj", "v_proj", "k_norm", "v_norm")
        )


def find_shared_layers(fields: Fields, types: tuple[str, ...], default: int) -> tuple[int, ...]:
    """Returns, for each layer, the place of the layer whose pages it reads.

    Args:
        fields: The fields of the config.
        types: The type of each layer.
        default: The default of `num_kv_shared_layers`.
    """
    first = len(types) - fields.integer("num_kv_shared_layers", default, minimum=0)
    types_with_pages = types[: max(0, first)]
    if missing := {*types[len(types_with_pages) :]} - {*types_with_pages}:
        text = (
            f"num_kv_shared_layers leaves no layer of type {', '.join(sorted(missing))} with keys"
        )
        fields.note_wrong(text, num_kv_shared_layers=0)
        return tuple(range(len(types)))
    last = {kind: index for index, kind in enumerate(types_with_pages)}
    return (*range(len(types_with_pages)), *(last[kind] for kind in types[len(types_with_pages) :]))


def cache_of_types(types: Sequence[str], places: Sequence[int], window: int) -> dict[str, Any]:
    """Returns the fields of `KVSpec` for a cache whose last layers are read by others.

    Args:
        types: The type of each layer.
        places: For each layer, the place of the layer whose pages it reads.
        window: The window of layers that slide.
    """
    types_with_pages = types[: 1 + max(places)]
    return {
        "num_layers": len(types_with_pages),
        "sliding_windows": tuple(window if kind == SLIDING else None for kind in types_with_pages),
        "decoder_layers": len(types),
    }


def whole_projection(num_in: int, at: Scope, name: str, num_out: int) -> Linear:
    """Returns a projection that is not sharded over devices."""
    return at.projection(num_in, (name, num_out), axes=(None, None))


class PerLayerInputs(nnx.Module):
    """Computes an input for each layer from the token and from its embedding."""

    def __init__(self, config: Gemma4LayersConfig, inputs: InputsForm, at: Scope):
        """Makes the table and the projection.

        Args:
            config: The config of the model.
            inputs: What it says of the inputs.
            at: The scope of the decoder.
        """
        width = config.num_layers * inputs.width
        table = (at / "embed_tokens_per_layer").name
        norm = at / "per_layer_projection_norm"
        self.table = Embedding(inputs.vocab_size, width, name=table, axis=None, dtype=at.dtype)
        self.projection = whole_projection(
            config.hidden_size, at, "per_layer_model_projection", width
        )
        self.norm = norms.rms_norm(config, norm, width=inputs.width, axis=None)
        self.scale = config.hidden_size**-0.5
        self.input_width = inputs.width

    def __call__(
        self, token_ids_T: Int[Array, "T"], embedded_TD: Float[Array, "T D"]
    ) -> Float[Array, "T L I"]:
        """Returns the inputs of all layers."""
        shape = (len(token_ids_T), -1, self.input_width)
        of_embedding = self.norm((self.projection(embedded_TD) * self.scale).reshape(shape))
        # Like the token table of Gemma this one is scaled by the root of its width. The factor of
        # the sum is `per_layer_input_scale` of transformers.
        of_token = self.table(token_ids_T).reshape(shape) * self.input_width**0.5
        return (of_embedding + of_token) * 2.0**-0.5


def bind_inputs(layers: Iterable[Any], inputs_TLI: Float[Array, "T L I"]) -> list[Any]:
    """Returns layers, each with its own input."""
    return [
        functools.partial(layer, input_TI=inputs_TLI[:, number])
        for number, layer in enumerate(layers)
    ]


class GatedInput(nnx.Module):
    """Takes a layer's own input through a gate that depends on the hidden state."""

    def __init__(self, config: Gemma4LayersConfig, input_width: int, layer: Scope):
        width = config.hidden_size
        self.gate = whole_projection(width, layer, "per_layer_input_gate", input_width)
        self.projection = whole_projection(input_width, layer, "per_layer_projection", width)
        self.norm = norms.rms_norm(config, layer / "post_per_layer_input_norm")
        self.activation = config.activation

    def __call__(
        self, x_TD: Float[Array, "T D"], input_TI: Float[Array, "T I"]
    ) -> Float[Array, "T D"]:
        """Returns what is added to the hidden state."""
        gate_TI = ACTIVATIONS[self.activation](self.gate(x_TD))
        return self.norm(self.projection(gate_TI * input_TI))


def gemma4_attention(config: Gemma4LayersConfig, index: int, at: Scope) -> Attention:
    """Returns the attention of a layer, without keys and values if it reads those of another.

    Args:
        config: The config of the model.
        index: The number of the layer.
        at: The scope of the attention.
    """
    form = config.layer_forms[index]
    num_kv_heads, head_dim = config.kv.heads_of(form.place)
    query_rows = config.num_query_heads * head_dim
    width, bias = config.hidden_size, config.attention_bias
    parts = [Part(query_rows, "heads", (at / "q_proj").name)]
    key_norm = value_norm = None
    if form.place == index:
        names = ["k_proj"] if form.keys_are_values else ["k_proj", "v_proj"]
        parts += [Part(num_kv_heads * head_dim, "kv_heads", (at / name).name) for name in names]
        key_norm = norms.rms_norm(config, at / "k_norm", width=head_dim, axis=None)
        # It has no scale, so that no checkpoint has it.
        value_norm = norms.rms_norm(config, None, width=head_dim)
    query_norm = norms.rms_norm(config, at / "q_norm", width=head_dim, axis=None)
    return Attention(
        form.place,
        Projections(
            linear(width, *parts, input_axis="embed", bias=bias, dtype=at.dtype),
            at.projection(query_rows, ("o_proj", width), axes=("heads", "embed"), bias=bias),
        ),
        head_dim=head_dim,
        rope=config.rope_of(index),
        norms=HeadNorms(query_norm, key_norm, value_norm),
        scores=Scores(
            # The norms of queries and keys take the place of the factor 1 / sqrt(head width).
            scale=1.0,
            sliding_window=config.kv.sliding_windows[form.place],
            sees_ahead=form.sees_ahead,
        ),
    )
