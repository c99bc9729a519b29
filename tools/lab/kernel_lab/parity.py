"""Compares every backend with float64 on cases that make kernels wrong.

The shapes are real ones, cut to a moderate size, in their own types. The error of an output element
is |got - want| over the same weighted sum of |v|: this measures rounding even where terms cancel.
The tolerance for bfloat16 and float16 queries is 2**-6, because the weights and the output are
rounded to eight bits of fraction, and scores may be too. For float32 it is 1e-4 (no TF32;
exponentials from hardware). A planted mistake gives errors near 1.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax
import numpy as np

from tools.lab.kernel_lab import oracle, specs
from tools.lab.kernel_lab.findings import FAILED, PASSED, Finding, LeftOut, judge
from tools.lab.kernel_lab.kernel_cases import Case, make_case
from tools.lab.kernel_lab.specs import Spec

TOLERANCE = {"float32": 1e-4, "bfloat16": 2.0**-6, "float16": 2.0**-6}
RAGGED = (1, 2047, 16, 17, 640, 1333)

Run = Callable[[Case], jax.Array]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A spec and the settings that a spec does not have.

    Attributes:
        spec: The spec.
        logit_softcap: The softcap of the call.
        padding: The query tokens after the last row.
        interpreted: True if the interpreter runs this trial; it runs only a few.
    """

    spec: Spec
    logit_softcap: float | None = None
    padding: int = 3
    interpreted: bool = False

    def cut(self) -> Trial:
        """Returns a small version of the trial for the interpreter."""
        return dataclasses.replace(self, spec=self.spec.cut(rows=6, context=70, queries=20))


def _of(
    name: str,
    contexts: tuple[int, ...],
    queries: tuple[int, ...],
    label: str = "",
    **changes: object,
) -> Spec:
    """Returns the heads and types of a named spec with rows of a moderate size."""
    spec = dataclasses.replace(specs.find(name), contexts=contexts, queries=queries, **changes)  # type: ignore[arg-type]
    return dataclasses.replace(spec, name=label or name.rpartition(" ")[0])


def trials() -> list[Trial]:
    """Returns the trials, those of decoding first."""
    return [*_decodes(), *_chunks_and_drafts()]


def _decodes() -> list[Trial]:
    ones = (1,) * len(RAGGED)
    decode = "llama-3-8b decode 64x2048"
    return [
        Trial(spec=_of(decode, RAGGED, ones, "decode ragged"), padding=0, interpreted=True),
        Trial(spec=_of(decode, (8192,), (1,), "decode of one long row"), padding=0),
        Trial(
            spec=_of(decode, RAGGED, ones, "decode float32", dtype="float32", page_dtype="float32"),
            padding=0,
        ),
        Trial(
            spec=_of(decode, RAGGED, ones, "decode float16", dtype="float16", page_dtype="float16"),
            padding=0,
        ),
        Trial(
            spec=_of(decode, RAGGED, ones, "decode int8", page_dtype="int8"),
            padding=0,
            interpreted=True,
        ),
        Trial(spec=_of(decode, RAGGED, ones, "decode uint8", page_dtype="uint8"), padding=0),
        Trial(spec=_of(decode, RAGGED, ones, "decode softcap"), padding=0, logit_softcap=5.0),
        Trial(
            spec=_of("qwen2-0.5b decode 64x2048", RAGGED, ones, "decode group 7 width 64"),
            padding=0,
        ),
        Trial(spec=_of("gpt2 decode 64x512", RAGGED, ones, "decode group 1 width 64"), padding=0),
        Trial(spec=_of(decode, RAGGED, ones, "decode width 96", head_dim=96), padding=0),
        Trial(spec=_of(decode, RAGGED, ones, "decode blocks of 128", block_size=128), padding=0),
        Trial(spec=_of(decode, RAGGED, ones, "decode blocks of 8", block_size=8), padding=0),
        Trial(
            spec=_of(
                "mistral-7b decode 64x8192", RAGGED, ones, "decode window", sliding_window=500
            ),
            padding=0,
            interpreted=True,
        ),
        Trial(
            spec=_of(
                "gpt-oss-20b decode 64x2048",
                RAGGED,
                ones,
                "decode sinks window",
                sliding_window=128,
            ),
            padding=0,
            interpreted=True,
        ),
    ]


def _chunks_and_drafts() -> list[Trial]:
    chunk = "llama-3-8b chunk 512+3584"
    empty = ((5, 700, 0, 300, 0), (5, 1, 0, 130, 0))
    return [
        Trial(
            spec=_of("gpt-oss-20b chunk 2048+2048", (1500, 512), (500, 512), "chunks sinks window")
        ),
        Trial(spec=_of(chunk, (1500, 512), (500, 512), "chunks")),
        Trial(
            spec=_of(
                chunk,
                (1500, 512),
                (500, 512),
                "chunks float32",
                dtype="float32",
                page_dtype="float32",
            )
        ),
        Trial(
            spec=_of(chunk, (1500, 512), (500, 512), "chunks uint8 softcap", page_dtype="uint8"),
            logit_softcap=5.0,
        ),
        Trial(spec=_of(chunk, (1500, 512), (500, 512), "chunks window", sliding_window=300)),
        Trial(spec=_of("opt-13b chunk 2048+0", (600,), (600,), "chunk group 1")),
        Trial(spec=_of(chunk, *empty, "mixed, empty rows"), interpreted=True),
        Trial(
            spec=_of("llama-3-8b verify chain 16x8", RAGGED[1:], (9, 9, 9, 4, 1), "verify chain")
        ),
        Trial(
            spec=_of("llama-3-8b verify tree 16x16", RAGGED[1:], (16, 9, 17, 4, 1), "verify tree"),
            interpreted=True,
        ),
        Trial(
            spec=_of(
                "llama-3-8b verify tree 16x63",
                RAGGED[1:],
                (7, 9, 9, 64, 1),
                "verify wide tree int8",
                page_dtype="int8",
            )
        ),
    ]


def check(backend: str, trial: Trial, run: Run) -> Finding:
    """Compares a backend with float64 on a trial.

    Args:
        backend: The kernel set, for the name.
        trial: The trial.
        run: Runs the backend on a case.

    Returns:
        A failure where an error is above the tolerance or `compared` reports a problem.

    Raises:
        LeftOut: The backend refuses the call.
    """
    case = make_case(
        trial.spec, padding=trial.padding, poison=True, logit_softcap=trial.logit_softcap, seed=1
    )
    name = f"parity {backend}: {trial.spec.name}"
    try:
        got_TNH = np.asarray(run(case)).astype(np.float64)
    except NotImplementedError as refusal:
        raise LeftOut(str(refusal)) from refusal
    want_TNH, size_TNH = oracle.attention(case)
    tolerance = TOLERANCE[trial.spec.dtype]
    error, problems = compare(got_TNH, want_TNH, size_TNH)
    if error > tolerance:
        problems.append(f"error {error:.2e} is more than {tolerance:.0e}")
    data = {"error": error, "tolerance": tolerance, "backend": backend, "trial": trial.spec.name}
    summary = "; ".join(problems) or f"error {error:.1e}, tolerance {tolerance:.0e}"
    return Finding(name, FAILED if problems else PASSED, summary, data=data)


def compare(
    got_TNH: np.ndarray, want_TNH: np.ndarray, size_TNH: np.ndarray
) -> tuple[float, list[str]]:
    """Returns the largest error, and the problems that no tolerance allows.

    These are numbers that are not finite, and values other than zero where nothing is seen.
    """
    problems = []
    if not np.isfinite(got_TNH).all():
        problems.append(f"{int((~np.isfinite(got_TNH)).sum())} outputs are not finite")
    nothing_T = ~(size_TNH > 0).any(axis=(1, 2))
    if np.any(got_TNH[nothing_T]):
        problems.append("tokens that see nothing have outputs other than zero")
    error = np.abs(got_TNH - want_TNH) / np.where(size_TNH > 0, size_TNH, 1.0)
    return float(np.max(np.nan_to_num(error, nan=np.inf, posinf=np.inf), initial=0.0)), problems


def findings(backend: str, *, interpret: bool, small: bool) -> Iterator[Finding]:
    """Yields the findings of one backend; in small, of the few trials for an interpreter, cut."""
    for trial in trials():
        if small and not trial.interpreted:
            continue
        trial = trial.cut() if small else trial
        yield judge(
            f"parity {backend}: {trial.spec.name}",
            functools.partial(_check, backend, trial, interpret),
        )


def _check(backend: str, trial: Trial, interpret: bool) -> Finding:
    return check(backend, trial, lambda case: case.run(backend, interpret=interpret))
