"""EAGLE heads: a decoder layer or a few that go on from the target's hidden states, and from their own where it has not been.

EAGLE-1 (Li et al. 2024, arXiv:2401.15077) predicts the target's last hidden state and asks the target's head for the token. EAGLE-3 (Li et
al. 2025, arXiv:2503.01840) begins with hidden states of several layers and has a head of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxpage.layers.attention import Attend, LayerPages
from jaxpage.layers.embedding import Embedding
from jaxpage.layers.linear import Linear
from jaxpage.layers.norms import RMSNorm
from jaxpage.layers.rope import Angles
from jaxpage.models.base import KVSpec, Pages, run_layers
from jaxpage.models.rotary_decoder import DecoderLayer, RotaryDecoderSpec, make_attention, make_mlp


@dataclass(frozen=True, kw_only=True)
class EagleSpec:
    """What both kinds have.

    decoder: the sizes of its layers. `vocab_size` is the target's.
    table_rows: of its head: V, or as many tokens as a head with a vocabulary of its own knows.
    """

    decoder: RotaryDecoderSpec
    table_rows: int
    token_map: bool = False  # a row of the head is not the token of that id
    fc_bias: bool = False


@dataclass(frozen=True, kw_only=True)
class Eagle3Spec(EagleSpec):
    """taps: see `models.drafter.Drafter`. norm_before_residual: what attention is added to is the normed feature."""

    taps: tuple[int, ...]
    target_width: int  # of the hidden states
    norm_before_residual: bool = False


class _Eagle(nnx.Module):
    """The tables of both kinds. The checkpoint may lack them: they are the target's then (`models.drafter.join`)."""

    def __init__(self, spec: EagleSpec, *, dtype: DTypeLike):
        width = spec.decoder.model_width
        self.spec = spec
        self.tokens = Embedding(spec.decoder.vocab_size, width, dtype=dtype)
        self.head = Embedding(spec.table_rows, width, dtype=dtype)
        self.token_map = nnx.Param(jnp.zeros((spec.table_rows,), jnp.int32)) if spec.token_map else None

    @property
    def kv(self) -> KVSpec:
        return self.spec.decoder.kv

    def logits(self, output_BD: Float[Array, "B D"]) -> Float[Array, "B V"]:
        logits_BV = self.head.logits(output_BD)
        if self.token_map is None:
            return logits_BV
        everywhere_BV = jnp.full((logits_BV.shape[0], self.spec.decoder.vocab_size), -jnp.inf)
        return everywhere_BV.at[:, self.token_map[...]].set(logits_BV)


class Eagle(_Eagle):
    """EAGLE-1: `layers(fc([embedding; feature]))`; the first layer has no norm before attention, and there is no final norm."""

    taps = ()

    def __init__(self, spec: EagleSpec, *, dtype: DTypeLike):
        super().__init__(spec, dtype=dtype)
        decoder, width = spec.decoder, spec.decoder.model_width
        self.fc = Linear(2 * width, width, bias=spec.fc_bias, dtype=dtype)
        self.layers = nnx.List(
            [DecoderLayer(decoder, norm_first=index > 0, dtype=dtype) for index in range(decoder.kv.num_layers)]
        )

    def fuse(self, states: Sequence[jax.Array]) -> Float[Array, "T D"]:
        (output_TD,) = states
        return output_TD

    def __call__(
        self,
        token_ids_T: Int[Array, "T"],
        feature_TD: Float[Array, "T D"],
        positions_T: Int[Array, "T"],
        pages: Pages,
        attend: Attend,
    ) -> tuple[Float[Array, "T D"], Pages]:
        both = jnp.concatenate([self.tokens(token_ids_T), feature_TD], axis=-1)
        return _run(self.layers, self.fc(both), pages, attend, self.spec.decoder.rope.angles(positions_T))


class FusionLayer(nnx.Module):
    """EAGLE-3's first layer: attention over `[norm(embedding); norm(feature)]`, added to the feature; then as in any decoder."""

    def __init__(self, spec: Eagle3Spec, *, dtype: DTypeLike):
        width, epsilon = spec.decoder.model_width, spec.decoder.norm_epsilon
        self.embedding_norm = RMSNorm(width, epsilon=epsilon, dtype=dtype)
        self.feature_norm = RMSNorm(width, epsilon=epsilon, dtype=dtype)
        self.attention = make_attention(spec.decoder, input_width=2 * width, dtype=dtype)
        self.mlp_norm = RMSNorm(width, epsilon=epsilon, dtype=dtype)
        self.mlp = make_mlp(spec.decoder, dtype=dtype)
        self.norm_before_residual = spec.norm_before_residual

    def __call__(
        self,
        embedded_TD: Float[Array, "T D"],
        feature_TD: Float[Array, "T D"],
        layer_pages: LayerPages,
        attend: Attend,
        angles: Angles,
    ) -> tuple[Float[Array, "T D"], LayerPages]:
        normed_TD = self.feature_norm(feature_TD)
        both = jnp.concatenate([self.embedding_norm(embedded_TD), normed_TD], axis=-1)
        attended_TD, layer_pages = self.attention(both, layer_pages, attend, angles=angles)
        x_TD = (normed_TD if self.norm_before_residual else feature_TD) + attended_TD
        return x_TD + self.mlp(self.mlp_norm(x_TD)), layer_pages


class Eagle3(_Eagle):
    """EAGLE-3: features `fc([hidden states])`, a `FusionLayer`, more layers if there are; its norm is a part of the logits."""

    def __init__(self, spec: Eagle3Spec, *, dtype: DTypeLike):
        super().__init__(spec, dtype=dtype)
        decoder, width = spec.decoder, spec.decoder.model_width
        self.spec: Eagle3Spec = spec
        self.fc = Linear(len(spec.taps) * spec.target_width, width, bias=spec.fc_bias, dtype=dtype)
        self.fusion = FusionLayer(spec, dtype=dtype)
        self.layers = nnx.List([DecoderLayer(decoder, dtype=dtype) for _ in range(decoder.kv.num_layers - 1)])
        self.norm = RMSNorm(width, epsilon=decoder.norm_epsilon, dtype=dtype)

    @property
    def taps(self) -> tuple[int, ...]:
        return self.spec.taps

    def fuse(self, states: Sequence[jax.Array]) -> Float[Array, "T D"]:
        return self.fc(jnp.concatenate(list(states), axis=-1))

    def __call__(
        self,
        token_ids_T: Int[Array, "T"],
        feature_TD: Float[Array, "T D"],
        positions_T: Int[Array, "T"],
        pages: Pages,
        attend: Attend,
    ) -> tuple[Float[Array, "T D"], Pages]:
        angles = self.spec.decoder.rope.angles(positions_T)
        output_TD, first = self.fusion(self.tokens(token_ids_T), feature_TD, pages[0], attend, angles)
        output_TD, rest = _run(self.layers, output_TD, pages[1:], attend, angles)
        return output_TD, (first, *rest)

    def logits(self, output_BD: Float[Array, "B D"]) -> Float[Array, "B V"]:
        return super().logits(self.norm(output_BD))


def _run(
    layers: Sequence[DecoderLayer], x_TD: jax.Array, pages: Pages, attend: Attend, angles: Angles
) -> tuple[jax.Array, Pages]:
    bound = [partial(layer, attend=attend, angles=angles, sliding_window=None) for layer in layers]
    output_TD, pages = run_layers(bound, None, x_TD, pages, ())
    return output_TD, pages
