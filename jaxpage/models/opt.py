"""OPT (Zhang et al., 2022) has norms first, in all sizes but the 350m.

The 350m norms last, and embeds in a narrower space.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxpage.layers.attention import Attention, Projections, query_key_value
from jaxpage.layers.context import ForwardContext, LayerPages
from jaxpage.layers.embedding import Embedding, token_tables
from jaxpage.layers.linear import Linear, Part, linear
from jaxpage.layers.mlp import MLP
from jaxpage.layers.norms import LayerNorm
from jaxpage.models.base import Hidden, KVSpec, Pages, run_layers
from jaxpage.models.fields import Fields

prefix = "model."
ignored: tuple[str, ...] = ()
# The first rows of the position table are for padding, in the code that OPT was trained with.
POSITION_OFFSET = 2


@dataclass(frozen=True, kw_only=True)
class Spec:
    """Holds the fields of transformers' `OPTConfig`. Dropouts and `layerdrop` are for training."""

    vocab_size: int
    hidden_size: int
    feed_forward_width: int
    # `word_embed_proj_dim`: there are projections to the model width and back where they differ.
    embedding_width: int
    num_query_heads: int
    max_position_embeddings: int
    kv: KVSpec
    activation: str
    norm_first: bool  # `do_layer_norm_before`
    final_norm: bool
    bias: bool  # `enable_bias`
    affine_norms: bool  # `layer_norm_elementwise_affine`
    tie_word_embeddings: bool

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Spec:
        """Returns the spec of a config.json."""
        with Fields(config, "opt") as fields:
            num_heads = fields.integer("num_attention_heads")
            num_layers = fields.integer("num_hidden_layers")
            width = fields.integer("hidden_size")
            head_dim = fields.divide("hidden_size", "num_attention_heads")
            norm_first = fields.flag("do_layer_norm_before", True)
            return cls(
                vocab_size=fields.integer("vocab_size"),
                hidden_size=width,
                feed_forward_width=fields.integer("ffn_dim"),
                embedding_width=fields.optional_integer("word_embed_proj_dim", None) or width,
                num_query_heads=num_heads,
                max_position_embeddings=fields.integer("max_position_embeddings", 2048),
                kv=KVSpec(num_layers, num_heads, head_dim, (None,) * num_layers),
                activation=fields.activation("activation_function", "relu"),
                norm_first=norm_first,
                final_norm=norm_first and not fields.flag("_remove_final_layer_norm", False),
                bias=fields.flag("enable_bias", True),
                affine_norms=fields.flag("layer_norm_elementwise_affine", True),
                tie_word_embeddings=fields.flag("tie_word_embeddings", True),
            )

    @property
    def projects(self) -> bool:
        """Returns whether the embeddings have another width than the model."""
        return self.embedding_width != self.hidden_size


class DecoderLayer(nnx.Module):
    """Adds attention and then the feed-forward half, with norms before each or after the sums."""

    def __init__(self, spec: Spec, layer_index: int, *, name: str, dtype: DTypeLike):
        width = spec.hidden_size
        inner = spec.feed_forward_width
        bias = spec.bias

        def projection(
            num_in: int, num_out: int, module: str, output_axis: str, input_axis: str
        ) -> Linear:
            part = Part(num_out, output_axis, f"{name}.{module}")
            return linear(num_in, part, input_axis=input_axis, bias=bias, dtype=dtype)

        def norm(module: str) -> LayerNorm:
            return LayerNorm(width, name=f"{name}.{module}", affine=spec.affine_norms, dtype=dtype)

        self.attention_norm = norm("self_attn_layer_norm")
        self.attention = Attention(
            layer_index,
            Projections(
                query_key_value(
                    width, width, width, name=f"{name}.self_attn", bias=bias, dtype=dtype
                ),
                projection(width, width, "self_attn.out_proj", "embed", "heads"),
            ),
            head_dim=spec.kv.head_dim,
        )
        self.mlp_norm = norm("final_layer_norm")
        up = projection(width, inner, "fc1", "ffn", "embed")
        down = projection(inner, width, "fc2", "embed", "ffn")
        self.mlp = MLP(up, down, activation=spec.activation)
        self.norm_first = spec.norm_first

    def __call__(
        self, x_TD: Float[Array, "T D"], layer_pages: LayerPages, context: ForwardContext
    ) -> tuple[Float[Array, "T D"], LayerPages]:
        """Returns the output of the layer and its pages."""
        if self.norm_first:
            attended_TD, layer_pages = self.attention(
                self.attention_norm(x_TD), layer_pages, context
            )
            x_TD = x_TD + attended_TD
            return x_TD + self.mlp(self.mlp_norm(x_TD)), layer_pages
        attended_TD, layer_pages = self.attention(x_TD, layer_pages, context)
        x_TD = self.attention_norm(x_TD + attended_TD)
        return self.mlp_norm(x_TD + self.mlp(x_TD)), layer_pages


class Model(nnx.Module):
    """Computes an OPT model; see `models.base.Model`.

    The projection of the 350m's output belongs to the logits, so that only sampled rows pay for it.
    """

    def __init__(self, spec: Spec, *, dtype: DTypeLike):
        width = spec.hidden_size
        narrow = spec.embedding_width
        decoder = "model.decoder"

        def projection(num_in: int, num_out: int, module: str) -> Linear | None:
            if not spec.projects:
                return None
            part = Part(num_out, None, f"{decoder}.{module}")
            return linear(num_in, part, input_axis="embed", bias=False, dtype=dtype)

        self.tokens, self.head = token_tables(
            spec.vocab_size,
            narrow,
            name=f"{decoder}.embed_tokens",
            tied=spec.tie_word_embeddings,
            dtype=dtype,
        )
        num_positions = spec.max_position_embeddings + POSITION_OFFSET
        self.positions = Embedding(
            num_positions, width, name=f"{decoder}.embed_positions", axis=None, dtype=dtype
        )
        self.project_in = projection(narrow, width, "project_in")
        self.project_out = projection(width, narrow, "project_out")
        self.layers = nnx.List(
            DecoderLayer(spec, index, name=f"{decoder}.layers.{index}", dtype=dtype)
            for index in range(spec.kv.num_layers)
        )
        norm_name = f"{decoder}.final_layer_norm"
        self.norm = (
            LayerNorm(width, name=norm_name, affine=spec.affine_norms, dtype=dtype)
            if spec.final_norm
            else None
        )

    def __call__(
        self, token_ids_T: Int[Array, "T"], pages: Pages, context: ForwardContext
    ) -> Hidden:
        """Returns hidden states, pages and auxiliary hidden states."""
        embedded = self.tokens(token_ids_T)
        hidden_TD = embedded if self.project_in is None else self.project_in(embedded)
        hidden_TD = hidden_TD + self.positions(context.positions_T + POSITION_OFFSET)
        return run_layers(self.layers, self.norm, hidden_TD, pages, context)

    def logits(self, hidden_BD: Float[Array, "B D"]) -> Float[Array, "B V"]:
        """Returns the logits in float32."""
        projected = hidden_BD if self.project_out is None else self.project_out(hidden_BD)
        return (self.head or self.tokens).logits(projected)
