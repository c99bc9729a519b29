"""The engine on the GPU's kernels, interpreted on CPU: the reference's tokens, and a refusal where a device cannot run them."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from jaxpage import BeamSearchParams, EngineConfig, SamplingParams
from jaxpage.device.backends import Backend, choose_backend
from jaxpage.engine.capacity import Place, mixes
from jaxpage.errors import UnsupportedError
from pallas_kernels import BACKENDS, INTERPRETABLE_BACKENDS, XLA_BACKENDS
from tests.support.engines import LLAMA, invariants, make_llm
from tests.support.random_checkpoints import random_checkpoint

pytestmark = pytest.mark.optimized

# Three rows and 16 tokens at most, so that few shapes are compiled; a pool that makes somebody give way.
SETTINGS = {"max_num_seqs": 3, "max_num_batched_tokens": 16, "max_model_len": 64, "num_blocks": 11, "block_size": 8}
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=0.9, n=2, seed=3, max_tokens=20, ignore_eos=True, logprobs=2),
    BeamSearchParams(beam_width=2, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=5, max_tokens=30, ignore_eos=True),
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return random_checkpoint(tmp_path_factory.mktemp("model") / "llama", LLAMA)


def outputs_of(directory, **settings):
    rng = np.random.default_rng(1)
    prompts = [rng.integers(1, 257, length).tolist() for length in (30, 17, 9, 23)]
    with make_llm(directory, **SETTINGS, **settings) as llm:
        outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
        stats = llm.stats()
        invariants(llm)
    return [[output.token_ids for output in each.outputs] for each in outputs], stats


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="plain", marks=pytest.mark.sweep),
        pytest.param({"enable_mixed_steps": True, "kv_cache_dtype": "int8"}, id="mixed-int8"),
    ],
)
def test_the_interpreted_kernel_gives_the_tokens_of_the_reference(directory, settings):
    want, _ = outputs_of(directory, attention_backend="reference", **settings)
    got, stats = outputs_of(directory, attention_backend="triton", **settings)
    assert got == want
    assert sum(stats["num_preemptions_total"].values()) > 0 and stats["copy_on_write_blocks_total"] > 0


def gpu(capability):
    return SimpleNamespace(platform="gpu", device_kind="a GPU", compute_capability=capability)


CPU = SimpleNamespace(platform="cpu", device_kind="cpu")


def test_kernels_are_interpreted_on_cpu_only():
    assert [choose_backend(name, CPU) for name in ("auto", "scan")] == [Backend("auto"), Backend("scan")]
    for name in INTERPRETABLE_BACKENDS:
        assert choose_backend(name, CPU) == Backend(name, interpret=True)
    for name in set(BACKENDS) - {*INTERPRETABLE_BACKENDS, *XLA_BACKENDS}:
        with pytest.raises(UnsupportedError, match=f"'{name}' needs a GPU: jax .* does not interpret it"):
            choose_backend(name, CPU)
    for name in BACKENDS:
        assert choose_backend(name, gpu("9.0")) == Backend(name)


def test_an_old_gpu_gets_what_it_can_run():
    assert choose_backend("auto", gpu("9.0")).name == choose_backend("auto", gpu("8.0")).name == "auto"
    assert choose_backend("auto", gpu("7.5")).name == "scan"
    with pytest.raises(
        UnsupportedError,
        match="'triton' with kv_cache_dtype 'auto' needs a GPU of compute capability 8.0 or more, but a GPU has 7.5; use reference or scan",
    ):
        choose_backend("triton", gpu("7.5"))
    with pytest.raises(UnsupportedError, match="'mosaic' with .* needs a GPU of compute capability 9.0"):
        choose_backend("mosaic", gpu("8.6"))


def test_a_gpu_without_fp8_keeps_pages_of_it_in_plain_xla():
    assert choose_backend("auto", gpu("8.0"), "fp8").name == "scan"
    assert choose_backend("auto", gpu("8.9"), "fp8").name == choose_backend("auto", gpu("8.0"), "int8").name == "auto"
    with pytest.raises(UnsupportedError, match="'triton' with kv_cache_dtype 'fp8' needs .* 8.9 or more"):
        choose_backend("triton", gpu("8.0"), "fp8")
    assert choose_backend("scan", gpu("8.0"), "fp8").name == "scan"


def test_what_writes_goes_with_the_backend():
    assert {name: Backend(name).mover["backend"] for name in ("auto", *BACKENDS)} == {
        "auto": "auto",
        "reference": "xla",
        "scan": "xla",
        "triton": "triton",
        "mosaic": "triton",
    }


def test_steps_mix_by_default_where_kernels_run():
    cpu, big = Place("cpu (cpu)", 2**34), Place("gpu (NVIDIA H200)", 2**37)
    assert not mixes(EngineConfig(), cpu) and mixes(EngineConfig(), big)
    assert mixes(EngineConfig(attention_backend="triton"), big)
    assert not mixes(EngineConfig(attention_backend="scan"), big)
    assert mixes(EngineConfig(enable_mixed_steps=True), cpu) and not mixes(EngineConfig(enable_mixed_steps=False), big)


def test_a_model_that_no_kernel_takes_is_refused_with_the_reason(tmp_path):
    wide = random_checkpoint(tmp_path / "llama", {**LLAMA, "head_dim": 272})
    with pytest.raises(UnsupportedError, match="attention_backend 'triton': .* triton: k_pages with heads 272 wide"):
        make_llm(wide, attention_backend="triton")
