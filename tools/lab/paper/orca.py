"""Simulates Orca, as the PagedAttention paper built it to compare with.

It schedules by iterations, over reservations of a buddy allocator.
"""

from __future__ import annotations

from collections.abc import Mapping

from jaxpage.step.request import Request
from tools.lab.paper.reserving import MAX_MODEL_LEN, Reservation, ReservingScheduler


def max_length(request: Request) -> int:
    """Returns the slots for Max: those of the longest sequence that the model takes."""
    return max(MAX_MODEL_LEN, request.max_total_tokens)


def next_power(request: Request) -> int:
    """Returns the slots for Pow2: the output is rounded up to a power of two.

    This is as if the output were known within a factor of two.
    """
    num_prompt = len(request.prompt_token_ids)
    output = 1 << (request.max_total_tokens - num_prompt - 1).bit_length()
    return max(min(num_prompt + output, MAX_MODEL_LEN), request.max_total_tokens)


def exact(request: Request) -> int:
    """Returns the slots for Oracle: the output is known beforehand, which no real system can do."""
    return request.max_total_tokens


RESERVATIONS: Mapping[str, Reservation] = {"Max": max_length, "Pow2": next_power, "Oracle": exact}


class Orca(ReservingScheduler):
    """Lets requests join and leave between any two steps, as in the engine, but reserves memory."""

    def __init__(
        self,
        num_slots: int,
        variant: str,
        *,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 2560,
    ) -> None:
        """Makes a scheduler.

        Args:
            num_slots: The slots of the pool.
            variant: A key of `RESERVATIONS`.
            max_num_seqs: The most sequences of a step.
            max_num_batched_tokens: The most tokens of a step.
        """
        super().__init__(
            num_slots,
            RESERVATIONS[variant],
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
        )
