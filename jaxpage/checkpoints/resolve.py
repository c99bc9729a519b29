"""From the name a user gives a model to where it is: packaged, fetched, a local directory or GGUF file, or from the Hugging Face hub."""

from __future__ import annotations

import glob
import logging
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from jaxpage.checkpoints.config_file import MODELOPT_FILE
from jaxpage.checkpoints.fetched import FETCHABLE, check_fetched, fetched_path
from jaxpage.checkpoints.gguf_header import looks_like_gguf
from jaxpage.checkpoints.safetensors_files import INDEX, SINGLE, weight_map
from jaxpage.errors import CheckpointError, ConfigError, ModelNotFoundError
from jaxpage.settings.argument_checks import close_names

logger = logging.getLogger(__name__)

DEMO = Path(__file__).parents[1] / "demo"
# the demo model, and what drafts for it
PACKAGED = ("demo", "demo/draft", "demo/medusa", "demo/eagle3")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", re.ASCII)

# What a model needs and nothing else: no pickles, no code, no copies of the weights in other
# formats.
TOKENIZER_FILES = (
    *(
        "config.json",
        "tokenizer*",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "merges.txt",
    ),
    *("vocab.txt", "spiece.model", "chat_template.*", "additional_chat_templates/*"),
)
HUB_FILES = (*TOKENIZER_FILES, "generation_config.json", MODELOPT_FILE, SINGLE, INDEX, "orbax/*")
_WEIGHTS = (SINGLE, "orbax/*")  # fetched after the index, together with the shards that it names


def resolve_model(
    model: str | os.PathLike[str],
    revision: str | None = None,
    *,
    hub_files: Sequence[str] = HUB_FILES,
) -> Path:
    """The directory or GGUF file of `model`: one of `PACKAGED` or `FETCHABLE`, a local directory or GGUF file, or a hub id such as
    "org/name", in this order.

    There is a warning where a local directory has such a name too; "./demo" is that one.
    All files of a hub model come from one snapshot, the one that `revision` (branch, tag or commit) names when asked;
    what is in the hub's cache is used without a download. Raises ModelNotFoundError, with the nearest names, when there
    is no such model, and ConfigError for a revision of what is not on the hub. hub_files: globs of what is wanted from there.
    """
    name = os.fspath(model)
    local = _own(name) or Path(name).expanduser()
    if _own(name) and os.path.isdir(name) and local.resolve() != Path(name).resolve():
        whose = "packaged with jaxpage" if name in PACKAGED else "of `jaxpage fetch`"
        logger.warning(
            "model = %r is the model %s; for the directory of that name use %r",
            name,
            whose,
            f"./{name}",
        )
    if name in FETCHABLE:
        check_fetched(name)
    is_file = looks_like_gguf(local)
    if name and (os.path.isdir(local) or is_file):  # "" would be the current directory
        if revision is not None:
            kind = "file" if is_file else "directory"
            raise ConfigError(
                f"revision = {revision!r} names a version on the hub, but model = {name!r} is a {kind}"
            )
        return local.resolve()
    if name in PACKAGED:
        raise ModelNotFoundError(
            f"the packaged {name} model is missing from this installation ({local})"
        )
    if name and os.path.lexists(local):
        raise ModelNotFoundError(
            f"model = {name!r} is not a directory, and no GGUF file: give one, or the directory that holds its config.json"
        )
    if name.endswith(".gguf"):
        raise ModelNotFoundError(f"model = {name!r}: there is no such file{_near(name)}")
    if not HUB_ID.fullmatch(name):
        raise ModelNotFoundError(f"model = {name!r}: there is no such directory{_near(name)}")
    return _from_hub(name, revision, hub_files)


def local_model(name: str) -> Path | None:
    """As `resolve_model`, of what is on this machine under its own name: the hub and its cache are not asked."""
    path = _own(name) or Path(name).expanduser()
    return path if name and (os.path.isdir(path) or looks_like_gguf(path)) else None


def _own(name: str) -> Path | None:
    """Where a model of a name that is jaxpage's own is."""
    if name in PACKAGED:
        return DEMO / name[len("demo/") :]
    return fetched_path(name) if name in FETCHABLE else None


def resolve_model_config(model: str | os.PathLike[str], revision: str | None = None) -> Path:
    """As `resolve_model`, where config.json is all that is wanted: it may be named itself, and nothing else comes from the hub."""
    path = Path(model).expanduser()
    is_file = path.name == "config.json" and os.path.isfile(path)
    return resolve_model(
        path.parent if is_file else model, revision, hub_files=("config.json", MODELOPT_FILE)
    )


def resolve_tokenizer(model: str | os.PathLike[str]) -> Path:
    """As `resolve_model`, where the tokenizer is all that is wanted: no weights come from the hub."""
    return resolve_model(model, hub_files=TOKENIZER_FILES)


def _from_hub(name: str, revision: str | None, files: Sequence[str]) -> Path:
    try:
        import huggingface_hub  # lazy on purpose: a local model needs no HTTP client

        def fetch(patterns: Iterable[str], version: str | None) -> Path:
            snapshot = huggingface_hub.snapshot_download(
                repo_id=name, revision=version, allow_patterns=list(patterns)
            )
            return Path(snapshot).resolve()

        snapshot = fetch([pattern for pattern in files if pattern not in _WEIGHTS], revision)
        if INDEX not in files:
            return snapshot
        # The directory of a snapshot is named by its commit: a push in between changes nothing.
        weights = [*(pattern for pattern in files if pattern in _WEIGHTS), *_shards(snapshot)]
        return fetch(weights, snapshot.name)
    except Exception as error:  # offline, unknown, private, gone, disk full: the model is not here
        version = f" at revision {revision!r}" if revision else ""
        reason = (str(error).strip().split("\n", 1)[0] or type(error).__name__)[:300]
        if _is_unreachable(error):
            found = f"the hub cannot be reached, and its cache on this machine has no such model{version}"
        else:
            found = f"the hub gave no model of that name{version}"
        raise ModelNotFoundError(
            f"model = {name!r}: there is no such directory, and {found} ({type(error).__name__}: {reason}){_near(name)}"
        ) from error


def _is_unreachable(error: Exception) -> bool:
    """Returns whether a failed download says nothing about the model, since no hub answered.

    huggingface_hub raises LocalEntryNotFoundError or OfflineModeIsEnabled then, or what the HTTP
    client raised, whose classes are no part of its interface: so they are told by their names.
    """
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool(
        names
        & {"LocalEntryNotFoundError", "OfflineModeIsEnabled", "ConnectError", "TransportError"}
    )


def _shards(snapshot: Path) -> list[str]:
    """Returns the safetensors files that the index of a snapshot names, whatever they are called, as globs.

    An index that is missing or damaged names none: opening the model says what is wrong.
    """
    try:
        names = set(weight_map(snapshot).values())
    except CheckpointError:
        return []
    return [glob.escape(name) for name in sorted(names) if name.endswith(".safetensors")]


def _near(name: str) -> str:
    """The names most like `name` among its siblings (and what is packaged), as the end of a sentence."""
    path = Path(name).expanduser()
    try:
        siblings = [
            entry.name
            for entry in path.parent.iterdir()
            if entry.is_dir() or entry.suffix == ".gguf"
        ]
    except (OSError, ValueError):  # no such parent, or a name that no file can have
        siblings = []
    near = (
        [str(path.with_name(match)) for match in close_names(path.name, siblings, most=3)]
        if path.name
        else []
    )
    near += close_names(name, (*PACKAGED, *FETCHABLE))
    return f". Did you mean {' or '.join(map(repr, near))}?" if near else ""
