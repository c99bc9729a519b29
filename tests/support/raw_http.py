"""HTTP by hand, over sockets: what no client would send, and answers as they come."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path
from typing import Any

from tests.support.running import Running

# no client may be told
ROOT = re.escape(str(Path(__file__).resolve().parents[2]))
OF_THE_MACHINE = re.compile(rf"0x|Traceback|site-packages|/home|/usr|{ROOT}|object at|File \"")


def request_bytes(method: str, path: str, body: Any = None, **headers: str) -> bytes:
    """Returns a request as it goes over the wire.

    Underscores in names of headers are hyphens; `Host` can be left out with ''.
    """
    content = (
        b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    )
    fields = {
        "Host": "localhost",
        **{name.replace("_", "-"): value for name, value in headers.items()},
    }
    if body is not None:
        fields = {"Content-Type": "application/json", "Content-Length": str(len(content)), **fields}
    lines = [
        f"{method} {path} HTTP/1.1",
        *(f"{name}: {value}" for name, value in fields.items() if value),
    ]
    return "\r\n".join([*lines, "", ""]).encode() + content


def answer_of(client: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """Returns the status, the headers and the body of what comes.

    It reads until the server closes the connection or the body is there.
    """
    data = b""
    while b"\r\n\r\n" not in data:
        if not (part := client.recv(65536)):
            return 0, {}, data
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    status, *lines = head.decode("latin-1").split("\r\n")
    headers = {
        name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)
    }
    length = int(headers["content-length"]) if "content-length" in headers else None
    while length is None or len(body) < length:
        if not (part := client.recv(65536)):
            break
        body += part
    return int(status.split()[1]), headers, body


def ask(
    server: Running, method: str, path: str, body: Any = None, **headers: str
) -> tuple[int, dict[str, str], bytes]:
    with server.connect() as client:
        client.sendall(request_bytes(method, path, body, Connection="close", **headers))
        return answer_of(client)
