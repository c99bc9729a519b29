"""Puts layers with weights in panels in the place of others; see `layers.packed`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from flax import nnx

from jaxpage.layers import Embedding, Linear
from jaxpage.layers.expert_linear import ExpertLinear, MXFP4ExpertLinear
from jaxpage.layers.packed import PackedEmbedding, PackedExpertLinear, PackedLinear
from jaxpage.layers.quantized import Quantized
from jaxpage.layers.quantized_experts import QuantizedExpertLinear
from jaxpage.models.parameters.replacing import Path, replace_modules

Codes = Quantized | QuantizedExpertLinear | MXFP4ExpertLinear


class Packing(NamedTuple):
    """Says how an array [..., rows, columns] is packed.

    Attributes:
        num_rows: The number of rows, which are outputs of a layer.
        num_columns: The number of columns.
        numbers: The numbers of a word.
    """

    num_rows: int
    num_columns: int
    numbers: int


def pack_modules(
    module: nnx.Module, numbers_of_word: Callable[[Any], int | None]
) -> dict[Path, Packing]:
    """Replaces all layers inside whose weights can be in panels.

    It is applied last, to a module whose other replacements are made, because it visits what they
    put in. Layers with weights of few bits are not replaced, but know then that these are in
    panels.

    Args:
        module: The module.
        numbers_of_word: Gives the numbers of a word of a type; None if it cannot be in panels.

    Returns:
        How each array is to be packed, by the path of its parameter.
    """
    packed: dict[Path, Packing] = {}

    def note(path: Path, parameter: nnx.Param[Any], numbers: int) -> None:
        num_rows, num_columns = parameter.get_value().shape[-2:]
        packed[path] = Packing(num_rows, num_columns, numbers)

    def replacement(path: Path, each: nnx.Module) -> nnx.Module | None:
        if isinstance(each, Linear) and not each.spec.multiplied:
            return None
        if isinstance(each, Codes) and not getattr(each, "int8_inputs", False):
            each.in_panels = True
            note((*path, "kernel"), each.kernel, 1)
            for name in () if each.block_rows > 1 else ("scale", "zero", "minimum"):
                if (parameter := getattr(each, name, None)) is not None:
                    note((*path, name), parameter, 1)
            return None
        if isinstance(each, Embedding) and type(each) is Embedding and each.axis == "vocab":
            numbers = numbers_of_word(each.table.get_value().dtype)
            if numbers is None:
                return None
            note((*path, "table"), each.table, numbers)
            return PackedEmbedding(each)
        if not isinstance(each, Linear | ExpertLinear) or not hasattr(each, "kernel"):
            return None
        numbers = numbers_of_word(each.kernel.get_value().dtype)
        if numbers is None:
            return None
        note((*path, "kernel"), each.kernel, numbers)
        return PackedLinear(each) if isinstance(each, Linear) else PackedExpertLinear(each)

    replace_modules(module, replacement)
    return packed
