"""EAGLE heads are decoder layers that continue from the target's hidden states.

Where the target has not been, they continue from their own. EAGLE-1 (Li et al. 2024,
arXiv:2401.15077) predicts the target's last hidden state, and the target's head gives the logits.
EAGLE-3 (Li et al. 2025, arXiv:2503.01840) begins with hidden states of several layers and has a
head of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxpage.layers import Attention, Embedding, ForwardContext, HeadNorms, LayerPages
from jaxpage.layers.parameter import parameter
from jaxpage.models.base import KVSpec, Pages, run_layers
from jaxpage.models.drafters.drafter import output_alone
from jaxpage.models.parts import DecoderConfig, Scope, attention, decoder, mlp, norms


@dataclass(frozen=True, kw_only=True)
class EagleSpec:
    """Holds what both kinds have in common.

    Attributes:
        decoder: The config of its layers. `vocab_size` is the target's.
        input_bias: True if the products for queries, keys and values have biases.
        output_bias: True if the product for the output of attention has a bias.
        has_head_norms: True if queries and keys have norms.
        table_rows: The rows of its head: V, or the number of tokens that a head with a vocabulary
            of its own knows.
        token_map: True if the rows of the head are those of a token map, not of the ids.
        fc_bias: True if the product that fuses its input has a bias.
        own_tokens: True if the checkpoint has a token table, so that the target's is not needed.
        own_head: True if the checkpoint has a head.
        aux_layers: See `models.drafters.Drafter`; only EAGLE-3 has any.
    """

    decoder: DecoderConfig
    table_rows: int
    input_bias: bool = False
    output_bias: bool = False
    has_head_norms: bool = False
    token_map: bool = False
    fc_bias: bool = False
    own_tokens: bool = False
    own_head: bool = False
    aux_layers: tuple[int, ...] = ()

    def make(self, dtype: jax.typing.DTypeLike) -> _Eagle:
        """Returns the module of this spec."""
        return Eagle(self, dtype=dtype)


@dataclass(frozen=True, kw_only=True)
class Eagle3Spec(EagleSpec):
    """Adds the target's width and the norms of EAGLE-3.

    Attributes:
        target_width: The width of the target's hidden states.
        norm_before_residual: True if the output of attention is added to the normed feature.
        norm_before_fc: True if the joined hidden states are normed before `fc`.
        norm_each: True if each hidden state is normed before `fc`.
        norm_output: True if the feature for the next place is normed.
    """

    target_width: int
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    norm_each: bool = False
    norm_output: bool = False

    def make(self, dtype: jax.typing.DTypeLike) -> _Eagle:
        """Returns the module of this spec."""
        return Eagle3(self, dtype=dtype)


class _Eagle(nnx.Module):
    """Holds what both kinds have in common.

    The checkpoint may lack a table, which is then the target's (`models.drafters.join`). The token
    map is not one of its weights.
    """

    def __init__(self, spec: EagleSpec, fused_width: int, *, dtype: jax.typing.DTypeLike):
        width = spec.decoder.hidden_size
        rows = spec.table_rows
        tokens_name = "embed_tokens" if spec.own_tokens else None
        head_name = "lm_head" if spec.own_head else None
        self.spec = spec
        self.tokens = Embedding(spec.decoder.vocab_size, width, name=tokens_name, dtype=dtype)
        self.head = Embedding(rows, width, name=head_name, dtype=dtype)
        at = Scope("", dtype)
        self.fc = at.projection(fused_width, ("fc", width), axes=(None, "embed"), bias=spec.fc_bias)
        self.token_map = (
            parameter((rows,), axes=("vocab",), dtype=jnp.int32) if spec.token_map else None
        )

    @property
    def kv(self) -> KVSpec:
        """Returns what a sequence keeps for each position in these layers."""
        return self.spec.decoder.kv

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Returns the hidden states of the target that it takes."""
        return self.spec.aux_layers

    def logits(self, output_BD: Float[Array, "B D"]) -> Float[Array, "B V"]:
        """Returns the logits of the target's vocabulary.

        They are -inf for tokens that the head does not know.
        """
        logits_BV = self.head.logits(output_BD)
        if self.token_map is None:
            return logits_BV
        # Verification compares with logits of the whole vocabulary.
        everywhere_BV = jnp.full((logits_BV.shape[0], self.spec.decoder.vocab_size), -jnp.inf)
        return everywhere_BV.at[:, self.token_map[...]].set(logits_BV)


class Eagle(_Eagle):
    """Computes EAGLE-1: `layers(fc([embedding; feature]))`.

    The first layer has no norm before attention, and there is no final norm.
    """

    fuse = staticmethod(output_alone)

    def __init__(self, spec: EagleSpec, *, dtype: jax.typing.DTypeLike):
        super().__init__(spec, 2 * spec.decoder.hidden_size, dtype=dtype)
        self.layers = nnx.List(_make_layers(spec, 0, dtype))
        self.layers[0].attention_norm = None

    def __call__(
        self,
        token_ids_T: Int[Array, "T"],
        feature_TD: Float[Array, "T D"],
        pages: Pages,
        context: ForwardContext,
    ) -> tuple[Float[Array, "T D"], Pages]:
        """Returns the hidden states, which are the next features, and the pages."""
        inputs = jnp.concatenate([self.tokens(token_ids_T), feature_TD], axis=-1)
        output_TD, pages, _ = run_layers(self.layers, None, self.fc(inputs), pages, context)
        return output_TD, pages


def _make_attention(
    spec: EagleSpec, index: int, at: Scope, input_width: int | None = None
) -> Attention:
    decoder = replace(spec.decoder, attention_bias=spec.input_bias)
    return attention.grouped_query_attention(
        decoder,
        index,
        at,
        output_bias=spec.output_bias,
        norms=attention.norms_of_heads(decoder, at) if spec.has_head_norms else HeadNorms(),
        input_width=input_width,
    )


def _make_layers(spec: EagleSpec, first: int, dtype: jax.typing.DTypeLike) -> list[decoder.Block]:
    """Returns the layers from this number on."""
    return [
        _make_block(spec, index, Scope(f"layers.{index}", dtype))
        for index in range(first, spec.decoder.kv.num_layers)
    ]


def _make_block(spec: EagleSpec, index: int, at: Scope) -> decoder.Block:
    return decoder.Block(
        attention_norm=norms.rms_norm(spec.decoder, at / "input_layernorm"),
        attention=_make_attention(spec, index, at / "self_attn"),
        mlp_norm=norms.rms_norm(spec.decoder, at / "post_attention_layernorm"),
        mlp=mlp.gated_mlp(spec.decoder, at / "mlp"),
    )


class FusionLayer(nnx.Module):
    """Attends over `[norm(embedding); norm(feature)]`, the first layer of EAGLE-3.

    The result is added to the feature. The rest is as in any decoder layer.
    """

    def __init__(self, spec: Eagle3Spec, at: Scope):
        decoder = spec.decoder
        self.embedding_norm = norms.rms_norm(decoder, at / "input_layernorm")
        self.feature_norm = norms.rms_norm(decoder, at / "hidden_norm")
        self.attention = _make_attention(
            spec, 0, at / "self_attn", input_width=2 * decoder.hidden_size
        )
        self.mlp_norm = norms.rms_norm(decoder, at / "post_attention_layernorm")
        self.mlp = mlp.gated_mlp(decoder, at / "mlp")
        self.norm_before_residual = spec.norm_before_residual

    def __call__(
        self,
        embedded_TD: Float[Array, "T D"],
        feature_TD: Float[Array, "T D"],
        layer_pages: LayerPages,
        context: ForwardContext,
    ) -> tuple[Float[Array, "T D"], LayerPages]:
        """Returns the output of the layer and its pages."""
        normed_TD = self.feature_norm(feature_TD)
        inputs = jnp.concatenate([self.embedding_norm(embedded_TD), normed_TD], axis=-1)
        attended_TD, layer_pages = self.attention(inputs, layer_pages, context)
        x_TD = (normed_TD if self.norm_before_residual else feature_TD) + attended_TD
        return x_TD + self.mlp(self.mlp_norm(x_TD)), layer_pages


class Eagle3(_Eagle):
    """Computes EAGLE-3: features `fc([hidden states])`, a `FusionLayer`, further layers and a norm.

    The norm belongs to the logits, and features are handed on without it, unless `norm_output` is
    True.
    """

    def __init__(self, spec: Eagle3Spec, *, dtype: jax.typing.DTypeLike):
        decoder = spec.decoder
        fused = len(spec.aux_layers) * spec.target_width
        super().__init__(spec, fused, dtype=dtype)
        self.spec: Eagle3Spec = spec
        at = Scope("", dtype)
        self.states_norm = (
            norms.rms_norm(decoder, at / "input_norm", width=fused, axis=None)
            if spec.norm_before_fc
            else None
        )
        state_norms = [
            norms.rms_norm(decoder, at / f"fc_norm.{index}", width=spec.target_width)
            for index in range(len(spec.aux_layers))
        ]
        self.state_norms = nnx.List(state_norms) if spec.norm_each else None
        self.fusion = FusionLayer(spec, at / "layers.0")
        self.layers = nnx.List(_make_layers(spec, 1, dtype))
        self.norm = norms.rms_norm(decoder, at / "norm")

    def fuse(self, states: Sequence[jax.Array]) -> Float[Array, "T D"]:
        """Returns the features of the target's hidden states."""
        fused = jnp.concatenate(states, axis=-1)
        if self.states_norm is not None:
            fused = self.states_norm(fused)
        if self.state_norms is not None:
            parts = jnp.split(fused, len(self.state_norms), axis=-1)
            fused = jnp.concatenate(
                [norm(part) for norm, part in zip(self.state_norms, parts, strict=True)], axis=-1
            )
        return self.fc(fused)

    def __call__(
        self,
        token_ids_T: Int[Array, "T"],
        feature_TD: Float[Array, "T D"],
        pages: Pages,
        context: ForwardContext,
    ) -> tuple[Float[Array, "T D"], Pages]:
        """Returns the hidden states, which are the next features, and the pages."""
        output_TD, first = self.fusion(self.tokens(token_ids_T), feature_TD, pages[0], context)
        output_TD, layer_pages, _ = run_layers(self.layers, None, output_TD, pages[1:], context)
        return self.norm(output_TD) if self.spec.norm_output else output_TD, (first, *layer_pages)

    def logits(self, output_BD: Float[Array, "B D"]) -> Float[Array, "B V"]:
        """Returns the logits of the target's vocabulary."""
        return super().logits(output_BD if self.spec.norm_output else self.norm(output_BD))
