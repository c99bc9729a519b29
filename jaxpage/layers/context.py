"""What layers take from a step besides their input and their pages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import jax
from jaxtyping import Array, Int

from jaxpage.layers.rope import Angles, Rope

LayerPages = Any  # keys and values of one layer: opaque here, given to `attend` and handed on as it returns them


@runtime_checkable
class Attend(Protocol):
    """Write new keys and values, attend with the queries, return the output and the pages."""

    def __call__(
        self,
        layer_index: int,
        q_TNH: jax.Array,
        k_TKH: jax.Array,
        v_TKH: jax.Array | None,
        layer_pages: LayerPages,
        /,
        *,
        scale: float,
        sliding_window: int | None = None,
        logit_softcap: float | None = None,
        sinks: jax.Array | None = None,
        value_width: int | None = None,
    ) -> tuple[jax.Array, LayerPages]:
        """Attend causally to the own sequence: `softmax(scale * q . k) v`, with the softmax in float32.

        Keys come after the rotary embedding. Query head n uses key/value head n // (N / K).
        layer_index: of the model's layers, whose window and pages these are.
        sliding_window: W positions, the query's own included: a query at p sees keys at p - W < position <= p.
        None: all positions up to p.
        logit_softcap: c: products s become `c tanh(s / c)` before the softmax (Gemma 2). Passed only where a layer has it.
        sinks: one more logit of each query head, whose share of the softmax is lost (GPT-OSS). Passed as `logit_softcap` is.
        value_width: values are the first so many numbers of the keys, and v_TKH is None. Passed as `logit_softcap` is.
        """


@dataclass(frozen=True, eq=False)
class ForwardContext:
    """One pass of a model over a stream of tokens. It belongs to the trace in which it is made.

    aux_layers: the layers whose entering hidden states, the auxiliary ones, the model hands out (`models.base.Model`).
    """

    positions_T: Int[Array, "T"]
    attend: Attend
    aux_layers: tuple[int, ...] = ()
    _angles: dict[Rope, Angles] = field(default_factory=dict, init=False, repr=False)

    def angles(self, rope: Rope) -> Angles:
        """Of the positions; computed once for all layers that have this rope."""
        if rope not in self._angles:
            self._angles[rope] = rope.angles(self.positions_T)
        return self._angles[rope]
