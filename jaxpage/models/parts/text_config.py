"""Holds what config.json says of decoders and of encoders alike."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from jaxpage.layers import NO_ROTATION, Rope
from jaxpage.models.base import KVSpec
from jaxpage.models.config import Fields


@dataclass(frozen=True, kw_only=True)
class LayerSizes:
    """Holds what norms and feed-forward halves take of the config of a model, of texts or pictures.

    Attributes:
        hidden_size: The width of hidden states (D).
        intermediate_size: The width of a feed-forward half (F).
        norm_epsilon: The number that norms add to the variance.
        activation: The function of a feed-forward half.
        mlp_bias: True if products of a feed-forward half have biases.
    """

    hidden_size: int
    intermediate_size: int
    norm_epsilon: float
    activation: str
    mlp_bias: bool = False


@dataclass(frozen=True, kw_only=True)
class TextConfig(LayerSizes):
    """Holds what the configs of models of texts say; see `models.base.ModelSpec`.

    A family whose config says more adds fields. What its models have in any case is not here, but
    in the code of its page.

    Attributes:
        rope: The rotation; `NO_ROTATION` for none.
        rope_by_layer: The rotation of each layer, None for none, where layers differ from `rope`.
        attention_bias: True if products of attention have biases; the page says which.
        name: The name of the model in the checkpoint, in which its head may be beside it.
    """

    model_type: ClassVar[str]
    aliases: ClassVar[Mapping[str, str]] = {}  # other names of fields; see `Fields`
    idle_fields: ClassVar[tuple[str, ...]] = ()  # fields that transformers passes over
    # The `rope_parameters` of a config without any; empty for those of all families.
    default_rope: ClassVar[Mapping[str, Any]] = {}

    vocab_size: int
    num_query_heads: int
    max_position_embeddings: int
    kv: KVSpec
    rope: Rope
    rope_by_layer: tuple[Rope | None, ...] = ()
    attention_bias: bool = False
    name: str = "model"

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> TextConfig:
        """Returns what a config.json says; see `SpecFactory`."""
        with Fields(cls.complete(config), cls.model_type, cls.aliases) as fields:
            return cls.read(fields)

    @classmethod
    def complete(cls, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the config with what its absent or older fields mean to this family."""
        config = {name: config[name] for name in config if name not in cls.idle_fields}
        is_stated = config.get("rope_parameters") is not None or config.get("rope_scaling")
        if cls.default_rope and not is_stated:
            config["rope_parameters"] = cls.default_rope
        return config

    @classmethod
    @abstractmethod
    def read(cls, fields: Fields) -> TextConfig:
        """Returns what the fields say."""

    def window_of(self, layer_index: int) -> int | None:
        """Returns how many positions a token of a layer sees; None if it sees all."""
        return self.kv.sliding_windows[layer_index]

    @property
    def num_layers(self) -> int:
        """Returns the number of layers of the model."""
        return self.kv.num_decoder_layers

    def rope_of(self, layer_index: int) -> Rope | None:
        """Returns the rotation of a layer; None if it has none."""
        rope = self.rope_by_layer[layer_index] if self.rope_by_layer else self.rope
        return None if rope == NO_ROTATION else rope
