"""Gemma 1 to 3, text (Gemma Team, Google, 2024 and 2025), and VaultGemma.

Norms store their scales less 1, and embeddings are multiplied by the root of their width. Each
generation is the one before it with a few differences:

    Gemma 2     norms after attention and after the feed-forward half too; a window in every second
                layer; soft caps of scores and of logits
    Gemma 3     a window in five layers of six, which have a rotation of their own; norms of queries
                and keys in place of the caps
    VaultGemma  Gemma 2 without the norms after the halves, trained with differential privacy

Gemma 3n and Gemma 4 are in `gemma3n.py` and `gemma4.py`, and share `gemma_layers.py`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax

from jaxpage.layers import RMSNorm, Scores
from jaxpage.models.config import Fields, layer_windows
from jaxpage.models.llama import Llama
from jaxpage.models.parts import NormNames, Scope, attention, decoder, norms
from jaxpage.models.parts.decoder_config import DecoderConfig, Defaults

ACTIVATION = "gelu_pytorch_tanh"
FULL = "full_attention"
SLIDING = "sliding_attention"
# The field of the base of the rotation in layers of each type, and its default.
GEMMA3_THETA = {
    FULL: ("rope_theta", 1_000_000.0),
    SLIDING: ("rope_local_base_freq", 10_000.0),
}


def gemma_norm(config: Any, at: Scope, **options: Any) -> RMSNorm:
    """Returns a norm whose stored scale is less 1; the options are those of `rms_norm`."""
    return norms.rms_norm(config, at, offset=1.0, **options)


def refuse_bidirectional(fields: Fields) -> None:
    """Notes an error if attention sees later tokens, as in models of embeddings."""
    if fields.get("use_bidirectional_attention", None):
        text = "use_bidirectional_attention (attention to later tokens) is not supported"
        fields.note_unsupported(text, use_bidirectional_attention=None)


class GemmaConfig(DecoderConfig):
    """Reads transformers' `GemmaConfig`.

    In `hidden_act`, "gelu" is a legacy value that means the tanh approximation.
    """

    model_type = "gemma"
    defaults = Defaults(
        num_kv_heads=16,
        head_dim=256,
        max_length=8192,
        activation=ACTIVATION,
        tied=True,
        attention_bias=False,
    )

    @classmethod
    def complete(cls, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the config with the activation that it means."""
        # The first published files said gelu, and the models were trained with the tanh form of it.
        is_legacy = config.get("hidden_act") == "gelu"
        return {**config, "hidden_act": ACTIVATION} if is_legacy else config

    @classmethod
    def read(cls, fields: Fields) -> GemmaConfig:
        """Returns what the fields say."""
        used = fields.get("hidden_act", ACTIVATION)
        other = fields.get("hidden_activation", None)
        if other not in (None, used):
            text = (
                f"hidden_activation = {other!r} is not supported with hidden_act = {used!r}, "
                "which is used"
            )
            fields.note_unsupported(text, hidden_activation=None)
        refuse_bidirectional(fields)
        return cls.from_fields(fields)


class Gemma(Llama, config=GemmaConfig):
    """Gemma 1 (Gemma Team, 2024) is Llama with wide heads, scaled embeddings and GELU."""

    make_norm: ClassVar[Callable[..., norms.Norm]] = staticmethod(gemma_norm)

    def embed_tokens(self, token_ids_T: jax.Array) -> jax.Array:
        """Returns the embeddings, times the root of their width."""
        # Vectors of pictures come in already scaled, and so take the place of the product.
        return super().embed_tokens(token_ids_T) * math.sqrt(self.config.hidden_size)


@dataclass(frozen=True, kw_only=True)
class Gemma2Config(DecoderConfig):
    """Reads transformers' `Gemma2Config`.

    Attributes:
        scores: The scale of scores, and their soft cap.
        logit_softcap: The soft cap of logits; None for none.
    """

    model_type = "gemma2"
    defaults = Defaults(
        num_kv_heads=4,
        head_dim=256,
        max_length=8192,
        activation=("hidden_activation", ACTIVATION),
        tied=True,
        attention_bias=False,
    )
    # Of scores and of logits, in the place of fields that are absent.
    default_softcaps: ClassVar[tuple[float | None, float | None]] = (50.0, 30.0)

    scores: Scores
    logit_softcap: float | None

    @classmethod
    def read(cls, fields: Fields) -> Gemma2Config:
        """Returns what the fields say."""
        windows = layer_windows.read_windows(fields, layer_windows.layer_types(fields, 2), 4096)
        return cls.read_gemma(fields, sliding_windows=windows)

    @classmethod
    def read_gemma(cls, fields: Fields, **options: Any) -> Gemma2Config:
        """Returns what the fields say that Gemma 2 and 3 have in common.

        Args:
            fields: The fields of the config.
            **options: Further arguments of `from_fields`.
        """
        refuse_bidirectional(fields)
        score_cap, logit_cap = cls.default_softcaps
        return cls.from_fields(
            fields,
            scores=Scores(
                # The 27B model is scaled for the width of the model over its heads, not for that of
                # a head.
                scale=fields.number("query_pre_attn_scalar", 256.0) ** -0.5,
                logit_softcap=fields.optional_number("attn_logit_softcapping", score_cap),
            ),
            logit_softcap=fields.optional_number("final_logit_softcapping", logit_cap),
            **options,
        )


class Gemma2(Gemma, config=Gemma2Config):
    """Gemma 2 (Gemma Team, 2024) has windows in every second layer, and four norms in a layer."""

    OVERFLOWS_FLOAT16 = True
    norm_names = NormNames(
        mlp_norm="pre_feedforward_layernorm",
        post_attention_norm="post_attention_layernorm",
        post_mlp_norm="post_feedforward_layernorm",
    )

    @classmethod
    def make_scores(cls, config: Any, at: Scope) -> Scores:
        """Returns the scale of scores, and their soft cap."""
        scores: Scores = config.scores
        return scores

    def logits(self, hidden_BD: jax.Array) -> jax.Array:
        """Returns the logits in float32."""
        return decoder.cap_logits(super().logits(hidden_BD), self.config.logit_softcap)


class VaultGemmaConfig(Gemma2Config):
    """Reads transformers' `VaultGemmaConfig`."""

    model_type = "vaultgemma"


class VaultGemma(Gemma2, config=VaultGemmaConfig):
    """VaultGemma (Google, 2025) is Gemma 2 with two norms in a layer."""

    OVERFLOWS_FLOAT16 = False
    norm_names = NormNames(mlp_norm="pre_feedforward_layernorm")


class Gemma3Config(Gemma2Config):
    """Reads transformers' `Gemma3TextConfig`."""

    model_type = "gemma3_text"
    default_softcaps = (None, None)

    @classmethod
    def read(cls, fields: Fields) -> Gemma2Config:
        """Returns what the fields say."""
        if fields.get("attn_logit_softcapping", None) is not None:
            text = "attn_logit_softcapping is not supported: attention of Gemma 3 has no softcap"
            fields.note_unsupported(text, attn_logit_softcapping=None)
        # Files from before `layer_types` have this field: one layer of so many is a full one.
        types = layer_windows.layer_types(fields, fields.integer("sliding_window_pattern", 6))
        return cls.read_gemma(
            fields,
            sliding_windows=layer_windows.read_windows(fields, types, 4096),
            **layer_windows.read_ropes(
                fields, types, fields.integer("head_dim", 256), 131_072, GEMMA3_THETA
            ),
        )


class Gemma3(Gemma2, config=Gemma3Config):
    """Gemma 3, text (Gemma Team, 2025), is Gemma 2 with norms of queries and keys."""

    make_head_norms = staticmethod(
        functools.partial(attention.norms_of_heads, make_norm=gemma_norm)
    )
