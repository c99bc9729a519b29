"""Compiles whole steps for TPUs without having one; rewrites the table of docs/tpu-results.md.

    python tools/inspect_tpu.py            # about an hour on two cores; rewrites the table
    python tools/inspect_tpu.py --print    # prints it, and exits with 1 where a step has a problem

It needs libtpu, which holds the compiler: pip install '.[tpu]'.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

# Before JAX is imported: with libtpu there it would look for a TPU.
os.environ["JAX_PLATFORMS"] = "cpu"
# Lets the program run where jaxpage is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
from tqdm import tqdm

from tools.inspect_kernels import replace_section
from tools.lab.kernel_lab.inspection.deviceless_tpu import (
    TPUS,
    compile_for_tpu,
    inspect_for_tpu,
    unavailable,
)
from tools.step_shapes import BUCKETS, LLAMA_3_8B, ON_TPU, step_shapes

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "tpu-results.md"
MARKS = ("<!-- begin: tools/inspect_tpu.py -->", "<!-- end: tools/inspect_tpu.py -->")
LLAMA_3_2_1B: Mapping[str, Any] = {  # what gives shapes; its heads are 64 wide
    **LLAMA_3_8B,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
DEMO: Mapping[str, Any] = json.loads((ROOT / "jaxpage" / "demo" / "config.json").read_text())
# Of so many blocks the pages of a layer are larger than anything else that a step makes.
MODELS: Mapping[str, tuple[Mapping[str, Any], int]] = {
    "demo": (DEMO, 65536),
    "Llama-3.2-1B": (LLAMA_3_2_1B, 16384),
    "Llama-3-8B": (LLAMA_3_8B, 32768),
}
KINDS = ("decode", "verify", "chunk")
COLUMNS = (
    "TPU",
    "model",
    "step",
    "calls of JAX's kernel",
    "pages MiB",
    "aliased MiB",
    "temporary MiB",
    "accessed GiB",
    "compiled in s",
    "problems",
)


def rows(
    tpus: Sequence[str], models: Sequence[str], kinds: Sequence[str], num_layers: int
) -> Iterator[tuple[str, ...]]:
    """Yields a row of cells for each TPU, model and kind of step; the last one has the problems."""
    cases = [(tpu, model, kind) for tpu in tpus for model in models for kind in kinds]
    for tpu, model, kind in tqdm(cases, desc="Steps", unit="step", disable=None):
        config, num_blocks = MODELS[model]
        shapes = step_shapes(
            BUCKETS[kind],
            backend=ON_TPU,
            config=config,
            num_layers=min(num_layers, config["num_hidden_layers"]),
            num_blocks=num_blocks,
        )
        began = time.monotonic()
        findings = inspect_for_tpu(compile_for_tpu(shapes.step, *shapes.arguments, tpu=tpu))
        seconds = time.monotonic() - began
        problems = findings.problems(pages_bytes=shapes.pages_bytes, array_bytes=shapes.array_bytes)
        yield (
            tpu,
            model,
            f"{kind} of {BUCKETS[kind].num_tokens} tokens",
            str(sum(findings.calls.values())),
            f"{shapes.pages_bytes / 2**20:,.0f}",
            f"{findings.aliased_bytes / 2**20:,.0f}",
            f"{findings.temporary_bytes / 2**20:,.1f}",
            f"{findings.accessed_bytes / 2**30:.2f}",
            f"{seconds:.0f}",
            "; ".join(problems) or "none",
        )


def table(rows: Sequence[Sequence[str]], num_layers: int) -> str:
    """Returns the rows as Markdown, with the versions of what compiled them."""
    versions = f"jax {jax.__version__}, libtpu {importlib.metadata.version('libtpu')}"
    lines = (COLUMNS, ("---",) * 3 + ("---:",) * 6 + ("---",), *rows)
    text = "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
    return f"Steps of {num_layers} layers in bfloat16, 16 rows, by {versions}:\n\n{text}"


def main(words: Sequence[str] | None = None) -> None:
    """Rewrites the table; with --print prints it. Exits with 1 where a step has a problem."""
    parser = argparse.ArgumentParser(
        prog="inspect_tpu", description=(__doc__ or "").partition("\n")[0]
    )
    for name, choices in (("tpus", TPUS), ("models", MODELS), ("kinds", KINDS)):
        parser.add_argument(f"--{name}", nargs="+", choices=tuple(choices), default=tuple(choices))
    parser.add_argument("--layers", type=int, default=2, help="of the models; default: 2")
    parser.add_argument("--print", action="store_true", help="print the table, and write nothing")
    parser.add_argument("--document", type=Path, default=DOCUMENT)
    arguments = parser.parse_args(words)
    if reason := unavailable():
        parser.error(reason)
    if arguments.layers < 1:
        parser.error(f"--layers must be at least 1, not {arguments.layers}")
    if not arguments.print and {*arguments.tpus, *arguments.models, *arguments.kinds} != {
        *TPUS,
        *MODELS,
        *KINDS,
    }:
        parser.error("--tpus, --models and --kinds make a part of the table, which --print shows")
    lines = []
    for cells in rows(arguments.tpus, arguments.models, arguments.kinds, arguments.layers):
        lines.append(cells)
        print(" | ".join(cells), flush=True)
    text = table(lines, arguments.layers)
    if arguments.print:
        print(text)
    else:
        old = arguments.document.read_text(encoding="utf-8")
        arguments.document.write_text(replace_section(old, text, MARKS), encoding="utf-8")
    sys.exit(any(cells[-1] != "none" for cells in lines))


if __name__ == "__main__":
    main()
