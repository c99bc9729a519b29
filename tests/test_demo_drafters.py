"""Drafters for the packaged demo model: the weights that jaxpage brings along, and the accuracies
in their configs.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxpage import LLM, SamplingParams
from jaxpage.assembly.planning.drafters import open_heads
from jaxpage.checkpoints.finding.resolve import DEMO, resolve_model
from jaxpage.checkpoints.loading import load_weights
from jaxpage.checkpoints.opening import open_model
from jaxpage.checkpoints.tokenizers.tokenizer_files import load_tokenizer
from jaxpage.errors import CheckpointError
from jaxpage.models.registry import load_family
from jaxpage.settings.speculative_config import SpeculativeConfig
from jaxpage.speculation.medusa import assume_accuracies, search
from tests.support.engines import invariants
from tests.support.medusa import CYCLE, random_heads, write_vllm
from tools.lab.demo_model import (
    acceptance,
    drafters,
    eagle_head,
)

pytestmark = pytest.mark.usefixtures("compiled_when_used", "decode_as_chunks")

TARGET: Any = SimpleNamespace(spec=load_family(CYCLE).Spec.from_config(CYCLE))


# --- accuracies that were measured


def heads_with(tmp_path: Path, accuracies: Any) -> SpeculativeConfig:
    write_vllm(
        tmp_path, random_heads(2, rows=8), token_map=np.arange(8), jaxpage_accuracies=accuracies
    )
    return SpeculativeConfig(
        method="medusa", model=str(tmp_path), tree=True, num_speculative_tokens=4
    )


def test_a_tree_is_searched_from_the_accuracies_in_the_config(tmp_path):
    rows = [[0.1, 0.6], [0.2, 0.3]]
    config = heads_with(tmp_path / "a", rows)
    heads = open_heads(config, TARGET)
    assert heads.choices == search(rows, 4) == ((1,), (1, 1), (1, 0), (0,))
    with_choices = config.model_copy(update={"medusa_choices": ((0,), (1,), (2,), (0, 0), (1, 0))})
    ordered = open_heads(with_choices, TARGET)
    assert ordered.choices == ((1,), (1, 0), (0,), (0, 0), (2,))  # of rank 2 nothing is known
    without = open_heads(heads_with(tmp_path / "b", None), TARGET)
    assert without.choices == search(assume_accuracies(2), 4) == ((0,), (0, 0), (1,), (0, 1))


@pytest.mark.parametrize(
    "accuracies",
    [[[0.5]], [[0.5], []], [[0.5], [0.6, 0.5]], [[0.5], [-0.1]], [[0.5], ["a"]], 1, []],
)
def test_accuracies_that_are_none_are_refused(tmp_path, accuracies):
    with pytest.raises(CheckpointError, match="jaxpage_accuracies must be a list of shares"):
        open_heads(heads_with(tmp_path / "a", accuracies), TARGET)


# --- what jaxpage brings along


def test_they_are_there_and_small():
    for name in ("draft", "medusa", "eagle3"):
        assert resolve_model(f"demo/{name}") == DEMO / name
    files = [
        path for name in drafters.RECIPES for path in (DEMO / name).rglob("*") if path.is_file()
    ]
    assert len(files) >= 9 and sum(path.stat().st_size for path in files) <= 5_500_000
    assert all(path.stat().st_mode & 0o444 == 0o444 for path in files)
    card = (DEMO / "DRAFTERS.md").read_text()
    for word in (
        "python tools/train_demo_model.py --drafters",
        "Apache-2.0",
        "tokens per step",
        "`demo/eagle3`",
    ):
        assert word in card
    for name, recipe in drafters.RECIPES.items():
        facts = json.loads((DEMO / name / "training.json").read_text())
        # so that the command of the card makes these
        assert facts["steps"] == recipe.steps and facts["seed"] == 0
        for sample, row in facts["acceptance"].items():
            line = " | ".join(map(str, [name, sample, *row["positions"], row["tokens_per_step"]]))
            assert f"| {line} |" in card


def test_a_directory_with_a_packaged_name_is_not_overlooked(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo" / "medusa").mkdir(parents=True)
    assert resolve_model("demo/medusa") == DEMO / "medusa"
    assert "for the directory of that name use './demo/medusa'" in caplog.text
    assert resolve_model("./demo/medusa") == tmp_path / "demo" / "medusa"
    caplog.clear()
    resolve_model("demo/draft")  # there is no other
    monkeypatch.chdir(DEMO.parent)
    resolve_model("demo/medusa")  # the other is the same
    assert caplog.text == ""


def test_the_packaged_draft_model_loads():
    files, target = open_model(DEMO / "draft"), open_model(DEMO)
    assert files.spec.vocab_size == target.spec.vocab_size
    assert files.spec.max_position_embeddings == target.spec.max_position_embeddings
    assert files.plan.num_bytes("bfloat16") == load_bytes("draft")
    load_weights(files.plan, "bfloat16", jnp.asarray)


def test_the_packaged_eagle_head_belongs_to_the_model():
    config = json.loads((DEMO / "eagle3" / "config.json").read_text())
    tensors = load_file(DEMO / "eagle3" / "model.safetensors")
    token_map = np.arange(config["draft_vocab_size"]) + tensors["d2t"]
    np.testing.assert_array_equal(np.flatnonzero(tensors["t2d"]), token_map)
    np.testing.assert_array_equal(
        token_map, load_file(DEMO / "medusa" / "model.safetensors")["token_map"]
    )
    assert config["eagle_aux_hidden_state_layer_ids"] == list(eagle_head.TAPS)


def load_bytes(name: str) -> int:
    tensors = load_file(DEMO / name / "model.safetensors")
    return sum(tensor.nbytes for tensor in tensors.values())


@pytest.fixture(scope="module")
def plain():
    with LLM(
        model="demo", max_num_seqs=2, max_num_batched_tokens=32, max_model_len=160, use_tqdm=False
    ) as llm:
        yield texts_of(llm, GREEDY, *BUDGETS)


def texts_of(llm: LLM, *params: SamplingParams) -> list[list[int]]:
    """Returns the tokens of each request.

    They run one after the other, so that few shapes are compiled.
    """
    return [llm.generate(PROMPT, each, use_tqdm=False)[0].outputs[0].token_ids for each in params]


PROMPT = "Once upon a time there was a poor miller"
GREEDY = SamplingParams(temperature=0.0, max_tokens=96)
# The prompt opens the reasoning of some; what others say in quotes is theirs, again and again.
OPENED, QUOTED = ("", "</think>", False), ('"', '"', True)
BUDGETS = [
    SamplingParams(
        temperature=0.0, max_tokens=40, thinking_token_budget=0, thinking_markers=OPENED
    ),
    SamplingParams(
        temperature=0.0, max_tokens=60, thinking_token_budget=9, thinking_markers=OPENED
    ),
    SamplingParams(
        temperature=0.7, seed=6, max_tokens=90, thinking_token_budget=4, thinking_markers=QUOTED
    ),
    SamplingParams(
        temperature=0.0, max_tokens=96, thinking_token_budget=500, thinking_markers=OPENED
    ),
]


def test_a_budget_for_reasoning_is_spent_where_it_is_said(plain):
    """Otherwise the drafts of budgets would be those of other requests."""
    tokenizer = load_tokenizer(DEMO)
    free, at_once, later, quoted, unspent = plain
    close = tokenizer("</think>", add_special_tokens=False)["input_ids"]
    assert len(close) > 1 and at_once[: len(close)] == close
    assert later[9 : 9 + len(close)] == close and later[:9] == free[:9]
    assert unspent == free
    said = tokenizer.decode(quoted).split('"')[1::2]
    assert any(len(tokenizer(text, add_special_tokens=False)["input_ids"]) == 4 for text in said)


MTP = {"num_speculative_tokens": 4}


@pytest.fixture(scope="module")
def engines():
    """Returns engines by their method, made when first asked for."""
    made: dict[str, LLM] = {}

    def engine(method: str, name: str | None, **settings: Any) -> LLM:
        key = f"{method} {settings}"
        llm = made[key] = made.get(key) or start(method, name, **settings)
        return llm

    yield engine
    for llm in made.values():
        llm.shutdown()


@pytest.mark.parametrize(
    ("method", "name", "settings", "at_least"),
    [
        pytest.param(
            "medusa", "medusa", {"num_speculative_tokens": 4}, 1.3, marks=pytest.mark.sweep
        ),
        pytest.param(
            *("medusa", "medusa", {"num_speculative_tokens": 7, "tree": True}, 1.5),
            marks=pytest.mark.sweep,
        ),
        ("draft_model", "draft", {"num_speculative_tokens": 4}, 2.5),
        pytest.param(
            "eagle3", "eagle3", {"num_speculative_tokens": 4}, 2.5, marks=pytest.mark.sweep
        ),
        ("mtp", None, MTP, 2.5),
        # Methods without a drafter have to learn from the text itself.
        *(
            pytest.param(method, None, settings, 1.2, marks=pytest.mark.sweep)
            for method, settings in (
                ("lookahead", {"num_speculative_tokens": 31}),
                ("token_recycling", {"num_speculative_tokens": 7, "tree": True}),
            )
        ),
    ],
)
def test_drafts_save_steps_and_change_nothing(plain, engines, method, name, settings, at_least):
    """They do so also where a budget forces the end of the reasoning, in the middle of drafts."""
    llm = engines(method, name, **settings)
    assert texts_of(llm, GREEDY) == plain[:1]
    assert llm.stats()["tokens_per_target_step"] > at_least
    before = llm.stats()["spec_decode_num_accepted_tokens_total"]
    assert texts_of(llm, *BUDGETS) == plain[1:]
    assert llm.stats()["spec_decode_num_accepted_tokens_total"] > before
    invariants(llm)


def start(method: str, name: str | None, **settings: Any) -> LLM:
    return LLM(
        model="demo",
        max_num_seqs=2,
        max_num_batched_tokens=32,
        max_model_len=160,
        speculative_config={"method": method, "model": name and f"demo/{name}", **settings},
        use_tqdm=False,
    )


def right(llm: LLM, prompts: list[str]) -> tuple[float, list[list[int]]]:
    """Returns how many drafts of a step are right in the mean, and the texts."""
    params = llm.default_sampling_params(seed=1, max_tokens=48)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    accepted, steps = (
        sum(getattr(output.metrics, name) for output in outputs)
        for name in ("num_accepted_tokens", "num_drafts")
    )
    return accepted / steps, [output.outputs[0].token_ids for output in outputs]


@pytest.mark.sweep  # drafters of both kinds: above, and tests/test_drafting_ahead.py
def test_the_head_in_the_model_is_right_as_often_as_eagle():
    prompts = [PROMPT, *acceptance.NOVELS]
    with start("eagle3", "eagle3", num_speculative_tokens=4) as llm:
        eagle, texts = right(llm, prompts)
    with start("mtp", None, num_speculative_tokens=4) as llm:
        mtp, same = right(llm, prompts)
        assert mtp >= eagle > 0.5 and same == texts


def test_the_head_in_the_model_is_replaced_with_the_model(engines):
    two = [PROMPT, acceptance.NOVELS[0]]
    llm = engines("mtp", None, **MTP)
    before = right(llm, two)
    assert before[0] > 0.5
    weights = {name: np.asarray(array) for name, array in llm.parameters().items()}
    stored = load_file(DEMO / "model.safetensors")
    for name, tensor in stored.items():
        np.testing.assert_array_equal(tensor, weights[name])
    assert weights.keys() == stored.keys()
    names = [name for name in weights if name.startswith("model.layers.4.")]
    assert len(names) == 13
    llm.update_parameters(weights | {name: 0 * weights[name] for name in names})
    none, same = right(llm, two)
    assert none < 0.1 and same == before[1], "a head of zeros drafts ends of texts alone"
    llm.update_parameters(weights, check_finite=True)
    assert right(llm, two) == before
    for name in names:
        del weights[name]
    with pytest.raises(CheckpointError, match=r"needs the tensors model\.layers\.4\.\*"):
        llm.update_parameters(weights)
    assert right(llm, two) == before
