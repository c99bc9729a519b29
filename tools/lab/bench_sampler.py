"""Times the cut-offs of a draw, and steps that mask, bias and penalise.

    python tools/lab/bench_sampler.py

Cut-offs are found by bisection, by the most likely tokens and by sorting; a step that processes
logits is compared with a plain one.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpage.assembly import build_engine
from jaxpage.bench.results import environment
from jaxpage.device.truncation import truncate
from jaxpage.engine.runner import Runner
from jaxpage.errors import JaxpageError
from jaxpage.settings.engine_config import EngineConfig
from jaxpage.settings.sampling_params import SamplingParams
from jaxpage.step.plan import Row, Sample, StepPlan
from jaxpage.tables import align

VOCABULARIES = (8192, 50257, 128256)
CUTS: dict[str, tuple[int, float]] = {  # (top_k, top_p)
    "top-k 50": (50, 1.0),
    "top-k 1000": (1000, 1.0),
    "top-p 0.9": (0, 0.9),
    "top-k 50, top-p 0.9": (50, 0.9),
}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "greedy, masked": {"temperature": 0.0, "allowed_token_ids": tuple(range(0, 90, 3))},
    "greedy, biased": {"temperature": 0.0, "logit_bias": {token_id: 1.0 for token_id in range(90)}},
    "greedy, penalised": {"temperature": 0.0, "repetition_penalty": 1.1, "frequency_penalty": 0.5},
    "sampled": {},
    "sampled, top-k 50, top-p 0.9": {"top_k": 50, "top_p": 0.9},
    "sampled, all of it": {
        **{
            "top_k": 50,
            "top_p": 0.9,
            "allowed_token_ids": tuple(range(0, 90, 3)),
            "logit_bias": {3: 1.0},
        },
        **{"repetition_penalty": 1.1, "presence_penalty": 0.5},
    },
}


def sort_and_cut(logits_V: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """Does what `truncate` does, by a sort."""
    sorted_V = jnp.sort(logits_V)[::-1]
    cutoff = jnp.where(top_k > 0, sorted_V[top_k - 1], -jnp.inf)
    likelihood_V = jnp.where(sorted_V >= cutoff, jnp.exp(sorted_V - sorted_V[0]), 0.0)
    reached_V = jnp.cumsum(likelihood_V) >= top_p * jnp.sum(likelihood_V)
    nucleus = jnp.where(top_p < 1.0, sorted_V[jnp.argmax(reached_V)], -jnp.inf)
    return jnp.where(logits_V >= jnp.maximum(cutoff, nucleus), logits_V, -jnp.inf)


def _truncate(
    logits_V: jax.Array, top_k: jax.Array, top_p: jax.Array, *, by_row: bool
) -> jax.Array:
    return truncate(logits_V, top_k, top_p, jnp.float32(0.0), by_row=by_row)


METHODS: dict[str, Callable[..., jax.Array]] = {
    "most likely first": functools.partial(_truncate, by_row=True),
    "bisection": functools.partial(_truncate, by_row=False),
    "sort": sort_and_cut,
}


def min_seconds(works: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Returns for each work the least time of `repeats` turns.

    The works take turns, so what disturbs one disturbs all.
    """
    minimum = dict.fromkeys(works, float("inf"))
    for _ in range(repeats):
        for name, work in works.items():
            start = time.perf_counter()
            work()
            minimum[name] = min(minimum[name], time.perf_counter() - start)
    return minimum


def measure_cuts(vocab_size: int, cut: str, *, scale: float, repeats: int) -> dict[str, float]:
    """Returns the seconds of one row, by method.

    Args:
        vocab_size: The number of logits.
        cut: A name in CUTS.
        scale: The scale of the random logits; 1 is flat, 4 is like a trained model's.
        repeats: The number of turns.
    """
    top_k, top_p = CUTS[cut]
    logits_V = (np.random.default_rng(0).standard_normal(vocab_size) * scale).astype(np.float32)
    arguments = jax.device_put((logits_V, np.int32(top_k), np.float32(top_p)))
    compiled = {
        name: jax.jit(method).lower(*arguments).compile() for name, method in METHODS.items()
    }
    works = {name: functools.partial(_run, work, arguments) for name, work in compiled.items()}
    return min_seconds(works, repeats)


def _run(work: Callable[..., jax.Array], arguments: tuple[jax.Array, ...]) -> jax.Array:
    return work(*arguments).block_until_ready()


def measure_steps(model: str, *, num_rows: int, num_tokens: int, repeats: int) -> dict[str, float]:
    """Returns the seconds of one decode step, by the sampling parameters of its rows.

    Input and output are included.
    """
    config = EngineConfig(
        model=model, max_num_seqs=num_rows, max_num_batched_tokens=max(64, num_rows)
    )
    built = build_engine(config)
    if num_tokens > built.memory.max_model_len:
        raise ValueError(
            f"--num-tokens is {num_tokens}, but max_model_len is {built.memory.max_model_len}"
        )
    engine = built.engine
    # All rows read the same blocks.
    table = tuple(range(1, -(-num_tokens // built.memory.block_size) + 1))
    token_ids = np.random.default_rng(0).integers(0, engine.builder.vocab_size, num_tokens).tolist()

    def plan(params: SamplingParams) -> StepPlan:
        history = tuple(token_ids) if params.penalises else ()
        sample = Sample(
            0, 0, 0, params, 1, 0, num_tokens, history=history, num_prompt_tokens=num_tokens // 2
        )
        rows = tuple(
            Row(row, num_tokens - 1, (token_ids[-1],), (table,)) for row in range(num_rows)
        )
        return StepPlan(
            0, rows, tuple(sample._replace(row=row, sequence_id=row) for row in range(num_rows))
        )

    plans = {name: plan(SamplingParams(**params)) for name, params in KINDS.items()}
    works = {
        name: functools.partial(_step, engine.runner, engine.builder.build, each)
        for name, each in plans.items()
    }
    min_seconds(works, 3)
    seconds = min_seconds(works, repeats)
    engine.runner.close()
    return seconds


def _step(runner: Runner, build: Callable[[StepPlan], Any], plan: StepPlan) -> object:
    return runner.run(build(plan))


def main(words: Sequence[str] | None = None) -> None:
    """Prints two tables and, as the last line, one JSON object."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--num-rows", type=int, default=8, help="of the steps; default: 8")
    parser.add_argument(
        "--num-tokens", type=int, default=200, help="of each row's sequence; default: 200"
    )
    parser.add_argument("--vocabularies", type=int, nargs="+", default=VOCABULARIES)
    parser.add_argument(
        "--scales",
        type=float,
        nargs="+",
        default=(1.0, 4.0),
        help="of the logits; default: 1 and 4",
    )
    parser.add_argument(
        "--repeats", type=int, default=50, help="repetitions; the lowest time is shown; default: 50"
    )
    arguments = parser.parse_args(words)
    too_few = arguments.num_tokens < 2 or min(arguments.num_rows, arguments.repeats) < 1
    if too_few or min(arguments.vocabularies) < 1000:
        parser.error(
            "--num-tokens must be at least 2, --num-rows and --repeats 1, --vocabularies 1000"
        )
    cuts = [
        {
            "vocab_size": size,
            "scale": scale,
            "cut": cut,
            "seconds": measure_cuts(size, cut, scale=scale, repeats=arguments.repeats),
        }
        for size, scale, cut in itertools.product(arguments.vocabularies, arguments.scales, CUTS)
    ]
    print("\n".join(_cut_lines(cuts)), end="\n\n")
    try:
        steps = measure_steps(
            arguments.model,
            num_rows=arguments.num_rows,
            num_tokens=arguments.num_tokens,
            repeats=arguments.repeats,
        )
    except (JaxpageError, ValueError) as error:
        parser.error(str(error))
    rows = [[f"step of {arguments.num_rows} rows", "ms", "of greedy"]]
    rows += [
        [name, f"{1e3 * value:.2f}", f"{value / steps['greedy']:.2f}"]
        for name, value in steps.items()
    ]
    print("\n".join(align(rows, num_words=1)))
    results = {"cuts": cuts, "steps": steps}
    print(json.dumps({**vars(arguments), **results, "environment": environment()}, allow_nan=False))


def _cut_lines(cuts: Sequence[dict[str, Any]]) -> list[str]:
    rows = [["µs per row", "vocabulary", "scale", *METHODS]]
    for cut in cuts:
        times = [f"{1e6 * seconds:.0f}" for seconds in cut["seconds"].values()]
        rows.append([cut["cut"], str(cut["vocab_size"]), f"{cut['scale']:g}", *times])
    return align(rows, num_words=1)


if __name__ == "__main__":
    main()
