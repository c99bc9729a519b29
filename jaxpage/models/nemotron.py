"""Nemotron (NVIDIA, 2024 and 2025): dense, with Mamba 2, and with halves of layers left out.

Nemotron 3 and 4, dense, and Jais 2 (2025) have LayerNorm and squared ReLU. Each layer of
Nemotron-H, Nemotron Nano 2 and Nemotron 3 is Mamba 2, attention without positions, a feed-forward
half, or experts, after a norm. Layers of the cache are those of Mamba 2 and of attention:

    hybrid_override_pattern    M    -    M    *    E
    layer of the cache         0         1    2

Nemotron Super and Ultra (DeciLM) are Llama whose layers may lack attention, the feed-forward half,
or both; the halves differ in their widths and in their numbers of key/value heads:

    attention              yes    yes    no     yes
    feed-forward half      yes    no     yes    yes
    layer of the cache     0      1             2
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flax import nnx
from jaxtyping import Array, Float

from jaxpage.layers import ExpertsSpec, ForwardContext, MambaSpec
from jaxpage.models.config import CORRECTED, Fields, MtpNames, mtp_names, recurrent_fields
from jaxpage.models.llama import Llama
from jaxpage.models.parts import Scope, attention, experts, mlp, norms, recurrences
from jaxpage.models.parts.decoder import Decoder, HalfBlock
from jaxpage.models.parts.decoder_config import DecoderConfig, Defaults, ExpertsConfig
from jaxpage.models.parts.names import ExpertNames, ModuleNames, PlainNames

FULL = "full_attention"
LINEAR = "linear_attention"
MLP = "mlp"
EXPERTS = "moe"
KINDS = (FULL, LINEAR, MLP, EXPERTS)
WITHOUT_PAGES = (MLP, EXPERTS)
OLDER = {"attention": FULL, "mamba": LINEAR}
PATTERN = {"M": LINEAR, "E": EXPERTS, "*": FULL, "-": MLP}
# What stands in for the layers of a config that is refused, so that its other fields are read.
_CORRECTED = {"layer_types": [FULL], "layers_block_type": [FULL], "hybrid_override_pattern": None}
# The names of these fields in older files outrank those of the class.
_RENAMED = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_dt_limit": "time_step_limit",
    "mamba_conv_bias": "use_conv_bias",
}
WIDTH_STEP = 256  # Widths of feed-forward halves are rounded up to a multiple of it.
# What either half may have in the files, and what jaxpage does not compute.
DECILM_NOT_HONOURED = ("replace_with_linear", "sparsify", "window_length", "num_sink_tokens")


class NemotronConfig(DecoderConfig):
    """Reads transformers' `NemotronConfig`."""

    model_type = "nemotron"
    defaults = Defaults(
        max_length=4096,
        partial=0.5,
        epsilon=("norm_eps", 1e-5),
        activation="relu2",
        attention_bias=False,
        mlp_bias=False,
    )


class Nemotron(Llama, config=NemotronConfig):
    """Nemotron 3 and 4, dense, and Minitron (NVIDIA, 2024), have LayerNorm and squared ReLU.

    The scales of norms are stored less 1, and half of each head is rotated.
    """

    mlp_names = PlainNames("up_proj", "down_proj")

    make_norm = staticmethod(functools.partial(norms.layer_norm, offset=1.0))


class Jais2Config(DecoderConfig):
    """Reads transformers' `Jais2Config`."""

    model_type = "jais2"
    defaults = Defaults(
        max_length=8192,
        epsilon=("layer_norm_eps", 1e-5),
        activation="relu2",
        attention_bias=True,
        mlp_bias=True,
    )


class Jais2(Nemotron, config=Jais2Config):
    """Jais 2 (MBZUAI, Inception, Cerebras, 2025) has LayerNorm, squared ReLU and biases."""

    make_norm = staticmethod(norms.layer_norm)


@dataclass(frozen=True, kw_only=True)
class NemotronHConfig(ExpertsConfig):
    """Reads transformers' `NemotronHConfig`.

    Attributes:
        types: The kind of each layer.
        recurrent: Mamba 2, in the layers that have it.
    """

    model_type = "nemotron_h"
    aliases = {"layer_types": "layers_block_type", "n_routed_experts": "num_local_experts"}
    defaults = Defaults(
        head_dim=128,
        max_length=4096,
        epsilon=("layer_norm_epsilon", 1e-5),
        activation=("mlp_hidden_act", "relu2"),
        mlp_bias=False,
    )
    expert_defaults = replace(
        CORRECTED,
        count=8,
        per_token=2,
        width=7688,
        shared_count=None,
        shared_width=("moe_shared_expert_intermediate_size", 7688),
    )

    types: tuple[str, ...]
    recurrent: MambaSpec

    @property
    def layer_places(self) -> Sequence[int | tuple[int, ...]]:
        """Returns for each layer the place of its pages; a layer without a cache has none."""
        places = itertools.count()
        return [() if kind in WITHOUT_PAGES else next(places) for kind in self.types]

    @classmethod
    def complete(cls, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the config with the names of the class alone."""
        config = dict(config)
        for older, name in _RENAMED.items():
            if older in config:
                config[name] = config.pop(older)
        return config

    @classmethod
    def read(cls, fields: Fields) -> NemotronHConfig:
        """Returns what the fields say."""
        types = _layer_types(fields)
        # As in transformers, the number of layers is that of the types.
        fields.config["num_hidden_layers"] = len(types)
        fields.refuse_true("tie_word_embeddings", " for this family: transformers ties nothing")
        names = ("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "mamba_hidden_act")
        # Time steps as in NVIDIA's own code and vLLM; transformers begins at time_step_min.
        mamba = recurrent_fields.read_mamba2(fields, *names)
        states = [
            mamba.state if kind == LINEAR else None for kind in types if kind not in WITHOUT_PAGES
        ]
        return cls.from_fields(
            fields,
            num_kv_heads=fields.integer("num_key_value_heads", 8),
            kv=recurrences.cache_of_states(states, len(types)),
            rope_by_layer=(None,) * len(states),
            recurrent=mamba,
            types=types,
            experts=cls.read_experts(fields) if EXPERTS in types else None,
            sparse_layers=tuple(kind == EXPERTS for kind in types),
        )

    @classmethod
    def read_experts(cls, fields: Fields) -> ExpertsSpec:
        """Returns the experts, whose expert of all tokens has a width of its own."""
        fields.only(n_shared_experts=1)
        latent_width = fields.optional_integer("moe_latent_size", None)
        return cls.expert_defaults.read(fields, has_gates=False, latent_width=latent_width)

    @classmethod
    def read_draft_heads(cls, fields: Fields) -> MtpNames | None:
        """Returns the names of MTP heads, which are not loaded; None if the config counts none."""
        return mtp_names.unread_heads(fields) if mtp_names.counts_heads(fields) else None


def _layer_types(fields: Fields) -> tuple[str, ...]:
    """Returns the kind of each layer, from a list or from a pattern of letters."""
    pattern = fields.get("hybrid_override_pattern", None)
    if fields.get("layer_types", None) is not None:
        layer_types = fields.in_file("layer_types")
        types = fields.get("layer_types", None)
    elif isinstance(pattern, str):
        layer_types = f"hybrid_override_pattern = {pattern!r}"
        types = [PATTERN.get(letter, letter) for letter in pattern]
    elif pattern is None:
        layer_types = "without layers_block_type and hybrid_override_pattern, a model"
        types = [LINEAR, EXPERTS, FULL, MLP]
    else:
        layer_types = f"hybrid_override_pattern = {pattern!r}"
        types = None
    types = [OLDER.get(str(kind), kind) for kind in types] if isinstance(types, list) else []
    if not {*map(str, types)} - {*WITHOUT_PAGES}:
        text = (
            f"{layer_types} must name layers of {FULL} (*), {LINEAR} (M), {MLP} (-) and "
            f"{EXPERTS} (E), and not the last two alone"
        )
        fields.note_wrong(text, **_CORRECTED)
    elif unknown := sorted({str(kind) for kind in types} - {*KINDS}):
        text = f"{layer_types} has layers {', '.join(unknown)}, which are not supported"
        fields.note_unsupported(text, **_CORRECTED)
    else:
        return tuple(types)
    return (FULL,)


class NemotronH(Decoder, config=NemotronHConfig):
    """Nemotron-H, Nemotron Nano 2 and Nemotron 3 (NVIDIA, 2025) have Mamba 2 and attention layers.

    Others are a feed-forward half or experts. A norm is before each. Attention has no positions.
    """

    # transformers has the first name in memory, files have the second one.
    prefix = ("model.", "backbone.")
    ignored = ("*mtp.*",)
    names = ModuleNames(tokens="embeddings", norm="norm_f")

    @classmethod
    def make_block(cls, config: Any, index: int, layer: Scope) -> nnx.Module:
        """Returns a layer."""
        kind, place = config.types[index], config.layer_places[index]
        mixer: nnx.Module
        if kind == LINEAR:
            mixer = recurrences.mamba2(config, config.recurrent, place, layer / "mixer")
        elif kind == FULL:
            mixer = attention.grouped_query_attention(config, place, layer / "mixer")
        elif kind == EXPERTS:
            mixer = cls.make_experts(config, config.experts, layer)
        else:
            mixer = mlp.plain_mlp(config, layer / "mixer", "up_proj", "down_proj")
        has_pages = kind not in WITHOUT_PAGES
        return HalfBlock(norms.rms_norm(config, layer / "norm"), mixer, has_pages=has_pages)

    @classmethod
    def make_experts(cls, config: NemotronHConfig, spec: ExpertsSpec, layer: Scope) -> nnx.Module:
        """Returns the experts of a layer, with the products around them where they are narrower.

        Args:
            config: The config of the model.
            spec: The experts.
            layer: The scope of the layer.
        """
        at = layer / "mixer"
        width, narrow = config.hidden_size, spec.latent_width
        shared = mlp.plain_mlp(
            config, at / "shared_experts", "up_proj", "down_proj", width=spec.shared_width
        )
        latent = None
        if narrow is not None:
            before, after = ("fc1_latent_proj", narrow), ("fc2_latent_proj", width)
            axes, bias = (None, None), config.mlp_bias
            latent = (
                at.projection(width, before, axes=axes, bias=bias),
                at.projection(narrow, after, axes=axes, bias=bias),
            )
        names = ExpertNames(
            module="mixer", in_memory=("mixer", "gate", "gate.e_score_correction_bias")
        )
        return experts.make_experts(
            spec,
            width,
            names,
            layer=layer.name,
            activation=config.activation,
            shared=(shared, None),
            latent=latent,
            dtype=layer.dtype,
        )


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
            # This is the largest; each layer has its own.
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
        fields.note_wrong(text, block_configs=None)
        return usual
    for index, block in enumerate(blocks):
        for half in ("attention", "ffn"):
            if idle := [name for name in DECILM_NOT_HONOURED if block[half].get(name)]:
                text = (
                    f"block_configs: {idle[0]} = {block[half][idle[0]]!r} of {half} in layer "
                    f"{index} is not supported"
                )
                fields.note_unsupported(text, block_configs=None)
                return usual
    halves = tuple(Halves(_kv_heads(fields, block), _width(fields, block)) for block in blocks)
    if not any(each.num_kv_heads for each in halves):
        text = "block_configs: attention in no layer (no_op = true) is not supported"
        fields.note_unsupported(text, block_configs=None)
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
    fields.note_wrong(text, block_configs=None)
    return 1


def _width(fields: Fields, block: dict[str, Any]) -> int | None:
    """Returns the width of a feed-forward half: two thirds of a multiple of the model's."""
    if block["ffn"].get("no_op"):
        return None
    factor = block["ffn"].get("ffn_mult")
    if type(factor) not in (int, float) or not 0 < factor < 1000:
        text = f"block_configs: ffn_mult = {factor!r} must be above 0 and below 1000"
        fields.note_wrong(text, block_configs=None)
        return WIDTH_STEP
    # So does `_ffn_mult_to_intermediate_size`, of NVIDIA, by the rule of the first code of Llama.
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
    def make_block(cls, config: Any, index: int, layer: Scope) -> nnx.Module:
        """Returns a layer with the halves that it has."""
        halves = config.halves[index]
        if halves.num_kv_heads is None and halves.width is None:
            return EmptyBlock()
        if halves.num_kv_heads is None:
            norm = cls.make_norm(config, layer / "post_attention_layernorm")
            return HalfBlock(norm, cls.make_mlp(config, index, layer), has_pages=False)
        if halves.width is None:
            norm = cls.make_norm(config, layer / "input_layernorm")
            return HalfBlock(norm, cls.make_attention(config, index, layer / "self_attn"))
        return super().make_block(config, index, layer)

    @classmethod
    def make_attention(cls, config: Any, index: int, at: Scope) -> nnx.Module:
        """Returns the attention of a layer, whose place is among those with attention."""
        return super().make_attention(config, config.layer_places[index], at)

    @classmethod
    def make_mlp(cls, config: Any, index: int, layer: Scope) -> nnx.Module:
        """Returns the feed-forward half of a layer."""
        return mlp.gated_mlp(config, layer / "mlp", width=config.halves[index].width)
