"""Reads what a model's files say of pictures."""

from __future__ import annotations

import logging
from typing import Any

from jaxpage.checkpoints import ModelFiles, read_object_if_there
from jaxpage.errors import CheckpointError
from jaxpage.images import PictureProcessor, read_settings, rule_of

logger = logging.getLogger(__name__)


def open_pictures(files: ModelFiles, tokenizer: Any | None) -> PictureProcessor | None:
    """Returns what processes the pictures of a model's prompts; None if it takes none.

    Args:
        files: The model's files.
        tokenizer: Its tokenizer; None if it has none.

    Raises:
        CheckpointError: A file is no JSON object, or the tokenizer has no token for pictures.
    """
    if files.vision is None or tokenizer is None:
        return None
    settings = read_settings(
        read_object_if_there(files.directory, "processor_config.json"),
        read_object_if_there(files.directory, "preprocessor_config.json"),
    )
    rule = None if settings is None else rule_of(settings, tokenizer, files.config)
    if settings is None or rule is None:
        kind = "no image processor" if settings is None else f"the image processor {settings.kind}"
        logger.warning("%s: its files name %s, so pictures are refused", files.directory, kind)
        return None
    try:
        return PictureProcessor(settings, rule, tokenizer)
    except ValueError as error:
        raise CheckpointError(f"{files.directory}: {error}") from None
