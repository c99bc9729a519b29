"""The methods of speculation: of each how its proposer is made, from its settings and the drafter that it needs on the device."""

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


class Target(NamedTuple):
    """The model that is drafted for, and what is known of the drafter beside it."""

    vocab_size: int
    choices: Choices = ()  # of heads: the tree of their guesses


METHODS: Mapping[str, Callable[[SpeculativeConfig, Target], Proposer]] = MappingProxyType(
    {
        "ngram": lambda config, target: NGramProposer(*config.prompt_lookup),
        "suffix": lambda config, target: SuffixProposer(config.suffix_decoding, tree=config.tree),
        "lookahead": lambda config, target: LookaheadProposer(config.lookahead),
        "token_recycling": lambda config, target: RecyclingProposer(target.vocab_size, tree=config.tree),
        "medusa": lambda config, target: MedusaProposer(target.choices),
        "draft_model": lambda config, target: AheadProposer(),
        "eagle": lambda config, target: AheadProposer(),
        "eagle3": lambda config, target: AheadProposer(),
    }
)


def make_proposer(config: SpeculativeConfig, target: Target) -> Proposer:
    """`config` is one that `problems` and `refused` have nothing against."""
    return METHODS[config.method](config, target)
