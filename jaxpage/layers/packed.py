"""Linear layers and tables with weights in panels take the place of `Linear` and `Embedding`.

A kernel for CPUs multiplies by such a weight, for any number of rows. No model family knows of
them. A parameter keeps its path and its declaration; only its array is in panels.
"""

from __future__ import annotations

from types import EllipsisType

from jaxtyping import Array, Float, Int

from jaxpage.layers.embedding import Embedding
from jaxpage.layers.expert_linear import ExpertLinear
from jaxpage.layers.linear import Linear
from jaxpage.layers.matmul import rows_of
from jaxpage.layers.weight_kinds import Packed


class PackedLinear(Linear):
    """Takes the place of a `Linear`."""

    def __init__(self, whole: Linear):
        self.spec, self.kernel, self.bias = whole.spec, whole.kernel, whole.bias
        self.lora, self.result = whole.lora, whole.result

    @property
    def weight(self) -> Packed:
        """Returns the weight in panels."""
        return Packed(self.kernel[...], self.spec.num_out, self.spec.num_in)


class PackedEmbedding(Embedding):
    """Takes the place of an `Embedding` whose rows are tokens.

    Attributes:
        size: The numbers of rows and of columns.
    """

    def __init__(self, whole: Embedding):
        self.name, self.axis, self.table = whole.name, whole.axis, whole.table
        self.bias = whole.bias
        num_rows, width = whole.table.get_value().shape
        self.size = (num_rows, width)

    @property
    def num_rows(self) -> int:
        """Returns the number of rows."""
        return self.size[0]

    @property
    def weight(self) -> Packed:
        """Returns the table in panels."""
        return Packed(self.table[...], *self.size)

    def __call__(self, ids_T: Int[Array, "T"]) -> Float[Array, "T D"]:
        """Returns the rows of these ids."""
        return rows_of(self.weight, ids_T)


class PackedExpertLinear(ExpertLinear):
    """Takes the place of an `ExpertLinear`."""

    def __init__(self, whole: ExpertLinear):
        self.spec, self.kernel, self.bias = whole.spec, whole.kernel, whole.bias

    def weight(self, expert: Int[Array, ""] | EllipsisType) -> Packed:
        """Returns the weight of one expert in panels, or for `...` of all."""
        return Packed(self.kernel[...][expert], self.spec.num_out, self.spec.num_in)
