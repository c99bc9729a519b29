"""Keeps matrices of GGUF files in their stored types, for `quantization="gguf"`.

Tensors in other types are dequantised when they are loaded. A tensor is bytes [out, ...], in
blocks of 32 or 256 inputs. The parts of a weight are exact in the types that hold them here, and
so is `code * scale`: the weights are those that the package `gguf` computes, to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from flax import nnx

from jaxpage.checkpoints.quantization import decoding
from jaxpage.checkpoints.quantization.scheme import Scheme
from jaxpage.errors import CheckpointError
from jaxpage.layers import Embedding, Linear, quantized
from jaxpage.models.parameters import Path

NAME = "gguf"
# A decoder turns blocks [out, blocks of a row, bytes] into [out, codes or groups, ...].
Decode = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class GGUFScheme(Scheme):
    """A scheme in which each tensor has its own type, even among those of one product here."""

    def _replacement(self, path: Path, module: nnx.Module) -> nnx.Module | None:
        if isinstance(module, Embedding):
            form = self.form_of(module.name) if module.name else None
            return quantized.QuantizedEmbedding(module, form) if form else None
        if not isinstance(module, Linear):
            return None
        forms = [self.form_of(part.name) if part.name else None for part in module.spec.parts]
        if not any(forms):
            return None
        first = forms[0]
        return (
            quantized.QuantizedLinear(module.spec, first)
            if first and forms == [first] * len(forms)
            else quantized.LinearOfParts(module.spec, forms)
        )


def choose_scheme(counts: Mapping[str, int], kind_of: Callable[[str], str | None]) -> Scheme:
    """Returns the scheme of a file.

    Args:
        counts: The number of its matrices in each type.
        kind_of: Gives the type of the weight of a module of the model.

    Raises:
        CheckpointError: No matrix can be kept.
    """
    counts_of_formats = [f"{count} in {kind}" for kind, count in counts.items() if kind in FORMATS]
    if not counts_of_formats:
        raise CheckpointError(
            f"quantization is {NAME!r}, but no matrix of the file is in "
            f"{', '.join(FORMATS)}: they are in {', '.join(counts)}"
        )
    others = [f"{count} in {kind}" for kind, count in counts.items() if kind not in FORMATS]
    others_text = f"; in the model's dtype {', '.join(others)}" if others else ""
    return GGUFScheme(
        NAME,
        f"GGUF: matrices as they are stored: {', '.join(counts_of_formats)}{others_text}",
        lambda *names: FORMATS.get(kind_of(names[0]) or ""),
    )


def _half(place: int) -> Decode:
    """Returns a decoder of the number in half precision at this place of each block."""
    return lambda blocks: np.ascontiguousarray(blocks[..., 2 * place : 2 * place + 2]).view(
        np.float16
    )[..., 0]


def _split(packed: np.ndarray, run: int) -> np.ndarray:
    """Returns [..., codes]: of each run of bytes the low nibbles, and then the high ones."""
    runs = packed.reshape(*packed.shape[:-1], -1, run)
    return np.concatenate([runs & 15, runs >> 4], axis=-1).reshape(*packed.shape[:-1], -1)


def _q4(first: int, run: int) -> Decode:
    """Returns a decoder of the codes that follow the first bytes of a block."""
    return lambda blocks: decoding.nibbles(
        _split(blocks[..., first:], run).reshape(len(blocks), -1)
    )


def _q5_0(blocks: np.ndarray) -> np.ndarray:
    fifth = np.unpackbits(blocks[..., 2:6], axis=-1, bitorder="little")
    return (_split(blocks[..., 6:], 16) | fifth << 4).view(np.int8) - np.int8(16)


def _q6_k(blocks: np.ndarray) -> np.ndarray:
    low = _split(blocks[..., :128], 64)
    # A byte has the upper two bits of four codes, each 32 after the one before.
    high = blocks[..., 128:192].reshape(*blocks.shape[:-1], 2, 32)
    high = np.concatenate([high >> shift & 3 for shift in (0, 2, 4, 6)], axis=-1).reshape(low.shape)
    return (low | high << 4).view(np.int8) - np.int8(32)


def _q6_k_scale(blocks: np.ndarray) -> np.ndarray:
    """Returns the scales, one for 16 inputs."""
    return _half(104)(blocks)[..., None].astype(np.float32) * blocks[..., 192:208].view(np.int8)


def _q4_k(blocks: np.ndarray, place: int) -> np.ndarray:
    """Returns the scales, or at place 1 the subtracted minima, one for 32 inputs.

    Each has six bits, and is multiplied by the number in half precision at that place.
    """
    # In 12 bytes ggml packs eight scales and eight minima (`get_scale_min_k4`): four of each have
    # six bits in a byte, whose upper two bits are those of the other four.
    parts = np.split(blocks[..., 4:16], 3, axis=-1)
    scale_and_min = parts[place]
    codes = parts[2] >> 4 if place else parts[2] & 15
    return _half(place)(blocks)[..., None].astype(np.float32) * np.concatenate(
        [scale_and_min & 63, codes | scale_and_min >> 6 << 4], axis=-1
    )


def _format(
    code: str,
    block: tuple[int, int],
    group_size: int,
    values: Decode,
    scale: Decode,
    minimum: Decode | None = None,
    scale_dtype: str = "float16",
) -> quantized.WeightFormat:
    """Returns the format; `block` has the numbers of its inputs and bytes."""
    size, num_bytes = block

    def as_stored(decode: Decode) -> quantized.StoredArray:
        return quantized.StoredArray(
            "weight",
            lambda num_out, num_in: (num_out, num_in // size * num_bytes),
            ("uint8",),
            lambda rows, num_out, num_in: decode(rows.reshape(num_out, -1, num_bytes)).reshape(
                num_out, -1
            ),
        )

    of_minimum = as_stored(minimum) if minimum else None
    return quantized.WeightFormat(
        code,
        as_stored(values),
        as_stored(scale),
        group_size=group_size,
        minimum=of_minimum,
        scale_dtype=scale_dtype,
    )


# Blocks are laid out as in the structures `block_q8_0`, `block_q4_0` and so on of ggml-common.h.
FORMATS = {
    "Q8_0": _format("int8", (32, 34), 32, lambda blocks: blocks[..., 2:].view(np.int8), _half(0)),
    "Q4_0": _format("int4", (32, 18), 32, _q4(2, 16), _half(0)),
    "Q4_1": _format("int4", (32, 20), 32, _q4(4, 16), _half(0), _half(1)),
    # These formats use more bits than the file, but fewer than a float: codes of five and six bits
    # are in eight, and scales of two factors in float32.
    "Q5_0": _format("int8", (32, 22), 32, _q5_0, _half(0)),
    "Q4_K": _format(
        "int4",
        (256, 144),
        32,
        _q4(16, 32),
        lambda blocks: _q4_k(blocks, 0),
        # The minimum of Q4_K is subtracted, and that of a format here is added.
        lambda blocks: -_q4_k(blocks, 1),
        scale_dtype="float32",
    ),
    "Q6_K": _format("int8", (256, 210), 16, _q6_k, _q6_k_scale, scale_dtype="float32"),
}
