"""Llama 1 to 4 (Meta, 2023 to 2025), and families that are Llama but for one thing or two.

Llama 1 to 3 have the form in which many other models are published; see Touvron et al., 2023, and
Grattafiori et al., 2024. Llama 4 attends to chunks of positions, except in layers that do not
rotate. Three layers of four rotate, and there a token sees those positions of its own chunk that
are not after it (`AttentionOptions.attention_chunk`). To the cache a chunk is a window of its size,
which holds all that a token sees of its chunk and more. Where no sequence is longer than a chunk,
all layers are full ones:

    position        0  1  2  3   4  5  6  7     attention_chunk_size 4
    5 sees                       x  x           in a layer that rotates
    5 sees          x  x  x  x   x  x           in a layer that does not
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

import jax
from flax import nnx

from jaxpage.layers import HeadNorms, Scores
from jaxpage.layers.mlp import XIELU
from jaxpage.models.config import ExpertDefaults, Fields, layer_windows, mtp_names
from jaxpage.models.parts import Block, Decoder, Scope, attention, decoder, experts, mlp, norms
from jaxpage.models.parts.decoder_config import DecoderConfig, Defaults, ExpertsConfig
from jaxpage.models.parts.names import AttentionNames, ExpertNames, MLPNames, NormNames, PlainNames

CHUNKED = "chunked_attention"
FULL = "full_attention"
APERTUS_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 12_000_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


class LlamaConfig(DecoderConfig):
    """Reads transformers' `LlamaConfig`.

    `attention_bias` puts biases on all four products. `pretraining_tp` only splits products. A head
    for multi-token prediction has DeepSeek's names.
    """

    model_type = "llama"
    defaults = Defaults(attention_bias=False, mlp_bias=False)
    read_draft_heads = staticmethod(mtp_names.read_numbered_names)


class Llama(Decoder, config=LlamaConfig):
    """Llama 1 to 3 have the form in which many other models are published.

    Many families differ from it in one of these methods alone, or in these attributes. Methods that
    make a part of a layer take the scope of the layer, as `layer`, and enter that of the part.
    `make_attention`, and what it calls, take the scope of attention, as `at`.
    """

    norm_names: ClassVar[NormNames] = NormNames()
    attention_names: ClassVar[AttentionNames] = AttentionNames()
    # `PlainNames` make a feed-forward half without gates.
    mlp_names: ClassVar[MLPNames | PlainNames] = MLPNames()
    expert_names: ClassVar[ExpertNames] = ExpertNames()
    # Returns the norms of queries and keys, of a config and the scope of attention.
    make_head_norms: ClassVar[Callable[..., HeadNorms]] = staticmethod(attention.no_head_norms)
    # True if the product for the output of attention has a bias; None if it is like the others.
    output_bias: ClassVar[bool | None] = None

    @classmethod
    def make_block(cls, config: Any, index: int, layer: Scope) -> nnx.Module:
        """Returns a layer."""
        return Block(
            **cls.make_norms(config, index, layer),
            attention=cls.make_mixer(config, index, layer),
            mlp=cls.make_mlp(config, index, layer),
            is_parallel=cls.is_parallel(config),
        )

    @classmethod
    def is_parallel(cls, config: Any) -> bool:
        """Returns whether both halves of a layer take its input."""
        return False

    @classmethod
    def make_norms(cls, config: Any, index: int, layer: Scope) -> dict[str, Any]:
        """Returns the norms of a layer, by the arguments of `Block` that take them."""
        names = asdict(cls.norm_names).items()
        return {part: name and cls.make_norm(config, layer / name) for part, name in names}

    @classmethod
    def make_mixer(cls, config: Any, index: int, layer: Scope) -> nnx.Module:
        """Returns the half of a layer in which tokens see others: attention, or a recurrence."""
        if config.kv.state_of(index) is not None:
            return cls.make_recurrence(config, index, layer)
        return cls.make_attention(config, index, layer / cls.attention_names.module)

    @classmethod
    def make_recurrence(cls, config: Any, index: int, layer: Scope) -> nnx.Module:
        """Returns what a layer that keeps a state has in the place of attention."""
        raise NotImplementedError

    @classmethod
    def make_attention(cls, config: Any, index: int, at: Scope) -> nnx.Module:
        """Returns the attention of a layer, whose scope is `at`."""
        return attention.grouped_query_attention(
            config,
            index,
            at,
            names=cls.attention_names,
            norms=cls.make_head_norms(config, at),
            scores=cls.make_scores(config, at),
            output_bias=cls.output_bias,
        )

    @classmethod
    def make_scores(cls, config: Any, at: Scope) -> Scores:
        """Returns what is special in the scores of a layer's attention: here nothing."""
        return Scores()

    @classmethod
    def make_mlp(cls, config: Any, index: int, layer: Scope) -> nnx.Module:
        """Returns the feed-forward half of a layer, or its experts.

        Args:
            config: The config of the model.
            index: The number of the layer.
            layer: The scope of the layer, because experts may have several names in it.
        """
        names = cls.mlp_names
        if isinstance(names, PlainNames):
            return mlp.plain_mlp(config, layer / names.module, names.up, names.down)
        if isinstance(config, ExpertsConfig):
            return experts.mlp_or_experts(
                config, index, layer, names=cls.expert_names, mlp_names=names
            )
        return mlp.gated_mlp(config, layer / names.module, names=names)


@dataclass(frozen=True, kw_only=True)
class Llama4Config(ExpertsConfig):
    """Reads transformers' `Llama4TextConfig`.

    The jitter of the router is for training.

    Attributes:
        use_qk_norm: True if queries and keys of layers that rotate have norms.
        temperature_tuning: How queries of the other layers grow with positions; see `Scores`.
    """

    model_type = "llama4_text"
    defaults = Defaults(
        num_kv_heads=8,
        head_dim=128,
        has_null_head_dim=True,
        max_length=131_072,
        theta=500_000.0,
        interleaved=True,
        epsilon=1e-5,
        attention_bias=False,
    )
    expert_defaults = ExpertDefaults(
        count_field="num_local_experts",
        count=16,
        per_token=1,
        width_field="intermediate_size",
        width=8192,
        normalized=False,
        # In a layer with experts `intermediate_size` is that of an expert; dense ones have `_mlp`.
        shared_width=("intermediate_size", 8192),
        routing={"sigmoid": True},
    )

    use_qk_norm: bool
    temperature_tuning: tuple[float, int, int] | None

    @classmethod
    def read(cls, fields: Fields) -> Llama4Config:
        """Returns what the fields say."""
        rotates = layer_windows.rotating_layers(fields)
        return cls.from_fields(
            fields,
            sliding_windows=_chunks(fields, rotates),
            intermediate_size=fields.integer("intermediate_size_mlp", 16_384),
            rotates=rotates,
            use_qk_norm=fields.flag("use_qk_norm", True),
            temperature_tuning=_temperature_tuning(fields),
            experts=cls.expert_defaults.read(fields, scales_input=True),
            sparse_layers=_sparse_layers(fields),
        )


def _chunks(fields: Fields, rotates: tuple[bool, ...]) -> tuple[int | None, ...]:
    """Returns the size of the chunks in each layer; None in those that see everything."""
    types = fields.layer_types(
        [CHUNKED if does_rotate else FULL for does_rotate in rotates], kinds=(CHUNKED, FULL)
    )
    size = fields.optional_integer("attention_chunk_size", 8192)
    if size is None:  # transformers refuses it, whatever the layers are.
        text = "attention_chunk_size must be an integer >= 1, not None"
        fields.note_wrong(text, attention_chunk_size=8192)
    return tuple(size if kind == CHUNKED else None for kind in types)


def _temperature_tuning(fields: Fields) -> tuple[float, int, int] | None:
    """Returns how queries grow with positions, counted from 1, in layers that do not rotate."""
    tuned = fields.get("attn_temperature_tuning", True)
    tuning = fields.number("attn_scale", 0.1), fields.integer("floor_scale", 8192), 1
    if not isinstance(tuned, int | None):  # The published files have 4 for true.
        text = f"attn_temperature_tuning must be true or false, not {tuned!r}"
        fields.note_wrong(text, attn_temperature_tuning=True)
    return tuning if tuned else None


def _sparse_layers(fields: Fields) -> tuple[bool, ...]:
    """Returns which layers have experts."""
    num_layers = fields.integer("num_hidden_layers")
    every = fields.integer("interleave_moe_layer_step", 1)
    sparse = fields.get("moe_layers", None)
    sparse = list(range(every - 1, num_layers, every)) if sparse is None else sparse
    if not isinstance(sparse, list) or not all(type(layer) is int for layer in sparse):
        text = f"moe_layers must be the numbers of layers, not {sparse!r}"
        fields.note_wrong(text, moe_layers=None)
        sparse = []
    return tuple(layer in sparse for layer in range(num_layers))


class Llama4(Llama, config=Llama4Config):
    """Llama 4, text (Meta, 2025), attends to chunks of positions in the layers that rotate."""

    expert_names = ExpertNames(
        module="feed_forward",
        router="router",
        shared=("shared_expert", None),
        in_memory=("feed_forward", "router", ""),
        only_stacked=True,
    )
    mlp_names = MLPNames(module="feed_forward")

    @classmethod
    def make_attention(cls, config: Any, index: int, at: Scope) -> nnx.Module:
        """Returns attention with norms if it rotates, and with growing queries if not."""
        head_norms = HeadNorms()
        scores = Scores(chunked=True)
        if config.rope_of(index) is None:
            scores = Scores(chunked=True, temperature_tuning=config.temperature_tuning)
        # L2 norms, which the checkpoint has no scales for, and of rotated queries and keys.
        elif config.use_qk_norm:
            head_norms = attention.norms_of_heads(
                config, at, norms.unscaled_rms_norm, after_rotation=True
            )
        return attention.grouped_query_attention(config, index, at, norms=head_norms, scores=scores)


class SmolLM3Config(DecoderConfig):
    """Reads transformers' `SmolLM3Config`.

    `no_rope_layers` has a 1 for each layer that rotates. Where the config uses a window, it is that
    of the layers that do not rotate.
    """

    model_type = "smollm3"
    defaults = Defaults(
        num_kv_heads=4,
        max_length=32768,
        theta=2_000_000.0,
        tied=True,
        attention_bias=False,
        mlp_bias=False,
    )

    @classmethod
    def read(cls, fields: Fields) -> SmolLM3Config:
        """Returns what the fields say."""
        rotates = layer_windows.rotating_layers(fields)
        window = None
        if fields.flag("use_sliding_window", False):
            window = fields.optional_integer("sliding_window", None)
        types = fields.layer_types(
            [
                "sliding_attention" if window and not does_rotate else "full_attention"
                for does_rotate in rotates
            ]
        )
        return cls.from_fields(
            fields,
            sliding_windows=layer_windows.windows_of(fields, types, window),
            rotates=rotates,
        )


class SmolLM3(Llama, config=SmolLM3Config):
    """SmolLM3 (Hugging Face, 2025) is Llama in which every fourth layer has no positions (NoPE)."""


class HeliumConfig(DecoderConfig):
    """Reads transformers' `HeliumConfig`."""

    model_type = "helium"
    defaults = Defaults(
        num_kv_heads=20,
        max_length=4096,
        theta=100_000.0,
        interleaved=True,
        epsilon=1e-8,
        attention_bias=False,
        mlp_bias=False,
    )

    @classmethod
    def read(cls, fields: Fields) -> HeliumConfig:
        """Returns what the fields say."""
        head_dim = fields.integer("head_dim", 128)
        usual = fields.divide("hidden_size", "num_attention_heads")
        if head_dim != usual:
            text = f"head_dim = {head_dim} is not hidden_size / num_attention_heads = {usual}"
            fields.note_unsupported(text, head_dim=usual)
        return cls.from_fields(fields, head_dim=usual)


class Helium(Llama, config=HeliumConfig):
    """Helium (Kyutai, 2025) is Llama that rotates interleaved."""

    output_bias = False


@dataclass(frozen=True, kw_only=True)
class SeedOssConfig(DecoderConfig):
    """Reads transformers' `SeedOssConfig`. Dropouts are for training.

    Attributes:
        attention_out_bias: True if the product for the output of attention has a bias.
    """

    model_type = "seed_oss"
    defaults = Defaults(
        num_kv_heads=8,
        head_dim=128,
        has_null_head_dim=True,
        max_length=524_288,
        attention_bias=True,
        mlp_bias=False,
    )

    attention_out_bias: bool

    @classmethod
    def read(cls, fields: Fields) -> SeedOssConfig:
        """Returns what the fields say."""
        has_bias = fields.flag("attention_out_bias", False)
        return cls.from_fields(fields, attention_out_bias=has_bias)


class SeedOss(Llama, config=SeedOssConfig):
    """Seed-OSS (ByteDance Seed, 2025) is Llama with biases on queries, keys and values."""

    @classmethod
    def make_attention(cls, config: Any, index: int, at: Scope) -> nnx.Module:
        """Returns the attention of a layer."""
        return attention.grouped_query_attention(
            config, index, at, output_bias=config.attention_out_bias
        )


@dataclass(frozen=True, kw_only=True)
class ApertusConfig(DecoderConfig):
    """Reads transformers' `ApertusConfig`.

    Attributes:
        xielu: True if the activation function is the learned one, and not `activation`.
    """

    model_type = "apertus"
    defaults = Defaults(
        max_length=65_536,
        theta=12_000_000.0,
        epsilon=1e-5,
        attention_bias=False,
    )
    default_rope = APERTUS_ROPE

    xielu: bool

    @classmethod
    def read(cls, fields: Fields) -> ApertusConfig:
        """Returns what the fields say."""
        learned = fields.get("hidden_act", "xielu") == "xielu"
        if learned:
            # The name of the learned function is no activation that `Fields` knows; it is not used.
            fields.config["hidden_act"] = "silu"
        return cls.from_fields(fields, xielu=learned)


class Apertus(Llama, config=ApertusConfig):
    """Apertus (Swiss AI, 2025) has a learned activation function, and norms of queries and keys."""

    # Files may have the two constants of the activation function, which are the same in all layers.
    ignored = (*Llama.ignored, "*.act_fn.beta", "*.act_fn.eps")
    norm_names = NormNames("attention_layernorm", "feedforward_layernorm")
    make_head_norms = staticmethod(attention.norms_of_heads)

    @classmethod
    def make_mlp(cls, config: Any, index: int, layer: Scope) -> nnx.Module:
        """Returns the feed-forward half of a layer."""
        at = layer / "mlp"
        learned = XIELU(name=f"{at.name}.act_fn", dtype=at.dtype) if config.xielu else None
        return mlp.plain_mlp(config, at, "up_proj", "down_proj", activation=learned)


@dataclass(frozen=True, kw_only=True)
class NanoChatConfig(DecoderConfig):
    """Reads transformers' `NanoChatConfig`.

    Attributes:
        logit_softcap: The soft cap of logits; None for none.
    """

    model_type = "nanochat"
    defaults = Defaults(activation="relu2", attention_bias=False)

    logit_softcap: float | None

    @classmethod
    def read(cls, fields: Fields) -> NanoChatConfig:
        """Returns what the fields say."""
        rope, reach = cls.defaults.read_rope(fields, fields.head_dim())
        # nanochat rotates by the transpose of the matrix that Llama rotates by.
        backwards = tuple(-frequency for frequency in rope.frequencies)
        return cls.from_fields(
            fields,
            rope=(replace(rope, frequencies=backwards), reach),
            logit_softcap=fields.optional_number("final_logit_softcapping", 15.0),
        )


class NanoChat(Llama, config=NanoChatConfig):
    """nanochat (Karpathy, 2025) has RMS norms without scales, and squared ReLU.

    Token embeddings are normalised too. The rotary embedding turns in the opposite direction.
    """

    mlp_names = PlainNames("fc1", "fc2")

    make_norm = staticmethod(norms.unscaled_rms_norm)
    make_head_norms = staticmethod(
        functools.partial(
            attention.norms_of_heads, make_norm=norms.unscaled_rms_norm, after_rotation=True
        )
    )

    def enter(self, embedded_TD: jax.Array, positions_T: jax.Array) -> jax.Array:
        """Returns normalised embeddings; `norm` serves for them too, because it has no scale."""
        return self.norm(super().enter(embedded_TD, positions_T))

    def logits(self, hidden_BD: jax.Array) -> jax.Array:
        """Returns the logits in float32."""
        return decoder.cap_logits(super().logits(hidden_BD), self.config.logit_softcap)
