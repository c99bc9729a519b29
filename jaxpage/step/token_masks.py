"""Packs sets of token ids into bits of 32-bit words: the tokens that may be sampled.

The host makes a mask, and the step reads it on the device.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from jaxpage.settings.token_ids import TokenIds

# The bits of a word: token v is in the set if bit v % 32 of word v // 32 is set.
MASK_BITS = 32

Mask = npt.NDArray[np.uint32]  # [U]


def num_mask_words(vocab_size: int) -> int:
    """Returns U, the number of words of a mask."""
    return -(-vocab_size // MASK_BITS)


def mask_of(token_ids: Iterable[int], vocab_size: int) -> Mask:
    """Returns the mask of a set of token ids."""
    words = np.zeros(num_mask_words(vocab_size), np.uint32)
    ids = np.array(tuple(token_ids), np.uint32)
    # `words[...] |= bits` would keep one id of a word only, because it stores to a place once.
    np.bitwise_or.at(words, ids // MASK_BITS, np.uint32(1) << ids % MASK_BITS)
    return words


def mask_of_ids(token_ids: TokenIds, vocab_size: int) -> Mask:
    """Returns the mask of ids that a request gives; it is made once, and is read-only."""
    if vocab_size not in token_ids.masks:
        mask = mask_of(token_ids, vocab_size)
        mask.flags.writeable = False
        token_ids.masks[vocab_size] = mask
    mask_made: Mask = token_ids.masks[vocab_size]
    return mask_made


def ids_of(mask: Mask) -> npt.NDArray[np.int32]:
    """Returns the ids of the tokens in a mask, in ascending order."""
    # The least significant bit comes first in a byte, as it does in a word's bytes in memory on the
    # little-endian machines that JAX runs on.
    bits = np.unpackbits(np.ascontiguousarray(mask).view(np.uint8), bitorder="little")
    return np.flatnonzero(bits).astype(np.int32)
