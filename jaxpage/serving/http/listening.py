"""Binds the server's address before the slow imports, so that a port in use is reported at once."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
from collections.abc import Iterator

from jaxpage.errors import ConfigError
from jaxpage.serving.settings.server_config import ServerConfig


@contextlib.contextmanager
def bind_socket(config: ServerConfig) -> Iterator[socket.socket]:
    """Binds the server's address, and closes it at the end of the context.

    No client can connect yet: the socket does not listen. The file of a Unix socket is removed at
    the end.

    Args:
        config: The settings of the server.

    Raises:
        ConfigError: The address cannot be bound.
    """
    if config.uds is not None:
        with _unix_socket(config.uds) as listener:
            yield listener
        return
    place = f"{config.host} port {config.port}"
    try:
        # With SO_REUSEADDR two servers could bind one address at first, until one of them listens.
        listener = _bind(config, reuse=False)
    except UnicodeError:  # the name cannot be encoded for DNS
        raise ConfigError(f"cannot listen on {place}: the host name cannot be resolved") from None
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise ConfigError(f"cannot listen on {place}: {error.strerror}") from None
        try:
            # Connections that an earlier server left in TIME_WAIT must not prevent a restart.
            listener = _bind(config, reuse=True)
        except OSError as error:
            raise ConfigError(f"cannot listen on {place}: {error.strerror}") from None
    with listener:
        yield listener


def _bind(config: ServerConfig, *, reuse: bool) -> socket.socket:
    family, *_, address = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
        listener.bind(address)
    except BaseException:
        listener.close()
        raise
    return listener


@contextlib.contextmanager
def _unix_socket(path: str) -> Iterator[socket.socket]:
    """Binds a Unix socket, in place of one that a server has left.

    A lock on a second file says that a server uses the path, also while it starts and does not
    answer yet.

    Raises:
        ConfigError: The socket cannot be bound, or something else is at the path.
    """
    place = f"the Unix socket {path}"
    with contextlib.ExitStack() as stack:
        try:
            lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            stack.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.lexists(path):
                if not stat.S_ISSOCK(os.lstat(path).st_mode):
                    raise ConfigError(f"cannot listen on {place}: it is a file of another kind")
                # A program that is no jaxpage server takes no lock, and its socket must stay.
                if _answers(path):
                    raise ConfigError(f"cannot listen on {place}: another program listens there")
                os.unlink(path)
            listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            listener.bind(path)
        except BlockingIOError:
            raise ConfigError(f"cannot listen on {place}: another server uses it") from None
        except OSError as error:
            # Python refuses a path that is too long for the kernel itself, without an error number.
            why = error.strerror or f"{error}; the path has {len(os.fsencode(path))} bytes"
            raise ConfigError(f"cannot listen on {place}: {why}") from None
        stack.callback(_remove, path)
        yield listener


def _answers(path: str) -> bool:
    """Returns whether a program listens on a Unix socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        try:
            client.connect(path)
        except ConnectionRefusedError:
            return False
    return True


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


def address_of(listener: socket.socket) -> str:
    """Returns the URL of a bound socket, as a client on this machine uses it.

    For a Unix socket it is `unix:` and the path.
    """
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
