"""Reads the format of the library compressed-tensors (llm-compressor).

It has int8 with inputs in int8 or not, int4 and int8 in groups, fp8, MXFP4 and NVFP4.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxpage.checkpoints.quantization import decoding
from jaxpage.checkpoints.quantization.quantization_fields import QuantizationFields
from jaxpage.checkpoints.quantization.scheme import (
    KV_SCALES,
    Check,
    Scheme,
    check_order,
    read_kv_cache,
)
from jaxpage.layers.quantized import StoredArray, WeightFormat

NAME = "compressed-tensors"
SIZE_FIELDS = "num_bits, strategy, group_size or block_structure"
EXCLUDED_FIELD = "ignore"
_QUANTIZED = (
    *("pack-quantized", "int-quantized", "float-quantized", "naive-quantized"),
    *("mxfp4-pack-quantized", "nvfp4-pack-quantized"),
)


def read(config: QuantizationFields) -> Scheme:
    """Reads `quantization_config`."""
    if (
        config.part("sparsity_config").config.get("format") != "dense"
    ):  # "dense" is stored as it is, zeros included
        config.absent("sparsity_config")
    config.absent("transform_config")
    ignore = config.names(EXCLUDED_FIELD)
    groups = config.part("config_groups")
    if config.config.get("config_groups") is None:
        config.refuse_wrong("config_groups", "must be an object of groups")
    forms = [
        (group.names("targets"), _form(group, config)) for group in map(groups.part, groups.config)
    ]
    by_target = {target: form for targets, form in forms for target in targets}

    def form_of(*names: str) -> WeightFormat | None:
        """Returns the format of the most specific target that names the module.

        In the library too, a name is more specific than a regular expression, and that more than
        the class.
        """
        if any(_is_named(names, entry) for entry in ignore):
            return None
        # A target may also be a class of PyTorch, and all products here are of this one.
        targets = [target for target in by_target if _is_named(names, target)] or ["Linear"]
        return by_target.get(min(targets, key=lambda target: (target not in names, target)))

    described = ", ".join(
        sorted(
            {f"{form.code} weights{' and inputs' if form.int8_inputs else ''}" for _, form in forms}
        )
    )
    return Scheme(
        NAME,
        f"{NAME}: {described}",
        form_of,
        ("*.weight_shape", "*.input_scale", "*.input_global_scale", "*.weight_g_idx", *KV_SCALES),
        read_kv_cache(config),
        (Check(".weight_g_idx", check_order(form_of)),),
    )


def _is_named(names: Sequence[str], entry: str) -> bool:
    """Returns whether an entry of a list is a name of the module, or a pattern of one."""
    return entry in names or (
        entry.startswith("re:") and any(re.match(entry[3:], name) for name in names)
    )


def _form(group: QuantizationFields, config: QuantizationFields) -> WeightFormat:
    """Returns the format of a group's weights; `config` has what all groups share."""
    name = (group if group.config.get("format") else config).one_of("format", _QUANTIZED)
    weights = group.part("weights")
    if name == "nvfp4-pack-quantized":
        # The file has the number by which the scales were multiplied before they were rounded.
        scale = decoding.nvfp4_scale("weight_scale", "weight_global_scale", (1,), divides=True)
        return WeightFormat(
            "fp4",
            decoding.describe_packed_bytes("weight_packed"),
            scale,
            group_size=decoding.NVFP4_GROUP,
        )
    strategy = weights.one_of("strategy", ("tensor", "channel", "group", "block"))
    # Only the order "group", which is not here, changes which inputs share a scale.
    weights.one_of("actorder", (None, False, "weight", "static"))
    size = weights.group_size("group_size", all_inputs=False) if strategy == "group" else None
    # Groups of 32 and these scales are those of the OCP's specification of MX formats.
    if name == "mxfp4-pack-quantized":
        return WeightFormat(
            "fp4", decoding.describe_packed_bytes("weight_packed"), _exponents(32), group_size=32
        )
    bits = weights.one_of("num_bits", (8, 4))
    kind = weights.one_of("type", ("int", "float"))
    symmetric = weights.flag("symmetric", True)
    if kind == "float":
        if bits != 8:
            weights.refuse(
                "num_bits", f"is not supported for the type {kind!r} in the format {name!r}"
            )
        block = weights.sizes("block_structure", 2) if strategy == "block" else None
        rows, size = block or (1, size)
        values = decoding.plain("float8_e4m3fn")
        scale = _scale(strategy, size, block)
        return WeightFormat("fp8", values, scale, group_size=size, block_rows=rows)
    packed = name == "pack-quantized"
    if bits == 4 and not packed:
        weights.refuse(
            "num_bits", f"is not supported in the format {name!r}, only in 'pack-quantized'"
        )
    values = _describe_packing(bits) if packed else decoding.plain("int8")
    zero = None if symmetric else _zero(bits, strategy, size, packed=packed)
    has_inputs = _int8_inputs(
        group, by_output=bits == 8 and symmetric and strategy in ("channel", "tensor")
    )
    code = "int8" if bits == 8 else "int4"
    return WeightFormat(
        code, values, _scale(strategy, size, None), zero, size, int8_inputs=has_inputs
    )


def _int8_inputs(group: QuantizationFields, *, by_output: bool) -> bool:
    """Returns whether inputs are rounded.

    Args:
        group: The group.
        by_output: True if weights are symmetric int8 with one scale for each output, or for all.
    """
    inputs = group.part("input_activations").config
    if not inputs:
        return False
    dynamic = (
        inputs.get("dynamic") in (True, "local")
        and inputs.get("strategy") == "token"
        and inputs.get("symmetric", True)
    )
    if not by_output or not dynamic or inputs.get("num_bits") != 8:
        group.refuse(
            "input_activations",
            "is not supported: inputs can be int8 for symmetric int8 weights of one scale "
            "per output, dynamic per token",
        )
    return True


def _describe_packing(bits: int) -> StoredArray:
    """Returns little-endian words, whose bytes are codes in order; four bits are packed as here."""

    def decode(words: np.ndarray, num_out: int, num_in: int) -> np.ndarray:
        # The last word of a row may have room left.
        codes = np.ascontiguousarray(words).view(np.uint8)[:, : num_in * bits // 8]
        return codes if bits == 4 else decoding.to_signed(codes)

    return StoredArray(
        "weight_packed",
        lambda num_out, num_in: (num_out, -(-num_in * bits // 32)),
        ("int32",),
        decode,
    )


def _exponents(size: int) -> StoredArray:
    """Returns scales that are powers of two, stored as biased exponents (E8M0)."""

    def decode(exponents: np.ndarray, num_out: int, num_in: int) -> np.ndarray:
        return np.ldexp(np.float32(1), exponents.astype(np.int32) - 127).astype(np.float32)

    def check(exponents: np.ndarray) -> str | None:
        # 255 is the NaN of E8M0.
        return "has scales that are not finite" if (exponents == 255).any() else None

    return StoredArray(
        "weight_scale", lambda num_out, num_in: (num_out, num_in // size), ("uint8",), decode, check
    )


def _scale(strategy: str, size: int | None, block: Any) -> StoredArray:
    if block:
        return decoding.block_scale("weight_scale", block)

    def shape(num_out: int, num_in: int) -> tuple[int, ...]:
        return (1,) if strategy == "tensor" else (num_out, decoding.num_groups(num_in, size))

    return StoredArray(
        "weight_scale", shape, decoding.FLOATS, decoding.columns, decoding.check_scale
    )


def _zero(bits: int, strategy: str, size: int | None, *, packed: bool) -> StoredArray:
    def shape(num_out: int, num_in: int) -> tuple[int, ...]:
        rows = -(-num_out * bits // 32) if packed else num_out
        return (1,) if strategy == "tensor" else (rows, decoding.num_groups(num_in, size))

    def decode(numbers: np.ndarray, num_out: int, num_in: int) -> np.ndarray:
        if not packed:
            return decoding.columns(numbers, num_out, num_in)
        codes = (
            decoding.unpack(np.ascontiguousarray(numbers.T), bits).T[:num_out].astype(np.float32)
        )
        # Codes of eight bits are kept less 128, and so are their zeros.
        return codes if bits == 4 else codes - 128

    return StoredArray("weight_zero_point", shape, ("int32",) if packed else ("int8",), decode)
