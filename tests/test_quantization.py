"""Quantised weights: each format against the numbers that its library or publication gives, engines
of them, and refusals.
"""

from __future__ import annotations

import copy
import functools
import itertools
import json
import operator
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from jaxpage import LLM, cli
from jaxpage.checkpoints import convert, load_shards, load_weights, open_model
from jaxpage.checkpoints.config_file import read_config
from jaxpage.checkpoints.drafters.eagle_files import find_shared_table
from jaxpage.checkpoints.problems import Problems
from jaxpage.checkpoints.quantization import gguf
from jaxpage.checkpoints.quantization.formats import METHODS
from jaxpage.checkpoints.quantization.on_load import SCHEMES
from jaxpage.checkpoints.quantization.scheme_choice import quantization_of
from jaxpage.checkpoints.safetensors_files import map_array, read_tensors
from jaxpage.device.attention import make_layer_kernels
from jaxpage.device.hardware.backends import Backend
from jaxpage.errors import CheckpointError, ConfigError, JaxpageError
from jaxpage.layers.embedding import Embedding
from jaxpage.layers.matmul import matmul, weight_numbers
from jaxpage.layers.quantized import QuantizedEmbedding
from jaxpage.layers.sharding import Sharding
from jaxpage.layers.trace_scope import TraceScope
from jaxpage.layers.weight_kinds import Scaled
from jaxpage.models.base import abstract_model, make_model
from jaxpage.models.sharding.dividing import Place, ShardedWeight, shard_weights, with_sharding
from jaxpage.settings.engine_config import EngineConfig
from tests.support.engines import SMALL_POOL, make_llm
from tests.support.gguf_files import write_gguf
from tests.support.mixed_requests import CONFIG, texts
from tests.support.random_checkpoints import random_checkpoint, random_tensors, write_tensors
from tests.support.sweeps import few

pytestmark = pytest.mark.usefixtures("compiled_when_used")
RNG = np.random.default_rng(0)
Tensors = dict[str, np.ndarray]
# what a module stores, after its name, and the weight that it stands for
Stored = tuple[Tensors, np.ndarray]


# --- what a module stores in each format, made of random codes; the weight is computed entry by
# entry, as the format's publication says


def compressed(
    num_bits: int, group_size: int | None, symmetric: bool, *, packed: bool
) -> Callable[[int, int], Stored]:
    def make(num_out: int, num_in: int) -> Stored:
        library = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
        torch = pytest.importorskip("torch")
        maximum = 2 ** (num_bits - 1)
        size = group_size or num_in
        codes = RNG.integers(-maximum, maximum, (num_out, num_in)).astype(np.int8)
        scale = RNG.uniform(0.01, 0.03, (num_out, num_in // size)).astype(np.float32)
        zero = RNG.integers(-maximum, maximum, scale.shape).astype(np.int8) * (not symmetric)
        weight = (codes - np.repeat(zero, size, 1).astype(np.float32)) * np.repeat(scale, size, 1)
        if not packed:
            return {"weight": codes, "weight_scale": scale}, weight
        tensors = {
            "weight_packed": library.pack_to_int32(torch.tensor(codes), num_bits).numpy(),
            "weight_scale": scale,
        }
        if not symmetric:
            packed_zero = library.pack_to_int32(torch.tensor(zero), num_bits, packed_dim=0)
            tensors["weight_zero_point"] = packed_zero.contiguous().numpy()
        return tensors, weight

    return make


def float8(
    scale_name: str,
    block: tuple[int, int] | None,
    per_output: bool = False,
    shape: tuple[int, ...] = (1,),
) -> Callable[[int, int], Stored]:
    def make(num_out: int, num_in: int) -> Stored:
        codes = RNG.standard_normal((num_out, num_in)).astype(ml_dtypes.float8_e4m3fn)
        rows, cols = (
            (-(-num_out // block[0]), -(-num_in // block[1]))
            if block
            else (num_out if per_output else 1, 1)
        )
        scale = RNG.uniform(0.05, 0.2, (rows, cols)).astype(np.float32)
        weight = np.empty((num_out, num_in), np.float32)
        for o in range(num_out):
            for i in range(num_in):
                s = (
                    scale[o // block[0], i // block[1]]
                    if block
                    else scale[o if per_output else 0, 0]
                )
                weight[o, i] = np.float32(codes[o, i]) * s
        if not block and not per_output:
            scale = scale.reshape(shape)
        return {"weight": codes, scale_name: scale}, weight

    return make


def mxfp4(num_out: int, num_in: int) -> Stored:
    nibbles = RNG.integers(0, 16, (num_out, num_in)).astype(np.uint8)
    exponents = RNG.integers(121, 125, (num_out, num_in // 32)).astype(np.uint8)
    table = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    weight = np.empty((num_out, num_in), np.float32)
    for o in range(num_out):
        for i in range(num_in):
            magnitude = table[nibbles[o, i] & 7] * 2.0 ** (int(exponents[o, i // 32]) - 127)
            weight[o, i] = -magnitude if nibbles[o, i] & 8 else magnitude
    return {
        "weight_packed": nibbles[:, ::2] | nibbles[:, 1::2] << 4,
        "weight_scale": exponents,
    }, weight


def nvfp4(library: str) -> Callable[[int, int], Stored]:
    """Has two scales, whose quotient or product is that of 16 inputs."""

    def make(num_out: int, num_in: int) -> Stored:
        nibbles = RNG.integers(0, 16, (num_out, num_in)).astype(np.uint8)
        scale = RNG.uniform(20, 60, (num_out, num_in // 16)).astype(ml_dtypes.float8_e4m3fn)
        whole = np.array(RNG.uniform(2e3, 4e3), np.float32)
        table = np.array(
            [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32
        )
        weight = np.empty((num_out, num_in), np.float32)
        for o in range(num_out):
            for i in range(num_in):
                weight[o, i] = table[nibbles[o, i]] * np.float32(scale[o, i // 16]) / whole
        packed = nibbles[:, ::2] | nibbles[:, 1::2] << 4
        if library == "modelopt":
            return {
                "weight": packed,
                "weight_scale": scale,
                "weight_scale_2": np.array(1 / whole),
            }, weight
        torch, helpers = (
            pytest.importorskip("torch"),
            pytest.importorskip("compressed_tensors.compressors.nvfp4"),
        )
        unpacked = helpers.unpack_fp4_from_uint8(
            torch.tensor(packed), num_out, num_in, dtype=torch.float32
        )
        np.testing.assert_array_equal(unpacked.numpy(), table[nibbles], err_msg="of the library")
        return {
            "weight_packed": packed,
            "weight_scale": scale,
            "weight_global_scale": whole.reshape(1),
        }, weight

    return make


def awq(num_out: int, num_in: int) -> Stored:
    """Stores column 8 c + i as nibble (0, 4, 1, 5, 2, 6, 3, 7)[i] of word c."""
    size, order = 64, (0, 4, 1, 5, 2, 6, 3, 7)
    codes = RNG.integers(0, 16, (num_in, num_out))
    zeros = RNG.integers(0, 16, (num_in // size, num_out))
    scale = RNG.uniform(0.01, 0.03, zeros.shape).astype(np.float16)

    def words(values: np.ndarray) -> np.ndarray:
        packed = np.zeros((len(values), num_out // 8), np.uint32)
        for row in range(len(values)):
            for column in range(num_out):
                packed[row, column // 8] |= np.uint32(values[row, column]) << np.uint32(
                    4 * order[column % 8]
                )
        return packed.view(np.int32)

    weight = (codes - np.repeat(zeros, size, 0)).astype(np.float32) * np.repeat(
        scale.astype(np.float32), size, 0
    )
    return {"qweight": words(codes), "qzeros": words(zeros), "scales": scale}, np.ascontiguousarray(
        weight.T
    )


def gptq(bits: int, sym: bool, version: str) -> Callable[[int, int], Stored]:
    def make(num_out: int, num_in: int) -> Stored:
        size, each = 32, 32 // bits
        codes = RNG.integers(0, 2**bits, (num_in, num_out))
        zeros = (
            RNG.integers(0, 2**bits, (num_in // size, num_out))
            if not sym
            else np.full((num_in // size, num_out), 2 ** (bits - 1))
        )
        scale = RNG.uniform(0.01, 0.03, zeros.shape).astype(np.float16)
        qweight = np.zeros((num_in // each, num_out), np.uint32)
        for i in range(num_in):
            qweight[i // each] |= codes[i].astype(np.uint32) << np.uint32(bits * (i % each))
        qzeros = np.zeros((num_in // size, num_out // each), np.uint32)
        for o in range(num_out):
            qzeros[:, o // each] |= zeros[:, o].astype(np.uint32) << np.uint32(bits * (o % each))
        # GPTQModel takes this from whole words: a zero of 0 borrows from its neighbour
        if version == "gptq":
            qzeros -= np.uint32(0x11111111 if bits == 4 else 0x01010101)
        weight = (codes - np.repeat(zeros, size, 0)).astype(np.float32) * np.repeat(
            scale.astype(np.float32), size, 0
        )
        tensors = {
            "qweight": qweight.view(np.int32),
            "qzeros": qzeros.view(np.int32),
            "scales": scale,
            "g_idx": (np.arange(num_in) // size).astype(np.int32),
        }
        return tensors, np.ascontiguousarray(weight.T)

    return make


def bitsandbytes(num_out: int, num_in: int) -> Stored:
    codes = RNG.integers(-127, 128, (num_out, num_in)).astype(np.int8)
    largest = RNG.uniform(1, 4, num_out).astype(np.float32)
    weight = np.empty((num_out, num_in), np.float32)
    for o in range(num_out):
        weight[o] = codes[o].astype(np.float64) * float(largest[o]) / 127
    return {"weight": codes, "SCB": largest, "weight_format": np.array(0, np.uint8)}, weight


def _compressed(
    form: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None
) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


INT8_INPUTS = {
    "num_bits": 8,
    "type": "int",
    "strategy": "token",
    "dynamic": True,
    "symmetric": True,
}
INT8_WEIGHTS = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
INT4_WEIGHTS = {
    "num_bits": 4,
    "type": "int",
    "strategy": "group",
    "group_size": 32,
    "symmetric": True,
}
# By name: `quantization_config`, and what makes the tensors of a module.
FORMATS: dict[str, tuple[dict[str, Any], Callable[[int, int], Stored]]] = {
    "W8A8": (
        _compressed("int-quantized", INT8_WEIGHTS, INT8_INPUTS),
        compressed(8, None, True, packed=False),
    ),
    "W8A16": (_compressed("pack-quantized", INT8_WEIGHTS), compressed(8, None, True, packed=True)),
    "W4A16": (_compressed("pack-quantized", INT4_WEIGHTS), compressed(4, 32, True, packed=True)),
    "W4A16 with zeros": (
        _compressed("pack-quantized", {**INT4_WEIGHTS, "symmetric": False}),
        compressed(4, 32, False, packed=True),
    ),
    "fp8 by output": (
        _compressed("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
        float8("weight_scale", None, per_output=True),
    ),
    "fp8 by weight": (
        _compressed("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
        float8("weight_scale", None),
    ),
    "fp8 blocks": (
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        float8("weight_scale_inv", (128, 128)),
    ),
    "fp8 of AutoFP8": (
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        float8("weight_scale", None, shape=(1,)),
    ),
    "mxfp4": (
        _compressed(
            "mxfp4-pack-quantized",
            {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32},
        ),
        mxfp4,
    ),
    "nvfp4": (
        _compressed(
            "nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "tensor_group"}
        ),
        nvfp4("compressed-tensors"),
    ),
    "fp8 of modelopt": (
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        float8("weight_scale", None, shape=()),
    ),
    "nvfp4 of modelopt": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head*"]},
        nvfp4("modelopt"),
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"},
        awq,
    ),
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True},
        gptq(4, True, "gptq"),
    ),
    "gptq with zeros": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False},
        gptq(4, False, "gptq"),
    ),
    "gptq of 8 bits": (
        {"quant_method": "gptq", "bits": 8, "group_size": 32, "sym": False},
        gptq(8, False, "gptq"),
    ),
    "gptq v2 of 8 bits": (
        {
            "quant_method": "gptq",
            "bits": 8,
            "group_size": 32,
            "sym": False,
            "checkpoint_format": "gptq_v2",
        },
        gptq(8, False, "gptq_v2"),
    ),
    "bitsandbytes": (
        {
            "quant_method": "bitsandbytes",
            "load_in_8bit": True,
            "load_in_4bit": False,
            "llm_int8_skip_modules": None,
            "llm_int8_threshold": 6.0,
        },
        bitsandbytes,
    ),
}


@functools.cache
def stored_at(place: int, name: str, num_out: int, num_in: int) -> Stored:
    """Returns what a module stores: each of a checkpoint its own, those of every checkpoint the
    same.
    """
    return FORMATS[name][1](num_out, num_in)


def quantized_checkpoint(
    directory: Path,
    name: str,
    config: dict[str, Any] = CONFIG,
    beside: Tensors | None = None,
    head: bool = False,
) -> dict[str, np.ndarray]:
    """Writes one, with a quantised head or without; returns the weights that its products stand
    for.
    """
    directory.mkdir(exist_ok=True)
    tensors, exact = random_tensors(config), {}
    modules = [key for key in tensors if key.endswith("_proj.weight")]
    modules += ["lm_head.weight"] * head
    quantization = FORMATS[name][0]
    if head:
        lists = {field: [] for field in ("ignore", "ignored_layers") if field in quantization}
        marked = {"lm_head": True} if quantization["quant_method"] in ("gptq", "awq") else {}
        quantization = {**quantization, **lists, **marked}
    for index, key in enumerate(modules):
        stored, weight = stored_at(index, name, *tensors.pop(key).shape)
        exact[key] = weight
        tensors |= {
            f"{key.removesuffix('weight')}{suffix}": array for suffix, array in stored.items()
        }
    (directory / "config.json").write_text(
        json.dumps({**config, "quantization_config": quantization})
    )
    write_tensors(directory, tensors | (beside or {}))
    return exact


# Which of them are divided in every run: one of each way to keep scales, zeros and codes.
DIVIDED = [
    ("W8A8", 2),
    ("W4A16 with zeros", 1),
    ("fp8 blocks", 2),
    ("awq", 2),
    ("gptq v2 of 8 bits", 1),
    ("nvfp4", 1),
]
FOUR_BITS = {
    "W4A16",
    "W4A16 with zeros",
    "mxfp4",
    "nvfp4",
    "nvfp4 of modelopt",
    "awq",
    "gptq",
    "gptq with zeros",
}


class Loaded:
    """Holds the modules of a checkpoint with their numbers."""

    def __init__(self, directory: Path, quantization: str | None = None, dtype: str = "float32"):
        self.files = open_model(directory, quantization)
        self.parameters = load_weights(self.files.plan, dtype, jnp.asarray)
        self.model = make_model(self.files.family, self.files.spec, dtype, self.files.rule)

    def multiply(self, x: np.ndarray, *path: str) -> np.ndarray:
        """Multiplies by the weight of a module of the second layer."""
        module, arrays = self.model.layers[1], self.parameters["layers"][1]
        for name in path:
            module, arrays = getattr(module, name), arrays[name]
        for name, value in arrays.items():
            getattr(module, name).set_value(value)
        with TraceScope(make_layer_kernels(Backend("auto"))).open():
            return np.asarray(matmul(jnp.asarray(x), module.weight))


@pytest.mark.parametrize(
    "name",
    few(  # those of other libraries, and gptq in other bits, store the same in other names
        FORMATS,
        [
            *("W8A8", "W4A16 with zeros", "fp8 by output", "fp8 blocks", "mxfp4", "nvfp4"),
            *("nvfp4 of modelopt", "awq", "gptq with zeros", "gptq v2 of 8 bits", "bitsandbytes"),
        ],
    ),
)
def test_a_checkpoint_stands_for_its_weights(name, tmp_path):
    """It is kept as it is stored, and its products are those with the weights that the format
    stands for.
    """
    exact = quantized_checkpoint(tmp_path, name)
    loaded = Loaded(tmp_path, dtype="bfloat16")
    layer = loaded.parameters["layers"][0]
    assert (
        layer["attention_norm"]["scale"].dtype == jnp.bfloat16
        and layer["mlp"]["down"]["scale"].dtype == jnp.float32
    )
    num_weights = sum(weight.size for weight in exact.values())
    others = sum(array.size for key, array in random_tensors(CONFIG).items() if key not in exact)
    bytes_of_weight = (loaded.files.plan.num_bytes("bfloat16") - 2 * others) / num_weights
    assert bytes_of_weight < (0.8 if name in FOUR_BITS else 1.4)
    tolerance = 0.02 if name == "W8A8" else 1e-5  # there inputs are rounded too
    attention, mlp = "model.layers.1.self_attn.", "model.layers.1.mlp."
    for path, names in {
        ("mlp", "down"): [f"{mlp}down_proj"],
        ("mlp", "gate_up"): [f"{mlp}gate_proj", f"{mlp}up_proj"],
        ("attention", "query_key_value"): [f"{attention}{part}_proj" for part in "qkv"],
    }.items():
        weight = np.concatenate([exact[f"{module}.weight"] for module in names])
        x = RNG.standard_normal((5, weight.shape[1])).astype(np.float32)
        expected = x @ weight.T
        np.testing.assert_allclose(
            loaded.multiply(x, *path), expected, atol=tolerance * np.abs(expected).max()
        )


WITH_HEAD = {**CONFIG, "vocab_size": 264}  # whole words of GPTQ's and AWQ's codes


@pytest.mark.parametrize(
    "name",
    few(FORMATS, ["W8A8", "W4A16 with zeros", "fp8 blocks", "nvfp4 of modelopt", "gptq"]),
)
def test_a_head_is_read_in_the_format_of_its_checkpoint(name, tmp_path):
    """Its logits are those with the weights that its codes stand for, in float64; the token table
    stays as it is.
    """
    weight = quantized_checkpoint(tmp_path, name, WITH_HEAD, head=True)["lm_head.weight"]
    assert_logits(Loaded(tmp_path), weight, 0.02 if name == "W8A8" else 1e-5)


def assert_logits(loaded: Loaded, weight: np.ndarray, tolerance: float = 1e-5) -> None:
    head = loaded.model.head
    assert "kernel" in loaded.parameters["head"] and "table" in loaded.parameters["tokens"]
    # A drafter can share the one, and not the other.
    assert find_shared_table("tokens", loaded.files) and not find_shared_table("head", loaded.files)
    nnx.update(head, _fill(head, loaded.parameters["head"]))
    x = RNG.standard_normal((5, weight.shape[1])).astype(np.float32)
    expected = x.astype(np.float64) @ weight.astype(np.float64).T
    with TraceScope(make_layer_kernels(Backend("auto"))).open():
        logits = np.asarray(head.logits(jnp.asarray(x)))
    assert logits.dtype == np.float32
    np.testing.assert_allclose(logits, expected, atol=tolerance * np.abs(expected).max())


def test_a_quantised_head_keeps_its_biases():
    """Phi has some, for example."""
    form = quantization_of({"quantization_config": FORMATS["gptq"][0]}, None).form_of("lm_head")
    whole = Embedding(16, 32, name="lm_head", bias="lm_head.bias", dtype="float32")
    assert QuantizedEmbedding(whole, form).bias is whole.bias is not None


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"quantization_config": {**FORMATS["gptq"][0], "modules_to_not_convert": ["lm_head"]}},
            r"'lm_head\.\w+' .* but quantization_config of config.json says that it is not",
        ),
        ({"tie_word_embeddings": True}, "use a checkpoint where lm_head is not quantised"),
    ],
)
def test_a_head_of_codes_that_config_json_contradicts_is_refused(change, text, tmp_path):
    quantized_checkpoint(tmp_path, "gptq", WITH_HEAD, head=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(CheckpointError, match=text):
        open_model(tmp_path)


def test_a_head_that_is_not_quantised_is_read_whatever_the_config_says(tmp_path):
    """Files of the library may leave it out of `ignore`, and GPTQModel's may say `lm_head:
    true`.
    """
    for name, change in {"W4A16": {"ignore": []}, "gptq": {"lm_head": True}}.items():
        quantized_checkpoint(tmp_path, name)
        stated = {**CONFIG, "quantization_config": FORMATS[name][0] | change}
        (tmp_path / "config.json").write_text(json.dumps(stated))
        assert "table" in Loaded(tmp_path).parameters["head"]


# two shards can have the groups of all formats
SHARED = {**CONFIG, "intermediate_size": 256, "num_hidden_layers": 1}


def numbers_of_shards(
    directory: Path, num_devices: int, quantization: str | None = None
) -> Callable[..., list[np.ndarray]]:
    """Loads a model in two shards, and returns a function that gives the weight of each, by the
    path of the layer.
    """
    files = open_model(directory, quantization)
    sharding = Sharding(2, num_devices, 2, invariant=True)
    rule = with_sharding(sharding, files.rule)
    _, shapes = abstract_model(files.family, files.spec, "float32", rule)
    weights = shard_weights([filled.weight for filled in files.plan.parameters], shapes, sharding)
    arrays = load_shards(
        files.plan,
        "float32",
        weights,
        np.array,
        lambda shape, dtype, make: [*map(make, range(num_devices))],
    )

    def numbers(*path: str | int) -> list[np.ndarray]:
        weights = []
        for device, index in np.ndindex(num_devices, sharding.num_local):
            module, branch = make_model(files.family, files.spec, "float32", rule), arrays
            for key in (*path[:-1], "shards", index, *path[-1:]):
                module, branch = (
                    module[key] if isinstance(key, int) else getattr(module, key),
                    branch[key],
                )
            for name, value in branch.items():
                part = value[device] if isinstance(value, list) else value
                getattr(module, name).set_value(jnp.asarray(part))
            with TraceScope(make_layer_kernels(Backend("reference"))).open():
                weights.append(np.asarray(weight_numbers(module.weight)))
        return weights

    return numbers


def assert_parts(numbers: Callable[..., list[np.ndarray]], exact: dict[str, np.ndarray]) -> None:
    """Checks that two shards have halves of these weights: by output, those of several modules one
    below the other, or by input.
    """
    attention, mlp = "model.layers.0.self_attn", "model.layers.0.mlp"
    for path, modules in {
        ("attention", "query_key_value"): [f"{attention}.{part}_proj.weight" for part in "qkv"],
        ("mlp", "gate_up"): [f"{mlp}.{part}_proj.weight" for part in ("gate", "up")],
    }.items():
        for index, weight in enumerate(numbers("layers", 0, *path)):
            expected = np.concatenate([np.split(exact[name], 2)[index] for name in modules])
            np.testing.assert_allclose(weight, expected, rtol=1e-6, atol=1e-9)
    for path, name in {
        ("attention", "output"): f"{attention}.o_proj.weight",
        ("mlp", "down"): f"{mlp}.down_proj.weight",
    }.items():
        for index, weight in enumerate(numbers("layers", 0, *path)):
            np.testing.assert_allclose(
                weight, np.split(exact[name], 2, axis=1)[index], rtol=1e-6, atol=1e-9
            )


@pytest.mark.parametrize(
    ("name", "num_devices"), few([(name, n) for name in FORMATS for n in (1, 2)], DIVIDED)
)
def test_a_shard_has_its_part_of_a_quantised_weight(name, num_devices, tmp_path):
    """Parts have codes, scales and zeros, of outputs and of inputs, on one device or on two."""
    exact = quantized_checkpoint(tmp_path, name, SHARED)
    assert_parts(numbers_of_shards(tmp_path, num_devices), exact)


def test_a_scale_that_is_not_divided_as_its_codes_is_seen(tmp_path, monkeypatch):
    """The test above would say nothing of this planted mistake if it saw the codes alone."""
    exact, real = quantized_checkpoint(tmp_path, "W4A16", SHARED), ShardedWeight.boxes

    def boxes(self: ShardedWeight, place: Place, device: int) -> Any:
        return real(self, replace(place, index=0) if place.path[-1] == "scale" else place, device)

    monkeypatch.setattr(ShardedWeight, "boxes", boxes)
    with pytest.raises(AssertionError):
        assert_parts(numbers_of_shards(tmp_path, 1), exact)


def test_a_group_that_two_shards_would_share_is_refused_with_the_numbers(tmp_path):
    config = {
        **SHARED,
        "intermediate_size": 192,
    }  # in groups of 128: 96 inputs of a shard would have one and the half of another
    quantized_checkpoint(tmp_path, "fp8 blocks", config)
    with pytest.raises(
        ConfigError, match="mlp.down_proj has 192 inputs.*each 128 share.*2 parts of 96"
    ):
        numbers_of_shards(tmp_path, 1)


def round_weight(weight: np.ndarray, bits: int) -> np.ndarray:
    """Returns the nearest multiples of a scale, which is that of an output or of 32 inputs."""
    rounded = np.empty_like(weight)
    size = weight.shape[1] if bits == 8 else 32
    for o in range(weight.shape[0]):
        for start in range(0, weight.shape[1], size):
            group = weight[o, start : start + size]
            largest = group[np.abs(group).argmax()]
            scale = abs(largest) / 127 if bits == 8 else largest / -8
            codes = np.clip(np.rint(group / scale), -(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
            rounded[o, start : start + size] = codes * scale
    assert np.abs(rounded - weight).max() > 0, "else this shows nothing"
    return rounded


@pytest.mark.parametrize(("name", "bits"), [("int8", 8), ("int4", 4)])
def test_a_checkpoint_is_rounded_at_load(name, bits, tmp_path):
    loaded = Loaded(random_checkpoint(tmp_path, CONFIG), name)
    rounded = round_weight(random_tensors(CONFIG)["model.layers.1.mlp.down_proj.weight"], bits)
    x = RNG.standard_normal((4, 192)).astype(np.float32)
    result = loaded.multiply(x, "mlp", "down")
    np.testing.assert_allclose(
        result, x @ rounded.T, atol=(0.02 if bits == 8 else 1e-5) * np.abs(result).max()
    )


@pytest.mark.parametrize("name", ["int8+head", "int4+head"])
def test_a_head_is_rounded_to_eight_bits_where_the_setting_says_so(name, tmp_path):
    """A token table that is not tied to it stays as it is."""
    loaded = Loaded(random_checkpoint(tmp_path, CONFIG), name)
    assert_logits(loaded, round_weight(random_tensors(CONFIG)["lm_head.weight"], 8), 0.02)


@pytest.mark.parametrize("stored", ["model.embed_tokens", "lm_head"])
def test_a_tied_head_is_rounded_with_its_table(stored, tmp_path):
    """Rows of tokens and logits are those of the rounded table, by whichever name a file has it."""
    config = {**CONFIG, "tie_word_embeddings": True}
    tensors = random_tensors(config)
    table = tensors.pop("model.embed_tokens.weight")
    random_checkpoint(tmp_path, config)
    write_tensors(tmp_path, {**tensors, f"{stored}.weight": table})
    loaded = Loaded(tmp_path, "int4+head")
    tokens = loaded.model.tokens
    nnx.update(tokens, _fill(tokens, loaded.parameters["tokens"]))
    rounded = round_weight(table, 8)
    x = RNG.standard_normal((5, table.shape[1])).astype(np.float32)
    expected = x.astype(np.float64) @ rounded.astype(np.float64).T
    with TraceScope(make_layer_kernels(Backend("auto"))).open():
        rows, logits = tokens(jnp.array([3, 0, 7])), tokens.logits(jnp.asarray(x))
    np.testing.assert_allclose(rows, rounded[[3, 0, 7]], atol=1e-6)
    np.testing.assert_allclose(logits, expected, atol=0.02 * np.abs(expected).max())
    assert loaded.model.head is None and "table" not in loaded.parameters["tokens"]


def test_products_in_eight_bits_are_exact_sums():
    """Inputs are rounded by themselves, in integers; one row, many rows and any order give the same
    bits.
    """
    x = RNG.standard_normal((40, 96)).astype(np.float32)
    x[3] = 0
    weight = Scaled(
        jnp.asarray(RNG.integers(-127, 128, (24, 96)), jnp.int8),
        jnp.asarray(RNG.random(24), jnp.float32),
    )
    together = np.asarray(jax.jit(matmul)(jnp.asarray(x), weight))
    scale = np.maximum(np.abs(x).max(1, keepdims=True) * np.float32(1 / 127), np.float32(2.0**-100))
    sums = np.rint(x / scale).astype(np.int64) @ np.asarray(weight.values_OI).astype(np.int64).T
    np.testing.assert_array_equal(
        together, sums.astype(np.float32) * scale * np.asarray(weight.scale_O)
    )
    for count in (1, 2, 7):
        np.testing.assert_array_equal(
            np.asarray(jax.jit(matmul)(jnp.asarray(x[:count]), weight)), together[:count]
        )


@pytest.mark.parametrize(
    ("quantization", "dtype"),
    few(
        itertools.product(["int8", "int4", "int8+head"], ["float32", "bfloat16"]),
        [("int8+head", "bfloat16")],
    ),
)
def test_an_engine_gives_the_same_bits_however_it_is_run(quantization, dtype, tmp_path):
    config = {**CONFIG, "tie_word_embeddings": "head" in quantization}
    settings = {"quantization": quantization, "dtype": dtype}
    model = random_checkpoint(tmp_path, config)
    plain = texts(model, **settings)
    assert texts(model, **settings, **SMALL_POOL, preemption_mode="swap") == plain


@pytest.mark.sweep  # logits of such a model: tests/test_gguf.py
def test_an_engine_of_kept_gguf_gives_the_same_bits_however_it_is_run(tmp_path):
    """Products have parts of several types, with minima and without, and a table is in
    eight bits.
    """
    kinds = {"embed": "Q8_0", "v_proj": "Q8_0", "down_proj": "Q4_0"}
    model = write_gguf(
        tmp_path / "model.gguf",
        {**CONFIG, "rms_norm_eps": 1e-6},
        random_tensors(CONFIG),
        "Q4_1",
        kinds=kinds,
    )
    plain = texts(model, quantization="gguf")
    assert texts(model, quantization="gguf", **SMALL_POOL) == plain


def test_a_quantised_checkpoint_goes_through_every_door(tmp_path):
    """It has a quantised head, goes into Orbax and back, and is a draft model and its target."""
    quantized_checkpoint(tmp_path / "awq", "awq", WITH_HEAD, head=True)
    plain = texts(tmp_path / "awq")
    convert(tmp_path / "awq", tmp_path / "orbax", progress=False)
    assert texts(tmp_path / "orbax") == plain
    convert(tmp_path / "orbax", tmp_path / "back", progress=False)
    stored, back = (load_file(tmp_path / name / "model.safetensors") for name in ("awq", "back"))
    assert stored.keys() == back.keys()
    assert all(np.array_equal(tensor, back[name]) for name, tensor in stored.items())
    drafting = {
        "method": "draft_model",
        "model": str(tmp_path / "awq"),
        "num_speculative_tokens": 3,
    }
    assert [tokens for tokens, _ in texts(tmp_path / "awq", speculative_config=drafting)] == [
        tokens for tokens, _ in plain
    ]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown method": (
        {"quant_method": "hqq", "nbits": 4},
        "'hqq' is not one of compressed-tensors, fp8",
    ),
    "four bits of bitsandbytes": (
        {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": True},
        "quantization_config.load_in_4bit = True is not supported",
    ),
    "no bits of bitsandbytes": (
        {"quant_method": "bitsandbytes"},
        "quantization_config.load_in_8bit = None is not supported, only true",
    ),
    "no object": (["fp8"], "quantization_config must be an object"),  # type: ignore[dict-item]
    "activations in order": (
        {**FORMATS["gptq"][0], "desc_act": True},
        "use a GPTQ or AWQ checkpoint without it, or the unquantised checkpoint with "
        "quantization='int8' or 'int4'",
    ),
    "three bits": (
        {"quant_method": "gptq", "bits": 3, "group_size": 32},
        "quantization_config.bits = 3 is not one of 4, 8",
    ),
    "a version of AWQ": (
        {**FORMATS["awq"][0], "version": "gemv"},
        "version = 'gemv' is not one of 'gemm'",
    ),
    "another format": (
        _compressed("marlin-24", INT4_WEIGHTS),
        "format = 'marlin-24' is not one of",
    ),
    "eight bits of ModelOpt": (
        {"quant_method": "modelopt", "quant_algo": "W8A8_SQ_PER_CHANNEL"},
        "quantization_config.quant_algo = 'W8A8_SQ_PER_CHANNEL' is not one of 'FP8', 'NVFP4'",
    ),
    "static inputs": (
        _compressed("int-quantized", INT8_WEIGHTS, {**INT8_INPUTS, "dynamic": False}),
        "'dynamic': False, 'symmetric': True} is not supported: inputs can be int8 for",
    ),
    "a cache in int8": (
        {**FORMATS["W4A16"][0], "kv_cache_scheme": {"num_bits": 8, "type": "int"}},
        "kv_cache_scheme = {'num_bits': 8, 'type': 'int'} is not supported, only FP8",
    ),
    "a cache in four bits": (
        {**FORMATS["nvfp4 of modelopt"][0], "kv_cache_quant_algo": "NVFP4"},
        "kv_cache_quant_algo = 'NVFP4' is not supported, only FP8",
    ),
    "groups without a size": (
        _compressed("pack-quantized", {**INT4_WEIGHTS, "group_size": None}),
        "group_size = None",
    ),
    "a list that is a name": (
        {**FORMATS["awq"][0], "modules_to_not_convert": "lm_head"},
        "must be a list of names",
    ),
    "sparse weights": (
        {**FORMATS["W4A16"][0], "sparsity_config": {"format": "sparse-24-bitmask"}},
        "sparsity_config = {'format': 'sparse-24-bitmask'} is not supported",
    ),
    "modules quantised in another way": (
        {**FORMATS["gptq"][0], "dynamic": {"-:.*gate$": {}, "+:.*down_proj": {"bits": 8}}},
        "is supported for modules that are not quantised (-:) alone",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_honoured_is_refused_by_name(case, tmp_path):
    quantization, text = REFUSED[case]
    random_checkpoint(tmp_path, CONFIG)
    (tmp_path / "config.json").write_text(
        json.dumps({**CONFIG, "quantization_config": quantization})
    )
    with pytest.raises(JaxpageError) as caught:
        open_model(tmp_path)
    assert text in str(caught.value)


LEFT_OUT: dict[str, dict[str, Any]] = {
    "awq": {"modules_to_not_convert": ["v_proj"]},
    "W4A16": {
        "ignore": ["re:.*v_proj", "lm_head"],
        "sparsity_config": {"format": "dense", "global_sparsity": 0.1},
    },
    "gptq": {"dynamic": {"-:.*v_proj$": {}, "-:.*mlp.gate$": {}}, "desc_act": False},
    "W8A8": {"ignore": ["re:.*v_proj", "lm_head"]},
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_a_part_of_a_product_may_be_left_as_it_was(name, tmp_path):
    """Queries and keys are quantised, and values are not."""
    exact = quantized_checkpoint(tmp_path, name)
    tensors = {
        key: array
        for key, array in load_file(tmp_path / "model.safetensors").items()
        if "v_proj" not in key
    }
    plain = {key: array for key, array in random_tensors(CONFIG).items() if "v_proj" in key}
    write_tensors(tmp_path, tensors | plain)
    stated = {**CONFIG, "quantization_config": FORMATS[name][0] | LEFT_OUT[name]}
    (tmp_path / "config.json").write_text(json.dumps(stated))
    loaded = Loaded(tmp_path)
    module, arrays = (
        loaded.model.layers[1].attention.query_key_value,
        loaded.parameters["layers"][1]["attention"]["query_key_value"],
    )
    nnx.update(module, _fill(module, arrays))
    weights = exact | plain
    weight = np.concatenate(
        [weights[f"model.layers.1.self_attn.{part}_proj.weight"] for part in "qkv"]
    )
    x = RNG.standard_normal((5, weight.shape[1])).astype(np.float32)
    with TraceScope(make_layer_kernels(Backend("auto"))).open():
        result = np.asarray(module(jnp.asarray(x)))
    np.testing.assert_allclose(
        result, x @ weight.T, atol=(0.02 if name == "W8A8" else 1e-5) * np.abs(result).max()
    )


def _fill(module: nnx.Module, arrays: Any) -> nnx.State:
    state = nnx.state(module)
    nnx.replace_by_pure_dict(state, arrays)
    return state


@pytest.mark.parametrize(
    ("bias", "text"), [(0.0, None), (0.5, "is unexpected: the layer has no bias")]
)
def test_zeros_for_biases_that_the_layers_do_not_have_are_nothing(bias, text, tmp_path):
    """Old AutoGPTQ wrote them for every quantised layer."""
    quantized_checkpoint(tmp_path, "gptq")
    tensors = dict(load_file(tmp_path / "model.safetensors"))
    more = {
        key.replace("scales", "bias"): array[0] * 0
        for key, array in tensors.items()
        if key.endswith(".scales")
    }
    more["model.layers.1.mlp.down_proj.bias"] += np.float16(bias)
    write_tensors(tmp_path, tensors | more)
    if text is None:
        open_model(tmp_path)
        return
    with pytest.raises(CheckpointError, match=text) as caught:
        open_model(tmp_path)
    assert "(1 problem)" in str(caught.value) and "layers.1.mlp.down_proj.bias" in str(caught.value)


def test_symmetric_gptq_may_have_the_middle_itself_as_its_zeros(tmp_path):
    """Nobody reads them: writers of the first form that take no one from each code have 8 where 7
    is meant.
    """
    exact = quantized_checkpoint(tmp_path, "gptq")
    tensors = dict(load_file(tmp_path / "model.safetensors"))
    write_tensors(
        tmp_path,
        {
            key: array + 0x11111111 if key.endswith("qzeros") else array
            for key, array in tensors.items()
        },
    )
    weight, x = (
        exact["model.layers.1.mlp.down_proj.weight"],
        RNG.standard_normal((3, 192)).astype(np.float32),
    )
    np.testing.assert_allclose(Loaded(tmp_path).multiply(x, "mlp", "down"), x @ weight.T, atol=1e-4)


def test_all_wrong_fields_of_a_quantisation_are_reported_at_once(tmp_path):
    weights = {
        "num_bits": 3,
        "type": "int",
        "strategy": "row",
        "symmetric": "yes",
        "actorder": "group",
    }
    groups = {
        "a": {"targets": ["re:("], "weights": weights, "input_activations": 8},
        "b": {"weights": INT8_WEIGHTS},
    }
    stated = {
        "config_groups": groups,
        "ignore": "lm_head",
        "format": "marlin-24",
        "kv_cache_scheme": {"num_bits": 4},
    }
    (random_checkpoint(tmp_path, CONFIG) / "config.json").write_text(
        json.dumps(
            {**CONFIG, "quantization_config": {"quant_method": "compressed-tensors", **stated}}
        )
    )
    with pytest.raises(CheckpointError) as caught:
        open_model(tmp_path)
    for field in (
        *(
            "config_groups.a.targets",
            "config_groups.a.input_activations",
            "ignore",
            "format",
            "kv_cache_scheme",
        ),
        *(
            f"config_groups.a.weights.{name}"
            for name in ("num_bits", "strategy", "symmetric", "actorder")
        ),
    ):
        assert str(caught.value).count(f"  - config.json: quantization_config.{field} = ") == 1, (
            str(caught.value)
        )
    assert "(9 problems)" in str(caught.value)


@pytest.mark.parametrize("swapped", [False, True])
def test_the_most_specific_target_decides_as_in_the_library(swapped):
    library = pytest.importorskip("compressed_tensors.quantization")
    transformers = pytest.importorskip("transformers")
    up = "model.layers.1.mlp.up_proj"
    targets = {"a": "re:.*mlp.*", "b": "Linear", "c": up, "d": "re:.*down_proj"}
    groups = {
        name: {
            "targets": [target],
            "weights": INT8_WEIGHTS,
            "input_activations": INT8_INPUTS if name in "bc" else None,
        }
        for name, target in sorted(targets.items(), reverse=swapped)
    }
    stated = {**FORMATS["W8A8"][0], "config_groups": groups}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG))
    library.apply_quantization_config(
        model, library.QuantizationConfig.model_validate(copy.deepcopy(stated))
    )
    expected = {
        name: module.quantization_scheme.input_activations is not None
        for name, module in model.named_modules()
        if hasattr(module, "quantization_scheme")
    }
    scheme = quantization_of({"quantization_config": stated}, None)
    assert scheme and {name: scheme.form_of(name).int8_inputs for name in expected} == expected  # type: ignore[union-attr]
    # four of each layer's attention, and `up`
    assert sum(expected.values()) == 9 and len(expected) == 14


def _places(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, inner in value.items() if isinstance(value, dict) else ():
        yield (*path, key)
        yield from _places(inner, (*path, key))


@pytest.mark.parametrize("name", ["W8A8", "fp8 blocks", "awq", "gptq", "nvfp4 of modelopt"])
def test_no_value_of_a_field_is_a_crash(name):
    """Whatever a field is, the scheme is read or refused as users see it."""
    for *parents, last in _places(FORMATS[name][0]):
        for value in (None, True, -1, 1.5, "re:(", [], [None], ["a"], {"a": 1}, {"a": {}}):
            stated = copy.deepcopy(FORMATS[name][0])
            functools.reduce(operator.getitem, parents, stated)[last] = value
            problems = Problems(Path("somewhere"))
            with problems.collect():
                quantization_of({"quantization_config": stated}, None)


def test_a_checkpoint_that_asks_for_a_kv_cache_in_fp8_has_it(tmp_path):
    """It has a scale for each token and head, whatever those of the checkpoint are; the setting can
    say something else.
    """
    beside = {
        f"model.layers.{layer}.self_attn.{scale}": np.float32([0.25])
        for layer in (0, 1)
        for scale in ("k_scale", "v_scale")
    }
    quantized_checkpoint(tmp_path, "W8A16", beside=beside)
    requested = texts(tmp_path, kv_cache_dtype="fp8")
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    stated = {**FORMATS["W8A16"][0], "kv_cache_scheme": scheme}
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": stated}))
    assert texts(tmp_path) == requested
    with make_llm(tmp_path, kv_cache_dtype="int8") as llm:
        assert {str(layer.k_pages.dtype) for layer in llm._engine.runner._pages} == {"int8"}


def test_modelopt_s_own_file_is_read(tmp_path):
    """Older versions of ModelOpt leave config.json as it was."""
    quantized_checkpoint(tmp_path, "nvfp4 of modelopt")
    stated = read_config(tmp_path)["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    written = {
        "producer": {"name": "modelopt"},
        "quantization": {"quant_algo": "NVFP4", "ignore": stated["ignore"]},
    }
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(written))
    assert read_config(tmp_path)["quantization_config"] == stated
    (tmp_path / "hf_quant_config.json").write_text("{}")
    with pytest.raises(
        CheckpointError, match="hf_quant_config.json: quantization must be an object"
    ):
        read_config(tmp_path)


# The algorithm of each kind of module; one that is not listed is not quantised.
MIXED = {
    **{f"self_attn.{part}_proj": "FP8" for part in "qk"},
    **{"self_attn.o_proj": "W4A16_NVFP4", "mlp": "NVFP4", "mlp.down_proj": "UNQUANTIZED"},
}
MIXED_LAYERS = {
    f"model.layers.{layer}.{module}": {"quant_algo": algorithm}
    | ({"group_size": 16} if algorithm.endswith("NVFP4") else {})
    for layer in range(CONFIG["num_hidden_layers"])
    for module, algorithm in MIXED.items()
}
MTP_LAYERS = {"mtp.layers.0.mlp.experts": {"quant_algo": "FP8_PB_WO", "group_size": 128}}
MAKERS = {
    "FP8": "fp8 of modelopt",
    "NVFP4": "nvfp4 of modelopt",
    "W4A16_NVFP4": "nvfp4 of modelopt",
}


def mixed_checkpoint(directory: Path, head: str | None = None) -> dict[str, np.ndarray]:
    """Writes the tensors of a model with `MIXED_LAYERS`; returns the weights that they stand for.

    `head` is the algorithm of lm_head, if it is quantised.
    """
    tensors = random_tensors(CONFIG)
    of_head = {}
    if head is not None:
        stored, weight = stored_at(0, MAKERS[head], *tensors.pop("lm_head.weight").shape)
        tensors |= {f"lm_head.{end}": array for end, array in stored.items()}
        of_head = {"lm_head.weight": weight}
    exact = {key: array for key, array in tensors.items() if key.endswith("_proj.weight")}
    for index, key in enumerate(exact):
        module = key.split(".", 3)[3].removesuffix(".weight")
        algorithm = MIXED.get(module, MIXED.get(module.partition(".")[0]))
        if algorithm in MAKERS:
            stored, exact[key] = stored_at(index, MAKERS[algorithm], *tensors.pop(key).shape)
            tensors |= {
                f"{key.removesuffix('weight')}{end}": array for end, array in stored.items()
            }
    write_tensors(directory, tensors)
    return exact | of_head


# `quantization_config` of config.json, and `quantization` of hf_quant_config.json, or None.
NVFP4_WEIGHTS = {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False}
FP8_WEIGHTS = {"num_bits": 8, "type": "float", "dynamic": False}
STATED: dict[str, tuple[Any, Any]] = {
    "in config.json": (
        {
            **{"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "ignore": ["lm_head"]},
            "quantized_layers": MIXED_LAYERS | MTP_LAYERS,
        },
        None,
    ),
    "in a file of its own": (
        None,
        {"quant_algo": "MIXED_PRECISION", "quantized_layers": MIXED_LAYERS, "group_size": 16},
    ),
    "in both, without a method": (
        {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": None, "ignore": ["lm_head"]},
        {
            **{"quant_algo": "MIXED_PRECISION", "exclude_modules": ["lm_head", "mtp*"]},
            "quantized_layers": MIXED_LAYERS | MTP_LAYERS,
        },
    ),
    "in config.json alone, without a method": (
        {"quant_algo": "MIXED_PRECISION", "quantized_layers": MIXED_LAYERS},
        None,
    ),
    "in groups": (
        {
            **{"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"},
            "config_groups": {
                f"group_{index}": {
                    "weights": weights,
                    "targets": [
                        name
                        for name, entry in MIXED_LAYERS.items()
                        if entry["quant_algo"].endswith(algorithm) and not name.endswith("mlp")
                    ]
                    + [
                        f"{name}.{part}_proj"
                        for name in MIXED_LAYERS
                        for part in ("gate", "up")
                        if algorithm == "NVFP4" and name.endswith("mlp")
                    ],
                }
                for index, (algorithm, weights) in enumerate(
                    {"FP8": FP8_WEIGHTS, "NVFP4": NVFP4_WEIGHTS}.items()
                )
            },
        },
        None,
    ),
}


def write_stated(directory: Path, stated: Any, own_file: Any) -> None:
    """Writes config.json, and the file of ModelOpt where there is one."""
    config = CONFIG if stated is None else {**CONFIG, "quantization_config": stated}
    (directory / "config.json").write_text(json.dumps(config))
    if own_file is not None:
        written = {"producer": {"name": "modelopt"}, "quantization": own_file}
        (directory / "hf_quant_config.json").write_text(json.dumps(written))


@pytest.mark.parametrize("place", STATED)
def test_modules_of_modelopt_may_have_different_algorithms(place, tmp_path):
    exact = mixed_checkpoint(tmp_path)
    write_stated(tmp_path, *STATED[place])
    loaded = Loaded(tmp_path)
    model = loaded.model.layers[1]
    arrays = loaded.parameters["layers"][1]
    for path, modules in {
        ("mlp", "down"): ["mlp.down_proj"],
        ("mlp", "gate_up"): ["mlp.gate_proj", "mlp.up_proj"],
        ("attention", "output"): ["self_attn.o_proj"],
        ("attention", "query_key_value"): [f"self_attn.{part}_proj" for part in "qkv"],
    }.items():
        weight = np.concatenate([exact[f"model.layers.1.{name}.weight"] for name in modules])
        x = RNG.standard_normal((5, weight.shape[1])).astype(np.float32)
        module = getattr(getattr(model, path[0]), path[1])
        nnx.update(module, _fill(module, arrays[path[0]][path[1]]))
        with TraceScope(make_layer_kernels(Backend("auto"))).open():
            result = np.asarray(module(jnp.asarray(x)))
        np.testing.assert_allclose(result, x @ weight.T, atol=1e-5 * np.abs(result).max())


@pytest.mark.parametrize("algorithm", MAKERS)
def test_a_head_of_modelopt_may_have_an_algorithm_of_its_own(algorithm, tmp_path):
    exact = mixed_checkpoint(tmp_path, algorithm)
    layers = MIXED_LAYERS | {"lm_head": {"quant_algo": algorithm}}
    stated = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
    write_stated(tmp_path, {**stated, "quantized_layers": layers}, None)
    assert_logits(Loaded(tmp_path), exact["lm_head.weight"])


FP8_OF_32B = {"kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}


@pytest.mark.parametrize(
    ("stated", "own_file"),
    [
        ({"activation_scheme": "static"}, {"quant_algo": "FP8", **FP8_OF_32B}),
        ({"quant_algo": "FP8"}, {"quant_algo": "FP8", **FP8_OF_32B}),
        ({"quant_algo": "FP8", "kv_cache_quant_algo": None}, FP8_OF_32B),
        ({"quant_method": "modelopt"}, {"quant_algo": "FP8", **FP8_OF_32B}),
        ({"quant_algo": "FP8", **FP8_OF_32B}, None),
    ],
)
def test_two_files_of_modelopt_complete_each_other(stated, own_file, tmp_path):
    scales = {
        f"model.layers.{layer}.self_attn.{part}_proj.{part}_scale": np.float32([0.25])
        for layer in (0, 1)
        for part in "kv"
    }
    quantized_checkpoint(tmp_path, "fp8 of modelopt", beside=scales)
    write_stated(tmp_path, stated, own_file)
    scheme = open_model(tmp_path).quantization
    assert scheme is not None and scheme.name == "modelopt" and scheme.kv_cache_dtype == "fp8"
    form = scheme.form_of("model.layers.0.mlp.down_proj")
    assert form is not None and form.code == "fp8" and scheme.form_of("lm_head") is None


_IN_GROUPS = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}


@pytest.mark.parametrize(
    ("stated", "own_file", "text"),
    [
        (
            {"quant_algo": "FP8"},
            {"quant_algo": "NVFP4"},
            "quantization_config.quant_algo is 'FP8', and in hf_quant_config.json 'NVFP4'",
        ),
        (
            {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"},
            {"kv_cache_quant_algo": "NVFP4"},
            "kv_cache_quant_algo is 'FP8', and in hf_quant_config.json 'NVFP4'",
        ),
        (_IN_GROUPS, None, "quantized_layers = None must name modules"),
        ({**_IN_GROUPS, "quantized_layers": ["a"]}, None, "quantized_layers = ['a'] must be an"),
        (
            {**_IN_GROUPS, "quantized_layers": {"model.layers.0.mlp.up_proj": "FP8"}},
            None,
            "quantized_layers.model.layers.0.mlp.up_proj = 'FP8' must be an object",
        ),
        (
            {**_IN_GROUPS, "quantized_layers": {"model.layers.0.mlp": {"quant_algo": "FP8_PB_WO"}}},
            None,
            "FP8_PB_WO of model.layers.0.mlp in quantization_config.quantized_layers is not one of",
        ),
        (
            {
                **_IN_GROUPS,
                "quantized_layers": {"model": {"quant_algo": "NVFP4", "group_size": 32}},
            },
            None,
            "quantized_layers.model.group_size = 32 is not supported, only 16",
        ),
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32},
            None,
            "quantization_config.group_size = 32 is not supported, only 16",
        ),
        (
            {**_IN_GROUPS, "config_groups": {"g": {"targets": ["x"], "weights": {"num_bits": 6}}}},
            None,
            "config_groups.g.weights.num_bits = 6 is not one of 8, 4",
        ),
    ],
)
def test_what_files_of_modelopt_may_not_say(stated, own_file, text, tmp_path):
    random_checkpoint(tmp_path, CONFIG)
    write_stated(tmp_path, stated, own_file)
    with pytest.raises(JaxpageError) as caught:
        open_model(tmp_path)
    assert text in str(caught.value)


def test_a_file_of_modelopt_next_to_another_method_is_not_read(tmp_path):
    quantized_checkpoint(tmp_path, "awq")
    write_stated(tmp_path, FORMATS["awq"][0], {"quant_algo": "NVFP4"})
    assert read_config(tmp_path)["quantization_config"] == FORMATS["awq"][0]


def test_damaged_scales_and_missing_tensors_are_reported_together(tmp_path):
    quantized_checkpoint(tmp_path, "awq")
    tensors = dict(load_file(tmp_path / "model.safetensors"))
    for name, numbers in (("mlp.down_proj", [np.nan]), ("mlp.up_proj", [0.0, np.inf, -0.0])):
        tensors[f"model.layers.0.{name}.scales"].flat[: len(numbers)] = numbers
    del tensors["model.layers.1.mlp.gate_proj.qzeros"]
    name = "model.layers.1.self_attn.o_proj.qweight"
    tensors[name] = tensors[name].astype(np.float32)
    write_tensors(tmp_path, tensors)
    with pytest.raises(CheckpointError) as caught:
        open_model(tmp_path)
    text = str(caught.value)
    for message in (
        "(4 problems)",
        "'model.layers.0.mlp.down_proj.scales' has 1 scales that are not finite",
        "'model.layers.0.mlp.up_proj.scales' has 1 scales that are not finite and 2 scales that "
        "are zero",
        "'model.layers.1.mlp.gate_proj.qzeros' of shape (2, 24) is missing",
        "'model.layers.1.self_attn.o_proj.qweight' has dtype F32, not I32",
    ):
        assert message in text, text


@pytest.mark.parametrize(
    ("name", "tensor", "change", "text"),
    [
        (
            "gptq",
            "g_idx",
            lambda _: np.arange(64, dtype=np.int32)[::-1] // 32,
            "order of activations, not 32 in a row",
        ),
        (
            "W4A16",
            "weight_g_idx",
            lambda _: np.arange(64, dtype=np.int32) % 2,
            "order of activations, not 32 in a row",
        ),
        (
            "gptq",
            "qzeros",
            lambda words: words + 1,
            "zeros that are not 7, but quantization_config.sym",
        ),
        ("gptq", "qzeros", lambda words: words.astype(np.float32), "has dtype F32, not I32"),
        ("bitsandbytes", "weight_format", lambda order: np.full_like(order, 2), "not in rows"),
    ],
)
def test_tensors_that_are_not_used_must_say_what_is_known(name, tensor, change, text, tmp_path):
    quantized_checkpoint(tmp_path, name)
    tensors, key = (
        dict(load_file(tmp_path / "model.safetensors")),
        f"model.layers.1.self_attn.q_proj.{tensor}",
    )
    write_tensors(tmp_path, tensors | {key: change(tensors.get(key))})
    with pytest.raises(CheckpointError) as caught:
        open_model(tmp_path)
    assert "(1 problem)" in str(caught.value) and f"'{key}' has" in str(caught.value), str(
        caught.value
    )
    assert text in str(caught.value) and "(such tensors: 1)" in str(caught.value)


def test_of_several_tensors_that_are_not_used_the_first_is_named(tmp_path):
    quantized_checkpoint(tmp_path, "gptq")
    tensors = dict(load_file(tmp_path / "model.safetensors"))
    first, second = (f"model.layers.{layer}.self_attn.q_proj.qzeros" for layer in (0, 1))
    changed = {first: tensors[first] + 1, second: tensors[second].astype(np.float32)}
    write_tensors(tmp_path, tensors | changed)
    with pytest.raises(CheckpointError) as caught:
        open_model(tmp_path)
    text = str(caught.value)
    assert f"'{first}' has zeros that are not 7" in text and "(such tensors: 2)" in text, text
    assert "(1 problem)" in text and second not in text


@pytest.mark.parametrize("name", ["awq", "fp8 by output", "nvfp4 of modelopt"])
def test_quantised_weights_without_their_config_are_one_sentence(name, tmp_path):
    quantized_checkpoint(tmp_path, name)
    tensors = {
        key: np.array(map_array(info))
        for key, info in read_tensors(tmp_path, Problems(tmp_path)).items()
    }
    tensors["model.norm.weight"] = np.ones(3, np.float32)
    write_tensors(tmp_path, tensors)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    for quantization in (None, "int8"):
        with pytest.raises(CheckpointError) as caught:
            open_model(tmp_path, quantization)
        text = str(caught.value)
        assert "(2 problems)" in text and "tensor 'model.norm.weight' has shape (3,)" in text
        assert (
            "quantised weights (such modules: 14), but config.json has no quantization_config"
            in text
        )


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"ignore": []},
            "'model.embed_tokens.weight' has dtype I8, which is of quantised weights (such "
            "modules: 1), but only those of linear "
            "layers, experts and an untied head are supported: use a checkpoint where "
            "model.embed_tokens is not quantised",
        ),
        (
            {"config_groups": {}},
            "(such modules: 14), but quantization_config of config.json says that it is not",
        ),
    ],
)
def test_quantised_weights_of_other_modules_are_one_sentence(change, text, tmp_path):
    quantized_checkpoint(tmp_path, "W8A8")
    (tmp_path / "config.json").write_text(
        json.dumps({**CONFIG, "quantization_config": FORMATS["W8A8"][0] | change})
    )
    if "ignore" in change:
        tensors = dict(load_file(tmp_path / "model.safetensors"))
        for module in ("lm_head", "model.embed_tokens"):
            coded, _ = FORMATS["W8A8"][1](*tensors[f"{module}.weight"].shape)
            tensors |= {f"{module}.{name}": array for name, array in coded.items()}
        write_tensors(tmp_path, tensors)
    with pytest.raises(CheckpointError) as caught:
        open_model(tmp_path)
    assert "(1 problem)" in str(caught.value) and text in str(caught.value), str(caught.value)


@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        (
            "fp8 blocks",
            {"weight_block_size": None},
            "has shape (1, 1), and the model needs (), as in 14 of 14 quantised",
        ),
        (
            "gptq",
            {"group_size": 64},
            "change bits or group_size in quantization_config of config.json",
        ),
        ("awq", {"group_size": 32}, "change group_size in quantization_config of config.json"),
    ],
)
def test_sizes_that_are_not_the_checkpoint_s_are_one_sentence(name, change, text, tmp_path):
    quantized_checkpoint(tmp_path, name)
    (tmp_path / "config.json").write_text(
        json.dumps({**CONFIG, "quantization_config": FORMATS[name][0] | change})
    )
    with pytest.raises(CheckpointError) as caught:
        open_model(tmp_path)
    assert "(1 problem)" in str(caught.value) and text in str(caught.value), str(caught.value)


@pytest.mark.parametrize("name", ["awq", "fp8 by output"])
def test_weights_that_are_not_quantised_as_their_config_says_are_one_sentence(name, tmp_path):
    quantized_checkpoint(tmp_path, name)
    stored = read_tensors(tmp_path, Problems(tmp_path))
    tensors = {key: np.array(map_array(info)) for key, info in stored.items()}
    of_layer = "model.layers.0.mlp.up_proj."
    for key in [key for key in tensors if key.startswith(of_layer)]:
        del tensors[key]
    tensors[f"{of_layer}weight"] = np.ones((96, 64), np.float32)
    write_tensors(tmp_path, tensors)
    with pytest.raises(CheckpointError) as caught:
        open_model(tmp_path)
    text = str(caught.value)
    assert (
        "(1 problem)" in text
        and f"'{of_layer}weight' has dtype F32, but quantization_config" in text
    ), text
    assert "(such modules: 1)" in text


def test_two_values_of_one_field_are_refused():
    awq = FORMATS["awq"][0]
    for config, text in (
        ({**awq, "w_bit": 8}, r"quantization_config.bits = 4 contradicts w_bit = 8"),
        (
            {**awq, "q_group_size": 128},
            r"quantization_config.q_group_size = 128 contradicts group_size = 64",
        ),
    ):
        problems = Problems(Path("somewhere"))
        with problems.collect():
            quantization_of({"quantization_config": config}, None)
        assert text in problems.lines[0]
    assert quantization_of(
        {"quantization_config": {**awq, "w_bit": 4}, "compression_config": None}, None
    )
    both = {"quantization_config": awq, "compression_config": FORMATS["W8A8"][0]}
    with pytest.raises(
        CheckpointError,
        match="quant_method = 'awq', but compression_config.quant_method = 'compressed-",
    ):
        quantization_of(both, None)


def test_the_setting_takes_the_name_of_each_format():
    names, _ = get_args(EngineConfig.model_fields["quantization"].annotation)
    assert set(get_args(names)) == {*SCHEMES, gguf.NAME, *METHODS}
    assert {config["quant_method"] for config, _ in FORMATS.values()} | {"mxfp4"} == set(METHODS)


def test_the_setting_and_the_checkpoint_must_agree(tmp_path):
    quantized_checkpoint(tmp_path, "awq")
    assert open_model(tmp_path, "awq").quantization.name == "awq"
    with pytest.raises(
        CheckpointError,
        match="quantization is 'int8', but the checkpoint is quantised already, by 'awq'",
    ):
        open_model(tmp_path, "int8")
    random_checkpoint(tmp_path / "plain", CONFIG)
    with pytest.raises(
        CheckpointError,
        match=r"quantization is 'awq', but .* has no quantization_config; use int8, int4, "
        r"int8\+head, int4\+head, gguf for",
    ):
        open_model(tmp_path / "plain", "awq")
    for model in (5, None):
        with pytest.raises(JaxpageError, match="model: must be a valid string"):
            LLM(model=model)  # type: ignore[arg-type]
    with pytest.raises(JaxpageError, match="quantization"):
        LLM(model=str(tmp_path / "plain"), quantization="int3")


@pytest.mark.sweep
def test_the_benchmark_says_what_rounding_costs(tmp_path, capsys):
    words = [
        "bench",
        "quantization",
        "--num-tokens",
        "60",
        "--batches",
        "2",
        "--max-model-len",
        "256",
    ]
    text = Path(__file__).parent / "support" / "alice.txt"
    assert cli.main([*words, "--model", "demo", "--dtype", "float32", "--text", str(text)]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    exact, int8, int4, head = (result[name] for name in ("float32", "int8", "int4", "int4+head"))
    assert exact["kl_divergence"] == 0 < int8["kl_divergence"] < int4["kl_divergence"]
    assert int4["kl_divergence"] < head["kl_divergence"] < 0.1
    assert exact["weights_mib"] > int8["weights_mib"] > int4["weights_mib"] > head["weights_mib"]
    assert (
        exact["perplexity"] == pytest.approx(np.exp(exact["loss"]))
        and exact["tokens_per_second_2"] > 0
    )
    quantized_checkpoint(tmp_path, "awq")
    assert cli.main([*words, "--model", str(tmp_path)]) == 2
    assert "is quantised already (AWQ: int4 weights in groups of 64)" in capsys.readouterr().err
