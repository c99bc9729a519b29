"""Reads uploaded forms (multipart/form-data, RFC 7578), of which clients upload files."""

from __future__ import annotations

from email.message import Message
from email.parser import BytesHeaderParser
from typing import NamedTuple

from jaxpage.serving.wire.errors import ApiError
from jaxpage.settings.argument_checks import shown

_MAX_PARTS = 16
_MAX_HEADER_BYTES = 4096
_MAX_FILENAME_CHARACTERS = 256


class Part(NamedTuple):
    """Holds a field of a form: its file name, which is empty for a plain field, and its bytes."""

    filename: str
    content: bytes


def read_form(content_type: str, body: bytes) -> dict[str, Part]:
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
    # Each part begins behind a line with the boundary; the last line has two hyphens more.
    before, *parts = (b"\r\n" + body).split(b"\r\n--" + boundary.encode())
    last = parts.pop() if parts else b""
    if before or not 0 < len(parts) <= _MAX_PARTS or not last.startswith(b"--"):
        raise ApiError(400, f"The form must have 1 to {_MAX_PARTS} whole parts")
    fields: dict[str, Part] = {}
    for part in parts:
        head, empty_line, content = part.removeprefix(b"\r\n").partition(b"\r\n\r\n")
        if not empty_line or len(head) > _MAX_HEADER_BYTES:
            raise ApiError(400, "A part of the form has no headers, or too long ones")
        headers = BytesHeaderParser().parsebytes(head)
        name = headers.get_param("name", header="content-disposition")
        if not isinstance(name, str) or name in fields:
            raise ApiError(400, "Each part of the form must have a name of its own")
        filename = headers.get_filename() or ""
        if len(filename) > _MAX_FILENAME_CHARACTERS or not filename.isprintable():
            raise ApiError(
                400, f"{name}: the file's name {shown(filename)} is too long, or cannot be printed"
            )
        fields[name] = Part(filename, content)
    return fields
