"""Drafters inside the step: they draft what a model in float64 without any paged memory drafts, and
no draft changes a text.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import transformers

from jaxpage import LLM, SamplingParams
from jaxpage.assembly.planning.drafting import Drafting
from jaxpage.device.drafters import drafting
from jaxpage.outputs import RequestOutput
from jaxpage.step.draft import Draft
from tests.support.eagle import Eagle, Eagle3, torch, write
from tests.support.engines import LLAMA, invariants, make_llm, run_giving_way
from tests.support.mtp import Head, save_with_head
from tests.support.random_checkpoints import random_checkpoint, random_tensors
from tests.support.sweeps import few

pytestmark = pytest.mark.usefixtures("decode_as_chunks")
SMALL = {
    **LLAMA,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
HEAD = {**LLAMA, "num_hidden_layers": 1, "rms_norm_eps": 1e-3, "rope_theta": 500.0}
TAPS = (1, 0, 1)
NUM_DRAFTS = 12


class Case(NamedTuple):
    method: str
    tree: bool
    drafter: str  # its directory; of `mtp` that of the target, too
    num_drafts: int = NUM_DRAFTS

    def target(self, root: Path) -> Path:
        return root / (self.drafter if self.method == "mtp" else "target")


CASES = [
    Case("draft_model", False, "alike"),
    Case("draft_model", True, "small"),
    Case("eagle", False, "eagle"),
    Case("eagle3", True, "eagle3"),
    Case("mtp", False, "qwen3_5", 3),
    Case("mtp", True, "deepseek_v3", 3),
]
# Models with heads: greedy texts of a few tokens, so that a random head is right now and then.
WITH_HEADS: dict[str, Any] = {"num_tokens": 2, "vocab_size": 257, "max_position_embeddings": 256}
TWO_LAYERS = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}


def _param(case: Case) -> Any:
    """Returns a case, in a sweep where other tests have what it differs in.

    EAGLE-1 differs from EAGLE-3 in its numbers alone, which tests/test_eagle.py has. DeepSeek's
    head is in tests/on_four_devices.py. tests/test_assistant.py compares the drafts of a model
    with those of transformers.
    """
    swept = case.method in ("eagle", "draft_model") or case.drafter == "deepseek_v3"
    marks = [pytest.mark.sweep] if swept else []
    return pytest.param(case, id=f"{case.method}-{'tree' if case.tree else 'chain'}", marks=marks)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Writes the models: the target, and of each case a drafter.

    One has shapes like the target's.
    """
    root = tmp_path_factory.mktemp("models")
    random_checkpoint(root / "target", LLAMA, 1)
    random_checkpoint(root / "alike", LLAMA, 2)
    random_checkpoint(root / "small", SMALL, 2)
    write_heads(root)
    for case in CASES:
        if case.method == "mtp":
            fields = WITH_HEADS | (TWO_LAYERS if case.drafter == "qwen3_5" else {})
            MTP_HEADS[case.drafter] = save_with_head(
                case.drafter, root / case.drafter, **fields
            ).head
    return root


MTP_HEADS: dict[str, Head] = {}  # by family


def write_heads(root: Path) -> None:
    write(
        root / "eagle",
        HEAD,
        heads()["eagle"].tensors(),
        without=("lm_head.weight", "embed_tokens.weight"),
    )
    config = {
        **HEAD,
        "architectures": ["LlamaForCausalLMEagle3"],
        "eagle_aux_hidden_state_layer_ids": TAPS,
    }
    write(
        root / "eagle3",
        {**config, "draft_vocab_size": HEAD["vocab_size"]},
        heads()["eagle3"].tensors(),
    )


@functools.cache
def heads() -> dict[str, Eagle | Eagle3]:
    """Returns the heads.

    EAGLE-1 has both tables of the target.

    It has no norm: as drawn it makes an error ten times as large from one level to the next.
    """
    eagle, eagle3 = (
        Eagle(**HEAD),
        Eagle3(rows=HEAD["vocab_size"], target_width=HEAD["hidden_size"], **HEAD),
    )
    eagle.take(random_tensors(LLAMA, 1), "tokens", "head")
    with torch.no_grad():
        eagle.fc.weight[:, HEAD["hidden_size"] :] *= 0.125
    return {"eagle": eagle, "eagle3": eagle3}


def start(root: Path, case: Case, **settings: Any) -> LLM:
    config: dict[str, Any] = {
        "method": case.method,
        "model": None if case.method == "mtp" else str(root / case.drafter),
        "tree": case.tree,
        "num_speculative_tokens": case.num_drafts,
    }
    return make_llm(
        case.target(root),
        speculative_config=config,
        max_num_seqs=2,
        max_num_batched_tokens=32,
        **settings,
    )


@pytest.fixture(scope="module", params=[_param(case) for case in CASES])
def case(request):
    return request.param


@pytest.fixture(scope="module")
def tight(case, root):
    """Starts an engine whose requests preempt each other, with blocks that no draft ends on
    evenly.
    """
    mode = "swap" if case.tree else "recompute"
    with start(
        root, case, block_size=4, num_blocks=26, max_model_len=96, preemption_mode=mode
    ) as llm:
        yield llm


def prompts() -> list[list[int]]:
    """Returns three prompts, of which one takes two chunks."""
    rng = np.random.default_rng(3)
    return [rng.integers(1, 257, size).tolist() for size in (23, 40, 5)]


def record(llm: LLM) -> list[tuple[tuple[int, ...], Draft]]:
    """Collects every draft from now on, with the tokens before it."""
    drafts: list[tuple[tuple[int, ...], Draft]] = []
    propose = type(llm._engine.speculator).propose

    def listen(running: Any) -> Any:
        proposed = propose(llm._engine.speculator, running)
        for group in running:
            for sequence in group.unfinished:
                if sequence.sequence_id in proposed.of:
                    drafts.append((tuple(sequence.token_ids), proposed.of[sequence.sequence_id]))
        return proposed

    llm._engine.speculator.propose = listen  # type: ignore[method-assign]
    return drafts


class Reference:
    """Grows a tree by brute force from the drafter's log probabilities in float64, without any
    memory of keys and values.
    """

    def __init__(self, logprobs: Callable[[tuple[int, ...], tuple[int, ...]], np.ndarray]):
        """Takes the log probabilities of what follows known tokens and the drafts after them."""
        self._logprobs = logprobs

    def paths(
        self, known: tuple[int, ...], levels: int, branches: int, num_drafts: int
    ) -> list[tuple[int, ...]]:
        """Returns the best drafts, each with what leads to it, best first."""
        frontier: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
        drafts = []
        for _ in range(levels):
            grown = []
            for score, path in frontier:
                logprobs = self._logprobs(known, path)
                grown += [
                    (score + logprobs[t], (*path, int(t))) for t in np.argsort(-logprobs)[:branches]
                ]
            grown.sort(key=lambda draft: -draft[0])
            frontier = grown[:branches]
            drafts += grown
        return [path for _, path in sorted(drafts, key=lambda draft: -draft[0])[:num_drafts]]


def of_a_model(directory: Path) -> Reference:
    model = hf_model(directory)

    @functools.cache
    def logprobs(known: tuple[int, ...], path: tuple[int, ...]) -> np.ndarray:
        with torch.no_grad():
            logits = model(torch.tensor([[*known, *path]])).logits[0, -1]
        return torch.log_softmax(logits, -1).numpy()

    return Reference(logprobs)


def of_a_head(head: Eagle | Eagle3 | Head, directory: Path) -> Reference:
    """Returns the reference of a head, whose features are the target's up to the token before the
    last known one.

    directory: of its target.
    """
    model = hf_model(directory)

    @functools.cache
    def features(known: tuple[int, ...]) -> np.ndarray:
        with torch.no_grad():
            states = model(torch.tensor([known[:-1]]), output_hidden_states=True).hidden_states
        numbers = [state[0].numpy() for state in states]
        return (
            head.fuse([numbers[tap] for tap in TAPS]) if isinstance(head, Eagle3) else numbers[-1]
        )

    @functools.cache
    def run(known: tuple[int, ...], path: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        """Returns features up to the last token, its own where the target has not been, and log
        probabilities of the next token.
        """
        before = features(known) if not path else run(known, path[:-1])[0]
        outputs, logits = head(np.array([*known[1:], *path]), before)
        logprobs = torch.log_softmax(torch.tensor(logits[-1]), -1).numpy()
        return np.concatenate([before, outputs[-1:]]), logprobs

    return Reference(lambda known, path: run(known, path)[1])


def hf_model(directory: Path) -> Any:
    """Loads a model in float64, for which experts have no other implementation."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float64, experts_implementation="eager"
    ).eval()


@pytest.fixture(scope="module")
def reference(case, root):
    if case.method == "draft_model":
        return of_a_model(root / case.drafter)
    head = MTP_HEADS[case.drafter] if case.method == "mtp" else heads()[case.method]
    return of_a_head(head, case.target(root))


def assert_as_the_reference(
    llm: LLM, drafts: list[tuple[tuple[int, ...], Draft]], reference: Reference
) -> None:
    options = llm._engine.runner.executables.options.drafter
    assert options is not None and drafts
    maximum = llm.spec.config.speculative_config.num_speculative_tokens
    for known, draft in drafts:
        paths = reference.paths(
            known, options.shape.num_levels, options.shape.num_branches, maximum
        )
        assert [draft.path(index) for index in range(len(draft.parents))] == paths


def outputs(llm: LLM, params: SamplingParams) -> list[Any]:
    return [
        result.outputs
        for result in llm.generate([{"prompt_token_ids": ids} for ids in prompts()], params)
    ]


GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(
    temperature=1.0, top_p=0.9, top_k=40, n=2, seed=5, logprobs=2, max_tokens=8, ignore_eos=True
)


@pytest.fixture(scope="module")
def plain_texts(root):
    """Returns what targets say without drafts; several cases have the same one."""

    @functools.cache
    def texts(target: Path) -> list[Any]:
        with make_llm(target) as llm:
            return [(params, outputs(llm, params)) for params in (GREEDY, SAMPLED)]

    return texts


@pytest.fixture(scope="module")
def plain(root, case, plain_texts):
    return plain_texts(case.target(root))


def test_it_drafts_what_the_reference_does(tight, reference):
    """Drafts follow prompts of several chunks, wrong drafts, and tokens that were computed once
    more.
    """
    drafts = record(tight)
    before = tight.stats()
    tight._engine.reset_prefix_cache()
    outputs(tight, GREEDY)
    stats = tight.stats()
    assert sum(stats["num_preemptions_total"].values()) > sum(
        before["num_preemptions_total"].values()
    )
    assert stats["spec_decode_wasted_slots_total"] > before["spec_decode_wasted_slots_total"]
    assert_as_the_reference(tight, drafts, reference)
    invariants(tight)


def test_no_draft_changes_a_text(tight, plain):
    num_compiled = tight.stats()["compile_total"]
    for params, expected in plain:
        assert outputs(tight, params) == expected
    assert tight.stats()["compile_total"] == num_compiled
    invariants(tight)


def test_found_prefixes_and_samples_of_one_prompt_are_drafted_for(tight, reference):
    """A head's numbers for a token follow from the next token, so that a block is found only before
    the same token.
    """
    drafts = record(tight)
    params = SamplingParams(temperature=1e-6, n=2, seed=1, max_tokens=8, ignore_eos=True)
    num_hits = tight.stats()["prefix_cache_hits_total"]
    for prompt in ([*range(1, 21)], [*range(1, 21), 7]):
        tight.generate([{"prompt_token_ids": prompt}], params)
    assert tight.stats()["prefix_cache_hits_total"] > num_hits
    assert_as_the_reference(tight, drafts, reference)


def simulate(
    reference: Reference, prompt: list[int], text: list[int], maximum: int, gap: int | None = None
) -> tuple[int, int]:
    """Returns how many drafts of a request are verified and how many accepted: chains after each
    token but those that are drafts themselves.

    gap: the number of known tokens of one more step, without drafts.
    """
    whole, place = (*prompt, *text), len(prompt) + 1
    drafted = accepted = 0
    while (room := min(maximum, len(whole) - place - 1)) > 0:
        if place == gap:
            place += 1
            continue
        path = reference.paths(whole[:place], maximum, 1, maximum)[-1][:room]
        pairs = zip(path, whole[place:], strict=False)
        right = len([*itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)])
        drafted, accepted, place = drafted + room, accepted + right, place + right + 1
    return drafted, accepted


def test_counts_are_those_of_a_simulation(tight, case, reference):
    """A head whose rows are missing drafts badly and changes no text, so that counts alone show it.

    Requests run alone, after a prefix that ends before another token, in a batch, and recomputed.
    """
    if case.method != "mtp" or case.tree:
        pytest.skip("chains alone are simulated, of a head whose drafts are right now and then")
    requested = [[*range(1, 22)], [*range(1, 21), 50]]
    drafts = record(tight)
    tight.reset_prefix_cache()
    alone = [tight.generate([prompt], GREEDY, use_tqdm=False)[0] for prompt in requested]
    texts = [output.outputs[0].token_ids for output in alone]
    expected = [
        simulate(reference, prompt, text, case.num_drafts)
        for prompt, text in zip(requested, texts, strict=True)
    ]
    assert [counts(output) for output in alone] == expected
    assert sum(accepted for _, accepted in expected) >= 4
    num_cached = [output.metrics.num_cached_tokens for output in alone]
    assert num_cached == [0, 16]  # of blocks of 4 the fifth is before another token
    assert [
        counts(output) for output in tight.generate(requested, GREEDY, use_tqdm=False)
    ] == expected
    engine = tight._engine
    reporters = [
        engine.add(str(name), engine.prepare(None, prompt, GREEDY))
        for name, prompt in enumerate(requested)
    ]
    before = tight.stats()["num_preemptions_total"]["recompute"]
    run_giving_way(engine, 4)
    assert tight.stats()["num_preemptions_total"]["recompute"] == before + 1
    for prompt, text, reporter in zip(requested, texts, reporters, strict=True):
        output = reporter.whole()
        assert output.outputs[0].token_ids == text
        gaps = [None, *range(len(prompt) + 1, len(prompt) + len(text))]
        assert counts(output) in [
            simulate(reference, prompt, text, case.num_drafts, gap) for gap in gaps
        ]
    assert_as_the_reference(tight, drafts, reference)


def counts(output: RequestOutput) -> tuple[int, int]:
    return output.metrics.num_draft_tokens, output.metrics.num_accepted_tokens


def _without_next_token(inputs: Any, *arguments: Any) -> Any:
    """Takes no token of the prompt for a chunk's last row."""
    return _next_tokens(inputs._replace(next_token_B=0 * inputs.next_token_B), *arguments)


_next_tokens = drafting._next_tokens
HEAD_MISTAKES: dict[str, tuple[Any, str, Any]] = {
    "a chunk's last row": (drafting, "_next_tokens", _without_next_token),
    "a block before another token": (Drafting, "num_following", 0),
}


@pytest.mark.parametrize("mistake", few(HEAD_MISTAKES, ["a block before another token"]))
def test_a_mistake_in_the_rows_of_a_head_is_seen(mistake, root, monkeypatch):
    monkeypatch.setattr(*HEAD_MISTAKES[mistake])
    case = next(case for case in CASES if case.method == "mtp" and not case.tree)
    with start(root, case, block_size=4, num_blocks=26, max_model_len=96) as llm:
        drafts = record(llm)
        for prompt in ([*range(1, 41)], [*range(1, 21), 50]):
            llm.generate([prompt], GREEDY, use_tqdm=False)
        reference = of_a_head(MTP_HEADS[case.drafter], case.target(root))
        with pytest.raises(AssertionError):
            assert_as_the_reference(llm, drafts, reference)


@pytest.mark.sweep
@pytest.mark.parametrize("mistake", ["_fork_last_blocks", "_inherit"])
def test_a_planted_mistake_is_seen(mistake, root, monkeypatch):
    """Pages stay as they were: scratch does not hold what stands before the drafts."""
    unmoved: dict[str, Any] = {
        "_fork_last_blocks": lambda pages, *_: pages,
        "_inherit": lambda tree, *_: tree.pages,
    }
    monkeypatch.setattr(drafting, mistake, unmoved[mistake])
    with start(root, CASES[1], block_size=4) as llm:
        drafts = record(llm)
        outputs(llm, GREEDY)
        with pytest.raises(AssertionError):
            assert_as_the_reference(llm, drafts, of_a_model(root / CASES[1].drafter))


def test_a_model_that_drafts_for_itself_is_always_right(tight, case, plain, monkeypatch):
    """It is right at any temperature. To executables parameters are arguments."""
    if case.drafter != "alike":
        pytest.skip("its shapes are not the target's")
    runner = tight._engine.runner
    target = runner.parameters["target"]
    monkeypatch.setattr(runner, "_parameters", {"target": target, "drafter": {"model": target}})
    tight.reset_prefix_cache()
    right, drafts = "spec_decode_num_accepted_tokens_total", "spec_decode_num_draft_tokens_total"
    before = tight.stats()
    for params, expected in plain:
        assert outputs(tight, params) == expected
    after = tight.stats()
    assert after[right] - before[right] == after[drafts] - before[drafts] > 0
    tight.reset_prefix_cache()


def test_a_step_in_which_the_drafter_is_off_is_that_of_the_target_alone(root, monkeypatch):
    # that costs are measured, which would compile and run every shape
    for name, result in (("measure_costs", None), ("describe_break_even", "")):
        monkeypatch.setattr(f"jaxpage.assembly.assembling.{name}", lambda *_, result=result: result)
    sizes = {"max_num_seqs": 1, "max_num_batched_tokens": 16, "max_model_len": 64}
    config = {"method": "eagle3", "model": str(root / "eagle3"), "num_speculative_tokens": "auto"}
    with (
        make_llm(root / "target", speculative_config=config, **sizes) as llm,
        make_llm(root / "target", **sizes) as alone,
    ):
        ours, others = (each._engine.runner.executables for each in (llm, alone))
        bucket = alone._engine.builder.menu.chunk[-1]
        expected = instructions(others.step(bucket))
        assert instructions(ours.step(bucket)) == expected
        assert instructions(ours.step(bucket, 0)) != expected


def instructions(step: Any) -> list[str]:
    """Returns the instructions of a compiled step, without their places in the source."""
    lines = [line for line in step.executable.as_text().splitlines() if " = " in line]
    return [re.sub(r", metadata=\{.*\}", "", line) for line in lines]


@pytest.mark.sweep
@pytest.mark.parametrize("number", [3, "auto"])
def test_a_recurrent_model_takes_typical_acceptance_and_auto(root, number):
    """The log probabilities of a lossy text are those of transformers for that text, in float64: no
    wrong draft left a state.
    """
    case = CASES[4]
    settings = {
        "method": "auto",
        "num_speculative_tokens": number,
        "acceptance": "typical",
        "typical_acceptance_posterior_threshold": 0.3,
    }
    model = hf_model(case.target(root))
    params = SamplingParams(temperature=1.0, seed=2, max_tokens=24, logprobs=0, ignore_eos=True)
    with make_llm(case.target(root), speculative_config=settings) as llm:
        outputs = llm.generate(prompts()[::2], params, use_tqdm=False)
        invariants(llm)
        (greedy,) = llm.generate([prompts()[0]], GREEDY, use_tqdm=False)
    for prompt, output in zip(prompts()[::2], outputs, strict=True):
        text = output.outputs[0]
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *text.token_ids]])).logits[0, len(prompt) - 1 :]
        expected = torch.log_softmax(logits, -1).numpy()
        ours = [
            entry[token].logprob for entry, token in zip(text.logprobs, text.token_ids, strict=True)
        ]
        np.testing.assert_allclose(
            ours, expected[np.arange(24), text.token_ids], rtol=1e-3, atol=1e-3
        )
    with torch.no_grad():
        whole = torch.tensor([[*prompts()[0], *greedy.outputs[0].token_ids]])
        top = model(whole).logits[0, len(prompts()[0]) - 1 : -1].argmax(-1)
    assert greedy.outputs[0].token_ids == top.tolist()
    if number == 3:
        drafted, accepted = np.sum([counts(output) for output in (*outputs, greedy)], axis=0)
        assert 0 < accepted < drafted
