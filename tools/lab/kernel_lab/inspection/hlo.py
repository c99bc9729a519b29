"""Reads optimised HLO: which large arrays a function copies, which Pallas kernels it calls."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

# These name an array that is already there, or hold what computations inside them make.
_VIEWS = frozenset(
    (
        "parameter",
        "tuple",
        "get-tuple-element",
        "bitcast",
        "while",
        "conditional",
        "call",
        "opt-barrier",
        "after-all",
    )
)
_IN_PLACE = frozenset(("scatter", "dynamic-update-slice"))
_KERNEL_TARGETS = ("__gpu$xla.gpu.triton", "mosaic_gpu_v2", "mosaic_gpu", "tpu_custom_call")
_ARRAY = re.compile(r"\b(pred|token|[a-z]+?\d+\w*)\[([\d,]*)\]")
_INSTRUCTION = re.compile(r"^\s*(ROOT )?%?([\w.\-$]+) = (.*)$")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-$]+) \(.*\{\s*$")


@dataclass(frozen=True)
class Instruction:
    """An instruction of HLO."""

    name: str
    opcode: str
    sizes: tuple[int, ...]  # bytes of its result, or of each part of it
    is_root: bool
    arguments: str  # operands and attributes

    @property
    def kernel(self) -> str | None:
        """Returns the name of the Pallas kernel that the instruction calls, or None."""
        target = (
            _attribute(self.arguments, "custom_call_target")
            if self.opcode == "custom-call"
            else None
        )
        if target not in _KERNEL_TARGETS:
            return None
        # The operation's name is "jit(f)/.../name/pallas_call", or ends in mpmd_map, which holds
        # Mosaic's kernels.
        path = (_attribute(self.arguments, "op_name") or "").split("/")
        return path[-2] if len(path) > 1 else target


@dataclass
class Computation:
    """A computation of HLO: the module's entry, the body of a loop, or a fusion."""

    name: str
    instructions: list[Instruction] = field(default_factory=list)


@dataclass(frozen=True)
class Made:
    """An array that an instruction makes."""

    name: str
    how: str  # the instruction's opcode, or the one that a fusion ends in
    num_bytes: int


def computations(text: str) -> dict[str, Computation]:
    """Returns the computations by name, from the text of `jax.stages.Compiled.as_text`."""
    computations_by_name: dict[str, Computation] = {}
    current: Computation | None = None
    for line in text.splitlines():
        if match := _INSTRUCTION.match(line):
            if current is not None:
                current.instructions.append(_instruction(match))
        elif match := _COMPUTATION.match(line):
            current = computations_by_name[match[1]] = Computation(match[1])
        elif line.startswith("}"):
            current = None
    return computations_by_name


def arrays_made(computations: Mapping[str, Computation], at_least: int) -> list[Made]:
    """Returns the arrays of at least this many bytes that a function makes.

    It may make them by a copy, a slice, a transposition or a sum. Arrays that it updates in place
    (a scatter, a kernel's aliased output) are not among them. Where no array as large as a layer's
    pages is made, none is copied.
    """
    fused = {
        name
        for each in computations.values()
        for item in each.instructions
        for name in _fusions(item)
    }
    return [
        array
        for computation in computations.values()
        if computation.name not in fused
        for item in computation.instructions
        for array in _makes(item, computations, at_least)
    ]


def kernel_calls(computations: Mapping[str, Computation]) -> Counter[str]:
    """Returns how often each Pallas kernel is called, by name; a call inside a loop counts once."""
    every = (item.kernel for each in computations.values() for item in each.instructions)
    return Counter(name for name in every if name is not None)


def _makes(
    item: Instruction, computations: Mapping[str, Computation], at_least: int
) -> Iterator[Made]:
    large = max(item.sizes, default=0)
    if (
        large < at_least
        or item.opcode in _VIEWS
        or item.opcode in _IN_PLACE
        or item.opcode.endswith(("-done", "-update"))
    ):
        return
    if item.opcode == "custom-call" and "output_to_operand_aliasing" in item.arguments:
        # A kernel with large outputs both new and aliased would pass here; the temporary memory
        # shows it.
        return
    if item.opcode == "fusion":
        for name in _fusions(item):
            for ending in _endings(computations[name]):
                if max(ending.sizes) >= at_least and ending.opcode not in _IN_PLACE:
                    yield Made(item.name, ending.opcode, max(ending.sizes))
        return
    yield Made(item.name, item.opcode, large)


def _endings(computation: Computation) -> list[Instruction]:
    """Returns the instructions that make the results of a fusion.

    They are its root, or the operands of a root that is a tuple; bitcasts are skipped.
    """
    by_name = {item.name: item for item in computation.instructions}
    (root,) = (item for item in computation.instructions if item.is_root)
    endings = [root]
    if root.opcode == "tuple":
        endings = [by_name[name] for name in _operands(root)]
    seen = []
    for ending in endings:
        while ending.opcode == "bitcast":
            ending = by_name[_operands(ending)[0]]
        seen.append(ending)
    return seen


def _operands(item: Instruction) -> list[str]:
    return re.findall(r"%([\w.\-$]+)", item.arguments[: _closing(item.arguments)])


def _fusions(item: Instruction) -> list[str]:
    return re.findall(r"\bcalls=%?([\w.\-$]+)", item.arguments) if item.opcode == "fusion" else []


def _instruction(match: re.Match[str]) -> Instruction:
    text = match[3]
    end = _closing(text) + 1 if text.startswith("(") else text.index(" ")
    opcode, _, operands = text[end:].lstrip().partition("(")
    # The result of an asynchronous start holds its operands, in a tuple of their own.
    begin = _closing(text[1:]) + 2 if text.startswith("((") else 0
    sizes = tuple(_bytes(kind, shape) for kind, shape in _ARRAY.findall(text[begin:end]))
    return Instruction(match[2], opcode, sizes, bool(match[1]), "(" + operands)


def _closing(text: str) -> int:
    """Returns the position where the parenthesis that opens the text is closed."""
    depth = 0
    for index, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return index
    return len(text)


def _bytes(kind: str, shape: str) -> int:
    bits = re.search(r"\d+", kind)
    width = 1 if kind == "pred" or bits is None else max(1, int(bits[0]) // 8)
    return width * math.prod(int(size) for size in shape.split(",") if size)


def _attribute(text: str, name: str) -> str | None:
    match = re.search(rf'\b{name}="([^"]*)"', text)
    return match[1] if match else None
