"""Draws the example pictures of the demo that sees, and records its answers about them."""

import json
from pathlib import Path

import numpy as np
from PIL import Image
from tokenizers import Tokenizer

from tools.lab.demo_model.drawings import Scene, Shape, draw
from tools.lab.demo_model.model import Params
from tools.lab.demo_model.picture_talk import RowMaker
from tools.lab.demo_model.seeing_accuracy import answer
from tools.lab.demo_model.seeing_model import SeeingSpec

SIZE = (256, 256)
ANSWERS = "answers.json"
# Of each picture: the scene, and what is asked about it.
EXAMPLES: dict[str, tuple[Scene, tuple[str, ...]]] = {
    "red-and-blue.png": (
        Scene(
            (
                Shape("red", "circle", True, 0.28, 0.48, 0.21, 0.0),
                Shape("blue", "circle", True, 0.74, 0.55, 0.22, 0.0),
            ),
            "white",
        ),
        ("What is in the picture?", "Where is the blue circle?", "How many shapes are there?"),
    ),
    "yellow.png": (
        Scene((Shape("yellow", "circle", True, 0.7, 0.3, 0.22, 0.0),), "black"),
        ("What is in the picture?", "Where is the circle?", "What colour is the background?"),
    ),
    "green-and-orange.png": (
        Scene(
            (
                Shape("green", "circle", False, 0.46, 0.24, 0.14, 0.0),
                Shape("orange", "circle", True, 0.54, 0.7, 0.21, 0.0),
            ),
            "grey",
        ),
        ("What is in the picture?", "How big is the green circle?", "Is there a red circle?"),
    ),
    "three.png": (
        Scene(
            (
                Shape("purple", "circle", False, 0.19, 0.3, 0.14, 0.0),
                Shape("red", "circle", False, 0.5, 0.68, 0.14, 0.0),
                Shape("blue", "circle", False, 0.81, 0.35, 0.14, 0.0),
            ),
            "white",
        ),
        ("Describe the picture.", "How many shapes?", "Is there a red circle?"),
    ),
    "orange-and-blue.png": (
        Scene(
            (
                Shape("orange", "circle", True, 0.71, 0.5, 0.21, 0.0),
                Shape("blue", "circle", False, 0.24, 0.42, 0.14, 0.0),
            ),
            "grey",
        ),
        (
            "What do you see?",
            "Is the orange circle right of the blue circle?",
            "What colour is the background?",
        ),
    ),
}


def draw_examples(directory: Path) -> None:
    """Writes the pictures as PNG files; the same ones each time."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, (scene, _) in EXAMPLES.items():
        draw(scene, SIZE, np.random.default_rng(0)).save(directory / name, optimize=True)


def record_answers(
    spec: SeeingSpec, params: Params, tokenizer: Tokenizer, directory: Path
) -> dict[str, dict[str, str]]:
    """Returns the model's answers by picture and question, and writes them as JSON."""
    maker = RowMaker(tokenizer, spec)
    answers: dict[str, dict[str, str]] = {}
    for name, (_, questions) in EXAMPLES.items():
        with Image.open(directory / name) as picture:
            answers[name] = {
                question: answer(spec, params, maker, picture, question) for question in questions
            }
    text = json.dumps(answers, indent=2) + "\n"
    (directory / ANSWERS).write_text(text, "utf-8")
    return answers
