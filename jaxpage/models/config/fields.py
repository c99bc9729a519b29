"""Reads config.json of a model family, with the defaults of its class in transformers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from jaxpage.errors import CheckpointError
from jaxpage.layers import ACTIVATIONS, Rope
from jaxpage.layers.rope_scaling import LENGTH, SCALINGS, make_rope, wrong_parameters
from jaxpage.models.config.config_fields import ConfigFields, FieldError, RefusedField, WrongField

T = TypeVar("T")
REQUIRED: Any = object()  # A default that says that there is none.
_ROPE_FIELDS = (
    "rope_scaling",
    "rope_parameters",
    "partial_rotary_factor",
    "original_max_position_embeddings",
)
NO_ROPE: dict[str, Any] = {
    **dict.fromkeys(_ROPE_FIELDS),
    "rope_theta": 10_000.0,
    "rope_local_base_freq": 10_000.0,
}
_SIZE = 64  # This size is read in the place of one that is missing or wrong.


# These fields would change the mathematics of any model. Absent, null, false and empty values pass.
_NOT_HONOURED = {
    "quantization_config": "quantised weights",
    "compression_config": "quantised weights",
    "per_layer_config": "layers that differ from each other",
    "pruned_heads": "pruned attention heads",
    "add_cross_attention": "cross attention",
    "is_encoder_decoder": "an encoder",
}

# Model types that published files have beside the architecture of another family.
_OTHER_MODEL_TYPES = {"kimi_k2": "deepseek_v3", "mimo": "qwen2"}


def text_part(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config of the text model of a model that takes images too.

    It has the fields of the text model, and those that both parts share.
    """
    text = config.get("text_config")
    if not isinstance(text, dict):
        return dict(config)
    common = {
        name: value
        for name, value in config.items()
        if name not in ("text_config", "vision_config", "audio_config", "model_type")
    }
    decided = {
        name: config[name] for name in ("architectures", "tie_word_embeddings") if name in config
    }
    return {**common, **text, **decided}


def without_axes(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config without the axes of positions (mrope), which are the same in a text."""
    changed = dict(config)
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(rope := config.get(name), dict):
            fields = {
                key: value
                for key, value in rope.items()
                if key not in ("mrope_section", "mrope_interleaved")
            }
            plain = {key: "default" for key in ("type", "rope_type") if fields.get(key) == "mrope"}
            changed[name] = {**fields, **plain}
    return changed


class Fields(ConfigFields):
    """Holds the fields of one family.

    Defaults are those of the transformers config class, and null is a value like others.
    """

    def __init__(
        self, config: Mapping[str, Any], model_type: str, aliases: Mapping[str, str] | None = None
    ) -> None:
        """Takes a config and notes what no family supports.

        Args:
            config: The config, in which nothing of a text model is nested.
            model_type: The model type of the family.
            aliases: Other names of fields, as the class has them in `attribute_map`.
        """
        super().__init__(config)
        self.aliases = aliases or {}
        # Errors are raised at the end of the block, or when the first field is read.
        self._collects = True
        named = config.get("model_type", model_type)
        if named != model_type and _OTHER_MODEL_TYPES.get(str(named)) != model_type:
            self.note_wrong(
                f"architectures {config.get('architectures')} are of model_type "
                f"{model_type!r}, but model_type is {named!r}",
                model_type=model_type,
            )
        for name, meaning in _NOT_HONOURED.items():
            if config.get(name):
                self.note_unsupported(f"{name} ({meaning}) is not supported", **{name: None})
        if config.get("is_causal", True) is not True:
            text = "is_causal = false (attention to later tokens) is not supported"
            self.note_unsupported(text, is_causal=True)
        self._collects = False

    def get(self, name: str, default: Any = REQUIRED) -> Any:
        """Returns the raw value of a field, under its name or its alias."""
        self._raise_outside()
        present = [key for key in self._names(name) if key in self.config]
        # `repr` tells 1 from true, and lists cannot be members of a set.
        if len({repr(self.config[key]) for key in present}) > 1:
            values = " and ".join(f"{key} = {self.config[key]!r}" for key in present)
            self._instead(WrongField(f"{values} contradict each other"), name, self.config[name])
        if present:
            return self.config[present[0]]
        if default is REQUIRED:
            self.note_wrong(f"{name} is missing", **{name: _SIZE})
            return _SIZE
        return default

    def _instead(self, error: FieldError, name: str, value: T) -> T:
        """Notes an error of a field, and returns a value, which is read from now on."""
        self.note(error, **dict.fromkeys(self._names(name), value))
        return value

    def _names(self, name: str) -> list[str]:
        """Returns the name of a field, and its alias if it has one."""
        return [name, self.aliases[name]] if name in self.aliases else [name]

    def in_file(self, name: str) -> str:
        """Returns the name that the file has for a field."""
        return next((alias for alias in self._names(name) if alias in self.config), name)

    def integer(self, name: str, default: Any = REQUIRED, *, minimum: int = 1) -> int:
        """Returns an integer that is at least `minimum`."""
        value = self.get(name, default)
        if isinstance(value, int) and not isinstance(value, bool) and value >= minimum:
            return value
        alias = self.in_file(name)
        error = WrongField(f"{alias} must be an integer >= {minimum}, not {value!r}")
        instead: int = self._instead(error, name, _SIZE if default is REQUIRED else default)
        return instead

    def optional_integer(self, name: str, default: int | None) -> int | None:
        """Returns a positive integer, or None for null."""
        return None if self.get(name, default) is None else self.integer(name, default)

    def number(self, name: str, default: float) -> float:
        """Returns a finite number above zero."""
        value = self.get(name, default)
        if (
            not isinstance(value, int | float)
            or isinstance(value, bool)
            or not 0 < value < math.inf
        ):
            error = WrongField(f"{name} must be a positive number, not {value!r}")
            return self._instead(error, name, default)
        return float(value)

    def optional_number(self, name: str, default: float | None) -> float | None:
        """Returns a finite number above zero, or None for null."""
        return (
            None
            if self.get(name, default) is None
            else self.number(name, 1.0 if default is None else default)
        )

    def layer_types(
        self,
        default: Sequence[str],
        *,
        kinds: Sequence[str] = ("full_attention", "sliding_attention"),
        older: Mapping[str, str] | None = None,
    ) -> tuple[str, ...]:
        """Returns `layer_types`: for each layer one of the kinds that this family has.

        Args:
            default: The kinds of the layers where the field is absent or null.
            kinds: The kinds that this family has.
            older: The names that kinds have in older files, with those of today.
        """
        types = self.get("layer_types", None)
        types = list(default) if types is None else types
        if isinstance(types, list) and older:
            types = [older.get(kind, kind) if isinstance(kind, str) else kind for kind in types]
        if not isinstance(types, list) or len(types) != len(default):
            text = (
                f"{self.in_file('layer_types')} must name each of the {len(default)} layers, not "
                f"{types!r}"
            )
            self.note_wrong(text, layer_types=None, num_hidden_layers=len(default))
            return tuple(default)
        unknown = sorted({str(kind) for kind in types} - {*kinds})
        if unknown:
            text = f"{self.in_file('layer_types')} {', '.join(unknown)} are not supported"
            self.note_unsupported(text, layer_types=None)
            return tuple(default)
        return tuple(types)

    def flag(self, name: str, default: bool) -> bool:
        """Returns a flag. Null is false, as in transformers, whatever the default is."""
        value = self.get(name, default)
        if value is not None and not isinstance(value, bool):
            error = WrongField(f"{name} must be true or false, not {value!r}")
            return self._instead(error, name, default)
        return bool(value)

    def activation(self, name: str, default: str) -> str:
        """Returns the name of an activation function that is known."""
        value = self.get(name, default)
        if not isinstance(value, str) or value not in ACTIVATIONS:
            error = RefusedField(f"{name} = {value!r} is not one of {', '.join(ACTIVATIONS)}")
            return self._instead(error, name, default)
        return value

    def only(self, **values: Any) -> None:
        """Refuses fields that are neither absent, nor null, nor have these values."""
        for name, value in values.items():
            stated = self.get(name, None)
            if stated is not None and stated != value:
                text = f"{name} = {stated!r} is not supported"
                self.note_unsupported(text, **{name: None})

    def refuse_true(self, name: str, reason: str = "") -> None:
        """Refuses a flag that is true; the reason follows in the error."""
        if self.flag(name, False):
            self.note_unsupported(f"{name} = true is not supported{reason}", **{name: False})

    def divide(self, name: str, divisor_name: str) -> int:
        """Returns one field over another, which must divide it.

        This is the head width, where no field gives it.
        """
        value = self.integer(name)
        divisor = self.integer(divisor_name)
        if value % divisor:
            error = WrongField(f"{divisor_name} = {divisor} does not divide {name} = {value}")
            sizes: dict[str, int] = {}
            for key, size in ((divisor_name, divisor), (name, divisor * _SIZE)):
                sizes |= dict.fromkeys(self._names(key), size)
            self.note(error, **sizes)
            return _SIZE
        return value // divisor

    def head_dim(self) -> int:
        """Returns `head_dim`.

        If it is absent or null, it is the width of the model over the number of query heads.
        """
        stated = self.optional_integer("head_dim", None)
        return stated or self.divide("hidden_size", "num_attention_heads")

    def kv_heads(self, default: int | None) -> int:
        """Returns `num_key_value_heads`; null means one for each query head."""
        heads = self.optional_integer("num_key_value_heads", default)
        return heads or self.integer("num_attention_heads")

    def rope(
        self,
        head_dim: int,
        max_position_embeddings: int,
        *,
        theta: float = 10_000.0,
        partial: float | None = None,
        aliases: Mapping[str, str] | None = None,
        original: int | None = None,
        interleaved: bool = False,
    ) -> tuple[Rope, int]:
        """Returns the rotary embedding and the number of positions for which it holds.

        See `make_rope`.

        Args:
            head_dim: The width of a head.
            max_position_embeddings: The number of positions of the config.
            theta: The default of `rope_theta`.
            partial: The default share of each head that is turned; None for a family that turns
                all.
            aliases: Other names of rope types in this family.
            original: The default of `original_max_position_embeddings` at the top of the file, in a
                family whose config class has that field.
            interleaved: See `Rope`.
        """
        parameters = self.rope_parameters(max_position_embeddings, theta, original)
        rope, reach = self.rope_of(parameters, head_dim, max_position_embeddings, partial, aliases)
        return replace(rope, interleaved=interleaved), reach

    def ropes_by_type(
        self,
        head_dim: int,
        max_position_embeddings: int,
        theta: Mapping[str, tuple[str, float]],
        partial: float | None = None,
    ) -> tuple[dict[str, Rope], int]:
        """Returns the rotary embedding of each layer type, and the positions for which all hold.

        `rope_scaling` of older configs is for layers without a window.

        Args:
            head_dim: The width of a head.
            max_position_embeddings: The number of positions of the config.
            theta: For each layer type the field of older configs, or "" for none, and the default.
            partial: See `rope`.
        """
        stated_ropes = self.get("rope_parameters", None) or {}
        scaling = self.get("rope_scaling", None) or {}
        if not isinstance(stated_ropes, dict) or not all(
            value is None or isinstance(value, dict) for value in stated_ropes.values()
        ):
            text = f"rope_parameters must have an object for each layer type, not {stated_ropes!r}"
            self.note_wrong(text, **NO_ROPE)
            stated_ropes = {}
        if not isinstance(scaling, dict):
            text = f"rope_scaling must be an object or null, not {scaling!r}"
            self.note_wrong(text, **NO_ROPE)
            scaling = {}
        ropes = {}
        limit = max_position_embeddings
        for kind, (name, default) in theta.items():
            parameters = {
                **(stated_ropes.get(kind) or {}),
                **(scaling if kind == "full_attention" else {}),
            }
            parameters = _standard(parameters)
            older = self.get(name, None) if name else None
            parameters.setdefault("rope_theta", default if older is None else older)
            parameters.setdefault("rope_type", "default")
            parameters.setdefault("original_max_position_embeddings", max_position_embeddings)
            if parameters["rope_type"] == "yarn" and not parameters.get("truncate", True):
                text = "rope truncate = false of a layer type is not supported: transformers reads"
                self.note_unsupported(f"{text} it in ropes of all layers alone", **NO_ROPE)
            ropes[kind], reach = self.rope_of(
                parameters, head_dim, max_position_embeddings, partial
            )
            limit = min(limit, reach)
        return ropes, limit

    def rope_of(
        self,
        parameters: dict[str, Any],
        head_dim: int,
        max_length: int,
        partial: float | None = None,
        aliases: Mapping[str, str] | None = None,
    ) -> tuple[Rope, int]:
        """Returns what `rope` does for parameters of the form that `rope_parameters` returns."""
        kind = parameters["rope_type"]
        if aliases and isinstance(kind, str):
            parameters["rope_type"] = aliases.get(kind, kind)
        # In transformers too, the share in the dict outranks the one at the top of the file.
        factor = (
            parameters.get("partial_rotary_factor")
            or self.get("partial_rotary_factor", None)
            or partial
            or 1.0
        )
        refused = []
        wrong = []
        if partial is None and factor != 1.0:
            refused.append("partial_rotary_factor other than 1 is not supported for this family")
            factor = 1.0
        if not isinstance(factor, int | float) or not 0 < factor <= 1:
            wrong.append(f"partial_rotary_factor must be above 0, up to 1, not {factor!r}")
            factor = 1.0
        width = int(head_dim * factor)
        if parameters.get("mrope_section"):
            refused.append("mrope_section (positions with several axes) is not supported")
        # vLLM and llama.cpp use these; transformers passes them over.
        for name in ("attn_factor", "extrapolation_factor"):
            if parameters.get(name, 1) != 1:
                refused.append(
                    f"rope {name} = {parameters[name]!r} is not supported; attention_factor is"
                )
        # A dict cannot be asked for a value that has no hash, such as a list.
        if (kind := parameters["rope_type"]) in (*SCALINGS,):
            wrong += wrong_parameters(parameters, width)
        else:
            refused.append(f"rope_type {kind!r} is not one of {', '.join(SCALINGS)}")
        if refused or wrong:
            self.note(*map(RefusedField, refused), *map(WrongField, wrong), **NO_ROPE)
            factor = partial or 1.0
            width = int(head_dim * factor)
            parameters = _plain_rope(max_length)
        if width % 2 or width == 0:
            instead = {"head_dim": _SIZE, "hidden_size": _SIZE, "num_attention_heads": 1}
            instead |= NO_ROPE if factor != 1.0 else {}
            text = f"the rotary embedding needs an even head width, not {width}"
            text += f" (head_dim {head_dim}, partial_rotary_factor {factor})"
            self.note_wrong(text, **instead)
            width = _SIZE
            parameters = _plain_rope(max_length)
        try:
            return make_rope(parameters, head_dim=width, max_position_embeddings=max_length)
        except CheckpointError as error:
            self.note_wrong(str(error), **NO_ROPE)
            return make_rope(
                _plain_rope(max_length), head_dim=width, max_position_embeddings=max_length
            )

    def rope_parameters(
        self, max_position_embeddings: int, theta: float, original: int | None = None
    ) -> dict[str, Any]:
        """Returns rope parameters as one dict, in the form of transformers 5.

        They are those of `rope_parameters`, or of `rope_scaling` and `rope_theta` of older
        versions.
        """
        old = self._object_or_null("rope_scaling")
        new = self._object_or_null("rope_parameters")
        parameters = self._complete(old or new or {}, max_position_embeddings, theta, original)
        if (
            old
            and new
            and parameters != self._complete(new, max_position_embeddings, theta, original)
        ):
            error: FieldError = WrongField("rope_scaling and rope_parameters contradict each other")
        elif any(isinstance(value, dict) for value in parameters.values()):
            error = RefusedField("rope_parameters by layer type are not supported for this family")
        else:
            return parameters
        self.note(error, **NO_ROPE)
        return self._complete({}, max_position_embeddings, theta, original)

    def _object_or_null(self, name: str) -> Any:
        value = self.get(name, None)
        if value is None or isinstance(value, dict):
            return value
        error = WrongField(f"{name} must be an object or null, not {value!r}")
        return self._instead(error, name, None)

    def _complete(
        self, stated: Mapping[str, Any], max_length: int, theta: float, original: int | None
    ) -> dict[str, Any]:
        """Returns rope parameters with what other fields say, and the defaults."""
        parameters = _standard(stated)
        parameters.setdefault("rope_theta", self.get("rope_theta", theta))
        parameters.setdefault("rope_type", "default")
        # In transformers too, a length at the top of the file outranks the one in the dict.
        original = self.get(LENGTH, original)
        if original is not None:
            parameters[LENGTH] = _whole(original)
        parameters.setdefault(LENGTH, max_length)
        return parameters


def _plain_rope(max_length: int) -> dict[str, Any]:
    """Returns rope parameters in the place of wrong ones, while the other fields are read."""
    return {"rope_type": "default", "rope_theta": 10_000.0, LENGTH: max_length}


def _standard(stated: Mapping[str, Any]) -> dict[str, Any]:
    """Returns rope parameters under the names of transformers 5, without those that are null."""
    parameters = {name: value for name, value in stated.items() if value is not None}
    older = parameters.pop("type", None)
    if older is not None:
        parameters.setdefault("rope_type", older)
    if LENGTH in parameters:
        parameters[LENGTH] = _whole(parameters[LENGTH])
    return parameters


def _whole(length: Any) -> Any:
    """Returns a length that is written as 16.0 as the integer that it is, and others unchanged."""
    return int(length) if isinstance(length, float) and length.is_integer() else length
