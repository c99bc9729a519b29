"""A linear layer may join several products of a checkpoint in one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxpage.layers.activations import activate, name_in_kernels
from jaxpage.layers.lora import LoRA
from jaxpage.layers.matmul import matmul, matmul_and_finish
from jaxpage.layers.parameter import Axis, Source, concatenate, parameter, tensor
from jaxpage.layers.weight_kinds import StoredWeight


@dataclass(frozen=True)
class Part:
    """Describes rows of a weight, hence columns of a result, that come from one checkpoint module.

    Attributes:
        rows: The number of rows.
        axis: The name of their axis.
        name: The module's name; None where the checkpoint has the rows only with the other parts.
        each: The number of rows of each section, where sections are divided among devices one by
            one; empty if the part is divided as one.
    """

    rows: int
    axis: str | None
    name: str | None
    each: tuple[int, ...] = ()


@dataclass(frozen=True)
class LinearSpec:
    """Describes a linear layer, whatever kind of weight it has.

    Attributes:
        num_in: The number of inputs.
        parts: The parts of the weight, one below the other.
        input_axis: The name of the axis of the inputs.
        bias: True if the layer has a bias.
        dtype: The type of the parameters.
        fused: The module that has all parts in this order, in checkpoints that fuse them.
        transposed: True if the checkpoint has weights as [in, out] (GPT-2's Conv1D).
        multiplied: False if only the weight is used and no input is multiplied by it (absorption);
            such a layer takes no adapters.
        shared: True if several layers of the model have this one; it takes no adapters, because
            those that files name are of one layer.
    """

    num_in: int
    parts: tuple[Part, ...]
    input_axis: str | None
    bias: bool
    dtype: DTypeLike
    fused: str | None = None
    transposed: bool = False
    multiplied: bool = True
    shared: bool = False

    @property
    def takes_adapters(self) -> bool:
        """Returns whether adapters can be added to the product."""
        return self.multiplied and not self.shared

    def declare(self, name: str, *columns: int) -> nnx.Param[jax.Array]:
        """Declares a parameter [out] or [out, in] that has this name in its checkpoint modules."""

        def source_of(module: str, rows: int) -> Source:
            transpose = self.transposed and bool(columns)
            shape = (rows, *columns)
            return tensor(
                f"{module}.{name}", *(shape[::-1] if transpose else shape), transpose=transpose
            )

        axes = (self.output_axis, *(self.input_axis for _ in columns))
        return parameter(
            (self.num_out, *columns), axes=axes, dtype=self.dtype, sources=self.sources(source_of)
        )

    def sources(self, make_source: Callable[[str, int], Source]) -> list[Source]:
        """Returns the sources of a parameter that has a row for each output.

        Args:
            make_source: Gives the source of a module's rows, from its name and their number.
        """
        separate = [
            make_source(part.name, part.rows) for part in self.parts if part.name is not None
        ]
        together = [make_source(self.fused, self.num_out)] if self.fused else []
        return [concatenate(separate), *together] if separate else together

    @property
    def num_out(self) -> int:
        """Returns the number of outputs."""
        return sum(part.rows for part in self.parts)

    @property
    def output_axis(self) -> Axis:
        """Returns the name of the axis of the outputs, or its parts."""
        axis_parts = tuple(
            (part.axis, rows) for part in self.parts for rows in part.each or (part.rows,)
        )
        return axis_parts[0][0] if len(axis_parts) == 1 else axis_parts


class Linear(nnx.Module):
    """Computes `y = x @ kernel.T + bias`. The kernel is stored [out, in]; see `matmul`.

    Attributes:
        spec: The description of the layer.
        kernel: The weight.
        bias: The bias, or None.
        lora: The adapters, or None. They are added to the product, whatever kind of weight it has.
        result: The type of the product and of its sums; None for the type of the input.
    """

    lora: LoRA | None = None
    result: DTypeLike | None = None

    def __init__(self, spec: LinearSpec):
        self.spec = spec
        self.kernel = spec.declare("weight", spec.num_in)
        self.bias = spec.declare("bias") if spec.bias else None

    @property
    def weight(self) -> StoredWeight:
        """Returns the weight as it is stored."""
        return self.kernel[...]

    def __call__(
        self, x_TI: Float[Array, "T I"], activation: str | None = None
    ) -> Float[Array, "T O"]:
        """Returns the product, with the bias and the tokens' adapters.

        Args:
            x_TI: The inputs.
            activation: The name of the function that follows; None for none.
        """
        y_TO = self._in_one_call(x_TI, activation)
        if y_TO is not None:
            return y_TO
        y_TO = matmul(x_TI, self.weight, result=self.result)
        if self.bias is not None:
            # Axes are written out everywhere: tests forbid JAX to add them
            # (`numpy_rank_promotion`).
            y_TO = y_TO + self.bias[...][None, :]
        return activate(y_TO if self.lora is None else self.lora(x_TI, y_TO), activation)

    def _in_one_call(self, x_TI: jax.Array, activation: str | None) -> jax.Array | None:
        """Returns the result where a kernel computes it at once; None where none does."""
        name = None if activation is None else name_in_kernels(activation)
        is_known = activation is None or name is not None
        # Adapters come before the activation. Without a bias and an activation `matmul` is the
        # call.
        if self.lora is not None or not is_known or (self.bias is None and activation is None):
            return None
        bias_O = None if self.bias is None else self.bias[...]
        return matmul_and_finish(x_TI, self.weight, bias_O, name, result=self.result)

    def add_lora(self, num_slots: int, rank: int) -> None:
        """Adds slots for adapters of at most this rank."""
        spec = self.spec
        rows = tuple(part.rows for part in spec.parts)
        axes = (spec.input_axis, spec.output_axis)
        self.lora = LoRA(num_slots, rank, spec.num_in, rows, axes, spec.dtype)


def linear(
    num_in: int,
    *parts: Part,
    input_axis: str | None,
    bias: bool,
    dtype: DTypeLike,
    fused: str | None = None,
    transposed: bool = False,
) -> Linear:
    """Returns a linear layer of this description; see `LinearSpec`."""
    return Linear(LinearSpec(num_in, parts, input_axis, bias, dtype, fused, transposed))
