"""The code that trains what drafts for the packaged demo model, on a toy."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from jaxpage.checkpoints.drafters.medusa_files import load_medusa, open_medusa
from jaxpage.checkpoints.drafters.mtp_files import load_mtp, open_mtp
from jaxpage.checkpoints.loading import load_weights
from jaxpage.checkpoints.opening import open_model
from jaxpage.models.base import abstract
from jaxpage.models.drafters.medusa import MedusaHeads
from tools.lab.demo_model import (
    acceptance,
    draft_model,
    drafters,
    eagle_head,
    exporting,
    medusa_heads,
    mtp_head,
    own_text,
    training,
)
from tools.lab.demo_model.distillation import Teacher, soft_cross_entropy
from tools.lab.demo_model.model import (
    ModelSpec,
    Params,
    init_params,
)

pytestmark = pytest.mark.usefixtures("compiled_when_used")

TOY = ModelSpec(
    vocabulary=48, width=32, layers=4, heads=2, kv_heads=1, feed_forward=48, max_positions=64
)
FREQUENT = np.sort(np.random.default_rng(3).permutation(48)[:40])


@pytest.fixture(scope="module")
def teacher() -> Teacher:
    """Makes a model of random weights, but with an opinion, so that there is something to learn."""
    params = init_params(TOY, jax.random.key(1))
    return Teacher(
        TOY, {name: value if name.endswith("norm") else 8 * value for name, value in params.items()}
    )


@pytest.fixture(scope="module")
def text(teacher: Teacher) -> np.ndarray:
    starts = np.random.default_rng(0).integers(0, 48, (96, 2)).astype(np.int32)
    heat = np.full((96, 64), 0.7, np.float32)
    return np.asarray(
        own_text.continue_rows(TOY, teacher.params, starts, np.full(96, 2), heat, jax.random.key(2))
    )


class Trained(NamedTuple):
    """A drafter after a few steps, and its losses before and after them, on text that it did not
    learn from.
    """

    drafter: drafters.Drafter
    params: Params
    losses: tuple[float, float]


@pytest.fixture(scope="module")
def train(teacher: Teacher, text: np.ndarray) -> Callable[[str], Trained]:
    @functools.cache
    def train_model(name: str) -> Trained:
        drafter = drafters.make_drafter(name, teacher, FREQUENT, 0)
        plan = training.Plan(80, 0, 2e-2)
        run, step = (
            training.start_run(drafter.params, plan),
            training.make_step(drafter.objective, plan),
        )
        loss, rng = jax.jit(drafter.objective), np.random.default_rng(0)
        for _ in range(plan.steps):
            rows = text[rng.integers(0, 64, 8)]
            run.params, run.optimizer_state, _ = step(run.params, run.optimizer_state, rows)
        losses = float(loss(drafter.params, text[64:80])), float(loss(run.params, text[64:80]))
        return Trained(drafter, run.params, losses)

    return train_model


@pytest.mark.parametrize(
    ("name", "by"), [("draft", 0.2), ("medusa", 0.03), ("eagle3", 0.1), ("mtp", 0.1)]
)
def test_the_loss_falls(train: Callable[[str], Trained], name: str, by: float) -> None:
    """Little of what a random model does two tokens on can be known.

    That text was not learned from.
    """
    before, after = train(name).losses
    assert after < before - by


# --- the text


def test_what_the_model_writes_is_what_it_would_draw(teacher: Teacher) -> None:
    """Greedy rows agree with whole passes over them, and the first draws of many rows with the
    distribution.
    """
    starts = np.tile(np.array([[5, 7, 11]], np.int32), (2000, 1))
    lengths = np.where(np.arange(2000) < 4, 1 + np.arange(2000), 3).astype(np.int32).clip(max=3)
    heat = np.where(np.arange(2000) < 4, 0.0, 1.0)[:, None] * np.ones((1, 12))
    rows = np.asarray(
        own_text.continue_rows(TOY, teacher.params, starts, lengths, heat, jax.random.key(0))
    )
    logits = np.asarray(teacher(rows).logits_BTV)
    for row in range(4):
        np.testing.assert_array_equal(rows[row, : lengths[row]], starts[row, : lengths[row]])
        np.testing.assert_array_equal(
            rows[row, lengths[row] :], logits[row, lengths[row] - 1 : -1].argmax(-1)
        )
    assert z_of(rows[4:, 3], np.asarray(jax.nn.softmax(logits[4, 2]))) < 4
    # another temperature is noticed
    assert z_of(rows[4:, 3], np.asarray(jax.nn.softmax(logits[4, 2] / 0.7))) > 10


def z_of(drawn: np.ndarray, probabilities: np.ndarray) -> float:
    """Returns how far chi-square is from what it should be, in its standard deviations.

    Rare tokens are counted together.
    """
    expected, counts = len(drawn) * probabilities, np.bincount(drawn, minlength=len(probabilities))
    rare = expected < 5
    expected, counts = (np.append(x[~rare], x[rare].sum() + 1e-9) for x in (expected, counts))
    freedom = len(expected) - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom))


# --- what the objectives are


def test_a_part_of_a_distribution_counts_as_much_as_it_is() -> None:
    rng = np.random.default_rng(0)
    p, logits = rng.dirichlet(np.ones(6), 5), rng.standard_normal((5, 4))
    q = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    expected = -(p[:, :4] * np.log(q)).sum(-1)
    np.testing.assert_allclose(
        soft_cross_entropy(jnp.asarray(p[:, :4]), jnp.asarray(logits)), expected, rtol=1e-5
    )


def step_by_step(
    name: str, teacher: Teacher, params: Params, tokens: np.ndarray, place: int, drafted: int
) -> np.ndarray:
    """Returns the logits at `place` of a head as it drafts, in float64.

    It goes from the target up to `place` - `drafted`, then from itself.
    """
    seen, is_eagle = teacher(tokens[None]), name == "eagle3"
    p = {key: np.asarray(value, np.float64) for key, value in params.items()}
    embed = np.asarray(teacher.params["embed"], np.float64)

    def norm(x: np.ndarray, weight: str) -> np.ndarray:
        return x / np.sqrt(np.mean(x * x) + TOY.norm_epsilon) * p[weight]

    def rotate(x_NH: np.ndarray, at: int) -> np.ndarray:
        first, second = np.split(x_NH, 2, -1)
        angle = at * TOY.rope_theta ** (-np.arange(0, TOY.head_dim, 2) / TOY.head_dim)
        cos, sin = np.cos(angle), np.sin(angle)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    if is_eagle:
        features = (
            np.concatenate([seen.streams[tap][0] for tap in eagle_head.TAPS], -1) @ p["fc_proj"]
        )
    else:
        features = np.asarray(seen.hidden_BTD[0])
    keys, values = [], []
    for at in range(place + 1):
        if at <= place - drafted:
            feature = features[at]
        embedding = norm(embed[tokens[at + 1]], "input_norm" if is_eagle else "embedding_norm")
        both = np.concatenate([embedding, norm(feature, "hidden_norm")])
        x = feature if is_eagle else both @ p["fc_proj"]
        y = both if is_eagle else norm(x, "input_norm")
        q, k, v = ((y @ p[f"{part}_proj"]).reshape(-1, TOY.head_dim) for part in "qkv")
        keys.append(rotate(k, at)[0])
        values.append(v[0])
        weights = np.exp(rotate(q, at) @ np.array(keys).T / np.sqrt(TOY.head_dim))
        attended = weights @ np.array(values) / weights.sum(-1, keepdims=True)
        x = x + attended.reshape(-1) @ p["o_proj"]
        fed = norm(x, "post_norm")
        gate = fed @ p["gate_proj"]
        x = x + (gate / (1 + np.exp(-gate)) * (fed @ p["up_proj"])) @ p["down_proj"]
        feature = x if is_eagle else norm(x, "output_norm")
    return norm(feature, "norm") @ p["lm_head"].T if is_eagle else feature @ embed.T


@pytest.mark.parametrize(("name", "head"), [("eagle3", eagle_head), ("mtp", mtp_head)])
def test_training_time_test_is_what_drafting_does(
    teacher: Teacher, text: np.ndarray, name: str, head: Any
) -> None:
    params = drafters.make_drafter(name, teacher, FREQUENT, 0).params
    params = {
        name: 8 * value if name.endswith("_proj") else value for name, value in params.items()
    }
    tokens = text[0, :10]
    passes = head.unroll(teacher, params, teacher(tokens[None]), tokens[None], 4)
    for place, drafted in ((0, 0), (6, 0), (6, 1), (6, 3), (3, 3)):
        expected = step_by_step(name, teacher, params, tokens, place, drafted)
        np.testing.assert_allclose(passes[drafted][0, place], expected, rtol=1e-3, atol=1e-4)
        other = step_by_step(name, teacher, params, tokens, place, (drafted + 1) % (place + 1))
        # which pass it is matters
        assert place == 0 or np.abs(passes[drafted][0, place] - other).max() > 0.01


# --- what is written is what others read


def test_a_draft_model_is_an_ordinary_model(
    train: Callable[[str], Trained], teacher: Teacher, text: np.ndarray, tmp_path: Path
) -> None:
    drafter, params, _ = train("draft")
    drafter.export(params, tmp_path, {})
    spec, again = exporting.import_model(tmp_path)
    assert spec == draft_model.draft_spec(TOY)
    jax.tree.map(np.testing.assert_array_equal, again, exporting.round_to_bfloat16(params))
    files = open_model(tmp_path)
    assert (files.spec.vocab_size, files.spec.hidden_size, files.spec.kv.num_layers) == (48, 16, 2)
    load_weights(files.plan, "float32", jnp.asarray)
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, local_files_only=True
    )
    with torch.no_grad():
        expected = theirs(torch.tensor(text[:2].tolist())).logits.numpy()
    np.testing.assert_allclose(
        draft_model.logits(teacher, again, text[:2]), expected, rtol=1e-3, atol=1e-4
    )


def test_heads_are_read_as_they_were_trained(
    train: Callable[[str], Trained], teacher: Teacher, tmp_path: Path
) -> None:
    drafter, params, _ = train("medusa")
    measured = {"accuracies": [[0.5, 0.25]] * 4}
    drafter.export(params, tmp_path, measured)
    files = open_medusa(tmp_path, hidden_size=32, vocab_size=48)
    assert files.accuracies == ((0.5, 0.25),) * 4
    parameters = load_medusa(files, "float32", jnp.asarray)
    np.testing.assert_array_equal(parameters["token_map"], FREQUENT)
    heads = nnx.merge(abstract(MedusaHeads(files.spec, dtype="float32"))[0], parameters)
    hidden = jax.random.normal(jax.random.key(0), (3, 32))
    rounded = exporting.round_to_bfloat16(params)
    for head in range(4):
        ours = medusa_heads.head_logits(rounded, head, hidden)
        np.testing.assert_allclose(heads.head_logits(head, hidden), ours, rtol=1e-4, atol=1e-4)
    assert (
        np.abs(np.diff([heads.head_logits(head, hidden) for head in range(4)], axis=0)).max() > 0.1
    )


def test_an_eagle_head_has_the_names_of_its_authors(
    train: Callable[[str], Trained], teacher: Teacher, tmp_path: Path
) -> None:
    drafter, params, _ = train("eagle3")
    drafter.export(params, tmp_path, {})
    tensors = load_file(tmp_path / "model.safetensors")
    shapes = {
        "fc.weight": (32, 96),
        "norm.weight": (32,),
        "lm_head.weight": (40, 32),
        "midlayer.hidden_norm.weight": (32,),
        "midlayer.input_layernorm.weight": (32,),
        "midlayer.post_attention_layernorm.weight": (32,),
        "midlayer.self_attn.q_proj.weight": (32, 64),
        "midlayer.self_attn.k_proj.weight": (16, 64),
        "midlayer.self_attn.v_proj.weight": (16, 64),
        "midlayer.self_attn.o_proj.weight": (32, 32),
        "midlayer.mlp.gate_proj.weight": (eagle_head.FEED_FORWARD, 32),
        "midlayer.mlp.up_proj.weight": (eagle_head.FEED_FORWARD, 32),
        "midlayer.mlp.down_proj.weight": (32, eagle_head.FEED_FORWARD),
        "d2t": (40,),
        "t2d": (48,),
    }
    assert {key: tensor.shape for key, tensor in tensors.items()} == shapes
    assert tensors["d2t"].dtype == np.int64 and tensors["t2d"].dtype == bool
    np.testing.assert_array_equal(np.arange(40) + tensors["d2t"], FREQUENT)
    np.testing.assert_array_equal(np.flatnonzero(tensors["t2d"]), FREQUENT)
    np.testing.assert_array_equal(
        tensors["fc.weight"].astype(np.float32), exporting.round_to_bfloat16(params)["fc_proj"].T
    )
    config = json.loads((tmp_path / "config.json").read_text())
    assert (
        config["architectures"] == ["LlamaForCausalLMEagle3"] and config["num_hidden_layers"] == 1
    )
    assert (config["vocab_size"], config["draft_vocab_size"]) == (48, 40)


def test_an_mtp_head_is_read_from_the_file_of_its_model(
    train: Callable[[str], Trained], teacher: Teacher, text: np.ndarray, tmp_path: Path
) -> None:
    """Transformers reads it, too: its `MtpModel` gives the guesses of the first pass."""
    drafter, params, _ = train("mtp")
    exporting.export_model(TOY, teacher.params, tmp_path)
    before = load_file(tmp_path / "model.safetensors")
    (tmp_path / "mtp").mkdir()
    for _ in range(2):  # the second time in place of the first
        drafter.export(params, tmp_path / "mtp", {})
    tensors = load_file(tmp_path / "model.safetensors")
    for name, tensor in before.items():
        np.testing.assert_array_equal(tensor, tensors.pop(name))
    assert len(tensors) == len(params)
    assert sum(tensor.size for tensor in tensors.values()) == sum(map(np.size, params.values()))
    load_mtp(open_mtp(open_model(tmp_path)), "float32", jnp.asarray)
    torch = pytest.importorskip("torch")
    from transformers import LlamaForCausalLM
    from transformers.modeling_layers import MtpModel

    target = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    target.get_input_embeddings().weight.data = torch.tensor(np.asarray(teacher.params["embed"]))
    target.config.num_mtp_layers = 1
    head = MtpModel(target, 1).eval()
    stored = {}
    for key, tensor in tensors.items():
        part = key.removeprefix("model.layers.4.").replace("shared_head.norm", "post_norm")
        of_block = part.startswith(("self_attn", "mlp", "input", "post_attention"))
        name = f"layers.0.{'mtp_block.' if of_block else ''}{part}"
        stored[name] = torch.tensor(tensor.astype(np.float32))
    assert not head.load_state_dict(stored, strict=False).unexpected_keys
    tokens = text[:1, :12]
    seen = teacher(tokens)
    with torch.no_grad():
        rows = head.forward_layer(
            0,
            torch.tensor(np.asarray(seen.hidden_BTD[:, :-1])),
            torch.arange(1, 12)[None],
            None,
            input_ids=torch.tensor(tokens[:, 1:].tolist()),
        )
    rounded = exporting.round_to_bfloat16(params)
    expected = rows.numpy() @ np.asarray(teacher.params["embed"]).T
    (guesses,) = mtp_head.unroll(teacher, rounded, seen, jnp.asarray(tokens), 1)
    np.testing.assert_allclose(guesses, expected, rtol=1e-3, atol=1e-4)


# --- the measurement


def test_a_replay_walks_as_speculation_does() -> None:
    right = np.zeros((1, 12, 2), bool)
    right[0, 3] = True, True  # begins here: two drafts and a draw, then place 6
    right[0, 4] = True, True  # never stood at
    right[0, 6] = False, True  # the second is right, but behind a wrong one
    right[0, 7] = True, False
    sample = acceptance.Sample("", np.zeros((1, 12), int), np.array([3]), np.array([12]))
    # steps at 3 (2 accepted), 6 (0), 7 (1), 9 (0); at 10 the text ends before both drafts
    assert acceptance.replay(right, sample) == ([0.5, 0.25], 1.75)


@pytest.mark.parametrize("name", drafters.RECIPES)
def test_ranks_are_those_of_guesses_made_one_by_one(
    name: str, train: Callable[[str], Trained], teacher: Teacher, text: np.ndarray
) -> None:
    """They are compared at every place, with nothing but what is known there."""
    drafter, params, _ = train(name)
    tokens = text[:1, :10]
    ranks = np.asarray(drafter.ranks(params, jnp.asarray(tokens)))
    assert ranks.shape == (1, 10, acceptance.DRAFTS)

    def know(length: int) -> np.ndarray:
        """Returns the first tokens and then zeros, so that all of these have one shape."""
        return np.where(np.arange(10) < length, tokens, 0)

    for index in range(1, 10):
        for draft in range(acceptance.DRAFTS):
            about = index + 1 + draft
            if about >= 10:
                assert ranks[0, index, draft] > 48
                continue
            logits = {
                "draft": lambda p, d: draft_model.logits(teacher, params, know(p + 1 + d))[
                    0, p + d
                ],
                "medusa": lambda p, d: medusa_heads.head_logits(
                    params, d, teacher(know(p)).hidden_BTD[0, p - 1]
                ),
                "eagle3": lambda p, d: step_by_step(
                    name, teacher, params, know(p + 1 + d)[0], p - 1 + d, d
                ),
                "mtp": lambda p, d: step_by_step(
                    name, teacher, params, know(p + 1 + d)[0], p - 1 + d, d
                ),
            }[name](index, draft)
            words = np.arange(48) if name in ("draft", "mtp") else FREQUENT
            order = words[np.argsort(-np.asarray(logits), kind="stable")].tolist()
            token = int(tokens[0, about])
            if token in order:
                assert ranks[0, index, draft] == order.index(token)
            else:
                assert ranks[0, index, draft] >= len(FREQUENT)
