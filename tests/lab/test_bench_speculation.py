"""`bench speculation` in miniature, and what its numbers mean."""

from __future__ import annotations

import argparse
import json
import re
from importlib.resources import files
from multiprocessing import active_children
from pathlib import Path
from random import Random

import pytest

from jaxpage import LLM, EngineConfig, SamplingParams, cli
from jaxpage.bench.studies import speculation
from jaxpage.bench.studies.engine_process import engine_process
from jaxpage.bench.studies.speculation import ALONE, CONTROL, NONE, Cell, EngineRun, table
from jaxpage.bench.studies.task_prompts import TASKS, task_texts
from jaxpage.checkpoints.finding.resolve import DEMO
from jaxpage.cli.parsers import make_parser
from jaxpage.errors import JaxpageError, ModelNotFoundError
from tests.test_bench_studies import engine_here
from tools.lab.demo_model.tales import tale

pytestmark = pytest.mark.usefixtures("compiled_when_used")

TEXT = Path(__file__).parents[1] / "support" / "alice.txt"
SMALL = EngineConfig(
    model="demo", max_num_seqs=2, max_num_batched_tokens=32, max_model_len=64, num_blocks=9
)


def test_tasks_are_measured_one_by_one(capsys, monkeypatch, tmp_path):
    """Each run has a salt of its own: what suffix decoding learned of a prompt would be the text of
    its next run.
    """
    monkeypatch.setattr(speculation, "TOKENS_OF_A_TURN", 24)
    monkeypatch.setattr(speculation, "engine_process", engine_here)
    words = ["--model", "demo", "--tasks", "chat", "translate", "--batches", "1", "--repeats", "1"]
    words += ["--methods", "suffix", "--num-speculative-tokens", "3", "--max-output", "24"]
    words += ["--max-num-batched-tokens", "64", "--plot", str(tmp_path / "ratios.svg")]
    assert cli.main(["bench", "speculation", *words]) == 0
    *shown, line = capsys.readouterr().out.splitlines()
    cells = json.loads(line)["cells"]
    ways = [(NONE, ""), ("suffix", "3"), ("suffix", "auto"), CONTROL]
    assert [(cell["task"], cell["method"], cell["num_speculative_tokens"]) for cell in cells] == [
        (task, *way) for task in ("chat", "translate") for way in ways
    ]
    assert shown[0].split()[:2] == ["task", "drafts"] and len(shown) == 1 + 8 + 2
    for cell in cells:
        assert cell["identical"] and cell["ratios"][0] <= cell["ratio"] <= cell["ratios"][1]
        assert all(share <= 1 for share in cell["accepted"])
        assert cell["tokens_per_step"] < 2, "no text is known from an earlier run"
    picture = (tmp_path / "ratios.svg").read_text()
    # Text is outlines with a comment, or text where another test has asked matplotlib for it.
    texts = {
        each or other for each, other in re.findall(r"<!-- (.*?) -->|>([^<>]*)</text>", picture)
    }
    ratios = {f"{cell['ratio']:.2f}" for cell in cells if cell["method"] == "suffix"}
    assert {"chat", "translate", "suffix auto", *ratios} <= texts
    assert not any("again" in text for text in texts)


def test_each_task_has_twenty_prompts_that_differ():
    texts = [text for task in TASKS for text in task_texts(task)]
    assert len(texts) == 20 * len(TASKS) == len({*texts})


def arguments_of(*words: str) -> argparse.Namespace:
    arguments = make_parser().parse_args(["bench", "speculation", *words])
    # Flags that are not given are absent, as are all settings.
    return argparse.Namespace(**{"seed": None, "text": None, "tasks": [], **vars(arguments)})


def test_the_default_prompts_are_of_texts_that_drafters_know():
    """The measure is a count, which no other program on the machine changes; it is 1.4 after random
    ids.
    """
    arguments = arguments_of("--methods", "eagle3=demo/eagle3", "--batches", "1", "4")
    prompts = speculation._prompts(arguments, SMALL)[""]
    assert len(prompts) == 4 and {len(prompt) for prompt in prompts} == {64}
    sized = speculation._size_config(SMALL.replace(max_model_len=112, num_blocks=None), 4, 112)
    config = speculation._config(sized, ("eagle3=demo/eagle3", "3"))
    greedy = [SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)] * 4
    with engine_here(config) as engine:
        engine.begin(prompts, greedy)
        while engine.go_on()[1]:
            pass
        assert engine.end().tokens_per_step > 3


def test_the_packaged_tales_are_those_of_the_tool():
    random = Random(11)
    tales = "\n\n".join(tale(random) for _ in range(40))
    assert (files("jaxpage.bench") / "tales.txt").read_text() == tales + "\n"


def test_random_ids_are_for_models_without_a_tokenizer(tmp_path, capsys):
    (tmp_path / "config.json").write_text((DEMO / "config.json").read_text())
    model = ["--model", str(tmp_path), "--batches", "2"]
    config = SMALL.replace(model=str(tmp_path))
    first, again, other = (
        speculation._prompts(arguments_of(*model, *seed), config)[""]
        for seed in ([], ["--seed", "0"], ["--seed", "1"])
    )
    assert first == again != other and [len(prompt) for prompt in first] == [64, 64]
    assert cli.main(["bench", "speculation", "--seed", "1"]) == 2
    assert "--seed draws token ids for a model without a tokenizer" in capsys.readouterr().err


def test_an_engine_in_a_process_of_its_own_does_what_one_does_here_and_its_end_is_an_error():
    prompts = [[5, 6, 7], [8, 9]]
    params = [
        SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True) for count in (4, 6)
    ]
    with LLM(**SMALL.model_dump(), use_tqdm=False) as llm:
        expected = [
            output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)
        ]
    with (
        pytest.raises(JaxpageError, match="process of an engine ended"),
        engine_process(SMALL) as engine,
    ):
        for _ in range(2):
            engine.begin(prompts, params)
            turns = [engine.go_on() for _ in range(6)]
            assert [goes_on for _, goes_on in turns] == [True] * 6
            last, goes_on = engine.go_on()
            assert not goes_on and [*turns, (last, False)] == sorted([*turns, (last, False)])
            assert engine.end() == (last, 1.0, expected, ())
        with pytest.raises(ValueError, match="takes one prompt, not 0"):
            engine.begin([[]], params[:1])
        (child,) = active_children()
        child.kill()
        engine.go_on()


def test_what_goes_wrong_at_the_start_of_a_process_is_raised_here():
    with (
        pytest.raises(ModelNotFoundError, match="nowhere"),
        engine_process(EngineConfig(model="nowhere")),
    ):
        pass


def test_a_ratio_is_to_the_mean_of_those_without_drafts(monkeypatch):
    seconds = {"first": 3.0, "drafting": 2.0, "second": 5.0}
    begun, requested = [], []

    def run_together(engines, prompts, params):
        begun.append(engines[0])
        requested.append(prompts)
        return [
            EngineRun(seconds[llm], 1.0, [[1]] if llm != "drafting" else [[2]]) for llm in engines
        ]

    monkeypatch.setattr(speculation, "_run_together", run_together)
    engines = {ALONE: "first", ("medusa=there+tree", "4"): "drafting", CONTROL: "second"}
    params = [speculation.SamplingParams(max_tokens=30)]
    pairs = speculation.measure(engines, [[7], [8], [9]], params, repeats=3)
    assert requested[:4] == [[[7]], [[8]], [[9]], [[7]]], "each run takes the next prompts"
    cells = [speculation._cell(1, way, 30, runs) for way, runs in pairs.items()]
    assert [
        (cell.method, cell.num_speculative_tokens, cell.ratio, cell.identical) for cell in cells
    ] == [
        (NONE, "", 4 / 3, True),
        ("medusa+tree", "4", 2.0, False),
        (NONE, "again", 0.8, True),
    ]
    assert [cell.tokens_per_second for cell in cells] == [10.0, 15.0, 6.0]
    counted = begun[18:]
    assert len(counted) == 3 * 18, "a turn is 512 tokens, of 30 in a run"
    assert all(counted.count(llm) == 18 for llm in seconds), (
        "each of them begins as often as another"
    )


def test_the_table_marks_the_best_of_each_batch():
    cells = [
        Cell(1, NONE, "", 1.0, 100.0, 1.0, True),
        Cell(1, "ngram", "auto", 2.0, 150.0, 1.5, True),
        Cell(8, NONE, "", 1.0, 400.0, 1.0, True),
        Cell(8, "ngram", "auto", 1.5, 390.0, 0.975, False),
    ]
    lines = [line.split() for line in table(cells).splitlines()[1:]]
    assert lines == [
        ["none", "1", "1.00", "100.0", "1.000", "yes"],
        ["ngram", "auto", "1", "2.00", "150.0", "1.500*", "yes"],
        ["none", "8", "1.00", "400.0", "1.000*", "yes"],
        ["ngram", "auto", "8", "1.50", "390.0", "0.975", "no"],
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--batches", "0"], "--batches must be at least 1, got 0"),
        (["--repeats", "0"], "--repeats must be at least 1, got 0"),
        (
            ["--num-speculative-tokens", "3", "0"],
            "--num-speculative-tokens must be at least 1, got 0",
        ),
        (["--temperature", "-1"], "--temperature must not be negative, got -1"),
        (["--methods", "oracle"], "--methods oracle: "),
        (["--methods", "none"], "--methods none: "),
        (
            ["--speculative-config", '{"method": "suffix"}'],
            "--methods ngram: speculative_config is for suffix",
        ),
        (
            ["--methods", "ngram+tree"],
            "--methods ngram+tree: speculative_config: tree=True is not supported",
        ),
        (
            ["--methods", "ngram=there"],
            "--methods ngram=there: speculative_config: model is 'there', but method is 'ngram'",
        ),
        (["--text", "nowhere.txt"], "--text nowhere.txt: "),
        (["--tasks", "chat", "dance"], "--tasks dance: it is not one of summarise, edit, "),
        (["--max-num-seqs", "3"], "unknown argument '--max-num-seqs'"),
    ],
)
def test_flags_that_make_no_sense(words, message, capsys):
    try:
        status = cli.main(["bench", "speculation", *words])
    except SystemExit as stop:
        status = stop.code
    assert status == 2 and message in capsys.readouterr().err


def test_how_drafts_are_accepted_holds_for_all_methods_and_other_settings_for_their_own():
    drafts = {"method": "ngram", "prompt_lookup_max": 8, "acceptance": "rejection"}
    config = SMALL.replace(speculative_config=drafts)
    ngram, suffix = (
        speculation._config(config, (method, "3")).speculative_config
        for method in ("ngram", "suffix")
    )
    assert ngram.prompt_lookup_max == 8 and ngram.acceptance == suffix.acceptance == "rejection"


def test_methods_of_a_fixed_number_are_not_run_with_auto():
    arguments = argparse.Namespace(
        methods=["token_recycling+tree", "ngram"], num_speculative_tokens=[4], oracle=False
    )
    _, *ways, _ = speculation._ways(arguments)
    assert ways == [("token_recycling+tree", "4"), ("ngram", "4"), ("ngram", "auto")]
