"""GPT-NeoX, GPT-J and GPT-Neo (EleutherAI, 2021 and 2022), and those that came of them.

GPT-NeoX and GPT-J compute both halves of a layer in parallel and rotate a part of each head.
CodeGen (Salesforce, 2022) is GPT-J. GPT-Neo is older: it has learned positions, and windows in
every other layer. StableLM (Bellagente et al., 2024) began as GPT-NeoX and has gates.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from jaxtyping import Array, Float

from jaxpage.layers import Attention, HeadNorms, Projections, Rope, Scores
from jaxpage.layers.rope_scaling import make_rope
from jaxpage.models.config import Fields
from jaxpage.models.gpt2 import ALIASES, EPSILON, GPT2, inner_width
from jaxpage.models.llama import Llama
from jaxpage.models.parts import Scope, attention, norms
from jaxpage.models.parts.decoder_config import DecoderConfig, Defaults
from jaxpage.models.parts.names import AttentionNames, ModuleNames, NormNames, PlainNames

NUM_PARTS = 4  # The parts of the product of CodeGen.


@dataclass(frozen=True, kw_only=True)
class GPTNeoXConfig(DecoderConfig):
    """Reads transformers' `GPTNeoXConfig`. Dropouts are for training.

    Attributes:
        is_parallel: True if both halves of a layer take its input.
    """

    model_type = "gpt_neox"
    idle_fields = ("partial_rotary_factor",)  # transformers writes it, and reads `rotary_pct`
    defaults = Defaults(
        plain_heads=True, epsilon=("layer_norm_eps", 1e-5), activation="gelu", attention_bias=True
    )

    is_parallel: bool

    @classmethod
    def read(cls, fields: Fields) -> GPTNeoXConfig:
        """Returns what the fields say."""
        head_dim = fields.divide("hidden_size", "num_attention_heads")
        theta = fields.number("rotary_emb_base", 10_000.0)
        share = fields.number("rotary_pct", 0.25)
        max_length = fields.integer("max_position_embeddings", 2048)
        # transformers passes these over, too; who wrote them expects something of them.
        fields.only(rope_theta=theta, head_dim=head_dim)
        return cls.from_fields(
            fields,
            rope=fields.rope(head_dim, max_length, theta=theta, partial=share),
            mlp_bias=True,
            name="gpt_neox",
            is_parallel=fields.flag("use_parallel_residual", True),
        )


class GPTNeoX(Llama, config=GPTNeoXConfig):
    """GPT-NeoX and Pythia (EleutherAI, 2022) compute both halves of a layer in parallel.

    Each half has a LayerNorm of its own, and a quarter of each head is rotated. Checkpoints have
    the queries, keys and values of a head next to each other (`AttentionNames.in_groups`).
    """

    prefix = "gpt_neox."
    ignored = ("*.attention.bias", "*.attention.masked_bias", "*rotary_emb.inv_freq")
    names = ModuleNames(tokens="embed_in", norm="final_layer_norm", heads=("embed_out", "lm_head"))
    attention_names = AttentionNames(output="dense", fused="query_key_value", module="attention")
    mlp_names = PlainNames("dense_h_to_4h", "dense_4h_to_h")
    make_norm = staticmethod(norms.layer_norm)

    @classmethod
    def is_parallel(cls, config: Any) -> bool:
        """Returns whether both halves of a layer take its input."""
        return bool(config.is_parallel)


class GPTJConfig(DecoderConfig):
    """Reads transformers' `GPTJConfig`. Dropouts are for training."""

    model_type = "gptj"
    aliases = ALIASES
    defaults = Defaults(
        plain_heads=True, epsilon=EPSILON, activation=("activation_function", "gelu_new")
    )

    @classmethod
    def read(cls, fields: Fields) -> GPTJConfig:
        """Returns what the fields say."""
        head_dim = fields.divide("hidden_size", "num_attention_heads")
        max_length = fields.integer("max_position_embeddings", 2048)
        return cls.from_fields(
            fields,
            intermediate_size=inner_width(fields, "n_inner"),
            rope=(_gptj_rope(fields, head_dim, max_length), max_length),
            mlp_bias=True,
            name="transformer",
        )


def _gptj_rope(fields: Fields, head_dim: int, max_length: int) -> Rope:
    width = fields.integer("rotary_dim", 64)
    if width % 2 or width > head_dim:
        text = f"rotary_dim = {width} must be even, and at most the width of a head, {head_dim}"
        fields.note_wrong(text, rotary_dim=2)
        width = 2
    # No field of GPT-J says the base.
    parameters = {"rope_type": "default", "rope_theta": 10_000.0}
    rope, _ = make_rope(parameters, head_dim=width, max_position_embeddings=max_length)
    return replace(rope, interleaved=True)


class GPTJ(Llama, config=GPTJConfig):
    """GPT-J (EleutherAI, 2021) computes both halves of a layer in parallel, after one LayerNorm.

    It rotates the first part of each head, interleaved.
    """

    prefix = "transformer."
    ignored = ("*.attn.bias", "*.attn.masked_bias", "*.attn.causal_mask")
    names = ModuleNames(tokens="wte", layers="h", norm="ln_f")
    norm_names = NormNames("ln_1", None)
    attention_names = AttentionNames("out_proj", module="attn")
    mlp_names = PlainNames("fc_in", "fc_out")
    make_norm = staticmethod(norms.layer_norm)

    @classmethod
    def is_parallel(cls, config: Any) -> bool:
        """Returns True: both halves of a layer take its input."""
        return True

    @classmethod
    def has_head_bias(cls, config: Any) -> bool:
        """Returns True: logits have biases."""
        return True


class CodeGenConfig(GPTJConfig):
    """Reads transformers' `CodeGenConfig`. `n_ctx` has no effect there either."""

    model_type = "codegen"

    @classmethod
    def read(cls, fields: Fields) -> GPTJConfig:
        """Returns what the fields say."""
        num_heads = fields.integer("num_attention_heads")
        if num_heads % NUM_PARTS:
            text = f"{NUM_PARTS} must divide n_head = {num_heads}"
            fields.note_wrong(text, num_attention_heads=NUM_PARTS, n_head=NUM_PARTS)
        return super().read(fields)


class AttentionInParts(Attention):
    """Divides the one product in parts, each with the queries, values and keys of some heads."""

    def project(self, x_TI: Float[Array, "T I"]) -> tuple[Array, Array, Array]:
        """Returns queries, keys and values; see `Attention.project`."""
        fused = self.query_key_value(x_TI)
        num_tokens = fused.shape[0]
        parts = fused.reshape(num_tokens, self.num_groups, 3, -1)
        # Values come before keys in a part, as in the code that CodeGen was trained with.
        q, v, k = (parts[:, :, index].reshape(num_tokens, -1) for index in range(3))
        return q, k, v


class CodeGen(GPTJ, config=CodeGenConfig):
    """CodeGen (Salesforce, 2022) is GPT-J with one product for queries, values and keys.

    The product has a part for each device among which a model was divided in training.
    """

    attention_names = AttentionNames("out_proj", fused="qkv_proj", module="attn")

    @classmethod
    def make_attention(cls, config: Any, index: int, at: Scope) -> Attention:
        """Returns the attention of a layer."""
        names = cls.attention_names
        whole = attention.grouped_query_attention(config, index, at, names=names)
        return AttentionInParts(
            index,
            Projections(whole.query_key_value, whole.output, num_groups=NUM_PARTS),
            head_dim=whole.head_dim,
            rope=whole.rope,
        )


class GPTNeoConfig(DecoderConfig):
    """Reads transformers' `GPTNeoConfig`. Dropouts are for training."""

    model_type = "gpt_neo"
    aliases = {"num_attention_heads": "num_heads", "num_hidden_layers": "num_layers"}
    defaults = Defaults(
        has_rope=False,
        plain_heads=True,
        epsilon=EPSILON,
        activation=("activation_function", "gelu_new"),
        tied=True,
    )

    @classmethod
    def read(cls, fields: Fields) -> GPTNeoConfig:
        """Returns what the fields say."""
        window = fields.integer("window_size", 256)
        return cls.from_fields(
            fields,
            intermediate_size=inner_width(fields, "intermediate_size"),
            sliding_windows=tuple(window if kind == "local" else None for kind in _kinds(fields)),
            mlp_bias=True,
            name="transformer",
        )


def _kinds(fields: Fields) -> list[str]:
    """Returns "global" or "local" for each layer; a pattern comes with how often it is repeated."""
    num_layers = fields.integer("num_hidden_layers")
    types = fields.get("attention_types", None) or [[["global", "local"], 12]]
    try:
        kinds = [kind for pattern, count in types for _ in range(count) for kind in pattern]
    except (TypeError, ValueError):
        kinds = []
    if len(kinds) != num_layers or set(kinds) - {"global", "local"}:
        text = f"attention_types = {types!r} must say global or local of {num_layers} layers"
        fields.note_unsupported(text, attention_types=[[["global"], num_layers]])
        return ["global"] * num_layers
    return kinds


class GPTNeo(Llama, config=GPTNeoConfig):
    """GPT-Neo (EleutherAI, 2021) has learned positions, and windows in every other layer.

    Scores of attention are not scaled.
    """

    prefix = "transformer."
    ignored = ("*.attention.bias", "*.attention.masked_bias")
    names = GPT2.names
    norm_names = GPT2.norm_names
    attention_names = AttentionNames("out_proj", module="attn.attention")
    mlp_names = PlainNames("c_fc", "c_proj")
    output_bias = True
    make_norm = staticmethod(norms.layer_norm)

    @classmethod
    def make_scores(cls, config: Any, at: Scope) -> Scores:
        """Returns the factor of scores: Mesh TensorFlow folded it into the weights of queries."""
        return Scores(scale=1.0)


@dataclass(frozen=True, kw_only=True)
class StableLmConfig(DecoderConfig):
    """Reads transformers' `StableLmConfig`. Dropouts are for training.

    Attributes:
        is_parallel: True if both halves of a layer take its input.
        qk_layernorm: True if queries and keys have norms, one for each head.
    """

    model_type = "stablelm"
    defaults = Defaults(
        num_kv_heads=32, max_length=4096, partial=0.25, epsilon=("layer_norm_eps", 1e-5)
    )

    is_parallel: bool
    qk_layernorm: bool

    @classmethod
    def read(cls, fields: Fields) -> StableLmConfig:
        """Returns what the fields say."""
        return cls.from_fields(
            fields,
            head_dim=fields.divide("hidden_size", "num_attention_heads"),
            attention_bias=fields.flag("use_qkv_bias", False),
            is_parallel=fields.flag("use_parallel_residual", False),
            qk_layernorm=fields.flag("qk_layernorm", False),
        )


class StableLm(Llama, config=StableLmConfig):
    """StableLM (Bellagente et al., 2024) has LayerNorm and rotates a quarter of each head.

    Some of its models compute both halves of a layer in parallel, or have a norm for each head.
    """

    make_norm = staticmethod(norms.layer_norm)
    output_bias = False

    @classmethod
    def is_parallel(cls, config: Any) -> bool:
        """Returns whether both halves of a layer take its input."""
        return bool(config.is_parallel)

    @classmethod
    def make_norms(cls, config: Any, index: int, layer: Scope) -> dict[str, Any]:
        """Returns the norms of a layer; a second half that takes its input has none of its own."""
        parts = super().make_norms(config, index, layer)
        return {**parts, "mlp_norm": None} if config.is_parallel else parts

    @classmethod
    def make_head_norms(cls, config: Any, at: Scope) -> HeadNorms:
        """Returns the norms of queries and keys, which the config may ask for."""
        return (
            attention.norms_by_head(config, at, separate=True)
            if config.qk_layernorm
            else HeadNorms()
        )
