"""BLOOM (BigScience, 2022) and MPT (MosaicML, 2023) have ALiBi in place of positions."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from jaxpage.layers import NO_ROTATION, Scores
from jaxpage.models.config import Fields, alibi
from jaxpage.models.llama import Llama
from jaxpage.models.parts import Scope, attention, norms
from jaxpage.models.parts.decoder_config import DecoderConfig, Defaults
from jaxpage.models.parts.names import AttentionNames, ModuleNames, NormNames, PlainNames

EPSILON = ("layer_norm_epsilon", 1e-5)
# The fields of `attn_config` that are read or refused.
ATTENTION = (
    *("attn_type", "clip_qkv", "softmax_scale", "prefix_lm", "qk_ln", "alibi", "alibi_bias_max"),
    *("attn_uses_sequence_id", "rope", "kv_n_heads", "sliding_window_size"),
)


class BloomConfig(DecoderConfig):
    """Reads transformers' `BloomConfig`.

    `pretraining_tp` and `slow_but_exact` are about the order of sums.
    """

    model_type = "bloom"
    aliases = {
        "hidden_size": "n_embed",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    }
    defaults = Defaults(plain_heads=True, epsilon=EPSILON, activation=("", "gelu_new"), tied=True)

    @classmethod
    def read(cls, fields: Fields) -> BloomConfig:
        """Returns what the fields say."""
        fields.refuse_true("apply_residual_connection_post_layernorm")
        return cls.from_fields(
            fields,
            rope=(NO_ROTATION, fields.integer("seq_length", 2048)),
            intermediate_size=4 * fields.integer("hidden_size"),
            attention_bias=True,
            mlp_bias=True,
            name="transformer",
        )


class Bloom(Llama, config=BloomConfig):
    """BLOOM and BLOOMZ (BigScience, 2022) have ALiBi in place of positions, and LayerNorm.

    One of the norms follows the token table.
    """

    prefix = "transformer."
    ignored = ()
    names = ModuleNames(tokens="word_embeddings", layers="h", norm="ln_f")
    attention_names = AttentionNames("dense", fused="query_key_value", module="self_attention")
    mlp_names = PlainNames("dense_h_to_4h", "dense_4h_to_h")
    make_norm = staticmethod(norms.layer_norm)

    def make_others(self, config: Any, at: Scope) -> None:
        """Makes the norm after the token table."""
        # It made training more stable (Le Scao et al., 2022).
        self.tokens_norm = norms.layer_norm(config, at / "word_embeddings_layernorm")

    @classmethod
    def make_scores(cls, config: Any, at: Scope) -> Scores:
        """Returns the slopes of ALiBi."""
        return Scores(alibi_slopes=alibi.alibi_slopes(config.num_query_heads))

    def enter(self, embedded_TD: jax.Array, positions_T: jax.Array) -> jax.Array:
        """Returns the input of the first layer, made of embedded tokens."""
        return self.tokens_norm(super().enter(embedded_TD, positions_T))


@dataclass(frozen=True, kw_only=True)
class MptConfig(DecoderConfig):
    """Reads transformers' `MptConfig`.

    Dropouts and `embedding_fraction` are for training. What MosaicML's own code has and
    transformers' has not, such as logits with a scale, is refused.

    Attributes:
        attention_scale: The factor of scores; None for `head_dim ** -0.5`.
        clip_qkv: See `Attention`.
    """

    model_type = "mpt"
    aliases = {
        "hidden_size": "d_model",
        "num_attention_heads": "n_heads",
        "num_hidden_layers": "n_layers",
    }
    defaults = Defaults(plain_heads=True, epsilon=EPSILON, activation=("", "gelu"), tied=True)

    attention_scale: float | None
    clip_qkv: float | None

    @classmethod
    def complete(cls, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the config with the fields of `attn_config` next to its own."""
        stated = config.get("attn_config")
        nested = stated if isinstance(stated, dict) else {}
        return {**config, **{name: nested[name] for name in ATTENTION if name in nested}}

    @classmethod
    def read(cls, fields: Fields) -> MptConfig:
        """Returns what the fields say."""
        if not isinstance(nested := fields.get("attn_config", None), dict | None):
            text = f"attn_config must be an object or null, not {nested!r}"
            fields.note_wrong(text, attn_config=None)
        fields.only(attn_type="multihead_attention", alibi=True, alibi_bias_max=8)
        fields.only(qk_ln=False, prefix_lm=False, attn_uses_sequence_id=False, rope=False)
        fields.only(kv_n_heads=fields.integer("num_attention_heads"), sliding_window_size=-1)
        # transformers reads none of these, and computes as if they had these values.
        fields.only(expansion_ratio=4, no_bias=True, logit_scale=None)
        return cls.from_fields(
            fields,
            rope=(NO_ROTATION, fields.integer("max_seq_len", 2048)),
            intermediate_size=4 * fields.integer("hidden_size"),
            attention_scale=fields.optional_number("softmax_scale", None),
            clip_qkv=fields.optional_number("clip_qkv", None),
            name="transformer",
        )


class Mpt(Llama, config=MptConfig):
    """MPT (MosaicML, 2023) has ALiBi in place of positions, and LayerNorm without biases."""

    prefix = "transformer."
    ignored = ()
    names = ModuleNames(tokens="wte", layers="blocks", norm="norm_f")
    norm_names = NormNames("norm_1", "norm_2")
    attention_names = AttentionNames("out_proj", fused="Wqkv", in_groups=False, module="attn")
    mlp_names = PlainNames("up_proj", "down_proj", module="ffn")
    make_norm = staticmethod(functools.partial(norms.layer_norm, bias=False))

    @classmethod
    def make_attention(cls, config: Any, index: int, at: Scope) -> nnx.Module:
        """Returns the attention of a layer."""
        slopes = alibi.alibi_slopes(config.num_query_heads)
        return attention.grouped_query_attention(
            config,
            index,
            at,
            names=cls.attention_names,
            scores=Scores(scale=config.attention_scale, alibi_slopes=slopes),
            clip_qkv=config.clip_qkv,
        )
