"""Requests with dummy tokens that end at a length known beforehand: what stands in for the model and its users."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jaxpage.settings.sampling_params import BeamSearchParams, SamplingParams
from jaxpage.simulation.beams import Ancestry, ScriptedBeams
from jaxpage.simulation.traces import Arrival
from jaxpage.step.edits import Append, Edit, Finish, Fork
from jaxpage.step.plan import StepPlan
from jaxpage.step.request import Request, SequenceGroup
from jaxpage.step.request import Sequence as TokenSequence

PREFIX_TOKEN = (1 << 31) - 1  # every token of the prefix that requests have in common


class ScriptedRequests:
    """Makes the groups of a trace and answers their draws. Every token of a request is its ordinal, so that no two share a prefix but
    the one that they are said to share."""

    def __init__(self, ancestries: Mapping[int, Sequence[Ancestry]] | None = None) -> None:
        """ancestries: by the number of beams, which beams went on in real searches; searches of a trace follow them in turn."""
        self._ancestries = ancestries or {}
        self._num_sequences = 0
        self._num_requests = 0
        # by sequence id: the ordinal of its request
        self._script_of: dict[int, tuple[int, Arrival]] = {}
        self._beams: dict[int, ScriptedBeams] = {}  # by ordinal

    def new_group(self, arrival: Arrival) -> SequenceGroup:
        """The group of a request, whose id is its ordinal. Sequence ids are given as the engine gives them."""
        ordinal, num_prompt_tokens = self._num_requests, arrival.num_prompt_tokens
        self._num_requests += 1
        tokens = [PREFIX_TOKEN] * arrival.num_prefix_tokens
        tokens += [ordinal] * (num_prompt_tokens - arrival.num_prefix_tokens)
        width, length = arrival.num_samples, arrival.num_output_tokens
        request = Request(
            request_id=str(ordinal),
            prompt=None,
            prompt_token_ids=tuple(tokens),
            params=SamplingParams(
                n=1 if arrival.is_beam_search else width, max_tokens=length, ignore_eos=True
            ),
            seed=ordinal,
            eos_token_ids=frozenset(),
            max_total_tokens=num_prompt_tokens + length,
            beam=BeamSearchParams(width, max_tokens=length, ignore_eos=True)
            if arrival.is_beam_search
            else None,
        )
        first = self._num_sequences
        sequence_ids = range(first, first + request.num_sequence_ids)
        self._num_sequences = sequence_ids.stop
        self._script_of.update(dict.fromkeys(sequence_ids, (ordinal, arrival)))
        group = SequenceGroup(request, [TokenSequence(first, 0, num_prompt_tokens, tokens)])
        if arrival.is_beam_search:
            group.reserved_ids = tuple(sequence_ids)
            ancestries = self._ancestries[width]
            self._beams[ordinal] = ScriptedBeams(
                sequence_ids, ancestries[ordinal % len(ancestries)]
            )
        else:
            group.child_ids = tuple(sequence_ids[1:])
        return group

    def edits(self, plan: StepPlan) -> list[Edit]:
        """A token for every draw that no wrong draft precedes; the other samples of a request at its first; an end where the script
        has it. Drafts are chains."""
        edits: list[Edit] = []
        for sample in plan.samples:
            sequence_id = sample.sequence_id
            ordinal, arrival = self._script_of[sequence_id]
            row = plan.rows[sample.row]
            is_last = sample.position + 1 == arrival.num_prompt_tokens + arrival.num_output_tokens
            if arrival.is_beam_search:
                edits += self._beams[ordinal].drawn(ordinal, is_last=is_last)
                continue
            drafts = row.token_ids[1:] if row.parents else ()
            if any(draft != ordinal for draft in drafts[: sample.offset]):
                continue
            is_drafted = drafts[sample.offset : sample.offset + 1] == (ordinal,)
            if sequence_id != row.sequence_id:
                edits.append(Fork(row.sequence_id, sequence_id, sample.sample_index))
            edits.append(Append(sequence_id, ordinal, drafted=is_drafted))
            if is_last:
                edits.append(Finish(sequence_id, "length"))
                del self._script_of[sequence_id]
        return edits
