"""Checkpoints: what loads must be exact, and what does not fit must be one clear error, whatever
the bytes are.
"""

from __future__ import annotations

import codecs
import gc
import itertools
import json
import math
import os
import shutil
import struct
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import numpy as np
import orbax.checkpoint
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from jaxpage.assembly import describing
from jaxpage.checkpoints import (
    convert,
    describe_model,
    load_weights,
    loading,
    open_model,
    read_config,
)
from jaxpage.checkpoints.config_file import eos_token_ids
from jaxpage.checkpoints.finding import resolve_model, resolve_tokenizer
from jaxpage.checkpoints.finding.resolve import DEMO, resolve_model_config
from jaxpage.checkpoints.opening import weights_bytes
from jaxpage.checkpoints.safetensors_files import SINGLE
from jaxpage.checkpoints.tokenizers.model_tokenizer import ends_of_text
from jaxpage.checkpoints.tokenizers.tokenizer_files import load_tokenizer
from jaxpage.errors import CheckpointError, ConfigError, ModelNotFoundError
from jaxpage.models.base import abstract_model, model_weights
from jaxpage.models.registry import load_family
from tests.support.engines import GRANITE_4
from tests.support.model_configs import config_json
from tests.support.published_configs import PUBLISHED
from tests.support.random_checkpoints import (
    DTYPES,
    check_weights,
    random_checkpoint,
    random_tensors,
    write_tensors,
)
from tests.support.sweeps import few

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
TIED = {**LLAMA, "tie_word_embeddings": True}
GPT2: dict[str, Any] = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    **{"vocab_size": 50, "n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 40},
}
QWEN3 = {**LLAMA, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16}
OPT: dict[str, Any] = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    **{
        "vocab_size": 50,
        "hidden_size": 24,
        "ffn_dim": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
    },
    **{"max_position_embeddings": 40, "word_embed_proj_dim": 12, "do_layer_norm_before": False},
}
CONFIGS = {"llama": LLAMA, "tied": TIED, "gpt2": GPT2, "qwen3": QWEN3, "opt": OPT}


def leaves(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key), value


def load(directory: Path, dtype: str | None = None) -> dict[tuple[Any, ...], np.ndarray]:
    return dict(leaves(load_weights(open_model(directory).plan, dtype, lambda array: array)))


def expected_arrays(
    config: dict[str, Any], dtype: str = "float32"
) -> dict[tuple[Any, ...], np.ndarray]:
    """Returns what must come out for `random_checkpoint(config)`, by path."""
    tensors = random_tensors(config, dtype=dtype)
    family = load_family(config)
    arrays = {}
    for weight in model_weights(family, family.Spec.from_config(config)):
        parts = [
            tensors[piece.name].T if piece.transpose else tensors[piece.name]
            for piece in weight.sources[0].pieces
        ]
        arrays[weight.path] = np.concatenate(parts)
    return arrays


def assert_same_bits(actual: dict[Any, Any], expected: dict[Any, Any]) -> None:
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        assert np.asarray(actual[key]).dtype == value.dtype, key
        np.testing.assert_array_equal(
            np.ascontiguousarray(actual[key]).view(np.uint8),
            np.ascontiguousarray(value).view(np.uint8),
            str(key),
        )


def refusal(directory: Path) -> str:
    """Returns the text of the one CheckpointError that opening the directory raises."""
    with pytest.raises(CheckpointError) as caught:
        open_model(directory)
    return str(caught.value)


def edit_json(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


# ---- What fits loads exactly ----


@pytest.mark.parametrize("name", CONFIGS)
def test_every_parameter_of_the_model_gets_its_tensor(tmp_path, name):
    directory = random_checkpoint(tmp_path, CONFIGS[name])
    opened = open_model(directory)
    loaded = load(directory)
    assert_same_bits(loaded, expected_arrays(CONFIGS[name]))
    _, parameters = abstract_model(opened.family, opened.spec, np.float32)
    assert {path: leaf.shape for path, leaf in leaves(parameters)} == {
        p: a.shape for p, a in loaded.items()
    }


@pytest.mark.parametrize(("dtype", "shards"), [*zip(DTYPES, (1, 3, 1), strict=True)])
def test_dtypes_and_shards(tmp_path, dtype, shards):
    directory = random_checkpoint(tmp_path, LLAMA, dtype=dtype, shards=shards)
    assert_same_bits(load(directory), expected_arrays(LLAMA, dtype))
    assert open_model(directory).plan.most_common_dtype() == dtype


@pytest.mark.parametrize("dtype", DTYPES)
def test_conversion_is_numpys_and_arrays_are_owned(tmp_path, dtype):
    directory = random_checkpoint(tmp_path, GPT2, dtype="bfloat16")
    loaded = load(directory, dtype)
    assert_same_bits(
        loaded,
        {
            path: value.astype(DTYPES[dtype])
            for path, value in expected_arrays(GPT2, "bfloat16").items()
        },
    )
    for array in loaded.values():  # a view would keep the file mapped under the model
        assert array.flags.owndata and array.flags.c_contiguous
    with pytest.raises(ValueError, match="'int8'"):
        load(directory, "int8")


@pytest.mark.parametrize("headless_names", [False, True])
@pytest.mark.parametrize("tied_head", [False, True])
def test_tied_weights_either_way(tmp_path, tied_head, headless_names):
    directory = random_checkpoint(
        tmp_path, TIED, tied_head=tied_head, headless_names=headless_names
    )
    assert_same_bits(load(directory), expected_arrays(TIED))


def test_a_tied_model_may_keep_only_its_head(tmp_path):
    tensors = random_tensors(TIED)
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    write_tensors(random_checkpoint(tmp_path, TIED), tensors)
    assert_same_bits(load(tmp_path), expected_arrays(TIED))


def test_a_tied_head_that_differs_is_refused(tmp_path):
    tensors = random_tensors(TIED)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    write_tensors(random_checkpoint(tmp_path, TIED), tensors)
    assert (
        "'model.embed_tokens.weight' and 'lm_head.weight' are one parameter, but they differ"
        in refusal(tmp_path)
    )


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_beside_the_weights_the_host_holds_a_few_times_the_largest_one(tmp_path, quantization):
    config = {**LLAMA, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 8}
    files = open_model(random_checkpoint(tmp_path, config), quantization)
    load_weights(files.plan, "float32", lambda array: array.nbytes)  # imports, once
    tracemalloc.start()  # numpy tells it what it allocates
    load_weights(files.plan, "float32", lambda array: array.nbytes)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # of the unquantised model: gate and up in one, and all
    largest, whole = 4 * 128 * 2 * 384, 6_365_696
    assert peak < 2 * largest < whole / 8, f"{peak:,} bytes"


def test_nan_and_infinite_weights_are_loaded_as_they_are(tmp_path):
    tensors = random_tensors(LLAMA)
    tensors["model.norm.weight"][:3] = [np.nan, np.inf, -np.inf]
    write_tensors(random_checkpoint(tmp_path, LLAMA), tensors)
    np.testing.assert_array_equal(load(tmp_path)["norm", "scale"][:3], [np.nan, np.inf, -np.inf])


def test_tensors_that_carry_nothing_may_have_any_dtype(tmp_path):
    tensors = {
        **random_tensors(GPT2),
        "transformer.h.0.attn.bias": np.ones((1, 1, 40, 40), np.uint8),
    }
    write_tensors(random_checkpoint(tmp_path, GPT2), tensors)
    assert_same_bits(load(tmp_path), expected_arrays(GPT2))


@pytest.mark.parametrize(
    ("name", "headless_names"), [("deepseek-v3-groups", False), ("glm4-moe-lite-mixed", True)]
)
def test_layers_that_draft_are_those_that_the_config_counts(tmp_path, name, headless_names):
    """Layers 3 and 4 of three layers and two more draft; a further one, or one that nobody counted,
    is of another model.
    """
    config = config_json(name)
    random_checkpoint(
        tmp_path, {**config, "num_nextn_predict_layers": 2}, headless_names=headless_names
    )
    tensors, without = dict(load_file(tmp_path / "model.safetensors")), load(tmp_path)
    first = "layers.3" if headless_names else "model.layers.3"
    more = {f"{first}.enorm.weight": np.ones(3, np.float32)}
    more |= {
        name.replace("layers.2", "layers.4"): array
        for name, array in tensors.items()
        if "layers.2." in name
    }
    write_tensors(tmp_path, tensors | more)
    assert_same_bits(load(tmp_path), without)
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    assert "layers.4.input_layernorm.weight' of shape" in refusal(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "the number of layers is 3 in config.json and 5 in the tensors" in refusal(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 10**9}))
    assert "num_nextn_predict_layers = 1000000000 is above 64" in refusal(tmp_path)


def test_weights_bytes_reads_headers_only(tmp_path):
    """The data of a Llama 2 7B is a hole in the file: 13.5 GB that are never read."""
    config = {**LLAMA, "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008}
    config |= {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32}
    random_checkpoint(tmp_path, LLAMA)
    (tmp_path / "config.json").write_text(json.dumps(config))
    family = open_model(random_checkpoint(tmp_path / "small", LLAMA)).family
    header, position = {}, 0
    for weight in model_weights(family, family.Spec.from_config(config)):
        for piece in weight.sources[0].pieces:
            end = position + 2 * int(np.prod(piece.stored_shape))
            header[piece.name] = {
                "dtype": "BF16",
                "shape": piece.stored_shape,
                "data_offsets": [position, end],
            }
            position = end
    raw = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw)
    os.truncate(tmp_path / "model.safetensors", 8 + len(raw) + position)
    assert weights_bytes(tmp_path) == weights_bytes(tmp_path, "float16") == 2 * 6_738_415_616
    assert weights_bytes(tmp_path, "float32") == 4 * 6_738_415_616


# ---- What does not fit is one error with all of it ----


def test_a_method_of_quantisation_and_a_family_are_looked_at_apart(tmp_path):
    config = {**LLAMA, "hidden_act": "spiral", "quantization_config": {"quant_method": "hqq"}}
    (random_checkpoint(tmp_path, LLAMA) / "config.json").write_text(json.dumps(config))
    text = refusal(tmp_path)
    assert (
        "(2 problems)" in text
        and "hidden_act = 'spiral'" in text
        and "quant_method = 'hqq'" in text
    )


def test_everything_wrong_is_listed_at_once_and_nothing_is_put(tmp_path):
    tensors = random_tensors(LLAMA)
    del tensors["model.layers.0.mlp.up_proj.weight"], tensors["lm_head.weight"]
    tensors["model.norm.weight"] = np.ones(33, np.float32)
    tensors["model.layers.1.mlp.up_proj.weight"] = tensors[
        "model.layers.1.mlp.up_proj.weight"
    ].T.copy()
    tensors["model.layers.1.mlp.gate_proj.weight"] = np.ones((48, 32), np.int64)
    tensors["extra"] = np.ones(1, np.float32)
    write_tensors(random_checkpoint(tmp_path, LLAMA), tensors)
    text = refusal(tmp_path)
    assert "(6 problems)" in text
    for line in (
        "tensor 'model.layers.0.mlp.up_proj.weight' of shape (48, 32) is missing in "
        "'model.safetensors'",
        "tensor 'lm_head.weight' of shape (64, 32) is missing in 'model.safetensors'",
        "'model.safetensors': tensor 'model.norm.weight' has shape (33,), and the model needs "
        "(32,)",
        "'model.safetensors': tensor 'model.layers.1.mlp.up_proj.weight' has shape (32, 48), "
        "and the model needs (48, 32)",
        "'model.safetensors': tensor 'model.layers.1.mlp.gate_proj.weight' has dtype I64, not "
        "one of F32, BF16, F16",
        "'model.safetensors': tensor 'extra' of shape (1,) is unexpected",
    ):
        assert f"  - {line}\n" in text + "\n"
    family = open_model(random_checkpoint(tmp_path / "good", LLAMA)).family
    table = model_weights(family, family.Spec.from_config(LLAMA))
    with pytest.raises(CheckpointError) as caught:
        check_weights(tmp_path, table, family.ignored)
    assert str(caught.value) == text


def test_a_tensor_that_does_not_fit_is_reported_with_its_shard(tmp_path):
    """The shard has the name of the file in the directory, though it may be a link to a name of the
    hub's cache.
    """
    directory = random_checkpoint(tmp_path / "models--a--b" / "snapshots" / "0123", LLAMA, shards=3)
    blobs = directory.parents[1] / "blobs"
    blobs.mkdir()
    for number, file in enumerate(sorted(directory.glob("*.safetensors"))):
        shutil.move(file, blobs / str(number))
        file.symlink_to(blobs / str(number))
    edit_json(
        directory / "config.json",
        lambda config: config.update(intermediate_size=40, num_key_value_heads=4),
    )
    index, text = json.loads((directory / INDEX).read_text())["weight_map"], refusal(directory)
    wrong = [name for name in index if "mlp" in name or "k_proj" in name or "v_proj" in name]
    assert f"({len(wrong)} problems)" in text
    assert [
        name for name in wrong if f"  - '{index[name]}': tensor '{name}' has shape" not in text
    ] == []
    assert len({index[name] for name in wrong}) > 1


@pytest.mark.parametrize(
    ("of_config", "config"), [(5, LLAMA), (1, LLAMA), (5, GPT2)], ids=["more", "fewer", "gpt2"]
)
def test_another_number_of_layers_is_one_sentence(tmp_path, of_config, config):
    random_checkpoint(tmp_path, config)
    name = "n_layer" if config is GPT2 else "num_hidden_layers"
    edit_json(tmp_path / "config.json", lambda content: content.update({name: of_config}))
    text = refusal(tmp_path)
    assert (
        "(1 problem)" in text
        and f"the number of layers is {of_config} in config.json and 2 in the tensors" in text
    )
    tensors = random_tensors(config)
    del tensors[next(name for name in tensors if ".0." in name)]
    write_tensors(tmp_path, tensors)
    assert (
        "(2 problems)" in (text := refusal(tmp_path))
        and "of shape" in text
        and "is missing" in text
    )


def test_a_missing_tensor_is_reported_with_where_it_was_looked_for(tmp_path):
    tensors = random_tensors(LLAMA)
    del tensors["model.norm.weight"]
    write_tensors(random_checkpoint(tmp_path, LLAMA, shards=3), tensors, shards=3)
    assert f"'model.norm.weight' of shape (32,) is missing in {INDEX} and its 3 files" in refusal(
        tmp_path
    )


def test_every_missing_tensor_is_listed_even_when_all_are(tmp_path):
    random_checkpoint(tmp_path, LLAMA)
    (tmp_path / "model.safetensors").write_bytes(safetensors({}))
    assert [
        name
        for name in random_tensors(LLAMA)
        if f"tensor '{name}' of shape" not in refusal(tmp_path)
    ] == []


def safetensors(entries: Any, data: bytes = b"", length: int | None = None) -> bytes:
    raw = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def entry(begin: Any, end: Any, shape: Any = (2,), dtype: Any = "F32") -> dict[str, Any]:
    return {
        "dtype": dtype,
        "shape": list(shape) if isinstance(shape, tuple) else shape,
        "data_offsets": [begin, end],
    }


FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "0 bytes are too short"),
    "cut length": (b"\x01\x00\x00", "3 bytes are too short"),
    "huge length": (safetensors({}, length=2**62), f"claims {2**62} bytes"),
    "long header": (safetensors({}, length=100_000_001), "claims 100000001 bytes"),
    "length beyond file": (safetensors({}, length=3), "claims 3 bytes, and at most 2"),
    "no header": (safetensors(b""), "does not start with an object"),
    "not JSON": (safetensors(b"{'a': 1}"), "is not JSON"),
    "array": (safetensors(b"[]"), "does not start with an object"),
    "not UTF-8": (safetensors(b'{"\xff": 1}'), "not UTF-8"),
    "deep": (safetensors(b'{"a":' * 100_000), "nested too deeply"),
    "NaN": (safetensors(b'{"a": NaN}'), "NaN is not a JSON number"),
    "long number": (safetensors(b'{"a": ' + b"9" * 10_000 + b"}"), "is not JSON"),
    "duplicate keys": (
        safetensors(b'{"a": %s, "a": %s}' % ((json.dumps(entry(0, 8)).encode(),) * 2), bytes(8)),
        "the key 'a' is given twice",
    ),
    "unknown dtype": (
        safetensors({"a": entry(0, 8, dtype="F33")}, bytes(8)),
        "unknown dtype 'F33'",
    ),
    "dtype list": (safetensors({"a": entry(0, 8, dtype=["F32"])}, bytes(8)), "unknown dtype"),
    "entry is a number": (safetensors({"a": 3}), "not described by exactly"),
    "extra field": (
        safetensors({"a": {**entry(0, 8), "x": 1}}, bytes(8)),
        "not described by exactly",
    ),
    "negative shape": (
        safetensors({"a": entry(0, 8, (-2, -1))}, bytes(8)),
        "impossible shape [-2, -1]",
    ),
    "huge shape": (safetensors({"a": entry(0, 8, (2**64,))}, bytes(8)), "impossible shape"),
    "wrapping shape": (
        safetensors({"a": entry(0, 8, (2**62, 8))}, bytes(8)),
        "does not fill its 8 bytes",
    ),
    "long shape": (safetensors({"a": entry(0, 4, (1,) * 100)}, bytes(4)), "impossible shape"),
    "boolean shape": (safetensors({"a": entry(0, 4, (True,))}, bytes(4)), "impossible shape"),
    "shape is not a list": (safetensors({"a": entry(0, 8, 2)}, bytes(8)), "impossible shape"),
    "half a byte": (safetensors({"a": entry(0, 1, (3,), "F4")}, bytes(1)), "does not fill"),
    "size differs from range": (
        safetensors({"a": entry(0, 8, (3,))}, bytes(8)),
        "does not fill its 8 bytes",
    ),
    "range backwards": (safetensors({"a": entry(8, 0)}, bytes(8)), "impossible data_offsets"),
    "float range": (safetensors({"a": entry(0, 8.0)}, bytes(8)), "impossible data_offsets"),
    "overlap": (
        safetensors({"a": entry(0, 8), "b": entry(4, 12)}, bytes(12)),
        "'b' overlaps the tensor before it",
    ),
    "gap": (
        safetensors({"a": entry(0, 8), "b": entry(12, 20)}, bytes(20)),
        "'b' leaves a gap before it",
    ),
    "late start": (safetensors({"a": entry(4, 12)}, bytes(12)), "'a' leaves a gap before it"),
    "truncated": (safetensors({"a": entry(0, 8)}, bytes(7)), "truncated"),
    "trailing bytes": (safetensors({"a": entry(0, 8)}, bytes(9)), "1 trailing bytes"),
    "metadata": (
        safetensors({"__metadata__": {"a": 1}}),
        "__metadata__ is not an object of strings",
    ),
    "float8": (
        safetensors({"model.norm.weight": entry(0, 32, (32,), "F8_E4M3")}, bytes(32)),
        "has dtype F8_E4M3",
    ),
    "integers": (
        safetensors({"model.norm.weight": entry(0, 256, (32,), "I64")}, bytes(256)),
        "has dtype I64",
    ),
    "terminal codes": (
        safetensors({"\x1b[2J": entry(0, 8)}, bytes(8)),
        "tensor '\\x1b[2J' of shape (2,) is unexp",
    ),
    "lone surrogate": (
        safetensors(b'{"\\ud800": %s}' % json.dumps(entry(0, 8)).encode(), bytes(8)),
        "'\\ud800'",
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_corrupt_files(tmp_path, name):
    content, text = FILES[name]
    random_checkpoint(tmp_path, LLAMA)
    (tmp_path / "model.safetensors").write_bytes(content)
    assert text in refusal(tmp_path)


def test_faults_of_several_files_are_listed_together(tmp_path):
    random_checkpoint(tmp_path, LLAMA, shards=3)
    edit_json(
        tmp_path / "config.json", lambda c: c.update(vocab_size=2**31, architectures=["Evil"])
    )
    (tmp_path / "model-00001-of-00003.safetensors").write_bytes(b"")
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    text = refusal(tmp_path)
    for part in (
        "vocab_size is 2147483648",
        "'Evil' is not one of",
        "00001-of-00003.safetensors': 0 bytes",
        "00002-of-00003",
    ):
        assert part in text


# ---- Index files ----

INDEX = "model.safetensors.index.json"
SHARD = "model-00001-of-00002.safetensors"
FIRST = "model.embed_tokens.weight"


def place(directory: Path, name: str, shard: Any) -> None:
    edit_json(directory / INDEX, lambda index: index["weight_map"].update({name: shard}))


def write(name: str, text: str) -> Callable[[Path], object]:
    return lambda directory: (directory / name).write_text(text)


def link_out(name: str) -> Callable[[Path], object]:
    """Moves the file out of the directory and leaves a symbolic link to it."""

    def change(directory: Path) -> None:
        outside = directory.parent / "outside"
        shutil.move(directory / name, outside)
        (directory / name).symlink_to(outside)

    return change


INDEX_FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "shard missing": (lambda d: (d / SHARD).unlink(), f"'{SHARD}' is missing"),
    "absolute": (lambda d: place(d, FIRST, str(d / SHARD)), "is a path that leaves the directory"),
    "parent": (lambda d: place(d, FIRST, f"../x/{SHARD}"), "is a path that leaves the directory"),
    "backslash": (lambda d: place(d, FIRST, f"..\\{SHARD}"), "is a path that leaves the directory"),
    "NUL": (lambda d: place(d, FIRST, f"{SHARD}\0"), "is a path that leaves the directory"),
    "endless name": (lambda d: place(d, FIRST, "x" * 100_000), "cannot be opened"),
    "not a string": (lambda d: place(d, FIRST, 1), "a file name that is not a string"),
    "directory": (lambda d: place(d, FIRST, "."), "is not a regular file"),
    "link leading out": (
        link_out(SHARD),
        f"'{SHARD}' is a symbolic link that leaves the directory",
    ),
    "index leading out": (link_out(INDEX), "is a symbolic link that leaves the directory"),
    "link to itself": (
        lambda d: ((d / SHARD).unlink(), (d / SHARD).symlink_to(SHARD)),
        f"'{SHARD}' cannot be opened",
    ),
    "pipe": (
        lambda d: ((d / SHARD).unlink(), os.mkfifo(d / SHARD)),
        f"'{SHARD}' is not a regular file",
    ),
    "in index only": (
        lambda d: place(d, "extra", SHARD),
        f"{INDEX} places tensor 'extra' in '{SHARD}', which does not hold it",
    ),
    "in shard only": (
        lambda d: edit_json(d / INDEX, lambda index: index["weight_map"].pop(FIRST)),
        f"'{SHARD}' holds tensor '{FIRST}', which {INDEX} does not place there",
    ),
    "no weight_map": (write(INDEX, "{}"), "weight_map is not an object"),
    "empty weight_map": (write(INDEX, '{"weight_map": {}}'), "weight_map is not an object"),
    "not JSON": (write(INDEX, "{"), "is not JSON"),
    "duplicate": (
        write(INDEX, '{"weight_map": {"a": "b", "a": "c"}}'),
        "the key 'a' is given twice",
    ),
}


@pytest.mark.parametrize("name", INDEX_FAULTS)
def test_faulty_index(tmp_path, name):
    change, text = INDEX_FAULTS[name]
    directory = random_checkpoint(tmp_path / "x", LLAMA, shards=2)
    change(directory)
    assert text in refusal(directory)


def test_links_of_the_hub_cache_are_followed_but_no_others(tmp_path):
    snapshot = random_checkpoint(tmp_path / "models--a--b" / "snapshots" / "0123", LLAMA)
    # of the model, and shared by all models
    for folder in (snapshot.parents[1] / "blobs", tmp_path / "blobs"):
        folder.mkdir()
        shutil.move(snapshot / "model.safetensors", folder / "data")
        (snapshot / "model.safetensors").symlink_to(folder / "data")
        assert_same_bits(load(snapshot), expected_arrays(LLAMA))
        (snapshot / "model.safetensors").unlink()
        shutil.move(folder / "data", snapshot / "model.safetensors")
    link_out("model.safetensors")(snapshot)
    assert "symbolic link that leaves" in refusal(snapshot)


# ---- Configs, and what must never run ----

CONFIG_FAULTS: dict[str, tuple[str | None, str]] = {
    "missing": (None, "'config.json' is missing"),
    "zero bytes": ("", "'config.json' is empty"),
    "not JSON": ("{", "'config.json' is not JSON"),
    "array": ("[]", "holds a JSON list, not an object"),
    "empty object": ("{}", "config.json is an empty object"),
    "NaN": ('{"rms_norm_eps": NaN}', "NaN is not a JSON number"),
    "minus infinity": ('{"rms_norm_eps": -Infinity}', "-Infinity is not a JSON number"),
    "infinity": (
        json.dumps({**LLAMA, "rms_norm_eps": math.inf}),
        "rms_norm_eps must be a positive number, not {'__float__': 'Infinity'}",
    ),
    "overflow": ('{"rms_norm_eps": 1e400}', "is not finite"),
    "duplicate": ('{"a": 1, "a": 2}', "the key 'a' is given twice"),
    "deep": ("[" * 100_000, "nested too deeply"),
    "no architecture": (
        json.dumps({**LLAMA, "architectures": None}),
        "not None; `jaxpage doctor` lists those that are known",
    ),
    "unknown architecture": (
        json.dumps({**LLAMA, "architectures": ["Evil"]}),
        "'Evil' is not one of the ",
    ),
    "vocabulary": (
        json.dumps({**LLAMA, "vocab_size": 2**31}),
        "vocab_size is 2147483648, not a whole number from 1",
    ),
    "layers": (
        json.dumps({**LLAMA, "num_hidden_layers": 10**9}),
        "num_hidden_layers is 1000000000",
    ),
    "zero heads": (json.dumps({**LLAMA, "num_attention_heads": 0}), "num_attention_heads is 0"),
    "text": (json.dumps({**LLAMA, "hidden_size": "32"}), "hidden_size is '32'"),
    "truth": (json.dumps({**LLAMA, "hidden_size": True}), "hidden_size is True"),
    "remote code": (
        json.dumps({**LLAMA, "architectures": ["Evil"], "auto_map": {"AutoModel": "evil.Model"}}),
        "its auto_map names remote code, and remote code is never run",
    ),
}


@pytest.mark.parametrize("name", CONFIG_FAULTS)
def test_faulty_config(tmp_path, name):
    content, text = CONFIG_FAULTS[name]
    random_checkpoint(tmp_path, LLAMA)
    (tmp_path / "config.json").unlink()
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    assert text in refusal(tmp_path)


def test_a_limit_may_be_infinity(tmp_path):
    """Older files have it so for the time steps of Mamba 2."""
    config = {**GRANITE_4, "time_step_limit": [0.5, math.inf]}
    random_checkpoint(tmp_path, config)
    assert "Infinity" in (tmp_path / "config.json").read_text()
    assert open_model(tmp_path).spec.recurrent.time_steps == (0.5, math.inf)


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "additional_chat_templates/x.jinja"]
)
def test_a_pipe_among_the_files_of_a_tokenizer_is_refused(tmp_path, name):
    """Whoever opened it would wait for good."""
    if name != "tokenizer.json":
        shutil.copy(DEMO / "tokenizer.json", tmp_path)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(
        CheckpointError, match=f"'{name}' can be no file of a tokenizer: it is not a regular file"
    ):
        load_tokenizer(tmp_path)


def test_a_tokenizer_model_alone_needs_the_package_that_reads_it(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0c\n\x05<unk>")
    (tmp_path / "tokenizer_config.json").write_text("{}")
    monkeypatch.setattr(
        "jaxpage.checkpoints.tokenizers.tokenizer_files.find_spec", lambda name: None
    )
    with pytest.raises(
        CheckpointError,
        match="tokenizer.model alone.*pip install sentencepiece, or give a directory",
    ):
        load_tokenizer(tmp_path)


def test_a_chat_template_that_does_not_parse_is_said_at_the_start(tmp_path, caplog):
    shutil.copy(DEMO / "tokenizer.json", tmp_path)
    for template in (
        "{% for m in messages %}{% generation %}x{% endgeneration %}{% break %}{% endfor %}",
        "{% if %}" + "x" * 10_000,
    ):
        (tmp_path / "chat_template.jinja").write_text(template)
        caplog.clear()
        load_tokenizer(tmp_path)
        messages = [
            text for text in caplog.messages if "the chat template 'default' does not parse" in text
        ]
        assert len(messages) == template.startswith("{% if") and all(
            len(text) < 1000 for text in messages
        )


def test_no_message_is_megabytes(tmp_path, caplog):
    """A message names the first tensors, added tokens and ends of texts that nobody expects, and
    how many there are.
    """
    random_checkpoint(tmp_path, LLAMA, generation_config={"eos_token_id": [*range(1, 20_000)]})
    tensors = random_tensors(LLAMA) | {
        f"model.more.{index}": np.ones(1, np.float32) for index in range(20_000)
    }
    write_tensors(tmp_path, tensors)
    text = refusal(tmp_path)
    assert "(20000 problems)" in text and "and 19900 more" in text and len(text) < 50_000
    write_tensors(tmp_path, random_tensors(LLAMA))
    backend = Tokenizer(WordLevel({f"t{index}": index for index in range(64)}, unk_token="t0"))
    backend.add_tokens([f"<{index}>" for index in range(20_000)])
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(tmp_path)
    files = open_model(tmp_path)
    tokenizer = describing._tokenizer(None, files)
    assert len(ends_of_text(files, tokenizer)) == 63
    assert all(len(message) < 1000 for message in caplog.messages)
    assert [
        part in caplog.text for part in ("and 19995 more lie beyond", "and 19931 more can never")
    ] == [True, True]


@pytest.mark.parametrize("dtype", ["../../x", "floaty", 16, ["float32"]])
def test_a_dtype_that_is_none_is_refused(tmp_path, dtype):
    random_checkpoint(tmp_path, LLAMA)
    for name in ("dtype", "torch_dtype"):
        edit_json(
            tmp_path / "config.json",
            lambda config: config.update({"torch_dtype": None, name: dtype}),  # noqa: B023
        )
        assert f"config.json: {name} {dtype!a} is not one of float32" in refusal(tmp_path)
        edit_json(tmp_path / "config.json", lambda config: config.pop(name))  # noqa: B023
    edit_json(
        tmp_path / "config.json", lambda config: config.update(torch_dtype="torch.float8_e4m3fn")
    )
    open_model(tmp_path)


def test_a_byte_order_mark_before_json_is_nothing(tmp_path):
    file = random_checkpoint(tmp_path, LLAMA) / "config.json"
    file.write_bytes(codecs.BOM_UTF8 + file.read_bytes())
    assert_same_bits(load(tmp_path), expected_arrays(LLAMA))
    file.write_bytes(codecs.BOM_UTF8)
    assert "'config.json' is empty" in refusal(tmp_path)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_whose_architecture_is_known_need_no_code_of_their_own(tmp_path, name):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    spec = describe_model(tmp_path).spec
    assert (spec.kv.num_layers, spec.vocab_size) == (
        PUBLISHED[name]["num_hidden_layers"],
        PUBLISHED[name]["vocab_size"],
    )


def test_code_of_a_model_is_never_run_and_the_own_class_takes_its_place(tmp_path, caplog):
    canary = tmp_path / "canary"
    random_checkpoint(tmp_path, LLAMA)
    (tmp_path / "evil.py").write_text(f"open({str(canary)!r}, 'w')")
    code = {
        "auto_map": {
            "AutoConfig": "evil.C",
            "AutoModelForCausalLM": "evil.M",
            "AutoTokenizer": ["evil.T", None],
        }
    }
    shutil.copy(DEMO / "tokenizer.json", tmp_path)
    edit_json(tmp_path / "config.json", lambda config: config.update(code))
    for name in ("tokenizer_config.json", "generation_config.json"):
        (tmp_path / name).write_text(json.dumps(code))
    assert_same_bits(load(tmp_path), expected_arrays(LLAMA))
    load(tmp_path)
    (warning,) = caplog.messages
    names = "config.json and tokenizer_config.json and generation_config.json"
    assert f"auto_map in {names} names remote code, and remote code is never run" in warning
    assert load_tokenizer(tmp_path).get_vocab() == load_tokenizer(DEMO).get_vocab()
    assert not canary.exists()


opened_files: list[str] = []
audit_on = [False]


def note_opened(event: str, args: tuple[Any, ...]) -> None:
    if audit_on[0] and event == "open":
        opened_files.append(str(args[0]))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickles_are_refused_unopened(tmp_path, name):
    random_checkpoint(tmp_path, LLAMA)
    (tmp_path / "model.safetensors").rename(tmp_path / name)
    sys.addaudithook(note_opened)  # for good: a hook cannot be taken away, only told to be quiet
    opened_files.clear()
    audit_on[0] = True
    text = refusal(tmp_path)
    audit_on[0] = False
    assert f"its weights are pickled ('{name}')" in text and "safetensors" in text
    assert any(file.endswith("config.json") for file in opened_files)
    assert not any(file.endswith(name) for file in opened_files)


def test_no_weights_at_all(tmp_path):
    random_checkpoint(tmp_path, LLAMA)
    (tmp_path / "model.safetensors").rename(tmp_path / "other.safetensors")
    assert "(1 problem)" in refusal(tmp_path)
    assert (
        "neither model.safetensors nor model.safetensors.index.json (found only 'other.s"
        in refusal(tmp_path)
    )


@pytest.mark.parametrize(
    ("generation", "config", "ids"),
    [
        (None, {}, set()),
        (None, {"eos_token_id": 2}, {2}),
        (None, {"eos_token_id": None}, set()),
        ({}, {"eos_token_id": [1, 2]}, {1, 2}),
        ({"eos_token_id": [7, 8]}, {"eos_token_id": 2}, {7, 8}),
        ({"eos_token_id": 0}, {"eos_token_id": 2}, {0}),
    ],
)
def test_eos_token_ids(tmp_path, generation, config, ids):
    random_checkpoint(tmp_path, {**LLAMA, **config}, generation_config=generation)
    assert eos_token_ids(tmp_path, read_config(tmp_path)) == ids


def test_an_id_that_ends_a_text_and_is_none_is_reported_with_the_rest(tmp_path):
    config = {**LLAMA, "hidden_act": "spiral", "eos_token_id": [1, "2"]}
    (random_checkpoint(tmp_path, LLAMA) / "config.json").write_text(json.dumps(config))
    text = refusal(tmp_path)
    assert (
        "(2 problems)" in text
        and "'spiral'" in text
        and "config.json: eos_token_id '2' is not a token id" in text
    )


@pytest.mark.parametrize("wrong", ["2", True, -1, 1.0, [1, None], 2**40, 2**70, {"a": 1}])
@pytest.mark.parametrize("place", ["generation_config.json", "config.json"])
def test_eos_token_ids_that_are_none(tmp_path, place, wrong):
    """They are refused in config.json, too, where generation_config.json, which counts, is
    right.
    """
    random_checkpoint(tmp_path, LLAMA, generation_config={"eos_token_id": 1})
    edit_json(tmp_path / place, lambda fields: fields.update(eos_token_id=wrong))
    assert f"{place}: eos_token_id " in refusal(tmp_path)
    with pytest.raises(CheckpointError, match=f"{place}: .* is not a token id"):
        eos_token_ids(tmp_path, json.loads((tmp_path / "config.json").read_text()))


def test_the_tokenizer_s_own_end_of_text_is_one_too(tmp_path):
    """A chat model whose generation_config.json lacks the token that its template writes would
    never stop; as in vLLM.
    """
    random_checkpoint(tmp_path, LLAMA, generation_config={"eos_token_id": [7, 8]})
    vocabulary = {f"t{index}": index for index in range(64)}
    backend = Tokenizer(WordLevel(vocabulary, unk_token="t0"))
    for ends, expected in (
        ({}, {7, 8}),
        ({"eos_token": "t5"}, {5, 7, 8}),
        ({"eos_token": "<beyond>"}, {7, 8}),
    ):
        PreTrainedTokenizerFast(tokenizer_object=backend, **ends).save_pretrained(tmp_path)
        assert ends_of_text(open_model(tmp_path), load_tokenizer(tmp_path)) == expected


# ---- Orbax and conversion ----

# After the first damaged tensor Orbax closes its event loop, and reads still on their way then
# complain to nobody.
orbax_complaints = pytest.mark.filterwarnings(
    "ignore:(?s).*Event loop is closed:pytest.PytestUnraisableExceptionWarning"
)


@pytest.mark.parametrize(
    ("name", "dtype"),
    few(
        itertools.product(CONFIGS, DTYPES),
        [("tied", "bfloat16"), ("gpt2", "float16"), ("opt", "float32")],
    ),
)
def test_the_way_to_orbax_and_back_is_exact(tmp_path, name, dtype):
    source = random_checkpoint(
        tmp_path / "hf", CONFIGS[name], dtype=dtype, shards=2, generation_config={"eos_token_id": 3}
    )
    (source / "tokenizer.json").write_text('{"model": {}}')
    there = convert(source, tmp_path / "new" / "orbax", progress=False)
    assert_same_bits(load(there), expected_arrays(CONFIGS[name], dtype))
    assert weights_bytes(there) == weights_bytes(source)
    back = convert(there, tmp_path / "back", progress=False)
    assert_same_bits(
        dict(load_file(back / "model.safetensors")), random_tensors(CONFIGS[name], dtype=dtype)
    )
    for file in ("config.json", "generation_config.json", "tokenizer.json"):
        assert (
            (back / file).read_bytes()
            == (there / file).read_bytes()
            == (source / file).read_bytes()
        )
    assert sorted(os.listdir(tmp_path)) == ["back", "hf", "new"]


def test_conversion_writes_shards_and_a_bar_on_standard_error(tmp_path, capfd, monkeypatch):
    (tmp_path / "orbax").mkdir()  # an empty directory is as good as none
    source = random_checkpoint(tmp_path / "hf", LLAMA)
    convert(source, tmp_path / "quiet")
    assert capfd.readouterr().err == "", "a bar is for a terminal, not for a file"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    there = convert(source, tmp_path / "orbax")
    assert "converting: 100%" in capfd.readouterr().err
    back = convert(there, tmp_path / "back", max_shard_bytes=10_000)
    assert len(list(back.glob("model-*-of-*.safetensors"))) > 2
    assert_same_bits(load(back), expected_arrays(LLAMA))
    captured = capfd.readouterr()
    assert captured.out == "" and "converting: 100%" in captured.err


def test_mixed_dtypes_convert_exactly(tmp_path):
    tensors = random_tensors(LLAMA)
    for i, name in enumerate(tensors):
        tensors[name] = tensors[name].astype(list(DTYPES.values())[i % 3])
    write_tensors(random_checkpoint(tmp_path / "hf", LLAMA), tensors)
    back = convert(
        convert(tmp_path / "hf", tmp_path / "a", progress=False), tmp_path / "b", progress=False
    )
    assert_same_bits(dict(load_file(back / "model.safetensors")), tensors)


def test_conversion_overwrites_nothing_and_leaves_nothing_behind(tmp_path, monkeypatch):
    source = random_checkpoint(tmp_path / "hf", LLAMA)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious").write_text("x")
    (tmp_path / "link").symlink_to("nowhere")
    for taken in (tmp_path / "full", tmp_path / "full" / "precious", tmp_path / "link", source):
        with pytest.raises(CheckpointError, match="exists and is not an empty directory"):
            convert(source, taken, progress=False)
    before = sorted(os.listdir(tmp_path))

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("jaxpage.checkpoints.conversion.save_orbax", interrupt)
    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "new", progress=False)
    with pytest.raises(CheckpointError, match="could not be written"):
        convert(source, tmp_path / "full" / "precious" / "new", progress=False)
    (source / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="too short"):
        convert(source, tmp_path / "new", progress=False)
    assert sorted(os.listdir(tmp_path)) == before


def flip_config(directory: Path) -> None:
    edit_json(
        directory / "config.json",
        lambda config: config.update(intermediate_size=40, num_hidden_layers=1),
    )


def truncate_all(directory: Path) -> None:
    for file in (directory / "orbax").rglob("*"):
        if file.is_file() and file.parent.name == "d":
            os.truncate(file, file.stat().st_size // 2)


ORBAX_FAULTS: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "uncommitted": (
        lambda d: (d / "orbax" / "commit_success.txt").unlink(),
        ["was not saved to the end"],
    ),
    "shapes and tree": (
        flip_config,
        [
            "'model.layers.0.mlp.up_proj.weight' has shape (48, 32), and the model needs (40, 32)",
            "the number of layers is 1 in config.json and 2 in the tensors",
        ],
    ),
    "tensor missing": (
        lambda d: edit_json(d / "config.json", lambda config: config.update(attention_bias=True)),
        ["'model.layers.0.self_attn.q_proj.bias' of shape (32,) is missing"],
    ),
    "truncated": (truncate_all, ["cannot be read as an Orbax checkpoint"]),
    "no metadata": (lambda d: (d / "orbax" / "_METADATA").unlink(), ["'_METADATA' is missing"]),
    "metadata": (write("orbax/_METADATA", "{"), ["'_METADATA' is not JSON"]),
    "other metadata": (
        write("orbax/_METADATA", '{"tree_metadata": 3}'),
        ["cannot be read as an Orbax checkpoint"],
    ),
    "no manifest": (
        lambda d: (d / "orbax" / "manifest.ocdbt").unlink(),
        ["cannot be read as an Orbax checkpoint"],
    ),
    "file leads out": (
        link_out("orbax/manifest.ocdbt"),
        ["'orbax/manifest.ocdbt' is a symbolic link"],
    ),
    "folder leads out": (link_out("orbax/d"), ["'orbax/d' is a symbolic link"]),
    "orbax leads out": (link_out("orbax"), ["orbax is not a directory"]),
    "pipe": (
        lambda d: os.mkfifo(d / "orbax" / "pipe"),
        ["'orbax/pipe' is a symbolic link or a special file"],
    ),
    "both layouts": (
        lambda d: random_checkpoint(d, LLAMA),
        ["both safetensors files and an orbax directory"],
    ),
}


@pytest.fixture(scope="module")
def orbax_checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("orbax")
    return convert(random_checkpoint(folder / "hf", LLAMA), folder / "orbax", progress=False)


def test_a_tensor_of_orbax_is_released_with_the_last_piece_that_it_fills(monkeypatch):
    restored = {"layer": {"shared": np.ones(2, np.float32), "alone": np.zeros(2, np.float32)}}
    infos = {
        name: SimpleNamespace(name=f"layer.{name}", dtype="F32", shape=(2,))
        for name in ("shared", "alone")
    }
    pieces = [
        SimpleNamespace(pieces=[(None, infos[name])]) for name in ("shared", "alone", "shared")
    ]
    plan = SimpleNamespace(
        layout="orbax", is_in_memory=False, tensors=infos, directory=None, parameters=pieces
    )
    monkeypatch.setattr(loading, "restore_orbax", lambda directory, names: restored)
    read = loading.make_array_reader(plan)
    assert read(infos["shared"])[0] == 1 and "shared" in restored["layer"]
    assert read(infos["alone"])[0] == 0 and "alone" not in restored["layer"]
    assert read(infos["shared"])[0] == 1 and restored == {"layer": {}}


@orbax_complaints
@pytest.mark.parametrize("name", ORBAX_FAULTS)
def test_faulty_orbax_directories(tmp_path, orbax_checkpoint, name):
    change, texts = ORBAX_FAULTS[name]
    directory = tmp_path / "x"
    shutil.copytree(orbax_checkpoint, directory)
    change(directory)
    text = refusal(directory)
    assert [part for part in texts if part not in text] == []


def test_orbax_holds_the_names_and_shapes_of_the_checkpoint(orbax_checkpoint):
    """Orbax reads it alone, without any knowledge of ours."""
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(orbax_checkpoint / "orbax")
    arrays = {".".join(path): np.asarray(array) for path, array in leaves(restored)}
    assert_same_bits(arrays, random_tensors(LLAMA))


@orbax_complaints
def test_orbax_files_beyond_ours_do_no_harm(tmp_path, orbax_checkpoint):
    shutil.copytree(orbax_checkpoint, tmp_path / "x")
    (tmp_path / "x" / "orbax" / "notes.txt").write_text("mine")
    assert_same_bits(load(tmp_path / "x"), expected_arrays(LLAMA))


@orbax_complaints
def test_orbax_data_lost_after_the_check_is_a_checkpoint_error(tmp_path, orbax_checkpoint):
    shutil.copytree(orbax_checkpoint, tmp_path / "x")
    plan = open_model(tmp_path / "x").plan
    truncate_all(tmp_path / "x")
    with pytest.raises(CheckpointError, match="cannot be restored"):
        load_weights(plan, None, lambda array: array)
    # What Orbax complains of while its other reads end, and while it is collected, belongs to this
    # test.
    time.sleep(0.5)
    gc.collect()


# ---- Names of models ----


class Hub:
    """Stands for huggingface_hub: the files of a repository, at one commit, or an error."""

    def __init__(self, answer: Path | Exception) -> None:
        self.answer = answer
        self.calls: list[dict[str, Any]] = []

    def snapshot_download(
        self, *, repo_id: str, revision: str | None, allow_patterns: list[str]
    ) -> str:
        self.calls.append({"repo_id": repo_id, "revision": revision})
        if isinstance(self.answer, Exception):
            raise self.answer
        snapshot = self.answer.parent / "snapshots" / "c0ffee"
        names = [
            str(path.relative_to(self.answer)) for path in self.answer.rglob("*") if path.is_file()
        ]
        for name in huggingface_hub.utils.filter_repo_objects(names, allow_patterns=allow_patterns):
            (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(self.answer / name, snapshot / name)
        return str(snapshot)


def use_hub(monkeypatch: pytest.MonkeyPatch, answer: Path | Exception) -> Hub:
    hub = Hub(answer)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)  # type: ignore[arg-type]
    return hub


def test_local_directories_and_the_demo(tmp_path, monkeypatch):
    hub = use_hub(monkeypatch, RuntimeError("the hub must not be asked"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "llama").mkdir(parents=True)
    assert (
        resolve_model("models/llama")
        == resolve_model(tmp_path / "models" / "llama")
        == tmp_path / "models" / "llama"
    )
    monkeypatch.setattr("jaxpage.checkpoints.finding.resolve.DEMO", tmp_path / "models")
    assert resolve_model("demo") == tmp_path / "models"
    monkeypatch.setattr("jaxpage.checkpoints.finding.resolve.DEMO", tmp_path / "none")
    with pytest.raises(ModelNotFoundError, match="packaged demo model is missing"):
        resolve_model("demo")
    for name in ("models/llama", str(tmp_path)):
        with pytest.raises(ConfigError, match="revision = 'v1'"):
            resolve_model(name, "v1")
    assert hub.calls == []


@pytest.mark.parametrize(
    "name",
    ["./models/lama", "{tmp}/models/lama", "models/lama/", "~/x", "a/b/c", "", "\0", "x" * 9999],
)
def test_paths_that_lead_nowhere_never_reach_the_hub(tmp_path, monkeypatch, name):
    hub = use_hub(monkeypatch, RuntimeError("asked"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "llama").mkdir(parents=True)
    with pytest.raises(ModelNotFoundError, match="there is no such directory") as caught:
        resolve_model(name.replace("{tmp}", str(tmp_path)))
    if "lama" in name:
        assert "models/llama'" in str(caught.value) and "Did you mean" in str(caught.value)
    # only that could be a hub id; the hub is the one to say it is too long
    assert len(hub.calls) == (name[:1] == "x")


def test_a_file_is_not_a_model(tmp_path):
    random_checkpoint(tmp_path, LLAMA)
    with pytest.raises(ModelNotFoundError, match="is not a directory"):
        resolve_model(tmp_path / "model.safetensors")


EXPECTED = [
    *(
        "config.json",
        "generation_config.json",
        "hf_quant_config.json",
        "tokenizer.json",
        "tokenizer.model",
    ),
    *("chat_template.jinja", "additional_chat_templates/tool_use.jinja"),
]
UNWANTED = [
    *(
        "pytorch_model.bin",
        "modeling_evil.py",
        "consolidated.safetensors",
        "x.pt",
        "model.onnx",
        "tf_model.h5",
    ),
    *("README.md", "original/model-00001.safetensors", "model.fp16.safetensors"),
]


@pytest.mark.parametrize(
    "weights",
    [
        [SINGLE],
        [INDEX, "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"],
        [INDEX, "model.safetensors-00001-of-00001.safetensors"],  # Qwen3.5's
        [INDEX, "weights/first[1].safetensors", "last.safetensors"],
        ["orbax/manifest.ocdbt", "orbax/d/1234"],
    ],
)
def test_all_files_of_a_hub_model_come_from_one_pinned_snapshot(tmp_path, monkeypatch, weights):
    shards = [name for name in weights if name.endswith(".safetensors")]
    for name in (*EXPECTED, *UNWANTED, *weights):
        (tmp_path / "repository" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "repository" / name).write_text(
            json.dumps({"weight_map": dict(enumerate([*shards, "x.pt"]))})
        )
    hub = use_hub(monkeypatch, tmp_path / "repository")
    snapshot = resolve_model("org/name", "main")
    assert [(call["repo_id"], call["revision"]) for call in hub.calls] == [
        ("org/name", "main"),
        ("org/name", "c0ffee"),
    ]
    assert {str(path.relative_to(snapshot)) for path in snapshot.rglob("*") if path.is_file()} == {
        *EXPECTED,
        *weights,
    }
    shutil.rmtree(snapshot)
    paths = {
        str(path.relative_to(snapshot))
        for path in resolve_tokenizer("org/name").rglob("*")
        if path.is_file()
    }
    assert paths == {*EXPECTED} - {"generation_config.json", "hf_quant_config.json"}


def test_a_hub_that_does_not_answer(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    use_hub(monkeypatch, ConnectionError("no route to host\nand more"))
    with pytest.raises(
        ModelNotFoundError,
        match=r"'org/name'.*the hub gave no model.*at revision 'v2' \(ConnectionError: no "
        r"route to host\)$",
    ):
        resolve_model("org/name", "v2")
    with pytest.raises(ModelNotFoundError, match="Did you mean 'demo'"):
        resolve_model("demmo")


GATED = "terms: ask for access on the model's page .*`hf auth login`, or set HF_TOKEN"
PRIVATE = "no model of that name for you: .*if it is private, log in"
REFUSED = "the hub refused access: the token may be old.*Log in anew"


@pytest.mark.parametrize(
    ("status", "code", "message", "expected"),
    [
        (401, "GatedRepo", "Access to model org/name is restricted.", GATED),
        (403, "GatedRepo", "You are not in the authorized list.", GATED),
        (401, "RepoNotFound", "Repository not found", PRIVATE),
        (404, "RepoNotFound", "Repository not found", PRIVATE),
        (401, "", "Invalid credentials in Authorization header", REFUSED),
        (403, "", "Forbidden", REFUSED),
        (404, "RevisionNotFound", "Invalid rev id: main", "the hub gave no model of that name "),
    ],
)
@pytest.mark.parametrize("refused", ["/api/", "/"])
def test_the_real_hub_client_refused(
    tmp_path, monkeypatch, status, code, message, expected, refused
):
    """The hub refuses all, or says which files a model has and does not give them."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if refused == "/" and self.path.startswith("/api/"):
                file = {"rfilename": "config.json", "type": "file", "path": "config.json"}
                files = [{**file, "oid": "0", "size": 2}]
                described = {"id": "org/name", "sha": "c0ffee" * 7, "siblings": files}
                body = json.dumps(files if "/tree/" in self.path else described).encode()
                self.send_response(200)
            else:
                body = b""
                self.send_response(status)
                self.send_header("X-Error-Message", message)
                if code:
                    self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
        template = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
        with pytest.raises(ModelNotFoundError, match=expected) as raised:
            resolve_model_config("org/name")
        server.shutdown()
    assert "cannot be reached" not in str(raised.value)


def test_the_real_hub_client_offline(tmp_path):
    """The process has imported nothing slow before it asks."""
    code = (
        "import sys; from jaxpage.checkpoints.finding import resolve_model\n"
        "print([name for name in ('orbax', 'huggingface_hub', 'torch') if name in sys.modules])\n"
        "resolve_model('some-org/some-model')"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout == "[]\n"
    assert "jaxpage.errors.ModelNotFoundError: model = 'some-org/some-model'" in done.stderr
    assert "the hub cannot be reached, and its cache on this machine has no" in done.stderr


# ---- Any bytes at all ----

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 2**70)
    | st.floats(allow_nan=False)
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=6,
)


def survive(directory: Path) -> None:
    """Opens and loads: it works or it is a CheckpointError."""
    try:
        opened = open_model(directory)
        load_weights(opened.plan, None, lambda array: array)
        eos_token_ids(directory, opened.config)
    except CheckpointError:
        pass


def damage(data: st.DataObject, content: bytes) -> bytes:
    """Returns `content` with a few bytes flipped, cut, or put in."""
    changed = bytearray(content)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, max(len(changed) - 1, 0)))
        kind = data.draw(st.sampled_from(["flip", "cut", "put in"]))
        if kind == "flip" and changed:
            changed[at] ^= data.draw(st.integers(1, 255))
        elif kind == "cut":
            del changed[at : at + data.draw(st.integers(1, 50))]
        else:
            changed[at:at] = data.draw(st.binary(min_size=1, max_size=8))
    return bytes(changed)


def replace_part(data: st.DataObject, value: Any) -> Any:
    """Returns `value` with one part, anywhere inside, replaced by arbitrary JSON."""
    if isinstance(value, dict) and value and data.draw(st.integers(0, 9)):
        key = data.draw(st.sampled_from(sorted(value)))
        return {**value, key: replace_part(data, value[key])}
    if isinstance(value, list) and value and data.draw(st.integers(0, 3)):
        at = data.draw(st.integers(0, len(value) - 1))
        return [*value[:at], replace_part(data, value[at]), *value[at + 1 :]]
    return data.draw(JSON)


fuzz = settings(
    max_examples=settings().max_examples // 2,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.mark.parametrize("name", ["model.safetensors", INDEX, "config.json"])
@fuzz
@given(data=st.data())
def test_damaged_files_raise_nothing_but_checkpoint_errors(tmp_path, name, data):
    config = data.draw(st.sampled_from([LLAMA, GPT2, OPT])) if name == "config.json" else LLAMA
    if not (tmp_path / "keep").exists():
        random_checkpoint(tmp_path / "keep", LLAMA, shards=2 if name == INDEX else 1)
        shutil.copytree(tmp_path / "keep", tmp_path / "x")
    if name == "config.json":
        content = json.dumps(config).encode()
    else:
        content = (tmp_path / "keep" / name).read_bytes()
    header_end = (
        8 + int.from_bytes(content[:8], "little") if name == "model.safetensors" else len(content)
    )
    if data.draw(st.booleans()):
        content = damage(data, content[:header_end]) + content[header_end:]
    elif name == "model.safetensors":
        content = safetensors(
            replace_part(data, json.loads(content[8:header_end])), content[header_end:]
        )
    else:
        content = json.dumps(replace_part(data, json.loads(content))).encode()
    (tmp_path / "x" / name).write_bytes(content)
    survive(tmp_path / "x")
