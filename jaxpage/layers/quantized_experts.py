"""Keeps the weights of experts in memory as they are stored, quantised.

A product takes the weight of one expert.
"""

from __future__ import annotations

from dataclasses import replace
from types import EllipsisType

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Int

from jaxpage.layers.expert_linear import ExpertLinear, ExpertLinearSpec
from jaxpage.layers.parameter import Piece, Source, Stored, parameter
from jaxpage.layers.quantized import CODE_DTYPES, CODES_PER_BYTE, StoredArray, WeightFormat
from jaxpage.layers.weight_kinds import Grouped, Packed, PackedCodes, Scaled


class QuantizedExpertLinear(ExpertLinear):
    """Takes the place of an `ExpertLinear` of the same spec.

    Codes of float8 are kept as their bits (see `pallas_kernels.QuantizedWeight`), and the scale of
    a block of outputs is kept once.
    """

    in_panels = False

    def __init__(self, spec: ExpertLinearSpec, form: WeightFormat):
        self.spec = spec
        self.code = form.code
        self.group_size = form.group_size or spec.num_in
        self.int8_inputs = form.int8_inputs
        self.block_rows = form.block_rows
        num_groups = -(-spec.num_in // self.group_size)
        values = form.values
        dtype = CODE_DTYPES[form.code]
        if form.code == "fp8":
            dtype = "uint8"
            decode = values.decode
            values = replace(values, decode=lambda *arguments: decode(*arguments).view(np.uint8))
        self.kernel = self._declare(values, spec.num_in // CODES_PER_BYTE[form.code], dtype)
        self.scale = self._declare(
            form.scale, num_groups, form.scale_dtype, block_rows=form.block_rows
        )
        self.zero = self._declare(form.zero, num_groups) if form.zero else None
        self.minimum = (
            self._declare(form.minimum, num_groups, form.scale_dtype) if form.minimum else None
        )
        self.bias = spec.declare_bias()

    def _declare(
        self, array: StoredArray, num_columns: int, dtype: str = "float32", *, block_rows: int = 1
    ) -> nnx.Param[jax.Array]:
        spec = self.spec
        rows = -(-spec.rows_of_part // block_rows)
        shape = (spec.num_experts, rows * spec.num_parts, num_columns)

        def sources() -> list[Source]:
            source = array.source(spec.rows_of_part, spec.num_in, (rows, num_columns))
            return [
                *spec.sources(source),
                # Quantised checkpoints store each expert apart; stacked ones are rounded while they
                # are loaded.
                *([self._of_stacked(array, shape)] if array.rounded else []),
            ]

        return parameter(
            shape,
            # The parts of that axis are counted in outputs, and would not add up to rows of blocks.
            axes=("expert", spec.output_axis if block_rows == 1 else None, spec.input_axis),
            dtype=jnp.dtype(dtype),
            sources=sources,
            keeps_dtype=True,
        )

    def _of_stacked(self, array: StoredArray, shape: tuple[int, ...]) -> Source:
        """Returns the source that is one tensor with the unquantised weights of all experts."""
        spec = self.spec

        def decode(numbers: np.ndarray) -> np.ndarray:
            return np.stack([array.decode(each, spec.num_out, spec.num_in) for each in numbers])

        stored = Stored(array.dtypes, decode)
        return Source(
            shape,
            (
                Piece(
                    spec.name,
                    spec.stacked_shape,
                    shape,
                    (0, 0, 0),
                    spec.transposed,
                    aliases=spec.aliases,
                    stored=stored,
                ),
            ),
        )

    def weight(
        self, expert: Int[Array, ""] | EllipsisType
    ) -> Scaled | Grouped | Packed | PackedCodes:
        """Returns the quantised weight of one expert, or for `...` of all."""
        spec = self.spec
        values = self.kernel[...][expert]
        scale = self.scale[...][expert]
        if self.int8_inputs:
            scale_O = scale[..., 0]
            if self.in_panels:
                return Packed(values, spec.num_out, spec.num_in, scale_O)
            return Scaled(values, scale_O)
        scale_row_O = None
        # A kernel for all experts finds the scale of an output by its row. For one expert scales
        # are repeated, which is small beside its codes.
        if self.block_rows > 1 and expert is ...:
            scale_row_O = jnp.asarray(self._block_of_output())
        elif self.block_rows > 1:
            scale = scale[self._block_of_output()]
        zero, minimum = (
            None if each is None else each[...][expert] for each in (self.zero, self.minimum)
        )
        codes = Grouped(values, scale, zero, self.code, self.group_size, minimum, scale_row_O)
        return PackedCodes(codes, spec.num_out, spec.num_in) if self.in_panels else codes

    def _block_of_output(self) -> np.ndarray:
        """Returns the block of each output. Each part begins with a block of its own."""
        spec = self.spec
        output = np.arange(spec.num_out)
        part, row = np.divmod(output, spec.rows_of_part)
        return part * -(-spec.rows_of_part // self.block_rows) + row // self.block_rows
