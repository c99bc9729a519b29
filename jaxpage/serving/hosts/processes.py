"""Finds the job that a process belongs to, and has JAX see the devices of all its processes."""

from __future__ import annotations

import atexit
import os
from typing import NamedTuple

import jax
from jax._src.clusters import ClusterEnv  # JAX has no public name for asking before it joins

# A cluster may not know the address of a job's first process at once.
DETECTION_SECONDS = 60


class JobProcess(NamedTuple):
    """A process of a job that started several, such as Slurm's or an Indexed Job of Kubernetes."""

    coordinator: str  # HOST:PORT, on the machine of process 0
    num_processes: int
    process_id: int
    local_id: int | None  # its number among those of its machine, where the job has several there


def find_job(seconds: int = DETECTION_SECONDS) -> JobProcess | None:
    """Returns what JAX detects of the job that this process belongs to, or None.

    Args:
        seconds: The time in which a cluster may answer what it does not know at once.
    """
    find = ClusterEnv.auto_detect_unset_distributed_params
    coordinator, num_processes, process_id, local_ids = find(None, None, None, None, None, seconds)
    if coordinator is None or num_processes is None or process_id is None:
        return None
    return JobProcess(coordinator, num_processes, process_id, local_ids[0] if local_ids else None)


def join_processes(
    coordinator: str, num_processes: int, process_id: int, join_seconds: float, grace_seconds: float
) -> None:
    """Has JAX see the devices of several processes, before it has opened any.

    Until `end_processes` is called, this process ends with status 1 at its exit, without the
    others: JAX would wait for processes that are gone, and abort.

    Args:
        coordinator: HOST:PORT of an interface of process 0, which listens there alone.
        num_processes: The number of processes.
        process_id: The number of this process.
        join_seconds: The time in which all must come together.
        grace_seconds: The time to wait for the others at the end.

    Raises:
        RuntimeError: The processes do not come together in time.
    """
    atexit.register(_end_alone)  # it runs before JAX's own, which was registered on import
    # Not every version of JAX has collectives among the CPUs of several processes by itself.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # The service would keep SIGTERM from ending a process.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        coordinator,
        num_processes,
        process_id,
        # In a job of Slurm JAX would take one device of this machine and leave the others.
        cluster_detection_method="deactivate",
        coordinator_bind_address=coordinator,
        initialization_timeout=int(join_seconds),
        shutdown_timeout_seconds=int(grace_seconds),
    )


def end_processes() -> None:
    """Lets the process wait at its exit for the others, which are asked to end, too.

    Without other processes nothing changes.
    """
    atexit.unregister(_end_alone)


def _end_alone() -> None:
    os._exit(1)
