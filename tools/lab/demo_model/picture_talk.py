"""Makes conversations about drawings: the tokenizer, the chat template and batches of rows."""

import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tools.lab.demo_model.drawings import COLOURS, KINDS, Question, Scene, ask, draw, make_scene
from tools.lab.demo_model.seeing_model import Rows, SeeingSpec, Seen

VOCABULARY = 512
PAD, BEGIN, END = "<|pad|>", "<|im_start|>", "<end_of_utterance>"
AROUND, IMAGE, WHOLE = "<fake_token_around_image>", "<image>", "<global-img>"
SPECIAL = (PAD, BEGIN, END, AROUND, IMAGE, WHOLE)
USER, ASSISTANT = f"{BEGIN}user\n", f"{END}\n{BEGIN}assistant\n"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% elif part['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<end_of_utterance>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# The tokens of a row, and of the answers in it, at most.
ROW_LENGTH, ANSWERS_LENGTH = 144, 48
# Shares of the rows: a bare prompt without the chat template, and a conversation of several turns,
# of which some have the first question before the picture.
RAW_SHARE, CONVERSATION_SHARE, QUESTION_FIRST_SHARE = 0.12, 0.38, 0.5


def train_tokenizer(seed: int) -> Tokenizer:
    """Returns a byte-level BPE tokenizer in which each word of the questions is a token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[AddedToken(text, special=True) for text in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    rng = np.random.default_rng((seed, 1))
    questions = itertools.chain.from_iterable(ask(make_scene(rng), rng) for _ in range(3000))
    texts = (f"user\n{question.text}\nassistant\n{question.answer}" for question in questions)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, spec: SeeingSpec, directory: Path) -> None:
    """Writes the files from which transformers makes the tokenizer and the processor."""
    tokenizer.save(str(directory / "tokenizer.json"))
    files = {
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BEGIN,
            "eos_token": END,
            "pad_token": PAD,
            "additional_special_tokens": [AROUND, IMAGE, WHOLE],
            "model_max_length": spec.text.max_positions,
            "clean_up_tokenization_spaces": False,
        },
        "processor_config.json": {
            "processor_class": "Idefics3Processor",
            "image_seq_len": spec.image_tokens,
        },
        "preprocessor_config.json": {
            "image_processor_type": "Idefics3ImageProcessor",
            "processor_class": "Idefics3Processor",
            "do_convert_rgb": True,
            "do_resize": True,
            "size": {"longest_edge": spec.image_size},
            "max_image_size": {"longest_edge": spec.image_size},
            "resample": int(Image.Resampling.LANCZOS),
            "do_image_splitting": False,
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "do_pad": True,
        },
    }
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content, indent=2) + "\n", "utf-8")
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE, "utf-8")


def pixels_of(picture: Image.Image, spec: SeeingSpec) -> np.ndarray:
    """Returns the pixels [3, size, size] as the image processor makes them, -1 to 1.

    The longer side gets its size first, in the picture's own proportions.
    """
    size, (width, height) = spec.image_size, picture.size
    sides = (size, int(size * height / width))
    if height > width:
        sides = (int(size * width / height), size)
    square = picture.resize(sides, Image.Resampling.LANCZOS)
    square = square.resize((size, size), Image.Resampling.LANCZOS)
    return (np.asarray(square, np.float32) / 127.5 - 1).transpose(2, 0, 1)


def cells_of(scene: Scene, side: int) -> np.ndarray:
    """Returns the colour, kind and size [side * side, 3] of the shape centred in each cell.

    The numbers begin at 1; a cell without a shape has zeros.
    """
    cells = np.zeros((side, side, 3), np.int32)
    for shape in scene.shapes:
        colour, kind = list(COLOURS).index(shape.colour), KINDS.index(shape.kind)
        cells[int(shape.y * side), int(shape.x * side)] = colour + 1, kind + 1, 1 + shape.is_large
    return cells.reshape(-1, 3)


class RowMaker:
    """Lays conversations out in rows, as `Rows` describes them."""

    def __init__(self, tokenizer: Tokenizer, spec: SeeingSpec) -> None:
        self.tokenizer = tokenizer
        self.spec = spec
        self.image_id = tokenizer.token_to_id(IMAGE)
        self._picture = f"{AROUND}{WHOLE}{IMAGE * spec.image_tokens}{AROUND}"

    def batch(self, rng: np.random.Generator, size: int) -> Rows:
        """Returns rows about new drawings."""
        return stack([self._random_row(make_scene(rng), rng) for _ in range(size)])

    def pictures(self, rng: np.random.Generator, size: int) -> Seen:
        """Returns new drawings without conversations about them."""
        seen = [self._draw(make_scene(rng), rng) for _ in range(size)]
        return Seen(*(np.stack(arrays) for arrays in zip(*seen, strict=True)))

    def one_question(self, scene: Scene, question: Question, rng: np.random.Generator) -> Rows:
        """Returns a row with one question in the chat template, to measure its answer."""
        seen = self._draw(scene, rng)
        return self._row(seen, USER + self._picture, [(question.text + ASSISTANT, question)])

    def unfinished(self, picture: Image.Image, question: str, answer_ids: Sequence[int]) -> Rows:
        """Returns a row whose only place is the end of an answer as far as it goes."""
        tokens = self.tokenizer.encode(USER + self._picture + question + ASSISTANT).ids
        tokens += answer_ids
        nothing = np.zeros((self.spec.image_tokens, 3), np.int32)
        row = self._row(Seen(pixels_of(picture, self.spec), nothing), tokens, [])
        places = np.zeros_like(row.places)
        places[0] = len(tokens) - 1
        return row._replace(places=places)

    def _draw(self, scene: Scene, rng: np.random.Generator) -> Seen:
        picture = draw(scene, random_size(rng), rng)
        cells = cells_of(scene, math.isqrt(self.spec.image_tokens))
        return Seen(pixels_of(picture, self.spec), cells)

    def _random_row(self, scene: Scene, rng: np.random.Generator) -> Rows:
        seen, questions = self._draw(scene, rng), ask(scene, rng)
        form, order = rng.random(2)
        if form < RAW_SHARE:
            turns = [(question.text + " ", question) for question in questions]
            return self._row(seen, self._picture, turns)
        if form > RAW_SHARE + CONVERSATION_SHARE:
            turns = [(question.text + ASSISTANT, question) for question in questions]
            return self._row(seen, USER + self._picture, turns)
        first, *others = questions
        turns = [("\n" + USER + question.text + ASSISTANT, question) for question in others]
        question_first = order < QUESTION_FIRST_SHARE
        parts = (first.text, self._picture) if question_first else (self._picture, first.text)
        shared = USER + "".join(parts) + ASSISTANT
        return self._row(seen, shared, [("", first), *turns], is_conversation=True)

    def _row(
        self,
        seen: Seen,
        shared: str | list[int],
        turns: Sequence[tuple[str, Question]],
        is_conversation: bool = False,
    ) -> Rows:
        """Returns a row of the shared text and as many turns (prompt, question) as it holds."""
        tokens = self.tokenizer.encode(shared).ids if isinstance(shared, str) else shared
        positions, segments = list(range(len(tokens))), [0] * len(tokens)
        places: list[int] = []
        begin = len(tokens)
        for number, (prompt, question) in enumerate(turns, 1):
            prompt_ids, answer_ids = self._turn(prompt, question)
            length = len(prompt_ids) + len(answer_ids)
            learnt = len(places) + len(answer_ids)
            if len(tokens) + length > ROW_LENGTH or learnt > ANSWERS_LENGTH:
                break
            begin = len(tokens) if is_conversation else begin
            tokens += prompt_ids + answer_ids
            positions += range(begin, begin + length)
            segments += [0 if is_conversation else number] * length
            places += range(len(tokens) - len(answer_ids) - 1, len(tokens) - 1)
        answers = [tokens[place + 1] for place in places]
        tokens_T = _pad(tokens, ROW_LENGTH)
        is_image = tokens_T == self.image_id
        return Rows(
            seen.pixels,
            tokens_T,
            _pad(positions, ROW_LENGTH),
            _pad(segments, ROW_LENGTH, -1),
            np.where(is_image, np.cumsum(is_image) - 1, -1).astype(np.int32),
            _pad(places, ANSWERS_LENGTH),
            _pad(answers, ANSWERS_LENGTH, -1),
            seen.cells,
        )

    def _turn(self, prompt: str, question: Question) -> tuple[list[int], list[int]]:
        """Returns the tokens of a prompt and of its answer, as one text is cut into tokens."""
        answer = (" " if prompt.endswith(" ") else "") + question.answer
        prompt_ids = self.tokenizer.encode(prompt.rstrip(" ")).ids if prompt else []
        return prompt_ids, self.tokenizer.encode(answer + END).ids


def random_size(rng: np.random.Generator) -> tuple[int, int]:
    """Returns the width and height of a drawing in pixels, not quite square."""
    width, height = rng.integers(96, 145, 2).tolist()
    return width, height


def _pad(values: Sequence[int], length: int, value: int = 0) -> np.ndarray:
    return np.array([*values, *[value] * (length - len(values))], np.int32)


def stack(rows: Sequence[Rows]) -> Rows:
    """Returns a batch of rows that have no axis of a batch yet."""
    return Rows(*(np.stack(arrays) for arrays in zip(*rows, strict=True)))
