"""Reads formats of quantised weights: what config.json says of them, and their tensors.

This is a room within `jaxpage.checkpoints`, with a door of its own. Other rooms take:

    Scheme                says how the weights of a model are quantised
    quantization_of       finds the scheme by config.json and the settings
    without_quantization  gives a config without the fields of quantisation
    FIELDS                names these fields
    METHODS               are the formats of checkpoints
    SIZES                 names the fields of a format that have the sizes of its groups
    SCHEMES               are the formats that are made when a model is loaded
    UNQUANTISED           says in messages what to use instead
    explain_refused_experts       says why a format cannot be read where experts are stacked
    GGUF                  is the name of the scheme that keeps matrices as a GGUF file has them
    GGUF_FORMATS          are the kinds of matrices that are kept
    choose_scheme         makes this scheme
"""

from jaxpage.checkpoints.quantization.formats import METHODS, SIZES
from jaxpage.checkpoints.quantization.gguf import FORMATS as GGUF_FORMATS
from jaxpage.checkpoints.quantization.gguf import NAME as GGUF
from jaxpage.checkpoints.quantization.gguf import choose_scheme
from jaxpage.checkpoints.quantization.on_load import SCHEMES
from jaxpage.checkpoints.quantization.scheme import UNQUANTISED, Scheme
from jaxpage.checkpoints.quantization.scheme_choice import (
    FIELDS,
    quantization_of,
    without_quantization,
)
from jaxpage.checkpoints.quantization.stacked import explain_refused_experts

__all__ = [
    "FIELDS",
    "GGUF",
    "GGUF_FORMATS",
    "METHODS",
    "SCHEMES",
    "SIZES",
    "UNQUANTISED",
    "Scheme",
    "choose_scheme",
    "explain_refused_experts",
    "quantization_of",
    "without_quantization",
]
