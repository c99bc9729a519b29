"""How long steps of each shape take, measured before the first request: what the choice of the number of drafts begins with."""

from __future__ import annotations

import functools
import time

from jaxpage.device.buckets import Bucket
from jaxpage.engine.batch_builder import BatchBuilder
from jaxpage.engine.runner import Runner
from jaxpage.sampling_params import SamplingParams
from jaxpage.scheduling.plan import Row, Sample, StepPlan
from jaxpage.speculation.speculation import Speculation

CONTEXT = 128  # tokens before those that are computed: all of them the null block's, whose contents do not matter
REPEATS = 3  # after a first run, of which nobody knows what it pays for
LEVELS = 3  # tokens ahead, when it is measured what each of them takes
_PARAMS = SamplingParams(temperature=0.0)


def measure_shapes(builder: BatchBuilder, runner: Runner, speculation: Speculation) -> None:
    """Full steps of every shape without drafts and with them, from the plan to the draws; and what a drafter on the device adds to them.
    Nothing, where nobody chooses between shapes."""
    controller = speculation.controller
    if controller is None:
        return
    for bucket in builder.menu.decode + builder.menu.verify:
        shape, plan = (bucket.num_rows, bucket.num_tokens), full_step(bucket, builder.table_width, builder.block_size)
        measure = functools.partial(_seconds, builder, runner, plan)
        seconds = measure(None)
        controller.costs.at_start(shape, seconds)
        if controller.costs.ahead is not None:
            follows, ahead = (min(measure(levels)) - min(seconds) for levels in (0, LEVELS))
            controller.costs.ahead.at_start(shape, follows, ahead, LEVELS)


def _seconds(builder: BatchBuilder, runner: Runner, plan: StepPlan, levels: int | None) -> list[float]:
    seconds = []
    for _ in range(1 + REPEATS):
        started = time.monotonic()
        runner.run(builder.build(plan, levels=levels))
        seconds.append(time.monotonic() - started)
    return seconds[1:]


def full_step(bucket: Bucket, table_width: int, block_size: int) -> StepPlan:
    """Rows that fill the bucket evenly and write to the null block."""
    per_row = bucket.num_tokens // bucket.num_rows
    parents, token_ids = tuple(range(per_row - 1)), (0,) * per_row
    context = max(0, min(CONTEXT, table_width * block_size - per_row))
    table = (0,) * -(-(context + per_row) // block_size)
    rows = tuple(Row(number, context, token_ids, table, parents) for number in range(bucket.num_rows))
    samples = tuple(
        Sample(row, offset, row, _PARAMS, 0, 0, context + offset + 1)
        for row in range(bucket.num_rows)
        for offset in range(per_row)
    )
    return StepPlan(0, rows, samples)
