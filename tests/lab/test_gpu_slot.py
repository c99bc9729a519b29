"""tools/gpu_slot.py: what runs in which order, what is not run twice, and what is left behind
however a part ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import time
import types
from pathlib import Path

import pytest

from tools import bench_kernels, bench_step, gpu_slot
from tools.lab import bench_engine, slot_parts, slot_results, step_times
from tools.lab.kernel_lab import environment, parts, specs
from tools.lab.kernel_lab.bounds import Ceilings
from tools.lab.kernel_lab.check import Check
from tools.lab.kernel_lab.children import Child
from tools.lab.kernel_lab.compare_sets import Row
from tools.lab.kernel_lab.findings import FAILED, LEFT_OUT, PASSED, Finding, append, read
from tools.lab.kernel_lab.kernel_cases import label
from tools.lab.kernel_lab.parts import choose
from tools.lab.kernel_lab.timing import Timing
from tools.lab.slot_parts import Part
from tools.lab.slot_results import Results, Screen

ROOT = Path(__file__).parents[2]
PASSES = json.dumps(
    {
        "check": "a check",
        "status": PASSED,
        "summary": "fine",
        "seconds": 1.0,
        "tables": [],
        "data": {},
    }
)


def part(
    tmp_path: Path, name: str, program: str = "", *, if_failed: str = "", **limits: float
) -> Part:
    """Returns a part that notes its start, finds one thing, and goes on with its program."""
    to = tmp_path / f"{name}.jsonl"
    begin = f"open({str(tmp_path / 'started')!r}, 'a').write({name + ' '!r}); "
    begin += f"open({str(to)!r}, 'a').write({PASSES!r} + chr(10)); import os, signal, time; "
    child = Child(
        name=name,
        command=[sys.executable, "-c", begin + program],
        to=to,
        **{"needs_s": 0.0, **limits},
    )
    return Part(child, "what it shows", if_failed)


def slot(tmp_path: Path, parts: list[list[Part]]) -> gpu_slot.Slot:
    results = Results(tmp_path / "state", tmp_path / "out", small=True)
    return gpu_slot.Slot(Check(interpret=True, directory=tmp_path), results, parts, Screen())


def start(tmp_path: Path) -> list[str]:
    return sorted((tmp_path / "started").read_text().split())


def test_the_order_is_that_of_what_matters_most(tmp_path):
    groups = list(slot_parts.groups(Check(directory=tmp_path), tmp_path / "state"))
    names = [part.name for group in groups for part in group]
    assert names == [
        "canary",
        "parity triton",
        "pages",
        "one-order",
        "steps",
        "steps without graphs",
        "engine",
        "engine without graphs",
        "bench triton",
        "products",
        "engine in several steps",
        "contiguous",
        "sampler",
        "steps skip-profiled",
        "parity fa3",
        "bench fa3",
        "parity mosaic",
        "bench mosaic",
        "tune",
    ]
    assert [part.name for group in groups if len(group) > 1 for part in group] == names[1:4]
    children = {part.name: part.child for group in groups for part in group}
    shared = {"parity triton", "pages", "one-order", "parity fa3", "parity mosaic"}
    assert {name for name, child in children.items() if not child.alone} == shared
    for child in children.values():
        assert child.environment["JAX_COMPILATION_CACHE_DIR"] == str(tmp_path / "state" / "cache")
        assert child.needs_s < child.limit_s < 300 and child.to.parent == tmp_path
        assert ("XLA_CLIENT_MEM_FRACTION" in child.environment) == child.alone
    assert children["steps without graphs"].environment["XLA_FLAGS"].endswith("command_buffer=")
    assert "SKIP_PROFILED" in children["steps skip-profiled"].environment["XLA_FLAGS"]
    assert "XLA_FLAGS" not in children["steps"].environment
    labels = {label(spec) for spec in choose(slot_parts.REAL.specs)}
    pages = ("", " int8", " uint8")
    assert labels == {
        *(f"llama-3-8b decode {rows}x2048{each}" for rows in (16, 64) for each in pages),
        "llama-3-8b chunk 2048+0",
    }


def test_what_a_library_that_never_ran_could_spoil_runs_without_it(tmp_path):
    """FlashAttention-3 is the first choice for prompt chunks as soon as its wheel is there."""
    groups = list(slot_parts.groups(Check(directory=tmp_path), tmp_path / "state"))
    children = {part.name: part.child for group in groups for part in group}
    for name in ("canary", "steps", "steps without graphs", "steps skip-profiled"):
        assert bench_step.parse(children[name].command[2:]).backend == "triton"
    steps = bench_step.cases(bench_step.parse(children["steps"].command[2:]))
    assert [(case.rows, case.chunk, case.num_layers) for case in steps] == [
        *((rows, 0, None) for rows in (1, 64, 8, 256)),
        (1, 2048, None),
    ]
    for name, steps in {
        "engine": 1,
        "engine without graphs": 1,
        "engine in several steps": 8,
    }.items():
        arguments = bench_engine.parse(children[name].command[2:])
        assert (arguments.backend, arguments.steps) == ("triton", steps)
    engine = bench_engine.parse(children["engine"].command[2:])
    assert (engine.model, engine.rows, engine.chunk, engine.trace) == (
        "8b",
        "1,8,64,256",
        2048,
        256,
    )
    assert engine.seconds < children["engine"].limit_s
    assert bench_kernels.parse(children["tune"].command[2:]).tune


@pytest.mark.parametrize(("program", "graphs"), [("", True), ("os.abort()", False)])
def test_all_parts_run_without_graphs_if_a_step_of_a_tiny_model_fails(tmp_path, program, graphs):
    flag = slot_parts.NO_GRAPHS
    says = f"exit({flag!r} in os.environ.get('XLA_FLAGS', ''))"
    parts = [[part(tmp_path, "canary", program)], [part(tmp_path, "steps", says)]]
    made = slot(tmp_path, parts)
    made.run(made.open_parts((), False), time.monotonic() + 60)
    assert made.results.verdict("canary") == (PASSED if graphs else FAILED)
    assert made.results.verdict("steps") == (PASSED if graphs else FAILED)


def test_one_row_is_timed_in_the_smallest_step():
    [case] = bench_step.cases(
        bench_step.parse(["--models", "tiny", "--rows", "1", "--contexts", "64"])
    )
    assert (case.bucket.num_rows, case.num_blocks) == (2, 1 + 4)
    assert step_times.time_step(case, dtype="float32", round_s=0.001).step > 0


def test_the_first_set_is_timed_with_blocks_of_other_sizes():
    sizes = [spec.block_size for spec in choose(slot_parts.REAL.block_sizes)]
    assert sizes == [32, 64, 128]
    assert {spec.block_size for spec in choose(slot_parts.REAL.specs)} == {16}


def test_products_keep_their_time():
    """Fourteen shapes are checked, and timed with and without their format: 36 compilations."""
    began = time.monotonic()
    findings = list(parts.PARTS["products"](parts.Options(interpret=True, seconds=11)))
    assert time.monotonic() - began < 40
    assert findings[-1].check == "products: timings"
    assert LEFT_OUT in {each.status for each in findings}
    assert FAILED not in {each.status for each in findings}


def test_a_pool_that_is_too_small_leaves_out_what_does_not_fit(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_engine, "open_engine", lambda *_: Slow(num_slots=100 * 32))
    to = tmp_path / "engine.jsonl"
    sizes = ["--model", "tiny", "--rows", "1,100,101", "--context", "8", "--new", "12"]
    assert bench_engine.main([*sizes, "--trace", "3", "--to", str(to)]) == 0
    left_out = [each for each in read(to) if each.status == LEFT_OUT]
    assert [(each.check, each.summary) for each in left_out] == [
        ("engine decode 101 rows", "the KV pool holds 100 sequences of 20 tokens")
    ]


def test_the_next_part_waits_until_a_killed_one_has_left_the_gpu(tmp_path, monkeypatch):
    answers = ["4711", "4711", ""]
    monkeypatch.setattr(environment, "_output", lambda command: answers.pop(0))
    assert environment.wait_for_gpu() and not answers
    monkeypatch.setattr(environment, "_output", lambda command: "4711")
    assert not environment.wait_for_gpu(limit_s=0.0)


def test_a_rehearsal_fails_where_a_package_lacks(tmp_path, monkeypatch, capsys):
    lacks = (
        f"open({str(tmp_path / 'engine.jsonl')!r}, "
        f"'w').write({PASSES.replace(PASSED, LEFT_OUT)!r} + chr(10))"
    )
    engine = part(tmp_path, "engine", lacks)
    monkeypatch.setattr(Check, "environment", lambda self: part(tmp_path, "environment").child)
    for may_lack, status in ((True, 0), (False, 1)):
        monkeypatch.setattr(
            gpu_slot,
            "groups",
            lambda *_, lack=may_lack: iter([[dataclasses.replace(engine, may_lack=lack)]]),
        )
        assert gpu_slot.main(["--rehearse", "--state", str(tmp_path / "state")]) == status
        assert "open: engine" in capsys.readouterr().out


ENDINGS = {
    "good": ("", PASSED, "1 passed"),
    "crashes": ("os.kill(os.getpid(), signal.SIGSEGV)", FAILED, "SIGSEGV"),
    "hangs": ("time.sleep(60)", FAILED, "it hangs"),
    "prints": ("print('x' * 5_000_000); exit(3)", FAILED, "exit status 3"),
}


def test_a_part_that_crashes_hangs_or_prints_megabytes_is_a_row_of_the_report(tmp_path, capsys):
    parts = [[part(tmp_path, name, text, limit_s=1.5) for name, (text, *_) in ENDINGS.items()]]
    parts += [
        [part(tmp_path, "why", if_failed="hangs")],
        [part(tmp_path, "why not", if_failed="good")],
    ]
    made = slot(tmp_path, parts)
    assert made.run(made.open_parts((), False), time.monotonic() + 60) == 1
    assert start(tmp_path) == sorted([*ENDINGS, "why"])
    findings = read(tmp_path / "out" / "results.jsonl")
    report = (tmp_path / "out" / "report.md").read_text()
    for name, (_, status, text) in ENDINGS.items():
        rows = [each for each in findings if each.data["part"] == name]
        assert (
            rows[0].check == "a check"
            and rows[-1].check == f"part {name}"
            and rows[-1].status == status
        )
        assert (
            text in " ".join(each.summary for each in rows)
            and f"| part {name} | {status} |" in report
        )
    files = list((tmp_path / "out").iterdir())
    assert len(files) <= 8 and sum(path.stat().st_size for path in files) < 100_000
    printed = capsys.readouterr().out
    assert (
        len(printed) < 9000
        and '{"' not in printed
        and "crashes: FAILED" in printed
        and "SIGSEGV" in printed
    )
    assert "xxx" in (tmp_path / "out" / "logs.txt").read_text()


def test_a_second_call_runs_what_is_open_alone(tmp_path):
    names = ("good", "crashes", "late", "large")
    limits = {"large": {"needs_s": 1000.0}}
    programs = {"crashes": "os.abort()", "late": "time.sleep(60)"}
    parts = [
        [part(tmp_path, name, programs.get(name, ""), **limits.get(name, {}))] for name in names
    ]
    first = slot(tmp_path, parts)
    first.run(first.open_parts((), False), time.monotonic() + 3)
    assert start(tmp_path) == ["crashes", "good", "late"]
    verdicts = {name: first.results.verdict(name) for name in names}
    assert verdicts == {"good": PASSED, "crashes": FAILED, "late": LEFT_OUT, "large": LEFT_OUT}

    second = slot(tmp_path, [[part(tmp_path, name)] for name in names])
    assert [group[0].name for group in second.open_parts((), False)] == ["late", "large"]
    assert [group[0].name for group in second.open_parts(("crash",), True)] == ["crashes"]
    second.run(second.open_parts((), False), time.monotonic() - 1)  # no time: what was found stays
    assert len(second.results.parts["late"]) == 3
    (tmp_path / "started").unlink()
    assert second.run(second.open_parts((), False), time.monotonic() + 30) == 0
    assert start(tmp_path) == ["large", "late"]
    assert [each.status for each in second.results.parts["late"]] == [PASSED, PASSED]
    listed = gpu_slot.list_parts(second.results, second.parts)
    assert listed.count("passed") == 3 and "crashes                FAILED" in listed
    for path in (tmp_path / "state", tmp_path / "out"):
        assert read(path / "results.jsonl") == second.results.findings


def test_results_are_in_the_files_while_a_part_goes_on_and_not_taken_for_its_end(tmp_path):
    results = Results(tmp_path / "state", tmp_path / "out", small=True)
    results.add("steps", Finding("step 8b", PASSED, "5 ms"))
    for path in (tmp_path / "state", tmp_path / "out"):
        assert [each.summary for each in read(path / "results.jsonl")] == ["5 ms"]
    again = Results(tmp_path / "state", tmp_path / "other", small=True)  # the run was cut off
    assert again.verdict("steps") == "" and [each.summary for each in again.findings] == ["5 ms"]


def test_the_report_has_one_table_of_all_kernel_sets_and_is_no_reason_to_stop(
    tmp_path, monkeypatch
):
    results, ceilings = (
        Results(tmp_path, tmp_path, small=False),
        Ceilings(copied=2e12, read=3e12, matmul=6e14),
    )
    row = Row(
        specs.find("llama-3-8b decode 16x2048"), "triton", 1e-4, timing=Timing(1e-4, 0.0, 1, 7)
    )
    measured = Finding("ceilings", PASSED, "", data=dataclasses.asdict(ceilings))
    timed = Finding("bench triton 16x2048", PASSED, "", data={"rows": [row.as_data(ceilings)]})
    results.end(
        "engine", [Finding("engine trace", PASSED, "", data={"seconds": 1.5, "rows": 2})], 1.0
    )
    results.end("bench triton", [measured, timed], 1.0)
    assert not results.problem
    assert "| llama-3-8b decode 16x2048 | triton | 100.0 |" in (tmp_path / "report.md").read_text()
    monkeypatch.setattr(slot_results, "bench_tables", lambda *_, **__: 1 / 0)
    results.end("steps", [Finding("step 8b", PASSED, "5 ms")], 1.0)
    assert (
        "could not be made" in (tmp_path / "report.md").read_text()
        and results.verdict("steps") == PASSED
    )
    assert "ZeroDivisionError" in results.problem and len(read(tmp_path / "results.jsonl")) == 7


def test_the_screen_is_short_and_keeps_room_for_the_end(capsys):
    screen = Screen()
    for number in range(1000):
        screen.say(f"{number} {'y' * 500}")
    screen.end("the end")
    printed = capsys.readouterr().out
    assert len(printed) <= 9000 and printed.endswith("the rest is in report.md)\nthe end\n")
    assert max(map(len, printed.splitlines())) <= slot_results.LINE


def test_another_gpu_does_not_mix_with_what_is_there(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_slot, "groups", lambda *_: iter([[part(tmp_path, "good")]]))
    where = {"device": "GPU X", "platform": "gpu"}

    def environment(self):
        line = json.dumps({**json.loads(PASSES), "check": "environment", "data": where})
        to = tmp_path / "environment.jsonl"
        return Child(
            name="environment", command=["sh", "-c", f"echo '{line}' > {to}"], to=to, needs_s=0
        )

    monkeypatch.setattr(Check, "environment", environment)
    command = ["--state", str(tmp_path / "state"), "--out", str(tmp_path / "out")]
    assert gpu_slot.main(command) == 0
    assert "open: nothing" in capsys.readouterr().out
    assert gpu_slot.main(command) == 0 and start(tmp_path) == ["good"]
    where["device"] = "GPU Y"
    assert gpu_slot.main(command) == 2
    assert "has results of GPU X, and this is GPU Y" in capsys.readouterr().out
    assert "GPU Y" not in (tmp_path / "state" / "results.jsonl").read_text()
    where.update(device="cpu", platform="cpu")
    assert gpu_slot.main(["--state", str(tmp_path / "none"), "--out", str(tmp_path / "out")]) == 2
    assert "--rehearse" in capsys.readouterr().out
    assert (
        gpu_slot.main(command) == 2
        and "GPU X" in (tmp_path / "state" / "results.jsonl").read_text()
    )
    where.update(device="GPU X", platform="gpu")
    assert gpu_slot.main(["--state", str(tmp_path / "none"), "--out", str(tmp_path / "out")]) == 0


def test_a_record_is_of_a_gpu(tmp_path, capsys):
    results, document = tmp_path / "results.jsonl", tmp_path / "gpu-results.md"
    document.write_text("# Results\n\n**There are no results yet.** Nothing.\n\n## How\n\nSo.\n")
    where = {
        "device": "cpu",
        "platform": "cpu",
        "jax": "0.11.2",
        "date": "2026-01-02 03:04 UTC",
        "part": "environment",
    }
    command = ["record", "--results", str(results), "--document", str(document)]
    append(results, Finding("environment", PASSED, "here", data=where))
    with pytest.raises(SystemExit, match="holds results of cpu, not of a GPU"):
        gpu_slot.main(command)
    results.unlink()
    environment = {**where, "device": "GPU X", "platform": "gpu", "commit": "unknown (no git here)"}
    append(results, Finding("environment", PASSED, "here", data=environment))
    append(results, Finding("step 8b", PASSED, "5 ms", data={"part": "steps"}))
    assert gpu_slot.main(command) == 0
    assert "GPU X, jax 0.11.2, 2026-01-02 03:04 UTC" in capsys.readouterr().out
    text = document.read_text()
    assert text.startswith("# Results\n\n## How\n\nSo.\n\n## 2026-01-02 03:04 UTC: GPU X, commit ")
    assert "no git here" not in text and "| step 8b | passed | 5 ms | 0.0 |" in text


class Slow(contextlib.AbstractContextManager):
    """An LLM whose every new token takes two milliseconds."""

    def __init__(self, num_slots=1_000_000):
        self.memory = types.SimpleNamespace(num_slots=num_slots)

    def __exit__(self, *_):
        pass

    def generate(self, prompts, params, use_tqdm=False):
        params = params if isinstance(params, list) else [params]
        time.sleep(0.002 * max(each.max_tokens for each in params))

    def stats(self):
        return {"compile_seconds_total": 1.0, "num_preemptions_total": {"swap": 2}}


def test_the_engine_is_timed_with_what_takes_longest_last(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_engine, "open_engine", lambda *_: Slow())
    to, command = (
        tmp_path / "engine.jsonl",
        ["--model", "tiny", "--rows", "1,100,2", "--context", "8", "--trace", "3"],
    )
    assert bench_engine.main([*command, "--new", "12", "--to", str(to)]) == 0
    findings = {each.check.removeprefix("engine "): each for each in read(to)}
    assert list(findings) == [
        *(
            "start tiny",
            "decode 1 rows",
            "decode 2 rows",
            "prompt of 2048 tokens",
            "decode 2 rows, top-p",
        ),
        *("trace of 3 requests", "decode 100 rows"),
    ]
    assert {each.status for each in findings.values()} == {PASSED}
    assert 0.0015 < findings["decode 2 rows"].data["step"] < 0.01
    assert findings["trace of 3 requests"].data["preemptions"] == 2
    to.unlink()
    assert bench_engine.main([*command, "--seconds", "12", "--to", str(to)]) == 0
    left_out = [each.check for each in read(to) if each.status == LEFT_OUT]
    assert left_out == [
        "engine decode 2 rows, top-p",
        "engine trace of 3 requests",
        "engine decode 100 rows",
    ]
    monkeypatch.setattr(bench_engine, "open_engine", lambda *_: 1 / 0)
    assert bench_engine.main([*command, "--to", str(to)]) == 1
    assert "ZeroDivisionError" in read(to)[-1].summary


def test_packages_that_lack_are_one_line_with_the_command(monkeypatch, capsys):
    monkeypatch.setattr(
        gpu_slot.importlib.util, "find_spec", lambda name: None if name == "pydantic" else name
    )
    assert gpu_slot.missing() == (
        "missing: pydantic (the engine): python3 -m pip install --no-deps -r "
        "constraints/gpu-wheels.txt"
    )
    assert gpu_slot.main(["--wheels"]) == 0
    fetch, install = capsys.readouterr().out.splitlines()
    assert (
        fetch.startswith("python3 -m pip download --no-deps")
        and "-r constraints/gpu-wheels.txt" in fetch
    )
    assert "--target .site .whl/*.whl" in install
    names = {line.partition("==")[0] for line in (ROOT / gpu_slot.WHEELS).read_text().splitlines()}
    assert {"llguidance", "pydantic", "flash-attn3-jax"} <= names
