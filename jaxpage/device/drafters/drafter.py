"""Defines device drafters, which run inside the steps of a model, their target.

One protocol serves heads, other models, and the target itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxpage.device.divided_logits import Logits
from jaxpage.device.hardware.backends import Backend
from jaxpage.device.inputs.buckets import Bucket
from jaxpage.device.inputs.step_inputs import Flags, StepInputs
from jaxpage.device.pages.kv_pages import KVPages


class TargetStep(NamedTuple):
    """Holds a step of the target, as a drafter sees it."""

    inputs: StepInputs
    bucket: Bucket
    backend: Backend
    by_row: bool
    hidden_TD: Float[Array, "T D"]  # after the final norm
    # [T, D]: the auxiliary hidden states that the drafter asked for, or else `hidden_TD`
    states: tuple[jax.Array, ...]
    logits: Logits
    token_ids_R: Int[Array, "R"]  # the drawn tokens
    paths_BQ: Int[Array, "_ _"]  # in a step that verifies: see `acceptance.decide`
    # The last draw of each sequence; a step that verifies has one for each row.
    last_B: Int[Array, "B"]
    pages: KVPages  # of the target's own layers, with the tokens of the step
    # [T, D]: what takes the place of tokens, where `inputs.is_vector_T` says so; None for none.
    vectors_TD: jax.Array | None

    @property
    def depth(self) -> jax.Array:
        """Returns `StepPlan.draft_depth`; -1 for None."""
        return self.inputs.flags[Flags.DRAFT_DEPTH]


@runtime_checkable
class DeviceDrafter(Protocol):
    """A drafter that is compiled into the steps of its target.

    It is fixed for the life of an engine, and hashable. The arrays that it computes with come with
    the parameters of each step.
    """

    @property
    def num_layers(self) -> int:
        """Returns the number of its own layers, whose pages follow the target's.

        A drafter with layers has to compute all tokens of the text.
        """
        ...

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Returns which auxiliary hidden states of the target it takes; see `ForwardContext`."""
        ...

    def drafts_in(self, bucket: Bucket) -> bool:
        """Returns whether it drafts in steps of this shape.

        In other steps `step` only computes the step's tokens.
        """
        ...

    def step(
        self, parameters: Any, target: TargetStep, pages: KVPages
    ) -> tuple[jax.Array | None, KVPages]:
        """Drafts as far ahead as `target.depth` says.

        Args:
            parameters: {"target": the target's, "drafter": its own}.
            target: The step of the target.
            pages: The pages of the drafter's own layers.

        Returns:
            What its proposer makes drafts of: int32, with an entry for each draw or for each of
            `target.last_B`; None in steps in which it does not draft. And the pages.
        """
        ...


def split_layers(pages: KVPages, drafter: DeviceDrafter | None) -> tuple[KVPages, KVPages]:
    """Returns the pages of the target's layers, and those of a drafter's layers after them."""
    num_layers = len(pages) - (drafter.num_layers if drafter else 0)
    return pages[:num_layers], pages[num_layers:]


@dataclass(frozen=True)
class HeadDrafter:
    """Drafts with Medusa's heads.

    Each head gives its W most likely tokens [J, W]; either all heads run or none.
    """

    graph: Any  # their nnx graph definition
    num_candidates: int  # W
    num_layers: ClassVar[int] = 0
    aux_layers: ClassVar[tuple[int, ...]] = ()

    def drafts_in(self, bucket: Bucket) -> bool:
        """Returns True: the heads draft in every step."""
        return True

    def step(
        self, parameters: Any, target: TargetStep, pages: KVPages
    ) -> tuple[jax.Array, KVPages]:
        """Returns the tokens [B, J, W] that the heads predict, and the pages as they were."""
        hidden_BD = target.hidden_TD[target.inputs.draws.drawn_token_R[target.last_B]]
        top_ids = functools.partial(
            nnx.merge(self.graph, parameters["drafter"]).top_ids, hidden_BD, self.num_candidates
        )
        return _if_requested(target, top_ids), pages


@dataclass(frozen=True)
class TopIdsDrafter:
    """Drafts with the target itself, for token recycling.

    It returns the W most likely tokens after each draw, the best first.
    """

    num_ids: int  # W
    num_layers: ClassVar[int] = 0
    aux_layers: ClassVar[tuple[int, ...]] = ()

    def drafts_in(self, bucket: Bucket) -> bool:
        """Returns True: every step has draws."""
        return True

    def step(
        self, parameters: Any, target: TargetStep, pages: KVPages
    ) -> tuple[jax.Array, KVPages]:
        """Returns the most likely tokens [R, W] after each draw, and the pages as they were."""
        return _if_requested(target, lambda: top_ids(target.logits.whole(), self.num_ids)), pages


def top_ids(logits_RV: Float[Array, "R V"], count: int) -> Int[Array, "R W"]:
    """Returns the most likely tokens of each row, the best first."""
    return jax.lax.top_k(logits_RV, count)[1].astype(jnp.int32)


def _if_requested(target: TargetStep, compute: Callable[[], jax.Array]) -> jax.Array:
    """Computes drafts where the step asks for some, and returns zeros where it does not."""
    shape = jax.eval_shape(compute)
    return jax.lax.cond(target.depth > 0, compute, lambda: jnp.zeros(shape.shape, shape.dtype))
