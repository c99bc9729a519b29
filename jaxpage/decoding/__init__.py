"""Turns the draws of a request into its text.

A strategy decodes one request: it sees the tokens that were drawn, answers with edits, and never
touches a block.
"""

from jaxpage.decoding.advance import advance, masks_of
from jaxpage.decoding.beam import BeamStrategy, hypothesis_score
from jaxpage.decoding.constraints import Constraint, Grammar
from jaxpage.decoding.mask_budget import MaskBudget
from jaxpage.decoding.sampling import SamplingStrategy
from jaxpage.decoding.stopping import Detokenizer, Stopping

__all__ = [
    "BeamStrategy",
    "Constraint",
    "Detokenizer",
    "Grammar",
    "MaskBudget",
    "SamplingStrategy",
    "Stopping",
    "advance",
    "hypothesis_score",
    "masks_of",
]
