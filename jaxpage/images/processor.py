"""Processes the pictures of one model, and writes their placeholders into prompts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from jaxpage.images.placeholders import PlaceholderRule
from jaxpage.images.processor_settings import ProcessorSettings
from jaxpage.images.sources import MAX_PIXELS
from jaxpage.settings.argument_checks import count
from jaxpage.step.embedded import EmbeddedPrompt, EmbeddedSpan, Picture


class ReadyPicture(NamedTuple):
    """Holds a picture that is ready for a model.

    Attributes:
        key: The 32 bytes by which it is known; see `EmbeddedSpan.key`.
        picture: What the encoder takes.
        text: What takes the place of its marker in a prompt.
    """

    key: bytes
    picture: Picture
    text: str


class PictureProcessor:
    """Processes pictures for one model, and expands the prompts that they are in.

    Any thread may call it.
    """

    def __init__(
        self,
        settings: ProcessorSettings,
        rule: PlaceholderRule,
        tokenizer: Any,
    ) -> None:
        """Takes what the files of the model say.

        Args:
            settings: Which image processor the model has.
            rule: What stands for a picture in its prompts.
            tokenizer: Its tokenizer.

        Raises:
            ValueError: The tokenizer has no token for the rows of a picture.
        """
        self.settings = settings
        self.rule = rule
        self._tokenizer = tokenizer
        self._settings_text = settings.digest_text().encode()
        self.token_id = self._id_of(rule.token)
        self._marker_id = self._id_of(rule.marker)

    def _id_of(self, token: str) -> int:
        # `convert_tokens_to_ids` would give the id of the unknown token in place of None.
        token_id = self._tokenizer.get_vocab().get(token)
        if token_id is None:
            raise ValueError(f"the tokenizer has no token {token!r} for pictures")
        return int(token_id)

    def process(self, pictures: Iterable[Any], max_pixels: int = MAX_PIXELS) -> list[ReadyPicture]:
        """Returns pictures as the model takes them; see `load_picture`.

        Those that are ready already stay as they are.

        Args:
            pictures: What `load_picture` takes, or a `ReadyPicture`.
            max_pixels: The most pixels of one.

        Raises:
            TypeError: Something is no picture.
            ValueError: A picture is refused; the message names its place among them.
        """
        # These import PIL, which an engine whose requests have no pictures does not need.
        from jaxpage.images.loading import load_picture
        from jaxpage.images.processing import process_picture

        processed = []
        for index, source in enumerate(pictures):
            if isinstance(source, ReadyPicture):
                processed.append(source)
                continue
            try:
                picture = load_picture(source, max_pixels)
                arrays = process_picture(self.settings, picture, self.rule.options)
            except (TypeError, ValueError) as error:
                error.add_note(f"This is picture {index} of the prompt.")
                raise
            processed.append(self.finish(arrays))
        return processed

    def finish(self, arrays: Mapping[str, npt.NDArray[Any]]) -> ReadyPicture:
        """Returns a picture of which the image processor has made the arrays."""
        text = self.rule.text_of(arrays)
        inputs = {name: array for name, array in arrays.items() if name not in self.rule.notes}
        picture = Picture(inputs, text.count(self.rule.token))
        return ReadyPicture(picture_key(inputs, self._settings_text), picture, text)

    def check_text(self, text: str, num_pictures: int) -> None:
        """Raises ValueError if a prompt has not one marker for each picture."""
        self._check_count(text.count(self.rule.marker), num_pictures)

    def _check_count(self, num_markers: int, num_pictures: int) -> None:
        if num_markers != num_pictures:
            raise ValueError(
                f"The prompt has {count(num_markers, 'place')} ({self.rule.marker!r}) for "
                f"{count(num_pictures, 'picture')}; each picture takes one"
            )

    def expand(
        self,
        prompt: str | Sequence[int],
        pictures: Sequence[ReadyPicture],
        *,
        add_special_tokens: bool = True,
    ) -> tuple[list[int], EmbeddedPrompt]:
        """Returns the token ids of a prompt with its pictures, and where these are.

        The engine adds the positions on several axes, where a model has them.

        Args:
            prompt: The text, or the token ids, with one marker for each picture. Token ids may
                also have all placeholders already.
            pictures: The pictures, in the order of their markers.
            add_special_tokens: True if the tokenizer adds its special tokens to a text.

        Raises:
            ValueError: There are more markers than pictures, or fewer, or the text has other
                placeholders.
        """
        if isinstance(prompt, str):
            self.check_text(prompt, len(pictures))
            parts = prompt.split(self.rule.marker)
            texts = [picture.text for picture in pictures] + [""]
            text = "".join(part + after for part, after in zip(parts, texts, strict=True))
            token_ids = self._encode(text, add_special_tokens=add_special_tokens)
        else:
            token_ids = self._expand_ids(prompt, pictures)
        spans = self._spans(token_ids, pictures)
        sources = {picture.key: picture.picture for picture in pictures}
        return token_ids, EmbeddedPrompt(spans, sources)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])

    def _expand_ids(self, token_ids: Sequence[int], pictures: Sequence[ReadyPicture]) -> list[int]:
        """Returns token ids with the placeholders of each picture in place of its marker."""
        num_rows = sum(picture.picture.num_rows for picture in pictures)
        if pictures and token_ids.count(self.token_id) == num_rows:
            return list(token_ids)
        self._check_count(token_ids.count(self._marker_id), len(pictures))
        texts = iter(picture.text for picture in pictures)
        expanded: list[int] = []
        for token_id in token_ids:
            if token_id == self._marker_id:
                expanded += self._encode(next(texts), add_special_tokens=False)
            else:
                expanded.append(token_id)
        return expanded

    def _spans(
        self, token_ids: Sequence[int], pictures: Sequence[ReadyPicture]
    ) -> tuple[EmbeddedSpan, ...]:
        """Returns the spans of the pictures: one for each run of placeholders of a picture."""
        places = np.flatnonzero(np.asarray(token_ids) == self.token_id)
        num_rows = sum(picture.picture.num_rows for picture in pictures)
        if len(places) != num_rows:
            raise ValueError(
                f"The prompt has {len(places)} tokens {self.rule.token!r}, but its "
                f"{count(len(pictures), 'picture')} need {num_rows}"
            )
        spans = []
        begin = 0
        for picture in pictures:
            rows = places[begin : begin + picture.picture.num_rows]
            begin += len(rows)
            # Models such as Pixtral have another token at the end of each row of patches.
            cuts = np.flatnonzero(np.diff(rows) != 1) + 1
            offset = 0
            for run in np.split(rows, cuts):
                spans.append(
                    EmbeddedSpan(
                        int(run[0]), len(run), picture.key, offset, is_whole=self.rule.is_whole
                    )
                )
                offset += len(run)
        return tuple(spans)


def picture_key(arrays: Mapping[str, npt.NDArray[Any]], settings: bytes) -> bytes:
    """Returns the SHA-256 digest of all that the rows of a picture depend on but the weights.

    Each array has its name, its shape and its type before it, so that no two pictures have the
    same bytes.

    Args:
        arrays: What the encoder takes.
        settings: The settings of the image processor.
    """
    digest = hashlib.sha256()
    _add(digest, settings)
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        _add(digest, json.dumps([name, array.dtype.str, array.shape]).encode())
        digest.update(array.reshape(-1).view(np.uint8))
    return digest.digest()


def _add(digest: Any, part: bytes) -> None:
    digest.update(len(part).to_bytes(8, "little"))
    digest.update(part)
