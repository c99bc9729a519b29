"""Brings the hosts together before they serve.

Each follower connects to rank 0, then all join `jax.distributed`, and then each builds an engine of
the same shapes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import socket
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jaxpage.assembly.planning import EngineSpec, drafter_directory
from jaxpage.checkpoints.finding import resolve_model, resolve_tokenizer
from jaxpage.errors import JaxpageError
from jaxpage.replay import Record, encode_record, package_versions
from jaxpage.serving.hosts.channel import Channel, Refused, greet_follower, greet_leader
from jaxpage.serving.hosts.processes import join_processes
from jaxpage.serving.hosts.secret import read_secret
from jaxpage.serving.settings.server_config import ServerConfig
from jaxpage.settings.argument_checks import show
from jaxpage.settings.engine_config import NO_LOG, EngineConfig

logger = logging.getLogger(__name__)

JOIN_SECONDS = 300.0  # the time in which all hosts must have joined
END_SECONDS = 10.0  # the time that a host waits for the others at the end
_RETRY_SECONDS = 0.2
# The paths of models may differ, because their files are hashed; rank 0 alone writes a log.
_NOT_COMPARED = ("model", "tokenizer", *NO_LOG)
_SIZES = ("num_blocks", "swap_space_blocks")


class HostsError(JaxpageError):
    """Says that the hosts cannot come together."""


def join(engine: EngineConfig, server: ServerConfig) -> dict[int, Channel]:
    """Waits for all hosts, and makes their devices known to JAX; call it before JAX opens devices.

    Args:
        engine: The settings of the engine.
        server: The settings of the server.

    Returns:
        The channels to the other hosts by rank; that of a follower leads to rank 0.

    Raises:
        ConfigError: There is no secret.
        HostsError: A host has not come, or this one is refused.
    """
    secret = read_secret(server)
    host, port = coordinator_of(server)
    about = _about(engine, server)
    # The port itself is that of jax.distributed.
    if server.host_rank:
        channels = {0: _join_leader(host, port + 1, secret, server.host_rank, about)}
    else:
        channels = _join_followers(host, port + 1, secret, server.num_hosts, about)
    try:
        join_processes(
            server.coordinator or "",
            server.num_hosts,
            server.host_rank,
            JOIN_SECONDS,
            END_SECONDS,
        )
    except RuntimeError as error:
        raise HostsError(f"coordinator {server.coordinator}: {error}") from None
    return channels


def min_sizes(
    spec: EngineSpec, channels: Mapping[int, Channel], *, host_rank: int
) -> dict[str, int]:
    """Returns settings with which the engine fits into the memory of every host.

    It is called before a model is loaded, and logs which host has the least memory.

    Args:
        spec: The spec of the engine as this host has planned it.
        channels: The channels to the other hosts.
        host_rank: The rank of this host.

    Returns:
        The sizes to change; none if all hosts have planned the same.

    Raises:
        HostsError: A host is gone, or has chosen another dtype, which may follow its processor.
    """
    record = spec.record()
    records = _exchange_with_all(
        {"event": "sizes", **{name: record[name] for name in ("dtype", *_SIZES)}},
        channels,
        host_rank,
    )
    _check_same(
        [{"dtype": each["dtype"]} for each in records],
        "; it follows the processor of a host: give --dtype on all",
    )
    sizes = {name: [each[name] for each in records] for name in _SIZES}
    differing = [name for name, values in sizes.items() if len(set(values)) > 1]
    for name in differing:
        minimum = min(sizes[name])
        maximum = max(sizes[name])
        text = (
            "%s is %d on all hosts, since rank %d has memory for no more; rank %d has memory for %d"
        )
        logger.warning(
            text, name, minimum, sizes[name].index(minimum), sizes[name].index(maximum), maximum
        )
    # Another size of the pool changes the swap space that follows from it, so both are fixed.
    return {
        name: min(values)
        for name, values in sizes.items()
        if name in differing or "num_blocks" in differing
    }


def agree(spec: EngineSpec, channels: Mapping[int, Channel], *, host_rank: int) -> None:
    """Waits until the engines of all hosts are compiled, and checks that they are the same.

    Args:
        spec: The spec of this host's engine.
        channels: The channels to the other hosts.
        host_rank: The rank of this host.

    Raises:
        HostsError: A host is gone, or its engine has another pool or other shapes.
    """
    records = _exchange_with_all({"event": "engine", "engine": spec.record()}, channels, host_rank)
    _check_same([each["engine"] for each in records])


def _exchange_with_all(
    record: Record, channels: Mapping[int, Channel], host_rank: int
) -> list[Record]:
    """Sends a record to all hosts, and returns the records of all in order of rank."""
    records: list[Record] = [json.loads(encode_record(record))]
    ranks = range(1, len(channels) + 1) if host_rank == 0 else ()
    rank = 0
    for channel in channels.values():
        channel.set_timeout(None)  # one host may load its model much faster than another
    try:
        if host_rank:
            channels[0].send(record)
            records = channels[0].receive()["said"]
        for rank in ranks:
            records.append(channels[rank].receive())
        for rank in ranks:
            channels[rank].send({"event": "all", "said": records})
    except OSError as error:
        raise HostsError(f"rank {rank} has ended while it started: {error}") from None
    return records


def _check_same(records: Sequence[Record], advice: str = "") -> None:
    for rank, theirs in enumerate(records[1:], 1):
        if difference := _difference(theirs, records[0], rank):
            raise HostsError(f"rank {rank} has another engine than rank 0: {difference}{advice}")


def coordinator_of(server: ServerConfig) -> tuple[str, int]:
    """Returns the host and the port of the setting `coordinator`."""
    host, _, port = (server.coordinator or "").rpartition(":")
    # An address of IPv6 is written in brackets before its port.
    return host.strip("[]"), int(port)


def _join_followers(
    host: str, port: int, secret: bytes, num_hosts: int, about: Record
) -> dict[int, Channel]:
    channels: dict[int, Channel] = {}
    deadline = time.monotonic() + JOIN_SECONDS
    try:
        listener = socket.create_server((host, port), family=_family(host, port))
    except OSError as error:
        raise HostsError(
            f"cannot listen on {host} port {port} for other hosts: {error.strerror}"
        ) from None
    with listener:
        while len(channels) < num_hosts - 1:
            # A socket with the timeout 0 does not wait at all, and one below 0 is an error.
            listener.settimeout(max(0.1, deadline - time.monotonic()))
            try:
                connection, address = listener.accept()
            except TimeoutError:
                missing = sorted(set(range(1, num_hosts)) - set(channels))
                raise HostsError(
                    f"rank {missing} of {num_hosts} hosts did not join in {JOIN_SECONDS:g} s"
                ) from None
            try:
                rank, channel = _admit(connection, secret, channels, num_hosts, about)
                channels[rank] = channel
            except (OSError, ValueError, Refused) as error:
                logger.warning("the host at %s was refused: %s", address[0], error)
                connection.close()
    return channels


def _admit(
    connection: socket.socket,
    secret: bytes,
    known: Mapping[int, Channel],
    num_hosts: int,
    about: Record,
) -> tuple[int, Channel]:
    rank, channel = greet_follower(connection, secret)
    theirs = channel.receive()
    why = _difference(theirs, about, rank)
    if rank in known or not 0 < rank < num_hosts:
        why = f"rank {rank} is taken or none of 1 to {num_hosts - 1}"
    channel.send({"event": "refused", "why": why} if why else {"event": "welcome"})
    if why:
        raise Refused(f"rank {rank}: {why}")
    return rank, channel


def _join_leader(host: str, port: int, secret: bytes, rank: int, about: Record) -> Channel:
    connection = _connect(host, port)
    try:
        channel = greet_leader(connection, secret, rank)
        channel.send(about)
        channel.set_timeout(JOIN_SECONDS)  # rank 0 admits the hosts one at a time
        answer = channel.receive()
    except Refused as error:
        raise HostsError(f"rank 0 at {host} port {port}: {error}") from None
    except (OSError, ValueError) as error:
        raise HostsError(f"rank 0 at {host} port {port} has not answered: {error}") from None
    if why := answer.get("why"):
        raise HostsError(f"rank 0 at {host} port {port} refuses this rank: {why}")
    return channel


def _connect(host: str, port: int) -> socket.socket:
    deadline = time.monotonic() + JOIN_SECONDS
    while True:
        try:
            return socket.create_connection((host, port), timeout=_RETRY_SECONDS * 10)
        except OSError as error:
            if time.monotonic() > deadline:
                raise HostsError(f"rank 0 is not at {host} port {port}: {error}") from None
            time.sleep(_RETRY_SECONDS)


def _family(host: str, port: int) -> socket.AddressFamily:
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]


def _about(engine: EngineConfig, server: ServerConfig) -> Record:
    """Returns a record of what must be the same on all hosts and is known before a model is loaded.

    It is like the header of an event log, with hashes of the files.
    """
    config = {
        name: value for name, value in engine.model_dump().items() if name not in _NOT_COMPARED
    }
    drafts = engine.speculative_config
    if (
        drafter := None
        if drafts is None or drafts.model is None
        else model_hash(drafter_directory(drafts))
    ):
        config["speculative_config"] = {**config["speculative_config"], "model": None}
    adapters = (module.partition("=") for module in server.lora_modules or ())
    files = {
        "model": model_hash(resolve_model(engine.model, engine.revision)),
        "drafter": drafter,
        "tokenizer": None
        if engine.tokenizer is None
        else model_hash(resolve_tokenizer(engine.tokenizer)),
        **{f"LoRA adapter {name!r}": model_hash(Path(path)) for name, _, path in adapters},
        # The files in it are compared when they are loaded.
        "weights_directory": None if server.weights_directory is None else "",
    }
    record = {
        "event": "header",
        "versions": {**package_versions(), "machine": platform.machine()},
        "config": {**config, "num_hosts": server.num_hosts},
        "files": files,
    }
    described: Record = json.loads(encode_record(record))
    return described


def model_hash(model: Path) -> str:
    """Returns a hash of the names and bytes of all files of a model, without hidden ones.

    It reads every file once.
    """
    paths = (
        [model]
        if model.is_file()
        else [path for path in sorted(model.rglob("*")) if path.is_file()]
    )
    names = ["" if path == model else path.relative_to(model).as_posix() for path in paths]
    # hashlib releases the GIL while it hashes.
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        digests = pool.map(_file_hash, paths)
        facts = [
            (name, digest)
            for name, digest in zip(names, digests, strict=True)
            if not name.startswith(".")
        ]
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()


def _file_hash(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()


def _difference(theirs: Record, ours: Record, rank: int) -> str | None:
    """Returns the first difference between two records, in words that hold on both hosts.

    `theirs` is the record of that rank, and `ours` is that of rank 0.
    """
    for name, value in ours.items():
        other = theirs.get(name)
        if isinstance(value, dict) and isinstance(other, dict):
            compare = _difference_of_files if name == "files" else _difference
            if (why := compare(other, value, rank)) is not None:
                return why if name in ("config", "files") else f"{name}: {why}"
        elif other != value:
            return f"{name} is {show(other)} on rank {rank}, {show(value)} on rank 0"
    return None


def _difference_of_files(theirs: Record, ours: Record, rank: int) -> str | None:
    for name, value in ours.items():
        other = theirs.get(name)
        if other != value and (other is None or value is None):
            return f"the {name} is given on rank {0 if other is None else rank} alone"
        if other != value:
            return (
                f"the files of the {name} differ (hash {other} on rank {rank}, {value} on rank 0)"
            )
    return None
