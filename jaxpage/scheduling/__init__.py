"""Decides which sequences take part in a step, and with how many tokens.

The decisions depend on the events alone. There is no clock and no device in this room, so the same
code plans for the engine, for the simulator and for the replay of a log.
"""

from jaxpage.scheduling.admitting import (
    Preemption,  # says what becomes of a preempted request
    PrefixCounts,  # counts the tokens that were found in the prefix cache and among pins
)
from jaxpage.scheduling.committing import (
    apply_edit,  # applies one edit to a sequence and its block tables
)
from jaxpage.scheduling.plan_builder import (
    sample_of,  # describes the draw from the last token of a row
)
from jaxpage.scheduling.queues import (
    POLICIES,  # are the scheduling policies by name; each makes a `WaitingQueue`
    WaitingQueue,  # is the interface of the requests that wait under one policy
)
from jaxpage.scheduling.scheduler import (
    Scheduler,  # plans each step and commits what came of it
)
