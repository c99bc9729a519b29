"""Finds tiles for each `Shape`: those with the least time over all specs of that Shape together.

The tuner sums each time divided by the least time that its spec could take, so that a batch of one
counts as much as a batch of 256. One choice serves all specs, because it must not depend on how
many rows a call has (path independence). From a start the tuner goes through the fields, keeps the
fastest value of each, and begins anew until nothing is faster or time is up. This tries a few dozen
candidates per Shape, where the whole grid has thousands.
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
from tools.lab.kernel_lab.bounds import Ceilings, work
from tools.lab.kernel_lab.inspection.compiled_cases import attention_case
from tools.lab.kernel_lab.kernel_cases import Case, label, make_case, shape_of_spec
from tools.lab.kernel_lab.specs import Spec
from tools.lab.kernel_lab.timing import Program, compile_case, num_layers, time_program

# Returns the number to minimise; raises where the tiles do not compile.
Measure = Callable[[Spec, Tiles], float]

VALUES: dict[str, tuple[int, ...]] = {  # the fields in the order in which they are tried
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
# For each kind of step, a walk also begins from these changes of the set's rule.
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
    """Holds what was found for one Shape.

    Attributes:
        shape: The Shape.
        seconds: For each tiles, the sum of the measure over the specs; infinite where one failed.
        of_spec: For each tiles, the parts of the sum.
        failures: For each tiles that failed, the reason.
        finished: False if time was up.
    """

    shape: Shape
    seconds: dict[Tiles, float] = field(default_factory=dict)
    of_spec: dict[Tiles, dict[Spec, float]] = field(default_factory=dict)
    failures: dict[Tiles, str] = field(default_factory=dict)
    finished: bool = False

    @property
    def best(self) -> Tiles | None:
        """Returns the fastest tiles; None where nothing ran."""
        tiles = min(self.seconds, key=self.seconds.__getitem__, default=None)
        return None if tiles is None or math.isinf(self.seconds[tiles]) else tiles


def fastest(tuned: Mapping[str, Tuned]) -> str | None:
    """Returns the name of the kernel set that is fastest with its best tiles.

    The sets were tuned for one Shape, and are compared over the specs that all of them take. None
    is returned where fewer than two ran or where they have no spec in common.
    """
    ran = {name: each.of_spec[each.best] for name, each in tuned.items() if each.best is not None}
    common = set.intersection(*map(set, ran.values())) if len(ran) > 1 else set()
    return min(ran, key=lambda name: sum(ran[name][spec] for spec in common)) if common else None


def starts(backend: str, shape: Shape) -> list[Tiles]:
    """Returns the tiles that the walk of a kernel set begins from, the set's rule first."""
    rule = RULES[backend](shape)
    candidates = [rule]
    for changes in STARTS[shape.kind]:
        with contextlib.suppress(ValueError):  # no kernel could take the tiles
            candidates.append(dataclasses.replace(rule, **changes))
    return candidates


def refusal(backend: str, spec: Spec) -> str | None:
    """Returns why a kernel set does not take a spec, or None. Nothing is compiled."""
    case = attention_case(spec, backend)
    try:
        jax.eval_shape(case.function, *case.arguments)
    except NotImplementedError as refused:
        return str(refused)
    return None


def by_shape(specs: Iterable[Spec]) -> dict[Shape, list[Spec]]:
    """Groups the specs by their Shape."""
    groups: dict[Shape, list[Spec]] = {}
    for spec in specs:
        groups.setdefault(shape_of_spec(spec), []).append(spec)
    return groups


def neighbours(tiles: Tiles, name: str) -> list[Tiles]:
    """Returns the checked tiles that differ in this field, and in the fields that must go with it.

    A split is whole turns of the loop over the context, so it changes with the length of a turn.
    """
    candidates = []
    for value in VALUES[name]:
        if name == "split_context" and tiles.max_splits == 1:
            continue  # nothing is split
        changes = [{name: value}]
        if name == "context" and tiles.split_context % value:
            changes = [
                {name: value, "split_context": max(value, tiles.split_context // value * value)}
            ]
        if name == "context":  # longer turns leave shared memory for fewer stages
            changes.append({**changes[0], "num_stages": 2})
        if name == "query_rows":  # more rows need more warps, and Mosaic takes nothing else
            changes.append({name: value, "num_warps": value // 16})
        for change in changes:
            with contextlib.suppress(ValueError):  # no kernel could take the tiles
                candidates.append(dataclasses.replace(tiles, **change))
    return list(dict.fromkeys(candidates))


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

    Args:
        shape: The Shape.
        specs: The specs of that Shape.
        measure: Measures tiles on a spec.
        starts: The tiles to begin from.
        prefetch: Is told what will be measured next.
        deadline: The time of `clock` at which the walk ends.
        clock: Returns the time.
        progress: Called with a line of text after each candidate.
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
            best = min(tuned.seconds, key=tuned.seconds.__getitem__)
            waiting = [tiles for tiles in neighbours(best, name) if tiles not in tuned.seconds]
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
    """Sums the measure over the specs; tiles that raise anything count as infinitely slow.

    The other candidates go on.
    """
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
    """Measures on this process's device: has `measure` and `prefetch` for `tune`.

    Candidates compile in threads ahead of their turn.
    """

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
        """Starts to compile the candidates for all specs."""
        self._coming = {
            (spec, tiles): self._pool.submit(self._compiled, spec, tiles)
            for tiles in candidates
            for spec in self.cases
        }

    def measure(self, spec: Spec, tiles: Tiles) -> float:
        """Returns a call's time divided by the least time that it could take."""
        # Threads that trace would delay the dispatch of the timed calls.
        wait(self._coming.values())
        coming = self._coming.pop((spec, tiles), None)
        program = coming.result() if coming else self._compiled(spec, tiles)
        return time_program(
            program, self.cases[spec], rounds=5, limit_s=0.5
        ).seconds / self._minimum(spec)

    def close(self) -> None:
        """Stops the threads, and drops what has not begun to compile."""
        self._pool.shutdown(cancel_futures=True)

    def _compiled(self, spec: Spec, tiles: Tiles) -> Program:
        return compile_case(
            self.cases[spec],
            backend=self.backend,
            tiles=tiles,
            interpret=self.interpret,
            min_seconds=None if self.interpret else self._minimum(spec),
            round_s=0.01,
        )

    def _minimum(self, spec: Spec) -> float:
        return self.ceilings.min_seconds(work(spec))
