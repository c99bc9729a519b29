"""Bounds how much longer a tokenizer may make a text.

A checkpoint is data of somebody else, and its normalizer is applied to every prompt.
"""

from __future__ import annotations

import base64
import json
import math
from typing import Any

MAX_GROWTH = 64  # times; the longest of Unicode's own compatibility forms has 18 characters


def check_growth(tokenizer: Any) -> None:
    """Checks that no part of a tokenizer can multiply a text.

    Raises:
        ValueError: A part can.
    """
    backend = tokenizer.backend_tokenizer
    for name in ("normalizer", "decoder"):
        if (growth := _growth_of(_describe(getattr(backend, name)))) > MAX_GROWTH:
            raise ValueError(
                f"its {name} could make a text {growth:g} times as long; at most {MAX_GROWTH} is "
                "allowed"
            )
    processor = _describe(backend.post_processor)
    for stage in processor.get("processors", [processor]):
        copies = sum("Sequence" in piece for piece in stage.get("single") or ())
        if copies > 1:
            raise ValueError(f"its post_processor repeats a text {copies} times")


def _describe(part: Any) -> dict[str, Any]:
    """Returns a part as tokenizer.json has it, without the vocabulary, which is large."""
    return {} if part is None else dict(json.loads(part.__getstate__()))


def _growth_of(stage: dict[str, Any]) -> float:
    """Returns an upper bound of the growth.

    A few characters that are added at an end do not count.
    """
    match stage.get("type"):
        case "Sequence":
            parts = stage.get("normalizers") or stage.get("decoders") or []
            return math.prod(_growth_of(part) for part in parts)
        case "Replace":
            pattern = stage.get("pattern", {})
            content = stage.get("content", "")
            min_length = len(pattern.get("String", "")) if isinstance(pattern, dict) else 0
            # A regular expression may match one character, or nothing in front of it.
            return max(1.0, len(content) / min_length if min_length else len(content) + 1.0)
        case "Precompiled":
            return max(1.0, float(_max_form_length(stage.get("precompiled_charsmap") or "")))
    return 1.0


def _max_form_length(charsmap: str) -> int:
    """Returns the length of the longest form in SentencePiece's table.

    The table is a trie with its size before it, then the forms, each with a zero after it.
    """
    table = base64.b64decode(charsmap)
    forms = table[4 + int.from_bytes(table[:4], "little") :]
    return max((len(form.decode(errors="replace")) for form in forms.split(b"\0")), default=1)
