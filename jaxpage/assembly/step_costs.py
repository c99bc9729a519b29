"""Measures how long steps of each shape take; the controller of speculation starts from that."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from jaxpage.device.inputs import Bucket, BucketMenu
from jaxpage.engine import BatchBuilder, Runner
from jaxpage.settings.sampling_params import SamplingParams
from jaxpage.speculation import Controller
from jaxpage.step.plan import Row, Sample, StepPlan

# The tokens before the computed ones; the content of their blocks does not matter.
CONTEXT = 128
LONG_CONTEXT = 2048  # at most; the drafter on the device is left out
NUM_RUNS = 6  # the first warms up, and the fastest of the others counts


def measure_costs(
    menu: BucketMenu, builder: BatchBuilder, runner: Runner, controller: Controller
) -> None:
    """Measures full steps of every shape, and the time that a drafter adds to them.

    A step is measured from the plan to the draws. No block of the pool may be in use.
    """
    deepest = max(controller.depths, default=0)
    costs = controller.costs
    depths = sorted({0, 1, deepest}) if deepest else []
    shapes = [*menu.decode, *menu.verify]
    buckets = [*shapes, *(menu.chunk[-1:] if deepest else ())]
    steps = [full_step(builder, bucket) for bucket in buckets]
    far_steps = [full_step(builder, bucket, LONG_CONTEXT) for bucket in shapes]
    plans = [replace(step, draft_depth=depth) for step in steps for depth in (None, *depths)]
    seconds = _fastest(builder, runner, [*plans, *far_steps])
    near_seconds = np.reshape(seconds[: len(plans)], (len(buckets), -1)).tolist()
    # The chunk, which comes last, has no far step and no shape of the controller's.
    for bucket, step, far_step, (alone, *by_depth), far in zip(
        shapes, steps, far_steps, near_seconds, seconds[len(plans) :], strict=False
    ):
        # Three depths are measured at most; what a level adds is the same for all.
        by_level = np.interp(range(1 + deepest), depths, by_depth).tolist() if deepest else ()
        near, distance = step.rows[0].start, far_step.rows[0].start - step.rows[0].start
        of_token = max(0.0, far - alone) / distance if distance else 0.0
        costs.at_start((bucket.num_rows, bucket.num_tokens), alone, by_level, (of_token, near))
    if deepest:
        alone, without_drafts, *_ = near_seconds[-1]
        costs.prompt_token = max(0.0, without_drafts - alone) / buckets[-1].num_tokens


def describe_break_even(controller: Controller, decoded: Sequence[int]) -> str:
    """Returns a line that says from how many accepted drafts on speculation pays.

    Args:
        controller: The controller, which knows the costs.
        decoded: The numbers of rows that steps can have, from small to large.
    """
    texts = []
    for num_rows in dict.fromkeys((decoded[0], decoded[len(decoded) // 2], decoded[-1])):
        accepted = controller.break_even(num_rows)
        needed = "never" if accepted is None else f"from {accepted:.2f}"
        texts.append(f"{needed} with {num_rows} sequence{'s' * (num_rows > 1)}")
    return f"drafts pay by the accepted ones of a sequence and step: {', '.join(texts)}"


def _fastest(builder: BatchBuilder, runner: Runner, plans: Iterable[StepPlan]) -> list[float]:
    """Returns the shortest time of each plan.

    The plans run in turns, so that a busy machine slows them all alike.
    """

    def seconds(plan: StepPlan) -> float:
        started = time.monotonic()
        runner.run(builder.build(plan))
        return time.monotonic() - started

    runs = [[seconds(plan) for plan in plans] for _ in range(NUM_RUNS)]
    return [min(each) for each in zip(*runs[1:], strict=True)]


def full_step(builder: BatchBuilder, bucket: Bucket, context: int = CONTEXT) -> StepPlan:
    """Returns a plan whose rows fill the bucket evenly, up to the longest possible sequence.

    Each row has blocks of its own, unless the pool has too few.

    Args:
        builder: The builder of the engine's steps.
        bucket: The shape.
        context: The tokens before those of a row, at most.
    """
    max_length = builder.max_length
    size = min(bucket.num_tokens // bucket.num_rows, max_length)
    context = min(context, max_length - size)
    width = -(-(context + size) // builder.block_size)
    parents = tuple(range(size - 1)) if bucket.verifies else ()
    drawn = range(0 if bucket.verifies else size - 1, size)
    rows = []
    samples = []
    for number in range(bucket.num_rows):
        places = range(number * width, (number + 1) * width)
        tables = tuple(
            tuple(blocks[place % len(blocks)] for place in places) for blocks in builder.blocks
        )
        rows.append(Row(number, context, (0,) * size, tables, parents))
        samples += [
            Sample(number, at, number, SamplingParams(temperature=0.0), 0, 0, context + at + 1)
            for at in drawn
        ]
    return StepPlan(0, tuple(rows), tuple(samples))
