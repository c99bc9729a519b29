"""Experts: the work of a step goes with what is routed, and a token's bits do not depend on what else is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpage.layers.experts import ExpertsSpec
from jaxpage.models.base import abstract
from jaxpage.models.experts import PLAIN_NAMES, make_experts
from tests.support.engines import BLOCKS_OF_4, SMALL_POOL
from tests.support.mixed_requests import CONFIG, texts
from tests.support.random_checkpoints import random_checkpoint

WIDTH = 32
MOE = {
    **CONFIG,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
}


def mixture(num_experts: int, per_token: int) -> tuple[Any, Any]:
    """A function of parameters and tokens, and the parameters."""
    spec = ExpertsSpec(num_experts, per_token, 48, normalized=True)
    module = make_experts(spec, WIDTH, PLAIN_NAMES, layer="0", activation="silu", shared=None, dtype="float32")
    graph, shapes = abstract(module)
    rng = np.random.default_rng(0)
    parameters = jax.tree.map(lambda each: jnp.asarray(0.3 * rng.standard_normal(each.shape), jnp.float32), shapes)
    return jax.jit(lambda parameters, x_TD: nnx.merge(graph, parameters)(x_TD)), parameters


def test_the_mixture_is_a_sum_over_each_tokens_experts() -> None:
    """The oracle takes every expert for every token, in float64."""
    run, parameters = mixture(6, 3)
    x = np.random.default_rng(1).standard_normal((40, WIDTH)).astype(np.float32)
    router, gate_up, down = (
        np.asarray(each, np.float64)
        for each in (parameters["router"], parameters["experts"]["gate_up"], parameters["experts"]["down"])
    )
    odds = np.exp(x @ router.T)
    wanted = np.zeros((40, WIDTH))
    for token in range(40):
        chosen = np.argsort(-odds[token])[:3]
        for expert in chosen:
            gate, up = np.split(gate_up[expert] @ x[token], 2)
            made = down[expert] @ (gate / (1 + np.exp(-gate)) * up)
            wanted[token] += odds[token, expert] / odds[token, chosen].sum() * made
    np.testing.assert_allclose(np.asarray(run(parameters, x)), wanted, atol=1e-4)


@pytest.mark.parametrize(("num_experts", "per_token"), [(4, 2), (16, 4), (128, 8)])
def test_a_token_has_its_bits_among_any_others(num_experts: int, per_token: int) -> None:
    run, parameters = mixture(num_experts, per_token)
    x = np.random.default_rng(1).standard_normal((128, WIDTH)).astype(np.float32)
    together = np.asarray(run(parameters, x))
    for count in (2, 8, 33):
        np.testing.assert_array_equal(np.asarray(run(parameters, x[:count])), together[:count])
    alike = np.repeat(x[:1], 64, axis=0)  # all of them at the same experts
    np.testing.assert_array_equal(np.asarray(run(parameters, alike)), np.repeat(together[:1], 64, axis=0))


def test_the_work_goes_with_the_tokens_and_not_with_the_experts() -> None:
    """XLA's own count of operations, in which a tile counts once. There are no more tiles than pairs of a token and an expert."""
    operations = {}
    for num_experts in (4, 64):
        run, parameters = mixture(num_experts, 2)
        compiled = run.lower(parameters, jnp.zeros((8, WIDTH))).compile()
        operations[num_experts] = compiled.cost_analysis()["flops"]
    assert operations[64] < 2 * operations[4], "16 times as many experts"


def test_an_engine_gives_the_same_bits_however_it_is_run(tmp_path: Path) -> None:
    model = random_checkpoint(tmp_path, MOE)
    plain = texts(model)
    assert texts(model, **{**BLOCKS_OF_4, **SMALL_POOL, "num_blocks": 65}, preemption_mode="swap") == plain
