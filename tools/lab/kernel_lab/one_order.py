"""Measures whether kernels with `batch_invariant` have the bits of a row in any company.

It is what no interpreter shows: that a tensor core adds up as its published model says, and that
the compiler keeps the order. Attention is computed in decode, in verification and in chunks, of
keys and values and of latents; products among few rows and among many; norms likewise.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import paged_attention
from pallas_kernels.quantized_matmul import batch_invariant_matmul
from pallas_kernels.quantized_weight import QuantizedWeight
from pallas_kernels.sets import SETS
from tools.lab.kernel_lab import specs
from tools.lab.kernel_lab.findings import LEFT_OUT, Finding, judge
from tools.lab.kernel_lab.kernel_cases import make_case
from tools.lab.kernel_lab.matmuls import make_weight
from tools.lab.kernel_lab.specs import MatmulSpec, Spec
from tools.lab.kernel_lab.stability import compare, last_tokens, pick, probe

Outcomes = list[tuple[str, np.ndarray]]
BACKEND = next(name for name, kernels in SETS.items() if kernels.is_batch_invariant)
LAST_S = 15.0  # the time before the end in which nothing further is begun
FEW = 2  # rows that are compared
LATENT = 512  # the width of values within keys that are 64 wider, as those of DeepSeek
# Attention of Llama-3-8B, of one-byte pages, and of latents for 16 heads.
ATTENTION: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "int8": {"page_dtype": "int8"},
    "latents": {"num_heads": 16, "num_kv_heads": 1, "head_dim": LATENT + 64},
}
# The weights of Llama-3-8B, one of few bits, and those of heads of latent attention.
_ROWS: dict[str, Any] = {"name": "", "num_rows": 1}
MATMULS = {
    "qkv": MatmulSpec(**_ROWS, num_in=4096, num_out=6144),
    "down": MatmulSpec(**_ROWS, num_in=14336, num_out=4096),
    "down, int4": MatmulSpec(**_ROWS, num_in=14336, num_out=4096, code="int4", group_size=128),
    "heads": MatmulSpec(**_ROWS, num_in=512, num_out=128, num_groups=16),
}


def findings(*, interpret: bool, small: bool, seconds: float) -> Iterator[Finding]:
    """Yields the findings; nothing is promised of interpreted kernels, whose products are XLA's.

    Args:
        interpret: Runs the kernels on CPU.
        small: Everything is cut small.
        seconds: The time for all of it. What no longer fits is left out.
    """
    end = time.monotonic() + seconds - LAST_S

    def judge_in_time(name: str, measure: Callable[[], Outcomes]) -> Finding:
        if time.monotonic() >= end:
            return Finding(name, LEFT_OUT, f"{seconds:.0f} s are used up")
        return judge(name, lambda: compare(name, measure(), promised=not interpret))

    base = specs.find("llama-3-8b decode 64 ragged")
    for name, fields in ATTENTION.items():
        spec = dataclasses.replace(base, contexts=(1500, 333), queries=(512, 1), **fields)
        if small:
            spec = spec.cut(rows=2, context=70, queries=20)
        values = LATENT if name == "latents" else None
        attend = functools.partial(attention, spec, values, interpret=interpret)
        yield judge_in_time(f"one order: attention, {name}", attend)
    for name, matmul in MATMULS.items():
        counts = (FEW, 17) if small else (FEW, 16, 64, 300, 2048)
        weight = matmul.cut() if small else matmul
        multiply = functools.partial(matmuls, weight, counts, interpret=interpret)
        yield judge_in_time(f"one order: product, {name}", multiply)
    yield judge_in_time("one order: norm", functools.partial(norms, interpret=interpret))


def attention(spec: Spec, value_width: int | None, *, interpret: bool) -> Outcomes:
    """Returns the output of a row's last token in several kinds of step.

    Args:
        spec: The shapes; the first row has a long chunk.
        value_width: The width of values within keys; None if there are pages of values.
        interpret: Runs the kernels on CPU.
    """
    whole = make_case(spec, seed=4)
    [pages] = whole.layers
    values = (pages.v_pages, pages.v_scale) if value_width is None else (None, None)
    max_length = spec.queries[0]
    cases = {
        f"{size} of at most {maximum}": last_tokens(whole, size, maximum)
        for size, maximum in ((1, 1), (1, 16), (16, 16), (3, max_length), (max_length, max_length))
    }
    width = spec.contexts[0] // spec.block_size
    cases["1, a wider table"] = pick(cases["1 of at most 1"], [0], extra_width=width)
    cases["with another row"] = whole
    outcomes = []
    for name, case in cases.items():
        out_TNH = paged_attention(
            case.q_TNH,
            pages.k_pages,
            values[0],
            case.step.block_table_BM,
            case.step.context_len_B,
            case.step.query_start,
            k_scale=pages.k_scale,
            v_scale=values[1],
            scale=case.scale,
            max_query_len=case.max_query_len or spec.max_query_len,
            value_width=value_width,
            backend=BACKEND,
            batch_invariant=True,
            interpret=interpret,
        )
        outcomes.append((name, probe(case, out_TNH, True)))
    return outcomes


def matmuls(spec: MatmulSpec, counts: tuple[int, ...], *, interpret: bool) -> Outcomes:
    """Returns the products of the first rows of each group among several numbers of rows."""
    weight, num_groups = make_weight(spec), spec.num_groups
    shape = (num_groups, max(counts), spec.num_in)
    x_EPI = jax.random.normal(jax.random.key(1), shape, jnp.dtype(spec.dtype))
    outcomes = []
    for count in counts:
        rows_PI = x_EPI[:, :count].reshape(-1, spec.num_in)
        if num_groups == 1:
            y_PO = batch_invariant_matmul(
                rows_PI, _only(weight), backend=BACKEND, interpret=interpret
            )
        else:
            groups_E = jnp.full(num_groups, count)
            y_PO = batch_invariant_matmul(
                rows_PI, weight, groups_E, backend=BACKEND, interpret=interpret
            )
        y_EPO = np.asarray(y_PO).reshape(num_groups, count, -1)
        outcomes.append((f"{count} rows", y_EPO[:, :FEW].copy()))
    return outcomes


def _only(weight: Any) -> Any:
    """Returns the weight of the only group."""
    if not isinstance(weight, QuantizedWeight):
        return weight[0]
    return weight._replace(values=weight.values[0], scale_OJ=weight.scale_OJ[0])


def norms(*, interpret: bool, width: int = 4096) -> Outcomes:
    """Returns the norms of the first rows among several numbers of rows."""
    x_TD = jax.random.normal(jax.random.key(2), (2048, width), jnp.bfloat16)
    scale_D = jnp.ones(width, jnp.bfloat16)
    norm = functools.partial(SETS[BACKEND].rows["rms_norm"], interpret=interpret)
    counts = (FEW, 17) if interpret else (FEW, 16, 64, 2048)
    return [
        (f"{count} rows", np.asarray(norm(x_TD[:count], scale_D, 1e-5, 0.0))[:FEW])
        for count in counts
    ]
