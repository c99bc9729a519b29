"""JAX's kernel for TPUs, on a CPU: its copies and semaphores are simulated, and races are found.

The kernel reads through reshaped references, and stores under masks, which the interpreter of jax
0.10 to 0.12 does not take: both are replaced here by reads and writes of the same memory.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax._src.pallas.mosaic.interpret import interpret_pallas_call  # the races have no public name
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel as of_jax

from pallas_kernels.compat import DescribedTPU, described

COPIES = of_jax.MultiPageAsyncCopyDescriptor


class FlatPages:
    """Pages [pages, S, 2K, H] of a reference as the kernel reads them: all slots of a head."""

    def __init__(self, ref: Any, of_words: bool = False):
        self._ref = ref
        self._of_words = of_words  # a word has two numbers of 16 bits: a key's and its value's
        self.dtype = jnp.dtype(jnp.uint32) if of_words else ref.dtype

    def reshape(self, *_: int) -> FlatPages:
        return self

    def bitcast(self, _: Any) -> FlatPages:
        return FlatPages(self._ref, of_words=True)

    def __getitem__(self, index: tuple[slice, slice]) -> jax.Array:
        if not self._of_words:
            return self._head(index[0].start)
        halves = (self._head(2 * index[0].start + half) for half in (0, 1))
        k, v = (
            jax.lax.bitcast_convert_type(each, jnp.uint16).astype(jnp.uint32) for each in halves
        )
        return k | v << 16

    def _head(self, head: int) -> jax.Array:
        return self._ref[:, :, head, :].reshape(-1, self._ref.shape[-1])


def _store(ref: Any, value: jax.Array, *, mask: jax.Array) -> None:
    ref[...] = jnp.where(mask, value, ref[...])


_PALLAS = types.SimpleNamespace(
    **{name: getattr(pltpu, name) for name in dir(pltpu) if not name.startswith("__")}
    | {"store": _store}
)


@contextlib.contextmanager
def interpreted(
    wait: Callable[[Any], Any] = COPIES.wait, copies: str = "on_wait"
) -> Iterator[Callable[[], bool]]:
    """Runs the set `tpu` on this CPU in a block; what it gives says whether there was a race.

    Memory that nobody wrote holds NaN. `wait` takes the place of the kernel's wait for a copy;
    `copies` says whether a copy is made when it begins ("eager") or when somebody waits for it.
    """
    params = pltpu.InterpretParams(detect_races=True, dma_execution_mode=copies, **_WARN)
    with (
        mock.patch.object(COPIES, "wait", lambda each: FlatPages(wait(each))),
        mock.patch.object(of_jax, "pltpu", _PALLAS),
        pltpu.force_tpu_interpret_mode(params),
        described(DescribedTPU(f"TPU v5 lite, {wait}")),  # each `wait` is traced by itself
    ):
        try:
            yield lambda: bool(interpret_pallas_call.races.races_found)
        finally:
            pltpu.reset_tpu_interpret_mode_state()


_WARN = {"on_race": "warn"} if "on_race" in pltpu.InterpretParams.__dataclass_fields__ else {}
