"""Makes a mixture of experts in the place of a feed-forward half, with its names in a checkpoint.

The experts are apart, as they are published, or stacked, as transformers keeps them in memory.
"""

from __future__ import annotations

import jax

from jaxpage.layers import MLP, ExpertsSpec, GatedMLP, Linear
from jaxpage.layers.expert_linear import ExpertLinear, ExpertLinearSpec
from jaxpage.layers.experts import Experts, MixtureOfExperts
from jaxpage.layers.parameter import Axis, Piece, Source, Stored, tensor
from jaxpage.layers.routing import Router, Routing
from jaxpage.models.parameters.weights import FLOATS
from jaxpage.models.parts.decoder_config import ExpertsConfig
from jaxpage.models.parts.mlp import gated_mlp
from jaxpage.models.parts.names import LLAMA_MLP, QWEN_EXPERTS, ExpertNames, MLPNames, Scope


def mlp_or_experts(
    config: ExpertsConfig,
    index: int,
    layer: Scope,
    *,
    names: ExpertNames = QWEN_EXPERTS,
    mlp_names: MLPNames = LLAMA_MLP,
) -> GatedMLP | MixtureOfExperts:
    """Returns the experts of a layer, or its feed-forward half with gates.

    Args:
        config: The config of the model.
        index: The number of the layer.
        layer: The scope of the layer.
        names: The names of the experts' weights.
        mlp_names: The names of the products of the half, and of the expert of all tokens.
    """
    at = layer / mlp_names.module
    experts = config.experts_of(index)
    if experts is None:
        return gated_mlp(config, at, names=mlp_names)
    shared = None
    if experts.shared_width is not None:
        name, gate = names.shared
        half = gated_mlp(config, at / (name or ""), names=mlp_names, width=experts.shared_width)
        shared = half, gate and (at / gate).name
    return make_experts(
        experts,
        config.hidden_size,
        names,
        layer=layer.name,
        activation=config.activation,
        shared=shared,
        dtype=layer.dtype,
    )


def make_experts(
    spec: ExpertsSpec,
    hidden_size: int,
    names: ExpertNames,
    *,
    layer: str,
    activation: str,
    shared: tuple[MLP | GatedMLP, str | None] | None,
    latent: tuple[Linear, Linear] | None = None,
    dtype: jax.typing.DTypeLike,
) -> MixtureOfExperts:
    """Returns the mixture of experts of a layer.

    Args:
        spec: The experts.
        hidden_size: The width of the model.
        names: The names of the weights.
        layer: The name of the layer in the checkpoint.
        activation: The name of the activation function.
        shared: The expert of all tokens, and the weight of its gate; None if there is none.
        latent: The products before and after the routed experts; see `MixtureOfExperts`.
        dtype: The type of the parameters.
    """
    published = f"{layer}.{names.module}"
    in_memory = f"{layer}.{names.in_memory[0]}"
    together = dict(zip(("gate_up_proj", "down_proj"), names.together, strict=False))
    inner = spec.width
    count = spec.routing.num_experts

    def stack(
        part: str, num_out: int, num_in: int, axes: tuple[Axis, str], parts: tuple[str, ...]
    ) -> ExpertLinear:
        separate = [] if names.only_stacked or names.together else range(count)
        modules = tuple(
            tuple(f"{published}.experts.{expert}.{part}" for part in parts) for expert in separate
        )
        name = f"{in_memory}.experts.{part}"
        aliases = (f"{published}.{together[part]}.weight",) if together else ()
        output_axis, input_axis = axes
        return ExpertLinear(
            ExpertLinearSpec(
                *(count, num_in, num_out, input_axis, output_axis),
                name,
                names.only_stacked,
                modules,
                bias=spec.swiglu is not None,
                dtype=dtype,
                aliases=aliases,
                in_rows_too=names.in_rows_too,
            )
        )

    outer = spec.latent_width or hidden_size
    # GPT-OSS stores gates and ups by turns, so that any range of columns has both.
    gate_up_axis: Axis = "ffn" if spec.swiglu else (("ffn", inner), ("ffn", inner))
    if spec.has_gates:
        up = stack(
            "gate_up_proj", 2 * inner, outer, (gate_up_axis, "embed"), (names.gate, names.up)
        )
    else:
        up = stack("up_proj", inner, outer, ("ffn", "embed"), (names.up,))
    down = stack("down_proj", outer, inner, ("embed", "ffn"), (names.down,))
    experts = Experts(
        up, down, activation=activation, swiglu=spec.swiglu, scales_input=spec.scales_input
    )
    router = _make_router(spec.routing, hidden_size, names, layer, dtype)
    return MixtureOfExperts(router, experts, hidden_size, shared=shared, latent=latent, dtype=dtype)


def _make_router(
    routing: Routing, hidden_size: int, names: ExpertNames, layer: str, dtype: jax.typing.DTypeLike
) -> Router:
    """Returns the router of a layer; see `make_experts`."""
    count = routing.num_experts
    published = f"{layer}.{names.module}"
    module, router, correction = names.in_memory
    in_memory = f"{layer}.{module}"
    return Router(
        routing,
        hidden_size,
        weight=_either(f"{published}.{names.router}", f"{in_memory}.{router}", count, hidden_size),
        bias=tensor(f"{published}.{names.router}.bias", count),
        correction=_corrections(
            f"{published}.{names.correction}",
            f"{in_memory}.{correction}",
            (1, count) if names.corrections_in_row else (count,),
        ),
        dtype=dtype,
    )


def _either(published: str, in_memory: str, *shape: int) -> Source:
    """Returns the source of a module's weight, which has one of two names."""
    aliases = () if published == in_memory else (f"{in_memory}.weight",)
    return tensor(f"{published}.weight", *shape, aliases=aliases)


def _corrections(published: str, in_memory: str, stored_shape: tuple[int, ...]) -> Source:
    """Returns the source of corrections [E], whose tensor has one of two names."""
    aliases = () if published == in_memory else (in_memory,)
    shape = stored_shape[-1:]
    stored = Stored(FLOATS, lambda array: array.reshape(shape))
    piece = Piece(published, stored_shape, shape, (0,), aliases=aliases, stored=stored)
    return Source(shape, (piece,))
