"""Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5 see with ViTs that take a picture of any size.

    patches ── product ── (+ table of positions) ── layers ── merger ── rows of the text model
                                                      └────── mergers ── features (DeepStack)

Queries and keys turn by the row and the column of their patch. Qwen2.5-VL has windows in most
layers, so that its patches are in the order of windows. Qwen3-VL and 3.5 add learned positions,
which are interpolated to the size of the picture; the mergers of Qwen3-VL give features as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxpage.layers.activations import ACTIVATIONS
from jaxpage.layers.attention import query_key_value
from jaxpage.layers.context import Attend, AttentionOptions, ForwardContext, LayerPages
from jaxpage.layers.embedding import Embedding
from jaxpage.layers.linear import Linear
from jaxpage.layers.parameter import Source, parameter, tensor
from jaxpage.layers.picture_attention import attend_in_windows, attend_to_picture
from jaxpage.models.parts.encoder import PreNormBlock, attention_both_ways
from jaxpage.models.parts.mlp import gated_mlp, plain_mlp
from jaxpage.models.parts.norms import Norm, layer_norm, rms_norm
from jaxpage.models.parts.projection import projection
from jaxpage.models.parts.scope import Scope
from jaxpage.models.parts.vision import PictureArrays, VisionCall
from jaxpage.models.vision.patch_grid import PatchGrid, rotary_positions
from jaxpage.models.vision.qwen_config import (
    Qwen2_5VisionConfig,
    Qwen2VisionConfig,
    Qwen3_5VisionConfig,
    Qwen3VisionConfig,
    QwenVisionConfig,
)


class ProcessedPicture(Protocol):
    """Holds a picture as its processor made it."""

    @property
    def arrays(self) -> PictureArrays:
        """Returns the arrays, under the names of the processor."""
        ...


class Merger(nnx.Module):
    """Joins the patches of a block, and computes of them a row of the text model."""

    def __init__(self, norm: Norm, up: Linear, down: Linear, *, is_norm_of_block: bool):
        """Makes the merger.

        Args:
            norm: The norm.
            up: The product with the numbers of a block.
            down: The product for the row.
            is_norm_of_block: True if the norm is over a block, False if over each of its patches.
        """
        self.norm = norm
        self.up = up
        self.down = down
        self.is_norm_of_block = is_norm_of_block

    def __call__(self, x_PW: Float[Array, "P W"]) -> Float[Array, "R D"]:
        """Returns a row for each block."""
        width = self.up.spec.num_in
        if self.is_norm_of_block:
            block_RW = self.norm(x_PW.reshape(-1, width))
        else:
            block_RW = self.norm(x_PW).reshape(-1, width)
        return self.down(ACTIVATIONS["gelu"](self.up(block_RW)))


class QwenVision(nnx.Module):
    """Computes an encoder; see `VisionModel`. The class is the family, as that of a `Decoder` is.

    A generation overrides what differs in its layers and in its merger.
    """

    Spec: ClassVar[type[QwenVisionConfig]]
    Model: ClassVar[Any]
    prefix: ClassVar[str | tuple[str, ...]] = "model."
    ignored: ClassVar[tuple[str, ...]] = ("*rotary_pos_emb.inv_freq",)
    patch_bias: ClassVar[bool] = False
    merger_names: ClassVar[tuple[str, str, str]] = ("ln_q", "mlp.0", "mlp.2")

    def __init_subclass__(
        cls, config: type[QwenVisionConfig] | None = None, **options: Any
    ) -> None:
        """Makes the class a family: its model is the class itself."""
        super().__init_subclass__(**options)
        cls.Model = cls
        if config is not None:
            cls.Spec = config

    def __init__(self, config: Any, *, dtype: DTypeLike):
        tower = config.tower
        at = Scope(tower.name, dtype)
        self.config = config
        self.patches = patch_product(config, at / "patch_embed.proj", bias=self.patch_bias)
        self.table = self.make_table(config, at / "pos_embed")
        self.layers = nnx.List(
            self.make_block(tower, index, at / f"blocks.{index}")
            for index in range(tower.num_layers)
        )
        self.merger = self.make_merger(config, at / "merger")
        self.deep_mergers = nnx.List(
            self.make_merger(config, at / f"deepstack_merger_list.{index}", is_norm_of_block=True)
            for index in range(config.num_deep)
        )

    @classmethod
    def make_table(cls, config: QwenVisionConfig, at: Scope) -> Embedding | None:
        """Returns the table of positions; None if there is none."""
        if not config.num_entries:
            return None
        width = config.tower.hidden_size
        return Embedding(config.num_entries**2, width, name=at.name, axis=None, dtype=at.dtype)

    @classmethod
    def make_norm(cls, tower: Any, at: Scope, **options: Any) -> Norm:
        """Returns a norm of hidden states."""
        return layer_norm(tower, at, **options)

    @classmethod
    def make_mlp(cls, tower: Any, at: Scope) -> nnx.Module:
        """Returns the feed-forward half of a layer."""
        return plain_mlp(tower, at, "fc1", "fc2")

    @classmethod
    def make_block(cls, tower: Any, index: int, at: Scope) -> PreNormBlock:
        """Returns a layer."""
        width = tower.hidden_size
        attention = at / "attn"
        inputs = query_key_value(
            width, width, width, name=attention.name, fused="qkv", bias=True, dtype=at.dtype
        )
        output = projection(width, attention, ("proj", width), axes=("heads", "embed"), bias=True)
        return PreNormBlock(
            attention_both_ways(tower, index, inputs, output),
            cls.make_norm(tower, at / "norm1"),
            cls.make_mlp(tower, at / "mlp"),
            cls.make_norm(tower, at / "norm2"),
        )

    @classmethod
    def make_merger(
        cls, config: QwenVisionConfig, at: Scope, *, is_norm_of_block: bool = False
    ) -> Merger:
        """Returns the product of blocks of patches; see `Merger`."""
        width = config.tower.hidden_size
        inner = width * config.merge**2
        norm, up, down = cls.merger_names
        return Merger(
            cls.make_norm(config.tower, at / norm, width=inner if is_norm_of_block else width),
            projection(inner, at, (up, inner), axes=(None, "ffn"), bias=True),
            projection(inner, at, (down, config.hidden_size), axes=("ffn", "embed"), bias=True),
            is_norm_of_block=is_norm_of_block,
        )

    @staticmethod
    def calls(spec: QwenVisionConfig, arrays: PictureArrays) -> list[VisionCall]:
        """Returns the call that encodes a picture.

        Raises:
            ValueError: It is a video, or larger than the largest size.
        """
        grid = grid_of(spec, arrays)
        size = next((size for size in spec.sizes if size >= grid.num_patches), None)
        if size is None:
            raise ValueError(
                f"a picture of {grid.num_patches} patches is larger than the encoder takes, "
                f"{spec.sizes[-1]}; make it smaller, or set max_pixels of the processor"
            )
        inputs = {
            "patches": np.asarray(arrays["pixel_values"], np.float32),
            "places": grid.places().T,
        }
        if spec.window:
            order_R, window_R = grid.windows(spec.window)
            per_block = spec.merge**2
            order_P = (order_R[:, None] * per_block + np.arange(per_block)).reshape(-1)
            inputs = {name: array[order_P] for name, array in inputs.items()}
            inputs["windows"] = np.repeat(1 + window_R, per_block)
            inputs["rows"] = np.argsort(order_R).astype(np.int32)
        if spec.num_entries:
            inputs["entries"], inputs["shares"] = grid.interpolate(spec.num_entries)
        shapes = QwenVision.input_shapes(spec, size)
        filled = {name: _pad(array, shapes[name]) for name, array in inputs.items()}
        filled["num_patches"] = np.asarray(grid.num_patches, np.int32)
        return [VisionCall(size, filled, grid.num_blocks)]

    @staticmethod
    def input_shapes(spec: QwenVisionConfig, size: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the shapes and types of the inputs of one size."""
        shapes = {
            "num_patches": jax.ShapeDtypeStruct((), jnp.int32),
            "patches": jax.ShapeDtypeStruct((size, int(np.prod(spec.patch))), jnp.float32),
            "places": jax.ShapeDtypeStruct((size, 2), jnp.int32),
        }
        if spec.window:
            shapes["windows"] = jax.ShapeDtypeStruct((size,), jnp.int32)
            shapes["rows"] = jax.ShapeDtypeStruct((size // spec.merge**2,), jnp.int32)
        if spec.num_entries:
            shapes["entries"] = jax.ShapeDtypeStruct((size, 4), jnp.int32)
            shapes["shares"] = jax.ShapeDtypeStruct((size, 4), jnp.float32)
        return shapes

    @staticmethod
    def axes_of(
        spec: QwenVisionConfig, token_ids: npt.ArrayLike, pictures: Sequence[ProcessedPicture]
    ) -> npt.NDArray[np.int32]:
        """Returns the rotary positions of a prompt's tokens [3, T]; see `rotary_positions`."""
        grids = [grid_of(spec, picture.arrays) for picture in pictures]
        return rotary_positions(token_ids, spec.image_token_id, grids)

    def __call__(self, inputs: Mapping[str, jax.Array]) -> Float[Array, "R 1+n D"]:
        """Returns the rows of the text model, each with its features."""
        config = self.config
        patch_PI = inputs["patches"].astype(self.patches.weight.dtype)
        hidden_PW = self.patches(patch_PI)
        if self.table is not None:
            entry_P4W = self.table(inputs["entries"]).astype(jnp.float32)
            position_PW = (entry_P4W * inputs["shares"][:, :, None]).sum(axis=1)
            hidden_PW = hidden_PW + position_PW.astype(hidden_PW.dtype)
        places_2P = inputs["places"].T
        context = ForwardContext(places_2P[0], self._attend(inputs), axes_AT=places_2P)
        deep = []
        for number, layer in enumerate(self.layers):
            hidden_PW = layer(hidden_PW, context)
            if number in config.deep_layers:
                deep.append(self.deep_mergers[len(deep)](hidden_PW))
        rows = jnp.stack([self.merger(hidden_PW), *deep], axis=1)
        return rows[inputs["rows"]] if config.window else rows

    def _attend(self, inputs: Mapping[str, jax.Array]) -> Attend:
        """Returns the operation that attention layers call."""
        config = self.config
        longest = (config.window * config.merge) ** 2

        def attend(
            layer_index: int,
            q_TNH: jax.Array,
            k_TNH: jax.Array | None,
            v_TNH: jax.Array | None,
            layer_pages: LayerPages,
            options: AttentionOptions,
            /,
        ) -> tuple[jax.Array, LayerPages]:
            assert k_TNH is not None and v_TNH is not None, "an encoder's layers have all three"
            scale = options.scale
            if not config.window or layer_index in config.whole_layers:
                num = inputs["num_patches"]
                out = attend_to_picture(q_TNH, k_TNH, v_TNH, num_tokens=num, scale=scale)
            else:
                windows = inputs["windows"]
                out = attend_in_windows(
                    q_TNH, k_TNH, v_TNH, window_T=windows, longest=longest, scale=scale
                )
            return out, layer_pages

        return attend


class Qwen2Vision(QwenVision, config=Qwen2VisionConfig):
    """Qwen2-VL's encoder (Wang et al., 2024) has LayerNorms and no table of positions."""


class Qwen2_5Vision(QwenVision, config=Qwen2_5VisionConfig):
    """Qwen2.5-VL's encoder (Bai et al., 2025) has RMS norms, gates and windows."""

    @classmethod
    def make_norm(cls, tower: Any, at: Scope, **options: Any) -> Norm:
        """Returns a norm of hidden states."""
        return rms_norm(tower, at, **options)

    @classmethod
    def make_mlp(cls, tower: Any, at: Scope) -> nnx.Module:
        """Returns the feed-forward half of a layer."""
        return gated_mlp(tower, at)


class Qwen3Vision(QwenVision, config=Qwen3VisionConfig):
    """Qwen3-VL's encoder (2025) has a table of positions, and features of several layers."""

    patch_bias = True
    merger_names = ("norm", "linear_fc1", "linear_fc2")

    @classmethod
    def make_mlp(cls, tower: Any, at: Scope) -> nnx.Module:
        """Returns the feed-forward half of a layer."""
        return plain_mlp(tower, at, "linear_fc1", "linear_fc2")


class Qwen3_5Vision(Qwen3Vision, config=Qwen3_5VisionConfig):
    """Qwen3.5's encoder (2026) is that of Qwen3-VL without features."""


def grid_of(spec: QwenVisionConfig, arrays: PictureArrays) -> PatchGrid:
    """Returns the grid of a picture's patches.

    Raises:
        ValueError: The arrays are not those of one picture.
    """
    grids = np.asarray(arrays["image_grid_thw"]).reshape(-1, 3).tolist()
    num_patches = len(arrays["pixel_values"])
    if len(grids) != 1 or grids[0][0] != 1 or grids[0][1] * grids[0][2] != num_patches:
        raise ValueError(
            f"{num_patches} patches with image_grid_thw {grids} are not those of one picture"
        )
    return PatchGrid(*grids[0][1:], spec.merge)


def patch_product(config: QwenVisionConfig, at: Scope, *, bias: bool) -> Linear:
    """Returns the product for patches, which is stored as a convolution [W, C, t, p, p]."""
    width = config.tower.hidden_size
    shape = (width, int(np.prod(config.patch)))
    made = projection(shape[1], at, ("", width), axes=(None, "embed"), bias=bias)
    stored = tensor(f"{at.name}.weight", width, *config.patch).pieces[0]
    source = Source(shape, (stored._replace(shape=shape, offset=(0, 0)),))
    made.kernel = parameter(shape, axes=("embed", None), dtype=at.dtype, sources=[source])
    return made


def _pad(array: npt.NDArray[Any], shape: jax.ShapeDtypeStruct) -> npt.NDArray[Any]:
    """Returns an array with zeros after its last row."""
    padded = np.zeros(shape.shape, shape.dtype)
    padded[: len(array)] = array
    return padded
