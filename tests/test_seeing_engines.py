"""Engines whose prompts have pictures: logits of transformers, and the same bits in every path."""

from __future__ import annotations

import dataclasses
import itertools
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxpage import BeamSearchParams, SamplingParams, cli
from jaxpage.device import unpack_weights
from jaxpage.errors import ConfigError, EventLogError, UnsupportedError
from jaxpage.replay.reading import RecordedSteps
from jaxpage.replay.recorder import Recorder
from jaxpage.replay.replaying import replay
from jaxpage.serving.cache_events.kv_events import KVEvents
from jaxpage.serving.inspector.recorded import _vectors as describe_recorded
from jaxpage.serving.inspector.state import Inspector
from jaxpage.step.embedded import EmbeddedPrompt
from tests.support.engines import (
    BLOCKS_OF_4,
    SMALL_POOL,
    decoding_in_chunks,
    invariants,
    make_llm,
    run_giving_way,
    tokens_of,
)
from tests.support.executables import when_used
from tests.support.sweeps import few

seeing = pytest.importorskip("tests.support.seeing_models")

PARAMS = SamplingParams(
    temperature=0.9, top_p=0.95, seed=11, max_tokens=16, ignore_eos=True, logprobs=3
)
GREEDY = dataclasses.replace(PARAMS, temperature=0.0, top_p=1.0)
MODELS = list(seeing.SEEING)


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    made = {}

    def directory(name):
        if name not in made:
            made[name] = seeing.save(name, tmp_path_factory.mktemp(name))
        return made[name]

    return directory


def prompts_of(name):
    draw = np.random.default_rng(3)
    texts = [draw.integers(1, 250, length).tolist() for length in (7, 20, 33, 5, 12)]
    first, second = seeing.picture(name, 1, 2), seeing.picture(name, 2, 5)
    other = seeing.picture(name, 3, 2)
    return [
        seeing.prompt(name, parts)
        for parts in (
            (texts[0], first, texts[3]),
            (texts[1], second, texts[4], first, texts[0]),
            (texts[1], first, texts[2]),
            (texts[1], other, texts[2]),
            (first, texts[0]),
            (texts[2], second),
        )
    ] + [(texts[2], None)]


def start(directory, **settings):
    """Returns an engine whose steps have few shapes: which one a step takes is no subject here."""
    with decoding_in_chunks():
        return make_llm(directory, **settings)


def run(llm, requests, params=PARAMS):
    """Generates for prompts together, by hand."""
    engine = llm._engine
    reporters = [
        engine.add(f"{number}", engine.prepare(None, ids, params, embedded))
        for number, (ids, embedded) in enumerate(requests)
    ]
    while engine.has_unfinished:
        engine.step()
        engine.scheduler.check()
    return [reporter.whole() for reporter in reporters]


@pytest.fixture(scope="module")
def alone(directories):
    known = {}

    def run_alone(name, params=PARAMS):
        key = name, params.temperature
        if key not in known:
            # One row has a shape of its own here, and in all other engines that of four rows.
            make = make_llm if name == "qwen3-vl" else start
            with make(directories(name), enable_prefix_caching=False) as llm:
                outputs = [run(llm, [prompt], params)[0] for prompt in prompts_of(name)]
            known[key] = tokens_of(outputs)
        return known[key]

    return run_alone


@pytest.mark.parametrize("name", MODELS)
def test_transformers_gives_the_same(name, directories):
    first = dataclasses.replace(GREEDY, max_tokens=1, logprobs=8)
    worst = 0.0
    with start(directories(name)) as llm:
        for ids, embedded in prompts_of(name):
            pictures = [embedded.sources[span.key] for span in embedded.spans] if embedded else []
            expected = seeing.their_logprobs(name, ids, pictures)
            (output,) = run(llm, [(ids, embedded)], first)
            entries = output.outputs[0].logprobs[0].items()
            worst = max(worst, *(abs(entry.logprob - expected[id_]) for id_, entry in entries))
    print(f"{name}: {worst:.1e}")
    assert worst < 1e-4


ENGINES = {
    "batch": {},
    "recompute": SMALL_POOL,
    "swap": {**SMALL_POOL, "preemption_mode": "swap", "enable_prefix_caching": False},
    "mixed": {**SMALL_POOL, "enable_mixed_steps": True},
    "blocks of 4": BLOCKS_OF_4,
    "no cache": {"encoder_cache_bytes": 1000},
    "several steps": {"num_scheduler_steps": 4},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
}


@pytest.mark.parametrize(
    ("name", "engine"),
    few(
        [*itertools.product(MODELS, ENGINES)],
        # Blocks of 4, swapping and drafts are in the tests below, and the fuzzer has all of them.
        [("qwen3-vl", "several steps"), ("gemma3", "mixed"), ("smolvlm", "no cache")],
    ),
)
def test_every_path(name, engine, directories, alone):
    params = GREEDY if engine == "drafts" else PARAMS
    expected = alone(name, params)
    with start(directories(name), **ENGINES[engine]) as llm:
        prompts = prompts_of(name)
        for order in (1, -1):  # the second time prefixes are found
            outputs = run(llm, prompts[::order], params)
            assert tokens_of(outputs)[::order] == expected
        counts = llm._engine.sources.encoder.counts
        if engine == "no cache":
            assert counts.num_found == 0 == counts.num_bytes
        elif engine == "swap":
            assert counts.num_found > counts.num_encoded == 3
        invariants(llm)


@pytest.mark.parametrize(
    ("name", "mode"),
    few(itertools.product(("qwen3-vl", "gemma3"), ("recompute", "swap")), [("qwen3-vl", "swap")]),
)
def test_preempted_in_its_prompt_and_later(name, mode, directories, alone):
    settings = {**SMALL_POOL, "preemption_mode": mode, "enable_prefix_caching": False}
    with start(directories(name), **settings) as llm:
        engine = llm._engine
        prompts = prompts_of(name)
        for step in (2, 3, 4, 5, 6, 9):
            engine.add("older", engine.prepare(None, prompts[6][0], PARAMS))
            ids, embedded = prompts[1]
            reporter = engine.add("watched", engine.prepare(None, ids, PARAMS, embedded))
            run_giving_way(engine, step)
            assert tokens_of([reporter.whole()]) == [alone(name)[1]]
        assert llm.stats()["num_preemptions_total"][mode] >= 4
        invariants(llm)


@pytest.mark.parametrize("name", few(MODELS, ["gemma3"]))
def test_prefixes_are_found_through_a_picture(name, directories, alone):
    """They are never found through another one in its place."""
    with start(directories(name)) as llm:
        prompts = prompts_of(name)

        def num_found(number):
            (output,) = run(llm, [prompts[number]])
            assert tokens_of([output]) == [alone(name)[number]]
            return output.metrics.num_cached_tokens

        ids, embedded = prompts[2]
        stop = embedded.stop
        assert num_found(2) == 0
        assert num_found(3) == 16  # a block of the text before the picture
        assert num_found(2) == (len(ids) - 1) // 16 * 16 > stop
        (output,) = run(llm, [(ids, None)])  # the placeholders without a picture
        assert output.metrics.num_cached_tokens == 16
        llm._engine.reset_prefix_cache()
        assert num_found(2) == 0
        counts = llm._engine.sources.encoder.counts
        assert (counts.num_encoded, counts.num_found) == (2, 1)
        invariants(llm)


@pytest.mark.parametrize(
    ("name", "caching"),
    few(
        itertools.product(["qwen3-vl", "smolvlm"], [False, True]),
        [("qwen3-vl", True)],
    ),
)
def test_requests_that_begin_alike_have_as_many_pictures_as_they_say(name, caching, directories):
    """They come together, each adding pictures to those of the one before (sglang #5455)."""
    text = np.random.default_rng(5).integers(1, 250, 9).tolist()
    album = [seeing.picture(name, seed, size) for seed, size in ((1, 2), (2, 3), (1, 2), (3, 2))]
    parts = [part for picture in album for part in (picture, text[:2])]
    prompts = [seeing.prompt(name, (text, *parts[: 2 * count])) for count in range(1, 5)]
    first = dataclasses.replace(GREEDY, max_tokens=2, logprobs=8)
    expected = []
    for ids, embedded in prompts:
        pictures = [embedded.sources[span.key] for span in embedded.spans]
        expected.append(seeing.their_logprobs(name, ids, pictures))
    with start(directories(name), enable_prefix_caching=caching) as llm:
        for order in (1, -1):  # the second time prefixes are found
            outputs = run(llm, prompts[::order], first)[::order]
            for output, theirs in zip(outputs, expected, strict=True):
                for token_id, entry in output.outputs[0].logprobs[0].items():
                    assert abs(entry.logprob - theirs[token_id]) < 1e-4
        assert bool(outputs[-1].metrics.num_cached_tokens) == caching
        assert llm._engine.sources.encoder.counts.num_encoded == 3
        invariants(llm)


@pytest.mark.parametrize("name", few(MODELS, ["gemma3"]))
def test_samples_and_beams(name, directories):
    """A prompt may end with a picture, whose last token is computed with the others."""
    prompts = prompts_of(name)
    many = dataclasses.replace(PARAMS, n=4, max_tokens=5)
    with start(directories(name)) as llm:
        for number in (0, 5):
            (of_many,) = run(llm, [prompts[number]], many)
            llm._engine.reset_prefix_cache()
            for index, output in enumerate(of_many.outputs):
                ids, embedded = prompts[number]
                single = dataclasses.replace(many, n=1)
                engine = llm._engine
                reporter = engine.add("one", engine.prepare(None, ids, single, embedded))
                engine.scheduler.waiting[0].sequences[0].sample_index = index
                while engine.has_unfinished:
                    engine.step()
                assert reporter.whole().outputs[0].token_ids == output.token_ids
        beams = BeamSearchParams(beam_width=2, max_tokens=5, ignore_eos=True)
        (first,) = run(llm, [prompts[5]], beams)
        (second,) = run(llm, [prompts[5]], beams)
        assert [o.token_ids for o in first.outputs] == [o.token_ids for o in second.outputs]
        invariants(llm)


@pytest.mark.parametrize("name", ["qwen3-vl"])
def test_a_log_is_replayed(name, directories, tmp_path):
    path = tmp_path / "log"
    with make_llm(directories(name), event_log=path, enable_prompt_embeds=True) as llm:
        prompts = prompts_of(name)
        ids, vectors = llm._engine.prompt_of_vectors(np.ones((20, 64), np.float32))
        run(llm, [*prompts[:3], (ids, vectors)])
    files = sorted(tmp_path.glob("log.vectors/*"))
    assert len(files) == 3 and all(file.stat().st_mode & 0o777 == 0o600 for file in files)
    with when_used():
        report = replay(path, progress=False)
    assert report.difference is None and report.num_steps > 10
    steps = RecordedSteps(path)
    rows = []
    for record in steps.records():
        steps.follow(record)
        rows += [steps.step["bucket"][1]] if record["event"] == "plan" else []
    assert rows[0] == 4 and len(rows) == report.num_steps  # of all sequences, as a vector is in it
    files[0].write_bytes(b"damaged")
    with when_used(), pytest.raises(EventLogError, match="cannot be read"):
        replay(path, progress=False)


def test_a_snapshot_says_which_positions_pictures_fill(directories):
    """A log says the same of its requests."""
    records = []
    with start(directories("smolvlm"), enable_prompt_embeds=True) as llm:
        engine = llm._engine
        engine.events = Recorder(records.append)
        inspector = Inspector()
        inspector.inspect(engine)
        first, second = (seeing.picture("smolvlm", 1, size) for size in (1, 2))
        parts = [[3, 4], first, [5], second, second, [6]]
        requests = [
            seeing.prompt("smolvlm", parts),
            engine.prompt_of_vectors(np.ones((20, 64), np.float32)),
            ([7, 8, 9], None),
        ]
        for number, (ids, embedded) in enumerate(requests):
            engine.add(f"{number}", engine.prepare(None, ids, PARAMS, embedded))
        shown = [request.get("vectors") for request in inspector.inspect(engine)["requests"]]
        engine.abort_all()
    assert shown == [[[2, 4, 1, 0], [7, 8, 2, 0], [15, 8, 3, 0]], [[0, 20, 0, 0]], None]
    arrivals = [record for record in records if record["event"] == "arrival"]
    logged = [describe_recorded(each) if "embedded" in each else None for each in arrivals]
    assert logged == shown


def test_other_weights(directories, alone):
    """The encoder gets them, too; what was made with the old ones is forgotten."""
    name = "smolvlm"
    prompts = prompts_of(name)
    with start(directories(name)) as llm:
        weights = {key: np.asarray(array) for key, array in llm.parameters().items()}
        assert any("vision_model" in key for key in weights)
        assert tokens_of(run(llm, prompts)) == alone(name)
        changed = {
            key: array * 1.5 if "connector" in key else array for key, array in weights.items()
        }
        llm.update_parameters(changed)
        others = tokens_of(run(llm, prompts))
        assert others[-1] == alone(name)[-1] and others[0] != alone(name)[0]
        text = {key: array for key, array in weights.items() if "connector" not in key}
        llm.update_parameters({k: a for k, a in text.items() if "vision_model" not in k})
        assert tokens_of(run(llm, prompts)) == others  # the encoder stays
        llm.update_parameters(weights)
        assert tokens_of(run(llm, prompts)) == alone(name)
        for level in (1, 2):
            llm.sleep(level)
            llm.wake_up()
            assert tokens_of(run(llm, prompts)) == alone(name)


def test_other_weights_for_requests_that_run(directories, alone):
    """Pictures are encoded again where everything is computed again, and those that are encoded
    later have the new weights.
    """
    name = "smolvlm"
    with start(directories(name), max_num_batched_tokens=16) as llm:
        weights = {key: np.asarray(array) for key, array in llm.parameters().items()}
        changed = {
            key: array * 1.5 if "connector" in key else array for key, array in weights.items()
        }
        llm.update_parameters(changed)
        others = tokens_of(run(llm, prompts_of(name)))
        llm.update_parameters(weights)
        engine, prompts = llm._engine, prompts_of(name)
        for mode in ("recompute", "keep"):
            reporters = [
                engine.add(f"{number}", engine.prepare(None, ids, PARAMS, embedded))
                for number, (ids, embedded) in enumerate(prompts)
            ]
            for _ in range(3):
                engine.step()
            is_begun = [each.num_computed_tokens > 0 for each in reporters]
            assert engine.sources.encoder.counts.num_bytes and not is_begun[-2]
            assert not any(each.num_output_tokens for each in reporters[1:])
            llm.update_parameters(changed, mode=mode)
            assert not engine.sources.encoder.counts.num_bytes
            while engine.has_unfinished:
                engine.step()
                engine.scheduler.check()
            tokens = tokens_of([each.whole() for each in reporters])
            for begun, ours, new in zip(is_begun[1:], tokens[1:], others[1:], strict=True):
                assert ours == new or (mode == "keep" and begun)
            llm.update_parameters(weights)
        assert tokens_of(run(llm, prompts)) == alone(name)


def test_what_does_not_fit_is_refused(directories):
    name = "smolvlm"
    ids, embedded = prompts_of(name)[1]
    with make_llm(directories(name), limit_images=1) as llm:
        prepare = llm._engine.prepare
        with pytest.raises(ValueError, match="the prompt has 2 pictures; limit_images is 1"):
            prepare(None, ids, PARAMS, embedded)
        ids, embedded = prompts_of(name)[0]
        (span,) = embedded.spans
        short = dataclasses.replace(embedded.sources[span.key], num_rows=7)
        with pytest.raises(ValueError, match="fills 7 positions of the prompt, but has 8 rows"):
            prepare(
                None,
                ids,
                PARAMS,
                EmbeddedPrompt((span._replace(length=7),), {span.key: short}),
            )
        for changed, text in (
            (
                span._replace(start=13),
                "take positions 13 to 20; they must be in order, from 0 to 19",
            ),
            (span._replace(offset=3), "take rows from 3 on, but the source has 8"),
            (span._replace(is_whole=True), "the model has no such attention"),
        ):
            with pytest.raises(ValueError, match=text):
                prepare(None, ids, PARAMS, dataclasses.replace(embedded, spans=(changed,)))
    with make_llm(directories(name), limit_images=0) as llm:
        with pytest.raises(UnsupportedError, match="takes no pictures, or limit_images is 0"):
            llm._engine.prepare(None, ids, PARAMS, embedded)
        assert "vision" not in llm._engine.parameters
    settings = {"max_num_batched_tokens": 12, "block_size": 4}
    with pytest.raises(ConfigError, match="fills up to 16 tokens that see each other both ways"):
        make_llm(directories("gemma3"), **settings)


def test_a_plan_counts_the_encoder(directories, capsys):
    directory = str(directories("gemma3"))
    for limit, has in ((None, True), ("0", False)):
        words = [] if limit is None else ["--limit-images", limit]
        assert cli.main(["plan", directory, *words]) == 0
        lines = capsys.readouterr().out
        assert ("encoder of pictures" in lines) == ("up to 512.00 MiB of the host" in lines) == has
        with make_llm(directory, **({} if has else {"limit_images": 0})) as llm:
            # In panels, outputs are filled up to a multiple of 16.
            engine = llm._engine
            unpacked = unpack_weights(engine.parameters, engine.packed).get("vision", {})
            held = jax.tree.leaves(unpacked)
            assert sum(leaf.nbytes for leaf in held) == llm.memory.vision_bytes
            assert (llm.memory.vision_bytes > 0) == has


@pytest.mark.parametrize("name", ["gemma3"])
def test_a_drafter_on_the_device_changes_no_bit(name, directories, alone):
    """It sees placeholders in place of a picture, and no later tokens."""
    drafts = {"method": "draft_model", "model": str(directories(name)), "num_speculative_tokens": 3}
    with start(directories(name), speculative_config=drafts, max_num_seqs=2) as llm:
        assert tokens_of(run(llm, prompts_of(name), GREEDY)) == alone(name, GREEDY)
        assert llm.stats()["spec_decode_num_accepted_tokens_total"] > 0


def test_texts_are_embedded_and_scored(directories):
    """Steps without axes and without vectors compute them."""
    with start(directories("qwen3-vl")) as llm:
        vectors = llm.embed([[3, 4, 5], [3, 4]], use_tqdm=False)
        assert vectors.shape == (2, 64) and np.isfinite(vectors).all()
        ids, _ = prompts_of("qwen3-vl")[-1]
        expected = seeing.their_logprobs("qwen3-vl", ids, [])
        (score,) = llm.score(ids, [7])
        assert abs(score - expected[7]) < 1e-4


def test_blocks_with_pictures_are_no_kv_events(directories):
    """Their tokens are placeholders, by which a router would take any picture for any other."""
    batches = []
    name = "smolvlm"
    with start(directories(name)) as llm:
        events = KVEvents(16, batches.append)
        llm._engine.prefix_cache.index.observer = events
        ids, embedded = prompts_of(name)[2]  # 20 tokens, a picture of 8, and 33 tokens
        run(llm, [(ids, embedded)])
        events.stepped(None)
    stored = [token for _, each, _ in batches for event in each for token in event["token_ids"]]
    assert stored == ids[:16]


def test_stored_prefixes_depend_on_the_encoder(directories, alone, tmp_path):
    """Another encoder gives other rows, although the text model is the same."""
    name = "smolvlm"
    other = tmp_path / "other"
    shutil.copytree(directories(name), other)
    weights = load_file(other / "model.safetensors")
    (projection,) = (key for key in weights if "modality_projection" in key)
    save_file({**weights, projection: 1.5 * weights[projection]}, other / "model.safetensors")
    for directory, num_cached in ((directories(name), 0), (directories(name), 48), (other, 0)):
        with start(directory, prefix_cache_directory=str(tmp_path / "stored")) as llm:
            (output,) = run(llm, [prompts_of(name)[2]])
            assert output.metrics.num_cached_tokens == num_cached
            assert (tokens_of([output]) == [alone(name)[2]]) == (directory != other)
