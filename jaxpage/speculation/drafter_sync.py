"""Decides when a device drafter runs, how far it drafts, and for which sequences.

It has to draft in the step before its drafts are verified. A drafter with a KV cache must compute
every token of a sequence. A sequence of which it has missed some is *stale*, and has no drafts.
While the drafter is on, its time is weighed against what its drafts gain. Once it has lost
`MAX_LOSS` it is off, and steps run the executables of the target alone, for so long that the loss
is a small share of the time. Then it is on again from the next new request on.
"""

from __future__ import annotations

from collections.abc import Iterable

from jaxpage.speculation.controller import MEMORY, PROBE_SHARE, Controller
from jaxpage.step.limits import StepLimits
from jaxpage.step.plan import StepPlan

MAX_LOSS = 6.0  # in steps without drafts


class DrafterSync:
    """Switches a device drafter on and off.

    Without a controller the drafter is always on, and drafts as far as the shapes allow.
    """

    def __init__(
        self,
        limits: StepLimits,
        controller: Controller | None,
        *,
        block_size: int,
        has_kv: bool = True,
    ):
        """Begins with the drafter on.

        Args:
            limits: The shapes of steps.
            controller: The controller, or None.
            block_size: The slots of a block (S).
            has_kv: The drafter has a KV cache. Without one it runs only where it drafts, and no
                sequence is ever stale.
        """
        self.ready: set[int] = set()  # sequences for which it has drafts
        self._limits = limits
        self._controller = controller
        self._block_size = block_size
        self._has_kv = has_kv
        self._seen: set[int] = set()  # sequences that have not ended
        self._stale: set[int] = set()
        self._stale_blocks: set[int] = (
            # It has missed tokens in them, and the prefix cache may give them to other sequences.
            set()
        )
        self._lost = 0.0  # the loss since it is on, in steps without drafts
        self._steps_off = 0.0

    @property
    def is_off(self) -> bool:
        """Returns whether the drafter is off."""
        return self._steps_off > 0

    def is_stale(self, sequence_id: int) -> bool:
        """Returns whether the drafter has missed tokens of a sequence."""
        return sequence_id in self._stale

    def depth(self, plan: StepPlan, others_wait: bool = False) -> int | None:
        """Returns `StepPlan.draft_depth` for a plan.

        `others_wait` says that there are requests that could run and do not yet.
        """
        depth = self._choose(plan, others_wait)
        if self._has_kv:
            self._note(plan, depth)
        return depth

    def _choose(self, plan: StepPlan, others_wait: bool) -> int | None:
        if self.is_off:
            # The count stops above 0 until there is a new request, of which it can compute all
            # tokens.
            self._steps_off -= self._steps_off > 1 or any(
                row.sequence_id not in self._seen for row in plan.rows
            )
            if self._steps_off > 0:
                return None
            self._lost = 0.0
        depth = self._limits.max_drafts(len(plan.rows))
        if self._controller is not None:
            depth = min(depth, self._controller.depth)
        goes_on = len({sample.row for sample in plan.samples}) < len(plan.rows)  # a prompt goes on
        if goes_on or (not plan.decodes and others_wait and self._limits.mixed):
            depth = 0  # the next step computes prompts, and has no room for drafts
        return depth if self._has_kv or depth else None

    def _note(self, plan: StepPlan, depth: int | None) -> None:
        """Notes what is stale after the step.

        If the step fails the pages are lost, and the blocks that are noted here with them.
        """
        for row in plan.rows:
            table = row.block_tables[0]
            written = table[row.start // self._block_size :]
            if depth is None:
                self._stale.add(row.sequence_id)
                self._stale_blocks.update(written)
            else:
                begun = -(-row.start // self._block_size)  # blocks with tokens from before
                if row.start == 0:
                    self._stale.discard(row.sequence_id)
                elif row.sequence_id not in self._seen and not self._stale_blocks.isdisjoint(
                    table[:begun]
                ):
                    self._stale.add(row.sequence_id)
                self._stale_blocks.difference_update(table[begun:])
            # Their tokens may now be in other blocks.
            if (plan.swap_in or plan.copies) and row.sequence_id in self._stale:
                self._stale_blocks.update(table)
            self._seen.add(row.sequence_id)
        for sample in () if plan.decodes else plan.samples:  # forks
            self._seen.add(sample.sequence_id)
            if plan.rows[sample.row].sequence_id in self._stale:
                self._stale.add(sample.sequence_id)

    def ran(self, plan: StepPlan, num_tokens: int, drafted: bool = True) -> None:
        """Learns that a step gave `num_tokens` tokens.

        `drafted` says that its shape is one in which the drafter drafts.
        """
        self.ready.difference_update([row.sequence_id for row in plan.rows])
        if plan.draft_depth and drafted:
            self.ready.update({sample.sequence_id for sample in plan.samples} - self._stale)
        if self._controller is None or plan.draft_depth is None or not self._has_kv:
            return
        costs = self._controller.costs
        num_rows = len(plan.rows)
        plain, shape = (
            self._limits.shape(num_rows, max(0, count)) for count in (0, plan.num_tokens - num_rows)
        )
        alone = costs.of(plain)
        if self._lost < 0.0:  # gains pay for the prompts of the near future
            self._lost *= 1.0 - 1.0 / MEMORY if self._controller.is_on else 0.0
        if plan.decodes:
            self._lost += costs.of(shape, plan.draft_depth) / alone - num_tokens / num_rows
        else:
            added = (
                costs.of(plain, plan.draft_depth)
                - alone
                + costs.pace * costs.prompt_token * plan.num_tokens
            )
            self._lost += added / alone
        if self._lost > MAX_LOSS:
            self._steps_off = self._lost / PROBE_SHARE

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """Forgets sequences that have ended."""
        for known in (self.ready, self._seen, self._stale):
            known.difference_update(sequence_ids)
