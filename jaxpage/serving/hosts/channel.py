"""Carries lines of JSON between two hosts over TCP, after both have shown that they know a secret.

Nothing is encrypted. Each line has a code made from the secret, the connection and the line's
number, so that no line can be changed, left out or sent again.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import socket
import threading
from typing import Any

from jaxpage.replay import MAX_LINE_BYTES, Record, encode_record

GREETING_SECONDS = 5.0  # the longest wait for a read or a write of the greeting
_GREETING_BYTES = 1024


class Refused(Exception):
    """Says that the other side refuses this one, or is refused."""


class Channel:
    """A connection whose two sides know each other; one thread may receive, and any may send.

    The methods raise OSError if the other side is gone or silent for too long, or if a line has a
    wrong code.
    """

    def __init__(self, connection: socket.socket, key: bytes, *, leads: bool) -> None:
        self._connection = connection
        self._lines = connection.makefile("rb")
        self._key = key
        self._ways = (b"down", b"up") if leads else (b"up", b"down")  # the way out, and the way in
        self._num_sent = self._num_received = 0
        self._lock = threading.Lock()

    def set_timeout(self, seconds: float | None) -> None:
        """Sets the longest time that a call may wait; None for no limit."""
        self._connection.settimeout(seconds)

    def send(self, record: Record) -> None:
        """Sends a record as a line."""
        line = encode_record(record)
        with self._lock:
            self._connection.sendall(self._code(self._ways[0], self._num_sent, line) + b" " + line)
            self._num_sent += 1

    def receive(self) -> Record:
        """Waits for the next line, and returns its record."""
        line = self._lines.readline(MAX_LINE_BYTES)
        if not line.endswith(b"\n"):
            raise ConnectionError("the connection has ended")
        code, _, body = line.partition(b" ")
        if not hmac.compare_digest(code, self._code(self._ways[1], self._num_received, body)):
            raise ConnectionError("a line is not what was sent")
        self._num_received += 1
        record: Record = json.loads(body)
        return record

    def shut(self) -> None:
        """Ends the connection, which a thread that receives notices on both sides."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the connection; no thread may be receiving."""
        self.shut()
        self._lines.close()
        self._connection.close()

    # The way is in the code, so that no line can be sent back to its sender.
    def _code(self, way: bytes, number: int, line: bytes) -> bytes:
        return _digest(self._key, way, str(number).encode(), line).encode()


def greet_follower(connection: socket.socket, secret: bytes) -> tuple[int, Channel]:
    """Greets a follower that has connected, as rank 0.

    Args:
        connection: The connection, on which nothing was sent yet.
        secret: The common secret of the hosts.

    Returns:
        The follower's rank, and the channel to it.

    Raises:
        Refused: The follower does not know the secret, or is no host of jaxpage.
        OSError: The follower is gone, or says nothing.
    """
    connection.settimeout(GREETING_SECONDS)
    nonce = secrets.token_hex(16)
    _say(connection, {"nonce": nonce})
    theirs = _receive_line(connection, {"nonce": str, "rank": int, "code": str})
    # Both sides have chosen a part of this, so that no answer of an earlier greeting fits.
    about = f"{nonce} {theirs['nonce']} {theirs['rank']}".encode()
    if not hmac.compare_digest(
        theirs["code"].encode(), _digest(secret, b"follower", about).encode()
    ):
        _say(connection, {"refused": "the secret is another one"})
        raise Refused("the secret is another one")
    _say(connection, {"code": _digest(secret, b"leader", about)})
    return theirs["rank"], Channel(connection, _key(secret, about), leads=True)


def greet_leader(connection: socket.socket, secret: bytes, rank: int) -> Channel:
    """Greets rank 0, as a follower, and returns the channel to it.

    Args:
        connection: The connection, on which nothing was sent yet.
        secret: The common secret of the hosts.
        rank: The rank of this host.

    Raises:
        Refused: The secrets of the two hosts differ, or the other side is no host of jaxpage.
        OSError: Rank 0 is gone, or says nothing.
    """
    connection.settimeout(GREETING_SECONDS)
    nonce = secrets.token_hex(16)
    about = f"{_receive_line(connection, {'nonce': str})['nonce']} {nonce} {rank}".encode()
    _say(connection, {"nonce": nonce, "rank": rank, "code": _digest(secret, b"follower", about)})
    answer = _receive_line(connection, {"code": str})
    if not hmac.compare_digest(answer["code"].encode(), _digest(secret, b"leader", about).encode()):
        raise Refused("the secret of rank 0 is another one")
    return Channel(connection, _key(secret, about), leads=False)


def _key(secret: bytes, about: bytes) -> bytes:
    # The word makes codes of lines and of greetings differ, whatever is in them.
    return hmac.digest(secret, b"lines\0" + about, "sha256")


def _digest(key: bytes, *parts: bytes) -> str:
    return hmac.new(key, b"\0".join(parts), "sha256").hexdigest()


def _say(connection: socket.socket, record: Record) -> None:
    connection.sendall(encode_record(record))


def _receive_line(connection: socket.socket, fields: dict[str, type]) -> dict[str, Any]:
    """Receives one line of the greeting byte by byte, because the channel reads the next ones."""
    line = b""
    while not line.endswith(b"\n"):
        byte = connection.recv(1)
        if not byte or len(line) > _GREETING_BYTES:
            raise ConnectionError("the connection has ended before the greeting")
        line += byte
    try:
        record = json.loads(line)
    except ValueError:
        raise Refused("this is no host of jaxpage") from None
    if isinstance(record, dict) and isinstance(why := record.get("refused"), str):
        raise Refused(why)
    if not isinstance(record, dict) or any(
        type(record.get(name)) is not kind for name, kind in fields.items()
    ):
        raise Refused("this is no host of jaxpage")
    return record
