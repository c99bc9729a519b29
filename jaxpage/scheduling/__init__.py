"""Decides which sequences take part in a step, and with how many tokens.

The decisions depend on the events alone. There is no clock and no device in this room, so the same
code plans for the engine, for the simulator and for the replay of a log.

Other rooms take these names:

    Scheduler     plans each step and commits what came of it
    Preemption    the settings that say what becomes of a preempted request
    POLICIES      the scheduling policies by name; each makes a `WaitingQueue`
    WaitingQueue  the interface of the requests that wait under one policy
    apply_edit    applies one edit to a sequence and its block tables
    sample_of     describes the draw from the last token of a row
"""

from jaxpage.scheduling.admitting import Preemption
from jaxpage.scheduling.committing import apply_edit
from jaxpage.scheduling.plan_builder import sample_of
from jaxpage.scheduling.queues import POLICIES, WaitingQueue
from jaxpage.scheduling.scheduler import Scheduler

__all__ = ["POLICIES", "Preemption", "Scheduler", "WaitingQueue", "apply_edit", "sample_of"]
