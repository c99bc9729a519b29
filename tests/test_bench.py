"""Benchmarks: lengths distributed as stated, equal work for every engine, a report that programs
can read.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import functools
import importlib.util
import json
import re
import runpy
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from jaxpage import cli
from jaxpage.assembly import PHASES
from jaxpage.assembly.planning import ModelLayout
from jaxpage.bench import history
from jaxpage.bench.comparison import check_same_work, compare, read_baseline
from jaxpage.bench.measure import dtypes
from jaxpage.bench.results import (
    Measurement,
    as_result,
    environment,
    print_result,
    table,
    too_short,
)
from jaxpage.bench.studies import start_times
from jaxpage.bench.workload_files import read_workload
from jaxpage.bench.workloads import DATASETS, WorkItem, chat, make_workload, prefix_repetition
from jaxpage.errors import UsageError
from tests.support.executables import with_compiled_kernels
from tests.support.random_checkpoints import random_checkpoint

pytestmark = pytest.mark.usefixtures("compiled_when_used", "decode_as_chunks")

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "eos_token_id": 3,
}


def lengths(
    dataset: str, count: int, cap: int = 10**6, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    return DATASETS[dataset](draw, count, cap, cap)


@pytest.mark.parametrize(
    ("dataset", "mean_input", "mean_output"),
    [("sharegpt", 161, 338), ("alpaca", 19.31, 58.45), ("random", 550, 550)],
)
def test_mean_lengths_are_the_stated_ones(dataset, mean_input, mean_output):
    inputs, outputs = lengths(dataset, 100_000, cap=1000 if dataset == "random" else 10**6)
    assert inputs.mean() == pytest.approx(mean_input, rel=0.02)
    assert outputs.mean() == pytest.approx(mean_output, rel=0.02)


def test_spreads_of_sharegpt_are_the_stated_ones():
    inputs, outputs = lengths("sharegpt", 200_000)
    assert inputs.std() / inputs.mean() == pytest.approx(1.3, rel=0.05)
    assert outputs.std() == pytest.approx(296, rel=0.02), "what figure 2 of the paper implies"
    assert abs(np.corrcoef(inputs, outputs)[0, 1]) < 0.01


@pytest.mark.parametrize("dataset", DATASETS)
def test_workloads_keep_to_the_caps_and_repeat(dataset):
    work = make_workload(dataset, 300, seed=5, vocab_size=50, max_input=40, max_output=30)
    assert work == make_workload(dataset, 300, seed=5, vocab_size=50, max_input=40, max_output=30)
    assert work != make_workload(dataset, 300, seed=6, vocab_size=50, max_input=40, max_output=30)
    assert all(
        1 <= len(item.prompt_token_ids) <= 40 and 1 <= item.num_output_tokens <= 30 for item in work
    )
    tokens = {token for item in work for token in item.prompt_token_ids}
    assert tokens == set(range(50))


def test_prefixes_and_chats_share_what_they_should():
    sizes = {"seed": 1, "vocab_size": 1000, "max_input": 48, "max_output": 9}
    work = prefix_repetition(9, **sizes, num_prefixes=3, prefix_len=20)
    assert (
        len({item.prompt_token_ids[:20] for item in work}) == 3
        and len({item.prompt_token_ids for item in work}) == 9
    )
    assert all(20 < len(item.prompt_token_ids) <= 48 for item in work)
    work = chat(11, **sizes, num_rounds=3)
    assert [item.after for item in work] == [None] * 4 + [0, 1, 2, 3, 4, 5, 6]
    for item in work[4:]:
        before = work[item.after or 0]
        length = len(before.prompt_token_ids)
        assert item.prompt_token_ids[:length] == before.prompt_token_ids
        assert length + before.num_output_tokens < len(item.prompt_token_ids) <= 48


WORKLOAD_FILES = {
    "sharegpt": '[{"conversations": [{"value": "abc"}, {"value": "defg"}]}, {"conversations": [{"value": "alone"}]}]',
    "alpaca": '[{"instruction": "ab", "input": "c", "output": "defg"}]',
    "custom": '{"prompt": "abc", "output_tokens": 4}\n\n',
    "trace": '{"timestamp": 2000, "input_length": 3, "output_length": 4, "hash_ids": [5]}\n'
    '{"timestamp": 500, "input_length": 900, "output_length": 4, "hash_ids": [5, 6]}',
}


@pytest.mark.parametrize("kind", WORKLOAD_FILES)
def test_workloads_from_files(kind, tmp_path):
    path = tmp_path / "work"
    path.write_text(WORKLOAD_FILES[kind])
    count = 2 if kind == "trace" else 1
    read = functools.partial(
        read_workload,
        kind,
        seed=0,
        vocab_size=50,
        max_input=600,
        max_output=6,
        encode=lambda text: [*text.encode()],
    )
    work = read(str(path), count)
    expected = {"alpaca": b"ab\nc"}.get(kind, b"abc")
    if kind == "trace":
        assert [(item.seconds, len(item.prompt_token_ids)) for item in work] == [
            (0.0, 600),
            (1.5, 3),
        ]
        assert work[0].prompt_token_ids[:3] == work[1].prompt_token_ids, (
            "the same hash, the same tokens"
        )
    else:
        assert work == [WorkItem(tuple(expected), 4)]
    with pytest.raises(UsageError, match=f"has {count} requests, fewer than --num-prompts 9"):
        read(str(path), 9)
    path.write_text('{"a": ')
    with pytest.raises(UsageError, match=f"not a file of --dataset {kind}"):
        read(str(path), 1)


def measurement(
    engine: str = "jaxpage", outputs: tuple[tuple[int, ...], ...] = ((1, 2), (3,))
) -> Measurement:
    work = [WorkItem((1, 2, 3), 2), WorkItem((4,), 1)]
    return Measurement.of(
        engine,
        work,
        outputs,
        duration=2.0,
        load_seconds=1.0,
        compile_seconds=0.5,
        warmup_seconds=0.25,
    )


def test_rates_are_counts_by_duration():
    result = measurement().as_dict()
    assert (result["completed"], result["total_input_tokens"], result["total_output_tokens"]) == (
        2,
        4,
        3,
    )
    assert (
        result["request_throughput"],
        result["output_throughput"],
        result["total_token_throughput"],
    ) == (
        1.0,
        1.5,
        3.5,
    )


def test_work_that_was_not_done_is_no_result():
    with pytest.raises(RuntimeError, match="jaxpage gave 1 tokens for request 0, not 2"):
        measurement(outputs=((1,), (3,)))


def test_the_table_has_a_column_per_engine():
    header, *rows = table([measurement(), measurement("transformers x 16")]).splitlines()
    assert header.split() == ["jaxpage", "transformers", "x", "16"]
    assert ["output", "tokens/s", "1.5", "1.5"] in [row.split() for row in rows]


def test_the_result_has_the_baseline_inside():
    result = as_result([measurement(), measurement("other", ((1, 2), (9,)))], dataset="random")
    assert result["engine"] == "jaxpage" and result["dataset"] == "random"
    assert result["baselines"][0]["engine"] == "other" and result["identical_outputs"] == [1]
    assert (
        result["environment"]["device"].startswith("cpu") and result["environment"] == environment()
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return random_checkpoint(tmp_path_factory.mktemp("bench") / "llama", LLAMA)


def flags(model: Path) -> list[str]:
    sizes = ["--num-prompts", "6", "--max-input", "20", "--max-output", "12", "--max-num-seqs", "4"]
    return [
        "--model",
        str(model),
        "--dtype",
        "float32",
        "--num-blocks",
        "33",
        "--max-num-batched-tokens",
        "32",
        *sizes,
    ]


def test_bench_throughput_end_to_end(model, tmp_path, capsys):
    pytest.importorskip("torch", reason="the baseline runs on torch")
    path = tmp_path / "result.json"
    words = [
        "bench",
        "throughput",
        *flags(model),
        "--baseline",
        "transformers",
        "--baseline-batch-size",
        "4",
    ]
    assert cli.main([*words, "--output-json", str(path)]) == 0
    *shown, line = capsys.readouterr().out.splitlines()
    result = json.loads(line)
    assert json.loads(path.read_text()) == result
    assert result["completed"] == 6 and result["compiles_during_run"] == 0
    assert result["baselines"][0]["total_output_tokens"] == result["total_output_tokens"]
    assert result["identical_outputs"] == [6], "greedy in float32: both engines say the same"
    assert "output tokens/s" in "\n".join(shown)
    assert result["config"]["num_blocks"] == 33 and result["seed"] == 0


def test_engines_with_other_settings_stand_beside(model, capsys):
    words = [
        *flags(model),
        "--num-blocks",
        "10",
        "--block-size",
        "4",
        "--max-model-len",
        "32",
        "--preemption-mode",
        "swap",
    ]
    others = [
        "--versus",
        "preemption_mode=recompute",
        "--versus",
        "num_blocks=41, swap_space_blocks=40",
    ]
    others += [
        "--versus",
        "speculative_config={method: ngram, num_speculative_tokens: 3}, num_blocks=41",
    ]
    assert cli.main(["bench", "throughput", *words, *others]) == 0
    *shown, line = capsys.readouterr().out.splitlines()
    result = json.loads(line)
    assert result["identical_outputs"] == [6, 6, 6]
    assert [other["engine"] for other in result["baselines"]] == others[1::2]
    preemptions = [
        result["num_preemptions"],
        *(other["num_preemptions"] for other in result["baselines"]),
    ]
    assert preemptions[0] > 0 and preemptions[1] > 0 and preemptions[2] == 0
    *others, drafted = result["baselines"]
    assert all(
        other["tokens_per_target_step"] == 1 and other["num_draft_tokens"] == 0
        for other in (result, *others)
    )
    num_drafts, num_accepted = drafted["num_draft_tokens"], drafted["num_accepted_tokens"]
    assert num_drafts > num_accepted > 0 and drafted["tokens_per_target_step"] > 1
    assert f"drafts {num_drafts} {num_accepted}" == " ".join(
        ["drafts", *(line.split()[-1] for line in shown if line.startswith("drafts"))]
    )
    assert "6 of 6 outputs equal those of preemption_mode=recompute" in shown


def test_run_batch_stands_beside(model, capsys):
    """Its outputs are the same, from a file of the same requests; each repeat makes an engine."""
    words = [*flags(model), "--run-batch", "--repeats", "2"]
    assert cli.main(["bench", "throughput", *words]) == 0
    *shown, line = capsys.readouterr().out.splitlines()
    result = json.loads(line)
    (batch,) = result["baselines"]
    assert batch["engine"] == "run-batch" and result["identical_outputs"] == [6]
    for each in (result, batch):
        assert len(each["durations"]) == 2 and each["duration"] == max(each["durations"])
        assert each["output_throughput"] == each["total_output_tokens"] / each["duration"]
    assert shown[0].split() == ["jaxpage", "run-batch"]
    (row,) = [line for line in shown if line.startswith("output tokens/s")]
    assert row.split()[-1] == f"{batch['output_throughput']:.1f}"
    assert "compile_seconds" not in batch, "load_seconds have it"


def result_of(*seconds: float, **changes: Any) -> dict[str, Any]:
    """Returns a result as `--output-json` writes it, with a run for each of the times."""
    work = {
        "dataset": "random",
        "seed": 0,
        "max_input": 8,
        "max_output": 8,
        "config": {"model": "/a/llama", "dtype": "auto"},
    }
    median = dataclasses.replace(
        measurement(), duration=sorted(seconds)[len(seconds) // 2], durations=seconds
    )
    return {**as_result([median], **work), **changes}


def test_a_ratio_to_an_earlier_run_has_the_spread_of_both(tmp_path):
    path = tmp_path / "baseline.json"
    path.write_text(json.dumps(result_of(2.0, 4.0, 1.0)))
    baseline = read_baseline(str(path))
    now = result_of(1.0, config={"model": "/b/llama", "dtype": "bfloat16"})
    now["environment"]["jax"] = "9"
    comparison = compare("a.json", baseline, now)
    assert (comparison.ratio, comparison.lowest, comparison.highest) == (2.0, 1.0, 4.0)
    one_run, *others = comparison.notes
    assert one_run.startswith("one run has no spread: use --repeats")
    assert others == [f"other jax: {jax.__version__}, now 9", "other dtype: auto, now bfloat16"]
    twice = compare("a.json", baseline, result_of(1.0, 1.0, config=now["config"]))
    assert twice.notes == ("other dtype: auto, now bfloat16",)
    types = [
        {"effective_dtype": dtype, "effective_kv_cache_dtype": "int8"}
        for dtype in ("bfloat16", "float32")
    ]
    before, now = (result_of(1.0, 1.0, **each) for each in types)
    assert compare("a.json", before, now).notes == ("other effective_dtype: bfloat16, now float32",)
    assert compare("a.json", result_of(1.0, 1.0), now).notes == (), (
        "a result of before does not say"
    )
    check_same_work("a.json", baseline, {"seed": 0, "model": "llama"})
    for work, said in (
        ({"model": "opt"}, "model 'llama', now 'opt'"),
        ({"seed": 1, "completed": 2}, "seed 0, now 1"),
    ):
        with pytest.raises(
            UsageError, match=f"--compare a.json: that was other work: {said}. Use the same flags"
        ):
            check_same_work("a.json", baseline, work)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"config": None}, "config must be a valid dictionary, got None"),
        ({"config": []}, "config must be a valid dictionary, got []"),
        ({"config": {"model": 3}}, "config.model must be a valid string, got 3"),
        ({"environment": "linux"}, "environment must be a valid dictionary, got 'linux'"),
        ({"environment": {"commit": 5}}, "environment.commit must be a valid string, got 5"),
        (
            {"total_output_tokens": 0},
            "total_output_tokens must be greater than or equal to 1, got 0",
        ),
        (
            {"total_output_tokens": 10**400},
            "total_output_tokens must be less than 1000000000000, got 1000",
        ),
        ({"duration": float("nan")}, "duration must be a finite number, got nan"),
        ({"duration": float("inf")}, "duration must be a finite number, got inf"),
        ({"duration": -1}, "duration must be greater than 0, got -1"),
        ({"durations": [1.0, 0]}, "durations.1 must be greater than 0, got 0"),
        ({"seed": "0", "self": 1}, "seed must be a valid integer, got '0'"),
    ],
)
def test_a_baseline_whose_fields_cannot_be_compared_is_refused(changes, said, tmp_path):
    path = tmp_path / "baseline.json"
    path.write_text(json.dumps({**result_of(2.0, 4.0, 1.0), **changes}))
    with pytest.raises(
        UsageError,
        match=f"--compare {path}: {re.escape(said)}.*, so it is no result of `jaxpage bench",
    ):
        read_baseline(str(path))


def test_a_baseline_of_brackets_is_refused(tmp_path):
    path = tmp_path / "baseline.json"
    path.write_text("[" * 100_000)
    with pytest.raises(UsageError, match="the file is not JSON, so it is no result"):
        read_baseline(str(path))


def test_a_quantised_kv_cache_has_a_dtype_of_its_own():
    llm: Any = SimpleNamespace(spec=SimpleNamespace(layout=ModelLayout("bfloat16", "int8")))
    assert dtypes(llm) == {"effective_dtype": "bfloat16", "effective_kv_cache_dtype": "int8"}


def test_a_gate_fails_where_all_runs_are_slower(model, tmp_path, capsys):
    path, document = tmp_path / "baseline.json", tmp_path / "page.md"
    document.write_text(f"# Page\n\n{history.BEGIN}\n{history.END}\n\nMore.\n")
    words = ["bench", "throughput", *flags(model), "--max-output", "4"]
    more = ["--repeats", "2", "--output-json", str(path), "--record", str(document)]
    assert cli.main([*words, *more]) == 0
    first = json.loads(path.read_text())
    assert first["effective_dtype"] == first["effective_kv_cache_dtype"] == "float32"
    # a second row, below the first
    history.record(str(document), first, day=datetime.date(2030, 1, 2))
    title, *lines, more_text = [line for line in document.read_text().splitlines() if line]
    assert (
        title == "# Page"
        and more_text == "More."
        and [lines[0], lines[-1]] == [history.BEGIN, history.END]
    )
    header, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:-1]
    ]
    assert len(rows) == 2 and rows[0][1:] == rows[1][1:] and rows[1][0] == "2030-01-02"
    row = dict(zip(header, rows[0], strict=True))
    assert (
        row["output tokens/s"].startswith(f"{first['output_throughput']:.1f} (")
        and "2 runs" in row["output tokens/s"]
    )
    assert (
        row["settings"] == first["config_hash"]
        and row["commit"][:7] == (first["environment"]["commit"] or "version")[:7]
    )
    assert sorted(first["durations"])[1] == first["duration"] and first["num_cached_tokens"] == 0
    capsys.readouterr()
    for below, status in (("1e-6", 0), ("1e6", 1)):
        assert cli.main([*words, "--compare", str(path), "--fail-below", below]) == status
        *shown, line = capsys.readouterr().out.splitlines()
        compared = json.loads(line)["compared"]
        assert 0 < compared["lowest"] <= compared["ratio"] <= compared["highest"]
        assert f"{compared['ratio']:.3f} times the output tokens/s of {path}" in "\n".join(shown)
    assert cli.main([*words, "--compare", str(path), "--seed", "3"]) == 2
    assert "that was other work: seed 0, now 3" in capsys.readouterr().err
    no_result = "so it is no result of `jaxpage bench throughput --output-json`"
    for text, said in (
        ("", f"the file is not JSON, {no_result}"),
        ("[]", f"the file has no 'duration', {no_result}"),
        ('{"total_output_tokens": 3, "duration": 1}', f"the file has no 'dataset', {no_result}"),
        (json.dumps({**first, "config": {}}), f"the file has no 'config.model', {no_result}"),
    ):
        path.write_text(text)
        assert cli.main([*words, "--compare", str(path)]) == 2
        assert f"--compare {path}: {said}" in capsys.readouterr().err


def test_runs_that_are_too_short_are_called_so():
    short, long = (dataclasses.replace(measurement(), duration=seconds) for seconds in (0.1, 5.0))
    assert "Do not compare the times: a run of 0.10 s is too short" in too_short([short, long])
    assert too_short([long, long]) == too_short([short]) == ""


@pytest.mark.parametrize(
    ("at_terminal", "json_flag", "is_printed"),
    [(True, False, False), (True, True, True), (False, False, True)],
)
def test_the_line_for_programs_is_not_for_people(
    at_terminal, json_flag, is_printed, monkeypatch, capsys
):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: at_terminal)
    print_result({"duration": 1}, argparse.Namespace(json=json_flag, output_json=None))
    assert capsys.readouterr().out == ('{"duration": 1}\n' if is_printed else "")


@pytest.mark.sweep  # it starts two processes; the next test starts one
def test_a_start_is_timed_by_phase(model, tmp_path, capsys, monkeypatch):
    cache = contextlib.nullcontext(str(with_compiled_kernels(tmp_path / "cache")))
    empty_but_for_kernels = SimpleNamespace(TemporaryDirectory=lambda **_: cache)
    monkeypatch.setattr(start_times, "tempfile", empty_but_for_kernels)
    path = tmp_path / "result.json"
    words = [
        "--model",
        str(model),
        "--num-blocks",
        "9",
        "--max-num-seqs",
        "1",
        "--max-num-batched-tokens",
        "16",
    ]
    words += ["--attention-backend", "scan", "--starts", "1", "--output-json", str(path)]
    began = time.perf_counter()
    assert cli.main(["bench", "startup", *words]) == 0
    seconds = time.perf_counter() - began
    *shown, line = capsys.readouterr().out.splitlines()
    result = json.loads(line)
    assert json.loads(path.read_text()) == result
    (warm,), names = (
        result["warm"],
        ["starting Python", "importing jax", "importing jaxpage", *PHASES, "the first token"],
    )
    assert list(result["cold"]) == list(warm) == names
    waking = [f"awake after sleep, level {level}" for level in (1, 2)]
    assert [line.split("  ")[0] for line in shown] == ["seconds", *names, "total", *waking]
    assert list(result["waking"]) == waking and min(result["waking"].values()) > 0
    assert result["warm_seconds"] == sum(warm.values()) and result["cold_seconds"] == sum(
        result["cold"].values()
    )
    assert min(warm.values()) > 0 and result["warm_seconds"] + result["cold_seconds"] < seconds


def test_a_start_that_fails_says_why(tmp_path, capsys):
    assert cli.main(["bench", "startup", str(tmp_path / "nowhere"), "--starts", "1"]) == 1
    *_, before, line = capsys.readouterr().err.splitlines()
    assert (
        line.startswith("jaxpage: error: ") and "nowhere" in line and before.startswith("Starting:")
    )
    assert cli.main(["bench", "startup", "--starts", "0"]) == 2
    assert "--starts must be at least 1, got 0" in capsys.readouterr().err


def test_the_tool_is_the_same_program(model, monkeypatch, capsys, caplog):
    tool = Path(__file__).parents[1] / "tools" / "bench_throughput.py"
    monkeypatch.setattr(sys, "argv", [str(tool), *flags(model), "--max-output", "100"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(tool), run_name="__main__")
    shown = capsys.readouterr()
    assert ended.value.code == 0 and json.loads(shown.out.splitlines()[-1])["max_output"] == 44
    assert (
        "max_model_len is 64: prompts are cut to 20 tokens, outputs to 44"
        in shown.err + caplog.text
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num-prompts", "0"], "--num-prompts must be at least 1, got 0"),
        (
            ["--dataset", "pile"],
            (
                "--dataset must be one of sharegpt, alpaca, random, prefix_repetition, chat, "
                "trace, custom, got 'pile'"
            ),
        ),
        (["--baseline", "vllm"], "--baseline must be one of transformers, got 'vllm'"),
        (["--versus", "recompute"], "--versus takes NAME=VALUE[,NAME=VALUE], got 'recompute'"),
        (["--versus", "model=other"], "--versus cannot change model: the work would be another"),
        (["--versus", "blocksize=8"], "blocksize: unknown setting; did you mean 'block_size'?"),
        (["--seed", "-1"], "--seed must not be negative, got -1"),
        (["--repeats", "0"], "--repeats must be at least 1, got 0"),
        (
            ["--fail-below", "0.9"],
            "--fail-below goes with --compare: it is a ratio to an earlier run",
        ),
        (["--compare", "no.json"], "--compare no.json: No such file or directory"),
        (["--record", "LICENSE"], "--record LICENSE: the file needs a line <!-- rows by"),
        (
            ["--dataset", "prefix_repetition", "--dataset-path", "x"],
            "--dataset-path goes with --dataset sharegpt, alpaca",
        ),
    ],
)
def test_flags_that_make_no_sense(words, message, capsys):
    assert cli.main(["bench", "throughput", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["throughput", "latency"])
def test_what_would_fail_at_the_end_is_refused_at_the_beginning(
    kind, tmp_path, monkeypatch, capsys
):
    """The refusal comes before any model is looked for."""
    words = ["bench", kind, "./no-such-model"]
    for path in (tmp_path / "no" / "such", tmp_path):
        assert cli.main([*words, "--output-json", str(path)]) == 2
        assert (
            f"--output-json {path}: there is no such directory, or it is one"
            in capsys.readouterr().err
        )
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *others: None if name == "torch" else find(name, *others),
    )
    assert cli.main([*words, "--baseline", "transformers"]) == 2
    assert "--baseline transformers needs torch, which is not installed" in capsys.readouterr().err
