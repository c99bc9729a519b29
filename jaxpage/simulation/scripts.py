"""Makes requests of dummy tokens whose lengths are known beforehand.

They take the place of the model and of its users.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jaxpage.settings.sampling_params import BeamSearchParams, SamplingParams
from jaxpage.simulation.beams import Ancestry, ScriptedBeams
from jaxpage.simulation.traces import Arrival
from jaxpage.step.edits import Append, Edit, Finish, Fork
from jaxpage.step.plan import StepPlan
from jaxpage.step.request import Request, SequenceGroup
from jaxpage.step.request import Sequence as TokenSequence

PREFIX_TOKEN = (1 << 31) - 1  # fills the prefix that requests share


class ScriptedRequests:
    """Makes the groups of a trace and answers their draws.

    Every token of a request is the request's ordinal, so that two requests share no prefix but the
    one that they are said to share.
    """

    def __init__(self, ancestries: Mapping[int, Sequence[Ancestry]] | None = None) -> None:
        """Begins without requests.

        Args:
            ancestries: The beams that went on in real searches, by number of beams. The searches of
                a trace follow them in turn.
        """
        self._ancestries = ancestries or {}
        self._num_sequences = 0
        self._num_requests = 0
        # The key is a sequence id; the value has the ordinal of its request.
        self._script_of: dict[int, tuple[int, Arrival]] = {}
        self._beams: dict[int, ScriptedBeams] = {}  # the key is the ordinal of a request

    def new_group(self, arrival: Arrival) -> SequenceGroup:
        """Returns the group of a request; the request's id is its ordinal.

        Sequence ids are given as the engine gives them.
        """
        ordinal = self._num_requests
        num_prompt_tokens = arrival.num_prompt_tokens
        self._num_requests += 1
        tokens = [PREFIX_TOKEN] * arrival.num_prefix_tokens
        # No other request has this token, so only the common prefix is found in the cache.
        tokens += [ordinal] * (num_prompt_tokens - arrival.num_prefix_tokens)
        width = arrival.num_samples
        length = arrival.num_output_tokens
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
        """Returns the edits that a step's draws lead to.

        Every draw appends a token, unless a wrong draft comes before it. The first draw of a
        request also forks its other samples, and a sequence that is as long as its script says is
        finished. Drafts are chains here, not trees.
        """
        edits: list[Edit] = []
        for sample in plan.samples:
            sequence_id = sample.sequence_id
            ordinal, arrival = self._script_of[sequence_id]
            row = plan.rows[sample.row]
            is_last = sample.position + 1 == arrival.num_prompt_tokens + arrival.num_output_tokens
            if arrival.is_beam_search:
                edits += self._beams[ordinal].advance(ordinal, is_last=is_last)
                continue
            drafts = row.token_ids[1:] if row.parents else ()
            if any(draft != ordinal for draft in drafts[: sample.offset]):
                continue
            # A slice, because after the last draft comes nothing.
            is_drafted = drafts[sample.offset : sample.offset + 1] == (ordinal,)
            if sequence_id != row.sequence_id:
                edits.append(Fork(row.sequence_id, sequence_id, sample.sample_index))
            edits.append(Append(sequence_id, ordinal, drafted=is_drafted))
            if is_last:
                edits.append(Finish(sequence_id, "length"))
                del self._script_of[sequence_id]
        return edits
