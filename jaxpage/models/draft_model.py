"""An ordinary model as a drafter (Leviathan et al. 2023, arXiv:2211.17192; Chen et al. 2023, arXiv:2302.01318)."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxpage.layers.context import ForwardContext
from jaxpage.models.base import Family, KVSpec, ModelSpec, Pages, make_model
from jaxpage.models.replacing import Rule


class DraftModel(nnx.Module):
    """See `models.drafter.Drafter`. It takes no features. Parameters: {"model": those of the model}.

    vocab_size: V of the target. Tables of one tokenizer may be padded to different lengths: ids that only this one has are cut off, and
    those that it lacks are never drafted.
    """

    aux_layers = None

    def __init__(
        self,
        family: Family,
        spec: ModelSpec,
        rule: Rule | None = None,
        *,
        vocab_size: int,
        dtype: DTypeLike,
    ):
        self.model = make_model(family, spec, dtype, rule)
        self.spec = spec
        self.vocab_size = vocab_size

    @property
    def kv(self) -> KVSpec:
        return self.spec.kv

    def fuse(self, states: Sequence[jax.Array]) -> None:
        return None

    def __call__(
        self,
        token_ids_T: Int[Array, "T"],
        feature_TD: Float[Array, "T D"] | None,
        pages: Pages,
        context: ForwardContext,
    ) -> tuple[Float[Array, "T D"], Pages]:
        hidden_TD, pages, _ = self.model(token_ids_T, pages, context)
        return hidden_TD, pages

    def logits(self, output_BD: Float[Array, "B D"]) -> Float[Array, "B V"]:
        logits_BV = self.model.logits(output_BD)[:, : self.vocab_size]
        lacking = self.vocab_size - logits_BV.shape[1]
        return jnp.pad(logits_BV, ((0, 0), (0, lacking)), constant_values=-jnp.inf)
