"""Tells which prefixes this server's cache can find, as KV events in the form of vLLM.

A router reads them, and sends a request to the server that has its prefix.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from jaxpage.memory import CachedBlocks, CacheObserver, Entry, has_vectors
from jaxpage.step.events import Events
from jaxpage.step.plan import StepPlan
from jaxpage.step.report import StepReport

Batch = list[Any]  # [time, events, rank]
MEDIUM = "GPU"  # vLLM's word for the device's memory
RANK = 0  # the rank in data parallelism, which one server does not have


class KVEvents(Events, CacheObserver):
    """Gathers the changes of the prefix index in a step, and sends them as one batch.

    Prefixes with a cache salt or an adapter are left out: other requests cannot find them, and
    others must not learn their tokens. So are those with pictures or vectors, which tokens do not
    tell.
    """

    def __init__(
        self,
        block_size: int,
        send: Callable[[Batch], None],
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self._block_size = block_size
        self._send = send
        self._close = close
        self._events: list[dict[str, Any]] = []
        self._hashes: dict[int, int] = {}  # the hash of each block that an event has named
        self._last_block: int | None = None  # the last block of the last BlockStored event

    def stored(self, block: int, entry: Entry) -> None:
        """Adds a block to the events, unless its prefix has a salt, an adapter or vectors."""
        parent = entry.parent
        if isinstance(parent, str) or (parent is not None and parent not in self._hashes):
            return
        if has_vectors(entry.token_ids):
            return
        # The hashes in vLLM's events are integers of 64 bits.
        self._hashes[block] = block_hash = int.from_bytes(entry.digest[:8], "big")
        if parent is None or self._last_block != parent:
            self._events.append(
                {
                    "type": "BlockStored",
                    "block_hashes": [],
                    "parent_block_hash": None if parent is None else self._hashes[parent],
                    "token_ids": [],
                    "block_size": self._block_size,
                    "lora_id": None,
                    "medium": MEDIUM,
                    "lora_name": None,
                }
            )
        self._events[-1]["block_hashes"].append(block_hash)
        self._events[-1]["token_ids"] += entry.token_ids[: self._block_size]
        self._last_block = block

    def watch(self, cached: CachedBlocks) -> None:
        """Hears from now on what can be found in a prefix cache."""
        cached.index.observer = self

    def removed(self, blocks: list[int]) -> None:
        """Adds the removal of blocks that an event has named."""
        if hashes := [self._hashes.pop(block) for block in blocks if block in self._hashes]:
            self._add({"type": "BlockRemoved", "block_hashes": hashes, "medium": MEDIUM})

    def cleared(self) -> None:
        """Adds that no block can be found any more."""
        self._hashes.clear()
        self._add({"type": "AllBlocksCleared"})

    def stepped(self, report: StepReport) -> None:
        """Sends the events of the step."""
        self._flush()

    def failed(self, plan: StepPlan, error: Exception) -> None:
        """Sends the events so far."""
        self._flush()

    def pages_rebuilt(self) -> None:
        """Sends the events so far."""
        self._flush()

    def prefix_cache_reset(self) -> None:
        """Sends the events so far."""
        self._flush()

    def closed(self) -> None:
        """Sends the last events, and ends the sending."""
        self._flush()
        self._close()

    def _add(self, event: dict[str, Any]) -> None:
        self._events.append(event)
        self._last_block = None

    def _flush(self) -> None:
        if self._events:
            self._send([time.time(), self._events, RANK])
            self._events = []
            self._last_block = None
