"""Trains the demo model's drafters: a draft model, Medusa heads, an EAGLE-3 and an MTP head.

They learn from text that the demo model writes itself.
"""

import dataclasses
import functools
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tokenizers import Tokenizer

from tools.lab.demo_model import (
    acceptance,
    draft_model,
    drafter_card,
    eagle_head,
    exporting,
    medusa_heads,
    mtp_head,
    own_text,
    training,
)
from tools.lab.demo_model.distillation import Teacher, frequent_tokens
from tools.lab.demo_model.model import Params

TEXT_TOKENS = 655_360
TOKENS_PER_STEP = 2048
HELD_OUT_ROWS = 32
# Heads choose among this many tokens: all but 4 in 1,000 of those that the model writes.
FREQUENT = 1024


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Sets how long a drafter is trained, the length of the windows in the end, and the text."""

    steps: int
    learning_rate: float
    max_length: int
    text_tokens: int = TEXT_TOKENS


RECIPES = {
    "draft": Recipe(540, 5e-3, 511),
    "medusa": Recipe(240, 2e-2, 511),
    "eagle3": Recipe(240, 2e-2, 255),
    "mtp": Recipe(270, 2e-2, 255, 196_608),
}


@dataclasses.dataclass(frozen=True)
class Drafter:
    """A drafter that can be trained."""

    params: Params
    objective: training.Objective
    ranks: acceptance.Ranks
    export: Callable[[Params, Path, dict[str, Any]], None]


def make_drafter(name: str, teacher: Teacher, token_map: np.ndarray, seed: int) -> Drafter:
    """Returns the first weights of "draft", "medusa", "eagle3" or "mtp", and functions for them."""
    if name == "draft":
        return Drafter(
            draft_model.first_params(teacher, seed),
            draft_model.objective(teacher),
            functools.partial(acceptance.draft_ranks, teacher),
            lambda params, directory, _: exporting.export_model(
                draft_model.draft_spec(teacher.spec), params, directory
            ),
        )
    if name == "medusa":
        return Drafter(
            medusa_heads.first_params(teacher, token_map),
            medusa_heads.objective(teacher, token_map),
            functools.partial(acceptance.medusa_ranks, teacher, token_map),
            lambda params, directory, measured: medusa_heads.export(
                teacher, token_map, params, directory, measured["accuracies"]
            ),
        )
    if name == "mtp":
        return Drafter(
            mtp_head.first_params(teacher, seed),
            mtp_head.objective(teacher),
            functools.partial(acceptance.mtp_ranks, teacher),
            lambda params, directory, _: mtp_head.export(teacher, params, directory.parent),
        )
    return Drafter(
        eagle_head.first_params(teacher, token_map, seed),
        eagle_head.objective(teacher, token_map),
        functools.partial(acceptance.eagle_ranks, teacher, token_map),
        lambda params, directory, _: eagle_head.export(teacher, token_map, params, directory),
    )


def run_recipe(
    name: str,
    drafter: Drafter,
    text: np.ndarray,
    *,
    scratch: Path,
    plan: training.Plan,
    minutes: float | None,
    resume: bool,
) -> tuple[training.Plan, training.Run]:
    """Trains to the end of the plan, from the beginning or from the checkpoint in `scratch`."""
    checkpoint, max_length = scratch / f"{name}.npz", RECIPES[name].max_length
    stream, held_out = text[:-HELD_OUT_ROWS].ravel(), text[-HELD_OUT_ROWS:].astype(np.int32)
    if resume and checkpoint.exists():
        plan, run = training.load_run(
            checkpoint, drafter.params, plan.steps if minutes is None else None
        )
    else:
        if minutes is not None:
            steps = training.steps_for_minutes(
                drafter.objective, drafter.params, plan, stream, max_length, minutes
            )
            plan = dataclasses.replace(plan, steps=steps)
        run = training.start_run(drafter.params, plan)
    loss = jax.jit(drafter.objective)
    print(f"{name}: {plan.steps} steps", flush=True)
    return plan, training.train(
        drafter.objective,
        plan,
        run,
        training.window_batches(stream, max_length, plan),
        checkpoint,
        lambda run: (
            f"{name} at step {run.step}: loss {loss(run.params, held_out[:, :max_length]):.3f} on text not learned from"
        ),
    )


def train_drafters(
    directory: Path,
    scratch: Path,
    names: Iterable[str],
    *,
    steps: int | None,
    minutes: float | None,
    seed: int,
    resume: bool,
) -> None:
    """Trains, writes and measures drafters, and writes the card of all of them.

    Args:
        directory: The directory of the model; each drafter gets a directory in it.
        scratch: The directory of checkpoints.
        names: The drafters to train.
        steps: The steps of each drafter.
        minutes: The time of each drafter; without steps and minutes its recipe decides.
        seed: The seed of the text, the first weights and the batches.
        resume: Training goes on from a checkpoint if there is one.
    """
    teacher = Teacher(*exporting.import_model(directory))
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    text = own_text.write(teacher.spec, teacher.params, tokenizer, TEXT_TOKENS, seed)
    token_map = frequent_tokens(text, teacher.spec.vocabulary, FREQUENT)
    samples = acceptance.make_samples(teacher, tokenizer, seed + 1)
    for name in names:
        drafter, recipe = make_drafter(name, teacher, token_map, seed), RECIPES[name]
        num_rows = recipe.text_tokens // teacher.spec.max_positions
        plan = training.Plan(
            steps or recipe.steps, seed, recipe.learning_rate, tokens_per_step=TOKENS_PER_STEP
        )
        plan, run = run_recipe(
            name,
            drafter,
            text[:num_rows],
            scratch=scratch,
            plan=plan,
            minutes=minutes,
            resume=resume,
        )
        params = exporting.round_to_bfloat16(run.params)
        measured = acceptance.measure(params, drafter.ranks, samples)
        if name == "draft":
            measured["overlap"] = {
                sample.name: acceptance.overlap(teacher, params, sample) for sample in samples
            }
        target = directory / name
        target.mkdir(exist_ok=True)
        drafter.export(params, target, measured)
        size = sum(value.size for value in params.values())
        facts = {
            "steps": run.step,
            "seed": plan.seed,
            "minutes": round(run.seconds / 60, 1),
            "parameters": size,
        }
        exporting.write_json(target / drafter_card.FACTS, facts | measured)
        print(name, json.dumps(facts | measured["acceptance"]), flush=True)
    drafter_card.write_card(
        directory,
        TEXT_TOKENS,
        RECIPES["mtp"].text_tokens,
        TOKENS_PER_STEP,
        acceptance.ROWS,
        acceptance.LENGTH,
    )
