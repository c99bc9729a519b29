"""Counts what an engine does; `snapshot` gives the counters by their public names."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import Any

from jaxpage.device import Executables
from jaxpage.engine.latencies import Latencies
from jaxpage.engine.picture_encoder import EncoderCounts
from jaxpage.memory import MemoryHistory, MemoryReport
from jaxpage.outputs import RequestMetrics
from jaxpage.prefix_store import FileCounts
from jaxpage.scheduling import PrefixCounts, Scheduler
from jaxpage.speculation import SpeculationCounts
from jaxpage.step.edits import Append
from jaxpage.step.plan import StepPlan
from jaxpage.step.report import StepReport
from jaxpage.step.request import SequenceGroup


@dataclass
class EngineMetrics:
    """Holds the counters of one engine, and the times of its requests."""

    engine_steps_total: int = 0
    prompt_tokens_total: int = 0  # computed ones; counted again after a preemption
    generation_tokens_total: int = 0
    copy_on_write_blocks_total: int = 0
    request_success_total: dict[str, int] = field(default_factory=dict)  # by finish reason
    requests: dict[str, RequestMetrics] = field(default_factory=dict)
    latencies: Latencies = field(default_factory=Latencies)
    memory: MemoryHistory = field(default_factory=MemoryHistory)
    speculation: SpeculationCounts = field(default_factory=SpeculationCounts)
    prefix_files: FileCounts = field(default_factory=FileCounts)
    encoder: EncoderCounts = field(default_factory=EncoderCounts)
    _step_began: float = 0.0  # in seconds of time.monotonic

    def add(self, request_id: str) -> RequestMetrics:
        """Returns the new metrics of a request that arrived."""
        metrics = self.requests[request_id] = RequestMetrics(arrival_time=time.monotonic())
        return metrics

    def scheduled(
        self, plan: StepPlan, group_of: dict[int, SequenceGroup], scheduler: Scheduler
    ) -> None:
        """Notes a step that is about to run."""
        now = self._step_began = time.monotonic()
        self.memory.begin(
            scheduler.usage,
            used_blocks=scheduler.num_used_blocks,
            num_preempted=len(plan.preempted),
        )
        for row in plan.rows:
            metrics = self.requests[group_of[row.sequence_id].request.request_id]
            if metrics.first_scheduled_time is None:
                metrics.first_scheduled_time = now
                metrics.num_cached_tokens = group_of[row.sequence_id].num_cached_tokens or 0

    def stepped(self, report: StepReport, group_of: dict[int, SequenceGroup]) -> None:
        """Notes a step that ran; a failed step has computed nothing and is not counted."""
        plan = report.plan
        edits = report.edits
        now = time.monotonic()
        self.engine_steps_total += 1
        self.memory.end(now - self._step_began)
        self.latencies.engine_step.observe(now - self._step_began)
        self.copy_on_write_blocks_total += len(plan.copies)
        appended = [edit.sequence_id for edit in edits if isinstance(edit, Append)]
        self.generation_tokens_total += len(appended)
        for row in plan.rows:
            if (group := group_of.get(row.sequence_id)) is None:
                continue  # the request was aborted during the step
            num_prompt_tokens = len(group.request.prompt_token_ids)
            self.prompt_tokens_total += max(
                0, min(row.context_length, num_prompt_tokens) - row.start
            )
        for sequence_id, num_tokens, num_accepted in self.speculation.add(plan, edits, group_of):
            if (group := group_of.get(sequence_id)) is None:
                continue
            metrics = self.requests[group.request.request_id]
            metrics.num_drafts += 1
            metrics.num_draft_tokens += num_tokens
            metrics.num_accepted_tokens += num_accepted
        self.speculation.took(plan, report.drafts.seconds, now - self._step_began)
        advanced = {
            id(group_of[sequence_id]) for sequence_id in appended if sequence_id in group_of
        }
        for group in report.groups:
            metrics = self.requests[group.request.request_id]
            metrics.num_preemptions = group.num_preemptions
            if id(group) in advanced:
                self.latencies.has_tokens(metrics, now)

    def ended(self, group: SequenceGroup) -> None:
        """Notes a request that has ended, for whatever reason."""
        if metrics := self.requests.pop(group.request.request_id, None):
            metrics.finished_time = time.monotonic()
            self.latencies.finished(group, metrics)
        for sequence in group.sequences:
            reason = sequence.finish_reason or "abort"
            self.request_success_total[reason] = self.request_success_total.get(reason, 0) + 1

    def memory_report(self, scheduler: Scheduler, block_size: int) -> MemoryReport:
        """Returns what the pools held over time, in blocks of `block_size` slots."""
        blocks = scheduler.block_counts()
        return self.memory.report(num_blocks=blocks.num_usable, block_size=block_size)

    def snapshot(self, scheduler: Scheduler, executables: Executables) -> dict[str, Any]:
        """Returns all counters by their public names."""
        blocks = scheduler.block_counts()
        split = scheduler.usage()
        return {
            "num_requests_running": scheduler.num_running,
            "num_requests_waiting": scheduler.num_waiting,
            "num_requests_swapped": scheduler.num_swapped,  # a part of the waiting ones
            "kv_cache_usage_perc": blocks.used_share,
            "num_blocks_total": blocks.num_usable,
            "num_blocks_free": blocks.num_free,
            "num_blocks_cached": blocks.num_cached,  # a part of the free ones
            "num_blocks_pinned": blocks.num_pinned,
            "num_preemptions_total": dict(scheduler.num_preemptions),
            **_count_prefixes(scheduler.prefix_counts),
            **{
                f"prefix_files_{name}_blocks_total": count
                for name, count in asdict(self.prefix_files).items()
            },
            "pictures_encoded_total": self.encoder.num_encoded,
            "encoder_cache_hits_total": self.encoder.num_found,
            "encoder_cache_bytes": self.encoder.num_bytes,
            "prompt_tokens_total": self.prompt_tokens_total,
            "generation_tokens_total": self.generation_tokens_total,
            "copy_on_write_blocks_total": self.copy_on_write_blocks_total,
            **self.speculation.snapshot(),
            "shared_blocks": split.shared_blocks,
            "kv_token_slots": split.token_slots,
            "kv_reserved_slots": split.reserved_slots,
            "kv_internal_fragmentation_slots": split.internal_fragmentation_slots,
            "kv_free_slots": split.free_slots,
            "kv_saved_by_sharing_blocks": split.saved_blocks,
            # The share, 0 to 1, of the blocks that were needed without sharing.
            "kv_saved_by_sharing_perc": split.saved_by_sharing,
            "request_success_total": dict(self.request_success_total),
            "compile_total": executables.compile_total,
            "compile_seconds_total": executables.compile_seconds,
            "engine_steps_total": self.engine_steps_total,
            **self.latencies.snapshot(),
        }


def _count_prefixes(counts: PrefixCounts) -> dict[str, int]:
    return {
        # These count tokens, as vLLM does, and each request once.
        "prefix_cache_queries_total": counts.num_queried,
        "prefix_cache_hits_total": counts.num_hits,
        # Hits after a preemption are counted here only.
        "prefix_cache_resumed_hits_total": counts.num_resumed_hits,
    }
