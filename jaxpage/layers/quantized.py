"""The linear layer with a weight of few bits. No model family knows of it: it takes the place of a `Linear`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxpage.layers.linear import Linear, LinearSpec
from jaxpage.layers.parameter import Piece, Source, Stored, parameter
from jaxpage.layers.product import Grouped, Scaled

CODE_DTYPES = {"int8": "int8", "int4": "uint8", "fp8": "float8_e4m3fn", "fp4": "uint8"}  # of the arrays that hold them
CODES_PER_BYTE = {"int8": 1, "int4": 2, "fp8": 1, "fp4": 2}


@dataclass(frozen=True)
class StoredArray:
    """One array of a quantised weight, in a checkpoint.

    name: of the tensor, behind that of its module. shape: of the tensor, for so many outputs and inputs.
    dtypes, decode, check: see `Stored`; `decode` gets the numbers of outputs and inputs too.
    transposed: whether it is `[in, out]` in a checkpoint that has weights so.
    """

    name: str
    shape: Callable[[int, int], tuple[int, ...]]
    dtypes: tuple[str, ...]
    decode: Callable[[np.ndarray, int, int], np.ndarray] = lambda numbers, num_out, num_in: numbers
    check: Callable[[np.ndarray], str | None] | None = None
    transposed: bool = False


@dataclass(frozen=True)
class WeightFormat:
    """How the weight of a linear layer is quantised, and stored.

    code: see `pallas_kernels.QuantizedWeight`. group_size: inputs that share a scale; None: all.
    int8_inputs: whether inputs are rounded to eight bits too (W8A8), each token with a scale of its own.
    """

    code: str
    values: StoredArray
    scale: StoredArray
    zero: StoredArray | None = None
    group_size: int | None = None
    int8_inputs: bool = False


class QuantizedLinear(Linear):
    """In place of a `Linear` of the same spec."""

    def __init__(self, spec: LinearSpec, form: WeightFormat):
        self.spec = spec
        self.code, self.group_size, self.int8_inputs = form.code, form.group_size or spec.num_in, form.int8_inputs
        num_groups = -(-spec.num_in // self.group_size)
        self.kernel = self._declare(form.values, spec.num_in // CODES_PER_BYTE[form.code], CODE_DTYPES[form.code])
        self.scale = self._declare(form.scale, num_groups)
        self.zero = self._declare(form.zero, num_groups) if form.zero else None
        self.bias = spec.declare("bias") if spec.bias else None

    def _declare(self, array: StoredArray, num_columns: int, dtype: str = "float32") -> nnx.Param[jax.Array]:
        spec = self.spec

        def one(module: str, num_rows: int) -> Source:
            transpose, stored_shape = spec.transposed and array.transposed, array.shape(num_rows, spec.num_in)
            decode = array.decode
            stored = Stored(array.dtypes, lambda numbers: decode(numbers, num_rows, spec.num_in), array.check)
            shape = (num_rows, num_columns)
            stored_shape = stored_shape[::-1] if transpose else stored_shape
            return Source(
                shape, (Piece(f"{module}.{array.name}", stored_shape, shape, (0, 0), transpose, stored=stored),)
            )

        return parameter(
            (spec.num_out, num_columns),
            axes=(spec.output_axis, spec.input_axis),
            dtype=jnp.dtype(dtype),
            sources=spec.sources(one),
            keeps_dtype=True,
        )

    @property
    def weight(self) -> Scaled | Grouped:
        if self.int8_inputs:
            return Scaled(self.kernel[...], self.scale[...][:, 0])
        zero = None if self.zero is None else self.zero[...]
        return Grouped(self.kernel[...], self.scale[...], zero, self.code, self.group_size)
