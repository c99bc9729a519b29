"""Makes a record of each event of an engine.

A record is a JSON object. The log writes records to a file, and a replay compares them with those
of a file. The scheduler is a function of its events, so a replay needs nothing else.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import zip_longest
from typing import Any

import numpy as np

from jaxpage.replay.log_aborted import describe_continued
from jaxpage.settings.sampling_params import BeamSearchParams, SamplingParams
from jaxpage.step.draft import Draft, chain
from jaxpage.step.edits import Append, Drop, Edit, Finish, Fork, Score
from jaxpage.step.embedded import EmbeddedPrompt
from jaxpage.step.events import Events
from jaxpage.step.plan import Row, StepPlan, StepResult
from jaxpage.step.report import StepReport
from jaxpage.step.request import SequenceGroup
from jaxpage.step.update import WeightsUpdate

Record = dict[str, Any]

_NEUTRAL = SamplingParams()
_NEUTRAL_BEAM = BeamSearchParams(1)


class Recorder(Events):
    """Turns events into records.

    Empty fields are left out. Of a block table a record has only what changed since the sequence's
    last row.
    """

    def __init__(self, sink: Callable[[Record], None]) -> None:
        self._sink = sink
        self._step = 0  # the last planned step
        # The last recorded block tables, by sequence id.
        self._tables: dict[int, tuple[tuple[int, ...], ...]] = {}

    def arrived(self, group: SequenceGroup) -> None:
        """Records a request and all its parameters."""
        request = group.request
        self._record(
            "arrival",
            request_id=request.request_id,
            sequences=group.sequence_ids,
            prompt_token_ids=list(request.prompt_token_ids),
            **(
                {"beam": _find_changed_beam(request.beam)}
                if request.beam
                else {"params": _find_changed_params(request.params)}
            ),
            seed=request.seed,
            eos_token_ids=sorted(request.eos_token_ids),
            max_total_tokens=request.max_total_tokens,
            **(
                {"bad_word_token_ids": request.bad_word_token_ids}
                if request.bad_word_token_ids
                else {}
            ),
            **({"embedded": _spans(request.embedded)} if request.embedded else {}),
            **describe_continued(group),
            **self._beside_arrival(group),
        )

    def aborted(self, group: SequenceGroup) -> None:
        """Records that a request was ended from outside."""
        self._record("abort", request_id=group.request.request_id)
        self._forget(sequence.sequence_id for sequence in group.sequences)

    def pinned(self, group: SequenceGroup, pin_id: int) -> None:
        """Records that a request was ended and its prompt pinned."""
        self._record("pin", request_id=group.request.request_id, pin_id=pin_id)
        self._forget(sequence.sequence_id for sequence in group.sequences)

    def unpinned(self, pin_id: int) -> None:
        """Records that a pin was given up."""
        self._record("unpin", pin_id=pin_id)

    def planned(self, plan: StepPlan) -> None:
        """Records the rows, drafts, blocks and moves of a step."""
        self._step = plan.step_id
        draws = [sample.row for sample in plan.samples]
        drafts = [_drafts(row) for row in plan.rows if row.parents]
        fields = {
            "rows": [[row.sequence_id, row.start, len(row.token_ids)] for row in plan.rows],
            "drafts": drafts,
            **self._table_changes(plan),
            **{
                name: [list(pair) for pair in getattr(plan, name)]
                for name in ("swap_out", "swap_in", "copies")
            },
            "preempted": list(plan.preempted),
        }
        present: Record = {name: value for name, value in fields.items() if value}
        if draws != usual_draws(present):
            present["draws"] = draws
        self._record("plan", **present, **self._beside_plan(plan))

    def stepped(self, report: StepReport) -> None:
        """Records the tokens of a step, and the edits that they do not imply."""
        plan = report.plan
        result = report.result
        edits = report.edits
        fields = {
            "logprobs": _logprobs(plan, result),
            "scores": [_scores(edit) for edit in edits if isinstance(edit, Score)],
            "edits": _describe(plan, result, edits),
            "paths": _paths(plan, result),
        }
        present = {name: value for name, value in fields.items() if value}
        self._record("result", tokens=result.token_ids.tolist(), **present)
        self._forget(edit.sequence_id for edit in edits if isinstance(edit, Finish | Drop))

    def failed(self, plan: StepPlan, error: Exception) -> None:
        """Records that a step failed."""
        self._record("failure", error=f"{type(error).__name__}: {error}")
        self._tables.clear()

    def pages_rebuilt(self) -> None:
        """Records that the pages were made anew."""
        self._record("rebuild")

    def weights_replaced(self, update: WeightsUpdate) -> None:
        """Records that the model has other weights; what they are is not in a record."""
        present = {name: value for name, value in update._asdict().items() if value}
        self._record("update", **present)

    def prefix_cache_reset(self) -> None:
        """Records that the prefix cache was emptied."""
        self._record("reset")

    def closed(self) -> None:
        """Records the end of the engine."""
        self._record("end")

    def _beside_arrival(self, group: SequenceGroup) -> Record:
        """Returns further fields of an arrival, which a log does not have."""
        return {}

    def _beside_plan(self, plan: StepPlan) -> Record:
        """Returns further fields of a plan, which a log does not have."""
        return {}

    def _record(self, event: str, **fields: Any) -> None:
        self._sink({"event": event, "step": self._step, **fields})

    def _table_changes(self, plan: StepPlan) -> Record:
        """Returns what changed in block tables since the last row of their sequences.

        The format of the log has the first cache group in `tables`. The others are in
        `further_tables`, where a change begins with the number of the group.
        """
        tables: list[list[Any]] = []
        further: list[list[Any]] = []
        for row in plan.rows:
            known = self._tables.get(row.sequence_id) or ((),) * len(row.block_tables)
            for group, (before, table) in enumerate(zip(known, row.block_tables, strict=True)):
                # A table is one tuple until it changes (`Table.frozen`), so no blocks are compared
                # here.
                if table is not before:
                    change = [row.sequence_id, len(table), *_find_changed_runs(before, table)]
                    if group:
                        further.append([group, *change])
                    else:
                        tables.append(change)
            self._tables[row.sequence_id] = row.block_tables
        return {"tables": tables, "further_tables": further}

    def _forget(self, sequence_ids: Iterable[int]) -> None:
        for sequence_id in sequence_ids:
            self._tables.pop(sequence_id, None)


def _find_changed_runs(before: tuple[int, ...], table: tuple[int, ...]) -> list[list[int]]:
    """Returns the changes of a block table as runs [first position, block, block, ...].

    From [3, 9, 4] to [3, 7, 8, 5] the only run is [1, 7, 8, 5]. Blocks that were cut off show only
    in the length of the table.
    """
    runs: list[list[int]] = []
    stop = -1  # the position after the last run
    for position, (old, block) in enumerate(zip_longest(before, table)):
        if block is None or block == old:
            continue
        if position != stop:
            runs.append([position])
        runs[-1].append(block)
        stop = position + 1
    return runs


def _spans(embedded: EmbeddedPrompt) -> list[list[Any]]:
    """Returns which tokens vectors take the place of; what they are is not in a record."""
    return [
        [span.start, span.length, span.key.hex(), span.offset, span.is_whole]
        for span in embedded.spans
    ]


def _find_changed_params(params: SamplingParams) -> Record:
    """Returns the parameters that differ from their defaults.

    The seed is not among them; it is a field of its own.
    """
    fields = (field.name for field in dataclasses.fields(params) if field.name != "seed")
    return {
        name: getattr(params, name)
        for name in fields
        if getattr(params, name) != getattr(_NEUTRAL, name)
    }


def _find_changed_beam(beam: BeamSearchParams) -> Record:
    """Returns the beam width, and the parameters that differ from their defaults."""
    fields = (field.name for field in dataclasses.fields(beam))
    parameters = {
        name: getattr(beam, name)
        for name in fields
        if getattr(beam, name) != getattr(_NEUTRAL_BEAM, name)
    }
    return {"beam_width": beam.beam_width, **parameters}


def _logprobs(plan: StepPlan, result: StepResult) -> list[list[Any]]:
    """Returns [draw, rank, ids, bits] for each draw that asks for log probabilities.

    The ids are those of the drawn token and of the most likely ones. The bits are their log
    probabilities, as the bits of float32.
    """
    return [
        [
            draw,
            int(result.ranks[draw]),
            [int(result.token_ids[draw]), *result.top_token_ids[draw, :num_top].tolist()],
            np.append(result.logprobs[draw], result.top_logprobs[draw, :num_top])
            .view(np.int32)
            .tolist(),
        ]
        for draw, sample in enumerate(plan.samples)
        if (num_top := sample.num_logprobs) is not None
    ]


def _scores(edit: Score) -> list[Any]:
    """Returns [sequence, position, [rank, ids, bits], ...] for scored tokens of a prompt.

    The position is that of the first one. For ids and bits see `_logprobs`.
    """
    tokens = [
        [
            token.rank,
            [token.token_id, *token.top_token_ids],
            np.array((token.logprob, *token.top_logprobs), np.float32).view(np.int32).tolist(),
        ]
        for token in edit.logprobs
    ]
    return [edit.sequence_id, edit.position, *tokens]


def usual_draws(plan: Record) -> list[int]:
    """Returns the rows that a recorded plan draws from unless it says otherwise.

    Each row draws once; with drafts in the plan, each draws once for each of its tokens.
    """
    if "drafts" not in plan:
        return list(range(len(plan["rows"])))
    return [
        index for index, (_, _, num_tokens) in enumerate(plan["rows"]) for _ in range(num_tokens)
    ]


def _drafts(row: Row) -> list[Any]:
    """Returns [sequence, token ids, parents, distributions] of a row's drafts.

    A parent is the index of a draft, or -1 for the last known token. Distributions are the ids and
    float32 bits that each draft was drawn from; only drafts that were drawn at random have them. A
    chain without distributions has no parents either.
    """
    draft = Draft(row.token_ids[-len(row.parents) :], tuple(parent - 1 for parent in row.parents))
    record = [row.sequence_id, list(draft.token_ids)]
    if row.q is not None:
        return [*record, list(draft.parents), row.q.as_lists()]
    return record if draft == chain(draft.token_ids) else [*record, list(draft.parents)]


def _paths(plan: StepPlan, result: StepResult) -> list[list[int]]:
    """Returns the places of each row's right drafts; nothing for steps without drafts."""
    if result.paths is None:
        return []
    paths = []
    first = 0  # the place of the row's first token in the stream
    for row, path in zip(plan.rows, result.paths.tolist(), strict=True):
        # A path begins with the known token, which is no draft, and ends with -1.
        paths.append([place - first for place in path if place > first])
        first += len(row.token_ids)
    return paths


def _describe(plan: StepPlan, result: StepResult, edits: list[Edit]) -> list[list[Any]]:
    """Returns the edits that are more than a new token.

    If a sequence ends before its last drawn token, its end has the number of tokens before it.
    """
    if result.paths is None:
        num_draws = {}
    else:
        counts = (result.paths >= 0).sum(axis=1).tolist()
        num_draws = {
            row.sequence_id: count
            for row, count in zip(plan.rows, counts, strict=True)
            if count > 1
        }
    num_tokens = (
        Counter(edit.sequence_id for edit in edits if type(edit) is Append)
        if num_draws
        else Counter()
    )
    described: list[list[Any]] = []
    for edit in edits:
        match edit:
            case Finish():
                sequence_id = edit.sequence_id
                cut = num_tokens[sequence_id] < num_draws.get(sequence_id, 0)
                at = [num_tokens[sequence_id]] if cut else []
                described.append(["finish", sequence_id, edit.reason, edit.stop_reason, *at])
            case Fork():
                described.append(["fork", edit.parent_id, edit.child_id, edit.sample_index])
            case Drop():
                described.append(["drop", edit.sequence_id])
    return described
