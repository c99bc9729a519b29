"""The programs of the laboratory: each says how it is used, and two time a part of the engine,
swapping and draws.
"""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxpage.bench.results import environment
from tests.support.random_checkpoints import random_checkpoint
from tests.test_bench import LLAMA
from tests.test_tools import TOOLS, check_usage
from tools.lab import bench_sampler, bench_swap

pytestmark = pytest.mark.usefixtures("compiled_when_used")

PROGRAMS = sorted(
    path.stem for path in (TOOLS / "lab").glob("*.py") if "__main__" in path.read_text()
)


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_says_how_it_is_used(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check_usage(f"lab/{name}", monkeypatch, capsys)


def test_swapping_is_timed_beside_recomputation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = random_checkpoint(tmp_path / "model", LLAMA)
    bench_swap.main(
        ["--model", str(model), "--num-tokens", "40", "--block-sizes", "4", "16", "--repeats", "2"]
    )
    header, *rows, line = capsys.readouterr().out.splitlines()
    assert header.split()[:2] == ["block", "size"] and [row.split()[:2] for row in rows] == [
        ["4", "10"],
        ["16", "3"],
    ]
    result = json.loads(line)
    assert result["num_tokens"] == 40 and result["environment"] == environment()
    for cost in result["results"]:
        swap_out, swap_in, recompute = (
            cost[f"{name}_seconds"] for name in ("swap_out", "swap_in", "recompute")
        )
        assert min(swap_out, swap_in, recompute) > 0
        assert cost["ratio"] == pytest.approx((swap_out + swap_in) / recompute)
    with pytest.raises(SystemExit):
        bench_swap.main(["--num-tokens", "1"])


def test_draws_are_timed_by_method_and_by_kind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = random_checkpoint(tmp_path / "model", LLAMA)
    words = "--num-rows 2 --num-tokens 20 --vocabularies 1200 --scales 4 --repeats 1"
    bench_sampler.main(["--model", str(model), *words.split()])
    *lines, line = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(bench_sampler.CUTS) + 2 + len(bench_sampler.KINDS)
    result = json.loads(line)
    assert [cut["cut"] for cut in result["cuts"]] == list(bench_sampler.CUTS) and list(
        result["steps"]
    ) == list(bench_sampler.KINDS)
    assert all(
        value > 0
        for cut in result["cuts"]
        for value in (*cut["seconds"].values(), *result["steps"].values())
    )
    with pytest.raises(SystemExit):
        bench_sampler.main(["--vocabularies", "50"])


@pytest.mark.parametrize("cut", bench_sampler.CUTS)
def test_the_methods_that_are_timed_do_the_same(cut: str) -> None:
    top_k, top_p = bench_sampler.CUTS[cut]
    logits = np.random.default_rng(3).standard_normal(1500).astype(np.float32) * 3
    programs = [
        np.isfinite(jax.jit(method)(logits, np.int32(top_k), np.float32(top_p)))
        for method in bench_sampler.METHODS.values()
    ]
    assert (
        (programs[0] == programs[2]).all()
        and (programs[1] == programs[2]).all()
        and 0 < programs[0].sum() < 1500
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--block-sizes", "3"),
            "block_size: must be a power of two from 1 to 128 or 'auto', got 3",
        ),
        (
            ("--num-tokens", "100000"),
            "max_model_len is 100000, but the model's positions end at 512",
        ),
        (("--model", "/nowhere/at/all"), "/nowhere/at/all"),
    ],
)
def test_swapping_refuses_what_cannot_be_had(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        bench_swap.main(words)
    assert exit_info.value.code == 2 and message in capsys.readouterr().err
