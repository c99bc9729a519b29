"""The failures that are likeliest in the minutes on a GPU, planted in a rehearsal: each costs its
own part alone.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path

import pytest

from tools import gpu_slot
from tools.lab import step_times
from tools.lab.kernel_lab import environment
from tools.lab.kernel_lab.check import Check
from tools.lab.kernel_lab.children import Child
from tools.lab.kernel_lab.findings import FAILED, PASSED, read
from tools.lab.slot_parts import CANARY, NO_GRAPHS, Part, groups

ROOT = Path(__file__).parents[2]
OUT_OF_MEMORY = "RuntimeError('RESOURCE_EXHAUSTED: Out of memory while trying to allocate')"
HANGS = "import time; time.sleep(1000)"
# What runs in a part's process before its program.
FAULTS = {
    CANARY: HANGS,  # a graph with conditionals, at its second run
    # The KV pool that is asked for is larger than what the weights leave.
    "engine": (
        "from jaxpage.device.hardware import device_spec; device_spec.available_host_bytes = "
        "lambda: 2**20"
    ),
    # Sixteen threads try tiles of products at once, beside what JAX has reserved.
    "steps": f"""
from tools.lab import step_times
def fail(*arguments, **options):
    raise {OUT_OF_MEMORY}
step_times.time_step = fail""",
    "products": f"""
from tools.lab.kernel_lab import products
def fail(*arguments, **options):
    raise {OUT_OF_MEMORY}
products.grouped_matmul = fail""",
    "parity mosaic": HANGS,  # at a barrier
    "parity fa3": "import os; os.abort()",  # a library of another CUDA
    "bench fa3": "import os; os.abort()",
    # A process that was killed leaves another one, which keeps the GPU busy.
    "sampler": """
import os, pathlib, signal, subprocess
left = subprocess.Popen(['sleep', '1000'])
pathlib.Path(os.environ['LEFT']).write_text(str(left.pid))
os.kill(os.getpid(), signal.SIGKILL)""",
}
LIMITS = {CANARY: 2.0, "parity mosaic": 2.0}
SOUND = ("steps without graphs", "engine without graphs", "pages", "parity triton")


def with_fault(child: Child) -> Child:
    """Returns the process with its fault, and a limit after which a hang is seen."""
    if child.name not in FAULTS:
        return child
    _, *words = child.command
    run = f"runpy.run_path({words[0]!r}, run_name='__main__')"
    if words[0] == "-m":
        _, module, *options = words
        words = [module, *options]
        run = f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    begin = f"import runpy, sys; sys.path.insert(0, {str(ROOT)!r}); sys.argv = {words!r}\n"
    return dataclasses.replace(
        child,
        command=[sys.executable, "-c", f"{begin}{FAULTS[child.name]}\n{run}"],
        limit_s=LIMITS.get(child.name, child.limit_s),
    )


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in ("Z", "X")


@pytest.mark.sweep
def test_each_fault_costs_its_part_alone(tmp_path, monkeypatch):
    """It takes two minutes: the parts that are sound run as in any rehearsal, without graphs since
    the first one hangs.
    """
    flags = {}

    def with_faults(check: Check, state: Path) -> list[list[Part]]:
        return [
            [dataclasses.replace(part, child=with_fault(part.child)) for part in group]
            for group in groups(check, state)
        ]

    def note_flags(self: gpu_slot.Slot, child: Child) -> Child:
        changed = as_it_can_run(self, child)
        flags[child.name] = changed.environment.get("XLA_FLAGS", "")
        return changed

    as_it_can_run = gpu_slot.Slot._as_it_can_run
    run_children = gpu_slot.Slot._run
    waits, ran = [], []

    def note_parts(self: gpu_slot.Slot, children: list[Child], deadline: float) -> None:
        ran.append([child.name for child in children])
        run_children(self, children, deadline)

    monkeypatch.setattr(gpu_slot.Slot, "_run", note_parts)
    monkeypatch.setattr(gpu_slot.Slot, "_as_it_can_run", note_flags)
    monkeypatch.setattr(gpu_slot, "groups", with_faults)
    monkeypatch.setattr(gpu_slot, "wait_for_gpu", lambda: waits.append(1))
    monkeypatch.setenv("LEFT", str(tmp_path / "left"))
    only = ",".join((*FAULTS, *SOUND))
    command = ["--rehearse", "--state", str(tmp_path / "state"), "--out", str(tmp_path / "out")]
    assert gpu_slot.main([*command, "--only", only]) == 1
    findings = read(tmp_path / "out" / "results.jsonl")
    verdicts = {
        finding.check.removeprefix("part "): finding.status
        for finding in findings
        if finding.check.startswith("part ")
    }
    with_failure = [parts for parts in ran if any(verdicts.get(name) == FAILED for name in parts)]
    # JAX 0.10 does not know the other way to update graphs.
    verdicts.pop("steps skip-profiled")
    expected = dict.fromkeys(verdicts, PASSED) | dict.fromkeys(FAULTS, FAILED)
    assert verdicts == expected and set(SOUND) < set(verdicts)
    assert len(waits) == len(with_failure), "parts after a failure wait, those beside it do not"
    assert NO_GRAPHS not in flags.pop(CANARY)
    assert all(NO_GRAPHS in flag for flag in flags.values())
    assert not is_alive(int((tmp_path / "left").read_text()))
    report = (tmp_path / "out" / "report.md").read_text()
    for text in ("it hangs", "SIGABRT", "SIGKILL", "RESOURCE_EXHAUSTED", "CapacityError"):
        assert text in report, text


def test_slow_first_calls_are_no_part_of_a_time():
    """A graph is recorded anew at the first call after others were compiled."""
    calls = []

    def run() -> float:
        calls.append(1)
        if len(calls) <= 2:
            time.sleep(0.2)
        return 1.0

    assert step_times._seconds(run, 0.0) < 0.05


def test_a_commit_is_given_where_there_is_no_repository(monkeypatch):
    monkeypatch.setattr(environment, "_output", lambda command: "")
    monkeypatch.setenv("JAXPAGE_COMMIT", "abc123")
    assert environment.commit() == "abc123"
    monkeypatch.delenv("JAXPAGE_COMMIT")
    assert environment.commit() == "unknown (no git here)"
