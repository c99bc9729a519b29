"""Runs `jaxpage run-batch`: answers a file of requests with an engine of its own."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from jaxpage.assembly import Hooks
from jaxpage.driver import AsyncDriver
from jaxpage.errors import ConfigError, UnsupportedError
from jaxpage.replay import open_engine
from jaxpage.serving.app import Server, build_app
from jaxpage.serving.batches.in_process import InProcess
from jaxpage.serving.batches.ordering import DEFAULT_WINDOW, LINE_EXTRA_BYTES, num_lines
from jaxpage.serving.batches.output_file import OutputFile
from jaxpage.serving.batches.running import BatchRun
from jaxpage.serving.metrics.metrics import ServerMetrics
from jaxpage.serving.model.lora_modules import check_lora_modules
from jaxpage.serving.settings.server_config import ServerConfig
from jaxpage.serving.startup import model_context, model_names
from jaxpage.settings.engine_config import EngineConfig

# A line may have as many prompts as a request to a server has; the engine has places for all.
_NUM_PLACES = 1 << 17
# The lines that wait while others run, for each sequence of a step, so that no step has a gap.
_LINES_PER_SEQUENCE = 2


class Done(NamedTuple):
    """Holds what a run has done.

    Attributes:
        summary: A line: lines, errors, and the tokens and the speed of this run.
        seconds: The time of this run, without that of making the engine.
    """

    summary: str
    seconds: float


def run_batch(
    engine: EngineConfig,
    server: ServerConfig,
    source: Path,
    target: Path,
    *,
    window: int = DEFAULT_WINDOW,
    quiet: bool = False,
) -> Done:
    """Answers the lines of a file that have no answer in `target` yet.

    Args:
        engine: The settings of the engine.
        server: The settings of the server whose answers these are.
        source: The file of requests.
        target: The file of answers, which is continued if it exists.
        window: The most lines that are ordered together.
        quiet: Show no progress.

    Raises:
        ConfigError: A file cannot be read or written, or the input has changed.
        UnsupportedError: The settings ask for several hosts.
        EngineFailed: The engine has ended. The other errors are those of `LLM`.
    """
    if not source.is_file():
        raise ConfigError(f"there is no file {source}")
    if target.exists() and target.samefile(source):
        raise ConfigError(f"{target} is the input: give another file for the answers")
    if server.num_hosts > 1:
        raise UnsupportedError(f"num_hosts = {server.num_hosts} is not supported by run-batch")
    # What a file of settings says of directories is for a server.
    directories = ("batch_directory", "weights_directory", "response_store_directory")
    server = server.model_copy(update=dict.fromkeys(directories))
    max_line_bytes = server.max_body_bytes + LINE_EXTRA_BYTES
    with OutputFile(target) as output:
        total = num_lines(source, max_line_bytes, output.done)
        began = time.monotonic()
        if output.before.lines < total:
            check_lora_modules(engine, server, model_names(engine, server))
            built = open_engine(engine, Hooks(progress=not quiet))
            driver = AsyncDriver(built, max_queued_requests=_NUM_PLACES)
            context = model_context(built, engine, server)
            metrics = ServerMetrics(context.model_names[0], built.block_size)
            app = build_app(driver, context, server, metrics)
            began = time.monotonic()
            bar = tqdm(
                total=total,
                initial=output.before.lines,
                desc="Answering",
                unit="line",
                disable=True if quiet else None,
            )
            with bar:
                _answer_all(driver, app.state.server, server, source, output, window, bar)
        seconds = time.monotonic() - began
        return Done(_summary(output, total, seconds), seconds)


def _answer_all(
    driver: AsyncDriver,
    server: Server,
    config: ServerConfig,
    source: Path,
    output: OutputFile,
    window: int,
    bar: tqdm,  # type: ignore[type-arg]
) -> None:
    def report() -> None:
        num_tokens = output.counts.completion_tokens - output.before.completion_tokens
        rate = num_tokens / max(bar.format_dict["elapsed"], 1e-9)
        bar.set_postfix_str(f"{rate:.0f} tokens/s", refresh=False)
        bar.update()

    async def answer() -> None:
        run = BatchRun(
            InProcess(server.routes, config, server.metrics),
            output,
            num_at_once=_LINES_PER_SEQUENCE * driver.max_num_seqs,
            max_line_bytes=config.max_body_bytes + LINE_EXTRA_BYTES,
            is_dead=driver.has_ended,
            on_answer=report,
            window=window,
        )
        await run.run(source)

    driver.start()
    try:
        asyncio.run(answer())
    finally:
        driver.stop()
        server.preparing.close()


def _summary(output: OutputFile, total: int, seconds: float) -> str:
    counts = output.counts
    before = output.before
    num_lines_now = counts.lines - before.lines
    prompt = counts.prompt_tokens - before.prompt_tokens
    cached = counts.cached_tokens - before.cached_tokens
    generated = counts.completion_tokens - before.completion_tokens
    parts = [f"{total} lines", f"{counts.errors} errors"]
    if before.lines:
        parts.append(f"{before.lines} answered before")
    if num_lines_now:
        parts += [
            f"{prompt} prompt tokens ({cached} cached)",
            f"{generated} output tokens",
            f"{seconds:.1f} s",
            f"{generated / seconds:.1f} output tokens/s",
            f"{(prompt + generated) / seconds:.1f} tokens/s",
        ]
    return ", ".join(parts)
