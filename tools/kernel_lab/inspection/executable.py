"""The kernels of a compiled function: what its serialised executable says of each one's code and of how it is launched.

The executable is a Protocol Buffer without its description at hand, so a kernel is known by the form of the message around its image. The
forms were read off executables of jax 0.10.2, 0.11.2 and 0.12.0.1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tools.kernel_lab.inspection.cubin import ELF, Machine, images, machines
from tools.kernel_lab.inspection.riegeli_records import FormatError, leaves, varint

Message = dict[int, list["int | bytes"]]


@dataclass(frozen=True)
class Kernel:
    """One launch of a kernel in an executable."""

    machine: Machine
    threads: int | None  # of a program; None where the executable does not say (Mosaic)
    # of a program; None where the executable does not say (Mosaic before jax 0.11)
    dynamic_shared_bytes: int | None
    image: bytes

    @property
    def name(self) -> str:
        return self.machine.name

    @property
    def shared_bytes(self) -> int | None:
        """Shared memory of a program."""
        if self.dynamic_shared_bytes is None:
            return None
        return self.machine.static_shared_bytes + self.dynamic_shared_bytes


def kernels(serialised: bytes) -> list[Kernel]:
    """Every launch of a kernel in an executable, XLA's own fusions among them, in the order in which they are kept.

    serialised: what `jax.stages.Compiled.runtime_executable().serialize()` gives. Raises ValueError for what cannot be read.
    """
    return [kernel for leaf in leaves(serialised) for kernel in _launches(leaf)]


def _launches(data: bytes) -> Iterator[Kernel]:
    """The launches in what may be a message; else one per kernel of the images in it."""
    message = _message(data)
    if message is not None:
        launch = _xla_launch(message) or _mosaic_launch(message)
        if launch is not None:
            yield launch
            return
        held = [
            value
            for values in message.values()
            for value in values
            if isinstance(value, bytes) and ELF in value
        ]
        if held:
            for value in held:
                yield from _launches(value)
            return
    for image in images(data):
        for machine in machines(image):
            yield Kernel(machine, None, None, image)


def _xla_launch(message: Message) -> Kernel | None:
    """A custom kernel of XLA, which Triton's are too: {2: {2: {1: image}, 4: name}, 4: {1: threads in x, y, z}, 6: shared bytes}."""
    spec = _message(_one(message, 2))
    if spec is None or not isinstance(name := _one(spec, 4), bytes):
        return None
    held = _message(_one(spec, 2))
    image = None if held is None else _one(held, 1)
    if not isinstance(image, bytes) or not image.startswith(ELF):
        return None
    (machine,) = (machine for machine in machines(image) if machine.name == name.decode())
    threads = 1
    for size in (_message(_one(_message(_one(message, 4)) or {}, 1)) or {}).values():
        threads *= int(size[0])
    shared = _one(message, 6)
    return Kernel(machine, threads, int(shared) if isinstance(shared, int) else 0, image)


def _mosaic_launch(message: Message) -> Kernel | None:
    """Mosaic's resources from jax 0.11 on: {8: image, 9: name, 10: shared bytes}."""
    image, name, shared = (_one(message, field) for field in (8, 9, 10))
    if not isinstance(image, bytes) or not isinstance(name, bytes) or not image.startswith(ELF):
        return None
    (machine,) = (machine for machine in machines(image) if machine.name == name.decode())
    return Kernel(machine, None, int(shared) if isinstance(shared, int) else 0, image)


def _one(message: Message, field: int) -> int | bytes | None:
    values = message.get(field, [])
    return values[0] if len(values) == 1 else None


def _message(data: int | bytes | None) -> Message | None:
    """Values by field, or None for what is no message."""
    if not isinstance(data, bytes):
        return None
    found: Message = {}
    at = 0
    try:
        while at < len(data):
            key, at = varint(data, at)
            kind, value = key & 7, b""
            if kind == 0:
                number, at = varint(data, at)
                found.setdefault(key >> 3, []).append(number)
                continue
            if kind == 2:
                size, at = varint(data, at)
            else:
                size = {1: 8, 5: 4}[kind]
            value, at = data[at : at + size], at + size
            if at > len(data) or key >> 3 == 0:
                return None
            found.setdefault(key >> 3, []).append(value)
    except (FormatError, KeyError):
        return None
    return found
