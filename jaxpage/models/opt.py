"""OPT (Zhang et al., 2022) and XGLM (Lin et al., 2021), both of Meta, have LayerNorm.

Norms come first in all sizes but the 350m of OPT, which norms last and embeds in a narrower space.
OPT has learned positions, and XGLM sinusoids.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxpage.layers import Embedding, LayerNorm, Linear
from jaxpage.layers.embedding import token_tables
from jaxpage.models.config import Fields
from jaxpage.models.llama import Llama
from jaxpage.models.parts import Block, Decoder, Scope, attention, decoder, mlp, norms
from jaxpage.models.parts.decoder_config import DecoderConfig, Defaults
from jaxpage.models.parts.names import AttentionNames, ModuleNames, NormNames, PlainNames

EPSILON = 1e-5
# The first positions are for padding, in the code that both were trained with.
POSITION_OFFSET = 2


@dataclass(frozen=True, kw_only=True)
class OPTConfig(DecoderConfig):
    """Reads transformers' `OPTConfig`. Dropouts and `layerdrop` are for training.

    Attributes:
        embedding_width: The width of embeddings. There are products to the width of the model and
            back where it is another one.
        norm_first: True if norms come before the halves of a layer.
        final_norm: True if there is a norm after the last layer.
        affine_norms: True if norms have scales and biases.
    """

    model_type = "opt"
    defaults = Defaults(
        has_rope=False,
        plain_heads=True,
        epsilon=("", EPSILON),
        activation=("activation_function", "relu"),
        tied=True,
        all_biases=("enable_bias", True),
    )

    embedding_width: int
    norm_first: bool
    final_norm: bool
    affine_norms: bool

    @classmethod
    def read(cls, fields: Fields) -> OPTConfig:
        """Returns what the fields say."""
        width = fields.integer("hidden_size")
        norm_first = fields.flag("do_layer_norm_before", True)
        return cls.from_fields(
            fields,
            intermediate_size=fields.integer("ffn_dim"),
            name="model.decoder",
            embedding_width=fields.optional_integer("word_embed_proj_dim", None) or width,
            norm_first=norm_first,
            final_norm=norm_first and not fields.flag("_remove_final_layer_norm", False),
            affine_norms=fields.flag("layer_norm_elementwise_affine", True),
        )


class OPT(Decoder, config=OPTConfig):
    """OPT (Zhang et al., 2022) has norms first, in all sizes but the 350m.

    The projection of the 350m's output belongs to the logits, so that only sampled rows pay for it.
    """

    positions: Embedding
    ignored = ()
    names = ModuleNames(positions="embed_positions", norm="final_layer_norm")

    def make_others(self, config: Any, at: Scope) -> None:
        """Makes the projections of embeddings and of the output, and a table of their width."""
        width, narrow = config.hidden_size, config.embedding_width
        self.project_in = _project(narrow, at, ("project_in", width))
        self.project_out = _project(width, at, ("project_out", narrow))
        if narrow != width:
            self.tokens, self.head = token_tables(
                config.vocab_size,
                narrow,
                name=(at / self.names.tokens).name,
                tied=config.tie_word_embeddings,
                dtype=at.dtype,
            )
        if not config.final_norm:
            self.norm = None

    @classmethod
    def make_block(cls, config: Any, index: int, layer: Scope) -> nnx.Module:
        """Returns a layer."""
        block = Block if config.norm_first else decoder.PostNormBlock
        return block(
            attention_norm=cls.make_norm(config, layer / "self_attn_layer_norm"),
            attention=attention.grouped_query_attention(
                config, index, layer / "self_attn", names=AttentionNames("out_proj")
            ),
            mlp_norm=cls.make_norm(config, layer / "final_layer_norm"),
            mlp=mlp.plain_mlp(config, layer, "fc1", "fc2"),
        )

    @classmethod
    def make_norm(cls, config: Any, at: Scope) -> LayerNorm:
        """Returns a norm of hidden states."""
        return norms.layer_norm(config, at, affine=config.affine_norms)

    @classmethod
    def make_positions(cls, config: Any, at: Scope, *, padding: int = 0) -> Embedding | None:
        """Returns the table of learned positions, whose first rows are for padding."""
        return super().make_positions(config, at, padding=POSITION_OFFSET)

    def enter(self, embedded_TD: jax.Array, positions_T: jax.Array) -> jax.Array:
        """Returns the input of the first layer, made of embedded tokens."""
        hidden_TD = embedded_TD if self.project_in is None else self.project_in(embedded_TD)
        return hidden_TD + self.positions(positions_T + POSITION_OFFSET)

    def logits(self, hidden_BD: jax.Array) -> jax.Array:
        """Returns the logits in float32."""
        projected = hidden_BD if self.project_out is None else self.project_out(hidden_BD)
        return super().logits(projected)


def _project(num_in: int, at: Scope, output: tuple[str, int]) -> Linear | None:
    """Returns a projection to another width; None where it is the same."""
    # Only the 350m has them: its tokens are embedded in 512 of 1,024 dimensions.
    has_projection = output[1] != num_in
    return at.projection(num_in, output, axes=("embed", None)) if has_projection else None


@dataclass(frozen=True, kw_only=True)
class XGLMConfig(DecoderConfig):
    """Reads transformers' `XGLMConfig`. Dropouts are for training.

    Attributes:
        embedding_scale: The factor of embeddings.
    """

    model_type = "xglm"
    aliases = {
        "hidden_size": "d_model",
        "num_attention_heads": "attention_heads",
        "num_hidden_layers": "num_layers",
    }
    defaults = Defaults(
        has_rope=False,
        plain_heads=True,
        epsilon=("", EPSILON),
        activation=("activation_function", "gelu"),
        tied=True,
    )

    embedding_scale: float

    @classmethod
    def read(cls, fields: Fields) -> XGLMConfig:
        """Returns what the fields say."""
        width = fields.integer("hidden_size")
        return cls.from_fields(
            fields,
            intermediate_size=fields.integer("ffn_dim"),
            attention_bias=True,
            mlp_bias=True,
            embedding_scale=width**0.5 if fields.flag("scale_embedding", True) else 1.0,
        )


class XGLM(Llama, config=XGLMConfig):
    """XGLM (Lin et al., 2021) has sinusoids for positions, and LayerNorm before both halves."""

    ignored = ("*.embed_positions.weights",)
    names = ModuleNames(norm="layer_norm")
    norm_names = NormNames("self_attn_layer_norm", "final_layer_norm")
    attention_names = AttentionNames("out_proj")
    mlp_names = PlainNames("fc1", "fc2", module="")
    make_norm = staticmethod(norms.layer_norm)

    def embed_tokens(self, token_ids_T: jax.Array) -> jax.Array:
        """Returns what vectors may take the place of."""
        return super().embed_tokens(token_ids_T) * self.config.embedding_scale

    def enter(self, embedded_TD: jax.Array, positions_T: jax.Array) -> jax.Array:
        """Returns the input of the first layer, made of embedded tokens."""
        hidden_TD = super().enter(embedded_TD, positions_T)
        half = hidden_TD.shape[1] // 2
        frequencies = np.exp(np.arange(half, dtype=np.float32) * -(np.log(10_000.0) / (half - 1)))
        # fairseq counts positions after the number of the padding token, which is 1.
        moved_T = (positions_T + POSITION_OFFSET).astype(jnp.float32)
        angles_TE = moved_T[:, None] * jnp.asarray(frequencies, jnp.float32)[None, :]
        sinusoids_TD = jnp.concatenate([jnp.sin(angles_TE), jnp.cos(angles_TE)], axis=1)
        odd = hidden_TD.shape[1] - 2 * half
        return hidden_TD + jnp.pad(sinusoids_TD, ((0, 0), (0, odd))).astype(hidden_TD.dtype)
