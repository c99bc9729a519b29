"""Which proposer a configuration asks for."""

from __future__ import annotations

from jaxpage.settings.speculative_config import SpeculativeConfig
from jaxpage.speculation.ahead import AheadProposer
from jaxpage.speculation.lookahead import LookaheadProposer
from jaxpage.speculation.ngram import NGramProposer
from jaxpage.speculation.proposal import Proposer
from jaxpage.speculation.recycling import RecyclingProposer
from jaxpage.speculation.suffix import SuffixProposer


def make_proposer(config: SpeculativeConfig, vocab_size: int) -> Proposer:
    """Of the methods that need nothing but settings. `config` is one that `problems` and `refused` have nothing against.

    Raises ValueError for another method.
    """
    if config.method == "ngram":
        return NGramProposer(*config.prompt_lookup)
    if config.method == "suffix":
        return SuffixProposer(config.suffix_decoding, tree=config.tree)
    if config.method == "lookahead":
        return LookaheadProposer(config.lookahead)
    if config.method == "token_recycling":
        return RecyclingProposer(vocab_size, tree=config.tree)
    if config.method in ("draft_model", "eagle", "eagle3"):
        return AheadProposer()
    raise ValueError(f"method {config.method!r} needs more than its settings")
