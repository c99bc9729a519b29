"""How a request turns draws into text: strategies that see tokens and answer with edits, and never touch a block."""

from jaxpage.decoding.advance import advance, masks_of
from jaxpage.decoding.beam import BeamStrategy, hypothesis_score
from jaxpage.decoding.constraints import Constraint, Grammar
from jaxpage.decoding.edits import Append, Drop, Edit, Finish, Fork, Score
from jaxpage.decoding.sampling import SamplingStrategy
from jaxpage.decoding.stopping import Detokenizer, Stopping
from jaxpage.decoding.strategy import Draw, Strategy

__all__ = [
    "Append",
    "BeamStrategy",
    "Constraint",
    "Detokenizer",
    "Draw",
    "Drop",
    "Edit",
    "Finish",
    "Fork",
    "Grammar",
    "SamplingStrategy",
    "Score",
    "Stopping",
    "Strategy",
    "advance",
    "hypothesis_score",
    "masks_of",
]
