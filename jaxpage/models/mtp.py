"""Multi-token prediction (MTP): the head inside a checkpoint, which drafts for its model.

Row t takes the embedding of token t + 1 and the model's hidden state of token t, after the final
norm, and predicts token t + 2. What it returns for row t takes the place of a hidden state where
the model has not been yet (DeepSeek-V3, arXiv:2412.19437, section 2.2).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxpage.layers.context import ForwardContext
from jaxpage.layers.embedding import Embedding
from jaxpage.layers.linear import Part, linear
from jaxpage.models.base import KVSpec, Pages, run_layers
from jaxpage.models.drafter import output_alone
from jaxpage.models.mtp_names import MtpNames
from jaxpage.models.parts.decoder_config import DecoderConfig
from jaxpage.models.parts.scope import Scope


def layer_spec(spec: Any) -> Any:
    """Returns the spec of the head's one layer.

    It attends to all positions, whatever the model's layers do, and has experts if the model has.
    """
    if isinstance(spec, DecoderConfig):
        return spec.of_draft_layer()
    kv = KVSpec(1, spec.kv.num_kv_heads, spec.kv.head_dim, (None,), spec.kv.value_width)
    return replace(
        spec, kv=kv, rope_by_layer=(), recurrent=None, sparse_layers=(spec.experts is not None,)
    )


class MtpHead(nnx.Module):
    """Computes `norm(layer(fc([norm(embedding); norm(hidden state)])))`; see `Drafter`.

    The token table and the head that gives logits are the model's (`models.drafter.join`).
    """

    aux_layers: ClassVar[tuple[int, ...]] = ()
    fuse = staticmethod(output_alone)

    def __init__(self, spec: Any, family: Any, names: MtpNames, *, dtype: DTypeLike):
        """Makes the head.

        Args:
            spec: The spec of the model.
            family: The family of the model, which makes the layer and the norms.
            names: The names of the head's tensors.
            dtype: The type of the parameters.
        """
        width, spec_of_layer = spec.hidden_size, layer_spec(spec)
        self.kv = spec_of_layer.kv
        self.tokens = Embedding(spec.vocab_size, width, name=None, dtype=dtype)
        self.head = Embedding(spec.vocab_size, width, name=None, dtype=dtype)
        self.embedding_norm, self.hidden_norm, self.norm = (
            family.Model.make_norm(spec, Scope(name, dtype))
            for name in (names.embedding_norm, names.hidden_norm, names.output_norm)
        )
        self.fc = linear(
            2 * width,
            Part(width, "embed", names.product),
            input_axis=None,
            bias=False,
            dtype=dtype,
        )
        layer = family.Model.make_block(spec_of_layer, 0, Scope(names.layer, dtype))
        self.layers = nnx.List([layer])

    def __call__(
        self,
        token_ids_T: Int[Array, "T"],
        feature_TD: Float[Array, "T D"],
        pages: Pages,
        context: ForwardContext,
    ) -> tuple[Float[Array, "T D"], Pages]:
        """Returns the hidden states, which are the next features, and the pages."""
        embedded_TD = self.embedding_norm(self.tokens(token_ids_T))
        both = jnp.concatenate([embedded_TD, self.hidden_norm(feature_TD)], axis=-1)
        output_TD, pages, _ = run_layers(self.layers, self.norm, self.fc(both), pages, context)
        return output_TD, pages

    def logits(self, output_BD: Float[Array, "B D"]) -> Float[Array, "B V"]:
        """Returns the logits of the model's vocabulary."""
        return self.head.logits(output_BD)
