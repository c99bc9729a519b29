"""Counts how long requests take, in histograms with vLLM's names.

All times are those of `time.monotonic` in one process.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from jaxpage.outputs import RequestMetrics
from jaxpage.step.request import SequenceGroup

# The bounds are 1, 2, 5, 10, ... They reach from a tenth of a millisecond, which is a step of a
# small model, to longer than anybody waits; and to a million tokens.
SECONDS = (*(mantissa * 10.0**power for power in range(-4, 3) for mantissa in (1, 2, 5)), 1000.0)
TOKENS = (*(mantissa * 10.0**power for power in range(6) for mantissa in (1, 2, 5)), 1e6)


class Histogram:
    """Counts how many values are at most each bound, and adds the values up.

    The bounds are fixed, as Prometheus wants it.
    """

    def __init__(self, bounds: Sequence[float]):
        # Rounded, so that a bound is 0.0002 and not 0.00020000000000000001.
        self._bounds = tuple(float(f"{bound:g}") for bound in bounds)
        self._counts = [0] * (len(bounds) + 1)  # the last one counts values above every bound
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Counts a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def snapshot(self) -> dict[str, Any]:
        """Returns `buckets`, `sum` and `count` of the values.

        `buckets` has the number of values up to and including each bound. Its key is the bound as
        Prometheus writes it.
        """
        total = 0
        buckets = {}
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            buckets[bound] = total
        return {"buckets": buckets, "sum": self._sum, "count": total}


class Latencies:
    """Holds the times of steps, of tokens, and of requests that ended by themselves.

    Requests that failed or were aborted are not counted.
    """

    def __init__(self) -> None:
        self.engine_step = Histogram(SECONDS)
        self._time_to_first_token = Histogram(SECONDS)
        self._inter_token_latency = Histogram(SECONDS)
        self._time_per_output_token = Histogram(SECONDS)
        self._end_to_end = Histogram(SECONDS)
        self._queue = Histogram(SECONDS)
        self._prefill = Histogram(SECONDS)
        self._decode = Histogram(SECONDS)
        self._prompt_tokens = Histogram(TOKENS)
        self._generation_tokens = Histogram(TOKENS)

    def has_tokens(self, metrics: RequestMetrics, now: float) -> None:
        """Notes that a step gave a request at least one token."""
        if metrics.last_token_time is None:
            metrics.first_token_time = now
            self._time_to_first_token.observe(now - metrics.arrival_time)
        else:
            self._inter_token_latency.observe(now - metrics.last_token_time)
        metrics.last_token_time = now

    def finished(self, group: SequenceGroup, metrics: RequestMetrics) -> None:
        """Notes that a request has ended."""
        if {sequence.finish_reason for sequence in group.sequences} - {"stop", "length"}:
            return
        scheduled = metrics.first_scheduled_time
        first = metrics.first_token_time
        last = metrics.last_token_time
        if scheduled is None or first is None or last is None or metrics.finished_time is None:
            return
        num_tokens = [sequence.num_output_tokens for sequence in group.sequences]
        self._end_to_end.observe(metrics.finished_time - metrics.arrival_time)
        self._queue.observe(scheduled - metrics.arrival_time)
        self._prefill.observe(first - scheduled)
        self._decode.observe(last - first)
        self._prompt_tokens.observe(len(group.request.prompt_token_ids))
        self._generation_tokens.observe(sum(num_tokens))
        if (max_length := max(num_tokens)) > 1:
            # The time of the first token is that of the prompt.
            self._time_per_output_token.observe((last - first) / (max_length - 1))

    def snapshot(self) -> dict[str, Any]:
        """Returns all histograms by their public names."""
        histograms = {
            "engine_step_seconds": self.engine_step,
            "time_to_first_token_seconds": self._time_to_first_token,
            "inter_token_latency_seconds": self._inter_token_latency,
            "request_time_per_output_token_seconds": self._time_per_output_token,
            "e2e_request_latency_seconds": self._end_to_end,
            "request_queue_time_seconds": self._queue,
            "request_prefill_time_seconds": self._prefill,
            "request_decode_time_seconds": self._decode,
            "request_prompt_tokens": self._prompt_tokens,
            "request_generation_tokens": self._generation_tokens,
        }
        return {name: histogram.snapshot() for name, histogram in histograms.items()}
