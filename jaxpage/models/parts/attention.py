"""Makes the attention of a layer, whose names in checkpoints are those of Llama or near to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
from flax import nnx

from jaxpage.layers import Attention, HeadNorms, LayerNorm, Linear, Projections, RMSNorm, Scores
from jaxpage.layers.attention import query_key_value
from jaxpage.layers.linear import Part, linear
from jaxpage.layers.norms import HeadNorm
from jaxpage.layers.parameter import stack, tensor
from jaxpage.models.parts.decoder_config import DecoderConfig
from jaxpage.models.parts.names import LLAMA_ATTENTION, AttentionNames, Scope
from jaxpage.models.parts.norms import rms_norm
from jaxpage.models.parts.text_config import TextConfig

AnyNorm = RMSNorm | LayerNorm | HeadNorm


@dataclass(frozen=True)
class Gates:
    """Describes gates that multiply the outputs of heads.

    Attributes:
        count: The number of gates of a head: the width of a head, or one.
        projection: The name of their product; None if the product for queries has them.
        alias: The other name of that product.
    """

    count: int
    projection: str | None = None
    alias: str | None = None


def grouped_query_attention(
    config: TextConfig,
    index: int,
    at: Scope,
    *,
    names: AttentionNames = LLAMA_ATTENTION,
    output_bias: bool | None = None,
    norms: HeadNorms = HeadNorms(),
    scores: Scores = Scores(),
    gates: Gates | None = None,
    clip_qkv: float | None = None,
    input_width: int | None = None,
) -> Attention:
    """Returns attention whose key/value heads may be shared by several query heads.

    Args:
        config: The config of the model. It says the heads, the window and the rotation of the
            layer.
        index: The number of the layer, which decides its pages, its window and its rotation.
        at: The scope of the attention.
        names: The names of its products.
        output_bias: True if the product for the output has a bias; None if it is like those for
            queries, keys and values, which `attention_bias` of the config says.
        norms: The norms of queries and keys.
        scores: How scores are made; the window is that of the config.
        gates: The gates of the heads' outputs; None if there are none.
        clip_qkv: See `Attention`.
        input_width: The width of the input; None for that of the model.
    """
    width = config.hidden_size
    num_kv_heads, head_dim = config.kv.heads_of(index)
    query_rows = config.num_query_heads * head_dim
    # With one head the fused product is as others are: all queries, the key, the value.
    is_grouped = names.fused is not None and names.in_groups and num_kv_heads > 1
    gates_in_queries = gates is not None and gates.projection is None
    inputs = query_key_value(
        input_width or width,
        query_rows * (2 if gates_in_queries else 1),
        num_kv_heads * head_dim,
        name=at.name,
        names=names.inputs,
        fused=names.fused,
        is_grouped=is_grouped,
        bias=config.attention_bias,
        dtype=at.dtype,
    )
    output = at.projection(
        query_rows,
        (names.output, width),
        axes=("heads", "embed"),
        bias=config.attention_bias if output_bias is None else output_bias,
    )
    projections = Projections(
        inputs,
        output,
        num_groups=num_kv_heads if is_grouped else None,
        gates=_make_gates(config, at, gates, input_width or width),
        num_gates=0 if gates is None else gates.count,
    )
    return Attention(
        index,
        projections,
        head_dim=head_dim,
        rope=config.rope_of(index),
        norms=norms,
        scores=replace(scores, sliding_window=config.window_of(index)),
        clip_qkv=clip_qkv,
    )


def _make_gates(
    config: TextConfig, at: Scope, gates: Gates | None, input_width: int
) -> Linear | None:
    """Returns the product for gates; None if they have none of their own."""
    if gates is None or gates.projection is None:
        return None
    return linear(
        input_width,
        Part(config.num_query_heads * gates.count, "heads", (at / gates.projection).name),
        fused=gates.alias and (at / gates.alias).name,
        input_axis="embed",
        bias=False,
        dtype=at.dtype,
    )


def no_head_norms(config: DecoderConfig, at: Scope) -> HeadNorms:
    """Returns no norms of queries and keys; see `norms_of_heads`."""
    return HeadNorms()


def norms_of_heads(
    config: DecoderConfig,
    at: Scope,
    make_norm: Callable[..., AnyNorm] = rms_norm,
    *,
    names: tuple[str, str] = ("q_norm", "k_norm"),
    after_rotation: bool = False,
) -> HeadNorms:
    """Returns norms over each head of queries and keys.

    Args:
        config: The config of the model.
        at: The scope of the attention.
        make_norm: Makes a norm of a config, a scope, a `width` and an `axis`.
        names: The names of the norms of queries and of keys.
        after_rotation: See `HeadNorms`.
    """
    query, key = (
        make_norm(config, at / name, width=config.kv.head_dim, axis=None) for name in names
    )
    return HeadNorms(query, key, after_rotation=after_rotation)


def norms_over_all_heads(config: DecoderConfig, at: Scope) -> HeadNorms:
    """Returns norms of queries and keys over all heads together; see `norms_of_heads`."""
    head_dim = config.kv.head_dim
    query_rows = config.num_query_heads * head_dim
    key_rows = config.kv.num_kv_heads * head_dim
    return HeadNorms(
        rms_norm(config, at / "q_norm", width=query_rows, axis="heads"),
        rms_norm(config, at / "k_norm", width=key_rows, axis="kv_heads"),
        over_all_heads=True,
    )


def norms_by_head(config: DecoderConfig, at: Scope, *, separate: bool = False) -> HeadNorms:
    """Returns norms of queries and keys with a scale for each head.

    Args:
        config: The config of the model.
        at: The scope of the attention.
        separate: True if each head has a tensor of its own (StableLM); False for one tensor of all
            (Cohere).
    """
    head_dim = config.kv.head_dim

    def norm(part: str, num_heads: int, axis: str) -> HeadNorm:
        if separate:
            norms = (at / f"{part}_layernorm.norms").name
            source = stack(
                [tensor(f"{norms}.{head}.weight", head_dim) for head in range(num_heads)]
            )
        else:
            source = tensor(f"{(at / part).name}_norm.weight", num_heads, head_dim)
        return HeadNorm(source, axis=axis, epsilon=config.norm_epsilon, dtype=at.dtype)

    num_kv_heads = config.kv.num_kv_heads
    return HeadNorms(
        norm("q", config.num_query_heads, "heads"), norm("k", num_kv_heads, "kv_heads")
    )


def attention_sinks(config: DecoderConfig, at: Scope, *aliases: str) -> nnx.Param[jax.Array]:
    """Returns the sinks of a layer, one for each query head; some files have the other names."""
    return at.vector("", config.num_query_heads, "heads", aliases)
