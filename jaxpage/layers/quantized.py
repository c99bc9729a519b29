"""Linear layers and tables with quantised weights take the place of `Linear` and `Embedding`.

No model family knows of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxpage.layers.activations import activate
from jaxpage.layers.embedding import Embedding
from jaxpage.layers.linear import Linear, LinearSpec, Part
from jaxpage.layers.matmul import rows_of
from jaxpage.layers.parameter import Piece, Source, Stored, parameter
from jaxpage.layers.weight_kinds import Grouped, Packed, PackedCodes, Scaled

# The types of the arrays that hold the codes.
CODE_DTYPES = {"int8": "int8", "int4": "uint8", "fp8": "float8_e4m3fn", "fp4": "uint8"}
CODES_PER_BYTE = {"int8": 1, "int4": 2, "fp8": 1, "fp4": 2}


@dataclass(frozen=True)
class StoredArray:
    """Describes one array of a quantised weight as a checkpoint stores it.

    Attributes:
        name: The tensor's name, after that of its module.
        shape: Gives the tensor's shape from the numbers of outputs and inputs.
        dtypes: The types that the tensor may have; see `Stored`.
        decode: Turns the tensor into the array, from its numbers, the number of outputs and the
            number of inputs.
        check: Says what is wrong with the numbers; see `Stored`.
        rounded: True if the array is computed at load from the checkpoint's unquantised weight.
        beside: Another tensor, whose numbers `decode` gets last; None if there is none.
        aliases: Other names of the tensor.
    """

    name: str
    shape: Callable[[int, int], tuple[int, ...]]
    dtypes: tuple[str, ...]
    decode: Callable[..., np.ndarray] = lambda numbers, num_out, num_in: numbers
    check: Callable[[np.ndarray], str | None] | None = None
    rounded: bool = False
    beside: StoredArray | None = None
    aliases: tuple[str, ...] = ()

    def source(
        self,
        num_out: int,
        num_in: int,
        shape: tuple[int, ...],
        *,
        repeats: int = 1,
        transposed: bool = False,
        modules: tuple[str, ...] = (),
    ) -> Callable[[str], Source]:
        """Returns a function that gives the source of a module, of one shape for all, by its name.

        Args:
            num_out: The number of outputs of each module.
            num_in: The number of inputs.
            shape: The shape of a module's decoded array.
            repeats: The number of times that each row is repeated in it.
            transposed: True if the checkpoint has weights as [in, out].
            modules: Other names of the module, if it is one.
        """
        stored_shape = self.shape(num_out, num_in)
        # Codes of quantised checkpoints are decoded by the format, which knows their order.
        transpose = transposed and self.rounded
        stored_shape = stored_shape[::-1] if transpose else stored_shape

        def decode(numbers: np.ndarray, *others: np.ndarray) -> np.ndarray:
            decoded = self.decode(numbers, num_out, num_in, *others)
            return decoded if repeats == 1 else np.repeat(decoded, repeats, axis=0)[:num_out]

        # All modules share one object, because a model may have 100,000 of them.
        stored = Stored(self.dtypes, decode, self.check)

        def of_module(module: str) -> Source:
            # The first is the name of the piece itself.
            aliases = tuple(
                f"{name}.{end}" for name in (module, *modules) for end in (self.name, *self.aliases)
            )[1:]
            piece = Piece(
                f"{module}.{self.name}",
                stored_shape,
                shape,
                (0, 0),
                transpose,
                aliases=aliases,
                stored=stored,
            )
            if (other := self.beside) is None:
                return Source(shape, (piece,))
            of_other = Stored(other.dtypes, check=other.check)
            beside = Piece(
                f"{module}.{other.name}",
                other.shape(num_out, num_in),
                (0, 0),
                (0, 0),
                stored=of_other,
            )
            return Source(
                shape, (piece._replace(stored=replace(stored, beside=(beside.name,))), beside)
            )

        return of_module


@dataclass(frozen=True)
class WeightFormat:
    """Describes how the weight of a linear layer is quantised and stored.

    Attributes:
        code: The code of the numbers; see `pallas_kernels.QuantizedWeight`.
        values: The array of the codes.
        scale: The array of the scales.
        zero: The array of the zeros, or None.
        group_size: The number of inputs that share a scale; None if all do.
        block_rows: The number of outputs that share a scale, in blocks.
        int8_inputs: True if inputs are rounded to eight bits too (W8A8), each token with its own
            scale.
        minimum: The array of minima, which take the place of zeros; None if there are none.
        scale_dtype: The type of the arrays of scales and minima.
    """

    code: str
    values: StoredArray
    scale: StoredArray
    zero: StoredArray | None = None
    group_size: int | None = None
    block_rows: int = 1
    int8_inputs: bool = False
    minimum: StoredArray | None = None
    scale_dtype: str = "float32"

    @property
    def is_rounded(self) -> bool:
        """Returns whether weights are rounded at load, because the checkpoint is not quantised."""
        return self.values.rounded


class Quantized(nnx.Module):
    """Holds the arrays of a quantised weight, for a linear layer or a table.

    Attributes:
        in_panels: True if the arrays are in panels (`device.packing`).
        aliases: Other names of the module.
    """

    in_panels = False
    aliases: tuple[str, ...] = ()
    block_rows = 1  # here the scale of a block of outputs is repeated for each

    def _declare_all(self, spec: LinearSpec, form: WeightFormat) -> None:
        self.spec = spec
        self.code = form.code
        self.group_size = form.group_size or spec.num_in
        self.int8_inputs = form.int8_inputs
        num_groups = -(-spec.num_in // self.group_size)
        self.kernel = self._declare(
            form.values, spec.num_in // CODES_PER_BYTE[form.code], CODE_DTYPES[form.code]
        )
        self.scale = self._declare(
            form.scale, num_groups, form.scale_dtype, repeats=form.block_rows
        )
        self.zero = self._declare(form.zero, num_groups) if form.zero else None
        self.minimum = (
            self._declare(form.minimum, num_groups, form.scale_dtype) if form.minimum else None
        )

    def _declare(
        self, array: StoredArray, num_columns: int, dtype: str = "float32", repeats: int = 1
    ) -> nnx.Param[jax.Array]:
        spec = self.spec

        def source_of(module: str, num_rows: int) -> Source:
            shape = num_rows, num_columns
            return array.source(
                num_rows,
                spec.num_in,
                shape,
                repeats=repeats,
                transposed=spec.transposed,
                modules=self.aliases,
            )(module)

        return parameter(
            (spec.num_out, num_columns),
            # One scale for all inputs of an output is whole on each device that has a part of them.
            axes=(spec.output_axis, spec.input_axis if num_columns > 1 else None),
            dtype=jnp.dtype(dtype),
            sources=spec.sources(source_of),
            keeps_dtype=True,
        )

    @property
    def weight(self) -> Scaled | Grouped | Packed | PackedCodes:
        """Returns the weight in the kind that `matmul` takes."""
        spec = self.spec
        if self.int8_inputs:
            values, scale_O = self.kernel[...], self.scale[...][:, 0]
            if self.in_panels:
                return Packed(values, spec.num_out, spec.num_in, scale_O)
            return Scaled(values, scale_O)
        zero, minimum = (None if each is None else each[...] for each in (self.zero, self.minimum))
        codes = Grouped(
            self.kernel[...], self.scale[...], zero, self.code, self.group_size, minimum
        )
        return PackedCodes(codes, spec.num_out, spec.num_in) if self.in_panels else codes


class QuantizedLinear(Quantized, Linear):
    """Takes the place of a `Linear` of the same spec."""

    def __init__(self, spec: LinearSpec, form: WeightFormat):
        self._declare_all(spec, form)
        self.bias = spec.declare("bias") if spec.bias else None


class QuantizedEmbedding(Quantized, Embedding):
    """Takes the place of an `Embedding` that a checkpoint has."""

    def __init__(self, whole: Embedding, form: WeightFormat):
        assert whole.name is not None
        table = whole.table.get_value()
        self.name = whole.name
        self.aliases = whole.aliases
        self.is_head = whole.is_head
        self.axis = whole.axis
        self.bias = whole.bias
        part = Part(table.shape[0], whole.axis, whole.name)
        self._declare_all(LinearSpec(table.shape[1], (part,), "embed", False, table.dtype), form)

    @property
    def num_rows(self) -> int:
        """Returns the number of rows."""
        return self.spec.num_out

    def __call__(self, ids_T: Int[Array, "T"]) -> Float[Array, "T D"]:
        """Returns the dequantised rows of these ids."""
        return rows_of(self.weight, ids_T).astype(self.spec.dtype)


class LinearOfParts(Linear):
    """Takes the place of a `Linear` whose parts have weights of several kinds.

    Each part is a product of its own.

    Attributes:
        parts: The layers of the parts, one after the other.
    """

    def __init__(self, spec: LinearSpec, forms: Sequence[WeightFormat | None]):
        self.spec = spec
        specs = [replace(spec, parts=(part,), fused=None) for part in spec.parts]
        self.parts = nnx.List(
            [
                QuantizedLinear(part_spec, form) if form else Linear(part_spec)
                for part_spec, form in zip(specs, forms, strict=True)
            ]
        )

    def __call__(
        self, x_TI: Float[Array, "T I"], activation: str | None = None
    ) -> Float[Array, "T O"]:
        """Returns the joined results of the parts, with the tokens' adapters; see `Linear`."""
        # Each part adds its own bias.
        y_TO = jnp.concatenate([part(x_TI) for part in self.parts], axis=1)
        return activate(y_TO if self.lora is None else self.lora(x_TI, y_TO), activation)
