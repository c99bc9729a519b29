"""Proposers for tests: they know what follows, and are wrong where a test wants them to be."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping

import numpy as np

from jaxpage import LLM
from jaxpage.engine.engine import Engine
from jaxpage.speculation import Proposer, ProposingSpeculator
from jaxpage.step.draft import Draft, chain
from jaxpage.step.request import Request, Sequence

# settings of the engines in which these stand
DRAFTING = {"method": "ngram", "num_speculative_tokens": 4}


class Scripted(Proposer):
    """Drafts what a sequence will be, so many right tokens and wrong ones behind them. `heard`:
    what it was told of each sequence.
    """

    def __init__(
        self,
        texts: Mapping[int, list[int]],
        script: Callable[[int, int], tuple[int, int]],
        vocab_size: int = 257,
    ) -> None:
        """
        Args:
            texts: by sequence id, all its tokens in the end.
            script: by sequence id and number of known tokens: how many right drafts, and how many
            wrong ones.
        """
        self.texts, self.script, self.vocab_size = texts, script, vocab_size
        self.heard: dict[int, list[int]] = {}

    def propose(self, request: Request, sequence: Sequence, num_drafts: int) -> Draft | None:
        sequence_id, token_ids = sequence.sequence_id, sequence.token_ids
        known = len(token_ids)
        num_right, num_wrong = self.script(sequence_id, known)
        right = list(self.texts.get(sequence_id, ())[known : known + num_right])
        follows = [*self.texts.get(sequence_id, ())[known + len(right) :], *[0] * num_wrong]
        wrong = [(token_id + 1) % self.vocab_size for token_id in follows[:num_wrong]]
        self.heard[sequence_id] = list(token_ids)
        return chain(tuple([*right, *wrong][:num_drafts]))


def mixed_up(sequence_id: int, known: int) -> tuple[int, int]:
    """Returns a script with some of everything."""
    digest = zlib.crc32(f"{sequence_id} {known}".encode())
    return digest % 5, digest // 5 % 3


class Guesses(Proposer):
    """Trees and chains of tokens without any sense."""

    def __init__(self, vocab_size: int = 257) -> None:
        self.vocab_size = vocab_size

    def propose(self, request: Request, sequence: Sequence, num_drafts: int) -> Draft | None:
        sequence_id, token_ids = sequence.sequence_id, sequence.token_ids
        rng = np.random.default_rng(
            zlib.crc32(str((sequence_id, len(token_ids), token_ids[-1])).encode())
        )
        length = int(rng.integers(0, num_drafts + 1))
        tokens = tuple(rng.integers(0, self.vocab_size, length).tolist())
        if rng.integers(2):
            return chain(tokens)
        return Draft(
            tokens, tuple(int(rng.integers(-1, index)) if index else -1 for index in range(length))
        )


def draft_with(engine: Engine, proposer: Proposer, *, always_drafts: bool = False) -> None:
    """Makes the engine verify what this proposer drafts, as much of it as its shapes hold."""
    engine.speculator = ProposingSpeculator(
        proposer,
        engine.scheduler.limits,
        None,
        vocab_size=engine.builder.vocab_size,
        strategies=engine._strategies,
        always_drafts=always_drafts,
    )


def without_drafts(llm: LLM) -> None:
    draft_with(llm._engine, Scripted({}, lambda *_: (0, 0)))
