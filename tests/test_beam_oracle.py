"""Beam search through the engine against transformers' generate(num_beams=...), tokens and scores,
and against all hypotheses there are.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from jaxpage import BeamSearchParams, SamplingParams
from tests.support.beams import all_hypotheses, naive_search
from tests.support.engines import invariants, make_llm
from tests.support.hf_models import save_model, torch
from tests.support.sweeps import few

pytestmark = pytest.mark.usefixtures("decode_as_chunks")
WIDTHS = (1, 3, 8)
PENALTIES = (-1.0, 0.0, 0.5, 2.0)
EARLY = (False, True, "never")
SETTINGS = {
    "max_num_seqs": 16,
    "max_num_batched_tokens": 64,
    "max_model_len": 128,
}
EOS = 5
# so many that beams end all the time
MANY = (9, 17, 25, 33, 41, 57, 73, 89, 101, 105, 110, 121, 125)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Gives torch one thread: its steps are too small to share."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module", params=few(["llama-grouped", "mistral-window"], ["mistral-window"]))
def models(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    model = save_model(request.param, directory, eos_token_id=EOS)
    with make_llm(directory, **SETTINGS) as llm:
        yield model, llm
        invariants(llm)


def transformers_search(
    model: Any, prompt: list[int], beam: BeamSearchParams
) -> list[tuple[list[int], float | None]]:
    """Returns tokens without padding and scores, as transformers gives them; None for a score that
    it does not give.
    """
    ends = [*([] if beam.ignore_eos else [EOS]), *beam.stop_token_ids]
    result = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        num_beams=beam.beam_width,
        num_return_sequences=beam.n or beam.beam_width,
        max_new_tokens=beam.max_tokens,
        length_penalty=beam.length_penalty,
        early_stopping=beam.early_stopping,
        eos_token_id=ends or None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    scores = result.sequences_scores.tolist() if beam.beam_width > 1 else [None]
    sequences = []
    for tokens in result.sequences[:, len(prompt) :].tolist():
        end = next((index for index, token in enumerate(tokens) if token in ends), len(tokens) - 1)
        sequences.append(tokens[: end + 1])
    return list(zip(sequences, scores, strict=True))


def compare(
    model: Any, llm: Any, requested: list[tuple[list[int], BeamSearchParams]], beside: int = 0
) -> list[Any]:
    """Compares all of them in one call, beside samplers and greedy requests."""
    strangers: list[Any] = [
        ([3, 4, 5], SamplingParams(temperature=1.0, n=2, max_tokens=20)) for _ in range(beside)
    ]
    strangers += [([6] * 9, SamplingParams(temperature=0.0, max_tokens=20)) for _ in range(beside)]
    everybody = [*strangers, *requested]
    outputs = llm.generate(
        [prompt for prompt, _ in everybody], [params for _, params in everybody], use_tqdm=False
    )
    outputs = outputs[len(strangers) :]
    for (prompt, beam), output in zip(requested, outputs, strict=True):
        expected = transformers_search(model, prompt, beam)
        assert [hypothesis.token_ids for hypothesis in output.outputs] == [
            tokens for tokens, _ in expected
        ], beam
        for hypothesis, (tokens, score) in zip(output.outputs, expected, strict=True):
            if score is not None:
                assert hypothesis.score == pytest.approx(score, rel=1e-4), beam
            last = tokens[-1]
            ends = last in beam.stop_token_ids or (last == EOS and not beam.ignore_eos)
            assert hypothesis.finish_reason == ("stop" if ends else "length")
            assert hypothesis.stop_reason == (last if last in beam.stop_token_ids else None)
            words = [f"t{token}" for token in (tokens[:-1] if ends else tokens)]
            assert hypothesis.text.split() == words
    return outputs


def test_every_width_penalty_and_way_to_stop(models):
    """Ends come rarely, often, and never. Each model has half of the cases."""
    model, llm = models
    rng = np.random.default_rng(1)
    requested = []
    for number, (width, penalty, early) in enumerate(itertools.product(WIDTHS, PENALTIES, EARLY)):
        prompt = rng.integers(6, 131, int(rng.integers(1, 30))).tolist()
        stops = [MANY, MANY[:3], ()][number % 3 if number % 7 else 0]
        n = None if number % 2 else max(1, width // 2)
        beam = BeamSearchParams(
            width, 10, penalty, early, n=n, ignore_eos=number % 5 == 0, stop_token_ids=stops
        )
        requested.append((prompt, beam))
    outputs = compare(model, llm, requested[model.config.model_type == "mistral" :: 2], beside=4)
    reasons = [hypothesis.finish_reason for output in outputs for hypothesis in output.outputs]
    assert min(reasons.count("stop"), reasons.count("length")) > 10
    lengths = {
        len({len(hypothesis.token_ids) for hypothesis in output.outputs}) for output in outputs
    }
    assert max(lengths) >= 3, "hypotheses of several lengths competed"


def test_early_stopping_and_penalty_matter(models):
    """On some prompt each way to stop and each penalty leads elsewhere, so that being ignored would
    be seen.
    """
    model, llm = models
    prompts = [np.random.default_rng(seed).integers(6, 131, (4, 7)).tolist() for seed in (2, 3)]
    each = list(itertools.chain(*prompts))
    ways = [(False, 1.0), (True, 1.0), ("never", 1.0), (False, 2.0), (False, -1.0)]
    beams = [
        BeamSearchParams(4, 14, penalty, early, stop_token_ids=MANY) for early, penalty in ways
    ]
    hypotheses = [
        [output.outputs for output in llm.generate(each, beam, use_tqdm=False)] for beam in beams
    ]
    reporting = [
        (
            each[
                next(index for index in range(8) if hypotheses[0][index] != hypotheses[way][index])
            ],
            beams[way],
        )
        for way in range(1, len(ways))
    ]
    compare(model, llm, [(prompt, beam) for prompt, way in reporting for beam in (beams[0], way)])


def test_a_prompt_that_fills_the_model(models):
    model, llm = models
    rng = np.random.default_rng(3)
    requested = []
    for room, width in ((1, 4), (2, 4), (5, 6)):
        prompt = rng.integers(6, 131, 128 - room).tolist()
        requested.append((prompt, BeamSearchParams(width, room, stop_token_ids=MANY)))
    outputs = compare(model, llm, requested)
    whole = [
        llm.generate(
            prompt, BeamSearchParams(beam.beam_width, None, stop_token_ids=MANY), use_tqdm=False
        )[0]
        for prompt, beam in requested
    ]
    assert [output.outputs for output in whole] == [output.outputs for output in outputs]


def test_a_tiny_vocabulary_by_brute_force(tmp_path):
    """Wide enough for every hypothesis, the search finds the best of all; narrower, what the
    definition finds.
    """
    model = save_model("llama-grouped", tmp_path, vocab_size=3, eos_token_id=0)
    prompt, max_tokens = [1, 2, 2, 1], 3
    known: dict[tuple[int, ...], np.ndarray] = {}

    def logprobs_of(token_ids: tuple[int, ...]) -> np.ndarray:
        if token_ids not in known:
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt, *token_ids]])).logits[0, -1]
            known[token_ids] = logits.double().log_softmax(-1).numpy()
        return known[token_ids]

    with make_llm(tmp_path, **SETTINGS | {"max_model_len": 32}) as llm:
        for penalty, early in itertools.product(PENALTIES, EARLY):
            for width in (2, 3, 15, 16):
                beam = BeamSearchParams(width, max_tokens, penalty, early)
                (output,) = llm.generate(prompt, beam, use_tqdm=False)
                # 1 + 2 + 4 x 3: those that end after one token, after two, and all of three
                if width >= 15:
                    expected = all_hypotheses(logprobs_of, penalty, {0}, max_tokens)
                    assert len(expected) == 15
                else:
                    expected = naive_search(logprobs_of, beam, {0}, max_tokens)
                assert [tuple(hypothesis.token_ids) for hypothesis in output.outputs] == [
                    hypothesis.token_ids for hypothesis in expected
                ]
                assert [hypothesis.score for hypothesis in output.outputs] == pytest.approx(
                    [hypothesis.score for hypothesis in expected], rel=1e-4
                )
        invariants(llm)
