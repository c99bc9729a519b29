"""Reads the kernels of a compiled function from its serialised executable.

The executable is a Protocol Buffer whose description is not available, so a kernel is recognised by
the form of the message around its image. The forms were read off executables of jax 0.10.2, 0.11.2
and 0.12.0.1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tools.lab.kernel_lab.inspection.cubin import ELF, Machine, images, machines
from tools.lab.kernel_lab.inspection.riegeli_records import FormatError, leaves, varint

Message = dict[int, list["int | bytes"]]


@dataclass(frozen=True)
class Kernel:
    """One launch of a kernel in an executable."""

    machine: Machine
    threads: int | None  # threads of a program; None where the executable does not say (Mosaic)
    # Bytes of a program; None where the executable does not say (Mosaic before jax 0.11).
    dynamic_shared_bytes: int | None
    image: bytes

    @property
    def name(self) -> str:
        """Returns the kernel's name."""
        return self.machine.name

    @property
    def shared_bytes(self) -> int | None:
        """Returns the bytes of shared memory of a program; None if they are unknown."""
        if self.dynamic_shared_bytes is None:
            return None
        return self.machine.static_shared_bytes + self.dynamic_shared_bytes


def kernels(serialised: bytes) -> list[Kernel]:
    """Returns every launch of a kernel in an executable, in the order in which they are kept.

    XLA's own fusions are among them.

    Args:
        serialised: The result of `jax.stages.Compiled.runtime_executable().serialize()`.

    Raises:
        ValueError: The bytes cannot be read.
    """
    return [kernel for leaf in leaves(serialised) for kernel in _launches(leaf)]


def _launches(data: bytes) -> Iterator[Kernel]:
    """Yields the launches in a possible message, or else one for each kernel of its images."""
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
    """Reads a custom kernel of XLA, which Triton's kernels are too.

    The message is {2: {2: {1: image}, 4: name}, 4: {1: threads in x, y, z}, 6: shared bytes}.
    """
    spec = _message(_field(message, 2))
    if spec is None or not isinstance(name := _field(spec, 4), bytes):
        return None
    held = _message(_field(spec, 2))
    image = None if held is None else _field(held, 1)
    if not isinstance(image, bytes) or not image.startswith(ELF):
        return None
    (machine,) = (machine for machine in machines(image) if machine.name == name.decode())
    threads = 1
    for size in (_message(_field(_message(_field(message, 4)) or {}, 1)) or {}).values():
        threads *= int(size[0])
    shared = _field(message, 6)
    return Kernel(machine, threads, int(shared) if isinstance(shared, int) else 0, image)


def _mosaic_launch(message: Message) -> Kernel | None:
    """Reads Mosaic's resources of jax 0.11 or later: {8: image, 9: name, 10: shared bytes}."""
    image, name, shared = (_field(message, field) for field in (8, 9, 10))
    if not isinstance(image, bytes) or not isinstance(name, bytes) or not image.startswith(ELF):
        return None
    (machine,) = (machine for machine in machines(image) if machine.name == name.decode())
    return Kernel(machine, None, int(shared) if isinstance(shared, int) else 0, image)


def _field(message: Message, field: int) -> int | bytes | None:
    values = message.get(field, [])
    return values[0] if len(values) == 1 else None


def _message(data: int | bytes | None) -> Message | None:
    """Returns the values by field; None if the bytes are no message."""
    if not isinstance(data, bytes):
        return None
    message: Message = {}
    at = 0
    try:
        while at < len(data):
            key, at = varint(data, at)
            kind, value = key & 7, b""
            if kind == 0:
                number, at = varint(data, at)
                message.setdefault(key >> 3, []).append(number)
                continue
            if kind == 2:
                size, at = varint(data, at)
            else:
                size = {1: 8, 5: 4}[kind]
            value, at = data[at : at + size], at + size
            if at > len(data) or key >> 3 == 0:
                return None
            message.setdefault(key >> 3, []).append(value)
    except (FormatError, KeyError):
        return None
    return message
