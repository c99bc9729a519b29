"""Measures whether a token's output has the same bits whoever its neighbours are.

One probe row keeps its queries, keys and values. For "decode" the batch, the row's place in it, the
table's width and the blocks change. For "chunk", and for "verify" in steps of few tokens, the chunk
that brings the row's last token grows and shrinks. Kernels promise equal bits within one kind of
step, because their tiles depend on nothing else; other bits are a failure only where a backend
promises the same.

Two differences are recorded, and nothing is promised about them:
  * across kinds: a decode step against a chunk;
  * in verification over a context of more than `max_splits` times `split_context` positions or with
    a window: there the ends of the splits follow the tile's end, and so the number of the row's
    query tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.sets import KERNEL_BACKENDS
from tools.lab.kernel_lab import specs
from tools.lab.kernel_lab.findings import FAILED, PASSED, Finding, LeftOut, Table, judge
from tools.lab.kernel_lab.kernel_cases import Case, Pages, Step, make_case
from tools.lab.kernel_lab.specs import Spec

Run = Callable[[Case], jax.Array]
Settings = Iterator[tuple[str, Case]]


def pick(case: Case, rows: list[int], *, extra_width: int = 0) -> Case:
    """Returns the decode batch of these rows of a batch with one token per row."""
    step = Step(
        jnp.pad(case.step.block_table_BM[jnp.asarray(rows)], ((0, 0), (0, extra_width))),
        case.step.context_len_B[jnp.asarray(rows)],
        jnp.arange(len(rows) + 1, dtype=jnp.int32),
    )
    return dataclasses.replace(case, q_TNH=case.q_TNH[jnp.asarray(rows)], step=step)


def move(case: Case, seed: int = 7) -> Case:
    """Returns a case with the same contents in other blocks."""
    pages = case.layers[0]
    num_blocks = pages.k_pages.shape[0]
    order = jnp.asarray(
        np.concatenate([[0], 1 + np.random.default_rng(seed).permutation(num_blocks - 1)]),
        jnp.int32,
    )
    place = jnp.argsort(order).astype(jnp.int32)  # new block order[i] holds what block i held
    made: Pages = jax.tree.map(lambda array: array[place], pages)
    step = dataclasses.replace(case.step, block_table_BM=order[case.step.block_table_BM])
    return dataclasses.replace(case, step=step, layers=(made,))


def decode_settings(spec: Spec, batches: tuple[int, ...]) -> Settings:
    """Yields decode batches whose probe is row 0 of `spec`; each setting names it first or last."""
    whole = make_case(spec, seed=3)
    last = len(spec.contexts) - 1
    yield "alone", pick(whole, [0])
    for batch in batches:
        yield f"first of {batch}", pick(whole, list(range(batch)))
    yield (
        f"last of {batches[0]}, other mates",
        pick(whole, [*range(last, last - batches[0] + 1, -1), 0]),
    )
    yield (
        "alone, table four times as wide",
        pick(whole, [0], extra_width=3 * whole.step.block_table_BM.shape[1]),
    )
    yield "alone, other blocks", move(pick(whole, [0]))


def last_tokens(whole: Case, size: int, num_tokens: int) -> Case:
    """Returns a step with the last `size` query tokens of row 0 alone.

    The step is padded to `num_tokens`, which is then the largest query length that it may have.
    """
    queries = whole.spec.queries[0]
    step = Step(
        whole.step.block_table_BM[:1], whole.step.context_len_B[:1], jnp.array([0, size], jnp.int32)
    )
    q_TNH = jnp.pad(whole.q_TNH[queries - size : queries], ((0, num_tokens - size), (0, 0), (0, 0)))
    return dataclasses.replace(whole, q_TNH=q_TNH, step=step, max_query_len=num_tokens)


def chunk_settings(spec: Spec, sizes: tuple[int, ...]) -> Settings:
    """Yields steps of one kind that bring the last `size` tokens of row 0.

    The kind does not depend on the number of tokens: each step has room for at least 128 where the
    row has as many.
    """
    whole = make_case(spec, seed=4)
    for size in sizes:
        num_tokens = max(size, min(128, spec.queries[0]))
        yield f"chunk of {size} in a step of {num_tokens}", last_tokens(whole, size, num_tokens)
    yield f"chunk of {spec.queries[0]} with others", whole


def verify_settings(spec: Spec, sizes: tuple[int, ...]) -> Settings:
    """Yields steps, each as long as the queries of row 0, that bring its last `size` tokens."""
    whole = make_case(spec, seed=4)
    for size in sizes:
        yield (
            f"{size} tokens in a step of {spec.queries[0]}",
            last_tokens(whole, size, spec.queries[0]),
        )


def probe(case: Case, out_TNH: jax.Array, first: bool) -> np.ndarray:
    """Returns the output of the probe's last token."""
    start = np.asarray(case.step.query_start)
    return np.asarray(out_TNH[int(start[1] if first else start[-1]) - 1])


def check(
    backend: str, kind: str, settings: Settings, run: Run, *, promised: bool | None = None
) -> Finding:
    """Compares the probe's output in all settings with that in the first.

    Args:
        backend: The kernel set.
        kind: The kind of step, for the names.
        settings: The cases with their names.
        run: Runs a case.
        promised: True if other bits are a failure; None if the backend's promise decides.
    """
    outputs: list[tuple[str, np.ndarray]] = []
    for name, case in settings:
        try:
            outputs.append((name, probe(case, run(case), not name.startswith("last"))))
        except NotImplementedError as refusal:
            raise LeftOut(str(refusal)) from refusal
    promised = backend in KERNEL_BACKENDS if promised is None else promised
    finding = compare(f"stability {backend}: {kind}", outputs, promised=promised)
    finding.data.update(backend=backend, kind=kind)
    return finding


def compare(name: str, outputs: Sequence[tuple[str, np.ndarray]], *, promised: bool) -> Finding:
    """Compares the bits of outputs with those of the first.

    Args:
        name: The name of the check.
        outputs: The name of each setting, and its output.
        promised: True if other bits are a failure.
    """
    base = outputs[0][1]
    table = Table(
        f"{name}: the outputs against {outputs[0][0]}",
        ["setting", "same bits", "largest difference"],
    )
    differing = []
    for setting, out in outputs:
        same = out.tobytes() == base.tobytes()
        largest = float(np.abs(out.astype(np.float64) - base.astype(np.float64)).max())
        table.rows.append([setting, "yes" if same else "NO", f"{largest:.1e}"])
        differing += [] if same else [setting]
    summary = f"{len(outputs) - len(differing)} of {len(outputs)} settings have the same bits"
    summary += f" (differ: {', '.join(differing)})" if differing else ""
    return Finding(
        name,
        FAILED if promised and differing else PASSED,
        summary if promised else summary + ", none promised",
        tables=[table],
        data={"differing": differing, "settings": len(outputs), "promised": promised},
    )


def across_kinds(backend: str, spec: Spec, run: Run) -> Finding:
    """Compares the last token of row 0 in a decode step and at the end of chunks.

    Nothing is promised, so the finding always passes.
    """
    whole = make_case(spec, seed=4)
    queries = spec.queries[0]
    results = {}
    for size, max_length in ((1, 1), (1, queries), (1, 16), (16, 16), (queries, queries)):
        case = last_tokens(whole, size, max_length)
        try:
            results[f"{size} of at most {max_length}"] = probe(case, run(case), True).astype(
                np.float64
            )
        except NotImplementedError as refusal:
            raise LeftOut(str(refusal)) from refusal
    base = next(iter(results.values()))
    table = Table(
        f"{backend}: the same token by kinds of step, against decode",
        ["query tokens", "same bits", "largest difference"],
    )
    for name, out in results.items():
        table.rows.append(
            [name, "yes" if np.array_equal(out, base) else "no", f"{np.abs(out - base).max():.1e}"]
        )
    data = {"backend": backend, "rows": table.rows}
    return Finding(
        f"stability {backend}: across kinds",
        PASSED,
        "recorded; nothing is promised",
        tables=[table],
        data=data,
    )


def findings(backend: str, *, interpret: bool, small: bool) -> Iterator[Finding]:
    """Yields the findings of one backend."""
    base = specs.find("llama-3-8b decode 64 ragged")
    decode = dataclasses.replace(
        base, contexts=(777, *(1 + 31 * i for i in range(1, 64))), queries=(1,) * 64
    )
    chunk = dataclasses.replace(base, contexts=(1500, 333, 90), queries=(512, 1, 40))
    short = dataclasses.replace(base, contexts=(500,), queries=(16,))
    long = dataclasses.replace(base, contexts=(8200,), queries=(16,))
    batches: tuple[int, ...] = (2, 4, 8, 16, 64)
    sizes: tuple[int, ...] = (512, 300, 65, 64, 7, 1)
    few = (16, 9, 5, 1)
    if small:
        decode, chunk = decode.cut(rows=4, context=70), chunk.cut(rows=2, context=70, queries=20)
        batches, sizes = (3,), (20, 3)

    def run(case: Case) -> jax.Array:
        return case.run(backend, interpret=interpret)

    yield judge(
        f"stability {backend}: decode",
        lambda: check(backend, "decode", decode_settings(decode, batches), run),
    )
    yield judge(
        f"stability {backend}: chunk",
        lambda: check(backend, "chunk", chunk_settings(chunk, sizes), run),
    )
    if not small:
        yield judge(
            f"stability {backend}: verify",
            lambda: check(backend, "verify", verify_settings(short, few), run),
        )
        yield judge(
            f"stability {backend}: verify over much",
            lambda: check(
                backend, "verify over much", verify_settings(long, few), run, promised=False
            ),
        )
        yield judge(f"stability {backend}: across kinds", lambda: across_kinds(backend, chunk, run))
