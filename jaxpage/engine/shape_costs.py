"""How long steps of each shape take, measured before the first request: what the choice of the number of drafts begins with."""

from __future__ import annotations

import time
from collections.abc import Iterable

from jaxpage.device.buckets import Bucket
from jaxpage.engine.batch_builder import BatchBuilder
from jaxpage.engine.runner import Runner
from jaxpage.sampling_params import SamplingParams
from jaxpage.scheduling.plan import Row, Sample, StepPlan
from jaxpage.speculation.controller import Controller

CONTEXT = 128  # tokens before those that are computed, whatever stands in their blocks
TURNS = 5  # after a first one, of which nobody knows what it pays for
LEVELS = 3  # tokens ahead, when it is measured what each of them takes
_PARAMS = SamplingParams(temperature=0.0)


def measure_shapes(builder: BatchBuilder, runner: Runner, controller: Controller, num_blocks: int) -> None:
    """Full steps of every shape without drafts and with them, from the plan to the draws; and what a drafter on the device adds to them.

    All of them in turn, so that what the machine does besides slows no shape more than the others. No block of the pool may be in use.
    """
    costs = controller.costs
    plans = {
        (bucket.num_rows, bucket.num_tokens): full_step(bucket, builder.table_width, builder.block_size, num_blocks)
        for bucket in builder.menu.decode + builder.menu.verify
    }
    parts = (None,) if costs.ahead is None else (None, 0, LEVELS)
    seconds: dict[tuple[tuple[int, int], int | None], list[float]] = {}
    for _ in range(1 + TURNS):
        for shape, plan in plans.items():
            for levels in parts:
                started = time.monotonic()
                runner.run(builder.build(plan, levels=levels))
                seconds.setdefault((shape, levels), []).append(time.monotonic() - started)
    for shape in plans:
        alone, *others = (seconds[shape, levels][1:] for levels in parts)
        costs.at_start(shape, alone)
        if costs.ahead is not None:
            following, ahead = (_longer(one, alone) for one in others)
            costs.ahead.at_start(shape, following, ahead, LEVELS)


def _longer(ones: Iterable[float], others: Iterable[float]) -> float:
    """Seconds, by the fastest of each."""
    return min(ones) - min(others)


def full_step(bucket: Bucket, table_width: int, block_size: int, num_blocks: int) -> StepPlan:
    """Rows that fill the bucket evenly, in blocks of their own as far as the pool has so many; the first of it is nobody's."""
    per_row = bucket.num_tokens // bucket.num_rows
    parents, token_ids = tuple(range(per_row - 1)), (0,) * per_row
    context = max(0, min(CONTEXT, table_width * block_size - per_row))
    length = -(-(context + per_row) // block_size)  # of a block table

    def row(number: int) -> Row:
        table = (1 + place % (num_blocks - 1) for place in range(number * length, (number + 1) * length))
        return Row(number, context, token_ids, tuple(table), parents)

    samples = tuple(
        Sample(number, offset, number, _PARAMS, 0, 0, context + offset + 1)
        for number in range(bucket.num_rows)
        for offset in range(per_row)
    )
    return StepPlan(0, tuple(map(row, range(bucket.num_rows))), samples)
