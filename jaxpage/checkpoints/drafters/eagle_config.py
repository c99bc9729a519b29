"""Reads what config.json says of an EAGLE head, in three published forms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from jaxpage.checkpoints.config_file import check_sizes
from jaxpage.checkpoints.opening import check_spec
from jaxpage.checkpoints.problems import Problems, quote
from jaxpage.models import DecoderConfig, load_family
from jaxpage.models.config import ConfigFields

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# These fields would change the mathematics. With the one value here they change nothing.
_NOT_HONOURED = {
    "use_aux_hidden_state": True,
    "add_para_norm": False,
    "logit_scale": 1,
    "parallel_drafting": False,
}


class EagleConfig(ConfigFields):
    """Holds the config.json of a head, `eagle_config` in it, and the fields of the head's decoder.

    Attributes:
        inner: The object `eagle_config`.
        layers: The decoder's fields, which are those of an ordinary model.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.inner: Mapping[str, Any] = {}
        self.layers: Mapping[str, Any] = self.config

    def __enter__(self) -> EagleConfig:
        """Finds the parts, and notes what no head supports."""
        super().__enter__()
        kind = self.config.get("speculators_model_type")
        if kind not in (None, "eagle3"):
            text = f"speculators_model_type {quote(kind)} is not supported, only 'eagle3'"
            self.note_unsupported(text, speculators_model_type="eagle3")
        if kind is not None:
            self.layers = self._object("transformer_layer_config", required=True)
        elif self.config.get("model_type") == "eagle":
            # In vLLM's form the fields outside of `model` outrank those inside.
            named = ("architectures", "model_type", "model")
            outside = {name: value for name, value in self.config.items() if name not in named}
            inside = self._object("model", required=True)
            self.layers = {**inside, **outside} if inside else {}
        self.inner = self._object("eagle_config", required=False)
        for name, harmless in _NOT_HONOURED.items():
            if (value := self.field(name, harmless)) != harmless:
                text = f"{name} = {quote(value)} is not supported"
                self.note_unsupported(text, **{name: harmless})
        return self

    def _object(self, name: str, *, required: bool) -> dict[str, Any]:
        value = self.config.get(name) or (None if required else {})
        if isinstance(value, dict):
            return value
        self.note_wrong(f"{name} must be an object, not {quote(value)}", **{name: {}})
        return {}

    def field(self, name: str, default: Any = None) -> Any:
        """Returns a field of the head itself. Null is no value."""
        values = [place[name] for place in (self.config, self.inner) if place.get(name) is not None]
        return values[0] if values else default

    def flag(self, name: str, default: bool = False) -> bool:
        """Returns a field of the head itself that must be true or false."""
        value = self.field(name, default)
        if isinstance(value, bool):
            return value
        self.note_wrong(f"{name} must be true or false, not {quote(value)}", **{name: default})
        return default

    @property
    def norm_before_residual(self) -> bool:
        """Returns the flag. Left out, it is true for speculators and false for all others."""
        return self.flag("norm_before_residual", "speculators_model_type" in self.config)

    def decoder(self, problems: Problems) -> DecoderConfig | None:
        """Returns the decoder; None if something is wrong, which is noted or in `problems`."""
        if not self.layers:
            return None  # That is noted.
        if self.layers != self.config:  # Those of config.json itself are checked when it is read.
            check_sizes(dict(self.layers), problems)
        model_type = self.layers.get("model_type", "llama")
        if not isinstance(model_type, str) or model_type not in _ARCHITECTURES:
            supported = ", ".join(_ARCHITECTURES)
            text = f"layers of model_type {quote(model_type)} are not among {supported}"
            self.note_unsupported(text)
            return None
        window = self.layers.get("sliding_window") and self.layers.get("use_sliding_window", True)
        types = self.layers.get("layer_types") or ()
        if model_type == "llama" and (window or "sliding_attention" in types):
            text = "layers of model_type 'llama' with a sliding window are not supported"
            self.note_unsupported(text)
            return None
        family = load_family({"architectures": [_ARCHITECTURES[model_type]]})
        return cast(DecoderConfig | None, check_spec(family, self.layers, problems))

    def aux_layers(self, num_layers: int) -> tuple[int, ...]:
        """Returns the hidden states that EAGLE-3 takes, by the target's layers that they enter.

        At the top level the ids are these numbers, as in vLLM and speculators. In `eagle_config`,
        which SpecForge and ModelOpt write and SGLang reads, an id is that of the layer whose output
        is taken. Without ids, those of the authors' code are taken.

        Args:
            num_layers: The number of the target's layers.
        """
        usual = (2, num_layers // 2, num_layers - 3)
        outside = self.config.get(LAYER_IDS)
        ids = outside or self.inner.get(LAYER_IDS)
        after = 1 if ids and not outside else 0
        ids = ids or list(usual)
        if not isinstance(ids, list) or any(type(number) is not int for number in ids):
            text = f"{LAYER_IDS} must be a list of whole numbers, not {quote(ids)}"
            self.note_wrong(text)
            return usual
        if min(ids) + after < 0 or max(ids) + after > num_layers:
            kind = "outputs" if after else "inputs"
            missing = f"{LAYER_IDS} {ids} are {kind} of layers that do not exist"
            self.note_wrong(f"{missing}: the model has {num_layers} layers")
        return tuple(number + after for number in ids)
