"""Says how texts become vectors, and pairs of texts scores."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxpage.lazy import open_door

if TYPE_CHECKING:
    from jaxpage.engine.texts.embedding import (
        TextEmbedding,  # says how texts become vectors
        check_dimensions,  # checks how many dimensions a call asks for
    )
    from jaxpage.engine.texts.encoding import (
        Side,  # names the sides at which a prompt may be cut
        Truncation,  # says how prompts that are too long are cut
        check_scored_whole,  # refuses to cut token ids that are scored
        encode,  # encodes a text, or two that are read together
        encode_together,  # encodes several texts in one call
        truncation_of,  # checks how many tokens of a prompt stay
    )
    from jaxpage.engine.texts.reranking import (
        ByPairs,  # ranks by the scores of a cross-encoder
        ByVectors,  # ranks by vectors
        Pair,  # holds a query and a document
        RerankMethod,  # names the ways of ranking
        YesNo,  # ranks by the probabilities of two tokens
        are_texts,  # tells texts from token ids
        check_documents,  # gives the documents of a caller as a list
        check_pairs,  # gives the pairs of texts of a caller as a list
        check_truncatable,  # refuses to cut prompts whose ends matter
        pair_up,  # puts each text with another one
        rank,  # puts documents in the order of their scores
        reranker_of,  # says how a model ranks documents
    )

__getattr__, __dir__ = open_door(__name__)
