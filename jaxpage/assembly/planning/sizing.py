"""Computes how many KV blocks fit, before anything is loaded.

It also makes the table that says so at start-up. The number of blocks is part of the shape of every
executable. So a default does not follow what happens to be free: on CPU it is fixed by the model
and the settings, and halved where it does not fit; on an accelerator it is rounded. Then the next
start finds the executables that this one compiled.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from jaxpage.errors import CapacityError
from jaxpage.tables import gib

# The share of the free host memory that a pool may take; other programs need memory, too.
HOST_SHARE = 0.5
# A pool on CPU has room for `max_num_seqs` sequences of so many tokens by default. Those of
# ShareGPT have 500 on average.
TOKENS_ON_HOST = 512
MAX_BYTES_ON_HOST = 4 * 2**30  # the largest default of a pool on CPU
_SIGNIFICANT_BITS = 6  # the number of blocks on an accelerator has no more: at most 3 % are lost


class WindowBlocks(NamedTuple):
    """Describes a cache group whose layers see a window, in a model with others that see more.

    The layers are recurrent if `is_state`.
    """

    sliding_window: int  # tokens
    block_bytes: int
    sequence_blocks: int  # the most that one sequence holds at a time
    max_blocks: int  # the most that all sequences hold at a time: its pool is no larger
    is_state: bool = False

    @property
    def described(self) -> str:
        """Returns the name of the group's row in the table."""
        return "state blocks" if self.is_state else f"KV blocks, window {self.sliding_window:,}"


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Holds the plan of where the memory goes, in bytes except where a name says otherwise."""

    device: str
    available_bytes: int  # for everything that this engine will allocate
    weights_bytes: int
    workspace_bytes: int  # temporary memory of the largest step
    block_bytes: int  # one block in all layers
    block_size: int
    num_blocks: int  # the blocks of the first cache group, the null block included
    max_model_len: int
    # The most that one sequence holds at a time, where a window slides.
    max_sequence_blocks: int | None = None
    windows: tuple[WindowBlocks, ...] = ()  # the other cache groups
    # Numbers of blocks that the attention kernels do not take: the first, and the next that they
    # take.
    unaddressable: tuple[int, int] = (0, 0)
    num_devices: int = 1  # the plan is that of each; the host has the blocks of all
    # The blocks for swapping, without the null block of the host; 0: nothing is swapped.
    num_host_blocks: int = 0
    swaps_to_file: bool = False  # host blocks lie in a file, since memory has no room for them
    vision_bytes: int = 0  # the part of the weights that an encoder of pictures has
    encoder_cache_bytes: int = 0  # the most of the host that encoded pictures take

    @property
    def pool_bytes(self) -> int:
        """Returns the bytes of the pools of all cache groups."""
        return self.bytes_of(self.num_blocks)

    @property
    def first_block_bytes(self) -> int:
        """Returns the bytes of a block in the layers of the first group."""
        return self.block_bytes - sum(window.block_bytes for window in self.windows)

    def blocks_of_groups(self, num_blocks: int) -> tuple[int, ...]:
        """Returns the blocks of every group, null blocks included; the first has `num_blocks`."""
        return (num_blocks, *(min(num_blocks, 1 + window.max_blocks) for window in self.windows))

    def bytes_of(self, num_blocks: int) -> int:
        """Returns the bytes of all groups, null blocks included; the first has `num_blocks`."""
        sizes = (self.first_block_bytes, *(window.block_bytes for window in self.windows))
        return sum(
            math.prod(pair) for pair in zip(sizes, self.blocks_of_groups(num_blocks), strict=True)
        )

    def max_blocks(self, num_bytes: int) -> int:
        """Returns the most blocks of the first group with which all groups fit in `num_bytes`.

        The null block is included.
        """
        # As if every group had as many blocks as the first; and below, as if the others had none.
        minimum = num_bytes // self.block_bytes
        maximum = num_bytes // self.first_block_bytes
        return minimum + bisect.bisect_right(
            range(minimum + 1, maximum + 1), num_bytes, key=self.bytes_of
        )

    @property
    def free_bytes(self) -> int:
        """Returns the bytes that weights and workspace leave; negative where they do not fit."""
        return self.available_bytes - self.weights_bytes - self.workspace_bytes

    @property
    def host_pool_bytes(self) -> int:
        """Returns the bytes of the host blocks of all devices; 0 if nothing is swapped."""
        return (
            self.num_devices * self.bytes_of(self.num_host_blocks + 1)
            if self.num_host_blocks
            else 0
        )

    @property
    def num_slots(self) -> int:
        """Returns the tokens that the first group's pool can hold; the null block holds none."""
        return (self.num_blocks - 1) * self.block_size

    def num_users(self, length: int) -> int:
        """Returns how many sequences of `length` tokens the pools hold at once, in whole blocks."""
        first, *further = self.blocks_of_groups(self.num_blocks)
        users = [(first - 1) // self.blocks_for(length)]
        for window, num_blocks in zip(self.windows, further, strict=True):
            users.append((num_blocks - 1) // min(self.blocks_for(length), window.sequence_blocks))
        return min(users)

    def blocks_for(self, length: int) -> int:
        """Returns the most blocks of the first group that `length` tokens take at a time."""
        return min(-(-length // self.block_size), self.max_sequence_blocks or length)

    def rows(self) -> list[tuple[str, str]]:
        """Returns the rows of the table for start-up: names and values."""
        if not self.block_bytes:  # an encoder keeps nothing of a text
            return [
                ("device", self.device),
                ("available memory", gib(self.available_bytes)),
                ("weights", gib(self.weights_bytes)),
                ("workspace", gib(self.workspace_bytes)),
                ("tokens of a text", f"{self.max_model_len:,}"),
            ]
        sequences = (self.num_blocks - 1) / self.blocks_for(self.max_model_len)
        host = (
            f"{self.num_host_blocks:,}, "
            f"{gib(self.host_pool_bytes)}{' in a file' if self.swaps_to_file else ''}"
        )
        counts = self.blocks_of_groups(self.num_blocks)[1:]
        return [
            (
                "device",
                self.device
                if self.num_devices == 1
                else f"{self.num_devices} x {self.device}, each as follows",
            ),
            ("available memory", gib(self.available_bytes)),
            ("weights", gib(self.weights_bytes)),
            *(
                [
                    ("encoder of pictures", f"{gib(self.vision_bytes)} of the weights"),
                    ("encoded pictures", f"up to {gib(self.encoder_cache_bytes)} of the host"),
                ]
                if self.vision_bytes
                else []
            ),
            ("workspace", gib(self.workspace_bytes)),
            ("KV pool", gib(self.pool_bytes)),
            (
                "KV blocks",
                f"{self.num_blocks - 1:,} of {self.block_size} slots, "
                f"{gib(self.first_block_bytes)} each",
            ),
            *(
                (window.described, f"{count - 1:,}, {gib(window.block_bytes)} each")
                for window, count in zip(self.windows, counts, strict=True)
            ),
            ("KV tokens", f"{self.num_slots:,}"),
            *([("host blocks for swapping", host)] if self.num_host_blocks else []),
            (f"sequences of {self.max_model_len:,} tokens", f"{sequences:,.1f}"),
        ]


def choose_num_blocks(
    plan: MemoryPlan,
    *,
    requested: int | None,
    pool_bytes: int | None,
    max_num_seqs: int,
    narrower_dtype: str | None = None,
    utilization: float = 1.0,
) -> MemoryPlan:
    """Returns the plan with `num_blocks` filled in: the caller's number or bytes, else a default.

    Args:
        plan: The plan without the number of blocks.
        requested: The caller's number of blocks, or None.
        pool_bytes: The caller's bytes for the pools, or None.
        max_num_seqs: The most sequences that run at once.
        narrower_dtype: A type of half the width that the weights have, if there is one, for the
            advice.
        utilization: The share of the device that `available_bytes` is, for the advice.

    Raises:
        CapacityError: The blocks do not fit; the text has the numbers and what would help.
    """
    minimum = 1 + -(-2 // plan.block_size)  # the null block, and two slots
    free = plan.free_bytes
    if free < minimum * plan.block_bytes:
        advice = _how_to_make_room(
            plan, minimum * plan.block_bytes - free, narrower_dtype, utilization
        )
        raise CapacityError(
            _does_not_fit(plan, "Weights and workspace leave no room for KV blocks", advice)
        )
    setting = "num_blocks" if requested is not None else "kv_cache_memory_bytes"
    if requested is None:
        if pool_bytes is not None:
            requested = plan.max_blocks(pool_bytes)
        elif plan.device.startswith("cpu"):
            requested = 1 + _halve(
                _useful_on_host(plan, max_num_seqs), plan.max_blocks(int(free * HOST_SHARE)) - 1
            )
        else:
            requested = 1 + _round_down(plan.max_blocks(free) - 1)
            if requested in range(*plan.unaddressable):
                requested = plan.unaddressable[0] - 1
    plan = replace(plan, num_blocks=requested)
    if plan.pool_bytes > free:
        maximum = plan.max_blocks(free) if setting == "num_blocks" else free
        advice = f"Lower {setting} to {maximum} or less, or leave it out to take what fits."
        raise CapacityError(
            _does_not_fit(plan, f"{requested} KV blocks take {gib(plan.pool_bytes)}", advice)
        )
    if requested in range(*plan.unaddressable):
        first, beyond = plan.unaddressable
        sizes = [f"{count} ({gib(plan.bytes_of(count))})" for count in (first - 1, beyond)]
        raise CapacityError(
            f"{setting} gives {requested} KV blocks, with which the one-byte keys of a layer have "
            "2^31 elements or more: the attention "
            f"kernels for GPUs cannot address them. Use {sizes[0]} or fewer, or {sizes[1]} or "
            "more, or attention_backend 'scan'."
        )
    if requested < minimum:
        enough = minimum if setting == "num_blocks" else minimum * plan.block_bytes
        advice = f"Set {setting} to {enough} or more; {gib(free)} are free for the pool."
        reason = f"A pool of {requested} blocks (one is the null block) holds no sequence"
        raise CapacityError(_does_not_fit(plan, reason, advice))
    return plan


def _useful_on_host(plan: MemoryPlan, max_num_seqs: int) -> int:
    """Returns how many blocks are of use on a CPU, at most as many as 4 GiB hold.

    They are for `max_num_seqs` sequences of usual length, and at least for one of `max_model_len`.
    """
    usual = max_num_seqs * plan.blocks_for(min(plan.max_model_len, TOKENS_ON_HOST))
    return max(
        1,
        min(
            max(usual, plan.blocks_for(plan.max_model_len)),
            plan.max_blocks(MAX_BYTES_ON_HOST) - 1,
        ),
    )


def _halve(number: int, maximum: int) -> int:
    """Returns the number, halved as often as needed to be at most `maximum`."""
    while number > maximum:
        number //= 2
    return number


def _round_down(number: int) -> int:
    """Returns the number rounded down to a few significant bits."""
    return number >> (shift := max(0, number.bit_length() - _SIGNIFICANT_BITS)) << shift


def choose_num_host_blocks(
    plan: MemoryPlan, *, requested: int | None, available: int, on_disk: int = 0
) -> MemoryPlan:
    """Returns the plan with `num_host_blocks` filled in: the caller's number, else a default.

    The default is the number of blocks on the device, halved until half of the free memory holds
    them.

    Args:
        plan: The plan with the number of blocks on the device.
        requested: The caller's number of host blocks, or None.
        available: The unused bytes of the host. On CPU the weights, the workspace and the KV pool
            will take their part of them.
        on_disk: The bytes that a file may take, for the caller's number where memory does not hold
            it.

    Raises:
        CapacityError: The caller's number does not fit; the text has the numbers.
    """
    taken = (
        plan.weights_bytes + plan.workspace_bytes + plan.pool_bytes
        if plan.device.startswith("cpu")
        else 0
    )
    free = max(0, available - plan.num_devices * taken)
    if requested is None:
        # One block of the host's is the null block.
        fitting = max(0, plan.max_blocks(int(free * HOST_SHARE) // plan.num_devices) - 1)
        return replace(plan, num_host_blocks=_halve(plan.num_blocks - 1, fitting))
    plan = replace(plan, num_host_blocks=requested)
    if plan.host_pool_bytes <= free:
        return plan
    if plan.host_pool_bytes <= on_disk:
        return replace(plan, swaps_to_file=True)
    fitting = max(0, plan.max_blocks(max(free, on_disk) // plan.num_devices) - 1)
    disk = f", and of prefix_cache_directory and its disk {gib(on_disk)}" if on_disk else ""
    raise CapacityError(
        f"{requested} host blocks for swapping and the null block take "
        f"{gib(plan.host_pool_bytes)}, but of the host's memory "
        f"{gib(free)} are free{disk}; a block of {plan.block_size} slots takes "
        f"{gib(plan.num_devices * plan.block_bytes)}. "
        f"Lower swap_space_blocks to {fitting} or less, leave it out to take what fits, or free "
        "memory."
    )


def _does_not_fit(plan: MemoryPlan, reason: str, advice: str) -> str:
    return (
        f"{reason}: of {gib(plan.available_bytes)} available on {plan.device}, weights take "
        f"{gib(plan.weights_bytes)} and the "
        f"workspace {gib(plan.workspace_bytes)}; a block of {plan.block_size} slots takes "
        f"{gib(plan.block_bytes)}. {advice}"
    )


def _how_to_make_room(
    plan: MemoryPlan, missing: int, narrower_dtype: str | None, utilization: float
) -> str:
    """Returns the ways that would make room for `missing` bytes, and no other ways."""
    ways = []
    if narrower_dtype and plan.weights_bytes // 2 >= missing:
        ways.append(
            f"use dtype {narrower_dtype}, in which the weights take {gib(plan.weights_bytes // 2)}"
        )
    if plan.workspace_bytes > missing:
        maximum = gib(plan.workspace_bytes - missing)
        ways.append(
            f"lower max_num_batched_tokens or max_num_seqs until the workspace takes {maximum} or less"
        )
    whole = plan.available_bytes / utilization
    if plan.available_bytes + missing <= whole:
        minimum = math.ceil(100 * (plan.available_bytes + missing) / whole) / 100
        ways.append(f"raise gpu_memory_utilization to {minimum:g} or more")
    ways.append(
        "free memory"
        if plan.device.startswith("cpu")
        else "free memory of the device, or use a larger one, or several (tensor_parallel_size)"
    )
    return f"{gib(missing)} are missing: {'; or '.join(ways)}."
