"""Finds tiles for each `Shape`: the ones with the least time over all the specs of that Shape together.

The sum is of each time over the least time that its spec could take, so that a batch of one counts as much as a batch of 256. One
choice serves them all, because it must not depend on how many rows a call has (path independence). From a start the tuner goes through
the fields, keeps the fastest value of each, and begins anew until nothing is faster or time is up: a few dozen candidates per Shape,
where the whole grid has thousands.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import jax

from pallas_kernels.sets import SETS
from pallas_kernels.tiles import Shape, Tiles
from tools.kernel_lab.bounds import Ceilings, work
from tools.kernel_lab.inspection.compiled_cases import attention_case
from tools.kernel_lab.kernel_cases import Case, label, make_case, shape_of_spec
from tools.kernel_lab.specs import Spec
from tools.kernel_lab.timing import Program, compiled, num_layers, time_program

Measure = Callable[[Spec, Tiles], float]  # what is to be least; raises where it does not compile

VALUES: dict[str, tuple[int, ...]] = {  # in the order in which they are tried
    "context": (16, 32, 64, 128),
    "num_warps": (2, 4, 8),
    "query_rows": (16, 32, 64, 128),
    "num_stages": (1, 2, 3, 4, 5, 7),
    "max_splits": (1, 4, 8, 16, 32, 64),
    "split_context": (64, 128, 256, 512, 1024, 2048),
}
RULES: dict[str, Callable[[Shape], Tiles]] = {
    name: each.tiles for name, each in SETS.items() if each.tiles
}
# For each kind of step, what a walk also begins from: these changes of the set's rule.
STARTS: dict[str, tuple[dict[str, int], ...]] = {
    # Two programs of four warps fit on a multiprocessor, and one computes its softmax while the
    # other multiplies.
    "chunk": ({"query_rows": 64, "num_warps": 4},),
    # With few rows of a few thousand positions, shorter splits are needed to give every
    # multiprocessor a program.
    "decode": ({"split_context": 128}, {"split_context": 64, "max_splits": 32}),
    "verify": ({"split_context": 128}, {"split_context": 64, "max_splits": 32}),
}


@dataclass
class Tuned:
    """What was found for one Shape: `seconds[tiles]` summed over its specs as the measure gives it (infinite: it failed), `of_spec` with
    the parts of the sums, `failures` with the reasons."""

    shape: Shape
    seconds: dict[Tiles, float] = field(default_factory=dict)
    of_spec: dict[Tiles, dict[Spec, float]] = field(default_factory=dict)
    failures: dict[Tiles, str] = field(default_factory=dict)
    finished: bool = False  # False: time was up

    @property
    def best(self) -> Tiles | None:
        """The fastest, None where nothing ran."""
        tiles = min(self.seconds, key=self.seconds.__getitem__, default=None)
        return None if tiles is None or math.isinf(self.seconds[tiles]) else tiles


def fastest(tuned: Mapping[str, Tuned]) -> str | None:
    """Returns which of the kernel sets that were tuned for one Shape, by name, is fastest with its best tiles, over the specs that all of
    them take; None where fewer than two ran."""
    ran = {name: each.of_spec[each.best] for name, each in tuned.items() if each.best is not None}
    common = set.intersection(*map(set, ran.values())) if len(ran) > 1 else set()
    return min(ran, key=lambda name: sum(ran[name][spec] for spec in common)) if common else None


def starts(backend: str, shape: Shape) -> list[Tiles]:
    """Returns the tiles that the walk of a kernel set begins from, the set's rule first."""
    rule = RULES[backend](shape)
    found = [rule]
    for changes in STARTS[shape.kind]:
        with contextlib.suppress(ValueError):  # no kernel could take them
            found.append(dataclasses.replace(rule, **changes))
    return found


def refusal(backend: str, spec: Spec) -> str | None:
    """Returns why a kernel set does not take a spec, or None. Nothing is compiled."""
    case = attention_case(spec, backend)
    try:
        jax.eval_shape(case.function, *case.arguments)
    except NotImplementedError as refused:
        return str(refused)
    return None


def by_shape(specs: Iterable[Spec]) -> dict[Shape, list[Spec]]:
    groups: dict[Shape, list[Spec]] = {}
    for spec in specs:
        groups.setdefault(shape_of_spec(spec), []).append(spec)
    return groups


def neighbours(tiles: Tiles, name: str) -> list[Tiles]:
    """The checked tiles that differ in this field, and in what has to go with it: a split is whole turns of the loop over the context."""
    found = []
    for value in VALUES[name]:
        if name == "split_context" and tiles.max_splits == 1:
            continue  # nothing is split
        changes = [{name: value}]
        if name == "context" and tiles.split_context % value:
            changes = [
                {name: value, "split_context": max(value, tiles.split_context // value * value)}
            ]
        if name == "context":  # larger turns leave shared memory for fewer of them
            changes.append({**changes[0], "num_stages": 2})
        if name == "query_rows":  # more rows go with more warps, and Mosaic takes nothing else
            changes.append({name: value, "num_warps": value // 16})
        for change in changes:
            with contextlib.suppress(ValueError):  # no kernel could take them
                found.append(dataclasses.replace(tiles, **change))
    return list(dict.fromkeys(found))


def tune(
    shape: Shape,
    specs: Sequence[Spec],
    measure: Measure,
    starts: Sequence[Tiles],
    *,
    prefetch: Callable[[Sequence[Tiles]], None] = lambda _: None,
    deadline: float = math.inf,
    clock: Callable[[], float] = time.monotonic,
    progress: Callable[[str], None] = lambda _: None,
) -> Tuned:
    """Measures `starts`, then walks from the best of them.

    prefetch: is told what will be measured next. deadline: of `clock`.
    """
    tuned = Tuned(shape)

    def seconds(tiles: Tiles) -> float:
        if tiles not in tuned.seconds:
            tuned.seconds[tiles] = _sum(tuned, specs, measure, tiles)
            progress(f"{shape}: {len(tuned.seconds)} tried, {len(tuned.failures)} failed")
        return tuned.seconds[tiles]

    for tiles in starts:
        seconds(tiles)
    while clock() < deadline:
        before = min(tuned.seconds.values())
        for name in VALUES:
            here = min(tuned.seconds, key=tuned.seconds.__getitem__)
            waiting = [tiles for tiles in neighbours(here, name) if tiles not in tuned.seconds]
            prefetch(waiting)
            for tiles in waiting:
                if clock() >= deadline:
                    return tuned
                seconds(tiles)
        if min(tuned.seconds.values()) >= before:
            tuned.finished = True
            return tuned
    return tuned


def _sum(tuned: Tuned, specs: Sequence[Spec], measure: Measure, tiles: Tiles) -> float:
    """Whatever measuring raises is a reason not to take these tiles; the other candidates go on."""
    parts = tuned.of_spec.setdefault(tiles, {})
    for spec in specs:
        try:
            parts[spec] = measure(spec, tiles)
        except Exception as failure:
            lines = str(failure).strip().splitlines()
            tuned.failures[tiles] = (
                f"{label(spec)}: {type(failure).__name__}: {lines[0][:300] if lines else ''}"
            )
            return math.inf
    return sum(parts.values())


class OnDevice:
    """Measures on this process's device: `measure` and `prefetch` for `tune`. Candidates compile in threads ahead of their turn."""

    def __init__(
        self,
        backend: str,
        specs: Sequence[Spec],
        ceilings: Ceilings,
        *,
        interpret: bool = False,
        layers: int | None = None,
        threads: int = 8,
    ) -> None:
        self.backend, self.ceilings, self.interpret = backend, ceilings, interpret
        self.cases: dict[Spec, Case] = {
            spec: make_case(spec, layers=layers or num_layers(spec)) for spec in specs
        }
        self._pool = ThreadPoolExecutor(threads)
        self._coming: dict[tuple[Spec, Tiles], Future[Program]] = {}

    def prefetch(self, candidates: Sequence[Tiles]) -> None:
        self._coming = {
            (spec, tiles): self._pool.submit(self._compiled, spec, tiles)
            for tiles in candidates
            for spec in self.cases
        }

    def measure(self, spec: Spec, tiles: Tiles) -> float:
        """A call's time over the least that it could take."""
        wait(self._coming.values())  # threads that trace would delay the dispatch of what is timed
        coming = self._coming.pop((spec, tiles), None)
        program = coming.result() if coming else self._compiled(spec, tiles)
        return time_program(program, self.cases[spec], rounds=5, limit_s=0.5).seconds / self._least(
            spec
        )

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _compiled(self, spec: Spec, tiles: Tiles) -> Program:
        return compiled(
            self.cases[spec],
            backend=self.backend,
            tiles=tiles,
            interpret=self.interpret,
            least_seconds=None if self.interpret else self._least(spec),
            round_s=0.01,
        )

    def _least(self, spec: Spec) -> float:
        return self.ceilings.least_seconds(work(spec))
