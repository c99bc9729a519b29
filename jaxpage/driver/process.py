"""Binds drivers to their process: forked processes are refused, and exit ends the threads."""

from __future__ import annotations

import atexit
import functools
import os
import threading

from jaxpage.driver.turns import Turns

EXIT_SECONDS = 10.0

_running: dict[threading.Thread, Turns] = {}


@functools.cache
def _first_process() -> int:
    """Returns the process in which the first driver was made.

    JAX's threads exist there, and not in the processes that are forked from it.
    """
    return os.getpid()


def check_process() -> None:
    """Checks that this process was not forked from one in which an LLM was made.

    A step in a forked process would wait for XLA's threads for ever.

    Raises:
        RuntimeError: The process was forked.
    """
    if os.getpid() != _first_process():
        raise RuntimeError(
            f"an LLM was made in process {_first_process()}, from which this one was forked: "
            "none works here. Start processes by multiprocessing's method 'spawn', or fork before "
            "the first LLM is made"
        )


def new_thread(turns: Turns) -> threading.Thread:
    """Returns a thread for the turns; the interpreter's exit ends it between two steps."""
    _end_at_exit()
    thread = threading.Thread(target=_run, args=(turns,), name="jaxpage-engine", daemon=True)
    _running[thread] = turns
    return thread


def _run(turns: Turns) -> None:
    try:
        turns.run()
    finally:
        _running.pop(threading.current_thread(), None)


@functools.cache
def _end_at_exit() -> None:
    """Registers `_end_all`, once, after JAX has registered its own exit.

    The function that is registered last is called first, so no step runs when JAX takes its devices
    down.
    """
    atexit.register(_end_all)


def _end_all() -> None:
    """Ends the threads of all drivers.

    Otherwise Python would stop a daemon thread inside a step, in the middle of native code.
    """
    running = dict(_running)
    for turns in running.values():
        turns.detach()
    for thread in running:
        thread.join(EXIT_SECONDS)
