"""Holds what the systems before paging have in common.

A request reserves contiguous slots for all that it may become, and keeps them until it ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from jaxpage.errors import CapacityError
from jaxpage.memory import MemorySplit
from jaxpage.scheduling import apply_edit, sample_of
from jaxpage.step.edits import Edit
from jaxpage.step.plan import Row, Sample, StepPlan
from jaxpage.step.request import Request, SequenceGroup
from jaxpage.step.request import Sequence as TokenSequence
from tools.lab.paper.buddy import BuddyAllocator

MAX_MODEL_LEN = 2048

# Returns how many slots a sequence of a request reserves.
Reservation = Callable[[Request], int]


class _NoBlocks:
    """Takes the place of a block manager where no sequence has a block table."""

    def fork(self, parent_id: int, child_id: int) -> None: ...

    def release(self, sequence_id: int) -> None: ...


@dataclass
class _Held:
    """Holds a running group's chunks, one for each of its sequences; they share nothing."""

    group: SequenceGroup
    num_slots: int  # the slots that each sequence asked for; the allocator gives a power of two
    chunks: list[int]

    @property
    def num_needed(self) -> int:
        """Returns the number of slots that will hold a token in the end."""
        return self.group.request.max_total_tokens * len(self.chunks)


class ReservingScheduler:
    """Serves requests first come, first served, and preempts none.

    Subclasses decide when requests are admitted and when they leave. A request is admitted when its
    reservation can be had. Then its whole prompt is computed in one step, and one token of each of
    its sequences in every later step, together with those of all other running requests. Several
    samples or beams have a copy of the prompt each, but compute it once; copying costs nothing, and
    so do beams that copy each other.
    """

    block_size = 1  # nothing is swapped

    def __init__(
        self,
        num_slots: int,
        reservation: Reservation,
        *,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 2560,
    ) -> None:
        self.allocator = BuddyAllocator(num_slots)
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self._reservation = reservation
        self._queue: deque[SequenceGroup] = deque()
        self._running: dict[str, _Held] = {}  # in order of arrival
        self._sequences: dict[int, tuple[SequenceGroup, TokenSequence]] = {}
        self._num_steps = 0

    @property
    def has_unfinished(self) -> bool:
        """Returns whether a request waits or runs."""
        return bool(self._queue or self._running)

    @property
    def num_running(self) -> int:
        """Returns how many requests run."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Returns how many requests wait."""
        return len(self._queue)

    def add(self, group: SequenceGroup) -> None:
        """Adds a request to the queue.

        Raises:
            CapacityError: The pool can never hold the request.
        """
        request = group.request
        num_slots, width = self._reservation(request), request.num_sequences
        maximum = self.allocator.largest
        if (
            num_slots > maximum
            or width * num_slots > self.allocator.num_slots
            or width > self.max_num_seqs
        ):
            raise CapacityError(
                f"request {request.request_id!r} reserves {width} x {num_slots} slots at once; the pool has"
                f" {self.allocator.num_slots}, at most {maximum} in a row, and a step {self.max_num_seqs} sequences"
            )
        self._queue.append(group)

    def plan(self) -> StepPlan | None:
        """Returns the next step; None if nothing can run."""
        self._admit()
        rows: list[Row] = []
        samples: list[Sample] = []
        for held in self._running.values():
            self._plan(held.group, rows, samples)
        if not rows:
            return None
        self._num_steps += 1
        return StepPlan(self._num_steps, tuple(rows), tuple(samples))

    def _admit(self) -> None:
        """Admits requests that have room, from the head of the queue."""
        num_tokens = sum(len(held.chunks) for held in self._running.values())
        num_seqs = num_tokens
        while self._queue:
            request = self._queue[0].request
            num_seqs += request.num_sequences
            num_tokens += len(request.prompt_token_ids)
            if (
                num_seqs > self.max_num_seqs
                or num_tokens > self.max_num_batched_tokens
                or not self._reserve()
            ):
                return

    def _reserve(self) -> bool:
        """Admits the first request of the queue, if there is a chunk for each of its sequences."""
        group = self._queue[0]
        num_slots = self._reservation(group.request)
        chunks: list[int] = []
        for _ in range(group.request.num_sequences):
            chunk = self.allocator.allocate(num_slots)
            if chunk is None:
                for taken in chunks:
                    self.allocator.free(taken)
                return False
            chunks.append(chunk)
        self._queue.popleft()
        self._running[group.request.request_id] = _Held(group, num_slots, chunks)
        for sequence in group.sequences:
            self._sequences[sequence.sequence_id] = group, sequence
        return True

    def _plan(self, group: SequenceGroup, rows: list[Row], samples: list[Sample]) -> None:
        """Adds the tokens of a group that are not computed, and a draw after them per sequence."""
        for sequence in group.unfinished:
            num_pending = sequence.num_pending_tokens
            sample = sample_of(len(rows), num_pending, sequence, group.request)
            if group.child_ids:
                children = enumerate(group.pending_forks, start=1)
                samples += [
                    sample._replace(sequence_id=child, sample_index=index)
                    for index, child in children
                ]
            samples.append(sample)
            start = sequence.num_computed_tokens
            rows.append(Row(sequence.sequence_id, start, tuple(sequence.token_ids[start:]), ()))

    def commit(self, plan: StepPlan, edits: Iterable[Edit]) -> list[SequenceGroup]:
        """Applies the edits of a step, and returns the groups whose answers have something new."""
        for row in plan.rows:
            _, sequence = self._sequences[row.sequence_id]
            sequence.num_computed_tokens = row.context_length
        touched: dict[str, SequenceGroup] = {}
        for edit in edits:
            group = apply_edit(edit, self._sequences, _NoBlocks())  # type: ignore[arg-type]
            assert group is not None
            touched[group.request.request_id] = group
        return self._leaving(list(touched.values()))

    def _leaving(self, touched: list[SequenceGroup]) -> list[SequenceGroup]:
        """Releases the finished groups, and returns the groups that have something new."""
        for group in touched:
            if group.finished:
                self._release(group)
        return touched

    def _release(self, group: SequenceGroup) -> None:
        for chunk in self._running.pop(group.request.request_id).chunks:
            self.allocator.free(chunk)
        for sequence in group.sequences:
            del self._sequences[sequence.sequence_id]

    def memory(self, rows: Sequence[Row]) -> MemorySplit:
        """Splits the slots as the paper's figure 2 does.

        Reserved slots will be used. Internal fragmentation is slots that were asked for and will
        never be used. The rest is what the allocator's powers of two add, and the free slots.
        """
        context = {row.sequence_id: row.context_length for row in rows}
        num_tokens = num_needed = num_requested = 0
        for held in self._running.values():
            maximum = held.group.request.max_total_tokens
            num_tokens += sum(
                min(context.get(s.sequence_id, s.num_computed_tokens), maximum)
                for s in held.group.sequences
            )
            num_needed += held.num_needed
            num_requested += held.num_slots * len(held.chunks)
        num_free = self.allocator.num_slots - num_requested
        return MemorySplit(
            num_tokens, num_needed - num_tokens, num_requested - num_needed, num_free, 0, 0, 0
        )
