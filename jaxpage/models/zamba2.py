"""Zamba 2 (Zyphra, 2024) has Mamba 2 in all layers; some take the output of a shared block, too.

A shared block is attention and an MLP. Its input is the hidden state, concatenated with the token's
embedding. There are a few such blocks, and the layers that use them take them in turn. The weights
of a block are held once; each layer adds low-rank products of its own to them (as LoRA does). The
cache of such a layer is the keys and values of its block, followed by its Mamba state.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxpage.layers.activations import gate
from jaxpage.layers.attention import Attention
from jaxpage.layers.context import ForwardContext, LayerPages, StateSpec
from jaxpage.layers.embedding import token_tables
from jaxpage.layers.linear import Linear, Part, linear
from jaxpage.layers.mamba import MambaSpec
from jaxpage.layers.rope import NO_ROTATION
from jaxpage.models.base import Hidden, KVSpec, Pages, run_layers
from jaxpage.models.config_fields import RefusedField, WrongField
from jaxpage.models.fields import Fields
from jaxpage.models.mamba_config import make_mamba, read_groups, read_time_steps
from jaxpage.models.mlp import MLPNames, make_gated_mlp
from jaxpage.models.replacing import Path, replace_modules
from jaxpage.models.rotary_decoder import (
    RotaryDecoderSpec,
    ignored,
    key_value_heads,
    make_attention,
    prefix,
)

__all__ = ["Model", "Spec", "ignored", "prefix"]

LINEAR = "linear_attention"
HYBRID = "hybrid"
# The layers of the 2.7B model, which are those of a config that does not name them.
DEFAULT_TYPES = (
    *(LINEAR, *(*(LINEAR,) * 5, HYBRID) * 7),
    *(*(LINEAR,) * 4, HYBRID, *(LINEAR,) * 3, HYBRID, *(LINEAR,) * 2),
)
MAMBA_EPSILON = 1e-5  # of the norm in Mamba 2, for which there is no field
MLP_NAMES = MLPNames("feed_forward", None, None)


@dataclass(frozen=True, kw_only=True)
class Spec(RotaryDecoderSpec):
    """Reads transformers' `Zamba2Config`.

    Attributes:
        hybrid: The layers that have a block, in ascending order.
        num_blocks: The number of blocks.
        rank: The rank of the products that a layer adds to those of its block.
        adapts_attention: True if a layer has such products for queries, keys and values too.
    """

    hybrid: tuple[int, ...]
    num_blocks: int
    rank: int
    adapts_attention: bool

    @property
    def tied_names(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Returns for each block its name, with those that it has in the other layers."""
        names = [_block(self.name, layer) for layer in self.hybrid]
        return tuple(
            (names[turn], tuple(names[turn + self.num_blocks :: self.num_blocks]))
            for turn in range(min(self.num_blocks, len(names)))
        )

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        """Returns the spec of a config.json."""
        names = ("layer_types", "layers_block_type")
        config = {key: value for key, value in config.items() if key not in names or value}
        if config.keys().isdisjoint(names):
            config["layers_block_type"] = [*DEFAULT_TYPES]
        aliases = {"layer_types": "layers_block_type", "head_dim": "attention_head_dim"}
        with Fields(config, "zamba2", aliases) as fields:
            num_layers = fields.integer("num_hidden_layers")
            types = fields.layer_types(
                (LINEAR,) * num_layers, kinds=(LINEAR, HYBRID), older={"mamba": LINEAR}
            )
            hybrid = tuple(index for index, kind in enumerate(types) if kind == HYBRID)
            width = fields.integer("hidden_size")
            mamba = _read_mamba(fields, width)
            head_dim = _read_head_dim(fields, width)
            _same(fields, hybrid_layer_ids=[*hybrid], attention_hidden_size=2 * width)
            _refuse(fields)
            longest = fields.integer("max_position_embeddings", 4096)
            num_with_pages = num_layers + len(hybrid)
            spec = cls._from_fields(
                fields,
                num_kv_heads=key_value_heads(fields, None),
                head_dim=head_dim,
                max_position_embeddings=longest,
                rope=fields.rope(head_dim, longest)
                if fields.flag("use_mem_rope", False)
                else (NO_ROTATION, longest),
                epsilon=("rms_norm_eps", 1e-5),
                activation=("hidden_act", "gelu"),
                feed_forward_width=fields.optional_integer("intermediate_size", None) or 4 * width,
                mlp_bias=fields.flag("add_bias_linear", False),
                attention_scale=(head_dim / 2) ** -0.5,
                recurrent=mamba,
                tied=True,
                hybrid=hybrid,
                num_blocks=fields.integer("num_mem_blocks", 1),
                rank=fields.integer("adapter_rank", 128),
                adapts_attention=fields.flag("use_shared_attention_adapter", False),
            )
        states: list[StateSpec | None] = []
        for kind in types:
            states += [None, mamba.state] if kind == HYBRID else [mamba.state]
        kv = KVSpec(
            num_with_pages,
            spec.kv.num_kv_heads,
            head_dim,
            (None,) * num_with_pages,
            states=tuple(states),
            decoder_layers=num_layers,
        )
        return replace(spec, kv=kv)


def _block(model: str, layer: int) -> str:
    """Returns the beginning of the names of a layer's block."""
    return f"{model}.layers.{layer}.shared_transformer."


def _read_mamba(fields: Fields, width: int) -> MambaSpec:
    heads = fields.integer("n_mamba_heads", 8)
    inner = fields.integer("mamba_expand", 2) * width
    if inner % heads:
        text = f"n_mamba_heads = {heads} does not divide mamba_expand * hidden_size = {inner}"
        fields.note(WrongField(text), n_mamba_heads=1, mamba_headdim=None, mamba_ngroups=1)
        heads = 1
    _same(fields, mamba_headdim=inner // heads)
    bias = fields.flag("add_bias_linear", False)
    return MambaSpec(
        heads=heads,
        head=inner // heads,
        groups=read_groups(fields, ("mamba_ngroups", 1), n_mamba_heads=heads),
        vector=fields.integer("mamba_d_state", 64),
        kernel=fields.integer("mamba_d_conv", 4),
        # As in Zyphra's own code and vLLM; transformers has (time_step_min, infinity).
        time_steps=read_time_steps(fields),
        input_bias=bias,
        output_bias=bias,
    )


def _read_head_dim(fields: Fields, width: int) -> int:
    """Returns the width of a head: heads share the width of two hidden states."""
    heads = fields.integer("num_attention_heads")
    if 2 * width % heads:
        text = f"num_attention_heads = {heads} does not divide 2 * hidden_size = {2 * width}"
        sizes = dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 1)
        fields.note(WrongField(text), **sizes, head_dim=None, attention_head_dim=None)
        heads = 1
    _same(fields, head_dim=2 * width // heads)
    return 2 * width // heads


def _same(fields: Fields, **derived: Any) -> None:
    """Refuses fields that say something else than what follows from others."""
    for name, value in derived.items():
        if (stated := fields.get(name, None)) not in (None, value):
            text = f"{name} = {stated!r} is not supported: from other fields follows {value}"
            fields.note(RefusedField(text), **{name: value})


def _refuse(fields: Fields) -> None:
    """Refuses what this family does not have, and what transformers cannot compute."""
    if fields.flag("use_long_context", False):
        text = (
            "use_long_context = true is not supported: the model was made with another rope_theta, "
            "which transformers leaves as it is; set max_position_embeddings and rope_parameters"
        )
        fields.note(RefusedField(text), use_long_context=False)
    if not fields.flag("tie_word_embeddings", True):
        text = (
            "tie_word_embeddings = false is not supported: in transformers no weights are shared "
            "then, those of blocks neither"
        )
        fields.note(RefusedField(text), tie_word_embeddings=True)
    fields.only(use_shared_mlp_adapter=True)
    heads = fields.integer("num_attention_heads")
    kv_heads = key_value_heads(fields, None)
    if fields.flag("use_shared_attention_adapter", False) and kv_heads != heads:
        text = f"use_shared_attention_adapter = true needs num_key_value_heads = {kv_heads} to be num_attention_heads = {heads}"
        fields.note(WrongField(text), num_key_value_heads=heads, use_shared_attention_adapter=False)


class LowRankLinear(nnx.Module):
    """Computes products of a low rank, several of the same input.

    Attributes:
        down: The product for all their ranks.
        up: For each of them the product for its output.
    """

    def __init__(
        self,
        spec: Spec,
        names: list[str],
        num_in: int,
        num_out: int,
        *,
        axis: str,
        dtype: DTypeLike,
    ):
        rank = spec.rank
        parts = [Part(rank, None, f"{name}.0") for name in names]
        self.down = linear(num_in, *parts, input_axis="embed", bias=False, dtype=dtype)
        self.up = nnx.List(
            linear(rank, Part(num_out, axis, f"{name}.1"), input_axis=None, bias=False, dtype=dtype)
            for name in names
        )
        replace_modules(self, _share)

    def __call__(self, x_TD: Float[Array, "T D"]) -> list[Float[Array, "T O"]]:
        """Returns the outputs."""
        ranks = jnp.split(self.down(x_TD), len(self.up), axis=-1)
        return [up(rank) for up, rank in zip(self.up, ranks, strict=True)]


class Block(nnx.Module):
    """Computes `mlp(norm(attention(norm(x))))`, with what a layer adds to its products.

    Its attention has the number of the first layer that uses it: all of these are in one cache
    group.
    """

    def __init__(self, spec: Spec, layer: int, place: int, *, dtype: DTypeLike):
        """Makes the block.

        Args:
            spec: The spec of the model.
            layer: The first layer that has the block.
            place: The number of layers of the cache before the keys and values of this one.
            dtype: The type of the parameters.
        """
        name = _block(spec.name, layer)
        width = spec.hidden_size
        epsilon = spec.norm_epsilon
        norm = spec.form.norm
        self.norm = norm(2 * width, name=f"{name}input_layernorm", epsilon=epsilon, dtype=dtype)
        attention = make_attention(
            spec, place, name=f"{name}self_attn", input_width=2 * width, dtype=dtype
        )
        assert isinstance(attention, Attention)
        self.attention = attention
        self.mlp_norm = norm(width, name=f"{name}pre_ff_layernorm", epsilon=epsilon, dtype=dtype)
        self.mlp = make_gated_mlp(
            MLP_NAMES,
            width,
            spec.feed_forward_width,
            module=f"{name}feed_forward",
            bias=spec.mlp_bias,
            activation=spec.activation,
            dtype=dtype,
        )
        replace_modules(self, _share)

    def __call__(
        self,
        x_TI: Float[Array, "T I"],
        of_attention: LowRankLinear | None,
        of_mlp: LowRankLinear,
        layer_pages: LayerPages,
        context: ForwardContext,
    ) -> tuple[Float[Array, "T D"], LayerPages]:
        """Returns the output of the block, with what a layer adds, and the pages of the layer."""
        x_TI = self.norm(x_TI)
        q, k, v = self.attention.project(x_TI)
        if of_attention is not None:
            assert k is not None and v is not None
            more_q, more_k, more_v = of_attention(x_TI)
            q, k, v = q + more_q, k + more_k, v + more_v
        x_TD, layer_pages = self.attention.attend(q, k, v, layer_pages, context)
        x_TD = self.mlp_norm(x_TD)
        (added_TF,) = of_mlp(x_TD)
        gate_up_TF = self.mlp.gate_up(x_TD) + added_TF
        return self.mlp.down(gate(gate_up_TF, self.mlp.activation)), layer_pages


def _share(path: Path, module: nnx.Module) -> nnx.Module | None:
    return Linear(replace(module.spec, shared=True)) if isinstance(module, Linear) else None


class Layer(nnx.Module):
    """Computes `x + mamba(norm(x + linear(block(x, embedding))))`; most layers have no block.

    Attributes:
        turn: The number of the block; None if there is none.
        of_attention: What the layer adds to the products of the block's attention, or None.
        of_mlp: What it adds to those of the block's feed-forward half.
        linear: The product for the output of the block.
        norm: The norm.
        mamba: Mamba 2.
    """

    def __init__(self, spec: Spec, index: int, place: int, *, dtype: DTypeLike):
        """Makes the layer.

        Args:
            spec: The spec of the model.
            index: The layer's place in its model.
            place: The number of layers of the cache before it.
            dtype: The type of the parameters.
        """
        name = f"{spec.name}.layers.{index}"
        width = spec.hidden_size
        self.turn: int | None = None
        if index in spec.hybrid:
            number = spec.hybrid.index(index)
            self.turn = number % spec.num_blocks
            self.of_attention, self.of_mlp = _adapters(spec, number, dtype=dtype)
            part = Part(width, "embed", f"{name}.linear")
            self.linear = linear(width, part, input_axis=None, bias=False, dtype=dtype)
            name = f"{name}.mamba_decoder"
            place += 1
        self.norm = spec.form.norm(
            width, name=f"{name}.input_layernorm", epsilon=spec.norm_epsilon, dtype=dtype
        )
        assert isinstance(spec.recurrent, MambaSpec)
        self.mamba = make_mamba(
            spec.recurrent,
            place,
            width=width,
            epsilon=MAMBA_EPSILON,
            name=f"{name}.mamba",
            dtype=dtype,
        )

    def __call__(
        self,
        x_TD: Float[Array, "T D"],
        layer_pages: tuple[LayerPages, ...],
        context: ForwardContext,
        *,
        embedded_TD: Float[Array, "T D"],
        block: Block | None,
    ) -> tuple[Float[Array, "T D"], tuple[LayerPages, ...]]:
        """Returns the output of the layer and its pages."""
        *of_block, state_pages = layer_pages
        entering_TD = x_TD
        if block is not None:
            both = jnp.concatenate([x_TD, embedded_TD], axis=-1)
            found_TD, of_block[0] = block(
                both, self.of_attention, self.of_mlp, of_block[0], context
            )
            entering_TD = x_TD + self.linear(found_TD)
        mixed_TD, state_pages = self.mamba(self.norm(entering_TD), state_pages, context)
        return x_TD + mixed_TD, (*of_block, state_pages)


def _adapters(
    spec: Spec, number: int, *, dtype: DTypeLike
) -> tuple[LowRankLinear | None, LowRankLinear]:
    """Returns what a layer, the one of this number that has a block, adds to its products."""
    name = _block(spec.name, spec.hybrid[number % spec.num_blocks])
    width = spec.hidden_size
    of_attention = None
    if spec.adapts_attention:
        names = [f"{name}self_attn.linear_{kind}_adapter_list.{number}" for kind in "qkv"]
        of_attention = LowRankLinear(spec, names, 2 * width, 2 * width, axis="heads", dtype=dtype)
    names = [f"{name}feed_forward.gate_up_proj_adapter_list.{number}"]
    return of_attention, LowRankLinear(
        spec, names, width, 2 * spec.feed_forward_width, axis="ffn", dtype=dtype
    )


class Model(nnx.Module):
    """Computes the model; see `models.base.Model`."""

    def __init__(self, spec: Spec, *, dtype: DTypeLike):
        width = spec.hidden_size
        self.tokens, _ = token_tables(
            spec.vocab_size, width, name=f"{spec.name}.embed_tokens", tied=True, dtype=dtype
        )
        places = [
            index + bisect.bisect_left(spec.hybrid, index)
            for index in range(spec.kv.num_decoder_layers)
        ]
        self.blocks = nnx.List(
            Block(spec, layer, places[layer], dtype=dtype)
            for layer in spec.hybrid[: spec.num_blocks]
        )
        self.layers = nnx.List(
            Layer(spec, index, place, dtype=dtype) for index, place in enumerate(places)
        )
        self.norm = spec.form.norm(
            width, name=f"{spec.name}.final_layernorm", epsilon=spec.norm_epsilon, dtype=dtype
        )

    def __call__(
        self, token_ids_T: Int[Array, "T"], pages: Pages, context: ForwardContext
    ) -> Hidden:
        """Returns hidden states, pages and auxiliary hidden states."""
        embedded_TD = self.tokens(token_ids_T)
        of_layers = iter(pages)
        by_layer = tuple(
            tuple(itertools.islice(of_layers, 1 if layer.turn is None else 2))
            for layer in self.layers
        )
        layers = [
            functools.partial(
                layer,
                embedded_TD=embedded_TD,
                block=None if layer.turn is None else self.blocks[layer.turn],
            )
            for layer in self.layers
        ]
        output_TD, by_layer, entering = run_layers(
            layers, self.norm, embedded_TD, by_layer, context
        )
        return output_TD, tuple(itertools.chain.from_iterable(by_layer)), entering

    def logits(self, hidden_BD: Float[Array, "B D"]) -> Float[Array, "B V"]:
        """Returns the logits in float32."""
        return self.tokens.logits(hidden_BD)
