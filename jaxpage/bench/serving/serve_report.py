"""Makes the table of `bench serve`, which has vLLM's rows and more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxpage.tables import align

_ROWS = (
    ("Successful requests", "completed", "d"),
    ("Failed requests", "failed", "d"),
    ("Benchmark duration (s)", "duration", ".2f"),
    ("Total input tokens", "total_input_tokens", "d"),
    ("Total generated tokens", "total_output_tokens", "d"),
    ("Request rate asked for (req/s)", "request_rate", ".2f"),
    ("Request rate drawn (req/s)", "drawn_request_rate", ".2f"),
    ("Request rate sent (req/s)", "sent_request_rate", ".2f"),
    ("Request throughput (req/s)", "request_throughput", ".2f"),
    ("Request goodput (req/s)", "request_goodput", ".2f"),
    ("Output token throughput (tok/s)", "output_throughput", ".1f"),
    ("Total token throughput (tok/s)", "total_token_throughput", ".1f"),
    *(
        (f"{label} {title} (ms)", f"{key}_{name}_ms", ".2f")
        for title, name in (
            ("TTFT", "ttft"),
            ("TPOT", "tpot"),
            ("ITL", "itl"),
            ("E2EL", "e2el"),
            ("latency per token", "normalized_latency"),
        )
        for label, key in (("Mean", "mean"), ("Median", "median"), ("P90", "p90"), ("P99", "p99"))
    ),
    ("KV pool in use, mean", "mean_kv_cache_usage_perc", ".1%"),
    ("KV pool in use, most", "max_kv_cache_usage_perc", ".1%"),
    ("Requests running, mean", "mean_num_requests_running", ".1f"),
    ("Saved by sharing, mean", "mean_kv_saved_by_sharing_perc", ".1%"),
    ("Prompt tokens found in cache", "prefix_cache_hit_rate", ".1%"),
    ("Draft tokens accepted", "draft_acceptance_rate", ".1%"),
    ("Preemptions", "num_preemptions", "d"),
)


def table(measured: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Returns a table with a column for each run.

    A row that no run has is left out, such as those of a server without metrics.
    """
    rows = [["", *(name for name, _ in measured)]]
    for label, key, form in _ROWS:
        values = [result.get(key) for _, result in measured]
        if any(value is not None for value in values):
            rows.append(
                [label, *("-" if value is None else format(value, form) for value in values)]
            )
    return "\n".join(align(rows, num_words=1))


def rate_notes(result: Mapping[str, Any]) -> list[str]:
    """Returns a note if requests were sent more slowly than they arrived."""
    if result.get("request_rate_held", True):
        return []
    drawn = result["drawn_request_rate"]
    sent = result["sent_request_rate"]
    return [
        f"The request rate was not held: {drawn:.2f} requests/s arrived, {sent:.2f} were sent, up "
        "to "
        f"{result['max_lateness_ms']:.0f} ms late. Latencies count from the arrivals. Raise "
        "--max-concurrency, or run the client elsewhere"
    ]
