"""The format of the library compressed-tensors (llm-compressor): int8 with inputs in int8 or not, int4 and int8 in groups, fp8, MXFP4 and
NVFP4."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxpage.errors import CheckpointError, UnsupportedError
from jaxpage.layers.quantized import StoredArray, WeightFormat
from jaxpage.models.quantization.decoding import (
    FLOATS,
    NVFP4_GROUP,
    block_scale,
    check_scale,
    columns,
    num_groups,
    nvfp4_scale,
    packed_bytes,
    plain,
    signed,
    unpacked,
)
from jaxpage.models.quantization.scheme import KV_SCALES, Scheme, matches, read_kv_cache

NAME = "compressed-tensors"
_QUANTIZED = (
    *("pack-quantized", "int-quantized", "float-quantized", "naive-quantized"),
    *("mxfp4-pack-quantized", "nvfp4-pack-quantized"),
)


def read(config: Mapping[str, Any]) -> Scheme:
    """Of `quantization_config`. Raises CheckpointError or UnsupportedError for what is not understood or not honoured."""
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        raise CheckpointError("config.json: quantization_config.config_groups must be an object of objects")
    for name in ("sparsity_config", "transform_config"):
        if config.get(name):
            raise UnsupportedError(f"config.json: quantization_config.{name} is not supported")
    ignore = tuple(config.get("ignore") or ())
    forms = [(tuple(group.get("targets") or ()), _form(group, config.get("format"))) for group in groups.values()]

    def form_of(name: str) -> WeightFormat | None:
        if matches(name, ignore):
            return None
        return next((form for targets, form in forms if "Linear" in targets or matches(name, targets)), None)

    described = ", ".join(
        sorted({f"{form.code} weights{' and inputs' if form.int8_inputs else ''}" for _, form in forms})
    )
    return Scheme(
        NAME,
        f"{NAME}: {described}",
        form_of,
        ("*.weight_shape", "*.input_scale", "*.input_global_scale", "*.weight_g_idx", *KV_SCALES),
        read_kv_cache(config),
    )


def _form(group: Mapping[str, Any], default: Any) -> WeightFormat:
    name, weights, inputs = group.get("format") or default, group.get("weights") or {}, group.get("input_activations")
    if name not in _QUANTIZED:
        raise UnsupportedError(
            f"config.json: quantization_config.format = {name!r} is not one of {', '.join(_QUANTIZED)}"
        )
    bits, kind, strategy = weights.get("num_bits"), weights.get("type"), weights.get("strategy")
    symmetric, group_size = weights.get("symmetric", True), weights.get("group_size")
    if name == "nvfp4-pack-quantized":
        scale = nvfp4_scale("weight_scale", "weight_global_scale", (1,), divides=True)
        return WeightFormat("fp4", packed_bytes("weight_packed"), scale, group_size=NVFP4_GROUP)
    if strategy not in ("tensor", "channel", "group", "block"):
        raise UnsupportedError(f"config.json: quantization_config: a strategy {strategy!r} of weights is not supported")
    if weights.get("actorder") not in (None, False, "weight", "static"):
        raise UnsupportedError(f"config.json: quantization_config: actorder = {weights['actorder']!r} is not supported")
    size = group_size if strategy == "group" else None
    if strategy == "group" and (not isinstance(size, int) or size < 1):
        raise CheckpointError(f"config.json: quantization_config: group_size = {size!r} of a group strategy")
    if name == "mxfp4-pack-quantized":
        return WeightFormat("fp4", packed_bytes("weight_packed"), _exponents(32), group_size=32)
    if (bits, kind) == (8, "float"):
        block = weights.get("block_structure") if strategy == "block" else None
        rows, size = block or (1, size)
        values, scale = plain("float8_e4m3fn"), _scale(strategy, size, block)
        return WeightFormat("fp8", values, scale, group_size=size, block_rows=rows)
    if kind != "int" or bits not in (4, 8):
        raise UnsupportedError(
            f"config.json: quantization_config: weights of {bits} bits and type {kind!r} are not supported"
        )
    packed = name == "pack-quantized"
    if bits == 4 and not packed:
        raise UnsupportedError(f"config.json: quantization_config: four bits in the format {name!r} are not supported")
    code = "int8" if bits == 8 else "int4"
    values = _packed(bits) if packed else plain("int8")
    zero = None if symmetric else _zero(bits, strategy, size, packed=packed)
    return WeightFormat(
        code,
        values,
        _scale(strategy, size, None),
        zero,
        size,
        int8_inputs=_int8_inputs(inputs, code, strategy, symmetric),
    )


def _int8_inputs(inputs: Any, code: str, strategy: str, symmetric: bool) -> bool:
    if not inputs:
        return False
    dynamic = (
        inputs.get("dynamic") in (True, "local") and inputs.get("strategy") == "token" and inputs.get("symmetric", True)
    )
    if (
        code != "int8"
        or strategy not in ("channel", "tensor")
        or not symmetric
        or not dynamic
        or inputs.get("num_bits") != 8
    ):
        raise UnsupportedError(
            "config.json: quantization_config.input_activations are supported as int8 for symmetric int8 weights of one scale per "
            f"output, dynamic per token, not {dict(inputs)}"
        )
    return True


def _packed(bits: int) -> StoredArray:
    """Little-endian words: their bytes are codes in order, four bits as we pack them too."""

    def decode(words: np.ndarray, num_out: int, num_in: int) -> np.ndarray:
        codes = np.ascontiguousarray(words).view(np.uint8)[:, : num_in * bits // 8]
        return codes if bits == 4 else signed(codes)

    return StoredArray("weight_packed", lambda num_out, num_in: (num_out, -(-num_in * bits // 32)), ("int32",), decode)


def _exponents(size: int) -> StoredArray:
    """Scales that are powers of two, as biased exponents (E8M0)."""

    def decode(exponents: np.ndarray, num_out: int, num_in: int) -> np.ndarray:
        return np.ldexp(np.float32(1), exponents.astype(np.int32) - 127).astype(np.float32)

    def check(exponents: np.ndarray) -> str | None:
        return "has scales that are not finite" if (exponents == 255).any() else None

    return StoredArray("weight_scale", lambda num_out, num_in: (num_out, num_in // size), ("uint8",), decode, check)


def _scale(strategy: str, size: int | None, block: Any) -> StoredArray:
    if block:
        return block_scale("weight_scale", block)

    def shape(num_out: int, num_in: int) -> tuple[int, ...]:
        return (1,) if strategy == "tensor" else (num_out, num_groups(num_in, size))

    return StoredArray("weight_scale", shape, FLOATS, columns, check_scale)


def _zero(bits: int, strategy: str, size: int | None, *, packed: bool) -> StoredArray:
    def shape(num_out: int, num_in: int) -> tuple[int, ...]:
        rows = -(-num_out * bits // 32) if packed else num_out
        return (1,) if strategy == "tensor" else (rows, num_groups(num_in, size))

    def decode(numbers: np.ndarray, num_out: int, num_in: int) -> np.ndarray:
        if not packed:
            return columns(numbers, num_out, num_in)
        codes = unpacked(np.ascontiguousarray(numbers.T), bits).T[:num_out].astype(np.float32)
        return codes if bits == 4 else codes - 128

    return StoredArray("weight_zero_point", shape, ("int32",) if packed else ("int8",), decode)
