"""Multi-token prediction (MTP): the head inside a checkpoint, which drafts for its model.

Row t takes the embedding of token t + 1, or the vector in its place, and the model's hidden state
of token t, after the final norm, and predicts token t + 2. What it returns for row t takes the
place of a hidden state where the model has not been yet (DeepSeek-V3, arXiv:2412.19437, section
2.2).
"""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxpage.layers import Embedding, ForwardContext
from jaxpage.models.base import Pages, run_layers
from jaxpage.models.config import MtpNames
from jaxpage.models.drafters.drafter import output_alone
from jaxpage.models.parts import Scope


class MtpHead(nnx.Module):
    """Computes `norm(layer(fc([norm(embedding); norm(hidden state)])))`; see `Drafter`.

    In some families `fc` takes the hidden state first (`MtpNames.hidden_first`).
    The token table and the head that gives logits are the model's (`models.drafters.join`).
    """

    aux_layers: ClassVar[tuple[int, ...]] = ()
    fuse = staticmethod(output_alone)

    def __init__(self, config: Any, family: Any, names: MtpNames, *, dtype: jax.typing.DTypeLike):
        """Makes the head.

        Args:
            config: The config of the model.
            family: The family of the model, which makes the layer and the norms.
            names: The names of the head's tensors.
            dtype: The type of the parameters.
        """
        width, of_layer = config.hidden_size, config.of_draft_layer()
        self.kv = of_layer.kv
        self.hidden_first = names.hidden_first
        self.tokens = Embedding(config.vocab_size, width, name=None, dtype=dtype)
        self.head = Embedding(config.vocab_size, width, name=None, dtype=dtype)
        self.embedding_norm, self.hidden_norm, self.norm = (
            family.Model.make_norm(config, Scope(name, dtype))
            for name in (names.embedding_norm, names.hidden_norm, names.output_norm)
        )
        at = Scope("", dtype)
        self.fc = at.projection(2 * width, (names.projection, width), axes=(None, "embed"))
        layer = family.Model.make_block(of_layer, 0, Scope(names.layer, dtype))
        self.layers = nnx.List([layer])

    def __call__(
        self,
        token_ids_T: Int[Array, "T"],
        feature_TD: Float[Array, "T D"],
        pages: Pages,
        context: ForwardContext,
    ) -> tuple[Float[Array, "T D"], Pages]:
        """Returns the hidden states, which are the next features, and the pages."""
        embedded_TD = self.embedding_norm(context.place_vectors(self.tokens(token_ids_T)))
        parts = embedded_TD, self.hidden_norm(feature_TD)
        inputs = jnp.concatenate(parts[::-1] if self.hidden_first else parts, axis=-1)
        output_TD, pages, _ = run_layers(self.layers, self.norm, self.fc(inputs), pages, context)
        return output_TD, pages

    def logits(self, output_BD: Float[Array, "B D"]) -> Float[Array, "B V"]:
        """Returns the logits of the model's vocabulary."""
        return self.head.logits(output_BD)
