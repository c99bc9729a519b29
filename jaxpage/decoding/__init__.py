"""How a request turns draws into text: strategies that see tokens and answer with edits, and never touch a block."""

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
