"""Holds what config.json says of encoders, and reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from jaxpage.layers import NO_ROTATION
from jaxpage.models.base import KVSpec
from jaxpage.models.config import Fields
from jaxpage.models.parts.decoder_config import DecoderConfig

SCORES_PAIRS = "ForSequenceClassification"  # how the architecture of a cross-encoder ends


DISTANCE_BUCKETS = 32  # of T5 and MPNet


_EXACT_DISTANCES = 8  # to each side; those beyond share buckets, up to _FARTHEST


_FARTHEST = 128


HeadPooling = Literal["cls", "mean"]


@dataclass(frozen=True, kw_only=True)
class EncoderConfig(DecoderConfig):
    """Holds what the configs of encoders say; see `models.base.ModelSpec`.

    Attributes:
        reach: For each layer, how many positions to both sides a token sees; None for all.
        token_types: The rows of the table of token types; 0 for none.
        first_position: The number of rows before those of positions (RoBERTa).
        padding_id: The token that takes no position, where `first_position` is not 0.
        has_distances: True if scores of attention have a bias by the distance of two tokens.
        num_labels: The scores that the head gives of a text; 0 for a model without a head.
        head_pooling: The state that the head takes: that of the first token, or the mean of all.
        idle_tensors: Globs over the names of tensors of heads that this model does not have.
    """

    reach: tuple[int | None, ...] = ()
    token_types: int = 0
    first_position: int = 0
    padding_id: int = 0
    has_distances: bool = False
    num_labels: int = 0
    head_pooling: HeadPooling = "cls"
    idle_tensors: tuple[str, ...] = ()

    @property
    def scores_pairs(self) -> bool:
        """Returns whether the model scores pairs of texts, and does not embed (cross-encoder)."""
        return self.num_labels > 0

    def positions_of(self, token_ids: np.typing.NDArray[np.int32]) -> np.typing.NDArray[np.int32]:
        """Returns the row of each token of a text in the table of positions."""
        if not self.first_position:
            return np.arange(len(token_ids), dtype=np.int32)
        # transformers' RoBERTa gives a padding token in the text no position of its own.
        counts = token_ids != self.padding_id
        places = np.cumsum(counts) * counts + self.first_position - 1
        return places.astype(np.int32)


def distance_buckets(maximum: int) -> np.typing.NDArray[np.int32]:
    """Returns the bucket of each distance from -most to most, of a key after its query.

    Short distances have a bucket each, and longer ones share them by their logarithm (T5; Raffel et
    al., 2020). Keys after the query have the second half of the buckets.

    Args:
        maximum: The longest distance, in tokens.
    """
    distance = np.arange(-maximum, maximum + 1)
    far = np.abs(distance)
    each_side = DISTANCE_BUCKETS // 2
    with np.errstate(divide="ignore"):
        # In float32, as in transformers: at a border the bucket depends on it.
        share = np.log(far.astype(np.float32) / _EXACT_DISTANCES)
        share = share / np.float32(np.log(_FARTHEST / _EXACT_DISTANCES))
        place = share * np.float32(each_side - _EXACT_DISTANCES)
    shared = _EXACT_DISTANCES + np.maximum(place, 0).astype(np.int32)
    bucket = np.where(far < _EXACT_DISTANCES, far, np.minimum(shared, each_side - 1))
    return (bucket + each_side * (distance > 0)).astype(np.int32)


def read_encoder(
    fields: Fields,
    *,
    num_positions: int,
    epsilon: tuple[str, float] = ("layer_norm_eps", 1e-12),
    activation: tuple[str, str] = ("hidden_act", "gelu"),
    head_dim: int | None = None,
) -> dict[str, Any]:
    """Returns the fields of an `EncoderConfig` that most configs have under the same names.

    Args:
        fields: The fields of the config.
        num_positions: The tokens of the longest text.
        epsilon: The field of the norms' epsilon, and its default.
        activation: The field of the activation, and its default.
        head_dim: The width of a head; None for that of the model over the number of heads.
    """
    fields.only(is_decoder=False, position_embedding_type="absolute")
    num_layers = fields.integer("num_hidden_layers")
    num_heads = fields.integer("num_attention_heads")
    head_dim = head_dim or fields.head_dim()
    return {
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": fields.integer("hidden_size"),
        "intermediate_size": fields.integer("intermediate_size"),
        "num_query_heads": num_heads,
        "max_position_embeddings": num_positions,
        "kv": KVSpec(0, num_heads, head_dim, (), decoder_layers=num_layers),
        "rope": NO_ROTATION,
        "reach": (None,) * num_layers,
        "norm_epsilon": fields.number(*epsilon),
        "activation": fields.activation(*activation),
        "tie_word_embeddings": False,
        "num_labels": read_num_labels(fields),
    }


def read_num_labels(fields: Fields) -> int:
    """Returns the number of scores that the head gives, 0 for an architecture without one.

    One label is a score; more of them are classes, which nothing here makes use of.
    """
    architectures = fields.get("architectures", None) or [""]
    if not str(architectures[0]).endswith(SCORES_PAIRS):
        return 0
    labels = fields.get("id2label", None)
    num_labels = len(labels) if isinstance(labels, dict) else fields.integer("num_labels", 2)
    if num_labels != 1:
        fields.note_unsupported(
            f"id2label has {num_labels} labels: only models with one, the score of a pair of "
            "texts, are supported",
            id2label=None,
            num_labels=1,
        )
    return 1
