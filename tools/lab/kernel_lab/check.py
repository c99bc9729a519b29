"""Runs a GPU check as a whole: its parts, their processes and time limits, and the findings."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pallas_kernels.sets import DEFINITION, GPU_BACKENDS, KERNEL_BACKENDS, XLA_BACKENDS
from tools.lab.kernel_lab import pages
from tools.lab.kernel_lab.children import Child, run_all
from tools.lab.kernel_lab.findings import FAILED, LEFT_OUT, PASSED, Finding, worst
from tools.lab.kernel_lab.parts import bench_tables

ROOT = Path(__file__).parents[3]
BENCH_SMALL = "llama-3-8b decode 16x2048"  # the spec that a miniature times
# Processes that share the GPU must not each reserve its memory.
SHARED_MEMORY = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


@dataclass(frozen=True, kw_only=True)
class Check:
    """Holds the settings of a GPU check.

    Attributes:
        minutes: The time for the whole check. A part that may not fit is not started, and a part
            that still runs at the end is stopped.
        interpret: Kernels are interpreted on CPU, and everything is small.
        backends: The kernel sets to check.
        only: Parts whose name holds one of these texts run; empty for all parts.
        jobs: The most processes that share the GPU.
        directory: The directory of findings and logs.
    """

    minutes: float = 9.0
    interpret: bool = False
    backends: tuple[str, ...] = GPU_BACKENDS
    only: tuple[str, ...] = ()
    jobs: int = 4
    directory: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="gpu_check_")))

    def children(self) -> list[Child]:
        """Returns the parts in the order in which they start.

        Checks that say most about whether the kernels are right come first, then times.
        """
        kernels = [name for name in self.backends if name in KERNEL_BACKENDS]
        made = [self.part("parity", name, needs_s=60, limit_s=240) for name in kernels]
        made += (
            [self.part("pages", needs_s=40, limit_s=150)]
            if set(pages.KERNELS) & set(self.backends)
            else []
        )
        made += [self.part("stability", name, needs_s=60, limit_s=240) for name in kernels]
        others = [name for name in self.backends if name not in KERNEL_BACKENDS]
        made += [self.part("parity", name, needs_s=40, limit_s=200) for name in others]
        made += [
            self.part("stability", name, needs_s=40, limit_s=200)
            for name in others
            if name != DEFINITION
        ]
        if not self.interpret:
            made.append(
                self.tool("contiguous", "lab/time_contiguous_attention.py", needs_s=40, limit_s=90)
            )
        if kernels:
            made.append(self.part("products", needs_s=60, limit_s=200, alone=True))
            made.append(self.part("sampler", needs_s=30, limit_s=90, alone=True))
        timed = [name for name in (*KERNEL_BACKENDS, XLA_BACKENDS[0]) if name in self.backends]
        specs = ["--specs", BENCH_SMALL] if self.interpret else []
        made += [
            self.part("bench", name, *specs, needs_s=45, limit_s=110, seconds=80, alone=True)
            for name in timed
        ]
        sizes = (
            ["tiny", "--rows", "2", "--contexts", "64", "--round", "0.01"]
            if self.interpret
            else ["8b,1b"]
        )
        # Fewer layers compile faster, and every layer is the same.
        layers = [] if self.interpret else ["--layers", "4"]
        steps = ["--models", *sizes, *layers, "--seconds", "100"]
        made.append(self.tool("steps", "bench_step.py", *steps, needs_s=60, limit_s=130))
        engine_backends = [*XLA_BACKENDS] if self.interpret else [*kernels, DEFINITION]
        made.append(
            self.tool("engine", "lab/check_engine.py", *engine_backends, needs_s=60, limit_s=170)
        )
        if not self.interpret:
            made += [
                self.part("sanitizer", name, needs_s=45, limit_s=200, seconds=180)
                for name in kernels
            ]
        return [
            child
            for child in made
            if not self.only or any(text in child.name for text in self.only)
        ]

    def environment(self) -> Child:
        """Returns the part that describes the machine."""
        return self.part("environment", needs_s=0, limit_s=120)

    def part(
        self,
        part: str,
        backend: str = "",
        *arguments: str,
        needs_s: float,
        limit_s: float,
        seconds: float = 120,
        alone: bool = False,
    ) -> Child:
        """Returns the process that runs a part of `tools.lab.kernel_lab.parts`."""
        name, seconds = f"{part} {backend}".strip(), 590 if self.interpret else seconds
        to = self.directory / f"{name.replace(' ', '-')}.jsonl"
        command = [
            sys.executable,
            "-m",
            "tools.lab.kernel_lab",
            part,
            "--to",
            str(to),
            "--seconds",
            str(seconds),
        ]
        command += ["--directory", str(self.directory), *arguments]
        command += ["--backend", backend] if backend else []
        command += ["--interpret"] if self.interpret else []
        return self._child(name, command, to, needs_s, limit_s, alone)

    def tool(self, name: str, file: str, *arguments: str, needs_s: float, limit_s: float) -> Child:
        """Returns the process of a program of tools/, which measures time and has the GPU alone."""
        to = self.directory / f"{name.replace(' ', '-')}.jsonl"
        command = [sys.executable, str(ROOT / "tools" / file), "--to", str(to), *arguments]
        return self._child(name, command, to, needs_s, limit_s, True)

    def _child(
        self,
        name: str,
        command: Sequence[str],
        to: Path,
        needs_s: float,
        limit_s: float,
        alone: bool,
    ) -> Child:
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
        if self.interpret:
            environment["JAX_PLATFORMS"] = "cpu"
        elif not alone:
            environment |= SHARED_MEMORY
        return Child(
            name=name,
            command=command,
            to=to,
            needs_s=0 if self.interpret else needs_s,
            limit_s=600 if self.interpret else limit_s,
            alone=alone,
            environment=environment,
        )

    def run(
        self,
        *,
        on_finding: Callable[[Finding], None] = lambda _: None,
        ended: Callable[[str, str], None] = lambda *_: None,
    ) -> list[Finding]:
        """Runs the parts; stops after the environment where there is no GPU.

        Args:
            on_finding: Called with each finding.
            ended: Called with the name of each part and its verdict.

        Returns:
            All findings.
        """
        deadline = time.monotonic() + self.minutes * 60
        findings: list[Finding] = []

        def report(_: Child, finding: Finding) -> None:
            findings.append(finding)
            on_finding(finding)

        def note_end(child: Child, new: list[Finding]) -> None:
            if not new:
                new = [nothing(child)]
                report(child, *new)
            ended(child.name, worst(new))

        run_all([self.environment()], deadline=deadline, jobs=1, done=note_end, on_finding=report)
        if self.interpret or has_gpu(findings):
            run_all(
                self.children(), deadline=deadline, jobs=self.jobs, done=note_end, on_finding=report
            )
        if tables := bench_tables(findings, small=self.interpret):
            report(self.environment(), Finding("bench", PASSED, "all kernel sets", tables=tables))
        return findings


def nothing(child: Child) -> Finding:
    """Returns the failure of a part whose process ended without a finding."""
    return Finding(child.name, FAILED, "its process ended well and found nothing")


def has_gpu(findings: Sequence[Finding]) -> bool:
    """Returns whether the environment's finding names a GPU."""
    return any(
        finding.data.get("platform") == "gpu"
        for finding in findings
        if finding.check == "environment"
    )


def exit_status(findings: Sequence[Finding]) -> int:
    """Returns 1 where a check failed or none was made, else 0."""
    made = [
        finding
        for finding in findings
        if finding.check != "environment" and finding.status != LEFT_OUT
    ]
    return 0 if made and not any(finding.status == FAILED for finding in findings) else 1
