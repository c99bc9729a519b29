"""Makes the attention of a layer, whose names in checkpoints are those of Llama or near to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
from flax import nnx

from jaxpage.layers.attention import Attention, HeadNorms, Projections, Scores, query_key_value
from jaxpage.layers.linear import Part, linear
from jaxpage.layers.norms import HeadNorm, LayerNorm, RMSNorm
from jaxpage.layers.parameter import parameter, tensor
from jaxpage.models.parts.decoder_config import DecoderConfig
from jaxpage.models.parts.scope import Scope

AnyNorm = RMSNorm | LayerNorm | HeadNorm


@dataclass(frozen=True)
class AttentionNames:
    """Holds the names of the products of attention.

    Attributes:
        output: The product for the output.
        fused: The one product for queries, keys and values; None for three products.
        in_groups: True if that product has for each key/value head its queries, its key and its
            value; False if it has all queries, then all keys, then all values.
    """

    output: str = "o_proj"
    fused: str | None = None
    in_groups: bool = True


LLAMA = AttentionNames()


@dataclass(frozen=True)
class Gates:
    """Describes gates that multiply the outputs of heads.

    Attributes:
        count: The number of gates of a head: the width of a head, or one.
        product: The name of their product; None if the product for queries has them.
        alias: The other name of that product.
    """

    count: int
    product: str | None = None
    alias: str | None = None


def grouped_query_attention(
    config: DecoderConfig,
    index: int,
    at: Scope,
    *,
    names: AttentionNames = LLAMA,
    input_bias: bool | None = None,
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
        index: The number of the layer.
        at: The scope of the attention.
        names: The names of its products.
        input_bias: True if the products for queries, keys and values have biases; None for
            `attention_bias` of the config.
        output_bias: True if the product for the output has a bias; None like `input_bias`.
        norms: The norms of queries and keys.
        scores: How scores are made; the window is that of the config.
        gates: The gates of the heads' outputs; None if there are none.
        clip_qkv: See `Attention`.
        input_width: The width of the input; None for that of the model.
    """
    width = config.hidden_size
    num_kv_heads = config.kv.num_kv_heads
    head_dim = config.kv.head_dim
    query_rows = config.num_query_heads * head_dim
    # With one head the fused product is as others are: all queries, the key, the value.
    is_grouped = names.fused is not None and names.in_groups and num_kv_heads > 1
    has_gates_in_queries = gates is not None and gates.product is None
    projections = Projections(
        query_key_value(
            input_width or width,
            query_rows * (2 if has_gates_in_queries else 1),
            num_kv_heads * head_dim,
            name=at.name,
            fused=names.fused,
            is_grouped=is_grouped,
            bias=config.attention_bias if input_bias is None else input_bias,
            dtype=at.dtype,
        ),
        linear(
            query_rows,
            Part(width, "embed", f"{at.name}.{names.output}"),
            input_axis="heads",
            bias=config.attention_bias if output_bias is None else output_bias,
            dtype=at.dtype,
        ),
        num_groups=num_kv_heads if is_grouped else None,
    )
    if gates is not None:
        projections = replace(projections, num_gates=gates.count)
    if gates is not None and gates.product is not None:
        part = Part(config.num_query_heads * gates.count, "heads", f"{at.name}.{gates.product}")
        product = linear(
            input_width or width,
            part,
            fused=gates.alias and f"{at.name}.{gates.alias}",
            input_axis="embed",
            bias=False,
            dtype=at.dtype,
        )
        projections = replace(projections, gates=product)
    return Attention(
        index,
        projections,
        head_dim=head_dim,
        rope=config.rope_of(index),
        norms=norms,
        scores=replace(scores, sliding_window=config.kv.sliding_windows[index]),
        clip_qkv=clip_qkv,
    )


def norms_of_heads(
    config: DecoderConfig,
    at: Scope,
    make_norm: Callable[..., AnyNorm],
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


def norms_over_all_heads(
    config: DecoderConfig, at: Scope, make_norm: Callable[..., AnyNorm]
) -> HeadNorms:
    """Returns norms of queries and keys over all heads together; see `norms_of_heads`."""
    head_dim = config.kv.head_dim
    query_rows = config.num_query_heads * head_dim
    key_rows = config.kv.num_kv_heads * head_dim
    return HeadNorms(
        make_norm(config, at / "q_norm", width=query_rows, axis="heads"),
        make_norm(config, at / "k_norm", width=key_rows, axis="kv_heads"),
        over_all_heads=True,
    )


def attention_sinks(config: DecoderConfig, at: Scope) -> nnx.Param[jax.Array]:
    """Returns the sinks of a layer, one for each query head."""
    count = config.num_query_heads
    source = tensor(at.name, count)
    return parameter((count,), axes=("heads",), dtype=at.dtype, sources=[source])
