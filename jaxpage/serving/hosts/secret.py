"""Reads the common secret of the hosts of a server."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from jaxpage.errors import ConfigError
from jaxpage.serving.settings.server_config import ServerConfig

SECRET_VARIABLE = "JAXPAGE_HOSTS_SECRET"
_MIN_BYTES = 16


def read_secret(config: ServerConfig, environment: Mapping[str, str] | None = None) -> bytes:
    """Returns the secret in `hosts_secret_file`, or else in $JAXPAGE_HOSTS_SECRET.

    Spaces and line ends around it do not count.

    Args:
        config: The settings of the server.
        environment: The environment variables; None for those of the process.

    Raises:
        ConfigError: There is no secret, it is too short, or the file cannot be read.
    """
    environment = os.environ if environment is None else environment
    if config.hosts_secret_file is not None:
        source = f"hosts_secret_file {config.hosts_secret_file}"
        try:
            secret = Path(config.hosts_secret_file).read_bytes().strip()
        except OSError as error:
            raise ConfigError(
                f"hosts_secret_file: cannot read {config.hosts_secret_file}: {error.strerror}"
            ) from None
    else:
        source = SECRET_VARIABLE
        secret = environment.get(SECRET_VARIABLE, "").strip().encode()
    if len(secret) < _MIN_BYTES:
        raise ConfigError(
            f"several hosts need a secret of at least {_MIN_BYTES} bytes, and {source} has "
            f"{len(secret)}; "
            "openssl rand -hex 32 makes one, for --hosts-secret-file on every host"
        )
    return secret
