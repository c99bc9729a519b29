"""Drives an engine: one thread takes its steps, and others send it commands and hold handles.

Nothing else calls `Engine.step`, but for benchmarks and replays. `LLM` waits for the answers,
`AsyncLLM` and the server await them. Only `async_driver.py` knows event loops, and no module knows
HTTP. Read `driver.py`, `turns.py` and `handle.py` first. Names are loaded at first use, because an
`LLM` needs no event loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxpage.lazy import open_door

if TYPE_CHECKING:
    from jaxpage.driver.async_driver import (
        AsyncDriver,  # is awaited by event loops
        AsyncPinnedPrefix,  # is a pinned prefix that is released by `await`
        AwaitedHandle,  # follows a request that an event loop reads
    )
    from jaxpage.driver.driver import Driver  # takes the steps of an engine for many callers
    from jaxpage.driver.facade import (
        SLEEP_LEVELS,  # are the levels at which a model sleeps
        DrivenModel,  # is the part that LLM and AsyncLLM have in common
        PinnedPrefix,  # is a prefix that an LLM keeps in place for its caller
        Receipts,  # makes the receipts of a driver's answers
        RequestStream,  # yields the outputs of a request to the caller of an LLM
        check_streamable,  # refuses parameters whose outputs are known only at the end
        prepare,  # encodes and checks a prompt
    )
    from jaxpage.driver.handle import (
        Handle,  # follows a request that a driver has
        Update,  # is a handle with what is new of its request
    )

__getattr__, __dir__ = open_door(__name__)
