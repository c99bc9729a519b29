"""How a request turns draws into text: strategies that see tokens and answer with edits, and never touch a block."""

from jaxpage.decoding.advance import advance, masks_of
from jaxpage.decoding.constraints import Constraint, Grammar
from jaxpage.decoding.edits import Append, Drop, Edit, Finish, Fork
from jaxpage.decoding.sampling import SamplingStrategy
from jaxpage.decoding.stopping import Detokenizer, Stopping
from jaxpage.decoding.strategy import Draw, Strategy

__all__ = [
    "Append",
    "Constraint",
    "Detokenizer",
    "Draw",
    "Drop",
    "Edit",
    "Finish",
    "Fork",
    "Grammar",
    "SamplingStrategy",
    "Stopping",
    "Strategy",
    "advance",
    "masks_of",
]
