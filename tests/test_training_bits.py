"""`TrainableModel` has the bits of the engine: whole distributions, after updates, and however it
is compiled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpage import LLM, LoRARequest, SamplingParams
from jaxpage.device.hardware import choose_backend
from jaxpage.device.rows.division import STREAM_TOKENS, divide_rows
from jaxpage.errors import CheckpointError, UnsupportedError
from jaxpage.training import LoRAWeights, TrainableModel
from pallas_kernels.cpu import packed
from tests.support.engines import GRANITE_4, LLAMA, QWEN3_5, make_llm
from tests.support.model_configs import config_json
from tests.support.random_checkpoints import random_checkpoint, random_tensors
from tests.support.sweeps import few

VOCAB_SIZE = 20  # so few that an engine reports the log probabilities of all tokens
ROWS = np.random.default_rng(5).integers(0, VOCAB_SIZE, (4, 24)).astype(np.int32)
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "qwen3.5": {  # delta rules
        **{**QWEN3_5, "max_position_embeddings": 1024},
        **{"num_hidden_layers": 2, "full_attention_interval": 2},
    },
    "granite 4": {  # Mamba 2 and experts
        **GRANITE_4,
        **{"num_hidden_layers": 2, "layers_block_type": ["mamba", "attention"]},
    },
    "jamba": config_json("jamba-mixed"),
    "gemma 3": config_json("gemma3-types", num_hidden_layers=2, sliding_window_pattern=2),
    "qwen3 moe": config_json("qwen3-moe-mixed", head_dim=16, num_hidden_layers=2),
    "mixtral": config_json("mixtral-window"),
    "deepseek": config_json("deepseek-v3-groups", num_hidden_layers=2),
    "gpt-oss": config_json("gpt-oss-windows"),
    "llama 4": config_json("llama4-chunks"),
    "lfm 2": config_json("lfm2-mixed"),
    "phi-moe": config_json("phimoe-biases"),
}


def load(llm: LLM, **settings: Any) -> tuple[TrainableModel, Any]:
    """Returns the trainer's model with the engine's weights."""
    return TrainableModel.load(llm.hf_config, llm.parameters(), **settings)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Any]:
    engines: list[LLM] = []

    def make_engine(name: str, **settings: Any) -> LLM:
        config = {**CONFIGS[name], "vocab_size": VOCAB_SIZE}
        directory = random_checkpoint(tmp_path / f"{len(engines)}", config)
        engines.append(make_llm(directory, **{"max_model_len": 128, **settings}))
        return engines[-1]

    yield make_engine
    for llm in engines:
        llm.shutdown()


def scores(llm: LLM, rows: np.ndarray = ROWS) -> np.ndarray:
    """Returns what the engine says of each token from the second on."""
    prompts, continuations = rows[:, :1].tolist(), rows[:, 1:].tolist()
    return np.array(llm.score(prompts, continuations), np.float32)


def distributions(llm: LLM) -> np.ndarray:
    """Returns what the engine says of all tokens after each of ROWS but the last, [R, C - 1, V]."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=VOCAB_SIZE)
    outputs = llm.generate(ROWS.tolist(), params, use_tqdm=False)
    return np.array(
        [
            [
                [entries[token].logprob for token in range(VOCAB_SIZE)]
                for entries in output.prompt_logprobs[1:]
            ]
            for output in outputs
        ],
        np.float32,
    )


@jax.jit  # by itself each operation would be compiled for each shape
def add_gradients(weights: Any, gradients: Any, rate: float) -> Any:
    return jax.tree.map(lambda w, g: (w + rate * g).astype(w.dtype), weights, gradients)


def weigh(model: TrainableModel, weights: Any, rows: Any) -> tuple[jax.Array, jax.Array]:
    """Returns a loss that depends on all tokens, and the log probabilities."""
    logprobs = model.log_probabilities(weights, rows)
    return jnp.sum(logprobs * jnp.sin(jnp.arange(logprobs.size)).reshape(logprobs.shape)), logprobs


@pytest.mark.parametrize(
    ("name", "dtype"),
    few(
        [(name, dtype) for name in CONFIGS for dtype in ("float32", "bfloat16")],
        # Qwen3.5 in float32 is in the test of long rows.
        [("qwen3 moe", "bfloat16"), ("deepseek", "float32")],
    ),
)
def test_every_bit_is_the_engine_s_before_and_after_an_update(
    name: str, dtype: str, make: Any
) -> None:
    llm = make(name, dtype=dtype)
    model, weights = load(llm, dtype=dtype)

    @jax.jit
    def whole(weights: Any) -> jax.Array:
        logits = model.logits(weights, ROWS)[:, :-1].reshape(-1, VOCAB_SIZE)
        every = jnp.tile(jnp.arange(VOCAB_SIZE), len(logits))
        return model._rows.log_probabilities(jnp.repeat(logits, VOCAB_SIZE, axis=0), every)

    @jax.jit
    def differentiate(weights: Any) -> Any:
        return jax.value_and_grad(lambda w: weigh(model, w, ROWS), has_aux=True)(weights)

    expected = distributions(llm)
    np.testing.assert_array_equal(whole(weights).reshape(expected.shape), expected)
    (_, logprobs), gradients = differentiate(weights)
    np.testing.assert_array_equal(logprobs, scores(llm))
    for path, gradient in jax.tree.leaves_with_path(gradients):
        assert np.isfinite(np.asarray(gradient, np.float32)).all(), path
    weights = add_gradients(weights, gradients, -1e-2)
    llm.update_parameters(model.named(weights))
    (_, others), _ = differentiate(weights)
    assert np.mean(np.asarray(others) == np.asarray(logprobs)) < 0.1
    np.testing.assert_array_equal(others, scores(llm))


@pytest.mark.parametrize("name", few(["qwen3 moe", "llama", "granite 4"], ["qwen3 moe"]))
def test_neither_batches_nor_transformations_change_a_bit(name: str, make: Any) -> None:
    llm = make(name)
    model, weights = load(llm)
    expected = scores(llm)
    np.testing.assert_array_equal(model.log_probabilities(weights, ROWS), expected)

    def loss(weights: Any, rows: Any) -> tuple[jax.Array, jax.Array]:
        return weigh(model, weights, rows)

    differentiate = jax.jit(jax.value_and_grad(jax.checkpoint(loss), has_aux=True))
    (_, again), _ = differentiate(weights, ROWS)
    np.testing.assert_array_equal(again, expected)

    def accumulate(total: Any, rows: jax.Array) -> tuple[Any, jax.Array]:
        (_, logprobs), gradients = jax.value_and_grad(loss, has_aux=True)(weights, rows)
        return jax.tree.map(jnp.add, total, gradients), logprobs

    zeros = jax.tree.map(lambda w: np.zeros(w.shape, w.dtype), weights)
    _, parts_of_logprobs = jax.jit(
        lambda: jax.lax.scan(accumulate, zeros, ROWS.reshape(2, 2, -1))
    )()
    np.testing.assert_array_equal(parts_of_logprobs.reshape(expected.shape), expected)
    of_rows = jax.jit(jax.vmap(model.log_probabilities, (None, 0)))(weights, ROWS[:, None])
    np.testing.assert_array_equal(of_rows[:, 0], expected)
    changes = jax.tree.map(lambda w: np.ones(w.shape, w.dtype), weights)
    derive = jax.jit(lambda *of: jax.jvp(lambda w: model.log_probabilities(w, ROWS), *of))
    of_pairs, _ = derive((weights,), (changes,))
    np.testing.assert_array_equal(of_pairs, expected)


def test_long_rows_and_many_rows_are_divided(make: Any) -> None:
    llm = make("qwen3.5", max_model_len=STREAM_TOKENS + 128, num_blocks=None)
    model, weights = load(llm)
    compute = jax.jit(model.log_probabilities)
    for shape in ((1, STREAM_TOKENS + 101), (70, 10), (1, 2), (3, 1)):
        rows = np.random.default_rng(7).integers(0, VOCAB_SIZE, shape).astype(np.int32)
        if shape[1] > 1:
            np.testing.assert_array_equal(compute(weights, rows), scores(llm, rows))
        else:
            assert compute(weights, rows).shape == (3, 0)
    division = divide_rows(70, 10)
    assert (division.num_streams, division.rows_at_once, division.num_chunks) == (2, 35, 1)
    division = divide_rows(2, 1100)
    assert (division.num_streams, division.rows_at_once, division.num_chunks) == (2, 1, 3)
    assert division.chunk * 3 - 1100 < 3


@pytest.mark.parametrize("name", few(["llama", "qwen3 moe", "qwen3.5"], ["llama"]))
def test_an_engine_without_kernels_in_cpp_has_the_bits_of_a_trainer_without(
    name: str, make: Any
) -> None:
    """The kernels' order of sums is not that of XLA, which is seen."""
    llm = make(name, attention_backend="scan")
    expected = scores(llm)
    model, weights = load(llm, attention_backend="scan")
    np.testing.assert_array_equal(jax.jit(model.log_probabilities)(weights, ROWS), expected)
    if not packed.takes("float32"):
        pytest.skip("no kernels for this CPU")
    model, _ = load(llm)
    others = np.asarray(jax.jit(model.log_probabilities)(weights, ROWS))
    assert np.mean(others == expected) < 0.9
    np.testing.assert_allclose(others, expected, atol=1e-4)


@pytest.mark.parametrize("name", few(["llama", "gemma 3", "qwen3.5"], ["llama"]))
def test_derivatives_are_those_of_the_dense_pass(name: str, make: Any) -> None:
    llm = make(name)
    gradients = []
    for exact in (True, False):
        model, weights = load(llm, exact=exact)
        differentiate = jax.jit(jax.grad(lambda w, m=model: weigh(m, w, ROWS)[0]))
        gradients.append(differentiate(weights))
    for ours, dense in zip(*map(jax.tree.leaves, gradients), strict=True):
        np.testing.assert_allclose(ours, dense, atol=1e-5 * max(1.0, float(abs(dense).max())))


def test_what_has_other_types_or_no_logits_is_refused() -> None:
    config: dict[str, Any] = {**LLAMA, "vocab_size": VOCAB_SIZE}
    model, weights = TrainableModel.load(config, random_tensors(config), dtype="bfloat16")
    weights["tokens"]["table"] = weights["tokens"]["table"].astype(jnp.float32)
    with pytest.raises(TypeError, match=r"table'\] is float32, .* computes in bfloat16: cast it"):
        model.log_probabilities(weights, ROWS)
    config = {"architectures": ["BertModel"], "model_type": "bert", "num_hidden_layers": 1}
    config |= {"hidden_size": 48, "num_attention_heads": 4, "intermediate_size": 80}
    config |= {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 32}
    with pytest.raises(UnsupportedError, match="encoders cannot be trained"):
        TrainableModel.load(config, random_tensors(config))


def test_panels_on_the_device_are_those_of_the_host() -> None:
    rng = np.random.default_rng(0)
    for shape in ((20, 7), (3, 32, 6)):
        weight = rng.standard_normal(shape).astype(np.float32)
        for dtype, numbers in (("float32", 1), ("bfloat16", 2)):
            array = jnp.asarray(weight, dtype)
            panels = jax.jit(packed.panels_of, static_argnums=1)(array, numbers)
            np.testing.assert_array_equal(panels, packed.pack(np.asarray(array), numbers))


def make_trained_adapter(model: TrainableModel, seed: int, **settings: Any) -> LoRAWeights:
    """Makes an adapter whose matrices B are not zero."""
    adapter = model.make_adapter(seed=seed, **settings)
    rng = np.random.default_rng(seed)
    tensors = {
        name: jnp.asarray(0.3 * rng.standard_normal(array.shape), "float32")
        for name, array in adapter.tensors.items()
    }
    return dataclasses.replace(adapter, tensors=tensors)


@pytest.mark.parametrize(
    ("name", "dtype"),
    few(
        [(name, dtype) for name in CONFIGS for dtype in ("float32", "bfloat16")],
        [],  # tests/test_lora.py always has one
    ),
)
def test_an_adapter_has_the_engine_s_bits_before_and_after_it_is_trained(
    name: str, dtype: str, make: Any
) -> None:
    llm = make(name, dtype=dtype, enable_lora=True, max_loras=2, max_lora_rank=8)
    model, weights = TrainableModel.for_engine(llm)
    assert model.dtype == dtype and model.find_differences(llm) == []
    adapter = make_trained_adapter(model, 1, rank=5, alpha=7)
    policy = LoRARequest("policy", 1)
    without = scores(llm)

    @jax.jit
    def differentiate(adapter: LoRAWeights) -> Any:
        def loss(adapter: LoRAWeights) -> tuple[jax.Array, jax.Array]:
            logprobs = model.log_probabilities(weights, ROWS, adapter)
            return logprobs.mean(), logprobs

        return jax.value_and_grad(loss, has_aux=True)(adapter)

    compute = jax.jit(model.log_probabilities)
    for _ in range(2):
        llm.update_adapter(policy, adapter.tensors, adapter.config)
        prompts, continuations = ROWS[:, :1].tolist(), ROWS[:, 1:].tolist()
        expected = np.array(llm.score(prompts, continuations, lora_request=policy), np.float32)
        (_, logprobs), gradients = differentiate(adapter)
        np.testing.assert_array_equal(logprobs, expected)
        np.testing.assert_array_equal(compute(weights, ROWS[1:2], adapter), expected[1:2])
        assert np.mean(expected == without) < 0.1
        assert gradients.tensors.keys() == adapter.tensors.keys()
        sizes = [float(np.abs(gradient).max()) for gradient in jax.tree.leaves(gradients)]
        assert np.isfinite(sizes).all() and np.mean(np.array(sizes) > 0) > 0.9
        adapter = add_gradients(adapter, gradients, 0.1)
    np.testing.assert_array_equal(scores(llm), without)


def test_an_engine_with_other_settings_is_known_by_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config: dict[str, Any] = {**LLAMA, "vocab_size": VOCAB_SIZE}
    loaded = TrainableModel.load(config, random_tensors(config), exact=False)
    other = TrainableModel.load({**config, "rms_norm_eps": 0.1}, random_tensors(config))[0]
    described = SimpleNamespace(
        kernels=choose_backend("scan", jax.devices()[0]), model=other._files.spec
    )
    spec = SimpleNamespace(
        layout=SimpleNamespace(dtype="bfloat16"),
        page_dtype=jnp.dtype("float8_e4m3fn"),
        described=described,
        quantization="int8",
        sharding=SimpleNamespace(num_shards=4),
    )
    settings = SimpleNamespace(enable_lora=True, max_lora_rank=8, attention_backend="scan")
    llm: Any = SimpleNamespace(spec=spec, config=settings, hf_config=config, parameters=dict)
    expected = [
        "dtype is float32 here and bfloat16 in the engine",
        "kv_cache_dtype is float32 here and float8_e4m3fn in the engine",
        "attention_backend is auto here and scan in the engine",
        "quantization is none here and int8 in the engine",
        "shards whose sums are added is 1 here and 4 in the engine",
        "exact is False here and True in the engine",
        "max_lora_rank is 16 here and 8 in the engine",
        "config.json describes another model",
    ]
    differences = loaded[0].find_differences(llm)
    assert [line for line in differences if not line.startswith("products")] == expected
    monkeypatch.setattr(TrainableModel, "load", lambda *_, **__: loaded)
    assert TrainableModel.for_engine(llm)[0] is loaded[0]
    (line,) = caplog.messages
    assert all(difference in line for difference in expected)


def test_adapters_that_cannot_be_trained_are_refused() -> None:
    config: dict[str, Any] = {**CONFIGS["qwen3 moe"], "vocab_size": VOCAB_SIZE}
    model, weights = TrainableModel.load(config, random_tensors(config), max_lora_rank=8)
    for names, text in (
        (["experts.0.up_proj"], "that take no adapter: 'model.layers.*experts.0.up_proj'"),
        (["embed_tokens"], "'embed_tokens' is the name of modules that take no adapter"),
        (["lm_head"], "'lm_head' is the name of modules that take no adapter"),
    ):
        with pytest.raises(UnsupportedError, match=text):
            model.make_adapter(target_modules=names)
    with pytest.raises(ValueError, match="the model has no 'query'; what .* 'k_proj', 'o_proj'"):
        model.make_adapter(target_modules=["q_proj", "query"])
    with pytest.raises(ValueError, match="target_modules must have a name"):
        model.make_adapter(target_modules=[])
    with pytest.raises(TypeError, match="a list of names of modules, or 'all-linear'; got 'q_proj"):
        model.make_adapter(target_modules="q_proj")
    for rank in (0, 9):
        with pytest.raises(ValueError, match=f"from 1 to max_lora_rank, which is 8; got {rank}"):
            model.make_adapter(rank=rank)
    for wrong in ({"rank": 2.0}, {"alpha": "8"}):
        with pytest.raises(TypeError, match="must be a"):
            model.make_adapter(**wrong)
    with pytest.raises(ValueError, match="alpha must be finite, got nan"):
        model.make_adapter(alpha=float("nan"))
    adapter = model.make_adapter(target_modules=["q_proj"])
    tensors = dict(adapter.tensors)
    tensors.popitem()
    tensors["x"] = jnp.zeros((2, 2))
    with pytest.raises(CheckpointError) as refusal:
        model.logits(weights, ROWS, dataclasses.replace(adapter, tensors=tensors))
    assert "the adapter in (parameters in memory) does not fit (2 problems)" in str(refusal.value)
    assert "has no lora_" in str(refusal.value) and "'x' is not one of" in str(refusal.value)
    with pytest.raises(TypeError, match="adapter must be LoRAWeights or None, not dict"):
        model.logits(weights, ROWS, adapter.tensors)
