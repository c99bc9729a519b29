"""The files of sentence-transformers decide how texts become vectors, against states of
transformers and float64.

What each module computes is written down here once more, from the library's documentation (its own
numbers were the same).
"""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxpage import LLM
from jaxpage.checkpoints import convert, read_embedding_files
from jaxpage.engine.texts import (
    ByVectors,
    TextEmbedding,
    reranker_of,
)
from jaxpage.errors import CheckpointError
from jaxpage.serving.wire.embeddings import open_embeddings
from jaxpage.serving.wire.errors import ApiError
from jaxpage.serving.wire.rerank import open_rerank
from tests.support import wire
from tests.support.engines import make_llm

torch = pytest.importorskip("torch", reason="the oracle is transformers on torch")

from tests.support.hf_models import make_model  # noqa: E402
from tests.support.sweeps import few  # noqa: E402
from tests.test_reranking import small_tokenizer  # noqa: E402

WIDTH = 48
RANDOM = np.random.default_rng(7)
QUERY = "where is the cat"
DOCUMENTS = ["the cat is here", "a dog", "yes no " * 90]
LONG_PROMPT = "find " * 140
TRANSFORMER = {"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"}
NEW = "sentence_transformers.sentence_transformer.modules"
MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
OLDER = (
    *("pooling_mode_cls_token", "pooling_mode_max_tokens", "pooling_mode_mean_tokens"),
    *("pooling_mode_mean_sqrt_len_tokens", "pooling_mode_weightedmean_tokens"),
    "pooling_mode_lasttoken",
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    tokenizer = small_tokenizer()
    directory = tmp_path_factory.mktemp("model")
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 1024, "head_dim": 16}
    model = make_model("qwen3-grouped", tie_word_embeddings=True, **sizes)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory, model, tokenizer


@pytest.fixture(scope="module")
def llm(checkpoint):
    with make_llm(checkpoint[0], max_model_len=256 * 4) as made:
        yield made


def write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def write_files(
    directory: Path,
    pooling: Any,
    layers: tuple[Any, ...] = (),
    texts: dict[str, Any] | None = None,
    package: str = "sentence_transformers.models",
) -> None:
    """Writes modules.json with what it names.

    A layer is "Normalize" or the config and tensors of a Dense.
    """
    write_json(directory / "1_Pooling" / "config.json", pooling)
    modules = [TRANSFORMER, {"idx": 1, "path": "1_Pooling", "type": f"{package}.Pooling"}]
    for index, layer in enumerate(layers, 2):
        kind = layer if isinstance(layer, str) else "Dense"
        path = f"{index}_{kind}"
        modules.append({"idx": index, "path": path, "type": f"{package}.{kind}"})
        if kind == "Dense":
            write_json(directory / path / "config.json", layer[0])
            save_file(layer[1], directory / path / "model.safetensors")
    write_json(directory / "modules.json", modules)
    if texts is not None:
        write_json(directory / "config_sentence_transformers.json", texts)


def dense(num_in: int, num_out: int, activation: str, **more: Any) -> Any:
    config = {
        **{"in_features": num_in, "out_features": num_out, "bias": more.get("bias", True)},
        **{"activation_function": f"torch.nn.modules.{activation}", **more},
    }
    tensors = {"linear.weight": RANDOM.standard_normal((num_out, num_in)).astype(np.float32) / 7}
    if config["bias"]:
        tensors["linear.bias"] = RANDOM.standard_normal(num_out).astype(np.float32)
    if more.get("use_residual") and num_in != num_out:
        tensors["residual.weight"] = RANDOM.standard_normal((num_out, num_in)).astype(np.float32)
    return config, tensors


def apply_layer(layer: Any, x: np.ndarray) -> np.ndarray:
    if layer == "Normalize":
        return x / np.linalg.norm(x)
    if layer == "Dropout":
        return x
    config, tensors = layer
    matmul = tensors["linear.weight"].astype(float) @ x + tensors.get("linear.bias", 0.0)
    out = {
        "Tanh": np.tanh(matmul),
        "Identity": matmul,
        "ReLU": np.maximum(matmul, 0),
        "Sigmoid": 1 / (1 + np.exp(-matmul)),
        "SiLU": matmul / (1 + np.exp(-matmul)),
        "GELU": np.array([0.5 * v * (1 + math.erf(v / math.sqrt(2))) for v in matmul]),
    }[config["activation_function"].rpartition(".")[2]]
    if config.get("use_residual"):
        out = out + tensors.get("residual.weight", np.eye(len(x))) @ x
    return out


def pool(states_TD: np.ndarray, mode: str) -> np.ndarray:
    """Returns the vector of states that count; only `weightedmean` needs positions."""
    return {
        "cls": states_TD[0],
        "max": states_TD.max(0),
        "mean": states_TD.mean(0),
        "mean_sqrt_len_tokens": states_TD.sum(0) / math.sqrt(len(states_TD)),
        "lasttoken": states_TD[-1],
    }[mode]


@torch.no_grad()
def vector_of(
    checkpoint: Any, text: str, modes: Any, layers: tuple[Any, ...] = (), skipped: str = ""
) -> np.ndarray:
    """Returns the vector of a text, without the tokens of the text that it begins with."""
    _, model, tokenizer = checkpoint
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    states_TD = model.model(ids).last_hidden_state[0].double().numpy()
    # The tokenizer ends each text with a token, which ends no prompt.
    first = len(tokenizer(skipped)["input_ids"]) - 1 if skipped else 0
    weights = np.arange(1, len(states_TD) + 1)[first:, None]
    parts = [
        (states_TD[first:] * weights).sum(0) / weights.sum()
        if mode == "weightedmean"
        else pool(states_TD[first:], mode)
        for mode in modes
    ]
    x = np.concatenate(parts)
    for layer in layers:
        x = apply_layer(layer, x)
    return x


def use(llm: LLM, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets an engine embed as the files of another directory say."""
    embedding = TextEmbedding(read_embedding_files(directory), llm.tokenizer)
    monkeypatch.setattr(llm, "_embedding", embedding)


def near(vector: Any, expected: Any) -> None:
    expected = np.asarray(expected)
    np.testing.assert_allclose(vector, expected, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("form", "mode"),
    few(
        itertools.product(["older", "compact", "list"], MODES),
        [*(("older", mode) for mode in MODES), ("compact", "cls"), ("list", "weightedmean")],
    ),
)
def test_the_pooling_is_that_of_the_files(form, mode, checkpoint, llm, tmp_path, monkeypatch):
    pooling: dict[str, Any] = {"embedding_dimension": WIDTH, "pooling_mode": mode}
    modes = [mode]
    if form == "older":
        pooling = dict(zip(OLDER, (each == mode for each in MODES), strict=True))
    if form == "list":
        modes = pooling["pooling_mode"] = ["mean", mode]
    write_files(tmp_path, pooling, package=NEW if form == "compact" else TRANSFORMER["type"][:28])
    use(llm, tmp_path, monkeypatch)
    vectors = llm.embed(DOCUMENTS, use_tqdm=False)
    near(vectors, [vector_of(checkpoint, text, modes) for text in DOCUMENTS])
    unit = llm.embed(DOCUMENTS[0], 20, normalize=True, use_tqdm=False)[0]
    cut = vector_of(checkpoint, DOCUMENTS[0], modes)[:20]
    near(unit, cut / np.linalg.norm(cut))


LAYERS: dict[str, tuple[Any, ...]] = {
    "none": (),
    "unit": ("Normalize",),
    "dense": (dense(WIDTH, 64, "activation.Tanh"), "Dropout"),
    "as in EmbeddingGemma": (
        dense(WIDTH, 80, "linear.Identity", bias=False),
        dense(80, WIDTH, "linear.Identity", bias=False),
        "Normalize",
    ),
    "unit before": ("Normalize", dense(WIDTH, 30, "activation.GELU")),
    "residual": (
        dense(WIDTH, WIDTH, "activation.SiLU", use_residual=True),
        dense(WIDTH, 24, "activation.Sigmoid", use_residual=True),
        dense(24, 24, "activation.ReLU"),
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_vector_goes_through_the_modules(name, checkpoint, llm, tmp_path, monkeypatch):
    layers = LAYERS[name]
    write_files(tmp_path, {"pooling_mode": "mean"}, layers)
    use(llm, tmp_path, monkeypatch)
    expected = [vector_of(checkpoint, text, ["mean"], layers) for text in DOCUMENTS]
    near(llm.embed(DOCUMENTS, use_tqdm=False), expected)
    plain = layers[:-1] if layers[-1:] == ("Normalize",) else layers
    near(
        llm.embed(DOCUMENTS[0], normalize=False, use_tqdm=False)[0],
        vector_of(checkpoint, DOCUMENTS[0], ["mean"], plain),
    )
    last = vector_of(checkpoint, DOCUMENTS[1], ["lasttoken"], layers)
    near(llm.embed(DOCUMENTS[1], pooling="last", use_tqdm=False)[0], last)
    # On the wire the same, and a width of its own.
    embedding = TextEmbedding(read_embedding_files(tmp_path), llm.tokenizer)
    context = wire.context(embedding=embedding)
    answer = open_embeddings({"model": "demo", "input": DOCUMENTS[0]}, context)
    raw = vector_of(checkpoint, DOCUMENTS[0], ["mean"]).astype(np.float32)
    answer.check_width(WIDTH)
    near(answer.whole([raw], 1)["data"][0]["embedding"], expected[0])
    assert embedding.files.width(WIDTH) == len(expected[0])


PROMPTS = {"query": "find ", "passage": "yes ", "sorting": LONG_PROMPT}
# Documents come after the first of the names "document", "passage" and "corpus" that the file has.
DOCUMENT_PROMPTS: list[tuple[dict[str, Any], str]] = [
    (PROMPTS, "yes "),
    ({"document": "", "passage": "yes "}, ""),
    ({"document": None, "query": None}, ""),
    ({"corpus": "no "}, "no "),
    ({}, ""),
]


@pytest.mark.parametrize(
    ("include", "mode"),
    few(
        itertools.product([True, False], ["mean", "weightedmean", "cls", "max"]),
        [(True, "weightedmean"), *((False, mode) for mode in ("mean", "weightedmean", "cls"))],
    ),
)
def test_prompts_come_before_texts_and_may_not_count(
    mode, include, checkpoint, llm, tmp_path, monkeypatch
):
    texts = {"prompts": PROMPTS, "default_prompt_name": "sorting", "similarity_fn_name": "dot"}
    write_files(tmp_path, {"pooling_mode": mode, "include_prompt": include}, (), texts)
    use(llm, tmp_path, monkeypatch)
    prompts = ["query", "passage", "passage", "passage"]
    vectors = [
        vector_of(checkpoint, PROMPTS[name] + text, [mode], (), "" if include else PROMPTS[name])
        for name, text in zip(prompts, [QUERY, *DOCUMENTS], strict=True)
    ]
    reranker = reranker_of(llm._embedding)
    assert isinstance(reranker, ByVectors)
    scores = {each.index: each.relevance_score for each in llm.rerank(QUERY, DOCUMENTS)}
    near([scores[index] for index in range(3)], np.stack(vectors[1:]) @ vectors[0])
    # A text that is neither query nor document comes after the default prompt; token ids do not.
    ids = llm.tokenizer(DOCUMENTS[1])["input_ids"]
    inputs = [DOCUMENTS[1], {"prompt": DOCUMENTS[1]}, ids]
    document = vector_of(
        checkpoint, LONG_PROMPT + DOCUMENTS[1], [mode], (), "" if include else LONG_PROMPT
    )
    plain = vector_of(checkpoint, DOCUMENTS[1], [mode])
    near(llm.embed(inputs, use_tqdm=False), [document, document, plain])


@pytest.mark.parametrize(("prompts", "expected"), DOCUMENT_PROMPTS)
def test_documents_have_a_prompt(prompts, expected, tmp_path):
    write_files(tmp_path, {"pooling_mode": "mean"}, (), {"prompts": prompts})
    assert read_embedding_files(tmp_path).document_prompt == expected


@pytest.mark.parametrize("similarity", [None, "cosine", "dot", "euclidean", "manhattan"])
def test_the_similarity_is_that_of_the_files(similarity, tmp_path):
    write_files(tmp_path, {"pooling_mode": "mean"}, (), {"similarity_fn_name": similarity})
    reranker = reranker_of(TextEmbedding(read_embedding_files(tmp_path)))
    assert isinstance(reranker, ByVectors)
    a, b = RANDOM.standard_normal((2, 9)).astype(np.float32)
    expected = {
        "dot": a @ b,
        "euclidean": -np.sqrt(((a - b) ** 2).sum()),
        "manhattan": -np.abs(a - b).sum(),
    }.get(similarity, a @ b / np.sqrt((a @ a) * (b @ b)))
    near(reranker.scores([("query", "document")], [a, b]), [expected])


def module(kind: str, path: str) -> dict[str, Any]:
    return {"type": f"sentence_transformers.models.{kind}", "path": path}


POOLED = [TRANSFORMER, module("Pooling", "1_Pooling")]
REFUSED: dict[str, tuple[str, Any, str]] = {
    "pooling": (
        "1_Pooling/config.json",
        {"pooling_mode": "first"},
        "pooling_mode = 'first' is not",
    ),
    "a way of another library": (
        "1_Pooling/config.json",
        {"pooling_mode_first_token": True},
        "'pooling_mode_first_token' is not one of",
    ),
    "a number": ("1_Pooling/config.json", {"pooling_mode": 3}, "must be a name or a list"),
    "no list": ("modules.json", {}, "holds no JSON list"),
    "a module of its own": (
        "modules.json",
        [*POOLED, {"type": "custom.Head", "path": "2_Head"}],
        "module 2 is 'custom.Head', and supported are",
    ),
    "code of its own": (
        "modules.json",
        [{"type": "custom_st.Transformer", "path": ""}],
        "not 'custom_st.Transformer' in ''",
    ),
    "no pooling": ("modules.json", [TRANSFORMER], "has no Pooling"),
    "a norm": ("modules.json", [*POOLED, module("LayerNorm", "2_LayerNorm")], "is LayerNorm,"),
    "another directory": ("modules.json", [module("Transformer", "0_T")], "in '0_T'"),
    "a path that leaves": (
        "modules.json",
        [TRANSFORMER, module("Pooling", "../other")],
        "is a path that leaves the directory",
    ),
    "a dense path that leaves": (
        "modules.json",
        [*POOLED, module("Dense", "/etc")],
        "is a path that leaves the directory",
    ),
    "pickled weights": ("2_Dense/config.json", {}, "has no model.safetensors, and pickled"),
    "an activation": (
        "2_Dense/config.json",
        {"activation_function": "os.system"},
        "activation_function = 'os.system' is not one of",
    ),
    "a default without a text": (
        "config_sentence_transformers.json",
        {"default_prompt_name": "q"},
        "default_prompt_name = 'q' is not one of",
    ),
    "prompts": ("config_sentence_transformers.json", {"prompts": ["q"]}, "an object of strings"),
    "a similarity": (
        "config_sentence_transformers.json",
        {"similarity_fn_name": "hamming"},
        "similarity_fn_name = 'hamming' is not one of",
    ),
    "lower case": ("sentence_bert_config.json", {"do_lower_case": True}, "do_lower_case = true"),
    "a flag": ("1_Pooling/config.json", {"include_prompt": 1}, "include_prompt must be"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_supported_is_refused_for_embeddings_alone(case, llm, tmp_path, monkeypatch):
    """One line refuses it before anything is compiled; the model generates text all the same."""
    file, content, text = REFUSED[case]
    write_files(tmp_path, {"pooling_mode": "mean"})
    if file.startswith("2_Dense"):
        write_json(tmp_path / "modules.json", [*POOLED, module("Dense", "2_Dense")])
    write_json(tmp_path / file, content)
    use(llm, tmp_path, monkeypatch)
    monkeypatch.setattr(llm, "_embedder", None)
    reranker = reranker_of(llm._embedding)
    context = wire.context(embedding=llm._embedding, reranker=reranker)
    requested = {"model": "demo", "query": "a", "documents": ["x"]}
    for error, call in (
        (CheckpointError, lambda: llm.embed("x")),
        (CheckpointError, lambda: llm.rerank("a", ["x"])),
        (ApiError, lambda: open_embeddings({"model": "demo", "input": "x"}, context)),
        (ApiError, lambda: open_rerank(requested, context)),
    ):
        with pytest.raises(error) as caught:
            call()
        message = getattr(caught.value, "message", str(caught.value))
        assert text in message and "\n" not in message


def test_a_weight_that_does_not_fit_is_an_error(tmp_path):
    write_files(tmp_path, {"pooling_mode": "mean"}, (dense(9, 4, "activation.Tanh"),))
    files = read_embedding_files(tmp_path)
    with pytest.raises(CheckpointError, match="takes vectors of 9 numbers, and gets 48"):
        files.width(WIDTH)
    context = wire.context(embedding=TextEmbedding(files))
    answer = open_embeddings({"model": "demo", "input": "x"}, context)
    with pytest.raises(ApiError, match="takes vectors of 9"):
        answer.check_width(WIDTH)
    write_files(tmp_path, {"pooling_mode": "mean"}, (dense(9, 4, "activation.Tanh"),))
    write_json(tmp_path / "2_Dense" / "config.json", {"in_features": 9, "out_features": 5})
    assert "linear.weight must have the shape (5, 9)" in read_embedding_files(tmp_path).refusal


@pytest.mark.parametrize("dimensions", [0, True, 49, "8"])
def test_dimensions_are_a_part_of_the_vector(dimensions, llm):
    with pytest.raises(ValueError, match="dimensions"):
        llm.embed("x", dimensions, use_tqdm=False)


def test_convert_takes_the_files_along(checkpoint, tmp_path):
    layers = (dense(WIDTH, 8, "activation.Tanh"), "Normalize")
    for file in checkpoint[0].iterdir():
        (tmp_path / "from").mkdir(exist_ok=True)
        (tmp_path / "from" / file.name).write_bytes(file.read_bytes())
    write_files(tmp_path / "from", {"pooling_mode": "cls"}, layers, {"prompts": {"query": "q: "}})
    there = read_embedding_files(convert(tmp_path / "from", tmp_path / "to", progress=False))
    here = read_embedding_files(tmp_path / "from")
    assert (there.modes, there.prompts, there.refusal) == (("cls",), {"query": "q: "}, "")
    x = RANDOM.standard_normal(WIDTH).astype(np.float32)
    np.testing.assert_array_equal(there.finish(x), here.finish(x))
