"""Reads the files next to a tokenizer that say how pictures become part of a prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from jaxpage.checkpoints.files import read_object_if_there
from jaxpage.checkpoints.finding.resolve import PICTURE_FILES


class ProcessorFiles(NamedTuple):
    """Holds the contents of the files; None for one that is not there.

    Attributes:
        image_processor: The content of preprocessor_config.json.
        processor: The content of processor_config.json.
    """

    image_processor: dict[str, Any] | None
    processor: dict[str, Any] | None


def read_processor_files(directory: Path) -> ProcessorFiles:
    """Returns the contents of the files in a model's directory.

    Raises:
        CheckpointError: A file is no JSON object.
    """
    return ProcessorFiles(*(read_object_if_there(directory, name) for name in PICTURE_FILES))
