"""`TrainableModel`: log probabilities and their derivatives against transformers on torch."""

from __future__ import annotations

import dataclasses
import json
import re
import runpy
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpage.device.rows import dense as dense_pass
from jaxpage.errors import UnsupportedError
from jaxpage.training import TrainableModel
from pallas_kernels import AttentionOptions

torch = pytest.importorskip("torch", reason="the oracle is transformers on torch")

from transformers import AutoModelForCausalLM  # noqa: E402

from tests.support.hf_models import save_model  # noqa: E402
from tests.support.sweeps import few  # noqa: E402

pytestmark = pytest.mark.usefixtures("compiled_when_used", "largest_shapes")
ROWS = np.random.default_rng(5).integers(0, 97, (2, 24)).astype(np.int32)


def of_torch(model: Any) -> Any:
    """Returns the log probability of each token of ROWS after those before it."""
    tokens = torch.tensor(ROWS, dtype=torch.long)
    logprobs = model(tokens).logits[:, :-1].log_softmax(-1)
    return logprobs.gather(-1, tokens[:, 1:, None])[..., 0]


def load(directory: Path, oracle: Any, **settings: Any) -> tuple[TrainableModel, Any]:
    config = json.loads((directory / "config.json").read_text())
    tensors = {name: tensor.detach().numpy() for name, tensor in oracle.state_dict().items()}
    return TrainableModel.load(config, tensors, **settings)


@pytest.mark.parametrize(
    "name",
    few(
        [
            *("llama-grouped", "gemma2-caps", "gemma3-types", "opt-350m-form"),
            *("deepseek-v3-halves", "deepseek-v3-groups", "deepseek-v2-greedy", "qwen3-5-mixed"),
            *("llama4-chunks", "qwen3-moe-mixed", "olmoe-many", "gpt-oss-windows", "jamba-mixed"),
            *("nemotron-h-experts", "lfm2-moe-mixed"),
        ],
        # Llama's are in the example below, and those of a mixture are differences in float64.
        ["gemma3-types", "qwen3-5-mixed"],
    ),
)
def test_log_probabilities_and_derivatives_are_those_of_transformers(
    name: str, tmp_path: Path
) -> None:
    oracle = save_model(name, tmp_path)
    model, weights = load(tmp_path, oracle)
    expected = of_torch(oracle)
    expected.mean().backward()

    @jax.jit
    def mean(weights: Any) -> tuple[jax.Array, jax.Array]:
        logprobs = model.log_probabilities(weights, ROWS)
        return logprobs.mean(), logprobs

    (_, actual), gradients = jax.value_and_grad(mean, has_aux=True)(weights)
    np.testing.assert_allclose(actual, expected.detach().numpy(), atol=2e-5)
    named = model.named(gradients)
    parameters = {key: each for key, each in oracle.named_parameters() if each.grad is not None}
    assert named.keys() >= parameters.keys()
    # Torch computes recurrences in chunks: beside its own in float64, its errors are three times
    # ours.
    tolerance = 1e-4 if "qwen3-5" in name else 1e-5
    for key, parameter in parameters.items():
        gradient = parameter.grad.numpy()
        np.testing.assert_allclose(
            named[key], gradient, atol=tolerance * max(1.0, np.abs(gradient).max()), err_msg=key
        )


@pytest.mark.parametrize(
    ("name", "option"),
    few(
        [("mistral-window", "sliding_window"), ("llama4-chunks", "attention_chunk")],
        [("mistral-window", "sliding_window")],
    ),
)
def test_a_window_that_is_one_too_wide_is_seen(
    name: str, option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle = save_model(name, tmp_path)
    model, weights = load(tmp_path, oracle)
    expected = of_torch(oracle).detach().numpy()
    np.testing.assert_allclose(model.log_probabilities(weights, ROWS.tolist()), expected, atol=2e-5)
    for rows in (ROWS[0], ROWS[None], ROWS[:0], ROWS[:, :0], ROWS * 1.0, ROWS > 3, 5):
        with pytest.raises(
            TypeError,
            match=r"token_ids must be integers in rows \[R, C\], at least one of each; got shape",
        ):
            model.log_probabilities(weights, rows)
    size = oracle.config.vocab_size
    for wrong_id in (size, -1):
        rows = jnp.array([[5, wrong_id]])
        with pytest.raises(
            ValueError,
            match=f"token_ids has {wrong_id}, but the model's token ids are 0 to {size - 1}",
        ):
            model.log_probabilities(weights, rows)
        assert jax.jit(model.log_probabilities)(weights, rows).shape == (1, 1), "traced: not known"
    model, _ = load(tmp_path, oracle, exact=False)
    dense = dense_pass.dense_attend

    def wrong(num_rows: int) -> Any:
        def attend(
            index: int, q: Any, k: Any, v: Any, pages: Any, options: AttentionOptions, /
        ) -> Any:
            if (size := getattr(options, option)) is not None:
                options = dataclasses.replace(options, **{option: size + 1})
            return dense(num_rows)(index, q, k, v, pages, options)

        return attend

    monkeypatch.setattr(dense_pass, "dense_attend", wrong)
    assert np.abs(model.log_probabilities(weights, ROWS) - expected).max() > 1e-3


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(AttentionOptions)])
def test_an_option_of_attention_is_computed_or_refused_by_name(name: str) -> None:
    q, k, v = np.random.default_rng(3).standard_normal((3, 6, 2, 4)).astype(np.float32)
    values = {
        **{"scale": 2.0, "logit_softcap": 0.5, "sinks": np.ones(2), "alibi_slopes": np.ones(2)},
        **{"tree_mask_TQ": np.ones((6, 3), bool), "last_seen_T": np.full(6, 2)},
    }

    def attend(**options: Any) -> Any:
        record = AttentionOptions(**{"scale": 1.0, **options})
        return dense_pass.dense_attend(2)(0, q, k, v, None, record)[0]

    try:
        out = attend(**{name: values.get(name, 2)})
    except UnsupportedError as error:
        assert str(error) == f"attention over whole rows does not compute {name}"
    else:
        assert not np.array_equal(out, attend())


def test_derivatives_of_experts_are_differences_in_float64(tmp_path: Path) -> None:
    """They go along a random direction of all weights; the oracle's own routes do not change on the
    way.
    """
    oracle = save_model("qwen3-moe-mixed", tmp_path)
    model, weights = load(tmp_path, oracle)
    gradients = jax.jit(jax.grad(lambda w: model.log_probabilities(w, ROWS).mean()))(weights)
    named = model.named(gradients)
    oracle.set_experts_implementation("eager")  # the others have no float64
    oracle = oracle.double()
    rng = np.random.default_rng(2)
    slope = 0.0
    step = 1e-5
    means = []
    with torch.no_grad():
        directions = {
            name: rng.standard_normal(parameter.shape)
            for name, parameter in oracle.named_parameters()
        }
        for name, parameter in oracle.named_parameters():
            slope += float((np.asarray(named[name], np.float64) * directions[name]).sum())
            parameter += step * torch.tensor(directions[name])
        means.append(of_torch(oracle).mean().item())
        for name, parameter in oracle.named_parameters():
            parameter -= 2 * step * torch.tensor(directions[name])
        means.append(of_torch(oracle).mean().item())
    difference = (means[0] - means[1]) / (2 * step)
    np.testing.assert_allclose(slope, difference, rtol=1e-3)


def test_the_example_of_the_reference(tmp_path: Path) -> None:
    page = Path(__file__).parents[1] / "docs" / "reference" / "python.md"
    *_, code = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "example.py").write_text(code)
    names = runpy.run_path(str(tmp_path / "example.py"))
    oracle = AutoModelForCausalLM.from_pretrained(names["directory"], dtype=torch.float32)
    rows = torch.tensor(np.asarray(names["rows"]), dtype=torch.long)
    logprobs = oracle(rows).logits[:, :-1].log_softmax(-1).gather(-1, rows[:, 1:, None])
    loss = -logprobs.mean()
    loss.backward()
    np.testing.assert_allclose(names["value"], loss.item(), atol=2e-5)
    for name, parameter in oracle.named_parameters():
        np.testing.assert_allclose(
            names["named"][name], parameter.grad.numpy(), atol=1e-4, err_msg=name
        )


def test_a_rollout_and_its_trainer_agree() -> None:
    """examples/rl_rollout.py on the demo model: scores have the rollout's bits, also after an
    update of the weights.
    """
    table = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "rl_rollout.py"))["main"](
        ["--steps", "2"]
    )
    assert len(table) == 2
    for reward, num_equal, num_tokens, difference in table:
        assert num_equal == num_tokens == 768 and difference == 0 and 0.05 < reward < 0.5
    assert table[0][0] != table[1][0], "other weights"
