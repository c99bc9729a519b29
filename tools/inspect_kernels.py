"""Compiles every kernel and whole steps without a GPU; rewrites docs/internals/kernels.md.

    python tools/inspect_kernels.py            # some minutes; rewrites the tables
    python tools/inspect_kernels.py --check    # fails where the file says something else

It needs JAX's CUDA plugin, but neither a GPU nor CUDA. To count instructions it needs NVIDIA's
disassembler, which triton's wheel has.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

# Lets the program run where jaxpage is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.lab.kernel_lab.inspection import (
    GPUS,
    Findings,
    compile_with_thunks,
    inspect,
    sass,
    thunks,
    unavailable,
)
from tools.lab.kernel_lab.inspection.compiled_cases import cases
from tools.lab.kernel_lab.inspection.kernel_tables import Row, markdown, rows
from tools.lab.step_times import GPU_OPTIONS
from tools.step_shapes import BUCKETS, FP8_BLOCKS, QWEN3_30B_A3B, step_shapes

DOCUMENT = Path(__file__).parents[1] / "docs" / "internals" / "kernels.md"
BEGIN, END = "<!-- begin: tools/inspect_kernels.py -->", "<!-- end: tools/inspect_kernels.py -->"
HEAD = "# Kernels\n\n## What the compiler makes of them\n\n"
LLAMA: Mapping[str, Any] = {}  # in bfloat16; the other models are arguments of `step_shapes`
STEPS: tuple[tuple[str, str, str, Mapping[str, Any]], ...] = (
    *(
        ("decode", "triton", "", LLAMA),
        ("several steps", "triton", "", LLAMA),
        ("verify", "triton", "", LLAMA),
    ),
    *(("chunk", "triton", "", LLAMA), ("chunk", "mosaic", "", LLAMA)),
    ("decode", "triton", "int4, ", {"quantization": "int4"}),
    ("decode", "triton", "fp8 in blocks, ", {"quantization": FP8_BLOCKS}),
    ("decode of 64", "triton", "Qwen3-30B-A3B, ", {"config": QWEN3_30B_A3B}),
)
STEP_COLUMNS = (
    "step",
    "our kernels",
    "all kernels",
    "pages",
    "aliased",
    "temporary MiB",
    "waits for the host",
    "problems",
)


def kernel_rows(gpu: str, only: str, progress: bool) -> tuple[list[Row], list[str]]:
    """Returns the rows of all cases whose name contains `only`, and the refusals."""
    listed, refusals = [], []
    chosen = [case for case in cases() if only in case.name]
    for case in tqdm(chosen, desc="Kernels", unit="case", disable=None if progress else True):
        try:
            listed += rows(case, gpu=gpu)
        except NotImplementedError as refusal:
            refusals.append(f"{case.name}: {refusal}")
    return listed, refusals


def step_rows(gpu: str, num_layers: int, progress: bool) -> Iterator[tuple[str, ...]]:
    """Yields a row of cells for each of `STEPS`."""
    for kind, backend, label, model in tqdm(
        STEPS, desc="Steps", unit="step", disable=None if progress else True
    ):
        shapes = step_shapes(BUCKETS[kind], backend=backend, num_layers=num_layers, **model)
        tokens = f"{kind.removesuffix(' of 64')} of {BUCKETS[kind].num_tokens} tokens"
        name = f"{tokens}, {label}{shapes.num_layers} layers ({backend})"
        try:
            compiled, listed = compile_with_thunks(
                shapes.step, *shapes.arguments, gpu=gpu, options=GPU_OPTIONS
            )
        except NotImplementedError as refusal:
            yield (name, *[""] * (len(STEP_COLUMNS) - 2), str(refusal))
            continue
        findings, waits = inspect(compiled), thunks.on_host(listed)
        problems = findings.problems(pages_bytes=shapes.pages_bytes, array_bytes=shapes.array_bytes)
        yield (
            name,
            _counts(findings),
            str(findings.num_launches),
            f"{shapes.pages_bytes / 2**30:.0f} GiB",
            f"{findings.aliased_bytes / 2**30:.0f} GiB",
            f"{findings.temporary_bytes / 2**20:.0f}",
            str(len(waits)),
            "; ".join(problems) or "none",
        )


def _counts(findings: Findings) -> str:
    return ", ".join(f"{number} {name}" for name, number in sorted(Counter(findings.calls).items()))


def section(arguments: argparse.Namespace) -> str:
    """Returns the text between the marks."""
    progress = not arguments.quiet
    rows, refusals = kernel_rows(arguments.gpu, arguments.only, progress)
    text = markdown(rows, refusals, gpu=arguments.gpu)
    if not arguments.no_steps:
        steps = "\n".join(
            "| " + " | ".join(row) + " |"
            for row in step_rows(arguments.gpu, arguments.layers, progress)
        )
        head = "| " + " | ".join(STEP_COLUMNS) + " |\n|---|---|" + "---:|" * 5 + "---|"
        text += f"\n\nWhole steps of Llama-3-8B in bfloat16, 16 rows, where no other model is named, from shapes alone:\n\n{head}\n{steps}"
    return text


def replace_section(document: str, text: str, marks: tuple[str, str] = (BEGIN, END)) -> str:
    """Returns the document with the text between its marks.

    Raises:
        ValueError: The marks are not there, once each and in order.
    """
    begin, end = marks
    if (
        document.count(begin) != 1
        or document.count(end) != 1
        or document.index(begin) > document.index(end)
    ):
        raise ValueError(
            f"the document must have the lines {begin!r} and {end!r}, once each and in this order"
        )
    before, after = document.split(begin)
    return f"{before}{begin}\n\n{text}\n\n{end}{after.split(end)[1]}"


def main(words: Sequence[str] | None = None) -> None:
    """Rewrites the tables; with --check compares them, and exits with 1 where they differ."""
    parser = argparse.ArgumentParser(
        prog="inspect_kernels", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "--check", action="store_true", help="compare with the file, and write nothing"
    )
    parser.add_argument("--print", action="store_true", help="print the tables, and write nothing")
    parser.add_argument("--gpu", choices=GPUS, default="h200", help="default: h200")
    parser.add_argument(
        "--only", default="", help="kernels of cases with this in their name; goes with --print"
    )
    parser.add_argument(
        "--layers",
        type=int,
        default=4,
        help="of the steps' model, which the table names; default: 4",
    )
    parser.add_argument(
        "--no-steps", action="store_true", help="leave the whole steps out; goes with --print"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.add_argument(
        "--document", type=Path, default=DOCUMENT, help="default: docs/internals/kernels.md"
    )
    arguments = parser.parse_args(words)
    if reason := unavailable():
        parser.error(reason)
    if (arguments.only or arguments.no_steps) and not arguments.print:
        parser.error("--only and --no-steps make a part of the tables, which --print shows")
    if sass.disassembler() is None and not arguments.print:
        parser.error(
            "instructions are counted by nvdisasm: pip install triton, or put CUDA's on the PATH"
        )
    if arguments.layers < 1:
        parser.error(f"--layers must be at least 1, not {arguments.layers}")
    if arguments.print:
        print(section(arguments))
        return
    path = arguments.document
    old = path.read_text(encoding="utf-8") if path.exists() else f"{HEAD}{BEGIN}\n{END}\n"
    try:
        new = replace_section(old, section(arguments))
    except ValueError as error:
        parser.error(f"{path}: {error}")
    if not arguments.check:
        path.write_text(new, encoding="utf-8")
        return
    if new != old:
        print(
            "\n".join(
                difflib.unified_diff(
                    old.splitlines(), new.splitlines(), str(path), "now", lineterm="", n=1
                )
            )
        )
        sys.exit(1)


if __name__ == "__main__":
    main()
