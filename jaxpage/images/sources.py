"""Reads what a picture comes in: base64 and data URLs. Nothing is decoded here."""

from __future__ import annotations

import binascii
import re

from jaxpage.settings.argument_checks import show

# A picture of this size takes 192 MiB as RGB, and a processor holds a few copies of it.
MAX_PIXELS = 64_000_000
_DATA_URL = re.compile(r"data:[^,]*?;base64,", re.IGNORECASE)


def base64_in(url: str) -> str:
    """Returns the base64 in a data URL, such as `data:image/png;base64,iVBOR...`.

    Raises:
        ValueError: It is another URL.
    """
    # A media type is short, and the pattern must not look for a comma in megabytes of base64.
    if (match := _DATA_URL.match(url[:1024])) is None:
        kind = re.match(r"[A-Za-z][A-Za-z0-9+.-]*(?=:)", url[:32])
        description = (
            f"a URL of {kind[0]!r}" if kind and kind[0].lower() != "data" else show(url[:40])
        )
        raise ValueError(
            f"must be a data URL with base64 (data:image/png;base64,...), got {description}: "
            "nothing is fetched, so send the picture itself"
        )
    return url[match.end() :]


def decode_base64(text: str) -> bytes:
    """Returns the bytes of a text in base64, which may have line breaks.

    Raises:
        ValueError: The text is empty or no base64.
    """
    packed = "".join(text.split())
    if not packed:
        raise ValueError("is empty, and must be a picture in base64")
    try:
        return binascii.a2b_base64(packed.encode("ascii"), strict_mode=True)
    except ValueError as error:  # of ASCII, too
        raise ValueError(f"is no base64: {str(error)[:100]}") from None
