"""What the commands do. Each imports what it needs when it runs: loading jax takes seconds, checking a configuration none."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxpage.cli_flags import PLANNED_SETTINGS, UsageError, engine_settings, sampling_settings, server_settings
from jaxpage.config import EngineConfig
from jaxpage.config_sources import BUILT_IN, Resolved, ResolvedConfig, resolve_config
from jaxpage.errors import UnsupportedError
from jaxpage.outputs import RequestMetrics, RequestOutput
from jaxpage.sampling_params import SamplingParams
from jaxpage.serving.config import ServerConfig, resolve_both

if TYPE_CHECKING:
    from jaxpage.llm import LLM

DEFAULT_MAX_TOKENS = 200


def say(text: str) -> None:
    """A line for the person at the terminal; standard output is for the text alone."""
    print(text, file=sys.stderr, flush=True)


def generate(arguments: argparse.Namespace) -> int:
    """`jaxpage generate PROMPT`: streams the continuation."""
    given = _sampling(arguments)
    prompt = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    if not prompt:
        raise UsageError("the prompt is empty")
    with _engine_for_one(arguments) as llm:
        params = _with_model_defaults(llm, given)
        with _refusals():
            chunks = llm.stream(prompt, params)
        if arguments.echo:
            print(prompt, end="", flush=True)
        last = _print_stream(chunks)
    return 1 if last.outputs[0].finish_reason in ("abort", "error") else 0


def chat(arguments: argparse.Namespace) -> None:
    """`jaxpage chat`: one conversation; an empty line or the end of the input ends it."""
    given = _sampling(arguments)
    system = [{"role": "system", "content": arguments.system}] if arguments.system else []
    with _engine_for_one(arguments) as llm:
        with _refusals():
            llm.chat_prompt(
                [*system, {"role": "user", "content": "Hello"}]
            )  # a model without template is refused at once
        params = _with_model_defaults(llm, given)
        say("An empty line ends the conversation, /reset begins a new one, Ctrl-C cuts an answer short.")
        messages = list(system)
        while question := _ask():
            if question == "/reset":
                messages = list(system)
                continue
            messages.append({"role": "user", "content": question})
            answer: list[str] = []
            with _refusals():
                chunks = llm.stream(llm.chat_prompt(messages), params)
            with contextlib.suppress(KeyboardInterrupt):
                _print_stream(chunks, answer)
            messages.append({"role": "assistant", "content": "".join(answer)})


def serve(arguments: argparse.Namespace) -> int:
    """`jaxpage serve [MODEL]`: until somebody ends it."""
    engine, server = _resolved_both(arguments)
    if engine.origins["model"] == BUILT_IN:
        raise UsageError("serve which model? jaxpage serve demo, a directory, a hub id, or --config FILE with a model")
    from jaxpage.serving.startup import start  # after the configuration is known to be right: this imports jax

    return start(engine.config, server.config)


def convert(arguments: argparse.Namespace) -> None:
    """`jaxpage convert SRC DST`."""
    from jaxpage.checkpoints import convert as convert_checkpoint
    from jaxpage.checkpoints import resolve_model

    source = resolve_model(arguments.source)
    say(f"Written to {convert_checkpoint(source, arguments.destination, progress=True)}")


def plan(arguments: argparse.Namespace) -> None:
    """`jaxpage plan MODEL`: also for settings that this version refuses to run."""
    planned = {name: vars(arguments).pop(name) for name in PLANNED_SETTINGS if name in vars(arguments)}
    config = _resolved(arguments).config
    from jaxpage.cli_plan import run  # after the configuration is known to be right: this imports jax

    run(arguments, config, planned)


def compile_menu(arguments: argparse.Namespace) -> None:
    """`jaxpage compile`: what an engine compiles at its start, kept for the next start."""
    with _engine(_resolved(arguments).config) as llm:
        stats = llm.stats()
    say(f"Compiled {stats['compile_total']} executables in {stats['compile_seconds_total']:.1f} s")


def config_show(arguments: argparse.Namespace) -> None:
    """`jaxpage config show`: the effective settings, as YAML, each with its origin."""
    engine, server = _resolved_both(arguments)
    print("\n".join([*engine.lines(), "server:", *(f"  {line}" for line in server.lines())]))


def config_validate(arguments: argparse.Namespace) -> None:
    """`jaxpage config validate FILE`: silent about anything but the verdict."""
    _resolved_both(arguments)
    say(f"{arguments.file or arguments.config or 'The configuration'} is valid")


def doctor(arguments: argparse.Namespace) -> None:
    """`jaxpage doctor`."""
    from jaxpage.cli_doctor import report

    for name, value in report():
        print(f"{name:<20} {value}")


def bench_throughput(arguments: argparse.Namespace) -> None:
    """`jaxpage bench throughput`."""
    from jaxpage.bench.throughput import run

    run(arguments, _resolved(arguments, without=("seed",)).config)


def bench_latency(arguments: argparse.Namespace) -> None:
    """`jaxpage bench latency`."""
    from jaxpage.bench.latency import run

    run(arguments, _resolved(arguments, without=("seed",)).config)


def bench_serve(arguments: argparse.Namespace) -> int:
    """`jaxpage bench serve`."""
    from jaxpage.bench.serve import run

    return run(arguments)


def bench_kv_dtype(arguments: argparse.Namespace) -> None:
    """`jaxpage bench kv-dtype`."""
    from jaxpage.bench.kv_dtype import run

    run(arguments, _resolved(arguments, without=("seed",)).config)


def bench_speculation(arguments: argparse.Namespace) -> None:
    """`jaxpage bench speculation`."""
    from jaxpage.bench.speculation import run

    run(arguments, _resolved(arguments, without=("seed",)).config)


def replay(arguments: argparse.Namespace) -> int:
    """`jaxpage replay LOG`: status 1 at a difference."""
    if not Path(arguments.log).is_file():
        raise UsageError(f"there is no event log {arguments.log}")
    from jaxpage.engine.replay import replay as replay_log

    report = replay_log(arguments.log, model=arguments.model, force=arguments.force)
    if report.ending:
        say(report.ending)
    print(report.difference or f"{report.num_steps} steps, {report.num_tokens} tokens, identical")
    return 1 if report.difference else 0


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """An engine refuses a bad prompt or parameter with ValueError, before anything runs: that is wrong use."""
    try:
        yield
    except ValueError as error:
        raise UsageError(str(error)) from error


def _sampling(arguments: argparse.Namespace) -> dict[str, Any]:
    """The given sampling parameters, refused before a model is loaded if they are wrong."""
    given = {"max_tokens": DEFAULT_MAX_TOKENS, **sampling_settings(arguments)}
    if given.get("min_tokens", 0) > DEFAULT_MAX_TOKENS and "max_tokens" not in vars(arguments):
        given["max_tokens"] = given["min_tokens"]
    try:
        params = SamplingParams(**given)
    except ValueError as error:
        raise UsageError(str(error)) from None
    if params.n > 1:
        raise UnsupportedError(f"the command line prints one text as it comes, not n={params.n}: use LLM.generate")
    return given


def _with_model_defaults(llm: LLM, given: dict[str, Any]) -> SamplingParams:
    """`given` over the model's generation_config.json; says on standard error what came from there."""
    params, plain = llm.default_sampling_params(**given), SamplingParams(**given)
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    taken = [f"{name}={getattr(params, name)}" for name in names if getattr(params, name) != getattr(plain, name)]
    if taken:
        say(f"From the model's generation_config.json: {', '.join(taken)}")
    return params


def _resolved(arguments: argparse.Namespace, without: tuple[str, ...] = ()) -> ResolvedConfig:
    return resolve_config(arguments.config, engine_settings(arguments, without), overrides_origin="command line")


def _resolved_both(arguments: argparse.Namespace) -> tuple[ResolvedConfig, Resolved[ServerConfig]]:
    file = getattr(arguments, "file", None)
    if file and arguments.config:
        raise UsageError(f"two configuration files: {file} and --config {arguments.config}")
    given = engine_settings(arguments), server_settings(arguments)
    return resolve_both(file or arguments.config, *given, overrides_origin="command line")


def _engine_for_one(arguments: argparse.Namespace) -> LLM:
    """For one request at a time: unless somebody says otherwise, no shape is compiled that only several would use."""
    resolved = _resolved(arguments, without=("seed",))
    if resolved.origins["max_num_seqs"] == BUILT_IN:
        return _engine(resolved.config.replace(max_num_seqs=1))
    return _engine(resolved.config)


def _engine(config: EngineConfig) -> LLM:
    from jaxpage.llm import LLM  # after the configuration is known to be right: this imports jax

    return LLM(**config.model_dump())


def _print_stream(chunks: Iterator[RequestOutput], kept: list[str] | None = None) -> RequestOutput:
    """Prints text as it comes, then one line about it on standard error; returns the last chunk."""
    start, num_tokens, last = time.monotonic(), 0, None
    try:
        for last in chunks:
            text = last.outputs[0].text
            num_tokens += len(last.outputs[0].token_ids)
            if kept is not None:
                kept.append(text)
            print(text, end="", flush=True)
    finally:
        print(flush=True)
    assert last is not None
    seconds = max(time.monotonic() - start, 1e-9)
    reason = last.outputs[0].finish_reason
    if reason == "error":
        reason += f", {last.outputs[0].stop_reason}"
    say(f"[{num_tokens} tokens, {num_tokens / seconds:.1f} tokens/s, {_drafted(last.metrics)}finish reason: {reason}]")
    return last


def _drafted(metrics: RequestMetrics | None) -> str:
    """What came of drafts, if there were any."""
    if metrics is None or not metrics.num_draft_tokens:
        return ""
    return f"{metrics.num_accepted_tokens} of {metrics.num_draft_tokens} drafts accepted, "


def _ask() -> str:
    print("> ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip()
