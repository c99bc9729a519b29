"""Puts layers with weights in panels in the place of others; see `layers.packed`."""

from __future__ import annotations

from flax import nnx

from jaxpage.layers.embedding import Embedding
from jaxpage.layers.expert_linear import ExpertLinear
from jaxpage.layers.linear import Linear
from jaxpage.layers.packed import PackedEmbedding, PackedExpertLinear, PackedLinear
from jaxpage.models.replacing import Path, replace_modules


def pack_modules(module: nnx.Module) -> dict[Path, tuple[int, int]]:
    """Replaces all layers inside whose weights can be in panels.

    It is applied last, to a module whose other replacements are made, because it visits what they
    put in.

    Returns:
        The numbers of outputs and inputs of each weight that is to be packed, by the path of its
        parameter.
    """
    packed: dict[Path, tuple[int, int]] = {}

    def replacement(path: Path, each: nnx.Module) -> nnx.Module | None:
        if type(each) is Linear and each.spec.multiplied:
            packed[*path, "kernel"] = each.spec.num_out, each.spec.num_in
            return PackedLinear(each)
        if type(each) is ExpertLinear:
            packed[*path, "kernel"] = each.spec.num_out, each.spec.num_in
            return PackedExpertLinear(each)
        if type(each) is Embedding and each.axis == "vocab":
            table = PackedEmbedding(each)
            packed[*path, "table"] = table.size
            return table
        return None

    replace_modules(module, replacement)
    return packed
