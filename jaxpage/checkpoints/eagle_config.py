"""What config.json says of an EAGLE head: three published forms, read as one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from jaxpage.checkpoints.config_file import check_sizes
from jaxpage.checkpoints.opening import check_spec
from jaxpage.checkpoints.problems import Problems, quoted
from jaxpage.errors import CheckpointError, UnsupportedError
from jaxpage.models.registry import load_family
from jaxpage.models.rotary_decoder import RotaryDecoderSpec

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# Fields that would change the mathematics, and the one value that changes nothing.
_NOT_HONOURED = {"use_aux_hidden_state": True, "add_para_norm": False, "logit_scale": 1, "parallel_drafting": False}


@dataclass(frozen=True)
class EagleConfig:
    """config.json, `eagle_config` in it, and the fields of the head's decoder, which read like those of an ordinary model."""

    outer: Mapping[str, Any]
    inner: Mapping[str, Any]
    layers: Mapping[str, Any]

    @classmethod
    def read(cls, config: Mapping[str, Any], problems: Problems) -> EagleConfig:
        """Raises CheckpointError, UnsupportedError."""
        kind, layers = config.get("speculators_model_type"), dict(config)
        if kind not in (None, "eagle3"):
            raise UnsupportedError(
                f"config.json: speculators_model_type {quoted(kind)} is not supported, only 'eagle3'"
            )
        if kind is not None:
            layers = _object(config, "transformer_layer_config")
        elif config.get("model_type") == "eagle":  # vLLM's: what stands outside outranks what stands inside
            named = ("architectures", "model_type", "model")
            layers = _object(config, "model") | {name: value for name, value in config.items() if name not in named}
        if layers != config:  # which has been checked
            check_sizes(layers, problems)
        read = cls(config, _object(config, "eagle_config", {}), layers)
        for name, harmless in _NOT_HONOURED.items():
            if read.field(name, harmless) != harmless:
                raise UnsupportedError(f"config.json: {name} = {quoted(read.field(name))} is not supported")
        return read

    def field(self, name: str, default: Any = None) -> Any:
        """Of the head itself. Null is no value."""
        found = [place[name] for place in (self.outer, self.inner) if place.get(name) is not None]
        return found[0] if found else default

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.field(name, default)
        if not isinstance(value, bool):
            raise CheckpointError(f"config.json: {name} must be true or false, not {quoted(value)}")
        return value

    @property
    def norm_before_residual(self) -> bool:
        """Left out, it is true for speculators and false for everyone else."""
        return self.flag("norm_before_residual", "speculators_model_type" in self.outer)

    def decoder(self, problems: Problems) -> RotaryDecoderSpec | None:
        """None: what is wrong is in `problems`. Raises UnsupportedError."""
        model_type = self.layers.get("model_type", "llama")
        if not isinstance(model_type, str) or model_type not in _ARCHITECTURES:
            supported = ", ".join(_ARCHITECTURES)
            raise UnsupportedError(f"config.json: layers of model_type {quoted(model_type)} are not among {supported}")
        window = self.layers.get("sliding_window") and self.layers.get("use_sliding_window", True)
        if model_type == "llama" and (window or "sliding_attention" in (self.layers.get("layer_types") or ())):
            raise UnsupportedError("config.json: layers of model_type 'llama' with a sliding window are not supported")
        family = load_family({"architectures": [_ARCHITECTURES[model_type]]})
        return cast(RotaryDecoderSpec | None, check_spec(family, self.layers, problems))

    def aux_layers(self, num_layers: int) -> tuple[int, ...]:
        """The hidden states of a target of so many layers that EAGLE-3 takes, by the layers that they enter.

        At the top level ids count just so, as in vLLM and speculators. In `eagle_config`, which SpecForge and ModelOpt write and SGLang
        reads, they are of the layers that the states leave. Where there are none, those of the authors' code.
        """
        ids, behind = self.outer.get(LAYER_IDS), 0
        if not ids:
            ids, behind = self.inner.get(LAYER_IDS), 1
        if not ids:
            ids, behind = [2, num_layers // 2, num_layers - 3], 0
        if not isinstance(ids, list) or any(type(number) is not int for number in ids):
            raise CheckpointError(f"config.json: {LAYER_IDS} must be a list of whole numbers, not {quoted(ids)}")
        if min(ids) + behind < 0 or max(ids) + behind > num_layers:
            raise CheckpointError(
                f"config.json: {LAYER_IDS} {ids} are {'outputs' if behind else 'inputs'} of layers that do not exist: "
                f"the model has {num_layers} layers"
            )
        return tuple(number + behind for number in ids)


def _object(config: Mapping[str, Any], name: str, default: Any = None) -> dict[str, Any]:
    value = config.get(name) or default
    if not isinstance(value, dict):
        raise CheckpointError(f"config.json: {name} must be an object, not {quoted(value)}")
    return value
