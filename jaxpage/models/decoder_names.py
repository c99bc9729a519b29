"""Names the modules of a decoder in a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DecoderNames:
    """Holds the names of a decoder's modules, which most families have from Llama.

    The names of norms between the halves of a layer are in `BlockForm`, those of the feed-forward
    half in `MLPNames`.

    Attributes:
        tokens: The token table, in the decoder.
        positions: The table of learned positions, in the decoder; None if there is none.
        layers: The layers, in the decoder.
        norm: The norm after the last layer, in the decoder.
        heads: The names that the head has, the usual one first.
        attention: The attention, in a layer.
        fused: The one product for queries, keys and values, in the attention; None for three
            products.
        in_groups: True if that product has for each key/value head its queries, its key and its
            value; False if it has all queries, then all keys, then all values.
        output: The product for the output, in the attention.
        head_norms: The norms of queries and of keys, in the attention.
    """

    tokens: str = "embed_tokens"
    positions: str | None = None
    layers: str = "layers"
    norm: str = "norm"
    heads: tuple[str, ...] = ("lm_head",)
    attention: str = "self_attn"
    fused: str | None = None
    in_groups: bool = True
    output: str = "o_proj"
    head_norms: tuple[str, str] = ("q_norm", "k_norm")


LLAMA_MODULES = DecoderNames()
