"""Makes the parts of encoders of pictures: patches, attention both ways, blocks.

A picture is a list of patches, in the order in which its blocks of patches become rows:

    grid of patches     blocks of 2 x 2         rows
    a b e f             [a b   [e f             abcd, efgh, ...
    c d g h              c d]   g h]

Patches that fill up the list to the size of an executable are a segment of their own. The towers
are small next to text models, so no device has a part of one: no axis has a name.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxpage.errors import CheckpointError, UnsupportedError
from jaxpage.layers import Angles, Linear, RMSNorm
from jaxpage.layers.linear import Part, linear
from jaxpage.layers.norms import add_and_norm
from jaxpage.layers.parameter import Piece, Source, parameter, tensor
from jaxpage.layers.picture_attention import attend_in_segments, attend_in_windows
from jaxpage.layers.product import product
from jaxpage.models.base import FamilyModule
from jaxpage.models.config import Fields
from jaxpage.models.config.config_fields import FieldError
from jaxpage.models.config.fields import text_part
from jaxpage.models.parts.names import Scope

Numbers = np.typing.NDArray[np.float32]


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


def text_width(config: Mapping[str, Any]) -> int:
    """Returns the width of the hidden states of the text model (D)."""
    return some_fields(text_part(config), "hidden_size").integer("hidden_size")


def some_fields(config: Mapping[str, Any], *names: str) -> Fields:
    """Returns these fields of an object of config.json alone."""
    return Fields({name: config[name] for name in names if name in config}, "")


@dataclass(frozen=True, kw_only=True)
class TowerConfig:
    """Holds what a `vision_config` says of the layers of an encoder.

    Attributes:
        hidden_size: The width of the encoder's hidden states.
        intermediate_size: The width of a feed-forward half.
        num_layers: The number of layers.
        num_heads: The number of heads.
        head_dim: The width of a head.
        num_channels: The colours of a pixel.
        patch_size: The side of a patch in pixels.
        image_size: The side of a picture in pixels: that of a tile, or the longest one.
        norm_epsilon: The number that norms add to the variance.
        activation: The function of a feed-forward half.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    num_channels: int
    patch_size: int
    image_size: int
    norm_epsilon: float
    activation: str

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
    """Holds what a config.json says of an encoder; see `VisionSpec`.

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


def cut_patches(pixels: np.typing.NDArray[Any], patch_size: int, block: int) -> Numbers:
    """Returns the patches of a picture [C, H, W], as rows [P, C * patch_size^2], block by block.

    Pixels after the last whole block are left out.
    """
    num_channels, height, width = pixels.shape
    side = patch_size * block
    rows, columns = height // side, width // side
    shape = (num_channels, rows, block, patch_size, columns, block, patch_size)
    whole = pixels[:, : rows * side, : columns * side].reshape(shape)
    patches = whole.transpose(1, 4, 2, 5, 0, 3, 6)
    return np.ascontiguousarray(patches, np.float32).reshape(
        rows * columns * block**2, num_channels * patch_size**2
    )


def by_blocks(grid: np.typing.NDArray[Any], block: int) -> np.typing.NDArray[Any]:
    """Returns the entries of a grid [height, width, ...] in the order of `cut_patches`."""
    height, width, *others = grid.shape
    parts = grid.reshape(height // block, block, width // block, block, *others)
    return parts.swapaxes(1, 2).reshape(height * width, *others)


def fill_up(
    inputs: Mapping[str, np.typing.NDArray[Any]], size: int
) -> dict[str, np.typing.NDArray[Any]]:
    """Returns arrays with rows of zeros after their own, and `segment_P`, in which these have 1."""
    num_patches = len(next(iter(inputs.values())))
    full = {"segment_P": np.ones(size, np.int32)}
    full["segment_P"][:num_patches] = 0
    for name, array in inputs.items():
        full[name] = np.zeros((size, *array.shape[1:]), array.dtype)
        full[name][:num_patches] = array
    return full


def placed_patch_shapes(patch_width: int, size: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes and types of patches with their places on two axes, as `fill_up` has them.

    Args:
        patch_width: The numbers of a patch (I).
        size: The number of patches (P).
    """
    return {
        "patch_PI": jax.ShapeDtypeStruct((size, patch_width), jnp.float32),
        "place_P2": jax.ShapeDtypeStruct((size, 2), jnp.int32),
        "segment_P": jax.ShapeDtypeStruct((size,), jnp.int32),
    }


def size_menu(max_patches: int, block: int) -> tuple[int, ...]:
    """Returns the powers of two below a number of patches, from 256, and the number itself.

    Each is rounded up to whole blocks of patches.
    """
    powers = (2**exponent for exponent in range(8, max_patches.bit_length()))
    whole = (-(-size // block**2) * block**2 for size in (*powers, max_patches))
    return tuple(sorted({min(size, max_patches) for size in whole}))


def size_for(sizes: Sequence[int], num_patches: int) -> int:
    """Returns the smallest size that holds so many patches.

    Raises:
        UnsupportedError: The picture has more patches than the largest one.
    """
    for size in sizes:
        if num_patches <= size:
            return size
    raise UnsupportedError(
        f"a picture has {num_patches} patches, and the encoder takes at most {sizes[-1]}: the "
        "settings in preprocessor_config.json do not fit vision_config in config.json"
    )


class PatchEmbedding(nnx.Module):
    """Multiplies patches by the kernel of a convolution that takes one at a time."""

    def __init__(self, config: TowerConfig, at: Scope, *, bias: bool):
        width = config.hidden_size
        stored = (width, config.num_channels, config.patch_size, config.patch_size)
        shape = (width, config.patch_width)
        kernel = Source(shape, (Piece(f"{at.name}.weight", stored, shape, (0, 0)),))
        self.kernel = parameter(shape, axes=(None, None), dtype=at.dtype, sources=[kernel])
        biases = tensor(f"{at.name}.bias", width)
        self.bias = (
            parameter((width,), axes=(None,), dtype=at.dtype, sources=[biases]) if bias else None
        )

    def __call__(self, patch_PI: Float[Array, "P I"]) -> Float[Array, "P D"]:
        """Returns the states of patches in the type of the kernel."""
        kernel = self.kernel[...]
        state_PD = product(patch_PI.astype(kernel.dtype), kernel)
        return state_PD if self.bias is None else state_PD + self.bias[...][None, :]


class PictureAttention(nnx.Module):
    """Lets the patches of a segment see each other.

    Attributes:
        inputs: The product for queries, keys and values.
        output: The product for the output.
        head_dim: The width of a head.
        scale: The factor of scores.
        longest: The most patches of a segment, where these are windows (`attend_in_windows`); None
            otherwise.
    """

    def __init__(
        self, inputs: Linear, output: Linear, *, head_dim: int, longest: int | None = None
    ):
        self.inputs = inputs
        self.output = output
        self.head_dim = head_dim
        self.scale = head_dim**-0.5
        self.longest = longest

    def __call__(
        self, x_PD: Float[Array, "P D"], segment_P: Int[Array, "P"], angles: Angles | None
    ) -> Float[Array, "P D"]:
        """Returns the output; angles turn queries and keys."""
        num_patches = len(x_PD)
        parts = jnp.split(self.inputs(x_PD), 3, axis=-1)
        q_PNH, k_PNH, v_PNH = (part.reshape(num_patches, -1, self.head_dim) for part in parts)
        if angles is not None:
            q_PNH, k_PNH = angles.rotate(q_PNH), angles.rotate(k_PNH)
        attend = attend_in_segments
        if self.longest is not None:
            attend = functools.partial(attend_in_windows, longest=self.longest)
        mixed_PNH = attend(q_PNH, k_PNH, v_PNH, segment_P, scale=self.scale)
        return self.output(mixed_PNH.reshape(num_patches, -1))


def picture_attention(
    config: TowerConfig, at: Scope, *, output: str, bias: bool
) -> PictureAttention:
    """Returns the attention of a layer, whose products for queries have the usual names.

    Args:
        config: The config of the tower.
        at: The scope of the attention.
        output: The name of the product for the output.
        bias: True if products have biases.
    """
    width = config.hidden_size
    inner = config.num_heads * config.head_dim
    parts = [(name, inner) for name in ("q_proj", "k_proj", "v_proj")]
    return PictureAttention(
        plain_projection(width, at, *parts, bias=bias),
        plain_projection(inner, at, (output, width), bias=bias),
        head_dim=config.head_dim,
    )


def plain_projection(num_in: int, at: Scope, *parts: tuple[str, int], bias: bool) -> Linear:
    """Returns a linear layer that every device has; see `projection`."""
    return at.projection(num_in, *parts, axes=(None, None), bias=bias)


def fuse_projections(num_in: int, at: Scope, name: str, each: Sequence[int]) -> Linear:
    """Returns a linear layer with biases that the checkpoint has as one, whose parts are `each`."""
    parts = [Part(rows, None, None) for rows in each]
    fused = (at / name).name
    return linear(num_in, *parts, fused=fused, input_axis=None, bias=True, dtype=at.dtype)


def tower_norm(width: int, at: Scope | None, epsilon: float) -> RMSNorm:
    """Returns an RMS norm that every device has; without a scale if there is no scope."""
    name, dtype = (None, "float32") if at is None else (at.name, at.dtype)
    return RMSNorm(width, name=name, epsilon=epsilon, axis=None, dtype=dtype)


class PictureBlock(nnx.Module):
    """Computes `y = x + attention(norm(x))`, then `y + mlp(norm(y))`."""

    def __init__(
        self, attention_norm: Any, attention: PictureAttention, mlp_norm: Any, mlp: nnx.Module
    ):
        self.attention_norm = attention_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp: Any = mlp

    def __call__(
        self, x_PD: Float[Array, "P D"], segment_P: Int[Array, "P"], angles: Angles | None = None
    ) -> Float[Array, "P D"]:
        """Returns the states after the layer."""
        attended_PD = self.attention(self.attention_norm(x_PD), segment_P, angles)
        y_PD, normed_PD = add_and_norm(self.mlp_norm, x_PD, attended_PD)
        fed_PD: jax.Array = self.mlp(normed_PD)
        return y_PD + fed_PD


class VisionTower(FamilyModule):
    """Computes an encoder of pictures; see `VisionFamily`.

    class SmolVLMVision(VisionTower, config=SmolVLMVisionConfig): ...
    """

    def __init__(self, config: Any, *, dtype: jax.typing.DTypeLike):
        self.config = config
        self.dtype = dtype

    @staticmethod
    def input_shapes(spec: Any, size: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the shapes and types of the inputs of one size."""
        return placed_patch_shapes(spec.tower.patch_width, size)
