"""Modules declare their parameters, and that is all that loading needs: fused, cut, stacked and
quantised weights touch no family.
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

from jaxpage.checkpoints import convert, load_weights, loading, open_model
from jaxpage.checkpoints.fitting import LoadPlan
from jaxpage.checkpoints.loading import insert
from jaxpage.checkpoints.orbax_files import save_orbax
from jaxpage.checkpoints.quantization.decoding import columns
from jaxpage.errors import CheckpointError
from jaxpage.layers.linear import Linear
from jaxpage.layers.parameter import Source, concatenate, parameter, sources_of, stack, tensor
from jaxpage.layers.quantized import QuantizedLinear, StoredArray, WeightFormat
from jaxpage.models.base import abstract, abstract_model, model_weights
from jaxpage.models.parameters.weights import num_bytes, weights_of
from jaxpage.models.registry import load_family
from tests.support.dense import logits_of
from tests.support.random_checkpoints import (
    check_weights,
    random_checkpoint,
    random_tensors,
    write_tensors,
)

QWEN2: dict[str, Any] = {  # with biases on queries, keys and values
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
FAMILY = load_family(QWEN2)
SPEC = FAMILY.Spec.from_config(QWEN2)
TOKENS = np.random.default_rng(0).integers(64, size=20)
FUSED = {
    "self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "mlp.gate_up_proj": ("gate_proj", "up_proj"),
}


def write(directory: Path, tensors: dict[str, np.ndarray]) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({**QWEN2, "torch_dtype": "float32"}))
    write_tensors(directory, tensors)
    return directory


def fuse(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Joins weights as Phi-3 stores them."""
    tensors = dict(tensors)
    for layer in range(2):
        for name, parts in FUSED.items():
            for kind in ("weight", "bias"):
                names = [
                    f"model.layers.{layer}.{name.split('.')[0]}.{part}.{kind}" for part in parts
                ]
                if names[0] in tensors:
                    joined = np.concatenate([tensors.pop(each) for each in names])
                    tensors[f"model.layers.{layer}.{name}.{kind}"] = joined
    return tensors


def load_weights_of(plan: LoadPlan) -> dict[Any, Any]:
    return load_weights(plan, "float32", jnp.asarray)


def refusal(directory: Path, weights: Any, ignored: tuple[str, ...] = ()) -> str:
    with pytest.raises(CheckpointError) as caught:
        check_weights(directory, weights, ignored)
    return str(caught.value)


# --- a model whose checkpoint has its products apart, together, or in eight bits


def test_products_stored_apart_and_together_are_one_model(tmp_path):
    separate, together = random_tensors(QWEN2), fuse(random_tensors(QWEN2))
    # of each layer three weights, three biases and two weights
    assert len(together) == len(separate) - 2 * (2 + 2 + 1)
    plans = [
        open_model(write(tmp_path / str(len(tensors)), tensors)).plan
        for tensors in (separate, together)
    ]
    first, second = (logits_of(FAMILY, SPEC, load_weights_of(plan), TOKENS) for plan in plans)
    assert first.std() > 0.3
    np.testing.assert_array_equal(first, second)
    for dtype in ("float32", "bfloat16"):
        assert [plan.num_bytes(dtype) for plan in plans] == [
            num_bytes(model_weights(FAMILY, SPEC), dtype)
        ] * 2


def test_what_is_stored_together_is_converted_as_it_is_stored(tmp_path):
    tensors = fuse(random_tensors(QWEN2))
    there = convert(write(tmp_path / "a", tensors), tmp_path / "b", progress=False)
    convert(there, tmp_path / "c", progress=False)
    assert_same(dict(load_file(tmp_path / "c" / "model.safetensors")), tensors)
    assert_same(
        load_weights_of(open_model(there).plan), load_weights_of(open_model(tmp_path / "a").plan)
    )


def test_of_products_that_are_incomplete_either_way_those_apart_are_missing(tmp_path):
    tensors = fuse(random_tensors(QWEN2))
    del (
        tensors["model.layers.0.self_attn.qkv_proj.weight"],
        tensors["model.layers.1.mlp.gate_up_proj.weight"],
    )
    tensors["model.layers.1.mlp.gate_proj.weight"] = np.zeros((48, 32), np.float32)
    tensors["model.layers.1.self_attn.q_proj.weight"] = np.zeros((32, 32), np.float32)
    text = refusal(write(tmp_path / "x", tensors), model_weights(FAMILY, SPEC))
    assert "(5 problems)" in text
    for name, size in (("q", 32), ("k", 16), ("v", 16)):
        assert (
            f"tensor 'model.layers.0.self_attn.{name}_proj.weight' of shape ({size}, 32) is missing"
            in text
        )
    assert "tensor 'model.layers.1.mlp.up_proj.weight' of shape (48, 32) is missing" in text
    assert "tensor 'model.layers.1.self_attn.q_proj.weight' of shape (32, 32) is unexpected" in text


INT8 = WeightFormat(
    "int8",
    StoredArray("weight", lambda num_out, num_in: (num_out, num_in), ("int8",)),
    StoredArray("weight_scale", lambda num_out, num_in: (num_out,), ("float32",), columns),
)


def to_int8(path: tuple[str | int, ...], module: nnx.Module) -> nnx.Module | None:
    return QuantizedLinear(module.spec, INT8) if isinstance(module, Linear) else None


def quantize(
    tensors: dict[str, np.ndarray],
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Returns products in eight bits with a scale for each row, and the tensors that these stand
    for.
    """
    stored, exact = dict(tensors), dict(tensors)
    for name, weight in tensors.items():
        if name.endswith("_proj.weight"):
            scale = np.abs(weight).max(axis=1) / np.float32(127)
            stored[name] = np.round(weight / scale[:, None]).astype(np.int8)
            stored[name.replace(".weight", ".weight_scale")] = scale
            exact[name] = stored[name].astype(np.float32) * scale[:, None]
    return stored, exact


@pytest.mark.parametrize("together", [False, True])
def test_weights_of_eight_bits_stand_for_what_they_are_with_their_scales(tmp_path, together):
    """Modules are replaced by path and load what they declare themselves; no family knows."""
    stored, exact = quantize(random_tensors(QWEN2))
    directory = write(tmp_path / "int8", fuse(stored) if together else stored)
    plan = check_weights(directory, model_weights(FAMILY, SPEC, to_int8), FAMILY.ignored)
    parameters = load_weights_of(plan)
    layer = parameters["layers"][1]["attention"]["query_key_value"]
    assert (
        layer["kernel"].dtype == jnp.int8
        and layer["scale"].dtype == jnp.float32
        and layer["scale"].shape == (64, 1)
    )
    weights = sum(value.size for value in stored.values() if value.dtype == np.int8)
    scales = sum(value.size for name, value in stored.items() if name.endswith("weight_scale"))
    num_others = sum(value.size for value in stored.values()) - weights - scales
    assert (
        plan.num_bytes("bfloat16") == weights + 4 * scales + 2 * num_others
        and plan.most_common_dtype() == "float32"
    )
    expected = logits_of(
        FAMILY, SPEC, load_weights_of(open_model(write(tmp_path / "exact", exact)).plan), TOKENS
    )
    logits = logits_of(FAMILY, SPEC, parameters, TOKENS, rule=to_int8)
    original = logits_of(
        FAMILY,
        SPEC,
        load_weights_of(open_model(random_checkpoint(tmp_path / "x", QWEN2)).plan),
        TOKENS,
    )
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5)
    assert np.abs(expected - original).max() > 1e-3  # else the last lines say little


def test_weights_of_eight_bits_that_do_not_fit_are_refused_with_all_others(tmp_path):
    stored, _ = quantize(random_tensors(QWEN2))
    for name in ("model.layers.0.mlp.down_proj.weight", "model.norm.weight"):
        stored[name] = stored[name].astype(np.float32 if name.endswith("_proj.weight") else np.int8)
    stored["model.layers.1.self_attn.o_proj.weight_scale"] = np.zeros((32, 1), np.float32)
    del stored["model.layers.0.self_attn.k_proj.weight_scale"]
    text = refusal(write(tmp_path / "x", stored), model_weights(FAMILY, SPEC, to_int8))
    assert "(4 problems)" in text
    assert "tensor 'model.layers.0.mlp.down_proj.weight' has dtype F32, not I8" in text
    assert (
        "tensor 'model.norm.weight' has dtype I8, which is of quantised weights (such modules: 1)"
        in text
    )
    assert (
        "'model.layers.1.self_attn.o_proj.weight_scale' has shape (32, 1), and the model needs "
        "(32,)"
    ) in text
    assert "tensor 'model.layers.0.self_attn.k_proj.weight_scale' of shape (16,) is missing" in text
    with pytest.raises(CheckpointError, match="weight_scale' of shape .* is unexpected"):
        open_model(tmp_path / "x")


def test_a_module_is_replaced_by_its_path_and_not_looked_into():
    requested = []

    def rule(path: tuple[str | int, ...], module: nnx.Module) -> nnx.Module | None:
        requested.append(path)
        return to_int8(path, module) if path == ("layers", 1, "mlp", "down") else None

    graph, parameters = abstract_model(FAMILY, SPEC, "bfloat16", rule)
    assert parameters["layers"][1]["mlp"]["down"].keys() == {"kernel", "scale"}
    assert parameters["layers"][0]["mlp"]["down"].keys() == {"kernel"}
    assert {
        ("tokens",),
        ("layers",),
        ("layers", 0),
        ("layers", 1, "attention", "query_key_value"),
    } <= set(requested)
    assert len(requested) == len(set(requested))
    assert (
        graph
        == abstract_model(FAMILY, SPEC, "bfloat16", rule)[0]
        != abstract_model(FAMILY, SPEC, "bfloat16")[0]
    )


# --- one parameter out of several tensors, several out of one


class Toy(nnx.Module):
    """Three experts whose gate and up products are stored apart or, with all experts, together; and
    three thirds of one tensor.
    """

    def __init__(self) -> None:
        halves = [
            [tensor(f"{part}.{index}", 4, 6) for part in ("gate", "up")] for index in range(3)
        ]
        separate, together = (
            stack([concatenate(pair) for pair in halves]),
            tensor("gate_up", 3, 8, 6),
        )
        axes = ("expert", (("ffn", 4), ("ffn", 4)), "embed")
        self.gate_up = parameter(
            (3, 8, 6), axes=axes, dtype="float32", sources=[separate, together]
        )
        wide = [tensor("left", 6, 2), tensor("right", 3, 6, transpose=True)]
        self.wide = parameter(
            (6, 5), axes=(None, None), dtype="float32", sources=[concatenate(wide, axis=1)]
        )
        thirds = [
            tensor("whole", 6, 9, transpose=True, rows=(3 * third, 3 * third + 3))
            for third in range(3)
        ]
        self.scale = parameter((), axes=(), dtype="float32", sources=[tensor("scale")])
        scales = stack([tensor(f"scale_of.{index}") for index in range(3)])
        self.scales = parameter((3,), axes=("expert",), dtype="float32", sources=[scales])
        self.thirds = nnx.List([Third(third) for third in thirds])


class Third(nnx.Module):
    def __init__(self, source: Source) -> None:
        self.kernel = parameter((3, 6), axes=("heads", "embed"), dtype="float32", sources=[source])


RNG = np.random.default_rng(1)
PARTS = {f"{part}.{index}": (4, 6) for part in ("gate", "up") for index in range(3)}
SHAPES = {
    **PARTS,
    "left": (6, 2),
    "right": (3, 6),
    "whole": (6, 9),
    "scale": (),
    **{f"scale_of.{index}": () for index in range(3)},
}
TENSORS = {
    name: np.asarray(RNG.standard_normal(shape), np.float32) for name, shape in SHAPES.items()
}
STACKED = np.stack(
    [np.concatenate([TENSORS[f"gate.{index}"], TENSORS[f"up.{index}"]]) for index in range(3)]
)
EXPECTED = {
    "gate_up": STACKED,
    "wide": np.concatenate([TENSORS["left"], TENSORS["right"].T], axis=1),
    "scale": TENSORS["scale"],
    "scales": np.stack([TENSORS[f"scale_of.{index}"] for index in range(3)]),
    "thirds": {
        third: {"kernel": TENSORS["whole"].T[3 * third : 3 * third + 3]} for third in range(3)
    },
}


def test_a_parameter_is_stacked_joined_or_cut_out_of_what_is_stored(tmp_path):
    together = {name: value for name, value in TENSORS.items() if name not in PARTS} | {
        "gate_up": STACKED
    }
    for name, tensors in (("apart", TENSORS), ("together", together)):
        plan = check_weights(write(tmp_path / name, tensors), weights_of(Toy()))
        assert_same(load_weights_of(plan), EXPECTED)
        assert plan.tensors.keys() == tensors.keys() and plan.num_bytes("float32") == 4 * (
            144 + 30 + 54 + 4
        )
    graph, _ = abstract(Toy())
    np.testing.assert_array_equal(
        nnx.merge(graph, load_weights_of(plan)).thirds[2].kernel[...],
        EXPECTED["thirds"][2]["kernel"],
    )


def test_an_orbax_tensor_that_fills_several_parameters_is_read_for_each(tmp_path):
    tree: dict[str, Any] = {}
    for name, value in TENSORS.items():
        insert(tree, name.split("."), value)
    save_orbax(tmp_path, tree)
    plan = check_weights(tmp_path, weights_of(Toy()))
    assert plan.layout == "orbax"
    assert_same(load_weights_of(plan), EXPECTED)


def test_any_part_of_a_parameter_is_that_part_of_the_whole(tmp_path):
    plan = check_weights(write(tmp_path / "x", TENSORS), weights_of(Toy()))
    (filled,) = (filled for filled in plan.parameters if filled.weight.path == ("gate_up",))
    arrays = [TENSORS[piece.name] for piece, _ in filled.pieces]
    for _ in range(100):
        bounds = [
            np.sort(RNG.choice(size + 1, 2, replace=False)).tolist() for size in STACKED.shape
        ]
        index = tuple(slice(*pair) for pair in bounds)
        part = loading._assemble(filled, arrays, np.dtype(np.float32), index)
        np.testing.assert_array_equal(part, STACKED[index])


def test_a_part_of_a_tensor_that_is_missing_or_misshapen_is_reported_once(tmp_path):
    tensors = {name: value for name, value in TENSORS.items() if name != "whole"}
    assert "(1 problem):\n  - tensor 'whole' of shape (6, 9) is missing" in refusal(
        write(tmp_path / "a", tensors), weights_of(Toy())
    )
    text = refusal(
        write(tmp_path / "b", {**tensors, "whole": TENSORS["whole"].T.copy()}), weights_of(Toy())
    )
    assert (
        "(1 problem):\n  - 'model.safetensors': tensor 'whole' has shape (9, 6), and the model needs (6, 9)"
        in text
    )


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "rank": ({"axes": ("embed",)}, "zip()"),
    "name": ({"axes": ("embed", "width")}, "'width'"),
    "twice": ({"axes": ("embed", "embed")}, "a name stands for one axis"),
    "parts": ({"axes": ((("heads", 3), ("kv_heads", 2)), "embed")}, "do not add up to (4, 6)"),
    "shape": ({"sources": [tensor("a", 6, 4)]}, "['a'] make (6, 4), the parameter is (4, 6)"),
    "second source": (
        {"sources": [tensor("a", 4, 6), concatenate([tensor("b", 2, 6)])]},
        "['b'] make (2, 6)",
    ),
    "a function's": ({"sources": lambda: [tensor("a", 6, 4)]}, "['a'] make (6, 4)"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_declaration_that_contradicts_itself_is_refused(name):
    right: dict[str, Any] = {
        "axes": ("ffn", "embed"),
        "dtype": "float32",
        "sources": [tensor("a", 4, 6)],
    }
    parameter((4, 6), **right)
    fields, message = WRONG[name]
    with pytest.raises(ValueError) as caught:
        sources_of(parameter((4, 6), **{**right, **fields}))
    assert message in str(caught.value)


def assert_same(ours: Any, theirs: Any) -> None:
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
