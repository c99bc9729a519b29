"""Drives a scheduler through a trace on a virtual clock.

The scheduler is the engine's own or one to compare it with.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from jaxpage.simulation.accounting import Run, Served, State, TimeAverage
from jaxpage.simulation.beams import Ancestry
from jaxpage.simulation.costs import CostModel
from jaxpage.simulation.policies import Policy
from jaxpage.simulation.scripts import ScriptedRequests
from jaxpage.simulation.traces import Arrival
from jaxpage.step.plan import Row, StepPlan
from jaxpage.step.request import SequenceGroup


class Simulator:
    """Runs one trace once.

    A request is added when the clock reaches its arrival; a step takes as long as the cost model
    says.
    """

    def __init__(
        self,
        arrivals: Iterable[Arrival],
        scheduler: Policy,
        cost: CostModel,
        *,
        average: TimeAverage | None = None,
        sample_every: int = 1,
        ancestries: Mapping[int, Sequence[Ancestry]] | None = None,
    ) -> None:
        """Prepares a run.

        Args:
            arrivals: The requests of the trace, in any order.
            scheduler: The scheduler that is driven.
            cost: The cost model of the machine.
            average: The window over which the memory is averaged; the whole run by default.
            sample_every: The steps from one look at the memory to the next. A look walks all block
                tables.
            ancestries: The ancestries of beam searches; see `ScriptedRequests`.
        """
        self.scheduler = scheduler
        self.cost = cost
        self.result = Run(average or TimeAverage())
        self._sample_every = sample_every
        self._arrivals = deque(sorted(arrivals, key=lambda arrival: arrival.seconds))
        self._requests = ScriptedRequests(ancestries)
        self._arrival_of: dict[str, Arrival] = {}  # unfinished requests by id
        self._first_token: dict[str, float] = {}  # virtual seconds by request id

    def run(self, until: float = math.inf) -> Run:
        """Steps until every request of the trace has finished, or the clock has reached `until`.

        Raises:
            CapacityError: A request could never run.
        """
        while (self._arrivals or self.scheduler.has_unfinished) and self.result.seconds < until:
            self._let_in()
            plan = self.scheduler.plan()
            if plan is not None:
                self._step(plan)
            else:
                # Nothing runs until the next request arrives.
                self._pass(self._arrivals[0].seconds, ())
        self.result.unfinished = [*self._arrival_of.values()]
        return self.result

    def _let_in(self) -> None:
        while self._arrivals and self._arrivals[0].seconds <= self.result.seconds:
            arrival = self._arrivals.popleft()
            group = self._requests.new_group(arrival)
            self.scheduler.add(group)
            self._arrival_of[group.request.request_id] = arrival

    def _step(self, plan: StepPlan) -> None:
        result = self.result
        swapping = self.cost.swap_seconds(
            len(plan.swap_out) + len(plan.swap_in), self.scheduler.block_size
        )
        seconds = self.cost.compute_seconds(plan) + swapping
        result.num_steps += 1
        result.max_step_seconds = max(result.max_step_seconds, seconds)
        result.num_preemptions += len(plan.preempted)
        result.num_swapped_out += len(plan.swap_out)
        result.num_swapped_in += len(plan.swap_in)
        result.swap_seconds += swapping
        self._pass(result.seconds + seconds, plan.rows)
        for group in self.scheduler.commit(plan, self._requests.edits(plan)):
            self._note(group)

    def _pass(self, until: float, rows: tuple[Row, ...]) -> None:
        """Moves the clock over a step with these rows, or over a pause if there are none."""
        begin = self.result.seconds
        self.result.seconds = until
        if self.result.num_steps % self._sample_every == 0 and self.result.average.holds(
            begin, until
        ):
            self.result.average.add(self._state(rows), begin, until)

    def _state(self, rows: tuple[Row, ...]) -> State:
        return State.of(
            self.scheduler.memory(rows), self.scheduler.num_running, self.scheduler.num_waiting
        )

    def _note(self, group: SequenceGroup) -> None:
        request_id = group.request.request_id
        now = self.result.seconds
        first_token = self._first_token.setdefault(request_id, now)
        if group.finished:
            self.result.served[request_id] = Served(
                arrival=self._arrival_of.pop(request_id),
                first_token=first_token,
                finished=now,
                num_preemptions=group.num_preemptions,
                num_output_tokens=tuple(sequence.num_output_tokens for sequence in group.sequences),
            )
