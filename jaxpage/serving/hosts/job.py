"""`coordinator: auto`: the hosts are the processes of a job that Slurm, Open MPI or Kubernetes has started."""

from __future__ import annotations

import os

from jaxpage.device.mesh import find_job
from jaxpage.errors import ConfigError
from jaxpage.serving.config import AUTO, ServerConfig, of_several_hosts
from jaxpage.settings.engine_config import EngineConfig


def hosts_of_job(engine: EngineConfig, server: ServerConfig) -> ServerConfig:
    """The settings with rank, number of hosts and coordinator of the job, as JAX detects them, where `auto` asks for it.

    Raises ConfigError where there is no such job, ConfigError or UnsupportedError for what several hosts cannot do.
    """
    if server.coordinator != AUTO:
        return server
    job = find_job()
    if job is None:
        raise ConfigError(
            "coordinator: auto finds no job of Slurm, Open MPI or Kubernetes in the environment: give num_hosts, host_rank and coordinator"
        )
    if job.local_id is not None and engine.tensor_parallel_size == job.num_processes:
        os.environ.setdefault(
            "JAX_LOCAL_DEVICE_IDS", str(job.local_id)
        )  # JAX reads it; without it each process has all devices
    host, _, port = job.coordinator.rpartition(":")
    # the port behind it is used too, and JAX's may be the last
    coordinator = f"{host}:{int(port) - 1}"
    found = server.replace(
        coordinator=coordinator, num_hosts=job.num_processes, host_rank=job.process_id
    )
    if found.num_hosts > 1 and (errors := of_several_hosts(engine, found)):
        raise errors[0]
    return found
