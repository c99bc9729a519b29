"""Makes the parts of encoders of pictures: the product for patches, attention both ways, blocks.

The towers are small next to text models, so no device has a part of one: their scopes are whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxpage.layers import Angles, Linear
from jaxpage.layers.linear import Part, linear
from jaxpage.layers.matmul import matmul
from jaxpage.layers.norms import add_and_norm
from jaxpage.layers.parameter import Piece, Source, parameter
from jaxpage.layers.picture_attention import attend_in_segments, attend_in_windows
from jaxpage.models.base import FamilyModule
from jaxpage.models.parts import Scope, patches, vision
from jaxpage.models.parts.vision_config import TowerConfig


class PatchEmbedding(nnx.Module):
    """Multiplies patches by the kernel of a convolution that takes one at a time."""

    def __init__(self, config: TowerConfig, at: Scope, *, bias: bool):
        width = config.hidden_size
        stored = (width, config.num_channels, config.patch_size, config.patch_size)
        shape = (width, config.patch_width)
        kernel = Source(shape, (Piece(f"{at.name}.weight", stored, shape, (0, 0)),))
        self.kernel = parameter(shape, axes=(None, None), dtype=at.dtype, sources=[kernel])
        self.bias = at.vector("bias", width) if bias else None

    def __call__(self, patch_PI: Float[Array, "P I"]) -> Float[Array, "P D"]:
        """Returns the states of patches in the type of the kernel."""
        kernel = self.kernel[...]
        state_PD = matmul(patch_PI.astype(kernel.dtype), kernel)
        return state_PD if self.bias is None else state_PD + self.bias[...][None, :]


class PictureAttention(nnx.Module):
    """Lets the patches of a segment see each other.

    Attributes:
        inputs: The product for queries, keys and values.
        output: The product for the output.
        head_dim: The width of a head.
        scale: The factor of scores.
        max_patches: The most patches of a segment, where these are windows (`attend_in_windows`);
            None otherwise.
    """

    def __init__(
        self, inputs: Linear, output: Linear, *, head_dim: int, max_patches: int | None = None
    ):
        self.inputs = inputs
        self.output = output
        self.head_dim = head_dim
        self.scale = head_dim**-0.5
        self.max_patches = max_patches

    def __call__(
        self, x_PD: Float[Array, "P D"], segment_P: Int[Array, "P"], angles: Angles | None
    ) -> Float[Array, "P D"]:
        """Returns the output; queries and keys are rotated if there are angles."""
        num_patches = len(x_PD)
        parts = jax.numpy.split(self.inputs(x_PD), 3, axis=-1)
        q_PNH, k_PNH, v_PNH = (part.reshape(num_patches, -1, self.head_dim) for part in parts)
        if angles is not None:
            q_PNH, k_PNH = angles.rotate(q_PNH), angles.rotate(k_PNH)
        inputs = q_PNH, k_PNH, v_PNH, segment_P
        if self.max_patches is None:
            mixed_PNH = attend_in_segments(*inputs, scale=self.scale)
        else:
            mixed_PNH = attend_in_windows(*inputs, scale=self.scale, max_length=self.max_patches)
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
        at.projection(width, *parts, bias=bias),
        at.projection(inner, (output, width), bias=bias),
        head_dim=config.head_dim,
    )


def fuse_projections(num_in: int, at: Scope, name: str, each: Sequence[int]) -> Linear:
    """Returns a linear layer with biases that the checkpoint has as one, whose parts are `each`."""
    parts = [Part(rows, None, None) for rows in each]
    fused = (at / name).name
    return linear(num_in, *parts, fused=fused, input_axis=None, bias=True, dtype=at.dtype)


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
    def make_call(
        spec: Any, num_patches: int, make_inputs: Callable[[], vision.PictureArrays]
    ) -> vision.VisionCall:
        """Returns the call that encodes so many patches, in the smallest size that holds them.

        Args:
            spec: The spec.
            num_patches: The number of patches, which are whole blocks.
            make_inputs: Returns the arrays of these patches.

        Raises:
            UnsupportedError: The encoder takes fewer patches.
        """
        size = patches.size_for(spec.sizes, num_patches)
        return vision.VisionCall(
            size, lambda: patches.fill_up(make_inputs(), size), num_patches // spec.block**2
        )

    @staticmethod
    def input_shapes(spec: Any, size: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the shapes and types of the inputs of one size."""
        return patches.placed_patch_shapes(spec.tower.patch_width, size)
