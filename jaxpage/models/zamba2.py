"""Zamba 2 (Zyphra, 2024) has Mamba 2 in all layers, and a few transformer blocks that layers share.

Most layers have Mamba 2 alone:

    x ──┬── norm ── mamba ── (+) ──
        └─────────────────────┘

A hybrid layer calls a shared block first. Mamba takes what the block returns, added to x:

    x ──┬── [x, embedding] ── block ── linear ── (+) ── norm ── mamba ── (+) ──
        ├─────────────────────────────────────────┘                      │
        └────────────────────────────────────────────────────────────────┘

The block takes x next to the embedding of the token, which is what the first layer takes: two
hidden states in a row. It is `mlp(norm(attention(norm(both))))`, without sums in between. There are
`num_mem_blocks` blocks, and the hybrid layers call them in turn. With blocks A and B:

    layer     0          1                    2          3                    4
    block                A                               B                    A
    cache     0 state    1 keys and values    3 state    4 keys and values    6 keys and values
                         2 state                         5 state              7 state

The weights of a block are held once, whichever layers call it; keys and values are of the layer
that calls. A hybrid layer also adds low-rank projections of its own to the projections of the block
(as LoRA does), so that a block differs a little from call to call.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxpage.layers import NO_ROTATION, ForwardContext, LayerPages, Linear, MambaSpec, Scores
from jaxpage.models.config import Fields, recurrent_fields
from jaxpage.models.parameters.replacing import Path, replace_modules
from jaxpage.models.parts import Scope, attention, decoder, mlp, norms, recurrences
from jaxpage.models.parts.decoder_config import DecoderConfig, Defaults
from jaxpage.models.parts.names import MLPNames, ModuleNames

LINEAR = "linear_attention"
HYBRID = "hybrid"
# The layers of the 2.7B model, which are those of a config that does not name them.
DEFAULT_TYPES = (
    *(LINEAR, *(*(LINEAR,) * 5, HYBRID) * 7),
    *(*(LINEAR,) * 4, HYBRID, *(LINEAR,) * 3, HYBRID, *(LINEAR,) * 2),
)
MAMBA_EPSILON = 1e-5  # of the norm in Mamba 2, for which there is no field
MLP_NAMES = MLPNames("feed_forward", gate=None, up=None)


@dataclass(frozen=True)
class SharedBlocks:
    """Describes the blocks that layers share.

    Attributes:
        callers: The hybrid layers, in ascending order.
        count: The number of blocks.
        rank: The rank of what a layer adds to the projections of its block.
        adapts_attention: True if it adds to those for queries, keys and values, too.
    """

    callers: tuple[int, ...]
    count: int
    rank: int
    adapts_attention: bool

    @property
    def first_callers(self) -> tuple[int, ...]:
        """Returns for each block the first layer that calls it."""
        return self.callers[: self.count]

    def block_of(self, layer: int) -> int | None:
        """Returns the number of the block that a layer calls; None if it is not hybrid."""
        return self.callers.index(layer) % self.count if layer in self.callers else None


@dataclass(frozen=True, kw_only=True)
class Zamba2Config(DecoderConfig):
    """Reads transformers' `Zamba2Config`.

    Attributes:
        recurrent: Mamba 2.
        blocks: The shared blocks.
    """

    model_type = "zamba2"
    aliases = {"layer_types": "layers_block_type", "head_dim": "attention_head_dim"}
    defaults = Defaults(max_length=4096, epsilon=1e-5, activation="gelu", tied=True)

    recurrent: MambaSpec
    blocks: SharedBlocks

    @property
    def tied_names(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Returns for each block its name, with those that it has in the other layers."""
        names = [scope_of_block(self, layer).name + "." for layer in self.blocks.callers]
        count = self.blocks.count
        return tuple(
            (name, tuple(names[number + count :: count]))
            for number, name in enumerate(names[:count])
        )

    @property
    def layer_places(self) -> Sequence[tuple[int, ...]]:
        """Returns for each layer the places of its block's keys and values and of its state."""
        places = itertools.count()
        callers = self.blocks.callers
        return [
            (next(places), next(places)) if layer in callers else (next(places),)
            for layer in range(self.num_layers)
        ]

    @classmethod
    def complete(cls, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the config with the types of its layers."""
        names = ("layer_types", "layers_block_type")
        config = {key: value for key, value in config.items() if key not in names or value}
        if config.keys().isdisjoint(names):
            # transformers has these as a default of the class, and not as a rule for other depths.
            config["layers_block_type"] = [*DEFAULT_TYPES]
        return config

    @classmethod
    def read(cls, fields: Fields) -> Zamba2Config:
        """Returns what the fields say."""
        num_layers = fields.integer("num_hidden_layers")
        types = fields.layer_types(
            (LINEAR,) * num_layers, kinds=(LINEAR, HYBRID), older={"mamba": LINEAR}
        )
        hybrid = tuple(index for index, kind in enumerate(types) if kind == HYBRID)
        width = fields.integer("hidden_size")
        mamba = _read_mamba(fields, width)
        head_dim = _read_head_dim(fields, width)
        _check_derived(fields, hybrid_layer_ids=[*hybrid], attention_hidden_size=2 * width)
        _refuse_unsupported(fields)
        max_length = fields.integer("max_position_embeddings", 4096)
        rotates = fields.flag("use_mem_rope", False)
        states_by_type = {LINEAR: (mamba.state,), HYBRID: (None, mamba.state)}
        states = [state for kind in types for state in states_by_type[kind]]
        return cls.from_fields(
            fields,
            head_dim=head_dim,
            rope=None if rotates else (NO_ROTATION, max_length),
            intermediate_size=fields.optional_integer("intermediate_size", None) or 4 * width,
            kv=recurrences.cache_of_states(states, num_layers),
            mlp_bias=fields.flag("add_bias_linear", False),
            recurrent=mamba,
            blocks=SharedBlocks(
                hybrid,
                fields.integer("num_mem_blocks", 1),
                fields.integer("adapter_rank", 128),
                fields.flag("use_shared_attention_adapter", False),
            ),
        )


def _read_mamba(fields: Fields, width: int) -> MambaSpec:
    heads = fields.integer("n_mamba_heads", 8)
    inner = fields.integer("mamba_expand", 2) * width
    if inner % heads:
        text = f"n_mamba_heads = {heads} does not divide mamba_expand * hidden_size = {inner}"
        fields.note_wrong(text, n_mamba_heads=1, mamba_headdim=None, mamba_ngroups=1)
        heads = 1
    _check_derived(fields, mamba_headdim=inner // heads)
    bias = fields.flag("add_bias_linear", False)
    return MambaSpec(
        heads=heads,
        head=inner // heads,
        groups=recurrent_fields.read_groups(fields, ("mamba_ngroups", 1), n_mamba_heads=heads),
        vector=fields.integer("mamba_d_state", 64),
        kernel=fields.integer("mamba_d_conv", 4),
        # As in Zyphra's own code and vLLM; transformers has (time_step_min, infinity).
        time_steps=recurrent_fields.read_time_steps(fields),
        input_bias=bias,
        output_bias=bias,
    )


def _read_head_dim(fields: Fields, width: int) -> int:
    """Returns the width of a head: heads share the width of two hidden states."""
    heads = fields.integer("num_attention_heads")
    if 2 * width % heads:
        text = f"num_attention_heads = {heads} does not divide 2 * hidden_size = {2 * width}"
        sizes = dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 1)
        fields.note_wrong(text, **sizes, head_dim=None, attention_head_dim=None)
        heads = 1
    _check_derived(fields, head_dim=2 * width // heads)
    return 2 * width // heads


def _check_derived(fields: Fields, **derived: Any) -> None:
    """Refuses fields that say something else than what follows from others."""
    for name, value in derived.items():
        if (stated := fields.get(name, None)) not in (None, value):
            text = f"{name} = {stated!r} is not supported: from other fields follows {value}"
            fields.note_unsupported(text, **{name: value})


def _refuse_unsupported(fields: Fields) -> None:
    """Refuses what this family does not have, and what transformers cannot compute."""
    fields.refuse_true(
        "use_long_context",
        ": the model was made with another rope_theta, which transformers leaves as it is; set "
        "max_position_embeddings and rope_parameters",
    )
    if not fields.flag("tie_word_embeddings", True):
        text = (
            "tie_word_embeddings = false is not supported: in transformers no weights are shared "
            "then, those of blocks neither"
        )
        fields.note_unsupported(text, tie_word_embeddings=True)
    fields.only(use_shared_mlp_adapter=True)
    heads = fields.integer("num_attention_heads")
    kv_heads = fields.kv_heads(None)
    if fields.flag("use_shared_attention_adapter", False) and kv_heads != heads:
        text = (
            f"use_shared_attention_adapter = true needs num_key_value_heads = {kv_heads} to be "
            f"num_attention_heads = {heads}"
        )
        fields.note_wrong(text, num_key_value_heads=heads, use_shared_attention_adapter=False)


def scope_of_block(
    config: Zamba2Config, layer: int, dtype: jax.typing.DTypeLike = "float32"
) -> Scope:
    """Returns the scope of the block that a layer calls; files may have it in several layers."""
    return Scope(f"{config.name}.layers.{layer}.shared_transformer", dtype)


class BlockAdapter(nnx.Module):
    """Computes what a hybrid layer adds to projections of its block that have one input.

    Attributes:
        down: The projection to the low ranks of all of them.
        up: For each of them the projection from its low rank to what is added.
    """

    def __init__(self, at: Scope, names: list[str], rank: int, sizes: tuple[int, int], axis: str):
        """Makes the projections.

        Args:
            at: The scope of the half of the block that has them.
            names: Their names.
            rank: Their rank.
            sizes: The numbers of inputs and of outputs of each.
            axis: The axis of the outputs.
        """
        num_in, num_out = sizes
        downs = [(f"{name}.0", rank) for name in names]
        self.down = at.projection(num_in, *downs, axes=("embed", None))
        self.up = nnx.List(
            at.projection(rank, (f"{name}.1", num_out), axes=(None, axis)) for name in names
        )
        replace_modules(self, _mark_shared)

    def __call__(self, x_TD: Float[Array, "T D"]) -> list[Float[Array, "T O"]]:
        """Returns what is added to each projection."""
        ranks = jax.numpy.split(self.down(x_TD), len(self.up), axis=-1)
        return [up(rank) for up, rank in zip(self.up, ranks, strict=True)]


def _mark_shared(path: Path, module: nnx.Module) -> nnx.Module | None:
    """Returns a linear layer as one that several layers have, which takes no LoRA adapters."""
    return Linear(replace(module.spec, shared=True)) if isinstance(module, Linear) else None


class SharedBlock(nnx.Module):
    """Computes `mlp(norm(attention(norm(both))))`, with what a layer adds to its projections.

    `both` is a hidden state and an embedding. Attention writes the pages of the layer that calls.
    Its number in the cache is that of its first caller: the keys and values of all callers are in
    one cache group.
    """

    def __init__(self, config: Zamba2Config, layer: int, dtype: jax.typing.DTypeLike):
        """Makes the block.

        Args:
            config: The config of the model.
            layer: The first layer that calls the block.
            dtype: The type of the parameters.
        """
        at = scope_of_block(config, layer, dtype)
        input_width = 2 * config.hidden_size
        # Heads share the width of two hidden states, and scores are scaled for the width of one.
        scores = Scores(scale=(config.kv.head_dim / 2) ** -0.5)
        # Every hybrid layer has two layers of the cache, of which the first has keys and values.
        place = config.layer_places[layer][0]
        self.norm = norms.rms_norm(config, at / "input_layernorm", width=input_width)
        self.attention = attention.grouped_query_attention(
            config, place, at / "self_attn", scores=scores, input_width=input_width
        )
        self.mlp_norm = norms.rms_norm(config, at / "pre_ff_layernorm")
        self.mlp = mlp.gated_mlp(config, at / "feed_forward", names=MLP_NAMES)
        replace_modules(self, _mark_shared)

    def __call__(
        self,
        both_TI: Float[Array, "T I"],
        attention_adapter: BlockAdapter | None,
        mlp_adapter: BlockAdapter,
        layer_pages: LayerPages,
        context: ForwardContext,
    ) -> tuple[Float[Array, "T D"], LayerPages]:
        """Returns the output of the block, with what a layer adds, and the pages of the layer."""
        both_TI = self.norm(both_TI)
        q, k, v = self.attention.project(both_TI)
        if attention_adapter is not None:
            assert k is not None and v is not None
            added_q, added_k, added_v = attention_adapter(both_TI)
            q, k, v = q + added_q, k + added_k, v + added_v
        x_TD, layer_pages = self.attention.attend(q, k, v, layer_pages, context)
        x_TD = self.mlp_norm(x_TD)
        (added_TF,) = mlp_adapter(x_TD)
        return self.mlp.gate_down(self.mlp.gate_up(x_TD) + added_TF), layer_pages


class Zamba2Layer(nnx.Module):
    """Computes `x + mamba(norm(x))`, or in a hybrid layer `x + mamba(norm(x + linear(block)))`.

    Attributes:
        block_number: The number of the block that a hybrid layer calls; None in other layers, which
            lack the first three modules.
        attention_adapter: What the layer adds to the projections of the block's attention, or None.
        mlp_adapter: What it adds to those of the block's feed-forward half.
        linear: The projection of the block's output.
        norm: The norm before Mamba 2.
        mamba: Mamba 2.
    """

    def __init__(self, config: Zamba2Config, index: int, at: Scope):
        self.block_number = config.blocks.block_of(index)
        if self.block_number is not None:
            width = config.hidden_size
            self.attention_adapter, self.mlp_adapter = _make_adapters(
                config, index, self.block_number, at
            )
            self.linear = at.projection(width, ("linear", width), axes=(None, "embed"))
            at = at / "mamba_decoder"
        self.norm = norms.rms_norm(config, at / "input_layernorm")
        place = config.layer_places[index][-1]
        self.mamba = recurrences.mamba2(
            config, config.recurrent, place, at / "mamba", epsilon=MAMBA_EPSILON
        )

    def __call__(
        self,
        x_TD: Float[Array, "T D"],
        layer_pages: tuple[LayerPages, ...],
        context: ForwardContext,
        *,
        embedded_TD: Float[Array, "T D"],
        block: SharedBlock | None,
    ) -> tuple[Float[Array, "T D"], tuple[LayerPages, ...]]:
        """Returns the output of the layer and its pages."""
        *block_pages, state_pages = layer_pages
        entering_TD = x_TD
        if block is not None:
            both_TI = jax.numpy.concatenate([x_TD, embedded_TD], axis=-1)
            block_TD, block_pages[0] = block(
                both_TI, self.attention_adapter, self.mlp_adapter, block_pages[0], context
            )
            # Mamba takes the sum, and the residual stream does not: x is added again below.
            entering_TD = x_TD + self.linear(block_TD)
        mixed_TD, state_pages = self.mamba(self.norm(entering_TD), state_pages, context)
        return x_TD + mixed_TD, (*block_pages, state_pages)


def _make_adapters(
    config: Zamba2Config, index: int, block_number: int, at: Scope
) -> tuple[BlockAdapter | None, BlockAdapter]:
    """Returns what a hybrid layer adds to the projections of attention and of the MLP.

    Files have it in the block, in lists with an entry for each hybrid layer.
    """
    blocks, width = config.blocks, config.hidden_size
    number = blocks.callers.index(index)
    block = scope_of_block(config, blocks.first_callers[block_number], at.dtype)
    attention_adapter = None
    if blocks.adapts_attention:
        names = [f"linear_{kind}_adapter_list.{number}" for kind in "qkv"]
        sizes = 2 * width, 2 * width
        attention_adapter = BlockAdapter(block / "self_attn", names, blocks.rank, sizes, "heads")
    names = [f"gate_up_proj_adapter_list.{number}"]
    sizes = width, 2 * config.intermediate_size
    return attention_adapter, BlockAdapter(block / "feed_forward", names, blocks.rank, sizes, "ffn")


class Zamba2(decoder.Decoder, config=Zamba2Config):
    """Zamba 2 (Zyphra, 2024) has Mamba 2 in all layers, some of which call a shared block, too."""

    names = ModuleNames(norm="final_layernorm")

    def make_others(self, config: Any, at: Scope) -> None:
        """Makes the blocks that layers share."""
        self.blocks = nnx.List(
            SharedBlock(config, layer, at.dtype) for layer in config.blocks.first_callers
        )

    @classmethod
    def make_block(cls, config: Any, index: int, layer: Scope) -> nnx.Module:
        """Returns a layer."""
        return Zamba2Layer(config, index, layer)

    def bind_layers(
        self, token_ids_T: Int[Array, "T"], hidden_TD: Float[Array, "T D"], context: ForwardContext
    ) -> Iterable[Any]:
        """Returns the layers, each with the embeddings and the block that it calls, if any."""
        # The embeddings are those of the first layer, however deep the layer is that takes them.
        numbers = [self.config.blocks.block_of(index) for index in range(len(self.layers))]
        return [
            functools.partial(
                layer,
                embedded_TD=hidden_TD,
                block=None if number is None else self.blocks[number],
            )
            for layer, number in zip(self.layers, numbers, strict=True)
        ]
