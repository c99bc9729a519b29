"""Experts: the work of a step goes with what is routed, and a token's bits do not depend on what
else is.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from jaxpage.checkpoints import load_weights, open_model
from jaxpage.checkpoints.quantization.scheme_choice import quantization_of
from jaxpage.device.attention import make_layer_kernels
from jaxpage.device.hardware.backends import Backend
from jaxpage.errors import CheckpointError
from jaxpage.layers.experts import ExpertsSpec
from jaxpage.layers.routing import Groups, Routing
from jaxpage.layers.trace_scope import LayerKernels, TraceScope
from jaxpage.models.base import abstract
from jaxpage.models.parameters.replacing import replace_modules
from jaxpage.models.parts.experts import make_experts
from jaxpage.models.parts.names import QWEN_EXPERTS
from pallas_kernels.expert_routing import choose_experts, gather_by_group
from pallas_kernels.triton import routing as triton_routing
from tests.support.dense import logits_of
from tests.support.mixed_requests import CONFIG
from tests.support.random_checkpoints import write_tensors
from tests.support.sweeps import few

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


def mixture(num_experts: int, per_token: int, **more: Any) -> tuple[Any, Any]:
    """Returns a function of parameters and tokens, and the parameters."""
    spec = ExpertsSpec(Routing(num_experts, per_token, normalized=True, **more), 48)
    module = make_experts(
        spec, WIDTH, QWEN_EXPERTS, layer="0", activation="silu", shared=None, dtype="float32"
    )
    graph, shapes = abstract(module)
    rng = np.random.default_rng(0)
    parameters = jax.tree.map(
        lambda each: jnp.asarray(0.3 * rng.standard_normal(each.shape), jnp.float32), shapes
    )
    return jax.jit(lambda parameters, x_TD: nnx.merge(graph, parameters)(x_TD)), parameters


AT_ONCE = make_layer_kernels(Backend("triton", interpret=True))


@pytest.mark.parametrize(
    "kernels", [make_layer_kernels(Backend("auto")), AT_ONCE], ids=["by tiles", "at once"]
)
def test_the_mixture_is_a_sum_over_each_tokens_experts(kernels):
    """The oracle takes every expert for every token, in float64."""
    run, parameters = mixture(6, 3)
    x = np.random.default_rng(1).standard_normal((40, WIDTH)).astype(np.float32)
    router, gate_up, down = (
        np.asarray(each, np.float64)
        for each in (
            parameters["router"]["weight"],
            *(parameters["experts"][part]["kernel"] for part in ("gate_up", "down")),
        )
    )
    scores = np.exp(x @ router.T)
    expected = np.zeros((40, WIDTH))
    for token in range(40):
        chosen = np.argsort(-scores[token])[:3]
        for expert in chosen:
            gate, up = np.split(gate_up[expert] @ x[token], 2)
            made = down[expert] @ (gate / (1 + np.exp(-gate)) * up)
            expected[token] += scores[token, expert] / scores[token, chosen].sum() * made
    with TraceScope(kernels).open():
        np.testing.assert_allclose(np.asarray(run(parameters, x)), expected, atol=1e-4)


def check_pairs(num_rows=20, per_row=2, num_groups=7, width=1500):
    """Compares a stable sort by numpy; numbers that are no group come last."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((num_rows, width)).astype(np.float32)
    group_P = rng.integers(-1, num_groups + 2, num_rows * per_row).astype(np.int32)
    options = {"backend": "triton", "interpret": True}
    rows_PD, place_P, sorted_P, count_E = gather_by_group(
        jnp.asarray(x), jnp.asarray(group_P), num_groups, **options
    )
    is_group_P = (group_P >= 0) & (group_P < num_groups)
    key_P = np.where(is_group_P, group_P, num_groups)
    order_P = np.argsort(key_P, kind="stable")
    np.testing.assert_array_equal(rows_PD, x[order_P // per_row])
    np.testing.assert_array_equal(np.asarray(place_P)[order_P], np.arange(len(group_P)))
    np.testing.assert_array_equal(sorted_P, key_P[order_P])
    np.testing.assert_array_equal(count_E, np.bincount(key_P, minlength=num_groups + 1)[:-1])


def test_pairs_are_sorted_by_expert():
    check_pairs()
    check_pairs(num_rows=3, per_row=1, num_groups=9, width=20)
    with pytest.raises(NotImplementedError, match="2050 pairs to sort \\(at most 2048\\)"):
        check_pairs(num_rows=1025, width=1)


def check_choice(sigmoid, corrected):
    """Compares the choice by `jax.lax.top_k` and scores in float64; two experts are alike."""
    logits_TE = np.random.default_rng(1).standard_normal((9, 12)).astype(np.float32)
    logits_TE[:, 7] = logits_TE[:, 3] = 2.5
    logits_TE[4, 5] = np.nan
    correction_E = np.linspace(1, 0, 12, dtype=np.float32) if corrected else None
    scores_TX, expert_TX = choose_experts(
        jnp.asarray(logits_TE),
        None if correction_E is None else jnp.asarray(correction_E),
        4,
        sigmoid=sigmoid,
        backend="triton",
        interpret=True,
    )
    wide_TE = logits_TE.astype(np.float64)
    scores_TE = 1 / (1 + np.exp(-wide_TE)) if sigmoid else np.exp(wide_TE - wide_TE.max(1)[:, None])
    rated_TE = scores_TE + (0 if correction_E is None else correction_E)
    is_number_T = np.arange(9) != 4  # a softmax has none at all there
    expected_TX = np.asarray(jax.lax.top_k(jnp.asarray(rated_TE, jnp.float32), 4)[1])
    np.testing.assert_array_equal(np.asarray(expert_TX)[is_number_T], expected_TX[is_number_T])
    expected = np.take_along_axis(scores_TE, expected_TX, 1)[is_number_T]
    np.testing.assert_allclose(np.asarray(scores_TX)[is_number_T], expected, rtol=2e-6)
    assert expert_TX[4, 0] == (5 if sigmoid else 0) and np.isnan(scores_TX[4, 0])
    assert len(set(np.asarray(expert_TX)[4].tolist())) == 4


@pytest.mark.parametrize(("sigmoid", "corrected"), [(False, False), (True, False), (True, True)])
def test_the_experts_that_are_rated_highest_are_chosen(sigmoid, corrected):
    check_choice(sigmoid, corrected)


@pytest.mark.parametrize("mistake", ["order", "count", "copy", "scores"])
def test_a_planted_mistake_in_routing_is_seen(mistake, monkeypatch):
    number, scores_of = triton_routing._number, triton_routing.scores_of

    def wrong_number(is_counted_P):
        return number(is_counted_P.at[0].set(False))

    if mistake == "count":
        monkeypatch.setattr(triton_routing, "_number", wrong_number)
    if mistake == "copy":
        monkeypatch.setattr(triton_routing.pl, "cdiv", lambda a, b: a // b)
    if mistake == "order":
        monkeypatch.setattr(triton_routing, "_group", lambda group, num_groups: group)
    if mistake == "scores":
        monkeypatch.setattr(
            triton_routing,
            "scores_of",
            lambda logits_E, sigmoid: scores_of(-logits_E, sigmoid=sigmoid),
        )
    triton_routing.gather_by_group.clear_cache()
    triton_routing.choose_experts.clear_cache()
    with pytest.raises(AssertionError):
        check_choice(True, True) if mistake == "scores" else check_pairs()
    triton_routing.gather_by_group.clear_cache()
    triton_routing.choose_experts.clear_cache()


@pytest.mark.parametrize(
    ("quantization", "block"),
    few(
        [(None, None), ("int8", None), ("int4", None), (None, [48, 32])],
        [("int8", None), (None, [48, 32])],
    ),
    ids=str,
)
def test_experts_at_once_make_what_they_make_one_after_another(quantization, block):
    """Numbers that are no expert's get zeros.

    The sums of eight-bit inputs are the same to the bit.
    """
    spec = ExpertsSpec(Routing(6, 2, normalized=True), 96)
    module = make_experts(
        spec, 64, QWEN_EXPERTS, layer="0", activation="silu", shared=None, dtype="float32"
    )
    config = (
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": block}}
        if block
        else {}
    )
    if scheme := quantization_of(config, quantization):
        replace_modules(module, scheme.rule)
    graph, shapes = abstract(module)
    rng = np.random.default_rng(0)

    def parameter(each: Any) -> np.ndarray:
        if each.dtype == jnp.float32:
            return (0.3 * rng.standard_normal(each.shape)).astype(np.float32)
        # none of the codes is a NaN
        return (rng.integers(0, 256, each.shape) & 0x77).astype(each.dtype)

    parameters = jax.tree.map(parameter, shapes)
    x_TD = jnp.asarray(rng.standard_normal((20, 64)), jnp.float32)
    expert_TX = rng.integers(-1, 8, (20, 2))
    made = {}
    for name, kernels in (
        ("by tiles", make_layer_kernels(Backend("reference"))),
        ("at once", AT_ONCE),
    ):

        @jax.jit
        def run(
            parameters: Any, expert_TX: jax.Array, kernels: LayerKernels = kernels
        ) -> jax.Array:
            with TraceScope(kernels).open():
                return nnx.merge(graph, parameters).experts.run(x_TD, expert_TX)

        clipped = (
            np.where((expert_TX < 0) | (expert_TX > 6), 6, expert_TX)
            if name == "by tiles"
            else expert_TX
        )
        made[name] = np.asarray(run(parameters, clipped))
    assert not made["at once"][(expert_TX < 0) | (expert_TX >= 6)].any() and made["at once"].any()
    size = 0 if quantization == "int8" else 1e-5 * np.abs(made["by tiles"]).max()
    np.testing.assert_allclose(made["at once"], made["by tiles"], rtol=0, atol=size)


@pytest.mark.parametrize(
    ("num_experts", "per_token", "more"),
    [
        (4, 2, {}),
        (128, 8, {}),
        (
            32,
            4,
            {"sigmoid": True, "corrected": True, "groups": Groups(4, 2, best=2), "factor": 2.5},
        ),
    ],
)
def test_a_token_has_its_bits_among_any_others(num_experts, per_token, more):
    """Tiles have 8 and 32 rows."""
    run, parameters = mixture(num_experts, per_token, **more)
    x = np.random.default_rng(1).standard_normal((256, WIDTH)).astype(np.float32)
    together = np.asarray(run(parameters, x))
    for count in (2, 33):
        np.testing.assert_array_equal(np.asarray(run(parameters, x[:count])), together[:count])
    alike = np.repeat(x[:1], 64, axis=0)  # all of them at the same experts
    np.testing.assert_array_equal(
        np.asarray(run(parameters, alike)), np.repeat(together[:1], 64, axis=0)
    )


def test_the_work_goes_with_the_tokens_and_not_with_the_experts():
    """XLA counts the operations, a tile once.

    There are no more tiles than pairs of a token and an expert.
    """
    operations = {}
    for num_experts in (4, 64):
        run, parameters = mixture(num_experts, 2)
        compiled = run.lower(parameters, jnp.zeros((8, WIDTH))).compile()
        operations[num_experts] = compiled.cost_analysis()["flops"]
    assert operations[64] < 2 * operations[4], "16 times as many experts"


def save_gpt_oss(directory: Path, **overrides: Any) -> Any:
    """Writes GPT-OSS in MXFP4, and returns the model of transformers with the weights that it
    stands for, by transformers' own conversion.
    """
    torch = pytest.importorskip("torch", reason="the oracle is transformers on torch")
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    from tests.support.hf_models import save_model

    rng = np.random.default_rng(5)
    model = save_model(
        "gpt-oss-windows", directory, vocab_size=257, max_position_embeddings=256, **overrides
    )
    tensors = dict(load_file(directory / "model.safetensors"))
    for index, layer in enumerate(model.model.layers):
        for name in ("gate_up_proj", "down_proj"):
            weight, key = (
                getattr(layer.mlp.experts, name),
                f"model.layers.{index}.mlp.experts.{name}",
            )
            num_experts, num_in, num_out = weight.shape
            blocks = rng.integers(0, 256, (num_experts, num_out, num_in // 32, 16)).astype(np.uint8)
            scales = rng.integers(121, 126, blocks.shape[:3]).astype(np.uint8)
            dense = mxfp4.convert_moe_packed_tensors(
                torch.tensor(blocks), torch.tensor(scales), dtype=torch.float32
            )
            weight.data.copy_(dense)
            del tensors[key]
            tensors |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
    write_tensors(directory, tensors)
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["lm_head", "*.mlp.router"],
    }
    (directory / "config.json").write_text(json.dumps(config))
    return model


@pytest.fixture(scope="module")
def in_four_bits(tmp_path_factory):
    directory = tmp_path_factory.mktemp("mxfp4")
    return directory, save_gpt_oss(directory)


def test_experts_in_mxfp4_are_multiplied_as_they_are_stored(in_four_bits):
    """A mistake is planted: nibbles the other way round."""
    import torch

    directory, model = in_four_bits
    files = open_model(directory)
    parameters = load_weights(files.plan, "float32", jnp.asarray)
    experts = parameters["layers"][0]["mlp"]["experts"]["gate_up"]
    assert experts["kernel"].dtype == jnp.uint8 and experts["scale"].dtype == jnp.bfloat16
    token_ids = np.random.default_rng(6).integers(0, 257, 40)
    with torch.no_grad():
        expected = model(torch.tensor(token_ids)[None]).logits[0].numpy()

    def difference() -> float:
        logits = logits_of(files.family, files.spec, parameters, token_ids, rule=files.rule)
        return float(np.abs(logits - expected).max())

    assert expected.std() > 0.5 and difference() < 1e-4
    experts["kernel"] = experts["kernel"] >> 4 | experts["kernel"] << 4
    assert difference() > 1e-2


def test_scales_of_experts_that_are_no_numbers_are_refused(in_four_bits, tmp_path):
    directory, _ = in_four_bits
    tensors = dict(load_file(directory / "model.safetensors"))
    tensors["model.layers.1.mlp.experts.down_proj_scales"].flat[3] = 255
    write_tensors(tmp_path, tensors)
    (tmp_path / "config.json").write_text((directory / "config.json").read_text())
    with pytest.raises(CheckpointError, match="down_proj_scales' has scales that are not finite"):
        open_model(tmp_path)
