"""The Grafana dashboard asks for metrics, labels and forms that the server has."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxpage.engine.latencies import Latencies
from jaxpage.serving.metrics.metric_texts import HELP, LABELS
from jaxpage.serving.metrics.metrics import ServerMetrics

DASHBOARD = Path(__file__).parents[1] / "configs" / "grafana-dashboard.json"

_SELECTOR = re.compile(r"\b((?:jaxpage|process)_\w+)(?:\{([^}]*)\})?(\[\$__rate_interval\])?")


def samples() -> dict[str, tuple[str, set[str]]]:
    """Returns the type of the family of every series that the server tells, and its labels."""
    stats: dict[str, Any] = {
        name: {"x": 0} if name in LABELS else 0 for name in HELP
    } | Latencies().snapshot()
    families = text_string_to_metric_families(ServerMetrics("m").exposition(stats).decode())
    return {
        sample.name: (family.type, set(sample.labels))
        for family in families
        for sample in family.samples
    }


def expressions() -> list[tuple[str, str]]:
    dashboard = json.loads(DASHBOARD.read_text())
    panels = [
        (panel["title"], target["expr"])
        for panel in dashboard["panels"]
        for target in panel.get("targets", [])
    ]
    return panels + [
        (each["name"], each["definition"])
        for each in dashboard["templating"]["list"]
        if "definition" in each
    ]


def problems(expression: str) -> list[str]:
    """Returns what in a query would give an empty or a wrong picture."""
    known, metrics = samples(), []
    for name, labels, is_range in _SELECTOR.findall(expression):
        if name not in known:
            metrics.append(f"there is no {name}")
            continue
        kind, metric_labels = known[name]
        requested = set(re.findall(r"(\w+)=", labels)) | set(
            re.findall(r"by \((\w+)\)", expression)
        )
        metrics += [f"{name} has no label {label}" for label in requested - metric_labels]
        grows = kind == "counter" or (kind == "histogram" and not name.endswith("_created"))
        if is_range and not grows:
            metrics.append(f"{name} is a gauge, and has no rate")
    if "histogram_quantile" in expression and "by (le)" not in expression:
        metrics.append("a quantile needs le")
    return metrics


@pytest.mark.parametrize(
    ("title", "expression"),
    expressions(),
    ids=[f"{title}: {text}" for title, text in expressions()],
)
def test_queries_name_what_the_server_has(title, expression):
    assert _SELECTOR.search(expression) and not problems(expression)
    assert expression.count("(") == expression.count(")") and expression.count(
        "{"
    ) == expression.count("}")


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("sum(jaxpage_num_request_running)", "there is no jaxpage_num_request_running"),
        (
            "sum(rate(jaxpage_kv_free_slots{}[$__rate_interval]))",
            "jaxpage_kv_free_slots is a gauge",
        ),
        (
            "sum by (mode) (rate(jaxpage_rejected_total{}[$__rate_interval]))",
            "jaxpage_rejected_total has no label mode",
        ),
        ('jaxpage_compile_total{model="x"}', "jaxpage_compile_total has no label model"),
        (
            "histogram_quantile(0.5, rate(jaxpage_engine_step_seconds_bucket[$__rate_interval]))",
            "a quantile needs le",
        ),
    ],
)
def test_a_wrong_query_would_be_found(expression, problem):
    assert any(text.startswith(problem) for text in problems(expression))


def test_the_dashboard_can_be_imported_anywhere():
    """It has no fixed data source, every panel in its place, and ids that differ."""
    dashboard = json.loads(DASHBOARD.read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 15
    assert dashboard.get("id") is None, "Grafana gives the number"
    assert {panel["datasource"]["uid"] for panel in panels if panel["type"] != "row"} == {
        "${datasource}"
    }
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])
        }
        assert not cells & taken and max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells


def test_what_matters_is_on_it():
    requested = " ".join(text for _, text in expressions())
    shown = {name for name in HELP if re.search(rf"jaxpage_{name}(_bucket|_sum)?\b", requested)}
    assert set(HELP) - shown <= {
        *(
            "compile_seconds_total",
            "engine_steps_total",
            "prefix_cache_resumed_hits_total",
            "tokens_per_target_step",
        ),
        *("pictures_encoded_total", "encoder_cache_hits_total", "encoder_cache_bytes"),
        *(
            f"prefix_files_{what}_blocks_total"
            for what in ("written", "restored", "skipped", "dropped")
        ),
        *(
            "kv_saved_by_sharing_blocks",
            "spec_decode_num_drafts_total",
            "spec_decode_wasted_slots_total",
        ),
        *(
            "spec_decode_num_accepted_tokens_per_pos_total",
            "spec_decode_num_drafts_by_length_total",
        ),
        *("spec_decode_draft_seconds_total", "spec_decode_verify_seconds_total"),
    }
