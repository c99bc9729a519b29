"""Pins a prefix for requests that begin with it: figure 16 of the PagedAttention paper.

It is computed once and stays in place.
"""

from __future__ import annotations

from jaxpage.scheduling import Scheduler
from jaxpage.settings.sampling_params import SamplingParams
from jaxpage.simulation.scripts import PREFIX_TOKEN
from jaxpage.step.edits import Append
from jaxpage.step.request import Request, Sequence, SequenceGroup

SEQUENCE_ID, PIN_ID = -1, -2  # ids that no request of a trace has


def pin_prefix(scheduler: Scheduler, num_tokens: int) -> None:
    """Computes and pins the prefix of `Arrival.num_prefix_tokens`, before anything else runs."""
    tokens = [PREFIX_TOKEN] * num_tokens
    request = Request(
        request_id="prefix",
        prompt=None,
        prompt_token_ids=tuple(tokens),
        params=SamplingParams(max_tokens=2, ignore_eos=True),
        seed=0,
        eos_token_ids=frozenset(),
        max_total_tokens=num_tokens + 2,
        is_prefix=True,
    )
    sequence = Sequence(SEQUENCE_ID, 0, num_tokens, tokens)
    scheduler.add(SequenceGroup(request, [sequence]))
    while sequence.num_computed_tokens < num_tokens:
        plan = scheduler.plan()
        assert plan is not None
        scheduler.commit(plan, [Append(sample.sequence_id, 0) for sample in plan.samples])
    scheduler.pin(PIN_ID, "prefix")
