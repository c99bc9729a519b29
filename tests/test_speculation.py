"""Speculation through the whole engine changes nothing: tokens, text, log probabilities and ends
are those of an engine without, to the last bit.

Drafts come from doubles that know what follows, or what does not.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter

import jax
import numpy as np
import pytest

from jaxpage import BeamSearchParams, SamplingParams
from jaxpage.decoding import advancing
from jaxpage.device import steps
from jaxpage.engine import batch_builder
from jaxpage.errors import UnsupportedError
from jaxpage.scheduling import plan_builder
from jaxpage.settings.checked_settings import UnsupportedSettings
from jaxpage.settings.speculative_config import SpeculativeConfig
from jaxpage.speculation import NoSpeculation
from tests.support.drafts import KINDS, MAX_DRAFTS, NUM_TOKEN_IDS, Drafter
from tests.support.engines import (
    LLAMA,
    MISTRAL,
    engines_by_name,
    invariants,
    make_llm,
    run_giving_way,
)
from tests.support.random_checkpoints import random_checkpoint
from tests.support.sweeps import few
from tests.support.tokenizers import write_tokenizer

TREES = SpeculativeConfig(method="suffix", num_speculative_tokens=MAX_DRAFTS, tree=True)
CHAINS = SpeculativeConfig(method="ngram", num_speculative_tokens=MAX_DRAFTS)
# Of the model that most tests use, all engines have the same shapes, for compiling takes longer
# than
# all else. The small pool holds one of the longest, or a few.
MAX_LENGTH = 128
SHAPES = {
    "max_num_seqs": 7,
    "max_num_batched_tokens": 56,
    "max_model_len": MAX_LENGTH,
    "block_size": 4,
    "num_blocks": 513,
}
SMALL_POOL = {
    **SHAPES,
    "num_blocks": 34,
    "enable_prefix_caching": False,
    "speculative_config": TREES,
}
TWO = {
    "max_num_seqs": 2,
    "max_num_batched_tokens": 16,
    "block_size": 4,
    "num_blocks": 513,
    "largest_shapes": True,
}
ENGINES = {
    "without": SHAPES,
    "trees": {**SHAPES, "speculative_config": TREES},
    "recomputing": SMALL_POOL,
    "swapping": {**SMALL_POOL, "preemption_mode": "swap"},
    "chains": {**SHAPES, "largest_shapes": True, "speculative_config": CHAINS},
    "int8 without": {**TWO, "kv_cache_dtype": "int8"},
    "int8": {**TWO, "kv_cache_dtype": "int8", "speculative_config": TREES},
    "bfloat16 without": {**TWO, "dtype": "bfloat16"},
    "bfloat16": {**TWO, "dtype": "bfloat16", "speculative_config": TREES},
    "mistral without": TWO,
    "mistral": {**TWO, "speculative_config": CHAINS},
}
LENGTH = {"max_tokens": 20, "ignore_eos": True}
SAMPLING = {
    "greedy": {"temperature": 0.0, "logprobs": 3},
    "hot": {"temperature": 1.3, "logprobs": 0},
    "top-k and top-p": {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "logprobs": 2},
    "min-p": {"temperature": 1.0, "min_p": 0.05, "logprobs": 2},
    "penalties": {
        "temperature": 0.9,
        "repetition_penalty": 1.4,
        "presence_penalty": 0.9,
        "frequency_penalty": 0.7,
        "logprobs": 2,
    },
    "greedy with penalties": {
        "temperature": 0.0,
        "repetition_penalty": 1.5,
        "frequency_penalty": 1.0,
    },
    "bias": {"temperature": 1.0, "logit_bias": {5: 4.0, 70: -100.0, 90: 3.0}},
    "bad words": {
        "temperature": 0.7,
        "bad_words": ["a", "ab", "10", "dog"],
        "logit_bias": {66: 3.0, 67: 3.0},
    },
    "ends": {
        "temperature": 1.0,
        "ignore_eos": False,
        "logit_bias": {0: 4.0},
        "min_tokens": 6,
        "max_tokens": 40,
    },
    "grammar": {
        "temperature": 1.5,
        "structured_outputs": {"regex": "(ab|ba|cat){2,6}( (10|00))+"},
        "ignore_eos": False,
    },
    "greedy grammar": {
        "temperature": 0.0,
        "structured_outputs": {"json": {"type": "array", "items": {"type": "boolean"}}},
    },
    "two samples": {"temperature": 0.9, "n": 2, "logprobs": 1},
    "best of three": {"temperature": 1.1, "n": 2, "best_of": 3},
    "prompt scores": {"temperature": 0.6, "prompt_logprobs": 2, "logprobs": 1},
    "to the last position": {"temperature": 1.0, "max_tokens": None},
}


def prompt_of(index):
    rng = np.random.default_rng(index)
    length = {11: 20, 14: MAX_LENGTH - 10}.get(index, int(rng.integers(1, 40)))
    return rng.integers(1, 100, length).tolist()


PROMPTS = [prompt_of(index) for index in range(len(SAMPLING))]
REQUESTS = [
    SamplingParams(**{**LENGTH, "seed": 100 + index, **each})
    for index, each in enumerate(SAMPLING.values())
]


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    return {
        name: write_tokenizer(random_checkpoint(tmp_path_factory.mktemp(name), config))
        for name, config in {"llama": LLAMA, "mistral": MISTRAL}.items()
    }


@pytest.fixture(scope="module")
def engines(directories):
    with engines_by_name(
        ENGINES, lambda name: directories["mistral" if "mistral" in name else "llama"]
    ) as engine:
        yield engine


def everything(outputs):
    """Returns all of the outputs but when things happened."""
    return [
        (output.prompt_token_ids, output.outputs, output.prompt_logprobs, output.finished)
        for output in outputs
    ]


def futures(outputs, requests):
    """Returns what a `Drafter` knows.

    Of a request that ranks its samples, only where the ranks are those of the samples.
    """
    known = {}
    for output, params in zip(outputs, requests, strict=True):
        for sample in output.outputs:
            known[tuple(output.prompt_token_ids), params.seed, sample.index] = sample.token_ids
    return known


@pytest.fixture(scope="module")
def lone(engines):
    """Returns what requests draw without speculation, by engine: outputs, and what a drafter knows
    of them.

    The first is asked for everything, the others for a few.
    """
    known = {}

    def outputs_of(name, prompts=PROMPTS, requests=REQUESTS):
        key = name, tuple(map(tuple, prompts)), tuple(requests)
        if key not in known:
            outputs = engines(name).generate(prompts, list(requests), use_tqdm=False)
            known[key] = everything(outputs), futures(outputs, requests)
        return known[key]

    return outputs_of


class Watched:
    """Puts a drafter in place of an engine's proposer; counts what it verifies and what was
    right.
    """

    def __init__(self, llm, outputs, kind, seed=0):
        self.llm, self.engine = llm, llm._engine
        self.drafter = Drafter(outputs, seed, self.engine._strategies)
        self.drafter.kind = KINDS[kind]
        self.counts = Counter()
        self.plans = []

    def __enter__(self):
        self._speculator, self._build = self.engine.speculator, self.engine.builder.build
        self._commit = self.engine.scheduler.commit
        self.engine.speculator = self.drafter
        self.engine.builder.build = self._built
        self.engine.scheduler.commit = self._committed
        return self

    def __exit__(self, *_):
        self.engine.speculator, self.engine.builder.build = self._speculator, self._build
        self.engine.scheduler.commit = self._commit

    def _built(self, plan, *masks):
        self.plans.append(plan)
        self.counts["steps"] += 1
        self.counts["drafts"] += sum(len(row.parents) for row in plan.rows)
        self.counts["branching"] += plan.branches
        self.counts["mixed"] += plan.verifies and not all(row.parents for row in plan.rows)
        return self._build(plan, *masks)

    def _committed(self, plan, edits):
        self.counts["right"] += sum(getattr(edit, "drafted", False) for edit in edits)
        return self._commit(plan, edits)

    def generate(self, prompts=PROMPTS, requests=REQUESTS):
        return everything(self.llm.generate(prompts, list(requests), use_tqdm=False))


def test_the_requests_are_not_all_alike(lone):
    """Otherwise equality would show little."""
    outputs, _ = lone("without")
    assert len({str(each[1][0].token_ids) for each in outputs}) == len(outputs)
    reasons = Counter(sample.finish_reason for each in outputs for sample in each[1])
    assert reasons["stop"] >= 2 and reasons["length"] >= 10 and set(reasons) == {"stop", "length"}
    assert len(outputs[-1][0]) + len(outputs[-1][1][0].token_ids) == MAX_LENGTH


@pytest.mark.parametrize(
    ("engine", "kind"),
    few(
        [("trees", kind) for kind in KINDS]
        + [("recomputing", "any tree"), ("recomputing", "right branch last")]
        + [("swapping", "any tree"), ("swapping", "too many")]
        + [("chains", "any length"), ("chains", "any tree")],
        [
            *(("trees", kind) for kind in ("any tree", "right branch last", "wrong")),
            *(("swapping", "too many"), ("chains", "any tree")),
        ],
    ),
)
def test_nothing_changes(engine, kind, engines, lone):
    expected, outputs = lone("without")
    llm = engines(engine)
    before = llm.stats()["num_preemptions_total"]
    with Watched(llm, outputs, kind) as watched:
        assert watched.generate() == expected
    assert watched.counts["drafts"] > 0 and (watched.counts["right"] > 0) == (kind != "wrong")
    branching = engine != "chains" and kind not in ("oracle", "wrong", "any length", "too many")
    assert (watched.counts["branching"] > 0) == branching
    if engine in ("recomputing", "swapping"):
        mode = "swap" if engine == "swapping" else "recompute"
        assert llm.stats()["num_preemptions_total"][mode] > before[mode]
    invariants(llm)


@pytest.mark.parametrize("kind", ["any tree", "right branch last", "oracle"])
def test_nothing_changes_for_one_at_a_time(kind, engines, lone):
    expected, outputs = lone("without")
    with Watched(engines("trees"), outputs, kind) as watched:
        for index in (0, 1, 4, 9, 14):
            assert (
                watched.generate(PROMPTS[index : index + 1], REQUESTS[index : index + 1])
                == expected[index : index + 1]
            )
    assert watched.counts["right"] > 20
    assert all(len(plan.rows) == 1 for plan in watched.plans)
    invariants(engines("trees"))


@pytest.mark.parametrize("model", few(["int8", "bfloat16", "mistral"], ["mistral"]))
def test_nothing_changes_in_fewer_bits_or_with_a_window(model, engines, lone):
    # of grammars and bad words, drafts that cannot be are left out beforehand
    some = [0, 2, 4, 3, 11]
    requested = [PROMPTS[index] for index in some], tuple(REQUESTS[index] for index in some)
    expected, outputs = lone(f"{model} without", *requested)
    assert expected != [lone("without")[0][index] for index in some]
    for kind in ("any tree", "right branch last", "oracle"):
        with Watched(engines(model), outputs, kind) as watched:
            assert watched.generate(*requested) == expected
        trees = model != "mistral" and kind != "oracle"
        # of chains that is the wrong branch, but for what is right by chance
        if trees or kind != "right branch last":
            assert watched.counts["right"] > 0
        assert (watched.counts["branching"] > 0) == trees
    invariants(engines(model))


def test_two_hundred_seeds(engines, lone):
    """The prompt is the same, and each seed has drafts that are right for a while."""
    requests = tuple(
        SamplingParams(temperature=1.0, seed=seed, max_tokens=8, ignore_eos=True)
        for seed in range(200)
    )
    prompts = [PROMPTS[2]] * len(requests)
    expected, outputs = lone("without", prompts, requests)
    assert len({tuple(each[1][0].token_ids) for each in expected}) > 150
    with Watched(engines("trees"), outputs, "any tree") as watched:
        assert watched.generate(prompts, requests) == expected
    assert watched.counts["right"] > 200


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_cuts_inside_an_accepted_run(include, engines, lone):
    """Every text of three characters that the reference says ends it where it ends without drafts,
    and nothing follows.
    """
    (_, (whole,), *_), outputs = lone("without")[0][1], lone("without")[1]
    stops = sorted({whole.text[index : index + 3] for index in range(len(whole.text) - 2)})
    assert len(stops) > 8
    requests = tuple(
        dataclasses.replace(REQUESTS[1], stop=(stop,), include_stop_str_in_output=include)
        for stop in stops
    )
    prompts = [PROMPTS[1]] * len(stops)
    expected, _ = lone("without", prompts, requests)
    assert all(each[1][0].stop_reason == stop for each, stop in zip(expected, stops, strict=True))
    with Watched(engines("trees"), outputs, "oracle") as watched:
        assert watched.generate(prompts, requests) == expected
    lengths = [len(each[1][0].token_ids) for each in expected]
    assert watched.counts["right"] > 0 and any(
        length % (1 + MAX_DRAFTS) not in (0, 1) for length in lengths
    )
    invariants(engines("trees"))


@pytest.mark.parametrize("engine", ["recomputing", "swapping"])
def test_who_gives_way_in_the_middle_goes_on_as_if_nothing_had_happened(engine, engines, lone):
    expected, outputs = lone("without")
    llm = engines(engine)
    chosen = [0, 2, 11]
    for step, kind in itertools.product((2, 4, 5, 7), ("any tree", "right branch last")):
        with Watched(llm, outputs, kind, step) as watched:
            reporters = [
                llm._engine.add(
                    f"{step} {kind} {index}",
                    llm._engine.prepare(None, PROMPTS[index], REQUESTS[index]),
                )
                for index in chosen
            ]
            run_giving_way(llm._engine, step)
        actual = everything([reporter.whole() for reporter in reporters])
        assert actual == [expected[index] for index in chosen]
        assert any(plan.preempted for plan in watched.plans) and watched.counts["right"] > 0
    invariants(llm)


def test_what_speculation_cached_is_what_others_find(engines, lone):
    """Prompts that go on with what was drawn find its blocks, right drafts included, and draw what
    they draw without a cache.
    """
    expected, outputs = lone("without")
    llm = engines("trees")
    longer = [[*PROMPTS[index], *expected[index][1][0].token_ids] for index in (1, 2, 3)]
    requests = tuple(
        SamplingParams(**LENGTH, temperature=0.9, seed=index, logprobs=1) for index in (1, 2, 3)
    )
    fresh, longer_futures = lone("without", longer, requests)
    llm.reset_prefix_cache()
    for kind in ("any tree", "right branch last", "wrong"):
        with Watched(llm, {**outputs, **longer_futures}, kind) as watched:
            watched.generate(PROMPTS[1:4], REQUESTS[1:4])
            before = llm.stats()["prefix_cache_hits_total"]
            assert watched.generate(longer, requests) == fresh
            assert llm.stats()["prefix_cache_hits_total"] - before >= sum(map(len, longer)) - 3 * 32
    invariants(llm)


def pages_of(engine, sequence):
    """Returns the bytes of the keys and values that a sequence has computed."""
    manager = engine.scheduler.block_manager
    table = list(manager.block_tables(sequence.sequence_id)[0])
    pages = [np.asarray(page)[table] for page in jax.tree.leaves(engine.runner._pages)]
    return [
        page.reshape(-1, *page.shape[2:])[: sequence.num_computed_tokens].copy() for page in pages
    ]


@pytest.mark.parametrize("kind", ["wrong", "right branch last", "any tree"])
def test_keys_and_values_are_those_without_drafts(kind, engines, lone):
    """Two forks are compared in every step: what was computed stays as it is, whatever the other's
    drafts were; and all is as without drafts.
    """
    index = list(SAMPLING).index("two samples")
    final = {}
    for name in ("without", "trees"):
        engine = engines(name)._engine
        with Watched(engines(name), lone("without")[1], kind) as watched:
            if name == "without":
                engine.speculator = NoSpeculation()
            engine.add("forked", engine.prepare(None, PROMPTS[index], REQUESTS[index]))
            (group,) = engine.scheduler.waiting
            before = {}
            while engine.has_unfinished:
                engine.step()
                for sequence in group.unfinished:
                    now = pages_of(engine, sequence)
                    for old, new in zip(before.get(sequence.sample_index, ()), now, strict=False):
                        np.testing.assert_array_equal(new[: len(old)], old)
                    before[sequence.sample_index] = now
            final[name] = before
        assert len(before) == 2
    assert watched.counts["drafts"] > 0 and (watched.counts["right"] > 0) == (kind != "wrong")
    for sample, pages in final["trees"].items():
        for actual, expected in zip(pages, final["without"][sample], strict=True):
            shared = min(len(actual), len(expected))
            assert shared > len(PROMPTS[index])
            np.testing.assert_array_equal(actual[:shared], expected[:shared])


def test_who_does_not_know_who_goes_on_does_not_draft(engines, lone):
    """Beams do not, nor samples that have not forked yet. The others beside them do."""
    index = list(SAMPLING).index("two samples")
    beam = BeamSearchParams(beam_width=2, max_tokens=9)
    prompts, requests = (
        [PROMPTS[0], PROMPTS[index], PROMPTS[3]],
        (REQUESTS[0], REQUESTS[index], beam),
    )
    plain = engines("without")
    expected = everything(plain.generate(prompts[:2], list(requests[:2]), use_tqdm=False))
    expected += everything(plain.generate(prompts[2], beam, use_tqdm=False))
    llm = engines("trees")
    with Watched(llm, lone("without")[1], "any tree") as watched:
        engine = llm._engine
        reporters = [
            engine.add(str(i), engine.prepare(None, *each))
            for i, each in enumerate(zip(prompts, requests, strict=True))
        ]
        forked = set()
        groups = {group.request.request_id: group for group in engine.scheduler.waiting}
        while engine.has_unfinished:
            due = set(groups["1"].pending_forks)
            engine.step()
            beams = set(groups["2"].sequence_ids)
            forked |= due & {sample.sequence_id for sample in watched.plans[-1].samples}
            for row in watched.plans[-1].rows:
                assert not (
                    row.parents
                    and (row.sequence_id in beams or due & set(groups["1"].sequence_ids))
                )
        assert everything([reporter.whole() for reporter in reporters]) == expected
    assert watched.counts["right"] > 0 and watched.counts["mixed"] > 0 and forked
    invariants(llm)


def test_a_request_that_is_aborted_while_its_drafts_are_verified_is_gone(engines, lone):
    expected, outputs = lone("without")
    llm = engines("trees")
    engine, run = llm._engine, llm._engine.runner.run
    with Watched(llm, outputs, "any tree") as watched:
        remaining = engine.add("kept", engine.prepare(None, PROMPTS[0], REQUESTS[0]))
        gone = engine.add("gone", engine.prepare(None, PROMPTS[2], REQUESTS[2]))

        def abort_then_run(batch):
            if watched.plans[-1].verifies and len(watched.plans[-1].rows) == 2:
                engine.abort("gone")
            return run(batch)

        engine.runner.run = abort_then_run
        try:
            while engine.has_unfinished:
                engine.step()
                engine.scheduler.check()
        finally:
            engine.runner.run = run
        assert everything([remaining.whole()]) == [expected[0]]
    (cut,) = gone.whole().outputs
    assert (
        cut.finish_reason == "abort"
        and cut.token_ids == expected[2][1][0].token_ids[: len(cut.token_ids)]
    )
    invariants(llm)


def test_a_failed_step_ends_its_requests_and_the_next_ones_draw_as_ever(engines, lone):
    expected, outputs = lone("without")
    llm = engines("trees")
    engine, run = llm._engine, llm._engine.runner.run
    with Watched(llm, outputs, "any tree") as watched:

        def fail(batch):
            if batch.bucket.verifies:
                raise RuntimeError("a device that is gone")
            return run(batch)

        engine.runner.run = fail
        try:
            (failed,) = llm.generate(PROMPTS[0], REQUESTS[0], use_tqdm=False)
        finally:
            engine.runner.run = run
        assert failed.outputs[0].finish_reason == "error"
        assert watched.generate(PROMPTS[:3], REQUESTS[:3]) == expected[:3]
    invariants(llm)


@pytest.mark.parametrize("engine", ["chains", "trees"])
def test_its_own_proposer_changes_nothing_either(engine, engines, lone):
    """Prompt lookup and trees of suffixes run on texts that repeat themselves, with the engine as a
    user has it.
    """
    prompts = [[5, 6, 7, 8] * 6, [9, 3, 9, 3, 9, 3, 9]]
    requests = tuple(
        SamplingParams(
            temperature=heat,
            seed=3,
            max_tokens=40,
            ignore_eos=True,
            logprobs=2,
            allowed_token_ids=few,
        )
        for heat, few in ((0.0, [5, 6, 7, 8]), (1.5, [3, 9]))
    )
    expected, _ = lone("without", prompts, requests)
    with Watched(engines(engine), {}, "oracle") as watched:
        watched.engine.speculator = watched._speculator
        assert watched.generate(prompts, requests) == expected
    assert watched.counts["right"] > 0 and (watched.counts["branching"] > 0) == (engine == "trees")
    texts = [outputs[0].token_ids for _, outputs, *_ in expected]
    reported = [
        [entry[id_].logprob for entry, id_ in zip(outputs[0].logprobs, text, strict=True)]
        for (_, outputs, *_), text in zip(expected, texts, strict=True)
    ]
    llm, name = engines(engine), "spec_decode_num_accepted_tokens_total"
    accepted = llm.stats()[name]
    with llm.stream(prompts[0], requests[0]) as beside:
        next(beside)
        assert llm.score(prompts, texts) == reported
    assert llm.stats()[name] > accepted


def test_trees_are_refused_where_they_are_not_drafted_or_not_attended(directories):
    with pytest.raises(
        UnsupportedSettings, match="tree=True is not supported: method 'ngram' drafts chains"
    ):
        make_llm(directories["llama"], speculative_config={"method": "ngram", "tree": True})
    with pytest.raises(UnsupportedError, match="tree=True is not supported for .*sliding windows"):
        make_llm(directories["mistral"], speculative_config=TREES)


def forgets_the_position(sample, draft, sequence, request):
    samples = right_samples(sample, draft, sequence, request)
    return [each._replace(position=sample.position) for each in samples]


def forgets_the_branch(sample, draft, sequence, request):
    return [
        sample._replace(offset=1 + index, position=sample.position + depth)
        for index, depth in enumerate(draft.depths)
    ]


def transposes_the_mask(mask_TU, parents):
    right_mask(mask_TU, parents)
    seen = (mask_TU[:, :1] >> np.arange(len(mask_TU), dtype=np.uint32) & 1).T
    mask_TU[:, 0] = (seen << np.arange(len(mask_TU), dtype=np.uint32)).sum(1)


def sees_no_branch(mask_TU, parents):
    """Sees everything before it in the row, as in a chain."""
    mask_TU[:, 0] = [2 ** (index + 1) - 1 for index in range(len(mask_TU))]


def accepts_one_more(plan, result):
    ends = list(itertools.accumulate(len(row.token_ids) for row in plan.rows))
    for index, sample, drafted in right_draws(plan, result):
        more = plan.rows[sample.row].parents and not drafted and index + 1 < ends[sample.row]
        yield index, sample, drafted or bool(more)
        if more:
            yield index + 1, plan.samples[index + 1], False


right_samples, right_mask, right_draws = (
    plan_builder.make_draft_samples,
    batch_builder._fill_tree_mask,
    advancing._that_count,
)


@pytest.mark.parametrize(
    ("module", "name", "mistake"),
    [
        (plan_builder, "make_draft_samples", forgets_the_position),
        (plan_builder, "make_draft_samples", forgets_the_branch),
        (batch_builder, "_fill_tree_mask", transposes_the_mask),
        (batch_builder, "_fill_tree_mask", sees_no_branch),
        (advancing, "_that_count", accepts_one_more),
    ],
)
def test_a_planted_mistake_is_seen(module, name, mistake, engines, lone, monkeypatch):
    expected, outputs = lone("without")
    some = [1, 2, 4, 5]
    monkeypatch.setattr(module, name, mistake)
    with Watched(engines("trees"), outputs, "any tree") as watched:
        actual = watched.generate(
            [PROMPTS[index] for index in some], [REQUESTS[index] for index in some]
        )
    assert actual != [expected[index] for index in some]
    monkeypatch.undo()
    engines("trees").reset_prefix_cache()


@pytest.mark.sweep
def test_it_is_seen_if_nothing_is_moved(directories, lone, monkeypatch):
    expected, outputs = lone("without")
    monkeypatch.setattr(steps, "moves", lambda paths, *_: (jax.numpy.zeros(paths.size, int),) * 2)
    with make_llm(directories["llama"], **TWO, speculative_config=TREES) as llm:
        for kind, same in (("right branch last", False), ("oracle", True)):
            with Watched(llm, outputs, kind) as watched:
                assert (watched.generate(PROMPTS[:3], REQUESTS[:3]) == expected[:3]) == same
            assert watched.counts["right"] > 0


def test_the_doubles_are_what_they_say():
    rng = np.random.default_rng(0)
    future = rng.integers(0, NUM_TOKEN_IDS, 20).tolist()
    for name, kind in KINDS.items():
        draft = kind(Drafter({})._rng, future, MAX_DRAFTS)
        assert all(-1 <= parent < index for index, parent in enumerate(draft.parents))
        right = [i for i, depth in enumerate(draft.depths) if list(draft.path(i)) == future[:depth]]
        assert (name == "wrong") == (not right)
        if name == "duplicates":
            assert (
                len(
                    {
                        (parent, token)
                        for parent, token in zip(draft.parents, draft.token_ids, strict=True)
                    }
                )
                < 7
            )
