"""prompt_logprobs: the model's own numbers, for every token once, whatever is cached, chunked,
preempted or sampled beside it.
"""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from jaxpage import SamplingParams
from jaxpage.engine import runner as runner_module
from jaxpage.errors import CapacityError
from jaxpage.outputs import Logprob
from jaxpage.scheduling import admitting, committing, plan_builder
from tests.support.engines import LLAMA, invariants, make_llm
from tests.support.random_checkpoints import random_checkpoint
from tests.support.sweeps import few
from tests.support.tokenizers import write_tokenizer

pytestmark = pytest.mark.usefixtures("decode_as_chunks")

PARAMS = SamplingParams(
    temperature=0.9, seed=7, max_tokens=6, ignore_eos=True, logprobs=2, prompt_logprobs=3
)
SILENT = dataclasses.replace(PARAMS, prompt_logprobs=None)
GREEDY = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
CLOSE = 1e-4
LENGTHS = (1, 2, 16, 17, 33, 50)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return random_checkpoint(tmp_path_factory.mktemp("llama"), LLAMA)


@pytest.fixture(scope="module")
def llm(directory):
    with make_llm(directory) as llm:
        yield llm


@pytest.fixture(autouse=True)
def nothing_left_after(llm):
    yield
    invariants(llm)
    llm.reset_prefix_cache()


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(4)
    return [rng.integers(1, 257, length).tolist() for length in LENGTHS]


@pytest.fixture(scope="module")
def lone(directory, prompts):
    """Returns the outputs by prompt, each request by itself, with nothing cached."""
    with make_llm(directory, enable_prefix_caching=False) as llm:
        return [generate(llm, prompt, PARAMS) for prompt in prompts]


def generate(llm, prompt, params):
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    return output


def content(output):
    """Returns all that must agree to the last bit."""
    return output.prompt_logprobs, output.outputs


def check_scores(prompt, scores, max_rank, log_probabilities):
    """Compares with `log_probabilities` [T, V] in float64: those of row t are of the token at t +
    1.

    Where they are too close, the order is free.
    """
    assert scores is not None and len(scores) == len(prompt) and scores[0] is None
    for position in range(1, len(prompt)):
        row, entries, token_id = log_probabilities[position - 1], scores[position], prompt[position]
        assert next(iter(entries)) == token_id, "the prompt's token comes first"
        for token, entry in entries.items():
            assert abs(entry.logprob - row[token]) < CLOSE
            assert (
                np.sum(row > row[token] + CLOSE)
                < entry.rank
                <= 1 + np.sum(row > row[token] - CLOSE)
            )
        top = [token for token in entries if token != token_id or entries[token].rank <= max_rank]
        assert len(top) == max_rank and len(entries) == max_rank + (token_id not in top)
        if max_rank:
            cut = np.sort(row)[-max_rank]
            assert all(row[token] > cut - CLOSE for token in top)


def log_softmax(logits):
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


CHUNK = 16
ORACLE_ENGINE = {
    "max_num_seqs": 2,
    "max_num_batched_tokens": CHUNK,
    "block_size": 4,
    "num_blocks": 18,
    "max_model_len": 60,
}  # the shapes of tests/test_engine_models.py


def agree_with_transformers(name, directory):
    torch = pytest.importorskip("torch", reason="the oracle is transformers on torch")
    from tests.support.hf_models import save_model

    model = save_model(name, directory)
    rng = np.random.default_rng(3)
    vocab_size = model.config.vocab_size
    prompts = [
        rng.integers(0, vocab_size, n).tolist()
        for n in (1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 9)
    ]
    prompts.append([*prompts[-1][:20], 5])  # finds a cached prefix, and must not use it
    with torch.no_grad():
        expected = [
            log_softmax(model(torch.tensor([prompt])).logits[0].double().numpy())
            for prompt in prompts
        ]
    with make_llm(directory, **ORACLE_ENGINE) as llm:
        for num_top in (5, 0, 1, 20):
            outputs = llm.generate(
                prompts, dataclasses.replace(GREEDY, prompt_logprobs=num_top), use_tqdm=False
            )
            for prompt, output, rows in zip(prompts, outputs, expected, strict=True):
                check_scores(prompt, output.prompt_logprobs, num_top, rows)
                assert output.prompt_logprobs[-1] is None or all(
                    entry.decoded_token == f"t{token_id}"
                    for token_id, entry in output.prompt_logprobs[-1].items()
                )
        invariants(llm)


@pytest.mark.parametrize(
    "name",
    few(
        ["llama-grouped", "mistral-window", "opt-350m-form", "gpt2-usual"],
        ["mistral-window"],
    ),
)
def test_the_numbers_are_those_of_transformers(name, tmp_path):
    agree_with_transformers(name, tmp_path)


def one_too_early(row, group):
    row = _scoring(row, group)
    return row._replace(
        scored=group.request.prompt_token_ids[row.start : row.start + len(row.scored)]
    )


def of_the_row_before(packed, num_rows):
    drawn = _unpack_drawn(packed, num_rows)
    return drawn._replace(
        top_token_ids=np.roll(drawn.top_token_ids, 1, axis=0),
        top_logprobs=np.roll(drawn.top_logprobs, 1, axis=0),
    )


def cache_all_the_same(group, manager):
    return _beginnings(
        SimpleNamespace(request=group.request, unfinished=group.unfinished, num_unscored=0), manager
    )


def forgets_the_chunk_before(group, edit):
    group.prompt_logprobs[:] = [*edit.logprobs, *group.prompt_logprobs]


_scoring, _unpack_drawn, _beginnings = (
    plan_builder._scoring,
    runner_module.unpack_drawn,
    admitting.beginnings,
)
MISTAKES = {
    "one too early": (plan_builder, "_scoring", one_too_early),
    "of the row before": (runner_module, "unpack_drawn", of_the_row_before),
    "cached all the same": (admitting, "beginnings", cache_all_the_same),
    "chunks in another order": (committing, "_score", forgets_the_chunk_before),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_oracle_sees_planted_mistakes(mistake, tmp_path, monkeypatch):
    monkeypatch.setattr(*MISTAKES[mistake])
    with pytest.raises(AssertionError):
        agree_with_transformers("llama-grouped", tmp_path)


def test_what_was_drawn_scores_the_same_as_a_prompt(llm, prompts):
    """It does to the last bit, since the row of logits is the same."""
    for prompt in prompts:
        drawn = generate(llm, prompt, dataclasses.replace(PARAMS, logprobs=3, max_tokens=20))
        (output,) = drawn.outputs
        scored = generate(llm, drawn.prompt_token_ids + output.token_ids, PARAMS)
        assert scored.prompt_logprobs == drawn.echoed().logprobs
        assert output.cumulative_logprob == sum(
            entries[t].logprob for entries, t in zip(output.logprobs, output.token_ids, strict=True)
        )


# ---- whatever happens around it


class Requested:
    """Counts the tokens that the plans of an engine ask to be scored."""

    def __init__(self, llm, monkeypatch):
        self.num_tokens = 0
        build = llm._engine.builder.build

        def counting(plan, *masks):
            self.num_tokens += sum(len(row.scored) for row in plan.rows)
            return build(plan, *masks)

        monkeypatch.setattr(llm._engine.builder, "build", counting)


def test_a_chunk_that_begins_before_what_is_missing(directory, prompts, lone, monkeypatch):
    """After a preemption the chunks may be cut elsewhere: a part of one is scored already."""
    with make_llm(directory, enable_prefix_caching=False) as llm:
        engine = llm._engine
        requested = Requested(llm, monkeypatch)
        # takes 49 of the 64 tokens of the first step
        engine.add("older", engine.prepare(None, [3] * 49, GREEDY))
        reporter = engine.add("watched", engine.prepare(None, prompts[5], PARAMS))
        engine.step()
        assert requested.num_tokens == 15
        engine.scheduler.give_way()
        while engine.has_unfinished:
            engine.step()
        assert content(reporter.whole()) == content(lone[5])
        assert requested.num_tokens == 49


def test_scored_once_for_all_samples(llm, prompts, lone, monkeypatch):
    requested = Requested(llm, monkeypatch)
    for prompt, alone in zip(prompts, lone, strict=True):
        output = generate(llm, prompt, dataclasses.replace(PARAMS, n=3, best_of=4))
        assert output.prompt_logprobs == alone.prompt_logprobs
    assert requested.num_tokens == sum(map(len, prompts)) - len(prompts)


def test_cold_and_warm(llm, prompts, lone):
    """It asks the cache for nothing, so it is no query either; what it computes is there for
    others.
    """
    prompt, alone = prompts[5], lone[5]
    names = (
        "prefix_cache_queries_total",
        "prefix_cache_hits_total",
        "prefix_cache_resumed_hits_total",
    )
    before = [llm.stats()[name] for name in names]
    for _ in range(2):
        output = generate(llm, prompt, PARAMS)
        assert content(output) == content(alone) and output.metrics.num_cached_tokens == 0
    assert [llm.stats()[name] for name in names] == before
    output = generate(llm, prompt, SILENT)
    assert output.outputs == alone.outputs and output.metrics.num_cached_tokens == 48
    assert [llm.stats()[name] - old for name, old in zip(names, before, strict=True)] == [50, 48, 0]


def test_pinned_or_not(llm, prompts, lone):
    prompt, alone = prompts[5], lone[5]
    for length in (1, 16, 40, 50):
        with llm.pin_prefix(prompt[:length]):
            llm.reset_prefix_cache()
            output = generate(llm, prompt, PARAMS)
            assert content(output) == content(alone) and output.metrics.num_cached_tokens == 0


def test_the_room_that_a_pin_saves_is_not_there_for_it(directory, prompts):
    """A request that would fit because it shares a pinned prefix does not fit when it computes all
    of it.
    """
    prompt = (prompts[5] * 4)[:160]  # 12 blocks with what is drawn
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    with make_llm(directory, num_blocks=17) as llm, llm.pin_prefix(prompt[:128]):
        generate(llm, prompt, params)
        with pytest.raises(
            CapacityError, match="may need 12 KV blocks .* the pool has 16, of which 8 are pinned"
        ):
            llm.generate([prompt], dataclasses.replace(params, prompt_logprobs=0), use_tqdm=False)


def test_lost_pages_and_failed_steps(llm, prompts, lone, monkeypatch):
    prompt, engine = [*prompts[5], *prompts[4], *prompts[3]], llm._engine
    expected = content(generate(llm, prompt, PARAMS))
    for num_steps in range(4):
        reporter = engine.add("watched", engine.prepare(None, prompt, PARAMS))
        for _ in range(num_steps):
            engine.step()
        engine.rebuild_pages()
        while engine.has_unfinished:
            engine.step()
        assert content(reporter.whole()) == expected
    run = engine.runner.run
    for num_steps in (0, 1, 2):
        calls = itertools.count()

        def failing(batch, calls=calls, last=num_steps):
            if next(calls) == last:
                raise RuntimeError("planted")
            return run(batch)

        monkeypatch.setattr(engine.runner, "run", failing)
        output = generate(llm, prompt, PARAMS)
        assert output.outputs[0].finish_reason == "error"
        assert output.prompt_logprobs == (expected[0] if num_steps == 2 else None), (
            "complete or not there"
        )


def test_an_abort_in_the_prompt(llm, prompts):
    reporter = llm._engine.add("watched", llm._engine.prepare(None, prompts[5] * 2, PARAMS))
    llm._engine.step()
    llm._engine.abort("watched")
    assert reporter.whole().prompt_logprobs is None and reporter.delta().prompt_logprobs is None


# ---- how it is shown


def test_a_stream_brings_it_once(llm, prompts, lone):
    for prompt, alone, n in itertools.product(prompts, [None], (1, 2)):
        alone = lone[prompts.index(prompt)]
        chunks = list(llm.stream(prompt, dataclasses.replace(PARAMS, n=n)))
        assert [chunk.prompt_logprobs for chunk in chunks] == [alone.prompt_logprobs] + [None] * (
            len(chunks) - 1
        )
        assert len(chunks) == PARAMS.max_tokens and all(
            sample.token_ids for chunk in chunks for sample in chunk.outputs
        )


def test_an_output_is_echoed_with_its_prompt(llm, prompts):
    prompt = prompts[2]
    output = generate(llm, prompt, dataclasses.replace(PARAMS, n=2))
    for index, completion in enumerate(output.outputs):
        echoed = output.echoed(index)
        assert echoed.token_ids == prompt + completion.token_ids and echoed.index == index
        assert (
            echoed.logprobs == output.prompt_logprobs + completion.logprobs
            and echoed.logprobs[0] is None
        )
        assert len(echoed.logprobs) == len(echoed.token_ids)
        assert echoed.cumulative_logprob == completion.cumulative_logprob
        assert (echoed.finish_reason, echoed.stop_reason) == (
            completion.finish_reason,
            completion.stop_reason,
        )
    assert output.outputs[0].token_ids != output.echoed().token_ids, (
        "the output itself is as it was"
    )
    for params in (SILENT, dataclasses.replace(PARAMS, logprobs=None)):
        assert generate(llm, prompt, params).echoed().logprobs is None


def test_echoed_text(tmp_path):
    with make_llm(write_tokenizer(random_checkpoint(tmp_path, LLAMA))) as llm:
        output = generate(llm, "ab cat dog", GREEDY)
        assert output.echoed().text == "ab cat dog" + output.outputs[0].text
        by_ids = generate(llm, output.prompt_token_ids, GREEDY)
        assert by_ids.echoed(prompt="ab cat dog").text == output.echoed().text
        with pytest.raises(ValueError, match="given as token ids"):
            by_ids.echoed()
        scored = generate(llm, "ab cat dog", dataclasses.replace(GREEDY, prompt_logprobs=0))
    entries = [entry for entries in scored.prompt_logprobs[1:] for entry in entries.values()]
    words = [entry.decoded_token for entry in entries]
    assert "ab cat dog".endswith("".join(words)) and all(isinstance(word, str) for word in words)
    assert all(isinstance(entry, Logprob) for entry in entries) and len(entries) > 2
