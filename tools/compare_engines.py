"""Compares jaxpage with transformers, CTranslate2 and llama.cpp, each in a process of its own.

The engines get the same requests, and uniform decode. They are greedy, and every output is as long
as was asked. Random weights cost as much as trained ones (`tools/make_random_model.py`). An engine
whose packages are missing, or that does not run here, is left out with its error. Each may have a
Python of its own, since its packages may need another version than jaxpage does best in:

    pip install torch ctranslate2 llama-cpp-python gguf
    python tools/compare_engines.py models/llama-110m --python jaxpage=python3.12
    python tools/compare_engines.py models/llama-110m --write docs/benchmarks.md
    jaxpage fetch smollm2 && jaxpage convert smollm2 models/smollm2
    python tools/compare_engines.py models/smollm2
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

# Lets the program run where only jaxpage is installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from jaxpage.bench import environment, make_workload
from tools.peers.task import Answer, Task

ROOT = Path(__file__).parents[1]
# For each name, the engine and the type of its weights.
CASES = {
    "jaxpage": ("jaxpage", "float32"),
    "jaxpage bfloat16": ("jaxpage", "bfloat16"),
    "jaxpage int8": ("jaxpage", "int8"),
    "jaxpage int4": ("jaxpage", "int4"),
    "transformers": ("transformers", "float32"),
    "CTranslate2": ("ctranslate2", "float32"),
    "CTranslate2 bfloat16": ("ctranslate2", "bfloat16"),
    "CTranslate2 int8": ("ctranslate2", "int8"),
    "llama.cpp": ("llama_cpp", "float32"),
    "llama.cpp bfloat16": ("llama_cpp", "bfloat16"),
    "llama.cpp int8 (Q8_0)": ("llama_cpp", "int8"),
    "llama.cpp int4 (Q4_1)": ("llama_cpp", "int4"),
}
PACKAGES = {  # the packages that each process imports
    "jaxpage": "jaxpage",
    "transformers": "torch transformers",
    "ctranslate2": "ctranslate2 torch transformers",
    "llama_cpp": "llama-cpp-python gguf torch safetensors",
}
BEGIN = "<!-- written by tools/compare_engines.py -->"
END = "<!-- end of what tools/compare_engines.py wrote -->"


def main() -> None:
    """Runs the engines and prints the report."""
    arguments = _arguments()
    model = Path(arguments.model)
    if not (model / "config.json").is_file():
        raise SystemExit(
            f"{model} is no model: it has no config.json (tools/make_random_model.py writes one)"
        )
    config = json.loads((model / "config.json").read_text())
    work = make_workload(
        "sharegpt",
        arguments.num_prompts,
        seed=0,
        vocab_size=config["vocab_size"],
        max_input=512,
        max_output=512,
    )
    trace = [(list(item.prompt_token_ids), item.num_output_tokens) for item in work]
    pythons = dict(arguments.python)
    answers: dict[str, Answer] = {}
    for name, (peer, dtype) in CASES.items():
        if name in arguments.engines:
            settings = {"max_model_len": 1024} if peer == "jaxpage" else {}
            sizes = (arguments.batches, arguments.context, arguments.steps, os.cpu_count() or 1)
            task = Task(str(model.absolute()), dtype, trace, *sizes, settings)
            print(f"{name} ...", file=sys.stderr, flush=True)
            if (found := _run(name, task, pythons.get(peer, sys.executable))) is not None:
                answers[name] = found
    if not answers:
        raise SystemExit("no engine ran")
    text = report(answers, model.name, trace, arguments)
    print(text)
    if arguments.write:
        path = Path(arguments.write)
        path.write_text(replaced(path.read_text(encoding="utf-8"), text), encoding="utf-8")
    if arguments.chart:
        draw(answers, sum(length for _, length in trace), arguments.chart)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("model", help="directory of a Llama, as tools/make_random_model.py writes it")
    add(
        "--engines",
        nargs="+",
        choices=CASES,
        default=list(CASES),
        metavar="NAME",
        help=f"default: {', '.join(CASES)}",
    )
    pythons: dict[str, Any] = {
        "type": _python,
        "action": "append",
        "default": [],
        "metavar": "PEER=PATH",
    }
    add("--python", **pythons, help=f"the Python of one of {', '.join(PACKAGES)}; repeatable")
    add(
        "--num-prompts",
        type=int,
        default=64,
        metavar="N",
        help="requests of the trace; default: 64",
    )
    add(
        "--batches",
        type=int,
        nargs="+",
        default=[1, 8, 16, 64],
        metavar="N",
        help="rows; default: 1 8 16 64",
    )
    add(
        "--context",
        type=int,
        default=200,
        metavar="N",
        help="prompt of uniform decode; default: 200",
    )
    add("--steps", type=int, default=64, metavar="N", help="steps of uniform decode; default: 64")
    add("--write", metavar="FILE", help="replace the section between the marks in this file")
    add("--chart", metavar="FILE", help="draw the throughput of the trace: .svg or .png")
    arguments = parser.parse_args()
    if arguments.chart and importlib.util.find_spec("matplotlib") is None:
        parser.error(
            "--chart needs matplotlib, which is not installed: pip install 'jaxpage[plot]'"
        )
    return arguments


def _python(text: str) -> tuple[str, str]:
    peer, is_given, path = text.partition("=")
    if not is_given or peer not in PACKAGES:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not one of {', '.join(PACKAGES)} with = and a path"
        )
    if (found := shutil.which(path)) is None:
        raise argparse.ArgumentTypeError(f"{text!r}: there is no such program")
    return peer, str(Path(found).absolute())


def _run(name: str, task: Task, python: str) -> Answer | None:
    """Runs one of CASES; returns None, and says why, where the engine does not run."""
    peer, _ = CASES[name]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(task.threads)}
    command = [python, "-m", f"tools.peers.{peer}_peer"]
    done = subprocess.run(
        command,
        input=json.dumps(asdict(task)),
        cwd=ROOT,
        env=variables,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        missing = re.fullmatch(r"ModuleNotFoundError: (No module named .*)", reason[0])
        how = (
            f"{missing[1]}. Install its packages: {python} -m pip install {PACKAGES[peer]}"
            if missing
            else reason[0]
        )
        print(f"{name} is left out: {how}", file=sys.stderr)
        return None
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return Answer(
        **{
            **found,
            "step_seconds": {int(rows): each for rows, each in found["step_seconds"].items()},
        }
    )


def report(
    answers: dict[str, Answer],
    model: str,
    trace: Sequence[tuple[list[int], int]],
    arguments: argparse.Namespace,
) -> str:
    """Returns a section of docs/benchmarks.md.

    Outputs are compared with those of the first engine: equal texts do not happen by chance.
    """
    num_input, num_output = (
        sum(each) for each in zip(*((len(prompt), length) for prompt, length in trace), strict=True)
    )
    where, day = environment(), datetime.datetime.now(datetime.UTC).date()
    rows = [
        [
            "engine",
            "output tokens/s",
            "ratio",
            "equal outputs",
            *(f"{each} rows, ms" for each in arguments.batches),
            "version",
        ]
    ]
    (_, first), *_ = answers.items()
    for name, each in answers.items():
        equal = sum(one == other for one, other in zip(each.outputs, first.outputs, strict=True))
        steps = [f"{each.step_seconds[count] * 1e3:.1f}" for count in arguments.batches]
        speed, ratio = num_output / each.seconds, first.seconds / each.seconds
        rows.append(
            [name, f"{speed:.1f}", f"{ratio:.2f}", f"{equal} of {len(trace)}", *steps, each.version]
        )
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines.insert(1, "|" + "---|" * len(rows[0]))
    machine = f"commit {str(where['commit'])[:7]}, {where['cores']} cores ({where['cpu']})"
    words = ["python", "tools/compare_engines.py", f"models/{model}"]
    words += ["--engines", *answers] if list(answers) != list(CASES) else []
    for peer, path in arguments.python:
        words += ["--python", f"{peer}={Path(path).name}"]
    words += ["--num-prompts", f"{len(trace)}", "--batches", *map(str, arguments.batches)]
    words += ["--context", f"{arguments.context}", "--steps", f"{arguments.steps}"]
    until = arguments.context + arguments.steps
    return "\n".join(
        [
            f"`{shlex.join(words)}`, {day}, {machine}.",
            f"{model}: {len(trace)} requests with lengths of `sharegpt`, {num_input:,} tokens in, {num_output:,} out, all at once;",
            f"and milliseconds of a decode step at a context of {arguments.context} to {until}.",
            "",
            *lines,
        ]
    )


def replaced(text: str, section: str) -> str:
    """Returns the text with this section between the marks."""
    before, found, rest = text.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not (found and ended):
        raise SystemExit(f"the file has no section between {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{section}\n\n{END}{after}"


def draw(answers: dict[str, Answer], num_output: int, path: str) -> None:
    """Draws the throughput of the engines."""
    from matplotlib.figure import Figure

    names = list(answers)[::-1]
    figure = Figure(figsize=(7, 0.6 + 0.4 * len(names)), layout="constrained")
    axes = figure.add_subplot()
    speeds = [num_output / answers[name].seconds for name in names]
    bars = axes.barh(
        names,
        speeds,
        color=["#2f6fde" if name.startswith("jaxpage") else "#b9bec8" for name in names],
    )
    axes.bar_label(bars, fmt="%.0f", padding=3)
    axes.set_xlabel("output tokens per second")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


if __name__ == "__main__":
    main()
