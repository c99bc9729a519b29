"""Medusa heads: their files, their numbers against float64, the tree of their guesses, and that no
guess changes a text.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from jaxpage import LLM, EngineConfig, SamplingParams
from jaxpage.assembly.planning.drafters import open_heads
from jaxpage.checkpoints.drafters.medusa_files import MedusaFiles, load_medusa, open_medusa
from jaxpage.device import steps
from jaxpage.device.packing import pack_weights
from jaxpage.errors import CheckpointError, ConfigError
from jaxpage.models.base import abstract
from jaxpage.models.drafters.medusa import MedusaHeads
from jaxpage.models.registry import load_family
from jaxpage.settings.speculative_config import SpeculativeConfig
from jaxpage.speculation import ProposingSpeculator
from jaxpage.speculation.medusa import (
    MedusaProposer,
    assume_accuracies,
    best_first,
    best_only,
    search,
)
from jaxpage.step.draft import Draft, chain
from jaxpage.step.edits import Append
from jaxpage.step.plan import Row, Sample, StepPlan, StepResult
from tests.support.engines import invariants, make_llm, run_giving_way
from tests.support.fake_device import make_group
from tests.support.medusa import (
    CYCLE,
    WIDTH,
    Head,
    cycle_checkpoint,
    knowing_heads,
    random_heads,
    table_of,
    times,
    write_original,
    write_vllm,
)

pytestmark = pytest.mark.usefixtures("decode_as_chunks")
TARGET: Any = SimpleNamespace(spec=load_family(CYCLE).Spec.from_config(CYCLE))

# --- files


def load(directory: Path) -> Any:
    return load_medusa(open_files(directory), "float32", jnp.asarray)


def open_files(directory: Path) -> MedusaFiles:
    return open_medusa(directory, hidden_size=WIDTH, vocab_size=WIDTH)


def module(directory: Path) -> MedusaHeads:
    graph, _ = abstract(MedusaHeads(open_files(directory).spec, dtype="float32"))
    heads: MedusaHeads = nnx.merge(graph, load(directory))
    return heads


def refusal(directory: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_files(directory)
    return str(caught.value)


def parameters_of(heads: Sequence[Head]) -> dict[str, Any]:
    """Returns what the loaders have to make of heads."""
    blocks = [
        {layer: {"kernel": w, "bias": b} for layer, (w, b) in enumerate(head.blocks)}
        for head in heads
    ]
    tables = {index: {"table": head.table} for index, head in enumerate(heads)}
    return {"blocks": dict(enumerate(blocks)), "tables": tables}


def assert_same(ours: Any, theirs: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


@pytest.mark.parametrize("layers", [0, 1, 2])
def test_both_formats_hold_the_same_heads(tmp_path, layers):
    heads = random_heads(3, layers)
    expected = parameters_of(heads) if layers else {"tables": parameters_of(heads)["tables"]}
    # whose config says that there are 2
    assert_same(load(write_original(tmp_path / "a", heads)), expected)
    assert_same(load(write_vllm(tmp_path / "b", heads)), expected)
    assert_same(load(write_vllm(tmp_path / "c", heads, prefix="medusa_heads.")), expected)


def test_heads_of_vllm_without_biases_and_with_one_table(tmp_path):
    heads = random_heads(2)
    directory = write_vllm(tmp_path / "a", heads, medusa_fc_bias=False, original_lm_head=True)
    tensors = load_file(directory / "model.safetensors")
    tensors = {
        name: tensor
        for name, tensor in tensors.items()
        if "bias" not in name and name != "lm_heads.1.weight"
    }
    save_file(tensors, directory / "model.safetensors")
    parameters = load(directory)
    assert list(parameters["tables"]) == [0] and list(parameters["blocks"][1][0]) == ["kernel"]
    hidden_BD = np.random.default_rng(1).standard_normal((2, WIDTH))
    for index, head in enumerate(heads):
        expected = reference(
            Head([(head.blocks[0][0], np.zeros(WIDTH))], heads[0].table), hidden_BD
        )
        actual = module(directory).head_logits(index, jnp.asarray(hidden_BD, jnp.float32))
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [np.int64, np.int32])
def test_heads_that_know_a_part_of_the_vocabulary(tmp_path, dtype):
    heads = random_heads(2)
    token_map = np.array([40, 3, 17, 9, 63, 0, 21, 8], dtype)
    cut = [Head(head.blocks, head.table[token_map]) for head in heads]
    full = write_vllm(tmp_path / "full", heads, token_map=token_map, truncated_vocab_size=8)
    assert_same(load(write_vllm(tmp_path / "cut", cut, token_map=token_map)), load(full))
    hidden_BD = np.random.default_rng(1).standard_normal((4, WIDTH))
    ids_BJW = module(full).top_ids(jnp.asarray(hidden_BD, jnp.float32), 3)
    expected = [token_map[np.argsort(-reference(head, hidden_BD), axis=1)[:, :3]] for head in cut]
    np.testing.assert_array_equal(ids_BJW, np.stack(expected, axis=1))


def test_all_that_does_not_fit_is_reported_at_once(tmp_path):
    heads = random_heads(3)
    heads[1] = Head(heads[1].blocks, heads[1].table[:-1])
    directory = write_original(tmp_path / "a", heads, medusa_num_layers=2, hidden_size=32)
    tensors = load_file(directory / "medusa_lm_head.safetensors")
    del tensors["2.0.linear.bias"]
    tensors["surplus"] = np.zeros(3, np.float32)
    save_file(tensors, directory / "medusa_lm_head.safetensors")
    text = refusal(directory)
    for line in (
        "5 problems",
        "hidden_size is 32, but the model's is 64",
        "medusa_num_layers is 2, but the tensors have 1",
        "tensor '1.1.weight' has shape (63, 64), and the model needs (64, 64)",
        "tensor '2.0.linear.bias' of shape (64,) is missing",
        "tensor 'surplus' of shape (3,) is unexpected",
    ):
        assert line in text, text


def test_a_gap_between_heads_is_a_missing_head(tmp_path):
    directory = write_original(tmp_path / "a", random_heads(3))
    tensors = load_file(directory / "medusa_lm_head.safetensors")
    save_file(
        {n: t for n, t in tensors.items() if n[0] != "1"}, directory / "medusa_lm_head.safetensors"
    )
    text = refusal(directory)
    assert "'1.0.linear.weight' of shape (64, 64) is missing" in text and "'2.1.weight'" in text


@pytest.mark.parametrize(
    ("token_map", "config", "message"),
    [
        (np.array([1, 1]), {}, "has token ids twice"),
        (np.array([1, 64]), {}, "beyond the model's, which end at 63"),
        (np.array([1, -1]), {}, "beyond the model's, which end at 63"),
        (np.array([1.0, 2.0]), {}, "is F64 of shape (2,), and must be I64"),
        (np.array([[1], [2]]), {}, "is I64 of shape (2, 1), and must be I64"),
        (
            np.array([1, 2]),
            {"truncated_vocab_size": 3},
            "truncated_vocab_size is 3, but token_map has 2 tokens",
        ),
        (None, {"truncated_vocab_size": 3}, "truncated_vocab_size is 3, but there is no token_map"),
        (None, {"vocab_size": 65}, "vocab_size is 65, but the model's is 64"),
        (None, {"num_hidden_layers": 2}, "num_hidden_layers is 2, but the tensors have 1"),
    ],
)
def test_vocabularies_that_contradict_themselves_are_refused(tmp_path, token_map, config, message):
    assert message in refusal(
        write_vllm(tmp_path / "a", random_heads(2), token_map=token_map, **config)
    )


def test_what_is_pickled_or_holds_no_heads_is_refused(tmp_path):
    directory = write_original(tmp_path / "a", random_heads(1))
    (directory / "medusa_lm_head.safetensors").unlink()
    (directory / "medusa_lm_head.pt").write_bytes(b"\x80\x04N.")
    assert "weights are pickled ('medusa_lm_head.pt')" in refusal(directory)
    assert "no tensor has a name of Medusa heads" in refusal(cycle_checkpoint(tmp_path / "model"))


# --- numbers


def reference(head: Head, hidden_BD: np.ndarray) -> np.ndarray:
    """Returns the logits of a head in float64, as the paper has it."""
    x = hidden_BD.astype(np.float64)
    for kernel, bias in head.blocks:
        y = x @ kernel.astype(np.float64).T + bias
        x = x + y / (1 + np.exp(-y))
    return np.asarray(x @ head.table.astype(np.float64).T)


@pytest.mark.parametrize("layers", [0, 1, 3])
def test_heads_compute_what_the_paper_says(tmp_path, layers):
    heads = random_heads(3, layers)
    ours = module(write_original(tmp_path / "a", heads))
    hidden_BD = jnp.asarray(np.random.default_rng(1).standard_normal((5, WIDTH)), jnp.float32)
    logits = [reference(head, np.asarray(hidden_BD)) for head in heads]
    for index, expected in enumerate(logits):
        np.testing.assert_allclose(
            ours.head_logits(index, hidden_BD), expected, rtol=1e-4, atol=1e-5
        )
    expected_ids = np.stack([np.argsort(-each, axis=1)[:, :4] for each in logits], axis=1)
    np.testing.assert_array_equal(ours.top_ids(hidden_BD, 4), expected_ids)


# --- trees

ACCURACIES = st.lists(
    st.lists(st.floats(0, 1, width=32), min_size=1, max_size=3), min_size=1, max_size=3
)


def mean_right(choices: Sequence[tuple[int, ...]], accuracies: Sequence[Sequence[float]]) -> float:
    return sum(
        math.prod(accuracies[head][rank] for head, rank in enumerate(path)) for path in choices
    )


@given(ACCURACIES, st.integers(1, 4))
def test_the_greedy_tree_is_the_best_of_all_trees(accuracies, num_drafts):
    ranks = [range(len(row)) for row in accuracies]
    paths = [
        path for depth in range(1, len(ranks) + 1) for path in itertools.product(*ranks[:depth])
    ]
    size = min(num_drafts, len(paths))
    trees = (
        tree
        for tree in itertools.combinations(paths, size)
        if all(len(path) == 1 or path[:-1] in tree for path in tree)
    )
    best = max(mean_right(tree, accuracies) for tree in trees)
    tree = search(accuracies, num_drafts)
    assert len(set(tree)) == size and mean_right(tree, accuracies) == pytest.approx(best, abs=1e-9)
    assert all(path[:-1] in ((), *tree[:index]) for index, path in enumerate(tree)), (
        "parents come first"
    )
    assert search(accuracies, num_drafts - 1) == tree[: num_drafts - 1]


def test_trees_without_measurements():
    rows = assume_accuracies(3)
    assert [row[0] for row in rows] == pytest.approx([0.6, 0.48, 0.384])
    assert all(list(row) == sorted(row, reverse=True) and sum(row) < 1 for row in rows)
    assert search(rows, 4) == ((0,), (0, 0), (1,), (0, 1))  # 0.6, 0.29, 0.24, 0.15
    assert best_only(3, 7) == ((0,), (0, 0), (0, 0, 0)) and best_only(3, 2) == ((0,), (0, 0))
    tree = search(rows, 20)
    assert best_first(tuple(sorted(tree)), rows) == tree


# --- the proposer


def test_guesses_hold_until_more_is_known():
    proposer = MedusaProposer(((0,), (1,), (1, 0), (1, 0, 2)))
    group = make_group("a", 0, [5, 6, 7])
    sequence = group.sequences[0]
    candidates_JW = np.array([[10, 11, 12], [20, 21, 22], [30, 31, 32]], np.int32)

    def draft(num_drafts: int) -> Draft | None:
        return proposer.propose(group.request, sequence, num_drafts)

    def observe(num_known_tokens: int) -> None:
        row = Row(sequence.sequence_id, num_known_tokens - 2, (1,), ((1,),))
        sample = Sample(0, 0, sequence.sequence_id, SamplingParams(), 0, 0, num_known_tokens - 1)
        nothing = np.zeros((1, 0))
        result = StepResult(
            nothing, nothing, nothing, nothing, nothing, draft_candidates=candidates_JW[None]
        )  # type: ignore[arg-type]
        proposer.observe(StepPlan(1, (row,), (sample,), draft_depth=1), result)

    assert draft(4) is None
    observe(4)
    assert draft(4) is None, "the token that was drawn beside the guesses is not known yet"
    sequence.token_ids.append(8)
    assert draft(9) == Draft((10, 11, 20, 32), (-1, -1, 1, 2))
    assert draft(2) == Draft((10, 11), (-1, -1))
    sequence.token_ids.append(9)
    assert draft(4) is None, "they are of the token before"
    observe(5)
    assert draft(1) == chain((10,))
    proposer.forget(group)
    assert draft(4) is None and not proposer._candidates


# --- the engine

GREEDY = SamplingParams(temperature=0, max_tokens=25, ignore_eos=True, logprobs=2)
SAMPLED = SamplingParams(temperature=1, max_tokens=25, ignore_eos=True, logprobs=2, seed=3, n=2)
PROMPTS = [
    [5, 9, 11],
    [7],
    [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18],
    [30, 31],
]
# The first head's second guess leads on, so that most of what is right stands on no first branch.
SECOND = ((0,), (1,), (0, 0), (1, 0), (1, 0, 0), (1, 1))


class Count(NamedTuple):
    steps: int
    drafts: int
    right: int


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return cycle_checkpoint(tmp_path_factory.mktemp("medusa") / "model")


@pytest.fixture(scope="module")
def heads(model):
    return write_original(model.parent / "heads", knowing_heads(3))


def engine_with(
    model: Path, speculative_config: dict[str, Any] | None, max_num_seqs: int = 4
) -> LLM:
    return make_llm(
        model,
        max_num_seqs=max_num_seqs,
        num_blocks=65,
        max_model_len=64,
        block_size=4,
        max_num_batched_tokens=32,
        preemption_mode="auto",
        speculative_config=speculative_config,
    )


@pytest.fixture(scope="module")
def plain(model):
    with engine_with(model, None) as llm:
        yield llm


@pytest.fixture(scope="module")
def chains(model, heads):
    with engine_with(
        model, {"method": "medusa", "model": str(heads), "num_speculative_tokens": 3}
    ) as llm:
        yield llm


@pytest.fixture(scope="module")
def trees(model, heads):
    settings = {
        "method": "medusa",
        "model": str(heads),
        "tree": True,
        "num_speculative_tokens": len(SECOND),
    }
    with engine_with(model, {**settings, "medusa_choices": [list(path) for path in SECOND]}) as llm:
        yield llm


def run(
    llm: LLM,
    params: SamplingParams,
    prompts: Sequence[list[int]] = PROMPTS,
    *,
    heads: Sequence[Head] | None = None,
    gives_way: int = -1,
) -> tuple[list[Any], Count]:
    """Returns the tokens and log probabilities that the requests draw, and the counts of drafts.

    heads: in place of the engine's own: to its executables they are arguments. gives_way: the step
    before which a request is preempted.
    """
    engine, runner = llm._engine, llm._engine.runner
    steps = drafts = right = 0
    preemptions = sum(engine.scheduler.num_preemptions.values())
    parameters, observe = runner._parameters, engine.speculator.observe

    def counting(report: Any) -> None:
        nonlocal steps, drafts, right
        observe(report)
        steps += 1
        drafts += sum(len(row.parents) for row in report.plan.rows)
        right += sum(edit.drafted for edit in report.edits if isinstance(edit, Append))

    if heads is not None:
        others = {"drafter": jax.tree.map(jnp.array, parameters_of(heads))}
        pack_weights(
            others, {path: how for path, how in runner.packed.items() if path[0] in others}
        )
        runner._parameters = parameters | others
    engine.speculator.observe = counting  # type: ignore[method-assign]
    try:
        reporters = [
            engine.add(str(index), engine.prepare(None, prompt, params))
            for index, prompt in enumerate(prompts)
        ]
        run_giving_way(engine, gives_way)
        outputs = [
            [(o.token_ids, o.logprobs) for o in reporter.whole().outputs] for reporter in reporters
        ]
    finally:
        runner._parameters = parameters
        engine.speculator.observe = observe  # type: ignore[method-assign]
    assert (sum(engine.scheduler.num_preemptions.values()) > preemptions) == (gives_way >= 0)
    invariants(llm)
    llm.reset_prefix_cache()
    if isinstance(engine.speculator, ProposingSpeculator):
        assert not engine.speculator.has_failed and not engine.speculator.proposer._candidates  # type: ignore[attr-defined]
    return outputs, Count(steps, drafts, right)


def second_knows() -> list[Head]:
    """Returns heads of which the first has what is right in second place."""
    first, *others = knowing_heads(3)
    return [Head(first.blocks, first.table + 1.5 * table_of((times(2) + 1) % WIDTH)), *others]


def test_heads_that_know_are_right_each_time(plain, chains):
    text, _ = run(plain, GREEDY, PROMPTS[:1])
    ids = text[0][0][0]
    assert list(ids) == [times(index)[PROMPTS[0][-1]] for index in range(1, 26)], (
        "the model is not the cycle it should be"
    )
    drafted, count = run(chains, GREEDY, PROMPTS[:1])
    assert drafted == text
    assert count == Count(steps=7, drafts=18, right=18), (
        "a prompt, and six times a token and three drafts"
    )


def test_samples_of_a_request_draft_from_their_first_token_on(plain, chains):
    params = SamplingParams(temperature=1e-3, n=2, seed=1, max_tokens=25, ignore_eos=True)
    drafted, count = run(chains, params, PROMPTS[:1])
    assert drafted == run(plain, params, PROMPTS[:1])[0]
    assert count == Count(steps=8, drafts=36, right=36), (
        "the last token of a prompt that forks has a step of its own"
    )


@pytest.mark.parametrize(("params", "gives_way"), [(GREEDY, -1), (SAMPLED, 3)])
def test_no_heads_change_a_text(plain, chains, trees, params, gives_way):
    text, _ = run(plain, params)
    counts = {}
    for name, heads in (("own", None), ("random", random_heads(3)), ("second", second_knows())):
        for llm in (chains, trees):
            drafted, counts[name, llm is trees] = run(llm, params, heads=heads, gives_way=gives_way)
            assert drafted == text, (name, llm is trees)
    assert all(count.drafts for count in counts.values())
    known, unknown = counts["own", False], counts["random", False]
    assert known.right > 0.3 * known.drafts and unknown.right < 0.15 * unknown.drafts
    chain_of, tree_of = counts["second", False], counts["second", True]
    assert chain_of.right < 0.1 * chain_of.drafts and tree_of.steps < 0.75 * chain_of.steps, (
        "the tree has the second guess"
    )


def test_a_wrong_order_of_heads_shows_in_what_is_right_and_in_no_text(plain, chains):
    heads = knowing_heads(4)[1:]
    drafted, count = run(chains, GREEDY, heads=heads)
    assert drafted == run(plain, GREEDY)[0]
    assert count.drafts and not count.right


@pytest.mark.sweep
def test_guesses_after_a_wrong_token_show_in_what_is_right_and_in_no_text(
    plain, model, heads, monkeypatch
):
    text, _ = run(plain, GREEDY)
    monkeypatch.setattr(steps, "last_of", lambda paths_BQ: jnp.maximum(paths_BQ[:, 0], 0))
    settings = {"method": "medusa", "model": str(heads), "num_speculative_tokens": 3}
    with engine_with(model, settings, max_num_seqs=2) as llm:
        drafted, count = run(llm, GREEDY)
    assert drafted == text
    assert 0 < count.right < 0.6 * count.drafts


def test_what_is_aborted_is_forgotten(chains):
    engine = chains._engine
    proposer: Any = engine.speculator.proposer  # type: ignore[attr-defined]
    engine.add("a", engine.prepare(None, [1, 2], SAMPLED))
    while not proposer._candidates:
        engine.step()
    assert len(proposer._candidates) == 2, "both samples have what their first draw came with"
    engine.abort("a")
    assert not proposer._candidates
    invariants(chains)


def test_heads_that_cannot_be_identified_end_the_drafts_and_no_request(plain, chains, monkeypatch):
    speculator: Any = chains._engine.speculator
    monkeypatch.setattr(speculator.proposer, "observe", lambda *_: 1 / 0)
    reporter = chains._engine.add("a", chains._engine.prepare(None, PROMPTS[0], GREEDY))
    try:
        run_giving_way(chains._engine, -1)
        assert speculator.has_failed
    finally:
        speculator.has_failed = False
    (output,) = reporter.whole().outputs
    assert [[(output.token_ids, output.logprobs)]] == run(plain, GREEDY, PROMPTS[:1])[0]


def test_engines_without_heads_have_steps_without_guesses(plain, chains, trees):
    for llm, count in ((plain, 3), (chains, 4)):
        runner = llm._engine.runner
        for bucket in llm._engine.builder.menu.buckets:
            shapes = runner.executables.step(bucket).executable.out_info
            assert len(jax.tree.leaves(shapes[0])) == count, bucket
            if count == 4:
                rows = bucket.num_rows if bucket.verifies else bucket.num_draws
                assert shapes[0].draft_candidates.shape == (rows, 3, 1)
    assert trees._engine.runner.executables.options.drafter.num_candidates == 2


# --- settings


def test_memory_counts_the_heads(plain, chains, heads):
    stored = open_medusa(heads, hidden_size=WIDTH, vocab_size=WIDTH).num_bytes("float32")
    assert stored == sum(
        leaf.nbytes for leaf in jax.tree.leaves(chains._engine.runner.parameters["drafter"])
    )
    assert stored == 4 * 3 * (2 * WIDTH * WIDTH + WIDTH)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_speculative_tokens": 4}, "num_speculative_tokens is 4, but of the 3 heads"),
        (
            {"medusa_choices": [[0] * depth for depth in range(1, 5)]},
            "medusa_choices goes 4 deep, but of the 3 heads",
        ),
    ],
)
def test_more_than_the_heads_guess_is_refused(model, heads, settings, message):
    with pytest.raises(ConfigError, match=message):
        engine_with(model, {"method": "medusa", "model": str(heads), **settings})


@pytest.mark.parametrize(
    ("settings", "lengths", "choices", "num_candidates"),
    [
        ({}, (1, 3, 7), best_only(3, 3), 1),
        ({"num_speculative_tokens": 2}, (2,), best_only(3, 2), 1),
        ({"tree": True}, (1, 3, 7), search(assume_accuracies(3), 7), 3),
        ({"tree": True, "num_speculative_tokens": 40}, (40,), search(assume_accuracies(3), 40), 6),
        (
            {"tree": True, "medusa_choices": [[1], [0, 0], [0], [0, 8]]},
            (1, 3, 4),
            ((0,), (0, 0), (1,), (0, 8)),
            9,
        ),
    ],
)
def test_drafts_are_cut_to_shapes_from_their_end(heads, settings, lengths, choices, num_candidates):
    config = EngineConfig(speculative_config={"method": "medusa", "model": str(heads), **settings})  # type: ignore[arg-type]
    assert config.speculative_config is not None
    assert config.speculative_config.draft_lengths == lengths
    opened = open_heads(config.speculative_config, TARGET)
    assert opened.choices == choices and opened.num_candidates == num_candidates


def test_a_guess_beyond_the_tokens_of_the_heads_is_refused(tmp_path):
    directory = write_vllm(tmp_path / "a", random_heads(1, rows=8), token_map=np.arange(8))
    settings = {"method": "medusa", "model": str(directory), "tree": True}
    for more, wrong in (
        ({"medusa_choices": [[7]]}, False),
        ({"medusa_choices": [[8]]}, True),
        ({}, False),
    ):
        config = SpeculativeConfig(**settings, **more)  # type: ignore[arg-type]
        if wrong:
            with pytest.raises(ConfigError, match="asks for rank 9, of 8 tokens in all"):
                open_heads(config, TARGET)
        else:
            assert open_heads(config, TARGET).choices


def test_heads_of_another_model_are_refused(model, tmp_path):
    other = write_original(tmp_path / "other", random_heads(2, width=32))
    with pytest.raises(
        CheckpointError, match=r"has shape \(32, 32\), and the model needs \(64, 64\)"
    ):
        engine_with(model, {"method": "medusa", "model": str(other)})


def test_choices_survive_the_settings_as_json():
    settings = {
        "method": "medusa",
        "model": "m",
        "tree": True,
        "medusa_choices": [[0], [1], [0, 0]],
    }
    config = EngineConfig(speculative_config=settings)  # type: ignore[arg-type]
    assert config.speculative_config is not None and config.speculative_config.medusa_choices == (
        (0,),
        (1,),
        (0, 0),
    )
    again = json.loads(json.dumps(config.model_dump()["speculative_config"]))
    assert config.replace(speculative_config=again) == config
