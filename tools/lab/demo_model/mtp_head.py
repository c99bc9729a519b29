"""Makes an MTP head: one layer of the target's form inside the target's own checkpoint.

DeepSeek-AI 2024, arXiv:2412.19437, section 2.2. At position t the head gets the embedding of token
t + 1 and the target's output after its final norm, and guesses token t + 2; further on it gets its
own output at the position before. The target's table makes the embedding and the logits.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
from safetensors.flax import load_file, save_file

from tools.lab.demo_model.distillation import UNSURE, Seen, Teacher, discount, soft_cross_entropy
from tools.lab.demo_model.eagle_head import mix
from tools.lab.demo_model.exporting import LAYER_MODULES, write_json
from tools.lab.demo_model.model import (
    Params,
    feed_forward,
    init_params,
    rms_norm,
    rope_tables,
    rotate,
)
from tools.lab.demo_model.training import Objective

UNROLLED = 3  # positions ahead of the target's hidden states, in training
OWN_MODULES = {
    "fc_proj": "eh_proj",
    "embedding_norm": "enorm",
    "hidden_norm": "hnorm",
    "output_norm": "shared_head.norm",
}


def first_params(teacher: Teacher, seed: int) -> Params:
    """Returns a random layer, which begins with the target's output, and norms of ones.

    The logits begin as the target's own for the token before, made smaller.
    """
    width = teacher.spec.width
    keys = jax.random.split(jax.random.key(seed))
    last = f"layers.{teacher.spec.layers - 1}."
    drawn = init_params(teacher.spec, keys[0])
    layer = {
        name.removeprefix(last): value for name, value in drawn.items() if name.startswith(last)
    }
    fc = 0.02 * jax.random.normal(keys[1], (2 * width, width))
    return {
        **layer,
        "fc_proj": fc.at[width:].add(jnp.eye(width)),
        "embedding_norm": jnp.ones(width),
        "hidden_norm": jnp.ones(width),
        "output_norm": UNSURE * teacher.params["norm"],
    }


def unroll(
    teacher: Teacher, params: Params, seen: Seen, tokens_BT: jax.Array, passes: int
) -> list[jax.Array]:
    """Returns logits for each of several passes over all positions; see `eagle_head.unroll`."""
    spec = teacher.spec
    epsilon = spec.norm_epsilon
    embedded_BTD = rms_norm(
        teacher.params["embed"][tokens_BT[:, 1:]], params["embedding_norm"], epsilon
    )
    b, t, _ = embedded_BTD.shape
    rope = rope_tables(spec, t)
    hidden_BTD = seen.hidden_BTD[:, :-1]
    past: list[tuple[jax.Array, jax.Array]] = []
    guesses = []
    for _ in range(passes):
        inputs = [embedded_BTD, rms_norm(hidden_BTD, params["hidden_norm"], epsilon)]
        x_BTD = jnp.concatenate(inputs, -1) @ params["fc_proj"]
        y = rms_norm(x_BTD, params["input_norm"], epsilon)
        q, k, v = ((y @ params[f"{part}_proj"]).reshape(b, t, -1, spec.head_dim) for part in "qkv")
        past.append((rotate(k, *rope), v))
        x_BTD = x_BTD + mix(spec, rotate(q, *rope), past) @ params["o_proj"]
        x_BTD = x_BTD + feed_forward(params, rms_norm(x_BTD, params["post_norm"], epsilon))
        output_BTD = rms_norm(x_BTD, params["output_norm"], epsilon)
        guesses.append(output_BTD @ teacher.params["embed"].T)
        hidden_BTD = jnp.roll(output_BTD, 1, 1)
    return guesses


def objective(teacher: Teacher) -> Objective:
    """Returns the loss of training-time test, as EAGLE-3 has it."""

    def loss(params: Params, window_BT: jax.Array) -> jax.Array:
        seen = teacher(window_BT)
        p_BTV = jax.nn.softmax(seen.logits_BTV[:, 1:], -1)
        guesses = unroll(teacher, params, seen, window_BT, UNROLLED)
        return discount(
            [soft_cross_entropy(p_BTV, logits)[:, j:].mean() for j, logits in enumerate(guesses)]
        )

    return loss


def export(teacher: Teacher, params: Params, directory: Path) -> None:
    """Writes the head into the checkpoint of its model, with DeepSeek's names and count."""
    layer = f"model.layers.{teacher.spec.layers}."
    weights = directory / "model.safetensors"
    tensors = {
        name: value for name, value in load_file(weights).items() if not name.startswith(layer)
    }
    for name, module in {**LAYER_MODULES, **OWN_MODULES}.items():
        value = params[name].T if name.endswith("_proj") else params[name]
        tensors[f"{layer}{module}.weight"] = value.astype(jnp.bfloat16)
    save_file(tensors, weights, metadata={"format": "pt"})
    weights.chmod(0o644)
    config = directory / "config.json"
    write_json(config, {**json.loads(config.read_text()), "num_nextn_predict_layers": 1})
