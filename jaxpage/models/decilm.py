"""DeciLM (NVIDIA, 2025; Nemotron Super and Ultra) is Llama with halves of layers left out.

A layer may have no attention, no feed-forward half, or neither; the halves differ in their widths
and in their numbers of key/value heads (`block_configs`). Layers of the cache are those with
attention:

    attention              yes    yes    no     yes
    feed-forward half      yes    no     yes    yes
    layer of the cache     0      1             2
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from flax import nnx
from jaxtyping import Array, Float

from jaxpage.layers.context import ForwardContext
from jaxpage.models.config.config_fields import RefusedField, WrongField
from jaxpage.models.config.fields import Fields
from jaxpage.models.llama import Llama
from jaxpage.models.parts.attention import grouped_query_attention
from jaxpage.models.parts.block import HalfBlock
from jaxpage.models.parts.decoder_config import DecoderConfig, Defaults
from jaxpage.models.parts.mlp import gated_mlp
from jaxpage.models.parts.scope import Scope

WIDTH_STEP = 256  # Widths of feed-forward halves are rounded up to a multiple of it.
# What either half may have in the files, and what jaxpage does not compute.
NOT_HONOURED = ("replace_with_linear", "sparsify", "window_length", "num_sink_tokens")


@dataclass(frozen=True)
class Halves:
    """Describes a layer.

    Attributes:
        num_kv_heads: The number of key/value heads; None if the layer has no attention.
        width: The width of the feed-forward half; None if the layer has none.
    """

    num_kv_heads: int | None
    width: int | None


@dataclass(frozen=True, kw_only=True)
class DeciLMConfig(DecoderConfig):
    """Reads the config of NVIDIA's own `DeciLMConfig`, which transformers does not have.

    Attributes:
        halves: What each layer has.
    """

    model_type = "nemotron-nas"
    defaults = Defaults(attention_bias=False, mlp_bias=False)

    halves: tuple[Halves, ...]

    @property
    def layer_places(self) -> Sequence[int | tuple[int, ...]]:
        """Returns for each layer the place of its pages; one without attention has none."""
        places = itertools.count()
        return [() if each.num_kv_heads is None else next(places) for each in self.halves]

    @classmethod
    def read(cls, fields: Fields) -> DeciLMConfig:
        """Returns what the fields say."""
        halves = _read_halves(fields)
        head_dim = fields.divide("hidden_size", "num_attention_heads")
        heads = [each.num_kv_heads for each in halves if each.num_kv_heads is not None]
        kv = {
            "num_layers": len(heads),
            "sliding_windows": (None,) * len(heads),
            "decoder_layers": len(halves),
            "heads": tuple((count, head_dim) for count in heads) if len({*heads}) > 1 else (),
        }
        return cls.from_fields(
            fields,
            num_kv_heads=max(heads),
            head_dim=head_dim,
            kv=kv,
            intermediate_size=max(each.width or WIDTH_STEP for each in halves),
            halves=halves,
        )


def _read_halves(fields: Fields) -> tuple[Halves, ...]:
    """Returns what each layer has; if `block_configs` is wrong, one attention in each."""
    count = fields.integer("num_hidden_layers")
    blocks = fields.get("block_configs", None)
    usual = (Halves(1, WIDTH_STEP),) * count
    is_list = isinstance(blocks, list) and len(blocks) == count
    if not is_list or not all(map(_has_halves, blocks)):
        text = f"block_configs must have attention and ffn of each of {count} layers"
        fields.note(WrongField(text), block_configs=None)
        return usual
    for index, block in enumerate(blocks):
        for half in ("attention", "ffn"):
            if idle := [name for name in NOT_HONOURED if block[half].get(name)]:
                text = f"block_configs: {idle[0]} = {block[half][idle[0]]!r} of {half} in layer {index} is not supported"
                fields.note(RefusedField(text), block_configs=None)
                return usual
    halves = tuple(Halves(_kv_heads(fields, block), _width(fields, block)) for block in blocks)
    if not any(each.num_kv_heads for each in halves):
        text = "block_configs: attention in no layer (no_op = true) is not supported"
        fields.note(RefusedField(text), block_configs=None)
        return usual
    return halves


def _has_halves(block: Any) -> bool:
    return isinstance(block, dict) and all(
        isinstance(block.get(name), dict) for name in ("attention", "ffn")
    )


def _kv_heads(fields: Fields, block: dict[str, Any]) -> int | None:
    """Returns the number of key/value heads: that of query heads over those that share one."""
    if block["attention"].get("no_op"):
        return None
    num_heads = fields.integer("num_attention_heads")
    size = block["attention"].get("n_heads_in_group")
    if type(size) is int and size > 0 and num_heads % size == 0:
        return num_heads // size
    text = (
        f"block_configs: n_heads_in_group = {size!r} must divide num_attention_heads = {num_heads}"
    )
    fields.note(WrongField(text), block_configs=None)
    return 1


def _width(fields: Fields, block: dict[str, Any]) -> int | None:
    """Returns the width of a feed-forward half: two thirds of a multiple of the model's."""
    if block["ffn"].get("no_op"):
        return None
    factor = block["ffn"].get("ffn_mult")
    if type(factor) not in (int, float) or not 0 < factor < 1000:
        text = f"block_configs: ffn_mult = {factor!r} must be above 0 and below 1000"
        fields.note(WrongField(text), block_configs=None)
        return WIDTH_STEP
    width = int(2 * factor * fields.integer("hidden_size") / 3)
    return -(-width // WIDTH_STEP) * WIDTH_STEP or WIDTH_STEP


class EmptyBlock(nnx.Module):
    """Returns its input; it is a layer without halves."""

    def __call__(
        self, x_TD: Float[Array, "T D"], layer_pages: Any, context: ForwardContext
    ) -> tuple[Float[Array, "T D"], Any]:
        """Returns the input and the pages, of which it has none."""
        return x_TD, layer_pages


class DeciLM(Llama, config=DeciLMConfig):
    """Nemotron Super 49B and Ultra 253B (NVIDIA, 2025) are Llama with halves of layers left out."""

    @classmethod
    def make_block(cls, config: Any, index: int, at: Scope) -> nnx.Module:
        """Returns a layer with the halves that it has."""
        halves = config.halves[index]
        if halves.num_kv_heads is None and halves.width is None:
            return EmptyBlock()
        if halves.num_kv_heads is None:
            norm = cls.make_norm(config, at / "post_attention_layernorm")
            return HalfBlock(norm, cls.make_mlp(config, index, at), has_pages=False)
        if halves.width is None:
            norm = cls.make_norm(config, at / "input_layernorm")
            return HalfBlock(norm, cls.make_attention(config, index, at / "self_attn"))
        return super().make_block(config, index, at)

    @classmethod
    def make_attention(cls, config: Any, index: int, at: Scope) -> nnx.Module:
        """Returns the attention of a layer."""
        kv = replace(config.kv, num_kv_heads=config.halves[index].num_kv_heads)
        return grouped_query_attention(replace(config, kv=kv), config.layer_places[index], at)

    @classmethod
    def make_mlp(cls, config: Any, index: int, layer: Scope) -> nnx.Module:
        """Returns the feed-forward half of a layer."""
        return gated_mlp(config, layer / "mlp", width=config.halves[index].width)
