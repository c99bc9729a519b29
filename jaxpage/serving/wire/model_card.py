"""Describes a model's files as clients read it: without any path of this machine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelCard:
    """Holds what is known of a model's files.

    Attributes:
        family: The `model_type` of config.json; empty if it is not known.
        format: "safetensors", "orbax" or "gguf"; empty if it is not known.
        num_parameters: The numbers of all weights; 0 if it is not known.
        quantization: The name of the type that most of the stored weights have; empty if it is not
            known.
        num_bytes: The bytes of the stored weights; 0 if it is not known.
        digest: 64 hexadecimal digits that differ between models and stay the same for one.
        modified_at: The time at which a file of it was changed last, in seconds since 1970; 0 if
            it is not known.
    """

    family: str = ""
    format: str = ""
    num_parameters: int = 0
    quantization: str = ""
    num_bytes: int = 0
    digest: str = "0" * 64
    modified_at: float = 0.0

    @property
    def parameter_size(self) -> str:
        """Returns the number of all weights for people ("8.0B", "362M"); empty for 0."""
        return short_count(self.num_parameters)


def short_count(number: int) -> str:
    """Returns a number as people write it ("8.0B", "362M"); nothing for 0."""
    if not number:
        return ""
    for unit, letter, digits in ((10**9, "B", 1), (10**6, "M", 2), (10**3, "K", 0)):
        if number >= unit:
            is_round = number % unit == 0
            return f"{number / unit:.{0 if is_round else digits}f}{letter}"
    return str(number)
