"""The time steps of Mamba 2 against the definition in float64: `time_step_limit` cuts them, and `time_step_min` does not.

The classes of Nemotron-H and Zamba 2 in transformers cut them from below by `time_step_min`, in prompts alone. NVIDIA's and Zyphra's own
code, mlx-lm and vLLM do not, and published configs have `time_step_limit: [0, Infinity]`, or null.
"""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from safetensors.numpy import load_file

pytest.importorskip("torch", reason="the weights are those of transformers on torch")

import jax.numpy as jnp

from jaxpage.checkpoints import load_weights, open_model
from tests.support.dense import logits_of
from tests.support.hf_models import save_model
from tests.support.sweeps import few

TOKENS = np.arange(2, 42) * 7 % 61
Tensors = dict[str, np.ndarray]


class Names(NamedTuple):
    """The names of a family's tensors, and the numbers that its config has by other names."""

    form: str
    overrides: dict[str, Any]
    layer: str
    mixer: str
    norm: str
    tables: tuple[str, str, str]
    heads: str
    groups: str
    vector: str
    kernel: str
    epsilon: str


FAMILIES = {
    "nemotron_h": Names(
        "nemotron-h-mixed",
        {"hybrid_override_pattern": "MM", "num_hidden_layers": 2, "use_bias": False},
        *("backbone.layers.{}.", "mixer.", "norm."),
        ("backbone.embeddings.weight", "backbone.norm_f.weight", "lm_head.weight"),
        *("mamba_num_heads", "n_groups", "ssm_state_size", "conv_kernel", "layer_norm_epsilon"),
    ),
    "zamba2": Names(
        "zamba2-turns",
        {
            **{"layers_block_type": ["mamba", "mamba"], "num_hidden_layers": 2},
            **{"use_mem_rope": False, "time_step_min": 0.3},
        },
        *("model.layers.{}.", "mamba.", "input_layernorm."),
        ("model.embed_tokens.weight", "model.final_layernorm.weight", "model.embed_tokens.weight"),
        *("n_mamba_heads", "mamba_ngroups", "mamba_d_state", "mamba_d_conv", "rms_norm_eps"),
    ),
    "mamba2": Names(
        "mamba2-tied",
        {"num_hidden_layers": 2, "use_bias": False, "time_step_min": 0.3},
        *("backbone.layers.{}.", "mixer.", "norm."),
        ("backbone.embeddings.weight", "backbone.norm_f.weight", "backbone.embeddings.weight"),
        *("num_heads", "n_groups", "state_size", "conv_kernel", "layer_norm_epsilon"),
    ),
}
LIMITS: dict[str, Any] = {
    "absent": (),
    "null": None,
    "none": [0.0, math.inf],
    "both": [0.2, 0.8],
    "least": [0.5, math.inf],
}


def scaled(x_TD: np.ndarray, weight_D: np.ndarray, epsilon: float, groups: int = 1) -> np.ndarray:
    """Returns the norm of each group of numbers."""
    parts = x_TD.reshape(len(x_TD), groups, -1)
    mean = (parts**2).mean(-1, keepdims=True)
    return (parts / np.sqrt(mean + epsilon)).reshape(x_TD.shape) * weight_D


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def mixed(
    x_TD: np.ndarray, w: Tensors, sizes: dict[str, int], epsilon: float, limit: tuple[float, float]
) -> np.ndarray:
    """Returns the output of a layer of Mamba 2, by a loop over the tokens."""
    heads, groups, vector, kernel = (
        sizes[name] for name in ("heads", "groups", "vector", "kernel")
    )
    inner = w["norm.weight"].size
    gate, convolved, steps = np.split(
        x_TD @ w["in_proj.weight"].T, [inner, w["in_proj.weight"].shape[0] - heads], axis=1
    )
    before = np.concatenate([np.zeros((kernel - 1, convolved.shape[1])), convolved])
    windows = np.stack([before[at : at + len(x_TD)] for at in range(kernel)])
    convolved = silu(np.einsum("kte,ek->te", windows, w["conv1d.weight"][:, 0]) + w["conv1d.bias"])
    x, b, c = np.split(convolved, [inner, inner + groups * vector], axis=1)
    steps = np.clip(np.logaddexp(0, steps + w["dt_bias"]), *limit)
    state = np.zeros((heads, vector, inner // heads))
    out = []
    for t in range(len(x_TD)):
        x_NH = x[t].reshape(heads, -1)
        b_NV, c_NV = (
            np.repeat(each[t].reshape(groups, vector), heads // groups, axis=0) for each in (b, c)
        )
        decay_N = np.exp(-np.exp(w["A_log"]) * steps[t])
        added_NVH = b_NV[:, :, None] * (steps[t][:, None] * x_NH)[:, None]
        state = state * decay_N[:, None, None] + added_NVH
        out.append((np.einsum("nv,nvh->nh", c_NV, state) + w["D"][:, None] * x_NH).ravel())
    gated = np.stack(out) * silu(gate)
    return scaled(gated, w["norm.weight"], epsilon, groups) @ w["out_proj.weight"].T


def logits_by_definition(directory: Path, names: Names, limit: tuple[float, float]) -> np.ndarray:
    """Returns the logits [T, V] of the model in float64."""
    config = json.loads((directory / "config.json").read_text())
    tensors = {
        name: array.astype(np.float64)
        for name, array in load_file(directory / "model.safetensors").items()
    }
    sizes = {name: config[getattr(names, name)] for name in ("heads", "groups", "vector", "kernel")}
    epsilon = config[names.epsilon]
    table, norm, head = (tensors[name] for name in names.tables)
    x_TD = table[TOKENS]
    for layer in range(2):
        start = names.layer.format(layer)
        own = {
            name.removeprefix(start + names.mixer): array
            for name, array in tensors.items()
            if name.startswith(start + names.mixer)
        }
        x = scaled(x_TD, tensors[f"{start}{names.norm}weight"], epsilon)
        # The norm of a mixer has the epsilon of its class.
        x_TD = x_TD + mixed(x, own, sizes, MIXER_EPSILON.get(names.form, epsilon), limit)
    return scaled(x_TD, norm, epsilon) @ head.T


MIXER_EPSILON = {"zamba2-turns": 1e-5}


@pytest.mark.parametrize(
    ("family", "limit"),
    few(
        itertools.product(FAMILIES, LIMITS),
        [*((family, "both") for family in FAMILIES), ("nemotron_h", "null"), ("mamba2", "absent")],
    ),
)
def test_time_steps_are_cut_by_their_limit(family, limit, tmp_path):
    names = FAMILIES[family]
    save_model(names.form, tmp_path, **names.overrides)
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("time_step_limit", None)
    if LIMITS[limit] != ():
        config["time_step_limit"] = LIMITS[limit]
    (tmp_path / "config.json").write_text(json.dumps(config))
    files = open_model(tmp_path)
    parameters = load_weights(files.plan, "float32", jnp.asarray)
    found = logits_of(files.family, files.spec, parameters, TOKENS)
    minimum, maximum = LIMITS[limit] or (0.0, math.inf)
    expected = logits_by_definition(tmp_path, names, (minimum, maximum))
    np.testing.assert_allclose(found, expected, atol=2e-5 * np.abs(expected).max())
    other = logits_by_definition(tmp_path, names, (0.3, math.inf))
    assert np.abs(other - expected).max() > 0.01  # as with `time_step_min`
