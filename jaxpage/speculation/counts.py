"""Counts what came of drafts, and how many tokens a step gives.

It counts from plans and edits alone, so that only tokens of the text count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jaxpage.step.edits import Append, Edit
from jaxpage.step.plan import StepPlan, depths_of
from jaxpage.step.request import SequenceGroup


class Verified(NamedTuple):
    """Says what came of one sequence's drafts in one step."""

    sequence_id: int
    num_tokens: int  # drafts
    # The drafts that are tokens of the sequence now; what a stop cut off is not.
    num_accepted: int


def count_verified_drafts(plan: StepPlan, edits: Iterable[Edit]) -> list[Verified]:
    """Returns what came of the drafts of every row that has some, in the order of the rows."""
    accepted = Counter(edit.sequence_id for edit in edits if type(edit) is Append and edit.drafted)
    return [
        Verified(row.sequence_id, len(row.parents), accepted[row.sequence_id])
        for row in plan.rows
        if row.parents
    ]


@dataclass
class SpeculationCounts:
    """Holds vLLM's counters (`spec_decode_...`), a few more, and two that count all decode steps.

    Its mean acceptance length, 1 + accepted / drafts, leaves out steps for which nothing was
    drafted; `tokens_per_target_step` includes them.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    # The key 0 is the draft after the last known token.
    num_accepted_per_position: dict[int, int] = field(default_factory=dict)
    # The key is the number of a sequence's draft tokens in a step.
    num_by_length: Counter[int] = field(default_factory=Counter)
    # The time of asking for drafts. A device drafter's time is a part of its steps.
    drafting_seconds: float = 0.0
    verifying_seconds: float = 0.0  # steps with drafts, from the plan to the tokens
    num_decode_rows: int = 0  # rows with one token left to compute
    num_decode_tokens: int = 0  # the tokens that these rows gave

    def add(
        self, plan: StepPlan, edits: Iterable[Edit], group_of: Mapping[int, SequenceGroup]
    ) -> list[Verified]:
        """Counts a step that happened, and returns what came of its drafts.

        Sequences that were aborted meanwhile are left out.
        """
        edits = list(edits)
        self._add_decoding(plan, edits, group_of)
        if not plan.verifies:
            return []
        verified = [
            each for each in count_verified_drafts(plan, edits) if each.sequence_id in group_of
        ]
        self.num_drafts += len(verified)
        self.num_draft_tokens += sum([each.num_tokens for each in verified])
        self.num_by_length.update(each.num_tokens for each in verified)
        self.num_accepted_tokens += sum([each.num_accepted for each in verified])
        shapes = {row.parents for row in plan.rows if row.parents and row.sequence_id in group_of}
        for position in range(max([max(depths_of(parents)) for parents in shapes], default=0)):
            accepted = sum([each.num_accepted > position for each in verified])
            self.num_accepted_per_position[position] = (
                self.num_accepted_per_position.get(position, 0) + accepted
            )
        return verified

    def took(self, plan: StepPlan, drafting: float, seconds: float) -> None:
        """Adds the seconds of asking for the drafts of a step, and those of the rest of it."""
        self.drafting_seconds += drafting
        self.verifying_seconds += seconds if plan.verifies else 0.0

    def _add_decoding(
        self, plan: StepPlan, edits: list[Edit], group_of: Mapping[int, SequenceGroup]
    ) -> None:
        """Counts the rows that compute the last token of an output.

        Beams are left out: how many tokens they draw says nothing of steps.
        """
        drawn = {sample.row for sample in plan.samples}
        decoding = set()
        for index, row in enumerate(plan.rows):
            if len(row.token_ids) == 1 + len(row.parents) and index in drawn:
                group = group_of.get(row.sequence_id)
                if (
                    group
                    and row.start >= len(group.request.prompt_token_ids)
                    and not group.request.beam
                ):
                    decoding.add(row.sequence_id)
        self.num_decode_rows += len(decoding)
        self.num_decode_tokens += sum(
            [type(edit) is Append and edit.sequence_id in decoding for edit in edits]
        )

    def snapshot(self) -> dict[str, Any]:
        """Returns the counters under the names of the public interface."""
        rows = self.num_decode_rows
        return {
            "spec_decode_num_drafts_total": self.num_drafts,  # one for a sequence in a step
            "spec_decode_num_draft_tokens_total": self.num_draft_tokens,
            "spec_decode_num_accepted_tokens_total": self.num_accepted_tokens,
            "spec_decode_num_accepted_tokens_per_pos_total": dict(
                sorted(self.num_accepted_per_position.items())
            ),
            "spec_decode_num_drafts_by_length_total": dict(sorted(self.num_by_length.items())),
            "spec_decode_draft_seconds_total": self.drafting_seconds,
            "spec_decode_verify_seconds_total": self.verifying_seconds,
            "spec_decode_wasted_slots_total": self.num_draft_tokens - self.num_accepted_tokens,
            "decode_rows_total": rows,
            "decode_tokens_total": self.num_decode_tokens,
            "tokens_per_target_step": self.num_decode_tokens / rows if rows else 0.0,
        }
