"""Turns the draws of a request into its text.

A strategy decodes one request: it sees the tokens that were drawn, answers with edits, and never
touches a block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxpage.lazy import open_door

if TYPE_CHECKING:
    from jaxpage.decoding.advancing import (
        advance,  # gives the draws of a step to the strategies, and collects their edits
        masks_of,  # asks the strategies for the token masks of a step
    )
    from jaxpage.decoding.beam import (
        BeamStrategy,  # decodes by beam search
        hypothesis_score,  # is the score by which a beam search compares hypotheses
    )
    from jaxpage.decoding.constraints import (
        Constraint,  # follows one sequence through its grammar
        Grammar,  # holds a compiled grammar
    )
    from jaxpage.decoding.grammar_compiler import (
        GrammarCompiler,  # compiles grammars in a process of its own
    )
    from jaxpage.decoding.grammars import (
        json_rule,  # writes a JSON schema as a rule of a grammar
    )
    from jaxpage.decoding.json_schemas import (
        ENFORCED_FORMATS,  # are the values of `format` in JSON schemas that grammars enforce
        KNOWN_FORMATS,  # are the enforced formats and the labels, which restrict nothing
        find_unsupported_keyword,  # names a keyword of a schema that no grammar enforces
    )
    from jaxpage.decoding.mask_budget import (
        MaskBudget,  # bounds the processor time that grammars take
    )
    from jaxpage.decoding.sampling import (
        SamplingStrategy,  # decodes by greedy decoding or sampling
    )
    from jaxpage.decoding.stopping import (
        Detokenizer,  # turns tokens into text as they come
        Stopping,  # finds the end of one sequence
    )

__getattr__, __dir__ = open_door(__name__)
