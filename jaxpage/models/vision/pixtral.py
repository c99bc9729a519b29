"""Holds the lineage of Pixtral (Agrawal et al., 2024): whole pictures, positions on two axes.

Mistral 3 and Ministral 3 join the states of a block of patches. A picture is computed by itself, in
the next larger size of a menu.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxpage.errors import UnsupportedError
from jaxpage.layers import ACTIVATIONS, Angles
from jaxpage.models.config import text_part
from jaxpage.models.parts import Scope, mlp, norms, patches, vision, vision_config, vision_tower

_EPSILON = 1e-5  # of the norms, which no field says
_TEXT_EPSILONS = {"ministral3": 1e-5}  # where `rms_norm_eps` is absent and it is not 1e-6


@dataclass(frozen=True, kw_only=True)
class PixtralConfig(vision_config.VisionConfig):
    """Holds what a config.json of Mistral 3 says of its encoder.

    Attributes:
        rope_theta: The base of the rotations.
        joined_epsilon: The number that the norm before joining adds to the variance.
        joined_activation: The function between the last two products.
        joined_bias: True if the last two products have biases.
    """

    rope_theta: float
    joined_epsilon: float
    joined_activation: str
    joined_bias: bool

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> PixtralConfig:
        """Reads config.json."""
        text = text_part(config)
        outer = vision_config.some_fields(
            config,
            *("spatial_merge_size", "projector_hidden_act", "vision_feature_layer"),
            "multimodal_projector_bias",
        )
        with vision_config.open_fields(config, "pixtral") as fields:
            tower = vision_config.read_tower(
                fields,
                width=1024,
                inner=4096,
                depth=24,
                num_heads=16,
                patch_size=16,
                image_size=1024,
                activation="gelu",
                norm_epsilon=_EPSILON,
            )
            block = outer.integer("spatial_merge_size", 2)
            if outer.get("vision_feature_layer", -1) not in (-1, tower.num_layers):
                text_of_error = "vision_feature_layer other than the last layer is not supported"
                outer.note_unsupported(text_of_error, vision_feature_layer=-1)
            theta = vision_config.read_theta(fields, 10_000.0)
        epsilon = _TEXT_EPSILONS.get(text.get("model_type", ""), 1e-6)
        text_fields = vision_config.some_fields(text, "rms_norm_eps")
        return cls(
            tower=tower,
            hidden_size=vision_config.text_width(config),
            block=block,
            # A processor rounds each side up to whole blocks, so the side may exceed `image_size`.
            sizes=patches.size_menu((-(-tower.side // block) * block) ** 2, block),
            rope_theta=theta,
            joined_epsilon=text_fields.number("rms_norm_eps", epsilon),
            joined_activation=outer.activation("projector_hidden_act", "gelu"),
            joined_bias=outer.flag("multimodal_projector_bias", False),
        )


class PixtralVision(vision_tower.VisionTower, config=PixtralConfig):
    """The encoder of Mistral 3 and Ministral 3: Pixtral, and products for blocks of patches."""

    def __init__(self, config: Any, *, dtype: jax.typing.DTypeLike):
        super().__init__(config, dtype=dtype)
        at = Scope("model.vision_tower", dtype, whole=True)
        self.patches = vision_tower.PatchEmbedding(config.tower, at / "patch_conv", bias=False)
        self.patch_norm = norms.rms_norm(config.tower, at / "ln_pre")
        self.layers = nnx.List(
            _block(config.tower, at / f"transformer.layers.{index}")
            for index in range(config.tower.num_layers)
        )
        projector = Scope("model.multi_modal_projector", dtype, whole=True)
        self.merger = PatchMerger(config, projector)

    @staticmethod
    def calls(spec: Any, arrays: vision.PictureArrays) -> Sequence[vision.VisionCall]:
        """Returns a call for each picture.

        Args:
            spec: The spec.
            arrays: `pixel_values` [..., C, H, W] and `image_sizes` [..., 2]: height and width.

        Raises:
            UnsupportedError: A picture has more patches than the encoder takes, or parts of blocks.
        """
        pixels = np.asarray(arrays["pixel_values"])
        pictures = pixels.reshape(-1, *pixels.shape[-3:])
        sizes = np.asarray(arrays["image_sizes"]).reshape(-1, 2)
        return [
            _call(spec, picture[:, :height, :width])
            for picture, (height, width) in zip(pictures, sizes, strict=True)
        ]

    def __call__(self, inputs: Mapping[str, jax.Array]) -> Float[Array, "R 1 D"]:
        """Returns a row for each block of patches."""
        config = self.config
        angles = two_axis_angles(inputs["place_P2"], config.tower.head_dim, config.rope_theta)
        state_PE = self.patch_norm(self.patches(inputs["patch_PI"]))
        for layer in self.layers:
            state_PE = layer(state_PE, inputs["segment_P"], angles)
        return self.merger(state_PE)[:, None, :]


def _call(spec: vision_config.VisionConfig, picture: np.typing.NDArray[Any]) -> vision.VisionCall:
    tower, block = spec.tower, spec.block
    side = tower.patch_size * block
    if any(length % side for length in picture.shape[1:]):
        raise UnsupportedError(
            f"a picture of {picture.shape[1]} x {picture.shape[2]} pixels has no whole blocks of "
            f"{side} x {side}: the processor must resize it"
        )
    height, width = (length // tower.patch_size for length in picture.shape[1:])

    def make_inputs() -> dict[str, np.typing.NDArray[Any]]:
        places = np.moveaxis(np.indices((height, width), np.int32), 0, -1)
        return {
            "patch_PI": patches.cut_patches(picture, tower.patch_size, block),
            "place_P2": patches.by_blocks(places, block),
        }

    return PixtralVision.make_call(spec, height * width, make_inputs)


def two_axis_angles(index_P2: Int[Array, "P 2"], head_dim: int, theta: float) -> Angles:
    """Returns angles whose first half is by the height, and the second by the width.

    The frequencies go to both by turns.
    """
    frequencies = patches.rotary_frequencies(head_dim, theta)
    axes = [
        index_P2[:, axis, None].astype(jnp.float32) * frequencies[None, axis::2] for axis in (0, 1)
    ]
    angles_PE = jnp.concatenate(axes, axis=-1)
    return Angles(jnp.cos(angles_PE), jnp.sin(angles_PE))


def _block(config: vision_config.TowerConfig, at: Scope) -> vision_tower.PictureBlock:
    return vision_tower.PictureBlock(
        norms.rms_norm(config, at / "attention_norm"),
        vision_tower.picture_attention(config, at / "attention", output="o_proj", bias=False),
        norms.rms_norm(config, at / "ffn_norm"),
        mlp.gated_mlp(config, at / "feed_forward"),
    )


class PatchMerger(nnx.Module):
    """Joins the states of a block of patches, and computes the row of the text model."""

    def __init__(self, config: PixtralConfig, at: Scope):
        width, rows = config.tower.hidden_size, config.hidden_size
        bias = config.joined_bias
        self.activation = ACTIVATIONS[config.joined_activation]
        self.num_patches = config.block**2
        of_text = replace(config.tower, norm_epsilon=config.joined_epsilon)
        self.norm = norms.rms_norm(of_text, at / "norm")
        joined = width * self.num_patches
        self.merge = (at / "patch_merger").projection(joined, ("merging_layer", width))
        self.first = at.projection(width, ("linear_1", rows), bias=bias)
        self.second = at.projection(rows, ("linear_2", rows), bias=bias)

    def __call__(self, state_PE: Float[Array, "P E"]) -> Float[Array, "R D"]:
        """Returns the rows of all blocks."""
        normed_PE = self.norm(state_PE)
        blocks = normed_PE.reshape(-1, self.num_patches, normed_PE.shape[-1])
        # The checkpoint's columns have the patches of a block next to each other.
        joined_RJ = blocks.swapaxes(1, 2).reshape(len(blocks), -1)
        return self.second(self.activation(self.first(self.merge(joined_RJ))))
