"""Makes the header of a log, which describes its engine, and compares it with another engine."""

from __future__ import annotations

import hashlib
import json
import logging
import platform
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from jaxpage.assembly import shards_of_weights
from jaxpage.assembly.planning import EngineSpec
from jaxpage.checkpoints import ModelFiles, load_shards
from jaxpage.device import Packings, unpack_weight
from jaxpage.device.hardware import cpu_kernels
from jaxpage.engine import Engine
from jaxpage.errors import EventLogError, JaxpageError
from jaxpage.replay.event_log import LogReader
from jaxpage.replay.recorder import Record
from jaxpage.settings.argument_checks import show
from jaxpage.settings.engine_config import NO_LOG, EngineConfig
from jaxpage.versions import package_version

logger = logging.getLogger(__name__)

FORMAT = 4  # 4: several steps in one, with placeholders as drafts
_HASHED_AT_ONCE = 4  # the most arrays that are hashed, and copied to the host, at a time
_PACKAGES = ("jaxpage", "jax", "jaxlib", "llguidance")
_FIELDS = {
    "versions": dict,
    "device": str,
    "config": dict,
    "config_hash": str,
    "weights_hash": str,
    "engine": dict,
}


class _InFiles:
    """Reads a parameter again from the checkpoint, because other hosts have parts of it."""

    is_fully_replicated = False

    def __init__(self, part: Callable[[int], np.ndarray], num_parts: int) -> None:
        self._part = part
        self._num_parts = num_parts

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.concatenate([self._part(device) for device in range(self._num_parts)])


def engine_header(
    config: EngineConfig, engine: Engine, spec: EngineSpec, files: ModelFiles | None = None
) -> Record:
    """Returns the header: everything other than the events on which schedule and tokens depend.

    It reads all weights once, for their hash.

    Args:
        config: The settings.
        engine: The engine.
        spec: The engine's specification.
        files: The model's files. They are needed on several hosts, each of which has only its own
            parts of the weights.
    """
    parameters, executables = engine.parameters, engine.executables
    target = parameters["target"]
    if files and not all(leaf.is_fully_addressable for leaf in jax.tree.leaves(target)):
        target = _of_all_hosts(files, spec)
    has_more = parameters["drafter"] is not None or "vision" in parameters
    settings = {**config.model_dump(), "block_size": spec.memory.block_size}  # no "auto"
    return {
        "event": "header",
        "format": FORMAT,
        "versions": package_versions(),
        "device": _device(spec),
        "autotuning": executables.autotuning,
        "config": settings,
        "config_hash": config_hash(settings),
        "weights_hash": weights_hash(
            {**parameters, "target": target} if has_more else target,
            engine.packed,
        ),
        "engine": spec.record(),
    }


def _device(spec: EngineSpec) -> str:
    """Returns the device with all that decides its bits: on a CPU, the kernels' instructions."""
    place = spec.described.device
    kernels = f", kernels {cpu_kernels()}" if place.is_cpu else ""
    return f"{place.name} of {platform.machine()}{kernels}"


def package_versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages that decide the numbers."""
    versions = {name: package_version(name) for name in _PACKAGES}
    return {"python": platform.python_version(), **versions}


def read_header(log: LogReader) -> Record:
    """Returns the header of a log that has just been opened.

    Raises:
        EventLogError: The file is no log, or has another format.
    """
    log.take()
    logged = log.next or {}
    if logged.get("event") != "header":
        log.refuse("this is not an event log: it does not begin with a header")
    if logged.get("format") != FORMAT:
        log.refuse(
            f"the log has format {show(logged.get('format'))}; this version reads format {FORMAT}. "
            "Replay it with the version that wrote it, or record a new log"
        )
    for name, kind in _FIELDS.items():
        if not isinstance(logged.get(name), kind):
            log.refuse(
                f"{name} of the header must be a {kind.__name__}, got {show(logged.get(name))}"
            )
    return logged


def check_replayable(log: LogReader, incident: Record) -> None:
    """Checks that an incident, which a server made of its last steps, can be replayed.

    Raises:
        EventLogError: It lacks the first steps or the token ids.
    """
    if incident.get("why_not_replayable"):
        log.refuse(
            f"this incident cannot be run again: {incident['why_not_replayable']}. Look into "
            "it with --request, --diff or --state"
        )


def read_logged_config(
    log: LogReader, logged: Record, model: str | None, *, keeps_tokenizer: bool
) -> EngineConfig:
    """Returns the settings of the log, with the values that "auto" had on its machine.

    Args:
        log: The log.
        logged: Its header.
        model: The model; None is that of the log.
        keeps_tokenizer: True if the replay needs the tokenizer that the log names; otherwise the
            model's, or none, is enough.

    Raises:
        EventLogError: The settings are refused.
    """
    resolved = {
        name: logged["engine"].get(name)
        for name in ("dtype", "max_model_len", "num_blocks", "swap_space_blocks")
    }
    defaults = EngineConfig().model_dump()  # a value that equals its default counts as not given
    requested = {
        # `...` equals no value, so a setting of a later version stays and is refused by its name.
        name: value
        for name, value in logged["config"].items()
        if value != defaults.get(name, ...)
    }
    settings = {**requested, **resolved, "kv_cache_memory_bytes": None, **NO_LOG}
    if "limit_images" not in logged["config"]:  # a log from before pictures
        settings["limit_images"] = 0
    if not keeps_tokenizer:
        settings["tokenizer"] = None
    if model is not None:
        settings |= {"model": model, "revision": None, "load_format": "auto"}
    try:
        return EngineConfig(**settings)
    except JaxpageError as error:
        log.refuse(f"its settings cannot be had: {error}")


def compare_engines(logged: Record, ours: Record, *, force: bool) -> None:
    """Warns about other versions and devices, and refuses an engine that cannot repeat the log.

    Args:
        logged: The header of the log.
        ours: The header of the engine.
        force: True only warns of what would be refused.

    Raises:
        EventLogError: Settings, weights or shapes differ.
    """
    for name, version in {**ours["versions"], "device": ours["device"]}.items():
        before = {**logged["versions"], "device": logged["device"]}.get(name)
        if before != version:
            logger.warning(
                "The log was written with %s %s, and this is %s: last bits may differ",
                name,
                before,
                version,
            )
    if other := _other_choices(logged, ours):
        logger.warning("%s", other)
    problems = []
    if logged["config_hash"] != config_hash(logged["config"]):
        problems.append("the settings in the log were changed after it was written")
    if logged["weights_hash"] != ours["weights_hash"]:
        problems.append(
            f"the weights of {ours['config']['model']!r} are not those of the log (hash "
            f"{ours['weights_hash']}, there "
            f"{show(logged['weights_hash'])}); --model names another directory"
        )
    for name, value in ours["engine"].items():
        if logged["engine"].get(name) != value:
            problems.append(f"{name} is {value}, in the log {show(logged['engine'].get(name))}")
    if problems and not force:
        raise EventLogError("\n".join([*problems, "--force replays the log all the same"]))
    for problem in problems:
        logger.warning("Replaying all the same: %s", problem)


def explain_difference(difference: str | None, logged: Record, ours: Record) -> str | None:
    """Returns the first difference of a replay, with the reason that is in the headers, if any."""
    other = _other_choices(logged, ours)
    return f"{difference}\n{other}" if difference and other else difference


def _other_choices(logged: Record, ours: Record) -> str:
    """Returns the sentence that XLA's autotuning chose otherwise for a log; "" if it did not.

    It is empty for a log that does not say what was chosen.
    """
    before = logged.get("autotuning")
    if before is None or before == ours["autotuning"]:
        return ""
    return (
        f"XLA's autotuning chose other kernels for the log (hash {show(before)}, here "
        f"{show(ours['autotuning'])}): bits may differ"
    )


def config_hash(config: dict[str, Any]) -> str:
    """Returns the hash of the settings."""
    return hashlib.blake2b(json.dumps(config, sort_keys=True).encode(), digest_size=16).hexdigest()


def weights_hash(parameters: Any, packed: Packings | None = None) -> str:
    """Returns the hash of the names, shapes, types and bytes of all loaded parameters.

    Args:
        parameters: The parameters of a model and its drafter, or of a model alone.
        packed: The weights that are in panels; None if there are none. The hash is that of the
            weights as they were.
    """
    sizes = packed or {}

    def plain(path: tuple[Any, ...], leaf: Any) -> Any:
        keys = tuple(key.key for key in path)
        # The paths of a model alone lack its key.
        size = sizes.get(keys) or sizes.get(("target", *keys))
        return unpack_weight(leaf, size) if size and isinstance(leaf, jax.Array) else leaf

    leaves = jax.tree_util.tree_leaves_with_path(parameters)
    with ThreadPoolExecutor(_HASHED_AT_ONCE) as pool:
        digests = pool.map(lambda leaf: _leaf_digest(leaf[0], plain(*leaf)), leaves)
        return hashlib.blake2b(b"".join(digests), digest_size=16).hexdigest()


def _of_all_hosts(files: ModelFiles, spec: EngineSpec) -> Any:
    count = spec.layout.tensor_parallel_size
    return load_shards(
        files.plan,
        spec.layout.dtype,
        shards_of_weights(files, spec),
        lambda array: _InFiles(lambda device: array, 1),
        lambda shape, dtype, part: _InFiles(part, count),
    )


def _leaf_digest(path: Any, leaf: Any) -> bytes:
    # The host's copy lives as long as this handle, and so does not stay with the parameter.
    handle = leaf.addressable_data(0) if leaf.is_fully_replicated else leaf
    array = np.asarray(handle)
    name = jax.tree_util.keystr(path, simple=True, separator=".")
    digest = hashlib.blake2b(f"{name} {array.dtype} {array.shape}\0".encode(), digest_size=16)
    digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.digest()
