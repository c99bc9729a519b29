"""Makes a mixture of experts in the place of a feed-forward half."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

from jaxpage.layers.experts import ExpertsSpec, MixtureOfExperts
from jaxpage.layers.linear import Linear
from jaxpage.layers.mlp import MLP, GatedMLP
from jaxpage.models.experts import PLAIN_NAMES, ExpertNames, make_experts
from jaxpage.models.parts.decoder_config import DecoderConfig
from jaxpage.models.parts.mlp import LLAMA_NAMES, MLPNames, gated_mlp
from jaxpage.models.parts.scope import Scope


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig(DecoderConfig):
    """Holds what the config of a decoder with experts says.

    Attributes:
        experts: The experts; None if no layer has any.
        sparse_layers: True for each layer with experts.
    """

    experts: ExpertsSpec | None
    sparse_layers: tuple[bool, ...]

    def experts_of(self, index: int) -> ExpertsSpec | None:
        """Returns the experts of a layer; None if it has a feed-forward half without."""
        return self.experts if self.sparse_layers[index] else None

    def of_draft_layer(self) -> ExpertsConfig:
        """Returns the config of an MTP head's layer, which has experts if the model has."""
        config = cast(ExpertsConfig, super().of_draft_layer())
        return replace(config, sparse_layers=(self.experts is not None,))


def mlp_or_experts(
    config: ExpertsConfig,
    index: int,
    layer: Scope,
    *,
    names: ExpertNames = PLAIN_NAMES,
    mlp_names: MLPNames = LLAMA_NAMES,
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
    if experts.shared_width is None:
        return mixture_of_experts(config, experts, layer, names=names)
    shared_name, gate = names.shared
    shared = gated_mlp(
        config, at / (shared_name or ""), names=mlp_names, width=experts.shared_width
    )
    return mixture_of_experts(
        config, experts, layer, names=names, shared=shared, shared_gate=gate and (at / gate).name
    )


def mixture_of_experts(
    config: DecoderConfig,
    experts: ExpertsSpec,
    layer: Scope,
    *,
    names: ExpertNames = PLAIN_NAMES,
    shared: MLP | GatedMLP | None = None,
    shared_gate: str | None = None,
    latent: tuple[Linear, Linear] | None = None,
) -> MixtureOfExperts:
    """Returns experts, of which each token takes a few.

    Args:
        config: The config of the model.
        experts: The experts.
        layer: The scope of the layer.
        names: The names of their weights.
        shared: The expert of all tokens; None if there is none.
        shared_gate: The name of the weight of its gate; None if it has no gate.
        latent: The products before and after the routed experts, if `latent_width` is given.
    """
    return make_experts(
        experts,
        config.hidden_size,
        names,
        layer=layer.name,
        activation=config.activation,
        shared=None if shared is None else (shared, shared_gate),
        latent=latent,
        dtype=layer.dtype,
    )
