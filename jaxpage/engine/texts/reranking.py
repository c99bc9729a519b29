"""Scores pairs of texts, and ranks documents by how well they answer a query.

A model scores a query and a document in one of three ways. A cross-encoder reads both together, and
its head gives the score. A reranker that is a decoder is asked whether the document answers the
query, and the score is the probability of "yes" against that of "no" as the next token. Any other
model embeds both, and the score says how near the two vectors are: the cosine of the angle between
them, unless the model's files say otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from jaxpage.engine.texts.embedding import TextEmbedding
from jaxpage.engine.texts.encoding import Truncation, encode
from jaxpage.errors import ConfigError
from jaxpage.outputs import RequestOutput, RerankResult, TokenPooling
from jaxpage.settings.argument_checks import check_choice, show
from jaxpage.settings.field_table import MAX_LOGPROBS
from jaxpage.settings.sampling_params import SamplingParams

Pair = tuple[str, str]  # a query and a document
RerankMethod = Literal["auto", "yes_no", "embedding"]
# The template and the instruction are those of the model card of Qwen3-Reranker
# (https://huggingface.co/Qwen/Qwen3-Reranker-0.6B), whose training used them.
DEFAULT_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
_AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_MARKS = ("<|im_start|>", "<|im_end|>")


@dataclass(frozen=True)
class ByVectors:
    """Ranks by the vectors of query and documents.

    Attributes:
        embedding: The way in which texts become vectors.
    """

    embedding: TextEmbedding = field(default_factory=TextEmbedding)

    def inputs(
        self,
        pairs: Sequence[Pair],
        instruction: str | None = None,
        truncation: Truncation | None = None,
    ) -> tuple[list[Any], list[TokenPooling]]:
        """Returns the prompts whose vectors are computed, and how each is pooled.

        A query comes once, however many documents it is compared with. Whoever encodes the prompts
        cuts them.

        Args:
            pairs: Each query with its document.
            instruction: What to look for; None for what the model's files say.
            truncation: It changes nothing here.

        Raises:
            CheckpointError: Something in the model's files is not supported.
        """
        embedding = self.embedding
        embedding.files.check()
        before_query = self._before_query(instruction)
        before = embedding.files.document_prompt
        queries = list(dict.fromkeys(query for query, _ in pairs))
        texts = [
            *(before_query + query for query in queries),
            *(before + document for _, document in pairs),
        ]
        poolings = [
            *[embedding.pooling(None, before_query)] * len(queries),
            *[embedding.pooling(None, before)] * len(pairs),
        ]
        return texts, poolings

    def scores(
        self, pairs: Sequence[Pair], pooled: Sequence[npt.NDArray[np.float32]]
    ) -> list[float]:
        """Returns the score of each pair, given the pooled vectors of all prompts."""
        files = self.embedding.files
        normalize = True if files.similarity == "cosine" else None
        vectors = [files.finish(vector, normalize).astype(np.float64) for vector in pooled]
        queries = list(dict.fromkeys(query for query, _ in pairs))
        # The vectors of the documents follow those of the queries.
        of_query = dict(zip(queries, vectors, strict=False))
        return [
            _similarity(files.similarity, of_query[query], document)
            for (query, _), document in zip(pairs, vectors[len(queries) :], strict=True)
        ]

    def _before_query(self, instruction: str | None) -> str:
        """Returns the text before a query.

        An instruction is written as Qwen3-Embedding was trained with it.
        """
        files = self.embedding.files
        return f"Instruct: {instruction}\nQuery:" if instruction else files.query_prompt


@dataclass(frozen=True)
class ByPairs:
    """Ranks by the score that a cross-encoder gives of a query and a document.

    Attributes:
        embedding: The files of the model and its tokenizer, which joins the two texts.
    """

    embedding: TextEmbedding

    def inputs(
        self,
        pairs: Sequence[Pair],
        instruction: str | None = None,
        truncation: Truncation | None = None,
    ) -> tuple[list[Any], list[TokenPooling]]:
        """Returns the prompt of each pair, in which both texts are.

        Args:
            pairs: Each query with its document.
            instruction: None.
            truncation: The way in which a prompt is cut; None if it is not.

        Raises:
            ValueError: There is an instruction, which such a model was not trained with.
        """
        if instruction is not None:
            raise ValueError("instruction is not supported: a cross-encoder takes none")
        tokenizer = self.embedding.tokenizer
        assert tokenizer is not None, "a model without one ranks no texts"
        prompts = []
        poolings = []
        for query, document in pairs:
            encoding = encode(tokenizer, query, document, truncation=truncation)
            prompts.append({"prompt": document, "prompt_token_ids": encoding.token_ids})
            poolings.append(TokenPooling((), second_text=encoding.second_text))
        return prompts, poolings

    def scores(
        self, pairs: Sequence[Pair], pooled: Sequence[npt.NDArray[np.float32]]
    ) -> list[float]:
        """Returns the score of each pair, given the one number that the head made of it."""
        return [self.embedding.files.pair_score(float(row[0])) for row in pooled]


def _similarity(name: str, query: np.ndarray, document: np.ndarray) -> float:
    """Returns how near two vectors are: the greater, the nearer."""
    if name in ("cosine", "dot"):
        return float(query @ document)
    order = 2 if name == "euclidean" else 1
    return -float(np.linalg.norm(query - document, ord=order))


@dataclass(frozen=True)
class YesNo:
    """Ranks by the probabilities of two tokens.

    They are drawn in up to two rounds. In the first only the two may be drawn, and the drawn one
    has its log probability; so has the other if it is among the most likely tokens. Where it is
    not, the second round draws it, and finds the prompt in the prefix cache.

    Attributes:
        yes: The token that says that a document answers the query.
        no: The token that says the opposite.
    """

    yes: int
    no: int

    def texts(self, pairs: Sequence[Pair], instruction: str | None = None) -> list[str]:
        """Returns the prompt of each pair of a query and a document."""
        requested = instruction or DEFAULT_INSTRUCTION
        return [
            f"{_BEFORE}<Instruct>: {requested}\n<Query>: {query}\n<Document>: {document}{_AFTER}"
            for query, document in pairs
        ]

    @property
    def first(self) -> SamplingParams:
        """Returns the parameters of the first round."""
        return _drawing(self.yes, self.no)

    def drawing(self, token: int) -> SamplingParams:
        """Returns the parameters of the second round for a prompt that lacks this token."""
        return _drawing(token)

    def missing(self, outputs: Sequence[RequestOutput]) -> dict[int, int]:
        """Returns the token that each output of the first round lacks, by the output's index.

        An output that lacks none is left out.
        """
        tokens = {self.yes, self.no}
        return {
            index: token
            for index, output in enumerate(outputs)
            for token in tokens - _logprobs(output).keys()
        }

    def scores(
        self, outputs: Sequence[RequestOutput], others: Mapping[int, RequestOutput]
    ) -> list[float]:
        """Returns the score of each document.

        Args:
            outputs: The outputs of the first round.
            others: Those of the second, by the index of the first.
        """
        scores = []
        for index, output in enumerate(outputs):
            logprobs = _logprobs(output)
            if index in others:
                logprobs |= _logprobs(others[index])
            scores.append(_sigmoid(logprobs[self.yes] - logprobs[self.no]))
        return scores


def _drawing(*tokens: int) -> SamplingParams:
    return SamplingParams(
        temperature=0.0,
        max_tokens=1,
        ignore_eos=True,
        allowed_token_ids=tokens,
        logprobs=MAX_LOGPROBS,
    )


def _logprobs(output: RequestOutput) -> dict[int, float]:
    """Returns the log probabilities that an output has, by token.

    Raises:
        RuntimeError: The step failed.
    """
    [drawn] = output.outputs
    entries = drawn.logprobs[0] if drawn.logprobs else None
    if drawn.finish_reason in ("error", "abort") or entries is None:
        raise RuntimeError(
            f"the engine failed during reranking: {drawn.stop_reason or drawn.finish_reason}"
        )
    return {token: entry.logprob for token, entry in entries.items()}


def _sigmoid(value: float) -> float:
    # Either form has the exponential of a number that is not positive, which cannot overflow.
    return 1 / (1 + math.exp(-value)) if value >= 0 else math.exp(value) / (1 + math.exp(value))


def reranker_of(
    embedding: TextEmbedding, method: RerankMethod = "auto"
) -> YesNo | ByVectors | ByPairs:
    """Returns the way in which a model ranks.

    A cross-encoder has one way. With "auto" a model that has the pooling of sentence-transformers
    ranks by vectors. Any other one whose tokenizer has the marks of the template, and "yes" and
    "no" as one token each, ranks by these tokens. The rest ranks by vectors.

    Args:
        embedding: The way in which the model embeds texts, with its tokenizer.
        method: The way, or "auto".

    Raises:
        ValueError: The method is unknown.
        ConfigError: The tokenizer lacks what the method needs.
    """
    check_choice("method", method, ("auto", "yes_no", "embedding"))
    if embedding.files.pair_activation is not None:
        if method == "auto":
            return ByPairs(embedding)
        raise ConfigError(
            f"method={method!r} is not supported: this model is a cross-encoder, which scores "
            "pairs of texts; leave the method out"
        )
    by_vectors = ByVectors(embedding)
    if method == "embedding" or (method == "auto" and embedding.files.is_stated):
        return by_vectors
    vocabulary = {} if embedding.tokenizer is None else embedding.tokenizer.get_vocab()
    if lacking := [text for text in (*_MARKS, "yes", "no") if text not in vocabulary]:
        if method == "auto":
            return by_vectors
        raise ConfigError(
            f"method='yes_no' needs the tokens {', '.join((*_MARKS, 'yes', 'no'))}, and the "
            f"model's tokenizer has no {', '.join(lacking)}: use method='embedding'"
        )
    return YesNo(vocabulary["yes"], vocabulary["no"])


def check_truncatable(reranker: YesNo | ByVectors | ByPairs, truncation: Truncation | None) -> None:
    """Raises ValueError if prompts of the model must not be cut, because their ends matter."""
    if truncation is not None and isinstance(reranker, YesNo):
        raise ValueError(
            "truncate_prompt_tokens is not supported: this model reads query and document within "
            "a template, whose end must stay; cut the documents before"
        )


def are_texts(argument: Any) -> bool:
    """Returns whether an argument is a text or a list of texts, and not token ids."""
    listed = [argument] if isinstance(argument, str) else argument
    is_list = isinstance(listed, list | tuple) and len(listed) > 0
    return is_list and all(isinstance(each, str) for each in listed)


def check_pairs(first: Any, second: Any) -> list[Pair]:
    """Returns the pairs of texts of a call; one text goes with each of several others.

    Raises:
        TypeError: An argument is neither a text nor a list of texts.
        ValueError: The numbers of texts differ.
    """
    texts: list[list[str]] = []
    for argument in (first, second):
        if not are_texts(argument):
            raise TypeError(
                f"both texts of a pair must be strings, or lists of strings; got {argument!r:.80}"
            )
        texts.append([argument] if isinstance(argument, str) else list(argument))
    return pair_up(*texts)


def pair_up(first: Sequence[str], second: Sequence[str]) -> list[Pair]:
    """Returns each of some texts with one of some others; a single text goes with all others.

    Raises:
        ValueError: The numbers of texts differ.
    """
    if len(first) not in (1, len(second)):
        raise ValueError(
            f"{len(first)} texts and {len(second)} make no pairs: give as many of both, or one "
            "first text"
        )
    return list(zip(first if len(first) > 1 else [*first] * len(second), second, strict=True))


def check_documents(query: Any, documents: Any, top_n: int | None, instruction: Any) -> list[str]:
    """Returns the documents of a call as a list.

    Raises:
        TypeError: The query or a document is no text.
        ValueError: There is no document, or `top_n` is less than 1.
    """
    if isinstance(documents, str) or not isinstance(documents, Iterable):
        raise TypeError(f"documents must be a list of strings; got {documents!r:.80}")
    texts: list[str] = list(documents)
    if wrong := [text for text in (query, *texts) if not isinstance(text, str)]:
        raise TypeError(f"query and documents must be strings; got {wrong[0]!r:.80}")
    if instruction is not None and not isinstance(instruction, str):
        raise TypeError(f"instruction must be a string or None; got {instruction!r:.80}")
    if not texts:
        raise ValueError("rerank needs at least one document")
    if top_n is not None and (isinstance(top_n, bool) or not isinstance(top_n, int) or top_n < 1):
        raise ValueError(f"top_n must be an integer of at least 1, or None; got {show(top_n)}")
    return texts


def rank(
    scores: Sequence[float], documents: Sequence[str], top_n: int | None
) -> list[RerankResult]:
    """Returns the documents with the highest scores first; of equal scores, in their order.

    Args:
        scores: The score of each document.
        documents: The documents.
        top_n: The most results; None for all.
    """
    order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
    return [RerankResult(index, scores[index], documents[index]) for index in order[:top_n]]
