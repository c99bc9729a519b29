"""Methods that draft on the host, each in the same engines: none changes a text, with room and with
too little of it.

Token recycling is told what transformers says. Settings that a method of drafting does not take are
refused.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxpage import LLM, EngineConfig, SamplingParams
from jaxpage.device.drafters import drafter
from jaxpage.errors import ConfigError, UnsupportedError
from jaxpage.settings.speculative_config import SpeculativeConfig
from jaxpage.speculation import make_proposer
from jaxpage.speculation.lookahead import LookaheadProposer
from jaxpage.speculation.methods import DraftedModel
from jaxpage.speculation.recycling import NUM_RECYCLED
from jaxpage.step.plan import StepPlan, StepResult
from tests.support.engines import LLAMA, invariants, make_llm
from tests.support.random_checkpoints import random_checkpoint, random_tensors, write_tensors
from tests.support.scripted import draft_with
from tests.support.sweeps import few
from tests.support.tokenizers import write_tokenizer
from tests.test_speculation import PROMPTS, REQUESTS, SHAPES, SMALL_POOL, everything

# Seven drafts each. Engines are built for token recycling: their steps tell what is likely after
# each draw, if they are asked to.
METHODS: dict[str, dict[str, Any]] = {
    "lookahead": {"num_speculative_tokens": 7, "lookahead_window": 2, "lookahead_ngram": 3},
    "token_recycling": {"num_speculative_tokens": 7, "tree": True},
}
DRAFTING = {"method": "token_recycling", **METHODS["token_recycling"]}
# Engines have the shapes of tests/test_speculation.py, since compiling takes longer than all else.
ENGINES: dict[str, dict[str, Any]] = {
    "without": {**SHAPES, "largest_shapes": True},
    "roomy": {**SHAPES, "largest_shapes": True, "speculative_config": DRAFTING},
    "recomputing": {**SMALL_POOL, "largest_shapes": True, "speculative_config": DRAFTING},
    "swapping": {
        **SMALL_POOL,
        "largest_shapes": True,
        "preemption_mode": "swap",
        "speculative_config": DRAFTING,
    },
}

# Texts of few tokens, in which n-grams come again.
FEW = [[5, 6, 7, 8] * 3, [70, 71], [66, 67, 68]]
SELDOM_NEW = [
    SamplingParams(
        temperature=heat,
        seed=3,
        max_tokens=40,
        ignore_eos=True,
        logprobs=2,
        allowed_token_ids=few,
        n=2,
    )
    for heat, few in ((0.0, [5, 6, 7, 8]), (1.5, [70, 71]), (0.7, [66, 67, 68]))
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Writes a model to which the last token matters most, so that recycled tokens are of use."""
    path = random_checkpoint(tmp_path_factory.mktemp("llama"), LLAMA)
    tensors = random_tensors(LLAMA)
    tensors["model.embed_tokens.weight"] *= 5
    write_tensors(path, tensors)
    return write_tokenizer(path)


@pytest.fixture(scope="module")
def engines(directory):
    """Returns engines by name, made when first asked for, with a proposer of this method that has
    seen nothing yet.
    """
    made: dict[str, LLM] = {}

    def engine(name: str, method: str | None = None) -> LLM:
        llm = made[name] = made.get(name) or make_llm(directory, **ENGINES[name])
        if method is not None:
            proposer = make_proposer(
                SpeculativeConfig(method=method, **METHODS[method]),
                DraftedModel(LLAMA["vocab_size"]),
            )  # type: ignore[arg-type]
            draft_with(llm._engine, proposer, always_drafts=method == "token_recycling")
        return llm

    yield engine
    for llm in made.values():
        llm.shutdown()


@pytest.fixture(scope="module")
def expected(engines):
    return everything(engines("without").generate(PROMPTS, REQUESTS, use_tqdm=False))


def right_drafts(llm: LLM) -> int:
    accepted: int = llm.stats()["spec_decode_num_accepted_tokens_total"]
    return accepted


@pytest.mark.parametrize("engine", few(["roomy", "recomputing", "swapping"], ["swapping"]))
@pytest.mark.parametrize("method", METHODS)
def test_nothing_changes(method, engine, engines, expected):
    """Requests are greedy and seeded, with several samples, grammars, bad words, penalties and
    ends; some are preempted.
    """
    llm = engines(engine, method)
    before, right = llm.stats()["num_preemptions_total"], right_drafts(llm)
    for _ in range(2):  # the second time recycling knows much
        assert everything(llm.generate(PROMPTS, REQUESTS, use_tqdm=False)) == expected
    assert right_drafts(llm) - right > 10
    if engine != "roomy":
        mode = "swap" if engine == "swapping" else "recompute"
        assert llm.stats()["num_preemptions_total"][mode] > before[mode]
    invariants(llm)
    proposer = llm._engine.speculator.proposer  # type: ignore[attr-defined]
    assert not isinstance(proposer, LookaheadProposer) or (
        not proposer._drafted and not proposer._pools
    )


def test_nothing_changes_where_much_is_right(engines):
    plain = everything(engines("without").generate(FEW, SELDOM_NEW, use_tqdm=False))
    llm = engines("roomy", "lookahead")
    before = right_drafts(llm)
    assert everything(llm.generate(FEW, SELDOM_NEW, use_tqdm=False)) == plain
    assert right_drafts(llm) - before > 80
    invariants(llm)


def test_stops_cut_inside_an_accepted_run(engines):
    few = SamplingParams(
        temperature=1.5, max_tokens=30, ignore_eos=True, allowed_token_ids=[66, 67], seed=1, n=2
    )
    (output,) = engines("without").generate("ab", few, use_tqdm=False)
    stops = sorted({output.outputs[0].text[index : index + 4] for index in range(5, 25)})
    requests = [dataclasses.replace(few, stop=(stop,)) for stop in stops]
    plain = everything(engines("without").generate(["ab"] * len(stops), requests, use_tqdm=False))
    llm = engines("roomy", "lookahead")
    before = right_drafts(llm)
    assert everything(llm.generate(["ab"] * len(stops), requests, use_tqdm=False)) == plain
    assert len(stops) > 5 and all(each[1][0].stop_reason for each in plain)
    assert right_drafts(llm) - before > len(stops)


def differs_from_transformers(
    llm: LLM, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> str | None:
    """Returns the first row that is heard and that a model of transformers, with the same text and
    draft, would not have said.
    """
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, local_files_only=True
    )
    engine, speculator = llm._engine, llm._engine.speculator
    proposer: Any = speculator.proposer  # type: ignore[attr-defined]
    texts: list[
        tuple[list[int], list[int]]
    ] = []  # what was computed up to a draw, and what is said to be likely after it
    heard: list[tuple[int, list[int]]] = []

    def keeps(plan: StepPlan, result: StepResult) -> None:
        assert result.draft_candidates is not None
        for sample, top in zip(plan.samples, result.draft_candidates.tolist(), strict=False):
            row, offset, path = plan.rows[sample.row], sample.offset, list[int]()
            while row.parents and offset:
                path.insert(0, row.token_ids[offset])
                offset = row.parents[offset - 1]
            (sequence,) = engine._groups[row.sequence_id].sequences
            texts.append((sequence.token_ids[: row.start + offset + 1] + path, top))
        observe(plan, result)

    def hears(salts: Any, token_ids: Any, top_ids_BW: np.ndarray) -> None:
        heard.extend(zip(token_ids, top_ids_BW.tolist(), strict=True))

    observe = proposer.observe
    with monkeypatch.context() as patch:
        patch.setattr(proposer, "observe", keeps)
        patch.setattr(proposer, "on_top_k", hears)
        params = SamplingParams(
            temperature=0.0, max_tokens=12, ignore_eos=True, cache_salt="of transformers"
        )
        llm.generate(PROMPTS[:2], params, use_tqdm=False)
    assert len(texts) == len(heard) > 20
    for (text, top), (token_id, heard_ids) in zip(texts, heard, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([text])).logits[0, -1].numpy()
        best = np.argsort(-logits, kind="stable")[: len(top)]
        # the order of what is equally likely is anybody's
        close = np.abs(logits[best] - logits[top]) < 1e-4
        if (
            token_id != text[-1]
            or heard_ids != top
            or not close.all()
            or len(set(top)) < NUM_RECYCLED
        ):
            return (
                f"behind {text}: {top}, told as behind {token_id}: {heard_ids}; transformers says "
                f"{best.tolist()}"
            )
    return None


def test_what_recycling_learns_is_what_transformers_says(engines, directory, monkeypatch):
    assert (
        differs_from_transformers(engines("roomy", "token_recycling"), directory, monkeypatch)
        is None
    )


@pytest.mark.sweep
def test_a_wrong_order_of_what_is_likely_is_seen(directory, monkeypatch):
    top_ids = drafter.top_ids
    monkeypatch.setattr(drafter, "top_ids", lambda logits_RV, count: top_ids(-logits_RV, count))
    with make_llm(
        directory, max_num_seqs=1, max_num_batched_tokens=16, speculative_config=DRAFTING
    ) as llm:
        assert differs_from_transformers(llm, directory, monkeypatch) is not None


# --- settings that a method refuses, before anything is opened

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"method": "medusa"}, "method 'medusa' needs model"),
    ({"method": "medusa", "model": "m", "medusa_choices": [[0], [0]]}, "has a path twice"),
    (
        {"method": "medusa", "model": "m", "tree": True, "medusa_choices": [[0], [1, 0]]},
        r"has \[1, 0\], but not its parent \[1\]",
    ),
    (
        {"method": "medusa", "model": "m", "medusa_choices": [[0], [1]]},
        "branches, but tree is False",
    ),
    (
        {"method": "medusa", "model": "m", "medusa_choices": [[0]], "num_speculative_tokens": 2},
        "is 2, but medusa_choices has 1 paths",
    ),
    ({"method": "medusa", "model": "m", "medusa_choices": []}, "medusa_choices"),
    ({"method": "medusa", "model": "m", "medusa_choices": [[]]}, "medusa_choices"),
    ({"method": "medusa", "model": "m", "medusa_choices": [[-1]]}, "medusa_choices"),
    ({"method": "medusa", "model": "m", "medusa_choices": [["0"]]}, "medusa_choices"),
    ({"method": "medusa", "model": "m", "medusa_choices": 3}, "medusa_choices"),
    ({"method": "ngram", "medusa_choices": [[0]]}, "it belongs to medusa"),
    (
        {
            "method": "lookahead",
            "lookahead_window": 15,
            "lookahead_ngram": 5,
            "lookahead_guesses": 15,
        },
        "lookahead_window 15, lookahead_ngram 5 and lookahead_guesses 15 take 119 drafts, more "
        "than the 63 that fit in a step",
    ),
    (
        {"method": "lookahead", "num_speculative_tokens": 3, "lookahead_ngram": 5},
        "lookahead_window 1, lookahead_ngram 5 and lookahead_guesses 1 take 7 drafts, more than "
        "num_speculative_tokens, 3",
    ),
    (
        {"method": "ngram", "lookahead_window": 3},
        "lookahead_window is 3, but method is 'ngram': it belongs to lookahead",
    ),
    ({"method": "lookahead", "lookahead_ngram": 1}, "lookahead_ngram"),
    ({"method": "lookahead", "lookahead_window": 0}, "lookahead_window"),
    ({"method": "lookahead", "lookahead_guesses": 0}, "lookahead_guesses"),
    ({"method": "token_recycling"}, "'auto' is not supported: .* use 1 to 63"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_settings_that_make_no_sense_are_refused(settings, message):
    error = UnsupportedError if "not supported" in message else ConfigError
    with pytest.raises(error, match=message):
        EngineConfig(speculative_config=settings)  # type: ignore[arg-type]
