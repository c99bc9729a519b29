"""Holds what config.json says of encoders, and reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np

from jaxpage.layers import NO_ROTATION
from jaxpage.models.base import KVSpec
from jaxpage.models.config import Fields
from jaxpage.models.parts.text_config import TextConfig

_Config = TypeVar("_Config", bound="EncoderConfig")

SCORES_PAIRS = "ForSequenceClassification"  # how the architecture of a cross-encoder ends
DISTANCE_BUCKETS = 32  # of T5 and MPNet
_EXACT_DISTANCES = 8  # to each side; those beyond share buckets, up to _FARTHEST
_FARTHEST = 128


@dataclass(frozen=True)
class ScoreForm:
    """Describes the head that gives one score of a pair of texts.

    Attributes:
        pooling: The state that the head takes: that of the first token, or the mean of all.
        bias: True if its first product has a bias.
        activation: The function after that product; None for tanh, which no config says.
    """

    pooling: Literal["cls", "mean"] = "cls"
    bias: bool = True
    activation: str | None = None


@dataclass(frozen=True, kw_only=True)
class EncoderConfig(TextConfig):
    """Holds what the configs of encoders say.

    Attributes:
        reach: For each layer, how many positions to both sides a token sees; None for all.
        token_types: The rows of the table of token types; 0 for none.
        padding_id: The token that takes no position; the rows of positions begin after that of its
            number (RoBERTa). None where they begin with the first row.
        head: The head; None for a model without one.
        attention_bias: As in other models, but True where a family does not say it; and `mlp_bias`.
    """

    has_distances: ClassVar[bool] = False  # True if scores have a bias by the distance of tokens
    head_tensors: ClassVar[tuple[str, ...]] = ()  # globs over what a model without a head lacks

    reach: tuple[int | None, ...]
    token_types: int = 0
    padding_id: int | None = None
    head: ScoreForm | None
    attention_bias: bool = True
    mlp_bias: bool = True

    @classmethod
    def from_fields(
        cls: type[_Config],
        fields: Fields,
        *,
        num_positions: int,
        epsilon: tuple[str, float] = ("layer_norm_eps", 1e-12),
        activation: tuple[str, str] = ("hidden_act", "gelu"),
        head_dim: int | None = None,
        **more: Any,
    ) -> _Config:
        """Returns the config of fields that most families have, with what the caller reads.

        Args:
            fields: The fields of the config.
            num_positions: The tokens of the longest text.
            epsilon: The field of the norms' epsilon, and its default.
            activation: The field of the activation, and its default.
            head_dim: The width of a head; None for that of the model over the number of heads.
            **more: Further fields of the config, or others than those that are read.
        """
        fields.only(is_decoder=False, position_embedding_type="absolute")
        num_layers = fields.integer("num_hidden_layers")
        num_heads = fields.integer("num_attention_heads")
        head_dim = head_dim or fields.head_dim()
        common: dict[str, Any] = {
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
            "head": ScoreForm() if read_scores_pairs(fields) else None,
        }
        return cls(**{**common, **more})

    def window_of(self, layer_index: int) -> int | None:
        """Returns how many positions to both sides a token of a layer sees; None for all."""
        return self.reach[layer_index]

    @property
    def tie_word_embeddings(self) -> bool:
        """Returns False: no head gives the logits of tokens."""
        return False

    @property
    def scores_pairs(self) -> bool:
        """Returns whether the model scores pairs of texts, and does not embed (cross-encoder)."""
        return self.head is not None

    @property
    def idle_tensors(self) -> tuple[str, ...]:
        """Returns globs over the names of tensors of heads that this model does not have."""
        return () if self.scores_pairs else self.head_tensors

    @property
    def num_rows_before(self) -> int:
        """Returns the number of rows of the table of positions before the first position."""
        return 0 if self.padding_id is None else self.padding_id + 1

    def positions_of(self, token_ids: np.typing.NDArray[np.int32]) -> np.typing.NDArray[np.int32]:
        """Returns the row of each token of a text in the table of positions."""
        if self.padding_id is None:
            return np.arange(len(token_ids), dtype=np.int32)
        # transformers' RoBERTa gives a padding token in the text no position of its own.
        counts = token_ids != self.padding_id
        places = np.cumsum(counts) * counts + self.padding_id
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


def read_scores_pairs(fields: Fields) -> bool:
    """Returns whether the architecture has a head, which must give one score.

    One label is a score; more of them are classes, which nothing here makes use of.
    """
    architectures = fields.get("architectures", None) or [""]
    if not str(architectures[0]).endswith(SCORES_PAIRS):
        return False
    labels = fields.get("id2label", None)
    num_labels = len(labels) if isinstance(labels, dict) else fields.integer("num_labels", 2)
    if num_labels != 1:
        fields.note_unsupported(
            f"id2label has {num_labels} labels: only models with one, the score of a pair of "
            "texts, are supported",
            id2label=None,
            num_labels=1,
        )
    return True
