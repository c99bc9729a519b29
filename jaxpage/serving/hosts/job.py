"""Finds the hosts of `coordinator: auto`, which are the processes of a job.

Slurm, Open MPI or Kubernetes has started the job.
"""

from __future__ import annotations

import os

from jaxpage.errors import ConfigError
from jaxpage.serving.hosts.processes import find_job
from jaxpage.serving.settings.resolving import of_several_hosts
from jaxpage.serving.settings.server_config import AUTO, ServerConfig
from jaxpage.settings.engine_config import EngineConfig


def hosts_of_job(engine: EngineConfig, server: ServerConfig) -> ServerConfig:
    """Returns the server's settings, completed from the job that has started this process.

    JAX detects the rank, the number of hosts and the coordinator. Without `coordinator: auto` the
    settings stay as they are.

    Args:
        engine: The settings of the engine.
        server: The settings of the server.

    Raises:
        ConfigError: There is no such job, or the settings do not fit its number of hosts.
        UnsupportedError: A setting is not supported with several hosts.
    """
    if server.coordinator != AUTO:
        return server
    job = find_job()
    if job is None:
        raise ConfigError(
            "coordinator: auto finds no job of Slurm, Open MPI or Kubernetes in the environment: "
            "give num_hosts, host_rank and coordinator"
        )
    if job.local_id is not None and engine.tensor_parallel_size == job.num_processes:
        # JAX reads this variable; without it each process takes all devices of its machine.
        os.environ.setdefault("JAX_LOCAL_DEVICE_IDS", str(job.local_id))
    host, _, port = job.coordinator.rpartition(":")
    # The channels use the port after the coordinator's, and the port that JAX has chosen may be the
    # last one there is.
    coordinator = f"{host}:{int(port) - 1}"
    settings = server.replace(
        coordinator=coordinator, num_hosts=job.num_processes, host_rank=job.process_id
    )
    if settings.num_hosts > 1 and (errors := of_several_hosts(engine, settings)):
        raise errors[0]
    return settings
