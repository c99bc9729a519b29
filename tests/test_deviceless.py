"""Every kernel and whole steps of Llama-3-8B, compiled for an H200 that is not there: no spills,
pages changed in place, no copy of them.

Each check is seen to find what it is for. Skipped where JAX's CUDA plugin is not installed;
`.ci/run` installs it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import serialize_executable

from jaxpage.device.compiler_options import compiler_options
from jaxpage.device.hardware.backends import Backend
from jaxpage.device.inputs.buckets import Bucket
from jaxpage.device.sampler import PROCESSED_AT_ONCE
from jaxpage.layers import norms
from pallas_kernels.quantized_matmul import batch_invariant_matmul
from pallas_kernels.sets import fa3, triton
from pallas_kernels.triton import backend as triton_backend
from pallas_kernels.triton import matmul_tiles
from tests.support.sweeps import few
from tools.lab.kernel_lab.inspection import (
    Findings,
    compile_for,
    compile_with_thunks,
    inspect,
    sass,
    thunks,
    unavailable,
)
from tools.lab.kernel_lab.inspection.compiled_cases import (
    Case,
    attention_case,
    copy_case,
    matmul_case,
    rotation_case,
    selection_case,
    write_case,
)
from tools.lab.kernel_lab.kernel_cases import shape_of_spec
from tools.lab.kernel_lab.specs import MATMULS, find
from tools.step_shapes import BUCKETS, LLAMA_3_8B, QWEN3_30B_A3B, step_shapes

reason = unavailable()
pytestmark = pytest.mark.skipif(reason is not None, reason=str(reason))

LAYERS = 1
ATTENTION = {  # a call of each kind, and what its kernel must be made of
    "llama-3-8b decode 64x2048": {"triton": ("LDGSTS.128", "HMMA"), "mosaic": ("UTMALDG", "HGMMA")},
    "llama-3-8b verify chain 16x8": {
        "triton": ("LDGSTS.128", "HGMMA"),
        "mosaic": ("UTMALDG", "HGMMA"),
    },
    "llama-3-8b chunk 2048+0": {"triton": ("LDGSTS.128", "HGMMA"), "mosaic": ("UTMALDG", "HGMMA")},
    "qwen2-0.5b decode 64x2048": {"triton": ("LDGSTS.128", "HMMA")},
    "mistral-7b chunk 2048+6144": {"triton": ("LDGSTS.128", "HGMMA")},
    "gpt-oss-20b decode 64x2048": {
        "triton": ("LDGSTS.128", "HMMA"),
        "mosaic": ("UTMALDG", "HGMMA"),
    },
    "gpt-oss-20b chunk 2048+2048": {
        "triton": ("LDGSTS.128", "HGMMA"),
        "mosaic": ("UTMALDG", "HGMMA"),
    },
    "llama-3-8b verify tree 16x16": {
        "triton": ("LDGSTS.128", "HGMMA"),
        "mosaic": ("UTMALDG", "HGMMA"),
    },
}


def compile_case(case: Case) -> Findings:
    return inspect(compile_for(case.function, *case.arguments))


@functools.cache
def compile_attention(spec: Any, backend: str = "triton", **options: Any) -> Findings:
    return compile_case(attention_case(spec, backend, **options))


def array_bytes(pages: Any) -> list[int]:
    return [leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pages)]


@pytest.mark.parametrize(
    ("name", "backend"),
    few(  # the others are of the same kernels in other shapes
        [(name, backend) for name, backends in ATTENTION.items() for backend in backends],
        [
            ("llama-3-8b decode 64x2048", "triton"),
            ("llama-3-8b verify tree 16x16", "mosaic"),
        ],
    ),
)
def test_attention_keeps_its_sums_in_registers(name, backend):
    findings = compile_attention(find(name), backend)
    assert findings.calls["paged_attention"] == 1 and findings.spilled_bytes == 0
    for kernel in findings.kernels:
        assert 16 <= kernel.machine.registers <= 255
        assert (kernel.shared_bytes or 0) <= 232448
    if sass.disassembler() is None:
        return  # what follows needs NVIDIA's disassembler
    (main,) = (
        kernel
        for kernel in findings.kernels
        if kernel.name.startswith("paged_attention") and "reduce" not in kernel.name
    )
    instructions = sass.opcodes(main.image)
    for instruction in ATTENTION[name][backend]:
        assert sass.count(instructions, *instruction.split(".")) > 0, f"no {instruction}"
    assert sass.count(instructions, "LDL") == sass.count(instructions, "STL") == 0


@pytest.mark.parametrize(
    ("page_dtype", "call", "options"),
    few(
        itertools.product(
            ["bfloat16", "int8"],
            ["decode 16x2048", "decode 64x2048", "chunk 2048+0"],
            [{}, {"batch_invariant": True}],
        ),
        [("bfloat16", "decode 64x2048", {})],
    ),
)
def test_latents_keep_their_sums_in_registers(page_dtype, call, options):
    """DeepSeek-V3's latents have 512 of 576 numbers as values, and all 128 heads share them."""
    latent = {"num_heads": 128, "num_kv_heads": 1, "head_dim": 576, "page_dtype": page_dtype}
    spec = dataclasses.replace(find(f"llama-3-8b {call}"), **latent)
    case = attention_case(spec, "triton", value_width=512, **options)
    findings = compile_case(case)
    assert findings.calls["paged_attention"] == 1 and findings.spilled_bytes == 0
    if options:
        return
    tiles = triton.heuristic(dataclasses.replace(shape_of_spec(spec), group=16), (8, 9))
    for kernel in compile_attention(spec, value_width=512, tiles=tiles).kernels:
        assert (kernel.shared_bytes or 0) <= 99 * 1024 and not kernel.machine.stack_bytes


def test_the_next_keys_and_values_are_on_their_way_while_these_are_multiplied():
    """Two turns of keys and two of values are in shared memory.

    With three or four stages it is one: the block table takes the others.
    """
    spec = find("llama-3-8b decode 64x2048")
    cut = triton.heuristic(shape_of_spec(spec))
    turn = 2 * 2 * cut.context * spec.head_dim  # bytes of keys and values
    for stages, buffers in ((cut.num_stages, 2), (4, 1)):
        tiles = dataclasses.replace(cut, num_stages=stages)
        (main,) = (
            kernel
            for kernel in compile_attention(spec, tiles=tiles).kernels
            if "reduce" not in kernel.name
        )
        assert turn * buffers <= (main.shared_bytes or 0) < turn * (buffers + 1)


@pytest.mark.parametrize(
    ("call", "width"),
    few(
        itertools.product(["chunk 2048+0", "verify chain 16x8"], [128, 256]),
        [("chunk 2048+0", 256)],
    ),
)
def test_tiles_fit_in_the_shared_memory_of_small_gpus(call, width):
    """Ada and its like have 99 KiB."""
    spec = dataclasses.replace(find(f"llama-3-8b {call}"), head_dim=width)
    tiles = triton.heuristic(shape_of_spec(spec), (8, 9))
    for kernel in compile_attention(spec, tiles=tiles).kernels:
        assert (kernel.shared_bytes or 0) <= 99 * 1024 and not kernel.machine.stack_bytes


@pytest.mark.parametrize(
    ("page_dtype", "call"),
    few(
        itertools.product(["int8", "uint8"], ["decode 64x2048", "chunk 128+0"]),
        [("int8", "decode 64x2048")],
    ),
)
def test_attention_over_quantised_pages_keeps_its_sums_in_registers(page_dtype, call):
    spec = dataclasses.replace(find(f"llama-3-8b {call}"), page_dtype=page_dtype)
    assert compile_attention(spec).spilled_bytes == 0


@pytest.mark.parametrize(
    "name",
    few(
        [spec.name for spec in MATMULS],
        [
            "qwen3-30b-a3b experts, 64 tokens",
            "llama-3-8b gate_up, 16 tokens, int4",
        ],
    ),
)
def test_a_product_is_one_launch_that_makes_no_weight(name):
    """Inputs of two halves and the sums of splits are temporary."""
    spec = next(spec for spec in MATMULS if spec.name == name)
    findings = compile_case(matmul_case(spec))
    assert findings.calls == {"grouped_matmul": 1} and findings.spilled_bytes == 0
    assert findings.temporary_bytes < spec.weight_bytes / 10
    (main,) = findings.kernels
    if sass.disassembler() is not None:
        instructions = sass.opcodes(main.image)
        assert sass.count(instructions, "LDGSTS", "128") > 0
        assert (
            sass.count(instructions, "HGMMA" if "2048" in name or "512 tokens" in name else "HMMA")
            > 0
        )


@pytest.mark.parametrize(
    ("rows", "weight", "dtype"),
    few(
        [
            *itertools.product(
                (2, 64, 2048),
                [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)],
                ["bfloat16"],
            ),
            (2, (4096, 4096), "float32"),
        ],
        [(64, (4096, 4096), "bfloat16"), (2048, (4096, 4096), "bfloat16")],
    ),
)
def test_a_product_in_one_order_adds_outside_the_tensor_core_at_the_ends_of_segments(
    rows, weight, dtype
):
    """With `batch_invariant` a program of few rows adds up nothing else, and one of many rows the
    sums of its segments.

    In float32 there is no tensor core, so that additions are found there.
    """
    if sass.disassembler() is None:
        pytest.skip("no nvdisasm: pip install triton")
    arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape in ((rows, weight[1]), weight)]
    findings = inspect(compile_for(jax.jit(batch_invariant_matmul), *arrays))
    (main,) = (kernel for kernel in findings.kernels if kernel.name == "grouped_matmul")
    cut = matmul_tiles.cut_by_weight(arrays[0].shape, (1, weight[0]), dtype, None, roomy=True)
    sums_of_a_thread = cut.rows * cut.cols // (main.threads or 0)
    instructions = sass.opcodes(main.image)
    additions = sass.count(instructions, "FADD") + sass.count(instructions, "FFMA")
    if dtype == "float32":
        assert additions >= sums_of_a_thread
        return
    assert additions == (sums_of_a_thread if cut.folds > 1 else 0)
    assert sass.count(instructions, "HMMA", "16816", "F32", "BF16") or sass.count(
        instructions, "HGMMA"
    )


@pytest.mark.parametrize("page_dtype", ["int8", "bfloat16"])
def test_decode_has_enough_bytes_on_their_way(page_dtype):
    """An H200 reads 4.8 TB/s, which takes about 33 KiB in flight on each multiprocessor: those of
    the next turn of its programs.
    """
    spec = dataclasses.replace(find("llama-3-8b decode 64x2048"), page_dtype=page_dtype)
    tiles = triton.heuristic(shape_of_spec(spec))
    (main,) = (kernel for kernel in compile_attention(spec).kernels if "reduce" not in kernel.name)
    registers = -(-main.machine.registers // 8) * 8 * (main.threads or 0)
    programs = min(65536 // registers, 233472 // ((main.shared_bytes or 0) + 1024))
    turn = 2 * tiles.context * spec.head_dim * jnp.dtype(page_dtype).itemsize
    assert programs * turn >= 33 * 1024


@pytest.mark.parametrize(
    ("page_dtype", "backend"),
    few(
        [*((each, "triton") for each in ("bfloat16", "int8", "uint8")), ("bfloat16", "mosaic")],
        [("int8", "triton"), ("bfloat16", "mosaic")],
    ),
)
def test_new_keys_and_values_are_written_in_place(page_dtype, backend):
    case = write_case(64, page_dtype=page_dtype, backend=backend)
    assert_in_place(compile_case(case), case.arguments[0], ours=backend == "triton")


@pytest.mark.parametrize(
    "case",
    [
        rotation_case(64),
        pytest.param(rotation_case(64, page_dtype="int8"), marks=pytest.mark.sweep),
        pytest.param(rotation_case(64, num_segments=4), marks=pytest.mark.sweep),
    ],
    ids=["bfloat16", "int8", "segments"],
)
def test_queries_and_keys_are_rotated_and_written_in_one_launch(case):
    findings = compile_case(case)
    assert_in_place(findings, case.arguments[0], ours=True)
    assert findings.num_launches == 1


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("config", "num_rows", "batch_invariant", "maximum"),
    [
        *((LLAMA_3_8B, num_rows, False, 13) for num_rows in (2, 16)),
        *((LLAMA_3_8B, num_rows, True, 10) for num_rows in (2, 16)),
        *((QWEN3_30B_A3B, 2, False, 16), (QWEN3_30B_A3B, 64, False, 17)),
        (QWEN3_30B_A3B, 2, True, 19),
    ],
)
def test_a_layer_has_few_launches(config, num_rows, batch_invariant, maximum):
    """In a layer attention has two of them, and in plain products a sum of split inputs may be one
    more.
    """
    bucket = Bucket(num_rows, num_rows, 1)
    numbers = []
    for num_layers in (1, 2):
        backend = Backend("triton", batch_invariant=batch_invariant)
        shapes = step_shapes(bucket, backend=backend, config=config, num_layers=num_layers)
        compiled, _ = compile_with_thunks(
            shapes.step, *shapes.arguments, options=compiler_options("gpu")
        )
        numbers.append(inspect(compiled).num_launches)
    assert numbers[1] - numbers[0] <= maximum


def test_selection_keeps_its_sums_in_registers():
    findings = compile_case(selection_case(64))
    assert findings.calls == {"cutoffs": 1, "top_candidates": 1} and findings.spilled_bytes == 0


@pytest.mark.parametrize("backend", few(["triton", "mosaic"], ["triton"]))
def test_blocks_are_copied_in_place(backend):
    case = copy_case(16, backend=backend)
    assert_in_place(compile_case(case), case.arguments[0], ours=backend == "triton")


def assert_in_place(findings: Findings, pages: Any, *, ours: bool) -> None:
    """Checks that pages change in place.

    ours: by kernels of ours, and not by XLA's.
    """
    sizes = array_bytes(pages)
    assert findings.problems(pages_bytes=sum(sizes), array_bytes=max(sizes)) == []
    assert (sum(findings.calls.values()) > 0) == ours


@pytest.mark.parametrize(
    ("kind", "backend", "reduced"),
    few(
        [
            ("decode", "triton", 1),
            ("verify", "triton", 1),
            ("chunk", "triton", 0),
            ("chunk", "mosaic", 0),
            ("several steps", "triton", 1),
        ],
        [("verify", "triton", 1)],  # whatever else a step of decode has
    ),
)
def test_a_step_is_one_cuda_graph_and_changes_its_pages_in_place(kind, backend, reduced):
    shapes = step_shapes(BUCKETS[kind], backend=backend, num_layers=LAYERS)
    compiled, thunks_text = compile_with_thunks(
        shapes.step, *shapes.arguments, options=compiler_options("gpu")
    )
    assert thunks.on_host(thunks_text) == [] and thunks.num_command_buffers(thunks_text) == 1
    assert len(serialize_executable.serialize(compiled)[0]) > 1 << 16, "it can be a file"
    findings = inspect(compiled)
    assert findings.problems(pages_bytes=shapes.pages_bytes, array_bytes=shapes.array_bytes) == []
    written = LAYERS if backend == "triton" else 0  # Mosaic leaves it to XLA
    expected = {
        "paged_attention": LAYERS,
        "rotate_and_write": written,
        "paged_attention_reduce": reduced * LAYERS,
    }
    selecting = {"cutoffs", "top_candidates"}
    calls = {name: number for name, number in findings.calls.items() if name not in selecting}
    assert calls == {name: number for name, number in expected.items() if number}
    if backend == "triton":
        # The loops are over processed rows, to draw and for the log probabilities of what they were
        # drawn from, over steps, and over prompt tokens that are scored: no cut-off is bisected, no
        # row is sorted.
        assert selecting <= set(findings.calls)
        processes_some = BUCKETS[kind].num_processed > PROCESSED_AT_ONCE
        num_loops = 2 * processes_some + (kind in ("several steps", "chunk"))
        assert thunks_text.count("kWhile") == num_loops
        assert (
            len(re.findall(r"kCustomKernel .* sort", thunks_text))
            == findings.calls["top_candidates"]
        )
    if kind == "verify":
        tokens = BUCKETS[kind].num_tokens
        logits_bytes = 4 * tokens * LLAMA_3_8B["vocab_size"]
        # One copy of the logits, and six of those of rows that are processed at once.
        assert findings.temporary_bytes < logits_bytes * (1 + 6.5 * PROCESSED_AT_ONCE / tokens)
    assert len(findings.kernels) == sum(findings.calls.values())


# The cards that people have: the H200 of the tests above is not among them.
CARDS = {  # bytes of shared memory that a program may have
    "a100": 166912,
    "rtx3090": 101376,
    "rtx4090": 101376,
    "h100": 232448,
    "b200": 232448,
    "rtx5090": 101376,
}
WITHOUT_FP8 = ("a100", "rtx3090")
CALLS = ("decode 64x2048", "verify chain 16x8", "verify tree 16x16", "chunk 2048+0")
HEADS = {"8b": {}, "1b": {"head_dim": 64}}  # of Llama 3, else alike
LLAMA_3_1B = {
    **LLAMA_3_8B,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "head_dim": 64,
    "tie_word_embeddings": True,
}


@pytest.mark.parametrize(
    ("gpu", "call", "heads", "page_dtype"),
    few(
        itertools.product(CARDS, CALLS, HEADS, ("bfloat16", "int8", "uint8")),
        [
            ("rtx3090", "decode 64x2048", "8b", "bfloat16"),
            ("rtx3090", "decode 64x2048", "8b", "uint8"),
        ],
    ),
)
def test_attention_fits_the_card(gpu, call, heads, page_dtype):
    spec = dataclasses.replace(find(f"llama-3-8b {call}"), page_dtype=page_dtype, **HEADS[heads])
    case = attention_case(spec, "triton")
    if page_dtype == "uint8" and gpu in WITHOUT_FP8:
        with pytest.raises(
            NotImplementedError,
            match=r"needs a GPU of compute capability 8\.9 or more for pages of fp8",
        ):
            compile_for(case.function, *case.arguments, gpu=gpu)
        return
    findings = inspect(compile_for(case.function, *case.arguments, gpu=gpu))
    assert findings.calls["paged_attention"] == 1 and findings.spilled_bytes == 0
    assert all((kernel.shared_bytes or 0) <= CARDS[gpu] for kernel in findings.kernels)


@pytest.mark.parametrize(
    ("gpu", "name"),
    few(
        itertools.product(
            WITHOUT_FP8, [spec.name for spec in MATMULS if spec.code in ("fp8", "fp4")]
        ),
        [("rtx3090", "llama-3-8b down, 16 tokens, fp8")],
    ),
)
def test_a_product_of_fp8_is_compiled_for_a_card_that_does_not_convert_it(
    gpu: str, name: str
) -> None:
    case = matmul_case(next(spec for spec in MATMULS if spec.name == name))
    findings = inspect(compile_for(case.function, *case.arguments, gpu=gpu))
    assert findings.calls == {"grouped_matmul": 1} and findings.spilled_bytes == 0
    assert all((kernel.shared_bytes or 0) <= CARDS[gpu] for kernel in findings.kernels)


@pytest.mark.sweep
@pytest.mark.parametrize("gpu", CARDS)
def test_pages_are_changed_in_place_on_the_card(gpu):
    for case in (
        copy_case(16),
        *(
            make_case(64, page_dtype=page_dtype)
            for page_dtype in ("bfloat16", "int8", "uint8")
            for make_case in (write_case, rotation_case)
        ),
    ):
        if "uint8" not in case.name or gpu not in WITHOUT_FP8:
            assert_in_place(
                inspect(compile_for(case.function, *case.arguments, gpu=gpu)),
                case.arguments[0],
                ours=True,
            )


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("gpu", "config", "kind", "num_layers"),
    [
        *((gpu, LLAMA_3_8B, kind, LAYERS) for gpu in CARDS for kind in ("decode", "chunk")),
        *((gpu, LLAMA_3_1B, kind, LAYERS) for gpu in CARDS for kind in ("decode", "verify")),
        ("rtx4090", LLAMA_3_1B, "decode", 16),
        ("b200", LLAMA_3_8B, "decode", 32),
    ],
)
def test_a_step_on_the_card_is_one_cuda_graph(gpu, config, kind, num_layers):
    # Of so many blocks a layer's keys are larger than the logits, and their copies, of what is
    # verified.
    shapes = step_shapes(
        BUCKETS[kind], backend="auto", config=config, num_layers=num_layers, num_blocks=32768
    )
    compiled, text = compile_with_thunks(
        shapes.step, *shapes.arguments, gpu=gpu, options=compiler_options("gpu")
    )
    assert thunks.on_host(text) == [] and thunks.num_command_buffers(text) == 1
    findings = inspect(compiled)
    assert findings.problems(pages_bytes=shapes.pages_bytes, array_bytes=shapes.array_bytes) == []
    assert findings.calls["paged_attention"] == findings.calls["rotate_and_write"] == num_layers


@pytest.mark.sweep
def test_a_card_without_kernels_is_refused_them_and_runs_plain_xla_in_float16():
    """XLA has no Triton for a T4.

    Plain XLA computes a step of float16 there without a copy of a weight in float32.
    """
    case = attention_case(find("llama-3-8b decode 64x2048"), "auto")
    with pytest.raises(
        NotImplementedError,
        match=r"8\.0 or more, but Tesla T4 has 7\.5.* by name: scan or reference",
    ):
        compile_for(case.function, *case.arguments, gpu="t4")
    shapes = step_shapes(
        BUCKETS["decode"],
        backend="scan",
        config=LLAMA_3_1B,
        num_layers=1,
        dtype="float16",
        num_blocks=2048,
    )
    compiled, text = compile_with_thunks(
        shapes.step, *shapes.arguments, gpu="t4", options=compiler_options("gpu")
    )
    assert thunks.on_host(text) == [] and thunks.num_command_buffers(text) == 1
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * 2048 * 128256


@pytest.mark.skipif(fa3.library()[0] is None, reason=fa3.library()[1])
@pytest.mark.parametrize("kind", ["decode", "chunk"])
def test_a_step_with_a_library_is_a_cuda_graph_between_its_calls(kind):
    """Its memory for scheduling lives during the call alone, so that it must not be recorded."""
    shapes = step_shapes(BUCKETS[kind], backend="fa3", num_layers=LAYERS)
    compiled, thunks_text = compile_with_thunks(
        shapes.step, *shapes.arguments, options=compiler_options("gpu")
    )
    assert (
        thunks.on_host(thunks_text) == [] and thunks.num_command_buffers(thunks_text) == LAYERS + 1
    )
    findings = inspect(compiled)
    assert findings.problems(pages_bytes=shapes.pages_bytes, array_bytes=shapes.array_bytes) == []
    assert compiled.as_text().count('custom_call_target="flash_mha_fwd"') == LAYERS


def test_a_norm_is_one_kernel():
    """It is no matrix product, as on CPU."""

    def norm(x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        return (wide * jax.lax.rsqrt(norms.mean(jnp.square(wide)) + 1e-5)).astype(x.dtype)

    x = jax.ShapeDtypeStruct((16, 4096), jnp.bfloat16)
    assert inspect(compile_for(jax.jit(norm), x)).num_launches == 1


# What the checks are for, planted.


def test_a_loop_that_waits_for_the_host_is_found():
    def step(x: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda y: jnp.sum(y) < 100.0, lambda y: y * 2.0, x)

    x = jax.ShapeDtypeStruct((4096,), jnp.float32)
    small = {"xla_gpu_graph_min_graph_size": 1}
    for options, loops in ((small, ["While"]), (small | compiler_options("gpu"), [])):
        assert thunks.on_host(compile_with_thunks(jax.jit(step), x, options=options)[1]) == loops


def test_xla_flags_have_the_last_word(monkeypatch):
    assert (
        compiler_options("cpu") == {}
        and "WHILE" in compiler_options("gpu")["xla_gpu_enable_command_buffer"]
    )
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_command_buffer=")
    assert compiler_options("gpu") == {}


def test_pages_that_are_not_donated_are_found():
    case = write_case(64)
    sizes = array_bytes(case.arguments[0])
    findings = inspect(compile_for(jax.jit(case.function.__wrapped__), *case.arguments))
    listed = findings.problems(pages_bytes=sum(sizes), array_bytes=max(sizes))
    assert any("0 bytes are aliased" in problem for problem in listed)
    assert any("(copy)" in problem for problem in listed)


def test_a_scan_that_copies_the_layers_pages_is_found():
    pages = jax.ShapeDtypeStruct((4, 1024, 16, 8, 128), jnp.bfloat16)
    new = jax.ShapeDtypeStruct((8, 128), jnp.bfloat16)

    def step(pages: jax.Array, new: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda carry, layer: (carry, layer.at[3, 5].set(new)), None, pages)[1]

    findings = inspect(compile_for(jax.jit(step, donate_argnums=0), pages, new))
    num_bytes = pages.size * 2
    listed = findings.problems(pages_bytes=num_bytes, array_bytes=num_bytes // 4)
    assert any("makes" in problem for problem in listed), listed


def kernel(body: Any, name: str, shape: jax.ShapeDtypeStruct, **settings: Any) -> Any:
    call = triton_backend.kernel_call(
        body, name=name, grid=(1,), out_shape=[shape], num_stages=1, interpret=False, **settings
    )
    return jax.jit(lambda x: call(x)[0], donate_argnums=0)


def test_a_kernel_that_spills_is_found():
    def square(x_ref: Any, out_ref: Any) -> None:
        row, middle, column = jnp.arange(128)[:, None], jnp.arange(32), jnp.arange(128)[None, :]
        left = triton_backend.load(x_ref.at[row, middle[None, :]])
        matmul = triton_backend.dot(left, triton_backend.load(x_ref.at[middle[:, None], column]))
        triton_backend.store(
            out_ref.at[row, column], matmul.astype(left.dtype)
        )  # 512 sums for each thread of one warp

    x = jax.ShapeDtypeStruct((128, 128), jnp.bfloat16)
    findings = inspect(compile_for(kernel(square, "square", x, num_warps=1), x))
    assert findings.spilled_bytes > 0
    assert any(
        "square spills" in problem
        for problem in findings.problems(pages_bytes=0, array_bytes=1 << 40)
    )


def test_an_array_that_a_kernel_does_not_change_in_place_is_found():
    def add_one(x_ref: Any, out_ref: Any) -> None:
        index = jnp.arange(1024)
        triton_backend.store(out_ref.at[index], triton_backend.load(x_ref.at[index]) + 1)

    x = jax.ShapeDtypeStruct((1 << 20,), jnp.float32)
    listed = {}
    for aliases in (True, False):
        jitted = kernel(
            add_one, "add_one", x, num_warps=4, input_output_aliases={0: 0} if aliases else {}
        )
        findings = inspect(compile_for(jitted, x))
        assert findings.calls == {"add_one": 1}
        listed[aliases] = findings.problems(pages_bytes=4 << 20, array_bytes=4 << 20)
    assert listed[True] == [] and any(
        "makes 4194304 bytes (custom-call)" in problem for problem in listed[False]
    )
