"""Defines a drafter with weights of its own, which runs in the steps of its target.

The target is the model that it drafts for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast, runtime_checkable

import jax
from flax import nnx

from jaxpage.layers import ForwardContext
from jaxpage.models.base import KVSpec, Pages


@runtime_checkable
class Drafter(Protocol):
    """Runs over the target's stream of tokens and predicts the tokens that follow.

    It has the slots and the positions of the target.
    """

    @property
    def kv(self) -> KVSpec:
        """Returns what a sequence keeps for each position in the drafter's own layers.

        The pages of these layers follow those of the target's.
        """

    @property
    def aux_layers(self) -> tuple[int, ...] | None:
        """Returns the hidden states of the target that it takes; see `models.base.Model`.

        An empty tuple is the output after the final norm; None is none.
        """

    def fuse(self, states: Sequence[jax.Array]) -> jax.Array | None:
        """Returns the features [T, D] of hidden states [T, D of the target].

        The hidden states are those of `aux_layers`, or the output alone. The result is None if the
        drafter takes none.
        """

    def __call__(
        self,
        token_ids_T: jax.Array,
        feature_TD: jax.Array | None,
        pages: Pages,
        context: ForwardContext,
    ) -> tuple[jax.Array, Pages]:
        """Runs over a stream, and returns an output [T, D] and the pages.

        The output is what `logits` takes, and the feature of the next place.

        Args:
            token_ids_T: For a drafter that takes features the token after each place; for any other
                the token at the place.
            feature_TD: The features that `fuse` returned or, where the target has not been, the
                output of this method for the place before. None for a drafter that takes no hidden
                states.
            pages: The pages of the drafter's layers.
            context: The context of the pass.
        """

    def logits(self, output_BD: jax.Array) -> jax.Array:
        """Returns the logits [B, V of the target] of the token after the last one given.

        They are in float32, and -inf for tokens that the drafter lacks.
        """


def output_alone(states: Sequence[jax.Array]) -> jax.Array:
    """Returns the output of the target: `Drafter.fuse` of drafters that take nothing else."""
    (output_TD,) = states
    return output_TD


def join(graph: Any, parameters: Mapping[str, Any]) -> Drafter:
    """Returns the drafter, for use in a jitted function.

    A table that it lacks is the target's, which is not copied.

    Args:
        graph: The graph of the drafter, with all of its tables.
        parameters: {"target": the target's, "drafter": its own, with None in place of a table that
            is the target's}.
    """
    tables = {"tokens": parameters["target"]["tokens"]}
    tables["head"] = parameters["target"].get("head", tables["tokens"])
    drafter_parameters = {
        name: tables[name] if part is None else part for name, part in parameters["drafter"].items()
    }
    return cast(Drafter, nnx.merge(graph, drafter_parameters))
