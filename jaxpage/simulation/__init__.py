"""Drives the engine's scheduler with a cost model in place of a device.

A run says what a schedule costs in virtual time, and what the scheduler costs in host time. Other
rooms take:

    PagedScheduler  is the engine's own scheduler, as a policy of the simulator
    CostModel       says how long a step takes
    ShapeCost       takes the costs from the measured times of an engine's shapes
    read_costs      reads a cost model from a file
    costs_as_dict   gives the fields of a cost model, for such a file
    Question        holds a configuration, its requests, and the SLO that they must keep
    AtRate          holds the results at one rate
    at_rate         simulates one rate
    highest_rate    searches the highest rate that is sustained
    SUSTAINED       is the share of the requests that must keep the SLO
    SEEDS           are the seeds of the runs at each rate
    LENGTHS         holds the distributions of lengths by name
"""

from jaxpage.simulation.costs import CostModel
from jaxpage.simulation.policies import PagedScheduler
from jaxpage.simulation.shape_costs import ShapeCost, costs_as_dict, read_costs
from jaxpage.simulation.sustained_rate import (
    SEEDS,
    SUSTAINED,
    AtRate,
    Question,
    at_rate,
    highest_rate,
)
from jaxpage.simulation.traces import LENGTHS

__all__ = [
    "LENGTHS",
    "SEEDS",
    "SUSTAINED",
    "AtRate",
    "CostModel",
    "PagedScheduler",
    "Question",
    "ShapeCost",
    "at_rate",
    "costs_as_dict",
    "highest_rate",
    "read_costs",
]
