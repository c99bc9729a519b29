"""Reads formats of quantised weights: what config.json says of them, and their tensors.

This is a room within `jaxpage.checkpoints`, with a door of its own.
"""

from jaxpage.checkpoints.quantization.formats import (
    METHODS,  # are the formats of checkpoints
    SIZES,  # names the fields of a format that have the sizes of its groups
)
from jaxpage.checkpoints.quantization.gguf import (
    FORMATS as GGUF_FORMATS,  # are the kinds of matrices that are kept
)
from jaxpage.checkpoints.quantization.gguf import (
    NAME as GGUF,  # is the name of the scheme that keeps matrices as a GGUF file has them
)
from jaxpage.checkpoints.quantization.gguf import choose_scheme  # makes this scheme
from jaxpage.checkpoints.quantization.on_load import (
    SCHEMES,  # are the formats that are made when a model is loaded
)
from jaxpage.checkpoints.quantization.scheme import (
    UNQUANTISED,  # says in messages what to use instead
    Scheme,  # says how the weights of a model are quantised
)
from jaxpage.checkpoints.quantization.scheme_choice import (
    FIELDS,  # names these fields
    quantization_of,  # finds the scheme by config.json and the settings
    without_quantization,  # gives a config without the fields of quantisation
)
from jaxpage.checkpoints.quantization.stacked import (
    explain_refused_experts,  # says why a format cannot be read where experts are stacked
)
