"""Lists the methods of speculation: how each makes its proposer, and what drafts on the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

from jaxpage.settings.speculative_config import SpeculativeConfig
from jaxpage.speculation.ahead import AheadProposer
from jaxpage.speculation.lookahead import LookaheadProposer
from jaxpage.speculation.medusa import Choices, MedusaProposer
from jaxpage.speculation.ngram import NGramProposer
from jaxpage.speculation.proposal import Proposer
from jaxpage.speculation.recycling import RecyclingProposer
from jaxpage.speculation.suffix import SuffixProposer

# On the device drafts come from heads or layers on the model's hidden states, from another model,
# or from the model's own most likely tokens.
DrafterKind = Literal["heads", "eagle_head", "mtp_head", "model", "top_ids"]


class DraftedModel(NamedTuple):
    """Describes the model that drafts are for, with what is known of its drafter."""

    vocab_size: int
    choices: Choices = ()  # the tree of drafts, where heads draft


class Method(NamedTuple):
    """Says how a method makes its proposer, and what it needs on the device besides the model."""

    make: Callable[[SpeculativeConfig, DraftedModel], Proposer]
    drafter: DrafterKind | None = None  # None: it drafts on the host


METHODS: Mapping[str, Method] = MappingProxyType(
    {
        "ngram": Method(lambda config, target: NGramProposer(*config.prompt_lookup)),
        "suffix": Method(
            lambda config, target: SuffixProposer(config.suffix_decoding, tree=config.tree)
        ),
        "lookahead": Method(lambda config, target: LookaheadProposer(config.lookahead)),
        "token_recycling": Method(
            lambda config, target: RecyclingProposer(target.vocab_size, tree=config.tree), "top_ids"
        ),
        "medusa": Method(lambda config, target: MedusaProposer(target.choices), "heads"),
        "draft_model": Method(lambda config, target: AheadProposer(), "model"),
        "eagle": Method(lambda config, target: AheadProposer(), "eagle_head"),
        "eagle3": Method(lambda config, target: AheadProposer(), "eagle_head"),
        "mtp": Method(lambda config, target: AheadProposer(), "mtp_head"),
    }
)


def make_proposer(config: SpeculativeConfig, target: DraftedModel) -> Proposer:
    """Returns the proposer of a method of speculation.

    `config` is one that its `problems` and `refused` have nothing against.
    """
    return METHODS[config.method].make(config, target)
