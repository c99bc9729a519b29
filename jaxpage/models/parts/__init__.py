"""Holds the parts of which the pages of models are composed.

    decoder              a model and its layers; a page makes its block, and what else differs
    decoder_config       what config.json says of most decoders
    attention, mlp, experts, latent, norms, recurrences
                         functions that make these parts of a layer
    names                names of modules in a checkpoint

Pages import these modules and call what they have, as in `attention.grouped_query_attention`, and
classes by their names. The name that nearly every page imports is here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxpage.lazy import open_door

if TYPE_CHECKING:
    from jaxpage.models.parts.names import (
        Scope,  # names a module in a checkpoint, and the type of its parameters
    )

__getattr__, __dir__ = open_door(__name__)
