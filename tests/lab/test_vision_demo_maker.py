"""Says what makes the packaged demo that sees: its drawings, its training model beside
transformers', and its accuracy.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
from PIL import Image
from tokenizers import Tokenizer

from jaxpage.checkpoints.finding.resolve import DEMO_VISION
from tests.test_vision_demo import ANSWERS, PICTURES, inputs_of, open_with_transformers
from tools.lab.demo_model import drawings, picture_talk, seeing_accuracy, seeing_examples
from tools.lab.demo_model.seeing_files import import_seeing
from tools.lab.demo_model.seeing_model import Seen, answer_logits

# Of the card's accuracy, for a sample of 96 questions: three standard deviations or more.
MARGIN = 0.15


@pytest.fixture(scope="module")
def maker() -> picture_talk.RowMaker:
    tokenizer = Tokenizer.from_file(str(DEMO_VISION / "tokenizer.json"))
    return picture_talk.RowMaker(tokenizer, import_seeing(DEMO_VISION)[0])


def accuracy_of_card() -> float:
    """Returns the share in the last row of the card's table."""
    card = (DEMO_VISION / "README.md").read_text()
    return float(re.search(r"^\| all \| ([\d.]+)% \|$", card, re.M).group(1)) / 100


def test_the_example_pictures_are_those_that_the_tool_draws(tmp_path):
    seeing_examples.draw_examples(tmp_path)
    assert (
        {path.name for path in PICTURES.glob("*.png")}
        == set(ANSWERS)
        == set(seeing_examples.EXAMPLES)
    )
    for name in ANSWERS:
        with Image.open(tmp_path / name) as drawn, Image.open(PICTURES / name) as stored:
            separate = np.asarray(drawn, np.int32) - np.asarray(stored, np.int32)
        assert np.abs(separate).max() <= 2  # another Pillow may round otherwise


def test_the_model_that_was_trained_is_the_one_of_transformers(maker):
    """Logits of the first token of an answer, with the processor's pixels and tokens."""
    torch = pytest.importorskip("torch")
    model, processor = open_with_transformers()
    spec, params = import_seeing(DEMO_VISION)
    for name, (width, height) in {"yellow.png": (90, 200), "three.png": (256, 256)}.items():
        with Image.open(PICTURES / name) as stored:
            picture = stored.resize((width, height))
        inputs = inputs_of(processor, picture, "What is in the picture?")
        row = maker.unfinished(picture, "What is in the picture?", [])
        length = inputs["input_ids"].shape[1]
        assert row.tokens[:length].tolist() == inputs["input_ids"][0].tolist()
        np.testing.assert_allclose(row.pixels, inputs["pixel_values"][0, 0].numpy(), atol=1e-6)
        with torch.no_grad():
            oracle = model(**inputs).logits[0, -1].numpy()
        logits = answer_logits(spec, params, picture_talk.stack([row]))[0, 0]
        np.testing.assert_allclose(logits, oracle, atol=1e-4)


def test_it_is_as_right_about_new_drawings_as_its_card_says(maker):
    spec, params = import_seeing(DEMO_VISION)
    rng = np.random.default_rng(17)
    questions = seeing_accuracy.make_questions(rng, 96)
    accuracy = seeing_accuracy.measure(spec, params, maker, questions, rng)
    assert accuracy.share() > accuracy_of_card() - MARGIN


def test_questions_have_the_answers_of_their_scenes():
    """The answers are made by hand, for a scene with two shapes and one with one."""
    scene = seeing_examples.EXAMPLES["red-and-blue.png"][0]
    rng = np.random.default_rng(1)
    questions = {
        question.text: question.answer for _ in range(200) for question in drawings.ask(scene, rng)
    }
    assert questions["What is in the picture?"] == "a red circle left of a blue circle"
    assert questions["How many shapes?"] == "two"
    assert questions["Where is the blue circle?"] == "right of the red circle"
    assert questions["Is the red circle left of the blue circle?"] == "yes"
    assert questions["Is the blue circle left of the red circle?"] == "no"
    assert questions["Is there a green circle?"] == "no"
    assert questions["How big is the blue circle?"] == "large"
    assert not [text for text in questions if "the circle" in text]  # there are two
    yellow = seeing_examples.EXAMPLES["yellow.png"][0]
    questions = {
        question.text: question.answer for _ in range(50) for question in drawings.ask(yellow, rng)
    }
    assert questions["What is this?"] == "a yellow circle"
    assert questions["Where is the circle?"] == "at the top right"
    assert questions["What color is the circle?"] == "yellow"
    assert questions["What colour is the background?"] == "black"


def test_a_shape_is_drawn_where_its_cell_says():
    rng = np.random.default_rng(2)
    for _ in range(40):
        scene = drawings.make_scene(rng)
        picture = drawings.draw(scene, (64, 64), rng)
        cells = picture_talk.cells_of(scene, 4).reshape(4, 4, 3)
        for shape in scene.shapes:
            colour = picture.getpixel((int(64 * shape.x), int(64 * shape.y)))
            separate = {
                name: sum(abs(a - b) for a, b in zip(colour, tint, strict=True))
                for name, tint in drawings.COLOURS.items()
            }
            assert min(separate, key=separate.get) == shape.colour
            assert cells[int(4 * shape.y), int(4 * shape.x)].any()


def test_turns_of_a_row_see_the_picture_and_themselves_alone(maker):
    """The same question has the same logits whatever stands in the other turns of its row."""
    spec, params = import_seeing(DEMO_VISION)
    scene = seeing_examples.EXAMPLES["yellow.png"][0]
    picture = drawings.draw(scene, (64, 64), np.random.default_rng(0))
    seen = Seen(picture_talk.pixels_of(picture, spec), picture_talk.cells_of(scene, 4))
    shared = picture_talk.USER + maker._picture
    turns = [
        (question.text + picture_talk.ASSISTANT, question)
        for question in drawings.ask(scene, np.random.default_rng(0))
    ]
    together = maker._row(seen, shared, turns)
    logits = answer_logits(spec, params, picture_talk.stack([together]))[0]
    place = 0
    for turn in turns[:4]:
        alone = maker._row(seen, shared, [turn])
        count = int((alone.answers >= 0).sum())
        expected = answer_logits(spec, params, picture_talk.stack([alone]))[0, :count]
        np.testing.assert_allclose(logits[place : place + count], expected, atol=1e-4)
        place += count
