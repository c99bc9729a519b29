"""An ordinary model drafts for another (Leviathan et al. 2023, Chen et al. 2023).

See arXiv:2211.17192 and arXiv:2302.01318.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxpage.layers import ForwardContext
from jaxpage.models.base import Family, KVSpec, ModelSpec, Pages, make_model
from jaxpage.models.parameters.replacing import Rule


class DraftModel(nnx.Module):
    """Drafts with an ordinary model; see `models.drafters.Drafter`. It takes no features.

    Its parameters are {"model": those of the model}.

    Attributes:
        model: The model.
        spec: The spec of the model.
        vocab_size: The size of the target's vocabulary (V). Tables of one tokenizer may be padded
            to different lengths: ids that only this model has are cut off, and those that it lacks
                are
            never drafted.
    """

    aux_layers = None

    def __init__(
        self,
        family: Family,
        spec: ModelSpec,
        rule: Rule | None = None,
        *,
        vocab_size: int,
        dtype: jax.typing.DTypeLike,
    ):
        self.model = make_model(family, spec, dtype, rule)
        self.spec = spec
        self.vocab_size = vocab_size

    @property
    def kv(self) -> KVSpec:
        """Returns what a sequence keeps for each position of the model."""
        return self.spec.kv

    def fuse(self, states: Sequence[jax.Array]) -> None:
        """Returns None, because the model takes no features."""
        return None

    def __call__(
        self,
        token_ids_T: Int[Array, "T"],
        feature_TD: Float[Array, "T D"] | None,
        pages: Pages,
        context: ForwardContext,
    ) -> tuple[Float[Array, "T D"], Pages]:
        """Returns the hidden states of the model, and the pages."""
        hidden_TD, pages, _ = self.model(token_ids_T, pages, context)
        return hidden_TD, pages

    def logits(self, output_BD: Float[Array, "B D"]) -> Float[Array, "B V"]:
        """Returns the logits of the target's vocabulary."""
        logits_BV = self.model.logits(output_BD)[:, : self.vocab_size]
        lacking = self.vocab_size - logits_BV.shape[1]
        return jnp.pad(logits_BV, ((0, 0), (0, lacking)), constant_values=-jnp.inf)
