"""The registry of kernel sets, a file each, and the one way to choose among them."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from pallas_kernels.compat import target_device
from pallas_kernels.kernel_set import Call, KernelSet
from pallas_kernels.sets import cpu, fa3, mosaic, reference, scan, triton
from pallas_kernels.tiles import Shape, measured_set, shape_of

logger = logging.getLogger(__name__)
Result = TypeVar("Result")
_TELLING = threading.Lock()

# In the order in which "auto" tries them, but for what `candidates` says of attention. Each has the
# name of its file, so that names can be listed without importing JAX.
SETS: dict[str, KernelSet] = {
    each.name: each for each in (triton.SET, fa3.SET, mosaic.SET, cpu.SET, scan.SET, reference.SET)
}

BACKENDS = tuple(SETS)
DEFINITION = reference.SET.name  # of what the others must give
XLA_BACKENDS = tuple(name for name, each in SETS.items() if not each.platforms)
# The definition gathers all that each token of a chunk sees, at once.
XLA_ADVICE = (
    f"{' or '.join(XLA_BACKENDS)}; {DEFINITION} needs far more memory for long chunks of prompts"
)
KERNEL_BACKENDS = tuple(name for name, each in SETS.items() if "gpu" in each.platforms)
GPU_BACKENDS = tuple(
    name for name, each in SETS.items() if each.runs_on("gpu")
)  # what checks and benchmarks of GPUs run
# on CPU, with interpret=True
INTERPRETABLE_BACKENDS = tuple(name for name, each in SETS.items() if each.interpretable)


def candidates(
    backend: str, platform: str, *, interpret: bool = False, shape: Shape | None = None
) -> tuple[KernelSet, ...]:
    """Returns the sets to try, in order: that of this name, or for "auto" those that run on the platform.

    On a GPU, and to interpret, "auto" means kernels for GPUs alone.

    shape: of a call of attention, for which "auto" first tries the set that was measured to be fastest on this kind of GPU, then the
        sets whose `comes_first` names the kind of step. It never depends on how many rows a call has.

    Raises ValueError where no set has this name.
    """
    if backend == "auto":
        gpu = interpret or platform == "gpu"
        sets = [
            each
            for each in SETS.values()
            if ("gpu" in each.platforms if gpu else each.runs_on(platform))
        ]
        if shape is not None:
            fastest = measured_set(shape)
            sets.sort(key=lambda each: (each.name != fastest, shape.kind not in each.comes_first))
        return tuple(sets)
    if backend not in SETS:
        raise ValueError(f"backend must be 'auto' or one of {', '.join(SETS)}, not {backend!r}")
    return (SETS[backend],)


def first_that_takes(
    operation: str,
    pick: Callable[[KernelSet], Callable[..., Result]],
    *arguments: Any,
    call: Call,
    backend: str,
) -> Result:
    """Returns what the first candidate that takes the call makes of the arguments. `pick`: gives a set's function for this operation.

    Raises:
        ValueError: no set has this name.
        NotImplementedError: no set takes the call; the text has every set's reason.
    """
    device, refusals, refused = target_device(), list[str](), list[KernelSet]()
    options = {name: value for name in ("interpret", "tiles") if (value := getattr(call, name))}
    for each in candidates(backend, device.platform, interpret=call.interpret, shape=_shape(call)):
        try:
            if (reason := each.refusal(device, call)) is None:
                result = pick(each)(*arguments, **options)
                if any(pick(other) is not pick(each) for other in refused):
                    _tell_of_plain_xla(each, refusals)
                return result
        except NotImplementedError as refusal:
            reason = str(refusal)
        refusals.append(f"{each.name}: {reason}")
        refused.append(each)
    raise _no_set_takes(operation, refusals, backend, device.platform)


def set_for(call: Call, *, backend: str, device: Any) -> KernelSet:
    """Returns the first candidate that says that it takes a call of attention, for a look ahead. Raises as `first_that_takes` does."""
    refusals: list[str] = []
    for each in candidates(backend, device.platform, interpret=call.interpret, shape=_shape(call)):
        if (reason := each.refusal(device, call)) is None:
            _tell_of_plain_xla(each, refusals)
            return each
        refusals.append(f"{each.name}: {reason}")
    raise _no_set_takes("paged_attention", refusals, backend, device.platform)


def _shape(call: Call) -> Shape | None:
    return None if call.attention is None else shape_of(call.attention)


def _no_set_takes(
    operation: str, refusals: list[str], backend: str, platform: str
) -> NotImplementedError:
    text = f"no backend of {operation} takes this call: {'; '.join(refusals)}"
    if backend == "auto" and platform == "gpu":
        text += f". Plain XLA runs on a GPU only where it is asked for by name: {XLA_ADVICE}"
    return NotImplementedError(text)


def _tell_of_plain_xla(chosen: KernelSet, refusals: list[str]) -> None:
    """Logs one line for a reason, whichever operations it is about: a start that compiles nothing says it too."""
    if refusals and not chosen.platforms:
        text = f"{'; '.join(refusals)}. Plain XLA ({chosen.name}) takes its place, which is slow"
        with _TELLING:  # steps are traced by several threads
            _warn_once(text)


@functools.cache
def _warn_once(text: str) -> None:
    logger.warning(text)
