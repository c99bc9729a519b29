"""Measures weights of few bits, for `jaxpage bench quantization`.

It shows the change of the logits, the size of the weights, and how fast they decode.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import statistics
import time
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

from jaxpage.assembly import choose_dtype
from jaxpage.bench.results import environment, print_result
from jaxpage.bench.studies.kv_dtype import (
    DIFFERENCES,
    Logits,
    differences,
    position_logits,
    table,
    text_tokens,
)
from jaxpage.bench.studies.roofline import STEPS, start_decoding
from jaxpage.bench.throughput import check_writable
from jaxpage.checkpoints import open_model
from jaxpage.checkpoints.finding import resolve_model
from jaxpage.checkpoints.quantization import SCHEMES
from jaxpage.device.hardware import DeviceSpec
from jaxpage.device.pages import page_dtype
from jaxpage.errors import CheckpointError, UsageError
from jaxpage.replay import open_engine
from jaxpage.settings.engine_config import EngineConfig

QUANTIZATIONS = (None, *SCHEMES)
OF_GGUF = "gguf"  # is added for a GGUF file with weights that can be kept as they are
CONTEXT = 64  # tokens of the prompt of a decoding row


def run_quantization(arguments: argparse.Namespace, config: EngineConfig) -> None:
    """Prints a table and, as the last line, one JSON object.

    Raises:
        UsageError: The text is too short, or the model is quantised already.
        CapacityError: A batch does not fit.
    """
    if min(arguments.batches) < 1:
        raise UsageError("--batches must be at least 1")
    check_writable("--output-json", arguments.output_json)
    files = open_model(resolve_model(config.model, config.revision))
    if files.quantization is not None:
        raise UsageError(
            f"{config.model} is quantised already ({files.quantization.described}): there is "
            "nothing to compare it with"
        )
    place = DeviceSpec.of(jax.devices()[0], config.gpu_memory_utilization)
    dtype = choose_dtype(config.dtype, place, files.plan.most_common_dtype(), files.family)
    token_ids = text_tokens(arguments, config, files)
    exact_TV: Logits | None = None
    columns: dict[str, dict[str, float]] = {}
    for quantization in tqdm(_quantizations(files.directory), desc="Measuring", unit="model"):
        # All rows have the same prompt (`start_request`), which a prefix cache would compute once.
        requested = config.replace(
            quantization=quantization, dtype=dtype, enable_prefix_caching=False
        )
        files = open_model(files.directory, quantization)
        logits_TV = position_logits(
            requested, files, token_ids, dtype=dtype, page_dtype=page_dtype("auto", dtype)
        )
        exact_TV = logits_TV if exact_TV is None else exact_TV
        figures = differences(exact_TV, logits_TV, token_ids)
        columns[quantization or dtype] = {
            **figures,
            "perplexity": math.exp(figures["loss"]),
            "weights_mib": files.plan.num_bytes(dtype) / 2**20,
            **_decoding_rates(requested, arguments.batches),
        }
    rates = [
        (f"decoding, {rows} sequences, tokens/s", f"tokens_per_second_{rows}", ",.0f")
        for rows in arguments.batches
    ]
    print(
        table(
            (
                *DIFFERENCES,
                ("perplexity", "perplexity", ".3f"),
                ("weights (MiB)", "weights_mib", ",.1f"),
                *rates,
            ),
            columns,
        )
    )
    print(
        f"{len(token_ids)} tokens of {arguments.text or 'random ids'}; decoding after "
        f"{CONTEXT} tokens"
    )
    context = {
        "num_tokens": len(token_ids),
        "text": arguments.text,
        "seed": arguments.seed,
        "dtype": dtype,
    }
    result: dict[str, Any] = {
        **columns,
        **context,
        "config": config.model_dump(),
        "environment": environment(),
    }
    print_result(result, arguments)


def _quantizations(directory: Path) -> list[str | None]:
    names: list[str | None] = [*QUANTIZATIONS]
    with contextlib.suppress(CheckpointError):
        open_model(directory, OF_GGUF)
        names.append(OF_GGUF)
    return names


def _decoding_rates(config: EngineConfig, batches: list[int]) -> dict[str, float]:
    """Returns the tokens per second of a whole step for each batch, by the median of some steps."""
    engine = open_engine(config).engine
    rates = {}
    for num_rows in batches:
        start_decoding(engine, num_rows, CONTEXT)
        seconds = []
        for _ in range(2 * STEPS):
            started = time.perf_counter()
            engine.step()
            seconds.append(time.perf_counter() - started)
        engine.abort_all()
        # The first half of the steps is the warm-up.
        rates[f"tokens_per_second_{num_rows}"] = num_rows / statistics.median(seconds[STEPS:])
    return rates
