"""Runs the commands.

Each command imports what it needs when it runs, because loading jax takes seconds and checking a
configuration does not.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from jaxpage.cli.flags import PLANNED_SETTINGS
from jaxpage.cli.resolving import engine, reporter, resolve_both_settings, resolve_settings, say
from jaxpage.errors import UsageError
from jaxpage.serving import AUTO, ServerConfig, bind_socket
from jaxpage.settings.argument_checks import count
from jaxpage.settings.engine_config import EngineConfig
from jaxpage.settings.sources import BUILT_IN, Resolved, ResolvedConfig

if TYPE_CHECKING:
    from jaxpage.replay import Report


def serve(arguments: argparse.Namespace) -> int:
    """Runs `jaxpage serve [MODEL]` until a signal ends it, and returns the exit status."""
    settings, server = resolve_both_settings(arguments)
    if server.config.models_file is not None:
        return _serve_several(settings, server)
    if settings.origins["model"] == BUILT_IN:
        raise UsageError(
            "serve which model? jaxpage serve demo, a directory, a GGUF file, a hub id, or "
            "--config FILE with a model"
        )
    config = server.config
    if config.coordinator == AUTO:
        from jaxpage.serving import hosts_of_job

        config = hosts_of_job(settings.config, config)
    if config.host_rank:
        from jaxpage.serving import follow

        return follow(settings.config, config)
    with bind_socket(config) as listener:
        # The settings and the address are checked first, because this imports jax.
        from jaxpage.serving import start

        return start(settings.config, config, listener)


def _serve_several(settings: ResolvedConfig, server: Resolved[ServerConfig]) -> int:
    """Runs `jaxpage serve --models FILE`, and returns the exit status."""
    from jaxpage.serving import read_models_file

    if explicit := [name for name, origin in settings.origins.items() if origin != BUILT_IN]:
        raise UsageError(
            f"--models FILE does not go with {', '.join(explicit)}: the file has the models and "
            "the settings of each"
        )
    config = server.config
    assert config.models_file is not None
    entries, memory_bytes = read_models_file(Path(config.models_file), config)
    with bind_socket(config) as listener:
        # The settings and the address are checked first, because this imports jax.
        from jaxpage.serving import start_several

        return start_several(entries, memory_bytes, config, listener)


def run_batch(arguments: argparse.Namespace) -> None:
    """Runs `jaxpage run-batch IN OUT`, which prints one line about what was done."""
    settings, server = resolve_both_settings(arguments)
    if arguments.sort_window < 1:
        raise UsageError(f"--sort-window must be at least 1, not {arguments.sort_window}")
    from jaxpage.serving import run_batch as answer_batch

    done = answer_batch(
        settings.config,
        server.config,
        Path(arguments.input),
        Path(arguments.output),
        window=arguments.sort_window,
        quiet=arguments.quiet,
    )
    print(done.summary)


def convert(arguments: argparse.Namespace) -> None:
    """Runs `jaxpage convert SRC DST`, which writes a checkpoint in another format."""
    from jaxpage.checkpoints import convert as convert_checkpoint
    from jaxpage.checkpoints.finding import resolve_model

    source = resolve_model(arguments.source)
    say(f"Written to {convert_checkpoint(source, arguments.destination, progress=True)}")


def plan(arguments: argparse.Namespace) -> int | None:
    """Runs `jaxpage plan MODEL`, also for settings that this version refuses to run.

    Args:
        arguments: The command line.

    Returns:
        The exit status with `--slo`, which is 1 if `--rate` is not sustained; otherwise None.
    """
    for name in ("rate", "costs", "dataset", "max_input", "max_output"):
        if arguments.slo is None and getattr(arguments, name) is not None:
            raise UsageError(f"--{name.replace('_', '-')} goes with --slo ttft=MS,tpot=MS")
    if arguments.devices is not None and (arguments.devices < 1 or arguments.slo is not None):
        raise UsageError("--devices must be a number from 1 on, and does not go with --slo")
    # They are taken out of the command line, because EngineConfig refuses values that cannot be
    # run.
    planned = {
        name: vars(arguments).pop(name) for name in PLANNED_SETTINGS if name in vars(arguments)
    }
    config = resolve_settings(arguments).config
    if arguments.slo is not None:
        from jaxpage.cli.plan_rate import run as run_rate

        return run_rate(arguments, config, planned)
    # The configuration is checked first, because this imports jax.
    from jaxpage.cli.plan import run

    run(arguments, config, planned)
    return None


def compile_menu(arguments: argparse.Namespace) -> None:
    """Runs `jaxpage compile`, which compiles an engine's executables into the compile cache."""
    with engine(
        resolve_settings(arguments).config, quiet=arguments.quiet, verbose=not arguments.quiet
    ) as llm:
        seconds = llm.stats()["compile_seconds_total"]
    reporter(arguments)(f"All executables are in the compile cache; this took {seconds:.1f} s")


def config_show(arguments: argparse.Namespace) -> None:
    """Runs `jaxpage config show`, which prints the effective settings and their origins as YAML."""
    settings, server = resolve_both_settings(arguments)
    print("\n".join([*settings.lines(), "server:", *(f"  {line}" for line in server.lines())]))


def config_validate(arguments: argparse.Namespace) -> None:
    """Runs `jaxpage config validate FILE`, which prints nothing but the verdict."""
    resolve_both_settings(arguments)
    say(f"{arguments.file or arguments.config or 'The configuration'} is valid")


def doctor(arguments: argparse.Namespace) -> None:
    """Runs `jaxpage doctor`, which reports versions, devices, memory and caches.

    On a terminal long lines are broken; elsewhere each value is one line, for grep.
    """
    from jaxpage.cli.doctor import report

    columns = shutil.get_terminal_size().columns
    for name, value in report(arguments.model):
        lines = [value]
        if sys.stdout.isatty():
            # A name takes 20 columns and a space. For an empty value `wrap` returns no line at all.
            lines = textwrap.wrap(value, max(columns - 21, 20), break_on_hyphens=False) or [""]
        print(f"{name:<20} " + f"\n{'':<21}".join(lines))


def bench_throughput(arguments: argparse.Namespace) -> int:
    """Runs `jaxpage bench throughput`; the status is 1 if it is slower than `--fail-below`."""
    from jaxpage.bench import run_throughput

    config = resolve_settings(arguments, excluded=("seed",)).config
    # `bench` must not import `serving`, which is on the same floor (tests/test_architecture.py).
    return run_throughput(arguments, config, answer_batch=_answer_batch)


def _answer_batch(config: EngineConfig, source: Path, target: Path, model: str) -> float:
    """Runs a file of requests as `run_batch` does, and returns the seconds of the run."""
    from jaxpage.serving import ServerConfig
    from jaxpage.serving import run_batch as answer_batch

    server = ServerConfig(served_model_name=(model,))
    return answer_batch(config, server, source, target, quiet=True).seconds


def bench_latency(arguments: argparse.Namespace) -> None:
    """Runs `jaxpage bench latency`."""
    from jaxpage.bench import run_latency

    run_latency(arguments, resolve_settings(arguments, excluded=("seed",)).config)


def bench_serve(arguments: argparse.Namespace) -> int:
    """Runs `jaxpage bench serve`, and returns the exit status."""
    from jaxpage.bench import run_serve

    return run_serve(arguments)


def bench_startup(arguments: argparse.Namespace) -> None:
    """Runs `jaxpage bench startup`."""
    from jaxpage.bench import run_startup

    run_startup(arguments, resolve_settings(arguments).config)


def bench_roofline(arguments: argparse.Namespace) -> None:
    """Runs `jaxpage bench roofline`."""
    from jaxpage.bench import run_roofline

    arguments.max_num_seqs = max(1, *arguments.batches)
    run_roofline(arguments, resolve_settings(arguments).config)


def bench_kv_dtype(arguments: argparse.Namespace) -> None:
    """Runs `jaxpage bench kv-dtype`."""
    from jaxpage.bench import run_kv_dtype

    run_kv_dtype(arguments, resolve_settings(arguments, excluded=("seed",)).config)


def bench_quantization(arguments: argparse.Namespace) -> None:
    """Runs `jaxpage bench quantization`."""
    from jaxpage.bench import run_quantization

    arguments.max_num_seqs = max(1, *arguments.batches)
    run_quantization(arguments, resolve_settings(arguments, excluded=("seed",)).config)


def bench_speculation(arguments: argparse.Namespace) -> None:
    """Runs `jaxpage bench speculation`."""
    from jaxpage.bench import run_speculation

    # The default max_num_seqs would refuse a step budget with fewer tokens than sequences.
    arguments.max_num_seqs = max(1, *arguments.batches)
    run_speculation(arguments, resolve_settings(arguments, excluded=("seed",)).config)


def replay(arguments: argparse.Namespace) -> int:
    """Runs `jaxpage replay LOG`; with --request, --texts, --diff or --state it builds no engine.

    Args:
        arguments: The command line.

    Returns:
        The exit status, which is 1 after a difference.
    """
    if not Path(arguments.log).is_file():
        raise UsageError(f"there is no event log {arguments.log}")
    from jaxpage.replay.reading import (
        check_until,
        first_difference,
        header_differences,
        state_lines,
    )

    log = arguments.log
    until = arguments.until
    if until is not None:
        check_until(until, log)
    if arguments.state:
        print("\n".join(state_lines(log, until)))
        return 0
    if arguments.request is not None or arguments.texts is not None:
        _show_texts(arguments)
        return 0
    if arguments.diff is not None:
        if not Path(arguments.diff).is_file():
            raise UsageError(f"there is no event log {arguments.diff}")
        for line in header_differences(log, arguments.diff):
            say(f"The headers differ: {line}")
        difference = first_difference(log, arguments.diff, until)
        print(difference or "The events are identical")
        return 1 if difference else 0
    report = _replay_log(arguments)
    if report is None:
        say("The incident cannot be run again, so its snapshots do not say which blocks are cached")
        return 0
    if report.ending:
        say(report.ending)
    print(
        report.difference
        or f"{count(report.num_steps, 'step')}, {count(report.num_tokens, 'token')}, identical"
    )
    if until is not None and not report.difference:
        print("\n".join(state_lines(log, until)))
    return 1 if report.difference else 0


def _show_texts(arguments: argparse.Namespace) -> None:
    """Runs `jaxpage replay LOG` with --request or --texts."""
    from jaxpage.replay import check_new, write_log
    from jaxpage.replay.reading import request_lines, tokenizer_of_log, with_texts
    from jaxpage.serving import TokenTexts

    log = arguments.log
    until = arguments.until
    tokenizer = tokenizer_of_log(log, arguments.model)
    text_of = TokenTexts(tokenizer)
    if arguments.request is not None:
        lines = request_lines(log, arguments.request, until, text_of if tokenizer else None)
        print("\n".join(lines))
    elif tokenizer is None:
        raise UsageError(
            "the tokenizer of the log is not on this machine; --model PATH names its directory"
        )
    else:
        check_new(arguments.texts)
        write_log(arguments.texts, with_texts(log, text_of, until))


def _replay_log(arguments: argparse.Namespace) -> Report | None:
    """Runs the log, and writes snapshots if they are asked for.

    Returns:
        The report, or None for snapshots of an incident that cannot be run again.
    """
    from jaxpage.replay import replay as replay_log

    log = arguments.log
    path = arguments.snapshots
    names = ("model", "force", "until", "weights")
    run = {name: getattr(arguments, name) for name in names}
    if path is None:
        return replay_log(log, **run)
    from jaxpage.replay.reading import tokenizer_of_log
    from jaxpage.serving import TokenTexts, write_snapshots

    tokenizer = tokenizer_of_log(log, arguments.model)
    return write_snapshots(Path(path), log, TokenTexts(tokenizer) if tokenizer else None, **run)
