"""Holds the encoder of Gemma 4 (Gemma Team, 2026): whole pictures, positions on two axes.

A picture becomes at most so many rows as its processor says, of one block of patches each. The rows
stand next to token embeddings that are scaled already, and are not scaled themselves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxpage.layers import ACTIVATIONS, Angles, RMSNorm
from jaxpage.layers.parameter import Piece, Source, parameter, tensor
from jaxpage.layers.picture_attention import attend_in_segments
from jaxpage.models.config import text_part
from jaxpage.models.parts import Scope, norms, patches, vision, vision_config, vision_tower

# The rows that a processor may let a picture have at most; most pictures have nearly as many.
_NUM_ROWS = (70, 140, 280, 560, 1120)
_USUAL_ROWS = 280  # without such a setting in preprocessor_config.json


@dataclass(frozen=True, kw_only=True)
class Gemma4VisionConfig(vision_config.VisionConfig):
    """Holds what a config.json of Gemma 4 says of its encoder.

    Attributes:
        num_kv_heads: The number of key/value heads.
        num_places: The rows of the table of positions of each axis.
        rope_theta: The base of the rotations.
        is_clipped: True if inputs and outputs of products have bounds.
        is_standardized: True if rows are moved and scaled before the last product.
        num_whole: The usual most of a picture's tokens that see each other both ways; 0
            if they do not.
    """

    num_kv_heads: int
    num_places: int
    rope_theta: float
    is_clipped: bool
    is_standardized: bool
    num_whole: int

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Gemma4VisionConfig:
        """Reads config.json."""
        bidirectional = text_part(config).get("use_bidirectional_attention")
        with vision_config.open_fields(config, "gemma4_vision") as fields:
            tower = _read_tower(fields)
            num_kv_heads = fields.integer("num_key_value_heads", 12)
            if tower.num_heads % num_kv_heads:
                text = f"num_key_value_heads = {num_kv_heads} must divide num_attention_heads"
                fields.note_wrong(text, num_key_value_heads=tower.num_heads)
            block = fields.integer("pooling_kernel_size", 3)
            return cls(
                tower=tower,
                hidden_size=vision_config.text_width(config),
                block=block,
                sizes=tuple(rows * block**2 for rows in _NUM_ROWS),
                num_kv_heads=num_kv_heads,
                num_places=fields.integer("position_embedding_size", 10_240),
                rope_theta=vision_config.read_theta(fields, 100.0),
                is_clipped=fields.flag("use_clipped_linears", False),
                is_standardized=fields.flag("standardize", False),
                num_whole=_USUAL_ROWS if bidirectional == "vision" else 0,
            )


def _read_tower(fields: vision_config.VisionFields) -> vision_config.TowerConfig:
    head_dim = fields.integer("head_dim", 64)
    if head_dim % 4:
        text = f"head_dim = {head_dim} must be a multiple of 4: each axis turns pairs of a half"
        fields.note_wrong(text, head_dim=64)
    return vision_config.TowerConfig(
        hidden_size=fields.integer("hidden_size", 768),
        intermediate_size=fields.integer("intermediate_size", 3072),
        num_layers=fields.integer("num_hidden_layers", 16),
        num_heads=fields.integer("num_attention_heads", 12),
        head_dim=head_dim,
        num_channels=3,
        patch_size=fields.side("patch_size", 16),
        image_size=0,  # a processor limits the patches of a picture, and none of its sides
        norm_epsilon=fields.number("rms_norm_eps", 1e-6),
        activation=fields.activation("hidden_activation", "gelu_pytorch_tanh"),
    )


class Gemma4Vision(vision_tower.VisionTower, config=Gemma4VisionConfig):
    """The encoder of Gemma 4: patches, layers of its own, and the mean of each block of patches."""

    def __init__(self, config: Gemma4VisionConfig, *, dtype: jax.typing.DTypeLike):
        super().__init__(config, dtype=dtype)
        at = Scope("model.vision_tower", dtype, whole=True)
        tower = config.tower
        tables = at / "patch_embedder"
        self.patches = tables.projection(tower.patch_width, ("input_proj", tower.hidden_size))
        table = (tables / "position_embedding_table").name
        source = tensor(table, 2, config.num_places, tower.hidden_size)
        self.places = parameter(source.shape, axes=(None,) * 3, dtype=dtype, sources=[source])
        self.layers = nnx.List(
            Gemma4PictureLayer(config, at / f"encoder.layers.{index}")
            for index in range(tower.num_layers)
        )
        self.pooling = BlockMeans(config, at)
        self.norm = norms.rms_norm(tower, None)
        self.projection = Scope("model.embed_vision", dtype, whole=True).projection(
            tower.hidden_size, ("embedding_projection", config.hidden_size)
        )

    @staticmethod
    def calls(spec: Any, arrays: vision.PictureArrays) -> Sequence[vision.VisionCall]:
        """Returns a call for each picture.

        Args:
            spec: The spec.
            arrays: `pixel_values` [..., P, I] and `image_position_ids` [..., P, 2]: the place of
                each patch, from left and from above, -1 for padding.

        Raises:
            UnsupportedError: A picture has more patches than the encoder takes, or parts of blocks.
        """
        width = spec.tower.patch_width
        pixels = np.asarray(arrays["pixel_values"], np.float32)
        places = np.asarray(arrays["image_position_ids"], np.int32)
        pictures = pixels.reshape(-1, pixels.shape[-2], width)
        positions = places.reshape(len(pictures), -1, 2)
        return [_call(spec, *each) for each in zip(pictures, positions, strict=True)]

    def __call__(self, inputs: Mapping[str, jax.Array]) -> Float[Array, "R 1 D"]:
        """Returns a row for each block of patches."""
        index_P2 = inputs["place_P2"]
        table = self.places[...]
        # The processor leaves pixels from 0 to 1, and the model was trained on -1 to 1.
        centred_PI = (2 * (inputs["patch_PI"] - 0.5)).astype(table.dtype)
        state_PE = self.patches(centred_PI)
        state_PE = state_PE + (table[0][index_P2[:, 0]] + table[1][index_P2[:, 1]])
        angles = _axis_angles(index_P2, self.config)
        for layer in self.layers:
            state_PE = layer(state_PE, inputs["segment_P"], angles)
        return self.projection(self.norm(self.pooling(state_PE)))[:, None, :]


def _call(
    spec: Gemma4VisionConfig, pixels: Float[np.ndarray, "P I"], places: Int[np.ndarray, "P 2"]
) -> vision.VisionCall:
    num_patches = int((places >= 0).all(axis=1).sum())
    width, height = (int(each) + 1 for each in places[:num_patches].max(axis=0))
    block = spec.block
    patches.check_whole("picture", height, width, block, num_patches)

    def make_inputs() -> dict[str, np.typing.NDArray[Any]]:
        grid = {"patch_PI": pixels, "place_P2": places}
        return {
            name: patches.by_blocks(each[:num_patches].reshape(height, width, -1), block)
            for name, each in grid.items()
        }

    return Gemma4Vision.make_call(spec, num_patches, make_inputs)


def _axis_angles(index_P2: Int[Array, "P 2"], config: Gemma4VisionConfig) -> list[Angles]:
    """Returns the angles of the first half of a head, by columns, and of the second, by rows."""
    frequencies = patches.rotary_frequencies(config.tower.head_dim // 2, config.rope_theta)
    angles = [index_P2[:, axis, None].astype(jnp.float32) * frequencies for axis in (0, 1)]
    return [Angles(jnp.cos(each), jnp.sin(each)) for each in angles]


class BoundedLinear(nnx.Module):
    """Computes a product whose inputs and outputs have bounds, which may be infinite."""

    def __init__(self, config: Gemma4VisionConfig, at: Scope, num_in: int, num_out: int):
        self.linear = at.projection(num_in, ("linear", num_out))
        names = ("input_min", "input_max", "output_min", "output_max") if config.is_clipped else ()
        self.bounds = nnx.List(
            parameter((1,), axes=(None,), dtype=at.dtype, sources=[_number((at / name).name)])
            for name in names
        )

    def __call__(self, x_PI: Float[Array, "P I"]) -> Float[Array, "P O"]:
        """Returns the product."""
        if not self.bounds:
            return self.linear(x_PI)
        low, high, out_low, out_high = (each[...] for each in self.bounds)
        return jnp.clip(self.linear(jnp.clip(x_PI, low, high)), out_low, out_high)


def _number(name: str) -> Source:
    """Returns the source that is a tensor without axes."""
    return Source((1,), (Piece(name, (), (1,), (0,)),))


class Gemma4PictureAttention(nnx.Module):
    """Lets patches see each other, with norms of queries, keys and values."""

    def __init__(self, config: Gemma4VisionConfig, at: Scope):
        tower = config.tower
        self.head_dim = tower.head_dim
        keys = config.num_kv_heads * tower.head_dim
        queries = tower.num_heads * tower.head_dim
        self.query = BoundedLinear(config, at / "q_proj", tower.hidden_size, queries)
        self.key = BoundedLinear(config, at / "k_proj", tower.hidden_size, keys)
        self.value = BoundedLinear(config, at / "v_proj", tower.hidden_size, keys)
        self.output = BoundedLinear(config, at / "o_proj", queries, tower.hidden_size)
        self.query_norm, self.key_norm, self.value_norm = (
            norms.rms_norm(tower, scope, width=tower.head_dim)
            for scope in (at / "q_norm", at / "k_norm", None)
        )

    def __call__(
        self, x_PD: Float[Array, "P D"], segment_P: Int[Array, "P"], angles: Sequence[Angles]
    ) -> Float[Array, "P D"]:
        """Returns the output."""

        def split(linear: BoundedLinear, norm: RMSNorm) -> jax.Array:
            return norm(linear(x_PD).reshape(len(x_PD), -1, self.head_dim))

        def rotate(x_PNH: jax.Array) -> jax.Array:
            halves = jnp.split(x_PNH, len(angles), axis=-1)
            rotated = [axis.rotate(half) for axis, half in zip(angles, halves, strict=True)]
            return jnp.concatenate(rotated, axis=-1)

        q_PNH = rotate(split(self.query, self.query_norm))
        k_PKH = rotate(split(self.key, self.key_norm))
        v_PKH = split(self.value, self.value_norm)
        # As in the text model, norms of queries and keys are all that scales scores.
        mixed_PNH = attend_in_segments(q_PNH, k_PKH, v_PKH, segment_P, scale=1.0)
        return self.output(mixed_PNH.reshape(len(x_PD), -1))


class Gemma4PictureLayer(nnx.Module):
    """Computes attention and a feed-forward half, with norms before and after each."""

    def __init__(self, config: Gemma4VisionConfig, at: Scope):
        tower = config.tower
        width, inner = tower.hidden_size, tower.intermediate_size
        self.activation = ACTIVATIONS[tower.activation]
        self.attention_norm = norms.rms_norm(tower, at / "input_layernorm")
        self.attention = Gemma4PictureAttention(config, at / "self_attn")
        self.post_attention_norm = norms.rms_norm(tower, at / "post_attention_layernorm")
        self.mlp_norm = norms.rms_norm(tower, at / "pre_feedforward_layernorm")
        self.gate = BoundedLinear(config, at / "mlp.gate_proj", width, inner)
        self.up = BoundedLinear(config, at / "mlp.up_proj", width, inner)
        self.down = BoundedLinear(config, at / "mlp.down_proj", inner, width)
        self.post_mlp_norm = norms.rms_norm(tower, at / "post_feedforward_layernorm")

    def __call__(
        self, x_PD: Float[Array, "P D"], segment_P: Int[Array, "P"], angles: Sequence[Angles]
    ) -> Float[Array, "P D"]:
        """Returns the states after the layer."""
        attended_PD = self.attention(self.attention_norm(x_PD), segment_P, angles)
        y_PD = x_PD + self.post_attention_norm(attended_PD)
        normed_PD = self.mlp_norm(y_PD)
        fed_PD = self.down(self.activation(self.gate(normed_PD)) * self.up(normed_PD))
        return y_PD + self.post_mlp_norm(fed_PD)


class BlockMeans(nnx.Module):
    """Computes the mean of each block of patches, times the root of its width, in float32."""

    def __init__(self, config: Gemma4VisionConfig, at: Scope):
        width = config.tower.hidden_size
        self.num_patches = config.block**2
        names = ("std_bias", "std_scale") if config.is_standardized else ()
        self.standard = nnx.List(at.vector(name, width) for name in names)

    def __call__(self, state_PE: Float[Array, "P E"]) -> Float[Array, "R E"]:
        """Returns a row for each block."""
        width = state_PE.shape[-1]
        blocks = state_PE.reshape(-1, self.num_patches, width).astype(jnp.float32)
        # transformers rounds the mean to the model's type before it goes on in float32.
        mean_RE = blocks.mean(axis=1).astype(state_PE.dtype).astype(jnp.float32) * math.sqrt(width)
        if self.standard:
            bias_E, scale_E = (each[...].astype(jnp.float32) for each in self.standard)
            mean_RE = (mean_RE - bias_E) * scale_E
        return mean_RE.astype(state_PE.dtype)
