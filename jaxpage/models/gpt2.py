"""GPT-2 (Radford et al., 2019), and GPT-BigCode (SantaCoder and StarCoder, 2023), which is like it.

They have norms first, and learned positions. Queries, keys and values come from one product.
StarCoder2 (2024) rotates in their place, and has the layers of Llama with LayerNorm and biases.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from flax import nnx

from jaxpage.layers import MLP, NO_ROTATION, Attention, Linear, Projections, Scores
from jaxpage.layers.linear import Part, linear
from jaxpage.models.base import KVSpec
from jaxpage.models.config import Fields
from jaxpage.models.llama import Llama
from jaxpage.models.parts import Scope, norms
from jaxpage.models.parts.decoder_config import DecoderConfig, Defaults
from jaxpage.models.parts.names import AttentionNames, ModuleNames, NormNames, PlainNames

ALIASES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
EPSILON = ("layer_norm_epsilon", 1e-5)


def inner_width(fields: Fields, name: str) -> int:
    """Returns the width of a feed-forward half; four times the model's where it is null."""
    return fields.optional_integer(name, None) or 4 * fields.integer("hidden_size")


@dataclass(frozen=True, kw_only=True)
class GPT2Config(DecoderConfig):
    """Reads transformers' `GPT2Config`.

    `reorder_and_upcast_attn` asks for scores in float32, which they always are here.

    Attributes:
        attention_scales: The factor of the scores of each layer.
    """

    model_type = "gpt2"
    aliases = {alias: name for name, alias in ALIASES.items()}

    attention_scales: tuple[float, ...]

    @classmethod
    def read(cls, fields: Fields) -> GPT2Config:
        """Returns what the fields say, which has its own names in messages."""
        num_heads, num_layers, width = (
            fields.integer(name) for name in ("n_head", "n_layer", "n_embd")
        )
        head_dim = fields.divide("n_embd", "n_head")
        scale = head_dim**-0.5 if fields.flag("scale_attn_weights", True) else 1.0
        by_layer = fields.flag("scale_attn_by_inverse_layer_idx", False)
        # It is read so that a value that is no flag is told.
        fields.flag("reorder_and_upcast_attn", False)
        return cls(
            vocab_size=fields.integer("vocab_size"),
            hidden_size=width,
            intermediate_size=fields.optional_integer("n_inner", None) or 4 * width,
            num_query_heads=num_heads,
            max_position_embeddings=fields.integer("n_positions", 1024),
            kv=KVSpec(num_layers, num_heads, head_dim, (None,) * num_layers),
            rope=NO_ROTATION,
            norm_epsilon=fields.number(*EPSILON),
            activation=fields.activation("activation_function", "gelu_new"),
            tie_word_embeddings=fields.flag("tie_word_embeddings", True),
            name="transformer",
            attention_scales=tuple(
                # GPT-2 of Mistral (Stanford CRFM) divides the scores of layer i by i + 1.
                scale / (index + 1 if by_layer else 1)
                for index in range(num_layers)
            ),
        )


class GPT2(Llama, config=GPT2Config):
    """GPT-2 (Radford et al., 2019) has norms first, and learned positions."""

    prefix = "transformer."
    # The causal masks that old checkpoints carry.
    ignored: ClassVar[tuple[str, ...]] = (
        "*.attn.bias",
        "*.attn.masked_bias",
        "*.crossattention.bias",
    )
    names = ModuleNames(tokens="wte", positions="wpe", layers="h", norm="ln_f")
    norm_names = NormNames("ln_1", "ln_2")
    attention_names = AttentionNames(module="attn")
    make_norm = staticmethod(norms.layer_norm)

    @classmethod
    def make_attention(cls, config: Any, index: int, at: Scope) -> nnx.Module:
        """Returns the attention of a layer."""
        width = config.hidden_size
        queries, keys, values = (
            Part(width, axis, None) for axis in ("heads", "kv_heads", "kv_heads")
        )
        return Attention(
            index,
            Projections(
                _conv1d(width, at / "c_attn", "embed", queries, keys, values),
                _conv1d(width, at / "c_proj", "heads", Part(width, "embed", None)),
            ),
            head_dim=config.kv.head_dim,
            scores=Scores(scale=config.attention_scales[index]),
        )

    @classmethod
    def make_mlp(cls, config: Any, index: int, layer: Scope) -> nnx.Module:
        """Returns the feed-forward half of a layer."""
        at = layer / "mlp"
        width = config.hidden_size
        inner = config.intermediate_size
        return MLP(
            _conv1d(width, at / "c_fc", "embed", Part(inner, "ffn", None)),
            _conv1d(inner, at / "c_proj", "ffn", Part(width, "embed", None)),
            activation=config.activation,
        )


def _conv1d(num_in: int, at: Scope, input_axis: str, *parts: Part) -> Linear:
    """Returns a product of parts whose weight is stored with its inputs first."""
    return linear(
        num_in,
        *parts,
        fused=at.name,
        input_axis=input_axis,
        bias=True,
        transposed=True,
        dtype=at.dtype,
    )


@dataclass(frozen=True, kw_only=True)
class GPTBigCodeConfig(DecoderConfig):
    """Reads transformers' `GPTBigCodeConfig`.

    Dropouts are for training. Softmax is always in float32 here.

    Attributes:
        attention_scale: The factor of scores; None for `head_dim ** -0.5`.
    """

    model_type = "gpt_bigcode"
    aliases = ALIASES
    defaults = Defaults(
        max_length=1024,
        has_rope=False,
        epsilon=EPSILON,
        activation=("activation_function", "gelu_pytorch_tanh"),
        tied=True,
    )

    attention_scale: float | None

    @classmethod
    def read(cls, fields: Fields) -> GPTBigCodeConfig:
        """Returns what the fields say."""
        heads = fields.integer("num_attention_heads")
        return cls.from_fields(
            fields,
            num_kv_heads=1 if fields.flag("multi_query", True) else heads,
            head_dim=fields.divide("hidden_size", "num_attention_heads"),
            intermediate_size=inner_width(fields, "n_inner"),
            attention_bias=True,
            mlp_bias=True,
            name="transformer",
            attention_scale=None if fields.flag("scale_attn_weights", True) else 1.0,
        )


class GPTBigCode(Llama, config=GPTBigCodeConfig):
    """GPT-BigCode (SantaCoder and StarCoder, 2023) is GPT-2 with one key/value head."""

    prefix = "transformer."
    ignored = ("*.attn.bias", "*.attn.masked_bias")
    names = GPT2.names
    norm_names = GPT2.norm_names
    attention_names = AttentionNames("c_proj", fused="c_attn", module="attn")
    mlp_names = PlainNames("c_fc", "c_proj")
    make_norm = staticmethod(norms.layer_norm)

    @classmethod
    def make_scores(cls, config: Any, at: Scope) -> Scores:
        """Returns the factor of scores."""
        return Scores(scale=config.attention_scale)


class Starcoder2Config(DecoderConfig):
    """Reads transformers' `Starcoder2Config`. Dropouts are for training."""

    model_type = "starcoder2"
    defaults = Defaults(
        num_kv_heads=2,
        has_window=True,
        max_length=4096,
        epsilon=("norm_epsilon", 1e-5),
        activation="gelu_pytorch_tanh",
        tied=True,
        all_biases=("use_bias", True),
    )


class Starcoder2(Llama, config=Starcoder2Config):
    """StarCoder2 (Lozhkov et al., 2024) has LayerNorm, biases, and an MLP without gates.

    Its window is that of all layers.
    """

    mlp_names = PlainNames("c_fc", "c_proj")

    make_norm = staticmethod(norms.layer_norm)
