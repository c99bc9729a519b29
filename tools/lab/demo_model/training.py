"""Trains on random crops with a schedule that depends on the number of steps alone.

The learning rate warms up, stays, and falls linearly to zero over the last part. The first steps
read short crops (cheap), the last ones full-length crops (so that every position is trained).
Batches depend on (seed, step) only, so a run that is interrupted and resumed, or repeated with the
same number of steps, reads exactly the same.

A run minimises an objective: a mean loss of some weights over windows of tokens. The language model
has one; the draft model and the heads have others, trained by the same code.
"""

import dataclasses
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from optax.contrib import MuonDimensionNumbers
from tqdm import tqdm

from tools.lab.demo_model.model import Params

# The second argument is a batch: windows of tokens, or whatever the objective reads.
Objective = Callable[[Params, Any], jax.Array]

SHORT_CROP, SHORT_FRACTION = 128, 0.8
WARM_UP_STEPS, DECAY_FRACTION = 40, 0.4
CALIBRATION_STEPS = 10
CHECKPOINT_SECONDS = 240


@dataclasses.dataclass(frozen=True)
class Plan:
    """Holds what makes a run reproducible.

    The same plan on the same corpus reads the same batches at the same rates.
    """

    steps: int
    seed: int
    learning_rate: float = 5e-3
    weight_decay: float = 0.1
    tokens_per_step: int = 4096

    def crop(self, step: int, max_length: int) -> int:
        """Returns the tokens per row at a step."""
        return SHORT_CROP if step < SHORT_FRACTION * self.steps else max_length

    def schedule(self, step: jax.Array) -> jax.Array:
        """Returns the learning rate at a step."""
        rise = (step + 1) / WARM_UP_STEPS
        fall = (self.steps - step) / (DECAY_FRACTION * self.steps)
        return self.learning_rate * jnp.minimum(1.0, jnp.minimum(rise, fall))


@dataclasses.dataclass
class Run:
    """Holds the state of training; `seconds` is the time spent in steps over all resumptions."""

    params: Params
    optimizer_state: optax.OptState
    step: int = 0
    seconds: float = 0.0


def _optimizer(plan: Plan) -> optax.GradientTransformation:
    """Returns Muon for the matrices of the layers, AdamW for the embedding and the norms."""

    def muon_axes(params: Params) -> dict[str, MuonDimensionNumbers | None]:
        return {name: MuonDimensionNumbers() if name.endswith("_proj") else None for name in params}

    muon = optax.contrib.muon(
        plan.schedule,
        weight_decay=plan.weight_decay,
        adam_b2=0.95,
        muon_weight_dimension_numbers=muon_axes,
        consistent_rms=0.2,
    )
    return optax.chain(optax.clip_by_global_norm(1.0), muon)


def start_run(params: Params, plan: Plan) -> Run:
    """Returns a new run with copies of the first weights, because a step donates its inputs."""
    params = {name: jnp.array(value) for name, value in params.items()}
    return Run(params, _optimizer(plan).init(params))


def make_step(
    objective: Objective, plan: Plan
) -> Callable[..., tuple[Params, optax.OptState, jax.Array]]:
    """Returns the compiled training step.

    It maps (params, optimizer state, batch) to their next values and the loss. A language model's
    batch has windows [B, T+1].
    """
    optimizer = _optimizer(plan)

    def step(params: Params, state: Any, batch: Any) -> tuple[Params, Any, jax.Array]:
        loss, gradients = jax.value_and_grad(objective)(params, batch)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    return jax.jit(step, donate_argnums=(0, 1))


def sample_windows(stream: np.ndarray, crop: int, plan: Plan, step: int) -> np.ndarray:
    """Returns random crops of crop + 1 tokens, across documents.

    They come from a generator keyed by (seed, step).
    """
    starts = np.random.default_rng((plan.seed, step)).integers(
        0, len(stream) - crop - 1, plan.tokens_per_step // crop
    )
    return stream[starts[:, None] + np.arange(crop + 1)].astype(np.int32)


def window_batches(stream: np.ndarray, max_length: int, plan: Plan) -> Callable[[int], np.ndarray]:
    """Returns the function from a step to its windows, short ones first."""
    return lambda step: sample_windows(stream, plan.crop(step, max_length), plan, step)


def steps_for_minutes(
    objective: Objective,
    params: Params,
    plan: Plan,
    stream: np.ndarray,
    max_length: int,
    minutes: float,
) -> int:
    """Returns how many steps fit; measures both crop lengths on copies of the weights."""
    seconds_per_step = []
    for crop in (SHORT_CROP, max_length):
        run, step = start_run(params, plan), make_step(objective, plan)
        for index in range(CALIBRATION_STEPS + 2):
            if index == 2:
                began = time.perf_counter()
            windows = sample_windows(stream, crop, plan, index)
            run.params, run.optimizer_state, loss = step(run.params, run.optimizer_state, windows)
            loss.block_until_ready()
        seconds_per_step.append((time.perf_counter() - began) / CALIBRATION_STEPS)
    average = SHORT_FRACTION * seconds_per_step[0] + (1 - SHORT_FRACTION) * seconds_per_step[1]
    print(
        f"seconds per step: {seconds_per_step[0]:.3f} short, {seconds_per_step[1]:.3f} long",
        flush=True,
    )
    return int(60 * minutes / average)


def save_run(path: Path, plan: Plan, run: Run) -> None:
    """Writes all arrays and the plan into one file, replaced atomically."""
    facts = json.dumps({"step": run.step, "seconds": run.seconds, "plan": dataclasses.asdict(plan)})
    arrays: dict[str, Any] = {"facts": np.array(facts)}
    for index, leaf in enumerate(jax.tree.leaves((run.params, run.optimizer_state))):
        arrays[f"leaf{index}"] = np.asarray(leaf)
    partial = path.with_suffix(".partial.npz")
    np.savez(partial, **arrays)
    partial.replace(path)


def load_run(path: Path, params: Params, steps: int | None = None) -> tuple[Plan, Run]:
    """Resumes a run of weights shaped like `params`.

    `steps` may move the end of the run, as long as its learning rate has not begun to fall.

    Raises:
        ValueError: The last part of the run has begun.
    """
    with np.load(path) as file:
        facts = json.loads(str(file["facts"]))
        plan = Plan(**facts["plan"])
        if steps is not None and steps != plan.steps:
            if facts["step"] > (1 - DECAY_FRACTION) * min(steps, plan.steps):
                raise ValueError(
                    f"--steps {steps}: the run is at step {facts['step']}, its last part has begun"
                )
            plan = dataclasses.replace(plan, steps=steps)
        fresh = start_run(params, plan)
        fresh_leaves, structure = jax.tree.flatten((fresh.params, fresh.optimizer_state))
        leaves = [jnp.asarray(file[f"leaf{index}"]) for index in range(len(fresh_leaves))]
    saved_params, state = jax.tree.unflatten(structure, leaves)
    return plan, Run(saved_params, state, facts["step"], facts["seconds"])


def train(
    objective: Objective,
    plan: Plan,
    run: Run,
    batch_at: Callable[[int], Any],
    checkpoint: Path,
    report: Callable[[Run], str],
) -> Run:
    """Runs the plan to its end, and saves and reports every few minutes.

    Args:
        objective: What is minimised.
        plan: The number of steps and the learning rates.
        run: Where training begins; it is changed and returned.
        batch_at: Returns the batch of a step.
        checkpoint: The file that the run is saved to.
        report: Returns the text that is printed with each checkpoint.

    Raises:
        FloatingPointError: The loss is not finite.
    """
    step = make_step(objective, plan)
    saved = began = time.perf_counter()
    seconds_before, losses = run.seconds, []
    bar = tqdm(total=plan.steps, initial=run.step, unit="step", mininterval=5)
    while run.step < plan.steps:
        batch = batch_at(run.step)
        run.params, run.optimizer_state, loss = step(run.params, run.optimizer_state, batch)
        run.step += 1
        bar.update()
        if run.step % 20 == 0:
            losses.append(float(loss))
            bar.set_postfix(loss=f"{np.mean(losses[-5:]):.3f}")
            if not math.isfinite(losses[-1]):
                raise FloatingPointError(f"the loss is {losses[-1]} at step {run.step}")
        now = time.perf_counter()
        if now - saved > CHECKPOINT_SECONDS or run.step == plan.steps:
            run.seconds = seconds_before + now - began
            save_run(checkpoint, plan, run)
            bar.write(report(run))
            saved = time.perf_counter()
    bar.close()
    return run
