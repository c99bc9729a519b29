"""Decides which vectors may take the place of tokens in prompts."""

from __future__ import annotations

from dataclasses import dataclass

import jax

from jaxpage.device.inputs import vector_shape
from jaxpage.errors import UnsupportedError
from jaxpage.models import Family, ModelSpec
from jaxpage.settings.engine_config import EngineConfig


@dataclass(frozen=True)
class VectorInput:
    """Describes what takes the place of a token.

    Attributes:
        width: The width of a vector (D).
        num_deep: The number of vectors for later layers (n).
    """

    width: int
    num_deep: int = 0

    def shape(self, dtype: str) -> jax.ShapeDtypeStruct:
        """Returns the shape [1 + n, D], with the type of the model's activations."""
        return vector_shape(self.num_deep, self.width, dtype)


def vector_input(config: EngineConfig, family: Family, spec: ModelSpec) -> VectorInput | None:
    """Returns what may take the place of tokens; None if nothing may.

    Raises:
        UnsupportedError: The settings ask for it, and the model's family does not take it.
    """
    if not config.enable_prompt_embeds:
        return None
    if not getattr(family.Model, "takes_vectors", False):
        name = getattr(family.Model, "__name__", "this")
        raise UnsupportedError(
            f"enable_prompt_embeds is not supported for {config.model}: models of the family "
            f"{name} need the ids of all tokens"
        )
    # A family may project narrow embeddings to the width of its layers (OPT-350m).
    return VectorInput(getattr(spec, "embedding_width", spec.hidden_size))
