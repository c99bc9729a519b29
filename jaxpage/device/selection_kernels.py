"""Binds the kernels that select in rows of logits to the sampler.

They find the cut-offs of top-k, top-p and min-p, and the most likely tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import jax

from jaxpage.device.batch_invariance import log_sums_of
from jaxpage.device.hardware.backends import Backend
from pallas_kernels import Call
from pallas_kernels.compat import target_device
from pallas_kernels.sets import candidates


class SelectionKernels(NamedTuple):
    """Holds the selecting kernels of one kernel set.

    Attributes:
        cutoffs: Takes (logits_RV, largest_R, temperature_R, top_k_R, top_p_R, min_p_R), and returns
            the least logit of each row that stays.
        top_candidates: Takes (logits_RV, largest_R, log_sum_R, count), and returns log
            probabilities and ids, in the order of the ids where they are equal.
        log_sums: Takes (logits_RV, largest_R), and returns the logarithms of the sums of the
            exponentials of logits less the largest one. None where XLA computes them.
    """

    cutoffs: Callable[..., jax.Array]
    top_candidates: Callable[..., tuple[jax.Array, jax.Array]]
    log_sums: Callable[..., jax.Array] | None


_kernels: ContextVar[SelectionKernels | None] = ContextVar("selection_kernels", default=None)


@contextmanager
def selection_kernels(backend: Backend) -> Iterator[None]:
    """Lets the sampler select with the kernels of this set, in what is traced inside.

    The sampler uses them where rows are computed at once.
    """
    token = _kernels.set(_find(backend))
    try:
        yield
    finally:
        _kernels.reset(token)


def _find(backend: Backend) -> SelectionKernels | None:
    device = target_device()
    for each in candidates(backend.name, device.platform, interpret=backend.interpret):
        if (selection := each.selection) is None:
            continue
        if each.refusal(device, Call(interpret=backend.interpret)) is None:
            bind = functools.partial(functools.partial, interpret=backend.interpret)
            return SelectionKernels(
                bind(selection.cutoffs), bind(selection.top_candidates), log_sums_of(backend)
            )
    return None


def kernels_in_use() -> SelectionKernels | None:
    """Returns the kernels that are bound now, or None."""
    return _kernels.get()
