"""Holds ModernBERT (Warner et al., 2024): rotations, windows to both sides, and gates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from jaxpage.layers.activations import ACTIVATIONS
from jaxpage.layers.attention import query_key_value
from jaxpage.layers.embedding import Embedding
from jaxpage.models.config.config_fields import WrongField
from jaxpage.models.config.fields import Fields
from jaxpage.models.parts.decoder_config import read_head_dim
from jaxpage.models.parts.encoder import (
    Encoder,
    EncoderConfig,
    HeadPooling,
    PreNormBlock,
    ScoreHead,
    attention_both_ways,
    read_encoder,
)
from jaxpage.models.parts.mlp import MLPNames, gated_mlp
from jaxpage.models.parts.norms import layer_norm
from jaxpage.models.parts.projection import projection
from jaxpage.models.parts.scope import Scope

_FULL = "full_attention"
_THETA = {_FULL: ("global_rope_theta", 160_000.0), "sliding_attention": ("local_rope_theta", 1e4)}
_HEAD = ("head.*", "classifier.*")


@dataclass(frozen=True, kw_only=True)
class ModernBertConfig(EncoderConfig):
    """Holds what a config.json of ModernBERT says.

    Attributes:
        norm_bias: True if norms have biases.
        head_bias: True if the first product of the head has a bias.
        head_activation: The function after it.
    """

    model_type = "modernbert"

    name: str = "model"
    norm_bias: bool = False
    head_bias: bool = False
    head_activation: str = "gelu"

    @classmethod
    def read(cls, fields: Fields) -> ModernBertConfig:
        """Reads the fields."""
        common = read_encoder(
            fields,
            num_positions=fields.integer("max_position_embeddings", 8192),
            epsilon=("norm_eps", 1e-5),
            activation=("hidden_activation", "gelu"),
        )
        fields.only(rope_scaling=None)
        num_layers = common["kv"].num_decoder_layers
        every = fields.integer("global_attn_every_n_layers", 3)
        default = ["sliding_attention" if index % every else _FULL for index in range(num_layers)]
        kinds = fields.layer_types(default)
        positions = common["max_position_embeddings"]
        ropes, length = fields.ropes_by_type(read_head_dim(fields), positions, _THETA)
        reach = fields.integer("local_attention", 128) // 2
        common |= {
            "max_position_embeddings": length,
            "rope_by_layer": tuple(ropes[kind] for kind in kinds),
            "reach": tuple(None if kind == _FULL else reach for kind in kinds),
        }
        return cls(
            **common,
            attention_bias=fields.flag("attention_bias", False),
            mlp_bias=fields.flag("mlp_bias", False),
            norm_bias=fields.flag("norm_bias", False),
            head_bias=fields.flag("classifier_bias", False),
            head_activation=fields.activation("classifier_activation", "gelu"),
            head_pooling=_read_head_pooling(fields),
            idle_tensors=() if common["num_labels"] else _HEAD,
        )


def _read_head_pooling(fields: Fields) -> HeadPooling:
    stated = fields.get("classifier_pooling", "cls")
    if stated == "mean":
        return "mean"
    if stated != "cls":
        error = WrongField(f"classifier_pooling must be cls or mean, not {stated!r}")
        fields.note(error, classifier_pooling="cls")
    return "cls"


class ModernBert(Encoder, config=ModernBertConfig):
    """ModernBERT, and what was trained from it: GTE and Granite encoders, and their rerankers."""

    prefix = "model."
    ignored: ClassVar[tuple[str, ...]] = ("decoder.*",)
    layers_name = "layers"

    @classmethod
    def make_tables(
        cls, config: Any, at: Scope
    ) -> tuple[Embedding, Embedding | None, Embedding | None]:
        """Returns the table of tokens, which is alone."""
        name = (at / "embeddings.tok_embeddings").name
        table = Embedding(config.vocab_size, config.hidden_size, name=name, dtype=at.dtype)
        return table, None, None

    @classmethod
    def make_table_norm(cls, config: Any, at: Scope) -> Any:
        """Returns the norm of the rows of the table."""
        return layer_norm(config, at / "embeddings.norm", bias=config.norm_bias)

    @classmethod
    def make_norm(cls, config: Any, at: Scope) -> Any:
        """Returns the norm after the last layer."""
        return layer_norm(config, at / "final_norm", bias=config.norm_bias)

    @classmethod
    def make_block(cls, config: Any, index: int, at: Scope) -> PreNormBlock:
        """Returns a layer; the first one has no norm before its attention."""
        width = config.hidden_size
        bias = config.attention_bias
        attention = at / "attn"
        inputs = query_key_value(
            width, width, width, name=attention.name, fused="Wqkv", bias=bias, dtype=at.dtype
        )
        output = projection(width, attention, ("Wo", width), axes=("heads", "embed"), bias=bias)
        names = MLPNames("mlp", None, None, "Wo", "Wi")
        return PreNormBlock(
            attention_both_ways(config, index, inputs, output),
            layer_norm(config, at / "attn_norm", bias=config.norm_bias) if index else None,
            gated_mlp(config, at / "mlp", names=names),
            layer_norm(config, at / "mlp_norm", bias=config.norm_bias),
        )

    @classmethod
    def make_head(cls, config: Any, at: Scope) -> ScoreHead:
        """Returns the head: a product, its function and norm, and the classifier."""
        width = config.hidden_size
        return ScoreHead(
            projection(width, at / "head", ("dense", width), bias=config.head_bias),
            ACTIVATIONS[config.head_activation],
            projection(width, at, ("classifier", config.num_labels), bias=True),
            layer_norm(config, at / "head.norm", bias=config.norm_bias),
        )
