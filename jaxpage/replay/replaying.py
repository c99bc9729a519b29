"""Runs a logged schedule again, with an equal engine, and compares all that comes of it.

Arrivals, aborts, resets and the starts of steps are taken from the log; everything else must follow
by itself. The engine has a recorder, as for a log, but each record is compared with the logged one
and not written.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Protocol

from tqdm import tqdm

from jaxpage.assembly import Hooks, build_engine
from jaxpage.decoding import BeamStrategy, Grammar, SamplingStrategy
from jaxpage.engine import Engine, EngineParts, NamedAdapter, NoText
from jaxpage.errors import JaxpageError
from jaxpage.replay.differences import Differs, StepAbandoned, differ, without_text
from jaxpage.replay.event_log import LogReader, encode_record, is_after
from jaxpage.replay.log_aborted import read_continued
from jaxpage.replay.log_header import (
    check_replayable,
    compare_engines,
    engine_header,
    explain_difference,
    read_header,
    read_logged_config,
)
from jaxpage.replay.log_vectors import directory_of_log, read_embedded
from jaxpage.replay.log_weights import Update, WeightsOfUpdates
from jaxpage.replay.recorder import Record, Recorder
from jaxpage.settings.argument_checks import show
from jaxpage.settings.sampling_params import BeamSearchParams, SamplingParams
from jaxpage.speculation import NoSpeculation
from jaxpage.step.draft import PLACEHOLDER, Candidates, Draft, Drafts, chain
from jaxpage.step.edits import Edit, Finish
from jaxpage.step.embedded import EmbeddedPrompt
from jaxpage.step.plan import StepPlan
from jaxpage.step.request import SequenceGroup
from jaxpage.step.strategy import Draw, Strategy

# The parameters that a replay needs the tokenizer for.
_NEED_TEXT = ("structured_outputs", "thinking_token_budget")


@dataclass(frozen=True)
class Report:
    """Holds the result of a replay.

    Attributes:
        num_steps: The number of steps that were the same.
        num_tokens: The number of tokens that were the same.
        difference: The first difference; None if there is none.
        ending: The way in which the log ends; None if it ends by a shutdown, a difference, or
            `until`.
    """

    num_steps: int
    num_tokens: int
    difference: str | None
    ending: str | None


class Viewer(Protocol):
    """Looks on while a log is replayed."""

    def follow(self, record: Record) -> None:
        """Takes a record of the log that the engine has made again."""

    def observe(self, engine: Engine) -> None:
        """Looks at the engine: before the first record, after each step, and at the end."""


def replay(
    path: str | os.PathLike[str],
    *,
    model: str | None = None,
    force: bool = False,
    progress: bool = True,
    until: int | None = None,
    viewer: Viewer | None = None,
    weights: Sequence[str | os.PathLike[str]] = (),
) -> Report:
    """Builds the engine of a log and runs the log through it.

    Args:
        path: The path of the log.
        model: The path of the model, if it is not where the log says.
        force: True goes on with other weights, settings or shapes than those of the log.
        progress: True shows a bar on standard error.
        until: The last step to run; None for all.
        viewer: Looks on; None for nobody.
        weights: Directories with the weights of updates that are not kept next to the log.

    Raises:
        EventLogError: The log is damaged or incomplete, the engine differs from that of the log, or
            the weights of an update are not found.
        ModelNotFoundError: There is no such model.
        CheckpointError: The model's files cannot be used.
        CapacityError: The memory is too small.
    """
    updates = WeightsOfUpdates(path, [Path(directory) for directory in weights])
    num_plans, is_constrained = _survey(path, updates, until)
    with LogReader(path) as log:
        logged = read_header(log)
        if incident := logged.get("incident"):
            check_replayable(log, incident)
        config = read_logged_config(log, logged, model, keeps_tokenizer=is_constrained)
        follower = Replay(log, viewer)
        built = build_engine(config, Hooks(progress=progress, parts=follower.parts))
        try:
            # As a log has it, where tuples are lists.
            ours = json.loads(encode_record(engine_header(config, built.engine, built.spec)))
            compare_engines(logged, ours, force=force)
            log.take()
            with tqdm(
                total=num_plans, desc="Replaying", unit="step", disable=None if progress else True
            ) as bar:
                follower.weights_of = partial(updates.load, built)
                report = follower.run(built.engine, bar, until=until)
            difference = explain_difference(report.difference, logged, ours)
            return replace(report, difference=difference)
        finally:
            built.engine.close()


class Replay:
    """Runs the records of a log through a new engine, which is made with `parts`.

    Attributes:
        weights_of: Returns the arguments of `Engine.replace_weights` from the record of an update.
    """

    weights_of: Callable[[Record], Update]
    _engine: Engine
    _bar: tqdm[Any] | None

    def __init__(self, log: LogReader, viewer: Viewer | None = None) -> None:
        self._log = log
        self._viewer = viewer
        self._plan: Record = {}  # the last plan
        self._ends: dict[int, _End] = {}  # the ends that text decided in this step, by sequence id
        self._drafts = LoggedDrafts()
        self._num_steps = self._num_tokens = 0

    @property
    def parts(self) -> EngineParts:
        """Returns the parts of the engine that take their decisions from the log."""
        return EngineParts(
            speculator=self._drafts,
            new_strategy=self._strategy,
            events=Recorder(self._compare),
        )

    def run(
        self, engine: Engine, bar: tqdm[Any] | None = None, *, until: int | None = None
    ) -> Report:
        """Runs the log from its first event to its end or to the first difference.

        Args:
            engine: The engine, which has the replay's `parts`.
            bar: The progress bar.
            until: The last step to run; None for all.

        Raises:
            EventLogError: A record is not valid.
        """
        self._engine = engine
        self._bar = bar
        self._observe()
        difference: str | None = None
        ending: str | None = "The log ends without a shutdown"
        try:
            while (record := self._log.next) is not None:
                if is_after(record, until):
                    ending = None
                    break
                self._follow(record)
                # `_compare` takes a record when the engine has made the same one.
                if record is self._log.next:
                    self._differ(record, None)
                if record["event"] == "end":
                    ending = None
        except Differs as differs:
            difference = str(differs)
            ending = None
        except _EndsInside as step:
            ending = f"The log ends in the middle of step {step}"
        if difference is None:
            self._observe()
        if self._log.torn:
            ending = f"{ending or 'The log ends'}; its last line is cut off"
        return Report(self._num_steps, self._num_tokens, difference, ending)

    def _follow(self, record: Record) -> None:
        """Does to the engine what the record says; the engine's own records go to `_compare`."""
        match record["event"]:
            case "arrival":
                self._add(record)
            case "abort":
                self._engine.abort(str(record.get("request_id")))
            case "pin":
                self._pin(record)
            case "unpin":
                if type(pin_id := record.get("pin_id")) is not int:
                    self._log.refuse(f"pin_id must be a number, got {show(pin_id)}")
                self._engine.unpin(pin_id)
            case "plan":
                self._drafts.next = self._drafts_of(record)
                with suppress(_Interrupted):
                    self._engine.step()
                    self._observe()
            case "rebuild":  # the logged step was interrupted; a failed step rebuilds by itself
                self._engine.rebuild_pages()
            case "reset":
                self._engine.reset_prefix_cache()
            case "update":
                self._update(record)
            case "end":
                self._engine.report_end()
            case event:
                self._log.refuse(
                    f"the log has no cause for this {event} of step {record.get('step')}"
                )

    def _observe(self) -> None:
        if self._viewer is not None:
            self._viewer.observe(self._engine)

    def _add(self, record: Record) -> None:
        try:
            embedded = read_embedded(record, directory_of_log(self._log.path))
            add_arrival(self._engine, without_text(record), embedded=embedded)
        except (AttributeError, LookupError, TypeError, ValueError, JaxpageError) as error:
            self._log.refuse(f"this arrival cannot be replayed: {type(error).__name__}: {error}")

    def _drafts_of(self, plan: Record) -> dict[int, Draft]:
        """Returns the drafts of the logged step; the scheduler plans the same ones."""
        try:
            return drafts_of(self._engine, plan)
        except (OverflowError, TypeError, ValueError) as error:
            self._log.refuse(f"these drafts are none: {error}")

    def _strategy(self, group: SequenceGroup, grammar: Grammar | None) -> Strategy:
        if group.request.beam:
            return _LoggedBeams(group, self._ends)
        return _LoggedEnds(group, grammar, self._ends)

    def _pin(self, record: Record) -> None:
        try:
            self._engine.pin(str(record.get("request_id")))
        except (LookupError, AssertionError, JaxpageError) as error:
            self._log.refuse(f"this pin cannot be replayed: {type(error).__name__}: {error}")

    def _update(self, record: Record) -> None:
        try:
            self._engine.replace_weights(*self.weights_of(record))
        except (RuntimeError, ValueError) as error:
            self._log.refuse(f"this update cannot be replayed: {error}")

    def _compare(self, record: Record) -> None:
        """Compares a record of the engine with the logged one."""
        logged = self._log.next
        replayed = json.loads(encode_record(record))
        if logged is None:
            raise _EndsInside(replayed["step"])
        if without_text(logged) != without_text(replayed):
            self._differ(logged, replayed)
        self._log.take()
        if self._viewer is not None:
            self._viewer.follow(logged)
        if replayed["event"] == "plan":
            self._plan = replayed
            self._foresee()
        elif replayed["event"] == "result":
            self._num_steps += 1
            self._num_tokens += _num_tokens(replayed)
            if self._bar is not None:
                self._bar.update()

    def _foresee(self) -> None:
        """Prepares the rest of the step from the next record of the log, which has its outcome."""
        self._ends.clear()
        match self._log.next:
            case None:
                raise _EndsInside(self._plan["step"])
            case {"event": "result"} as result:
                self._ends.update(_ends_by_text(result))
            case {"event": "failure"} as failure:
                raise LoggedFailure(failure.get("error"))
            case _:
                raise _Interrupted

    def _differ(self, logged: Record, replayed: Record | None) -> NoReturn:
        place = f"First difference: step {logged.get('step')} (line {self._log.line})"
        if replayed is not None and replayed["event"] == logged["event"]:
            logged = without_text(logged)
            replayed = without_text(replayed)
        differ(place, logged, replayed, self._plan)


class LoggedDrafts(NoSpeculation):
    """Proposes the drafts of a log, whichever method made them.

    Attributes:
        next: The drafts of the next step, by sequence id.
        depth: The draft depth of the next step; see `StepPlan.draft_depth`.
    """

    def __init__(self) -> None:
        self.next: dict[int, Draft] = {}
        self.depth: int | None = None

    def step(self, engine: Engine, plan: Record) -> None:
        """Runs a logged step with its drafts; raises the same errors as `drafts_of`."""
        self.next = drafts_of(engine, plan)
        self.depth = plan.get("draft_depth")
        engine.step()

    def propose(self, running: Iterable[SequenceGroup]) -> Drafts:
        """Returns the drafts of the logged step."""
        return Drafts(self.next)

    def draft_depth(self, plan: StepPlan, others_wait: bool) -> int | None:
        """Returns the draft depth of the logged step."""
        return self.depth


class LoggedFailure(Exception):
    """Fails a step that failed in the log."""


class _Interrupted(StepAbandoned):
    """Leaves a step at the place where the logged one was interrupted."""


class _EndsInside(StepAbandoned):
    """Leaves a step that is unfinished in the log."""


class _End(NamedTuple):
    """Holds the logged end of a sequence.

    Attributes:
        finish: The end.
        num_tokens: The number of the step's tokens before it. None means after the last one, or an
            error in place of the only one.
    """

    finish: Finish
    num_tokens: int | None


class _LoggedEnds(SamplingStrategy):
    """Samples as usual, but takes the ends that text decided from the log.

    A replay has no text, so it can find neither a stop string nor an error in detokenizing.
    """

    def __init__(
        self, group: SequenceGroup, grammar: Grammar | None, ends: Mapping[int, _End]
    ) -> None:
        super().__init__(group.request, NoText, grammar)
        self._ends = ends
        self._num_tokens: Counter[int] = Counter()  # the tokens of each sequence in this step

    def advance(self, draws: Sequence[Draw]) -> list[Edit]:
        self._num_tokens.clear()
        return super().advance(draws)

    def _advance(self, draw: Draw) -> list[Edit]:
        append, *ends = super()._advance(draw)
        self._num_tokens[draw.sequence_id] += 1
        if draw.sequence_id not in self._ends:
            return [append, *ends]
        end, num_tokens = self._ends[draw.sequence_id]
        if num_tokens == 0:
            return [end]  # an error replaced all draws
        is_here = (
            not draw.drafted
            if num_tokens is None
            else self._num_tokens[draw.sequence_id] == num_tokens
        )
        if not is_here:
            return [append, *ends]
        if end.reason == "error" and ends != [end]:
            # Either the text's error replaced the only token, or the draw after this one found no
            # token that it may draw.
            return [end] if num_tokens is None else [append, *ends]
        return [append, end]  # if the grammar ended it, `ends` has the same end


class _LoggedBeams(BeamStrategy):
    """Searches as usual, but takes errors from the log; such an error ends all beams."""

    def __init__(self, group: SequenceGroup, ends: Mapping[int, _End]) -> None:
        super().__init__(group.request, group.reserved_ids, NoText)
        self._ends = ends

    def advance(self, draws: Sequence[Draw]) -> list[Edit]:
        ends = [
            self._ends[draw.sequence_id].finish for draw in draws if draw.sequence_id in self._ends
        ]
        return (
            list(ends)
            if ends and all(draw.token_id >= 0 for draw in draws)
            else super().advance(draws)
        )


def add_arrival(
    engine: Engine,
    record: Record,
    lora: NamedAdapter | None = None,
    *,
    embedded: EmbeddedPrompt | None = None,
) -> None:
    """Adds a recorded request to an engine.

    Args:
        engine: The engine.
        record: The arrival.
        lora: The request's adapter, if it has one.
        embedded: The vectors that take the place of tokens, if any do.

    Raises:
        CapacityError: The request can never fit into the pool.
        AttributeError, LookupError, TypeError, ValueError: The record is not valid.
    """
    words = tuple(tuple(word) for word in record.get("bad_word_token_ids", ()))
    checked = engine.check_params(_read_params(record))
    checked = checked._replace(bad_word_token_ids=engine.check_words(words))
    prepared = engine.prepare(None, record["prompt_token_ids"], checked, embedded)
    continued = prepared._replace(lora=lora, aborted=read_continued(record))
    engine.add(record["request_id"], continued)


def _read_params(record: Record) -> SamplingParams | BeamSearchParams:
    """Returns the parameters of a recorded request.

    Raises:
        LookupError, TypeError, ValueError: The record is not valid.
    """
    fields = record["beam" if "beam" in record else "params"]
    values: Any = {
        name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()
    }
    return (
        BeamSearchParams(**values)
        if "beam" in record
        else SamplingParams(**values, seed=record["seed"])
    )


def drafts_of(engine: Engine, plan: Record) -> dict[int, Draft]:
    """Returns the drafts of a recorded step, by sequence id.

    Raises:
        OverflowError, TypeError, ValueError: The record is not valid.
    """
    vocab_size = engine.vocab_size
    multi_step = engine.runs_several_steps
    return dict(
        _draft(*item, vocab_size=vocab_size, multi_step=multi_step)
        for item in plan.get("drafts", ())
    )


def _ends_by_text(result: Record) -> dict[int, _End]:
    ends = {}
    for edit in result.get("edits", ()):
        match edit:
            case ["finish", int(sequence_id), str(reason), str(stop_reason)]:
                ends[sequence_id] = _End(Finish(sequence_id, reason, stop_reason), None)
            case ["finish", int(sequence_id), str(reason), str(stop_reason), int(num_tokens)]:
                ends[sequence_id] = _End(Finish(sequence_id, reason, stop_reason), num_tokens)
    return ends


def _draft(
    sequence_id: Any,
    token_ids: Any,
    parents: Any = None,
    q: Any = None,
    *,
    vocab_size: int,
    multi_step: bool = False,
) -> tuple[int, Draft]:
    """Returns a sequence id and its drafts.

    Raises:
        TypeError, ValueError: No engine could verify such drafts.
    """
    draft = chain(tuple(token_ids)) if parents is None else Draft(tuple(token_ids), tuple(parents))
    if any(type(number) is not int for number in (sequence_id, *draft.token_ids, *draft.parents)):
        raise ValueError(f"they must be numbers, got {show([sequence_id, token_ids, parents])}")
    if multi_step and set(draft.token_ids) != {PLACEHOLDER}:
        raise ValueError(
            f"a step of several has {PLACEHOLDER} for each of its tokens, got {show(token_ids)}"
        )
    if not multi_step and not all(0 <= token_id < vocab_size for token_id in draft.token_ids):
        raise ValueError(f"token ids are 0 to {vocab_size - 1}, got {show(token_ids)}")
    if len(draft.parents) != len(draft.token_ids) or not all(
        -1 <= p < index for index, p in enumerate(draft.parents)
    ):
        raise ValueError(
            f"each of {len(draft.token_ids)} needs a parent before it or -1, got {show(parents)}"
        )
    if q is not None:
        candidates = Candidates.from_lists(q)
        candidates.check(draft.token_ids, vocab_size)
        draft = draft._replace(q=candidates)
    return sequence_id, draft


def _num_tokens(result: Record) -> int:
    """Returns how many tokens the sequences of a step drew, up to the first wrong draft."""
    if "paths" in result:
        return sum(1 + len(path) for path in result["paths"])
    return len(result["tokens"])


def _survey(
    path: str | os.PathLike[str], updates: WeightsOfUpdates, until: int | None
) -> tuple[int, bool]:
    """Returns the number of plans in a log, and whether any request has a mask.

    Grammars and markers of reasoning need the tokenizer. It reads the whole log, so that a damaged
    line, and an update whose weights are nowhere, is found before anything is loaded.
    """
    num_plans = 0
    is_constrained = False
    with LogReader(path) as log:
        log.take()
        while log.next is not None:
            num_plans += log.next["event"] == "plan"
            params = log.next.get("params") or ()
            is_constrained |= any(name in params for name in _NEED_TEXT)
            is_run = until is None or log.next.get("step", 0) <= until
            if log.next["event"] == "update" and is_run:
                updates.check(log.next)
            log.take()
    return num_plans, is_constrained
