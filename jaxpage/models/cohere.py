"""Command R, R+, R7B and A (Cohere, 2024) compute both halves of a layer in parallel.

They have LayerNorm without biases, and rotate interleaved.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax

from jaxpage.layers import HeadNorms
from jaxpage.models.config import Fields, layer_windows
from jaxpage.models.llama import Llama
from jaxpage.models.parts import DecoderConfig, Defaults, NormNames, Scope, attention, norms

THETA = 500_000.0


@dataclass(frozen=True, kw_only=True)
class CohereConfig(DecoderConfig):
    """Reads transformers' `CohereConfig`.

    `model_max_length`, which that class does not have, is the length that Command R was trained
    for. Its `max_position_embeddings` is far shorter.

    Attributes:
        logit_scale: The factor of logits.
        use_qk_norm: True if queries and keys have norms, with a scale for each head.
    """

    model_type = "cohere"
    defaults = Defaults(epsilon=("layer_norm_eps", 1e-5), tied=True, attention_bias=False)

    logit_scale: float
    use_qk_norm: bool = False

    @classmethod
    def read(cls, fields: Fields) -> CohereConfig:
        """Returns what the fields say."""
        max_length = fields.integer("max_position_embeddings", 8192)
        if fields.rope_parameters(max_length, THETA)["rope_type"] == "default":
            # A scaled rotation says how far it reaches by itself, and then this field does not
            # count.
            max_length = fields.optional_integer("model_max_length", None) or max_length
        # Cohere rotates neighbours and not halves, as its own code does.
        rope = fields.rope(fields.head_dim(), max_length, theta=THETA, interleaved=True)
        return cls.from_fields(
            fields,
            rope=rope,
            logit_scale=fields.number("logit_scale", 0.0625),
            use_qk_norm=fields.flag("use_qk_norm", False),
        )


class Cohere(Llama, config=CohereConfig):
    """Command R and R+ (Cohere, 2024) compute both halves of a layer in parallel.

    R+ has norms of queries and keys.
    """

    norm_names = NormNames(mlp_norm=None)
    make_norm = staticmethod(functools.partial(norms.layer_norm, bias=False))

    @classmethod
    def is_parallel(cls, config: Any) -> bool:
        """Returns True: both halves of a layer take its input."""
        return True

    @classmethod
    def make_head_norms(cls, config: Any, at: Scope) -> HeadNorms:
        """Returns the norms of queries and keys, which the config may ask for."""
        return attention.norms_by_head(config, at) if config.use_qk_norm else HeadNorms()

    def logits(self, hidden_BD: jax.Array) -> jax.Array:
        """Returns the logits in float32."""
        return super().logits(hidden_BD) * self.config.logit_scale


class Cohere2Config(CohereConfig):
    """Reads transformers' `Cohere2Config`."""

    model_type = "cohere2"
    defaults = replace(CohereConfig.defaults, max_length=8192, interleaved=True)

    @classmethod
    def read(cls, fields: Fields) -> Cohere2Config:
        """Returns what the fields say."""
        types = layer_windows.layer_types(fields, fields.integer("sliding_window_pattern", 4))
        return cls.from_fields(
            fields,
            sliding_windows=layer_windows.read_windows(fields, types, 4096),
            rotates=layer_windows.slides(types),
            logit_scale=fields.number("logit_scale", 0.0625),
        )


class Cohere2(Cohere, config=Cohere2Config):
    """Command R7B and Command A (Cohere, 2024) compute both halves of a layer in parallel.

    Layers with windows rotate; those without have no positions.
    """
