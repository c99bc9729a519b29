"""What a drafter with weights of its own shows the step that it runs in, beside the model that it drafts for: its target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast, runtime_checkable

import jax
from flax import nnx

from jaxpage.layers.context import ForwardContext
from jaxpage.models.base import KVSpec, Pages


@runtime_checkable
class Drafter(Protocol):
    """A module that runs over the target's stream of tokens, in the same slots and positions, and predicts what follows."""

    @property
    def kv(self) -> KVSpec:
        """Of its own layers, whose pages stand behind the target's."""

    @property
    def aux_layers(self) -> tuple[int, ...] | None:
        """Which hidden states of the target it takes (see `models.base.Model`). (): the output behind the final norm. None: none."""

    def fuse(self, states: Sequence[jax.Array]) -> jax.Array | None:
        """The features [T, D] of hidden states [T, D of the target]: of `aux_layers`, or the output alone. None if it takes none."""

    def __call__(
        self,
        token_ids_T: jax.Array,
        feature_TD: jax.Array | None,
        pages: Pages,
        context: ForwardContext,
    ) -> tuple[jax.Array, Pages]:
        """One pass over a stream: what `logits` takes and what is the feature of the place behind [T, D], and the pages.

        Args:
            token_ids_T: of a drafter that takes features, the token behind each place; of any other, the token there.
            feature_TD: from `fuse`, or where the target has not been, what this returned for the place before. Nothing to a drafter
                that takes no hidden states.
        """

    def logits(self, output_BD: jax.Array) -> jax.Array:
        """Of the token behind the last one that it was given: [B, V of the target], float32, -inf for tokens that it lacks."""


def join(graph: Any, parameters: Mapping[str, Any]) -> Drafter:
    """The drafter, for use inside a jitted function: a table that it lacks is the target's, which is not copied.

    Args:
        graph: of the drafter, with all of its tables.
        parameters: {"target": the target's, "drafter": its own, with None in place of a table that is the target's}.
    """
    tables = {"tokens": parameters["target"]["tokens"]}
    tables["head"] = parameters["target"].get("head", tables["tokens"])
    own = {
        name: tables[name] if part is None else part for name, part in parameters["drafter"].items()
    }
    return cast(Drafter, nnx.merge(graph, own))
