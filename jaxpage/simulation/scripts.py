"""Requests with dummy tokens that end at a length known beforehand: what stands in for the model and its users."""

from __future__ import annotations

import itertools

from jaxpage.settings.sampling_params import SamplingParams
from jaxpage.simulation.traces import Arrival
from jaxpage.step.edits import Append, Edit, Finish, Fork
from jaxpage.step.plan import StepPlan
from jaxpage.step.request import Request, Sequence, SequenceGroup


class ScriptedRequests:
    """Makes the groups of a trace and answers their draws. Every token of a request is its ordinal, so that no two share a prefix."""

    def __init__(self) -> None:
        self._sequence_ids = itertools.count()
        self._num_requests = 0
        self._script_of: dict[int, tuple[int, Arrival]] = {}  # by sequence id: the ordinal of its request

    def new_group(self, arrival: Arrival) -> SequenceGroup:
        """The group of a request, whose id is its ordinal."""
        ordinal, num_prompt_tokens = self._num_requests, arrival.num_prompt_tokens
        self._num_requests += 1
        request = Request(
            request_id=str(ordinal),
            prompt=None,
            prompt_token_ids=(ordinal,) * num_prompt_tokens,
            params=SamplingParams(n=arrival.num_samples, max_tokens=arrival.num_output_tokens, ignore_eos=True),
            seed=ordinal,
            eos_token_ids=frozenset(),
            max_total_tokens=num_prompt_tokens + arrival.num_output_tokens,
        )
        sequence = Sequence(self._new_sequence(ordinal, arrival), 0, num_prompt_tokens, [ordinal] * num_prompt_tokens)
        return SequenceGroup(request, [sequence])

    def _new_sequence(self, ordinal: int, arrival: Arrival) -> int:
        sequence_id = next(self._sequence_ids)
        self._script_of[sequence_id] = ordinal, arrival
        return sequence_id

    def edits(self, plan: StepPlan) -> list[Edit]:
        """A token for every draw that no wrong draft precedes; the other samples of a request at its first; an end where the script
        has it. Drafts are chains."""
        edits: list[Edit] = []
        for sample in plan.samples:
            ordinal, arrival = self._script_of[sample.sequence_id]
            row = plan.rows[sample.row]
            drafts = row.token_ids[1:] if row.parents else ()
            if any(draft != ordinal for draft in drafts[: sample.offset]):
                continue
            is_drafted = drafts[sample.offset : sample.offset + 1] == (ordinal,)
            sequence_ids = [sample.sequence_id]
            if sample.position == arrival.num_prompt_tokens:
                for sample_index in range(1, arrival.num_samples):
                    sequence_ids.append(self._new_sequence(ordinal, arrival))
                    edits.append(Fork(sample.sequence_id, sequence_ids[-1], sample_index))
            is_last = sample.position + 1 == arrival.num_prompt_tokens + arrival.num_output_tokens
            for sequence_id in sequence_ids:
                edits.append(Append(sequence_id, ordinal, drafted=is_drafted))
                if is_last:
                    edits.append(Finish(sequence_id, "length"))
                    del self._script_of[sequence_id]
        return edits
