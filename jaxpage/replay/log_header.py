"""Which engine a log is of: its first record, and whether the engine at hand is the same."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import platform
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from jaxpage.assembly import EngineSpec, shards_of_weights
from jaxpage.checkpoints import load_shards
from jaxpage.checkpoints.opening import ModelFiles
from jaxpage.engine.engine import Engine
from jaxpage.errors import EventLogError, JaxpageError
from jaxpage.replay.event_log import LogReader
from jaxpage.replay.recorder import Record
from jaxpage.settings.argument_checks import shown
from jaxpage.settings.engine_config import EngineConfig

logger = logging.getLogger(__name__)

FORMAT = 4  # 4: limits and buckets of several steps in one; placeholders among the drafts
_HASHED_AT_ONCE = 4  # arrays, each of which may be copied to the host
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
    """A parameter of which other hosts have parts: it is read again from the checkpoint."""

    is_fully_replicated = False

    def __init__(self, part: Callable[[int], np.ndarray], num_parts: int) -> None:
        self._part, self._num_parts = part, num_parts

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.concatenate([self._part(device) for device in range(self._num_parts)])


def header(
    config: EngineConfig, engine: Engine, spec: EngineSpec, files: ModelFiles | None = None
) -> Record:
    """Which engine it is: all that decides its schedule and its tokens, besides the events. Reads all weights once.

    files: of the model; needed on several hosts, each of which has its own parts of the weights.
    """
    parameters = engine.runner.parameters
    target = parameters["target"]
    if files and not all(leaf.is_fully_addressable for leaf in jax.tree.leaves(target)):
        target = _of_all_hosts(files, spec)
    return {
        "event": "header",
        "format": FORMAT,
        "versions": versions(),
        "device": f"{spec.memory.device} of {platform.machine()}",
        "config": config.model_dump(),
        "config_hash": config_hash(config.model_dump()),
        "weights_hash": weights_hash(
            target if parameters["drafter"] is None else {**parameters, "target": target}
        ),
        "engine": spec.record(),
    }


def versions() -> dict[str, str]:
    return {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}}


def read_header(log: LogReader) -> Record:
    """Of a log that has just been opened. Raises EventLogError if it is none, or none of this version."""
    log.take()
    logged = log.next or {}
    if logged.get("event") != "header":
        log.refuse("this is not an event log: it does not begin with a header")
    if logged.get("format") != FORMAT:
        log.refuse(
            f"the log has format {shown(logged.get('format'))}; this version reads format {FORMAT}. "
            "Replay it with the version that wrote it, or record a new log"
        )
    for name, kind in _FIELDS.items():
        if not isinstance(logged.get(name), kind):
            log.refuse(
                f"{name} of the header must be a {kind.__name__}, got {shown(logged.get(name))}"
            )
    return logged


def check_replayable(log: LogReader, incident: Record) -> None:
    """Raises EventLogError for what a server kept of its last steps, if that is not all, or is scrubbed."""
    if incident.get("why_not_replayable"):
        log.refuse(
            f"this incident cannot be run again: {incident['why_not_replayable']}. Look into it with --request, --diff or --state"
        )


def logged_config(
    log: LogReader, logged: Record, model: str | None, *, keeps_tokenizer: bool
) -> EngineConfig:
    """The settings of the log, with what they left to the machine as it was resolved there.

    keeps_tokenizer: the log's own is needed; otherwise the model's, or none, will do.
    """
    resolved = {
        name: logged["engine"].get(name)
        for name in ("dtype", "max_model_len", "num_blocks", "swap_space_blocks")
    }
    defaults = EngineConfig().model_dump()  # what has its default was not asked for
    asked = {
        name: value for name, value in logged["config"].items() if value != defaults.get(name, ...)
    }
    settings = {**asked, **resolved, "kv_cache_memory_bytes": None, "event_log": None}
    if not keeps_tokenizer:
        settings["tokenizer"] = None
    if model is not None:
        settings |= {"model": model, "revision": None, "load_format": "auto"}
    try:
        return EngineConfig(**settings)
    except JaxpageError as error:
        log.refuse(f"its settings cannot be had: {error}")


def compare_engines(logged: Record, ours: Record, *, force: bool) -> None:
    """Warns of other versions and devices. Raises EventLogError, unless forced, if the schedule or the tokens can not be the same."""
    for name, version in {**ours["versions"], "device": ours["device"]}.items():
        before = {**logged["versions"], "device": logged["device"]}.get(name)
        if before != version:
            logger.warning(
                "The log was written with %s %s, and this is %s: last bits may differ",
                name,
                before,
                version,
            )
    problems = []
    if logged["config_hash"] != config_hash(logged["config"]):
        problems.append("the settings in the log were changed after it was written")
    if logged["weights_hash"] != ours["weights_hash"]:
        problems.append(
            f"the weights of {ours['config']['model']!r} are not those of the log (hash {ours['weights_hash']}, there "
            f"{shown(logged['weights_hash'])}); --model names another directory"
        )
    for name, value in ours["engine"].items():
        if logged["engine"].get(name) != value:
            problems.append(f"{name} is {value}, in the log {shown(logged['engine'].get(name))}")
    if problems and not force:
        raise EventLogError("\n".join([*problems, "--force replays the log all the same"]))
    for problem in problems:
        logger.warning("Replaying all the same: %s", problem)


def config_hash(config: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(config, sort_keys=True).encode(), digest_size=16).hexdigest()


def weights_hash(parameters: Any) -> str:
    """Of the names, shapes, types and bytes of all parameters as they are loaded."""
    leaves = jax.tree_util.tree_leaves_with_path(parameters)
    with ThreadPoolExecutor(_HASHED_AT_ONCE) as pool:
        digests = pool.map(lambda leaf: _leaf_digest(*leaf), leaves)
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
    # A handle of its own, which keeps the host's copy for as long as it lives.
    handle = leaf.addressable_data(0) if leaf.is_fully_replicated else leaf
    array = np.asarray(handle)
    name = jax.tree_util.keystr(path, simple=True, separator=".")
    digest = hashlib.blake2b(f"{name} {array.dtype} {array.shape}\0".encode(), digest_size=16)
    digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.digest()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # run from a source tree
        return "not installed"
