"""What the pool held over time: a few samples of its split, however long it runs, and the report that is made of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from jaxpage.memory.memory_split import MemorySplit


@dataclass(frozen=True)
class MemorySample:
    """What the pool held during one step, and what it is taken to have held until the next sample."""

    step: int  # how many steps came before, since the start
    seconds: float  # that those took: time between steps, when nothing runs, does not count
    split: MemorySplit


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """What a KV pool held over some steps. Means are over the time that the steps took."""

    num_blocks: int  # that can be handed out
    block_size: int
    num_steps: int
    seconds: float
    peak_blocks: int  # most blocks in use, of all steps and not only those sampled
    num_preemptions: int
    samples: tuple[MemorySample, ...]

    @property
    def mean_shares(self) -> dict[str, float]:
        """The four kinds as shares of the pool, 0 to 1 in sum; no step, no shares."""
        shares: dict[str, float] = {}
        weighted = list(self._weighted())
        total = sum(weight for _, weight in weighted)
        for split, weight in weighted:
            for kind, slots in split.kinds.items():
                shares[kind] = shares.get(kind, 0.0) + weight / total * slots / split.num_slots
        return shares

    @property
    def saved_by_sharing(self) -> float:
        """Blocks saved by sharing / blocks without sharing, 0 to 1, both summed up over time."""
        weighted = list(self._weighted())
        unshared = sum(weight * split.unshared_blocks for split, weight in weighted)
        return sum(weight * split.saved_blocks for split, weight in weighted) / unshared if unshared else 0.0

    def _weighted(self) -> Iterator[tuple[MemorySplit, float]]:
        """The samples with the seconds that each stands for; alike if no time has passed."""
        times = [*(sample.seconds for sample in self.samples), self.seconds]
        for sample, (start, end) in zip(self.samples, itertools.pairwise(times), strict=True):
            yield sample.split, end - start if self.seconds else 1.0

    def as_dict(self) -> dict[str, Any]:
        """The summary, without the samples, for JSON. Shares are 0 to 1."""
        return {
            "num_blocks": self.num_blocks,
            "block_size": self.block_size,
            "num_steps": self.num_steps,
            "seconds": self.seconds,
            "mean_shares": {kind.replace(" ", "_"): share for kind, share in self.mean_shares.items()},
            "peak_blocks": self.peak_blocks,
            "saved_by_sharing": self.saved_by_sharing,
            "num_preemptions": self.num_preemptions,
        }

    def __str__(self) -> str:
        rows = [(kind, f"{share:.1%}") for kind, share in self.mean_shares.items()]
        rows += [
            ("peak use", f"{self.peak_blocks / self.num_blocks:.1%}"),
            ("saved by sharing", f"{self.saved_by_sharing:.1%}"),
            ("preemptions", f"{self.num_preemptions}"),
        ]
        pool = f"KV memory, mean of {self.num_steps:,} steps: {self.num_blocks:,} blocks of {self.block_size} slots"
        return "\n".join([pool, *(f"{name:<24}{value:>10}" for name, value in rows)])


class MemoryHistory:
    """Samples every k-th step, with k = 1 at first; when the samples are many, every other one goes and k doubles.

    So their number is bounded, and whenever the number of steps doubles, the block tables were walked max_samples / 2 times more.
    """

    def __init__(self, max_samples: int = 512) -> None:
        """Raises ValueError unless `max_samples` is even and positive: thinning keeps the steps that k divides."""
        if max_samples < 2 or max_samples % 2:
            raise ValueError(f"{max_samples=} must be an even number from 2")
        self._max_samples = max_samples
        self._samples: list[MemorySample] = []
        self._interval = 1
        self._num_steps = 0
        self._seconds = 0.0
        self._peak_blocks = 0
        self._num_preemptions = 0

    def begin(self, usage: Callable[[], MemorySplit], *, used_blocks: int, num_preempted: int) -> None:
        """A step was planned and has its blocks. `usage` is called only if the step is sampled."""
        self._peak_blocks = max(self._peak_blocks, used_blocks)
        self._num_preemptions += num_preempted
        if self._num_steps % self._interval:
            return
        if self._samples and self._samples[-1].step == self._num_steps:  # of a step that failed
            self._samples.pop()
        if len(self._samples) == self._max_samples:
            del self._samples[1::2]
            self._interval *= 2
        self._samples.append(MemorySample(self._num_steps, self._seconds, usage()))

    def end(self, seconds: float) -> None:
        """The step has happened, and took that long."""
        self._num_steps += 1
        self._seconds += seconds

    def report(self, *, num_blocks: int, block_size: int) -> MemoryReport:
        """What was seen so far, of a pool of `num_blocks` usable blocks."""
        return MemoryReport(
            num_blocks=num_blocks,
            block_size=block_size,
            num_steps=self._num_steps,
            seconds=self._seconds,
            peak_blocks=self._peak_blocks,
            num_preemptions=self._num_preemptions,
            samples=tuple(self._samples),
        )
