"""Simulates static batching, as with FasterTransformer.

A batcher takes as many of the earliest requests as memory holds.
"""

from __future__ import annotations

from jaxpage.step.plan import Row, Sample
from jaxpage.step.request import SequenceGroup
from tools.lab.paper.orca import max_length
from tools.lab.paper.reserving import ReservingScheduler


class StaticBatcher(ReservingScheduler):
    """Runs a batch until its longest output ends, then answers its requests and begins the next.

    Every sequence has room for the longest sequence that the model takes. A sequence that has ended
    stays in the batch: its rows are computed, but nothing is drawn from them. Prompts of a batch
    are computed in one step, without padding.
    """

    def __init__(self, num_slots: int, *, max_num_seqs: int = 256) -> None:
        super().__init__(
            num_slots, max_length, max_num_seqs=max_num_seqs, max_num_batched_tokens=num_slots
        )

    def _admit(self) -> None:
        if not self._running:
            super()._admit()

    def _plan(self, group: SequenceGroup, rows: list[Row], samples: list[Sample]) -> None:
        super()._plan(group, rows, samples)
        rows += [
            Row(sequence.sequence_id, sequence.num_computed_tokens, (sequence.token_ids[-1],), ())
            for sequence in group.sequences
            if sequence.finished
        ]

    def _leaving(self, touched: list[SequenceGroup]) -> list[SequenceGroup]:
        if all(held.group.finished for held in self._running.values()):
            batch = [held.group for held in self._running.values()]
            for group in batch:
                self._release(group)
            return batch
        return [group for group in touched if not group.finished]
