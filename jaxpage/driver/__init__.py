"""Drives an engine: one thread takes its steps, and others send it orders and hold handles.

Nothing else calls `Engine.step`, but for benchmarks and replays.
`LLM` waits for its answers, `AsyncLLM` and the server await them. The room knows no event loop and
no HTTP. Its reading order is `driver.py`, `turns.py`, `handle.py`, `orders.py`, and then the rest.
Other rooms take:

    Driver          takes the steps of an engine for many callers
    DrivenModel     the part that LLM and AsyncLLM have in common
    OBEY_SECONDS    the time in which a thread obeys an order, unless a step takes long
    SLEEP_LEVELS    the levels at which a model sleeps
    Handle, Update  a request that a driver has, and what is new of it
    RequestStream, PinnedPrefix  what an LLM gives its caller to hold
    HeldPrefix      a pin, to be released by whoever holds it
    prepare, check_streamable   encode and check a request
    copy_error      copies an error for one more receiver
"""

from jaxpage.driver.driver import OBEY_SECONDS, Driver
from jaxpage.driver.encoding import check_streamable, prepare
from jaxpage.driver.front import SLEEP_LEVELS, DrivenModel
from jaxpage.driver.handle import Handle, Update, copy_error
from jaxpage.driver.streams import HeldPrefix, PinnedPrefix, RequestStream

__all__ = [
    "OBEY_SECONDS",
    "SLEEP_LEVELS",
    "DrivenModel",
    "Driver",
    "Handle",
    "HeldPrefix",
    "PinnedPrefix",
    "RequestStream",
    "Update",
    "check_streamable",
    "copy_error",
    "prepare",
]
