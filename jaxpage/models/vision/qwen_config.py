"""Reads `vision_config` of Qwen's models that see."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

from jaxpage.layers import Rope
from jaxpage.layers.rope_scaling import make_rope
from jaxpage.models.config import text_part
from jaxpage.models.config.mrope import NUM_AXES, QWEN2_VL, QWEN3_5, QWEN3_VL, Sections
from jaxpage.models.parts import vision_config

_Config = TypeVar("_Config", bound="QwenVisionConfig")

# The rows of the text model for which the encoder is compiled: 16,384 are 12 megapixels.
ROWS = tuple(64 << doubling for doubling in range(9))
_ALIASES = {"num_heads": "num_attention_heads", "depth": "num_hidden_layers"}
# The defaults of Qwen2.5-VL in all but its sizes. A picture has any size.
_TOWER = vision_config.TowerConfig(
    hidden_size=1280,
    intermediate_size=0,
    num_layers=32,
    num_heads=16,
    head_dim=80,
    num_channels=3,
    patch_size=14,
    image_size=0,
    norm_epsilon=1e-6,  # no field says another one
    activation="silu",
    mlp_bias=True,
)


@dataclass(frozen=True, kw_only=True)
class QwenVisionConfig(vision_config.VisionConfig):
    """Holds what config.json says of an encoder.

    Attributes:
        rope: The rotation, whose axes are rows and columns.
        num_frames: The frames of a patch; those of a picture are all the same.
        image_token_id: The token that stands for a picture's tokens in a prompt.
        num_entries: The entries of the table of positions, along each side; 0 for no table.
        window: The side of a window in blocks; 0 if no layer has windows.
        whole_layers: The layers that see the whole picture, where others see windows.
        deep_layers: The layers whose outputs are features for the text model's first layers.
    """

    kinds: ClassVar[tuple[str, ...]]  # the model types of `vision_config`
    sections: ClassVar[Sections] = QWEN2_VL
    default_token: ClassVar[int] = 151_655
    num_axes: ClassVar[int] = NUM_AXES  # the axes of rotary positions

    rope: Rope
    num_frames: int
    image_token_id: int
    num_entries: int = 0
    window: int = 0
    whole_layers: tuple[int, ...] = ()
    deep_layers: tuple[int, ...] = ()

    @property
    def patch(self) -> tuple[int, int, int, int]:
        """Returns the channels, frames, rows and columns of a patch."""
        side = self.tower.patch_size
        return self.tower.num_channels, self.num_frames, side, side

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> QwenVisionConfig:
        """Returns what a config.json says.

        Raises:
            CheckpointError: A field makes no sense.
            UnsupportedError: A field asks for something that is not supported.
            ExceptionGroup: Several fields are wrong.
        """
        vision = vision_config.vision_part(config, *cls.kinds)
        vision["image_token_id"] = config.get("image_token_id", cls.default_token)
        with vision_config.VisionFields(vision, "", _ALIASES) as fields:
            made = cls.read(fields)
            _check_text(fields, config, cls.sections, made.hidden_size)
            return made

    @classmethod
    def read(cls, fields: vision_config.VisionFields) -> QwenVisionConfig:
        """Reads the fields of `vision_config`; each generation has its own way."""
        raise NotImplementedError

    @classmethod
    def from_fields(
        cls: type[_Config],
        fields: vision_config.VisionFields,
        usual: vision_config.TowerConfig,
        *,
        width: str = "hidden_size",
        inner: int | None = None,
        hidden_size: str = "out_hidden_size",
        deep_layers: tuple[int, ...] = (),
        **more: Any,
    ) -> _Config:
        """Returns the config of fields that all generations have.

        Args:
            fields: The fields of `vision_config`.
            usual: The defaults of the tower.
            width: The field of the width of the encoder.
            inner: The width of a feed-forward half; None to read `intermediate_size`.
            hidden_size: The field of the width of the text model.
            deep_layers: The layers whose outputs are features.
            **more: Further fields of the config.
        """
        num_heads = fields.integer("num_heads", usual.num_heads)
        size = fields.integer(width, usual.hidden_size)
        # Each of two axes turns pairs of a head.
        if size % (4 * num_heads):
            text = f"{num_heads} heads of {size} numbers cannot turn by rows and columns"
            fields.note_wrong(text, **{width: 64, "num_heads": 1})
            size = 64 * num_heads
        head_dim = size // num_heads
        block = fields.integer("spatial_merge_size", 2)
        tower = replace(
            usual,
            hidden_size=size,
            intermediate_size=inner or fields.integer("intermediate_size", usual.intermediate_size),
            num_layers=fields.integer("depth", usual.num_layers),
            num_heads=num_heads,
            head_dim=head_dim,
            num_channels=fields.integer("in_channels", usual.num_channels),
            patch_size=fields.side("patch_size", usual.patch_size),
            activation=fields.activation("hidden_act", usual.activation),
        )
        return cls(
            tower=tower,
            hidden_size=fields.integer(hidden_size, 3584),
            block=block,
            sizes=tuple(rows * block**2 for rows in ROWS),
            num_deep=len(deep_layers),
            rope=_read_rope(fields, head_dim),
            num_frames=fields.side("temporal_patch_size", 2),
            image_token_id=fields.integer("image_token_id", minimum=0),
            deep_layers=deep_layers,
            **more,
        )


class Qwen2VisionConfig(QwenVisionConfig):
    """Reads transformers' `Qwen2VLVisionConfig`."""

    kinds = ("qwen2_vl_vision", "qwen2_vl")

    @classmethod
    def read(cls, fields: vision_config.VisionFields) -> QwenVisionConfig:
        """Returns what the fields say; `hidden_size` is that of the text model."""
        # Qwen2-VL began from the tower of DFN, a CLIP, and has its function.
        usual = replace(_TOWER, activation="quick_gelu")
        inner = fields.integer("mlp_ratio", 4) * fields.integer("embed_dim", usual.hidden_size)
        return cls.from_fields(
            fields, usual, width="embed_dim", inner=inner, hidden_size="hidden_size"
        )


class Qwen2_5VisionConfig(QwenVisionConfig):
    """Reads transformers' `Qwen2_5_VLVisionConfig`."""

    kinds = ("qwen2_5_vl_vision", "qwen2_5_vl")

    @classmethod
    def read(cls, fields: vision_config.VisionFields) -> QwenVisionConfig:
        """Returns what the fields say; a window has a side in pixels there."""
        config = cls.from_fields(
            fields,
            replace(_TOWER, hidden_size=3584, intermediate_size=3420),
            whole_layers=_read_layers(fields, "fullatt_block_indexes", (7, 15, 23, 31)),
        )
        pixels = fields.integer("window_size", 112)
        patch_size = config.tower.patch_size
        window = pixels // config.block // patch_size
        if window == 0:
            text = f"window_size = {pixels} is smaller than a block of patches"
            fields.note_wrong(text, window_size=pixels, patch_size=patch_size)
        return replace(config, window=window)


class Qwen3VisionConfig(QwenVisionConfig):
    """Reads transformers' `Qwen3VLVisionConfig`, and that of the model with experts."""

    kinds = ("qwen3_vl_vision", "qwen3_vl", "qwen3_vl_moe_vision", "qwen3_vl_moe")
    sections = QWEN3_VL

    @classmethod
    def read(cls, fields: vision_config.VisionFields) -> QwenVisionConfig:
        """Returns what the fields say."""
        return cls.from_fields(
            fields,
            replace(
                _TOWER,
                hidden_size=1152,
                intermediate_size=4304,
                num_layers=27,
                patch_size=16,
                activation="gelu_pytorch_tanh",
            ),
            num_entries=_read_square(fields),
            deep_layers=cls.read_deep(fields),
        )

    @classmethod
    def read_deep(cls, fields: vision_config.VisionFields) -> tuple[int, ...]:
        """Returns the layers whose outputs are features for the text model's first layers."""
        return _read_layers(fields, "deepstack_visual_indexes", (8, 16, 24))


class Qwen3_5VisionConfig(Qwen3VisionConfig):
    """Reads transformers' `Qwen3_5VisionConfig`, which has no features for other layers."""

    kinds = ("qwen3_5_vision", "qwen3_5", "qwen3_5_moe_vision", "qwen3_5_moe")
    sections = QWEN3_5
    default_token = 248_056

    @classmethod
    def read_deep(cls, fields: vision_config.VisionFields) -> tuple[int, ...]:
        """Returns no layers: transformers passes the field over."""
        return ()


def _read_rope(fields: vision_config.VisionFields, head_dim: int) -> Rope:
    """Returns a rotation whose first pairs turn by the row of a patch, the others by its column."""
    parameters = fields.get("rope_parameters", None) or {}
    kind = parameters.get("rope_type", "axial")
    if kind != "axial":
        text = f"rope_type {kind!r} is not supported; 'axial' is"
        fields.note_unsupported(text, rope_parameters=None)
        parameters = {}
    plain = {"rope_type": "default", "rope_theta": parameters.get("rope_theta", 10_000.0)}
    # A rotation without scaling is the same for any number of positions.
    rope, _ = make_rope(plain, head_dim=head_dim // 2, max_position_embeddings=1)
    frequencies = rope.frequencies
    return Rope(
        (*frequencies, *frequencies), axes=(0,) * len(frequencies) + (1,) * len(frequencies)
    )


def _read_square(fields: vision_config.VisionFields) -> int:
    """Returns the entries of the table of positions along each side."""
    num_entries = fields.integer("num_position_embeddings", 2304)
    side = int(num_entries**0.5)
    if side**2 != num_entries:
        text = f"num_position_embeddings must be a square, not {num_entries}"
        fields.note_wrong(text, num_position_embeddings=2304)
    return side


def _read_layers(
    fields: vision_config.VisionFields, name: str, default: tuple[int, ...]
) -> tuple[int, ...]:
    """Returns numbers of layers, which must be in order; those that do not exist are left out."""
    layers = fields.get(name, default)
    stated: list[Any] = list(layers) if isinstance(layers, list | tuple) else [None]
    if not all(type(layer) is int for layer in stated) or stated != sorted(set(stated)):
        text = f"{name} must be a list of numbers of layers in their order, not {layers!r}"
        fields.note_wrong(text, **{name: []})
        return ()
    return tuple(layer for layer in stated if 0 <= layer < fields.integer("depth", 32))


def _check_text(
    fields: vision_config.VisionFields,
    config: Mapping[str, Any],
    sections: Sections,
    hidden_size: int,
) -> None:
    """Notes what in the text model's config does not fit the encoder."""
    width = vision_config.text_width(config)
    if width != hidden_size:
        error = (
            f"rows of the encoder have {hidden_size} numbers, and those of the text model {width}"
        )
        fields.note_wrong(error, out_hidden_size=width)
    text = text_part(config)
    head_dim = text.get("head_dim") or width // text.get("num_attention_heads", 1)
    if not sections.axes(config, head_dim // 2):
        stated = sections.read(config)
        error = f"mrope_section = {stated!r} of the text model does not fit {head_dim // 2} pairs"
        fields.note_wrong(error, mrope_section=None)
