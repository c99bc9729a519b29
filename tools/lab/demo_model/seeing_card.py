"""Writes the model card of the demo that sees: its data, training, accuracy and answers."""

import dataclasses

import jax
import numpy as np

from tools.lab.demo_model.drawings import BACKGROUNDS, COLOURS
from tools.lab.demo_model.model import Params
from tools.lab.demo_model.picture_talk import CONVERSATION_SHARE, RAW_SHARE
from tools.lab.demo_model.seeing_accuracy import KINDS, Accuracy
from tools.lab.demo_model.seeing_model import SeeingSpec
from tools.lab.demo_model.training import Plan, Run

TITLES = {
    "describe": '"What is in the picture?"',
    "count": '"How many shapes are there?"',
    "colour": '"What colour is the circle?"',
    "size": '"How big is the red circle?"',
    "present": '"Is there a red circle?"',
    "where": '"Where is the blue circle?"',
    "relation": '"Is the red circle above the blue circle?"',
    "background": '"What colour is the background?"',
}
TEMPLATE = """---
license: apache-2.0
language: en
---
# The demo of jaxpage that sees

An Idefics 3 of {parameters:,} parameters in bfloat16. Its vision transformer (SigLIP: width {spec.width}, \
{spec.layers} layers, {spec.heads} heads, feed-forward {spec.feed_forward}) reads pictures of {spec.image_size}x{spec.image_size} \
pixels in patches of {spec.patch_size}, and {shuffle} patches become one of {spec.image_tokens} tokens. Its Llama has \
width {spec.text.width}, {spec.text.layers} layers, {spec.text.heads} query and {spec.text.kv_heads} key/value heads of width \
{spec.text.head_dim}, feed-forward {spec.text.feed_forward}, a vocabulary of {spec.text.vocabulary} and tied embeddings. It exists so that \
a question about a picture is answered on a machine without a network, and so that tests of pictures have weights that \
look at them. It is not useful for anything else.

## What it saw

Drawings that `tools/lab/demo_model/drawings.py` makes: one to three circles in {colours}, \
small or large, on a {backgrounds} background that varies a little, and eight kinds of questions with \
their answers. Nothing was downloaded.

## How it was trained

`python tools/train_vision_demo.py --steps {plan.steps} --seed {plan.seed}`

{steps:,} steps of {batch} new drawings with five or six questions each in {minutes:.0f} minutes of \
wall time, one thread of a CPU that other programs shared, in float32 with jax {jax_version}. Muon for \
the matrices of the layers and AdamW for the rest (optax), learning rate {plan.learning_rate}, weight \
decay {plan.weight_decay}, clip 1, linear warm-up and linear decay. The loss is that of the answers' \
tokens; in addition each picture token learns the colour, kind and size of the shape whose centre it \
covers, by a matrix that is not kept. {conversations:.0%} of the rows are conversations of several \
questions, in half of which the first question comes before the picture; {raw:.0%} are a picture and \
a question without the chat template.

## How good it is

The share of greedy answers that are right word for word, about {asked:,} new drawings (of seeds that training does not use), \
measured with the exported weights in float32:

| question, such as | right |
|---|---|
{accuracies}

## What it says

{answers}

## Limits

It knows drawings as above and the questions about them, in English, in the wordings of `drawings.py`. About a photograph or another \
question it says something in the same words. Pictures are made square, so that a long one is distorted, and shapes smaller than about \
an eighth of the picture may be missed. It was trained on one picture in a conversation, and on prompts of up to {row_length} tokens.

## Licence

The weights, tokenizer and configuration are under Apache-2.0, as jaxpage is.
"""


@dataclasses.dataclass(frozen=True)
class Facts:
    """Holds what the card reports; answers are by picture and question."""

    spec: SeeingSpec
    plan: Plan
    run: Run
    parameters: Params
    batch: int
    row_length: int
    accuracy: Accuracy
    answers: dict[str, dict[str, str]]


def _accuracy_lines(accuracy: Accuracy) -> str:
    rows = [(TITLES[kind], accuracy.share(kind)) for kind in KINDS]
    rows.append(("all", accuracy.share()))
    return "\n".join(f"| {title} | {share:.1%} |" for title, share in rows)


def _answer_lines(answers: dict[str, dict[str, str]]) -> str:
    lines = ["| picture (`examples/pictures/`) | question | answer |", "|---|---|---|"]
    for name, replies in answers.items():
        lines += [f"| {name} | {question} | {text} |" for question, text in replies.items()]
    return "\n".join(lines)


def model_card(facts: Facts) -> str:
    """Returns README.md of the model's directory."""
    return TEMPLATE.format(
        spec=facts.spec,
        plan=facts.plan,
        parameters=sum(int(np.prod(value.shape)) for value in facts.parameters.values()),
        shuffle=facts.spec.shuffle**2,
        colours=_join_words(list(COLOURS), "and"),
        backgrounds=_join_words(list(BACKGROUNDS), "or"),
        steps=facts.run.step,
        batch=facts.batch,
        minutes=facts.run.seconds / 60,
        jax_version=jax.__version__,
        conversations=CONVERSATION_SHARE,
        raw=RAW_SHARE,
        num_questions=sum(facts.accuracy.num_questions.values()),
        accuracies=_accuracy_lines(facts.accuracy),
        answers=_answer_lines(facts.answers),
        row_length=facts.row_length,
    )


def _join_words(words: list[str], joined_by: str) -> str:
    return f"{', '.join(words[:-1])} {joined_by} {words[-1]}"
