"""Reads the API keys that let requests in."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from jaxpage.errors import ConfigError
from jaxpage.serving.settings.server_config import ServerConfig

API_KEY_VARIABLE = "JAXPAGE_API_KEY"
MAX_KEY_FILE_BYTES = 1 << 16


def read_api_keys(
    config: ServerConfig, environment: Mapping[str, str] | None = None
) -> tuple[str, ...]:
    """Returns the keys that let a request in.

    They come from `api_key_file`, one on each line, and from $JAXPAGE_API_KEY, separated by commas.
    If neither is given there are no keys, and the server asks for none. A source that is given but
    has no key is an error, so that a mistake opens no door.

    Raises:
        ConfigError: A source cannot be read, is empty, or has a key that no header can carry.
    """
    text = (os.environ if environment is None else environment).get(API_KEY_VARIABLE)
    keys = [] if text is None else _keys(API_KEY_VARIABLE, text.split(","))
    if config.api_key_file is not None:
        lines = _read_key_file(Path(config.api_key_file)).splitlines()
        keys += _keys(
            config.api_key_file, [line for line in lines if not line.lstrip().startswith("#")]
        )
    return tuple(dict.fromkeys(keys))


def _keys(source: str, texts: Iterable[str]) -> list[str]:
    keys = [key for text in texts if (key := text.strip())]
    if not keys:
        raise ConfigError(f"{source} is given, but has no key")
    if not all(key.isascii() and key.isprintable() and " " not in key for key in keys):
        # The message does not show the key, which is a secret.
        raise ConfigError(f"{source}: a key must be printable ASCII without spaces")
    return keys


def _read_key_file(path: Path) -> str:
    try:
        if not path.is_file():
            raise ConfigError(f"api_key_file: there is no file {path}")
        if path.stat().st_size > MAX_KEY_FILE_BYTES:
            raise ConfigError(f"api_key_file: {path} has more than {MAX_KEY_FILE_BYTES} bytes")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"api_key_file: cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"api_key_file: {path} is not a text file (UTF-8)") from None
