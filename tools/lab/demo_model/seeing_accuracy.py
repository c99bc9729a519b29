"""Measures how many answers of the demo that sees are right, word for word."""

import functools
from collections import defaultdict
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

from tools.lab.demo_model.drawings import Question, Scene, ask, make_scene
from tools.lab.demo_model.model import Params
from tools.lab.demo_model.picture_talk import END, RowMaker, stack
from tools.lab.demo_model.seeing_model import Rows, SeeingSpec, answer_logits

ROWS = 32
MAX_ANSWER = 24  # tokens
KINDS = (
    *("describe", "count", "colour", "size", "present"),
    *("where", "relation", "background"),
)


class Accuracy(NamedTuple):
    """Holds the number of questions and of right answers, by the kind of the question."""

    num_questions: dict[str, int]
    right: dict[str, int]

    def share(self, kind: str | None = None) -> float:
        """Returns the share of right answers to a kind of question, or to all."""
        kinds = KINDS if kind is None else (kind,)
        return sum(self.right[name] for name in kinds) / sum(
            self.num_questions[name] for name in kinds
        )


def make_questions(rng: np.random.Generator, count: int) -> list[tuple[Scene, Question]]:
    """Returns questions about new scenes, each kind as often as the others.

    Args:
        rng: The source of the scenes; its seed is none of training.
        count: The number of questions, a multiple of the number of kinds.
    """
    questions: list[tuple[Scene, Question]] = []
    while len(questions) < count:
        scene, kind = make_scene(rng), KINDS[len(questions) % len(KINDS)]
        fitting = [question for question in ask(scene, rng) if question.kind == kind]
        if fitting:
            questions.append((scene, fitting[0]))
    return questions


def measure(
    spec: SeeingSpec,
    params: Params,
    maker: RowMaker,
    questions: list[tuple[Scene, Question]],
    rng: np.random.Generator,
) -> Accuracy:
    """Returns how many greedy answers are right in all tokens, the end of the answer too.

    A greedy answer is right exactly if each of its tokens is the most likely one after the right
    tokens before it, so one pass over the right answer decides.
    """
    num_questions: dict[str, int] = defaultdict(int)
    right: dict[str, int] = defaultdict(int)
    for begin in range(0, len(questions), ROWS):
        part = questions[begin : begin + ROWS]
        rows = [maker.one_question(scene, question, rng) for scene, question in part]
        # The last batch is filled up with its first row, so that one program serves all.
        filled = stack(rows + rows[:1] * (ROWS - len(rows)))
        are_right = _are_right(spec, params, filled)
        for (_, question), is_right in zip(part, are_right, strict=False):
            num_questions[question.kind] += 1
            right[question.kind] += bool(is_right)
    return Accuracy(num_questions, right)


def answer(
    spec: SeeingSpec, params: Params, maker: RowMaker, picture: Image.Image, question: str
) -> str:
    """Returns the greedy answer to a question in the chat template."""
    ids: list[int] = []
    end = maker.tokenizer.token_to_id(END)
    while len(ids) < MAX_ANSWER:
        row = stack([maker.unfinished(picture, question, ids)])
        top_ids = int(_top_candidates(spec, params, row)[0, 0])
        if top_ids == end:
            break
        ids.append(top_ids)
    return maker.tokenizer.decode(ids)


@functools.partial(jax.jit, static_argnums=0)
def _top_candidates(spec: SeeingSpec, params: Params, rows: Rows) -> jax.Array:
    return jnp.argmax(answer_logits(spec, params, rows), -1)


def _are_right(spec: SeeingSpec, params: Params, rows: Rows) -> np.ndarray:
    top_ids = np.asarray(_top_candidates(spec, params, rows))
    return ((top_ids == rows.answers) | (rows.answers < 0)).all(-1)
