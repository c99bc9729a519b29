"""Loads pictures of callers, whose size and format are checked before they are decoded."""

from __future__ import annotations

import io
import re
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

from jaxpage.images.sources import MAX_PIXELS, base64_in, decode_base64
from jaxpage.settings.argument_checks import show

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_WHITE = (255, 255, 255, 255)

PictureSource = bytes | str | Path | Image.Image | npt.NDArray[np.uint8]


def load_picture(source: PictureSource, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Returns a picture as RGB, as it is to be looked at.

    The orientation of its EXIF data is applied, transparent parts become white, and an animation
    gives its first frame.

    Args:
        source: The bytes of a PNG, JPEG, WebP or GIF file, the path of one, a data URL, a picture
            of Pillow, or an array of uint8 [height, width, 3].
        max_pixels: The most pixels.

    Raises:
        TypeError: The source is none of these.
        ValueError: The picture has too many pixels or none, is cut off, or has another format.
    """
    if isinstance(source, np.ndarray):
        return _from_array(source, max_pixels)
    if isinstance(source, Image.Image):
        _check_size(source.size, max_pixels)
        return _as_seen(source)
    if isinstance(source, str):
        source = _bytes_of(source)
    if isinstance(source, Path):
        source = _read(source)
    if not isinstance(source, bytes | bytearray | memoryview):
        raise TypeError(
            "a picture must be bytes of a file, a path, a data URL, a PIL.Image or an array of "
            f"uint8; got {type(source).__name__}"
        )
    return _decode(bytes(source), max_pixels)


def _bytes_of(text: str) -> bytes | Path:
    """Returns the bytes of a data URL, or the path that a text is."""
    if text[:5].lower() == "data:":
        try:
            return decode_base64(base64_in(text))
        except ValueError as error:
            raise ValueError(f"the picture {error}") from None
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", text):
        raise ValueError(
            f"the picture {show(text)} is a URL, and nothing is fetched: give the path of a file, "
            "its bytes or a data URL"
        )
    return Path(text)


def _read(path: Path) -> bytes:
    try:
        if not path.is_file():
            raise ValueError(f"the picture {show(str(path))} is no file")
        return path.read_bytes()
    except OSError as error:
        raise ValueError(
            f"the picture {show(str(path))} cannot be read: {error.strerror}"
        ) from None


def _from_array(array: npt.NDArray[np.uint8], max_pixels: int) -> Image.Image:
    is_rgb = array.ndim == 3 and array.shape[2] in (3, 4)
    if array.dtype != np.uint8 or not (is_rgb or array.ndim == 2):
        raise ValueError(
            "a picture as an array must be uint8 of shape [height, width, 3] (or 4 with "
            f"transparency, or [height, width] in grey); got {array.dtype} {list(array.shape)}"
        )
    _check_size((array.shape[1], array.shape[0]), max_pixels)
    return _as_seen(Image.fromarray(np.ascontiguousarray(array)))


def _decode(data: bytes, max_pixels: int) -> Image.Image:
    try:
        picture = Image.open(io.BytesIO(data), formats=FORMATS)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        num_pixels = re.search(r"\d+", str(error))
        raise ValueError(
            f"the picture has {num_pixels[0] if num_pixels else 'too many'} pixels; at most "
            f"{max_pixels} are allowed"
        ) from None
    except Exception:  # decoders raise errors of any type
        raise ValueError(
            f"the picture ({len(data)} bytes) is no PNG, JPEG, WebP or GIF file, or its header is "
            "damaged"
        ) from None
    _check_size(picture.size, max_pixels)
    try:
        picture.load()
    # A lack of memory is no fault of the picture.
    except MemoryError:
        raise
    except Exception as error:
        raise ValueError(
            f"the picture ({len(data)} bytes of {picture.format}) is cut off or damaged: "
            f"{error!s:.100}"
        ) from None
    return _as_seen(picture)


def _check_size(size: tuple[int, int], max_pixels: int) -> None:
    width, height = size
    if width * height > max_pixels:
        raise ValueError(
            f"the picture has {width} x {height} = {width * height} pixels; at most {max_pixels} "
            "are allowed"
        )
    if not width or not height:
        raise ValueError(f"the picture has {width} x {height} pixels; it must have at least one")


def _as_seen(picture: Image.Image) -> Image.Image:
    """Returns a picture turned as its EXIF data says, in RGB on a white background."""
    try:
        picture = ImageOps.exif_transpose(picture)
    except MemoryError:
        raise
    except Exception as error:
        raise ValueError(f"the picture's EXIF data cannot be read: {error!s:.100}") from None
    # A palette has no band A: its transparent colour is in `info`.
    if "A" in picture.getbands() or picture.info.get("transparency") is not None:
        picture = picture.convert("RGBA")
        background = Image.new("RGBA", picture.size, _WHITE)
        picture = Image.alpha_composite(background, picture)
    return picture.convert("RGB")
