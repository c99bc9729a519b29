"""Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5 see with ViTs that take a picture of any size.

    patches ── product ── (+ table of positions) ── layers ── merger ── rows of the text model
                                                      └────── mergers ── features (DeepStack)

Queries and keys turn by the row and the column of their patch. Qwen2.5-VL has windows in most
layers, so that its patches are in the order of windows. Qwen3-VL and 3.5 add learned positions,
which are interpolated to the size of the picture; the mergers of Qwen3-VL give features as well.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from jaxpage.errors import UnsupportedError
from jaxpage.layers import ACTIVATIONS, Embedding, Linear
from jaxpage.layers.parameter import Source, parameter, tensor
from jaxpage.models.parts import Scope, mlp, norms, patches, vision, vision_tower
from jaxpage.models.vision import patch_grid, qwen_config


@runtime_checkable
class ProcessedPicture(Protocol):
    """Holds a picture as its processor made it."""

    @property
    def arrays(self) -> vision.PictureArrays:
        """Returns the arrays, under the names of the processor."""
        ...


class Merger(nnx.Module):
    """Joins the patches of a block, and computes of them a row of the text model."""

    def __init__(self, norm: norms.Norm, up: Linear, down: Linear, *, is_norm_of_block: bool):
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


class QwenVision(vision_tower.VisionTower):
    """Computes an encoder; a generation overrides what differs in its layers and its mergers."""

    ignored: ClassVar[tuple[str, ...]] = ("*rotary_pos_emb.inv_freq",)
    patch_bias: ClassVar[bool] = False
    # Returns a norm of hidden states, of the config of a tower and a scope.
    make_norm: ClassVar[Callable[..., norms.Norm]] = staticmethod(norms.layer_norm)
    merger_names: ClassVar[tuple[str, str, str]] = ("ln_q", "mlp.0", "mlp.2")

    def __init__(self, config: Any, *, dtype: jax.typing.DTypeLike):
        super().__init__(config, dtype=dtype)
        at = Scope("model.visual", dtype, whole=True)
        self.patches = patch_matmul(config, at / "patch_embed.proj", bias=self.patch_bias)
        self.table = self.make_table(config, at / "pos_embed")
        self.layers = nnx.List(
            self.make_block(config, index, at / f"blocks.{index}")
            for index in range(config.tower.num_layers)
        )
        self.merger = self.make_merger(config, at / "merger")
        self.deep_mergers = nnx.List(
            self.make_merger(config, at / f"deepstack_merger_list.{index}", is_norm_of_block=True)
            for index in range(config.num_deep)
        )

    @classmethod
    def make_table(cls, config: qwen_config.QwenVisionConfig, at: Scope) -> Embedding | None:
        """Returns the table of positions; None if there is none."""
        if not config.num_entries:
            return None
        rows = config.num_entries**2
        return Embedding(rows, config.width, name=at.name, axis=None, dtype=at.dtype)

    @classmethod
    def make_mlp(cls, config: qwen_config.QwenVisionConfig, index: int, layer: Scope) -> nnx.Module:
        """Returns the feed-forward half of a layer; see `Llama.make_mlp`."""
        return mlp.plain_mlp(config.tower, layer / "mlp", "fc1", "fc2")

    @classmethod
    def make_block(
        cls, config: qwen_config.QwenVisionConfig, index: int, layer: Scope
    ) -> vision_tower.PictureBlock:
        """Returns a layer."""
        width = config.width
        attention = layer / "attn"
        has_windows = config.window and index not in config.whole_layers
        return vision_tower.PictureBlock(
            cls.make_norm(config.tower, layer / "norm1"),
            vision_tower.PictureAttention(
                vision_tower.fuse_projections(width, attention, "qkv", (width,) * 3),
                attention.projection(width, ("proj", width), bias=True),
                head_dim=config.tower.head_dim,
                max_patches=(config.window * config.block) ** 2 if has_windows else None,
            ),
            cls.make_norm(config.tower, layer / "norm2"),
            cls.make_mlp(config, index, layer),
        )

    @classmethod
    def make_merger(
        cls, config: qwen_config.QwenVisionConfig, at: Scope, *, is_norm_of_block: bool = False
    ) -> Merger:
        """Returns the product of blocks of patches; see `Merger`."""
        inner = config.width * config.block**2
        norm, up, down = cls.merger_names
        return Merger(
            cls.make_norm(config.tower, at / norm, width=inner if is_norm_of_block else None),
            at.projection(inner, (up, inner), bias=True),
            at.projection(inner, (down, config.hidden_size), bias=True),
            is_norm_of_block=is_norm_of_block,
        )

    @staticmethod
    def calls(
        spec: qwen_config.QwenVisionConfig, arrays: vision.PictureArrays
    ) -> list[vision.VisionCall]:
        """Returns the call that encodes a picture.

        Args:
            spec: The spec.
            arrays: `pixel_values` [P, C * t * p * p] and `image_grid_thw` [1, 3].

        Raises:
            UnsupportedError: It is too large.
            ValueError: The arrays are not those of one picture.
        """
        grid = grid_of(spec, arrays)
        if grid.num_patches > spec.sizes[-1]:
            raise UnsupportedError(
                f"a picture has {grid.num_patches} patches, and the encoder takes at most "
                f"{spec.sizes[-1]}: make it smaller, or lower size in preprocessor_config.json"
            )
        size = patches.size_for(spec.sizes, grid.num_patches)
        make_inputs = functools.partial(_inputs, spec, grid, arrays["pixel_values"], size)
        return [vision.VisionCall(size, make_inputs, grid.num_blocks)]

    @staticmethod
    def input_shapes(
        spec: qwen_config.QwenVisionConfig, size: int
    ) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the shapes and types of the inputs of one size."""
        shapes = patches.placed_patch_shapes(math.prod(spec.patch), size)
        if spec.num_entries:
            shapes["entry_P4"] = jax.ShapeDtypeStruct((size, 4), jnp.int32)
            shapes["share_P4"] = jax.ShapeDtypeStruct((size, 4), jnp.float32)
        if spec.window:
            shapes["window_P"] = jax.ShapeDtypeStruct((size,), jnp.int32)
            shapes["row_R"] = jax.ShapeDtypeStruct((size // spec.block**2,), jnp.int32)
        return shapes

    @staticmethod
    def axes_of(
        spec: qwen_config.QwenVisionConfig,
        token_ids: np.typing.ArrayLike,
        pictures: Sequence[ProcessedPicture],
    ) -> np.typing.NDArray[np.int32]:
        """Returns the rotary positions of a prompt's tokens [3, T]; see `rotary_positions`."""
        grids = [grid_of(spec, picture.arrays) for picture in pictures]
        return patch_grid.rotary_positions(token_ids, spec.image_token_id, grids)

    def __call__(self, inputs: Mapping[str, jax.Array]) -> Float[Array, "R 1+n D"]:
        """Returns the rows of the text model, each with its features."""
        config = self.config
        hidden_PW = self.patches(inputs["patch_PI"].astype(self.dtype))
        if self.table is not None:
            entry_P4W = self.table(inputs["entry_P4"]).astype(jnp.float32)
            position_PW = (entry_P4W * inputs["share_P4"][:, :, None]).sum(axis=1)
            hidden_PW = hidden_PW + position_PW.astype(hidden_PW.dtype)
        angles = config.rope.angles(inputs["place_P2"].T)
        deep: list[jax.Array] = []
        for index, layer in enumerate(self.layers):
            has_windows = config.window and index not in config.whole_layers
            segment_P = inputs["window_P" if has_windows else "segment_P"]
            hidden_PW = layer(hidden_PW, segment_P, angles)
            if index in config.deep_layers:
                deep.append(self.deep_mergers[len(deep)](hidden_PW))
        rows = jnp.stack([self.merger(hidden_PW), *deep], axis=1)
        return rows[inputs["row_R"]] if config.window else rows


def _inputs(
    spec: qwen_config.QwenVisionConfig,
    grid: patch_grid.PatchGrid,
    pixels_PI: np.typing.NDArray[Any],
    size: int,
) -> dict[str, np.typing.NDArray[Any]]:
    inputs: dict[str, np.typing.NDArray[Any]] = {
        "patch_PI": np.asarray(pixels_PI, np.float32),
        "place_P2": grid.places().T,
    }
    if spec.num_entries:
        inputs["entry_P4"], inputs["share_P4"] = grid.interpolate(spec.num_entries)
    if not spec.window:
        return patches.fill_up(inputs, size)
    order_R, window_R = grid.windows(spec.window)
    block_size = spec.block**2
    order_P = (order_R[:, None] * block_size + np.arange(block_size)).reshape(-1)
    inputs = {name: array[order_P] for name, array in inputs.items()}
    inputs["window_P"] = np.repeat(1 + window_R, block_size)
    row_R = np.zeros(size // block_size, np.int32)
    # Undoes the order of windows: rows of the text model go by rows of the picture.
    row_R[: grid.num_blocks] = np.argsort(order_R)
    return {**patches.fill_up(inputs, size), "row_R": row_R}


class Qwen2Vision(QwenVision, config=qwen_config.Qwen2VisionConfig):
    """The encoder of Qwen2-VL (Wang et al., 2024): LayerNorms, and no table of positions."""


class Qwen2_5Vision(QwenVision, config=qwen_config.Qwen2_5VisionConfig):
    """The encoder of Qwen2.5-VL (Bai et al., 2025): RMS norms, gates and windows."""

    make_norm = staticmethod(norms.rms_norm)

    @classmethod
    def make_mlp(cls, config: qwen_config.QwenVisionConfig, index: int, layer: Scope) -> nnx.Module:
        """Returns the feed-forward half of a layer."""
        return mlp.gated_mlp(config.tower, layer / "mlp")


class Qwen3Vision(QwenVision, config=qwen_config.Qwen3VisionConfig):
    """The encoder of Qwen3-VL (2025): a table of positions, and features of several layers."""

    patch_bias = True
    merger_names = ("norm", "linear_fc1", "linear_fc2")

    @classmethod
    def make_mlp(cls, config: qwen_config.QwenVisionConfig, index: int, layer: Scope) -> nnx.Module:
        """Returns the feed-forward half of a layer."""
        return mlp.plain_mlp(config.tower, layer / "mlp", "linear_fc1", "linear_fc2")


class Qwen3_5Vision(Qwen3Vision, config=qwen_config.Qwen3_5VisionConfig):
    """The encoder of Qwen3.5 (2026), which is that of Qwen3-VL without features."""


def grid_of(
    spec: qwen_config.QwenVisionConfig, arrays: vision.PictureArrays
) -> patch_grid.PatchGrid:
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
    _, height, width = grids[0]
    return patch_grid.PatchGrid(height, width, spec.block)


def patch_matmul(config: qwen_config.QwenVisionConfig, at: Scope, *, bias: bool) -> Linear:
    """Returns the product for patches, which is stored as a convolution [W, C, t, p, p]."""
    shape = (config.width, math.prod(config.patch))
    made = at.projection(shape[1], ("", config.width), bias=bias)
    stored = tensor(f"{at.name}.weight", config.width, *config.patch).pieces[0]
    source = Source(shape, (stored._replace(shape=shape, offset=(0, 0)),))
    made.kernel = parameter(shape, axes=(None, None), dtype=at.dtype, sources=[source])
    return made
