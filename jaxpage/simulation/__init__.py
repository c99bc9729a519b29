"""Drives the engine's scheduler with a cost model in place of a device.

A run says what a schedule costs in virtual time, and what the scheduler costs in host time.
"""

from jaxpage.simulation.costs import CostModel  # says how long a step takes
from jaxpage.simulation.policies import (
    PagedScheduler,  # is the engine's own scheduler, as a policy of the simulator
)
from jaxpage.simulation.shape_costs import (
    ShapeCost,  # takes the costs from the measured times of an engine's shapes
    costs_as_dict,  # gives the fields of a cost model, for such a file
    read_costs,  # reads a cost model from a file
)
from jaxpage.simulation.sustained_rate import (
    SEEDS,  # are the seeds of the runs at each rate
    SUSTAINED,  # is the share of the requests that must keep the SLO
    AtRate,  # holds the results at one rate
    Question,  # holds a configuration, its requests, and the SLO that they must keep
    at_rate,  # simulates one rate
    highest_rate,  # searches the highest rate that is sustained
)
from jaxpage.simulation.traces import LENGTHS  # holds the distributions of lengths by name
