"""Drafts of what may follow, and how many of them are worth their cost. Never imports jax; what is drafted changes no text."""

from jaxpage.speculation.methods import make_proposer
from jaxpage.speculation.proposal import Draft, Proposer, chain

__all__ = ["Draft", "Proposer", "chain", "make_proposer"]
