"""Makes an EAGLE-3 head: one layer that continues from the target's hidden states.

Li et al. 2025, arXiv:2503.01840. At position t the head gets the embedding of token t + 1 and a
feature, and guesses token t + 2. For positions that the target has computed, the feature is made of
three of its hidden states; further on it is the head's own output at the position before.
"""

import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from tools.lab.demo_model.distillation import UNSURE, Seen, Teacher, discount, soft_cross_entropy
from tools.lab.demo_model.exporting import LAYER_MODULES, llama_config, write_json
from tools.lab.demo_model.model import (
    ModelSpec,
    Params,
    feed_forward,
    rms_norm,
    rope_tables,
    rotate,
)
from tools.lab.demo_model.training import Objective

TAPS = (
    1,
    2,
    3,
)  # the target's layers whose inputs are used: 0.07 nats better than (1, 2, 4) in a short trial
FEED_FORWARD = 352
UNROLLED = 3  # positions ahead of the target's hidden states, in training


def first_params(teacher: Teacher, token_map: np.ndarray, seed: int) -> Params:
    """Returns random layers, and a feature and a table that come from the target.

    The feature begins as the last of the three hidden states, and the table as the target's rows,
    made smaller.
    """
    spec, width = teacher.spec, teacher.spec.width
    inner, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    shapes = {
        "q_proj": (2 * width, inner),
        "k_proj": (2 * width, kv),
        "v_proj": (2 * width, kv),
        "o_proj": (inner, width),
        "gate_proj": (width, FEED_FORWARD),
        "up_proj": (width, FEED_FORWARD),
        "down_proj": (FEED_FORWARD, width),
        "fc_proj": (len(TAPS) * width, width),
    }
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    params = {
        name: 0.02 * jax.random.normal(key, shape)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    params["fc_proj"] = params["fc_proj"].at[-width:].add(jnp.eye(width))
    norms = {name: jnp.ones(width) for name in ("input_norm", "hidden_norm", "post_norm")}
    return {
        **params,
        **norms,
        "norm": teacher.params["norm"],
        "lm_head": UNSURE * teacher.params["embed"][token_map],
    }


def mix(spec: ModelSpec, q_BTNH: jax.Array, past: list[tuple[jax.Array, jax.Array]]) -> jax.Array:
    """Returns the attention of the newest pass over positions: [B, T, N * H].

    Pass j of position t continues from passes j - 1, j - 2 and so on of the positions just before
    it; further back it sees the first pass, whose features are the target's.

    Args:
        spec: The target's sizes.
        q_BTNH: The queries of the newest pass.
        past: The keys and values [B, T, K, H] of every pass so far.
    """
    b, t, _, _ = q_BTNH.shape
    q = q_BTNH.reshape(b, t, spec.kv_heads, -1, spec.head_dim) / math.sqrt(spec.head_dim)
    newest = len(past) - 1
    back = jnp.arange(t)[:, None] - jnp.arange(t)
    first = jnp.where(back >= newest, jnp.einsum("btkgh,bskh->bkgts", q, past[0][0]), -1e30)
    moved = [[jnp.roll(x, newest - index, 1) for x in past[index]] for index in range(1, len(past))]
    diagonals = [jnp.einsum("btkgh,btkh->bkgt", q, k)[..., None] for k, _ in moved]
    weights = jax.nn.softmax(jnp.concatenate([first, *diagonals], -1), -1)
    mixed = jnp.einsum("bkgts,bskh->btkgh", weights[..., :t], past[0][1])
    for index, (_, v) in enumerate(moved):
        mixed = mixed + jnp.einsum("bkgt,btkh->btkgh", weights[..., t + index], v)
    return mixed.reshape(b, t, -1)


def unroll(
    teacher: Teacher, params: Params, seen: Seen, tokens_BT: jax.Array, passes: int
) -> list[jax.Array]:
    """Returns logits over the frequent tokens for each of several passes over all positions.

    Pass j, position t, guesses token t + 2 from the target's hidden states up to position t - j and
    from tokens up to t + 1. This is what drafting does whose last j guesses were right. Positions
    below j have no meaning in pass j; there is one position less than there are tokens.
    """
    spec = teacher.spec
    taps = [seen.streams[tap][:, :-1] for tap in TAPS]
    next_BTD = rms_norm(
        teacher.params["embed"][tokens_BT[:, 1:]], params["input_norm"], spec.norm_epsilon
    )
    b, t, _ = next_BTD.shape
    rope = rope_tables(spec, t)
    feature_BTD = jnp.concatenate(taps, -1) @ params["fc_proj"]
    past: list[tuple[jax.Array, jax.Array]] = []
    guesses = []
    for _ in range(passes):
        y = jnp.concatenate(
            [next_BTD, rms_norm(feature_BTD, params["hidden_norm"], spec.norm_epsilon)], -1
        )
        q, k, v = ((y @ params[f"{part}_proj"]).reshape(b, t, -1, spec.head_dim) for part in "qkv")
        past.append((rotate(k, *rope), v))
        x_BTD = feature_BTD + mix(spec, rotate(q, *rope), past) @ params["o_proj"]
        x_BTD = x_BTD + feed_forward(
            params, rms_norm(x_BTD, params["post_norm"], spec.norm_epsilon)
        )
        guesses.append(rms_norm(x_BTD, params["norm"], spec.norm_epsilon) @ params["lm_head"].T)
        feature_BTD = jnp.roll(x_BTD, 1, 1)
    return guesses


def objective(teacher: Teacher, token_map: np.ndarray) -> Objective:
    """Returns the loss of training-time test.

    The head continues from its own outputs, and at each position it guesses the target's
    distribution.
    """

    def loss(params: Params, window_BT: jax.Array) -> jax.Array:
        seen = teacher(window_BT)
        p_BTV = jax.nn.softmax(seen.logits_BTV[:, 1:], -1)[..., token_map]
        guesses = unroll(teacher, params, seen, window_BT, UNROLLED)
        return discount(
            [soft_cross_entropy(p_BTV, logits)[:, j:].mean() for j, logits in enumerate(guesses)]
        )

    return loss


def export(teacher: Teacher, token_map: np.ndarray, params: Params, directory: Path) -> None:
    """Writes the head in the format of EAGLE's authors and SpecForge, without the embedding."""
    names = {**LAYER_MODULES, "hidden_norm": "hidden_norm"}
    tensors = {
        "fc.weight": params["fc_proj"].T,
        "norm.weight": params["norm"],
        "lm_head.weight": params["lm_head"],
    }
    for name, module in names.items():
        tensors[f"midlayer.{module}.weight"] = (
            params[name].T if name.endswith("_proj") else params[name]
        )
    stored = {name: np.asarray(value.astype(jnp.bfloat16)) for name, value in tensors.items()}
    stored["d2t"] = token_map - np.arange(len(token_map))
    stored["t2d"] = np.isin(np.arange(teacher.spec.vocabulary), token_map)
    weights = directory / "model.safetensors"
    save_file(stored, weights, metadata={"format": "pt"})
    weights.chmod(0o644)
    config = llama_config(teacher.spec) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "intermediate_size": FEED_FORWARD,
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
        "draft_vocab_size": len(token_map),
        "target_hidden_size": teacher.spec.width,
        "norm_before_residual": False,
        # The layers whose inputs are used; see docs/guides/drafters.md.
        "eagle_aux_hidden_state_layer_ids": list(TAPS),
    }
    write_json(directory / "config.json", config)
