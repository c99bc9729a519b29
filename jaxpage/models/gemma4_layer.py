"""Makes the layers of Gemma 4, and the inputs that each layer has of its own.

Gemma 3n has some of these parts too.
"""

from __future__ import annotations

from dataclasses import dataclass

from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxpage.layers.activations import ACTIVATIONS
from jaxpage.layers.attention import Attention, HeadNorms, Projections, Scores
from jaxpage.layers.context import ForwardContext, LayerPages
from jaxpage.layers.embedding import Embedding
from jaxpage.layers.expert_linear import ExpertLinear, ExpertLinearSpec
from jaxpage.layers.experts import Experts, ExpertsSpec
from jaxpage.layers.linear import Linear, Part, linear
from jaxpage.layers.norms import RMSNorm
from jaxpage.layers.parameter import Axis, parameter, tensor
from jaxpage.layers.routing import Router
from jaxpage.models.config_fields import WrongField
from jaxpage.models.fields import Fields
from jaxpage.models.rotary_decoder import RotaryDecoderSpec, make_mlp

FULL = "full_attention"
SLIDING = "sliding_attention"


@dataclass(frozen=True, kw_only=True)
class Gemma4Spec(RotaryDecoderSpec):
    """Holds what a config says of Gemma 4.

    Attributes:
        layer_types: The type of each layer.
        places: For each layer, the place of the layer whose pages it reads; its own if it writes
            them.
        keys_are_values: True if full layers have no product for values: they take the keys before
            their norm.
        wide_mlp: True if layers that share pages have a feed-forward half of twice the width.
        input_width: The width of the layers' own inputs; None if they have none.
        input_vocab_size: The rows of the table for these inputs.
    """

    layer_types: tuple[str, ...] = ()
    places: tuple[int, ...] = ()
    keys_are_values: bool = False
    wide_mlp: bool = False
    input_width: int | None = None
    input_vocab_size: int = 0

    @property
    def num_layers(self) -> int:
        """Returns the number of layers, of which `kv` has those that write pages."""
        return len(self.places)

    @property
    def idle_tensors(self) -> tuple[str, ...]:
        """Returns globs over tensors of layers that share pages; published files have them."""
        return tuple(
            f"*layers.{layer}.self_attn.{part}.*"
            for layer, place in enumerate(self.places)
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
    first = len(types) - fields.integer("num_kv_shared_layers", default, least=0)
    types_with_pages = types[: max(0, first)]
    if missing := {*types[len(types_with_pages) :]} - {*types_with_pages}:
        text = f"num_kv_shared_layers leaves no layer of type {', '.join(missing)} with keys"
        fields.note(WrongField(text), num_kv_shared_layers=0)
        return tuple(range(len(types)))
    last = {kind: place for place, kind in enumerate(types_with_pages)}
    return (*range(len(types_with_pages)), *(last[kind] for kind in types[len(types_with_pages) :]))


def make_norm(
    spec: Gemma4Spec, name: str | None, dtype: DTypeLike, width: int | None = None
) -> RMSNorm:
    """Returns a norm over the hidden state, or over a head of this width."""
    axis = "embed" if width is None else None
    return RMSNorm(
        width or spec.hidden_size, name=name, epsilon=spec.norm_epsilon, axis=axis, dtype=dtype
    )


def make_product(num_in: int, num_out: int, name: str, dtype: DTypeLike) -> Linear:
    """Returns a product that is not divided among devices."""
    return linear(num_in, Part(num_out, None, name), input_axis=None, bias=False, dtype=dtype)


class PerLayerInputs(nnx.Module):
    """Computes an input for each layer from the token and from its embedding."""

    def __init__(self, spec: Gemma4Spec, *, dtype: DTypeLike):
        assert spec.input_width is not None
        width = spec.num_layers * spec.input_width
        name = spec.name
        self.table = Embedding(
            spec.input_vocab_size,
            width,
            name=f"{name}.embed_tokens_per_layer",
            axis=None,
            dtype=dtype,
        )
        module = f"{name}.per_layer_model_projection"
        self.product = make_product(spec.hidden_size, width, module, dtype)
        self.norm = make_norm(spec, f"{name}.per_layer_projection_norm", dtype, spec.input_width)
        self.scale = spec.hidden_size**-0.5
        self.input_width = spec.input_width

    def __call__(
        self, token_ids_T: Int[Array, "T"], embedded_TD: Float[Array, "T D"]
    ) -> Float[Array, "T L I"]:
        """Returns the inputs of all layers."""
        shape = (len(token_ids_T), -1, self.input_width)
        of_embedding = self.norm((self.product(embedded_TD) * self.scale).reshape(shape))
        of_token = self.table(token_ids_T).reshape(shape) * self.input_width**0.5
        return (of_embedding + of_token) * 2.0**-0.5


class GatedInput(nnx.Module):
    """Takes a layer's own input through a gate that depends on the hidden state."""

    def __init__(self, spec: Gemma4Spec, input_width: int, *, name: str, dtype: DTypeLike):
        width = spec.hidden_size
        self.gate = make_product(width, input_width, f"{name}.per_layer_input_gate", dtype)
        self.product = make_product(input_width, width, f"{name}.per_layer_projection", dtype)
        self.norm = make_norm(spec, f"{name}.post_per_layer_input_norm", dtype)
        self.activation = spec.activation

    def __call__(
        self, x_TD: Float[Array, "T D"], input_TI: Float[Array, "T I"]
    ) -> Float[Array, "T D"]:
        """Returns what is added to the hidden state."""
        gate_TI = ACTIVATIONS[self.activation](self.gate(x_TD))
        return self.norm(self.product(gate_TI * input_TI))


class Gemma4Experts(nnx.Module):
    """Adds chosen experts, which take the input of the feed-forward half before its norm, to it.

    The router has a norm of its own, and each expert a factor of its weight.
    """

    def __init__(self, spec: Gemma4Spec, experts: ExpertsSpec, *, name: str, dtype: DTypeLike):
        width = spec.hidden_size
        count = experts.routing.num_experts
        inner = experts.width

        def stack(part: str, sizes: tuple[int, int], axes: tuple[str, Axis]) -> ExpertLinear:
            return ExpertLinear(
                ExpertLinearSpec(
                    count,
                    *sizes,
                    *axes,
                    name=f"{name}.experts.{part}",
                    transposed=False,
                    modules=(),
                    bias=False,
                    dtype=dtype,
                )
            )

        both: Axis = (("ffn", inner), ("ffn", inner))
        self.experts = Experts(
            stack("gate_up_proj", (width, 2 * inner), ("embed", both)),
            stack("down_proj", (inner, width), ("ffn", "embed")),
            activation=spec.activation,
            swiglu=None,
        )
        router = f"{name}.router"
        self.router = Router(
            experts.routing,
            width,
            weight=tensor(f"{router}.proj.weight", count, width),
            bias=tensor(f"{router}.bias", count),
            correction=tensor(f"{router}.correction", count),
            dtype=dtype,
        )
        self.router_norm = make_norm(spec, None, dtype)
        self.router_scale = parameter(
            (width,), axes=("embed",), dtype=dtype, sources=[tensor(f"{router}.scale", width)]
        )
        self.factor = parameter(
            (count,),
            axes=(None,),
            dtype=dtype,
            sources=[tensor(f"{router}.per_expert_scale", count)],
        )
        self.norm = make_norm(spec, f"{name}.pre_feedforward_layernorm_2", dtype)
        self.behind = make_norm(spec, f"{name}.post_feedforward_layernorm_2", dtype)
        self.behind_dense = make_norm(spec, f"{name}.post_feedforward_layernorm_1", dtype)

    def __call__(
        self, x_TD: Float[Array, "T D"], dense_TD: Float[Array, "T D"]
    ) -> Float[Array, "T D"]:
        """Returns the sum of the experts' output and that of the dense half."""
        scale = x_TD.shape[1] ** -0.5
        routed_TD = self.router_norm(x_TD) * self.router_scale[...][None] * scale
        expert_TX, weight_TX = self.router(routed_TD)
        weight_TX = weight_TX * self.factor[...][expert_TX]
        made_TD = self.experts(self.norm(x_TD), expert_TX, weight_TX)
        return self.behind_dense(dense_TD) + self.behind(made_TD)


def make_attention(spec: Gemma4Spec, layer: int, *, name: str, dtype: DTypeLike) -> Attention:
    """Returns the attention of a layer, without keys and values if it shares pages."""
    place = spec.places[layer]
    num_kv_heads, head = spec.kv.heads_of(place)
    queries = spec.num_query_heads * head
    parts = [Part(queries, "heads", f"{name}.q_proj")]
    key_norm = value_norm = None
    if place == layer:
        projections = ["k_proj", "v_proj"]
        if spec.keys_are_values and spec.layer_types[layer] == FULL:
            projections = ["k_proj"]
        parts += [Part(num_kv_heads * head, "kv_heads", f"{name}.{part}") for part in projections]
        key_norm = make_norm(spec, f"{name}.k_norm", dtype, head)
        value_norm = make_norm(spec, None, dtype, head)
    bias = spec.attention_input_bias
    width = spec.hidden_size
    out = Part(width, "embed", f"{name}.o_proj")
    return Attention(
        place,
        Projections(
            linear(width, *parts, input_axis="embed", bias=bias, dtype=dtype),
            linear(queries, out, input_axis="heads", bias=spec.attention_output_bias, dtype=dtype),
        ),
        head_dim=head,
        rope=spec.rope_of(layer),
        norms=HeadNorms(make_norm(spec, f"{name}.q_norm", dtype, head), key_norm, value_norm),
        scores=Scores(scale=spec.attention_scale, sliding_window=spec.kv.sliding_windows[place]),
    )


class Gemma4Layer(nnx.Module):
    """Computes attention, the feed-forward half with or without experts, and the layer's input."""

    def __init__(self, spec: Gemma4Spec, layer_index: int, *, name: str, dtype: DTypeLike):
        """Makes the layer.

        Args:
            spec: The spec of the model.
            layer_index: The layer's place in its model.
            name: The layer's name in the checkpoint.
            dtype: The type of the parameters.
        """
        shares = spec.places[layer_index] != layer_index
        wide = 2 if shares and spec.wide_mlp else 1
        self.attention_norm = make_norm(spec, f"{name}.input_layernorm", dtype)
        self.attention = make_attention(spec, layer_index, name=f"{name}.self_attn", dtype=dtype)
        self.post_attention_norm = make_norm(spec, f"{name}.post_attention_layernorm", dtype)
        self.mlp_norm = make_norm(spec, f"{name}.pre_feedforward_layernorm", dtype)
        inner = wide * spec.feed_forward_width
        self.mlp = make_mlp(spec, name=f"{name}.mlp", inner_width=inner, dtype=dtype)
        self.post_mlp_norm = make_norm(spec, f"{name}.post_feedforward_layernorm", dtype)
        self.experts = (
            None
            if spec.experts is None
            else Gemma4Experts(spec, spec.experts, name=name, dtype=dtype)
        )
        self.input = (
            None
            if spec.input_width is None
            else GatedInput(spec, spec.input_width, name=name, dtype=dtype)
        )
        scalar = tensor(f"{name}.layer_scalar", 1)
        self.scale = parameter((1,), axes=(None,), dtype=dtype, sources=[scalar])

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
