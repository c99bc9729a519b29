"""Draft models inside the step: what they draft is what transformers would draft behind the same tokens, and no draft changes a text."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxpage import LLM, SamplingParams
from jaxpage.device import drafting
from jaxpage.speculation import Draft
from tests.support.engines import LLAMA, invariants, make_llm
from tests.support.random_checkpoints import random_checkpoint

SMALL = {**LLAMA, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
NUM_DRAFTS = 12
KINDS = {"chains": False, "trees": True}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    configs = {"target": (LLAMA, 1), "draft": (SMALL, 2)}
    return {name: random_checkpoint(root / name, config, seed) for name, (config, seed) in configs.items()}


def start(directories: Mapping[str, Path], draft: str, *, tree: bool, **settings: Any) -> LLM:
    config = {
        "method": "draft_model",
        "model": str(directories[draft]),
        "num_speculative_tokens": NUM_DRAFTS,
        "tree": tree,
    }
    return make_llm(directories["target"], speculative_config=config, **settings)


@pytest.fixture(scope="module", params=KINDS)
def tight(request: pytest.FixtureRequest, directories: dict[str, Path]) -> Iterator[LLM]:
    """An engine whose requests give way to each other, with blocks that no draft ends on evenly."""
    with start(directories, "draft", tree=KINDS[request.param], block_size=4, num_blocks=48, max_model_len=128) as llm:
        yield llm


def prompts() -> list[list[int]]:
    """Two begin alike; one takes two chunks."""
    rng = np.random.default_rng(3)
    rows = [rng.integers(1, 257, size).tolist() for size in (5, 23, 75)]
    return [*rows, [*rows[1][:16], 7]]


def record(llm: LLM) -> list[tuple[tuple[int, ...], Draft]]:
    """Every draft from now on, behind which tokens."""
    drafts: list[tuple[tuple[int, ...], Draft]] = []
    propose = type(llm._engine.speculation).propose

    def listen(groups: Any) -> Any:
        proposed = propose(llm._engine.speculation, groups)
        for group in llm._engine.scheduler.running:
            for sequence in group.unfinished:
                if sequence.sequence_id in proposed:
                    drafts.append((tuple(sequence.token_ids), proposed[sequence.sequence_id]))
        return proposed

    llm._engine.propose = listen
    return drafts


class Reference:
    """transformers' model, and a tree grown from its logits by brute force."""

    def __init__(self, directory: Path):
        self._torch = pytest.importorskip("torch")
        transformers = pytest.importorskip("transformers")
        self._model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=self._torch.float64)

    def logprobs(self, token_ids: tuple[int, ...]) -> np.ndarray:
        with self._torch.no_grad():
            logits = self._model(self._torch.tensor([token_ids])).logits[0, -1]
        return self._torch.log_softmax(logits, -1).numpy()

    def paths(self, known: tuple[int, ...], levels: int, branches: int, num_drafts: int) -> list[tuple[int, ...]]:
        """Of the best drafts, each with what leads to it, best first."""
        frontier, found = [(0.0, ())], []
        for _ in range(levels):
            grown = []
            for score, path in frontier:
                logprobs = self.logprobs((*known, *path))
                grown += [(score + logprobs[t], (*path, int(t))) for t in np.argsort(-logprobs)[:branches]]
            frontier = sorted(grown, reverse=True)[:branches]
            found += grown
        return [path for _, path in sorted(found, reverse=True)[:num_drafts]]


@pytest.fixture(scope="module")
def reference(directories: dict[str, Path]) -> Reference:
    return Reference(directories["draft"])


def assert_as_the_reference(llm: LLM, drafts: list[tuple[tuple[int, ...], Draft]], reference: Reference) -> None:
    options = llm._engine.runner.executables.options.drafter
    assert options is not None and drafts
    for known, draft in drafts:
        paths = reference.paths(known, options.num_levels, options.num_branches, NUM_DRAFTS)
        assert [draft.path(index) for index in range(len(draft.parents))] == paths


def outputs(llm: LLM, params: SamplingParams) -> list[Any]:
    results = llm.generate([{"prompt_token_ids": ids} for ids in prompts()], params)
    return [[dataclasses.replace(sample) for sample in result.outputs] for result in results]


GREEDY = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)


def test_it_drafts_as_transformers_would(tight: LLM, reference: Reference) -> None:
    drafts = record(tight)
    outputs(tight, GREEDY)
    stats = tight.stats()
    assert any(stats["num_preemptions_total"].values()) and stats["spec_decode_wasted_slots_total"] > 0
    assert_as_the_reference(tight, drafts, reference)
    drafts.clear()
    outputs(tight, GREEDY)  # the beginnings are found in the prefix cache
    assert tight.stats()["prefix_cache_hits_total"] > stats["prefix_cache_hits_total"]
    assert_as_the_reference(tight, drafts, reference)
    invariants(tight)


def test_samples_of_one_prompt_are_drafted_for_each_behind_its_own_token(tight: LLM, reference: Reference) -> None:
    drafts = record(tight)
    params = SamplingParams(temperature=1e-6, n=3, seed=1, max_tokens=8, ignore_eos=True, logit_bias={5: 1.0})
    tight.generate([{"prompt_token_ids": prompts()[0]}], params)
    assert_as_the_reference(tight, drafts, reference)


@pytest.mark.parametrize("mistake", ["_fork_last_blocks", "_inherit"])
def test_a_planted_mistake_is_seen(
    mistake: str, directories: dict[str, Path], reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages as they were: scratch does not hold what stands before the drafts."""
    where = {"_fork_last_blocks": 0, "_inherit": None}[mistake]
    monkeypatch.setattr(drafting, mistake, lambda *a: a[0] if where == 0 else a[0].pages)
    with start(directories, "draft", tree=True, block_size=4, max_num_seqs=2) as llm:
        drafts = record(llm)
        outputs(llm, GREEDY)
        with pytest.raises(AssertionError):
            assert_as_the_reference(llm, drafts, reference)


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_drafts_for_itself_is_right_at_any_temperature(kind: str, directories: dict[str, Path]) -> None:
    """As far as a chain goes: trees have other guesses too, and fewer of the likeliest."""
    params = SamplingParams(temperature=1.0, top_p=0.9, top_k=40, seed=5, n=2, max_tokens=29, ignore_eos=True)
    with make_llm(directories["target"]) as plain:
        wanted = outputs(plain, params)
    with start(directories, "target", tree=KINDS[kind]) as llm:
        assert outputs(llm, params) == wanted
        stats = llm.stats()
    rate = stats["spec_decode_num_accepted_tokens_total"] / stats["spec_decode_num_draft_tokens_total"]
    assert rate == 1.0 if kind == "chains" else rate > 0.4


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=1.0, n=2, seed=4, logprobs=2, max_tokens=12)])
def test_no_draft_changes_a_text(tight: LLM, directories: dict[str, Path], params: SamplingParams) -> None:
    with make_llm(directories["target"]) as plain:
        wanted = outputs(plain, params)
    assert outputs(tight, params) == wanted
    assert tight.stats()["compile_total"] == tight.stats()["compile_total"]
