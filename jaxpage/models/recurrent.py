"""Makes recurrent layers with their names in a checkpoint."""

from __future__ import annotations

from typing import TypeAlias

from jax.typing import DTypeLike

from jaxpage.layers.delta_net import DeltaWidths, GatedDeltaNet
from jaxpage.layers.mamba import Mamba2, MambaSpec
from jaxpage.models.delta_config import make_delta_net
from jaxpage.models.mamba_config import make_mamba

RecurrentSpec: TypeAlias = DeltaWidths | MambaSpec
RecurrentLayer: TypeAlias = GatedDeltaNet | Mamba2


def make_recurrent(
    spec: RecurrentSpec,
    layer_index: int,
    *,
    width: int,
    epsilon: float,
    layer: str,
    dtype: DTypeLike,
) -> RecurrentLayer:
    """Returns the module.

    Args:
        spec: The description of the layer.
        layer_index: The layer's place in its model.
        width: The width of the model.
        epsilon: The epsilon of the norm.
        layer: The name of the decoder layer in the checkpoint.
        dtype: The type of the parameters.
    """
    if isinstance(spec, MambaSpec):
        return make_mamba(
            spec, layer_index, width=width, epsilon=epsilon, name=f"{layer}.mamba", dtype=dtype
        )
    return make_delta_net(
        spec, layer_index, width=width, epsilon=epsilon, name=f"{layer}.linear_attn", dtype=dtype
    )
