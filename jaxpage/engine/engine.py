"""Implements the engine: requests come in, steps run, sequence groups come out.

`Engine.step` calls the scheduler, the speculator, the runner and the strategies in turn.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from collections.abc import Sequence as TokenIds
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from jaxpage.decoding import GrammarCompiler, advance, masks_of
from jaxpage.device import Executables, Packings
from jaxpage.device.inputs import Bucket
from jaxpage.engine.adapters import Adapters
from jaxpage.engine.admission import (
    Admission,
    AdmissionRules,
    CheckedParams,
    NamedAdapter,
    PreparedRequest,
    Words,
)
from jaxpage.engine.batch_builder import NO_SLOTS, BatchBuilder
from jaxpage.engine.engine_metrics import EngineMetrics
from jaxpage.engine.reporting import Reporter
from jaxpage.engine.runner import Runner, WakingWeights
from jaxpage.engine.strategies import NO_PARTS, DefaultStrategies, EngineParts
from jaxpage.engine.text import words_as_token_ids
from jaxpage.engine.thinking import budget_of
from jaxpage.engine.vector_fields import NO_SOURCES
from jaxpage.engine.vector_sources import NO_PICTURES, NOT_ENABLED, VectorSources
from jaxpage.errors import UnsupportedError
from jaxpage.memory import BlockManager, CachedBlocks, MemoryHistory, MemoryReport
from jaxpage.outputs import RequestMetrics
from jaxpage.prefix_store import FileCounts
from jaxpage.scheduling import Scheduler
from jaxpage.settings.lora_request import LoRARequest
from jaxpage.settings.sampling_params import BeamSearchParams, SamplingParams
from jaxpage.shapes import NOT_FINITE
from jaxpage.speculation import NoSpeculation, Speculator
from jaxpage.step.aborted import AbortedRequest, begin_group
from jaxpage.step.draft import Drafts
from jaxpage.step.edits import Edit, Finish, Fork
from jaxpage.step.embedded import EmbeddedPrompt
from jaxpage.step.events import Both, Events
from jaxpage.step.plan import StepPlan, StepResult
from jaxpage.step.report import StepReport
from jaxpage.step.request import SequenceGroup
from jaxpage.step.update import RUNNING_MODES, Mode, WeightsUpdate

if TYPE_CHECKING:
    from jaxpage.decoding import Grammar

logger = logging.getLogger(__name__)


class Engine:
    """Calls the scheduler and the runner in turn.

    Only the thread of its driver changes it. Any thread may prepare requests (`check_params`,
    `prepare`, `find_grammar`, `compile_grammar`, `open_adapter`) and ask whether it sleeps.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        builder: BatchBuilder,
        runner: Runner,
        tokenizer: Any | None,
        rules: AdmissionRules,
        adapters: Adapters | None = None,
        sources: VectorSources | None = None,
        parts: EngineParts = NO_PARTS,
    ):
        """Joins the parts.

        Args:
            scheduler: The scheduler.
            builder: The batch builder.
            runner: The runner.
            tokenizer: The tokenizer; None if the model has none.
            rules: What the model and the settings admit.
            adapters: The LoRA adapters; None if requests may have none.
            sources: The sources of vectors in prompts; None if prompts may have none.
            parts: The parts that take decisions.
        """
        self.scheduler = scheduler
        self.builder = builder
        self.runner = runner
        self.metrics = EngineMetrics()
        if sources is not None and sources.encoder is not None:
            self.metrics.encoder = sources.encoder.counts
        self.events = parts.events or Events()
        self.tokenizer = tokenizer
        self.admission = Admission(
            rules,
            vocab_size=builder.vocab_size,
            spell=None if tokenizer is None else functools.partial(words_as_token_ids, tokenizer),
            read_budget=None
            if tokenizer is None
            else functools.partial(budget_of, tokenizer, builder.vocab_size),
            has_priorities=scheduler.has_priorities,
        )
        self.adapters = adapters
        self.sources = sources
        self.grammars = GrammarCompiler(tokenizer, builder.vocab_size)
        self.speculator: Speculator = parts.speculator or NoSpeculation()
        self._default_strategies = DefaultStrategies(tokenizer)
        self._new_strategy = parts.new_strategy or self._default_strategies
        self._strategies = {} if parts.strategies is None else parts.strategies
        self._groups: dict[int, SequenceGroup] = {}  # by sequence id
        # Counts admitted sequences only: a replay never sees refused requests, so they take no id.
        self._num_sequences = 0
        self._num_pins = 0
        self.weights_version = 0

    @property
    def has_unfinished(self) -> bool:
        """Returns whether a request is running or waiting."""
        return self.scheduler.has_unfinished

    @property
    def running(self) -> tuple[SequenceGroup, ...]:
        """Returns the groups that run, in order of rank."""
        return self.scheduler.running

    @property
    def groups(self) -> list[SequenceGroup]:
        """Returns the groups that run, and then those that wait."""
        return [*self.running, *self.waiting]

    @property
    def num_steps(self) -> int:
        """Returns how many steps have run."""
        return self.metrics.engine_steps_total

    @property
    def waiting(self) -> tuple[SequenceGroup, ...]:
        """Returns the groups that wait, in order of rank."""
        return self.scheduler.waiting

    @property
    def block_manager(self) -> BlockManager:
        """Returns the owner of all block tables."""
        return self.scheduler.block_manager

    def is_swapped(self, group: SequenceGroup) -> bool:
        """Returns whether the blocks of a waiting group are in host memory."""
        return self.scheduler.is_swapped(group)

    def listen(self, listener: Events) -> None:
        """Tells a listener everything from now on, after those that listen already."""
        self.events = Both(self.events, listener)

    def times_of(self, request_id: str) -> RequestMetrics:
        """Returns the times and counts of a request that runs or waits."""
        return self.metrics.requests[request_id]

    def bucket_of(self, plan: StepPlan) -> Bucket:
        """Returns the shape of a step."""
        return self.builder.bucket_of(plan)

    @property
    def vocab_size(self) -> int:
        """Returns the number of the model's token ids (V)."""
        return self.builder.vocab_size

    @property
    def max_num_seqs(self) -> int:
        """Returns how many sequences run at a time at most."""
        return self.scheduler.max_num_seqs

    @property
    def runs_several_steps(self) -> bool:
        """Returns whether one executable may run several decode steps (`num_scheduler_steps`)."""
        return self.scheduler.runs_several_steps

    @property
    def prefix_cache(self) -> CachedBlocks | None:
        """Returns the cached blocks; None where prefix caching is off."""
        return self.scheduler.prefix_cache

    def count_prefix_files(self, counts: FileCounts) -> None:
        """Has the metrics show these counts of the files with prefixes."""
        self.metrics.prefix_files = counts

    @property
    def executables(self) -> Executables:
        """Returns the compiled steps."""
        return self.runner.executables

    @property
    def parameters(self) -> Any:
        """Returns the weights as the steps take them; see `Runner.parameters`."""
        return self.runner.parameters

    @property
    def packed(self) -> Packings:
        """Returns which of the weights are in panels, by path."""
        return self.runner.packed

    def check_params(self, requested: SamplingParams | BeamSearchParams) -> CheckedParams:
        """Checks all of a request but its prompt, once for many prompts; see `Admission`."""
        return self.admission.check_params(requested)

    def check_words(self, words: Words) -> Words:
        """Returns bad words, or raises ValueError if one is wrong; see `Admission`."""
        return self.admission.check_words(words)

    def prepare(
        self,
        prompt: str | None,
        token_ids: TokenIds[int],
        params: SamplingParams | BeamSearchParams | CheckedParams,
        embedded: EmbeddedPrompt | None = None,
    ) -> PreparedRequest:
        """Returns a request for `add`, without its grammar; see `compile_grammar`.

        It changes nothing, and any thread may call it.

        Args:
            prompt: The text of the prompt, if there is one.
            token_ids: The token ids of the prompt.
            params: The parameters. For several prompts, pass the result of
                `check_params`, so that they are checked once.
            embedded: The vectors that take the place of some of the tokens, if any do.

        Raises:
            ValueError: A parameter or the prompt does not fit the model.
            UnsupportedError: A parameter cannot be honoured. The message names it and its value.
        """
        checked = params if isinstance(params, CheckedParams) else self.check_params(params)
        if embedded is not None:
            if self.sources is None:
                raise UnsupportedError(NO_PICTURES)
            embedded = self.sources.complete(token_ids, embedded)
        return self.admission.prepare(prompt, token_ids, checked, embedded)

    def prompt_of_vectors(self, values: Any) -> tuple[TokenIds[int], EmbeddedPrompt]:
        """Returns what `prepare` takes for a prompt of vectors; see `VectorSources.prompt_of`."""
        if self.sources is None:
            raise UnsupportedError(NOT_ENABLED)
        return self.sources.prompt_of(values)

    def compile_grammar(self, params: SamplingParams | BeamSearchParams) -> Grammar | None:
        """Returns the compiled grammar of a checked request, or None if it asks for none.

        It may take seconds, and any thread may call it.

        Raises:
            ValueError: Something is wrong with the grammar.
            UnsupportedError: llguidance cannot take the tokenizer.
            TimeoutError: The grammars of other requests take too long.
            JaxpageError: The process that tries grammars was killed twice, or gave no answer.
        """
        requested = getattr(params, "structured_outputs", None)
        return None if requested is None else self.grammars.compile(requested)

    def find_grammar(self, requested: tuple[str, str]) -> Grammar | None:
        """Returns a grammar that is compiled already; see `GrammarCompiler.find`."""
        return self.grammars.find(requested)

    def add(self, request_id: str, prepared: PreparedRequest) -> Reporter:
        """Takes in a request, and compiles its grammar if it has one that is not compiled.

        A request that is continued has the id that it had.

        Raises:
            CapacityError: The request can never fit into the pool.
            ValueError: The request id is in use; or what `compile_grammar` raises.
        """
        aborted = prepared.aborted
        # A request that is continued keeps the seed that was drawn for it.
        request = (aborted and aborted.request) or self.admission.admit(request_id, prepared)
        grammar = prepared.grammar or self.compile_grammar(prepared.params)
        first_id = self._num_sequences
        sequence_ids = tuple(range(first_id, first_id + request.num_sequence_ids))
        group = begin_group(request, sequence_ids, self.weights_version, aborted)
        strategy = self._new_strategy(group, grammar)
        # It may refuse the group, so nothing is noted before.
        self.scheduler.add(group)
        if aborted is not None:
            strategy = aborted.adopt(group, strategy)
        if self.adapters is not None and prepared.lora is not None:
            self.adapters.hold(request_id, prepared.lora.adapter)
        if self.sources is not None and request.embedded is not None:
            self.sources.hold(request_id, request.embedded)
        self._num_sequences += request.num_sequence_ids
        for sequence_id in group.sequence_ids:
            self._groups[sequence_id] = group
            self._strategies[sequence_id] = strategy
        self.events.arrived(group)
        return Reporter(group, self.metrics.add(request_id), self.tokenizer)

    def open_adapter(self, requested: LoRARequest) -> NamedAdapter:
        """Returns the adapter of a request; any thread may call it.

        Raises:
            UnsupportedError: The engine has no adapters (`enable_lora` is False).
            ValueError: The number lora_int_id belongs to another adapter.
            ModelNotFoundError: There is no such directory.
            CheckpointError: The adapter does not fit the model.
        """
        return NamedAdapter(requested.lora_name, self.adapters_for(requested).open(requested))

    def adapters_for(self, requested: LoRARequest) -> Adapters:
        """Returns what keeps the adapters, for a call about one of them; any thread may call it.

        Raises:
            UnsupportedError: The engine has no adapters (`enable_lora` is False).
        """
        if self.adapters is None:
            raise UnsupportedError(f"LoRA adapter {requested.lora_name!r} needs enable_lora=True")
        return self.adapters

    def abort(self, request_id: str) -> AbortedRequest | None:
        """Ends a request, whatever it is doing; its blocks are free at once.

        Returns:
            What it had, with which it can be added again; None if there is no such request, or if
            it has finished.
        """
        group = self.scheduler.abort(request_id)
        if group is None:
            return None
        strategy = self._strategies[group.sequences[0].sequence_id]
        self.events.aborted(group)
        self._forget(group)
        return AbortedRequest.of(group, strategy)

    def step(self) -> list[SequenceGroup]:
        """Runs one step on the device, and returns the groups that it changed.

        The list is also empty after a step that computed chunks of prompts alone, so
        `has_unfinished` says whether anything is left to do.
        """
        drafts = self.speculator.propose(self.scheduler.running)
        if (plan := self._plan(drafts)) is None:
            return []
        if (result := self._run(plan)) is None:
            return self._fail(plan)
        edits = advance(plan, result, self._strategies)
        groups = self.scheduler.commit(plan, edits)
        self._report(StepReport(drafts, plan, result, edits, groups))
        return groups

    def _plan(self, drafts: Drafts) -> StepPlan | None:
        plan = self.scheduler.plan(drafts)
        if plan is None:
            return None
        return replace(
            plan, draft_depth=self.speculator.draft_depth(plan, self.scheduler.has_sequence_slots)
        )

    def _run(self, plan: StepPlan) -> StepResult | None:
        """Returns the result of the step, or None if the step failed."""
        self.metrics.scheduled(plan, self._groups, self.scheduler)
        self._default_strategies.mask_budget.begin_step()
        try:
            # It is inside the `try`, so that a replay can fail where the logged step did.
            self.events.planned(plan)
            slots = self.adapters.load_for(plan) if self.adapters else NO_SLOTS
            sources = self.sources.rows_for(plan) if self.sources else NO_SOURCES
            result = self.runner.run(
                self.builder.build(plan, masks_of(plan, self._strategies), slots, sources)
            )
        except Exception as error:
            logger.exception("step %d failed; running requests end with an error", plan.step_id)
            self.events.failed(plan, error)
            return None
        return result

    def _report(self, report: StepReport) -> None:
        """Reports a committed step to the event listener, the metrics and the speculator."""
        self.events.stepped(report)
        self.metrics.stepped(report, self._groups)
        self.speculator.observe(report)
        self._forget_finished(report.groups)
        if (report.result.token_ids == NOT_FINITE).any():
            # The pages may hold numbers that are not finite too; they must not outlive their
            # request.
            self.reset_prefix_cache()

    def abort_all(self) -> list[SequenceGroup]:
        """Ends every request, and returns their groups."""
        groups = self.groups
        for group in groups:
            self.abort(group.request.request_id)
        return groups

    def reset_prefix_cache(self) -> None:
        """Makes sure that no request finds blocks that were computed before now.

        Running requests keep their blocks, and neither these nor those that they fill from now on
        are found: each follows from the blocks before it.
        """
        self.scheduler.forget_cached()
        self.events.prefix_cache_reset()

    def replace_weights(
        self, weights: Mapping[str, Any], mode: Mode = "wait", checksum: str | None = None
    ) -> int:
        """Gives the model other weights, and returns their version.

        No request finds blocks that were computed with the old weights.

        Args:
            weights: The model's, and its drafter's if they are replaced; see
                `Runner.replace_parameters`.
            mode: With "keep", running requests go on with the blocks that they have; with
                "recompute", they compute all their tokens again. The other modes are for an engine
                in which nothing runs.
            checksum: The hash of the weights, for an event log.

        Raises:
            RuntimeError: The engine sleeps, a prefix is pinned, or a request is running or waiting
                in a mode that does not allow it.
        """
        self._check_awake()
        self._check_unpinned("weights cannot be replaced", "prefixes of the old ones")
        if mode not in RUNNING_MODES:
            self._check_idle("weights cannot be replaced")
        self.runner.replace_parameters(weights)
        if self.sources is not None:
            self.sources.weights_replaced()
        self.weights_version += 1
        preempted = self.scheduler.replace_weights(
            self.weights_version, recomputes=mode == "recompute"
        )
        self.events.weights_replaced(WeightsUpdate(self.weights_version, mode, checksum, preempted))
        self.reset_prefix_cache()
        return self.weights_version

    def share_weights(self) -> Any:
        """Returns the weights of the model and of its drafter, which their caller may hold.

        Raises:
            RuntimeError: The engine sleeps.
        """
        self._check_awake()
        return self.runner.share_parameters()

    def _check_awake(self) -> None:
        if self.is_asleep:
            raise RuntimeError("the model sleeps: call wake_up first")

    def _check_idle(self, action: str) -> None:
        if self.has_unfinished:
            raise RuntimeError(f"{action} while requests are running or waiting")

    def _check_unpinned(self, action: str, prefixes: str) -> None:
        if pins := len(self.scheduler.pins):
            raise RuntimeError(f"{action} while {prefixes} are pinned ({pins}); release them first")

    @property
    def is_asleep(self) -> bool:
        """Returns whether the device has neither weights nor pages."""
        return self.runner.is_asleep

    def sleep(self, level: int) -> None:
        """Frees the device's memory until `wake`; the executables stay, the prefix cache is lost.

        Args:
            level: 1 moves the weights to the host's memory, with the adapters in their slots;
                2 drops them.

        Raises:
            RuntimeError: The engine sleeps already, a request is running or waiting, or a prefix is
                pinned.
        """
        if self.is_asleep:
            raise RuntimeError("the engine sleeps already")
        self._check_idle("the engine cannot sleep")
        self._check_unpinned("the engine cannot sleep", "prefixes")
        self.scheduler.lose_pages()
        self.runner.sleep(keeps_weights=level == 1)

    def wake(self, weights: WakingWeights) -> None:
        """Takes weights again after `sleep`, and makes the pages anew.

        Args:
            weights: Those that the runner kept, or those of the checkpoint.

        Raises:
            RuntimeError: The engine does not sleep, or the weights were read for an earlier sleep.
        """
        if not self.is_asleep:
            raise RuntimeError("the engine does not sleep")
        if weights.num_sleeps != self.runner.num_sleeps:
            raise RuntimeError(
                "the weights were read for a sleep that another call has ended, and the engine "
                "sleeps again: call wake_up again"
            )
        were_dropped = self.runner.host_parameters is None
        self.runner.wake(weights.parameters)
        self.events.pages_rebuilt()
        if were_dropped and self.adapters is not None:
            self.adapters.lose_slots()
        if were_dropped and self.sources is not None:
            self.sources.weights_replaced()
        if were_dropped and self.weights_version:
            # Those of the checkpoint, in place of later ones.
            self.weights_version += 1
            self.events.weights_replaced(WeightsUpdate(self.weights_version, "wait"))
            self.reset_prefix_cache()

    def pin(self, request_id: str) -> int:
        """Ends a running request and pins its computed prompt until `unpin`; returns the pin's id.

        Raises:
            CapacityError: Other requests need the room.
        """
        pin_id = -1 - self._num_pins  # negative: pins share a table with sequences
        group = self.scheduler.pin(pin_id, request_id)
        self._num_pins += 1
        self.events.pinned(group, pin_id)
        self._forget(group)
        return pin_id

    def unpin(self, pin_id: int) -> None:
        """Gives up a pin; its blocks are free unless requests use them. A lost pin is no error."""
        if self.is_pinned(pin_id):
            self.scheduler.unpin(pin_id)
            self.events.unpinned(pin_id)

    def is_pinned(self, pin_id: int) -> bool:
        """Returns whether the pin is in place."""
        return pin_id in self.scheduler.pins

    def stats(self) -> dict[str, Any]:
        """Returns all counters by their public names."""
        return self.metrics.snapshot(self.scheduler, self.runner.executables)

    def memory_report(self, *, reset: bool) -> MemoryReport:
        """Returns what the pools held since the engine was built or since the last reset.

        Args:
            reset: True begins a new report.
        """
        report = self.metrics.memory_report(self.scheduler, self.builder.block_size)
        if reset:
            self.metrics.memory = MemoryHistory()
        return report

    def _fail(self, plan: StepPlan) -> list[SequenceGroup]:
        """Ends the running requests with an error after a failed step, and makes the pages anew.

        The pages were donated to the step, so they are lost.
        """
        edits: list[Edit] = []
        for group in self.scheduler.running:
            ended = [sequence.sequence_id for sequence in group.unfinished]
            # Samples that the first draw would have forked have an output, too.
            due = group.pending_forks
            edits += [
                Fork(ended[0], child_id, index) for index, child_id in enumerate(due, start=1)
            ]
            edits += [Finish(sequence_id, "error") for sequence_id in (*ended, *due)]
        # Without rows, since nothing was computed.
        groups = self.scheduler.commit(replace(plan, rows=()), edits)
        self._forget_finished(groups)
        self.rebuild_pages()
        return groups

    def report_end(self) -> None:
        """Tells the listener that no step and no request follows."""
        self.events.closed()

    def close(self) -> None:
        """Frees the device, and ends the process that tries grammars."""
        self.runner.close()
        self.grammars.close()

    def rebuild_pages(self) -> None:
        """Makes the pages anew; the prefix cache and the pins are lost with them.

        A model that wakes has empty pages too, since `sleep` has lost what was in the old ones.
        """
        if pins := self.scheduler.pins:
            logger.warning(
                "%d pinned prefixes are lost with the KV pages; pin them again", len(pins)
            )
        self.scheduler.lose_pages()
        self.runner.rebuild_pages()
        self.events.pages_rebuilt()

    def _forget_finished(self, groups: list[SequenceGroup]) -> None:
        for group in groups:
            if group.finished:
                self._forget(group)

    def _forget(self, group: SequenceGroup) -> None:
        self.metrics.ended(group)
        if self.adapters is not None:
            self.adapters.release(group.request.request_id)
        if self.sources is not None:
            self.sources.release(group.request.request_id)
        self.speculator.forget(group)
        for sequence_id in group.sequence_ids:
            self._strategies.pop(sequence_id, None)
            self._groups.pop(sequence_id, None)
