"""Draws coloured circles, and asks what is in a drawing: the data of the demo that sees.

A scene has one to three shapes on a plain background. Coordinates and radii are fractions of the
picture, x to the right and y down. Each question has one right answer; what would be unclear (two
shapes on a diagonal, a size between small and large) is never drawn.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from PIL import Image, ImageDraw

T = TypeVar("T")

COLOURS = {
    "red": (215, 35, 40),
    "orange": (245, 140, 25),
    "yellow": (250, 220, 40),
    "green": (45, 165, 65),
    "blue": (40, 85, 215),
    "purple": (145, 55, 175),
}
# Those that the shipped model knows. `draw` has "square", "triangle" and "star" too, but in the
# time of the shipped run the vision transformer learnt colours, sizes and places, and not these.
KINDS: tuple[str, ...] = ("circle",)
BACKGROUNDS = {"white": 245, "grey": 150, "black": 15}
NUMBERS = ("no shapes", "one", "two", "three")
SMALL, LARGE = (0.13, 0.15), (0.2, 0.24)
CELLS = ((0.25, 0.35), (0.44, 0.56), (0.65, 0.75))
# How much longer the longer of two distances must be, for "left of" or "above" to be clear.
CLEAR = 1.5
OPPOSITE = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}


class Shape(NamedTuple):
    """Holds one shape: what it is, the centre, the radius, and how far it is turned in radians."""

    colour: str
    kind: str
    is_large: bool
    x: float
    y: float
    radius: float
    turn: float

    @property
    def name(self) -> str:
        """Returns the colour and the kind, which name a shape in its scene."""
        return f"{self.colour} {self.kind}"


@dataclasses.dataclass(frozen=True)
class Scene:
    """Holds the shapes of a drawing and the name of its background."""

    shapes: tuple[Shape, ...]
    background: str


class Question(NamedTuple):
    """Holds a question, its right answer, and the kind by which accuracies are counted."""

    kind: str
    text: str
    answer: str


# --- scenes


def make_scene(rng: np.random.Generator) -> Scene:
    """Returns a random scene: one shape in a quarter of them, two in a half, three in the rest."""
    count = int(rng.choice((1, 2, 2, 3)))
    background = str(rng.choice(list(BACKGROUNDS)))
    while True:
        shapes = tuple(_random_shape(rng, count) for _ in range(count))
        if _is_clear(shapes):
            return Scene(shapes, background)


def _random_shape(rng: np.random.Generator, count: int) -> Shape:
    is_large = bool(rng.random() < (0.5 if count < 3 else 0.3))
    radius = float(rng.uniform(*(LARGE if is_large else SMALL)))
    kind = str(rng.choice(KINDS))
    if count == 1:
        x, y = (float(rng.uniform(*CELLS[rng.integers(3)])) for _ in range(2))
    else:
        x, y = (float(rng.uniform(radius + 0.02, 0.98 - radius)) for _ in range(2))
    turn = float(rng.uniform(-0.1, 0.1))
    return Shape(str(rng.choice(list(COLOURS))), kind, is_large, x, y, radius, turn)


def _is_clear(shapes: Sequence[Shape]) -> bool:
    for first, second in itertools.combinations(shapes, 2):
        distance = math.hypot(first.x - second.x, first.y - second.y)
        if first.name == second.name or distance < 1.1 * (first.radius + second.radius):
            return False
        if len(shapes) == 2 and relation(first, second) is None:
            return False
        if len(shapes) == 3 and abs(first.x - second.x) < 0.07:
            return False
    return True


def relation(first: Shape, second: Shape) -> str | None:
    """Returns where the first shape is from the second; None where that is not clear."""
    dx, dy = first.x - second.x, first.y - second.y
    if abs(dx) > CLEAR * abs(dy):
        return "left of" if dx < 0 else "right of"
    if abs(dy) > CLEAR * abs(dx):
        return "above" if dy < 0 else "below"
    return None


# --- pictures


def draw(scene: Scene, size: tuple[int, int], rng: np.random.Generator) -> Image.Image:
    """Returns an antialiased picture of a scene, in colours that vary a little.

    Args:
        scene: What is drawn.
        size: The width and height in pixels.
        rng: Where the tints come from.
    """
    width, height = 2 * size[0], 2 * size[1]
    grey = BACKGROUNDS[scene.background]
    picture = Image.new("RGB", (width, height), _tint((grey, grey, grey), 10, rng))
    pen = ImageDraw.Draw(picture)
    for shape in scene.shapes:
        centre = np.array([shape.x * width, shape.y * height])
        radius = shape.radius * min(width, height)
        colour = _tint(COLOURS[shape.colour], 14, rng)
        if shape.kind == "circle":
            pen.ellipse((*(centre - radius), *(centre + radius)), fill=colour)
        else:
            points = centre + radius * _outline(shape.kind, shape.turn)
            pen.polygon([(float(x), float(y)) for x, y in points], fill=colour)
    return picture.reduce(2)


def _tint(colour: Sequence[int], by: int, rng: np.random.Generator) -> tuple[int, int, int]:
    red, green, blue = np.clip(np.array(colour) + rng.integers(-by, by + 1, 3), 0, 255).tolist()
    return red, green, blue


def _outline(kind: str, turn: float) -> np.ndarray:
    corners = {"square": 4, "triangle": 3, "star": 10}[kind]
    begin = math.pi / 4 if kind == "square" else -math.pi / 2
    angles = begin + turn + 2 * math.pi * np.arange(corners) / corners
    lengths = np.where(np.arange(corners) % 2, 0.42, 1.0) if kind == "star" else np.ones(corners)
    return np.stack([lengths * np.cos(angles), lengths * np.sin(angles)], -1)


# --- questions


def describe(scene: Scene) -> str:
    """Returns what is in a picture, as in "a red circle left of a blue square"."""
    shapes = list(scene.shapes)
    if len(shapes) == 2:
        first, second = shapes
        place = relation(first, second)
        if place in ("right of", "below"):
            first, second, place = second, first, OPPOSITE[place]
        return f"{_a(first.name)} {place} {_a(second.name)}"
    names = [_a(shape.name) for shape in sorted(shapes, key=lambda shape: shape.x)]
    return ", ".join(names[:-1]) + " and " + names[-1] if len(names) > 1 else names[0]


def ask(scene: Scene, rng: np.random.Generator) -> list[Question]:
    """Returns questions about a scene in a random order, at most two of a kind."""
    questions = [
        Question("describe", _choose(rng, DESCRIBE), describe(scene)),
        Question("count", _choose(rng, COUNT), NUMBERS[len(scene.shapes)]),
        Question("background", _spell(rng, "What colour is the background?"), scene.background),
        *_about_shapes(scene, rng),
        *(_is_there(scene, rng) for _ in range(2)),
        *_about_places(scene, rng),
    ]
    return [questions[index] for index in rng.permutation(len(questions))]


DESCRIBE = (
    *("What is in the picture?", "What is in the image?", "What is this?", "What do you see?"),
    *("Describe the picture.", "Describe this image.", "What can you see in this picture?"),
)
COUNT = (
    *("How many shapes?", "How many shapes are there?", "How many shapes are in the picture?"),
    "How many shapes do you see?",
)


def _about_shapes(scene: Scene, rng: np.random.Generator) -> Iterator[Question]:
    shape = _choose(rng, scene.shapes)
    size = "large" if shape.is_large else "small"
    which = _which(scene, shape, rng)
    yield Question(
        "size", _choose(rng, (f"Is {which} small or large?", f"How big is {which}?")), size
    )
    if sum(other.kind == shape.kind for other in scene.shapes) == 1:
        text = _choose(rng, ("What colour is the {}?", "What is the colour of the {}?"))
        yield Question("colour", _spell(rng, text.format(shape.kind)), shape.colour)
    if len(KINDS) > 1 and sum(other.colour == shape.colour for other in scene.shapes) == 1:
        text = _choose(rng, ("What shape is {}?", "Which shape is {}?", "What is {}?"))
        yield Question("shape", text.format(shape.colour), f"a {shape.kind}")


def _is_there(scene: Scene, rng: np.random.Generator) -> Question:
    """Asks for a shape that is there, or in half of the cases for one that is not."""
    names = {shape.name for shape in scene.shapes}
    name = _choose(rng, sorted(names))
    if rng.random() < 0.5:
        near = [f"{shape.colour} {kind}" for shape in scene.shapes for kind in KINDS]
        near += [f"{colour} {shape.kind}" for shape in scene.shapes for colour in COLOURS]
        name = _choose(rng, [other for other in near if other not in names])
    return Question("present", f"Is there {_a(name)}?", "yes" if name in names else "no")


def _about_places(scene: Scene, rng: np.random.Generator) -> Iterator[Question]:
    if len(scene.shapes) == 1:
        (shape,) = scene.shapes
        text = f"Where is {_which(scene, shape, rng)}?"
        yield Question("where", text, _cell(shape))
        return
    first, second = (scene.shapes[index] for index in rng.permutation(len(scene.shapes))[:2])
    place = relation(first, second)
    if place is None:
        return
    if len(scene.shapes) == 2:
        text = f"Where is {_which(scene, first, rng)}?"
        yield Question("where", text, f"{place} the {second.name}")
    claim = place if rng.random() < 0.5 else OPPOSITE[place]
    if claim != place and rng.random() < 0.3:
        claim = _choose(rng, [other for other in OPPOSITE if other not in (place, claim)])
    text = f"Is {_which(scene, first, rng)} {claim} {_which(scene, second, rng)}?"
    yield Question("relation", text, "yes" if claim == place else "no")


def _cell(shape: Shape) -> str:
    column = ("left", "", "right")[_third(shape.x)]
    row = ("top", "", "bottom")[_third(shape.y)]
    words = f"{row} {column}".strip()
    return f"at the {words}" if words else "in the middle"


def _third(value: float) -> int:
    return next(index for index, (_, end) in enumerate(CELLS) if value <= end)


def _which(scene: Scene, shape: Shape, rng: np.random.Generator) -> str:
    is_alone = sum(other.kind == shape.kind for other in scene.shapes) == 1
    return f"the {shape.kind if is_alone and rng.random() < 0.5 else shape.name}"


def _a(name: str) -> str:
    return f"{'an' if name.startswith('o') else 'a'} {name}"


def _spell(rng: np.random.Generator, text: str) -> str:
    return text.replace("colour", "color") if rng.random() < 0.3 else text


def _choose(rng: np.random.Generator, options: Sequence[T]) -> T:
    return options[int(rng.integers(len(options)))]
