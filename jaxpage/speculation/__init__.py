"""Drafts of what may follow, and how many of them are worth their cost. Never imports jax."""

from jaxpage.speculation.methods import make_proposer
from jaxpage.speculation.proposal import Candidates, Draft, Proposer, chain

__all__ = ["Candidates", "Draft", "Proposer", "chain", "make_proposer"]
