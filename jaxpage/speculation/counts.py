"""What came of the drafts, and how many tokens a step gives: counted from plans and edits alone, so that it is the text that counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jaxpage.decoding.edits import Append, Edit
from jaxpage.request import SequenceGroup
from jaxpage.scheduling.plan import StepPlan


class Verified(NamedTuple):
    """One sequence's drafts of one step."""

    sequence_id: int
    num_tokens: int  # drafts
    num_accepted: int  # of them, those that are tokens of the sequence now: what a stop cut off is not


def verified_drafts(plan: StepPlan, edits: Iterable[Edit]) -> list[Verified]:
    """Of every row with drafts, in the order of the rows."""
    accepted = Counter(edit.sequence_id for edit in edits if type(edit) is Append and edit.drafted)
    return [Verified(row.sequence_id, len(row.parents), accepted[row.sequence_id]) for row in plan.rows if row.parents]


@dataclass
class SpeculationCounts:
    """vLLM's counters (`spec_decode_...`), and two that count steps without drafts as well.

    Its mean acceptance length, 1 + accepted / drafts, leaves out steps for which nothing was drafted; `tokens_per_target_step` has them.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_per_position: dict[int, int] = field(default_factory=dict)  # 0: the draft behind the last known token
    num_decode_rows: int = 0  # of steps: a sequence with one token left to compute
    num_decode_tokens: int = 0  # that they gave

    def add(self, plan: StepPlan, edits: Iterable[Edit], group_of: Mapping[int, SequenceGroup]) -> list[Verified]:
        """Books a step that happened; returns what came of its drafts."""
        edits = list(edits)
        self._add_decoding(plan, edits, group_of)
        if not plan.verifies:
            return []
        verified = verified_drafts(plan, edits)
        for row in plan.rows:
            if row.parents:
                for position in range(_depth(row.parents)):
                    self.num_accepted_per_position.setdefault(position, 0)
        for each in verified:
            self.num_drafts += 1
            self.num_draft_tokens += each.num_tokens
            self.num_accepted_tokens += each.num_accepted
            for position in range(each.num_accepted):
                self.num_accepted_per_position[position] += 1
        return verified

    def _add_decoding(self, plan: StepPlan, edits: list[Edit], group_of: Mapping[int, SequenceGroup]) -> None:
        """Of rows that compute the last token of an output. Beams are left out: how many tokens they draw says nothing of steps."""
        drawn = {sample.row for sample in plan.samples}
        decoding = set()
        for index, row in enumerate(plan.rows):
            if len(row.token_ids) == 1 + len(row.parents) and index in drawn:
                if (group := group_of.get(row.sequence_id)) is None:
                    continue  # aborted meanwhile
                request = group.request
                if row.start >= len(request.prompt_token_ids) and not request.beam:
                    decoding.add(row.sequence_id)
        self.num_decode_rows += len(decoding)
        self.num_decode_tokens += sum([type(edit) is Append and edit.sequence_id in decoding for edit in edits])

    def snapshot(self) -> dict[str, Any]:
        """Under the names of the public interface."""
        rows = self.num_decode_rows
        return {
            "spec_decode_num_drafts_total": self.num_drafts,  # of a sequence in a step
            "spec_decode_num_draft_tokens_total": self.num_draft_tokens,
            "spec_decode_num_accepted_tokens_total": self.num_accepted_tokens,
            "spec_decode_num_accepted_tokens_per_pos_total": dict(sorted(self.num_accepted_per_position.items())),
            "spec_decode_wasted_slots_total": self.num_draft_tokens - self.num_accepted_tokens,
            "decode_rows_total": rows,
            "decode_tokens_total": self.num_decode_tokens,
            "tokens_per_target_step": self.num_decode_tokens / rows if rows else 0.0,
        }


def _depth(parents: tuple[int, ...]) -> int:
    """Of a row's tree. Parents are places in the row: 0 is the token before the drafts."""
    depths = [0]
    for parent in parents:
        depths.append(1 + depths[parent])
    return max(depths)
