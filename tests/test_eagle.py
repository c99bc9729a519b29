"""Drafters with weights: EAGLE heads from files of every published format against torch in float64,
draft models, refusals.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from flax import nnx

from jaxpage.assembly.planning.drafters import ModelDrafterFiles, open_drafter
from jaxpage.checkpoints import load_weights, open_model
from jaxpage.checkpoints.opening import ModelFiles
from jaxpage.errors import CheckpointError
from jaxpage.layers.context import AttentionOptions, ForwardContext
from jaxpage.models.base import abstract, abstract_model
from jaxpage.models.drafters.drafter import join
from jaxpage.settings.speculative_config import SpeculativeConfig
from tests.support.eagle import LAYERS, TARGET, Eagle, Eagle3, write
from tests.support.hf_models import save_model
from tests.support.random_checkpoints import random_checkpoint, random_tensors
from tests.support.sweeps import few

torch = pytest.importorskip("torch", reason="the oracle is transformers on torch")

LENGTH, WIDTH, VOCAB = 24, LAYERS["hidden_size"], LAYERS["vocab_size"]
TOLERANCE = 2e-4
DEFAULT_LAYERS = (2, 3, 4)  # of a target of 7 layers
TOKENS = np.random.default_rng(0).integers(VOCAB, size=LENGTH + 1)
AUTHORS = {**LAYERS, "architectures": ["LlamaForCausalLM"]}


class Target(NamedTuple):
    files: ModelFiles
    tensors: dict[str, np.ndarray]
    parameters: Any
    states: list[np.ndarray]  # that enter each layer, by transformers
    output: np.ndarray


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    directory = random_checkpoint(tmp_path_factory.mktemp("models") / "target", TARGET)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory).eval()
    with torch.no_grad():
        *states, output = model(
            torch.tensor(TOKENS[:LENGTH])[None], output_hidden_states=True
        ).hidden_states
    files = open_model(directory)
    parameters = load_weights(files.plan, "float32", jnp.asarray)
    states = [state[0].numpy() for state in states]
    return Target(files, random_tensors(TARGET), parameters, states, output[0].numpy())


def open_head(directory: Path, method: Any, target: Target) -> ModelDrafterFiles:
    drafter = open_drafter(SpeculativeConfig(method=method, model=str(directory)), target.files)
    assert isinstance(drafter, ModelDrafterFiles)
    return drafter


def refusal(directory: Path, method: str, target: Target) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_head(directory, method, target)
    return str(caught.value)


def growing(
    layer: int, q_TNH: Any, k_TKH: Any, v_TKH: Any, pages: Any, options: AttentionOptions, /
) -> tuple[jax.Array, Any]:
    """Returns an `Attend` over keys and values in a row: pages are those before, None at first."""
    v_TKH = k_TKH[..., : options.value_width] if v_TKH is None else v_TKH
    k_CKH, v_CKH = (
        (k_TKH, v_TKH)
        if pages is None
        else (jnp.concatenate(pair) for pair in zip(pages, (k_TKH, v_TKH), strict=True))
    )
    group = q_TNH.shape[1] // k_CKH.shape[1]
    k_CNH, v_CNH = (jnp.repeat(array, group, axis=1) for array in (k_CKH, v_CKH))
    distance_TC = np.arange(len(k_CNH))[None] - np.arange(len(k_CNH))[-len(q_TNH) :, None]
    seen_TC = (distance_TC <= 0) & (distance_TC > -(options.sliding_window or len(k_CNH)))
    scores_NTC = jnp.einsum("TNH,CNH->NTC", q_TNH, k_CNH) * options.scale
    weights_NTC = jax.nn.softmax(jnp.where(seen_TC, scores_NTC, -jnp.inf), axis=-1)
    return jnp.einsum("NTC,CNH->TNH", weights_NTC, v_CNH), (k_CKH, v_CKH)


def both(drafter: ModelDrafterFiles, target: Target, dtype: str = "float32") -> Any:
    """Returns the parameters of a step."""
    return {
        "target": target.parameters,
        "drafter": drafter.load(dtype, jnp.asarray, progress=False),
    }


class Run(NamedTuple):
    """Holds what a drafter makes of a sequence, and then of one place more whose feature is its own
    output.
    """

    features: np.ndarray
    outputs: np.ndarray  # LENGTH places and one
    logits: np.ndarray


def run(drafter: ModelDrafterFiles, target: Target) -> Run:
    parameters = both(drafter, target)
    states = (
        [target.output]
        if not drafter.aux_layers
        else [target.states[layer] for layer in drafter.aux_layers]
    )
    graph, none = abstract(drafter.divide("float32"))[0], (None,) * drafter.kv.num_layers

    @functools.partial(jax.jit, static_argnames="fuse")
    def forward(
        parameters: Any, token_ids: Any, feature: Any, start: Any, pages: Any, fuse: bool
    ) -> Any:
        model = join(graph, parameters)
        feature = model.fuse(feature) if fuse else feature
        positions = start + jnp.arange(len(token_ids))
        output, pages = model(token_ids, feature, pages, ForwardContext(positions, growing))
        return feature, output, model.logits(output), pages

    first_place = 0 if drafter.aux_layers is None else 1  # which token stands at a place
    first, last = TOKENS[first_place:LENGTH], TOKENS[LENGTH : LENGTH + 1]
    states = [state[: len(first)] for state in states]
    features, outputs, logits, pages = forward(parameters, first, states, 0, none, fuse=True)
    *_, output, next_logits, _ = forward(
        parameters, last, outputs[-1:], len(first), pages, fuse=False
    )
    assert logits.dtype == jnp.float32 and logits.shape == (len(first), VOCAB)
    return Run(features, np.concatenate([outputs, output]), np.concatenate([logits, next_logits]))


def run_oracle(head: Any, features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the same of the oracle, over the whole sequence and then over the whole once more."""
    outputs, _ = head(TOKENS[1:LENGTH], features)
    return head(TOKENS[1 : LENGTH + 1], np.concatenate([features, outputs[-1:]]))


def assert_same(ours: np.ndarray, theirs: np.ndarray) -> None:
    assert theirs.std() > 0.3  # else a small difference says little
    np.testing.assert_allclose(ours, theirs, atol=TOLERANCE, rtol=TOLERANCE)


# --- EAGLE-1

NESTED = {
    "model_type": "eagle",
    "architectures": ["EAGLEModel"],
    "model": {**LAYERS, "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 5},
    "num_hidden_layers": 2,  # what stands outside outranks what stands inside
    "eagle_fc_bias": True,
    "truncated_vocab_size": VOCAB,
}


def check_eagle(directory: Path, head: Eagle, target: Target) -> ModelDrafterFiles:
    drafter = open_head(directory, "eagle", target)
    assert drafter.aux_layers == () and drafter.kv.num_layers == head.config.num_hidden_layers
    result = run(drafter, target)
    np.testing.assert_array_equal(result.features, target.output[: LENGTH - 1])
    outputs, logits = run_oracle(head, target.output[: LENGTH - 1].astype(np.float64))
    assert_same(result.outputs, outputs)
    assert_same(result.logits, logits)
    return drafter


@pytest.mark.parametrize(("fc_bias", "has_tables"), [(True, False), (False, True)])
def test_eagle_as_its_authors_publish_it(tmp_path, target, fc_bias, has_tables):
    """The tables are the target's, which are not held twice, also where the head's file has copies
    of them.
    """
    head = Eagle(fc_bias=fc_bias)
    head.take(target.tensors, "tokens", "head")
    tensors, tables = head.tensors(), ("lm_head.weight", "embed_tokens.weight")
    directory = write(tmp_path, AUTHORS, tensors, without=() if has_tables else tables)
    drafter = check_eagle(directory, head, target)
    num_stored = sum(tensor.size for name, tensor in tensors.items() if name not in tables)
    assert (
        drafter.num_bytes("float32") == 4 * num_stored
        and drafter.num_bytes("bfloat16") == 2 * num_stored
    )


def test_eagle_as_vllm_has_it(tmp_path, target):
    """There is a config in the config, a prefix, two layers and tables of its own."""
    head = Eagle(num_hidden_layers=2)
    tensors = head.tensors()
    prefixed = {
        name if name.startswith(("fc", "lm_head")) else f"model.{name}": tensor
        for name, tensor in tensors.items()
    }
    drafter = check_eagle(write(tmp_path, NESTED, prefixed), head, target)
    assert drafter.num_bytes("float32") == 4 * sum(tensor.size for tensor in tensors.values())


def test_eagle_with_biases_and_a_vocabulary_of_its_own(tmp_path, target):
    head = Eagle(attention_bias=True, mlp_bias=True)
    known = np.random.default_rng(3).permutation(VOCAB)[:50]
    head.table.weight = torch.nn.Parameter(head.table.weight[torch.tensor(known)])
    tensors = {**head.tensors(), "token_map": known}
    config = {**NESTED, "num_hidden_layers": 1, "truncated_vocab_size": 50}
    result = run(open_head(write(tmp_path, config, tensors), "eagle", target), target)
    _, logits = run_oracle(head, target.output[: LENGTH - 1].astype(np.float64))
    check_spread(result.logits, logits, known)


def check_spread(ours: np.ndarray, theirs: np.ndarray, known: np.ndarray) -> None:
    """Checks that logits over the head's tokens stand where those tokens are in the target's
    vocabulary.
    """
    assert_same(ours[:, known], theirs)
    assert np.isneginf(np.delete(ours, known, axis=1)).all()


# --- EAGLE-3

# the tokens that a head chooses among
KNOWN = np.sort(np.random.default_rng(4).permutation(VOCAB)[:60])
D2T = {"d2t": KNOWN - np.arange(len(KNOWN)), "t2d": np.isin(np.arange(VOCAB), KNOWN)}
EAGLE3 = {**AUTHORS, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": len(KNOWN)}


def with_midlayer(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}


def speculators(**fields: Any) -> dict[str, Any]:
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": LAYERS,
        "draft_vocab_size": len(KNOWN),
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": "someone/model", "architectures": ["LlamaForCausalLM"]},
        },
        **fields,
    }


def check_eagle3(
    directory: Path,
    head: Eagle3,
    target: Target,
    aux_layers: Sequence[int] = DEFAULT_LAYERS,
    known: np.ndarray = KNOWN,
) -> None:
    drafter = open_head(directory, "eagle3", target)
    assert (
        drafter.aux_layers == tuple(aux_layers)
        and drafter.kv.num_layers == head.config.num_hidden_layers
    )
    result = run(drafter, target)
    features = head.fuse(
        [target.states[layer][: LENGTH - 1].astype(np.float64) for layer in aux_layers]
    )
    outputs, logits = run_oracle(head, features)
    assert_same(result.features, features)
    assert_same(result.outputs, outputs)
    check_spread(result.logits, logits, known)


def test_eagle3_as_its_authors_publish_it(tmp_path, target):
    head = Eagle3(rows=len(KNOWN))
    head.take(target.tensors, "tokens")
    tensors = with_midlayer({**head.tensors(), **D2T})
    check_eagle3(write(tmp_path, EAGLE3, tensors, without=("embed_tokens.weight",)), head, target)


@pytest.mark.parametrize("norm_before_residual", few([True, False, None], [False, None]))
def test_eagle3_of_speculators(tmp_path, target, norm_before_residual):
    """A residual without a word on it is normed here, and nowhere else."""
    head = Eagle3(rows=len(KNOWN), norm_before_residual=norm_before_residual is not False)
    said = {} if norm_before_residual is None else {"norm_before_residual": norm_before_residual}
    config = speculators(eagle_aux_hidden_state_layer_ids=[1, 6, 0], **said)
    check_eagle3(
        write(tmp_path, config, {**head.tensors(), **D2T}), head, target, aux_layers=(1, 6, 0)
    )


def test_eagle3_with_all_its_norms_of_speculators(tmp_path, target):
    """It has two layers of Qwen3's kind with norms of heads, one with a window, four states, and
    all tokens in another order than the model's.
    """
    norms = {
        "norm_before_residual": True,
        "norm_before_fc": True,
        "fc_norm": True,
        "norm_output": True,
    }
    layers = {
        **LAYERS,
        "model_type": "qwen3",
        "head_dim": 20,
        "num_hidden_layers": 2,
        "attention_bias": True,
    }
    layers |= {
        "use_sliding_window": True,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    head = Eagle3(num_states=4, rows=VOCAB, **norms, **layers)
    order = np.random.default_rng(5).permutation(VOCAB)
    config = speculators(
        transformer_layer_config=layers, eagle_aux_hidden_state_layer_ids=[3, 1, 5, 5], **norms
    )
    config["draft_vocab_size"] = VOCAB
    tensors = {**head.tensors(), "d2t": order - np.arange(VOCAB)}
    check_eagle3(
        write(tmp_path, config, tensors), head, target, aux_layers=(3, 1, 5, 5), known=order
    )


@pytest.mark.parametrize(
    ("ids", "aux_layers"),
    [
        (
            {
                "eagle_config": {
                    "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
                    "use_aux_hidden_state": True,
                }
            },
            (2, 3, 4),
        ),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [5, 0, 3]}}, (6, 1, 4)),
        ({"eagle_aux_hidden_state_layer_ids": [5, 0, 3]}, (5, 0, 3)),
        (
            {
                "eagle_aux_hidden_state_layer_ids": [5, 0, 3],
                "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]},
            },
            (5, 0, 3),
        ),
        ({"eagle_aux_hidden_state_layer_ids": None, "eagle_config": None}, (2, 3, 4)),
    ],
)
def test_where_layer_ids_stand_says_what_they_count(tmp_path, target, ids, aux_layers):
    """They count layers that are entered at the top level, and layers that are left in
    `eagle_config`; the former outrank the latter.
    """
    tensors = {**Eagle3(rows=len(KNOWN)).tensors(), **D2T}
    assert (
        open_head(write(tmp_path, {**EAGLE3, **ids}, tensors), "eagle3", target).aux_layers
        == aux_layers
    )


def test_eagle3_narrower_than_its_target_that_takes_the_states_of_its_last_layer(tmp_path, target):
    """SpecForge's form.

    The state that leaves the last layer is no state of the oracle's, so here it is one like any
    other.
    """
    head = Eagle3(target_width=WIDTH, rows=VOCAB, hidden_size=32)
    config = {**EAGLE3, "hidden_size": 32, "target_hidden_size": WIDTH, "draft_vocab_size": VOCAB}
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [6, -1, 2]}
    directory = write(tmp_path, config, with_midlayer(head.tensors()))
    last = target._replace(states=[*target.states, target.states[0][::-1]])
    check_eagle3(directory, head, last, aux_layers=(7, 0, 3), known=np.arange(VOCAB))


def test_eagle3_without_a_head_takes_the_target_s(tmp_path, target):
    head = Eagle3()
    head.take(target.tensors, "head", "tokens")
    config = {**EAGLE3, "draft_vocab_size": VOCAB}
    directory = write(
        tmp_path, config, head.tensors(), without=("lm_head.weight", "embed_tokens.weight")
    )
    check_eagle3(directory, head, target, known=np.arange(VOCAB))


def test_a_head_on_what_the_target_itself_computes(tmp_path, target):
    """The whole chain is in one jitted function: the model with auxiliary hidden states, features,
    and the head with the model's tables.
    """
    head = Eagle3(rows=len(KNOWN))
    head.take(target.tensors, "tokens")
    directory = write(tmp_path, EAGLE3, {**head.tensors(), **D2T}, without=("embed_tokens.weight",))
    drafter, files = open_head(directory, "eagle3", target), target.files
    parameters = both(drafter, target)
    assert parameters["drafter"]["tokens"] is None
    graph, _ = abstract_model(files.family, files.spec, "float32")

    @jax.jit
    def forward(parameters: Any, token_ids: jax.Array) -> jax.Array:
        positions = jnp.arange(LENGTH)
        model = nnx.merge(graph, parameters["target"])
        context = ForwardContext(positions, growing, aux_layers=drafter.aux_layers)
        _, _, states = model(token_ids[:LENGTH], (None,) * 7, context)
        module = join(abstract(drafter.divide("float32"))[0], parameters)
        output, _ = module(
            token_ids[1:], module.fuse(states), (None,), ForwardContext(positions, growing)
        )
        return module.logits(output)

    features = head.fuse([target.states[layer].astype(np.float64) for layer in DEFAULT_LAYERS])
    _, logits = head(TOKENS[1:], features)
    check_spread(np.asarray(forward(parameters, TOKENS)), logits, KNOWN)


def test_a_head_in_half_precision(tmp_path, target):
    """Its weights are kept so; logits are in float32, and token ids are what they are."""
    head = Eagle3(rows=len(KNOWN))
    drafter = open_head(write(tmp_path, EAGLE3, {**head.tensors(), **D2T}), "eagle3", target)
    parameters = both(drafter, target, "bfloat16")
    graph, states = (
        abstract(drafter.divide("bfloat16"))[0],
        [jnp.bfloat16(target.states[layer]) for layer in DEFAULT_LAYERS],
    )

    @jax.jit
    def forward(parameters: Any) -> Any:
        module = join(graph, parameters)
        output, _ = module(
            jnp.asarray(TOKENS[1:]),
            module.fuse(states),
            (None,),
            ForwardContext(jnp.arange(LENGTH), growing),
        )
        return output, module.logits(output)

    output, logits = forward(parameters)
    assert output.dtype == jnp.bfloat16 and logits.dtype == jnp.float32
    _, expected_logits = head(
        TOKENS[1:], head.fuse([target.states[layer].astype(np.float64) for layer in DEFAULT_LAYERS])
    )
    assert np.abs(logits[:, KNOWN] - expected_logits).std() < 0.1 * expected_logits.std()


# --- what does not fit


def change(**fields: Any) -> Callable[[dict[str, Any], dict[str, np.ndarray]], None]:
    return lambda config, tensors: config.update(fields)


def store(
    name: str, tensor: np.ndarray | None
) -> Callable[[dict[str, Any], dict[str, np.ndarray]], None]:
    def change_field(config: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor

    return change_field


IDS = "eagle_aux_hidden_state_layer_ids"
WRONG: dict[str, tuple[Any, list[str]]] = {
    "width": (change(hidden_size=40), ["hidden_size is 40", "width is 48"]),
    "width of states": (change(target_hidden_size=64), ["target_hidden_size is 64", "width is 48"]),
    "vocabulary": (change(vocab_size=120), ["vocab_size is 120", "model's is 131"]),
    "own vocabulary": (change(draft_vocab_size=61), ["draft_vocab_size is 61", "d2t has 60"]),
    "no map": (store("d2t", None), ["draft_vocab_size is 60", "there is no d2t", "lm_head.weight"]),
    "map of other length": (
        store("d2t", np.arange(59)),
        ["d2t has 59 tokens", "(60, 48)", "(59, 48)"],
    ),
    "map beyond": (store("d2t", np.full(60, 72)), ["'d2t'", "end at 130"]),
    "map with doubles": (store("d2t", -np.arange(60)), ["'d2t'", "twice"]),
    "map of floats": (store("d2t", np.zeros(60, np.float32)), ["'d2t'", "F32"]),
    "layer entered": (change(**{IDS: [1, 2, 8]}), [IDS, "[1, 2, 8]", "inputs", "has 7 layers"]),
    "layer left": (
        change(eagle_config={IDS: [1, 2, 7]}),
        [IDS, "[1, 2, 7]", "outputs", "has 7 layers"],
    ),
    "layer before": (change(**{IDS: [1, 2, -1]}), [IDS, "-1"]),
    "no layer": (change(**{IDS: [1, 2, True]}), [IDS, "True"]),
    "two states": (change(**{IDS: [1, 2]}), ["fc.weight", "(48, 144)", "(48, 96)"]),
    "missing": (store("norm.weight", None), ["'norm.weight'", "missing"]),
    "unexpected": (
        store("layers.0.extra.weight", np.zeros(3, np.float32)),
        ["'layers.0.extra.weight'", "unexpected"],
    ),
    "norm that no config asks for": (
        store("input_norm.weight", np.ones(144, np.float32)),
        ["'input_norm.weight'"],
    ),
    "norm that is missing": (
        change(norm_before_fc=True),
        ["'input_norm.weight'", "(144,)", "missing"],
    ),
    "flag": (change(norm_before_residual="yes"), ["norm_before_residual", "'yes'"]),
    "no states": (
        change(eagle_config={"use_aux_hidden_state": False}),
        ["use_aux_hidden_state = False"],
    ),
    "other norms": (change(add_para_norm=True), ["add_para_norm = True"]),
    "window": (change(sliding_window=512), ["sliding window"]),
    "layers of another kind": (
        change(model_type="gemma"),
        ["'gemma'", "llama, mistral, qwen2, qwen3"],
    ),
    "speculator of another kind": (
        change(speculators_model_type="mlp"),
        ["speculators_model_type 'mlp'"],
    ),
    "speculator without layers": (
        change(speculators_model_type="eagle3"),
        ["transformer_layer_config"],
    ),
    "quantised": (change(quantization_config={"bits": 4}), ["quantization_config"]),
    "huge": (change(intermediate_size=2**40), ["intermediate_size", str(2**40)]),
    "huge inside": (
        change(
            speculators_model_type="eagle3",
            transformer_layer_config={**LAYERS, "intermediate_size": 2**40},
        ),
        ["intermediate_size", str(2**40)],
    ),
    "twice": (store("midlayer.hidden_norm.weight", np.ones(48, np.float32)), ["one parameter"]),
}


@functools.cache
def head_tensors() -> dict[str, np.ndarray]:
    return {**Eagle3(rows=len(KNOWN)).tensors(), **D2T}


@pytest.mark.parametrize("name", WRONG)
def test_a_head_that_does_not_fit_is_refused_with_the_numbers(tmp_path, target, name):
    wrong, words = WRONG[name]
    config, tensors = dict(EAGLE3), dict(head_tensors())
    open_head(write(tmp_path / "right", config, tensors), "eagle3", target)
    wrong(config, tensors)
    message = refusal(write(tmp_path / "wrong", config, tensors), "eagle3", target)
    assert all(word in message for word in words), message


def test_everything_that_is_wrong_comes_at_once(tmp_path, target):
    config = {**EAGLE3, "vocab_size": 99, "target_hidden_size": 7}
    message = refusal(
        write(tmp_path, config, head_tensors(), without=("norm.weight", "fc.weight")),
        "eagle3",
        target,
    )
    assert (
        "is 99" in message
        and "is 7" in message
        and "'norm.weight'" in message
        and "'fc.weight'" in message
    )


def test_a_head_of_the_other_method_is_reported_as_such(tmp_path, target):
    first, third = (
        write(tmp_path / "1", AUTHORS, Eagle().tensors()),
        write(tmp_path / "3", EAGLE3, head_tensors()),
    )
    assert "of method 'eagle', not 'eagle3'" in refusal(first, "eagle3", target)
    assert "of method 'eagle3', not 'eagle'" in refusal(third, "eagle", target)


def test_a_table_that_only_the_target_has_must_fit(tmp_path, target):
    """A narrower head cannot do with the target's embedding, nor a head with a vocabulary of its
    own with the target's.
    """
    narrow = Eagle3(target_width=WIDTH, rows=len(KNOWN), hidden_size=32)
    config = {**EAGLE3, "hidden_size": 32, "target_hidden_size": WIDTH}
    directory = write(
        tmp_path / "a", config, {**narrow.tensors(), **D2T}, without=("embed_tokens.weight",)
    )
    message = refusal(directory, "eagle3", target)
    assert "no embed_tokens.weight" in message and "(131, 48)" in message and "(131, 32)" in message
    message = refusal(
        write(tmp_path / "b", EAGLE3, head_tensors(), without=("lm_head.weight",)), "eagle3", target
    )
    assert "no lm_head.weight" in message and "(131, 48)" in message and "(60, 48)" in message


def test_without_layer_ids_a_target_of_two_layers_is_refused(tmp_path):
    shallow = open_model(random_checkpoint(tmp_path / "target", {**TARGET, "num_hidden_layers": 2}))
    directory = write(tmp_path / "head", EAGLE3, head_tensors())
    with pytest.raises(CheckpointError, match=r"\[2, 1, -1\] are inputs of layers .* has 2 layers"):
        open_drafter(SpeculativeConfig(method="eagle3", model=str(directory)), shallow)


def test_files_without_a_tensor_are_refused(tmp_path, target):
    assert "of method 'eagle', not 'eagle3'" in refusal(
        write(tmp_path, AUTHORS, {}), "eagle3", target
    )
    assert "'fc.weight' of shape (48, 96) is missing" in refusal(tmp_path, "eagle", target)


def test_pickles_are_refused_unopened(tmp_path, target):
    (tmp_path / "config.json").write_text(json.dumps(AUTHORS))
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    assert "pickled ('pytorch_model.bin')" in refusal(tmp_path, "eagle", target)


# --- draft models


@pytest.mark.parametrize(
    "name", few(["llama-tied-bias", "gpt2-usual", "qwen3-windows"], ["qwen3-windows"])
)
def test_a_draft_model_has_the_logits_of_transformers(tmp_path, target, name):
    model = save_model(name, tmp_path)
    drafter = open_head(tmp_path, "draft_model", target)
    assert drafter.aux_layers is None and drafter.kv == open_model(tmp_path).spec.kv
    assert drafter.num_bytes("float32") == 4 * sum(
        parameter.numel() for parameter in model.parameters()
    )
    result = run(drafter, target)
    assert result.features is None
    with torch.no_grad():
        assert_same(result.logits, model(torch.tensor(TOKENS)[None]).logits[0].numpy())


@pytest.mark.parametrize("vocab_size", [VOCAB - 20, VOCAB + 20])
def test_tables_of_one_vocabulary_may_be_padded_differently(tmp_path, target, vocab_size):
    """The tokenizers tell it; the one with the longer table may name some of the padding."""
    model = save_model("llama-grouped", tmp_path / "draft", vocab_size=vocab_size)
    message = refusal(tmp_path / "draft", "draft_model", target)  # the target has no tokenizer
    assert f"has {vocab_size} tokens, and the model has {VOCAB}" in message
    save_model("llama-grouped", tmp_path / "target")
    padded = target._replace(files=open_model(tmp_path / "target"))
    drafter = open_head(tmp_path / "draft", "draft_model", padded)
    tokens = TOKENS % min(vocab_size, VOCAB)
    graph, none = abstract(drafter.divide("float32"))[0], (None,) * drafter.kv.num_layers

    @jax.jit
    def forward(parameters: Any, token_ids: jax.Array) -> jax.Array:
        module = join(graph, parameters)
        output, _ = module(
            token_ids, None, none, ForwardContext(jnp.arange(len(token_ids)), growing)
        )
        return module.logits(output)

    ours = forward(both(drafter, target), tokens)
    with torch.no_grad():
        theirs = model(torch.tensor(tokens)[None]).logits[0].numpy()
    check_spread(np.asarray(ours), theirs[:, :VOCAB], np.arange(min(vocab_size, VOCAB)))


def test_a_draft_model_with_other_tokens_is_refused(tmp_path, target):
    save_model("llama-grouped", tmp_path / "target")
    save_model("llama-grouped", tmp_path / "draft", vocab_size=100)
    other = (tmp_path / "draft" / "tokenizer.json").read_text().replace('"t7"', '"seven"')
    (tmp_path / "draft" / "tokenizer.json").write_text(other)
    message = refusal(
        tmp_path / "draft", "draft_model", target._replace(files=open_model(tmp_path / "target"))
    )
    assert "has 100 tokens, and the model has 131" in message and "as 7" in message


def test_other_methods_have_no_drafter_here(target):
    assert open_drafter(SpeculativeConfig(method="ngram"), target.files) is None
