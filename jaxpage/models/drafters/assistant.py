"""Gemma 4's assistants draft from the keys and values of their target, and have none of their own.

An assistant is a small model with a checkpoint of its own. Its layers have queries alone, and read
the pages of the target's last layer with keys and values of their type. It takes the embedding of a
token and the target's hidden state of the token before it. Where the target has not been, a
projection of its own output takes the place of that state. All drafts of a step are made at the
position of the token that they follow:

    target's layers   0 sliding   1 full   2 sliding   3 full
    assistant's       0 sliding reads the pages of 2, 1 full those of 3
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxpage.layers import Embedding, ForwardContext
from jaxpage.layers.parameter import parameter
from jaxpage.models import gemma_layers
from jaxpage.models.base import KVSpec, Pages, run_layers
from jaxpage.models.gemma4 import Gemma4Config, Gemma4Layer
from jaxpage.models.parts import Scope, norms


@dataclass(frozen=True)
class Centroids:
    """Says which tokens a head chooses among.

    They are divided into groups of one size, of which those with the best centroids count.

    Attributes:
        count: The number of groups.
        num_chosen: The number of groups whose tokens have logits; those of others are -inf.
    """

    count: int
    num_chosen: int


@dataclass(frozen=True, kw_only=True)
class AssistantSpec:
    """Describes an assistant and the target that it fits.

    Attributes:
        decoder: The config of its layers, which have the numbers from `first_layer` on: as if they
            followed the target's and shared the pages of these.
        first_layer: The number of the target's layers.
        target_width: The width of the target's hidden states.
        centroids: The groups of tokens; None for a head that has logits for all.
    """

    decoder: Gemma4Config
    first_layer: int
    target_width: int
    centroids: Centroids | None

    @property
    def places(self) -> tuple[int, ...]:
        """Returns for each layer the target's layer whose pages it reads."""
        return tuple(form.place for form in self.decoder.layer_forms[self.first_layer :])

    def make(self, dtype: jax.typing.DTypeLike) -> Assistant:
        """Returns the module, whose parameters have this type."""
        return Assistant(self, dtype=dtype)


def find_target_layers(kv: KVSpec, windows: tuple[int | None, ...]) -> tuple[int | None, ...]:
    """Returns, for layers with these windows, the target's last layer of the same type.

    It is None where the target has no layer of the type: with a window, or without one.

    Args:
        kv: What the target keeps.
        windows: The window of each layer of the assistant; None for a layer that sees all.
    """
    last = {window is None: layer for layer, window in enumerate(kv.sliding_windows)}
    return tuple(last.get(window is None) for window in windows)


def follow_target(
    config: Gemma4Config, target: Gemma4Config, places: tuple[int, ...]
) -> Gemma4Config:
    """Returns the config of an assistant whose layers follow those of its target.

    Args:
        config: What the assistant's config.json says of a model with keys and values of its own.
        target: The config of the target.
        places: For each layer, the target's layer whose pages it reads.
    """
    # As in transformers, a layer with a window of W sees W keys and the one before them.
    windows = tuple(window and window + 1 for window in target.kv.sliding_windows)
    forms = [
        gemma_layers.LayerForm(place, form.intermediate_size)
        for place, form in zip(places, config.layer_forms, strict=True)
    ]
    return replace(
        config,
        kv=replace(target.kv, sliding_windows=windows),
        layer_forms=(*target.layer_forms, *forms),
        rope_by_layer=(*target.rope_by_layer, *config.rope_by_layer),
    )


class Assistant(nnx.Module):
    """Computes `norm(layers(before([embedding; hidden state])))`.

    Attributes:
        tokens: The target's token table (`models.drafters.join`).
        token_order: The tokens, group by group. It is not one of the weights; None without groups.
    """

    def __init__(self, spec: AssistantSpec, *, dtype: jax.typing.DTypeLike):
        config, at = spec.decoder, Scope("", dtype)
        width = config.hidden_size
        is_tied = config.tie_word_embeddings
        name = "model.embed_tokens" if is_tied else "lm_head"
        aliases = ("lm_head",) if is_tied else ()
        self.spec = spec
        self.tokens = Embedding(config.vocab_size, spec.target_width, name=None, dtype=dtype)
        self.head = Embedding(config.vocab_size, width, name=name, aliases=aliases, dtype=dtype)
        self.before = gemma_layers.whole_projection(
            2 * spec.target_width, at, "pre_projection", width
        )
        self.layers = nnx.List(
            Gemma4Layer(config, spec.first_layer + number, at / f"model.layers.{number}")
            for number in range(len(spec.places))
        )
        self.norm = norms.rms_norm(config, at / "model.norm")
        self.after = gemma_layers.whole_projection(width, at, "post_projection", spec.target_width)
        groups = spec.centroids
        self.centroids = self.token_order = None
        if groups is not None:
            projection = gemma_layers.whole_projection(
                width, at, "masked_embedding.centroids", groups.count
            )
            order = parameter((config.vocab_size,), axes=("vocab",), dtype=jnp.int32)
            self.centroids, self.token_order = nnx.data(projection), nnx.data(order)

    def __call__(
        self,
        token_ids_T: Int[Array, "T"],
        state_TS: Float[Array, "T S"],
        target_pages: Pages,
        context: ForwardContext,
    ) -> Float[Array, "T D"]:
        """Returns what `logits` and `next_state` take.

        Args:
            token_ids_T: The tokens that drafts follow.
            state_TS: The target's hidden state of the token before each, after its final norm, or
                what `next_state` returns.
            target_pages: The pages of the target's layers, which stay as they are.
            context: The context; its `attend` gets the numbers of the target's layers.
        """
        # Gemma scales embeddings by the root of the width, here that of the target.
        embedded_TS = self.tokens(token_ids_T) * self.spec.target_width**0.5
        inputs = jnp.concatenate([embedded_TS, state_TS], axis=-1)
        layers: list[Any] = list(self.layers)
        output_TD, *_ = run_layers(
            layers, self.norm, self.before(inputs), target_pages, context, self.spec.places
        )
        return output_TD

    def next_state(self, output_TD: Float[Array, "T D"]) -> Float[Array, "T S"]:
        """Returns what takes the place of the target's hidden state, for the token after."""
        return self.after(output_TD)

    def logits(self, output_BD: Float[Array, "B D"]) -> Float[Array, "B V"]:
        """Returns the logits of the target's vocabulary; -inf for tokens of other groups."""
        logits_BV = self.head.logits(output_BD)
        groups, centroids, token_order = self.spec.centroids, self.centroids, self.token_order
        if groups is None or centroids is None or token_order is None:
            return logits_BV
        _, chosen_BG = jax.lax.top_k(centroids(output_BD), groups.num_chosen)
        row_B1 = jnp.arange(len(output_BD))[:, None]
        is_chosen_BC = (
            jnp.zeros((len(output_BD), groups.count), bool).at[row_B1, chosen_BG].set(True)
        )
        in_order_BV = jnp.repeat(is_chosen_BC, logits_BV.shape[1] // groups.count, axis=1)
        has_logit_BV = jnp.zeros(logits_BV.shape, bool).at[:, token_order[...]].set(in_order_BV)
        return jnp.where(has_logit_BV, logits_BV, -jnp.inf)
