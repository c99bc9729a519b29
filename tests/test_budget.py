"""The budget of the suite: files that need more executables than their line says are told so, and
how they share them.
"""

from __future__ import annotations

import concurrent.futures
import json
import time

import pytest

from jaxpage.device import executables, steps
from tests.support import durations
from tests.support.engines import LLAMA, SMALL_POOL, make_llm
from tests.support.executables import Counts, SharedExecutables, when_used
from tests.support.random_checkpoints import random_checkpoint

KNOWN = {
    "test_a.py": {"seconds": 9.0, "cpu_seconds": 9.0, "engines": 1, "executables": 5, "compiled": 0}
}


@pytest.mark.parametrize(
    ("name", "num_executables", "line"), [("test_a.py", 6, 5), ("test_new.py", 25, 24)]
)
def test_more_than_the_line_is_reported_with_the_numbers(name, num_executables, line):
    problem = durations.over_budget(name, num_executables, KNOWN)
    for part in (
        f"tests/{name} need {num_executables} ",
        f"budget is {line} (tests/durations.json)",
        "engines.py",
        f"pytest -n 0 tests/{name}",
    ):
        assert part in problem


def test_no_more_than_the_line_is_fine():
    assert (
        durations.over_budget("test_a.py", 5, KNOWN)
        is durations.over_budget("test_new.py", 24, KNOWN)
        is None
    )


def test_a_partial_run_keeps_the_lines_of_other_files(tmp_path, monkeypatch):
    (tmp_path / "lab").mkdir()
    for name in ("test_a.py", "test_b.py", "lab/test_b.py"):
        (tmp_path / name).touch()
    monkeypatch.setattr(durations, "PATH", tmp_path / "durations.json")
    assert durations.read() == {}
    durations.write({**KNOWN, "test_gone.py": KNOWN["test_a.py"]})
    other = durations.Stopwatch().record(Counts())
    durations.write({"test_b.py": other})
    assert durations.read() == {**KNOWN, "test_b.py": other}
    laboratory = durations.name_of(tmp_path / "lab" / "test_b.py")
    durations.write({laboratory: KNOWN["test_a.py"]})
    assert durations.read() == {**KNOWN, "test_b.py": other, "lab/test_b.py": KNOWN["test_a.py"]}
    whole = json.loads(durations.PATH.read_text())
    assert [whole[name]["executables"] for name in ("totals", "totals of tests/lab")] == [5, 5]
    assert sum("test_" in line for line in durations.PATH.read_text().splitlines()) == 3


@pytest.fixture
def compilations(monkeypatch):
    """Collects what is compiled from here on; nothing is, really."""
    names = []
    for name in ("_compile_step", "_compile_copy"):
        monkeypatch.setattr(
            executables, name, lambda *arguments, name=name: names.append(name) or object()
        )
    return names


def test_an_executable_is_compiled_once_and_counted_in_every_file_that_needs_it(compilations):
    shared = SharedExecutables()
    for num_compiled in (2, 0):
        with shared.in_use(optimized=False) as counts:
            executables._compile_copy("pages", 16, "backend")
            executables._compile_copy("pages", 8, "backend")
            executables._compile_copy("pages", 8, "backend")
        assert (len(counts.requested), counts.compiled) == (2, num_compiled)
    with shared.in_use(optimized=True) as counts:
        executables._compile_copy("pages", 8, "backend")
    assert counts.compiled == 1, "other code for the same shapes"


def test_planted_mistakes_are_not_shared(compilations, monkeypatch):
    shared = SharedExecutables()
    with shared.in_use(optimized=False) as counts:
        executables._compile_copy("pages", 8, "backend")
        with monkeypatch.context() as patch:
            patch.setattr(steps, "copy_step", lambda *_, **__: None)
            executables._compile_copy("pages", 8, "backend")
        executables._compile_copy("pages", 8, "backend")
    assert counts.compiled == 2


def test_a_small_pool_compiles_nothing_of_its_own(tmp_path):
    directory = random_checkpoint(tmp_path, {**LLAMA, "num_hidden_layers": 1})
    shared, settings = SharedExecutables(), {"at_start": True, "largest_shapes": True}
    with shared.in_use(optimized=False):
        make_llm(directory, **{**SMALL_POOL, "num_blocks": 129}, **settings).shutdown()
    with (
        shared.in_use(optimized=False) as counts,
        make_llm(directory, **SMALL_POOL, **settings) as llm,
    ):
        assert llm.stats()["num_blocks_total"] == 16 and counts.compiled == 0


def test_what_is_compiled_when_used_is_compiled_once_and_only_then(monkeypatch):
    names = []

    def compile_one(*arguments):
        names.append(arguments)
        return lambda value: value + arguments[1]

    monkeypatch.setattr(executables, "_compile_copy", compile_one)
    shared = SharedExecutables()
    with shared.in_use(optimized=False) as counts:
        with when_used():
            copy, same, late = (
                executables._compile_copy("pages", size, "backend") for size in (8, 8, 16)
            )
        assert (counts.requested, executables._workspace_bytes(copy)) == (set(), 0)
        assert (copy(1), copy(2), same(3)) == (9, 10, 11)
        assert (len(counts.requested), counts.compiled, names) == (1, 1, [("pages", 8, "backend")])
        monkeypatch.setattr(steps, "copy_step", lambda *_, **__: None)
        with pytest.raises(RuntimeError, match="too late: .*copy_step"):
            late(1)


def test_executables_of_several_threads_may_be_forgotten_at_once(monkeypatch):
    """Every eighth makes a quarter of the others forgotten, as in a process with many
    memory maps.
    """

    class SlowlyCompared(int):
        def __hash__(self):
            return 0

        def __eq__(self, other):
            time.sleep(0.0002)  # another thread runs
            return int(self) == int(other)

    monkeypatch.setattr(executables, "_compile_copy", lambda *arguments: arguments[1])
    shared = SharedExecutables(max_maps=0)
    with (
        shared.in_use(optimized=False) as counts,
        concurrent.futures.ThreadPoolExecutor(8) as threads,
    ):
        sizes = [SlowlyCompared(size) for size in range(40)]
        results = threads.map(
            lambda size: executables._compile_copy("pages", size, "backend"), sizes
        )
        assert list(results) == sizes and counts.compiled == len(counts.requested) == 40
