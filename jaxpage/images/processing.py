"""Runs the image processor of a model: transformers' own, on Pillow and numpy alone."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import transformers
from PIL import Image

from jaxpage.errors import UnsupportedError
from jaxpage.images.processor_settings import ProcessorSettings


def process_picture(
    settings: ProcessorSettings, picture: Image.Image, options: Mapping[str, Any]
) -> dict[str, npt.NDArray[Any]]:
    """Returns what a model's image processor makes of one picture.

    A picture is processed by itself, so that its arrays depend on no other one.

    Args:
        settings: The settings of the model.
        picture: The picture, in RGB.
        options: The arguments of the call, which the family's rule of placeholders needs.

    Raises:
        ValueError: The processor refuses the picture, for instance because it is too narrow.
        UnsupportedError: This version of transformers does not have the processor.
    """
    # A text can be the key of a cache, and a dict cannot.
    processor = _processor(settings.kind, json.dumps(settings.arguments, sort_keys=True))
    try:
        processed = processor(images=[picture], return_tensors="np", **options)
    except MemoryError:
        raise
    except Exception as error:  # a processor is a program, and may fail in any way
        size = f"{picture.width} x {picture.height} pixels"
        raise ValueError(
            f"the picture ({size}) cannot be processed for this model: {error!s:.200}"
        ) from error
    return {name: np.asarray(value) for name, value in processed.items()}


@functools.lru_cache(maxsize=8)
def _processor(kind: str, arguments: str) -> Any:
    """Returns the image processor, in its form for Pillow, which needs no torch."""
    name = f"{kind}Pil"
    if (made := getattr(transformers, name, None)) is None:
        raise UnsupportedError(
            f"transformers {transformers.__version__} has no {name}: pip install -U transformers"
        )
    return made.from_dict(json.loads(arguments))
