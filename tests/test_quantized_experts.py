"""Mixtures of experts with quantised weights: against transformers with the weights that a
checkpoint stands for, and engines of them.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
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
from jaxpage.layers.expert_linear import ExpertLinearSpec
from jaxpage.layers.experts import ExpertsSpec
from jaxpage.layers.routing import Routing
from jaxpage.layers.trace_scope import TraceScope
from jaxpage.models.base import abstract, abstract_model, model_weights
from jaxpage.models.parameters.replacing import replace_modules
from jaxpage.models.parts.experts import make_experts
from jaxpage.models.parts.names import QWEN_EXPERTS
from jaxpage.models.registry import load_family
from tests.support.dense import logits_of
from tests.support.engines import SMALL_POOL
from tests.support.mixed_requests import CONFIG, PROMPTS, texts
from tests.support.random_checkpoints import random_checkpoint, random_tensors, write_tensors
from tests.support.sweeps import few
from tests.test_quantization import FORMATS, float8
from tools.lab.kernel_lab.inspection import compile_for, unavailable

torch = pytest.importorskip("torch", reason="the oracle is transformers on torch")
from tests.support.hf_models import save_model  # noqa: E402

Make = Callable[[int, int], tuple[dict[str, np.ndarray], np.ndarray]]
BLOCKS: tuple[dict[str, Any], Make] = (
    {"quant_method": "fp8", "weight_block_size": [48, 32]},
    float8("weight_scale_inv", (48, 32)),
)
SMALL_BLOCKS: tuple[dict[str, Any], Make] = (
    {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 32]},
    float8("weight_scale_inv", (16, 32)),
)
MIXED = {  # a layer with experts and one without
    **{
        "hidden_size": 128,
        "moe_intermediate_size": 64,
        "intermediate_size": 64,
        "head_dim": 32,
        "num_experts": 4,
    },
    **{"num_hidden_layers": 2, "mlp_only_layers": [1]},
}
TOKEN_IDS = np.random.default_rng(6).integers(0, 131, 40)


def checkpoint(
    directory: Path, form: tuple[dict[str, Any], Make], model: str, **overrides: Any
) -> Any:
    """Writes one with all linear layers quantised, and returns the model of transformers with the
    weights that it stands for.
    """
    quantization, make = form
    model = save_model(model, directory, **overrides)
    config, tensors, exact = (
        json.loads((directory / "config.json").read_text()),
        {},
        load_file(directory / "model.safetensors"),
    )
    for key, weight in list(exact.items()):
        is_router = key.endswith("mlp.gate.weight")
        if weight.ndim != 2 or is_router or ".layers." not in key:
            tensors[key] = weight
            continue
        stored, exact[key] = make(*weight.shape)
        tensors |= {
            f"{key.removesuffix('weight')}{suffix}": array for suffix, array in stored.items()
        }
    write_tensors(directory, exact)
    model = type(model).from_pretrained(directory).eval()
    write_tensors(directory, tensors)
    (directory / "config.json").write_text(
        json.dumps({**config, "quantization_config": quantization})
    )
    return model


def logits_of_transformers(model: Any, token_ids: np.ndarray = TOKEN_IDS) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor(token_ids)[None]).logits[0].numpy()


def difference(files: Any, parameters: Any, expected: np.ndarray) -> float:
    """Returns the difference of logits, relative to how far they are spread."""
    logits = logits_of(files.family, files.spec, parameters, TOKEN_IDS, rule=files.rule)
    return float(np.abs(logits - expected).max() / expected.std())


def round_inputs(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    """Rounds the inputs of all layers of transformers' model but the router and the head, each
    token by its own scale.
    """
    linear = torch.nn.functional.linear

    def rounding(x: Any, weight: Any, bias: Any = None) -> Any:
        if weight.shape[0] not in (131, 4):
            scale = x.abs().amax(-1, keepdim=True).clamp(min=2.0**-100) / 127
            x = torch.round(x / scale) * scale
        return linear(x, weight, bias)

    model.set_experts_implementation("eager")
    monkeypatch.setattr(torch.nn.functional, "linear", rounding)


SHARED = (
    "fp8 by output",
    "fp8 by weight",
    "W8A8",
    "W8A16",
    "W4A16 with zeros",
    "mxfp4",
    "nvfp4",
    "awq",
    "gptq with zeros",
)
CASES = {"fp8 blocks": BLOCKS, **{name: FORMATS[name] for name in SHARED}}


# One of each way to keep codes, scales and zeros of experts; all are seen in linear layers always,
# and experts in MXFP4 in tests/test_experts.py.
ALWAYS = ("fp8 blocks", "W8A8", "nvfp4")


@pytest.mark.parametrize("name", few(CASES, ALWAYS))
def test_a_checkpoint_stands_for_its_weights(name, tmp_path, monkeypatch):
    """A mistake is planted: the scales of two experts exchanged.

    Experts in blocks take no more bytes than in the file.
    """
    model = checkpoint(tmp_path, CASES[name], "qwen3-moe-mixed", **MIXED)
    if name == "W8A8":
        round_inputs(monkeypatch, model)
    files = open_model(tmp_path)
    parameters = load_weights(files.plan, "float32", jnp.asarray)
    expected = logits_of_transformers(model)
    tolerance = 0.05 if name == "W8A8" else 1e-3
    assert difference(files, parameters, expected) < tolerance
    experts = parameters["layers"][0]["mlp"]["experts"]
    num_bytes = sum(array.nbytes for layer in experts.values() for array in layer.values())
    stored = sum(info.num_bytes for key, info in files.plan.tensors.items() if ".experts." in key)
    assert num_bytes == stored if name == "fp8 blocks" else num_bytes < 1.4 * stored
    for layer in experts.values():
        layer["scale"] = layer["scale"][jnp.array([1, 0, 2, 3])]
    assert difference(files, parameters, expected) > 3 * tolerance or name == "fp8 by weight"


@pytest.fixture(scope="module")
def latent(tmp_path_factory):
    """Writes DeepSeek-V3's shape in fp8, and returns the model of transformers."""
    directory = tmp_path_factory.mktemp("latent")
    sizes = {"hidden_size": 64, "vocab_size": 257, "max_position_embeddings": 256}
    return directory, checkpoint(directory, SMALL_BLOCKS, "deepseek-v3-groups", **sizes)


def test_the_product_that_is_absorbed_is_dequantised(latent):
    """Mistakes are planted in its codes, and in those of experts."""
    directory, model = latent
    files = open_model(directory)
    parameters = load_weights(files.plan, "float32", jnp.asarray)
    expected = logits_of_transformers(model)
    assert parameters["layers"][1]["attention"]["expand"]["kernel"].dtype == jnp.float8_e4m3fn
    assert difference(files, parameters, expected) < 1e-3
    for path in (("attention", "expand", "scale"), ("mlp", "experts", "gate_up", "scale")):
        *parents, last = path
        module = parameters["layers"][1]
        for key in parents:
            module = module[key]
        right = module[last]
        module[last] = jnp.roll(right, 1, axis=-2)
        assert difference(files, parameters, expected) > 1e-2
        module[last] = right


def test_an_engine_of_latents_and_experts_gives_the_tokens_of_transformers_however_it_is_run(
    latent,
):
    directory, model = latent
    plain = texts(directory)
    for index in (0, 3):  # the greedy ones
        ids = list(PROMPTS[index])
        for _ in range(24):
            ids.append(int(logits_of_transformers(model, np.array(ids))[-1].argmax()))
        assert plain[index][0] == ids[len(PROMPTS[index]) :]
    assert texts(directory, **SMALL_POOL, preemption_mode="swap") == plain, "another path"


MOE = {
    **{
        **CONFIG,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "head_dim": 32,
    },
    **{"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
}


@pytest.mark.sweep  # experts in blocks: above; rounded linear layers: tests/test_quantization.py
def test_an_engine_of_experts_that_are_rounded_gives_the_same_bits_however_it_is_run(tmp_path):
    model = random_checkpoint(tmp_path, MOE)
    plain = texts(model, quantization="int8")
    assert texts(model, quantization="int8", **SMALL_POOL, preemption_mode="swap") == plain


@pytest.mark.parametrize(
    ("name", "on_gpu"),
    few(itertools.product(["fp8", "int8"], [False, True]), [("fp8", False), ("int8", True)]),
)
def test_no_more_than_one_experts_weights_are_made_of_their_codes(name, on_gpu):
    """XLA counts the memory beside arguments and results, which a copy of all experts would not fit
    in.
    """
    if on_gpu and (reason := unavailable()):
        pytest.skip(reason)
    scheme = quantization_of(
        {"quantization_config": BLOCKS[0]} if name == "fp8" else {}, None if name == "fp8" else name
    )
    assert scheme is not None
    spec = ExpertsSpec(Routing(32, 2, normalized=True), 96)
    module = make_experts(
        spec, 64, QWEN_EXPERTS, layer="0", activation="silu", shared=None, dtype="float32"
    )
    replace_modules(module, scheme.rule)
    graph, shapes = abstract(module)

    @jax.jit
    def run(parameters: Any, x_TD: jax.Array) -> jax.Array:
        with TraceScope(make_layer_kernels(Backend("reference" if on_gpu else "auto"))).open():
            return nnx.merge(graph, parameters)(x_TD)

    arguments = shapes, jax.ShapeDtypeStruct((16, 64), "float32")
    compiled = compile_for(run, *arguments) if on_gpu else run.lower(*arguments).compile()
    used = compiled.memory_analysis()
    codes = sum(shapes["experts"][part]["kernel"].size for part in ("gate_up", "down"))
    assert used.argument_size_in_bytes > codes > 2 * used.temp_size_in_bytes


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_tensors_of_experts_are_listed_where_a_checkpoint_is_opened(quantization, monkeypatch):
    """DeepSeek-V3 has 90,000 of them, and its module is made several times."""
    listed, sources, scheme = [], ExpertLinearSpec.sources, quantization_of({}, quantization)
    monkeypatch.setattr(
        ExpertLinearSpec, "sources", lambda self, spec: listed.append(self) or sources(self, spec)
    )
    family = load_family(MOE)
    arguments = family, family.Spec.from_config(MOE)
    abstract_model(*arguments, "float32", scheme and scheme.rule)
    assert not listed
    model_weights(*arguments, scheme and scheme.rule)
    assert len(listed) == MOE["num_hidden_layers"] * 2 * (2 if quantization else 1)


def stack(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns experts as transformers keeps them in memory."""
    result = {name: array for name, array in tensors.items() if ".experts." not in name}
    for layer in range(CONFIG["num_hidden_layers"]):
        experts = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            np.stack([tensors[f"{experts}.{expert}.{part}_proj.weight"] for expert in range(8)])
            for part in ("gate", "up", "down")
        )
        result |= {
            f"{experts}.gate_up_proj": np.concatenate([gate, up], axis=1),
            f"{experts}.down_proj": down,
        }
    return result


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_experts_are_rounded_alike_apart_and_stacked(name, tmp_path):
    """Each is rounded as a linear layer of its own would be (see `test_quantization`)."""
    directory = random_checkpoint(tmp_path / "apart", MOE)
    (tmp_path / "stacked").mkdir()
    write_tensors(tmp_path / "stacked", stack(random_tensors(MOE)))
    (tmp_path / "stacked" / "config.json").write_text((directory / "config.json").read_text())
    separate, together = (
        load_weights(open_model(tmp_path / which, name).plan, "float32", np.asarray)["layers"][1][
            "mlp"
        ]["experts"]
        for which in ("apart", "stacked")
    )
    jax.tree.map(np.testing.assert_array_equal, separate, together)
    weight = random_tensors(MOE)["model.layers.1.mlp.experts.5.up_proj.weight"]
    codes, scale = separate["gate_up"]["kernel"][5, 64:], separate["gate_up"]["scale"][5, 64:]
    if name == "int4":
        codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(64, -1).astype(np.float32) - 8
        scale = np.repeat(scale, 32, axis=1)
    weights = codes.astype(np.float32) * scale
    assert (
        0
        < np.abs(weights - weight).max()
        <= 1.001 * np.abs(scale).max() * (0.5 if name == "int8" else 1)
    )


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("gpt-oss-windows", "mlp.experts.down_proj"),
        ("granitemoehybrid-mixed", "block_sparse_moe.output_linear.weight"),
    ],
)
def test_experts_that_are_one_tensor_are_rounded_too(name, tensor, tmp_path):
    """GPT-OSS has them as `[in, out]`, Granite under another name than in memory."""
    save_model(name, tmp_path)
    weight = load_file(tmp_path / "model.safetensors")[f"model.layers.1.{tensor}"]
    if name.startswith("gpt"):
        weight = weight.swapaxes(1, 2)
    down = load_weights(open_model(tmp_path, "int8").plan, "float32", np.asarray)["layers"][1][
        "mlp"
    ]["experts"]["down"]
    wrong = np.abs(down["kernel"] * down["scale"] - weight)
    assert wrong.max() > 0 and (wrong <= 0.501 * down["scale"]).all()


def test_what_cannot_be_rounded_or_differs_within_a_stack_is_refused_by_name(tmp_path):
    directory = random_checkpoint(tmp_path, {**MOE, "moe_intermediate_size": 48})
    with pytest.raises(CheckpointError) as caught:
        open_model(directory, "int4")
    for layer in range(MOE["num_hidden_layers"]):
        assert (
            f"layers.{layer}.mlp.experts.0.down_proj has 48 inputs, which are no multiple of 32"
            in str(caught.value)
        )
    quantization = {**FORMATS["W4A16"][0], "ignore": ["re:.*experts.3.up_proj"]}
    (tmp_path / "config.json").write_text(json.dumps({**MOE, "quantization_config": quantization}))
    with pytest.raises(
        CheckpointError, match=r"0\.gate_proj, .*experts\.3\.up_proj are one product, and must be"
    ):
        open_model(directory)


def test_stacked_experts_of_other_formats_are_refused_in_one_sentence(tmp_path):
    """Its advice about experts that are not quantised is tried.

    GPT-OSS has none but stacked ones.
    """
    quantization, make = FORMATS["W4A16"]
    tensors, unquantized = (
        stack(random_tensors(MOE)),
        {**quantization, "ignore": ["lm_head", "re:.*[.]experts"]},
    )
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        made, _ = make(*tensors.pop(name).shape)
        tensors |= {
            f"{name.removesuffix('weight')}{suffix}": array for suffix, array in made.items()
        }

    def write(
        directory: Path, config: dict[str, Any], quantization: Any, tensors: dict[str, np.ndarray]
    ) -> None:
        directory.mkdir(exist_ok=True)
        (directory / "config.json").write_text(
            json.dumps({**config, "quantization_config": quantization})
        )
        write_tensors(directory, tensors)

    qwen, gpt_oss = tmp_path / "qwen", tmp_path / "gpt-oss"
    write(qwen, MOE, quantization, tensors)
    with pytest.raises(
        CheckpointError, match=r"\(1 problem\).*\n.*'compressed-tensors' are not loaded from"
    ) as caught:
        open_model(qwen)
    assert f"add '{unquantized['ignore'][1]}' to quantization_config.ignore" in str(caught.value)
    write(qwen, MOE, unquantized, tensors)
    experts = load_weights(open_model(qwen).plan, "float32", np.asarray)["layers"][0]["mlp"][
        "experts"
    ]
    np.testing.assert_array_equal(
        experts["down"]["kernel"], tensors["model.layers.0.mlp.experts.down_proj"]
    )

    write(
        qwen,
        MOE,
        quantization,
        tensors | {"model.layers.1.mlp.experts.down_proj_scale": np.ones(8, np.float32)},
    )
    with pytest.raises(
        CheckpointError,
        match=r"\(1 problem\).*\n.*each expert, such as '.*\.0\.mlp\.experts\.0\..*_packed'",
    ):
        open_model(qwen)

    save_model("gpt-oss-windows", gpt_oss)
    tensors = load_file(gpt_oss / "model.safetensors")
    config = json.loads((gpt_oss / "config.json").read_text())
    scale = np.ones((6, 64), np.float32)
    write(
        gpt_oss,
        config,
        BLOCKS[0],
        tensors | {"model.layers.1.mlp.experts.down_proj_scale_inv": scale},
    )
    message = r"\(1 problem\).*\n.*'fp8' .* '.*\.1\.mlp\.experts\.down_proj_scale_inv' and 0 other tensors; .*in MXFP4, or"
    with pytest.raises(CheckpointError, match=message):
        open_model(gpt_oss)
