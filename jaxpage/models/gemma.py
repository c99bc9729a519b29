"""Gemma 1 to 3, text (Gemma Team, Google, 2024 and 2025), and VaultGemma.

Norms store their scales less 1, and embeddings grow by the root of their width. Gemma 2 adds norms
after both halves, windows, and soft caps of scores and logits; Gemma 3 has norms of queries and
keys in place of the caps. VaultGemma was trained with differential privacy. What the layers of
Gemma 3n and Gemma 4 have in common follows: some read the pages of another one, heads are wider in
full layers, and each may have an input of its own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxpage.layers.activations import ACTIVATIONS
from jaxpage.layers.attention import Attention, HeadNorms, Projections, Scores
from jaxpage.layers.embedding import Embedding
from jaxpage.layers.linear import Linear, Part, linear
from jaxpage.layers.norms import RMSNorm
from jaxpage.models.config.config_fields import RefusedField, WrongField
from jaxpage.models.config.fields import Fields
from jaxpage.models.config.layer_windows import layer_types, read_ropes, read_windows
from jaxpage.models.llama import Llama
from jaxpage.models.parts.attention import grouped_query_attention, norms_of_heads
from jaxpage.models.parts.decoder import cap_logits
from jaxpage.models.parts.decoder_config import DecoderConfig, Defaults
from jaxpage.models.parts.norms import Norm, rms_norm
from jaxpage.models.parts.projection import projection
from jaxpage.models.parts.scope import Scope

ACTIVATION = "gelu_pytorch_tanh"
GEMMA3_THETA = {
    "full_attention": ("rope_theta", 1_000_000.0),
    "sliding_attention": ("rope_local_base_freq", 10_000.0),
}
FULL = "full_attention"
SLIDING = "sliding_attention"


def gemma_norm(config: Any, at: Scope, **options: Any) -> RMSNorm:
    """Returns a norm whose stored scale is less 1; the options are those of `rms_norm`."""
    return rms_norm(config, at, offset=1.0, **options)


def refuse_bidirectional(fields: Fields) -> None:
    """Notes an error if attention sees later tokens, as in models of embeddings."""
    if fields.get("use_bidirectional_attention", None):
        text = "use_bidirectional_attention (attention to later tokens) is not supported"
        fields.note(RefusedField(text), use_bidirectional_attention=None)


class GemmaConfig(DecoderConfig):
    """Reads transformers' `GemmaConfig`.

    In `hidden_act`, "gelu" is a legacy value that means the tanh approximation.
    """

    model_type = "gemma"
    defaults = Defaults(
        num_kv_heads=16,
        head_dim=256,
        max_length=8192,
        activation=ACTIVATION,
        tied=True,
        attention_bias=False,
    )

    @classmethod
    def complete(cls, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the config with the activation that it means."""
        is_legacy = config.get("hidden_act") == "gelu"
        return {**config, "hidden_act": ACTIVATION} if is_legacy else config

    @classmethod
    def read(cls, fields: Fields) -> GemmaConfig:
        """Returns what the fields say."""
        used = fields.get("hidden_act", ACTIVATION)
        other = fields.get("hidden_activation", None)
        if other not in (None, used):
            text = f"hidden_activation = {other!r} is not supported with hidden_act = {used!r}, which is used"
            fields.note(RefusedField(text), hidden_activation=None)
        refuse_bidirectional(fields)
        return cls.from_fields(fields)


class Gemma(Llama, config=GemmaConfig):
    """Gemma 1 (Gemma Team, 2024) is Llama with wide heads, scaled embeddings and GELU."""

    make_norm: ClassVar[Callable[..., Norm]] = staticmethod(gemma_norm)

    def embed_tokens(self, token_ids_T: jax.Array) -> jax.Array:
        """Returns what vectors may take the place of."""
        return super().embed_tokens(token_ids_T) * math.sqrt(self.config.hidden_size)


@dataclass(frozen=True, kw_only=True)
class Gemma2Config(DecoderConfig):
    """Reads transformers' `Gemma2Config`.

    Attributes:
        scores: The scale of scores, and their soft cap.
        logit_softcap: The soft cap of logits; None for none.
    """

    model_type = "gemma2"
    defaults = Defaults(
        num_kv_heads=4,
        head_dim=256,
        max_length=8192,
        activation=("hidden_activation", ACTIVATION),
        tied=True,
        attention_bias=False,
    )
    default_softcaps: ClassVar[tuple[float | None, float | None]] = (50.0, 30.0)

    scores: Scores
    logit_softcap: float | None

    @classmethod
    def read(cls, fields: Fields) -> Gemma2Config:
        """Returns what the fields say."""
        windows = read_windows(fields, layer_types(fields, 2), 4096)
        return cls.read_gemma(fields, sliding_windows=windows)

    @classmethod
    def read_gemma(cls, fields: Fields, **options: Any) -> Gemma2Config:
        """Returns what the fields say that Gemma 2 and 3 have in common.

        Args:
            fields: The fields of the config.
            **options: Further arguments of `from_fields`.
        """
        refuse_bidirectional(fields)
        score_cap, logit_cap = cls.default_softcaps
        return cls.from_fields(
            fields,
            scores=Scores(
                scale=fields.number("query_pre_attn_scalar", 256.0) ** -0.5,
                logit_softcap=fields.optional_number("attn_logit_softcapping", score_cap),
            ),
            logit_softcap=fields.optional_number("final_logit_softcapping", logit_cap),
            **options,
        )


class Gemma2(Gemma, config=Gemma2Config):
    """Gemma 2 (Gemma Team, 2024) has windows in every second layer, and four norms in a layer."""

    OVERFLOWS_FLOAT16 = True
    norm_names = ("input_layernorm", "pre_feedforward_layernorm")
    output_norm_names: ClassVar[tuple[str | None, str | None]] = (
        "post_attention_layernorm",
        "post_feedforward_layernorm",
    )

    @classmethod
    def make_attention(cls, config: Any, index: int, at: Scope) -> nnx.Module:
        """Returns the attention of a layer."""
        norms = cls.make_head_norms(config, at)
        return grouped_query_attention(config, index, at, scores=config.scores, norms=norms)

    def logits(self, hidden_BD: jax.Array) -> jax.Array:
        """Returns the logits in float32."""
        return cap_logits(super().logits(hidden_BD), self.config.logit_softcap)


class VaultGemmaConfig(Gemma2Config):
    """Reads transformers' `VaultGemmaConfig`."""

    model_type = "vaultgemma"


class VaultGemma(Gemma2, config=VaultGemmaConfig):
    """VaultGemma (Google, 2025) is Gemma 2 with two norms in a layer."""

    OVERFLOWS_FLOAT16 = False
    output_norm_names = (None, None)


class Gemma3Config(Gemma2Config):
    """Reads transformers' `Gemma3TextConfig`."""

    model_type = "gemma3_text"
    default_softcaps = (None, None)

    @classmethod
    def read(cls, fields: Fields) -> Gemma2Config:
        """Returns what the fields say."""
        if fields.get("attn_logit_softcapping", None) is not None:
            text = "attn_logit_softcapping is not supported: attention of Gemma 3 has no softcap"
            fields.note(RefusedField(text), attn_logit_softcapping=None)
        types = layer_types(fields, fields.integer("sliding_window_pattern", 6))
        return cls.read_gemma(
            fields,
            sliding_windows=read_windows(fields, types, 4096),
            **read_ropes(fields, types, fields.integer("head_dim", 256), 131_072, GEMMA3_THETA),
        )


class Gemma3(Gemma2, config=Gemma3Config):
    """Gemma 3, text (Gemma Team, 2025), is Gemma 2 with norms of queries and keys."""

    make_head_norms = staticmethod(functools.partial(norms_of_heads, make_norm=gemma_norm))


@dataclass(frozen=True)
class LayerForm:
    """Says what differs from layer to layer.

    Attributes:
        place: The number of the layer whose pages it reads; its own if it writes them.
        intermediate_size: The width of its feed-forward half.
        keys_are_values: True if it has no projection to values, which are the keys before their
            norm.
        sparsity: The share of its gates that are cut off; 0 for none.
    """

    place: int
    intermediate_size: int
    keys_are_values: bool = False
    sparsity: float = 0.0


@dataclass(frozen=True)
class InputsForm:
    """Describes the inputs that layers have of their own.

    Attributes:
        width: The width of an input.
        vocab_size: The number of rows of their table.
    """

    width: int
    vocab_size: int


@dataclass(frozen=True, kw_only=True)
class Gemma4LayersConfig(DecoderConfig):
    """Holds what the configs of Gemma 4 and of Gemma 3n say.

    Attributes:
        layer_forms: What differs from layer to layer.
        inputs: The inputs that layers have of their own; None if they have none.
        logit_softcap: The soft cap of logits; None for none.
        sees_ahead: True if the tokens of a picture see each other both ways in layers with a
            window.
    """

    sees_ahead: bool = False
    layer_forms: tuple[LayerForm, ...]
    inputs: InputsForm | None
    logit_softcap: float | None

    @property
    def layer_places(self) -> Sequence[int]:
        """Returns for each layer the place of its pages; see `run_layers`."""
        return [form.place for form in self.layer_forms]

    @property
    def idle_tensors(self) -> tuple[str, ...]:
        """Returns globs over tensors of layers that share pages; published files have them."""
        return tuple(
            f"*layers.{layer}.self_attn.{part}.*"
            for layer, place in enumerate(self.layer_places)
            if place != layer
            for part in ("k_proj", "v_proj", "k_norm", "v_norm")
        )


def find_shared_layers(fields: Fields, types: tuple[str, ...], default: int) -> tuple[int, ...]:
    """Returns, for each layer, the place of the layer whose pages it reads.

    Args:
        fields: The fields of the config.
        types: The type of each layer.
        default: The default of `num_kv_shared_layers`.
    """
    first = len(types) - fields.integer("num_kv_shared_layers", default, least=0)
    types_with_pages = types[: max(0, first)]
    if missing := {*types[len(types_with_pages) :]} - {*types_with_pages}:
        text = (
            f"num_kv_shared_layers leaves no layer of type {', '.join(sorted(missing))} with keys"
        )
        fields.note(WrongField(text), num_kv_shared_layers=0)
        return tuple(range(len(types)))
    last = {kind: place for place, kind in enumerate(types_with_pages)}
    return (*range(len(types_with_pages)), *(last[kind] for kind in types[len(types_with_pages) :]))


def cache_of_types(types: Sequence[str], places: Sequence[int], window: int) -> dict[str, Any]:
    """Returns the fields of `KVSpec` for a cache whose last layers are read by others.

    Args:
        types: The type of each layer.
        places: For each layer, the place of the layer whose pages it reads.
        window: The window of layers that slide.
    """
    types_with_pages = types[: 1 + max(places)]
    return {
        "num_layers": len(types_with_pages),
        "sliding_windows": tuple(window if kind == SLIDING else None for kind in types_with_pages),
        "decoder_layers": len(types),
    }


def undivided(num_in: int, at: Scope, name: str, num_out: int) -> Linear:
    """Returns a projection that is not divided among devices."""
    return projection(num_in, at, (name, num_out), axes=(None, None))


class PerLayerInputs(nnx.Module):
    """Computes an input for each layer from the token and from its embedding."""

    def __init__(self, config: Gemma4LayersConfig, inputs: InputsForm, at: Scope):
        """Makes the table and the projection.

        Args:
            config: The config of the model.
            inputs: What it says of the inputs.
            at: The scope of the decoder.
        """
        width = config.num_layers * inputs.width
        table = (at / "embed_tokens_per_layer").name
        norm = at / "per_layer_projection_norm"
        self.table = Embedding(inputs.vocab_size, width, name=table, axis=None, dtype=at.dtype)
        self.product = undivided(config.hidden_size, at, "per_layer_model_projection", width)
        self.norm = rms_norm(config, norm, width=inputs.width, axis=None)
        self.scale = config.hidden_size**-0.5
        self.input_width = inputs.width

    def __call__(
        self, token_ids_T: Int[Array, "T"], embedded_TD: Float[Array, "T D"]
    ) -> Float[Array, "T L I"]:
        """Returns the inputs of all layers."""
        shape = (len(token_ids_T), -1, self.input_width)
        of_embedding = self.norm((self.product(embedded_TD) * self.scale).reshape(shape))
        of_token = self.table(token_ids_T).reshape(shape) * self.input_width**0.5
        return (of_embedding + of_token) * 2.0**-0.5


class GatedInput(nnx.Module):
    """Takes a layer's own input through a gate that depends on the hidden state."""

    def __init__(self, config: Gemma4LayersConfig, input_width: int, layer: Scope):
        width = config.hidden_size
        self.gate = undivided(width, layer, "per_layer_input_gate", input_width)
        self.product = undivided(input_width, layer, "per_layer_projection", width)
        self.norm = rms_norm(config, layer / "post_per_layer_input_norm")
        self.activation = config.activation

    def __call__(
        self, x_TD: Float[Array, "T D"], input_TI: Float[Array, "T I"]
    ) -> Float[Array, "T D"]:
        """Returns what is added to the hidden state."""
        gate_TI = ACTIVATIONS[self.activation](self.gate(x_TD))
        return self.norm(self.product(gate_TI * input_TI))


def gemma4_attention(config: Gemma4LayersConfig, index: int, at: Scope) -> Attention:
    """Returns the attention of a layer, without keys and values if it reads those of another.

    Args:
        config: The config of the model.
        index: The number of the layer.
        at: The scope of the attention.
    """
    form = config.layer_forms[index]
    num_kv_heads, head_dim = config.kv.heads_of(form.place)
    query_rows = config.num_query_heads * head_dim
    width, bias = config.hidden_size, config.attention_bias
    parts = [Part(query_rows, "heads", (at / "q_proj").name)]
    key_norm = value_norm = None
    if form.place == index:
        names = ["k_proj"] if form.keys_are_values else ["k_proj", "v_proj"]
        parts += [Part(num_kv_heads * head_dim, "kv_heads", (at / name).name) for name in names]
        key_norm = rms_norm(config, at / "k_norm", width=head_dim, axis=None)
        value_norm = rms_norm(config, None, width=head_dim)
    query_norm = rms_norm(config, at / "q_norm", width=head_dim, axis=None)
    window = config.kv.sliding_windows[form.place]
    return Attention(
        form.place,
        Projections(
            linear(width, *parts, input_axis="embed", bias=bias, dtype=at.dtype),
            projection(query_rows, at, ("o_proj", width), axes=("heads", "embed"), bias=bias),
        ),
        head_dim=head_dim,
        rope=config.rope_of(index),
        norms=HeadNorms(query_norm, key_norm, value_norm),
        scores=Scores(
            scale=1.0,
            sliding_window=window,
            sees_ahead=window is not None or not config.sees_ahead,
        ),
    )
