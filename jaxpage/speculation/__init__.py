"""Makes drafts of what may follow, and decides how many of them are worth their cost.

This room never imports jax.
"""

from jaxpage.speculation.methods import make_proposer
from jaxpage.speculation.proposal import Proposer
from jaxpage.speculation.speculator import NoSpeculation, ProposingSpeculator, Speculator

__all__ = ["NoSpeculation", "Proposer", "ProposingSpeculator", "Speculator", "make_proposer"]
