"""Makes the proposer of each method of speculation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from jaxpage.settings.speculative_config import SpeculativeConfig
from jaxpage.speculation.ahead import AheadProposer
from jaxpage.speculation.lookahead import LookaheadProposer
from jaxpage.speculation.medusa import Choices, MedusaProposer
from jaxpage.speculation.ngram import NGramProposer
from jaxpage.speculation.proposal import Proposer
from jaxpage.speculation.recycling import RecyclingProposer
from jaxpage.speculation.suffix import SuffixProposer


class DraftedModel(NamedTuple):
    """Describes the model that drafts are for, with what is known of its drafter."""

    vocab_size: int
    choices: Choices = ()  # the tree of drafts, where heads draft


# The methods that are not here draft with a model or a layer on the device.
_PROPOSERS: Mapping[str, Callable[[SpeculativeConfig, DraftedModel], Proposer]] = MappingProxyType(
    {
        "ngram": lambda config, target: NGramProposer(*config.prompt_lookup),
        "suffix": lambda config, target: SuffixProposer(config.suffix_decoding, tree=config.tree),
        "lookahead": lambda config, target: LookaheadProposer(config.lookahead),
        "token_recycling": lambda config, target: RecyclingProposer(
            target.vocab_size, tree=config.tree
        ),
        "medusa": lambda config, target: MedusaProposer(target.choices),
    }
)


def make_proposer(config: SpeculativeConfig, target: DraftedModel) -> Proposer:
    """Returns the proposer of a method of speculation.

    `config` is one that its `problems` and `find_refused` have nothing against.
    """
    make = _PROPOSERS.get(config.method)
    return make(config, target) if make else AheadProposer()
