"""Tests the memory in which weights lie on a CPU."""

import gc
import mmap
import weakref

import jax
import numpy as np
import pytest

from pallas_kernels.cpu import large_pages


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> large_pages.Blocks:
    """Replaces the blocks of the process by small ones."""
    monkeypatch.setattr(large_pages, "BYTES_OF_BLOCK", 1 << 21)
    monkeypatch.setattr(large_pages, "_BLOCKS", blocks := large_pages.Blocks())
    return blocks


def test_arrays_keep_their_numbers_and_are_taken_without_a_copy(blocks: large_pages.Blocks) -> None:
    """Arrays of odd sizes, some of them larger than a block, share no byte, and JAX copies none."""
    shapes = [(3,), (70_001,), (129, 65), (1 << 20,), (5,), (300_000,)]
    arrays = [large_pages.make_array(shape, "float32") for shape in shapes]
    for number, array in enumerate(arrays):
        array[...] = number
    for number, (shape, array) in enumerate(zip(shapes, arrays, strict=True)):
        assert array.shape == shape and (array == number).all()
        taken = jax.device_put(array)
        assert taken.unsafe_buffer_pointer() == array.ctypes.data


def test_a_block_is_let_go_of_with_its_last_array(blocks: large_pages.Blocks) -> None:
    """A block stays while any array of it is in use."""
    first, second = (large_pages.make_array((1000,), "float32") for _ in range(2))
    block = weakref.ref(second.base)
    large_pages.make_array((1 << 20,), "uint8")
    large_pages.make_array((1 << 20,), "uint8")  # a new block
    del first
    gc.collect()
    assert block() is not None
    del second
    gc.collect()
    assert block() is None


def test_a_system_without_large_pages_gets_plain_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """macOS has no MADV_HUGEPAGE."""
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    array = large_pages.make_array((3, 4), "int8")
    assert isinstance(array, np.ndarray) and array.shape == (3, 4)
