"""Holds what config.json says of encoders of pictures, and reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxpage.errors import CheckpointError, UnsupportedError
from jaxpage.models.config import Fields
from jaxpage.models.config.config_fields import FieldError
from jaxpage.models.config.fields import text_part
from jaxpage.models.parts.text_config import LayerSizes


class VisionFields(Fields):
    """Holds the fields of `vision_config`, whose errors say so."""

    def note(self, *errors: FieldError, **instead: Any) -> None:
        """Notes errors; see `ConfigFields.note`."""
        for error in errors:
            text = str(error).replace("config.json: ", "config.json: vision_config: ", 1)
            error.args = (text,)
        super().note(*errors, **instead)

    def side(self, name: str, default: int) -> int:
        """Returns the side of a square, in pixels, which files may give as a pair."""
        stated = self.get(name, default)
        if isinstance(stated, list | tuple) and len(stated) == 2 and stated[0] == stated[1]:
            self.config[name] = stated[0]
        return self.integer(name, default)


def vision_part(config: Mapping[str, Any], *kinds: str) -> dict[str, Any]:
    """Returns the config of the encoder, without its `model_type`.

    Args:
        config: The config.json.
        kinds: The model types that it may have.

    Raises:
        CheckpointError: The config has none.
        UnsupportedError: It is of another kind.
    """
    vision = config.get("vision_config")
    if not isinstance(vision, dict):
        raise CheckpointError(f"config.json: vision_config must be an object, not {vision!r}")
    kind = vision.get("model_type", kinds[0])
    if kind not in kinds:
        raise UnsupportedError(
            f"config.json: vision_config has model_type {kind!r}, which is not one of "
            f"{', '.join(kinds)}"
        )
    return {name: value for name, value in vision.items() if name != "model_type"}


def open_fields(config: Mapping[str, Any], *kinds: str) -> VisionFields:
    """Returns the fields of the encoder; see `vision_part`."""
    return VisionFields(vision_part(config, *kinds), "")


def text_width(config: Mapping[str, Any]) -> int:
    """Returns the width of the hidden states of the text model (D)."""
    return some_fields(text_part(config), "hidden_size").integer("hidden_size")


def some_fields(config: Mapping[str, Any], *names: str) -> Fields:
    """Returns these fields of an object of config.json alone."""
    return Fields({name: config[name] for name in names if name in config}, "")


@dataclass(frozen=True, kw_only=True)
class TowerConfig(LayerSizes):
    """Holds what a `vision_config` says of the layers of an encoder.

    Attributes:
        num_layers: The number of layers.
        num_heads: The number of heads.
        head_dim: The width of a head.
        num_channels: The colours of a pixel.
        patch_size: The side of a patch in pixels.
        image_size: The side of a picture in pixels: that of a tile, or the longest one.
    """

    num_layers: int
    num_heads: int
    head_dim: int
    num_channels: int
    patch_size: int
    image_size: int

    @property
    def side(self) -> int:
        """Returns the patches along a side of a picture."""
        return self.image_size // self.patch_size

    @property
    def patch_width(self) -> int:
        """Returns how many numbers a patch has."""
        return self.num_channels * self.patch_size**2


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """Holds what a config.json says of an encoder.

    It may have `num_whole`, the most tokens of a picture that see each other both ways in the text
    model. Without it none do.

    Attributes:
        tower: The layers.
        hidden_size: The width of the text model's hidden states (D).
        block: The side of a block of patches that becomes a row.
        sizes: The numbers of patches for which the encoder is compiled.
        num_deep: The number of the text model's layers that take features, too.
    """

    tower: TowerConfig
    hidden_size: int
    block: int
    sizes: tuple[int, ...]
    num_deep: int = 0

    @property
    def width(self) -> int:
        """Returns the width of the encoder's hidden states."""
        return self.tower.hidden_size

    @property
    def inner(self) -> int:
        """Returns the width of a feed-forward half of the encoder."""
        return self.tower.intermediate_size

    @property
    def num_heads(self) -> int:
        """Returns the number of heads of the encoder."""
        return self.tower.num_heads


def read_tower(
    fields: VisionFields,
    *,
    width: int,
    inner: int,
    depth: int,
    num_heads: int,
    patch_size: int,
    image_size: int,
    activation: str,
    norm_epsilon: float | None = None,
) -> TowerConfig:
    """Returns what the fields say that most towers have; the arguments are defaults of fields.

    `norm_epsilon` is that of a tower without a field for it.
    """
    fields.config.setdefault("hidden_size", width)
    fields.config.setdefault("num_attention_heads", num_heads)
    return TowerConfig(
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size", inner),
        num_layers=fields.integer("num_hidden_layers", depth),
        num_heads=fields.integer("num_attention_heads"),
        head_dim=fields.divide("hidden_size", "num_attention_heads"),
        num_channels=fields.integer("num_channels", 3),
        patch_size=fields.side("patch_size", patch_size),
        image_size=fields.side("image_size", image_size),
        norm_epsilon=norm_epsilon or fields.number("layer_norm_eps", 1e-6),
        activation=fields.activation("hidden_act", activation),
    )


def check_blocks(fields: VisionFields, tower: TowerConfig, block: int) -> None:
    """Notes a picture of which blocks of patches would leave some out."""
    if tower.side < block or tower.side % block:
        text = (
            f"image_size makes {tower.side} patches a side, which blocks of {block} do not divide"
        )
        fields.note_wrong(text, image_size=tower.patch_size * block)


def read_theta(fields: VisionFields, default: float) -> float:
    """Returns the base of rotations by two axes, which no field changes but `rope_theta`."""
    parameters = fields.get("rope_parameters", None) or {}
    if not isinstance(parameters, dict):
        fields.note_wrong("rope_parameters must be an object", rope_parameters=None)
        parameters = {}
    if parameters.get("rope_type", "axial") not in ("axial", "default"):
        text = f"rope_type {parameters['rope_type']!r} is not supported"
        fields.note_unsupported(text, rope_parameters=None)
    if (theta := parameters.get("rope_theta")) is not None:
        fields.config["rope_theta"] = theta
    return fields.number("rope_theta", default)
