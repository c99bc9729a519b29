"""Binds the server's address before the slow imports, so that a port in use is reported at once."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Iterator

from jaxpage.errors import ConfigError
from jaxpage.serving.config import ServerConfig


@contextlib.contextmanager
def bound_socket(config: ServerConfig) -> Iterator[socket.socket]:
    """Binds the server's address, and closes it at the end of the context.

    No client can connect yet: the socket does not listen.

    Args:
        config: The settings of the server.

    Raises:
        ConfigError: The address cannot be bound.
    """
    place = f"{config.host} port {config.port}"
    try:
        # With SO_REUSEADDR two servers could bind one address at first, until one of them listens.
        listener = _bound(config, reuse=False)
    except UnicodeError:  # the name cannot be encoded for DNS
        raise ConfigError(f"cannot listen on {place}: the host name cannot be resolved") from None
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise ConfigError(f"cannot listen on {place}: {error.strerror}") from None
        try:
            # Connections that an earlier server left in TIME_WAIT must not prevent a restart.
            listener = _bound(config, reuse=True)
        except OSError as error:
            raise ConfigError(f"cannot listen on {place}: {error.strerror}") from None
    with listener:
        yield listener


def _bound(config: ServerConfig, *, reuse: bool) -> socket.socket:
    family, *_, address = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
        listener.bind(address)
    except BaseException:
        listener.close()
        raise
    return listener


def address_of(listener: socket.socket) -> str:
    """Returns the URL of a bound socket, as a client on this machine uses it."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
