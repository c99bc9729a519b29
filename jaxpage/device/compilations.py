"""Counts what JAX compiles in this process."""

from __future__ import annotations

import functools

import jax
import jax.monitoring


class Compilations:
    """Counts what JAX compiles and finds compiled in this process, by JAX's own monitoring.

    Attributes:
        count: The number of compilations.
        num_found: How many of them JAX found in its cache.
    """

    def __init__(self) -> None:
        self.count = self.num_found = 0
        jax.monitoring.register_event_duration_secs_listener(self._note)
        jax.monitoring.register_event_listener(self._note_found)

    def _note(self, event: str, duration_secs: float, **_: str | int) -> None:
        self.count += event == "/jax/core/compile/backend_compile_duration"

    def _note_found(self, event: str, **_: str | int) -> None:
        self.num_found += event == "/jax/compilation_cache/cache_hits"


@functools.cache  # a listener cannot be taken back, so there is one
def watch_compilations() -> Compilations:
    """Returns what counts the compilations of this process."""
    return Compilations()
