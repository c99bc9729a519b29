"""Measures how near steps come to what the machine can do, for `jaxpage bench roofline`.

It also shows where their time goes.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from jaxpage.assembly import Hooks
from jaxpage.assembly.planning import refuse_recurrent
from jaxpage.bench.measure import parameters
from jaxpage.bench.results import environment, print_result
from jaxpage.bench.studies.ceilings import bandwidth, matmul_rate
from jaxpage.bench.studies.step_profile import OTHER, SCOPES, profile
from jaxpage.bench.throughput import check_writable
from jaxpage.checkpoints import describe_model
from jaxpage.checkpoints.finding import resolve_model
from jaxpage.device import Executables
from jaxpage.device.pages import bytes_per_layer
from jaxpage.engine import Batch, Engine, Reporter
from jaxpage.errors import UsageError
from jaxpage.models import Family, ModelSpec, model_weights
from jaxpage.models.parameters import Rule, Weight, num_bytes
from jaxpage.replay import open_engine
from jaxpage.settings.engine_config import NO_LOG, EngineConfig
from jaxpage.tables import align

STEPS = 24  # measured steps; as many are profiled
PARTS = ("planning", "batch", "commit", *SCOPES, OTHER, "dispatch and transfer")


@dataclass(frozen=True)
class Work:
    """Holds the work that a step cannot avoid.

    Attributes:
        num_bytes: The bytes that must be read at least once.
        num_operations: The operations of products and attention.
    """

    num_bytes: float
    num_operations: float

    def seconds(self, bytes_per_second: float, operations_per_second: float) -> float:
        """Returns the roofline in seconds: the time of reading or of arithmetic, the longer one."""
        return max(self.num_bytes / bytes_per_second, self.num_operations / operations_per_second)


def work_of(
    spec: ModelSpec,
    weights: MatmulWeights,
    page_dtype: Any,
    *,
    num_rows: int,
    num_tokens: int,
    context: int,
) -> Work:
    """Returns the work of a step in which all rows have the same size.

    Args:
        spec: The model.
        weights: The weights that every token is multiplied by.
        page_dtype: The type of the KV pages.
        num_rows: The rows.
        num_tokens: The query tokens of each row.
        context: The tokens of each row before these.
    """
    max_length = context + num_tokens
    slots = bytes_per_layer(spec.kv, 1, page_dtype)
    pages_bytes = num_rows * sum(
        min(max_length, window or max_length) * slot
        for window, slot in zip(spec.kv.sliding_windows, slots, strict=True)
    )
    # A token attends to so many positions in the mean. In windows it sees fewer: this is a bound.
    seen = context + (num_tokens + 1) / 2
    heads = [spec.kv.heads_of(layer)[1] for layer in range(spec.kv.num_layers)]
    widths = sum(width + (spec.kv.value_width or width) for width in heads)  # keys, then values
    attention = 2 * spec.num_query_heads * widths * seen
    return Work(
        weights.num_bytes + pages_bytes, num_rows * num_tokens * (2 * weights.number + attention)
    )


class MatmulWeights(NamedTuple):
    """Holds the size of the weights that every token is multiplied by.

    Attributes:
        number: The number of weights.
        num_bytes: The bytes that they take.
    """

    number: int
    num_bytes: int


def matmul_weights(
    family: Family, spec: ModelSpec, dtype: str, rule: Rule | None = None
) -> MatmulWeights:
    """Returns the size of the weights that every token is multiplied by.

    Args:
        family: The family of the model.
        spec: The model.
        dtype: The type of weights that are not quantised.
        rule: The rule that says which modules have quantised weights.
    """
    # A token reads one row of the token table. A tied table is multiplied as the head, too.
    looked_up = 0 if spec.tie_word_embeddings else spec.vocab_size * spec.hidden_size
    number = sum(weight.size for weight in _tables(family, spec, None)) - looked_up
    return MatmulWeights(
        number,
        num_bytes(_tables(family, spec, rule), dtype) - looked_up * jnp.dtype(dtype).itemsize,
    )


def _tables(family: Family, spec: ModelSpec, rule: Rule | None) -> list[Weight]:
    weights = model_weights(family, spec, rule)
    return [weight for weight in weights if len(weight.shape) > 1 and weight.axes[0] is not None]


@dataclass(frozen=True)
class Measured:
    """Holds the seconds of the median step, and of its parts."""

    name: str
    work: Work
    seconds: float
    parts: dict[str, float]  # seconds by the names in PARTS


def run_roofline(arguments: argparse.Namespace, config: EngineConfig) -> None:
    """Prints tables and, as the last line, one JSON object.

    Raises:
        UsageError: The flags ask for impossible sizes.
        CapacityError: A batch does not fit.
    """
    _check(arguments, config)
    model = describe_model(resolve_model(config.model, config.revision), config.quantization)
    spec = model.spec
    refuse_recurrent("bench roofline", spec.kv)
    max_length = min(
        spec.max_position_embeddings, config.max_model_len or spec.max_position_embeddings
    )
    # So many tokens may follow the prompt of a row; see `start_decoding`.
    maximum = max_length - 4 * STEPS
    if maximum < 1:
        raise UsageError(
            f"max_model_len must be at least {4 * STEPS + 1} for bench roofline, and is {max_length}"
        )
    if arguments.context > maximum:
        raise UsageError(f"--context must be at most {maximum}: max_model_len is {max_length}")
    # All prompts are equal (`start_request`), and a prefix cache would leave nothing to compute.
    config = config.replace(num_scheduler_steps=1, enable_prefix_caching=False, **NO_LOG)
    built = open_engine(config, Hooks(progress=True))
    engine = built.engine
    weights = matmul_weights(model.family, spec, built.spec.layout.dtype, model.rule)
    work = functools.partial(work_of, spec, weights, built.spec.page_dtype)
    measured = []
    for num_rows in tqdm(arguments.batches, desc="Measuring", unit="batch"):
        seen = arguments.context + 3 * STEPS // 2  # the mean context of the measured steps
        start_decoding(engine, num_rows, arguments.context)
        decode_work = work(num_rows=num_rows, num_tokens=1, context=seen)
        measured.append(_measure(engine, f"{num_rows} rows", decode_work, lambda: None))
    chunk = min(built.spec.menu.chunk[-1].num_tokens, max_length - 1)
    decode_work = work(num_rows=1, num_tokens=chunk, context=0)
    measured.append(
        _measure(engine, f"chunk of {chunk}", decode_work, lambda: start_request(engine, chunk, 1))
    )
    rate = matmul_rate(built.spec.layout.dtype)
    rows = [
        _as_dict(decode_work, bandwidth(int(decode_work.work.num_bytes)), rate)
        for decode_work in measured
    ]
    print(f"Products in {built.spec.layout.dtype}: {rate * 1e-9:.0f} GFLOP/s\n\n{_table(rows)}\n")
    result = {
        "steps": rows,
        "context": arguments.context,
        "product_flops_per_second": rate,
        "config": config.model_dump(),
        "environment": environment(),
    }
    print_result(result, arguments)


def _check(arguments: argparse.Namespace, config: EngineConfig) -> None:
    if min(arguments.batches) < 1 or arguments.context < 1:
        raise UsageError("--batches and --context must be at least 1")
    if config.speculative_config is not None:
        raise UsageError(
            "bench roofline has no use for speculative_config: `bench speculation` measures that"
        )
    if config.num_scheduler_steps not in ("auto", 1):
        raise UsageError(
            "bench roofline measures single steps: num_scheduler_steps is "
            f"{config.num_scheduler_steps}; use 1"
        )
    check_writable("--output-json", arguments.output_json)


def start_decoding(engine: Engine, num_rows: int, context: int) -> None:
    """Computes prompts of `context` tokens, so that the next steps compute a token of each."""
    # The requests are long enough that the caller aborts them before they end.
    reporters = [start_request(engine, context, 4 * STEPS) for _ in range(num_rows)]
    while not all(reporter.num_output_tokens for reporter in reporters):
        engine.step()


def start_request(engine: Engine, num_prompt_tokens: int, num_output_tokens: int) -> Reporter:
    """Adds a request with a prompt of random tokens."""
    request_id = str(uuid.uuid4())
    prompt = np.random.default_rng(0).integers(0, engine.vocab_size, num_prompt_tokens).tolist()
    return engine.add(request_id, engine.prepare(None, prompt, parameters(num_output_tokens)))


def _measure(engine: Engine, name: str, work: Work, before: Callable[[], object]) -> Measured:
    """Measures STEPS steps, and then profiles as many.

    Args:
        engine: The engine.
        name: The name of the column.
        work: The work of a step.
        before: Called before each step, to give it something to do.
    """
    with _time_parts(engine) as (seconds, batches):

        def steps() -> None:
            for _ in range(STEPS):
                before()
                started = time.perf_counter()
                engine.step()
                seconds["step"].append(time.perf_counter() - started)

        steps()  # the first round has all that happens only once
        seconds.clear()
        steps()
        middle = int(np.argsort(seconds["step"])[STEPS // 2])
        plain = {part: each[middle] for part, each in seconds.items()}
        seconds.clear()
        scopes = profile(steps, _text_of_step(engine.executables, batches[-1]))
    engine.abort_all()
    scale = plain["run"] / sum(seconds["run"])  # because the profiler slows a run down
    device = {scope: spent * scale for scope, spent in scopes.items()}
    parts = {part: plain[part] for part in ("planning", "batch")}
    parts["commit"] = plain["step"] - plain["planning"] - plain["batch"] - plain["run"]
    parts |= {**device, "dispatch and transfer": plain["run"] - sum(device.values())}
    return Measured(name, work, plain["step"], parts)


def _text_of_step(executables: Executables, batch: Batch) -> str:
    """Returns the compiled code of a batch's step."""
    return str(executables.step(batch.bucket, batch.draft_depth).executable.as_text())


@contextlib.contextmanager
def _time_parts(engine: Engine) -> Iterator[tuple[dict[str, list[float]], list[Batch]]]:
    """Yields the seconds of each call of the parts of `Engine.step`, and the batches."""
    seconds: dict[str, list[float]] = defaultdict(list)
    batches: list[Batch] = []

    def time_call(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            started = time.perf_counter()
            result = call(*arguments)
            seconds[name].append(time.perf_counter() - started)
            if isinstance(result, Batch):
                batches.append(result)
            return result

        return run

    with contextlib.ExitStack() as stack:
        for name, owner, method in (
            ("planning", engine.scheduler, "plan"),
            ("batch", engine.builder, "build"),
            ("run", engine.runner, "run"),
        ):
            stack.enter_context(
                mock.patch.object(owner, method, time_call(name, getattr(owner, method)))
            )
        yield seconds, batches


def _as_dict(
    measured: Measured, bytes_per_second: float, operations_per_second: float
) -> dict[str, Any]:
    limit = measured.work.seconds(bytes_per_second, operations_per_second)
    return {
        "name": measured.name,
        "seconds": measured.seconds,
        "bytes": measured.work.num_bytes,
        "operations": measured.work.num_operations,
        "bytes_per_second": bytes_per_second,
        "roofline_seconds": limit,
        "share": limit / measured.seconds,
        "parts": measured.parts,
    }


def _table(steps: Sequence[Mapping[str, Any]]) -> str:
    """Returns a table with a column for each kind of step."""
    shown: list[tuple[str, Callable[[Mapping[str, Any]], str]]] = [
        ("must read (MB)", lambda step: f"{step['bytes'] * 1e-6:.1f}"),
        ("must compute (GFLOP)", lambda step: f"{step['operations'] * 1e-9:.2f}"),
        ("memory (GB/s)", lambda step: f"{step['bytes_per_second'] * 1e-9:.1f}"),
        ("roofline (ms)", lambda step: f"{step['roofline_seconds'] * 1e3:.2f}"),
        ("step (ms)", lambda step: f"{step['seconds'] * 1e3:.2f}"),
        ("share of the roofline", lambda step: f"{step['share']:.2f}"),
        *(
            (f"  {part} (ms)", lambda step, part=part: f"{step['parts'][part] * 1e3:.2f}")
            for part in PARTS
        ),
    ]
    rows = [["", *(step["name"] for step in steps)]]
    rows += [[label, *(show(step) for step in steps)] for label, show in shown]
    return "\n".join(align(rows, num_words=1))
