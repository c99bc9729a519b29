"""Runs `jaxpage generate`, and prints a text as it comes."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from jaxpage import receipts
from jaxpage.cli.resolving import (
    Say,
    engine_for_one,
    read_sampling,
    refusals,
    reporter,
    say,
)
from jaxpage.errors import UsageError
from jaxpage.outputs import RequestMetrics, RequestOutput
from jaxpage.settings.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxpage.llm import LLM


def generate(arguments: argparse.Namespace) -> int:
    """Runs `jaxpage generate [MODEL] PROMPT`, which streams the continuation.

    Args:
        arguments: The command line.

    Returns:
        The exit status, which is 1 if the output was aborted or ended with an error.
    """
    sampling = read_sampling(arguments)
    report = reporter(arguments)
    prompt = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    # Before jax is imported, which takes a second.
    if not prompt:
        raise UsageError("the prompt is empty")
    from jaxpage.checkpoints.finding import is_own_name

    if "model" not in arguments and is_own_name(prompt):
        raise UsageError(
            f"{prompt!r} is a model, and the prompt is missing: jaxpage generate {prompt} PROMPT "
            f"(or --model demo to continue the word {prompt!r})"
        )
    path = arguments.receipt
    # Opening with "x" also refuses a link that leads nowhere, but only after the answer was
    # computed.
    if path is not None and os.path.lexists(path):
        raise UsageError(f"--receipt {path}: the file exists already")
    with engine_for_one(arguments, prompt=prompt) as llm:
        params = _with_model_defaults(llm, sampling, report)
        # The arguments are checked by this call, and not at the first chunk.
        with refusals():
            chunks = llm.stream(prompt, params, receipt=path is not None)
        echoed = sys.stdout.isatty() if arguments.echo is None else arguments.echo
        last = print_stream(chunks, report, before=prompt if echoed else "")
    if last.receipt is not None:
        try:
            receipts.write_receipt(path, last.receipt)
        except OSError as error:
            raise UsageError(f"--receipt {path}: {error.strerror}") from None
        report(f"The receipt is in {path}; jaxpage verify {path} computes the answer again")
    return 1 if last.outputs[0].finish_reason in ("abort", "error") else 0


def _with_model_defaults(llm: LLM, sampling: dict[str, Any], report: Say) -> SamplingParams:
    """Returns the given parameters, completed from the model's generation_config.json.

    It tells which parameters come from there.
    """
    if taken := [
        f"{name}={value}" for name, value in llm.sampling_defaults.items() if name not in sampling
    ]:
        report(f"From the model's generation_config.json: {', '.join(taken)}")
    return llm.default_sampling_params(**sampling)


def print_stream(
    chunks: Iterator[RequestOutput],
    report: Say,
    texts: list[str] | None = None,
    *,
    before: str = "",
) -> RequestOutput:
    """Prints text as it comes, then tells one line about it.

    On a terminal lines are broken between words.

    Args:
        chunks: The outputs of a request that is streamed.
        report: Prints the line about the text.
        texts: A list that gets the texts of the chunks, even if Ctrl-C or an error ends the stream.
        before: A text that is printed first.

    Returns:
        The last chunk.
    """
    wrapper = None
    if sys.stdout.isatty():
        from jaxpage.cli.wrapping import Wrapper

        wrapper = Wrapper(shutil.get_terminal_size().columns)

    def show(text: str) -> None:
        print(text if wrapper is None else wrapper.feed(text), end="", flush=True)

    start = time.monotonic()
    num_tokens = 0
    last = None
    show(before)
    try:
        for last in chunks:
            text = last.outputs[0].text
            num_tokens += len(last.outputs[0].token_ids)
            if texts is not None:
                texts.append(text)
            show(text)
    finally:
        print("" if wrapper is None else wrapper.finish(), flush=True)
    assert last is not None
    # A clock may not have moved for a single token.
    seconds = max(time.monotonic() - start, 1e-9)
    reason = last.outputs[0].finish_reason
    if reason == "error":
        # --quiet hides progress, and no failure.
        report = say
        reason = f"error, {last.outputs[0].stop_reason}"
    report(
        f"[{num_tokens} tokens, {num_tokens / seconds:.1f} tokens/s, "
        f"{_describe_drafts(last.metrics)}finish reason: {reason}]"
    )
    return last


def _describe_drafts(metrics: RequestMetrics | None) -> str:
    """Returns the part of the line that tells how many drafts were accepted, if there were any."""
    if metrics is None or not metrics.num_draft_tokens:
        return ""
    return f"{metrics.num_accepted_tokens} of {metrics.num_draft_tokens} drafts accepted, "
