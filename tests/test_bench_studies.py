"""The kinds of `jaxpage bench` that are studies, each once from the command line.

`tests/lab/` has what their numbers mean.
"""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path

import pytest

from jaxpage import cli
from jaxpage.assembly.planning import engine_spec
from jaxpage.bench.studies import speculation
from jaxpage.bench.studies.engine_process import EngineInTurns
from jaxpage.bench.studies.roofline import PARTS
from jaxpage.bench.studies.speculation import CONTROL, NONE
from tests.support.engines import LLAMA, make_short_menu
from tests.support.random_checkpoints import random_checkpoint

pytestmark = pytest.mark.usefixtures("compiled_when_used")
TEXT = Path(__file__).parent / "support" / "alice.txt"


def test_the_effect_of_a_kv_cache_of_eight_bits(capsys):
    words = ["bench", "kv-dtype", "--model", "demo", "--text", str(TEXT), "--num-tokens", "100"]
    assert cli.main([*words, "--max-model-len", "256", "--dtype", "float32"]) == 0
    *shown, line = capsys.readouterr().out.splitlines()
    result = json.loads(line)
    assert shown[0].split() == ["float32", "int8", "fp8"] and result["num_tokens"] == 100
    exact, int8, fp8 = result["auto"], result["int8"], result["fp8"]
    assert (
        exact["max_logit_difference"] == exact["kl_divergence"] == 0.0
        and exact["top1_agreement"] == 1.0
    )
    assert 0 < int8["mean_logit_difference"] < fp8["mean_logit_difference"] < 0.1
    assert [column["bytes_per_token"] for column in (exact, int8, fp8)] == [4096, 1088, 1088]
    assert [column["sequences_per_gib"] for column in (exact, int8, fp8)] == [1023, 3854, 3854]
    assert 3 < exact["loss"] < 5, "the demo model knows English"


def test_steps_are_compared_with_what_the_machine_can_do(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("jaxpage.bench.studies.ceilings.WIDTH", 64)
    monkeypatch.setattr("jaxpage.bench.studies.ceilings.MATMUL_WIDTHS", (32, 64))
    model, path = random_checkpoint(tmp_path / "llama", LLAMA), tmp_path / "result.json"
    words = [
        "bench",
        "roofline",
        str(model),
        "--max-num-batched-tokens",
        "16",
        "--preemption-mode",
        "recompute",
    ]
    words += ["--dtype", "float32", "--max-model-len", "64"]
    words += ["--batches", "2", "--output-json", str(path)]
    assert cli.main([*words, "--context", "20"]) == 2
    assert (
        "max_model_len must be at least 97 for bench roofline, and is 64" in capsys.readouterr().err
    )
    monkeypatch.setattr("jaxpage.bench.studies.roofline.STEPS", 4)
    assert cli.main([*words, "--context", "49"]) == 2
    assert "--context must be at most 48: max_model_len is 64" in capsys.readouterr().err
    assert cli.main([*words, "--context", "20"]) == 0
    *shown, line = capsys.readouterr().out.splitlines()
    result = json.loads(line)
    assert json.loads(path.read_text()) == result
    assert [step["name"] for step in result["steps"]] == ["2 rows", "chunk of 16"]
    for step in result["steps"]:
        assert tuple(step["parts"]) == PARTS
        # the kernels for CPUs read pages in place
        nothing = ("sampling", "gather", "dispatch and transfer")
        assert all(step["parts"][name] > 0 for name in PARTS if name not in nothing)
        assert sum(step["parts"].values()) == pytest.approx(step["seconds"])
        limits = (
            step["bytes"] / step["bytes_per_second"],
            step["operations"] / result["product_flops_per_second"],
        )
        assert (
            step["roofline_seconds"] == max(limits)
            and step["share"] == max(limits) / step["seconds"]
        )
    assert "share of the roofline" in "\n".join(shown)


@contextlib.contextmanager
def engine_here(config, *, oracle=False):
    """Runs an engine in place of a process of its own, which takes 8 seconds to begin."""
    engine = EngineInTurns()
    engine.start(config, oracle=oracle)
    try:
        yield engine
    finally:
        engine.shutdown()


def test_drafts_are_measured_beside_engines_without(capsys, monkeypatch):
    monkeypatch.setattr(speculation, "TOKENS_OF_A_TURN", 24)
    monkeypatch.setattr(speculation, "engine_process", engine_here)
    monkeypatch.setattr(engine_spec, "make_menu", make_short_menu)
    words = ["--model", "demo", "--text", str(TEXT), "--batches", "1", "--repeats", "1"]
    words += ["--num-speculative-tokens", "2", "--max-output", "24"]
    words += ["--oracle", "--temperature", "0.8"]
    assert cli.main(["bench", "speculation", *words, "--max-num-batched-tokens", "64"]) == 0
    *shown, line = capsys.readouterr().out.splitlines()
    cells = json.loads(line)["cells"]
    methods = [(method, number) for method in ("ngram", "oracle") for number in ("2", "auto")]
    ways = [(NONE, ""), *methods, CONTROL]
    assert [(cell["method"], cell["num_speculative_tokens"]) for cell in cells] == ways
    assert all(cell["identical"] for cell in cells[1:])
    # Of 23 tokens after the first, each step gives 3.
    assert cells[3]["tokens_per_step"] == 23 / 8
    shares = [line.split()[-2] for line in shown if line.startswith("oracle")]
    assert shares == ["1.00", "1.00"]
    assert any(re.match(r"auto: at least [\d.]+ of the best fixed", line) for line in shown)
