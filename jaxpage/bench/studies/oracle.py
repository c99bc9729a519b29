"""Drafts the text that a run without drafts gave: the most that any method can reach."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Any

from jaxpage.assembly import Built
from jaxpage.llm import LLM
from jaxpage.settings.engine_config import EngineConfig
from jaxpage.settings.sampling_params import SamplingParams
from jaxpage.speculation import Proposer, ProposingSpeculator, Speculator
from jaxpage.step.draft import Draft, chain
from jaxpage.step.request import Request, Sequence


class OracleProposer(Proposer):
    """Drafts what follows in texts that are known beforehand."""

    def __init__(self) -> None:
        # By the tokens of the prompt and the seed.
        self._texts: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def learn(
        self, prompts: Items[list[int]], params: Items[SamplingParams], outputs: Items[list[int]]
    ) -> None:
        """Takes the outputs of the requests that come next, in place of all earlier ones.

        Args:
            prompts: The tokens of the prompts.
            params: The sampling parameters of each, with a seed.
            outputs: The tokens that follow each prompt.
        """
        self._texts = {
            (tuple(prompt), param.seed or 0): [*prompt, *output]
            for prompt, param, output in zip(prompts, params, outputs, strict=True)
        }

    def propose(self, request: Request, sequence: Sequence, num_drafts: int) -> Draft | None:
        """Drafts the next tokens of the text."""
        text = self._texts.get((request.prompt_token_ids, request.seed), [])
        start = len(sequence.token_ids)
        return chain(tuple(text[start : start + num_drafts]))


class OracleLLM(LLM):
    """An `LLM` with speculation whose drafts are those of an oracle.

    Attributes:
        oracle: The oracle.
    """

    def learn(
        self, prompts: Items[list[int]], params: Items[SamplingParams], outputs: Items[list[int]]
    ) -> None:
        """Tells the oracle what comes of the requests that come next; see `OracleProposer`."""
        self.oracle.learn(prompts, params, outputs)

    def _use(self, config: EngineConfig, built: Built, **options: Any) -> None:
        self.oracle = OracleProposer()
        _replace_proposer(built.engine.speculator, self.oracle)
        super()._use(config, built, **options)


def _replace_proposer(speculator: Speculator, proposer: Proposer) -> None:
    assert isinstance(speculator, ProposingSpeculator), "the config has speculation"
    speculator.proposer = proposer
