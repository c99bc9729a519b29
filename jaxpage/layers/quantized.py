"""Linear layers and tables with weights of few bits. No model family knows of them: they take the place of `Linear` and `Embedding`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxpage.layers.embedding import Embedding
from jaxpage.layers.linear import Linear, LinearSpec, Part
from jaxpage.layers.parameter import Piece, Source, Stored, parameter
from jaxpage.layers.product import product, rows_of
from jaxpage.layers.weight_kinds import Grouped, Scaled

# of the arrays that hold them
CODE_DTYPES = {"int8": "int8", "int4": "uint8", "fp8": "float8_e4m3fn", "fp4": "uint8"}
CODES_PER_BYTE = {"int8": 1, "int4": 2, "fp8": 1, "fp4": 2}


@dataclass(frozen=True)
class StoredArray:
    """One array of a quantised weight, as a checkpoint stores it.

    name: the tensor's name, after that of its module.
    shape: gives the tensor's shape for so many outputs and inputs.
    dtypes, decode, check: see `Stored`; `decode` gets the numbers of outputs and inputs too.
    rounded: whether it is made of the checkpoint's unquantised weight, when that is loaded.
    beside: another tensor, whose numbers `decode` gets last.
    aliases: other names of the tensor.
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
    ) -> Callable[[str], Source]:
        """Returns a function that gives the source of a module by its name; all its modules are alike.

        shape: what a module's array becomes.
        repeats: how often each row is repeated there.
        transposed: whether the checkpoint has weights as `[in, out]`.
        """
        stored_shape, transpose = self.shape(num_out, num_in), transposed and self.rounded
        stored_shape = stored_shape[::-1] if transpose else stored_shape

        def decode(numbers: np.ndarray, *others: np.ndarray) -> np.ndarray:
            found = self.decode(numbers, num_out, num_in, *others)
            return found if repeats == 1 else np.repeat(found, repeats, axis=0)[:num_out]

        # one for all of them, as models may have 100,000
        stored = Stored(self.dtypes, decode, self.check)

        def of_module(module: str) -> Source:
            aliases = tuple(f"{module}.{name}" for name in self.aliases)
            own = Piece(
                f"{module}.{self.name}",
                stored_shape,
                shape,
                (0, 0),
                transpose,
                aliases=aliases,
                stored=stored,
            )
            if (other := self.beside) is None:
                return Source(shape, (own,))
            of_other = Stored(other.dtypes, check=other.check)
            beside = Piece(
                f"{module}.{other.name}",
                other.shape(num_out, num_in),
                (0, 0),
                (0, 0),
                stored=of_other,
            )
            return Source(
                shape, (own._replace(stored=replace(stored, beside=(beside.name,))), beside)
            )

        return of_module


@dataclass(frozen=True)
class WeightFormat:
    """How the weight of a linear layer is quantised, and stored.

    code: see `pallas_kernels.QuantizedWeight`. group_size: inputs that share a scale; None: all.
    block_rows: outputs that share a scale, in blocks.
    int8_inputs: whether inputs are rounded to eight bits too (W8A8), each token with a scale of its own.
    minimum: in place of zeros. scale_dtype: of the arrays of scales and minima.
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
    """The arrays of a quantised weight, which stands for a `Linear` of this spec: a linear layer and a table share them."""

    def _declare_all(self, spec: LinearSpec, form: WeightFormat) -> None:
        self.spec = spec
        self.code, self.group_size, self.int8_inputs = (
            form.code,
            form.group_size or spec.num_in,
            form.int8_inputs,
        )
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

        def one(module: str, num_rows: int) -> Source:
            shape = num_rows, num_columns
            return array.source(
                num_rows, spec.num_in, shape, repeats=repeats, transposed=spec.transposed
            )(module)

        return parameter(
            (spec.num_out, num_columns),
            axes=(spec.output_axis, spec.input_axis if num_columns > 1 else None),
            dtype=jnp.dtype(dtype),
            sources=spec.sources(one),
            keeps_dtype=True,
        )

    @property
    def weight(self) -> Scaled | Grouped:
        if self.int8_inputs:
            return Scaled(self.kernel[...], self.scale[...][:, 0])
        zero, minimum = (None if each is None else each[...] for each in (self.zero, self.minimum))
        return Grouped(self.kernel[...], self.scale[...], zero, self.code, self.group_size, minimum)


class QuantizedLinear(Quantized, Linear):
    """A linear layer that takes the place of a `Linear` of the same spec."""

    def __init__(self, spec: LinearSpec, form: WeightFormat):
        self._declare_all(spec, form)
        self.bias = spec.declare("bias") if spec.bias else None


class QuantizedEmbedding(Quantized, Embedding):
    """In place of an `Embedding` that a checkpoint has."""

    def __init__(self, whole: Embedding, form: WeightFormat):
        assert whole.name is not None
        table = whole.table.get_value()
        self.name, self.axis = whole.name, whole.axis
        part = Part(table.shape[0], whole.axis, whole.name)
        self._declare_all(LinearSpec(table.shape[1], (part,), "embed", False, table.dtype), form)

    @property
    def num_rows(self) -> int:
        return self.kernel.get_value().shape[0]

    def __call__(self, ids_T: Int[Array, "T"]) -> Float[Array, "T D"]:
        assert isinstance(self.weight, Grouped)
        return rows_of(self.weight, ids_T).astype(self.spec.dtype)

    def logits(self, hidden_BD: Float[Array, "B D"]) -> Float[Array, "B V"]:
        return product(hidden_BD, self.weight, result=jnp.float32)


class LinearOfParts(Linear):
    """In place of a `Linear` whose parts do not have weights of one kind: each is a product of its own.

    forms: of the parts; None: it is not quantised.
    """

    def __init__(self, spec: LinearSpec, forms: Sequence[WeightFormat | None]):
        self.spec = spec
        specs = [replace(spec, parts=(part,), fused=None) for part in spec.parts]
        self.parts = nnx.List(
            [
                QuantizedLinear(one, form) if form else Linear(one)
                for one, form in zip(specs, forms, strict=True)
            ]
        )

    def __call__(self, x_TI: Float[Array, "T I"]) -> Float[Array, "T O"]:
        y_TO = jnp.concatenate([part(x_TI) for part in self.parts], axis=1)
        return y_TO if self.lora is None else self.lora(x_TI, y_TO)
