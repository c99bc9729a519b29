"""`jaxpage bench roofline`: how near steps come to what the machine can do, and where their time goes."""

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

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from jaxpage.assembly import Hooks, refuse_recurrent
from jaxpage.bench.ceilings import bandwidth, product_rate
from jaxpage.bench.measure import parameters
from jaxpage.bench.report import environment, print_result
from jaxpage.bench.step_profile import OTHER, SCOPES, profiled
from jaxpage.bench.throughput import check_writable
from jaxpage.checkpoints import describe_model, resolve_model
from jaxpage.device.cpu_products import cpu_products
from jaxpage.device.kv_pages import bytes_per_layer
from jaxpage.engine.batch_builder import Batch
from jaxpage.engine.engine import Engine
from jaxpage.engine.reporting import Reporter
from jaxpage.errors import UsageError
from jaxpage.models.base import Family, ModelSpec, model_weights
from jaxpage.models.replacing import Rule
from jaxpage.models.weights import Weight, num_bytes
from jaxpage.replay.opening import open_engine
from jaxpage.settings.engine_config import EngineConfig
from jaxpage.tables import aligned

STEPS = 24  # measured, and as many profiled
PARTS = ("planning", "batch", "commit", *SCOPES, OTHER, "dispatch and transfer")


@dataclass(frozen=True)
class Work:
    """Of one step: bytes that must be read and operations of products and attention that must be done, at least once each."""

    num_bytes: float
    num_operations: float

    def seconds(self, bytes_per_second: float, operations_per_second: float) -> float:
        """The roofline: what takes longer limits."""
        return max(self.num_bytes / bytes_per_second, self.num_operations / operations_per_second)


def work_of(
    spec: ModelSpec,
    weights: ProductWeights,
    page_dtype: Any,
    *,
    num_rows: int,
    num_tokens: int,
    context: int,
) -> Work:
    """num_tokens: of each row, behind `context` others."""
    positions = sum(
        min(context + num_tokens, window or context + num_tokens)
        for window in spec.kv.sliding_windows
    )
    pages_bytes = num_rows * positions * bytes_per_layer(spec.kv, 1, page_dtype)
    # of a token, in the mean; windows see less
    seen = (context + (num_tokens + 1) / 2) * spec.kv.num_layers
    widths = spec.kv.head_width + (spec.kv.value_width or spec.kv.head_width)  # of keys and values
    attention = 2 * spec.num_query_heads * widths * seen
    return Work(
        weights.num_bytes + pages_bytes, num_rows * num_tokens * (2 * weights.number + attention)
    )


class ProductWeights(NamedTuple):
    """What every token is multiplied by: how many numbers, and the bytes that they take."""

    number: int
    num_bytes: int


def product_weights(
    family: Family, spec: ModelSpec, dtype: str, rule: Rule | None = None
) -> ProductWeights:
    """rule: of modules with quantised weights."""
    looked_up = 0 if spec.tie_word_embeddings else spec.vocab_size * spec.model_width
    number = sum(weight.size for weight in _tables(family, spec, None)) - looked_up
    return ProductWeights(
        number,
        num_bytes(_tables(family, spec, rule), dtype) - looked_up * jnp.dtype(dtype).itemsize,
    )


def _tables(family: Family, spec: ModelSpec, rule: Rule | None) -> list[Weight]:
    weights = model_weights(family, spec, rule)
    return [weight for weight in weights if len(weight.shape) > 1 and weight.axes[0] is not None]


@dataclass(frozen=True)
class Measured:
    """Seconds of the step that is the median of all, and of its parts."""

    name: str
    work: Work
    seconds: float
    parts: dict[str, float]  # PARTS


def run(arguments: argparse.Namespace, config: EngineConfig) -> None:
    """Prints tables and, as the last line, one JSON object. Raises UsageError or CapacityError for sizes that cannot be."""
    _check(arguments, config)
    model = describe_model(resolve_model(config.model, config.revision), config.quantization)
    spec = model.spec
    refuse_recurrent("bench roofline", spec.kv)
    longest = min(
        spec.max_position_embeddings, config.max_model_len or spec.max_position_embeddings
    )
    most = longest - 4 * STEPS
    if most < 1:
        raise UsageError(
            f"max_model_len must be at least {4 * STEPS + 1} for bench roofline, and is {longest}"
        )
    if arguments.context > most:
        raise UsageError(f"--context must be at most {most}: max_model_len is {longest}")
    config = config.replace(enable_prefix_caching=False, event_log=None)
    built = open_engine(config, Hooks(progress=True))
    engine = built.engine
    weights = product_weights(model.family, spec, built.spec.layout.dtype, model.rule)
    work = functools.partial(work_of, spec, weights, built.spec.page_dtype)
    measured = []
    for num_rows in tqdm(arguments.batches, desc="Measuring", unit="batch"):
        seen = arguments.context + 3 * STEPS // 2  # in the mean of the steps that are measured
        start_decoding(engine, num_rows, arguments.context)
        one = work(num_rows=num_rows, num_tokens=1, context=seen)
        measured.append(_measured(engine, f"{num_rows} rows", one, lambda: None))
    chunk = min(built.spec.menu.chunk[-1].num_tokens, longest - 1)
    one = work(num_rows=1, num_tokens=chunk, context=0)
    measured.append(
        _measured(engine, f"chunk of {chunk}", one, lambda: start_request(engine, chunk, 1))
    )
    rate = product_rate(built.spec.layout.dtype)
    rows = [_as_dict(one, bandwidth(int(one.work.num_bytes)), rate) for one in measured]
    library = f", {cpu_products().library or 'plain XLA'}" if jax.default_backend() == "cpu" else ""
    print(
        f"Products in {built.spec.layout.dtype}: {rate * 1e-9:.0f} GFLOP/s{library}\n\n{_table(rows)}\n"
    )
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
    if config.num_scheduler_steps > 1:
        raise UsageError(
            f"bench roofline measures single steps: num_scheduler_steps is {config.num_scheduler_steps}; use 1"
        )
    check_writable("--output-json", arguments.output_json)


def start_decoding(engine: Engine, num_rows: int, context: int) -> None:
    """Computes prompts of `context` tokens, so that the next steps compute a token of each."""
    # they run until they are aborted
    reporters = [start_request(engine, context, 4 * STEPS) for _ in range(num_rows)]
    while not all(reporter.num_output_tokens for reporter in reporters):
        engine.step()


def start_request(engine: Engine, num_prompt_tokens: int, num_output_tokens: int) -> Reporter:
    """Of random tokens."""
    request_id = str(uuid.uuid4())
    prompt = (
        np.random.default_rng(0).integers(0, engine.builder.vocab_size, num_prompt_tokens).tolist()
    )
    return engine.add(request_id, engine.prepare(None, prompt, parameters(num_output_tokens)))


def _measured(engine: Engine, name: str, work: Work, before: Callable[[], object]) -> Measured:
    """before: what each step needs to have something to do."""
    with _timed_parts(engine) as (seconds, batches):

        def steps() -> None:
            for _ in range(STEPS):
                before()
                started = time.perf_counter()
                engine.step()
                seconds["step"].append(time.perf_counter() - started)

        steps()  # what happens only once happens here
        seconds.clear()
        steps()
        middle = int(np.argsort(seconds["step"])[STEPS // 2])
        plain = {part: each[middle] for part, each in seconds.items()}
        seconds.clear()
        executable = engine.runner.executables.step(
            batches[-1].bucket, batches[-1].draft_depth
        ).executable
        scopes = profiled(steps, executable.as_text())
    engine.abort_all()
    scale = plain["run"] / sum(seconds["run"])  # a profiler takes time too
    device = {scope: spent * scale for scope, spent in scopes.items()}
    parts = {part: plain[part] for part in ("planning", "batch")}
    parts["commit"] = plain["step"] - plain["planning"] - plain["batch"] - plain["run"]
    parts |= {**device, "dispatch and transfer": plain["run"] - sum(device.values())}
    return Measured(name, work, plain["step"], parts)


@contextlib.contextmanager
def _timed_parts(engine: Engine) -> Iterator[tuple[dict[str, list[float]], list[Batch]]]:
    """Seconds of each call of the parts of `Engine.step`, and the batches."""
    seconds: dict[str, list[float]] = defaultdict(list)
    batches: list[Batch] = []

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
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
                mock.patch.object(owner, method, timed(name, getattr(owner, method)))
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
    """A column per kind of step."""
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
    return "\n".join(aligned(rows, num_words=1))
