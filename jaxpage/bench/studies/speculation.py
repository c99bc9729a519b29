"""Measures speculative decoding against none, for `jaxpage bench speculation`.

It shows tokens per step and per second, for each batch and each way to draft.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from importlib import resources
from itertools import zip_longest
from statistics import median
from typing import Any

import numpy as np
from tqdm import tqdm

from jaxpage.bench.results import environment, print_result
from jaxpage.bench.studies.engine_process import EngineInTurns, EngineRun, Prompts, engine_process
from jaxpage.bench.studies.file_texts import read_token_ids
from jaxpage.bench.studies.task_prompts import TASKS, prompts_of_tasks
from jaxpage.bench.throughput import check_plot
from jaxpage.checkpoints import read_config
from jaxpage.checkpoints.finding import resolve_model
from jaxpage.checkpoints.tokenizers import tokenizer_of
from jaxpage.device.hardware import USUAL_BLOCK_SIZE
from jaxpage.errors import UnsupportedError, UsageError
from jaxpage.settings.engine_config import EngineConfig
from jaxpage.settings.sampling_params import SamplingParams
from jaxpage.settings.speculative_methods import METHODS, Method
from jaxpage.tables import align

NONE = "none"
ORACLE = "oracle"  # drafts what the run without drafts gave; see `oracle.py`
ALONE = NONE, ""
# Another engine without drafts. The difference of the two is noise and not an effect of drafts.
CONTROL = NONE, "again"
NUM_INPUT_TOKENS = 64  # the length of a prompt
# Each engine draws at least so many tokens in a turn. So one sequence alone runs several times, and
# `auto` has found out which number of drafts pays before it is measured.
TOKENS_OF_A_TURN = 512
Way = tuple[str, str]  # a method, and a number of drafts or "auto"
# Pairs (a run without drafts that has the mean time of both such engines, a run at the same time).
Pairs = list[tuple[EngineRun, EngineRun]]


@dataclass(frozen=True)
class Cell:
    """Holds the result of one way to draft at one batch: medians over the repeats of all starts.

    Attributes:
        batch: The number of sequences.
        method: The method that drafts.
        num_speculative_tokens: A number or "auto". Without drafts it is empty, and "again" for the
            second engine without drafts.
        tokens_per_step: The tokens of a sequence per step, after its first token.
        tokens_per_second: The tokens of all sequences per second.
        ratio: The tokens per second over those of the two engines without drafts next to it.
        identical: Says whether the tokens are those without drafts, in every repeat.
        task: The task that the prompts are of; empty without `--tasks`.
        ratios: The lowest and the highest ratio of all repeats.
        accepted: See `EngineRun`.
    """

    batch: int
    method: str
    num_speculative_tokens: str
    tokens_per_step: float
    tokens_per_second: float
    ratio: float
    identical: bool
    task: str = ""
    ratios: tuple[float, float] = (1.0, 1.0)
    accepted: tuple[float, ...] = ()

    @property
    def way(self) -> str:
        """Returns the method and the number of drafts, as they are printed."""
        return f"{self.method} {self.num_speculative_tokens}".strip()


def run_speculation(arguments: argparse.Namespace, config: EngineConfig) -> None:
    """Prints a table and, as the last line, one JSON object.

    Raises:
        UsageError: The flags do not fit together.
    """
    _check(arguments, config)
    ways = _ways(arguments)
    prompts = _prompts(arguments, config)
    max_length = max(len(prompt) for each in prompts.values() for prompt in each)
    config = _size_config(config, max(arguments.batches), max_length + arguments.max_output)
    configs = {way: _config(config, way) for way in ways}
    params = [
        SamplingParams(
            temperature=arguments.temperature,
            max_tokens=arguments.max_output,
            ignore_eos=True,
            seed=seed,
        )
        for seed in range(max(arguments.batches))
    ]
    cases = [(task, batch) for task in prompts for batch in arguments.batches]
    pairs: dict[tuple[str, int, Way], Pairs] = {(*case, way): [] for case in cases for way in ways}

    def cell(task: str, batch: int, way: Way) -> Cell:
        num_tokens = batch * arguments.max_output
        return _cell(batch, way, num_tokens, pairs[task, batch, way], task)

    each_start = [
        (start, way)
        for start in range(1, 1 + arguments.starts)
        for way in ways
        if way not in (ALONE, CONTROL)
    ]
    with tqdm(total=len(each_start) * (1 + len(cases)), disable=None) as bar:
        for start, way in each_start:
            bar.set_description(f"Start {start} of {arguments.starts}, {' '.join(way)}")
            with ExitStack() as stack:
                engines = {
                    each: stack.enter_context(
                        engine_process(configs[each], oracle=each[0] == ORACLE)
                    )
                    for each in (ALONE, way, CONTROL)
                }
                bar.update()
                for task, batch in cases:
                    rows = prompts[task] if task else prompts[task][:batch]
                    for each, more in measure(
                        engines, rows, params[:batch], arguments.repeats, separate=bool(task)
                    ).items():
                        pairs[task, batch, each] += more
                    bar.update()
            if start == arguments.starts:
                # A long measurement that is interrupted has shown what it found.
                cells = [cell(task, batch, way) for task, batch in cases]
                tqdm.write(table(cells), file=sys.stderr)
    _report([cell(*key) for key in pairs], arguments, config)


def _report(cells: Sequence[Cell], arguments: argparse.Namespace, config: EngineConfig) -> None:
    """Prints the table and the JSON object, and draws the picture if it is asked for."""
    print(table(cells))
    print(
        f"{arguments.max_output} tokens of each sequence, temperature "
        f"{arguments.temperature:g}; ratio: to the mean of none and none again"
    )
    if text := auto_text(cells):
        print(text)
    context = {
        name: getattr(arguments, name)
        for name in ("temperature", "max_output", "starts", "repeats", "text", "tasks", "seed")
    }
    if arguments.plot:
        from jaxpage.bench.studies.speculation_plot import (
            draw,  # matplotlib is optional: see check_plot
        )

        draw(cells).savefig(arguments.plot)
    results = [asdict(cell) for cell in cells]
    result = {
        "cells": results,
        **context,
        "config": config.model_dump(),
        "environment": environment(),
    }
    print_result(result, arguments)


def measure(
    engines: dict[Way, EngineInTurns],
    prompts: Prompts,
    params: Sequence[SamplingParams],
    repeats: int,
    *,
    separate: bool = False,
) -> dict[Way, Pairs]:
    """Measures one batch: an engine with drafts next to two engines without.

    The first turn is not counted. Each run takes the prompts that follow those of the run before.
    After the last prompt the first one comes again.

    Args:
        engines: The engines by their ways to draft.
        prompts: The prompts, of which each run takes one for each row.
        params: The sampling parameters of each row of the batch.
        repeats: The turns that are counted.
        separate: True gives each request a cache salt of its own, so that no method drafts from
            what the same prompt became in an earlier run, or in another row.
    """
    pairs: dict[Way, Pairs] = {way: [] for way in engines}
    ways = list(engines)
    runs_of_a_turn = -(-TOKENS_OF_A_TURN // sum(param.max_tokens or 0 for param in params))
    for index in range((1 + repeats) * runs_of_a_turn):
        ways.append(ways.pop(0))  # so that each engine is first in its turn
        first = (index - runs_of_a_turn) * len(params)  # what is counted begins with the first
        rows = [prompts[(first + row) % len(prompts)] for row in range(len(params))]
        if separate:
            params = [replace(each, cache_salt=f"{index} {row}") for row, each in enumerate(params)]
        for (method, _), engine in engines.items():
            if method == ORACLE:
                known = _run_together([engines[ALONE]], rows, params)[0]
                engine.learn(rows, params, known.outputs)
        runs = dict(
            zip(ways, _run_together([engines[each] for each in ways], rows, params), strict=True)
        )
        if index >= runs_of_a_turn:
            seconds = (runs[ALONE].seconds + runs[CONTROL].seconds) / 2
            for each, run in runs.items():
                pairs[each].append((runs[ALONE]._replace(seconds=seconds), run))
    return pairs


def _run_together(
    engines: Sequence[EngineInTurns], prompts: Prompts, params: Sequence[SamplingParams]
) -> list[EngineRun]:
    """Runs engines in turns of a few milliseconds.

    A turn is a token of each sequence of the engine that has had the least time so far. So anything
    else that runs on the machine slows all engines alike. If one whole run followed the other, they
    could differ by a tenth for that reason alone.
    """
    for engine in engines:
        engine.begin(prompts, params)
    seconds = dict.fromkeys(engines, 0.0)  # engines that are done are removed
    while seconds:
        engine = min(seconds, key=seconds.__getitem__)
        seconds[engine], goes_on = engine.go_on()
        if not goes_on:
            del seconds[engine]
    return [engine.end() for engine in engines]


def _cell(batch: int, way: Way, num_tokens: int, pairs: Pairs, task: str = "") -> Cell:
    """Returns the medians of some pairs.

    Args:
        batch: The number of sequences.
        way: The way to draft.
        num_tokens: The tokens of all sequences in a run.
        pairs: The runs.
        task: The task of the prompts.
    """
    method, number = way
    ratios = [none.seconds / run.seconds for none, run in pairs]
    shares = zip_longest(*(run.accepted for _, run in pairs), fillvalue=0.0)
    return Cell(
        batch,
        _method_and_model(method)[0] + ("+tree" if method.endswith("+tree") else ""),
        number,
        tokens_per_step=median(run.tokens_per_step for _, run in pairs),
        tokens_per_second=median(num_tokens / run.seconds for _, run in pairs),
        ratio=median(ratios),
        identical=all(none.outputs == run.outputs for none, run in pairs),
        task=task,
        ratios=(min(ratios), max(ratios)),
        accepted=tuple(median(each) for each in shares),
    )


def table(cells: Sequence[Cell]) -> str:
    """Returns a row for each way at each batch of a task; a star marks the fastest of a batch.

    With an oracle, a column has each ratio as a share of that of the oracle with as many drafts.
    """
    has_tasks = any(cell.task for cell in cells)
    tasks = ["task"] if has_tasks else []
    oracles = {_case(cell): cell.ratio for cell in cells if cell.method == ORACLE}
    shares = ["of oracle"] if oracles else []
    rows = [[*tasks, "drafts", "batch", "tokens/step", "tokens/s", "ratio", *shares, "same text"]]
    for cell in cells:
        ratios = [
            other.ratio for other in cells if (other.task, other.batch) == (cell.task, cell.batch)
        ]
        numbers = (
            f"{cell.tokens_per_step:.2f}",
            f"{cell.tokens_per_second:.1f}",
            f"{cell.ratio:.3f}",
        )
        share = f"{cell.ratio / oracles[_case(cell)]:.2f}" if _case(cell) in oracles else ""
        mark = "*" if len(ratios) > 1 and cell.ratio == max(ratios) else ""
        rows.append(
            [
                *([cell.task] if has_tasks else []),
                cell.way,
                str(cell.batch),
                *numbers[:2],
                numbers[2] + mark,
                *([share] if oracles else []),
                "yes" if cell.identical else "no",
            ]
        )
    return "\n".join(align(rows, num_words=1 + has_tasks))


def _case(cell: Cell) -> tuple[str, int, str]:
    """Returns what a cell has in common with that of the oracle."""
    return cell.task, cell.batch, cell.num_speculative_tokens


def auto_text(cells: Sequence[Cell]) -> str:
    """Returns how near `auto` came to the best choice of the table, none included; may be empty."""
    shares = []
    for cell in cells:
        if cell.num_speculative_tokens == "auto":
            fixed = [
                other.ratio
                for other in cells
                if (other.task, other.batch, other.method) == (cell.task, cell.batch, cell.method)
                and other.num_speculative_tokens.isdigit()
            ]
            shares.append((cell.ratio / max([1.0, *fixed]), cell))
    if not shares:
        return ""
    share, cell = min(shares, key=lambda pair: pair[0])
    place = f"{cell.method}, batch {cell.batch}" + (f", {cell.task}" if cell.task else "")
    minimum = min(cell.ratio for _, cell in shares)
    return (
        f"auto: at least {share:.2f} of the best fixed choice ({place}), {minimum:.2f} of no drafts"
    )


def _check(arguments: argparse.Namespace, config: EngineConfig) -> None:
    methods = [_method_and_model(requested)[0] for requested in arguments.methods]
    if NONE in methods:
        raise UsageError("--methods none: engines without drafts run with each method in any case")
    if config.speculative_config is not None and config.speculative_config.method not in methods:
        method = config.speculative_config.method
        raise UsageError(
            f"--methods {' '.join(methods)}: speculative_config is for {method}, name it in "
            "--methods, too"
        )
    if ORACLE in methods:
        raise UsageError("--methods oracle: use --oracle, which measures it beside the others")
    if unknown := [task for task in arguments.tasks if task not in TASKS]:
        raise UsageError(f"--tasks {unknown[0]}: it is not one of {', '.join(TASKS)}")
    for name in ("batches", "num_speculative_tokens"):
        if min(getattr(arguments, name)) < 1:
            raise UsageError(
                f"--{name.replace('_', '-')} must be at least 1, got "
                f"{min(getattr(arguments, name))}"
            )
    for name in ("starts", "repeats", "max_output"):
        if getattr(arguments, name) < 1:
            raise UsageError(
                f"--{name.replace('_', '-')} must be at least 1, got {getattr(arguments, name)}"
            )
    if arguments.plot:
        check_plot(arguments.plot)
    if arguments.temperature < 0:
        raise UsageError(f"--temperature must not be negative, got {arguments.temperature:g}")
    if arguments.seed is not None and arguments.seed < 0:
        raise UsageError(f"--seed must not be negative, got {arguments.seed}")


def _method_and_model(requested: str) -> tuple[str, str]:
    """Returns the parts of NAME[=MODEL][+tree]."""
    method, _, model = requested.removesuffix("+tree").partition("=")
    return method, model


def _ways(arguments: argparse.Namespace) -> list[Way]:
    """Returns pairs of a method and a number of drafts."""
    numbers = [*map(str, arguments.num_speculative_tokens), "auto"]
    methods = [*arguments.methods, *([ORACLE] if arguments.oracle else [])]
    ways = [(requested, number) for requested in methods for number in numbers]
    ways = [
        (requested, number)
        for requested, number in ways
        if number != "auto" or not METHODS.get(_method_and_model(requested)[0], Method()).is_fixed
    ]
    return [ALONE, *ways, CONTROL]


def _size_config(config: EngineConfig, batch: int, num_tokens: int) -> EngineConfig:
    """Returns a configuration that is just large enough: three engines are in memory at once."""
    length = config.max_model_len or num_tokens
    block_size = USUAL_BLOCK_SIZE if config.block_size == "auto" else config.block_size
    return config.replace(
        max_model_len=length,
        block_size=block_size,
        num_blocks=config.num_blocks or 1 + batch * (1 + -(-length // block_size)),
        max_num_seqs=batch,
        enable_prefix_caching=False,
    )


def _config(config: EngineConfig, way: Way) -> EngineConfig:
    """Returns the configuration of one way to draft.

    Raises:
        UsageError: There is no such method, or it needs a setting that was not given.
    """
    requested, number = way
    method, model = _method_and_model(requested)
    drafts: Any = None
    if method != NONE:
        drafts = {
            # The oracle takes the place of a method that drafts chains on the host.
            "method": "ngram" if method == ORACLE else method,
            "num_speculative_tokens": number if number == "auto" else int(number),
        }
        drafts |= {"tree": True} if requested.endswith("+tree") else {}
        drafts |= {"model": model} if model else {}
        if config.speculative_config is not None:
            fields = config.speculative_config.model_dump(exclude_unset=True)
            # The settings of acceptance hold for all methods, all others for their own method.
            if fields["method"] != method:
                fields = {name: value for name, value in fields.items() if "acceptance" in name}
            drafts = {**fields, **drafts}
    try:
        return config.replace(speculative_config=drafts)
    except (ValueError, UnsupportedError) as error:
        raise UsageError(f"--methods {requested}: {error}") from None


def _prompts(arguments: argparse.Namespace, config: EngineConfig) -> Mapping[str, Prompts]:
    """Returns the prompts of each task; without tasks, those of the largest batch under "".

    Prompts of no task have 64 tokens each: parts of the text of `--text` or of the packaged tales.
    After random ids no drafter is right, so only a model without a tokenizer gets them.
    """
    count = max(arguments.batches)
    has_random_ids = not (arguments.tasks or arguments.text) and tokenizer_of(config) is None
    if arguments.seed is not None and not has_random_ids:
        raise UsageError(
            "--seed draws token ids for a model without a tokenizer; here it has no use"
        )
    if arguments.tasks:
        return prompts_of_tasks(arguments.tasks, config)
    if has_random_ids:
        vocab_size = read_config(resolve_model(config.model, config.revision))["vocab_size"]
        draw = np.random.default_rng(arguments.seed or 0)
        drawn = [draw.integers(0, vocab_size, NUM_INPUT_TOKENS).tolist() for _ in range(count)]
        return {"": drawn}
    with resources.as_file(resources.files("jaxpage.bench") / "tales.txt") as tales:
        token_ids = read_token_ids(arguments.text or str(tales), config)
    if len(token_ids) < NUM_INPUT_TOKENS:
        raise UsageError(
            f"--text {arguments.text}: at least {NUM_INPUT_TOKENS} tokens are needed, got "
            f"{len(token_ids)}"
        )
    room = len(token_ids) - NUM_INPUT_TOKENS
    starts = [room * index // max(1, count - 1) for index in range(count)]
    return {"": [token_ids[start : start + NUM_INPUT_TOKENS] for start in starts]}
