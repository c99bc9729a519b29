"""Measures what llama.cpp's own speculation gives, as `jaxpage bench speculation` measures jaxpage.

`llama-server` gets the prompts of the same tasks as token ids, as many at once as there are rows,
greedy, each for the same number of tokens. Each n-gram type of speculation runs between two runs
without drafts, and its ratio is to the mean of these two. Each run without drafts is also compared
with the one before it: the difference of this ratio from 1 is noise. Each run has a server of its
own, because some types draft from what the server wrote before. The server has as many slots as
there are rows. All types have the server's defaults unless `--flags` says otherwise. `--draft`
measures a draft model of llama.cpp.

    cmake -B build && cmake --build build --target llama-server    # of llama.cpp
    SERVER=build/bin/llama-server
    python tools/lab/compare_speculation.py models/smollm2 --server $SERVER
    python tools/lab/compare_speculation.py models/smollm2 --server $SERVER --draft draft.gguf
    python tools/lab/compare_speculation.py models/smollm2 --server $SERVER --flags "-fa off"

The shortest n-gram that is looked up is 12 tokens long by default (`--spec-ngram-simple-size-n`).
The model is a GGUF file with a tokenizer that jaxpage reads, or a Llama in Hugging Face's format.
Of the latter a GGUF file is written, and removed after the measurement.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from statistics import median

# Lets the program run where only jaxpage is installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from jaxpage import EngineConfig
from jaxpage.bench import TASKS, environment, prompts_of_tasks
from tools.lab.peers.gguf_file import TYPES, write_gguf
from tools.lab.peers.llama_server import Run, complete, ngram_types, run_server, version_of
from tools.lab.peers.other_programs import OtherPrograms
from tools.lab.peers.report import table_row

NONE, DRAFT = "none", "draft-simple"  # types of speculation by their names in llama.cpp
SPARE_TOKENS = 128  # of a slot, for drafts after the last token
TITLES = ["task", "rows", "drafts", "tokens/step", "tokens/s", "ratio", "equal outputs"]
Pair = tuple[Run, list[Run]]  # a run, and the runs without drafts that it is compared with


def main() -> None:
    """Runs the servers, and prints each row of the table as soon as it is measured.

    Raises:
        SystemExit: There is no such model or server, or a server failed.
    """
    arguments = _arguments()
    model = Path(arguments.model)
    if not (model.is_file() or (model / "config.json").is_file()):
        raise SystemExit(f"{model} is no model: it is no GGUF file and has no config.json")
    types = arguments.types or ngram_types(arguments.server)
    types = [*types, *([DRAFT] if arguments.draft else [])]
    prompts = prompts_of_tasks(arguments.tasks, EngineConfig(model=str(model)))
    where, day = environment(), datetime.datetime.now(datetime.UTC).date()
    words = [Path(word).name if os.path.isabs(word) else word for word in sys.argv[1:]]
    print(
        f"`python tools/lab/compare_speculation.py {shlex.join(words)}`, {day}, "
        f"llama.cpp {version_of(arguments.server)}, {where['cores']} cores ({where['cpu']}).\n"
        f"{arguments.max_output} tokens of each sequence; medians of {arguments.repeats} rounds, "
        f"with the lowest and the highest.\n"
    )
    print(table_row(TITLES), "|" + "---|" * len(TITLES), sep="\n", flush=True)
    others = OtherPrograms()
    # The pool ends after the last server, without which its threads would wait for answers.
    with _gguf(model, arguments.dtype) as path, ThreadPoolExecutor(max(arguments.batches)) as pool:
        for task, batch in ((task, batch) for task in prompts for batch in arguments.batches):
            turning = cycle(prompts[task])
            num_groups = -(-arguments.num_prompts // batch)
            groups = [[*islice(turning, batch)] for _ in range(num_groups)]
            run = partial(_run, arguments, pool, path, groups)
            for kind, pairs in measure(run, types, arguments.repeats).items():
                print(table_row([task, str(batch), kind, *cells(pairs)]), flush=True)
    if (share := others.share()) is not None:
        print(f"\nOther programs had {share:.0%} of the cores.")


def measure(run: Callable[[str], Run], types: Sequence[str], repeats: int) -> dict[str, list[Pair]]:
    """Runs all types in turns, with a run without drafts before and after each."""
    pairs: dict[str, list[Pair]] = {kind: [] for kind in (NONE, *types)}
    before = run(NONE)
    for kind in [*types] * repeats:
        answers, after = run(kind), run(NONE)
        pairs[kind].append((answers, [before, after]))
        pairs[NONE].append((after, [before]))
        before = after
    return pairs


def cells(pairs: Sequence[Pair]) -> list[str]:
    """Returns the cells of the table after the first three.

    An output is compared with that of the same prompt in the run without drafts before it.
    """
    rates = [run.rate for run, _ in pairs]
    ratios = [run.rate / mean_rate(baseline) for run, baseline in pairs]
    equal = [
        output == other
        for run, baseline in pairs
        for output, other in zip(run.outputs, baseline[0].outputs, strict=True)
    ]
    return [
        f"{median(run.tokens_per_step for run, _ in pairs):.2f}",
        f"{median(rates):.0f} ({min(rates):.0f} to {max(rates):.0f})",
        f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
        f"{sum(equal)} of {len(equal)}",
    ]


def mean_rate(runs: Sequence[Run]) -> float:
    """Returns the tokens per second of some runs in the mean of their times."""
    return len(runs) / sum(1 / run.rate for run in runs)


def _run(
    arguments: argparse.Namespace,
    pool: ThreadPoolExecutor,
    path: Path,
    groups: Sequence[Sequence[Sequence[int]]],
    kind: str,
) -> Run:
    with run_server(arguments.server, arguments.port, _flags(arguments, path, groups, kind)):
        complete(pool, arguments.port, [[row[:8] for row in groups[0]]], 2)  # a warm-up
        return complete(pool, arguments.port, groups, arguments.max_output)


def _flags(
    arguments: argparse.Namespace,
    path: Path,
    groups: Sequence[Sequence[Sequence[int]]],
    kind: str,
) -> list[str]:
    """Returns the flags of a server for these prompts."""
    batch = len(groups[0])
    max_length = max(len(row) for rows in groups for row in rows)
    slot = max_length + arguments.max_output + SPARE_TOKENS
    flags = ["--model", str(path), "--parallel", str(batch)]
    flags += ["--ctx-size", str(slot * batch), "--threads", str(os.cpu_count() or 1)]
    flags += ["--cache-ram", "0", "--spec-type", kind]
    flags += ["--model-draft", arguments.draft] if kind == DRAFT else []
    return [*flags, *shlex.split(arguments.flags)]


@contextmanager
def _gguf(model: Path, dtype: str) -> Iterator[Path]:
    """Yields the GGUF file of a model, which is written if the model is a directory."""
    if model.is_file():
        yield model
        return
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model.gguf"
        write_gguf(model, json.loads((model / "config.json").read_text()), str(path), dtype)
        yield path


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("model", help="directory of a Llama, or a GGUF file")
    add("--server", type=_program, required=True, metavar="PATH", help="llama-server")
    add("--draft", metavar="FILE", help="GGUF file of a draft model, which is measured, too")
    add(
        "--types",
        nargs="+",
        metavar="NAME",
        help="types of --spec-type; default: all with n-grams that the server has",
    )
    add("--flags", default="", help="further flags of the server, in one string")
    add("--dtype", choices=TYPES, default="bfloat16", help="the weights; default: bfloat16")
    add("--port", type=int, default=8931, metavar="N", help="of the server; default: 8931")
    add("--tasks", nargs="+", choices=TASKS, default=TASKS, help="default: all")
    add("--batches", type=int, nargs="+", default=[1, 8, 32], metavar="N", help="rows; 1 8 32")
    text = "prompts of a task, at least one for each row; default: 8"
    add("--num-prompts", type=int, default=8, metavar="N", help=text)
    add("--max-output", type=int, default=64, metavar="N", help="new tokens; default: 64")
    add("--repeats", type=int, default=3, metavar="N", help="rounds; default: 3")
    arguments = parser.parse_args()
    numbers = arguments.num_prompts, arguments.repeats, arguments.max_output - 1
    if min(*arguments.batches, *numbers) < 1:
        parser.error("at least 1 row, 1 prompt, 1 round and 2 tokens are needed")
    if arguments.draft and not Path(arguments.draft).is_file():
        parser.error(f"--draft {arguments.draft}: there is no such file")
    return arguments


def _program(text: str) -> str:
    if (program := shutil.which(text)) is None:
        raise argparse.ArgumentTypeError(f"{text!r}: there is no such program")
    return program


if __name__ == "__main__":
    # A request to end stops the server as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    main()
