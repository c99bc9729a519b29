"""Lists for `jaxpage plan --devices N` the ways to divide N devices into equal replicas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from jaxpage.assembly.planning import MemoryPlan, ModelLayout
from jaxpage.errors import CapacityError, JaxpageError
from jaxpage.tables import align, gib


class Planned(Protocol):
    """A layout with its memory plan, as `cli.plan.Option` has it."""

    @property
    def layout(self) -> ModelLayout:
        """Returns the layout."""

    @property
    def plan(self) -> MemoryPlan | None:
        """Returns the memory plan of each device, or None."""

    @property
    def error(self) -> JaxpageError | None:
        """Returns why there is no plan, or None."""

    def num_users(self, length: int) -> int:
        """Returns how many users of this many tokens fit."""


def divisions(
    option_of: Callable[[ModelLayout], Planned], layout: ModelLayout, num_devices: int
) -> list[Planned]:
    """Returns one replica of each division; its number of devices divides that of all devices.

    Args:
        option_of: Plans a layout.
        layout: The layout of a replica, but for its number of devices.
        num_devices: The number of all devices.
    """
    sizes = (size for size in range(1, num_devices + 1) if num_devices % size == 0)
    return [option_of(replace(layout, tensor_parallel_size=size)) for size in sizes]


def lines(options: list[Planned], num_devices: int, length: int) -> list[str]:
    """Returns the table of the divisions, as lines."""
    lengths = (length, 4 * length)
    users_of = [f"users of {each:,}" for each in lengths]
    rows: list[tuple[str, ...]] = [
        (
            "tensor parallel",
            "replicas",
            "weights of a device",
            "KV tokens of a replica",
            *users_of,
            "",
        )
    ]
    for option in options:
        size = option.layout.tensor_parallel_size
        plan = option.plan
        reason = "does not fit" if isinstance(option.error, CapacityError) else str(option.error)
        numbers: tuple[str, ...] = ("", "", *("" for _ in lengths), reason)
        if plan is not None:
            users = (f"{num_devices // size * option.num_users(each):,}" for each in lengths)
            numbers = (gib(plan.weights_bytes), f"{plan.num_slots:,}", *users, "")
        rows.append((str(size), str(num_devices // size), *numbers))
    title = (
        f"{num_devices} devices as replicas, each on one or more of them "
        "(tensor_parallel_size), and how many users"
        " fit in the memory of all, by the tokens of each user:"
    )
    return ["", title, *align(rows)]


def as_dicts(options: list[Planned], num_devices: int, length: int) -> list[dict[str, Any]]:
    """Returns the divisions for JSON."""
    rows = []
    for option in options:
        size = option.layout.tensor_parallel_size
        plan = option.plan
        numbers = {"weights_bytes": plan.weights_bytes, "num_slots": plan.num_slots} if plan else {}
        users = num_devices // size * option.num_users(length)
        error = None if option.error is None else str(option.error)
        rows.append(
            {
                "tensor_parallel_size": size,
                "replicas": num_devices // size,
                **numbers,
                "users_of_all": users,
                "error": error,
            }
        )
    return rows
