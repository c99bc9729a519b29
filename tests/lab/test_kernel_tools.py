"""The programs for a real GPU, in miniature: what they count, time, choose and write down."""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import tiles, write_kv
from pallas_kernels.quantized_matmul import grouped_matmul
from pallas_kernels.tiles import Tiles
from tests.support import attention
from tools import bench_kernels, bench_step
from tools.lab import check_engine, gpu_check, time_contiguous_attention
from tools.lab.kernel_lab import (
    check,
    goals,
    matmuls,
    one_order,
    oracle,
    pages,
    parity,
    parts,
    record,
    specs,
    stability,
    timing,
    tuner,
)
from tools.lab.kernel_lab.bounds import Ceilings, work
from tools.lab.kernel_lab.children import Child, run_all
from tools.lab.kernel_lab.compare_sets import Row, compare, table
from tools.lab.kernel_lab.findings import (
    FAILED,
    LEFT_OUT,
    PASSED,
    Finding,
    LeftOut,
    Table,
    append,
    judge,
    read,
    worst,
)
from tools.lab.kernel_lab.goals import table as goals_table
from tools.lab.kernel_lab.kernel_cases import (
    Case,
    label,
    make_case,
    shape_of_spec,
    slots_in_sight,
    tree_masks,
)
from tools.lab.kernel_lab.specs import Spec

CEILINGS = Ceilings(copied=2.0e12, read=3.0e12, matmul=6.0e14)
SMALL = Spec(
    name="small",
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    contexts=(30, 9),
    queries=(1, 1),
    block_size=8,
)
SMALL = dataclasses.replace(SMALL, dtype="float32", page_dtype="float32")
MIXED = dataclasses.replace(SMALL, name="mixed", contexts=(30, 7, 19, 0), queries=(12, 0, 1, 0))


# What a call must move and compute


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 20)), min_size=1, max_size=4),
    window=st.one_of(st.none(), st.integers(1, 30)),
    tree=st.booleans(),
    page_dtype=st.sampled_from(["bfloat16", "int8", "uint8"]),
)
def test_work_is_what_counting_one_by_one_finds(rows, window, tree, page_dtype):
    tree = tree and window is None and any(new for _, new in rows)
    contexts, queries = tuple(before + new for before, new in rows), tuple(new for _, new in rows)
    spec = dataclasses.replace(
        SMALL, contexts=contexts, queries=queries, sliding_window=window, tree=tree
    )
    spec = dataclasses.replace(spec, dtype="bfloat16", page_dtype=page_dtype)
    masks, token = tree_masks(spec), 0
    pairs, touched, blocks = 0, set(), set()
    for row, (context, new) in enumerate(zip(contexts, queries, strict=True)):
        for offset in range(new):
            position = context - new + offset
            for c in range(context):
                place = c - (context - new)
                seen = c <= position if not tree or place < 0 else bool(masks[token, place])
                if seen and (window is None or c > position - window):
                    pairs += 1
                    touched.add((row, c))
                    blocks.add((row, c // spec.block_size))
            token += 1
    vector = 16 * 2 if page_dtype == "bfloat16" else 16 + 4
    amounts = work(spec)
    assert amounts.kv_bytes == 2 * len(touched) * spec.num_kv_heads * vector
    assert amounts.flops == 4 * pairs * spec.num_heads * spec.head_dim
    assert amounts.query_bytes == 2 * sum(queries) * spec.num_heads * spec.head_dim * 2
    assert amounts.table_bytes == 4 * len(blocks)


def test_the_tiles_of_a_spec_are_those_of_its_call():
    class Seen(Exception):
        pass

    for spec in (SMALL, MIXED, *specs.SPECS):
        cut = dataclasses.replace(spec, contexts=spec.contexts[:2], queries=spec.queries[:2])
        num_tokens, shape = sum(cut.queries), (3, cut.block_size, cut.num_kv_heads, cut.head_dim)
        arguments = SimpleNamespace(
            max_query_len=cut.max_query_len,
            group=cut.num_heads // cut.num_kv_heads,
            q_TNH=jax.ShapeDtypeStruct((num_tokens, cut.num_heads, cut.head_dim), cut.dtype),
            k_pages=jax.ShapeDtypeStruct(shape, cut.page_dtype),
        )
        assert tiles.shape_of(arguments) == shape_of_spec(cut)


# Cases and their oracle


@pytest.mark.parametrize(
    "spec",
    [
        MIXED,
        dataclasses.replace(MIXED, sliding_window=9),
        dataclasses.replace(SMALL, queries=(7, 4), tree=True),
        dataclasses.replace(MIXED, page_dtype="int8"),
        dataclasses.replace(MIXED, page_dtype="uint8"),
    ],
    ids=["mixed", "window", "tree", "int8", "uint8"],
)
def test_the_oracle_agrees_with_the_one_of_the_tests(spec):
    case = make_case(spec, padding=2, poison=True, logit_softcap=3.0)
    layer, step = case.layers[0], case.step
    arrays = (
        case.q_TNH,
        layer.k_pages,
        layer.v_pages,
        step.block_table_BM,
        step.context_len_B,
        step.query_start,
    )
    scales = [
        None if scale is None else np.asarray(scale) for scale in (layer.k_scale, layer.v_scale)
    ]
    plain = attention.Case(*map(np.asarray, arrays), *scales)
    masks = None if step.tree_mask_TQ is None else np.asarray(step.tree_mask_TQ)
    options = {"sliding_window": spec.sliding_window, "logit_softcap": 3.0, "tree_mask_TQ": masks}
    expected = attention.oracle(plain, scale=case.scale, **options)
    out, size = oracle.attention(case)
    np.testing.assert_allclose(out, expected, atol=1e-12)
    assert np.all(size >= np.abs(out) - 1e-12) and np.isfinite(out).all()


def test_bits_of_float8():
    bits = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(
        oracle.float8_e4m3fn(bits), bits.view(attention.E4M3).astype(np.float64)
    )


def test_what_nobody_sees_is_poisoned_and_layers_differ():
    spec = dataclasses.replace(MIXED, sliding_window=9)
    case = make_case(spec, layers=3, poison=True)
    seen = slots_in_sight(spec, np.asarray(case.step.block_table_BM), len(case.layers[0].k_pages))
    for layer in case.layers:
        for array in (layer.k_pages, layer.v_pages):
            assert np.isnan(array)[~seen].all() and np.isfinite(array)[seen].all()
    assert not seen[0].any() and seen.sum() == work(spec).kv_bytes // (2 * 2 * 16 * 4)
    assert len({np.asarray(array).tobytes() for array in jax.tree.leaves(case.layers)}) == 6


# Timing


def test_rounds_and_their_median():
    taken = iter([50.0, 3.0, 1.0, 2.0, 9.0, 2.5])
    now = [0.0]

    def run():
        now[0] += next(taken)
        return np.zeros(1)

    median = timing.median_of_rounds(run, 10, rounds=5, limit_s=1e9, clock=lambda: now[0])
    assert (median.seconds, median.calls, median.rounds) == (
        0.25,
        10,
        5,
    ) and median.spread == pytest.approx(8 / 2.5)


def test_a_slow_call_gets_fewer_rounds():
    now = [0.0]

    def run():
        now[0] += 3.0
        return np.zeros(1)

    median = timing.median_of_rounds(run, 1, rounds=9, limit_s=7.0, clock=lambda: now[0])
    assert median.rounds == 2 and median.seconds == 3.0


@pytest.mark.parametrize("backend", ["scan", "a kernel"])
def test_a_program_calls_every_layer_in_turn_on_the_output_before(backend):
    case = make_case(SMALL, layers=2)
    attend, expected = jax.jit(functools.partial(case.attend, backend="scan")), case.q_TNH
    for _ in range(2):
        for layer in case.layers:
            expected = attend(expected, case.step, layer)
    real = dataclasses.replace(case)
    if backend != "scan":
        object.__setattr__(
            real, "attend", lambda *arrays, **_: case.attend(*arrays, backend="scan")
        )
    program = jax.jit(timing.steps(real, 2, backend=backend))
    actual = program(case.q_TNH, case.step, case.layers)
    np.testing.assert_allclose(actual, expected, atol=1e-6)
    assert (
        np.abs(np.asarray(program(case.q_TNH, case.step, case.layers[::-1])) - expected).max()
        > 1e-4
    )


def test_the_layers_of_real_shapes_outgrow_the_cache_or_are_said_not_to():
    for spec in specs.SPECS:
        layers = timing.num_layers(spec)
        assert timing.stays_in_cache(spec, layers) == (
            work(spec).kv_bytes * layers < timing.CACHE_BYTES
        )
        assert layers == 16 or work(spec).kv_bytes * layers >= timing.CACHE_BYTES
        assert work(spec).kv_bytes * layers <= timing.POOL_BYTES


# Tables of times


def illegal_address(*_, **__):
    raise RuntimeError(
        "INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered"
    )


def test_comparison_reports_refusals_failures_and_ratios():
    def fake(case, *, backend, **_):
        if backend == "mosaic":
            raise NotImplementedError("mosaic: no float32")
        if backend == "reference":
            raise RuntimeError("illegal address\nand more")
        return timing.Timing({"triton": 1e-6, "scan": 4e-6}[backend], 0.0, 1, 1)

    rows = compare([SMALL], ["triton", "mosaic", "reference", "scan"], CEILINGS, time_one=fake)
    assert [row.failed for row in rows] == [False, False, True, False]
    lines = table(rows, CEILINGS, {"contiguous": {"small": 2e-6}}).rows
    cells = dict(zip(table(rows, CEILINGS, {"contiguous": {}}).columns, lines[0], strict=True))
    assert (cells["us"], cells["x XLA"], cells["x contiguous"], cells["bound"]) == (
        "1.0",
        "0.250",
        "0.500",
        "memory",
    )
    assert float(cells["fraction"]) == pytest.approx(
        work(SMALL).num_bytes / 3.0e12 / 1e-6, abs=1e-3
    )
    assert lines[1][2] == "-" and "mosaic: no float32" in lines[1][-1]
    assert "RuntimeError: illegal address" in lines[2][-1]
    spoiled = compare([SMALL], ["triton", "scan"], CEILINGS, time_one=illegal_address)
    assert (
        spoiled[0].failed
        and not spoiled[1].failed
        and "an error of CUDA, with triton on small" in spoiled[1].note
    )
    late = compare([SMALL], ["scan"], CEILINGS, time_one=fake, time_left=lambda: False)
    assert late[0].seconds is None and "no time" in late[0].note


def test_one_table_of_what_each_kernel_set_was_timed_at_alone():
    def make_timed(backend, name, seconds):
        row = Row(specs.find(name), backend, seconds, "2 splits", timing.Timing(seconds, 0.0, 1, 7))
        return Finding(
            f"bench {backend} {name}", PASSED, "", data={"rows": [row.as_data(CEILINGS)]}
        )

    decode, chunk = "llama-3-8b decode 16x2048", "llama-3-8b chunk 2048+0"
    measured = Finding("ceilings", PASSED, "", data=dataclasses.asdict(CEILINGS))
    contiguous = Finding("contiguous", PASSED, "", data={"seconds": {"contiguous": {decode: 2e-4}}})
    findings = [
        contiguous,
        make_timed("triton", chunk, 3e-3),
        make_timed("triton", decode, 1e-4),
        make_timed("scan", decode, 4e-4),
    ]
    assert parts.bench_tables(findings) == []  # nothing to judge them by
    rows = parts.bench_tables([measured, *findings])[0].rows
    assert [row[:2] for row in rows] == [[decode, "triton"], [decode, "scan"], [chunk, "triton"]]
    assert rows[0][-3:] == ["0.250", "0.500", "2 splits"]


@pytest.mark.parametrize(
    ("seconds", "best"),
    [((4e-4, 3e-4, 2.95e-4, 3.1e-4), 32), ((3e-4, 3e-4, 2.9e-4, 2.5e-4), 128)],
)
def test_the_slots_of_a_block_that_are_best_are_named(seconds, best):
    """They are the fewest within 2% of the fastest.

    Another number of rows and another set are no competitors.
    """
    names = [
        "llama-3-8b decode 64x2048",
        *(f"llama-3-8b decode in blocks of {size}" for size in (32, 64, 128)),
    ]
    rows = [
        Row(specs.find(name), "triton", each, "") for name, each in zip(names, seconds, strict=True)
    ]
    others = [
        Row(specs.find("llama-3-8b decode 16x2048"), "triton", 1e-9, ""),
        Row(specs.find(names[0]), "scan", 1e-9, ""),
    ]
    table = goals.block_sizes([*others, *reversed(rows), Row(rows[0].spec, "fa3", None, "")])
    assert [row[1:3] for row in table.rows] == [
        ["triton", slots] for slots in ("16", "32", "64", "128")
    ]
    assert [row[2] for row in table.rows if row[-1] == "yes"] == [f"{best}"]


def test_a_kernel_set_is_timed_alone_with_the_splits_that_are_requested(monkeypatch):
    monkeypatch.setattr(parts, "measure_ceilings", lambda small: CEILINGS)
    requested = []

    def compare_one(specs, backends, *_, tiles, **__):
        requested.append((backends, {name: each.max_splits for name, each in tiles.items()}))
        refused = specs[0].page_dtype == "int8"
        return [Row(specs[0], backends[0], None if refused else 1e-4, "refused" if refused else "")]

    monkeypatch.setattr(parts, "compare", compare_one)
    names = "llama-3-8b decode 4x2048,llama-3-8b decode 16x2048 int8,llama-3-8b chunk 128"
    options = parts.Options(backend="mosaic", specs=names, splits=(1, 8))
    first, *findings = parts.PARTS["bench"](options)
    assert first.check == "ceilings" and "3000 GB/s" in first.summary
    swept = [{"mosaic": 1}, {"mosaic": 8}, {"mosaic": 1}, {}]
    assert requested == [(["mosaic"], splits) for splits in swept]
    single, eight, refused, chunk = (finding.summary for finding in findings)
    assert (
        single.endswith("of memory, 1 splits")
        and eight.endswith("of memory, 8 splits")
        and "100.0 us" in chunk
    )
    assert refused == "1 splits, refused" and findings[2].status == LEFT_OUT
    [unknown] = parts.PARTS["bench"](parts.Options(backend="fa4"))
    assert unknown.status == LEFT_OUT and unknown.summary.startswith(
        "there is no kernel set of this name among triton"
    )


def test_goals():
    decode, chunk = specs.find("llama-3-8b decode 16x2048"), specs.find("llama-3-8b chunk 2048+0")
    at = {spec: CEILINGS.min_seconds(work(spec)) for spec in (decode, chunk)}
    rows = [
        Row(decode, "triton", at[decode] / 0.8),
        Row(decode, "mosaic", at[decode] / 0.9),
        Row(decode, "scan", None),
        Row(chunk, "triton", at[chunk] / 0.5),
        Row(specs.find("llama-3-8b decode 1x2048"), "triton", 1.0),
    ]
    table_rows = goals_table(rows, CEILINGS, {decode.name: at[decode]}).rows
    assert [(row[2], row[3], row[5]) for row in table_rows] == [
        ("mosaic", "0.900", "yes"),
        ("mosaic", "1.111", "no"),
        ("triton", "0.500", "no"),
    ]


# The tuner

START = Tiles(query_rows=16, context=32, max_splits=4, split_context=256, num_warps=4, num_stages=2)
BEST = Tiles(query_rows=64, context=64, max_splits=16, split_context=512, num_warps=8, num_stages=3)


def distance(spec: Spec, candidate: Tiles) -> float:
    if candidate.num_stages == 4:
        raise RuntimeError("ptxas: too much shared memory")
    names = [field.name for field in dataclasses.fields(Tiles)]
    weight = 3.0 if spec.name == "small" else 1.0
    return weight * (1.0 + sum(getattr(candidate, name) != getattr(BEST, name) for name in names))


def test_the_tuner_finds_the_fastest_and_reports_what_failed(tmp_path, monkeypatch):
    shape = shape_of_spec(SMALL)
    requested = []
    assert tuner.VALUES["num_stages"][-2:] == (5, 7), (
        "the first that double-buffer keys and values in Triton's loop"
    )
    tuned = tuner.tune(
        shape,
        [SMALL, dataclasses.replace(SMALL, name="b")],
        distance,
        [START],
        prefetch=requested.extend,
    )
    assert tuned.best == BEST and tuned.finished and tuned.seconds[BEST] == 4.0
    assert tuned.failures and all(each.num_stages == 4 for each in tuned.failures)
    assert all("small: RuntimeError: ptxas" in reason for reason in tuned.failures.values())
    assert set(tuned.seconds) == {START, *requested} and len(requested) == len(set(requested)) < 60
    kind = "NVIDIA H100 80GB HBM3"
    path = tiles.write_tuned(kind, {"triton": {str(shape): tuned.best}}, tmp_path)
    assert path.parent == tmp_path and tiles.read_tuned(kind, tmp_path) == {
        "triton": {str(shape): BEST}
    }
    assert tiles.read_tuned("another", tmp_path) == {} == tiles.read_fastest("another", tmp_path)
    tiles.write_tuned(kind, {}, tmp_path, fastest={str(shape): "mosaic"})
    tiles.write_tuned(
        kind, {"triton": {str(shape): BEST}}, tmp_path, fastest={"another shape": "fa3"}
    )
    assert tiles.read_fastest(kind, tmp_path) == {str(shape): "mosaic", "another shape": "fa3"}
    assert tiles.read_tuned(kind, tmp_path) == {"triton": {str(shape): BEST}}
    table_of, device = tiles._table, SimpleNamespace(platform="gpu", device_kind=kind)
    monkeypatch.setattr(tiles, "_table", lambda kind: table_of(kind, tmp_path))
    monkeypatch.setattr(jax, "devices", lambda: [device])
    assert tiles.find_tuned("triton", shape) == BEST
    assert tiles.find_tuned("mosaic", shape) is None
    assert (
        tiles.find_measured_set(shape) == "mosaic"
        and tiles.find_measured_set(shape_of_spec(MIXED)) is None
    )


def test_sets_are_compared_over_the_specs_that_all_of_them_take():
    """One takes two specs, and its sum is larger; over the one that both take it is faster."""
    shape, other = shape_of_spec(SMALL), dataclasses.replace(SMALL, name="b")

    def make_tuned(**seconds):
        result = tuner.Tuned(shape, {BEST: sum(seconds.values())})
        result.of_spec[BEST] = {
            {"small": SMALL, "b": other}[name]: taken for name, taken in seconds.items()
        }
        return result

    both, small_only, nothing = (
        make_tuned(small=1.0, b=9.0),
        make_tuned(small=2.0),
        tuner.Tuned(shape),
    )
    assert tuner.fastest({"fa3": small_only, "triton": both}) == "triton"
    assert tuner.fastest({"fa3": make_tuned(small=0.5), "triton": both, "mosaic": nothing}) == "fa3"
    assert (
        tuner.fastest({"triton": both})
        is None
        is tuner.fastest({"triton": both, "mosaic": nothing})
    )
    assert tuner.fastest({"triton": make_tuned(small=1.0), "fa3": make_tuned(b=1.0)}) is None, (
        "nothing in common"
    )


def test_a_walk_begins_at_the_rule_and_at_what_may_be_better():
    chunk, decode = (
        shape_of_spec(specs.find(f"llama-3-8b {name}"))
        for name in ("chunk 2048+0", "decode 64x2048")
    )
    rule, *others = tuner.starts("triton", chunk)
    assert rule == tuner.RULES["triton"](chunk) and [
        (t.query_rows, t.num_warps) for t in others
    ] == [(64, 4)]
    assert [t.split_context for t in tuner.starts("triton", decode)] == [256, 128, 64]
    wide = dataclasses.replace(SMALL, dtype="float32", page_dtype="float32")
    assert (
        "mosaic: queries of float32" in tuner.refusal("mosaic", wide)
        and tuner.refusal("triton", wide) is None
    )


def test_the_tuner_stops_in_time_and_may_find_nothing():
    now = [0.0]

    def slow(spec, candidate):
        now[0] += 1.0
        return distance(spec, candidate)

    tuned = tuner.tune(
        shape_of_spec(SMALL), [SMALL], slow, [START], deadline=5.0, clock=lambda: now[0]
    )
    assert len(tuned.seconds) == 5 and not tuned.finished and tuned.best is not None

    def break_all(spec, candidate):
        raise ValueError("no")

    assert tuner.tune(shape_of_spec(SMALL), [SMALL], break_all, [START]).best is None


def test_specs_are_tuned_by_shape():
    groups = tuner.by_shape(specs.SPECS)
    assert sum(map(len, groups.values())) == len(specs.SPECS)
    for shape, group in groups.items():
        assert {shape_of_spec(spec) for spec in group} == {shape}
    batches = {
        len(spec.contexts) for spec in groups[shape_of_spec(specs.find("llama-3-8b decode 1x2048"))]
    }
    assert {1, 4, 16, 64, 256} <= batches  # one choice for all of them


# Verdicts

PLANTED = {
    "scaled": lambda case: case.run("scan") * 1.05,
    "table rows swapped": lambda case: dataclasses.replace(
        case, step=dataclasses.replace(case.step, block_table_BM=case.step.block_table_BM[::-1])
    ).run("scan"),
    "off by one": lambda case: dataclasses.replace(
        case,
        step=dataclasses.replace(
            case.step, context_len_B=np.maximum(case.step.context_len_B - 1, 0)
        ),
    ).run("scan"),
    "padding not zero": lambda case: case.run("scan").at[-1].set(1e-9),
    "not a number": lambda case: case.run("scan").at[0, 0, 0].set(np.nan),
}


@pytest.mark.parametrize("mistake", PLANTED)
def test_a_planted_wrong_backend_fails(mistake):
    trial = parity.Trial(spec=MIXED, padding=2)
    assert parity.check("right", trial, lambda case: case.run("scan")).status == PASSED
    assert parity.check("wrong", trial, PLANTED[mistake]).status == FAILED


def test_a_wrong_backend_fails_the_whole_check(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(parity, "trials", lambda: [parity.Trial(spec=MIXED, interpreted=True)])
    monkeypatch.setattr(parity.Trial, "cut", lambda self: self)

    def run(self, *, on_finding, ended):
        findings = [parts_finding("environment", {"platform": "cpu", "device": "cpu"})]
        findings += parity.findings("scan", interpret=False, small=True)
        for finding in findings:
            on_finding(finding)
        return findings

    def parts_finding(check, data):
        return Finding(check, PASSED, "", data=data)

    monkeypatch.setattr(check.Check, "run", run)
    assert gpu_check.main(["--interpret"]) == 0
    right = Case.run
    monkeypatch.setattr(
        Case, "run", lambda self, backend, **options: right(self, backend, **options) * 1.05
    )
    assert gpu_check.main(["--interpret", "--json", str(tmp_path / "out.json")]) == 1
    printed = capsys.readouterr().out
    data = json.loads(printed.splitlines()[-1])
    assert data == json.loads((tmp_path / "out.json").read_text())
    assert not data["ok"] and data["exit_status"] == 1 and "1 FAILED" in data["counts"]
    assert "FAILED    parity scan: mixed: error" in printed


def test_refusals_are_left_out_and_exceptions_fail():
    def refuse(case):
        raise NotImplementedError("a reason")

    trial = parity.Trial(spec=MIXED)
    finding = judge("x", lambda: parity.check("b", trial, refuse))
    assert (finding.status, finding.summary) == (LEFT_OUT, "a reason")
    broken = judge("x", lambda: parity.check("b", trial, lambda case: 1 / 0))
    assert (
        broken.status == FAILED
        and "ZeroDivisionError" in broken.summary
        and "lambda" in broken.data["traceback"]
    )
    assert worst([finding, broken]) == FAILED and worst([finding]) == LEFT_OUT


def test_bits_that_depend_on_neighbours_are_seen():
    spec = dataclasses.replace(SMALL, contexts=(30, 9, 17), queries=(1, 1, 1))

    def run(case):
        out = case.run("scan")
        return out if len(case.step.context_len_B) < 3 else out * np.float32(1 + 2.0**-23)

    stable = stability.check(
        "triton", "decode", stability.decode_settings(spec, (2, 3)), lambda case: case.run("scan")
    )
    assert stable.status == PASSED and all(row[1] == "yes" for row in stable.tables[0].rows)
    findings = stability.check("triton", "decode", stability.decode_settings(spec, (2, 3)), run)
    assert findings.status == FAILED and findings.data["differing"] == ["first of 3"]
    assert (
        stability.check("scan", "decode", stability.decode_settings(spec, (2, 3)), run).status
        == PASSED
    )


def test_bits_that_depend_on_the_rows_other_tokens_are_seen_and_may_be_recorded():
    spec = dataclasses.replace(SMALL, contexts=(30,), queries=(5,))

    def settings():
        return stability.verify_settings(spec, (5, 3, 1))

    def run(case):
        return case.run("scan") * np.float32(1 + 2.0**-23 * (int(case.step.query_start[1]) == 3))

    assert (
        stability.check("triton", "verify", settings(), lambda case: case.run("scan")).status
        == PASSED
    )
    findings = stability.check("triton", "verify", settings(), run)
    assert findings.status == FAILED and findings.data["differing"] == ["3 tokens in a step of 5"]
    assert stability.check("triton", "verify", settings(), run, promised=False).status == PASSED


@pytest.mark.parametrize("tokens", [(1, 20), (20, 20), (6, 20)], ids=["decode", "whole", "end"])
def test_contiguous_attention_is_the_same_attention(tokens):
    torch = pytest.importorskip("torch")
    queries, context = tokens
    spec = dataclasses.replace(
        SMALL, contexts=(context, context), queries=(queries, queries), block_size=20
    )
    case = make_case(spec)
    expected, _ = oracle.attention(case)
    blocks = np.asarray(case.step.block_table_BM)[:, 0]
    layer = case.layers[0]
    k, v = (
        torch.tensor(np.asarray(each)[blocks]).transpose(1, 2)
        for each in (layer.k_pages, layer.v_pages)
    )
    q = torch.tensor(np.asarray(case.q_TNH)).reshape(2, queries, 4, 16).transpose(1, 2)
    actual = (
        time_contiguous_attention.attend(spec, q, [(k, v)]).transpose(1, 2).reshape(expected.shape)
    )
    np.testing.assert_allclose(actual, expected, atol=2e-6)


def test_contiguous_attention_in_miniature(tmp_path):
    pytest.importorskip("torch")
    to = tmp_path / "contiguous.jsonl"
    time_contiguous_attention.main(["--small", "--to", str(to), "--specs", "short"])
    *_, last = read(to)
    timed = parts.contiguous_seconds(read(to))["contiguous"]
    assert last.status == PASSED and set(timed) == {
        "llama-3-8b decode 1x2048",
        "llama-3-8b decode 16x2048",
        "llama-3-8b decode 64x2048",
        "llama-3-8b chunk 512+3584",
        "llama-3-8b chunk 2048+0",
        "llama-3-8b verify chain 16x8",
    }
    why = {row[0]: row[2] for row in last.tables[0].rows}
    assert (
        why["llama-3-8b decode 64 ragged"] == "ragged rows"
        and why["llama-3-8b verify tree 16x16"] == "a tree"
    )
    assert parts.best_of({"a": {"x": 1.0}, "b": {"x": 0.5, "y": 2.0}}) == {"x": 0.5, "y": 2.0}


# Processes


def child(tmp_path, name, program, **options):
    return Child(
        name=name, command=[sys.executable, "-c", program], to=tmp_path / f"{name}.jsonl", **options
    )


def test_what_crashes_or_hangs_takes_no_other_along(tmp_path):
    good = json.dumps(dataclasses.asdict(Finding("good", PASSED, "fine"))) + "\n"

    def write(name):
        return f"open({str(tmp_path / name)!r} + '.jsonl', 'a').write({good!r})"

    children = [
        child(tmp_path, "good", write("good"), needs_s=0),
        child(tmp_path, "crash", write("crash") + "; import os; os.abort()", needs_s=0),
        child(tmp_path, "hang", "import time; time.sleep(60)", needs_s=0, limit_s=0.5),
        child(tmp_path, "big", "", needs_s=1000),
        child(tmp_path, "late", "import time; time.sleep(60)", needs_s=0, alone=True),
    ]
    ended, events = {}, []
    run_all(
        children,
        deadline=time.monotonic() + 3,
        jobs=2,
        done=lambda each, findings: ended.update({each.name: findings}),
        on_finding=lambda each, finding: events.append((each.name, finding)),
    )
    assert sorted(map(str, events)) == sorted(
        str((name, each)) for name, findings in ended.items() for each in findings
    )
    assert [finding.status for finding in ended["good"]] == [PASSED]
    assert [finding.status for finding in ended["crash"]] == [
        PASSED,
        FAILED,
    ] and "SIGABRT" in ended["crash"][1].summary
    assert ended["hang"][0].status == FAILED and "hangs" in ended["hang"][0].summary
    assert ended["big"][0].status == LEFT_OUT and "it may need 1000" in ended["big"][0].summary
    assert ended["late"][0].status == LEFT_OUT and "time is up" in ended["late"][0].summary


def test_a_finding_is_reported_while_its_part_goes_on(tmp_path):
    line = json.dumps(dataclasses.asdict(Finding("good", PASSED, "fine"))) + "\n"
    seen = tmp_path / "seen"
    program = (
        f"import os, time; open({str(tmp_path / 'slow.jsonl')!r}, 'a').write({line!r}); until = "
        "time.time() + 20"
    )
    program += (
        f"\nwhile not os.path.exists({str(seen)!r}) and time.time() < until: time.sleep(0.01)"
    )
    program += f"\nassert os.path.exists({str(seen)!r})"
    slow_child, ended = child(tmp_path, "slow", program, needs_s=0), []
    report = {
        "done": lambda _, findings: ended.extend(findings),
        "on_finding": lambda *_: seen.touch(),
    }
    run_all([slow_child], deadline=time.monotonic() + 30, jobs=1, **report)
    assert [finding.status for finding in ended] == [PASSED]


def test_what_a_part_leaves_behind_is_stopped(tmp_path):
    program = (
        "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', 'import time; "
        "time.sleep(60)']).pid)"
    )
    leaving_child = child(tmp_path, "leaves", program, needs_s=0)
    run_all([leaving_child], deadline=time.monotonic() + 30, jobs=1, done=lambda *_: None)
    status = Path(f"/proc/{int(leaving_child.log.read_text())}/status")
    until = time.monotonic() + 10
    while status.exists() and "zombie" not in status.read_text() and time.monotonic() < until:
        time.sleep(0.05)
    assert not status.exists() or "zombie" in status.read_text()


def test_the_engines_float32_is_no_tf32_in_any_thread(tmp_path, monkeypatch):
    """Engines compile in threads of their own."""
    seen = []

    def generate(backend, dtype, orders):
        thread = threading.Thread(
            target=lambda: seen.append((dtype, jax.config.jax_default_matmul_precision))
        )
        thread.start()
        thread.join()
        return [[([1], [0.0]) for _ in order] for order in orders]

    monkeypatch.setattr(check_engine, "generate", generate)
    check_engine.main(["triton", "reference", "--to", str(tmp_path / "engine.jsonl")])
    assert seen == [("float32", "highest")] * 2 + [("bfloat16", None)]


def test_pages_are_not_timed_when_time_is_short(monkeypatch):
    monkeypatch.setattr(parts, "measure_ceilings", lambda small: CEILINGS)
    monkeypatch.setattr(parts, "compare", lambda specs, *_, **__: [Row(specs[0], "triton", None)])
    *_, last = parts.PARTS["bench"](parts.Options(backend="triton", seconds=30))
    assert (last.status, last.check) == (
        LEFT_OUT,
        "pages: timings",
    ) and "it may need 40" in last.summary


def test_a_missing_package_leaves_the_engine_out(tmp_path):
    to = tmp_path / "engine.jsonl"
    program = "import sys, runpy; sys.modules['llguidance'] = None; sys.argv[0] = 'x'; "
    program += "runpy.run_path('tools/lab/check_engine.py', run_name='__main__')"
    command = [sys.executable, "-c", program, "--to", str(to), "scan", "reference"]
    first_child = Child(
        name="engine", command=command, to=to, needs_s=0, environment={"JAX_PLATFORMS": "cpu"}
    )
    run_all([first_child], deadline=time.monotonic() + 120, jobs=1, done=lambda *_: None)
    assert [(finding.status, finding.summary) for finding in read(to)] == [
        (LEFT_OUT, "no llguidance here")
    ]


def test_findings_survive_a_line_that_was_cut(tmp_path):
    path = tmp_path / "found.jsonl"
    finding = Finding(
        "a", PASSED, "b", tables=[Table("t", ["x", "y"], [["1", "2"]])], data={"n": 1}
    )
    append(path, finding)
    path.write_text(path.read_text() + '{"check": "c", "sta')
    assert read(path) == [finding] and read(tmp_path / "none") == []
    append(path, finding)
    assert read(path) == [finding, finding]


def test_a_backend_that_crashed_is_not_timed(tmp_path, monkeypatch):
    append(
        tmp_path / "parity-triton.jsonl",
        Finding("parity triton", FAILED, "SIGABRT", data={"log": "..."}),
    )
    append(
        tmp_path / "parity-scan.jsonl",
        Finding("parity scan", FAILED, "error 1.0", data={"error": 1.0}),
    )
    assert (
        parts.backends_that_broke(tmp_path) == ["triton"] and parts.backends_that_broke(None) == []
    )


def test_the_record_keeps_what_was_there(tmp_path):
    path = tmp_path / "gpu-results.md"
    path.write_text("# Results\n\nAn introduction.\n")
    findings = [
        Finding("environment", PASSED, "here", data={"device": "GPU X", "commit": "abc"}),
        Finding("bench", PASSED, "1 of 1", 2.0, [Table("Times", ["spec", "us"], [["a|b", "1.0"]])]),
        Finding("engine", LEFT_OUT, "no llguidance here"),
    ]
    for date in ("2026-01-01", "2026-01-02"):
        text = record.section(
            findings, {"device": "GPU X", "commit": "abc"}, date=date, command="python x"
        )
        record.append_section(path, text)
    text = path.read_text()
    assert text.startswith(
        "# Results\n\nAn introduction.\n\n## 2026-01-01: GPU X, commit abc\n\n`python x`: 2 passed"
    )
    assert text.index("## 2026-01-01") < text.index("## 2026-01-02")
    assert "| spec | us |\n| --- | ---: |\n| a\\|b | 1.0 |\n" in text
    assert "| engine | left out | no llguidance here | 0.0 |" in text


def test_without_a_gpu_the_check_says_so(monkeypatch, capsys):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert gpu_check.main(["--minutes", "2"]) == 2
    captured = capsys.readouterr()
    assert (
        "no GPU here" in captured.err
        and json.loads(captured.out.splitlines()[-1])["exit_status"] == 2
    )


def test_a_miniature_of_the_whole_check(tmp_path, capsys):
    out = tmp_path / "results.md"
    command = [
        "--interpret",
        "--only",
        "parity scan",
        "--record",
        str(out),
        "--directory",
        str(tmp_path / "work"),
    ]
    assert gpu_check.main(command) == 0
    data = json.loads(capsys.readouterr().out.splitlines()[-1])
    checks = {finding["check"]: finding["status"] for finding in data["findings"]}
    assert (
        checks["parity scan: mixed, empty rows"] == PASSED
        and checks["parity scan: verify tree"] == PASSED
    )
    assert "parity scan: decode int8" in out.read_text()


def test_products_are_compared_and_timed(monkeypatch):
    """A weight of four bits and experts are compared, and then a result that is five per cent too
    large.
    """
    packed = next(spec for spec in specs.MATMULS if spec.code == "int4" and spec.num_groups == 1)
    chosen = [packed, specs.MATMULS[0]]
    monkeypatch.setattr(matmuls, "MATMULS", chosen)
    *findings, last = parts.PARTS["products"](parts.Options(interpret=True, seconds=600))
    assert len(findings) == 2 and {each.status for each in findings} == {PASSED} == {last.status}
    assert [float(row[1]) > 0 for row in last.tables[0].rows] == [True, True]
    assert [row[2] == "-" for row in last.tables[0].rows] == [False, True]

    def wrong(x_PI, weight, count_E):
        return 1.05 * grouped_matmul(
            x_PI, weight, count_E, backend="triton", interpret=True
        ).astype("float32")

    assert matmuls.parity(chosen[0].cut(), wrong).status == FAILED


def test_the_kernel_in_miniature(monkeypatch):
    few = [trial for trial in parity.trials() if trial.spec.name == "mixed, empty rows"]
    monkeypatch.setattr(parity, "trials", lambda: few)
    [finding] = parts.PARTS["parity"](parts.Options(backend="triton", interpret=True))
    assert finding.status == PASSED, finding.summary


def test_steps_in_miniature(tmp_path, capsys):
    """On a CPU, too, whole steps and their parts come out as a table, as JSON and as findings."""
    to, shape = (
        tmp_path / "steps.jsonl",
        ["--models", "tiny", "--rows", "2", "--contexts", "32", "--sampling", "top_p"],
    )
    assert bench_step.main([*shape, "--chunks", "16", "--round", "0.001", "--to", str(to)]) == 0
    printed = capsys.readouterr().out
    rows = json.loads(printed.splitlines()[-1])["rows"]
    assert [(row["rows"], row["context"], row["chunk"]) for row in rows] == [
        (2, 32, 0),
        (1, 16, 16),
    ]
    parts = ("step", "read", "call", "matmuls", "attention", "sampler", "bytes_read")
    assert all(row[part] > 0 for row in rows for part in parts) and "host gap" in printed
    *findings, last = read(to)
    assert [each.status for each in findings] == [PASSED, PASSED] and last.tables[0].rows[0][
        0
    ].startswith("tiny, decode 2")
    assert bench_step.main([*shape, "--seconds", "-1", "--to", str(to)]) == 0
    assert "tiny, decode 2 rows, context 32, top_p: left out" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="--models: large not among 8b, 1b, tiny"):
        bench_step.main(["--models", "large"])


def test_the_check_times_whole_steps_in_the_time_that_it_has():
    for whole, models in ((check.Check(), "8b,1b"), (check.Check(interpret=True), "tiny")):
        [steps] = (child for child in whole.children() if child.name == "steps")
        assert steps.alone and models in steps.command and "--to" in steps.command
        assert steps.needs_s < steps.limit_s <= 600 and 60 * whole.minutes < 600


def test_tuning_in_miniature(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(
        tuner.OnDevice, "measure", lambda self, spec, candidate: distance(spec, candidate)
    )
    monkeypatch.setattr(tuner.OnDevice, "prefetch", lambda self, candidates: None)
    command = [
        "--small",
        "--tune",
        "--specs",
        "gpt2",
        "--backends",
        "triton",
        "--tuned-directory",
        str(tmp_path),
    ]
    assert bench_kernels.main(command) == 0
    data = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [each["best"] for each in data["tuned"]] == [dataclasses.asdict(BEST)] * 2
    kind = jax.devices()[0].device_kind
    assert set(tiles.read_tuned(kind, tmp_path)["triton"]) == {
        each["shape"] for each in data["tuned"]
    }


def test_pages_in_miniature(monkeypatch):
    few = {"page_dtypes": ("int8",), "interpret": True, "small": True}
    assert next(pages.findings(**few)).status == PASSED

    def forgetful(*arrays, backend, **options):
        written = write_kv(
            *arrays, backend="reference", k_scale=options["k_scale"], v_scale=options["v_scale"]
        )
        return written if backend == "reference" else (*written[:3], options["v_scale"])

    monkeypatch.setattr(pages, "write_kv", forgetful)
    assert next(pages.findings(**few)).status == FAILED


SANITIZED = {
    "ERROR SUMMARY: 0 errors": (0, PASSED, "ERROR SUMMARY: 0 errors"),
    "x\\nERROR SUMMARY: 3 errors": (86, FAILED, "ERROR SUMMARY: 3 errors"),
    "Segmentation fault": (139, FAILED, "no summary, exit status 139"),
    "Error: Device not supported": (1, LEFT_OUT, "compute-sanitizer says"),
    "pages\\nNotImplementedError: of int8\\nERROR SUMMARY: 0 errors": (
        1,
        LEFT_OUT,
        "NotImplementedError: of int8",
    ),
}


@pytest.mark.parametrize("printed", SANITIZED)
def test_what_compute_sanitizer_says(printed, tmp_path, monkeypatch):
    code, status, text = SANITIZED[printed]
    fake = tmp_path / "compute-sanitizer"
    fake.write_text(f"#!/bin/sh\nprintf '{printed}\\n'\nexit {code}\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    [finding] = parts.PARTS["sanitizer"](parts.Options(backend="triton"))
    assert finding.status == status and finding.summary.startswith(text)


def test_wrong_flags(capsys):
    with pytest.raises(SystemExit):
        bench_kernels.main(["--interpret"])
    assert "--interpret needs --small" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        bench_kernels.main(["--backends", "cuda"])
    with pytest.raises(SystemExit, match="no shape's name holds 'nonsense'"):
        bench_kernels.main(["--specs", "nonsense"])
    with pytest.raises(SystemExit, match="nonsense not among"):
        gpu_check.main(["--backends", "nonsense"])
    assert bench_kernels.main(["--list", "--specs", "64x2048 int8"]) == 0
    assert capsys.readouterr().out.strip() == "llama-3-8b decode 64x2048 int8"
    assert len({label(spec) for spec in specs.SPECS}) == len(specs.SPECS)
    with pytest.raises(LeftOut, match="not on PATH"):
        parts._sanitize(parts.Options(backend="triton"))


def test_sums_in_another_order_are_seen_where_one_is_promised(monkeypatch):
    """Products that depend on the number of rows fail; what exceeds the time is left out."""
    monkeypatch.setattr(one_order, "ATTENTION", {})
    monkeypatch.setattr(one_order, "MATMULS", {"qkv": one_order.MATMULS["qkv"].cut()})
    monkeypatch.setattr(one_order, "norms", lambda **_: [("2 rows", np.ones(3))] * 2)

    def verdicts(**options):
        findings = one_order.findings(small=True, **{"seconds": 60.0, "interpret": True, **options})
        return {finding.check.removeprefix("one order: "): finding.status for finding in findings}

    assert verdicts() == {"product, qkv": PASSED, "norm": PASSED}
    assert set(verdicts(seconds=1.0).values()) == {LEFT_OUT}

    def wrong(x_TI, *arguments, **options):
        return x_TI * np.float32(1 + 2.0**-6 * len(x_TI))

    monkeypatch.setattr(one_order, "batch_invariant_matmul", wrong)
    assert verdicts(interpret=False)["product, qkv"] == FAILED
