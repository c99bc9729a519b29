"""How long steps of each shape take, measured before the first request: what the choice of the number of drafts begins with."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from jaxpage.device.buckets import Bucket
from jaxpage.engine.batch_builder import BatchBuilder
from jaxpage.engine.runner import Runner
from jaxpage.settings.sampling_params import SamplingParams
from jaxpage.speculation.controller import Controller
from jaxpage.speculation.costs import Shape
from jaxpage.step.plan import Row, Sample, StepPlan

CONTEXT = 128  # tokens before those that are computed, whatever stands in their blocks
TURNS = 5  # after a first one, of which nobody knows what it pays for
_PARAMS = SamplingParams(temperature=0.0)


def measure_shapes(builder: BatchBuilder, runner: Runner, controller: Controller) -> None:
    """Full steps of every shape without drafts and with them, from the plan to the draws; and what a drafter on the device adds to them.

    All of them in turn, so that what the machine does besides slows no shape more than the others. No block of the pool may be in use.
    """
    costs = controller.costs
    plans = {
        (bucket.num_rows, bucket.num_tokens): full_step(bucket, builder)
        for bucket in builder.menu.decode + builder.menu.verify
    }
    if costs.ahead is None:
        for shape, (alone,) in _seconds(builder, runner, plans, (None,)).items():
            costs.at_start(shape, alone)
        return
    for shape, (alone, *added) in _seconds(builder, runner, plans, (None, 0, 1, costs.ahead.farthest)).items():
        costs.at_start(shape, alone)
        follows, first, farthest = (seconds - alone for seconds in added)
        costs.ahead.at_start(shape, follows, first, farthest)
    prompts = full_step(builder.menu.chunk[-1], builder)
    ((alone, follows),) = _seconds(builder, runner, {(0, 0): prompts}, (None, 0)).values()
    costs.ahead.prompt_token = max(0.0, follows - alone) / prompts.num_tokens


def _seconds(
    builder: BatchBuilder, runner: Runner, plans: Mapping[Shape, StepPlan], parts: Sequence[int | None]
) -> dict[Shape, list[float]]:
    """The fastest run of each, by the drafter's part in it."""
    found: dict[Shape, list[list[float]]] = {shape: [[] for _ in parts] for shape in plans}
    for _ in range(1 + TURNS):
        for shape, plan in plans.items():
            for levels, seconds in zip(parts, found[shape], strict=True):
                started = time.monotonic()
                runner.run(builder.build(replace(plan, draft_depth=levels)))
                seconds.append(time.monotonic() - started)
    return {shape: [min(seconds[1:]) for seconds in runs] for shape, runs in found.items()}


def full_step(bucket: Bucket, builder: BatchBuilder) -> StepPlan:
    """Rows that fill the bucket evenly, in blocks of their own as far as the pool has so many; the first of it is nobody's."""
    per_row = bucket.num_tokens // bucket.num_rows
    drawn = range(per_row) if bucket.verifies else range(per_row - 1, per_row)
    parents, token_ids = tuple(range(per_row - 1)) if bucket.verifies else (), (0,) * per_row
    context = max(0, min(CONTEXT, builder.tables.width * builder.block_size - per_row))
    length = -(-(context + per_row) // builder.block_size)  # of a block table

    def row(number: int) -> Row:
        places = range(number * length, (number + 1) * length)
        first, *further = (tuple(blocks[place % len(blocks)] for place in places) for blocks in builder.blocks)
        return Row(number, context, token_ids, first, parents, further_tables=tuple(further))

    samples = tuple(
        Sample(number, offset, number, _PARAMS, 0, 0, context + offset + 1)
        for number in range(bucket.num_rows)
        for offset in drawn
    )
    return StepPlan(0, tuple(map(row, range(bucket.num_rows))), samples)
