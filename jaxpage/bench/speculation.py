"""`jaxpage bench speculation`: tokens per step and per second with drafts, by batch and by how drafts are made, beside none."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np
from tqdm import tqdm

from jaxpage.bench.engine_process import EngineInTurns, Prompts, Run, engine_process
from jaxpage.bench.file_texts import read_token_ids
from jaxpage.bench.report import environment, print_result
from jaxpage.checkpoints import read_config, resolve_model
from jaxpage.errors import UnsupportedError, UsageError
from jaxpage.settings.engine_config import EngineConfig
from jaxpage.settings.sampling_params import SamplingParams
from jaxpage.settings.speculative_config import FIXED
from jaxpage.tables import aligned

NONE = "none"
ALONE = NONE, ""
# another engine without drafts: what the two differ by is not the doing of drafts
CONTROL = NONE, "again"
NUM_INPUT_TOKENS = 64  # of a prompt
# Of each engine, at least: one sequence runs several times, or `auto` would be measured while it
# still finds out what pays.
TOKENS_OF_A_TURN = 512
Way = tuple[str, str]  # a method, and a number of drafts or "auto"
# one that took as long as the mean of the two without drafts, and the one beside them
Pairs = list[tuple[Run, Run]]


@dataclass(frozen=True)
class Cell:
    """One way to draft at one batch: medians over the repeats of all starts."""

    batch: int
    method: str
    # a number or "auto"; without drafts nothing, and "again" of the second engine
    num_speculative_tokens: str
    tokens_per_step: float  # of a sequence, behind its first token
    tokens_per_second: float
    ratio: float  # tokens per second to those of the two engines without drafts beside it
    identical: bool  # whether the tokens are those without drafts, in every repeat


def run(arguments: argparse.Namespace, config: EngineConfig) -> None:
    """Prints a table and, as the last line, one JSON object. Raises UsageError for flags that do not fit together."""
    _check(arguments, config)
    ways = _ways(arguments)
    config = _sized(config, max(arguments.batches), NUM_INPUT_TOKENS + arguments.max_output)
    configs = {way: _config(config, way) for way in ways}
    prompts = _prompts(arguments, config)
    params = [
        SamplingParams(
            temperature=arguments.temperature,
            max_tokens=arguments.max_output,
            ignore_eos=True,
            seed=seed,
        )
        for seed in range(len(prompts))
    ]
    pairs: dict[tuple[int, Way], Pairs] = {
        (batch, way): [] for batch in arguments.batches for way in ways
    }
    each_start = [
        (start, way)
        for start in range(1, 1 + arguments.starts)
        for way in ways
        if way not in (ALONE, CONTROL)
    ]
    with tqdm(total=len(each_start) * (1 + len(arguments.batches)), disable=None) as bar:
        for start, way in each_start:
            bar.set_description(f"Start {start} of {arguments.starts}, {' '.join(way)}")
            with ExitStack() as stack:
                engines = {
                    each: stack.enter_context(engine_process(configs[each]))
                    for each in (ALONE, way, CONTROL)
                }
                bar.update()
                for batch in arguments.batches:
                    for each, more in measure(
                        engines, prompts[:batch], params[:batch], arguments.repeats
                    ).items():
                        pairs[batch, each] += more
                    bar.update()
    cells = [
        _cell(batch, way, batch * arguments.max_output, runs)
        for (batch, way), runs in pairs.items()
    ]
    print(table(cells))
    print(
        f"{arguments.max_output} tokens of each sequence, temperature {arguments.temperature:g}; ratio: to the mean of none and none again"
    )
    context = {
        name: getattr(arguments, name)
        for name in ("temperature", "max_output", "starts", "repeats", "text", "seed")
    }
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
) -> dict[Way, Pairs]:
    """One batch: drafts beside the two engines without. The first of the turns is not counted."""
    pairs: dict[Way, Pairs] = {way: [] for way in engines}
    ways = list(engines)
    runs_of_a_turn = -(-TOKENS_OF_A_TURN // sum(param.max_tokens or 0 for param in params))
    for index in range((1 + repeats) * runs_of_a_turn):
        ways.append(ways.pop(0))  # another one begins
        runs = dict(
            zip(ways, _run_together([engines[each] for each in ways], prompts, params), strict=True)
        )
        if index >= runs_of_a_turn:
            seconds = (runs[ALONE].seconds + runs[CONTROL].seconds) / 2
            for each, run in runs.items():
                pairs[each].append((runs[ALONE]._replace(seconds=seconds), run))
    return pairs


def _run_together(
    engines: Sequence[EngineInTurns], prompts: Prompts, params: Sequence[SamplingParams]
) -> list[Run]:
    """In turns of a few milliseconds: a token of each sequence of the engine that has had the least time so far.

    So whatever else the machine does slows all alike. One whole run behind the other may differ by a tenth for that alone.
    """
    for engine in engines:
        engine.begin(prompts, params)
    seconds = dict.fromkeys(engines, 0.0)  # of those that are not through
    while seconds:
        engine = min(seconds, key=seconds.__getitem__)
        seconds[engine], goes_on = engine.go_on()
        if not goes_on:
            del seconds[engine]
    return [engine.end() for engine in engines]


def _cell(batch: int, way: Way, wanted: int, pairs: Pairs) -> Cell:
    """wanted: tokens of all sequences."""
    method, number = way
    return Cell(
        batch,
        _method_and_model(method)[0] + ("+tree" if method.endswith("+tree") else ""),
        number,
        tokens_per_step=median(run.tokens_per_step for _, run in pairs),
        tokens_per_second=median(wanted / run.seconds for _, run in pairs),
        ratio=median(none.seconds / run.seconds for none, run in pairs),
        identical=all(none.outputs == run.outputs for none, run in pairs),
    )


def table(cells: Sequence[Cell]) -> str:
    """A row for each way at each batch; the best of a batch in seconds is marked."""
    rows = [["drafts", "batch", "tokens/step", "tokens/s", "ratio", "same text"]]
    for cell in cells:
        best = max(other.ratio for other in cells if other.batch == cell.batch)
        way = f"{cell.method} {cell.num_speculative_tokens}".strip()
        numbers = (
            f"{cell.tokens_per_step:.2f}",
            f"{cell.tokens_per_second:.1f}",
            f"{cell.ratio:.3f}",
        )
        mark = "*" if cell.ratio == best else ""
        rows.append(
            [
                way,
                str(cell.batch),
                *numbers[:2],
                numbers[2] + mark,
                "yes" if cell.identical else "no",
            ]
        )
    return "\n".join(aligned(rows, num_words=1))


def _check(arguments: argparse.Namespace, config: EngineConfig) -> None:
    methods = [_method_and_model(asked)[0] for asked in arguments.methods]
    if NONE in methods:
        raise UsageError(
            "--methods none: engines without drafts run beside each method in any case"
        )
    if config.speculative_config is not None and config.speculative_config.method not in methods:
        given = config.speculative_config.method
        raise UsageError(
            f"--methods {' '.join(methods)}: speculative_config is for {given}, name it in --methods, too"
        )
    for name in ("batches", "num_speculative_tokens"):
        if min(getattr(arguments, name)) < 1:
            raise UsageError(
                f"--{name.replace('_', '-')} must be at least 1, got {min(getattr(arguments, name))}"
            )
    for name in ("starts", "repeats", "max_output"):
        if getattr(arguments, name) < 1:
            raise UsageError(
                f"--{name.replace('_', '-')} must be at least 1, got {getattr(arguments, name)}"
            )
    if arguments.temperature < 0:
        raise UsageError(f"--temperature must not be negative, got {arguments.temperature:g}")
    if arguments.seed < 0:
        raise UsageError(f"--seed must not be negative, got {arguments.seed}")


def _method_and_model(asked: str) -> tuple[str, str]:
    """Of NAME[=MODEL][+tree]."""
    method, _, model = asked.removesuffix("+tree").partition("=")
    return method, model


def _ways(arguments: argparse.Namespace) -> list[Way]:
    """Pairs of a method and a number of drafts."""
    numbers = [*map(str, arguments.num_speculative_tokens), "auto"]
    ways = [(asked, number) for asked in arguments.methods for number in numbers]
    ways = [
        (asked, number)
        for asked, number in ways
        if number != "auto" or _method_and_model(asked)[0] not in FIXED
    ]
    return [ALONE, *ways, CONTROL]


def _sized(config: EngineConfig, batch: int, num_tokens: int) -> EngineConfig:
    """Just large enough, since three engines lie side by side in memory."""
    length = config.max_model_len or num_tokens
    num_blocks = config.num_blocks or 1 + batch * (1 + -(-length // config.block_size))
    return config.replace(
        max_model_len=length, num_blocks=num_blocks, max_num_seqs=batch, enable_prefix_caching=False
    )


def _config(config: EngineConfig, way: Way) -> EngineConfig:
    """Raises UsageError for a method that there is not, or that needs what was not given."""
    asked, number = way
    method, model = _method_and_model(asked)
    drafts: Any = None
    if method != NONE:
        drafts = {
            "method": method,
            "num_speculative_tokens": number if number == "auto" else int(number),
        }
        drafts |= {"tree": True} if asked.endswith("+tree") else {}
        drafts |= {"model": model} if model else {}
        if config.speculative_config is not None:
            given = config.speculative_config.model_dump(exclude_unset=True)
            # how drafts are accepted holds for all methods, all else for its own
            if given["method"] != method:
                given = {name: value for name, value in given.items() if "acceptance" in name}
            drafts = {**given, **drafts}
    try:
        return config.replace(speculative_config=drafts)
    except (ValueError, UnsupportedError) as error:
        raise UsageError(f"--methods {asked}: {error}") from None


def _prompts(arguments: argparse.Namespace, config: EngineConfig) -> Prompts:
    """Of 64 tokens each: parts of the text, or random ids."""
    count = max(arguments.batches)
    if arguments.text is None:
        vocab_size = read_config(resolve_model(config.model, config.revision))["vocab_size"]
        draw = np.random.default_rng(arguments.seed)
        return [draw.integers(0, vocab_size, NUM_INPUT_TOKENS).tolist() for _ in range(count)]
    token_ids = read_token_ids(arguments.text, config)
    if len(token_ids) < NUM_INPUT_TOKENS:
        raise UsageError(
            f"--text {arguments.text}: at least {NUM_INPUT_TOKENS} tokens are needed, got {len(token_ids)}"
        )
    room = len(token_ids) - NUM_INPUT_TOKENS
    starts = [room * index // max(1, count - 1) for index in range(count)]
    return [token_ids[start : start + NUM_INPUT_TOKENS] for start in starts]
