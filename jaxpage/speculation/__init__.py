"""Drafts of what may follow, and how many of them are worth their cost. Never imports jax."""

from jaxpage.speculation.methods import make_proposer
from jaxpage.speculation.proposal import Proposer

__all__ = ["Proposer", "make_proposer"]
