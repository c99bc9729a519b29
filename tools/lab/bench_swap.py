"""Times how a preempted sequence comes back, by swapping and by recomputation.

    python tools/lab/bench_swap.py

The times for each block size are figure 19a of the PagedAttention paper.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from jaxpage.assembly import build_engine
from jaxpage.bench.results import environment
from jaxpage.engine.batch_builder import Batch, BatchBuilder
from jaxpage.engine.runner import Runner
from jaxpage.errors import JaxpageError
from jaxpage.settings.engine_config import EngineConfig
from jaxpage.settings.sampling_params import SamplingParams
from jaxpage.step.plan import Row, Sample, StepPlan
from jaxpage.tables import align

BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True)
class SwapCost:
    """Holds the median seconds for one sequence."""

    block_size: int
    num_blocks: int
    swap_out_seconds: float
    swap_in_seconds: float
    recompute_seconds: float

    @property
    def ratio(self) -> float:
        """Returns the time of swapping both ways divided by that of computing again."""
        return (self.swap_out_seconds + self.swap_in_seconds) / self.recompute_seconds


def measure(model: str, block_size: int, *, num_tokens: int, repeats: int) -> SwapCost:
    """Measures swapping and recomputing a sequence.

    Each of the `repeats` rounds does all three, so what disturbs a round disturbs all of them; one
    round before them does not count.
    """
    num_blocks = -(-num_tokens // block_size)
    config = EngineConfig(
        model=model,
        block_size=block_size,
        num_blocks=2 * num_blocks + 1,
        max_model_len=num_tokens,
        max_num_seqs=2,
    )
    engine = build_engine(config).engine
    runner, builder = engine.runner, engine.builder
    table = tuple(range(1, num_blocks + 1))
    elsewhere = tuple(range(num_blocks + 1, 2 * num_blocks + 1))
    chunks = _chunks(builder, table, num_tokens)
    moves = builder.build(
        StepPlan(
            step_id=0,
            rows=(Row(0, num_tokens - 1, (0,), (table,)),),
            samples=(),
            swap_out=tuple(zip(table, table, strict=True)),
            swap_in=tuple(zip(table, elsewhere, strict=True)),
        )
    )
    rounds = [_round(runner, chunks, moves) for _ in range(1 + repeats)][1:]
    runner.close()
    return SwapCost(
        block_size, num_blocks, *(statistics.median(times) for times in zip(*rounds, strict=True))
    )


def _chunks(builder: BatchBuilder, table: tuple[int, ...], num_tokens: int) -> list[Batch]:
    """Returns the steps that compute a sequence again, cut as the scheduler cuts it.

    A token is drawn at its end.
    """
    size = builder.menu.chunk[-1].num_tokens
    plans = []
    for start in range(0, num_tokens, size):
        token_ids = tuple(
            position % builder.vocab_size
            for position in range(start, min(start + size, num_tokens))
        )
        row = Row(0, start, token_ids, (table,))
        sample = Sample(
            0, len(token_ids) - 1, 0, SamplingParams(temperature=0.0), 0, 0, row.context_length
        )
        last = row.context_length == num_tokens
        plans.append(StepPlan(step_id=0, rows=(row,), samples=(sample,) if last else ()))
    return [builder.build(plan) for plan in plans]


def _round(runner: Runner, chunks: Sequence[Batch], moves: Batch) -> tuple[float, float, float]:
    """Returns the seconds of swapping out, swapping in, and computing again."""

    def recompute() -> None:
        for batch in chunks:
            runner.run(batch)

    return (
        _seconds(runner, lambda: runner.swap_out(moves.swap_out)),
        _seconds(runner, lambda: runner.swap_in(moves.swap_in)),
        _seconds(runner, recompute),
    )


def _seconds(runner: Runner, work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    runner.wait()
    return time.perf_counter() - start


def table_of(costs: Sequence[SwapCost]) -> str:
    """Returns the costs as lines of a table."""
    rows = [["block size", "blocks", "out (ms)", "in (ms)", "recompute (ms)", "ratio"]]
    for cost in costs:
        times = (cost.swap_out_seconds, cost.swap_in_seconds, cost.recompute_seconds)
        milliseconds = [f"{1e3 * seconds:.2f}" for seconds in times]
        rows.append(
            [f"{cost.block_size}", f"{cost.num_blocks}", *milliseconds, f"{cost.ratio:.3f}"]
        )
    return "\n".join(align(rows))


def main(words: Sequence[str] | None = None) -> None:
    """Prints a table and, as the last line, one JSON object."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument(
        "--num-tokens", type=int, default=256, help="of the sequence that is swapped; default: 256"
    )
    parser.add_argument("--block-sizes", type=int, nargs="+", default=BLOCK_SIZES)
    parser.add_argument(
        "--repeats", type=int, default=15, help="medians are taken over so many; default: 15"
    )
    arguments = parser.parse_args(words)
    if arguments.num_tokens < 2 or arguments.repeats < 1:
        parser.error("--num-tokens must be at least 2 and --repeats at least 1")
    try:
        costs = [
            measure(
                arguments.model, size, num_tokens=arguments.num_tokens, repeats=arguments.repeats
            )
            for size in arguments.block_sizes
        ]
    except JaxpageError as error:
        parser.error(str(error))
    print(table_of(costs))
    results = [{**asdict(cost), "ratio": cost.ratio} for cost in costs]
    print(
        json.dumps(
            {**vars(arguments), "results": results, "environment": environment()}, allow_nan=False
        )
    )


if __name__ == "__main__":
    main()
