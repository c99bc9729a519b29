"""Holds what config.json says of most decoders, and reads it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar, cast

from jaxpage.layers import NO_ROTATION, ExpertsSpec, Rope
from jaxpage.models.base import KVSpec
from jaxpage.models.config import Fields
from jaxpage.models.config.expert_fields import ExpertDefaults
from jaxpage.models.config.mtp_names import MtpNames, no_heads
from jaxpage.models.parts.text_config import TextConfig

# In place of `Self`, which beartype does not take in single methods (`pytest --check-shapes`).
_Decoder = TypeVar("_Decoder", bound="DecoderConfig")
_Experts = TypeVar("_Experts", bound="ExpertsConfig")


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """Says what a family takes in the place of fields that a config.json lacks.

    Where a pair is allowed, it is another field than the usual one, and its default; the field is
    "" for a family that has none.

    Attributes:
        num_kv_heads: In the place of `num_key_value_heads`; None for one for each query head.
        head_dim: In the place of `head_dim`; None to call `Fields.head_dim`.
        has_null_head_dim: True if null in this field is the width of the model over the number of
            query heads.
        has_window: True if `sliding_window` is that of all layers; absent or null for none.
        max_length: In the place of `max_position_embeddings`.
        theta: In the place of `rope_theta`.
        partial: The share of each head that is rotated; None for a family that rotates all.
        interleaved: See `Rope`; no field says it.
        has_rope: False for a family that does not rotate.
        plain_heads: True for a family in which no field says the number of key/value heads, which
            is that of query heads, or the width of a head.
        epsilon: In the place of `rms_norm_eps`, or a pair.
        activation: In the place of `hidden_act`, or a pair.
        tied: In the place of `tie_word_embeddings`.
        attention_bias: In the place of this field; None for a family that has none.
        mlp_bias: Like `attention_bias`.
        all_biases: The field that says whether all products have biases, and its default; None for
            a family that has none.
    """

    num_kv_heads: int | None = None
    head_dim: int | None = None
    has_null_head_dim: bool = False
    has_window: bool = False
    max_length: int = 2048
    theta: float = 10_000.0
    partial: float | None = None
    interleaved: bool = False
    has_rope: bool = True
    plain_heads: bool = False
    epsilon: tuple[str, float] | float = 1e-6
    activation: tuple[str, str] | str = "silu"
    tied: bool = False
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    all_biases: tuple[str, bool] | None = None

    def read_kv_heads(self, fields: Fields) -> int:
        """Returns the number of key/value heads."""
        if self.plain_heads:
            return fields.integer("num_attention_heads")
        return fields.kv_heads(self.num_kv_heads)

    def read_head_dim(self, fields: Fields) -> int:
        """Returns the width of a head."""
        is_null = self.has_null_head_dim and fields.get("head_dim", self.head_dim) is None
        if self.plain_heads or is_null:
            return fields.divide("hidden_size", "num_attention_heads")
        if self.head_dim is None:
            return fields.head_dim()
        return fields.integer("head_dim", self.head_dim)

    def read_rope(self, fields: Fields, head_dim: int) -> tuple[Rope, int]:
        """Returns the rotation of heads, and the number of positions for which it holds."""
        max_length = fields.integer("max_position_embeddings", self.max_length)
        if not self.has_rope:
            return NO_ROTATION, max_length
        return fields.rope(
            head_dim,
            max_length,
            theta=self.theta,
            partial=self.partial,
            interleaved=self.interleaved,
        )

    def read_epsilon(self, fields: Fields) -> float:
        """Returns the number that norms add to the variance."""
        pair = self.epsilon if isinstance(self.epsilon, tuple) else ("rms_norm_eps", self.epsilon)
        return fields.number(*pair) if pair[0] else pair[1]

    def read_activation(self, fields: Fields) -> str:
        """Returns the function of a feed-forward half."""
        usual = self.activation
        pair = usual if isinstance(usual, tuple) else ("hidden_act", usual)
        return fields.activation(*pair) if pair[0] else pair[1]

    def read_biases(self, fields: Fields) -> dict[str, bool]:
        """Returns which products have biases, as far as the family has fields for it."""
        biases = {"attention_bias": self.attention_bias, "mlp_bias": self.mlp_bias}
        if self.all_biases is not None:
            return dict.fromkeys(biases, fields.flag(*self.all_biases))
        return {
            name: fields.flag(name, usual) for name, usual in biases.items() if usual is not None
        }


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(TextConfig):
    """Holds what the configs of most decoders say.

    Attributes:
        tie_word_embeddings: True if the token table is the head, too.
        draft_heads: The heads that the checkpoint may have after its last layer.
        not_loaded: What the other models in the checkpoint take, for messages.
    """

    defaults: ClassVar[Defaults] = Defaults()
    # Returns the names of the heads after the last layer, of the fields.
    read_draft_heads: ClassVar[Callable[..., MtpNames | None]] = staticmethod(no_heads)

    tie_word_embeddings: bool
    draft_heads: MtpNames | None = None
    not_loaded: str = ""

    @classmethod
    def read(cls, fields: Fields) -> DecoderConfig:
        """Returns what the fields say; a family whose config says more overrides it."""
        return cls.from_fields(fields)

    @classmethod
    def from_fields(
        cls: type[_Decoder],
        fields: Fields,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        rope: tuple[Rope, int] | None = None,
        sliding_windows: tuple[int | None, ...] | int | None = None,
        rotates: Sequence[bool] | None = None,
        kv: Mapping[str, Any] | None = None,
        intermediate_size: int | None = None,
        **more: Any,
    ) -> _Decoder:
        """Returns the config of fields that most families have, with what the caller reads.

        An argument that is None is read, with the `defaults` of the family.

        Args:
            fields: The fields of the config.
            num_kv_heads: The number of key/value heads.
            head_dim: The width of a head.
            rope: The rotation, and the number of positions for which it holds.
            sliding_windows: The window of each layer, or the one of all; None if there is none.
            rotates: True for each layer that rotates; None if all do.
            kv: The fields of `KVSpec` that differ from what the other arguments say.
            intermediate_size: The width of a feed-forward half.
            **more: Further fields of the config, or others than those that are read.
        """
        usual = cls.defaults
        num_layers = fields.integer("num_hidden_layers")
        num_query_heads = fields.integer("num_attention_heads")
        num_kv_heads = num_kv_heads or usual.read_kv_heads(fields)
        _check_heads(fields, num_query_heads, num_kv_heads)
        head_dim = head_dim or usual.read_head_dim(fields)
        rotation, length = rope or usual.read_rope(fields, head_dim)
        windows = sliding_windows
        if usual.has_window and windows is None:
            windows = fields.optional_integer("sliding_window", None)
        if not isinstance(windows, tuple):
            windows = (windows,) * num_layers
        common: dict[str, Any] = {
            "vocab_size": fields.integer("vocab_size"),
            "hidden_size": fields.integer("hidden_size"),
            "intermediate_size": intermediate_size or fields.integer("intermediate_size"),
            "num_query_heads": num_query_heads,
            "max_position_embeddings": length,
            "kv": replace(KVSpec(num_layers, num_kv_heads, head_dim, windows), **(kv or {})),
            "rope": rotation,
            "norm_epsilon": usual.read_epsilon(fields),
            "activation": usual.read_activation(fields),
            "tie_word_embeddings": fields.flag("tie_word_embeddings", usual.tied),
            "draft_heads": cls.read_draft_heads(fields),
            **usual.read_biases(fields),
        }
        if rotates is not None:
            common["rope_by_layer"] = tuple(
                rotation if does_rotate else None for does_rotate in rotates
            )
        return cls(**{**common, **more})

    @property
    def layer_places(self) -> Sequence[int | tuple[int, ...]] | None:
        """Returns for each layer the place of its pages; see `run_layers`."""
        return None

    def of_draft_layer(self) -> DecoderConfig:
        """Returns the config of the one layer of an MTP head, which attends to all positions."""
        # The layer has the index 0, and a window or rotation there would be that of the first one
        # of the model.
        kv = KVSpec(1, self.kv.num_kv_heads, self.kv.head_dim, (None,), self.kv.value_width)
        return replace(self, kv=kv, rope_by_layer=())


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig(DecoderConfig):
    """Holds what the config of a decoder with experts says.

    Attributes:
        experts: The experts; None if no layer has any.
        sparse_layers: True for each layer with experts.
    """

    expert_defaults: ClassVar[ExpertDefaults]

    experts: ExpertsSpec | None
    sparse_layers: tuple[bool, ...]

    @classmethod
    def from_fields(cls: type[_Experts], fields: Fields, **options: Any) -> _Experts:
        """Returns the config; experts are read with `expert_defaults` unless the caller has."""
        usual = cls.expert_defaults
        if "experts" not in options:
            options["experts"] = usual.read(fields)
        if "sparse_layers" not in options:
            options["sparse_layers"] = usual.read_layers(fields)
        return super().from_fields(fields, **options)

    def experts_of(self, index: int) -> ExpertsSpec | None:
        """Returns the experts of a layer; None if it has a feed-forward half without."""
        return self.experts if self.sparse_layers[index] else None

    def of_draft_layer(self) -> ExpertsConfig:
        """Returns the config of an MTP head's layer, which has experts if the model has."""
        config = cast(ExpertsConfig, super().of_draft_layer())
        return replace(config, sparse_layers=(self.experts is not None,))


def _check_heads(fields: Fields, num_query_heads: int, num_kv_heads: int) -> None:
    if num_query_heads % num_kv_heads:
        text = (
            f"num_key_value_heads = {num_kv_heads} must divide num_attention_heads = "
            f"{num_query_heads}"
        )
        heads = dict.fromkeys(("num_key_value_heads", "num_attention_heads"), num_query_heads)
        fields.note_wrong(text, **heads)
