"""Drafts of what may follow, and how many of them are worth their cost. Never imports jax."""

from jaxpage.speculation.methods import make_proposer
from jaxpage.speculation.proposal import Proposer
from jaxpage.speculation.speculator import NoSpeculation, ProposingSpeculator, Speculator

__all__ = ["NoSpeculation", "Proposer", "ProposingSpeculator", "Speculator", "make_proposer"]
