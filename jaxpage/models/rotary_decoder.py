"""Llama and most families after it share this decoder: norms, rotation, gated feed-forward.

The families differ in which biases and norms exist, in a few factors, and in the meaning of their
configs. Their files say so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxpage.layers.attention import Attention, HeadNorms, Projections, Scores, query_key_value
from jaxpage.layers.context import ForwardContext, LayerPages, StateSpec
from jaxpage.layers.delta_net import DeltaWidths, GatedDeltaNet
from jaxpage.layers.embedding import Embedding, token_tables
from jaxpage.layers.experts import ExpertsSpec, MixtureOfExperts
from jaxpage.layers.latent_attention import LatentAttention
from jaxpage.layers.linear import Linear, Part, linear
from jaxpage.layers.mlp import MLP, XIELU, GatedMLP
from jaxpage.layers.norms import HeadNorm, add_and_norm
from jaxpage.layers.parameter import parameter, tensor
from jaxpage.layers.rope import NO_ROTATION, Rope
from jaxpage.models.base import Hidden, KVSpec, Pages, run_layers
from jaxpage.models.block_form import LLAMA_FORM, BlockForm, Norm
from jaxpage.models.config_fields import WrongField
from jaxpage.models.decoder_names import LLAMA_MODULES, DecoderNames
from jaxpage.models.experts import PLAIN_NAMES, ExpertNames, make_experts
from jaxpage.models.fields import Fields
from jaxpage.models.mlp import LLAMA_NAMES, MLPNames, make_gated_mlp
from jaxpage.models.mtp_names import MtpNames
from jaxpage.models.parts.latent import LatentSpec, latent_attention
from jaxpage.models.parts.recurrences import delta_net_of_tensors
from jaxpage.models.parts.scope import Scope

prefix = "model."
ignored = ("*rotary_emb.inv_freq",)


@dataclass(frozen=True, kw_only=True)
class RotaryDecoderSpec:
    """Holds the fields that the families' configs have in common."""

    vocab_size: int
    hidden_size: int
    feed_forward_width: int
    num_query_heads: int
    max_position_embeddings: int
    kv: KVSpec
    rope: Rope
    norm_epsilon: float
    activation: str
    tie_word_embeddings: bool
    attention_input_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    mlp_names: MLPNames = LLAMA_NAMES
    # The names of the two products of a feed-forward half without gates; None for one with gates.
    plain_mlp: tuple[str, str] | None = None
    xielu: bool = False  # True if that half has a learned activation function
    # Norms of queries and keys before the rotation, over each head unless `form.together` is True.
    norm_heads: bool = False
    form: BlockForm = LLAMA_FORM
    form_by_layer: tuple[BlockForm, ...] = ()  # where layers differ from `form`
    rope_by_layer: tuple[Rope | None, ...] = ()  # where layers differ; None for no rotation
    attention_scale: float | None = None  # None for head_dim ** -0.5
    attention_softcap: float | None = None
    attention_limit: float | None = None  # see `Attention.clip_qkv`
    sinks: bool = False  # True if attention has sinks
    alibi_slopes: tuple[float, ...] | None = None  # see `AttentionOptions`
    latent: LatentSpec | None = None  # latent attention, if the model has it
    recurrent: DeltaWidths | None = None  # the layers that have a state in `kv.states`
    attention_gated: bool = False  # see `Attention`
    separate_gates: int = 0  # the gates of each head for which there is a product of their own
    temperature_tuning: tuple[float, int, int] | None = None  # see `Attention`
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # the factor of each half's output, before it is added
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    experts: ExpertsSpec | None = None
    expert_names: ExpertNames = PLAIN_NAMES
    sparse_layers: tuple[bool, ...] = ()  # True for each layer with experts
    name: str = "model"  # the name of the decoder in the checkpoint
    names: DecoderNames = LLAMA_MODULES  # the names of its modules
    head_bias: bool = False  # True if logits have biases
    draft_heads: MtpNames | None = None  # heads that the checkpoint may have after its last layer
    not_loaded: str = ""  # the other models in the checkpoint, for messages

    @property
    def num_layers(self) -> int:
        """Returns the number of layers of the decoder."""
        return self.kv.num_decoder_layers

    def rope_of(self, layer_index: int) -> Rope | None:
        """Returns the rotation of a layer; None if it has none."""
        rope = self.rope_by_layer[layer_index] if self.rope_by_layer else self.rope
        return None if rope == NO_ROTATION else rope

    @classmethod
    def _from_fields(
        cls,
        fields: Fields,
        *,
        num_kv_heads: int,
        max_position_embeddings: int,
        head_dim: int | None = None,
        value_width: int | None = None,
        sliding_windows: tuple[int | None, ...] | None = None,
        states: tuple[StateSpec | None, ...] = (),
        attention_bias: bool = False,
        attention_input_bias: bool = False,
        attention_output_bias: bool = False,
        rope: tuple[Rope, int] | None = None,
        epsilon: tuple[str, float] | float = ("rms_norm_eps", 1e-6),
        activation: tuple[str, str] | str = ("hidden_act", "silu"),
        feed_forward_width: int | None = None,
        tied: bool = False,
        **knobs: Any,
    ) -> RotaryDecoderSpec:
        """Returns a spec from the fields that most configs have, and the family's own.

        Args:
            fields: The fields of the config.
            num_kv_heads: The number of key/value heads.
            max_position_embeddings: The number of positions.
            head_dim: The width of a head; None to call `read_head_dim`.
            value_width: See `KVSpec`.
            sliding_windows: The window of each layer; None if no layer has one.
            states: See `KVSpec`.
            attention_bias: True if all four products of attention have biases.
            attention_input_bias: True if the products for queries, keys and values have biases.
            attention_output_bias: True if the product for the output has a bias.
            feed_forward_width: The width of a feed-forward layer; None to read `intermediate_size`.
            rope: The rotation and the number of positions for which it holds; None to call
                `Fields.rope`.
            epsilon: The field of the norms' epsilon, and its default; a number if it has no field.
            activation: The field of the activation, and its default; the activation itself if it
                has no field.
            tied: The default of `tie_word_embeddings`.
            **knobs: Further fields of the spec.
        """
        num_layers = fields.integer("num_hidden_layers")
        num_query_heads = fields.integer("num_attention_heads")
        if num_query_heads % num_kv_heads:
            text = f"num_key_value_heads = {num_kv_heads} must divide num_attention_heads = {num_query_heads}"
            heads = dict.fromkeys(("num_key_value_heads", "num_attention_heads"), num_query_heads)
            fields.note(WrongField(text), **heads)
        head_dim = head_dim or read_head_dim(fields)
        turned, length = rope or fields.rope(head_dim, max_position_embeddings)
        return cls(
            vocab_size=fields.integer("vocab_size"),
            hidden_size=fields.integer("hidden_size"),
            feed_forward_width=feed_forward_width or fields.integer("intermediate_size"),
            num_query_heads=num_query_heads,
            max_position_embeddings=length,
            kv=KVSpec(
                num_layers,
                num_kv_heads,
                head_dim,
                sliding_windows or (None,) * num_layers,
                value_width,
                states,
            ),
            rope=turned,
            norm_epsilon=fields.number(*epsilon) if isinstance(epsilon, tuple) else epsilon,
            activation=activation
            if isinstance(activation, str)
            else fields.activation(*activation),
            tie_word_embeddings=fields.flag("tie_word_embeddings", tied),
            attention_input_bias=attention_bias or attention_input_bias,
            attention_output_bias=attention_bias or attention_output_bias,
            **knobs,
        )


def key_value_heads(fields: Fields, default: int | None) -> int:
    """Returns `num_key_value_heads`; null means one for each query head."""
    return fields.optional_integer("num_key_value_heads", default) or fields.integer(
        "num_attention_heads"
    )


def read_head_dim(fields: Fields) -> int:
    """Returns `head_dim`.

    If it is absent or null, it is the model width over the number of query heads.
    """
    return fields.optional_integer("head_dim", None) or fields.divide(
        "hidden_size", "num_attention_heads"
    )


def make_attention(
    spec: RotaryDecoderSpec,
    layer_index: int,
    *,
    name: str,
    input_width: int | None = None,
    dtype: DTypeLike,
) -> Attention | LatentAttention:
    """Returns the attention of a layer.

    The names are those of Llama, which the other families kept.

    Args:
        spec: The spec of the model.
        layer_index: The layer's place in its model.
        name: The module's name in the checkpoint, as in the functions below.
        input_width: The width of the input; None for the model's.
        dtype: The type of the parameters.
    """
    if spec.latent is not None:
        return latent_attention(
            spec,  # type: ignore[arg-type]
            spec.latent,
            layer_index,
            Scope(name, dtype),
            temperature_tuning=spec.temperature_tuning,
        )
    width = spec.hidden_size
    head = spec.kv.head_dim
    queries = spec.num_query_heads * head
    keys = spec.kv.num_kv_heads * head
    # With one head the fused product is as others are: all queries, the key, the value.
    is_fused = spec.names.fused is not None and spec.names.in_groups
    is_grouped = is_fused and spec.kv.num_kv_heads > 1
    query_name, key_name = (f"{name}.{norm}" for norm in spec.names.head_norms)

    def head_norm(num_rows: int, axis: str, *, name: str) -> Norm | HeadNorm | None:
        if not spec.norm_heads:
            return None
        epsilon = spec.norm_epsilon
        return spec.form.head_norm(num_rows, head, axis, name=name, epsilon=epsilon, dtype=dtype)

    return Attention(
        layer_index,
        Projections(
            query_key_value(
                input_width or width,
                queries * (2 if spec.attention_gated else 1),
                keys,
                name=name,
                fused=spec.names.fused,
                is_grouped=is_grouped,
                bias=spec.attention_input_bias,
                dtype=dtype,
            ),
            linear(
                queries,
                Part(width, "embed", f"{name}.{spec.names.output}"),
                input_axis="heads",
                bias=spec.attention_output_bias,
                dtype=dtype,
            ),
            num_groups=spec.kv.num_kv_heads if is_grouped else None,
            gates=_gates(spec, input_width or width, name, dtype),
            num_gates=head if spec.attention_gated else spec.separate_gates,
        ),
        head_dim=head,
        rope=spec.rope_of(layer_index),
        norms=HeadNorms(
            query=head_norm(queries, "heads", name=query_name),
            key=head_norm(keys, "kv_heads", name=key_name),
            over_all_heads=spec.form.together,
            after_rotation=spec.form.turned_first,
        ),
        scores=Scores(
            scale=spec.attention_scale,
            sliding_window=spec.kv.sliding_windows[layer_index],
            logit_softcap=spec.attention_softcap,
            temperature_tuning=spec.temperature_tuning,
            sinks=_sinks(spec, name, dtype),
            alibi_slopes=spec.alibi_slopes,
        ),
        clip_qkv=spec.attention_limit,
    )


def make_mixer(
    spec: RotaryDecoderSpec, layer_index: int, *, name: str, dtype: DTypeLike
) -> Attention | LatentAttention | GatedDeltaNet:
    """Returns the half of a layer in which tokens see others; `name` is that of the layer."""
    if spec.recurrent is None or spec.kv.state_of(layer_index) is None:
        return make_attention(spec, layer_index, name=f"{name}.{spec.names.attention}", dtype=dtype)
    at = Scope(f"{name}.linear_attn", dtype)
    return delta_net_of_tensors(cast(Any, spec), spec.recurrent, layer_index, at)


def _gates(spec: RotaryDecoderSpec, input_width: int, name: str, dtype: DTypeLike) -> Linear | None:
    if not spec.separate_gates:
        return None
    part = Part(spec.num_query_heads * spec.separate_gates, "heads", f"{name}.gate_proj")
    other = f"{name}.g_proj"  # the name that transformers has in memory for LFM3
    return linear(input_width, part, fused=other, input_axis="embed", bias=False, dtype=dtype)


def _sinks(spec: RotaryDecoderSpec, name: str, dtype: DTypeLike) -> nnx.Param[jax.Array] | None:
    if not spec.sinks:
        return None
    count = spec.num_query_heads
    return parameter(
        (count,), axes=("heads",), dtype=dtype, sources=[tensor(f"{name}.sinks", count)]
    )


def make_mlp(
    spec: RotaryDecoderSpec, *, name: str, inner_width: int | None = None, dtype: DTypeLike
) -> MLP | GatedMLP:
    """Returns a feed-forward half; `inner_width` None is that of the spec."""
    width = spec.hidden_size
    inner = inner_width or spec.feed_forward_width
    bias = spec.mlp_bias
    if spec.plain_mlp is None:
        return make_gated_mlp(
            spec.mlp_names,
            width,
            inner,
            module=name,
            bias=bias,
            activation=spec.activation,
            dtype=dtype,
        )
    up_name, down_name = spec.plain_mlp
    part = Part(inner, "ffn", f"{name}.{up_name}")
    up = linear(width, part, input_axis="embed", bias=bias, dtype=dtype)
    part = Part(width, "embed", f"{name}.{down_name}")
    down = linear(inner, part, input_axis="ffn", bias=bias, dtype=dtype)
    activation = XIELU(name=f"{name}.act_fn", dtype=dtype) if spec.xielu else spec.activation
    return MLP(up, down, activation=activation)


def make_feed_forward(
    spec: RotaryDecoderSpec, layer_index: int, *, name: str, dtype: DTypeLike
) -> MLP | GatedMLP | MixtureOfExperts:
    """Returns the feed-forward half of a layer, or its experts; `name` is that of the layer."""
    experts = spec.experts
    module = f"{name}.{spec.mlp_names.module}".removesuffix(".")
    if experts is None or not spec.sparse_layers[layer_index]:
        return make_mlp(spec, name=module, dtype=dtype)
    shared = None
    if experts.shared_width is not None:
        shared_name, gate = spec.expert_names.shared
        expert = make_mlp(
            spec,
            name=f"{module}.{shared_name}" if shared_name else module,
            inner_width=experts.shared_width,
            dtype=dtype,
        )
        shared = expert, gate and f"{module}.{gate}"
    return make_experts(
        experts,
        spec.hidden_size,
        spec.expert_names,
        layer=name,
        activation=spec.activation,
        shared=shared,
        dtype=dtype,
    )


class DecoderLayer(nnx.Module):
    """Computes `x + attention(norm(x))`, then `x + mlp(norm(x))`, or another `BlockForm`."""

    def __init__(
        self,
        spec: RotaryDecoderSpec,
        layer_index: int,
        *,
        name: str,
        norm_first: bool = True,
        dtype: DTypeLike,
    ):
        """Makes the layer.

        Args:
            spec: The spec of the model.
            layer_index: The layer's place in its model.
            name: The layer's name in the checkpoint.
            norm_first: False if attention takes the input without a norm (EAGLE).
            dtype: The type of the parameters.
        """
        form = spec.form_by_layer[layer_index] if spec.form_by_layer else spec.form

        def norm(part: str | None) -> Norm | None:
            if part is None:
                return None
            return form.norm(
                spec.hidden_size, name=f"{name}.{part}", epsilon=spec.norm_epsilon, dtype=dtype
            )

        before_attention, post_attention_norm, before_mlp, post_mlp_norm = form.norms
        self.attention_norm = norm(before_attention) if norm_first else None
        self.attention = self.mixer(spec, layer_index, name=name, dtype=dtype)
        self.post_attention_norm = norm(post_attention_norm)
        self.mlp_norm = norm(before_mlp)
        self.mlp = make_feed_forward(spec, layer_index, name=name, dtype=dtype)
        self.post_mlp_norm = norm(post_mlp_norm)
        self.parallel = form.parallel
        self.residual_scale = spec.residual_scale

    def mixer(
        self, spec: Any, layer_index: int, *, name: str, dtype: DTypeLike
    ) -> Attention | LatentAttention | GatedDeltaNet:
        """Returns what `make_mixer` makes; a family may make another one."""
        return make_mixer(spec, layer_index, name=name, dtype=dtype)

    def __call__(
        self, x_TD: Float[Array, "T D"], layer_pages: LayerPages, context: ForwardContext
    ) -> tuple[Float[Array, "T D"], LayerPages]:
        """Returns the output of the layer and its pages."""
        normed_TD = _norm(self.attention_norm, x_TD)
        attended_TD, layer_pages = self.attention(normed_TD, layer_pages, context)
        attended_TD = self._scale(_norm(self.post_attention_norm, attended_TD))
        if self.parallel:
            added_TD = x_TD + attended_TD
            entering_TD = normed_TD if self.mlp_norm is None else self.mlp_norm(x_TD)
        else:
            added_TD, entering_TD = add_and_norm(self.mlp_norm, x_TD, attended_TD)
        fed_TD = self.mlp(entering_TD)
        return added_TD + self._scale(_norm(self.post_mlp_norm, fed_TD)), layer_pages

    def _scale(self, x_TD: Float[Array, "T D"]) -> Float[Array, "T D"]:
        return x_TD if self.residual_scale == 1.0 else x_TD * self.residual_scale


def _norm(norm: Norm | None, x_TD: Float[Array, "T D"]) -> Float[Array, "T D"]:
    return x_TD if norm is None else norm(x_TD)


class RotaryDecoder(nnx.Module):
    """Computes a model of one of these families; see `models.base.Model`.

    Attributes:
        layer: The class of the layers.
    """

    layer: ClassVar[Callable[..., nnx.Module]] = DecoderLayer

    def __init__(self, spec: RotaryDecoderSpec, *, dtype: DTypeLike):
        width = spec.hidden_size
        names = spec.names
        self.tokens, self.head = token_tables(
            spec.vocab_size,
            width,
            name=f"{spec.name}.{names.tokens}",
            heads=names.heads,
            tied=spec.tie_word_embeddings,
            bias=spec.head_bias,
            dtype=dtype,
        )
        self.positions = (
            None
            if names.positions is None
            else Embedding(
                spec.max_position_embeddings,
                width,
                name=f"{spec.name}.{names.positions}",
                axis=None,
                dtype=dtype,
            )
        )
        self.layers = nnx.List(
            self.layer(spec, index, name=f"{spec.name}.{names.layers}.{index}", dtype=dtype)
            for index in range(spec.num_layers)
        )
        self.norm = spec.form.norm(
            width, name=f"{spec.name}.{names.norm}", epsilon=spec.norm_epsilon, dtype=dtype
        )
        self.embedding_scale = spec.embedding_scale
        self.logit_scale = spec.logit_scale
        self.logit_softcap = spec.logit_softcap

    @classmethod
    def make_block(cls, spec: Any, index: int, at: Scope) -> nnx.Module:
        """Returns a layer, as `Decoder.make_block` does."""
        return cls.layer(spec, index, name=at.name, dtype=at.dtype)

    @classmethod
    def make_norm(cls, spec: Any, at: Scope) -> Norm:
        """Returns a norm of hidden states, as `Decoder.make_norm` does."""
        epsilon = spec.norm_epsilon
        return spec.form.norm(spec.hidden_size, name=at.name, epsilon=epsilon, dtype=at.dtype)

    def __call__(
        self, token_ids_T: Int[Array, "T"], pages: Pages, context: ForwardContext
    ) -> Hidden:
        """Returns hidden states, pages and auxiliary hidden states."""
        hidden_TD = self.embed(token_ids_T, context.positions_T)
        return run_layers(self.layers, self.norm, hidden_TD, pages, context)

    def embed(
        self, token_ids_T: Int[Array, "T"], positions_T: Int[Array, "T"]
    ) -> Float[Array, "T D"]:
        """Returns the input of the first layer."""
        hidden_TD = self.tokens(token_ids_T)
        if self.embedding_scale != 1.0:
            hidden_TD = hidden_TD * self.embedding_scale
        return hidden_TD if self.positions is None else hidden_TD + self.positions(positions_T)

    def logits(self, hidden_BD: Float[Array, "B D"]) -> Float[Array, "B V"]:
        """Returns the logits in float32."""
        logits_BV = (self.head or self.tokens).logits(hidden_BD)
        if self.logit_scale != 1.0:
            logits_BV = logits_BV * self.logit_scale
        return (
            logits_BV
            if self.logit_softcap is None
            else self.logit_softcap * jnp.tanh(logits_BV / self.logit_softcap)
        )
