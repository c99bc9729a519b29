"""Holds the encoder of Gemma 3: SigLIP, a mean over blocks of patches, a norm and a product.

The rows stand next to token embeddings that are scaled already, and are not scaled themselves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxpage.errors import UnsupportedError
from jaxpage.layers.matmul import matmul
from jaxpage.layers.parameter import parameter, tensor
from jaxpage.models.parts import Scope, norms, vision, vision_config
from jaxpage.models.vision.siglip import Siglip, SiglipConfig, SiglipTiles


class Gemma3VisionConfig(SiglipConfig):
    """Holds what a config.json of Gemma 3 says of its encoder."""

    kinds = ("siglip_vision_model",)
    widths: ClassVar[Mapping[str, int]] = {"width": 768, "num_heads": 12, "patch_size": 16}

    @property
    def num_rows(self) -> int:
        """Returns the number of rows of a tile."""
        return (self.tower.side // self.block) ** 2

    @property
    def num_whole(self) -> int:
        """Returns how many tokens of a picture see each other both ways: all of a tile's."""
        return self.num_rows

    @classmethod
    def read_block(cls, config: Mapping[str, Any], tower: vision_config.TowerConfig) -> int:
        """Returns the side of a block, so that a tile has as many as `mm_tokens_per_image` says."""
        name = "mm_tokens_per_image"
        rows = vision_config.some_fields(config, name).integer(name, 256)
        return max(1, tower.side // math.isqrt(rows))


class Gemma3Vision(SiglipTiles, config=Gemma3VisionConfig):
    """The encoder of Gemma 3: SigLIP, and the mean of each block of patches."""

    ignored = ("*vision_tower.head.*", "*vision_tower.vision_model.head.*")
    older_names = (
        (
            "model.vision_tower.",
            (
                "model.vision_tower.vision_model.",
                "vision_tower.vision_model.",
            ),
        ),
    )

    def __init__(self, config: Any, *, dtype: jax.typing.DTypeLike):
        super().__init__(config, dtype=dtype)
        self.tower = Siglip(config.tower, Scope("model.vision_tower", dtype, whole=True))
        self.projector = Projector(config, Scope("model.multi_modal_projector", dtype, whole=True))

    @staticmethod
    def calls(spec: Any, arrays: vision.PictureArrays) -> Sequence[vision.VisionCall]:
        """Returns a call for each tile: the picture, and crops of it (pan and scan).

        Raises:
            UnsupportedError: A tile does not have the size of the config.
        """
        calls = SiglipTiles.calls(spec, arrays)
        for call in calls:
            if call.num_rows != spec.num_rows:
                side = spec.tower.image_size
                raise UnsupportedError(
                    f"a tile of a picture fills {call.num_rows} rows, not {spec.num_rows}: "
                    f"preprocessor_config.json must resize pictures to {side} x {side} pixels"
                )
        return calls

    def __call__(self, inputs: Mapping[str, jax.Array]) -> Float[Array, "R 1 D"]:
        """Returns a row for each block of patches."""
        return self.projector(self.tower(inputs))[:, None, :]


class Projector(nnx.Module):
    """Computes `norm(mean of a block) @ weight`."""

    def __init__(self, config: Gemma3VisionConfig, at: Scope):
        width = config.tower.hidden_size
        self.num_patches = config.block**2
        # Norms of Gemma store their scales less 1.
        self.norm = norms.rms_norm(config.tower, at / "mm_soft_emb_norm", offset=1.0)
        name = (at / "mm_input_projection_weight").name
        source = tensor(name, width, config.hidden_size, transpose=True)
        self.kernel = parameter(source.shape, axes=(None, None), dtype=at.dtype, sources=[source])

    def __call__(self, state_PE: Float[Array, "P E"]) -> Float[Array, "R D"]:
        """Returns the rows of all blocks."""
        blocks = state_PE.reshape(-1, self.num_patches, state_PE.shape[-1])
        # PyTorch's AvgPool2d adds up in float32, too, and rounds only the mean.
        mean_RE = jnp.mean(blocks.astype(jnp.float32), axis=1).astype(state_PE.dtype)
        return matmul(self.norm(mean_RE), self.kernel[...])
