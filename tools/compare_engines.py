"""Compares jaxpage with other engines, each in its own process.

They are transformers, CTranslate2, llama.cpp, OpenVINO GenAI and vLLM.

The engines get the same requests, uniform decode, and one long prompt. They are greedy, and every
output is as long as was asked. Random weights cost as much as trained ones
(`tools/make_random_model.py`). An engine with several modes shows the best one for each number.
All engines run three times, in turns: the table has medians, with the lowest and the highest. It is
not written to a file if other programs used the machine. An engine whose packages are missing, or
that does not run here, is left out with its error. Each may have a Python of its own, since its
packages may need another version than jaxpage does best in:

    pip install torch ctranslate2 llama-cpp-python openvino-genai gguf
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
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

# Lets the program run where only jaxpage is installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from jaxpage.bench import make_workload
from tools.lab.peers.cases import CASES, PACKAGES, modes_of
from tools.lab.peers.other_programs import OtherPrograms
from tools.lab.peers.report import Answers, best, draw, replace_section, report
from tools.lab.peers.task import FIRST_TOKENS, PROMPT, TRACE, Answer, Task, rows_name

ROOT = Path(__file__).parents[1]
BUSY = 0.05  # the share of the cores that other programs may have while an engine runs


def main() -> None:
    """Runs the engines and prints the report.

    Raises:
        SystemExit: There is no such model, no engine ran, or the machine was busy and the report
            should be written to a file.
    """
    arguments = _arguments()
    model = Path(arguments.model)
    if not (model / "config.json").is_file():
        raise SystemExit(
            f"{model} is no model: it has no config.json (tools/make_random_model.py writes one)"
        )
    config = json.loads((model / "config.json").read_text())
    arguments.prompt = min(arguments.prompt, config["max_position_embeddings"] - FIRST_TOKENS)
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
    busy: list[str] = []

    def run(name: str, letters: str, numbers: Sequence[str]) -> Answer | None:
        peer, dtype = CASES[name]
        sizes = (arguments.batches, arguments.context, arguments.steps, arguments.prompt)
        threads, mode = os.cpu_count() or 1, modes_of(name)[letters]
        task = Task(str(model.absolute()), dtype, trace, *sizes, threads, list(numbers), mode)
        others = OtherPrograms()
        answer = _run(name, task, pythons.get(peer, sys.executable))
        if (share := others.share() or 0.0) > BUSY:
            busy.append(f"{name} {letters}".strip() + f" {share:.0%}")
        return answer

    numbers = [TRACE, *map(rows_name, arguments.batches), PROMPT]
    answers = measure(arguments.engines, numbers, arguments.repeats, run)
    if not answers:
        raise SystemExit("no engine ran")
    text = report(answers, model.name, trace, arguments)
    print(text)
    if busy:
        print(
            f"other programs had more than {BUSY:.0%} of the cores during {', '.join(busy)}",
            file=sys.stderr,
        )
    if busy and (arguments.write or arguments.chart):
        raise SystemExit("nothing is written: stop the other programs and measure again")
    if arguments.write:
        path = Path(arguments.write)
        path.write_text(replace_section(path.read_text(encoding="utf-8"), text), encoding="utf-8")
    if arguments.chart:
        draw(answers, arguments.chart)


def measure(
    names: Sequence[str],
    numbers: Sequence[str],
    repeats: int,
    run: Callable[[str, str, Sequence[str]], Answer | None],
) -> Answers:
    """Runs all engines in turns.

    From the second round on, a mode measures those numbers alone in which it was the best of its
    engine in the first. A mode that does not run is left out.

    Args:
        names: The cases.
        numbers: The names of the numbers.
        repeats: The rounds.
        run: Runs a case in a mode for some numbers.
    """
    answers: Answers = {}
    for name in names:
        for letters in modes_of(name):
            _say(1, repeats, name, letters)
            if (answer := run(name, letters, numbers)) is not None:
                answers.setdefault(name, {})[letters] = [answer]
    for number in range(2, 1 + repeats):
        for name, modes in answers.items():
            best_modes = {each: best(modes, each).mode for each in numbers}
            for letters, settings in modes.items():
                if expected := [each for each in numbers if best_modes[each] == letters]:
                    _say(number, repeats, name, letters)
                    if (answer := run(name, letters, expected)) is not None:
                        settings.append(answer)
    return answers


def _say(number: int, repeats: int, name: str, letters: str) -> None:
    message = f"round {number} of {repeats}: {name} {letters}".rstrip()
    print(f"{datetime.datetime.now():%H:%M:%S} {message}", file=sys.stderr, flush=True)


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
    add(
        "--prompt",
        type=int,
        default=2048,
        metavar="N",
        help="tokens of the long prompt, at most as many as the model takes; default: 2048",
    )
    add("--repeats", type=int, default=3, metavar="N", help="rounds; default: 3")
    add("--write", metavar="FILE", help="replace the section between the marks in this file")
    add("--chart", metavar="FILE", help="draw decode with 1 and 16 rows: .svg or .png")
    arguments = parser.parse_args()
    if arguments.chart and not {1, 16} & set(arguments.batches):
        parser.error("--chart shows 1 and 16 rows, and --batches has neither")
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
    if (program := shutil.which(path)) is None:
        raise argparse.ArgumentTypeError(f"{text!r}: there is no such program")
    return peer, str(Path(program).absolute())


def _run(name: str, task: Task, python: str) -> Answer | None:
    """Runs one of CASES; returns None, and says why, where the engine does not run."""
    peer, _ = CASES[name]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(task.threads)}
    command = [python, "-m", f"tools.lab.peers.{peer}_peer"]
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
    return Answer(**json.loads(done.stdout.splitlines()[-1]))


if __name__ == "__main__":
    main()
