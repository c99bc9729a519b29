"""Defines the Llama architecture as one pure function of a dict of arrays, for training only.

Shapes: B rows, T tokens, N query heads, K key/value heads, G = N/K, H head width, D model width, F
feed-forward width, V vocabulary.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

Params = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """Holds the sizes of a Llama model with tied embeddings and no biases."""

    vocabulary: int = 2048
    width: int = 256
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    feed_forward: int = 576
    max_positions: int = 512
    rope_theta: float = 10_000.0
    norm_epsilon: float = 1e-5

    @property
    def head_dim(self) -> int:
        """Returns the width of a head."""
        return self.width // self.heads


def init_params(spec: ModelSpec, key: jax.Array) -> Params:
    """Returns Normal(0.02) weights in [in, out] layout.

    Projections that write to the residual stream are scaled down.
    """
    d, h = spec.width, spec.head_dim
    shapes = {
        "q_proj": (d, spec.heads * h),
        "k_proj": (d, spec.kv_heads * h),
        "v_proj": (d, spec.kv_heads * h),
        "o_proj": (spec.heads * h, d),
        "gate_proj": (d, spec.feed_forward),
        "up_proj": (d, spec.feed_forward),
        "down_proj": (spec.feed_forward, d),
    }
    residual_scale = 1 / math.sqrt(2 * spec.layers)
    keys = iter(jax.random.split(key, 1 + spec.layers * len(shapes)))
    params = {
        "embed": 0.02 * jax.random.normal(next(keys), (spec.vocabulary, d)),
        "norm": jnp.ones(d),
    }
    for layer in range(spec.layers):
        for name, shape in shapes.items():
            scale = 0.02 * (residual_scale if name in ("o_proj", "down_proj") else 1.0)
            params[f"layers.{layer}.{name}"] = scale * jax.random.normal(next(keys), shape)
        params[f"layers.{layer}.input_norm"] = jnp.ones(d)
        params[f"layers.{layer}.post_norm"] = jnp.ones(d)
    return params


def rms_norm(x: jax.Array, weight: jax.Array, epsilon: float) -> jax.Array:
    """Returns the root mean square norm of x over the last axis."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + epsilon) * weight


def rotate(x_BTNH: jax.Array, cos_TH: jax.Array, sin_TH: jax.Array) -> jax.Array:
    """Returns the heads with rotary embeddings; the tables may be those of each row, BTH."""
    first, second = jnp.split(x_BTNH, 2, -1)
    rotated = jnp.concatenate([-second, first], -1)
    return x_BTNH * cos_TH[..., None, :] + rotated * sin_TH[..., None, :]


def rope_tables(spec: ModelSpec, length: int) -> tuple[jax.Array, jax.Array]:
    """Returns the cosines and sines of rotary embeddings for the first positions."""
    return rope_at(spec, jnp.arange(length))


def rope_at(spec: ModelSpec, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the cosines and sines for any positions, with one more axis."""
    frequency = spec.rope_theta ** (-jnp.arange(0, spec.head_dim, 2) / spec.head_dim)
    angle = positions[..., None] * frequency
    angle_TH = jnp.concatenate([angle, angle], -1)
    return jnp.cos(angle_TH), jnp.sin(angle_TH)


def _attend(
    spec: ModelSpec,
    p: Params,
    x_BTD: jax.Array,
    rope: tuple[jax.Array, jax.Array],
    sees_BTT: jax.Array | None,
) -> jax.Array:
    b, t, _ = x_BTD.shape
    if sees_BTT is None:
        sees_BTT = jnp.tril(jnp.ones((1, t, t), bool))
    q = rotate((x_BTD @ p["q_proj"]).reshape(b, t, spec.heads, -1), *rope)
    k = rotate((x_BTD @ p["k_proj"]).reshape(b, t, spec.kv_heads, -1), *rope)
    v = (x_BTD @ p["v_proj"]).reshape(b, t, spec.kv_heads, -1)
    q = q.reshape(b, t, spec.kv_heads, spec.heads // spec.kv_heads, -1) / math.sqrt(spec.head_dim)
    scores = jnp.einsum("btkgh,bskh->bkgts", q, k)
    scores = jnp.where(sees_BTT[:, None, None], scores, -1e30)
    mixed = jnp.einsum("bkgts,bskh->btkgh", jax.nn.softmax(scores, -1), v)
    return mixed.reshape(b, t, -1) @ p["o_proj"]


def decoder_layer(
    spec: ModelSpec,
    p: Params,
    x_BTD: jax.Array,
    rope: tuple[jax.Array, jax.Array],
    sees_BTT: jax.Array | None = None,
) -> jax.Array:
    """Returns the output of a layer with the weights `p`.

    Row t of `sees_BTT` is true for the tokens that token t attends to; the default is all up to t.
    """
    normed = rms_norm(x_BTD, p["input_norm"], spec.norm_epsilon)
    x_BTD = x_BTD + _attend(spec, p, normed, rope, sees_BTT)
    return x_BTD + feed_forward(p, rms_norm(x_BTD, p["post_norm"], spec.norm_epsilon))


def feed_forward(p: Params, x_BTD: jax.Array) -> jax.Array:
    """Returns the SwiGLU feed-forward network's output."""
    return (jax.nn.silu(x_BTD @ p["gate_proj"]) * (x_BTD @ p["up_proj"])) @ p["down_proj"]


def layer_params(params: Params, layer: int) -> Params:
    """Returns the weights of one layer, by their own names."""
    prefix = f"layers.{layer}."
    return {
        name.removeprefix(prefix): value
        for name, value in params.items()
        if name.startswith(prefix)
    }


def residual_streams(spec: ModelSpec, params: Params, tokens_BT: jax.Array) -> list[jax.Array]:
    """Returns the inputs of all layers in order, and then the output of the last layer."""
    streams = [params["embed"][tokens_BT]]
    rope = rope_tables(spec, tokens_BT.shape[1])
    for layer in range(spec.layers):
        streams.append(decoder_layer(spec, layer_params(params, layer), streams[-1], rope))
    return streams


def last_hidden_states(spec: ModelSpec, params: Params, tokens_BT: jax.Array) -> jax.Array:
    """Returns the normed output of the last layer, which the tied embedding turns into logits."""
    return rms_norm(
        residual_streams(spec, params, tokens_BT)[-1], params["norm"], spec.norm_epsilon
    )


def token_losses(
    spec: ModelSpec, params: Params, tokens_BT: jax.Array, targets_BT: jax.Array
) -> jax.Array:
    """Returns the cross-entropy of each target in nats."""
    logits = last_hidden_states(spec, params, tokens_BT) @ params["embed"].T
    chosen = jnp.take_along_axis(logits, targets_BT[..., None], -1)[..., 0]
    return jax.nn.logsumexp(logits, -1) - chosen


def next_token_loss(spec: ModelSpec, params: Params, window_BT: jax.Array) -> jax.Array:
    """Returns the mean loss of each token of the windows after the first.

    This is the objective of a language model.
    """
    return token_losses(spec, params, window_BT[:, :-1], window_BT[:, 1:]).mean()
