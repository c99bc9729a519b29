"""The engine on the GPU's kernels, interpreted on CPU: the reference's tokens, and a refusal where
a device cannot run them.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpage import BeamSearchParams, EngineConfig, SamplingParams
from jaxpage.assembly import choose_dtype
from jaxpage.assembly.planning import Described, ModelLayout, engine_spec_of, notices
from jaxpage.assembly.planning.engine_spec import mixes
from jaxpage.device.attention import make_attend
from jaxpage.device.hardware import DeviceSpec
from jaxpage.device.hardware.backends import Backend, attention_sets, choose_backend
from jaxpage.device.inputs.buckets import Bucket
from jaxpage.device.inputs.step_inputs import TableShape, size_when_packed, unpack, views
from jaxpage.device.pages.kv_pages import LayerPages, page_dtype, page_shapes
from jaxpage.errors import CapacityError, UnsupportedError
from jaxpage.models.base import KVSpec
from jaxpage.models.gemma import Gemma2, Gemma3
from jaxpage.models.glm import Glm4
from jaxpage.models.llama import Llama
from jaxpage.settings import engine_config
from pallas_kernels import BACKENDS, INTERPRETABLE_BACKENDS, AttentionOptions
from pallas_kernels.cpu.library import load
from pallas_kernels.sets import KERNEL_BACKENDS, SETS, XLA_BACKENDS
from pallas_kernels.triton import backend as triton_backend
from pallas_kernels.triton import matmul
from tests.support.engines import LLAMA, invariants, make_llm
from tests.support.random_checkpoints import random_checkpoint
from tests.support.sweeps import few
from tools.step_shapes import LLAMA_3_8B

pytestmark = pytest.mark.usefixtures("largest_shapes")

# Three rows and 16 tokens at most, so that few shapes are compiled; a pool in which some are
# preempted.
SETTINGS = {
    "max_num_seqs": 3,
    "max_num_batched_tokens": 16,
    "max_model_len": 64,
    "num_blocks": 11,
    "block_size": 8,
}
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=0.9, n=2, seed=3, max_tokens=20, ignore_eos=True, logprobs=2),
    BeamSearchParams(beam_width=2, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=5, max_tokens=30, ignore_eos=True),
]


def outputs_of(directory, **settings):
    rng = np.random.default_rng(1)
    prompts = [rng.integers(1, 257, length).tolist() for length in (30, 17, 9, 23)]
    with make_llm(directory, **SETTINGS, **settings) as llm:
        outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
        stats = llm.stats()
        invariants(llm)
    return [[output.token_ids for output in each.outputs] for each in outputs], stats


EXPERTS = {
    **{
        **LLAMA,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 64,
    },
    **{
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 1,
    },
}


MIXED = {"enable_mixed_steps": True, "kv_cache_dtype": "int8"}


@pytest.mark.parametrize(
    ("config", "settings"),
    few(
        [
            ({**LLAMA, "num_hidden_layers": 1}, {}),
            *((EXPERTS, {"quantization": quantization}) for quantization in (None, "int8")),
            (EXPERTS, {"quantization": "int4", **MIXED}),
        ],
        [(EXPERTS, {"quantization": "int4", **MIXED})],
    ),
)
def test_the_interpreted_kernels_give_the_tokens_of_the_reference(
    config, settings, tmp_path, monkeypatch
):
    """Kernels compute attention, and the products of experts and of dense layers of few bits."""
    directory, codes = random_checkpoint(tmp_path, config), set()
    right = matmul.kernel
    monkeypatch.setattr(
        matmul,
        "kernel",
        lambda *refs, config: codes.add(config.code) or right(*refs, config=config),
    )
    expected, _ = outputs_of(directory, attention_backend="reference", **settings)
    assert not codes
    tokens, stats = outputs_of(directory, attention_backend="triton", **settings)
    assert tokens == expected
    quantization = settings.get("quantization")
    experts = {quantization if quantization == "int4" else None}
    assert codes == (experts if config is EXPERTS else set())
    assert sum(stats["num_preemptions_total"].values()) > 0
    assert stats["copy_on_write_blocks_total"] > 0


def gpu(capability):
    return SimpleNamespace(platform="gpu", device_kind="NVIDIA A100", compute_capability=capability)


CPU = SimpleNamespace(platform="cpu", device_kind="cpu")
TPU = SimpleNamespace(platform="tpu", device_kind="TPU v5 lite")


def test_kernels_are_interpreted_on_cpu_only():
    in_cpp = not load().reason
    assert [choose_backend(name, CPU) for name in ("auto", "scan")] == [
        Backend("auto", in_cpp=in_cpp),
        Backend("scan"),
    ]
    for name in INTERPRETABLE_BACKENDS:
        assert choose_backend(name, CPU) == Backend(name, interpret=True)
    for name in set(KERNEL_BACKENDS) - {*INTERPRETABLE_BACKENDS}:
        with pytest.raises(
            UnsupportedError, match=f"'{name}' needs a GPU: jax .* does not interpret it"
        ):
            choose_backend(name, CPU)
    for name in set(BACKENDS) - {"cpu", "fa3", "tpu"}:  # fa3 is of a package: tests/test_fa3.py
        assert choose_backend(name, gpu("9.0")) == Backend(name)
    with pytest.raises(UnsupportedError, match="'cpu' needs a CPU"):
        choose_backend("cpu", gpu("9.0"))


def test_a_tpu_has_a_set_of_its_own_and_errors_say_how_to_see_one(monkeypatch):
    find_spec = importlib.util.find_spec
    there = {"libtpu": find_spec("jax")}
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *others: there.get(name, find_spec(name, *others))
    )
    for name in ("auto", "tpu"):
        assert choose_backend(name, TPU) == Backend(name, interleaved=True)
    assert choose_backend("scan", TPU) == choose_backend("scan", CPU) == Backend("scan")
    with pytest.raises(UnsupportedError, match="'triton' needs a GPU"):
        choose_backend("triton", TPU)
    with pytest.raises(UnsupportedError, match="'tpu' needs a TPU: jax .* on this device$"):
        choose_backend("tpu", CPU)
    there["libtpu"] = None
    for device in (CPU, gpu("9.0")):
        with pytest.raises(
            UnsupportedError, match="'tpu' needs a TPU: .*; libtpu is not installed: pip install"
        ):
            choose_backend("tpu", device)
    tpu_spec = DeviceSpec("tpu (TPU v5 lite)", 2**34)
    assert tpu_spec.platform == "tpu" and mixes(EngineConfig(), tpu_spec)
    assert not mixes(EngineConfig(attention_backend="scan"), tpu_spec)


def test_an_old_gpu_is_refused_the_kernels_that_it_cannot_run():
    for name, device in (
        ("auto", gpu("7.5")),
        ("triton", gpu("8.0")),
        ("scan", gpu("7.5")),
        ("scan", gpu("gfx90a")),
    ):
        assert choose_backend(name, device) == Backend(name)
    with pytest.raises(
        UnsupportedError,
        match="'triton' .* 'auto': needs a GPU of compute capability 8.0 or more, but NVIDIA "
        "A100 has 7.5; use scan or reference",
    ):
        choose_backend("triton", gpu("7.5"))
    for other in ("8.6", "10.0"):
        with pytest.raises(
            UnsupportedError, match="'mosaic' with .* needs a GPU of compute capability 9.0"
        ):
            choose_backend("mosaic", gpu(other))
    with pytest.raises(
        UnsupportedError, match="'triton' with .* 8.0 or more, but NVIDIA A100 has gfx90a"
    ):
        choose_backend("triton", gpu("gfx90a"))


def test_a_gpu_without_fp8_is_refused_pages_of_it():
    for name, capability, kv_cache_dtype in (
        ("triton", "8.9", "fp8"),
        ("triton", "8.0", "int8"),
        ("scan", "8.0", "fp8"),
    ):
        assert choose_backend(name, gpu(capability), kv_cache_dtype) == Backend(name)
    with pytest.raises(
        UnsupportedError, match="'triton' with kv_cache_dtype 'fp8': needs .* 8.9 or more"
    ):
        choose_backend("triton", gpu("8.0"), "fp8")


@pytest.mark.parametrize(
    ("kind", "capability"),
    [
        *(
            ("NVIDIA GeForce RTX 3090", "8.6"),
            ("NVIDIA RTX A6000", "8.6"),
            ("NVIDIA A10G", "8.6"),
            ("NVIDIA A40", "8.6"),
        ),
        *(
            ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", "8.0"),
            ("NVIDIA L40S", "8.9"),
            ("NVIDIA GeForce RTX 5090", "12.0"),
        ),
        *(("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "12.0"), ("GRID A100D-40C", "8.0")),
    ],
)
def test_a_gpu_that_jax_does_not_lower_kernels_for_is_refused(monkeypatch, kind, capability):
    """The oracle is the function of JAX that its lowering calls, on a first device of that name;
    jax 0.10 has none.
    """
    device = SimpleNamespace(platform="gpu", device_kind=kind, compute_capability=capability)
    monkeypatch.setattr("jax._src.interpreters.pxla.get_default_device", lambda: device)
    refused = False
    if ask := getattr(triton_backend.plt, "get_gpu_info", None):
        ask.cache_clear()
        try:
            assert ask().compute_capability == int(capability.replace(".", ""))
        except ValueError:
            refused = True
        ask.cache_clear()  # the CPU of other tests is no such GPU
    if not refused:
        assert choose_backend("triton", device) == Backend("triton")
        return
    with pytest.raises(
        UnsupportedError, match=f"jax .* has a list of the GPUs that it takes, without {kind}"
    ):
        choose_backend("triton", device)


def test_a_gpu_without_bfloat16_computes_in_float16_and_says_so(caplog):
    def on(capability, stored="bfloat16", family=Llama, dtype="auto"):
        device = gpu(capability)
        device.memory_stats = lambda: {"bytes_limit": 2**34}
        return choose_dtype(dtype, DeviceSpec.of(device, 0.9), stored, family)

    for capability in ("8.0", "9.0", "12.0", "gfx90a"):
        assert on(capability) == on(capability, dtype="bfloat16") == "bfloat16"
    assert on("7.5", "float16") == "float16" and on("7.5", "float32") == "float32" == on(
        "7.5", dtype="float32"
    )
    assert not caplog.records
    assert on("7.5") == "float16" and on("7.0", family=Gemma2) == "float32"
    assert [record.getMessage().rpartition(": ")[2] for record in caplog.records] == [
        "dtype 'auto' is float16",
        "dtype 'auto' is float32",
    ]
    with pytest.raises(
        UnsupportedError,
        match="'bfloat16': gpu .* takes a compute capability of 8.0 .*; use .* 'float16'",
    ):
        on("7.5", dtype="bfloat16")


def test_float16_is_refused_where_hidden_states_overflow_it():
    """The families are those that vLLM refuses it for; "auto" of a checkpoint in float16 is what
    vLLM takes, too.
    """

    def on(device, family, dtype="float16", stored="float16"):
        return choose_dtype(dtype, device, stored, family)

    cpu, new, old = (
        DeviceSpec("cpu (x)", 1),
        DeviceSpec("gpu (x)", 1),
        DeviceSpec("gpu (y)", 1, "", has_bfloat16=False),
    )
    for family in (Gemma2, Gemma3, Glm4):
        for device, instead in ((cpu, "bfloat16"), (new, "bfloat16"), (old, "float32")):
            with pytest.raises(
                UnsupportedError, match=f"^dtype 'float16': .*overflow; use dtype '{instead}'"
            ):
                on(device, family)
        assert [on(device, family, "auto") for device in (cpu, new, old)] == [
            "float32",
            "bfloat16",
            "float32",
        ]
    assert on(new, Llama) == on(new, Llama, "auto") == on(cpu, Llama) == "float16"


def run_attention(backend):
    """Returns what the seam makes of a step of two tokens after three, in the blocks 1 and 2 of
    four slots.
    """
    bucket, tables = Bucket(num_tokens=4, num_rows=1, max_query_len=4), TableShape(1, 2)
    packed = np.zeros(size_when_packed(bucket, tables), np.int32)
    fields = views(packed, bucket, tables)
    fields["slots_ZT"][0, :2], fields["block_table_ZBM"][0, 0] = (7, 8), (1, 2)
    fields["context_len_B"][0], fields["query_start"][1:] = 5, 2
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((4, heads, 8)), jnp.float32) for heads in (4, 2, 2))
    pages = LayerPages(
        *(jnp.asarray(rng.standard_normal((3, 4, 2, 8)), jnp.float32) for _ in range(2))
    )

    @jax.jit
    def step(packed, q, k, v, pages):
        inputs = unpack(packed, bucket, tables)
        attend = make_attend(inputs, backend=backend, bucket=bucket, layer_groups=(0,))
        return attend(0, q, k, v, pages, AttentionOptions(scale=0.3))

    out, pages = step(jnp.asarray(packed), q, k, v, pages)
    return jax.tree.map(np.asarray, (out[:2], [array[1:] for array in pages[:2]]))


def test_a_set_with_one_kernel_for_both_writes_and_attends(monkeypatch):
    """A set that is registered can be chosen, and the engine does not know that it has one kernel
    for both.
    """
    scan = SETS["scan"]

    def write_and_attend(k_TKH, v_TKH, slots_T, arguments):
        pages = scan.write(k_TKH, v_TKH, arguments.k_pages, arguments.v_pages, slots_T, None, None)
        return scan.attend(
            dataclasses.replace(arguments, k_pages=pages[0], v_pages=pages[1])
        ) + 1, pages

    toy = dataclasses.replace(
        scan, name="toy", platforms=("cpu",), prefers_mixed_steps=True, attend=None, write=None
    )
    monkeypatch.setitem(SETS, "toy", dataclasses.replace(toy, write_and_attend=write_and_attend))
    monkeypatch.setattr(engine_config, "attention_backends", lambda: ("auto", "toy"))
    assert mixes(EngineConfig(attention_backend="toy"), DeviceSpec("cpu (cpu)", 2**34))
    (expected, expected_pages), (actual, pages) = (
        run_attention(Backend("scan")),
        run_attention(choose_backend("toy", CPU)),
    )
    np.testing.assert_allclose(actual, expected + 1, atol=1e-6)
    np.testing.assert_array_equal(pages, expected_pages)
    with pytest.raises(UnsupportedError, match="'toy' needs a CPU"):
        choose_backend("toy", gpu("9.0"))


def test_steps_mix_by_default_where_kernels_run():
    cpu, big = DeviceSpec("cpu (cpu)", 2**34), DeviceSpec("gpu (NVIDIA H200)", 2**37)
    assert not mixes(EngineConfig(), cpu) and mixes(EngineConfig(), big)
    assert mixes(EngineConfig(attention_backend="triton"), big)
    assert not mixes(EngineConfig(attention_backend="scan"), big)
    assert mixes(EngineConfig(enable_mixed_steps=True), cpu) and not mixes(
        EngineConfig(enable_mixed_steps=False), big
    )


def test_a_model_that_no_kernel_takes_is_refused_with_the_reason(tmp_path):
    wide = random_checkpoint(tmp_path / "llama", {**LLAMA, "head_dim": 272})
    with pytest.raises(
        UnsupportedError, match="attention_backend 'triton': .* triton: k_pages with heads 272 wide"
    ):
        make_llm(wide, attention_backend="triton")


WITHOUT_TRITON = """
import sys
sys.modules["jax.experimental.pallas.triton"] = None
from jaxpage import LLM, SamplingParams
from jaxpage.errors import UnsupportedError
from pallas_kernels.compat import describe_gpu
from tools.lab.kernel_lab.inspection.compiled_cases import attention_case, copy_case, write_case
from tools.lab.kernel_lab.specs import find
settings = {"use_tqdm": False, "max_num_seqs": 1, "max_num_batched_tokens": 16, "max_model_len": 64, "num_blocks": 16}
with LLM("demo", **settings) as llm:
    print(len(llm.generate("Once", SamplingParams(max_tokens=3, ignore_eos=True))[0].outputs[0].token_ids))
try:
    LLM("demo", attention_backend="triton", **settings)
except UnsupportedError as refusal:
    print(refusal)
spec = find("llama-3-8b decode 64x2048")
for case in (attention_case(spec, "mosaic"), write_case(64, backend="mosaic"), copy_case(16, backend="mosaic")):
    with describe_gpu():
        text = case.function.trace(*case.arguments).lower(lowering_platforms=("cuda",)).as_text()
    print(text.count("mosaic_gpu"), text.count('"stablehlo.scatter"'))
"""


def test_without_pallas_triton_backend_everything_else_works():
    """JAX has deprecated it, and may remove it."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    tokens, refusal, attention, written, copied = done.stdout.splitlines()
    assert tokens == "3" and not attention.startswith("0 ")
    assert (written, copied) == ("0 2", "0 64"), "plain XLA"
    assert refusal == (
        "attention_backend 'triton' with kv_cache_dtype 'auto': needs "
        "jax.experimental.pallas.triton, "
        f"which jax {jax.__version__} does not have; use scan or reference; reference needs "
        f"far more memory for long chunks of prompts"
    )


def test_the_kernel_set_is_known_before_anything_is_loaded_and_is_no_plain_xla_on_a_gpu():
    def choose(name, device, heads=1, dtype="bfloat16"):
        spec = KVSpec(num_layers=2, num_kv_heads=heads, head_dim=256, sliding_windows=(None, None))
        pages = page_shapes(spec, 2**17 + 1, 16, page_dtype(dtype, "bfloat16"))
        layers, buckets = (
            zip(pages, spec.sliding_windows, strict=True),
            [Bucket(2, 2, 1), Bucket(256, 2, 256)],
        )
        return attention_sets(Backend(name), device, layers, buckets, num_heads=4, dtype="bfloat16")

    assert choose("auto", gpu("9.0")) == "triton" == choose("auto", gpu("9.0"), dtype="fp8")
    assert choose("auto", CPU) in ("cpu", "scan") and choose("scan", gpu("7.5")) == "scan"
    with pytest.raises(
        UnsupportedError,
        match=f"'auto': .*triton: needs a GPU .*; mosaic: .* by name: {' or '.join(XLA_BACKENDS)};",
    ):
        choose("auto", gpu("7.5"))
    with pytest.raises(
        UnsupportedError,
        match=r"triton: k_pages of 2147500032 one-byte elements .*; mosaic: pages of",
    ):
        choose("auto", gpu("9.0"), heads=4, dtype="int8")


def test_a_pool_of_one_byte_pages_ends_where_kernels_address_no_further():
    """Llama-3.2-1B is on a GPU of 141 GB: with 2^18 blocks of int8, of 8,192 elements each, a
    layer's keys would have 2^31.
    """
    small = {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "head_dim": 64,
    }
    spec = Llama.Spec.from_config({**LLAMA_3_8B, **small, "num_attention_heads": 32})
    config = EngineConfig(kv_cache_dtype="int8")

    def plan(device="gpu (NVIDIA H200)", **settings):
        described = Described(
            config.replace(**settings),
            spec,
            DeviceSpec(device, 126 * 2**30),
            ModelLayout("bfloat16", settings.get("kv_cache_dtype", "int8")),
            weights_bytes=2 * 2**30,
        )
        return engine_spec_of(described, swaps=False)

    planned = plan()
    memory = planned.memory
    assert memory.num_blocks * 16 * 8 * 64 < 2**31 <= (memory.num_blocks + 1) * 16 * 8 * 64
    assert "2^31" in notices(planned.described, memory)[0]
    assert plan(attention_backend="scan").memory.num_blocks > 2**18
    assert plan(num_blocks=2**18 - 1).memory.num_blocks == 2**18 - 1
    for settings in ({"num_blocks": 2**18}, {"kv_cache_memory_bytes": 100 * 2**30}):
        with pytest.raises(
            CapacityError, match=r"2\^31 elements or more.*Use 262143 \(.*\) or fewer, or 524289 "
        ):
            plan(**settings)
