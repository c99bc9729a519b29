"""Writes the answer of `/metrics`.

It has the values of `Engine.stats` under Prometheus' names, and the counters of the server.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from jaxpage import __version__
from jaxpage.serving.metrics.metric_texts import HELP, LABELS
from jaxpage.settings.from_vllm import answers

PREFIX = "jaxpage_"

# The set is closed: if clients could choose a label's values, they could fill the memory of every
# program that stores the metrics.
REJECTIONS = (
    *("invalid", "unauthorized", "not_found", "too_large", "timeout"),
    *(
        "queue_full",
        "busy",
        "too_many_connections",
        "not_ready",
        "unhealthy",
        "shutting_down",
        "other",
    ),
)
ABORTIONS = ("disconnect", "deadline", "slow_reader", "shutdown", "error", "other")

# This name ends like that of a counter, but is the number of blocks that there are.
_GAUGES = frozenset({"num_blocks_total"})


class ServerMetrics:
    """Keeps the counters of one server; any thread may count.

    Attributes:
        content_type: The media type of the exposition.
    """

    content_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self, model_name: str, block_size: int = 0):
        """Makes counters that are all 0.

        Args:
            model_name: The value of the label `model_name`.
            block_size: The slots of a KV block, which routers read under vLLM's names; 0 leaves
                out the metrics under these names.
        """
        self._model_name = model_name
        self._block_size = block_size
        self._lock = threading.Lock()
        self._rejected = dict.fromkeys(REJECTIONS, 0)
        self._aborted = dict.fromkeys(ABORTIONS, 0)

    def rejected(self, reason: str) -> None:
        """Counts a request that was answered with an error before the engine had it.

        A reason that is not in `REJECTIONS` counts as "other".
        """
        with self._lock:
            self._rejected[reason if reason in self._rejected else "other"] += 1

    def aborted(self, reason: str) -> None:
        """Counts a request that was ended before it had finished.

        A reason that is not in `ABORTIONS` counts as "other".
        """
        with self._lock:
            self._aborted[reason if reason in self._aborted else "other"] += 1

    def exposition(self, stats: Mapping[str, Any]) -> bytes:
        """Returns all metrics in Prometheus' text format.

        Args:
            stats: The values of `Engine.stats`; empty if the engine gives none.
        """
        return join_expositions([(self, stats)])

    def families(self, stats: Mapping[str, Any]) -> list[Metric]:
        """Returns the metrics of this server's model; for `stats` see `exposition`."""
        with self._lock:
            facts = {
                **stats,
                "rejected_total": dict(self._rejected),
                "aborted_total": dict(self._aborted),
            }
        theirs = _under_vllm_names(stats, self._model_name, self._block_size)
        return [*_families(facts, self._model_name), *theirs]


def join_expositions(each: Iterable[tuple[ServerMetrics, Mapping[str, Any]]]) -> bytes:
    """Returns the metrics of several models in Prometheus' text format, each metric once.

    Args:
        each: The counters of each model, with the values of its `Engine.stats`.
    """
    build = GaugeMetricFamily(PREFIX + "build_info", "What runs here", labels=("version",))
    build.add_metric((__version__,), 1)
    joined: dict[str, Metric] = {}
    for metrics, stats in each:
        for family in metrics.families(stats):
            if (first := joined.setdefault(family.name, family)) is not family:
                first.samples += family.samples
    registry = CollectorRegistry()
    registry.register(_Collected([*joined.values(), build]))
    # It registers itself.
    ProcessCollector(registry=registry)
    return generate_latest(registry)


class _Collected:
    """A collector of metric families that are made already."""

    def __init__(self, families: Iterable[Metric]):
        self._families = list(families)

    def collect(self) -> Iterator[Metric]:
        return iter(self._families)


def _families(stats: Mapping[str, Any], model_name: str, prefix: str = PREFIX) -> Iterator[Metric]:
    for name, value in stats.items():
        if isinstance(value, Mapping) and "buckets" in value:
            histogram = HistogramMetricFamily(prefix + name, HELP[name], labels=("model_name",))
            histogram.add_metric((model_name,), list(value["buckets"].items()), value["sum"])
            yield histogram
            continue
        family = (
            CounterMetricFamily
            if name.endswith("_total") and name not in _GAUGES
            else GaugeMetricFamily
        )
        label = (LABELS[name],) if isinstance(value, Mapping) else ()
        metric = family(prefix + name, HELP[name], labels=("model_name", *label))
        for key, number in value.items() if isinstance(value, Mapping) else [(None, value)]:
            metric.add_metric((model_name, *([] if key is None else [str(key)])), number)
        yield metric


def _under_vllm_names(
    stats: Mapping[str, Any], model_name: str, block_size: int
) -> Iterator[Metric]:
    """Yields the metrics that routers and vLLM's dashboard read, under vLLM's names.

    Such a router is the endpoint picker of the Gateway API.
    """
    if not stats or not block_size:
        return
    same = (name for name, answer in answers("metrics").items() if answer.kind == "same")
    theirs = {name: stats[name] for name in same if name in stats}
    preemptions = stats["num_preemptions_total"]
    theirs["num_preemptions_total"] = sum(preemptions.values())  # vLLM has no label for the mode
    yield from _families(theirs, model_name, "vllm:")
    labels = ("model_name", "block_size", "num_gpu_blocks")
    cache = GaugeMetricFamily("vllm:cache_config_info", "The size of the KV cache", labels=labels)
    cache.add_metric((model_name, str(block_size), str(stats["num_blocks_total"])), 1)
    yield cache
