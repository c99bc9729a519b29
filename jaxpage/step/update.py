"""Says what an update of the weights does to the requests that run."""

from __future__ import annotations

from typing import Literal, NamedTuple

# What happens to requests that run or wait when the model gets other weights: they finish first,
# they end, they go on with the keys and values that they have, or all their tokens are computed
# again.
Mode = Literal["wait", "abort", "keep", "recompute"]
# In these modes nothing has to finish or end before.
RUNNING_MODES = ("keep", "recompute")


class WeightsUpdate(NamedTuple):
    """Tells listeners of an update of the weights.

    Attributes:
        version: The version of the weights from here on.
        mode: What happened to the requests that ran.
        checksum: The hash of the new weights; on several hosts, of their files. None for those of
            the model's own checkpoint, and where nobody logs events.
        preempted: The ids of the requests that ran and compute all their tokens again.
    """

    version: int
    mode: Mode
    checksum: str | None = None
    preempted: tuple[str, ...] = ()
