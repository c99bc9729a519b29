"""Measures what keys and values of eight bits do to a model, for `jaxpage bench kv-dtype`.

It shows the change of the logits, and how many more sequences fit into memory.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.typing import DTypeLike

from jaxpage.assembly import choose_dtype
from jaxpage.assembly.planning import refuse_recurrent
from jaxpage.bench.results import environment, print_result
from jaxpage.bench.studies.file_texts import read_token_ids
from jaxpage.checkpoints import ModelFiles, load_weights, open_model
from jaxpage.checkpoints.finding import resolve_model
from jaxpage.device import pack_weights
from jaxpage.device.hardware import DeviceSpec, choose_backend
from jaxpage.device.pages import bytes_per_layer, page_dtype
from jaxpage.device.rows import logits_of_prompt
from jaxpage.errors import UsageError
from jaxpage.models import abstract, make_model
from jaxpage.settings.engine_config import EngineConfig
from jaxpage.tables import align

KV_CACHE_DTYPES = ("auto", "int8", "fp8")
Logits = npt.NDArray[np.float32]  # [T, V]

DIFFERENCES = (
    ("max |logit difference|", "max_logit_difference", ".4f"),
    ("mean |logit difference|", "mean_logit_difference", ".5f"),
    ("KL divergence (nats)", "kl_divergence", ".2e"),
    ("same most likely token", "top1_agreement", ".1%"),
    ("loss (nats per token)", "loss", ".4f"),
)
_ROWS = (
    *DIFFERENCES,
    ("KV bytes per token", "bytes_per_token", ",.0f"),
    ("sequences per GiB", "sequences_per_gib", ",d"),
)


def run_kv_dtype(arguments: argparse.Namespace, config: EngineConfig) -> None:
    """Prints a table and, as the last line, one JSON object.

    Raises:
        UsageError: The text is too short.
    """
    files = open_model(resolve_model(config.model, config.revision), config.quantization)
    refuse_recurrent("bench kv-dtype", files.spec.kv)
    place = DeviceSpec.of(jax.devices()[0], config.gpu_memory_utilization)
    dtype = choose_dtype(config.dtype, place, files.plan.most_common_dtype(), files.family)
    block_size = place.choose_block_size(config.block_size)
    max_length = _max_length(config, files)
    token_ids = text_tokens(arguments, config, files)
    columns: dict[str, dict[str, float]] = {}
    for kv_cache_dtype in KV_CACHE_DTYPES:
        held_dtype = page_dtype(kv_cache_dtype, dtype)
        logits_TV = position_logits(config, files, token_ids, dtype=dtype, page_dtype=held_dtype)
        if kv_cache_dtype == "auto":
            exact_TV = logits_TV
        block_bytes = sum(bytes_per_layer(files.spec.kv, block_size, held_dtype))
        columns[kv_cache_dtype] = {
            **differences(exact_TV, logits_TV, token_ids),
            "bytes_per_token": block_bytes / block_size,
            # One block is the null block, which no sequence has.
            "sequences_per_gib": (2**30 // block_bytes - 1) // -(-max_length // block_size),
        }
    print(
        table(
            _ROWS, {dtype if name == "auto" else name: column for name, column in columns.items()}
        )
    )
    print(
        f"{len(token_ids)} tokens of {arguments.text or 'random ids'}; sequences of "
        f"{max_length:,} tokens"
    )
    context = {
        "num_tokens": len(token_ids),
        "text": arguments.text,
        "seed": arguments.seed,
        "dtype": dtype,
    }
    result = {**columns, **context, "config": config.model_dump(), "environment": environment()}
    print_result(result, arguments)


def differences(exact_TV: Logits, logits_TV: Logits, token_ids: Sequence[int]) -> dict[str, float]:
    """Returns measures of the distance between logits and the exact ones, and the loss of the text.

    Args:
        exact_TV: The exact logits [T, V].
        logits_TV: The logits [T, V] that are measured.
        token_ids: The tokens of the text.
    """
    exact_logprobs_TV = _log_softmax(exact_TV)
    logprobs_TV = _log_softmax(logits_TV)
    divergence_T = (np.exp(exact_logprobs_TV) * (exact_logprobs_TV - logprobs_TV)).sum(-1)
    return {
        "max_logit_difference": float(np.abs(logits_TV - exact_TV).max()),
        "mean_logit_difference": float(np.abs(logits_TV - exact_TV).mean()),
        "kl_divergence": float(divergence_T.mean()),
        "top1_agreement": float((logits_TV.argmax(-1) == exact_TV.argmax(-1)).mean()),
        "loss": float(-logprobs_TV[np.arange(len(token_ids) - 1), token_ids[1:]].mean()),
    }


def _log_softmax(logits_TV: Logits) -> npt.NDArray[np.float64]:
    # In float32 the rounding of the sums would be as large as small divergences.
    shifted_TV = logits_TV.astype(np.float64) - logits_TV.max(-1, keepdims=True)
    logprobs_TV: npt.NDArray[np.float64] = shifted_TV - np.log(
        np.exp(shifted_TV).sum(-1, keepdims=True)
    )
    return logprobs_TV


def text_tokens(
    arguments: argparse.Namespace, config: EngineConfig, files: ModelFiles
) -> list[int]:
    """Returns the tokens of the text that is asked for, or random ones.

    Raises:
        UsageError: There are fewer than two.
    """
    token_ids = _token_ids(arguments, config, files)[
        : min(arguments.num_tokens, _max_length(config, files))
    ]
    if len(token_ids) < 2:
        raise UsageError(f"at least 2 tokens are needed, got {len(token_ids)}")
    return token_ids


def _max_length(config: EngineConfig, files: ModelFiles) -> int:
    return min(
        files.spec.max_position_embeddings,
        config.max_model_len or files.spec.max_position_embeddings,
    )


def _token_ids(arguments: argparse.Namespace, config: EngineConfig, files: ModelFiles) -> list[int]:
    for name, minimum in (("num_tokens", 2), ("seed", 0)):
        if getattr(arguments, name) < minimum:
            raise UsageError(
                f"--{name.replace('_', '-')} must be at least {minimum}, got "
                f"{getattr(arguments, name)}"
            )
    if arguments.text is None:
        draw = np.random.default_rng(arguments.seed)
        return [
            int(token_id)
            for token_id in draw.integers(0, files.spec.vocab_size, arguments.num_tokens)
        ]
    return read_token_ids(arguments.text, config)


def position_logits(
    config: EngineConfig,
    files: ModelFiles,
    token_ids: Sequence[int],
    *,
    dtype: str,
    page_dtype: DTypeLike,
) -> Logits:
    """Returns the logits [T, V] after each token of one sequence, over pages of `page_dtype`.

    The engine's own step computes them.
    """
    device = jax.devices()[0]
    place = DeviceSpec.of(device, config.gpu_memory_utilization)
    backend = choose_backend(config.attention_backend, device)
    model = make_model(files.family, files.spec, jnp.dtype(dtype), files.rule)
    packings = backend.pack_modules(model)
    parameters = load_weights(files.plan, dtype, jax.device_put, progress=False)
    pack_weights(parameters, packings)
    return logits_of_prompt(
        files.spec,
        abstract(model)[0],
        parameters,
        token_ids,
        backend=backend,
        block_size=place.choose_block_size(config.block_size),
        page_dtype=page_dtype,
    )


def table(measures: Sequence[tuple[str, str, str]], columns: dict[str, dict[str, float]]) -> str:
    """Returns a table as text.

    Args:
        measures: The heading, the key and the format of each row.
        columns: The values by key, for each heading of a column.
    """
    rows = [["", *columns]]
    for label, key, form in measures:
        rows.append([label, *(format(column[key], form) for column in columns.values())])
    return "\n".join(align(rows, num_words=1))
