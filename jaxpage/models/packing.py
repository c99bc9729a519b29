"""Puts layers with weights in panels in the place of others; see `layers.packed`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flax import nnx

from jaxpage.layers.embedding import Embedding
from jaxpage.layers.expert_linear import ExpertLinear
from jaxpage.layers.linear import Linear
from jaxpage.layers.packed import PackedEmbedding, PackedExpertLinear, PackedLinear
from jaxpage.layers.quantized import QuantizedLinear
from jaxpage.layers.quantized_experts import QuantizedExpertLinear
from jaxpage.models.replacing import Path, replace_modules


def pack_modules(module: nnx.Module, takes: Callable[[Any], bool]) -> dict[Path, tuple[int, int]]:
    """Replaces all layers inside whose weights can be in panels.

    It is applied last, to a module whose other replacements are made, because it visits what they
    put in.

    Args:
        module: The module.
        takes: Says whether weights of a type can be in panels.

    Returns:
        The numbers of outputs and inputs of each weight that is to be packed, by the path of its
        parameter.
    """
    packed: dict[Path, tuple[int, int]] = {}

    def replacement(path: Path, each: nnx.Module) -> nnx.Module | None:
        if isinstance(each, Linear) and _is_plain(each, takes) and each.spec.multiplied:
            packed[*path, "kernel"] = each.spec.num_out, each.spec.num_in
            return PackedLinear(each)
        if isinstance(each, ExpertLinear) and _is_plain(each, takes):
            packed[*path, "kernel"] = each.spec.num_out, each.spec.num_in
            return PackedExpertLinear(each)
        if type(each) is Embedding and each.axis == "vocab" and takes(each.table.get_value().dtype):
            table = PackedEmbedding(each)
            packed[*path, "table"] = table.size
            return table
        return None

    replace_modules(module, replacement)
    return packed


def _is_plain(each: Linear | ExpertLinear, takes: Callable[[Any], bool]) -> bool:
    """Returns whether a layer's weight is an array as it is, or of int8 with inputs of int8."""
    is_known = type(each) in (Linear, ExpertLinear) or (
        isinstance(each, QuantizedLinear | QuantizedExpertLinear) and each.int8_inputs
    )
    return is_known and takes(each.kernel.get_value().dtype)
