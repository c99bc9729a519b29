"""Typed reading of config.json: a field that is missing, mistyped or not honoured is an error that names it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

from jaxpage.errors import CheckpointError, UnsupportedError
from jaxpage.layers.activations import ACTIVATIONS
from jaxpage.layers.rope import Rope
from jaxpage.layers.rope_scaling import make_rope

REQUIRED: Any = object()  # as a default: the field has none

# Fields of any config that would change the mathematics, and what they stand for; absent, null, false and empty pass.
_NOT_HONOURED = {
    "quantization_config": "quantised weights",
    "compression_config": "quantised weights",
    "per_layer_config": "layers that differ from each other",
    "pruned_heads": "pruned attention heads",
    "add_cross_attention": "cross attention",
    "is_encoder_decoder": "an encoder",
}


class Fields:
    """config.json of one family. Defaults are those of the transformers config class, and null is a value like others.

    aliases: other names for a field, as in the class's `attribute_map`: {name here: other name}.
    """

    def __init__(self, config: Mapping[str, Any], model_type: str, aliases: Mapping[str, str] | None = None):
        self.config = config
        self.aliases = aliases or {}
        if config.get("model_type", model_type) != model_type:
            raise CheckpointError(
                f"config.json: architectures {config.get('architectures')} are of model_type {model_type!r}, "
                f"but model_type is {config['model_type']!r}"
            )
        for name, meaning in _NOT_HONOURED.items():
            if config.get(name):
                raise UnsupportedError(f"config.json: {name} ({meaning}) is not supported")
        if config.get("is_causal", True) is not True:
            raise UnsupportedError("config.json: is_causal = false (attention to later tokens) is not supported")

    def get(self, name: str, default: Any = REQUIRED) -> Any:
        """The raw value of a field, under its name or its alias."""
        present = [key for key in (name, self.aliases.get(name)) if key is not None and key in self.config]
        if len({repr(self.config[key]) for key in present}) > 1:
            raise CheckpointError(f"config.json: {' and '.join(present)} contradict each other")
        if present:
            return self.config[present[0]]
        if default is REQUIRED:
            raise CheckpointError(f"config.json lacks {name}")
        return default

    def integer(self, name: str, default: Any = REQUIRED, *, least: int = 1) -> int:
        value = self.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise CheckpointError(f"config.json: {name} must be an integer >= {least}, not {value!r}")
        return value

    def optional_integer(self, name: str, default: int | None) -> int | None:
        return None if self.get(name, default) is None else self.integer(name, default)

    def number(self, name: str, default: float) -> float:
        """A finite number above zero."""
        value = self.get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise CheckpointError(f"config.json: {name} must be a positive number, not {value!r}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise CheckpointError(f"config.json: {name} must be true or false, not {value!r}")
        return value

    def activation(self, name: str, default: str) -> str:
        value = self.get(name, default)
        if not isinstance(value, str) or value not in ACTIVATIONS:
            raise UnsupportedError(f"config.json: {name} = {value!r} is not one of {', '.join(ACTIVATIONS)}")
        return value

    def divided(self, name: str, divisor_name: str) -> int:
        """One field over another, which must divide it: the head width, where no field gives it."""
        value, divisor = self.integer(name), self.integer(divisor_name)
        if value % divisor:
            raise CheckpointError(f"config.json: {divisor_name} = {divisor} does not divide {name} = {value}")
        return value // divisor

    def rope(self, head_width: int, max_position_embeddings: int) -> tuple[Rope, int]:
        """The rotary embedding and the number of positions it holds for; see `make_rope`."""
        if head_width % 2:
            raise CheckpointError(f"config.json: the rotary embedding needs an even head width, not {head_width}")
        parameters = self._rope_parameters(max_position_embeddings)
        if (self.get("partial_rotary_factor", None) or parameters.get("partial_rotary_factor") or 1.0) != 1.0:
            raise UnsupportedError("config.json: partial_rotary_factor other than 1 is not supported for this family")
        if parameters.get("mrope_section"):
            raise UnsupportedError("config.json: mrope_section (positions with several axes) is not supported")
        return make_rope(parameters, head_width=head_width, max_position_embeddings=max_position_embeddings)

    def _rope_parameters(self, max_position_embeddings: int) -> dict[str, Any]:
        """`rope_parameters` of transformers 5, or `rope_scaling` and `rope_theta` of older versions, as one dict."""
        old, new = self.get("rope_scaling", None), self.get("rope_parameters", None)
        for name, value in (("rope_scaling", old), ("rope_parameters", new)):
            if value is not None and not isinstance(value, dict):
                raise CheckpointError(f"config.json: {name} must be an object or null, not {value!r}")
        if old and new and old != new:
            raise CheckpointError("config.json: rope_scaling and rope_parameters contradict each other")
        parameters = dict(cast("dict[str, Any]", old or new or {}))
        if any(isinstance(value, dict) for value in parameters.values()):
            raise UnsupportedError("config.json: rope_parameters by layer type are not supported for this family")
        parameters.setdefault("rope_theta", self.get("rope_theta", 10_000.0))
        parameters.setdefault("rope_type", parameters.get("type", "default"))
        # As in transformers, a length at the top of the file outranks the one in the dict.
        original = self.get("original_max_position_embeddings", None)
        if original is not None:
            parameters["original_max_position_embeddings"] = original
        parameters.setdefault("original_max_position_embeddings", max_position_embeddings)
        return parameters
