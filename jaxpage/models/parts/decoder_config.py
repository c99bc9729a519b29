"""Holds what config.json says of most decoders, and reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from jaxpage.layers.rope import NO_ROTATION, Rope
from jaxpage.models.base import KVSpec
from jaxpage.models.config.config_fields import WrongField
from jaxpage.models.config.fields import Fields
from jaxpage.models.config.mtp_names import MtpNames


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Holds what the configs of most decoders say; see `models.base.ModelSpec`.

    A family whose config says more adds fields. What its models have in any case is not here, but
    in the code of its page.

    Attributes:
        intermediate_size: The width of a feed-forward half (F).
        rope: The rotation; `NO_ROTATION` for none.
        rope_by_layer: The rotation of each layer, None for none, where layers differ from `rope`.
        attention_bias: True if products of attention have biases; the page says which.
        mlp_bias: True if products of a feed-forward half have biases.
        draft_heads: The heads that the checkpoint may have after its last layer.
        name: The name of the decoder in the checkpoint.
        not_loaded: What the other models in the checkpoint take, for messages.
    """

    model_type: ClassVar[str]
    aliases: ClassVar[Mapping[str, str]] = {}  # other names of fields; see `Fields`

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_query_heads: int
    max_position_embeddings: int
    kv: KVSpec
    rope: Rope
    rope_by_layer: tuple[Rope | None, ...] = ()
    norm_epsilon: float
    activation: str
    tie_word_embeddings: bool
    attention_bias: bool = False
    mlp_bias: bool = False
    draft_heads: MtpNames | None = None
    name: str = "model"
    not_loaded: str = ""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> DecoderConfig:
        """Returns what a config.json says; see `SpecFactory`."""
        with Fields(cls.complete(config), cls.model_type, cls.aliases) as fields:
            return cls.read(fields)

    @classmethod
    def complete(cls, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the config with what its absent or older fields mean to this family."""
        return config

    @classmethod
    def read(cls, fields: Fields) -> DecoderConfig:
        """Reads the fields; each family has its own way."""
        raise NotImplementedError

    @property
    def num_layers(self) -> int:
        """Returns the number of layers of the decoder."""
        return self.kv.num_decoder_layers

    @property
    def layer_places(self) -> Sequence[int | tuple[int, ...]] | None:
        """Returns for each layer the place of its pages; see `run_layers`."""
        return None

    def of_draft_layer(self) -> DecoderConfig:
        """Returns the config of the one layer of an MTP head, which attends to all positions."""
        kv = KVSpec(1, self.kv.num_kv_heads, self.kv.head_dim, (None,), self.kv.value_width)
        return replace(self, kv=kv, rope_by_layer=())

    def rope_of(self, layer_index: int) -> Rope | None:
        """Returns the rotation of a layer; None if it has none."""
        rope = self.rope_by_layer[layer_index] if self.rope_by_layer else self.rope
        return None if rope == NO_ROTATION else rope


def read_common(
    fields: Fields,
    *,
    num_kv_heads: int,
    max_position_embeddings: int,
    head_dim: int | None = None,
    kv: Mapping[str, Any] | None = None,
    sliding_windows: tuple[int | None, ...] | None = None,
    rope: tuple[Rope, int] | Mapping[str, Any] | None = None,
    epsilon: tuple[str, float] | float = ("rms_norm_eps", 1e-6),
    activation: tuple[str, str] | str = ("hidden_act", "silu"),
    intermediate_size: int | None = None,
    tied: bool = False,
) -> dict[str, Any]:
    """Returns the fields of a `DecoderConfig` that most configs have under the same names.

    Args:
        fields: The fields of the config.
        num_kv_heads: The number of key/value heads.
        max_position_embeddings: The number of positions.
        head_dim: The width of a head; None to call `read_head_dim`.
        kv: The fields of `KVSpec` that differ from what the other arguments say.
        sliding_windows: The window of each layer; None if no layer has one.
        rope: The rotation and the number of positions for which it holds; or arguments with which
            to call `Fields.rope`.
        epsilon: The field of the norms' epsilon, and its default; a number if it has no field.
        activation: The field of the activation, and its default; the activation itself if it has no
            field.
        intermediate_size: The width of a feed-forward half; None to read the field.
        tied: The default of `tie_word_embeddings`.
    """
    num_layers = fields.integer("num_hidden_layers")
    num_query_heads = fields.integer("num_attention_heads")
    if num_query_heads % num_kv_heads:
        text = f"num_key_value_heads = {num_kv_heads} must divide num_attention_heads = {num_query_heads}"
        heads = dict.fromkeys(("num_key_value_heads", "num_attention_heads"), num_query_heads)
        fields.note(WrongField(text), **heads)
    head_dim = head_dim or read_head_dim(fields)
    if not isinstance(rope, tuple):
        rope = fields.rope(head_dim, max_position_embeddings, **(rope or {}))
    rotation, length = rope
    windows = sliding_windows or (None,) * num_layers
    return {
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": fields.integer("hidden_size"),
        "intermediate_size": intermediate_size or fields.integer("intermediate_size"),
        "num_query_heads": num_query_heads,
        "max_position_embeddings": length,
        "kv": replace(KVSpec(num_layers, num_kv_heads, head_dim, windows), **(kv or {})),
        "rope": rotation,
        "norm_epsilon": fields.number(*epsilon) if isinstance(epsilon, tuple) else epsilon,
        "activation": activation if isinstance(activation, str) else fields.activation(*activation),
        "tie_word_embeddings": fields.flag("tie_word_embeddings", tied),
    }


def key_value_heads(fields: Fields, default: int | None) -> int:
    """Returns `num_key_value_heads`; null means one for each query head."""
    heads = fields.optional_integer("num_key_value_heads", default)
    return heads or fields.integer("num_attention_heads")


def read_head_dim(fields: Fields) -> int:
    """Returns `head_dim`.

    If it is absent or null, it is the width of the model over the number of query heads.
    """
    stated = fields.optional_integer("head_dim", None)
    return stated or fields.divide("hidden_size", "num_attention_heads")
