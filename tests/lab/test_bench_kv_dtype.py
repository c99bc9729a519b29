"""`bench kv-dtype` looks at the logits that an engine draws from, and its numbers mean what they
say.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from jaxpage import SamplingParams, cli
from jaxpage.bench.studies.kv_dtype import differences, position_logits
from jaxpage.checkpoints import open_model
from jaxpage.settings.engine_config import EngineConfig
from tests.support.engines import LLAMA, LogitsWitness, make_llm
from tests.support.random_checkpoints import random_checkpoint


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return random_checkpoint(tmp_path_factory.mktemp("llama"), LLAMA)


def test_its_logits_are_those_of_an_engine_to_the_last_bit(directory):
    token_ids = np.random.default_rng(0).integers(1, 257, 150).tolist()
    config, files = EngineConfig(model=str(directory), block_size=8), open_model(directory)
    logits_TV = position_logits(config, files, token_ids, dtype="float32", page_dtype="int8")
    with make_llm(directory, kv_cache_dtype="int8", max_num_seqs=2) as llm:
        witness = LogitsWitness(llm)
        lengths = (1, 64, 129, 150)
        llm.generate(
            [token_ids[:length] for length in lengths], SamplingParams(max_tokens=1), use_tqdm=False
        )
        for sequence_id, length in enumerate(lengths):
            np.testing.assert_array_equal(
                logits_TV[length - 1], witness.logits[sequence_id, length]
            )


def test_differences_against_sums_by_hand():
    exact = np.log(np.array([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]], np.float32)) + 3
    other = np.log(np.array([[0.25, 0.5, 0.25], [0.1, 0.8, 0.1]], np.float32)) - 1
    actual = differences(exact, other, [2, 0])
    assert actual["max_logit_difference"] == pytest.approx(4 + math.log(2))
    assert actual["mean_logit_difference"] == pytest.approx((6 * 4 + math.log(2) - math.log(2)) / 6)
    assert actual["kl_divergence"] == pytest.approx((0.5 * math.log(2) - 0.25 * math.log(2)) / 2)
    assert actual["top1_agreement"] == 0.5
    assert actual["loss"] == pytest.approx(math.log(4))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num-tokens", "1"], "--num-tokens must be at least 2, got 1"),
        (["--seed", "-1"], "--seed must be at least 0, got -1"),
        (["--text", "nowhere.txt"], "--text nowhere.txt: "),
        (["--text", __file__, "--model", "RANDOM"], "has no tokenizer"),
        (["--kv-cache-dtype", "int8"], "unknown argument '--kv-cache-dtype'"),
    ],
)
def test_flags_that_make_no_sense(words, message, directory, capsys):
    words = [str(directory) if word == "RANDOM" else word for word in words]
    try:
        status = cli.main(["bench", "kv-dtype", *words])
    except SystemExit as stop:
        status = stop.code
    assert status == 2 and message in capsys.readouterr().err
