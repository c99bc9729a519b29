"""Makes snapshots of an engine between two steps: its blocks, its requests, and its last steps.

Those of a recorded event log have the same form (recorded.py), so that the page draws both in the
same way. docs/guides/inspector.md describes the form.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable
from typing import Any

from jaxpage.device import Executables
from jaxpage.engine import Engine
from jaxpage.memory import BlockManager
from jaxpage.serving.inspector.watching import Timeline, Track, Watcher
from jaxpage.step.embedded import EmbeddedPrompt, Picture
from jaxpage.step.request import Sequence, SequenceGroup

Snapshot = dict[str, Any]
MAX_COPIES = 24  # the most block copies of the last steps that a snapshot shows


class Inspector:
    """Looks at one engine, on the thread that steps it; it keeps nothing of one without viewers."""

    def __init__(
        self, *, show_prompts: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Makes an inspector that has not looked yet.

        Args:
            show_prompts: Snapshots have the prompts of requests. Otherwise they have neither text
                nor token ids.
            clock: Gives the time, in seconds unless a snapshot says otherwise.
        """
        self._show_prompts = show_prompts
        self._clock = clock
        self._epoch = clock()  # the times of snapshots count from here
        self._watcher: Watcher | None = None

    def inspect(self, engine: Engine) -> Snapshot:
        """Returns the state of the engine now.

        The cost is a walk over the block tables of its requests, and copies of what it returns.
        """
        watcher = self._watcher
        if watcher is None or not watcher.is_listening:
            watcher = self._watcher = Watcher(engine, self._clock)
        watcher.note_visit()
        groups = [(group, "running") for group in engine.running]
        groups += [(group, _waiting_state(group, engine)) for group in engine.waiting]
        manager = engine.block_manager
        requests = [
            self._request(group, state, manager, watcher.tracks[group.request.request_id].timeline)
            for group, state in groups
        ]
        requests += [
            self._describe_finished(track, manager) for track in reversed(watcher.finished)
        ]
        steps = list(watcher.steps)
        return {
            "clock": {"unit": "seconds", "now": round(watcher.last_visit - self._epoch, 4)},
            "pool": _pool(manager),
            "requests": requests,
            "step": steps[-1] if steps else None,
            "history": [history_row(step) for step in steps],
            "copies": [[step["step"], *pair] for step in steps for pair in step["copies"]][
                -MAX_COPIES:
            ],
            "num_steps": engine.num_steps,
            "compiles": _compiles(engine.executables),
        }

    def _describe_finished(self, track: Track, manager: BlockManager) -> Snapshot:
        reasons = [sequence.finish_reason for sequence in track.group.sequences]
        return {
            **self._request(track.group, "finished", manager, track.timeline),
            "reasons": reasons,
        }

    def _request(
        self, group: SequenceGroup, state: str, manager: BlockManager, timeline: Timeline
    ) -> Snapshot:
        request = group.request
        shown = (
            {"prompt": request.prompt or list(request.prompt_token_ids)}
            if self._show_prompts
            else {}
        )
        return {
            "number": group.arrival,  # from 1, in order of arrival
            "id": request.request_id,
            "state": state,  # running, waiting, preempted, swapped, finished
            "beam_width": request.beam.beam_width if request.beam else 0,
            "num_sequences": request.num_sequences,
            "prompt_tokens": len(request.prompt_token_ids),
            "max_total_tokens": request.max_total_tokens,
            "cached_tokens": group.num_cached_tokens or 0,
            "num_preemptions": group.num_preemptions,
            "sequences": [_sequence(sequence, manager) for sequence in group.sequences],
            "timeline": [self._since_epoch(segment) for segment in timeline.segments],
            **({"vectors": _vectors(request.embedded)} if request.embedded else {}),
            **shown,
        }

    def _since_epoch(self, segment: list[Any]) -> list[Any]:
        kind, start, end, num_tokens = segment
        return [
            kind,
            round(start - self._epoch, 4),
            None if end is None else round(end - self._epoch, 4),
            num_tokens,
        ]


def history_row(step: Snapshot) -> list[Any]:
    """Returns what the history says of a step: its number, tokens, tokens of the shape, seconds."""
    num_tokens = sum(num_tokens for _, _, _, num_tokens, _ in step["rows"])
    return [step["step"], num_tokens, step["bucket"][0], step["seconds"]]


def describe_vectors(spans: Iterable[Iterable[Any]], pictures: Container[Any]) -> list[list[int]]:
    """Returns which positions of a prompt vectors fill.

    The entries are [first position, tokens, picture, first row]; pictures count from 1, and 0 is
    for vectors of a client.

    Args:
        spans: The fields of each `EmbeddedSpan`.
        pictures: The keys of the spans that pictures fill.
    """
    vectors = []
    num_pictures = 0
    for start, length, key, row, _ in spans:
        is_picture = key in pictures
        num_pictures += is_picture and row == 0
        vectors.append([start, length, num_pictures if is_picture else 0, row])
    return vectors


def _vectors(embedded: EmbeddedPrompt) -> list[list[int]]:
    sources = embedded.sources.items()
    pictures = {key for key, source in sources if isinstance(source, Picture)}
    return describe_vectors(embedded.spans, pictures)


def _compiles(executables: Executables) -> Snapshot:
    _, total = executables.num_found_of_all
    return {"total": total, "seconds": round(executables.compile_seconds, 3)}


def _waiting_state(group: SequenceGroup, engine: Engine) -> str:
    if engine.is_swapped(group):
        return "swapped"
    return "preempted" if group.num_preemptions else "waiting"


def _sequence(sequence: Sequence, manager: BlockManager) -> Snapshot:
    sequence_id = sequence.sequence_id
    owns = sequence.finish_reason is None and sequence_id in manager.sequence_ids
    swapped = sequence.finish_reason is None and manager.is_swapped(sequence_id)
    return {
        "id": sequence_id,
        "sample": sequence.sample_index,
        "known": sequence.num_known_tokens,
        "computed": sequence.num_computed_tokens,
        "host_blocks": list(manager.host_tables(sequence_id)[0]) if swapped else [],
        **(_blocks(sequence_id, manager) if owns else {"blocks": ()}),
    }


def _blocks(sequence_id: int, manager: BlockManager) -> Snapshot:
    """Returns the block table of the first cache group, and those of further groups, if any."""
    first, *further = manager.block_tables(sequence_id)
    return {"blocks": first, **({"further_blocks": further} if further else {})}


def _pool(manager: BlockManager) -> Snapshot:
    """Returns the state of the pools.

    The top level is that of the first cache group; the others are in `further_groups`, and their
    blocks have other ids.
    """
    first, *further = manager.groups
    host_pool = first.swapped.pool
    return {
        "block_size": manager.block_size,
        "num_blocks": first.pool.num_blocks,  # the null block included
        "num_host_blocks": 0 if host_pool is None else host_pool.num_usable,
        "ref_counts": first.pool.ref_counts(),  # by block
        "kept": first.pool.kept_blocks(),  # the blocks whose content the prefix index finds
        "further_groups": [
            {
                "window": group.sliding_window,
                "num_blocks": group.pool.num_usable,
                "num_free": group.pool.num_free,
                "first_block": group.pool.first,
                "ref_counts": group.pool.ref_counts()[group.pool.first :],
                "kept": group.pool.kept_blocks(),
            }
            for group in further
        ],
        "pins": [
            {
                "id": pin_id,
                "tokens": len(pin.token_ids),
                **_blocks(pin_id, manager),
            }
            for pin_id, pin in manager.pins.items()
        ],
    }
