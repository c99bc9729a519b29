"""Binds the kernels for weights in panels, and packs the weights of a model.

See `pallas_kernels.cpu.packed`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from jaxpage.layers import Embedding, Linear
from jaxpage.layers.expert_linear import ExpertLinear, MXFP4ExpertLinear
from jaxpage.layers.fusion import AddAndNorm, AddSum, Gate, Multiply, Norm, Stage
from jaxpage.layers.packed import PackedEmbedding, PackedExpertLinear, PackedLinear
from jaxpage.layers.quantized import Quantized
from jaxpage.layers.quantized_experts import QuantizedExpertLinear
from jaxpage.layers.weight_kinds import Packed, PackedCodes
from jaxpage.models.parameters import Path, replace_modules
from pallas_kernels.compat import target_device
from pallas_kernels.cpu import fusion, large_pages, packed
from pallas_kernels.cpu.packed import takes as takes
from pallas_kernels.quantized_weight import QuantizedWeight, numbers

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


class Padding(NamedTuple):
    """Says which tokens of a pass are padding: the last ones.

    Attributes:
        size: The number of tokens with padding (T).
        num_tokens: The number of tokens without it.
    """

    size: int
    num_tokens: jax.Array

    def num_rows_of(self, x_TI: jax.Array) -> jax.Array | None:
        """Returns the number of rows without padding, of an array whose rows are the tokens.

        None says that all rows count: of an array with another number of rows.
        """
        return self.num_tokens if len(x_TI) == self.size else None


# How each packed array is packed, by the path of its parameter.
Packings = Mapping[Path, Packing]


def pack_modules(module: nnx.Module) -> Packings:
    """Replaces all layers inside whose weights can be in panels.

    It is applied last, to a module whose other replacements are made, because it visits what they
    put in. Layers and tables with quantised weights are not replaced, but know then that these are
    in panels.

    Returns:
        How each array is to be packed, by the path of its parameter.
    """
    packings: dict[Path, Packing] = {}

    def note(path: Path, parameter: nnx.Param[Any], count: int) -> None:
        num_rows, num_columns = parameter.get_value().shape[-2:]
        packings[path] = Packing(num_rows, num_columns, count)

    def replacement(path: Path, each: nnx.Module) -> nnx.Module | None:
        # Its weight is read as numbers (`weight_numbers`), never multiplied by an input.
        if isinstance(each, Linear) and not each.spec.multiplied:
            return None
        if isinstance(each, Codes):
            each.in_panels = True
            if getattr(each, "int8_inputs", False):
                # An output has one scale, so that scales need no panels.
                note((*path, "kernel"), each.kernel, packed.NUMBERS["int8"])
                return None
            note((*path, "kernel"), each.kernel, 1)
            # Arrays that outputs share have no row for each output, which a panel needs.
            for name in () if each.block_rows > 1 else ("scale", "zero", "minimum"):
                if (parameter := getattr(each, name, None)) is not None:
                    note((*path, name), parameter, 1)
            return None
        # Tables of positions are only looked up, where panels gain nothing.
        if isinstance(each, Embedding) and each.axis == "vocab":
            count = _numbers_of_word(each.table)
            if count is None:
                return None
            note((*path, "table"), each.table, count)
            return PackedEmbedding(each)
        if not isinstance(each, Linear | ExpertLinear) or not hasattr(each, "kernel"):
            return None
        count = _numbers_of_word(each.kernel)
        if count is None:
            return None
        note((*path, "kernel"), each.kernel, count)
        return PackedLinear(each) if isinstance(each, Linear) else PackedExpertLinear(each)

    replace_modules(module, replacement)
    return packings


def _numbers_of_word(parameter: nnx.Param[Any]) -> int | None:
    """Returns the numbers of a word of a parameter's type; None if it cannot be in panels."""
    return packed.NUMBERS.get(jnp.dtype(parameter.get_value().dtype).name)


def multiply_packed(
    x_TI: jax.Array,
    weight: Packed | PackedCodes,
    result: DTypeLike,
    count_E: jax.Array | None,
    bias_O: jax.Array | None = None,
    activation: str | None = None,
    *,
    padding: Padding | None = None,
) -> jax.Array:
    """Multiplies as `LayerKernels.multiply_packed`, and leaves padding out."""
    num_rows = None if padding is None else padding.num_rows_of(x_TI)
    # The kernels store these two types.
    made = jnp.bfloat16 if result == jnp.bfloat16 else jnp.float32
    if isinstance(weight, PackedCodes):
        codes = QuantizedWeight(*weight.codes)
        y_TO = packed.multiply_quantized(
            x_TI, codes, weight.num_out, result=made, count_E=count_E, num_rows=num_rows
        )
    else:
        y_TO = packed.multiply_packed(
            x_TI,
            weight.panels,
            weight.num_out,
            result=made,
            scale_O=weight.scale_O,
            count_E=count_E,
            num_rows=num_rows,
            bias_O=bias_O,
            activation=activation,
        )
    return y_TO.astype(result)


def run_fusion(
    x_TI: jax.Array,
    stages: Sequence[Stage],
    epsilon: float,
    offset: float,
    *,
    padding: Padding | None = None,
) -> Sequence[jax.Array]:
    """Computes stages as `LayerKernels.run_fusion`, and leaves padding out."""
    operations = [_operation(stage, x_TI.dtype) for stage in stages]
    num_rows = None if padding is None else padding.num_rows_of(x_TI)
    return fusion.run(x_TI, operations, epsilon=epsilon, offset=offset, num_rows=num_rows)


def _operation(stage: Stage, dtype: DTypeLike) -> fusion.Stage:
    """Returns a stage for rows of a type as the kernel takes it."""
    match stage:
        case Multiply(weight):
            return fusion.multiply(_operand(weight, dtype), weight.num_out)
        case Norm(scale_D):
            return fusion.norm(scale_D)
        case AddAndNorm(added_TD, scale_D):
            return fusion.add_and_norm(added_TD, scale_D)
        case Gate(activation):
            return fusion.gate(activation)
        case AddSum():
            return fusion.add_sum()


def _operand(weight: Packed | PackedCodes, dtype: DTypeLike) -> packed.Operand:
    if isinstance(weight, Packed):
        return packed.operand_of_panels(weight.panels, weight.scale_O)
    return packed.operand_of_codes(QuantizedWeight(*weight.codes), weight.num_in, dtype)


def read_packed_rows(weight: Packed | PackedCodes, ids_T: jax.Array) -> jax.Array:
    """Returns rows of a table in panels; those of a quantised one in float32."""
    if isinstance(weight, PackedCodes):
        return numbers(packed.read_quantized_rows(QuantizedWeight(*weight.codes), ids_T))
    rows_TI = packed.rows_of_panels(weight.panels, ids_T, weight.num_in)
    if weight.scale_O is None:
        return rows_TI
    return rows_TI.astype(jnp.float32) * weight.scale_O[ids_T][:, None]


def make_packed_matmul(weight: jax.Array) -> Callable[[jax.Array], jax.Array] | None:
    """Returns the function `x @ weight.T` by the kernel for CPUs; None where there is none."""
    if target_device().platform != "cpu" or not takes(weight.dtype):
        return None
    panels = jax.device_put(packed.pack(np.asarray(weight), packed.NUMBERS[weight.dtype.name]))
    return lambda x: packed.multiply_packed(x, panels, len(weight), result=x.dtype)


def pack_weights(parameters: Any, packings: Packings, *, deletes: bool = True) -> None:
    """Puts weights in panels in the place of those that are loaded, one after the other.

    So at any time there are two copies of one weight at most.

    Args:
        parameters: The tree of all parameters.
        packings: Which of them go into panels.
        deletes: True deletes the arrays; False leaves them to their owner.
    """
    for path, how in packings.items():
        branch = _branch(parameters, path)
        if (array := branch.get(path[-1])) is not None:
            packs = functools.partial(packed.pack, numbers=how.numbers)
            branch[path[-1]] = _of_each_part(array, packs)
            if deletes:
                array.delete()
    if packings:
        large_pages.return_freed_memory()


def panels_of_weights(parameters: Any, packings: Packings) -> Any:
    """Returns the tree of all parameters, with those weights in panels; it may be traced."""
    # New dictionaries with the same arrays, so that the caller's tree stays as it is.
    tree = jax.tree.map(lambda array: array, parameters)
    for path, how in packings.items():
        branch = _branch(tree, path)
        if (array := branch.get(path[-1])) is not None:
            branch[path[-1]] = packed.panels_of(array, how.numbers)
    return tree


def unpack_weights(parameters: Any, packings: Packings) -> Any:
    """Returns the tree of all parameters, with the weights [out, in] of those in panels."""
    tree = jax.tree.map(lambda array: array, parameters)
    for path, how in packings.items():
        branch = _branch(tree, path)
        if (array := branch.get(path[-1])) is not None:
            branch[path[-1]] = unpack_weight(array, how)
    return tree


def unpack_weight(array: jax.Array, how: Packing) -> jax.Array:
    """Returns the weight [out, in] of one in panels; each device has the same part as before."""
    return _of_each_part(array, lambda part: packed.unpack(part, how.num_rows, how.num_columns))


def _branch(tree: Any, path: Path) -> Any:
    for key in path[:-1]:
        # A part may be missing, such as a drafter that is None.
        tree = tree.get(key) or {}
    return tree


def _of_each_part(array: jax.Array, change: Callable[[np.ndarray], np.ndarray]) -> jax.Array:
    """Applies a function to the part of an array on each device, and returns the new array."""
    shards = array.addressable_shards
    made = [
        jax.device_put(np.ascontiguousarray(change(np.asarray(shard.data))), shard.device)
        for shard in shards
    ]
    num_parts = array.shape[0] // shards[0].data.shape[0]
    shape = (num_parts * made[0].shape[0], *made[0].shape[1:])
    return jax.make_array_from_single_device_arrays(shape, array.sharding, made)
