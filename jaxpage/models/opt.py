"""OPT (Zhang et al., 2022), all sizes: norms first, but the 350m norms last and embeds in a narrower space."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxpage.layers.attention import Attend, Attention, LayerPages
from jaxpage.layers.embedding import Embedding
from jaxpage.layers.linear import Linear
from jaxpage.layers.mlp import MLP
from jaxpage.layers.norms import LayerNorm
from jaxpage.models.base import Hidden, KVSpec, Pages, run_layers
from jaxpage.models.fields import Fields
from jaxpage.models.weights import Path, Weight, WeightTable

ignored: tuple[str, ...] = ()
POSITION_OFFSET = 2  # the first rows of the position table belong to padding in the code OPT was trained with


@dataclass(frozen=True, kw_only=True)
class Spec:
    """`OPTConfig`. Dropouts and `layerdrop` are of training."""

    vocab_size: int
    model_width: int
    feed_forward_width: int
    embedding_width: int  # `word_embed_proj_dim`; projected to the model width and back where they differ
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
        fields = Fields(config, "opt")
        num_heads, num_layers = fields.integer("num_attention_heads"), fields.integer("num_hidden_layers")
        width, head_width = fields.integer("hidden_size"), fields.divided("hidden_size", "num_attention_heads")
        norm_first = fields.flag("do_layer_norm_before", True)
        return cls(
            vocab_size=fields.integer("vocab_size"),
            model_width=width,
            feed_forward_width=fields.integer("ffn_dim"),
            embedding_width=fields.optional_integer("word_embed_proj_dim", None) or width,
            num_query_heads=num_heads,
            max_position_embeddings=fields.integer("max_position_embeddings", 2048),
            kv=KVSpec(num_layers, num_heads, head_width, (None,) * num_layers),
            activation=fields.activation("activation_function", "relu"),
            norm_first=norm_first,
            final_norm=norm_first and not fields.flag("_remove_final_layer_norm", False),
            bias=fields.flag("enable_bias", True),
            affine_norms=fields.flag("layer_norm_elementwise_affine", True),
            tie_word_embeddings=fields.flag("tie_word_embeddings", True),
        )

    @property
    def projects(self) -> bool:
        return self.embedding_width != self.model_width


class DecoderLayer(nnx.Module):
    """Attention and feed-forward, each with a residual and with its norm before it or after the sum."""

    def __init__(self, spec: Spec, *, dtype: DTypeLike):
        width = spec.model_width
        self.attention_norm = LayerNorm(width, affine=spec.affine_norms, dtype=dtype)
        self.attention = Attention(
            width,
            num_query_heads=spec.num_query_heads,
            num_kv_heads=spec.kv.num_kv_heads,
            head_width=spec.kv.head_width,
            input_bias=spec.bias,
            output_bias=spec.bias,
            dtype=dtype,
        )
        self.mlp_norm = LayerNorm(width, affine=spec.affine_norms, dtype=dtype)
        self.mlp = MLP(width, spec.feed_forward_width, activation=spec.activation, bias=spec.bias, dtype=dtype)
        self.norm_first = spec.norm_first

    def __call__(
        self, x_TD: Float[Array, "T D"], layer_pages: LayerPages, attend: Attend
    ) -> tuple[Float[Array, "T D"], LayerPages]:
        if self.norm_first:
            attended_TD, layer_pages = self.attention(self.attention_norm(x_TD), layer_pages, attend)
            x_TD = x_TD + attended_TD
            return x_TD + self.mlp(self.mlp_norm(x_TD)), layer_pages
        attended_TD, layer_pages = self.attention(x_TD, layer_pages, attend)
        x_TD = self.attention_norm(x_TD + attended_TD)
        return self.mlp_norm(x_TD + self.mlp(x_TD)), layer_pages


class Model(nnx.Module):
    """See `models.base.Model`. The projection out of the 350m is part of the logits: only sampled rows pay it."""

    def __init__(self, spec: Spec, *, dtype: DTypeLike):
        width, narrow = spec.model_width, spec.embedding_width
        self.tokens = Embedding(spec.vocab_size, narrow, dtype=dtype)
        self.positions = Embedding(spec.max_position_embeddings + POSITION_OFFSET, width, dtype=dtype)
        self.project_in = Linear(narrow, width, bias=False, dtype=dtype) if spec.projects else None
        self.project_out = Linear(width, narrow, bias=False, dtype=dtype) if spec.projects else None
        self.layers = nnx.List([DecoderLayer(spec, dtype=dtype) for _ in range(spec.kv.num_layers)])
        self.norm = LayerNorm(width, affine=spec.affine_norms, dtype=dtype) if spec.final_norm else None
        self.head = None if spec.tie_word_embeddings else Embedding(spec.vocab_size, narrow, dtype=dtype)

    def __call__(
        self,
        token_ids_T: Int[Array, "T"],
        positions_T: Int[Array, "T"],
        pages: Pages,
        attend: Attend,
        taps: Sequence[int] = (),
    ) -> Hidden:
        embedded = self.tokens(token_ids_T)
        hidden_TD = embedded if self.project_in is None else self.project_in(embedded)
        hidden_TD = hidden_TD + self.positions(positions_T + POSITION_OFFSET)
        layers = [partial(layer, attend=attend) for layer in self.layers]
        return run_layers(layers, self.norm, hidden_TD, pages, taps)

    def logits(self, hidden_BD: Float[Array, "B D"]) -> Float[Array, "B V"]:
        projected = hidden_BD if self.project_out is None else self.project_out(hidden_BD)
        return (self.head or self.tokens).logits(projected)


def weights(spec: Spec) -> list[Weight]:
    table = WeightTable(prefix="model.")
    width, narrow, decoder = spec.model_width, spec.embedding_width, "model.decoder"
    table.add_embeddings(f"{decoder}.embed_tokens.weight", spec.vocab_size, narrow, tied=spec.tie_word_embeddings)
    num_positions = spec.max_position_embeddings + POSITION_OFFSET
    table.add(("positions", "table"), f"{decoder}.embed_positions.weight", num_positions, width)
    if spec.projects:
        table.add_linear(("project_in",), f"{decoder}.project_in", narrow, width, bias=False)
        table.add_linear(("project_out",), f"{decoder}.project_out", width, narrow, bias=False)
    for index in range(spec.kv.num_layers):
        _add_layer(table, spec, ("layers", index), f"{decoder}.layers.{index}")
    if spec.final_norm:
        table.add_layer_norm(("norm",), f"{decoder}.final_layer_norm", width, affine=spec.affine_norms)
    return table


def _add_layer(table: WeightTable, spec: Spec, path: Path, name: str) -> None:
    width, feed_forward = spec.model_width, spec.feed_forward_width
    for ours, theirs in (("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj"), ("output", "out_proj")):
        table.add_linear((*path, "attention", ours), f"{name}.self_attn.{theirs}", width, width, bias=spec.bias)
    table.add_layer_norm((*path, "attention_norm"), f"{name}.self_attn_layer_norm", width, affine=spec.affine_norms)
    table.add_linear((*path, "mlp", "up"), f"{name}.fc1", width, feed_forward, bias=spec.bias)
    table.add_linear((*path, "mlp", "down"), f"{name}.fc2", feed_forward, width, bias=spec.bias)
    table.add_layer_norm((*path, "mlp_norm"), f"{name}.final_layer_norm", width, affine=spec.affine_norms)
