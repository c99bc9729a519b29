"""What came of the drafts, and how many tokens a step gives: counted from plans and edits alone, so that it is the text that counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jaxpage.step.edits import Append, Edit
from jaxpage.step.plan import StepPlan, depths_of
from jaxpage.step.request import SequenceGroup


class Verified(NamedTuple):
    """One sequence's drafts of one step."""

    sequence_id: int
    num_tokens: int  # drafts
    # of them, those that are tokens of the sequence now: what a stop cut off is not
    num_accepted: int


def verified_drafts(plan: StepPlan, edits: Iterable[Edit]) -> list[Verified]:
    """Of every row with drafts, in the order of the rows."""
    accepted = Counter(edit.sequence_id for edit in edits if type(edit) is Append and edit.drafted)
    return [
        Verified(row.sequence_id, len(row.parents), accepted[row.sequence_id])
        for row in plan.rows
        if row.parents
    ]


@dataclass
class SpeculationCounts:
    """vLLM's counters (`spec_decode_...`), a few more, and two that count steps without drafts as well.

    Its mean acceptance length, 1 + accepted / drafts, leaves out steps for which nothing was drafted; `tokens_per_target_step` has them.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    # 0: the draft behind the last known token
    num_accepted_per_position: dict[int, int] = field(default_factory=dict)
    num_by_length: Counter[int] = field(
        default_factory=Counter
    )  # drafts of a sequence in a step, by how many tokens they are
    # in which drafts were asked for; what drafts on the device is a part of its steps
    drafting_seconds: float = 0.0
    verifying_seconds: float = 0.0  # of steps with drafts, from the plan to the tokens
    num_decode_rows: int = 0  # of steps: a sequence with one token left to compute
    num_decode_tokens: int = 0  # that they gave

    def add(
        self, plan: StepPlan, edits: Iterable[Edit], group_of: Mapping[int, SequenceGroup]
    ) -> list[Verified]:
        """Books a step that happened; returns what came of its drafts. Who was aborted meanwhile is passed over."""
        edits = list(edits)
        self._add_decoding(plan, edits, group_of)
        if not plan.verifies:
            return []
        verified = [each for each in verified_drafts(plan, edits) if each.sequence_id in group_of]
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
        """Seconds in which drafts for the step were asked for, and of the rest of it."""
        self.drafting_seconds += drafting
        self.verifying_seconds += seconds if plan.verifies else 0.0

    def _add_decoding(
        self, plan: StepPlan, edits: list[Edit], group_of: Mapping[int, SequenceGroup]
    ) -> None:
        """Of rows that compute the last token of an output. Beams are left out: how many tokens they draw says nothing of steps."""
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
        """Under the names of the public interface."""
        rows = self.num_decode_rows
        return {
            "spec_decode_num_drafts_total": self.num_drafts,  # of a sequence in a step
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
