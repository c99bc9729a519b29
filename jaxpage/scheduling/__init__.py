"""Which sequences take part in a step, and with how many tokens: a pure function of what is known, without clock or device."""

from jaxpage.scheduling.plan import Row, Sample, StepPlan, StepResult
from jaxpage.scheduling.policy import StepLimits
from jaxpage.scheduling.scheduler import Scheduler

__all__ = ["Row", "Sample", "Scheduler", "StepLimits", "StepPlan", "StepResult"]
