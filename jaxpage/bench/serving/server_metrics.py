"""Reads a server's /metrics during a measurement: KV pool, batch, preemptions, sharing, acceptance.

jaxpage and vLLM name them alike except for the prefix. A server without these metrics adds nothing
to a result.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping
from time import perf_counter
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from jaxpage.bench.serving.http_client import Client

POLL_SECONDS = 0.25
_PREFIXES = ("jaxpage_", "vllm:")
_GAUGES = (
    "kv_cache_usage_perc",
    "num_requests_running",
    "num_requests_waiting",
    "kv_saved_by_sharing_perc",
)
_COUNTERS = {"num_preemptions": "num_preemptions_total", "compiles_during_run": "compile_total"}
_RATIOS = {
    "prefix_cache_hit_rate": ("prefix_cache_hits_total", "prefix_cache_queries_total"),
    "draft_acceptance_rate": (
        "spec_decode_num_accepted_tokens_total",
        "spec_decode_num_draft_tokens_total",
    ),
}


class MetricsPoller:
    """Asks a server for its metrics four times a second, while a `with` block runs."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._samples: list[tuple[float, Mapping[str, float]]] = []

    async def __aenter__(self) -> MetricsPoller:
        self._start = perf_counter()
        await self._read_all()
        self._polling = asyncio.ensure_future(self._poll())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._polling.cancel()
        await asyncio.gather(self._polling, return_exceptions=True)
        await self._read_all()

    def as_dict(self) -> dict[str, Any]:
        """Returns counts over the run, and means and maxima of its samples, if there are any."""
        if not self._samples:
            return {}
        _, first = self._samples[0]
        _, last = self._samples[-1]
        # Nothing runs at the first and the last sample, so a run shorter than a poll has no means.
        during = self._samples[1:-1]
        figures: dict[str, Any] = {}
        series: dict[str, list[float]] = {"seconds": [seconds for seconds, _ in during]}
        for name in _GAUGES:
            if name in last and during:
                series[name] = [sample.get(name, 0.0) for _, sample in during]
                figures |= {
                    f"mean_{name}": sum(series[name]) / len(series[name]),
                    f"max_{name}": max(series[name]),
                }
        for name, counter in _COUNTERS.items():
            if counter in last:
                figures[name] = int(last[counter] - first.get(counter, 0.0))
        for name, pair in _RATIOS.items():
            part, total = (last.get(counter, 0.0) - first.get(counter, 0.0) for counter in pair)
            if total:
                figures[name] = part / total
        if during and figures:
            figures["server_series"] = series
        return figures

    async def _poll(self) -> None:
        while self._samples:  # empty if the first look found no metrics
            await asyncio.sleep(POLL_SECONDS)
            await self._read_all()

    async def _read_all(self) -> None:
        text = await self._client.text("/metrics")
        try:
            values = parse(text or "")
        except ValueError:
            return
        if values:
            self._samples.append((perf_counter() - self._start, values))


def parse(text: str) -> dict[str, float]:
    """Returns the values in Prometheus' text format by name without prefix, summed over labels.

    A name with several prefixes has the value of one of them: jaxpage's server also gives some of
    its values under vLLM's names.
    """
    values: dict[str, dict[str, float]] = {prefix: defaultdict(float) for prefix in _PREFIXES}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            for prefix in _PREFIXES:
                if sample.name.startswith(prefix):
                    values[prefix][sample.name.removeprefix(prefix)] += sample.value
    # The last one counts, which is jaxpage's own prefix.
    return {name: value for prefix in reversed(_PREFIXES) for name, value in values[prefix].items()}
