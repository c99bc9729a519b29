"""Keeps a bounded number of samples of the pools over time, and makes a report of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from jaxpage.memory.memory_split import MemorySplit


@dataclass(frozen=True)
class MemorySample:
    """The split of the pools in one step, taken for that of all steps up to the next sample.

    Attributes:
        step: The number of steps before it.
        seconds: The time that those steps took. Time between steps, when nothing runs, is left out.
        split: What the slots held.
    """

    step: int
    seconds: float
    split: MemorySplit


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """The use of the KV pools over some steps. Means are weighted by the time that steps took.

    Attributes:
        num_blocks: The number of blocks that can be handed out.
        block_size: The slots of a block.
        num_steps: The number of steps.
        seconds: The time that the steps took.
        peak_blocks: The most blocks that were used in a step, sampled or not.
        num_preemptions: The number of preemptions.
        samples: The samples, in order of time.
    """

    num_blocks: int
    block_size: int
    num_steps: int
    seconds: float
    peak_blocks: int
    num_preemptions: int
    samples: tuple[MemorySample, ...]

    @property
    def mean_shares(self) -> dict[str, float]:
        """Returns the share of each kind of slots; they add up to 1, or there was no step."""
        shares: dict[str, float] = {}
        weighted = list(self._with_weights())
        total = sum(weight for _, weight in weighted)
        for split, weight in weighted:
            for kind, slots in split.kinds.items():
                shares[kind] = shares.get(kind, 0.0) + weight / total * slots / split.num_slots
        return shares

    @property
    def saved_by_sharing(self) -> float:
        """Returns the share of blocks, 0 to 1, that sharing saved over all the time."""
        weighted = list(self._with_weights())
        unshared = sum(weight * split.unshared_blocks for split, weight in weighted)
        savings = sum(weight * split.saved_blocks for split, weight in weighted)
        return savings / unshared if unshared else 0.0

    def _with_weights(self) -> Iterator[tuple[MemorySplit, float]]:
        """Returns each split with the seconds until the next one, or 1.0 if no time has passed."""
        times = [*(sample.seconds for sample in self.samples), self.seconds]
        for sample, (start, end) in zip(self.samples, itertools.pairwise(times), strict=True):
            yield sample.split, end - start if self.seconds else 1.0

    def as_dict(self) -> dict[str, Any]:
        """Returns the summary, without the samples, for JSON; shares are 0 to 1."""
        shares = {kind.replace(" ", "_"): share for kind, share in self.mean_shares.items()}
        return {
            "num_blocks": self.num_blocks,
            "block_size": self.block_size,
            "num_steps": self.num_steps,
            "seconds": self.seconds,
            "mean_shares": shares,
            "peak_blocks": self.peak_blocks,
            "saved_by_sharing": self.saved_by_sharing,
            "num_preemptions": self.num_preemptions,
        }

    def __str__(self) -> str:
        """Returns the summary as a table."""
        rows = [(kind, f"{share:.1%}") for kind, share in self.mean_shares.items()]
        rows += [
            ("peak use", f"{self.peak_blocks / self.num_blocks:.1%}"),
            ("saved by sharing", f"{self.saved_by_sharing:.1%}"),
            ("preemptions", f"{self.num_preemptions}"),
        ]
        pool = f"{self.num_blocks:,} blocks of {self.block_size} slots"
        title = f"KV memory, mean of {self.num_steps:,} steps: {pool}"
        return "\n".join([title, *(f"{name:<24}{value:>10}" for name, value in rows)])


class MemoryHistory:
    """Samples every k-th step, where k is 1 at first and doubles when there are many samples.

    Every second sample is dropped then. So the number of samples is bounded, and the block tables
    are walked max_samples / 2 times more whenever the number of steps doubles.
    """

    def __init__(self, max_samples: int = 512) -> None:
        """Begins without samples.

        Args:
            max_samples: The most samples that are kept.

        Raises:
            ValueError: `max_samples` is odd or not positive. With an odd number the step after a
                thinning would not be a multiple of the new k.
        """
        if max_samples < 2 or max_samples % 2:
            raise ValueError(f"{max_samples=} must be an even number from 2")
        self._max_samples = max_samples
        self._samples: list[MemorySample] = []
        self._interval = 1
        self._num_steps = 0
        self._seconds = 0.0
        self._peak_blocks = 0
        self._num_preemptions = 0

    def begin(
        self,
        usage: Callable[[], MemorySplit],
        *,
        used_blocks: int,
        num_preempted: int,
    ) -> None:
        """Notes that a step was planned and has its blocks.

        Args:
            usage: Gives the split; it is called only if the step is sampled.
            used_blocks: The number of used blocks.
            num_preempted: The number of groups that were preempted for the step.
        """
        self._peak_blocks = max(self._peak_blocks, used_blocks)
        self._num_preemptions += num_preempted
        if self._num_steps % self._interval:
            return
        if self._samples and self._samples[-1].step == self._num_steps:
            self._samples.pop()  # the sample of a step that failed
        if len(self._samples) == self._max_samples:
            del self._samples[1::2]
            self._interval *= 2
        self._samples.append(MemorySample(self._num_steps, self._seconds, usage()))

    def end(self, seconds: float) -> None:
        """Notes that the step has happened, and how long it took."""
        self._num_steps += 1
        self._seconds += seconds

    def report(self, *, num_blocks: int, block_size: int) -> MemoryReport:
        """Returns what was seen so far.

        Args:
            num_blocks: The number of blocks that the pools can hand out.
            block_size: The slots of a block.
        """
        return MemoryReport(
            num_blocks=num_blocks,
            block_size=block_size,
            num_steps=self._num_steps,
            seconds=self._seconds,
            peak_blocks=self._peak_blocks,
            num_preemptions=self._num_preemptions,
            samples=tuple(self._samples),
        )
