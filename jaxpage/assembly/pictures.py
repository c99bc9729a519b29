"""Reads what a model's files say of pictures."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxpage import images
from jaxpage.checkpoints.tokenizers import read_processor_files
from jaxpage.errors import CheckpointError

logger = logging.getLogger(__name__)


def open_pictures(
    directory: Path, config: Mapping[str, Any], tokenizer: Any
) -> images.PictureProcessor | None:
    """Returns what processes the pictures of a model's prompts; None if its files do not say.

    Args:
        directory: The model's directory.
        config: The content of its config.json.
        tokenizer: Its tokenizer.

    Raises:
        CheckpointError: A file is no JSON object, or the tokenizer has no token for pictures.
    """
    files = read_processor_files(directory)
    settings = images.read_settings(files.processor, files.image_processor)
    rule = None if settings is None else images.rule_of(settings, tokenizer, config)
    if settings is None or rule is None:
        kind = "no image processor" if settings is None else f"the image processor {settings.kind}"
        logger.warning("%s: its files name %s, so pictures are refused", directory, kind)
        return None
    try:
        return images.PictureProcessor(settings, rule, tokenizer)
    except ValueError as error:
        raise CheckpointError(f"{directory}: {error}") from None
