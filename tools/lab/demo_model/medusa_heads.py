"""Makes Medusa-1 heads for a model that does not change, with one table for all heads.

The table is over the frequent tokens. Cai et al. 2024, arXiv:2401.10774.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from tools.lab.demo_model.distillation import UNSURE, Teacher, discount, soft_cross_entropy
from tools.lab.demo_model.exporting import write_json
from tools.lab.demo_model.model import Params
from tools.lab.demo_model.training import Objective

HEADS, LAYERS = 4, 2


def first_params(teacher: Teacher, token_map: np.ndarray) -> Params:
    """Returns blocks that change nothing yet, and the rows of the target's table, made smaller.

    Matrices are in [in, out] layout.
    """
    width = teacher.spec.width
    params = {"table": UNSURE * teacher.params["embed"][token_map]}
    for head in range(HEADS):
        for layer in range(LAYERS):
            params[f"blocks.{head}.layers.{layer}_proj"] = jnp.zeros((width, width))
            params[f"blocks.{head}.layers.{layer}.bias"] = jnp.zeros(width)
    return params


def head_logits(params: Params, head: int, hidden_BTD: jax.Array) -> jax.Array:
    """Returns logits over the frequent tokens for the token `head` + 2 positions ahead.

    Position t, which holds token t, gives the logits of token t + `head` + 2.
    """
    x_BTD = hidden_BTD
    for layer in range(LAYERS):
        name = f"blocks.{head}.layers.{layer}"
        x_BTD = x_BTD + jax.nn.silu(x_BTD @ params[f"{name}_proj"] + params[f"{name}.bias"])
    return x_BTD @ params["table"].T


def objective(teacher: Teacher, token_map: np.ndarray) -> Objective:
    """Returns the loss: each head guesses the target's distribution of its later token.

    The target's distribution is the one with the tokens between known.
    """

    def loss(params: Params, window_BT: jax.Array) -> jax.Array:
        seen = teacher(window_BT)
        p_BTV = jax.nn.softmax(seen.logits_BTV, -1)[..., token_map]
        losses = []
        for head in range(HEADS):
            guesses = head_logits(params, head, seen.hidden_BTD[:, : -1 - head])
            losses.append(soft_cross_entropy(p_BTV[:, 1 + head :], guesses).mean())
        return discount(losses)

    return loss


def export(
    teacher: Teacher,
    token_map: np.ndarray,
    params: Params,
    directory: Path,
    accuracies: list[list[float]],
) -> None:
    """Writes the heads in vLLM's format.

    config.json also has how often each head's guess of each rank was right, for the search of a
    tree.
    """
    tensors = {"lm_heads.0.weight": params["table"]}
    for head in range(HEADS):
        for layer in range(LAYERS):
            name = f"blocks.{head}.layers.{layer}"
            tensors[f"{name}.weight"], tensors[f"{name}.bias"] = (
                params[f"{name}_proj"].T,
                params[f"{name}.bias"],
            )
    stored = {name: np.asarray(value.astype(jnp.bfloat16)) for name, value in tensors.items()}
    weights = directory / "model.safetensors"
    save_file({**stored, "token_map": token_map}, weights, metadata={"format": "pt"})
    weights.chmod(0o644)
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": teacher.spec.width,
        "vocab_size": teacher.spec.vocabulary,
        "truncated_vocab_size": len(token_map),
        "num_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "medusa_fc_bias": True,
        "original_lm_head": True,
        "dtype": "bfloat16",
    }
    write_json(directory / "config.json", config | {"jaxpage_accuracies": accuracies})
