"""Draws a result of `bench serve`: latency over the request rate, or batch and KV pool over time.

It needs matplotlib.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure


def draw(results: Sequence[Mapping[str, Any]], *, title: str) -> Figure:
    """Returns a picture with one or two panels.

    The first shows latencies over the rates, if there are several. The second shows what the server
    reported during the last rate, if it reported anything.
    """
    series = results[-1].get("server_series", ())
    panels = [_latencies] * (len(results) > 1) + [_batch] * ("num_requests_running" in series)
    figure = Figure(figsize=(9.6, 4.2 * max(1, len(panels))), dpi=150, layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=13)
    for index, panel in enumerate(panels, start=1):
        panel(figure.add_subplot(len(panels), 1, index), results)
    return figure


def _latencies(axes: Any, results: Sequence[Mapping[str, Any]]) -> None:
    rates = [result.get("drawn_request_rate") or result["request_throughput"] for result in results]
    for label, style in (("mean", "-"), ("p99", ":")):
        for name, colour in (
            ("ttft", "#0072B2"),
            ("tpot", "#E69F00"),
            ("normalized_latency", "#D55E00"),
        ):
            # matplotlib draws no point for NaN.
            values = [result[f"{label}_{name}_ms"] or math.nan for result in results]
            axes.plot(
                rates,
                values,
                style,
                color=colour,
                marker="o",
                markersize=3,
                label=f"{name}, {label}",
            )
    axes.set_yscale("log")
    axes.set(xlabel="requests/s that were drawn", ylabel="ms (normalised: per output token)")
    axes.legend(frameon=False, fontsize=9, ncols=2)


def _batch(axes: Any, results: Sequence[Mapping[str, Any]]) -> None:
    series = results[-1]["server_series"]
    axes.plot(
        series["seconds"], series["num_requests_running"], color="#0072B2", label="requests running"
    )
    axes.set(
        xlabel=f"seconds; {results[-1]['request_throughput']:.2f} requests/s",
        ylabel="requests running",
        ylim=(0, None),
    )
    if "kv_cache_usage_perc" in series:
        other = axes.twinx()
        other.plot(
            series["seconds"],
            series["kv_cache_usage_perc"],
            color="#D55E00",
            label="KV pool in use",
        )
        other.set(ylabel="KV pool in use", ylim=(0, 1))
        other.legend(loc="upper right", frameon=False, fontsize=9)
    axes.legend(loc="upper left", frameon=False, fontsize=9)
