"""Times torch's scaled_dot_product_attention on contiguous keys and values, without paging.

The times tell what the same call costs without pages. As in tools/lab/kernel_lab/timing.py, a
program is many calls that depend on each other over several sets of keys and values (here a CUDA
graph, between two events), so that neither Python nor the cache is timed. The fastest of torch's
own backends counts. Specs that have no contiguous equal are named with the reason.
tools/lab/gpu_check.py and tools/bench_kernels.py run it in a process of its own, so that torch and
JAX do not share memory.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

# Lets the program run where jaxpage is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.lab.kernel_lab.findings import LEFT_OUT, PASSED, Finding, Table, append, first_line
from tools.lab.kernel_lab.kernel_cases import label
from tools.lab.kernel_lab.parts import choose
from tools.lab.kernel_lab.specs import Spec
from tools.lab.kernel_lab.timing import num_layers

try:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.bias import causal_lower_right
except ImportError as absent:
    torch, MISSING = None, str(absent)

ROUND_S, ROUNDS = 0.02, 7


def incomparable(spec: Spec) -> str:
    """Returns why a spec has no contiguous equal; "" if it has one."""
    if len(set(spec.contexts)) > 1 or len(set(spec.queries)) > 1:
        return "ragged rows"
    if spec.page_dtype != spec.dtype:
        return f"pages of {spec.page_dtype}"
    return "a tree" if spec.tree else "a sliding window" if spec.sliding_window else ""


def inputs(spec: Spec, layers: int, device: str) -> tuple[Any, list[tuple[Any, Any]]]:
    """Returns queries, and keys and values for each layer.

    The queries are [B, N, Q, H]. Keys and values are [B, K, C, H], views of [B, C, K, H].
    """
    rows, context, queries = len(spec.contexts), spec.contexts[0], spec.queries[0]
    dtype = getattr(torch, spec.dtype)
    q = torch.randn(
        rows, queries, spec.num_heads, spec.head_dim, dtype=dtype, device=device
    ).transpose(1, 2)
    shape = (rows, context, spec.num_kv_heads, spec.head_dim)
    made = [
        [torch.randn(shape, dtype=dtype, device=device).transpose(1, 2) for _ in range(2)]
        for _ in range(layers)
    ]
    return q, [(k, v) for k, v in made]


def attend(spec: Spec, q: Any, layers: list[tuple[Any, Any]]) -> Any:
    """Makes one call per layer, each on the output of the one before."""
    queries, context = spec.queries[0], spec.contexts[0]
    options: dict[str, Any] = {
        "scale": spec.head_dim**-0.5,
        "enable_gqa": spec.num_heads != spec.num_kv_heads,
    }
    if queries == context and queries > 1:
        options["is_causal"] = True
    elif queries > 1:
        options["attn_mask"] = causal_lower_right(queries, context)
    for k, v in layers:
        q = torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)
    return q


def seconds(spec: Spec, layers: int, device: str) -> float:
    """Times one call, which on a CPU is simply a share of one round."""
    q, pages = inputs(spec, layers, device)
    if device == "cpu":
        began = time.perf_counter()
        attend(spec, q, pages)
        return (time.perf_counter() - began) / layers
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):  # graphs need a warm-up
        attend(spec, q, pages)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend(spec, q, pages)
    once = _round(graph, 1)
    replays = max(1, min(500, round(ROUND_S / max(once, 1e-6))))
    return statistics.median(_round(graph, replays) for _ in range(ROUNDS)) / replays / layers


def _round(graph: Any, replays: int) -> float:
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(replays):
        graph.replay()
    stop.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(stop)) / 1e3


def fastest(spec: Spec, layers: int, device: str) -> tuple[float | None, str]:
    """Returns (seconds, the backend), or (None, the reasons why each refused)."""
    names = (
        ("MATH",)
        if device == "cpu"
        else ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION")
    )
    times: dict[str, float] = {}
    refused = []
    for name in names:
        try:
            with torch.no_grad(), sdpa_kernel([getattr(SDPBackend, name)]):
                times[name] = seconds(spec, layers, device)
        except Exception as error:  # the backend does not take the call; the others go on
            refused.append(f"{name}: {first_line(error)}")
    if not times:
        return None, "; ".join(refused)
    best = min(times, key=times.__getitem__)
    return times[best], best


def others() -> str:
    """Names other kernels for pages that are installed here.

    None is timed, because the interfaces of their versions differ.
    """
    sentences = []
    for name in ("flashinfer-python", "vllm", "flash-attn"):
        try:
            sentences.append(f"{name} {metadata.version(name)} is there and not timed")
        except metadata.PackageNotFoundError:
            sentences.append(f"{name} is not there")
    return ", ".join(sentences)


def main(argv: list[str] | None = None) -> None:
    """Times the specs and appends the findings."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--specs", default="short", help="texts of names, comma-separated, or all; default: short"
    )
    parser.add_argument(
        "--to",
        type=Path,
        required=True,
        help="file to which findings are appended as lines of JSON",
    )
    parser.add_argument("--small", action="store_true", help="on CPU, with specs cut small")
    arguments = parser.parse_args(argv)
    append(arguments.to, Finding("other kernels", LEFT_OUT, others()))
    if torch is None or not (arguments.small or torch.cuda.is_available()):
        reason = f"torch: {MISSING}" if torch is None else "torch sees no GPU"
        append(arguments.to, Finding("contiguous", LEFT_OUT, reason))
        return
    device = "cpu" if arguments.small else "cuda"
    table = Table(
        "Attention over contiguous keys and values (torch)", ["spec", "us", "backend, or why not"]
    )
    seconds: dict[str, float] = {}
    for spec in choose(arguments.specs):
        name = label(spec)
        taken, how = None, incomparable(spec)
        if not how:
            spec = spec.cut() if arguments.small else spec
            taken, how = fastest(spec, 2 if arguments.small else num_layers(spec), device)
        if taken is not None:
            seconds[name] = taken
        table.rows.append([name, "-" if taken is None else f"{taken * 1e6:.1f}", how])
    text = f"{len(seconds)} specs timed with torch {torch.__version__}"
    status = PASSED if seconds else LEFT_OUT
    append(
        arguments.to,
        Finding(
            "contiguous", status, text, tables=[table], data={"seconds": {"contiguous": seconds}}
        ),
    )


if __name__ == "__main__":
    main()
