"""Keeps executables as files: a start that finds them neither traces nor compiles.

JAX's own compile cache saves XLA's work alone. To find something in it, every function must be
traced and lowered again, which takes longer than all else of a warm start. Here the key is a
function's name, its arguments, and the code that it is traced from.

A file is code: it is read only from a directory of the user's own (`use_compile_cache`). A damaged
file is compiled again, and so is one that does not load.

On a GPU a file also has what XLA's autotuning chose, as text. An executable for a GPU is the
machine code of its kernels and the program that calls them; CUDA graphs are recorded from that
again.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable

from jaxpage.device.autotuning import TUNED_PLATFORMS, choices_of
from jaxpage.device.compile_cache import own_cache_directory
from jaxpage.device.hardware.backends import cpu_kernels
from jaxpage.device.hardware.gpu_versions import gpu_versions
from jaxpage.device.hardware.host_processor import processor_lines
from jaxpage.device.hardware.mesh import DeviceMesh
from jaxpage.device.hardware.traced_code import hash_traced_code
from pallas_kernels.compat import without_compile_cache

logger = logging.getLogger(__name__)

MAX_BYTES = 2 * 2**30  # in the directory: what was unused for the longest time goes first
# A file has the digest of its name and of all that follows, the workspace in bytes, the length of
# the choices, the choices, and the executable.
_DIGEST_BYTES = 32
_SIZE_BYTES = 8


@dataclass
class StoredExecutable:
    """An executable whose file is undamaged.

    Attributes:
        path: The file.
        payload: The executable as bytes.
        workspace_bytes: The temporary memory that it takes.
        choices: What XLA's autotuning chose for it; see `choices_of`.
        trees: The structures of its arguments and of its result.
        devices: The devices that run it.
        compile_one: Compiles it.
    """

    path: Path
    payload: memoryview
    workspace_bytes: int
    choices: str
    trees: tuple[Any, Any]
    devices: Sequence[jax.Device]
    compile_one: functools.partial[Any]

    def load(self) -> Any:
        """Returns the executable, which takes 0.2 s for a step of 30 layers.

        One that does not load is compiled again, for which XLA may choose otherwise.
        """
        try:
            return serialize_executable.deserialize_and_load(
                bytes(self.payload), *self.trees, execution_devices=self.devices
            )
        except Exception as error:
            logger.warning("%s is compiled again: %s: %s", self.path, type(error).__name__, error)
            with contextlib.suppress(OSError):  # the directory may be read alone
                self.path.unlink()
            compiled = self.compile_one()
            if self.devices[0].platform in TUNED_PLATFORMS:
                self.choices = choices_of(compiled)
            return compiled


class StoredExecutables:
    """Holds a directory of executables for these devices.

    Attributes:
        num_found: How many of the executables that were asked for were in it.
    """

    def __init__(self, directory: Path, devices: Sequence[jax.Device]) -> None:
        self._directory = directory
        self._devices = devices
        self._is_tuned = devices[0].platform in TUNED_PLATFORMS
        self._lock = threading.Lock()
        self.num_found = 0
        self._has_written = False
        self._is_full = False  # or cannot be written for another reason, which was logged
        # Each text is kept with its object, so that no other object gets the same id.
        self._texts: dict[int, tuple[Any, str]] = {}

    def get(self, compile_one: functools.partial[Any], arguments: Any, result: Any) -> Any:
        """Returns a `StoredExecutable`, or compiles the executable, stores it and returns it.

        Args:
            compile_one: The call that compiles it; the file's name follows from it.
            arguments: A tree like the executable's arguments, whatever the leaves are.
            result: A tree like its result.
        """
        # JAX's structure of a call has keyword arguments, too, of which there are none.
        trees = jax.tree.structure((arguments, {})), jax.tree.structure(result)
        with self._lock:  # one thread makes what all names have in common
            path = self._path(compile_one)
        if path is None:
            return compile_one()
        if (contents := _read(path)) is not None:
            with self._lock:
                self.num_found += 1
            workspace_bytes, choices, payload = _parts(contents)
            return StoredExecutable(
                path, payload, workspace_bytes, choices, trees, self._devices, compile_one
            )
        compiled = compile_one()
        self._has_written = True
        try:
            _write(path, compiled, trees, choices_of(compiled) if self._is_tuned else "")
        except Exception as error:  # it is compiled again at the next start
            if "pickle" in str(error):
                logger.info(
                    "%s calls Python, as interpreted kernels do: it is not stored", path.name
                )
                return compiled
            if not self._is_full:
                # JAX may print whole trees of arrays, so the text is cut.
                why = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
                logger.warning("cannot store executables in %s: %s", self._directory, why)
            self._is_full = True
        return compiled

    def has(self, compile_one: functools.partial[Any]) -> bool:
        """Returns whether there is a file of what a call compiles, damaged or not."""
        with self._lock:
            path = self._path(compile_one)
        return path is not None and path.exists()

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Switches JAX's own cache off, and tidies the directory if something was written.

        An executable that comes from JAX's cache cannot be written as a file again: its functions
        are missing when it runs.
        """
        with without_compile_cache():
            yield
        if self._has_written:
            self._tidy()

    def _tidy(self) -> None:
        """Deletes the files that were unused for the longest time, until the rest fits."""
        try:
            used = sorted(
                ((entry.stat().st_mtime, entry) for entry in self._directory.iterdir()),
                reverse=True,
            )
            total = 0
            for _, entry in used:
                total += entry.stat().st_size
                if total > MAX_BYTES:
                    entry.unlink()
        except OSError as error:
            logger.debug("cannot tidy %s: %s", self._directory, error)

    def _describe(self, leaf: Any) -> str:
        if hasattr(leaf, "dtype"):
            return f"{leaf.dtype}{leaf.shape}{getattr(leaf, 'sharding', None)}"
        # The model is a leaf of the call of every step, and its text takes 50 ms.
        if id(leaf) not in self._texts:
            self._texts[id(leaf)] = leaf, repr(leaf)
        return self._texts[id(leaf)][1]

    def _path(self, call: functools.partial[Any]) -> Path | None:
        """Returns the file of a call; None where something in it has no name but its address."""
        leaves, tree = jax.tree.flatten((call.args, call.keywords))
        arguments = [self._describe(leaf) for leaf in leaves]
        text = f"{_surroundings(tuple(self._devices))} {call.func.__qualname__} {tree} {arguments}"
        if " at 0x" in text:
            return None
        return self._directory / hashlib.sha256(text.encode()).hexdigest()


@functools.cache
def _surroundings(devices: tuple[jax.Device, ...]) -> str:
    """Returns, as text, all that an executable for these devices depends on besides its call."""
    if devices[0].platform == "gpu":
        hardware: list[Any] = gpu_versions(devices)
    else:
        hardware = [processor_lines(), os.cpu_count(), cpu_kernels()]
    return repr(
        [
            jax.__version__,
            importlib.metadata.version("jaxlib"),
            hash_traced_code(),
            hardware,
            [
                os.environ.get(name, "")
                for name in ("XLA_FLAGS", "JAX_ENABLE_X64", "JAX_DEFAULT_MATMUL_PRECISION")
            ],
            str(jax.devices()),
        ]
    )


def workspace_bytes(executable: Any) -> int:
    """Returns the temporary memory that an executable takes, as XLA planned it."""
    analysis = executable.memory_analysis()
    return 0 if analysis is None else int(analysis.temp_size_in_bytes)


def _digest(path: Path, contents: bytes | memoryview) -> bytes:
    """Returns the digest of a file's name and contents, so that a renamed file is noticed, too."""
    digest = hashlib.sha256(path.name.encode())
    digest.update(contents)
    return digest.digest()


def _read(path: Path) -> memoryview | None:
    """Returns the contents after the digest; None if the file is missing or damaged."""
    try:
        contents = memoryview(path.read_bytes())
    except OSError:
        return None
    with contextlib.suppress(OSError):  # the file system may be read-only
        # `_tidy` goes by this time.
        os.utime(path)
    if _digest(path, contents[_DIGEST_BYTES:]) != contents[:_DIGEST_BYTES]:
        logger.warning("%s is compiled again: its contents are not those that were written", path)
        return None
    return contents[_DIGEST_BYTES:]


def _parts(contents: memoryview) -> tuple[int, str, memoryview]:
    """Returns the workspace in bytes, the choices, and the executable."""
    workspace_bytes, num_choices = (
        int.from_bytes(contents[at : at + _SIZE_BYTES], "little") for at in (0, _SIZE_BYTES)
    )
    end = 2 * _SIZE_BYTES + num_choices
    return workspace_bytes, bytes(contents[2 * _SIZE_BYTES : end]).decode(), contents[end:]


def _write(path: Path, compiled: Any, trees: tuple[Any, ...], choices: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    payload, *its_trees = serialize_executable.serialize(compiled)
    if tuple(its_trees) != trees:
        raise TypeError("its arguments or results are not those that were expected")
    text = choices.encode()
    sizes = (workspace_bytes(compiled), len(text))
    contents = b"".join([*(size.to_bytes(_SIZE_BYTES, "little") for size in sizes), text, payload])
    temporary = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        # Another start may read or write the same file: it is whole, or not there.
        temporary.write_bytes(_digest(path, contents) + contents)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def open_stored_executables(mesh: DeviceMesh) -> StoredExecutables | None:
    """Returns the executables in our own cache, on CPUs and GPUs of one process; else None.

    The cache is our own if the user has not chosen its directory.
    """
    directory = own_cache_directory()
    is_tried = mesh.first.platform in ("cpu", "gpu") and mesh.is_one_process
    if directory is None or not is_tried:
        return None
    return StoredExecutables(directory / "executables", mesh.devices)
