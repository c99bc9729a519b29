"""Reads the pictures of requests, in the process that renders templates.

A picture comes as base64, in a part of a message:

    part ──read──▶ base64 ──process (limits of time and memory)──▶ arrays ──▶ ReadyPicture
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy.typing as npt
from safetensors.numpy import load

from jaxpage.images import MAX_PIXELS, LastUsed, PictureProcessor, ReadyPicture, base64_in
from jaxpage.serving.wire.context import ModelContext
from jaxpage.serving.wire.errors import ApiError
from jaxpage.serving.wire.rendering import RENDERERS
from jaxpage.settings.argument_checks import count

PICTURE_SECONDS = 20.0  # processor time; the largest picture takes two to four
PICTURE_BYTES = 1536 << 20
# A client sends the whole conversation with each question, so its pictures come again.
KNOWN_BYTES = 256 << 20


class SentPicture(NamedTuple):
    """Holds a picture of a request.

    Attributes:
        path: The path of the field that it is in.
        base64: Its file.
    """

    path: str
    base64: str


class RequestedPictures(NamedTuple):
    """Holds the pictures of a prompt, and what makes them ready.

    Attributes:
        processor: The processor of the model.
        pictures: The pictures, in the order of their markers in the prompt.
        max_tokens: The most tokens that they may fill together.
    """

    processor: PictureProcessor
    pictures: tuple[SentPicture, ...]
    max_tokens: int

    def process(self) -> list[ReadyPicture]:
        """Returns the pictures as the model takes them.

        This takes a while, so it belongs on a worker thread.

        Raises:
            ApiError: A picture is refused, or they fill too many tokens.
        """
        ready = []
        num_tokens = 0
        for picture in self.pictures:
            try:
                ready.append(_process(self.processor, picture.base64))
            except ValueError as error:
                problem = str(error)
                if problem.startswith("it "):  # what the process says of its limits
                    problem = f"the picture cannot be processed: {problem}"
                raise ApiError(400, f"{picture.path}: {problem}", param=picture.path) from None
            num_tokens += ready[-1].picture.num_rows
            if num_tokens > self.max_tokens:
                raise ApiError(
                    400,
                    f"{picture.path}: the first {count(len(ready), 'picture')} of the "
                    f"{len(self.pictures)} fill {num_tokens} tokens, and max_model_len is "
                    f"{self.max_tokens}",
                    param=picture.path,
                    code="context_length_exceeded",
                )
        return ready

    def expand(
        self,
        prompt: str | Sequence[int],
        ready: Sequence[ReadyPicture],
        *,
        add_special_tokens: bool,
    ) -> tuple[list[int], Any]:
        """Returns the token ids of a prompt, and where the pictures are; see `PictureProcessor`.

        Raises:
            ApiError: The prompt has not one place for each picture.
        """
        try:
            return self.processor.expand(prompt, ready, add_special_tokens=add_special_tokens)
        except ValueError as error:
            path = self.pictures[0].path
            raise ApiError(400, f"{path}: {error}", param=path) from None


def read_picture(url: str, path: str, context: ModelContext, num_before: int) -> SentPicture:
    """Returns the picture in a part of a message.

    Args:
        url: The data URL of the picture.
        path: The path of the part.
        context: The served model and the server's settings.
        num_before: The number of pictures before it in the request.

    Raises:
        ApiError: The model takes no pictures, there are too many, or it is another URL.
    """
    if context.pictures is None:
        raise ApiError(400, f"{path} is a picture, and this model takes text alone", param=path)
    maximum = context.limits.max_pictures
    if num_before >= maximum:
        raise ApiError(400, f"{path}: at most {count(maximum, 'picture')} are allowed", param=path)
    path += ".image_url.url"
    try:
        return SentPicture(path, base64_in(url))
    except ValueError as error:
        raise ApiError(400, f"{path} {error}", param=path) from None


def request_pictures(context: ModelContext, pictures: Sequence[SentPicture]) -> RequestedPictures:
    """Returns the pictures of a request, of which there is at least one, for a model with eyes."""
    assert context.pictures is not None, "`read_picture` refuses them otherwise"
    return RequestedPictures(context.pictures, tuple(pictures), context.max_model_len)


# The pictures that were processed last, which are not processed again.
_KNOWN: LastUsed[ReadyPicture] = LastUsed(KNOWN_BYTES)


def _process(processor: PictureProcessor, base64: str) -> ReadyPicture:
    """Returns a picture as a model takes it.

    Raises:
        ValueError: It is refused.
    """
    about = processor.settings.digest_text().encode()
    key = hashlib.sha256(hashlib.sha256(about).digest() + base64.encode()).digest()
    if (known := _KNOWN.get(key)) is not None:
        return known
    ready = processor.finish(_arrays_of(processor, base64))
    _KNOWN.add(key, ready, sum(array.nbytes for array in ready.picture.arrays.values()))
    return ready


def _arrays_of(processor: PictureProcessor, base64: str) -> dict[str, npt.NDArray[Any]]:
    with tempfile.NamedTemporaryFile(prefix="jaxpage-picture-") as file:
        request = {
            "picture": base64,
            "max_pixels": MAX_PIXELS,
            "settings": processor.settings,
            "options": processor.rule.options,
            "path": file.name,
        }
        RENDERERS.render(request, PICTURE_SECONDS, PICTURE_BYTES)
        arrays: dict[str, npt.NDArray[Any]] = load(file.read())
        return arrays
