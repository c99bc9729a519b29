"""Knows the contents of messages that chat templates take, with and without pictures."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

# A template that takes texts and lists of parts asks which of the two a content is.
_TESTS_OF_TEXT = re.compile(r"\bis\s+(not\s+)?(string|mapping|iterable|sequence)\b")
_PLACES = ("image", "image_pil", "url", "path", "base64")  # of a picture in a part
PICTURE_TYPES = ("image", "image_url", "image_pil")


def takes_parts_alone(template: str) -> bool:
    """Returns whether a chat template shows contents that are lists of parts, and no texts.

    Older templates of models with pictures go over the parts of every message, and over the letters
    of a text.
    """
    return "image" in template and _TESTS_OF_TEXT.search(template) is None


def parts_of_content(content: Any) -> list[Any]:
    """Returns the content of a message as a list of parts."""
    if isinstance(content, list | tuple):
        return list(content)
    return [] if content is None else [{"type": "text", "text": content}]


def picture_in(part: Mapping[str, Any]) -> Any:
    """Returns the picture of a part of a message, as `load_picture` takes it.

    It may be {"type": "image", "image": ...}, where the name of the second entry may also be "url",
    "path" or "base64" as in transformers, or {"type": "image_url", "image_url": {"url": ...}} with
    a data URL, or {"type": "image_pil", "image_pil": ...} as in vLLM.

    Raises:
        ValueError: The part has no picture.
    """
    kind = part.get("type")
    value = part.get("image_url")
    if kind == "image_url" and value is not None:
        url = value.get("url") if isinstance(value, Mapping) else value
        # The scheme of a URL may be in capitals (RFC 3986).
        if not isinstance(url, str) or url[:5].lower() != "data:":
            raise ValueError(
                f"image_url must be a data URL (data:image/png;base64,...), got {url!r:.60}: "
                "nothing is fetched, so give the picture itself: {'type': 'image', 'image': "
                "a path, bytes, or a PIL.Image}"
            )
        return url
    places = [name for name in _PLACES if part.get(name) is not None]
    if kind in PICTURE_TYPES and len(places) == 1:
        place = places[0]
        return f"data:;base64,{part[place]}" if place == "base64" else part[place]
    raise ValueError(
        f"a part of type {kind!r} must have one picture: {{'type': 'image', 'image': a path, "
        f"bytes, or a PIL.Image}}; got {sorted(map(str, part))}"
    )
