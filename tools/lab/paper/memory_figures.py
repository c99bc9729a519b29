"""Shows what the slots hold and how many requests run at once: table 1, figures 2 and 13."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jaxpage.models.base import Family, model_weights
from jaxpage.models.parameters.weights import num_bytes
from jaxpage.models.registry import load_family
from tools.lab.paper.effort import Effort
from tools.lab.paper.results import Check, Figure, Interval, Panel, Row, Series
from tools.lab.paper.simulated_cases import (
    FASTER_TRANSFORMER,
    PAGED,
    SYSTEMS,
    Case,
    Outcome,
    Workload,
    run_case,
)

# The layers, heads and width of OPT's models. From the paper's table 1: the gigabytes of weights,
# the gigabytes for keys and values, and the thousands of slots.
SHAPES = {"OPT-13B": (40, 40, 5120), "OPT-66B": (64, 72, 9216), "OPT-175B": (96, 96, 12288)}
TABLE_1 = {"OPT-13B": (26, 12, 15.7), "OPT-66B": (132, 21, 9.7), "OPT-175B": (346, 264, 60.1)}
GIB = 2**30

KINDS = ("token states", "reserved", "internal fragmentation", "external and other")
PAPER_SPLIT = {  # percent
    "Orca (Max)": (20.4, 13.3, 57.3, 8.9),
    "Orca (Pow2)": (26.8, 17.9, 13.6, 41.6),
    "Orca (Oracle)": (38.2, 25.2, 0.0, 36.6),
    PAGED: (96.3,),
}
PAPER_BATCHED = {
    "sharegpt": {"Orca (Max)": 7.00, "Orca (Pow2)": 9.81, "Orca (Oracle)": 13.62, PAGED: 30.42},
    "alpaca": {"Orca (Max)": 7.00, "Orca (Pow2)": 43.24, "Orca (Oracle)": 72.75, PAGED: 132.44},
}
RATES = {"sharegpt": 2.0, "alpaca": 30.0}  # requests per second
COMPARED = tuple(system for system in SYSTEMS if system != FASTER_TRANSFORMER)


def table_1() -> Figure:
    """Makes table 1."""
    rows = []
    for name, (num_layers, num_heads, width) in SHAPES.items():
        config = {
            "architectures": ["OPTForCausalLM"],
            "model_type": "opt",
            "hidden_size": width,
            "ffn_dim": 4 * width,
            "num_hidden_layers": num_layers,
            "num_attention_heads": num_heads,
            "vocab_size": 50272,
            "max_position_embeddings": 2048,
            "word_embed_proj_dim": width,
            "do_layer_norm_before": True,
            "activation_function": "relu",
        }
        family: Family = load_family(config)
        spec = family.Spec.from_config(config)
        kv = spec.kv
        token_bytes = 2 * kv.num_layers * kv.num_kv_heads * kv.head_dim * 2
        paper_weights, kv_memory, paper_slots = TABLE_1[name]
        weights = num_bytes(model_weights(family, spec), "float16")
        rows.append(Row(f"{name}: weights (GB)", f"{paper_weights}", f"{weights / 1e9:.0f}"))
        slots = kv_memory * GIB / token_bytes
        ours = f"{slots / 1e3:.1f} ({token_bytes / 2**10:.0f} KiB a token)"
        rows.append(Row(f"{name}: thousand slots in {kv_memory} GiB", f"{paper_slots}", ours))
    return Figure("table 1", "Models, weights and slots", "computed", rows)


def memory_figures(effort: Effort) -> list[Figure]:
    """Makes figures 2 and 13, from the same runs."""
    cases = [
        Case(system, Workload(dataset), effort.memory_window(dataset, system), seed)
        for dataset in RATES
        for system in COMPARED
        for seed in effort.seeds
    ]
    outcomes = effort.pool.map(run_case, [(case, RATES[case.workload.dataset]) for case in cases])
    by_system: dict[tuple[str, str], list[Outcome]] = {}
    for case, outcome in zip(cases, outcomes, strict=True):
        by_system.setdefault((case.workload.dataset, case.system), []).append(outcome)
    return [_figure_2(by_system), _figure_13(by_system)]


def _shares(outcomes: Sequence[Outcome]) -> list[Interval]:
    """Returns the percentages of the slots, by kind."""
    means = [outcome.mean for outcome in outcomes]
    values = [(m.token_slots, m.reserved_slots, m.internal_slots, m.free_slots) for m in means]
    return [
        Interval.of(100 * value / m.num_slots for value, m in zip(kind, means, strict=True))
        for kind in zip(*values, strict=True)
    ]


def _figure_2(by_system: Mapping[tuple[str, str], Sequence[Outcome]]) -> Figure:
    shares = {system: _shares(by_system["sharegpt", system]) for system in COMPARED}
    rows = [
        Row(
            f"{system}: {' / '.join(KINDS) if system == COMPARED[0] else 'the same (%)'}",
            " / ".join(f"{value:.1f}" for value in PAPER_SPLIT[system]),
            " / ".join(interval.text(1) for interval in kinds),
        )
        for system, kinds in shares.items()
    ]
    checks = [
        Check(f"figure 2, {system}, {kind} (%)", interval.mean, paper - 3, paper + 3)
        for system, kinds in shares.items()
        for kind, paper, interval in zip(KINDS, PAPER_SPLIT[system], kinds, strict=False)
    ]
    checks.append(
        Check(
            "figure 2, external fragmentation of Orca (Max) (%)",
            shares["Orca (Max)"][3].mean,
            8.8,
            9.0,
        )
    )
    checks.append(Check("waste of the pool (%)", 100 - shares[PAGED][0].mean, 0, 4))
    series = [
        Series(kind, range(len(COMPARED)), [shares[system][index].mean for system in COMPARED])
        for index, kind in enumerate(KINDS)
    ]
    panel = Panel("", "", "slots for keys and values (%)", series, bars=COMPARED, stacked=True)
    return Figure("2", "What the KV memory holds", "simulated", rows, [panel], checks)


def _figure_13(by_system: Mapping[tuple[str, str], Sequence[Outcome]]) -> Figure:
    rows, checks, panels = [], [], []
    for part, (dataset, rate) in zip("ab", RATES.items(), strict=True):
        paper = PAPER_BATCHED[dataset]
        running = {
            s: Interval.of(outcome.mean.running for outcome in by_system[dataset, s])
            for s in COMPARED
        }
        rows += [
            Row(
                f"{part}) {dataset}, {rate:g} requests/s: {s}", f"{paper[s]:.2f}", running[s].text()
            )
            for s in COMPARED
        ]
        tolerance = {s: 0.15 for s in COMPARED} | {"Orca (Max)": 0.02 / 7}
        checks += [
            Check(
                f"figure 13{part}, {s}",
                running[s].mean,
                (1 - tolerance[s]) * paper[s],
                (1 + tolerance[s]) * paper[s],
            )
            for s in COMPARED
            if (dataset, s) != ("alpaca", PAGED)  # see the note of figure 13
        ]
        ours = [running[s].mean for s in COMPARED], [running[s].half for s in COMPARED]
        series = [
            Series("paper", range(len(COMPARED)), [paper[s] for s in COMPARED], is_paper=True),
            Series("simulated", range(len(COMPARED)), *ours),
        ]
        panels.append(
            Panel(
                f"({part}) {dataset}, {rate:g} requests/s",
                "",
                "requests in a batch",
                series,
                COMPARED,
            )
        )
    served = {
        s: Interval.of(o.tokens_per_second for o in by_system["sharegpt", s]) for s in COMPARED
    }
    ratio = served[PAGED].mean / served["Orca (Oracle)"].mean
    throughputs = ", ".join(f"{system}: {tokens.text(0)}" for system, tokens in served.items())
    rows.append(
        Row(
            "a) output tokens/s of the same runs: more requests arrive than any system can serve",
            "",
            throughputs,
        )
    )
    checks.append(
        Check("tokens/s at 2 requests/s of ShareGPT, over Orca (Oracle)", ratio, 1.7, 2.7)
    )
    return Figure("13", "Requests in a batch", "simulated", rows, panels, checks)
