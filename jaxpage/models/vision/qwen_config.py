"""Reads `vision_config` of Qwen's models that see."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from jaxpage.layers.rope import Rope
from jaxpage.layers.rope_scaling import make_rope
from jaxpage.models.base import KVSpec
from jaxpage.models.config.config_fields import RefusedField, WrongField
from jaxpage.models.config.fields import Fields, text_part
from jaxpage.models.config.mrope import QWEN2_VL, QWEN3_5, QWEN3_VL, Sections
from jaxpage.models.parts.encoder import EncoderConfig

# The rows of the text model for which the encoder is compiled: 16,384 are 12 megapixels.
ROWS = tuple(64 << doubling for doubling in range(9))
_ALIASES = {"num_heads": "num_attention_heads", "depth": "num_hidden_layers"}
_EPSILON = 1e-6


@dataclass(frozen=True, kw_only=True)
class QwenVisionConfig:
    """Holds what config.json says of an encoder; see `VisionSpec`.

    Attributes:
        tower: The layers, under the names that parts of models have for them.
        hidden_size: The width of the text model's hidden states (D).
        patch: The channels, frames, rows and columns of a patch.
        merge: The patches of a token of the text model, along each side.
        image_token_id: The token that stands for a picture's tokens in a prompt.
        num_entries: The entries of the table of positions, along each side; 0 for no table.
        window: The text model's tokens of a window, along each side; 0 if no layer has windows.
        whole_layers: The layers that see the whole picture, where others see windows.
        deep_layers: The layers whose outputs are features for the text model's first layers.
    """

    sections: ClassVar[Sections] = QWEN2_VL
    default_token: ClassVar[int] = 151_655

    tower: EncoderConfig
    hidden_size: int
    patch: tuple[int, int, int, int]
    merge: int
    image_token_id: int
    num_entries: int = 0
    window: int = 0
    whole_layers: tuple[int, ...] = ()
    deep_layers: tuple[int, ...] = ()

    @property
    def num_deep(self) -> int:
        """Returns how many of the text model's first layers take features of a picture."""
        return len(self.deep_layers)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Returns the numbers of patches for which the encoder is compiled."""
        return tuple(rows * self.merge**2 for rows in ROWS)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> QwenVisionConfig:
        """Returns what a config.json says.

        Raises:
            CheckpointError: A field makes no sense.
            UnsupportedError: A field asks for something that is not supported.
            ExceptionGroup: Several fields are wrong.
        """
        vision = dict(config.get("vision_config") or {})
        vision["image_token_id"] = config.get("image_token_id", cls.default_token)
        vision.pop("model_type", None)
        with Fields(vision, "", _ALIASES) as fields:
            made = cls.read(fields)
            _check_text(fields, config, cls.sections, made.hidden_size)
            return made

    @classmethod
    def read(cls, fields: Fields) -> QwenVisionConfig:
        """Reads the fields of `vision_config`; each generation has its own way."""
        raise NotImplementedError

    @classmethod
    def read_common(cls, fields: Fields, *, patch: int) -> dict[str, Any]:
        """Returns the fields that all generations have.

        Args:
            fields: The fields of `vision_config`.
            patch: The default of `patch_size`.
        """
        side = fields.integer("patch_size", patch)
        channels = fields.integer("in_channels", 3)
        frames = fields.integer("temporal_patch_size", 2)
        return {
            "patch": (channels, frames, side, side),
            "merge": fields.integer("spatial_merge_size", 2),
            "image_token_id": fields.integer("image_token_id", least=0),
        }


class Qwen2VisionConfig(QwenVisionConfig):
    """Reads transformers' `Qwen2VLVisionConfig`."""

    @classmethod
    def read(cls, fields: Fields) -> QwenVisionConfig:
        """Returns what the fields say."""
        width = fields.integer("embed_dim", 1280)
        return cls(
            **cls.read_common(fields, patch=14),
            tower=_read_tower(
                fields, "embed_dim", width, 32, fields.integer("mlp_ratio", 4) * width, "quick_gelu"
            ),
            hidden_size=fields.integer("hidden_size", 3584),
        )


class Qwen2_5VisionConfig(QwenVisionConfig):
    """Reads transformers' `Qwen2_5_VLVisionConfig`."""

    @classmethod
    def read(cls, fields: Fields) -> QwenVisionConfig:
        """Returns what the fields say; a window is a number of pixels there."""
        width = fields.integer("hidden_size", 3584)
        common = cls.read_common(fields, patch=14)
        pixels = fields.integer("window_size", 112)
        window = pixels // common["merge"] // common["patch"][-1]
        if window == 0:
            fields.note(
                WrongField(f"window_size = {pixels} is less than a block of patches"),
                window_size=112,
            )
        return cls(
            **common,
            tower=_read_tower(
                fields, "hidden_size", width, 32, fields.integer("intermediate_size", 3420), "silu"
            ),
            hidden_size=fields.integer("out_hidden_size", 3584),
            window=window,
            whole_layers=_read_layers(fields, "fullatt_block_indexes", (7, 15, 23, 31)),
        )


class Qwen3VisionConfig(QwenVisionConfig):
    """Reads transformers' `Qwen3VLVisionConfig`, which is that of its experts, too."""

    sections = QWEN3_VL

    @classmethod
    def read(cls, fields: Fields) -> QwenVisionConfig:
        """Returns what the fields say; the table of positions is a square."""
        width = fields.integer("hidden_size", 1152)
        inner = fields.integer("intermediate_size", 4304)
        return cls(
            **cls.read_common(fields, patch=16),
            tower=_read_tower(fields, "hidden_size", width, 27, inner, "gelu_pytorch_tanh"),
            hidden_size=fields.integer("out_hidden_size", 3584),
            num_entries=_read_square(fields),
            deep_layers=cls.read_deep(fields),
        )

    @classmethod
    def read_deep(cls, fields: Fields) -> tuple[int, ...]:
        """Returns the layers whose outputs are features for the text model's first layers."""
        return _read_layers(fields, "deepstack_visual_indexes", (8, 16, 24))


class Qwen3_5VisionConfig(Qwen3VisionConfig):
    """Reads transformers' `Qwen3_5VisionConfig`, which has no features for other layers."""

    sections = QWEN3_5
    default_token = 248_056

    @classmethod
    def read_deep(cls, fields: Fields) -> tuple[int, ...]:
        """Returns no layers: transformers passes the field over."""
        return ()


def _read_tower(
    fields: Fields, width_field: str, width: int, depth: int, inner: int, activation: str
) -> EncoderConfig:
    """Returns the config of the layers.

    Args:
        fields: The fields of `vision_config`.
        width_field: The field of the width.
        width: The width of the hidden states.
        depth: The default number of layers.
        inner: The width of a feed-forward half.
        activation: The default activation.
    """
    num_layers = fields.integer("depth", depth)
    num_heads = fields.integer("num_heads", 16)
    head_dim = width // num_heads
    if width % num_heads or head_dim % 4:
        text = f"{num_heads} heads of {width} numbers cannot turn by rows and columns: 4 must divide the width of a head"
        fields.note(WrongField(text), **{width_field: 64, "num_heads": 1})
        head_dim = 64
    return EncoderConfig(
        vocab_size=0,
        hidden_size=width,
        intermediate_size=inner,
        num_query_heads=num_heads,
        max_position_embeddings=ROWS[-1],
        kv=KVSpec(0, num_heads, head_dim, (), decoder_layers=num_layers),
        rope=_read_rope(fields, head_dim),
        reach=(None,) * num_layers,
        norm_epsilon=_EPSILON,
        activation=fields.activation("hidden_act", activation),
        tie_word_embeddings=False,
        mlp_bias=True,
        name="model.visual",
    )


def _read_rope(fields: Fields, head_dim: int) -> Rope:
    """Returns a rotation whose first pairs turn by the row of a patch, the others by its column."""
    parameters = {"rope_theta": 10_000.0, **(fields.get("rope_parameters", None) or {})}
    kind = parameters.setdefault("rope_type", "axial")
    if kind != "axial":
        text = f"rope_type {kind!r} of vision_config is not supported; 'axial' is"
        fields.note(RefusedField(text), rope_parameters=None)
    plain = {"rope_type": "default", "rope_theta": float(parameters["rope_theta"])}
    rope, _ = make_rope(plain, head_dim=head_dim // 2, max_position_embeddings=1)
    each = rope.frequencies
    return Rope((*each, *each), axes=(0,) * len(each) + (1,) * len(each))


def _read_square(fields: Fields) -> int:
    """Returns the entries of the table of positions along each side."""
    num_entries = fields.integer("num_position_embeddings", 2304)
    side = int(num_entries**0.5)
    if side**2 != num_entries:
        text = f"num_position_embeddings must be a square, not {num_entries}"
        fields.note(WrongField(text), num_position_embeddings=2304)
        side = 48
    return side


def _read_layers(fields: Fields, name: str, default: tuple[int, ...]) -> tuple[int, ...]:
    """Returns numbers of layers, which must be in order; those that do not exist are left out."""
    layers = fields.get(name, default)
    layers = list(layers) if isinstance(layers, list | tuple) else [layers]
    if not all(type(layer) is int for layer in layers) or layers != sorted(set(layers)):
        text = f"{name} must be a list of numbers of layers in their order, not {layers!r}"
        fields.note(WrongField(text), **{name: []})
        layers = []
    return tuple(layer for layer in layers if 0 <= layer < fields.integer("depth", 32))


def _check_text(
    fields: Fields, config: Mapping[str, Any], sections: Sections, hidden_size: int
) -> None:
    """Notes what in the text model's config does not fit the encoder."""
    text = text_part(config)
    width = text.get("hidden_size")
    if isinstance(width, int) and width != hidden_size:
        error = f"rows of the encoder have {hidden_size} numbers, and the text model's {width}"
        fields.note(WrongField(error), out_hidden_size=width)
    heads = text.get("num_attention_heads")
    if isinstance(width, int) and isinstance(heads, int) and heads:
        num_pairs = (text.get("head_dim") or width // heads) // 2
        if not sections.axes(config, num_pairs):
            error = f"mrope_section = {sections.read(config)!r} does not fit {num_pairs} pairs"
            fields.note(WrongField(error), mrope_section=None)
