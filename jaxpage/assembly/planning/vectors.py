"""Decides which vectors may take the place of tokens in prompts, and which encoder makes some."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxpage.device.inputs import vector_shape
from jaxpage.device.vision import sizes_for
from jaxpage.errors import UnsupportedError
from jaxpage.layers.picture_attention import queries_at_once
from jaxpage.models import Family, ModelSpec, model_weights
from jaxpage.models.parameters import num_bytes
from jaxpage.settings.engine_config import EngineConfig


@dataclass(frozen=True)
class VisionPart:
    """Describes an encoder of pictures.

    Attributes:
        family: The `VisionFamily`.
        spec: Its spec.
    """

    family: Any
    spec: Any

    def num_bytes(self, dtype: str) -> int:
        """Returns the bytes of its weights."""
        return num_bytes(model_weights(self.family, self.spec), dtype)


@dataclass(frozen=True)
class VectorInput:
    """Describes what takes the place of a token.

    Attributes:
        width: The width of a vector (D).
        vision: The encoder of pictures; None if there is none.
        num_axes: The axes that the rotary positions of a prompt with pictures have; 0 if there is
            one, as for texts.
    """

    width: int
    vision: VisionPart | None = None
    num_axes: int = 0

    @property
    def num_whole(self) -> int:
        """Returns the most tokens that see each other both ways; 0 if none do."""
        return 0 if self.vision is None else getattr(self.vision.spec, "num_whole", 0)

    def shape(self, dtype: str) -> jax.ShapeDtypeStruct:
        """Returns the shape [1 + n, D], with the type of the model's activations."""
        num_deep = 0 if self.vision is None else self.vision.spec.num_deep
        return vector_shape(num_deep, self.width, dtype)

    def vision_bytes(self, dtype: str) -> int:
        """Returns the bytes of the encoder's weights."""
        return 0 if self.vision is None else self.vision.num_bytes(dtype)

    def vision_workspace_bytes(self, max_rows: int, dtype: str) -> int:
        """Returns an estimate of the temporary memory of the encoder's largest executable.

        It has a few activations of all patches, and twice the float32 scores of a tile of queries.
        Encoders of published models that are compiled for a GPU take 0.6 to 0.8 of it.

        Args:
            max_rows: The most positions that a picture fills.
            dtype: The type of the weights and activations.
        """
        if self.vision is None:
            return 0
        spec = self.vision.spec
        num_patches = sizes_for(spec, max_rows)[-1]
        width = max(4 * spec.width, spec.inner)
        num_scores = min(num_patches, queries_at_once(num_patches, spec.num_heads)) * spec.num_heads
        activations = 4 * jnp.dtype(dtype).itemsize * width
        num_bytes: int = num_patches * (activations + 2 * 4 * num_scores)
        return num_bytes


def find_vision(
    config: EngineConfig, family: Family, model_config: Mapping[str, Any]
) -> VisionPart | None:
    """Returns the encoder of pictures of a model, by its config.json; None if there is none.

    Raises:
        CheckpointError: A field of the config makes no sense.
        UnsupportedError: A field asks for something that is not supported.
    """
    vision: Any = getattr(family, "Vision", None)
    if vision is None or config.limit_images == 0 or "vision_config" not in model_config:
        return None
    if not takes_vectors(family):
        return None
    return VisionPart(vision, vision.Spec.from_config(model_config))


def takes_vectors(family: Family) -> bool:
    """Returns whether vectors may take the place of tokens in models of a family."""
    takes: bool = getattr(family.Model, "takes_vectors", False)
    return takes


def vector_input(
    config: EngineConfig, family: Family, spec: ModelSpec, vision: VisionPart | None
) -> VectorInput | None:
    """Returns what may take the place of tokens; None if nothing may.

    Args:
        config: The settings.
        family: The family of the text model.
        spec: The spec of the text model.
        vision: Its encoder of pictures, if there is one.

    Raises:
        UnsupportedError: The settings ask for it, and the model's family does not take it.
    """
    if not config.enable_prompt_embeds and vision is None:
        return None
    if not takes_vectors(family):
        name = getattr(family.Model, "__name__", "this")
        raise UnsupportedError(
            f"enable_prompt_embeds is not supported for {config.model}: models of the family "
            f"{name} need the ids of all tokens"
        )
    # A family may project narrow embeddings to the width of its layers (OPT-350m).
    width = getattr(spec, "embedding_width", spec.hidden_size)
    num_axes = 0 if vision is None else getattr(vision.spec, "num_axes", 0)
    return VectorInput(width, vision, num_axes)
