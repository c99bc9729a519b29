"""Keeps the registry of kernel sets, one file for each, and chooses among them."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from pallas_kernels.compat import target_device
from pallas_kernels.kernel_set import Call, KernelSet
from pallas_kernels.sets import cpu, fa3, mosaic, reference, scan, tpu, triton
from pallas_kernels.tiles import Shape, find_measured_set, shape_of

logger = logging.getLogger(__name__)
Result = TypeVar("Result")
_TELLING = threading.Lock()

# The sets are in the order in which "auto" tries them; `candidates` has other rules for attention.
# Each has the name of its file, so that names can be listed without importing JAX.
SETS: dict[str, KernelSet] = {
    each.name: each
    for each in (triton.SET, fa3.SET, mosaic.SET, cpu.SET, tpu.SET, scan.SET, reference.SET)
}

BACKENDS = tuple(SETS)
DEFINITION = reference.SET.name  # the set that defines the results of the others
XLA_BACKENDS = tuple(name for name, each in SETS.items() if not each.platforms)
# The definition gathers the whole context of every token of a chunk at once.
XLA_ADVICE = (
    f"{' or '.join(XLA_BACKENDS)}; {DEFINITION} needs far more memory for long chunks of prompts"
)
KERNEL_BACKENDS = tuple(name for name, each in SETS.items() if "gpu" in each.platforms)
GPU_BACKENDS = tuple(
    name for name, each in SETS.items() if each.runs_on("gpu")
)  # the sets that checks and benchmarks of GPUs run
# The sets whose kernels also run on CPU, with interpret=True.
INTERPRETABLE_BACKENDS = tuple(name for name, each in SETS.items() if each.interpretable)


def candidates(
    backend: str, platform: str, *, interpret: bool = False, shape: Shape | None = None
) -> tuple[KernelSet, ...]:
    """Returns the sets to try in order: that of this name, or for "auto" those of the platform.

    On a GPU, and to interpret, "auto" means only kernels for GPUs. For attention "auto" first tries
    the set that was measured to be fastest on this kind of GPU, then the sets whose `comes_first`
    names the kind of step. The order never depends on how many rows a call has.

    Args:
        backend: The name of a set, or "auto".
        platform: The platform of JAX.
        interpret: Says whether kernels run on CPU.
        shape: The shape of a call of attention; None for other operations.

    Raises:
        ValueError: No set has this name.
    """
    if backend == "auto":
        gpu = interpret or platform == "gpu"
        sets = [
            each
            for each in SETS.values()
            if ("gpu" in each.platforms if gpu else each.runs_on(platform))
        ]
        if shape is not None:
            fastest = find_measured_set(shape)
            # A stable sort: all others stay in the order of `SETS`.
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
    """Returns the result of an operation by the first candidate that takes the call.

    Args:
        operation: The name of the operation, for messages.
        pick: Returns a set's function for this operation.
        *arguments: The arguments of the function.
        call: The call.
        backend: The name of a set, or "auto".

    Raises:
        ValueError: No set has this name.
        NotImplementedError: No set takes the call; the message has every set's reason.
    """
    device = target_device()
    refusals = list[str]()
    refused = list[KernelSet]()
    names = ("interpret", "tiles", "batch_invariant")
    options = {name: value for name in names if (value := getattr(call, name))}
    for each in candidates(backend, device.platform, interpret=call.interpret, shape=_shape(call)):
        try:
            if (reason := each.refusal(device, call)) is None:
                result = pick(each)(*arguments, **options)
                # Sets may share the function of an operation, and then nothing slower takes its
                # place.
                if any(pick(other) is not pick(each) for other in refused):
                    _warn_of_plain_xla(each, refusals)
                return result
        except NotImplementedError as refusal:
            reason = str(refusal)
        refusals.append(f"{each.name}: {reason}")
        refused.append(each)
    raise _no_set_takes(operation, refusals, backend, device.platform)


def set_for(call: Call, *, backend: str, device: Any) -> KernelSet:
    """Returns the first candidate that takes a call of attention, without computing the call.

    Raises:
        ValueError: No set has this name.
        NotImplementedError: No set takes the call; the message has every set's reason.
    """
    refusals: list[str] = []
    for each in candidates(backend, device.platform, interpret=call.interpret, shape=_shape(call)):
        if (reason := each.refusal(device, call)) is None:
            _warn_of_plain_xla(each, refusals)
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


def _warn_of_plain_xla(chosen: KernelSet, refusals: list[str]) -> None:
    """Logs once for each reason that plain XLA takes the place of a kernel.

    A start that compiles nothing logs it too.
    """
    if refusals and not chosen.platforms:
        text = f"{'; '.join(refusals)}. Plain XLA ({chosen.name}) takes its place, which is slow"
        with _TELLING:  # because several threads trace steps
            _warn_once(text)


@functools.cache
def _warn_once(text: str) -> None:
    logger.warning(text)
