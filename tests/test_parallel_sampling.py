"""n and best_of: a sample is the lone request with its noise key, whatever it shares; and blocks
are copied only when written.
"""

from __future__ import annotations

import dataclasses
import itertools

import jax
import numpy as np
import pytest

from jaxpage import SamplingParams
from jaxpage.errors import CapacityError, UnsupportedError
from jaxpage.scheduling.plan_builder import PlanBuilder
from tests.support.engines import LLAMA, WIDE, invariants, lone_sample, make_llm
from tests.support.random_checkpoints import random_checkpoint

pytestmark = pytest.mark.usefixtures("largest_shapes")

PARAMS = SamplingParams(
    temperature=0.9, top_p=0.95, seed=7, max_tokens=14, ignore_eos=True, logprobs=2
)
MAXIMUM = 8
SIZE = 16
LENGTHS = (1, 5, 16, 33, 50)  # one token, less than a block, a block, more


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return random_checkpoint(tmp_path_factory.mktemp("llama"), LLAMA)


@pytest.fixture(scope="module")
def llm(directory):
    with make_llm(directory, **WIDE) as llm:
        yield llm


@pytest.fixture(autouse=True)
def nothing_left_after(llm):
    yield
    invariants(llm)


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(4)
    return [rng.integers(1, 257, length).tolist() for length in LENGTHS]


@pytest.fixture(scope="module")
def lone(directory, prompts):
    """Returns the outputs by prompt and sample, from an engine that caches nothing."""
    with make_llm(directory, enable_prefix_caching=False) as llm:
        return [[lone_sample(llm, prompt, PARAMS, i) for i in range(MAXIMUM)] for prompt in prompts]


def test_the_samples_differ(lone):
    for samples in lone:
        assert len({tuple(sample.token_ids) for sample in samples}) == MAXIMUM


@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_a_sample_is_the_lone_request_with_its_key(n, llm, prompts, lone):
    """Sample i of 8 is sample i of 4, with its tokens and the bits of their log probabilities."""
    before = llm.stats()
    outputs = llm.generate(prompts, dataclasses.replace(PARAMS, n=n), use_tqdm=False)
    for output, samples in zip(outputs, lone, strict=True):
        assert output.outputs == samples[:n] and output.finished
    after = llm.stats()
    assert after["generation_tokens_total"] - before["generation_tokens_total"] == n * 14 * len(
        prompts
    )
    assert after["request_success_total"]["length"] - before["request_success_total"].get(
        "length", 0
    ) == n * len(prompts)


def test_more_samples_than_a_prompt_step_has_rows(directory, prompts, lone, monkeypatch):
    monkeypatch.setattr("jaxpage.device.inputs.buckets.CHUNK_ROWS", 2)
    with make_llm(directory) as llm:
        assert llm._engine.scheduler.limits.max_chunk_rows == 2
        outputs = llm.generate(prompts, dataclasses.replace(PARAMS, n=4), use_tqdm=False)
        assert [output.outputs for output in outputs] == [samples[:4] for samples in lone]


def bytes_of(llm, sequence_id, num_tokens):
    """Returns the bytes of a sequence's first keys and values, found by its block table."""
    table = list(llm._engine.scheduler.block_manager.block_tables(sequence_id)[0])
    pages = [np.asarray(page)[table] for page in jax.tree.leaves(llm._engine.runner._pages)]
    return [page.reshape(-1, *page.shape[2:])[:num_tokens].tobytes() for page in pages]


@pytest.mark.parametrize("mistaken", [False, True])
def test_figure_8_on_the_device(mistaken, llm, prompts, monkeypatch):
    """The first to write into the shared last block gets a copy of it, the last writes in place;
    the others keep what they had.
    """
    if mistaken:  # the table says that there is a copy, and there is none
        monkeypatch.setattr(PlanBuilder, "add_copies", lambda *_: None)
    engine, manager = llm._engine, llm._engine.scheduler.block_manager
    prompt, copied = prompts[3], llm.stats()["copy_on_write_blocks_total"]
    llm.reset_prefix_cache()
    reporter = engine.add("watched", engine.prepare(None, prompt, dataclasses.replace(PARAMS, n=3)))
    (group,) = engine.scheduler.waiting
    while len(group.sequences) == 1:
        engine.step()
    ids = group.sequence_ids
    shared = manager.block_tables(ids[0])[0]
    assert [manager.block_tables(i)[0] for i in ids] == [shared] * 3 and len(shared) == 3
    assert (
        manager.groups[0].pool.ref_count(shared[2]) == 3
        and llm.stats()["copy_on_write_blocks_total"] == copied
    )
    before = bytes_of(llm, ids[0], len(prompt))
    engine.step()
    tables = [manager.block_tables(i)[0] for i in ids]
    assert [table[:2] for table in tables] == [shared[:2]] * 3
    assert len({table[2] for table in tables}) == 3 and tables[2][2] == shared[2]
    unchanged = [bytes_of(llm, i, len(prompt)) == before for i in ids]
    assert unchanged == ([False, False, True] if mistaken else [True] * 3)
    firsts = {sequence.output_token_ids[0] for sequence in group.sequences}
    # each wrote its own token
    assert len({tuple(bytes_of(llm, i, len(prompt) + 1)) for i in ids}) == len(firsts) > 1
    assert llm.stats()["copy_on_write_blocks_total"] - copied == (0 if mistaken else 2)
    if not mistaken:
        assert llm.stats()["shared_blocks"] == 2
        while engine.has_unfinished:
            engine.step()
        assert [output.index for output in reporter.whole().outputs] == [0, 1, 2]
        assert llm.stats()["copy_on_write_blocks_total"] - copied == 2
    engine.abort("watched")
    llm.reset_prefix_cache()


@pytest.mark.parametrize("caching", [True, False])
def test_only_a_last_block_that_is_partly_filled_is_copied(caching, directory, prompts):
    with make_llm(directory, **WIDE, enable_prefix_caching=caching) as llm:
        for prompt, n, max_tokens in itertools.product(prompts, (1, 2, 5), (1, 14)):
            before = llm.stats()["copy_on_write_blocks_total"]
            llm.generate(
                prompt, dataclasses.replace(PARAMS, n=n, max_tokens=max_tokens), use_tqdm=False
            )
            shares = len(prompt) % SIZE and max_tokens > 1
            assert llm.stats()["copy_on_write_blocks_total"] - before == (n - 1 if shares else 0)


def test_best_of_is_the_most_likely_of_all(llm, prompts):
    for n, best_of, logprobs in itertools.product((1, 2, 3), (3, 8), (None, 1)):
        params = dataclasses.replace(
            PARAMS, temperature=1.0, top_p=1.0, ignore_eos=False, stop_token_ids=range(9, 40)
        )
        everything = llm.generate(prompts, dataclasses.replace(params, n=best_of), use_tqdm=False)
        best = llm.generate(
            prompts,
            dataclasses.replace(params, n=n, best_of=best_of, logprobs=logprobs),
            use_tqdm=False,
        )
        for every, some in zip(everything, best, strict=True):
            sums = [
                sum(step[t].logprob for step, t in zip(o.logprobs, o.token_ids, strict=True))
                for o in every.outputs
            ]
            ranked = (
                sorted(range(best_of), key=lambda i: -sums[i])[:n]
                if n < best_of
                else range(best_of)
            )
            assert [o.token_ids for o in some.outputs] == [
                every.outputs[i].token_ids for i in ranked
            ]
            assert [o.index for o in some.outputs] == list(range(n)) and some.finished
            assert all((o.logprobs is None) == (logprobs is None) for o in some.outputs)
            if n < best_of or logprobs is not None:
                assert [o.cumulative_logprob for o in some.outputs] == [sums[i] for i in ranked]


def test_equals_are_ranked_by_their_index_and_greedy_ones_are_equal(llm, prompts):
    greedy = dataclasses.replace(PARAMS, temperature=0.0, n=3)
    (output,) = llm.generate(prompts[1], greedy, use_tqdm=False)
    expected = lone_sample(llm, prompts[1], greedy, 0)
    assert output.outputs == [dataclasses.replace(expected, index=index) for index in range(3)]
    (best,) = llm.generate(prompts[1], dataclasses.replace(greedy, n=2, best_of=4), use_tqdm=False)
    assert best.outputs == output.outputs[:2]


def test_each_sample_ends_by_itself(llm, prompts):
    params = dataclasses.replace(
        PARAMS, max_tokens=40, min_tokens=2, stop_token_ids=range(1, 17), n=8
    )
    for prompt in prompts:
        (output,) = llm.generate(prompt, params, use_tqdm=False)
        assert output.outputs == [lone_sample(llm, prompt, params, i) for i in range(8)]
        assert len({len(sample.token_ids) for sample in output.outputs}) > 2
    (output,) = llm.generate(
        prompts[1], dataclasses.replace(PARAMS, n=8, max_tokens=1), use_tqdm=False
    )
    assert [(len(sample.token_ids), sample.finish_reason) for sample in output.outputs] == [
        (1, "length")
    ] * 8


def test_a_seed_is_drawn_once_for_all_samples(llm, prompts):
    (output,) = llm.generate(
        prompts[2], dataclasses.replace(PARAMS, n=6, seed=None), use_tqdm=False
    )
    assert len({tuple(sample.token_ids) for sample in output.outputs}) == 6


def test_what_cannot_be_honoured_is_refused(llm, prompts):
    with pytest.raises(
        UnsupportedError, match="best_of=3: which are the best n=2 is known only at the end"
    ):
        llm.stream(prompts[0], SamplingParams(n=2, best_of=3))
    with llm.stream(prompts[0], SamplingParams(n=2, best_of=2)) as stream:
        next(stream)
    for params in (SamplingParams(n=17), SamplingParams(n=2, best_of=17)):
        with pytest.raises(CapacityError, match="17 sequences at once; max_num_seqs is 16"):
            llm.generate(prompts[0], params, use_tqdm=False)


def test_an_abort_ends_all_samples_at_any_step(llm, prompts):
    engine = llm._engine
    for num_steps, params in itertools.product(range(5), [{"n": 4}, {"n": 4, "best_of": 5}]):
        requested = dataclasses.replace(PARAMS, **params)
        reporter = engine.add("watched", engine.prepare(None, prompts[3], requested))
        for _ in range(num_steps):
            engine.step()
        engine.abort("watched")
        invariants(llm)
        whole = reporter.whole()
        ends = [(output.index, output.finish_reason) for output in whole.outputs]
        assert ends == [(index, "abort") for index in range(4)]
        if "best_of" not in params:
            assert reporter.delta().outputs == whole.outputs


def test_a_failed_step_ends_every_sample(llm, prompts, monkeypatch):
    """Samples that are not forked yet end, too."""
    run = llm._engine.runner.run

    def failing_after(num_steps):
        calls = itertools.count()

        def failing(batch):
            if next(calls) == num_steps:
                raise RuntimeError("planted")
            return run(batch)

        return failing

    for num_steps in (0, 1, 2, 5):
        monkeypatch.setattr(llm._engine.runner, "run", failing_after(num_steps))
        (output,) = llm.generate(
            prompts[3], dataclasses.replace(PARAMS, n=3, best_of=4), use_tqdm=False
        )
        assert [(sample.index, sample.finish_reason) for sample in output.outputs] == [
            (i, "error") for i in range(3)
        ]


def test_logits_that_are_no_numbers_end_the_sample_that_drew_them(llm, prompts, lone, monkeypatch):
    """They come at the first draws and later; of the best, a sample that ended so comes last."""
    run = llm._engine.runner.run

    def spoil_at(step, draw):
        calls = itertools.count()

        def spoil(batch):
            result = run(batch)
            if next(calls) == step:
                token_ids = result.token_ids.copy()
                token_ids[draw] = -1
                return dataclasses.replace(result, token_ids=token_ids)
            return result

        return spoil

    for step, draw, sample in ((1, 0, 1), (1, 2, 0), (3, 0, 0), (3, 2, 2)):
        for best_of in (None, 3):
            llm.reset_prefix_cache()
            monkeypatch.setattr(llm._engine.runner, "run", spoil_at(step, draw))
            params = dataclasses.replace(PARAMS, n=3, best_of=best_of)
            (output,) = llm.generate(prompts[3], params, use_tqdm=False)
            assert [each.finish_reason == "error" for each in output.outputs] == [
                i == sample for i in range(3)
            ]
            for index in {0, 1, 2} - {sample}:
                assert output.outputs[index] == lone[3][index]
    monkeypatch.setattr(llm._engine.runner, "run", spoil_at(3, 0))
    (output,) = llm.generate(
        prompts[3], dataclasses.replace(PARAMS, n=2, best_of=3), use_tqdm=False
    )
    assert {sample.finish_reason for sample in output.outputs} == {"length"}
