"""Defines Idefics 3, as small as the demo that sees, as a pure function of a dict of arrays.

A vision transformer (SigLIP) reads patches of a picture, and each square of patches becomes the
input of one token of the Llama in `model.py`. Shapes: B rows, T tokens, P patches, C width of the
vision transformer, I picture tokens, A tokens of answers, D width of the Llama.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tools.lab.demo_model.model import (
    ModelSpec,
    Params,
    decoder_layer,
    init_params,
    layer_params,
    rms_norm,
    rope_at,
)

# The one parameter that serves training alone: what a picture token shows, read off its vector.
CELLS = "cells_proj"
CELLS_WEIGHT = 0.5


@dataclasses.dataclass(frozen=True)
class SeeingSpec:
    """Holds the sizes of a vision transformer and of the Llama that reads its output."""

    text: ModelSpec
    width: int = 128
    layers: int = 4
    heads: int = 4
    feed_forward: int = 512
    image_size: int = 64
    patch_size: int = 8
    shuffle: int = 2
    norm_epsilon: float = 1e-6
    # The numbers of values in each column of `Rows.cells`, 0 (no shape) included.
    cell_values: tuple[int, ...] = (7, 5, 3)

    @property
    def patches(self) -> int:
        """Returns the number of patches of a picture."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def image_tokens(self) -> int:
        """Returns the number of tokens that a picture takes in a prompt."""
        return self.patches // self.shuffle**2


# An array of NumPy, and one of JAX within a compiled function.
Values = Any


class Seen(NamedTuple):
    """Holds pictures, and what their cells show."""

    pixels: Values  # [B, 3, image size, image size], -1 to 1
    cells: Values  # [B, I, 3], colour, kind and size of the shape that a picture token shows


class Rows(NamedTuple):
    """Holds a batch: conversations about pictures, laid out in rows of one length.

    A row begins with what all of its conversations share (segment 0), and each conversation
    continues it: positions count on from the shared part, and tokens of one segment see only
    theirs and the shared ones. The padding has segment -1.
    """

    pixels: Values  # [B, 3, image size, image size], -1 to 1
    tokens: Values  # [B, T]
    positions: Values  # [B, T]
    segments: Values  # [B, T]
    image_rows: Values  # [B, T], which row of the picture a token takes, or -1
    places: Values  # [B, A], the tokens after which a token of an answer comes; 0 as padding
    answers: Values  # [B, A], the tokens that come there; -1 as padding
    cells: Values  # [B, I, 3], colour, kind and size of the shape that a picture token shows


def init_seeing(spec: SeeingSpec, key: jax.Array) -> Params:
    """Returns Normal weights in [in, out] layout; those of the Llama have the prefix "text."."""
    width, inner = spec.width, spec.feed_forward
    text_key, *keys = jax.random.split(key, 5 + 6 * spec.layers)
    params = {f"text.{name}": w for name, w in init_params(spec.text, text_key).items()}
    draws = iter(keys)

    def normal(rows: int, columns: int, scale: float = 1.0) -> jax.Array:
        return scale / math.sqrt(rows) * jax.random.normal(next(draws), (rows, columns))

    params["patch_proj"] = normal(3 * spec.patch_size**2, width)
    params["patch_bias"] = jnp.zeros(width)
    params["position"] = 0.1 * normal(spec.patches, width)
    params["connector_proj"] = normal(width * spec.shuffle**2, spec.text.width, 0.1)
    residual_scale = 1 / math.sqrt(2 * spec.layers)
    for layer in range(spec.layers):
        prefix = f"vision.{layer}."
        for name in ("q", "k", "v", "out"):
            scale = residual_scale if name == "out" else 1.0
            params[f"{prefix}{name}_proj"] = normal(width, width, scale)
            params[f"{prefix}{name}_bias"] = jnp.zeros(width)
        params[f"{prefix}fc1_proj"] = normal(width, inner)
        params[f"{prefix}fc1_bias"] = jnp.zeros(inner)
        params[f"{prefix}fc2_proj"] = normal(inner, width, residual_scale)
        params[f"{prefix}fc2_bias"] = jnp.zeros(width)
        for norm in ("norm1", "norm2"):
            params |= {f"{prefix}{norm}": jnp.ones(width), f"{prefix}{norm}_bias": jnp.zeros(width)}
    params[CELLS] = normal(spec.text.width, sum(spec.cell_values))
    return params | {"vision_norm": jnp.ones(width), "vision_norm_bias": jnp.zeros(width)}


def _linear(p: Params, name: str, x: jax.Array) -> jax.Array:
    return x @ p[f"{name}_proj"] + p[f"{name}_bias"]


def _layer_norm(spec: SeeingSpec, p: Params, name: str, x: jax.Array) -> jax.Array:
    centred = x - x.mean(-1, keepdims=True)
    scale = jax.lax.rsqrt(jnp.mean(centred**2, -1, keepdims=True) + spec.norm_epsilon)
    return centred * scale * p[name] + p[f"{name}_bias"]


def _vision_layer(spec: SeeingSpec, p: Params, x_BPC: jax.Array) -> jax.Array:
    b, patches, width = x_BPC.shape
    normed = _layer_norm(spec, p, "norm1", x_BPC)
    q, k, v = (_linear(p, name, normed).reshape(b, patches, spec.heads, -1) for name in "qkv")
    scores = jnp.einsum("bpnh,bsnh->bnps", q, k) / math.sqrt(width // spec.heads)
    mixed = jnp.einsum("bnps,bsnh->bpnh", jax.nn.softmax(scores, -1), v)
    x_BPC = x_BPC + _linear(p, "out", mixed.reshape(b, patches, width))
    inner = jax.nn.gelu(_linear(p, "fc1", _layer_norm(spec, p, "norm2", x_BPC)), approximate=True)
    return x_BPC + _linear(p, "fc2", inner)


def picture_rows(spec: SeeingSpec, params: Params, pixels: jax.Array) -> jax.Array:
    """Returns the inputs [B, I, D] of the picture tokens for pixels [B, 3, size, size]."""
    b, side = pixels.shape[0], spec.image_size // spec.patch_size
    patches = pixels.reshape(b, 3, side, spec.patch_size, side, spec.patch_size)
    patches = patches.transpose(0, 2, 4, 1, 3, 5).reshape(b, spec.patches, -1)
    x_BPC = _linear(params, "patch", patches) + params["position"]
    for layer in range(spec.layers):
        prefix = f"vision.{layer}."
        weights = {n.removeprefix(prefix): w for n, w in params.items() if n.startswith(prefix)}
        x_BPC = _vision_layer(spec, weights, x_BPC)
    x_BPC = _layer_norm(spec, params, "vision_norm", x_BPC)
    small = side // spec.shuffle
    x_BPC = x_BPC.reshape(b, small, spec.shuffle, small, spec.shuffle, spec.width)
    return x_BPC.transpose(0, 1, 3, 2, 4, 5).reshape(b, small**2, -1) @ params["connector_proj"]


def answer_logits(
    spec: SeeingSpec, params: Params, rows: Rows, pictures: jax.Array | None = None
) -> jax.Array:
    """Returns the logits [B, A, vocabulary] of the tokens of the answers."""
    if pictures is None:
        pictures = picture_rows(spec, params, rows.pixels)
    text = {n.removeprefix("text."): w for n, w in params.items() if n.startswith("text.")}
    # Products with zeros and ones: the gradients of gathers are slow on CPUs.
    is_text = (rows.image_rows < 0)[..., None]
    chosen = is_text * jax.nn.one_hot(rows.tokens, spec.text.vocabulary)
    taken = jax.nn.one_hot(rows.image_rows, spec.image_tokens)
    x_BTD = chosen @ text["embed"] + taken @ pictures
    segments = rows.segments
    sees = (segments[:, None] == 0) | (segments[:, None] == segments[:, :, None])
    sees &= jnp.tril(jnp.ones(sees.shape[1:], bool))
    rope = rope_at(spec.text, rows.positions)
    for layer in range(spec.text.layers):
        x_BTD = decoder_layer(spec.text, layer_params(text, layer), x_BTD, rope, sees)
    x_BAD = jnp.take_along_axis(x_BTD, rows.places[..., None], 1)
    return rms_norm(x_BAD, text["norm"], spec.text.norm_epsilon) @ text["embed"].T


def seeing_loss(spec: SeeingSpec, params: Params, rows: Rows) -> jax.Array:
    """Returns the mean cross-entropy of the answers' tokens in nats, and a share of the cells'."""
    pictures = picture_rows(spec, params, rows.pixels)
    logits = answer_logits(spec, params, rows, pictures)
    counts = rows.answers >= 0
    loss = jnp.sum(_cross_entropy(logits, rows.answers) * counts) / jnp.sum(counts)
    return loss + CELLS_WEIGHT * _cells_loss(spec, params, pictures, rows.cells)


def cells_loss(spec: SeeingSpec, params: Params, seen: Seen) -> jax.Array:
    """Returns the loss of the cells alone, which needs no parameter of the Llama.

    It teaches each picture token to show the shape whose centre it has. Answers alone teach the
    vision transformer slowly, because they reach it through the Llama.
    """
    pictures = picture_rows(spec, params, seen.pixels)
    return _cells_loss(spec, params, pictures, seen.cells)


def _cells_loss(
    spec: SeeingSpec, params: Params, pictures: jax.Array, cells: jax.Array
) -> jax.Array:
    ends = np.cumsum(spec.cell_values)[:-1]
    columns = jnp.split(pictures @ params[CELLS], ends, -1)
    losses = [_cross_entropy(part, cells[..., i]).mean() for i, part in enumerate(columns)]
    return jnp.sum(jnp.stack(losses))


def _cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    chosen = jnp.sum(logits * jax.nn.one_hot(targets, logits.shape[-1]), -1)
    return jax.nn.logsumexp(logits, -1) - chosen
