"""Reads from a model's files which image processor it has, and how that is set."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple


class ProcessorSettings(NamedTuple):
    """Names a model's image processor, with its arguments.

    Attributes:
        kind: The name of the image processor in transformers, such as "Qwen2VLImageProcessor".
        arguments: Its arguments, as JSON.
        of_prompts: The model's other settings, which say how many placeholders a picture has.
    """

    kind: str
    arguments: Mapping[str, Any]
    of_prompts: Mapping[str, Any]

    def digest_text(self) -> str:
        """Returns a text that is the same for the same settings, and for no others."""
        return json.dumps(self, sort_keys=True, default=str)


def read_settings(
    processor: Mapping[str, Any] | None, image_processor: Mapping[str, Any] | None
) -> ProcessorSettings | None:
    """Returns the settings in a model's files, or None if these name no image processor.

    Args:
        processor: The content of processor_config.json, which may contain the other file.
        image_processor: The content of preprocessor_config.json.
    """
    of_prompts = dict(processor or {})
    nested = of_prompts.pop("image_processor", None)
    arguments = nested if isinstance(nested, Mapping) else image_processor or {}
    # Older files have another name, and names of the classes that need torch.
    name = arguments.get("image_processor_type") or arguments.get("feature_extractor_type")
    if not isinstance(name, str):
        return None
    kind = re.sub(r"(FeatureExtractor|ImageProcessor)(Fast|Pil)?$", "ImageProcessor", name)
    return ProcessorSettings(kind, arguments, of_prompts)
