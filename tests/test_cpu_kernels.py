"""The kernels for CPUs: written and attended in one call, bits that depend on the row alone, and
engines that run them.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxpage import SamplingParams
from jaxpage.device.hardware.backends import choose_backend
from jaxpage.errors import UnsupportedError
from jaxpage.layers.matmul import multiply_rounded
from pallas_kernels import (
    Arguments,
    AttentionOptions,
    copy_blocks,
    paged_attention,
    write_and_attend,
)
from pallas_kernels.cpu import build, library, packed
from pallas_kernels.quantized_matmul import quantized_matmul
from pallas_kernels.quantized_weight import QuantizedWeight, numbers
from pallas_kernels.sets import SETS, candidates
from tests.support.attention import make_case
from tests.support.engines import LLAMA, SMALL_POOL, make_llm
from tests.support.random_checkpoints import random_checkpoint
from tests.support.sweeps import few

ROOT = Path(__file__).parent.parent
PAGES = {
    "float32": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "int8": "float32",
    "uint8": "bfloat16",
}  # and queries
BLOCK_SIZE, MAX_LENGTH = 8, 41  # so many query tokens of a row are computed some at once


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> None:
    if (reason := library.load().reason) is not None:
        pytest.skip(reason)


def step(
    backend: str,
    page_dtype: str,
    *,
    heads: tuple[int, int] = (6, 2),
    width: int = 32,
    block_size: int = BLOCK_SIZE,
    tree: bool = False,
    num_rows: int = 4,
    only: int | None = None,
    **options: Any,
) -> tuple[Any, ...]:
    """Returns what a set makes of a step of rows that have 5, 70, 0, 130, ... positions before
    them, and the pages.

    Slot 0 takes padding.
    """
    queries = [5, 1, 3, MAX_LENGTH] * (num_rows // 4)
    contexts = [
        before + new for before, new in zip([5, 70, 0, 130] * (num_rows // 4), queries, strict=True)
    ]
    case = make_case(7, contexts, queries, heads=heads, width=width, block_size=block_size)
    rng, dtype = np.random.default_rng(3), PAGES[page_dtype]
    num_tokens = len(case.q_TNH)
    k, v = (
        jnp.asarray(rng.standard_normal((num_tokens, heads[1], width)), dtype) for _ in range(2)
    )
    rows = np.repeat(np.arange(len(queries)), queries)
    places = np.concatenate([np.arange(c - n, c) for c, n in zip(contexts, queries, strict=True)])
    slots = np.zeros(num_tokens, np.int32)
    slots[: len(rows)] = (
        case.block_table_BM[rows, places // block_size] * block_size + places % block_size
    )
    pages = [jnp.asarray(case.k_pages), jnp.asarray(case.v_pages)]
    scales: dict[str, jax.Array] = {}
    if page_dtype in ("int8", "uint8"):
        pages = [
            jnp.asarray(rng.integers(0, 120, pages[0].shape).astype(page_dtype)) for _ in range(2)
        ]
        scales = {
            name: jnp.asarray(rng.random(pages[0].shape[:3]), jnp.float32)
            for name in ("k_scale", "v_scale")
        }
    else:
        pages = [page.astype(page_dtype) for page in pages]
    if tree:  # the first token has two children, and the others follow the second
        mask = np.zeros((num_tokens, MAX_LENGTH), bool)
        for start, count in zip(np.cumsum([0, *queries[:-1]]), queries, strict=True):
            for index in range(count):
                mask[start + index, : index + 1] = True
                mask[start + index, 1] &= index < 2
        options["tree_mask_TQ"] = mask

    q, table, context = jnp.asarray(case.q_TNH, dtype), case.block_table_BM, case.context_len_B
    start = case.query_start
    if only is not None:
        tokens = slice(start[only], start[only + 1])
        q, k, v, slots = q[tokens], k[tokens], v[tokens], slots[tokens]
        table, context, start = (
            table[only : only + 1],
            context[only : only + 1],
            np.array([0, len(slots)], np.int32),
        )

    @jax.jit
    def run(k_pages: jax.Array, v_pages: jax.Array, scales: dict[str, jax.Array]) -> Any:
        arguments = Arguments(
            q_TNH=q,
            k_pages=k_pages,
            v_pages=v_pages,
            block_table_BM=table,
            context_len_B=context,
            query_start=start,
            options=AttentionOptions(**{"scale": 6.4 / width, **options}),
            max_query_len=MAX_LENGTH,
            **scales,
        )
        return write_and_attend(k, v, slots, arguments, backend=backend)

    out, written = run(*pages, scales)
    blocks = [
        np.asarray(each.astype(jnp.float32) if each.dtype == jnp.bfloat16 else each)[1:]
        for each in written
        if each is not None
    ]
    return np.asarray(out.astype(jnp.float32))[: start[-1]], blocks


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 20},
    "chunks": {"attention_chunk": 20},
    "softcap": {"logit_softcap": 3.0},
    "tree": {"tree": True},
}
# Heads of these widths have code of their own.
WIDTHS: dict[str, dict[str, Any]] = {
    "64 wide": {"width": 64, "sliding_window": 20},
    "128 wide": {"width": 128, "heads": (5, 5)},
    "256 wide": {"width": 256, "heads": (4, 1)},
}
SLOPES = {"alibi_slopes": np.array([0.5, 0.1, 0.0, 0.02, 0.004, 0.25], np.float32)}
ALIBI: dict[str, dict[str, Any]] = {"alibi": SLOPES, "alibi in a tree": {**SLOPES, "tree": True}}
# Tiles of AMX have 16 rows: more query heads than that, more than are computed at once, and blocks
# whose keys are read where they are.
TILES: dict[str, dict[str, Any]] = {
    "long blocks": {"width": 64, "block_size": 16},
    "long blocks, window": {"width": 64, "block_size": 16, "sliding_window": 20},
    "many heads": {"heads": (20, 1)},
    "more heads": {"heads": (50, 1)},
    "many heads in a tree": {"heads": (20, 1), "tree": True},
    "steep scores": {"width": 64, "scale": 2.0},
    "sinks": {"sinks": np.array([-np.inf, 0.5, 3.0, -1.0, 9.0, 2.0], np.float32)},
}
ONE_CALL = {**OPTIONS, **WIDTHS, **ALIBI, **TILES}


@pytest.mark.parametrize(
    ("page_dtype", "name"),
    few(
        itertools.product(PAGES, ONE_CALL),
        [
            *zip(itertools.cycle(("float32", "bfloat16")), OPTIONS, strict=False),
            *((dtype, "window") for dtype in ("float16", "int8", "uint8")),
            *zip(("float32", "bfloat16", "int8"), WIDTHS, strict=True),
            ("bfloat16", "alibi in a tree"),
            *(("bfloat16", name) for name in TILES),
        ],
    ),
)
def test_one_call_writes_and_attends(page_dtype: str, name: str) -> None:
    """The oracle is the kernel set that defines what the others do; what is written has its
    bits.
    """
    options = ONE_CALL[name]
    (expected, expected_pages), (actual, pages) = (
        step("reference", page_dtype, **options),
        step("cpu", page_dtype, **options),
    )
    tolerance = 5e-5 if PAGES[page_dtype] == "float32" else 2e-2
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)
    for page, other in zip(pages, expected_pages, strict=True):
        np.testing.assert_array_equal(page, other)


@pytest.mark.parametrize(("page_dtype", "options"), [("float32", SLOPES), ("bfloat16", {})])
def test_a_row_has_its_bits_among_any_others(page_dtype: str, options: dict[str, Any]) -> None:
    """All key/value heads are in one unit of work, or some in each."""
    shape: dict[str, Any] = {"heads": (6, 6), "width": 64, "num_rows": 32, **options}
    together, _ = step("cpu", page_dtype, **shape)
    queries, start = [5, 1, 3, MAX_LENGTH] * 8, 0
    for row, count in enumerate(queries):
        if row % 5 == 0:
            alone, _ = step("cpu", page_dtype, **shape, only=row)
            np.testing.assert_array_equal(alone, together[start : start + count])
        start += count


@pytest.mark.parametrize("block_size", [8, 16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_call_gives_a_token_its_bits_in_a_chunk_and_alone(dtype: str, block_size: int) -> None:
    """A value that is not finite reaches only the tokens that see it."""
    before, bad = 130, 20
    case = make_case(
        7,
        [before + MAX_LENGTH],
        [MAX_LENGTH],
        heads=(6, 2),
        width=64,
        block_size=block_size,
        padding=0,
        dtype=dtype,
        page_dtype=dtype,
    )
    block, place = divmod(before + bad, block_size)
    case.v_pages[case.block_table_BM[0, block], place, 1, 3] = np.inf

    def attend(q_TNH: np.ndarray, context: int) -> np.ndarray:
        arguments = (q_TNH, *case.arrays[1:4], np.array([context]), np.array([0, len(q_TNH)]))
        return np.asarray(
            paged_attention(*arguments, backend="cpu", max_query_len=MAX_LENGTH, scale=0.125), float
        )

    together = attend(case.q_TNH, before + MAX_LENGTH)
    assert np.isfinite(together[:bad]).all() and not np.isfinite(together[bad:, 3:, 3]).any()
    for token in (0, 7, bad - 1, bad, MAX_LENGTH - 1):
        alone = attend(case.q_TNH[token : token + 1], before + token + 1)
        np.testing.assert_array_equal(alone[0], together[token])


def quantized_weight(
    code: str,
    *,
    zeros: bool = False,
    minima: bool = False,
    half: bool = False,
    num_out: int = 19,
    num_in: int = 80,
) -> tuple[QuantizedWeight, np.ndarray]:
    """Returns a weight in groups of 32, of which the last is short, and its numbers in float64.

    half: scales and minima are in half precision.
    """
    rng = np.random.default_rng(5)
    dtype = np.float16 if half else np.float32
    scale = rng.uniform(0.5, 2.0, (num_out, 3)).astype(dtype)
    scale[0, 0] = 3e-6  # subnormal, in half precision
    minimum = rng.uniform(-9.0, 9.0, (num_out, 3)).astype(dtype) if minima else None
    zero = rng.integers(0, 16, (num_out, 3)).astype(np.float32) if zeros else None
    if code in ("int4", "fp4"):
        nibbles = rng.integers(0, 16, (num_out, num_in))
        values = jnp.asarray(nibbles[:, ::2] + 16 * nibbles[:, 1::2], jnp.uint8)
        numbers = (
            np.arange(16.0)
            if code == "int4"
            else np.arange(16).astype(np.uint8).view(ml_dtypes.float4_e2m1fn)
        )
        exact = numbers.astype(np.float64)[nibbles]
    else:
        values = jnp.asarray(rng.integers(-128, 128, (num_out, num_in)), jnp.int8)
        if code == "fp8":  # all of its codes but its two NaNs
            bits = np.arange(num_out * num_in).reshape(num_out, num_in) % 254
            values = jnp.asarray(
                (bits + (bits >= 127)).astype(np.uint8).view(ml_dtypes.float8_e4m3fn)
            )
        exact = np.asarray(values).astype(np.float64)
    for group, columns in enumerate((slice(0, 32), slice(32, 64), slice(64, 80))):
        exact[:, columns] -= (
            zero[:, group, None] if zero is not None else 8.0 * (code == "int4" and not minima)
        )
        exact[:, columns] *= scale[:, group, None]
        exact[:, columns] += minimum[:, group, None] if minimum is not None else 0.0
    of_groups = (None if each is None else jnp.asarray(each) for each in (scale, zero, minimum))
    scale_OJ, zero_OJ, minimum_OJ = of_groups
    return QuantizedWeight(values, scale_OJ, zero_OJ, code, 32, minimum_OJ), exact


def on_device(weight: QuantizedWeight) -> QuantizedWeight:
    arrays = {
        name: jnp.asarray(each) for name, each in weight._asdict().items() if hasattr(each, "shape")
    }
    return weight._replace(**arrays)


# Only formats of int4 have minima. Codes and groups are read apart from each other.
IN_GROUPS = few(
    [
        *itertools.product(["int8", "int4", "fp8", "fp4"], ["scales", "zeros", "half scales"]),
        *itertools.product(["int4"], ["minima", "half minima"]),
    ],
    [
        *(("int8", "scales"), ("int8", "zeros"), ("fp8", "half scales"), ("fp4", "scales")),
        *(("int4", groups) for groups in ("scales", "zeros", "half minima")),
    ],
)


@pytest.mark.parametrize(("code", "groups"), IN_GROUPS)
def test_one_call_multiplies_by_a_quantised_weight(code: str, groups: str) -> None:
    """The oracle is numpy in float64. A token has its bits among any others."""
    weight, exact = quantized_weight(
        code, zeros="zeros" in groups, minima="minima" in groups, half="half" in groups
    )
    x = np.random.default_rng(6).standard_normal((11, 80)).astype(np.float32)
    in_panels, num_out = packed.pack_quantized(weight), len(exact)

    def matmul(x: Any, result: str = "float32") -> Any:
        return np.asarray(packed.multiply_quantized(x, in_panels, num_out, result=result))

    together = matmul(x)
    tolerance = 1e-5 * np.abs(exact).max()
    np.testing.assert_allclose(together, x @ exact.T, atol=tolerance, rtol=1e-5)
    for count in (1, 2, 3, 4, 5, 8):
        np.testing.assert_array_equal(matmul(x[-count:]), together[-count:])
    by_definition = quantized_matmul(jnp.asarray(x), weight, backend="reference")
    np.testing.assert_allclose(np.asarray(by_definition), x @ exact.T, atol=tolerance, rtol=1e-5)
    assert np.array_equal(matmul(x, "bfloat16"), together.astype("bfloat16"))
    rows = packed.read_quantized_rows(on_device(in_panels), np.array([2, 0]))
    np.testing.assert_allclose(numbers(rows), exact[[2, 0]], rtol=1e-5, atol=tolerance)


@pytest.mark.parametrize("instructions", [library.NONE, library.DOT, library.TILES])
@pytest.mark.parametrize(("code", "groups"), IN_GROUPS)
def test_one_call_multiplies_rows_of_bfloat16_by_codes(
    code: str, groups: str, instructions: int
) -> None:
    """The oracle is numpy in float64: codes are exact in bfloat16, and sums are of float32.

    Without instructions for bfloat16 an input may be rounded to 16 bits beside the largest of its
    group.
    """
    if instructions > library.load().instructions.get("bfloat16", library.NONE):
        pytest.skip("no such instructions on this processor")
    weight, exact = quantized_weight(
        code, zeros="zeros" in groups, minima="minima" in groups, half="half" in groups
    )
    x = jnp.asarray(np.random.default_rng(6).standard_normal((40, 80)), jnp.bfloat16)
    x = x.at[3, 7].set(3000).at[38, 79].set(-7)
    in_panels, num_out = packed.pack_quantized(weight), len(exact)

    def matmul(x: Any) -> Any:
        return np.asarray(
            packed.multiply_quantized(
                x, in_panels, num_out, result="float32", instructions=instructions
            )
        )

    together = matmul(x)
    numbers_of_x = np.asarray(x).astype(np.float64)
    expected = numbers_of_x @ exact.T
    # What is lost has the size of the terms, of which zeros take away a part.
    size = np.abs(numbers_of_x) @ np.abs(exact.T) + 16 * np.abs(exact).max()
    lost = 1e-6 * size
    if instructions == library.NONE and code != "fp8":
        for columns in (slice(0, 32), slice(32, 64), slice(64, 80)):
            largest = np.abs(numbers_of_x[:, columns]).max(1, keepdims=True)
            lost += 2.0**-15 * largest * np.abs(exact[:, columns]).sum(1)
    assert (np.abs(together - expected) <= lost).all()
    for count in (1, 2, 5, 12, 13, 17):
        np.testing.assert_array_equal(matmul(x[-count:]), together[-count:])
    for bad in (np.nan, np.inf):
        assert not np.isfinite(matmul(x.at[0, 70].set(bad))[0]).any()


@pytest.mark.parametrize(
    ("code", "num_in", "group_size"),
    [
        *(("int8", 320, 320), ("int4", 320, 96), ("int4", 320, 160), ("int4", 320, 150)),
        *(("int8", 75, 32), ("int8", 78, 26), ("int8", 75, 25), ("int8", 2048, 2048)),
    ],
)
def test_one_call_multiplies_inputs_of_eight_bits_exactly(
    code: str, num_in: int, group_size: int
) -> None:
    """The oracle is numpy, with whole numbers: inputs of bfloat16 that are at least the 128th part
    of the largest lose nothing, in any number and in groups of any size.
    """
    rng = np.random.default_rng(2)
    x = (rng.integers(128, 256, (3, num_in)) * rng.choice([-1, 1], (3, num_in))).astype(np.float32)
    if code == "int4":
        exact = rng.integers(-8, 8, (32, num_in))
        # The greatest sums of low halves of eight bits.
        x[0], exact[0] = np.where(np.arange(num_in) % 32, 255, 1 << 14), 7
        stored = (exact[:, ::2] + 8 | exact[:, 1::2] + 8 << 4).astype(np.uint8)
    else:
        exact = rng.integers(-128, 128, (32, num_in))
        if num_in > 1000:  # whose sum is more than 32 bits have
            x, exact = abs(x), abs(exact) - 1
        stored = exact.astype(np.int8)
    scale = 2.0 ** rng.integers(-2, 3, (32, -(-num_in // group_size))).astype(np.float32)
    weight = QuantizedWeight(stored, jnp.asarray(scale), None, code, group_size, None)
    in_panels = packed.pack_quantized(weight)

    def matmul(x: np.ndarray) -> np.ndarray:
        x = jnp.asarray(x, jnp.bfloat16)
        return np.asarray(packed.multiply_quantized(x, in_panels, 32, result="float32"))

    whole = np.repeat(scale, group_size, 1)[:, :num_in].astype(np.float64) * exact
    expected = (x @ whole.T).astype(np.float32)
    rtol = 1e-6 if num_in > 1000 else 0
    np.testing.assert_allclose(matmul(x), expected, rtol=rtol)
    np.testing.assert_allclose(matmul(x[:1]), expected[:1], rtol=rtol)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shared", [False, True], ids=["scales of its own", "shared scales"])
def test_one_call_multiplies_rows_by_quantised_weights_of_groups(shared: bool, dtype: str) -> None:
    """The oracle is the definition. Where outputs share scales, these are not in panels."""
    rng, counts = np.random.default_rng(9), np.array([1, 0, 8])
    x = jnp.asarray(rng.standard_normal((10, 320)), dtype)
    values = rng.integers(0, 256, (3, 40, 160)).astype(np.uint8)
    scale = rng.uniform(0.1, 1, (3, 3 if shared else 40, 2)).astype(np.float32)
    rows = np.arange(40) // 16 if shared else None
    weights = QuantizedWeight(values, scale, None, "int4", 288, None, rows)
    matmuls = packed.multiply_quantized(
        x, packed.pack_quantized(weights), 40, result="float32", count_E=jnp.asarray(counts)
    )
    first = 0
    for count, codes, scales in zip(counts, values, scale, strict=True):
        weight = QuantizedWeight(codes, scales if rows is None else scales[rows], None, "int4", 288)
        own_x = np.asarray(x[first : first + count]).astype(np.float32)
        expected = own_x @ np.asarray(numbers(on_device(weight))).T
        np.testing.assert_allclose(matmuls[first : first + count], expected, rtol=1e-4, atol=1e-3)
        first += count
    assert not np.asarray(matmuls[first:]).any(), "of no group"


@pytest.mark.parametrize("num_in", [64, 2115])
@pytest.mark.parametrize("instructions", [library.NONE, library.DOT, library.TILES])
def test_one_call_rounds_rows_and_multiplies_by_panels(num_in: int, instructions: int) -> None:
    """The oracle is numpy, with whole numbers of 64 bits.

    The bits are those of XLA's path, for any rows.
    """
    if instructions > library.load().instructions["int8"]:
        pytest.skip("no such instructions on this processor")
    rng = np.random.default_rng(6)
    x = (rng.standard_normal((40, num_in)) * 10 ** rng.uniform(-3, 3, (40, 1))).astype(np.float32)
    # The second row is below the least scale, and above the numbers that some processors take as
    # zero.
    x[0], x[1], x[2, 7], x[3, 7], x[4] = 0, 1e-33, np.nan, np.inf, -x[4, 0]
    x[5] = np.resize([254, 1], num_in)  # 127 and 0.5, which is rounded to even
    values = rng.integers(-128, 128, (190, num_in)).astype(np.int8)
    scale = rng.uniform(0.5, 2, 190).astype(np.float32)

    def matmul(x: Any) -> Any:
        return np.asarray(
            packed.multiply_packed(
                x,
                packed.pack(values, 4),
                190,
                result="float32",
                scale_O=scale,
                instructions=instructions,
            )
        )

    together = matmul(x)
    assert np.isnan(together[2]).all() and not together[:2].any()
    largest = np.abs(x[4:]).max(axis=1, keepdims=True) * np.float32(1 / 127)
    rounded = np.round(x[4:] * (1 / largest)).astype(np.int64)
    sums = (rounded @ values.T.astype(np.int64)).astype(np.float32)
    np.testing.assert_array_equal(together[4:], sums * largest * scale)
    xla_sums, xla_scale = jax.jit(multiply_rounded)(x, values)
    np.testing.assert_array_equal(together, np.float32(xla_sums) * xla_scale * scale)
    for count in (1, 2, 5, 7):
        np.testing.assert_array_equal(matmul(x[8 - count : 8]), together[8 - count : 8])


@pytest.mark.parametrize(
    ("dtype", "quantization"),
    few(
        itertools.product(("float32", "bfloat16"), (None, "int8")),
        [("bfloat16", "int8")],
    ),
)
def test_an_engine_has_the_same_bits_for_few_rows_and_for_many(
    dtype: Any, quantization: Any
) -> None:
    """Generation multiplies few rows, and the score of its tokens many in one chunk."""
    prompts = [[5, 9, 200], [7], [20, 3, 5, 60, 60, 1, 17, 90]]
    params = SamplingParams(temperature=0.7, seed=1, max_tokens=40, ignore_eos=True, logprobs=0)
    with make_llm("demo", dtype=dtype, quantization=quantization, max_model_len=128) as llm:
        outputs = [each.outputs[0] for each in llm.generate(prompts, params, use_tqdm=False)]
        scores = llm.score(prompts, [list(each.token_ids) for each in outputs])
    for output, score in zip(outputs, scores, strict=True):
        drawn = [
            entry[id_].logprob
            for entry, id_ in zip(output.logprobs or [], output.token_ids, strict=True)
        ]
        assert score == drawn


@pytest.mark.parametrize("shape", [(192, 64), (250, 1033), (1, 1)], ids=str)
@pytest.mark.parametrize(
    ("dtype", "instructions"),
    [
        ("float32", library.NONE),
        ("bfloat16", library.NONE),
        ("bfloat16", library.DOT),
        ("bfloat16", library.TILES),
    ],
)
def test_one_call_multiplies_any_number_of_rows_by_panels(
    dtype: str, instructions: int, shape: tuple[int, int]
) -> None:
    """The oracle is numpy in float64. A row has its bits among any others."""
    if instructions > library.load().instructions.get(dtype, library.NONE):
        pytest.skip("no such instructions on this processor")
    num_out, num_in = shape
    rng = np.random.default_rng(5)
    x, w = (rng.standard_normal((rows, num_in)).astype(dtype) for rows in (130, num_out))
    panels = packed.pack(w, packed.NUMBERS[dtype])
    assert panels.shape[0] == -(-num_out // 16) and panels.nbytes % 64 == 0
    for array in (panels, jnp.asarray(panels)):
        np.testing.assert_array_equal(packed.unpack(array, num_out, num_in), w)
    ids = np.array([0, num_out - 1, num_out // 2])
    np.testing.assert_array_equal(packed.rows_of_panels(jnp.asarray(panels), ids, num_in), w[ids])

    def matmul(x: Any, result: str = "float32") -> Any:
        return np.asarray(
            packed.multiply_packed(x, panels, num_out, result=result, instructions=instructions)
        )

    together = matmul(x)
    exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
    np.testing.assert_allclose(together, exact, atol=1e-4, rtol=1e-5)
    np.testing.assert_array_equal(matmul(x, "bfloat16"), together.astype("bfloat16"))
    for count in (0, 1, 2, 3, 4, 5, 6, 7, 97):
        np.testing.assert_array_equal(matmul(x[len(x) - count :]), together[len(x) - count :])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_call_multiplies_rows_by_the_weight_of_their_group(dtype: str) -> None:
    rng = np.random.default_rng(6)
    counts = np.array([3, 0, 100, 1])
    x, w = (rng.standard_normal(size).astype(dtype) for size in ((110, 40), (4, 24, 40)))
    matmuls = packed.multiply_packed(
        x, packed.pack(w, packed.NUMBERS[dtype]), 24, result="float32", count_E=jnp.asarray(counts)
    )
    first = 0
    for count, weight in zip(counts, w, strict=True):
        rows = slice(first, first + count)
        alone = packed.multiply_packed(
            x[rows], packed.pack(weight, packed.NUMBERS[dtype]), 24, result="float32"
        )
        np.testing.assert_array_equal(matmuls[rows], alone)
        first += count
    assert not np.asarray(matmuls[first:]).any(), "of no group"


def test_a_weight_in_panels_that_does_not_fit_is_refused() -> None:
    panels = packed.pack(np.ones((20, 8), np.float32), 1)
    for x, num_out in ((jnp.ones((2, 9)), 20), (jnp.ones((2, 8)), 33)):
        with pytest.raises(Exception, match="the shapes of a weight in panels do not fit"):
            jax.block_until_ready(packed.multiply_packed(x, panels, num_out, result="float32"))
    with pytest.raises(Exception, match="no kernel for a product of these types"):
        x = jnp.ones((2, 8), jnp.float16)
        jax.block_until_ready(packed.multiply_packed(x, panels, 20, result="float32"))


def test_texts_are_those_of_plain_xla(tmp_path: Path) -> None:
    assert candidates("auto", "cpu")[0] is SETS["cpu"] and SETS["cpu"] not in candidates(
        "auto", "gpu"
    )
    model = random_checkpoint(tmp_path / "llama", LLAMA)
    rng = np.random.default_rng(4)
    prompts = [rng.integers(1, 257, length).tolist() for length in (5, 61, 33, 90)]
    params = [
        SamplingParams(temperature=t, seed=3, n=n, max_tokens=40, ignore_eos=True)
        for t, n in ((0, 1), (1, 2), (0, 1), (1, 1))
    ]

    def texts(**settings: Any) -> Any:
        with make_llm(model, **settings) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            return [
                [(output.token_ids, output.cumulative_logprob) for output in each.outputs]
                for each in outputs
            ]

    plain = texts()
    assert texts(attention_backend="cpu", **SMALL_POOL, preemption_mode="swap") == plain, (
        "path independence"
    )
    xla = texts(attention_backend="scan")
    assert [each[0][0] for each in xla][::2] == [each[0][0] for each in plain][::2], "greedy texts"


def test_without_a_compiler_plain_xla_does_it_and_the_reason_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("JAXPAGE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    monkeypatch.delenv("CXX", raising=False)
    loaded = library._load.__wrapped__()
    assert loaded.reason is not None and "no C++ compiler" in loaded.reason
    monkeypatch.setattr(library, "load", lambda: loaded)
    with pytest.raises(UnsupportedError, match=r"'cpu' .*no C\+\+ compiler"):
        choose_backend("cpu", jax.devices()[0])
    case = make_case(7, [5, 20], [1, 3])
    actual, expected = (
        paged_attention(*case.arrays, scale=0.2, max_query_len=3, backend=each)
        for each in ("auto", "scan")
    )
    np.testing.assert_array_equal(actual, expected)
    copy_blocks([jax.numpy.asarray(case.k_pages)], np.array([1]), np.array([2]))
    assert "copy_blocks" not in caplog.text, "the kernels have none of their own"
    said = re.findall(
        r"cpu: .*no C\+\+ compiler.*Plain XLA \(scan\) takes its place, which is slow", caplog.text
    )
    assert len(said) == 1
    for command, reason in {
        "/bin/false -pipe": "/bin/false failed: exit status 1",
        "sh -c 'printf \"warning\\nx.cc: error: no space\\nmore\" >&2; exit 1'": "sh failed: x.cc: error: no space",
    }.items():
        monkeypatch.setenv("CXX", command)
        with pytest.raises(RuntimeError, match=f"^{reason}$"):
            library.compile_library("avx2", ())


def test_a_library_of_the_wheel_is_used_and_a_damaged_one_is_not(tmp_path: Path) -> None:
    if (instructions := library.instruction_set()) is None or library.load().reason is not None:
        pytest.skip("there are no kernels for this machine")
    name, flags = instructions
    (tmp_path / f"{name}.so").write_bytes(library.compile_library(name, flags).read_bytes())
    program = (
        f"from pathlib import Path; from pallas_kernels.cpu import library; library.PREBUILT = "
        f"Path({str(tmp_path)!r})\n"
        "print(*library.load()[:2])"
    )
    variables = {
        **os.environ,
        "JAXPAGE_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": str(ROOT),
        "CXX": "/bin/false",
    }
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, env=variables, check=True)
    assert done.stdout.strip() == f"{name} None", "without a compiler"
    whole = (tmp_path / f"{name}.so").read_bytes()
    (tmp_path / f"{name}.so").write_bytes(whole[:9000] + bytes(100_000) + whole[109_000:])
    done = subprocess.run(command, capture_output=True, text=True, env=variables, check=True)
    assert f"{name}.so cannot be used: the file is damaged" in done.stderr
    assert "/bin/false failed" in done.stdout


@pytest.fixture
def build_hook(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the hook of a wheel as hatchling would, which is not installed here; with it come the
    warnings.
    """

    def make(choice: str | None, compiler: str) -> tuple[Any, list[str]]:
        said: list[str] = []
        interface: Any = ModuleType("interface")
        app = SimpleNamespace(display_warning=said.append)
        interface.BuildHookInterface = type("Hook", (), {"root": str(ROOT), "app": app})
        parts = ["hatchling", "builders", "hooks", "plugin", "interface"]
        for end in range(1, len(parts)):
            name = ".".join(parts[:end])
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.setitem(sys.modules, ".".join(parts), interface)
        monkeypatch.delenv("JAXPAGE_BUILD_KERNELS", raising=False)
        if choice is not None:
            monkeypatch.setenv("JAXPAGE_BUILD_KERNELS", choice)
        monkeypatch.setenv("CXX", compiler)
        return runpy.run_path(str(ROOT / "hatch_build.py"))["Kernels"](), said

    return make


def test_an_installation_compiles_the_kernels_or_says_why_not(
    build_hook: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def data() -> dict[str, Any]:
        return {"force_include": {}, "pure_python": True}

    hook, said = build_hook(None, "/bin/true")
    assert hook.dependencies() == ["jax>=0.10,<0.11"]
    monkeypatch.setattr(type(hook), "_build", lambda self, directory: [tmp_path / "avx2.so"])
    hook.initialize("standard", build_again := data())
    hook.finalize("standard", build_again, "")
    assert build_again["force_include"] == {
        str(tmp_path / "avx2.so"): "pallas_kernels/cpu/prebuilt/avx2.so"
    }
    assert (
        build_again["tag"].startswith("py3-none-") and not build_again["pure_python"] and not said
    )
    hook.initialize("editable", edited := data())
    assert edited == data()

    hook, said = build_hook(None, "/bin/false")
    hook.initialize("standard", build_again := data())
    assert build_again == data(), "a wheel of pure Python"
    assert len(said) == 1 and said[0].endswith("at the first use: /bin/false failed: exit status 1")
    hook, _ = build_hook("1", "/bin/false")
    with pytest.raises(RuntimeError, match="/bin/false failed"):
        hook.initialize("standard", data())

    # Without a compiler nothing is downloaded for a build, unless the kernels must be there.
    monkeypatch.setattr(shutil, "which", lambda name: None)
    for choice, needs in ((None, []), ("0", []), ("1", ["jax>=0.10,<0.11"])):
        hook, said = build_hook(choice, "")
        assert hook.dependencies() == needs
        if choice != "1":
            hook.initialize("standard", build_again := data())
            assert build_again == data() and len(said) == (choice is None)
    with pytest.raises(ValueError, match="JAXPAGE_BUILD_KERNELS='yes': it may be 0 or 1"):
        build_hook("yes", "")


def test_a_damaged_library_of_the_cache_is_compiled_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("JAXPAGE_CACHE_DIR", str(tmp_path))
    made = [bytes(1000), bytes(2000)]

    def build_again(commands: list[list[str]]) -> None:
        if len(commands) == 1:  # the linker's
            Path(commands[0][-1]).write_bytes(made.pop(0))

    monkeypatch.setattr(build, "_run", build_again)
    path = library.compile_library("avx2", ())
    # the file system is read-only now, and there is no compiler
    with monkeypatch.context() as later:
        later.setattr(Path, "chmod", lambda *_: 1 / 0)
        later.setenv("CXX", "/bin/false")
        assert library.compile_library("avx2", ()) == path
    assert (
        library.compile_library("avx2", ()) == path
        and len(made) == 1
        and "damaged" not in caplog.text
    )
    path.write_bytes(path.read_bytes()[:-1])
    assert library.compile_library("avx2", ()) == path and path.read_bytes()[:2000] == bytes(2000)
    assert f"{path} is damaged" in caplog.text


def test_of_two_processes_one_compiles_a_library(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The other, which finds none either, waits for it."""
    monkeypatch.setenv("JAXPAGE_CACHE_DIR", str(tmp_path))
    lock, built = library.fcntl.flock, []

    def build_here(path: Path, *_: object) -> None:
        directory = os.open(path.parent, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            lock(directory, library.fcntl.LOCK_EX | library.fcntl.LOCK_NB)
        os.close(directory)
        built.append(path)
        path.write_bytes(hashlib.sha256(b"").digest())

    def wait_while_the_other_builds(*_: int) -> None:
        monkeypatch.setattr(library.fcntl, "flock", lock)
        library.compile_library("avx2", ())

    monkeypatch.setattr(library, "build", build_here)
    monkeypatch.setattr(library.fcntl, "flock", wait_while_the_other_builds)
    assert [library.compile_library("avx2", ())] == built


PACKED_MISTAKES = {
    "the high nibble first": ("w = step ? w >> 4 : w & 15;", "w = step ? w & 15 : w >> 4;"),
    "zeros are forgotten": ("return has_sums ? multiply", "return p.minimum ? multiply"),
    "scales of another group": ("(panel * p.num_groups + group)", "(panel * p.num_groups)"),
    "minima are forgotten": ("offset[i] = p.minimum", "offset[i] = false"),
    "shared scales of another output": (
        "p.scale_row[panel * kOutputsOfPanel + lane]",
        "p.scale_row[lane]",
    ),
    "a sum without what it has too much": ("128 * p.row_sum", "127 * p.row_sum"),
    "a scale without its least": ("if (scale < 0x1p-100f)", "if (false)"),
    "rounded down": ("(whole + magic) - magic", "whole"),
    "the scale of another output": ("(p.scale) + output", "(p.scale)"),
    "the first block of words alone": ("} while (begin < p.num_words);", "} while (false);"),
    "sums begin anew in each block": (
        "begin ? raw_at<typename Word::Sum>",
        "false ? raw_at<typename Word::Sum>",
    ),
    "the numbers of a word take turns": (
        "step ? w & 0xffff0000u : w << 16",
        "step ? w << 16 : w & 0xffff0000u",
    ),
    "rows of another tile": ("x + first * num_words * Word::kSteps", "x"),
    "the last outputs are left out": (
        "panel < end_panel; ++panel) run(",
        "panel < end_panel - 1; ++panel) run(",
    ),
    "words with the high nibble first": ("both | both << 12", "both >> 4 | both << 16"),
    "zeros are added": ("? -scale[i]", "? scale[i]"),
    "a group with the scale of the first": (
        "p.scale, first_panel + i, group)",
        "p.scale, first_panel + i, 0)",
    ),
    "a group without those before it": ("[i], raw_at<Vec>(total + at))", "[i], Vec{})"),
    "one row without the groups before": ("scales.offset[0], total);", "scales.offset[0], Vec{});"),
    "a low half with a sign": ("_mm256_cvtepu16_epi32(low)", "_mm256_cvtepi16_epi32(low)"),
    "a high half without its weight": ("_cvtepi16_epi32(high), 8)", "_cvtepi16_epi32(high), 7)"),
    "a part with its first sum alone": ("i < end; i += kInputsOfSum) {", "i < end; i = end) {"),
    "the inputs of another sum": ("rows.halves + i * 2", "rows.halves + first * 2"),
    "few rows with the inputs of the first group": (
        "rows.x + first * Word::kSteps,",
        "rows.x,",
    ),
    "few rows with the codes of the first group": ("source.from(first)", "source.from(0)"),
    "the last group is left out": (
        "part + i < rows.num_parts; ++i)",
        "part + i + 1 < rows.num_parts; ++i)",
    ),
    "sums of the first row's inputs": ("row * rows.sum_stride + part", "part"),
    "pairs with the high nibble first": ("(two | two << 12)", "(two >> 4 | two << 16)"),
    "pairs of one input": ("bytes_at(at + kOutputsOfPanel)", "bytes_at(at)"),
    "codes of fp4 that are not doubled": ("scale * 0.5f : scale", "scale : scale"),
    "an input beside the largest number of its row": (
        "for (int64_t i = first; i < end; ++i) max_bits",
        "for (int64_t i = 0; i < p.num_in; ++i) max_bits",
    ),
    "the middle of codes is kept": ("has_sums ? 0 :", "true ? 0 :"),
    "a large group in one part": ("p.group_size > kMaxInputsOfPart ?", "false ?"),
    "parts with a scale of their own": ("part / parts_of_group", "part"),
    "what is not finite is a number": (": NAN", ": 1.0f"),
    "codes of other inputs": ("source, first + begin, first + end,", "source, begin, end,"),
    "a row without its last number": (
        "std::memcpy(words, x, p.num_in * 2);",
        "std::memcpy(words, x, p.num_in * 2 - 2);",
    ),
}
ROW_MISTAKES = {
    "gates and ups change places": ("load<Stored>(gates + p.width", "load<Stored>(gates"),
    "a sigmoid of gates": ("return x / (splat", "return splat(1.0f) / (splat"),
    "gates without their last vector": (
        "i < p.width; i += kLanes)\n    store<Stored>(out, i, p.width,\n                  activate",
        "i + kLanes <= p.width; i += kLanes)\n    store<Stored>(out, i, p.width, activate",
    ),
    "a norm without its offset": (
        "(load(p.scale_type, p.scale, i, p.width) + offset)",
        "load(p.scale_type, p.scale, i, p.width)",
    ),
    "the mean of another width": ("/ p.width;", "/ (p.width / 16 * 16);"),
    "another row's angles": ("token = row / heads_of_token", "token = row / p.width"),
    "values of the first head": ("(token * p.num_keys + value)", "(token * p.num_keys)"),
    "keys of the first head": ("(token * p.num_keys + key)", "(token * p.num_keys)"),
    "a norm of what was not added": (
        "x = static_cast<const Number*>(p.sum) + row * p.width;",
        ";",
    ),
    "pairs that turn back": ("second * cos + first * sin", "second * cos - first * sin"),
    "what is not turned is lost": ("(p.width - 2 * pairs) * sizeof(Number)", "0"),
}
# Of what follows a product, of layer norms, and of attention both ways.
ENCODER_MISTAKES = {
    "biases of the first outputs": ("p.bias + output,", "p.bias,"),
    "a product without its activation": (
        "value = activate(kActivation, value)",
        "value = activate(Activation::kNone, value)",
    ),
    "an error function that ends too soon": ("max(splat(-4.0f)", "max(splat(-2.0f)"),
    "a variance with what fills up a row": (
        "last = select(lane_indices()",
        "last = select(splat(0.0f)",
    ),
    "a mean without the last vectors": (
        "for (; i < num_vectors; ++i) sums[0] += part(i);",
        "",
    ),
    "a layer norm of what was not added": (
        "numbers[i] = Load<Stored>::at(rounded);",
        "numbers[i] = of_row(p.x, i);",
    ),
    "keys of the first head": ("head * a.num_kv_heads / a.num_heads", "0"),
    "one key too few to the right": ("column + a.reach + 1)", "column + a.reach)"),
    "one key too few to the left": ("column - a.reach);", "column - a.reach + 1);"),
    "scores of keys that are not there": (
        "for (int64_t i = end / kLanes * kLanes; i < num_columns; i += kLanes) hide(i);",
        "",
    ),
    "scores of keys out of reach": (
        "for (int64_t i = 0; i < begin; i += kLanes) hide(i);",
        "",
    ),
    "values of the first keys": ("visible.values + begin * kLanes", "visible.values"),
    "sums of values begin anew": (
        "begin ? raw_at<Vec>(sums.at(t, v * kLanes)) : Vec{}",
        "Vec{}",
    ),
    "a weight that is never zero": ("select(x < splat(-126.0f)", "select(x < splat(-1e30f)"),
    "what is no text is kept": ("if (segment[begin] < 0)", "if (segment[begin] < -9)"),
    "two texts are one": ("segment[end] == segment[begin];)", "segment[end] >= 0;)"),
}
MISTAKES = {
    "a window that is one too wide": ("unit.last + 1 - a.window", "unit.last - a.window"),
    "the last position is left out": (
        "unit.last - position + 1 : kTile",
        "unit.last - position : kTile",
    ),
    "softcap without its factor": ("* splat(a.softcap);", ";"),
    "a tree is taken for a chain": ("unit.branch = branch;", "unit.branch = nullptr;"),
    "a block that never ends": ("a.block_size - 1 - (position + j) % a.block_size", "kTile"),
    "tiles that tokens see differently are shared": (
        "if (token_tile.begin != begin || token_tile.end != end) break;",
        "",
    ),
    "keys of other numbers": ("keys[(i * kLanes + lane)", "keys[(i * kLanes + kLanes - 1 - lane)"),
    "lanes are added twice": ("width, lane + kStep, other)", "width, lane, other)"),
    "values of the first position": ("values[j * value_vecs + first + i];", "values[first + i];"),
    "slopes of other heads": (
        "slope = a.slopes ? a.slopes[head]",
        "slope = a.slopes ? a.slopes[a.num_heads - 1 - head]",
    ),
    "distances from the block": (
        "tile.position + group - query_position",
        "group % a.block_size - query_position",
    ),
    "sums are left in registers": (
        "acc[h][i]);\n    }\n  }\n  for (int h = 0; h < kHeads; ++h)\n"
        "    for (int i = 0; i < kVecs; ++i) heads[h].acc[first + i] = acc[h][i];",
        "acc[h][i]);\n    }\n  }",
    ),
    "scales of keys are forgotten": ("scores[j] *= a.k_scale", "scores[j] += 0 * a.k_scale"),
}


# These need AMX.
TILE_MISTAKES = {
    "a group with the inputs of the first": (
        "x + (first + i * size) * kSteps",
        "x + first * kSteps",
    ),
    "a group with the codes of the first": (
        "buffer + (i * size - begin) * kSteps",
        "buffer + (0 - begin) * kSteps",
    ),
    "values of the first half": ("(half * vecs + i) * kRowsOfTile", "i * kRowsOfTile"),
    "few heads with the first positions' values again": (
        "values + (vecs + i) * kRowsOfTile",
        "values + i * kRowsOfTile",
    ),
    "the first positions' values again": (
        "_tile_loadd(2, high + i * kRowsOfTile",
        "_tile_loadd(2, low + i * kRowsOfTile",
    ),
    "scores without their scale": ("a.scale * kLog2E", "kLog2E"),
    "queries of the first block": ("queries.data() + next * words", "queries.data()"),
    "a value that is not finite reaches all": ("data()) && num_tokens > 1", "data()) && false"),
    "keys of another key/value head": (
        "(a.k_pages) + (all.kv_begin + kv) * width",
        "(a.k_pages) + all.kv_begin * width",
    ),
    "one row of weights": ("configured(kAreFew, num_heads)", "configured(kAreFew, 1)"),
    "keys of the positions before": ("k * kTile + second", "k * kTile + first"),
    "sums that are not corrected": ("sums[i] *= correction", "sums[i] *= splat(1.0f)"),
    "few heads with sums that are not corrected": (
        "sums[h * vecs + i] *= splat(correction)",
        "sums[h * vecs + i] *= splat(1.0f)",
    ),
    "the position after the last": ("(position <= block.last)", "(position <= block.last + 1)"),
    "few heads with the position after the last": (
        "(lane <= block.last[h])",
        "(lane <= block.last[h] + 1)",
    ),
    "weights of another head": ("sums[a.value_width][index])", "sums[a.value_width][0])"),
    "slopes of other heads in tiles": (
        "slope[lane] = a.slopes ? a.slopes[head]",
        "slope[lane] = a.slopes ? a.slopes[0]",
    ),
    "sinks of other heads in tiles": ("a.sinks[head] * kLog2E", "a.sinks[0] * kLog2E"),
    "numbers of a result in the order of tiles": (
        "shuffle<0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23>",
        "shuffle<0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15>",
    ),
}
# These are of the phases of a call, and of fused operations.
FUSION_MISTAKES = {
    "a phase begins before the one before it ends": ("if (i) wait(i - 1);", ""),
    "rows of the first block": ("unit % blocks * kRowsAtOnce", "0"),
    "a group with the units of all before it": ("unit -= (group - 1)->end_unit", "unit -= 0"),
    "a fusion without zeros for padding": (
        "clear_rows(ret(i).untyped_data(), num_rows_,",
        "clear_rows(ret(i).untyped_data(), x_.num_rows,",
    ),
    "a product without zeros for padding": (
        "clear_rows(p.out, row,",
        "clear_rows(p.out, p.num_rows,",
    ),
    "a fusion without its sum": ("p.added = sum_;", "p.added = x_.data;"),
    "a norm of rows before the last stage": (
        "x_ = as_matrix(out);",
        "x_.width = as_matrix(out).width;",
    ),
    "inputs of another row": ("p.narrow[row * p.num_in + i]", "p.narrow[i]"),
    "inputs as they were": ("if (bytes) p.words = words;", ""),
}
ALL_MISTAKES = {
    **FUSION_MISTAKES,
    **MISTAKES,
    **PACKED_MISTAKES,
    **ROW_MISTAKES,
    **ENCODER_MISTAKES,
    **TILE_MISTAKES,
}


def test_each_mistake_is_planted_in_one_line() -> None:
    sources = "".join(each.read_text() for each in library.SOURCES.iterdir())
    assert not [name for name, (line, _) in ALL_MISTAKES.items() if sources.count(line) != 1]


@pytest.mark.sweep
@pytest.mark.parametrize("mistake", ALL_MISTAKES)
def test_a_planted_mistake_is_seen(mistake: str, tmp_path: Path) -> None:
    if mistake in TILE_MISTAKES and library.load().instructions["bfloat16"] != library.TILES:
        pytest.skip("no AMX")
    sources, (line, wrong) = tmp_path / "src", ALL_MISTAKES[mistake]
    shutil.copytree(library.SOURCES, sources)
    (source,) = (each for each in sources.iterdir() if line in each.read_text())
    assert source.read_text().count(line) == 1
    source.write_text(source.read_text().replace(line, wrong))
    done = _in_process(f"library.SOURCES = Path({str(sources)!r})", tmp_path)
    has_failed = done.returncode == 1 and "failed" in done.stdout
    # What reads past an array may end the process.
    assert has_failed or done.returncode == -signal.SIGSEGV, done.stdout + done.stderr


@pytest.mark.sweep
@pytest.mark.skipif(
    library.instruction_set() is None or library.instruction_set()[0] != "avx512",
    reason="no AVX-512",
)
def test_a_processor_without_avx512_does_the_same(tmp_path: Path) -> None:
    done = _in_process(
        'del build.X86["avx512"]; assert library.instruction_set()[0] == "avx2"', tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.sweep
def test_behaviour_is_defined(tmp_path: Path) -> None:
    extra = '("-fsanitize=undefined", "-fno-sanitize-recover=undefined", "-O1")'
    done = _in_process(f"build.FLAGS = (*build.FLAGS, *{extra})", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.sweep
@pytest.mark.parametrize("beyond", [False, True], ids=["as it is", "one output too many"])
def test_no_memory_beyond_the_arrays_is_touched(beyond: bool, tmp_path: Path) -> None:
    """AddressSanitizer looks on; it must be loaded before Python is, with the C++ library whose
    functions it watches.
    """
    sources = tmp_path / "src"
    shutil.copytree(build.SOURCES, sources)
    if beyond:
        text, check = (sources / "packed.cc").read_text(), "count == kOutputsOfPanel ? to : buffer"
        assert text.count(check) == 1
        (sources / "packed.cc").write_text(text.replace(check, "to"))
    libraries = [_of_compiler(name) for name in ("libasan.so", "libstdc++.so")]
    change = f'build.FLAGS = (*build.FLAGS, "-fsanitize=address", "-O1")\n    library.SOURCES = Path({str(sources)!r})'
    done = _in_process(
        change,
        tmp_path,
        LD_PRELOAD=" ".join(libraries),
        ASAN_OPTIONS=f"detect_leaks=0:log_path={tmp_path}/log",
    )
    assert (done.returncode != 0) == beyond, done.stdout + done.stderr
    # pytest captures what is written elsewhere
    logs = [path.read_text() for path in tmp_path.glob("log.*")]
    assert any("AddressSanitizer: heap-buffer-overflow" in log for log in logs) == beyond


def _of_compiler(name: str) -> str:
    command = [*build.compiler(), f"-print-file-name={name}"]
    path = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    if path == name:
        pytest.skip(f"this compiler has no {name}")
    return path


def _in_process(change: str, cache: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """Runs the tests of one call with another library."""
    plugin = "from pathlib import Path\ndef pytest_collection_finish():\n    from pallas_kernels.cpu import build, library\n    "
    (cache / "another_library.py").write_text(plugin + change)
    variables = {
        **os.environ,
        "JAXPAGE_CACHE_DIR": str(cache),
        "PYTHONPATH": f"{ROOT}:{cache}",
        **more,
    }
    words = (
        *("-n", "0", "-q", "-m", ""),
        "-p",
        "another_library",
        "tests/test_cpu_kernels.py",
        "tests/test_cpu_rows.py",
        "-k",
        "one_call",
    )
    command = [sys.executable, "-m", "pytest", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=variables)
