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
from jaxpage.models.rotary_decoder import DecoderLayer, RotaryDecoderSpec, add_layer, make_attention, make_mlp
from jaxpage.models.weights import Weight, WeightTable


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
    own_tokens: bool = False  # it has a token table, and need not take the target's
    own_head: bool = False
    taps: tuple[int, ...] = ()  # see models.drafter.Drafter: none but EAGLE-3 has any

    def make(self, dtype: DTypeLike) -> _Eagle:
        return Eagle(self, dtype=dtype)

    def weights(self) -> list[Weight]:
        """One entry per parameter that is its own; `token_map` is no weight."""
        table = self._outer_weights(2 * self.decoder.model_width)
        for index in range(self.decoder.kv.num_layers):
            add_layer(table, self.decoder, ("layers", index), f"layers.{index}", norm_first=index > 0)
        return table

    def _outer_weights(self, fc_width: int) -> WeightTable:
        table, width = WeightTable(prefix="model."), self.decoder.model_width
        table.add_linear(("fc",), "fc", fc_width, width, bias=self.fc_bias)
        if self.own_tokens:
            table.add(("tokens", "table"), "embed_tokens.weight", self.decoder.vocab_size, width)
        if self.own_head:
            table.add(("head", "table"), "lm_head.weight", self.table_rows, width)
        return table


@dataclass(frozen=True, kw_only=True)
class Eagle3Spec(EagleSpec):
    """Three ways of norming, besides: of the states all together before `fc`, of each of them, and of the feature that is handed on."""

    target_width: int  # of the hidden states
    norm_before_residual: bool = False  # attention is added to the normed feature
    norm_before_fc: bool = False
    norm_each: bool = False
    norm_output: bool = False

    def make(self, dtype: DTypeLike) -> _Eagle:
        return Eagle3(self, dtype=dtype)

    def weights(self) -> list[Weight]:
        decoder, width, fused = self.decoder, self.decoder.model_width, len(self.taps) * self.target_width
        table = self._outer_weights(fused)
        if self.norm_before_fc:
            table.add(("states_norm", "scale"), "input_norm.weight", fused)
        if self.norm_each:
            for index in range(len(self.taps)):
                table.add(("state_norms", index, "scale"), f"fc_norm.{index}.weight", self.target_width)
        table.add(("fusion", "embedding_norm", "scale"), "layers.0.input_layernorm.weight", width)
        table.add(("fusion", "feature_norm", "scale"), "layers.0.hidden_norm.weight", width)
        add_layer(table, decoder, ("fusion",), "layers.0", norm_first=False, input_width=2 * width)
        for index in range(1, decoder.kv.num_layers):
            add_layer(table, decoder, ("layers", index - 1), f"layers.{index}")
        table.add(("norm", "scale"), "norm.weight", width)
        return table


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

    @property
    def taps(self) -> tuple[int, ...]:
        return self.spec.taps

    def logits(self, output_BD: Float[Array, "B D"]) -> Float[Array, "B V"]:
        logits_BV = self.head.logits(output_BD)
        if self.token_map is None:
            return logits_BV
        everywhere_BV = jnp.full((logits_BV.shape[0], self.spec.decoder.vocab_size), -jnp.inf)
        return everywhere_BV.at[:, self.token_map[...]].set(logits_BV)


class Eagle(_Eagle):
    """EAGLE-1: `layers(fc([embedding; feature]))`; the first layer has no norm before attention, and there is no final norm."""

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
        angles = self.spec.decoder.rope.angles(positions_T)
        return _run(self.layers, self.kv.sliding_windows, self.fc(both), pages, attend, angles)


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
        sliding_window: int | None,
    ) -> tuple[Float[Array, "T D"], LayerPages]:
        normed_TD = self.feature_norm(feature_TD)
        both = jnp.concatenate([self.embedding_norm(embedded_TD), normed_TD], axis=-1)
        attended_TD, layer_pages = self.attention(
            both, layer_pages, attend, angles=angles, sliding_window=sliding_window
        )
        x_TD = (normed_TD if self.norm_before_residual else feature_TD) + attended_TD
        return x_TD + self.mlp(self.mlp_norm(x_TD)), layer_pages


class Eagle3(_Eagle):
    """EAGLE-3: features `fc([hidden states])`, a `FusionLayer`, more layers if there are, and a norm.

    The norm is a part of the logits, and features go without it; where `norm_output` says so they go with it.
    """

    def __init__(self, spec: Eagle3Spec, *, dtype: DTypeLike):
        super().__init__(spec, dtype=dtype)
        decoder, fused = spec.decoder, len(spec.taps) * spec.target_width
        norm = partial(RMSNorm, epsilon=decoder.norm_epsilon, dtype=dtype)
        self.spec: Eagle3Spec = spec
        self.states_norm = norm(fused) if spec.norm_before_fc else None
        self.state_norms = nnx.List([norm(spec.target_width) for _ in spec.taps]) if spec.norm_each else None
        self.fc = Linear(fused, decoder.model_width, bias=spec.fc_bias, dtype=dtype)
        self.fusion = FusionLayer(spec, dtype=dtype)
        self.layers = nnx.List([DecoderLayer(decoder, dtype=dtype) for _ in range(decoder.kv.num_layers - 1)])
        self.norm = norm(decoder.model_width)

    def fuse(self, states: Sequence[jax.Array]) -> Float[Array, "T D"]:
        fused = jnp.concatenate(states, axis=-1)
        if self.states_norm is not None:
            fused = self.states_norm(fused)
        if self.state_norms is not None:
            parts = jnp.split(fused, len(self.state_norms), axis=-1)
            fused = jnp.concatenate([norm(part) for norm, part in zip(self.state_norms, parts, strict=True)], axis=-1)
        return self.fc(fused)

    def __call__(
        self,
        token_ids_T: Int[Array, "T"],
        feature_TD: Float[Array, "T D"],
        positions_T: Int[Array, "T"],
        pages: Pages,
        attend: Attend,
    ) -> tuple[Float[Array, "T D"], Pages]:
        angles, windows = self.spec.decoder.rope.angles(positions_T), self.kv.sliding_windows
        embedded_TD = self.tokens(token_ids_T)
        output_TD, first = self.fusion(embedded_TD, feature_TD, pages[0], attend, angles, windows[0])
        output_TD, rest = _run(self.layers, windows[1:], output_TD, pages[1:], attend, angles)
        return self.norm(output_TD) if self.spec.norm_output else output_TD, (first, *rest)

    def logits(self, output_BD: Float[Array, "B D"]) -> Float[Array, "B V"]:
        return super().logits(output_BD if self.spec.norm_output else self.norm(output_BD))


def _run(
    layers: Sequence[DecoderLayer],
    windows: Sequence[int | None],
    x_TD: jax.Array,
    pages: Pages,
    attend: Attend,
    angles: Angles,
) -> tuple[jax.Array, Pages]:
    bound = [
        partial(layer, attend=attend, angles=angles, sliding_window=window)
        for layer, window in zip(layers, windows, strict=True)
    ]
    output_TD, pages = run_layers(bound, None, x_TD, pages, ())
    return output_TD, pages
