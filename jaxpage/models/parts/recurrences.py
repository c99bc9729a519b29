"""Makes a recurrent layer in the place of attention."""

from __future__ import annotations

from jaxpage.models.parts.decoder_config import DecoderConfig
from jaxpage.models.parts.scope import Scope
from jaxpage.models.recurrent import RecurrentLayer, RecurrentSpec, make_recurrent


def recurrent_layer(
    config: DecoderConfig, recurrent: RecurrentSpec, index: int, layer: Scope
) -> RecurrentLayer:
    """Returns a layer that keeps a state in place of keys and values.

    Args:
        config: The config of the model.
        recurrent: The widths of the layer.
        index: The number of the layer.
        layer: The scope of the decoder layer.
    """
    return make_recurrent(
        recurrent,
        index,
        width=config.hidden_size,
        epsilon=config.norm_epsilon,
        layer=layer.name,
        dtype=layer.dtype,
    )
