"""Holds the lineage of SigLIP (Zhai et al., 2023): tiles of one size, and learned positions.

SmolVLM and Idefics 3 divide a picture into tiles and join the states of a block of patches.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxpage.errors import UnsupportedError
from jaxpage.layers import Embedding
from jaxpage.models.parts import Scope, mlp, norms, patches, vision, vision_config, vision_tower


@dataclass(frozen=True, kw_only=True)
class SiglipConfig(vision_config.VisionConfig):
    """Holds what a config.json says of an encoder that takes tiles of one size."""

    kinds: ClassVar[tuple[str, ...]]  # the model types of `vision_config`
    widths: ClassVar[Mapping[str, int]]  # defaults in which families differ; see `read_tower`

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> SiglipConfig:
        """Reads config.json."""
        with vision_config.open_fields(config, *cls.kinds) as fields:
            tower = vision_config.read_tower(
                fields,
                inner=3072,
                depth=12,
                image_size=224,
                activation="gelu_pytorch_tanh",
                **cls.widths,
            )
            block = cls.read_block(config, tower)
            vision_config.check_blocks(fields, tower, block)
        return cls(
            tower=tower,
            hidden_size=vision_config.text_width(config),
            block=block,
            sizes=(tower.side**2,),
        )

    @classmethod
    @abstractmethod
    def read_block(cls, config: Mapping[str, Any], tower: vision_config.TowerConfig) -> int:
        """Returns the side of a block of patches that becomes a row."""


class Siglip(nnx.Module):
    """Computes the states of patches."""

    def __init__(self, config: vision_config.TowerConfig, at: Scope):
        width = config.hidden_size
        tables = at / "embeddings"
        self.patches = vision_tower.PatchEmbedding(config, tables / "patch_embedding", bias=True)
        self.positions = Embedding(
            config.side**2,
            width,
            name=(tables / "position_embedding").name,
            axis=None,
            dtype=at.dtype,
        )
        self.layers = nnx.List(
            _block(config, at / f"encoder.layers.{index}") for index in range(config.num_layers)
        )
        self.norm = norms.layer_norm(config, at / "post_layernorm")

    def __call__(self, inputs: Mapping[str, jax.Array]) -> Float[Array, "P D"]:
        """Returns the states after the last norm."""
        state_PD = self.patches(inputs["patch_PI"]) + self.positions(inputs["position_P"])
        for layer in self.layers:
            state_PD = layer(state_PD, inputs["segment_P"])
        return self.norm(state_PD)


def _block(config: vision_config.TowerConfig, at: Scope) -> vision_tower.PictureBlock:
    return vision_tower.PictureBlock(
        norms.layer_norm(config, at / "layer_norm1"),
        vision_tower.picture_attention(config, at / "self_attn", output="out_proj", bias=True),
        norms.layer_norm(config, at / "layer_norm2"),
        mlp.plain_mlp(config, at / "mlp", "fc1", "fc2", bias=True),
    )


class SiglipTiles(vision_tower.VisionTower):
    """Encodes each tile of a picture by itself."""

    @staticmethod
    def calls(spec: Any, arrays: vision.PictureArrays) -> Sequence[vision.VisionCall]:
        """Returns a call for each tile.

        Args:
            spec: The spec.
            arrays: `pixel_values` [..., C, H, W]; of those with a `pixel_attention_mask`
                [..., H, W], tiles without any pixel are left out.

        Raises:
            UnsupportedError: A tile has more patches than the encoder takes, or padding.
        """
        pixels = np.asarray(arrays["pixel_values"])
        tiles = pixels.reshape(-1, *pixels.shape[-3:])
        mask = arrays.get("pixel_attention_mask")
        if mask is not None:
            counts = np.asarray(mask).reshape(len(tiles), -1)
            if ((counts.min(axis=1) == 0) & (counts.max(axis=1) > 0)).any():
                raise UnsupportedError("a tile of a picture has padding: tiles must be resized")
            tiles = tiles[counts.max(axis=1) > 0]
        return [_call(spec, tile) for tile in tiles]

    @staticmethod
    def input_shapes(spec: Any, size: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the shapes and types of the inputs of one size."""
        numbers = jax.ShapeDtypeStruct((size,), jnp.int32)
        pixels = jax.ShapeDtypeStruct((size, spec.tower.patch_width), jnp.float32)
        return {"patch_PI": pixels, "position_P": numbers, "segment_P": numbers}


def _call(spec: vision_config.VisionConfig, tile: np.typing.NDArray[Any]) -> vision.VisionCall:
    tower, block = spec.tower, spec.block
    height, width = (side // tower.patch_size for side in tile.shape[1:])
    patches.check_whole("tile", height, width, block)

    def make_inputs() -> dict[str, np.typing.NDArray[Any]]:
        places = place_in_table(height, tower.side)[:, None] * tower.side
        places = places + place_in_table(width, tower.side)[None, :]
        return {
            "patch_PI": patches.cut_patches(tile, tower.patch_size, block),
            "position_P": patches.by_blocks(places, block).astype(np.int32),
        }

    return SiglipTiles.make_call(spec, height * width, make_inputs)


def place_in_table(num_patches: int, side: int) -> Int[np.ndarray, "P"]:
    """Returns the place of each patch along a side in a table of this side.

    A tile of fewer or more patches is spread over the whole table. transformers computes the same
    in float32, whose rounding puts some patches of a few sides (19, 25, 29, ...) one place earlier,
    and not the same ones on each machine; no published model has such a side.
    """
    return np.arange(num_patches) * side // num_patches


class Idefics3VisionConfig(SiglipConfig):
    """Holds what a config.json of Idefics 3 says of its encoder."""

    kinds = ("idefics3_vision", "smolvlm_vision", "idefics3", "smolvlm", "siglip_vision_model")
    widths: ClassVar[Mapping[str, int]] = {"width": 1152, "num_heads": 16, "patch_size": 32}

    @classmethod
    def read_block(cls, config: Mapping[str, Any], tower: vision_config.TowerConfig) -> int:
        """Returns the side of a block, which `scale_factor` says."""
        return vision_config.some_fields(config, "scale_factor").integer("scale_factor", 2)


class Idefics3Vision(SiglipTiles, config=Idefics3VisionConfig):
    """The encoder of Idefics 3 and SmolVLM: SigLIP, and a product for each block of patches."""

    def __init__(self, config: Any, *, dtype: jax.typing.DTypeLike):
        super().__init__(config, dtype=dtype)
        at = Scope("model", dtype, whole=True)
        self.tower = Siglip(config.tower, at / "vision_model")
        joined = config.tower.hidden_size * config.block**2
        connector = at / "connector.modality_projection"
        self.projection = connector.projection(joined, ("proj", config.hidden_size))

    def __call__(self, inputs: Mapping[str, jax.Array]) -> Float[Array, "R 1 D"]:
        """Returns a row for each block of patches."""
        state_PD = self.tower(inputs)
        joined_RJ = state_PD.reshape(-1, self.projection.spec.num_in)
        return self.projection(joined_RJ)[:, None, :]
