"""Makes drafts of what may follow, and decides how many of them are worth their cost.

This room never imports jax. Other rooms take:

    Speculator           plans the drafts of each step, and learns from what was accepted
    NoSpeculation        plans none
    ProposingSpeculator  asks a proposer for drafts, and a controller how many to verify
    make_proposer        makes the proposer of a method
    Proposer             proposes drafts for each sequence
    DraftedModel         describes the model that drafts are for
    Controller           chooses the number of drafts that gives the most tokens per second
    DrafterSync          switches a device drafter on and off
    SpeculationCounts    counts drafts that were verified and accepted
    Choices              is a tree of drafts: each node is its path of ranks
    choices_of           gives the tree for a number of drafts
    assume_accuracies    says how often heads are taken to be right before they are measured
    NUM_RECYCLED         is the number of tokens that recycling keeps for each token
"""

from jaxpage.speculation.controller import Controller
from jaxpage.speculation.counts import SpeculationCounts
from jaxpage.speculation.drafter_sync import DrafterSync
from jaxpage.speculation.medusa import Choices, assume_accuracies, choices_of
from jaxpage.speculation.methods import DraftedModel, make_proposer
from jaxpage.speculation.proposal import Proposer
from jaxpage.speculation.recycling import NUM_RECYCLED
from jaxpage.speculation.speculator import NoSpeculation, ProposingSpeculator, Speculator

__all__ = [
    "NUM_RECYCLED",
    "Choices",
    "Controller",
    "DraftedModel",
    "DrafterSync",
    "NoSpeculation",
    "Proposer",
    "ProposingSpeculator",
    "SpeculationCounts",
    "Speculator",
    "assume_accuracies",
    "choices_of",
    "make_proposer",
]
