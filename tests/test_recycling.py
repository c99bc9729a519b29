"""Token recycling: the tree against its definition, written out path by path; what is heard against Hugging Face; that no text changes;
and what it is worth."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpage import LLM, EngineConfig, SamplingParams
from jaxpage.device import drafter
from jaxpage.errors import UnsupportedError
from jaxpage.shapes import MOST_DRAFTS
from jaxpage.speculation import recycling
from jaxpage.speculation.medusa import search
from jaxpage.speculation.recycling import NUM_RECYCLED, RecyclingProposer
from jaxpage.step.draft import Draft
from jaxpage.step.plan import StepPlan, StepResult
from tests.support.drafting_engines import engines_that_draft, held, made_when_asked, right_drafts
from tests.support.engines import LLAMA, invariants, make_llm, run_giving_way
from tests.support.fake_device import make_group
from tests.support.random_checkpoints import random_checkpoint, random_tensors, write_tensors
from tests.support.tokenizers import write_tokenizer
from tests.test_speculation import PROMPTS, REQUESTS, everything

pytestmark = pytest.mark.optimized

VOCAB = 6
TREE = search([recycling.ACCURACIES] * recycling.MOST_LEVELS, MOST_DRAFTS)

# A step's draws: salts, the tokens that they stand behind, and the seed of what is likely behind those.
heard_steps = st.lists(
    st.tuples(
        st.lists(st.tuples(st.sampled_from([None, "a"]), st.integers(0, VOCAB - 1)), min_size=1), st.integers(0, 99)
    ),
    max_size=6,
)


def likely(count: int, seed: int, width: int = NUM_RECYCLED) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, (count, width), np.int32)


def paths(draft: Draft | None) -> list[tuple[int, ...]]:
    return [draft.path(index) for index in range(len(draft.token_ids))] if draft else []


@given(heard=heard_steps, tree=st.booleans(), last=st.integers(0, VOCAB - 1), most=st.integers(1, MOST_DRAFTS))
def test_drafts_are_what_was_likely_the_last_time_rank_by_rank(
    heard: list[tuple[list[tuple[str | None, int]], int]], tree: bool, last: int, most: int
) -> None:
    proposer = RecyclingProposer(VOCAB, tree=tree)
    known: dict[tuple[str | None, int], list[int]] = {}
    for draws, seed in heard:
        salts, token_ids = zip(*draws, strict=True)
        rows = likely(len(draws), seed)
        proposer.heard(salts, token_ids, rows)
        known.update(zip(draws, rows.tolist(), strict=True))
    for salt in (None, "a"):
        want: list[tuple[int, ...]] = []
        for choice in TREE if tree else [(0,) * depth for depth in range(1, MOST_DRAFTS + 1)]:
            path = [last]
            for rank in choice:
                if (salt, path[-1]) not in known:
                    break
                path.append(known[salt, path[-1]][rank])
            else:
                want.append(tuple(path[1:]))
        group = make_group("one", 0, [0, last], cache_salt=salt)
        assert paths(proposer.propose(group.request, group.sequences[0], most)) == want[:most]


def test_salts_that_nobody_uses_give_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recycling, "MOST_TABLES", 2)
    monkeypatch.setattr(recycling, "KEPT", 2)
    proposer = RecyclingProposer(VOCAB, tree=False)

    def drafts(*salts: str | None) -> list[bool]:
        groups = [make_group("one", 0, [3], cache_salt=salt) for salt in salts]
        return [proposer.propose(group.request, group.sequences[0], 1) is not None for group in groups]

    proposer.heard(["b", "a", "c"], [3] * 3, likely(3, 0))
    assert drafts("b", "a", "c", None) == [True, True, False, False]
    proposer.heard(["a", "c", None], [3] * 3, likely(3, 0))
    assert drafts("b", "a", "c", None) == [
        True,
        True,
        False,
        True,
    ]  # b was used a step ago, and there is room without a salt
    proposer.heard(["a", "c"], [3] * 2, likely(2, 0))
    assert drafts("b", "a", "c", None) == [False, True, True, True]


def test_models_of_fewer_tokens_than_are_kept() -> None:
    proposer = RecyclingProposer(VOCAB, tree=True)
    proposer.heard([None], [3], np.array([[3, 1, 4]], np.int32))
    group = make_group("one", 0, [3])
    draft = proposer.propose(group.request, group.sequences[0], 9)
    assert (
        draft is not None
        and set(paths(draft)) >= {(3,), (1,), (4,), (3, 3), (3, 1)}
        and set(draft.token_ids) == {1, 3, 4}
    )


def test_auto_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="'auto' is not supported: .* use 1 to 63"):
        EngineConfig(speculative_config={"method": "token_recycling"})  # type: ignore[arg-type]


# --- the engine

DRAFTING = {"method": "token_recycling", "num_speculative_tokens": 7, "tree": True}
ENGINES = engines_that_draft(DRAFTING, chains=DRAFTING | {"tree": False})
HELD = held(ENGINES, len(PROMPTS))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model to which the last token matters most, so that what is recycled is of use."""
    path = random_checkpoint(tmp_path_factory.mktemp("llama"), LLAMA)
    tensors = random_tensors(LLAMA)
    tensors["model.embed_tokens.weight"] *= 5
    write_tensors(path, tensors)
    return write_tokenizer(path)


@pytest.fixture(scope="module")
def engines(directory: Path) -> Iterator[Callable[[str], LLM]]:
    with made_when_asked(directory, ENGINES) as engine:
        yield engine


@pytest.fixture(scope="module")
def want(engines: Callable[[str], LLM]) -> list[Any]:
    return everything(engines("without").generate(PROMPTS, REQUESTS, use_tqdm=False))


@pytest.mark.parametrize("engine", ["chains", "recomputing", "swapping"])
def test_nothing_changes(engine: str, engines: Callable[[str], LLM], want: list[Any]) -> None:
    """Greedy and seeded, several samples, grammars, bad words, penalties and ends; blocks of 1, 4 and 16 tokens; and who gives way."""
    llm, chosen = engines(engine), HELD[engine]
    before = llm.stats()
    for _ in range(2):  # the second time much is known
        got = llm.generate([PROMPTS[index] for index in chosen], [REQUESTS[index] for index in chosen], use_tqdm=False)
        assert everything(got) == [want[index] for index in chosen]
    after = llm.stats()
    name = "spec_decode_num_accepted_tokens_total"
    assert after[name] - before[name] > 10
    if engine != "chains":
        mode = "swap" if engine == "swapping" else "recompute"
        assert after["num_preemptions_total"][mode] > before["num_preemptions_total"][mode]
    invariants(llm)


@pytest.mark.parametrize("engine", ["recomputing", "swapping"])
def test_nothing_changes_for_who_gives_way_in_the_middle(
    engine: str, engines: Callable[[str], LLM], want: list[Any]
) -> None:
    llm, chosen = engines(engine), [0, 2]
    before = right_drafts(llm)
    reporters = [
        llm._engine.add(str(index), llm._engine.prepare(None, PROMPTS[index], REQUESTS[index])) for index in chosen
    ]
    run_giving_way(llm._engine, 4)
    assert everything([reporter.whole() for reporter in reporters]) == [want[index] for index in chosen]
    assert right_drafts(llm) > before
    invariants(llm)


def test_a_prefix_is_pinned_where_right_drafts_would_take_it_to_its_end(engines: Callable[[str], LLM]) -> None:
    """The last chunk of the prefix is one token, behind which the next ones are known from before."""
    llm = engines("swapping")
    greedy = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    (output,) = llm.generate([PROMPTS[0]], greedy, use_tqdm=False)
    prefix = [*output.prompt_token_ids, *output.outputs[0].token_ids][:33]
    llm.generate([prefix], greedy, use_tqdm=False)
    with llm.pin_prefix(prefix) as pinned:
        assert pinned.num_tokens == 33 and not pinned.released
    invariants(llm)


def differs_from_transformers(llm: LLM, directory: Path, monkeypatch: pytest.MonkeyPatch) -> str | None:
    """The first row that is heard and that a model of transformers, given the same text and draft, would not have said."""
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True)
    engine, speculator = llm._engine, llm._engine.speculator
    proposer: Any = speculator.proposer  # type: ignore[attr-defined]
    texts: list[
        tuple[list[int], list[int]]
    ] = []  # what was computed up to a draw, and what is said to be likely behind it
    heard: list[tuple[int, list[int]]] = []

    def keeps(plan: StepPlan, result: StepResult) -> None:
        assert result.guesses is not None
        for sample, likeliest in zip(plan.samples, result.guesses.tolist(), strict=False):
            row, offset, path = plan.rows[sample.row], sample.offset, list[int]()
            while row.parents and offset:
                path.insert(0, row.token_ids[offset])
                offset = row.parents[offset - 1]
            (sequence,) = engine._groups[row.sequence_id].sequences
            texts.append((sequence.token_ids[: row.start + offset + 1] + path, likeliest))
        observe(plan, result)

    def hears(salts: Any, token_ids: Any, likeliest_BW: np.ndarray) -> None:
        heard.extend(zip(token_ids, likeliest_BW.tolist(), strict=True))

    observe = proposer.observe
    with monkeypatch.context() as patch:
        patch.setattr(proposer, "observe", keeps)
        patch.setattr(proposer, "heard", hears)
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, cache_salt="of transformers")
        llm.generate(PROMPTS[:2], params, use_tqdm=False)
    assert len(texts) == len(heard) > 20
    for (text, likeliest), (token_id, told) in zip(texts, heard, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([text])).logits[0, -1].numpy()
        best = np.argsort(-logits, kind="stable")[: len(likeliest)]
        close = np.abs(logits[best] - logits[likeliest]) < 1e-4  # the order of what is equally likely is anybody's
        if token_id != text[-1] or told != likeliest or not close.all() or len(set(likeliest)) < NUM_RECYCLED:
            return f"behind {text}: {likeliest}, told as behind {token_id}: {told}; transformers says {best.tolist()}"
    return None


def test_what_is_heard_is_what_transformers_says(
    engines: Callable[[str], LLM], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert differs_from_transformers(engines("chains"), directory, monkeypatch) is None


def test_a_wrong_order_is_seen(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    top_ids = drafter.top_ids
    monkeypatch.setattr(drafter, "top_ids", lambda logits_RV, count: top_ids(-logits_RV, count))
    with make_llm(directory, max_num_seqs=1, max_num_batched_tokens=16, speculative_config=DRAFTING) as llm:
        assert differs_from_transformers(llm, directory, monkeypatch) is not None


def test_it_is_worth_something_on_the_demo_model() -> None:
    """Greedily and hot: what one tale taught is of use in the next one."""
    with LLM(
        model="demo",
        max_num_seqs=1,
        max_model_len=128,
        max_num_batched_tokens=16,
        speculative_config={"method": "token_recycling", "num_speculative_tokens": 7, "tree": True},
        use_tqdm=False,
    ) as llm:
        prompts = ["Once upon a time", "The old fox went", "A rabbit and a bear", "In the town there"]
        for temperature, least in ((0.0, 1.4), (1.0, 1.2)):
            llm.generate(prompts[:2], SamplingParams(temperature=temperature, seed=5, max_tokens=100), use_tqdm=False)
            before = llm.stats()
            params = SamplingParams(temperature=temperature, seed=6, max_tokens=90, ignore_eos=True)
            llm.generate(prompts[2:], params, use_tqdm=False)
            after = llm.stats()
            rows, tokens = (after[name] - before[name] for name in ("decode_rows_total", "decode_tokens_total"))
            print(f"temperature {temperature}: {tokens / rows:.2f} tokens per step")
            assert tokens / rows > least
