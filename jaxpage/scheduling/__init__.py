"""Which sequences take part in a step, and with how many tokens: a pure function of what is known, without clock or device."""

from jaxpage.scheduling.policy import Preemption
from jaxpage.scheduling.queues import POLICIES, WaitingQueue
from jaxpage.scheduling.scheduler import Scheduler

__all__ = ["POLICIES", "Preemption", "Scheduler", "WaitingQueue"]
