"""How long requests take, as histograms with vLLM's names. All times are of `time.monotonic`, of one process."""

from __future__ import annotations

from typing import Any

from jaxpage.engine.histogram import SECONDS, TOKENS, Histogram
from jaxpage.outputs import RequestMetrics
from jaxpage.step.request import SequenceGroup


class Latencies:
    """The times of all steps, of all tokens, and of the requests that ended by themselves: not of those that failed or were aborted."""

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
        """A step gave a request one token or more."""
        if metrics.last_token_time is None:
            metrics.first_token_time = now
            self._time_to_first_token.observe(now - metrics.arrival_time)
        else:
            self._inter_token_latency.observe(now - metrics.last_token_time)
        metrics.last_token_time = now

    def finished(self, group: SequenceGroup, metrics: RequestMetrics) -> None:
        """A request has ended."""
        if {sequence.finish_reason for sequence in group.sequences} - {"stop", "length"}:
            return
        scheduled, first, last = metrics.first_scheduled_time, metrics.first_token_time, metrics.last_token_time
        if scheduled is None or first is None or last is None or metrics.finished_time is None:
            return
        num_tokens = [sequence.num_output_tokens for sequence in group.sequences]
        self._end_to_end.observe(metrics.finished_time - metrics.arrival_time)
        self._queue.observe(scheduled - metrics.arrival_time)
        self._prefill.observe(first - scheduled)
        self._decode.observe(last - first)
        self._prompt_tokens.observe(len(group.request.prompt_token_ids))
        self._generation_tokens.observe(sum(num_tokens))
        if (longest := max(num_tokens)) > 1:
            self._time_per_output_token.observe((last - first) / (longest - 1))

    def snapshot(self) -> dict[str, Any]:
        """Under the names of the public interface."""
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
