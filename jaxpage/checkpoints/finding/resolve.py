"""Finds a model by the name that a user gives it.

It may be packaged or fetched, a local directory or GGUF file, or on the Hugging Face hub.
"""

from __future__ import annotations

import glob
import logging
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from jaxpage.checkpoints.config_file import MODELOPT_FILE
from jaxpage.checkpoints.embedding_files import EMBEDDING_FILES
from jaxpage.checkpoints.finding.fetched import FETCHABLE, check_fetched, model_of_fetched
from jaxpage.checkpoints.gguf.header import is_gguf_file
from jaxpage.checkpoints.safetensors_files import INDEX, SINGLE, weight_map
from jaxpage.errors import CheckpointError, ConfigError, ModelNotFoundError
from jaxpage.settings.argument_checks import close_names

logger = logging.getLogger(__name__)

DEMO = Path(__file__).parents[2] / "demo"
DEMO_VISION = Path(__file__).parents[2] / "demo_vision"
# The demo model, its drafters, and the demo model that answers questions about pictures.
PACKAGED = ("demo", "demo/draft", "demo/medusa", "demo/eagle3", "demo-vision")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", re.ASCII)

# A model needs these files and no others: no pickles, no code, no copies of the weights in other
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
# They say how pictures are processed.
PICTURE_FILES = ("preprocessor_config.json", "processor_config.json")
HUB_FILES = (
    *(*TOKENIZER_FILES, "generation_config.json", MODELOPT_FILE, *EMBEDDING_FILES),
    *PICTURE_FILES,
    *(SINGLE, INDEX, "orbax/*"),
)
# What huggingface_hub or its HTTP client raises if no hub answered.
_UNREACHABLE = {"LocalEntryNotFoundError", "OfflineModeIsEnabled", "ConnectError", "TransportError"}
# They are fetched after the index, together with the shards that it names.
_WEIGHTS = (SINGLE, "orbax/*")


def resolve_model(
    model: str | os.PathLike[str],
    revision: str | None = None,
    *,
    hub_files: Sequence[str] = HUB_FILES,
) -> Path:
    """Returns the directory or GGUF file of a model.

    The name is looked up in this order: `PACKAGED` and `FETCHABLE`, local directories and GGUF
    files, the hub (such as "org/name"). There is a warning where a local directory has a packaged
    or fetched name too; "./demo" is the directory. All files of a hub model come from one snapshot,
    and files in the hub's cache are used without a download.

    Args:
        model: The name or the path.
        revision: The branch, tag or commit of the snapshot.
        hub_files: Globs of the files that are wanted from the hub.

    Raises:
        ModelNotFoundError: There is no such model; the error has the nearest names.
        ConfigError: The revision is of a model that is not on the hub.
    """
    name = os.fspath(model)
    local = _packaged_path(name) or Path(name).expanduser()
    if _packaged_path(name) and os.path.isdir(name) and local.resolve() != Path(name).resolve():
        whose = "packaged with jaxpage" if name in PACKAGED else "of `jaxpage fetch`"
        logger.warning(
            "model = %r is the model %s; for the directory of that name use %r",
            name,
            whose,
            f"./{name}",
        )
    if name in FETCHABLE:
        check_fetched(name)
    is_file = is_gguf_file(local)
    if name and (os.path.isdir(local) or is_file):  # "" would be the current directory
        if revision is not None:
            kind = "file" if is_file else "directory"
            raise ConfigError(
                f"revision = {revision!r} names a version on the hub, but model = {name!r} is a "
                f"{kind}"
            )
        return local.resolve()
    if name in PACKAGED:
        raise ModelNotFoundError(
            f"the packaged {name} model is missing from this installation ({local})"
        )
    if name and os.path.lexists(local):
        raise ModelNotFoundError(
            f"model = {name!r} is not a directory, and no GGUF file: give one, or the directory "
            "that holds its config.json"
        )
    if name.endswith(".gguf"):
        raise ModelNotFoundError(f"model = {name!r}: there is no such file{_near(name)}")
    if not HUB_ID.fullmatch(name):
        raise ModelNotFoundError(f"model = {name!r}: there is no such directory{_near(name)}")
    return _from_hub(name, revision, hub_files)


def is_own_name(text: str) -> bool:
    """Returns whether a text is the name of a packaged model, or of one that `fetch` brings."""
    return text in (*PACKAGED, *FETCHABLE)


def local_model(name: str) -> Path | None:
    """Returns the path of a model on this machine, or None; the hub and its cache are not asked."""
    path = _packaged_path(name) or Path(name).expanduser()
    return path if name and (os.path.isdir(path) or is_gguf_file(path)) else None


def _packaged_path(name: str) -> Path | None:
    """Returns the place of a model whose name is jaxpage's own; None for other names."""
    if name == "demo-vision":
        return DEMO_VISION
    if name in PACKAGED:
        return DEMO / name[len("demo/") :]
    return model_of_fetched(name) if name in FETCHABLE else None


def resolve_model_config(model: str | os.PathLike[str], revision: str | None = None) -> Path:
    """Returns the directory of a model of which only config.json is wanted.

    The file itself may be named, and only it comes from the hub. See `resolve_model`.
    """
    path = Path(model).expanduser()
    is_file = path.name == "config.json" and os.path.isfile(path)
    return resolve_model(
        path.parent if is_file else model, revision, hub_files=("config.json", MODELOPT_FILE)
    )


def resolve_tokenizer(model: str | os.PathLike[str]) -> Path:
    """Returns the directory of a model of which only the tokenizer is wanted; see `resolve_model`.

    No weights come from the hub.
    """
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
        # The directory of a snapshot has the name of its commit, so a push in between changes
        # nothing.
        weights = [*(pattern for pattern in files if pattern in _WEIGHTS), *_shards(snapshot)]
        return fetch(weights, snapshot.name)
    except Exception as error:  # offline, unknown, private, gone, disk full: the model is not here
        reason = (str(error).strip().split("\n", 1)[0] or type(error).__name__)[:300]
        raise ModelNotFoundError(
            f"model = {name!r}: there is no such directory, and {_refusal(error, revision)} "
            f"({type(error).__name__}: {reason}){_near(name)}"
        ) from error


def _refusal(error: Exception, revision: str | None) -> str:
    """Returns why the hub gave no model, and what to do if it wants to know the user.

    huggingface_hub passes on some answers of the hub as the cause of "no such entry in the cache",
    so the causes are looked at, too. Classes are compared by name, because those of its HTTP client
    are no part of its interface.
    """
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = cause.__cause__
    names = {kind.__name__ for each in chain for kind in type(each).__mro__}
    statuses = {getattr(getattr(each, "response", None), "status_code", None) for each in chain}
    version = f" at revision {revision!r}" if revision else ""
    log_in = "`hf auth login`, or set HF_TOKEN"
    if "GatedRepoError" in names:
        return (
            "the hub gives that model only to those who accept its terms: ask for access on the "
            f"model's page of the hub, then log in with the same account ({log_in})"
        )
    if "RepositoryNotFoundError" in names:
        return (
            f"the hub has no model of that name{version} for you: check the spelling, and if it is "
            f"private, log in with an account that may read it ({log_in})"
        )
    if statuses & {401, 403}:
        return (
            f"the hub refused access{version}: the token may be old, or lack the right to read "
            "this "
            f"model. Log in anew ({log_in}); to read open models without a token unset HF_TOKEN, "
            "or `hf auth logout`"
        )
    if names & _UNREACHABLE:
        return (
            f"the hub cannot be reached, and its cache on this machine has no such model{version}"
        )
    return f"the hub gave no model of that name{version}"


def _shards(snapshot: Path) -> list[str]:
    """Returns, as globs, the safetensors files that the index of a snapshot names.

    An index that is missing or damaged names none: opening the model says what is wrong.
    """
    try:
        names = set(weight_map(snapshot).values())
    except CheckpointError:
        return []
    return [glob.escape(name) for name in sorted(names) if name.endswith(".safetensors")]


def _near(name: str) -> str:
    """Returns the names most like `name`, as the end of a sentence.

    They are its siblings, and the names that jaxpage has.
    """
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
        [str(path.with_name(match)) for match in close_names(path.name, siblings, maximum=3)]
        if path.name
        else []
    )
    near += close_names(name, (*PACKAGED, *FETCHABLE))
    return f". Did you mean {' or '.join(map(repr, near))}?" if near else ""
