"""A linear layer of experts stacks their weights and multiplies rows by the weight of one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import EllipsisType

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxpage.layers.matmul import matmul, matmul_by_group
from jaxpage.layers.parameter import (
    Axis,
    Piece,
    Source,
    Stored,
    concatenate,
    parameter,
    stack,
    tensor,
)
from jaxpage.layers.weight_kinds import Grouped, PackedCodes, StoredWeight

MXFP4_GROUP = 32  # inputs that share a scale


@dataclass(frozen=True)
class ExpertLinearSpec:
    """Describes the linear layers of all experts.

    Attributes:
        num_experts: The number of experts.
        num_in: The number of inputs.
        num_out: The number of outputs.
        input_axis: The name of the axis of the inputs.
        output_axis: The name of the axis of the outputs.
        name: The tensor that has the weights of all experts, in checkpoints that stack them.
        transposed: True if that tensor has the weights as [in, out].
        modules: The modules of each expert, in checkpoints that do not stack them; each has an
            equal part of the outputs. Empty if all checkpoints stack them.
        bias: True if there are biases, in the tensor `{name}_bias` [E, out].
        dtype: The type of the parameters.
        aliases: Other names of the tensor that has the weights of all experts.
        in_rows_too: True if that tensor may also have the weights as [out, in].
    """

    num_experts: int
    num_in: int
    num_out: int
    input_axis: str
    output_axis: Axis
    name: str
    transposed: bool
    modules: tuple[tuple[str, ...], ...]
    bias: bool
    dtype: DTypeLike
    aliases: tuple[str, ...] = ()
    in_rows_too: bool = False

    @property
    def num_parts(self) -> int:
        """Returns the number of modules of an expert."""
        return len(self.modules[0]) if self.modules else 1

    @property
    def rows_of_part(self) -> int:
        """Returns the number of outputs of each module."""
        return self.num_out // self.num_parts

    def sources(self, make_source: Callable[[str], Source]) -> list[Source]:
        """Returns the sources of a parameter that has the rows of every expert.

        Args:
            make_source: Gives the source of the module that has this name.
        """
        by_expert = [
            concatenate([make_source(module) for module in modules]) for modules in self.modules
        ]
        return [stack(by_expert)] if by_expert else []

    @property
    def stacked_shape(self) -> tuple[int, int, int]:
        """Returns the shape of the tensor that has the weights of all experts."""
        last = (self.num_in, self.num_out) if self.transposed else (self.num_out, self.num_in)
        return (self.num_experts, *last)

    def declare_bias(self) -> nnx.Param[jax.Array] | None:
        """Declares the biases, or returns None if there are none."""
        if not self.bias:
            return None
        shape = (self.num_experts, self.num_out)
        sources = [tensor(f"{self.name}_bias", *shape)]
        return parameter(
            shape, axes=("expert", self.output_axis), dtype=self.dtype, sources=sources
        )


class ExpertLinear(nnx.Module):
    """Computes `y = x @ kernel[expert].T + bias[expert]`."""

    def __init__(self, spec: ExpertLinearSpec):
        self.spec = spec

        def sources() -> list[Source]:
            separate = spec.sources(
                lambda module: tensor(f"{module}.weight", spec.rows_of_part, spec.num_in)
            )
            stacked = [
                tensor(
                    spec.name, *spec.stacked_shape, transpose=spec.transposed, aliases=spec.aliases
                )
            ]
            if spec.in_rows_too:
                stacked.append(tensor(spec.name, spec.num_experts, spec.num_out, spec.num_in))
            return [*separate, *stacked]

        self.kernel = parameter(
            (spec.num_experts, spec.num_out, spec.num_in),
            axes=("expert", spec.output_axis, spec.input_axis),
            dtype=spec.dtype,
            sources=sources,
        )
        self.bias = spec.declare_bias()

    def weight(self, expert: Int[Array, ""] | EllipsisType) -> StoredWeight:
        """Returns the weight of one expert, or for `...` of all, with one more axis in front."""
        return self.kernel[...][expert]

    def __call__(self, expert: Int[Array, ""], x_PI: Float[Array, "P I"]) -> Float[Array, "P O"]:
        """Multiplies rows by the weight of this expert."""
        y_PO = matmul(x_PI, self.weight(expert))
        return y_PO if self.bias is None else y_PO + self.bias[...][expert][None, :]

    def of_sorted(
        self, x_PI: Float[Array, "P I"], expert_P: Int[Array, "P"], count_E: Int[Array, "E"]
    ) -> Float[Array, "P O"] | None:
        """Multiplies each row by the weight of its expert; see `matmul_by_group`."""
        y_PO = matmul_by_group(x_PI, self.weight(...), expert_P, count_E)
        # Rows that are no expert's have a number past the last one, which JAX clamps; nobody reads
        # them.
        return y_PO if self.bias is None or y_PO is None else y_PO + self.bias[...][expert_P]


class MXFP4ExpertLinear(ExpertLinear):
    """Holds weights of four bits, of which 32 share a scale that is a power of two.

    GPT-OSS stores them in two tensors: `{name}_blocks` [E, out, in / 32, 16] with two numbers in a
    byte, the low nibble first, and `{name}_scales` [E, out, in / 32] with the exponents.
    """

    in_panels = False  # `pack_modules` of `device/packing.py` sets it.
    block_rows = 1

    def __init__(self, spec: ExpertLinearSpec):
        self.spec = spec
        leading = (spec.num_experts, spec.num_out)
        num_groups = spec.num_in // MXFP4_GROUP

        def declare(
            name: str, stored_shape: tuple[int, ...], columns: int, dtype: str, stored: Stored
        ) -> nnx.Param[jax.Array]:
            shape = (*leading, columns)
            source = Source(
                shape,
                (Piece(f"{spec.name}_{name}", stored_shape, shape, (0, 0, 0), stored=stored),),
            )
            axes = ("expert", spec.output_axis, spec.input_axis)
            return parameter(
                shape, axes=axes, dtype=jnp.dtype(dtype), sources=[source], keeps_dtype=True
            )

        blocks = (*leading, num_groups, MXFP4_GROUP // 2)
        self.kernel = declare("blocks", blocks, spec.num_in // 2, "uint8", Stored(("uint8",)))
        exponents = Stored(("uint8",), _powers_of_two, _wrong_exponents)
        # bfloat16 has the exponents of float32, so every scale is exact in it.
        self.scale = declare("scales", (*leading, num_groups), num_groups, "bfloat16", exponents)
        self.bias = spec.declare_bias()

    def weight(self, expert: Int[Array, ""] | EllipsisType) -> StoredWeight:
        """Returns the quantised weight of one expert, or for `...` of all."""
        codes = Grouped(self.kernel[...][expert], self.scale[...][expert], None, "fp4", MXFP4_GROUP)
        spec = self.spec
        return PackedCodes(codes, spec.num_out, spec.num_in) if self.in_panels else codes


def _powers_of_two(exponents: np.ndarray) -> np.ndarray:
    # An exponent is stored with 127 added to it (E8M0 of the MX formats); 255 stands for NaN.
    return np.ldexp(np.float32(1), exponents.astype(np.int32) - 127).astype(np.float32)


def _wrong_exponents(exponents: np.ndarray) -> str | None:
    return "has scales that are not finite" if (exponents == 255).any() else None
