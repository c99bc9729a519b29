"""Makes drafts of what may follow, and decides how many of them are worth their cost.

This room never imports jax.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxpage.lazy import open_door

if TYPE_CHECKING:
    from jaxpage.speculation.controller import (
        Controller,  # chooses the number of drafts that gives the most tokens per second
    )
    from jaxpage.speculation.counts import (
        SpeculationCounts,  # counts drafts that were verified and accepted
    )
    from jaxpage.speculation.drafter_sync import (
        DrafterSync,  # switches a device drafter on and off
    )
    from jaxpage.speculation.medusa import (
        Choices,  # is a tree of drafts: each node is its path of ranks
        assume_accuracies,  # says how often heads are taken to be right before they are measured
        choices_of,  # gives the tree for a number of drafts
    )
    from jaxpage.speculation.methods import (
        DraftedModel,  # describes the model that drafts are for
        make_proposer,  # makes the proposer of a method
    )
    from jaxpage.speculation.proposal import (
        Proposer,  # proposes drafts for each sequence
    )
    from jaxpage.speculation.recycling import (
        NUM_RECYCLED,  # is the number of tokens that recycling keeps for each token
    )
    from jaxpage.speculation.speculator import (
        NoSpeculation,  # plans no drafts
        ProposingSpeculator,  # asks a proposer for drafts, and a controller how many to verify
        Speculator,  # plans the drafts of each step, and learns from what was accepted
    )

__getattr__, __dir__ = open_door(__name__)
