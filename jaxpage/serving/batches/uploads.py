"""Reads uploaded forms (multipart/form-data, RFC 7578), of which clients upload files."""

from __future__ import annotations

from email.message import Message
from email.parser import BytesHeaderParser
from typing import NamedTuple

from jaxpage.serving.wire.errors import ApiError
from jaxpage.settings.argument_checks import show

_MAX_PARTS = 16
_MAX_HEADER_BYTES = 4096
_MAX_FILENAME_CHARACTERS = 256


class FormPart(NamedTuple):
    """Holds a field of a form: its file name, which is empty for a plain field, and its bytes."""

    filename: str
    content: bytes


def read_form(content_type: str, body: bytes) -> dict[str, FormPart]:
    """Returns the fields of a form by their names.

    Args:
        content_type: The header of the request, which has the boundary of the parts.
        body: The body of the request.

    Raises:
        ApiError: It is no such form.
    """
    header = Message()
    header["content-type"] = content_type
    boundary = header.get_param("boundary")
    if header.get_content_type() != "multipart/form-data" or not isinstance(boundary, str):
        raise ApiError(415, "Unsupported Media Type: a file is uploaded as 'multipart/form-data'")
    fields: dict[str, FormPart] = {}
    for start, end in _parts(body, b"--" + boundary.encode()):
        # The empty line may be where the head would begin, so that there are no headers.
        # Two bytes are the line break after the boundary, four the empty line.
        empty_line = body.find(b"\r\n\r\n", start, min(end, start + 2 + _MAX_HEADER_BYTES + 4))
        if empty_line < 0:
            raise ApiError(400, "A part of the form has no headers, or too long ones")
        head = body[start:empty_line].removeprefix(b"\r\n")
        content = body[empty_line + 4 : end]
        headers = BytesHeaderParser().parsebytes(head)
        name = headers.get_param("name", header="content-disposition")
        if not isinstance(name, str) or name in fields:
            raise ApiError(400, "Each part of the form must have a name of its own")
        filename = headers.get_filename() or ""
        if len(filename) > _MAX_FILENAME_CHARACTERS or not filename.isprintable():
            raise ApiError(
                400, f"{name}: the file's name {show(filename)} is too long, or cannot be printed"
            )
        fields[name] = FormPart(filename, content)
    return fields


def _parts(body: bytes, boundary: bytes) -> list[tuple[int, int]]:
    """Returns where the parts of a form begin and end, without their boundaries.

    Each part begins after a line with the boundary; the last line has two hyphens more. The search
    stops at the first part too many, so that a body of nothing but boundaries costs no time.

    Raises:
        ApiError: There are too many parts or none, or the form is not whole.
    """
    parts: list[tuple[int, int]] = []
    start = len(boundary) if body.startswith(boundary) else -1
    # Two hyphens follow the last boundary of a form.
    while start >= 0 and len(parts) <= _MAX_PARTS and not body.startswith(b"--", start):
        end = body.find(b"\r\n" + boundary, start)
        if end < 0:
            break
        parts.append((start, end))
        start = end + 2 + len(boundary)
    is_whole = start >= 0 and body.startswith(b"--", start)
    if not is_whole or not 0 < len(parts) <= _MAX_PARTS:
        raise ApiError(400, f"The form must have 1 to {_MAX_PARTS} whole parts")
    return parts
