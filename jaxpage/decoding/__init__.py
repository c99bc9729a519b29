"""Turns the draws of a request into its text.

A strategy decodes one request: it sees the tokens that were drawn, answers with edits, and never
touches a block. Other rooms take:

    SamplingStrategy  decodes by greedy decoding or sampling
    BeamStrategy      decodes by beam search
    hypothesis_score  is the score by which a beam search compares hypotheses
    advance           gives the draws of a step to the strategies, and collects their edits
    masks_of          asks the strategies for the token masks of a step
    GrammarCompiler   compiles grammars in a process of its own
    Grammar           holds a compiled grammar
    Constraint        follows one sequence through its grammar
    MaskBudget        bounds the processor time that grammars take
    Stopping          finds the end of one sequence
    Detokenizer       turns tokens into text as they come
    json_rule         writes a JSON schema as a rule of a grammar
    ENFORCED_FORMATS  are the values of `format` in JSON schemas that grammars enforce
    KNOWN_FORMATS     are those and the labels, which restrict nothing
    find_unsupported_keyword  names a keyword of a schema that no grammar enforces
"""

from jaxpage.decoding.advancing import advance, masks_of
from jaxpage.decoding.beam import BeamStrategy, hypothesis_score
from jaxpage.decoding.constraints import Constraint, Grammar
from jaxpage.decoding.grammar_compiler import GrammarCompiler
from jaxpage.decoding.grammars import json_rule
from jaxpage.decoding.json_schemas import ENFORCED_FORMATS, KNOWN_FORMATS, find_unsupported_keyword
from jaxpage.decoding.mask_budget import MaskBudget
from jaxpage.decoding.sampling import SamplingStrategy
from jaxpage.decoding.stopping import Detokenizer, Stopping

__all__ = [
    "ENFORCED_FORMATS",
    "KNOWN_FORMATS",
    "BeamStrategy",
    "Constraint",
    "Detokenizer",
    "Grammar",
    "GrammarCompiler",
    "MaskBudget",
    "SamplingStrategy",
    "Stopping",
    "advance",
    "find_unsupported_keyword",
    "hypothesis_score",
    "json_rule",
    "masks_of",
]
