"""Drafts of what may follow, and how many of them are worth their cost. Never imports jax; what is drafted changes no text."""

from jaxpage.speculation.proposal import Draft, chain

__all__ = ["Draft", "chain"]
