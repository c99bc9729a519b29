"""Encoders against transformers and the rules of sentence-transformers: vectors, scores of pairs,
bits, and what they refuse.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpage import LLM, AsyncLLM
from jaxpage.cli import doctor, main
from jaxpage.device.encoder import TextEncoder
from jaxpage.device.encoder_step import (
    attend_in_cpp,
    attend_in_xla,
    pack_texts,
    split_inputs,
)
from jaxpage.device.hardware.backends import Backend
from jaxpage.device.inputs import stream_sizes
from jaxpage.engine.texts import (
    Truncation,
    encode,
)
from jaxpage.errors import CheckpointError, ConfigError, UnsupportedError
from jaxpage.models import ENCODERS, load_family
from jaxpage.models.bert import Bert
from pallas_kernels import AttentionOptions

torch = pytest.importorskip("torch", reason="the oracle is transformers on torch")

import transformers  # noqa: E402

from tests.support.encoders import (  # noqa: E402
    SIZES,
    random_texts,
    save_encoder,
    states_of,
    write_json,
)
from tests.support.sweeps import examples, few  # noqa: E402
from tests.support.word_tokenizer import POSITIONS, word_tokenizer  # noqa: E402

pytestmark = pytest.mark.usefixtures("compiled_when_used")

ROBERTA = {"max_position_embeddings": POSITIONS + 1, "pad_token_id": 0}
# The config of each architecture that is tested: different heads, activations, tables.
MODERN = {
    **{"max_position_embeddings": POSITIONS, "local_attention": 12, "num_hidden_layers": 3},
    **{
        "pad_token_id": 0,
        "cls_token_id": 1,
        "sep_token_id": 2,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "global_attn_every_n_layers": 2,
}
BERT = {
    "model_type": "bert",
    "architectures": ["BertModel"],
    **{"vocab_size": 60, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 8},
}
# Heads of 16, which the kernel for CPUs takes; those of other forms are 12 wide.
FORMS: dict[str, dict[str, Any]] = {
    "BertModel": {"max_position_embeddings": POSITIONS, "hidden_size": 64},
    "BertForMaskedLM": {"max_position_embeddings": POSITIONS, "hidden_act": "relu"},
    "RobertaModel": {**ROBERTA, "pad_token_id": 3, "max_position_embeddings": POSITIONS + 4},
    "XLMRobertaModel": {**ROBERTA, "type_vocab_size": 1, "layer_norm_eps": 1e-5},
    "ModernBertModel": {**MODERN, "hidden_size": 64, "norm_bias": True},
    "ModernBertForMaskedLM": {**MODERN, "attention_bias": True, "mlp_bias": True},
    "NomicBertModel": {"max_position_embeddings": POSITIONS, "hidden_size": 64},
    "MPNetModel": {"max_position_embeddings": POSITIONS + 2, "hidden_size": 64},
}
PAIRS: dict[str, dict[str, Any]] = {
    "BertForSequenceClassification": {"max_position_embeddings": POSITIONS},
    "RobertaForSequenceClassification": ROBERTA,
    "XLMRobertaForSequenceClassification": ROBERTA,
    "ModernBertForSequenceClassification": {**MODERN, "classifier_pooling": "mean"},
    "MPNetForSequenceClassification": {"max_position_embeddings": POSITIONS + 2},
}
LENGTHS = (1, 2, 20, 32, 33, 64, 65, 100, POSITIONS)
SETTINGS: dict[str, Any] = {"use_tqdm": False, "verbose": False, "max_num_batched_tokens": 128}
QUERY = "where is the cat"
DOCUMENTS = ["the cat is here", "a dog", "the cat", "find the cat here , dog . " * 3]


def open_llm(directory: Path, **settings: Any) -> LLM:
    return LLM(str(directory), **{**SETTINGS, **settings})


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp("bert")
    return directory, save_encoder(directory, "BertModel", **FORMS["BertModel"])


@pytest.fixture(scope="module")
def llm(checkpoint: tuple[Path, Any]) -> Iterator[LLM]:
    with open_llm(checkpoint[0]) as made:
        yield made


@pytest.fixture(scope="module")
def ranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LLM, Any]]:
    directory = tmp_path_factory.mktemp("pairs")
    model = save_encoder(
        directory,
        "BertForSequenceClassification",
        num_labels=1,
        **PAIRS["BertForSequenceClassification"],
    )
    with open_llm(directory) as made:
        yield made, model


@pytest.mark.parametrize(
    "architecture",
    few(
        FORMS,
        # Bert is the model of most tests below.
        ["RobertaModel", "ModernBertForMaskedLM", "NomicBertModel", "MPNetModel"],
    ),
)
def test_states_are_those_of_transformers(architecture: str, tmp_path: Path) -> None:
    model = save_encoder(tmp_path, architecture, **FORMS[architecture])
    texts = random_texts(LENGTHS)
    with open_llm(tmp_path) as llm:
        pooled = {
            mode: llm.embed(texts, pooling=mode, normalize=False, use_tqdm=False)
            for mode in ("mean", "cls", "last")
        }
    for index, text in enumerate(texts):
        states_TD = states_of(model, text)
        expected = {"mean": states_TD.mean(axis=0), "cls": states_TD[0], "last": states_TD[-1]}
        for mode, vector in expected.items():
            tolerance = 1e-5 * np.abs(states_TD).max()
            np.testing.assert_allclose(pooled[mode][index], vector, rtol=0, atol=tolerance)


def test_a_padding_token_in_a_text_takes_no_position(tmp_path: Path) -> None:
    model = save_encoder(tmp_path, "RobertaModel", **FORMS["RobertaModel"])
    text = [9, 3, 10, 3, 3, 11]
    with open_llm(tmp_path) as llm:
        vector = llm.embed(text, pooling="mean", normalize=False, use_tqdm=False)[0]
    np.testing.assert_allclose(vector, states_of(model, text).mean(axis=0), atol=1e-5)
    assert llm.memory.max_model_len == POSITIONS


@pytest.mark.parametrize(
    "architecture",
    few(
        PAIRS,
        [f"{family}ForSequenceClassification" for family in ("XLMRoberta", "ModernBert")],
    ),
)
def test_scores_of_pairs_are_those_of_transformers(architecture: str, tmp_path: Path) -> None:
    model = save_encoder(tmp_path, architecture, num_labels=1, **PAIRS[architecture])
    check_scores(tmp_path, model)


def check_scores(directory: Path, model: Any) -> None:
    tokenizer = word_tokenizer()
    has_types = getattr(model.config, "type_vocab_size", 0) > 1
    expected = []
    for document in DOCUMENTS:
        inputs = dict(tokenizer(QUERY, document, return_tensors="pt"))
        if not has_types:
            del inputs["token_type_ids"]
        with torch.no_grad():
            expected.append(float(model(**inputs).logits[0, 0].double().sigmoid()))
    with open_llm(directory) as llm:
        results = llm.rerank(QUERY, DOCUMENTS)
    order = np.argsort([-score for score in expected]).tolist()
    assert [result.index for result in results] == order
    scores = [result.relevance_score for result in sorted(results, key=lambda each: each.index)]
    np.testing.assert_allclose(scores, expected, atol=1e-5)


@given(
    st.lists(st.sampled_from(["the", "cat", "zq", "[SEP]", "unknown9"]), max_size=12),
    st.none() | st.lists(st.sampled_from(["dog", ",", "is"]), max_size=12),
    st.integers(5, 26),
    st.sampled_from(["left", "right"]),
)
@examples(20)
def test_a_prompt_is_cut_as_by_the_tokenizer(
    first: list[str], second: list[str] | None, maximum: int, side: Any
) -> None:
    """The tokenizer of transformers is what sentence-transformers cuts with."""
    texts = (" ".join(first), *([] if second is None else [" ".join(second)]))
    oracle = word_tokenizer()
    oracle.truncation_side = side
    expected = oracle(*texts, truncation=True, max_length=maximum)
    types = expected["token_type_ids"]
    for tokenizer, cut in ((word_tokenizer(), side), (oracle, None)):
        encoded = encode(tokenizer, *texts, truncation=Truncation(maximum, cut))
        assert list(encoded.token_ids) == expected["input_ids"]
        if second is not None:
            assert encoded.second_text == (types.index(1) if 1 in types else None)


@pytest.mark.parametrize("maximum", [7, -1])
def test_a_text_that_is_too_long_is_cut_where_a_call_asks(
    checkpoint: Any, llm: LLM, maximum: int
) -> None:
    long = " ".join(["the cat , a dog"] * POSITIONS)
    tokenizer = word_tokenizer()
    length = POSITIONS if maximum == -1 else maximum
    ids = tokenizer(long, truncation=True, max_length=length)["input_ids"]
    vectors = llm.embed(
        [long, "a dog", ids + [9] * 300],
        pooling="mean",
        normalize=False,
        truncate_prompt_tokens=maximum,
        use_tqdm=False,
    )
    for vector, text in zip(vectors, (ids, tokenizer("a dog")["input_ids"], ids), strict=True):
        np.testing.assert_allclose(vector, states_of(checkpoint[1], text).mean(axis=0), atol=1e-5)
    ranked = llm.rerank(long, [long, "a dog"], truncate_prompt_tokens=maximum)
    assert ranked[0].index == 0 and abs(ranked[0].relevance_score - 1) < 1e-6


def test_what_cannot_be_cut_is_refused(llm: LLM, ranker: tuple[LLM, Any]) -> None:
    for maximum in (0, -2, 129, True, 2.0, "7"):
        with pytest.raises(ValueError, match=r"must be 1 to 128 \(max_model_len\), or -1"):
            llm.embed("the", truncate_prompt_tokens=maximum, use_tqdm=False)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="=2 leaves no room .* adds 2 special tokens"):
        llm.embed("the cat", truncate_prompt_tokens=2, use_tqdm=False)
    with pytest.raises(ValueError, match="=4 leaves no room .* adds 3 special tokens"):
        ranker[0].rerank(QUERY, DOCUMENTS, truncate_prompt_tokens=4)
    with pytest.raises(ValueError, match="129 tokens are more than max_model_len = 128"):
        llm.embed([5] * 129, use_tqdm=False)
    with pytest.raises(ValueError, match="only for pairs of texts"):
        llm.score([5], [6], truncate_prompt_tokens=1)


@pytest.mark.parametrize("maximum", [None, 12])
def test_pairs_are_scored_as_by_transformers(ranker: tuple[LLM, Any], maximum: int | None) -> None:
    llm, model = ranker
    queries = ["the cat", QUERY, "a dog is here", "find"]
    pair_scores = llm.score(queries, DOCUMENTS, truncate_prompt_tokens=maximum)
    tokenizer = word_tokenizer()
    for score, query, document in zip(pair_scores, queries, DOCUMENTS, strict=True):
        cut = {} if maximum is None else {"truncation": True, "max_length": maximum}
        inputs = tokenizer(query, document, return_tensors="pt", **cut)
        with torch.no_grad():
            expected = float(model(**inputs).logits[0, 0].double().sigmoid())
        assert abs(score - expected) < 1e-5
    ranked = llm.rerank(QUERY, DOCUMENTS, truncate_prompt_tokens=maximum)
    by_place = {result.index: result.relevance_score for result in ranked}
    scores = llm.score(QUERY, DOCUMENTS, truncate_prompt_tokens=maximum)
    assert scores == [by_place[index] for index in range(4)]
    with pytest.raises(ValueError, match="2 texts and 3 make no pairs"):
        llm.score(["a", "b"], ["a", "b", "c"])
    with pytest.raises(TypeError, match="both texts of a pair must be strings"):
        llm.score("a", [5])


def test_an_encoder_that_embeds_scores_pairs_by_their_vectors(llm: LLM) -> None:
    vectors = llm.embed(["the cat", "a dog", "cat"], use_tqdm=False).astype(np.float64)
    scores = llm.score(["the cat", "the cat"], ["a dog", "cat"])
    np.testing.assert_allclose(scores, vectors[1:] @ vectors[0], atol=1e-6)


def test_every_architecture_is_tested() -> None:
    """A few are enough of those with a head for masked tokens, which is left out."""
    heads_left_out = {name for name in ENCODERS if name.endswith("ForMaskedLM")}
    assert {*FORMS, *PAIRS} >= {*ENCODERS} - heads_left_out


@pytest.mark.parametrize("architecture", ENCODERS)
def test_absent_fields_mean_what_the_class_in_transformers_says(architecture: str) -> None:
    """Sizes have to be there, and the number of labels, which must be one."""
    config = getattr(transformers, architecture).config_class(num_labels=1).to_dict()
    config |= {"architectures": [architecture], "num_labels": 1}
    family = load_family(config)
    needed = {*SIZES, "vocab_size", "num_labels", "id2label", "architectures", "model_type"}
    for name in config.keys() - needed:
        less = {field: value for field, value in config.items() if field != name}
        assert family.Spec.from_config(less) == family.Spec.from_config(config), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_text_has_the_same_bits_alone_and_among_any_others(
    checkpoint: Any, llm: LLM, dtype: str, request: pytest.FixtureRequest
) -> None:
    """The stream may have another size, and the text another place in it."""
    if dtype != "float32":
        llm = LLM(str(checkpoint[0]), dtype=dtype, max_num_batched_tokens=128)
        request.addfinalizer(llm.shutdown)
    texts = random_texts([*LENGTHS, *(1 + 7 * number % POSITIONS for number in range(20))])
    together = llm.embed(texts, pooling="mean", normalize=False, use_tqdm=False)
    back = llm.embed(texts[::-1], pooling="mean", normalize=False, use_tqdm=False)[::-1]
    np.testing.assert_array_equal(together, back)
    for text, vector in zip(texts, together, strict=True):
        alone = llm.embed(text, pooling="mean", normalize=False, use_tqdm=False)[0]
        np.testing.assert_array_equal(alone, vector)


def test_a_pair_has_the_same_bits_alone_and_among_others(ranker: tuple[LLM, Any]) -> None:
    llm, _ = ranker
    documents = [f"the cat {'is here ' * number}" for number in range(1, 24)]
    together = {each.index: each.relevance_score for each in llm.rerank(QUERY, documents)}
    for index, document in enumerate(documents):
        assert llm.rerank(QUERY, [document])[0].relevance_score == together[index]


def test_texts_share_a_stream_with_those_of_similar_length() -> None:
    assert stream_sizes(128, 128) == (32, 64, 128) and stream_sizes(100, 20) == (32, 64, 128)
    config = Bert.Spec.from_config({**BERT, "hidden_size": 64})
    for in_cpp, batches in ((False, [[1], [4], [3, 2, 0], [5]]), (True, [[1], [4, 3], [2, 0, 5]])):
        backend = SimpleNamespace(attention_backend=Backend("auto", in_cpp=in_cpp))
        executables = SimpleNamespace(options=backend)
        encoder = TextEncoder(config, executables, stream_sizes(128, 128), 128)  # type: ignore[arg-type]
        assert encoder.batches([10, 128, 30, 33, 70, 1]) == batches
        assert encoder.batches([]) == []
        assert [len(batch) for batch in encoder.batches([1] * 40)] == (
            [16, 16, 8] if in_cpp else [4] * 10
        )


@pytest.mark.parametrize("way", [attend_in_cpp, attend_in_xla])
def test_options_that_no_encoder_computes_are_refused_by_name(way: Any) -> None:
    packed, _ = pack_texts([(np.zeros(5, np.int32),) * 3], 32, 32)
    inputs = split_inputs(jnp.asarray(packed), 32)
    attend = way(inputs, 32, 32) if way is attend_in_cpp else way(inputs)
    options = AttentionOptions(scale=1.0, logit_softcap=2.0, sinks=jnp.ones(2))
    with pytest.raises(UnsupportedError, match="encoders does not compute logit_softcap, sinks$"):
        attend(0, *jnp.ones((3, 32, 2, 16)), (), options)


@pytest.mark.parametrize(
    ("dtype", "reach", "lengths"),
    few(
        itertools.product(
            ["float32", "bfloat16"], [None, 6], [(100,), (33, 1, 30), (64, 64), (5, 3, 2)]
        ),
        [("float32", 6, (33, 1, 30)), ("bfloat16", None, (64, 64))],
    ),
)
def test_both_ways_to_attend_agree(dtype: str, reach: int | None, lengths: tuple[int, ...]) -> None:
    """The kernels for CPUs and plain XLA, with what follows a text and without."""
    error = 2e-6 if dtype == "float32" else 0.03
    heads = np.random.default_rng(5).standard_normal((3, sum(lengths), 2, 16)).astype(dtype)
    options = AttentionOptions(scale=0.25, sliding_window=reach)
    outputs = []
    for alignment, attend in ((1, attend_in_cpp), (32, attend_in_xla)):
        texts = [(np.zeros(length, np.int32),) * 3 for length in lengths]
        packed, starts = pack_texts(texts, 128, alignment)
        spread = np.full((3, 128, 2, 16), 9.0, dtype)  # what is no text must not matter
        places = np.concatenate(
            [start + np.arange(length) for start, length in zip(starts, lengths, strict=True)]
        )
        spread[:, places] = heads
        inputs = split_inputs(jnp.asarray(packed), 128)
        more = (128, 128) if alignment == 1 else ()
        out, _ = attend(inputs, *more)(0, *map(jnp.asarray, spread), (), options)
        outputs.append(np.asarray(out, np.float32)[places])
    np.testing.assert_allclose(*outputs, atol=error)


def files_of(directory: Path, pooling: dict[str, Any], *more: str, **prompts: Any) -> None:
    kinds = ("Transformer", "Pooling", *more)
    modules = [
        {
            "idx": index,
            "path": f"{index}_{kind}" if index else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for index, kind in enumerate(kinds)
    ]
    write_json(directory / "modules.json", modules)
    write_json(directory / "1_Pooling" / "config.json", pooling)
    write_json(
        directory / "sentence_bert_config.json", {"max_seq_length": 64, "do_lower_case": False}
    )
    if prompts:
        write_json(directory / "config_sentence_transformers.json", prompts)


def test_the_files_of_sentence_transformers_are_followed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_encoder(tmp_path, "BertModel", **FORMS["BertModel"])
    modes = {"pooling_mode_cls_token": True, "pooling_mode_mean_sqrt_len_tokens": True}
    files_of(
        tmp_path,
        modes,
        "Normalize",
        prompts={"query": "query : ", "document": "passage : "},
        default_prompt_name="query",
    )
    tokenizer = word_tokenizer()
    main(["plan", str(tmp_path), "--json"])
    planned = json.loads(capsys.readouterr().out)
    assert (planned["max_model_len"], planned["max_position_embeddings"]) == (64, POSITIONS)
    [said] = doctor._texts(str(tmp_path))
    assert said == "embedded by cls, mean_sqrt_len_tokens: at most 64 tokens of 128"
    with open_llm(tmp_path) as llm:
        [embedding] = llm.embed("the cat", use_tqdm=False)
        ranked = llm.rerank("the cat", ["a dog", "cat"])
        assert llm.memory.max_model_len == 64
        with pytest.raises(ValueError, match="65 tokens are more than max_model_len = 64"):
            llm.embed(random_texts([65])[0], use_tqdm=False)

    def vector(text: str) -> np.ndarray:
        states_TD = states_of(model, tokenizer(text)["input_ids"])
        whole = np.concatenate([states_TD[0], states_TD.sum(axis=0) / np.sqrt(len(states_TD))])
        return whole / np.linalg.norm(whole)

    np.testing.assert_allclose(embedding, vector("query : the cat"), atol=1e-5)
    for result in ranked:
        expected = vector("query : the cat") @ vector(f"passage : {result.document}")
        assert abs(result.relevance_score - expected) < 1e-5


def test_without_files_a_vector_is_the_mean_of_length_one(checkpoint: Any, llm: LLM) -> None:
    text = random_texts([9])[0]
    mean = states_of(checkpoint[1], text).mean(axis=0)
    vector = llm.embed(text, use_tqdm=False)[0]
    np.testing.assert_allclose(vector, mean / np.linalg.norm(mean), atol=1e-5)
    cut = llm.embed(text, 8, use_tqdm=False)[0]
    np.testing.assert_allclose(cut, mean[:8] / np.linalg.norm(mean[:8]), atol=1e-5)


@pytest.mark.parametrize(
    ("stated", "function"),
    [
        ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, "identity"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Tanh"}}, "tanh"),
    ],
)
def test_the_function_of_scores_is_that_of_the_files(
    stated: Any, function: str, ranker: tuple[LLM, Any]
) -> None:
    llm, _ = ranker
    files = llm._embedding.files.of_encoder(stated, scores_pairs=True)
    assert files.pair_score(0.5) == {"identity": 0.5, "tanh": float(np.tanh(0.5))}[function]
    with pytest.raises(CheckpointError, match="'custom.Thing'"):
        files.of_encoder(
            {"sentence_transformers": {"activation_fn": "custom.Thing"}}, scores_pairs=True
        )


def test_an_encoder_generates_nothing(llm: LLM) -> None:
    for call in (
        lambda: llm.generate([5, 6]),
        # These have all that the parameters of a request for vectors have.
        lambda: llm.generate([5, 6], dataclasses.replace(llm._embedding.params)),
        lambda: llm.stream([5, 6]),
        lambda: llm.score([5], [6]),
        lambda: llm.pin_prefix([5, 6]),
    ):
        with pytest.raises(UnsupportedError, match=r"is an encoder: it embeds and ranks texts"):
            call()


def test_a_cross_encoder_has_no_vectors(ranker: tuple[LLM, Any]) -> None:
    llm, _ = ranker
    with pytest.raises(CheckpointError, match="scores pairs of texts"):
        llm.embed("the cat", use_tqdm=False)
    with pytest.raises(ConfigError, match="cross-encoder"):
        llm.rerank(QUERY, DOCUMENTS, method="embedding")
    with pytest.raises(ValueError, match="instruction"):
        llm.rerank(QUERY, DOCUMENTS, instruction="find")


@pytest.mark.parametrize(
    "settings",
    [
        {"num_blocks": 9},
        {"enable_lora": True},
        {"kv_cache_dtype": "int8"},
        {"event_log": "x"},
        {"tensor_parallel_size": 2},
    ],
)
def test_settings_of_a_kv_cache_are_refused(settings: dict[str, Any], checkpoint: Any) -> None:
    [(name, _)] = settings.items()
    with pytest.raises(UnsupportedError, match=rf"{name} = .*is an encoder"):
        open_llm(checkpoint[0], **settings)


def test_a_longer_length_than_the_positions_is_refused(checkpoint: Any) -> None:
    with pytest.raises(ConfigError, match=f"max_model_len is 200, .*end at {POSITIONS}"):
        open_llm(checkpoint[0], max_model_len=200)


def test_classes_are_refused(tmp_path: Path) -> None:
    save_encoder(tmp_path, "BertForSequenceClassification", num_labels=3)
    with pytest.raises(CheckpointError, match="id2label has 3 labels"):
        open_llm(tmp_path)


def test_weights_are_replaced_and_put_to_sleep(checkpoint: Any, llm: LLM) -> None:
    text = random_texts([40])[0]
    before = llm.embed(text, use_tqdm=False)
    weights = {name: np.asarray(array) for name, array in llm.parameters().items()}
    [name] = [key for key in weights if key.endswith("layer.1.output.dense.bias")]
    llm.update_parameters({**weights, name: np.ones(64, np.float32)})
    assert not np.array_equal(llm.embed(text, use_tqdm=False), before)
    llm.update_parameters(weights)
    np.testing.assert_array_equal(llm.embed(text, use_tqdm=False), before)
    llm.sleep()
    llm.wake_up()
    np.testing.assert_array_equal(llm.embed(text, use_tqdm=False), before)


def test_an_event_loop_embeds_likewise(checkpoint: Any, llm: LLM) -> None:
    texts = random_texts(LENGTHS)

    async def vectors() -> Any:
        settings = {key: value for key, value in SETTINGS.items() if key.startswith("max")}
        async with AsyncLLM(str(checkpoint[0]), **settings) as other:
            return await other.embed(texts)

    np.testing.assert_array_equal(asyncio.run(vectors()), llm.embed(texts, use_tqdm=False))


def test_from_parameters_takes_an_encoder(checkpoint: Any, llm: LLM) -> None:
    config = json.loads((checkpoint[0] / "config.json").read_text())
    weights = {name: tensor.numpy() for name, tensor in checkpoint[1].state_dict().items()}
    text = random_texts([30])[0]
    with LLM.from_parameters(config, weights, max_num_batched_tokens=128) as other:
        np.testing.assert_array_equal(
            other.embed(text, use_tqdm=False), llm.embed(text, use_tqdm=False)
        )


def test_each_family_says_what_it_is() -> None:
    for architecture in ENCODERS:
        family = load_family({"architectures": [architecture]})
        assert (family.__doc__ or "").partition("\n")[0].endswith(".")


def test_a_server_embeds_and_ranks_and_generates_nothing(
    checkpoint: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    import httpx

    from jaxpage.assembly import build_engine
    from jaxpage.driver.async_driver import AsyncDriver
    from jaxpage.settings.engine_config import EngineConfig
    from tests.support.served import served_engine

    built = build_engine(EngineConfig(model=str(checkpoint[0]), max_num_batched_tokens=128))
    driver = AsyncDriver(built)
    driver.start()
    try:
        with served_engine(driver, built) as address, httpx.Client(base_url=address) as client:
            texts = ["the cat", "a dog is here"]
            body = {"model": "demo", "input": texts}
            answer = client.post("/v1/embeddings", json=body).json()
            shown = client.post("/api/show", json={"model": "demo"}).json()
            refused = client.post("/v1/completions", json={"model": "demo", "prompt": "the"})
            ranked = {"model": "demo", "query": "a cat", "documents": texts}
            results = client.post("/v1/rerank", json=ranked).json()["results"]
            facts = client.get("/v1/capabilities").json()["model"]
            long = {"model": "demo", "input": "the cat , " * 5000}
            tokens = {**long, "input": [[5] * 4000]}
            statuses = [client.post("/v1/embeddings", json=body) for body in (long, tokens)]
            cut = [
                client.post(path, json={**body, **fields}).json()
                for path, body, fields in (
                    ("/v1/embeddings", long, {"truncate_prompt_tokens": 9}),
                    ("/v1/embeddings", tokens, {"truncate_prompt_tokens": 9}),
                    ("/v1/embeddings", long, {"truncation": True}),
                    ("/v1/rerank", ranked, {"documents": ["a " * 999], "truncate": True}),
                    ("/v1/score", {"model": "demo"}, {"text_1": texts[0], "text_2": texts}),
                    ("/score", {"model": "demo"}, {"queries": texts, "documents": texts}),
                )
            ]
            embedded = [
                client.post("/api/embed", json={**long, **fields})
                for fields in ({}, {"truncate": True}, {"truncate": False})
            ]
            wrong = [
                client.post("/v1/score", json={"model": "demo", **fields}).json()["error"]
                for fields in (
                    {"text_1": texts},
                    {"text_1": texts, "text_2": [*texts, "a"]},
                    {"text_1": "a", "text_2": "b", "data_1": "a", "data_2": "b"},
                    {"text_1": "a", "text_2": "b", "truncate_prompt_tokens": 200},
                )
            ]
    finally:
        assert driver.stop(60)
    vectors = np.array([row["embedding"] for row in answer["data"]])
    tokenizer = word_tokenizer()
    for text, vector in zip(texts, vectors, strict=True):
        mean = states_of(checkpoint[1], tokenizer(text)["input_ids"]).mean(axis=0)
        np.testing.assert_allclose(vector, mean / np.linalg.norm(mean), atol=1e-5)
    assert [each.status_code for each in statuses] == [400, 400]
    assert all("max_model_len" in each.json()["error"]["message"] for each in statuses)
    tokens_of_cut = [each["usage"]["prompt_tokens"] for each in cut]
    assert tokens_of_cut[:3] == [9, 9, POSITIONS]
    assert tokens_of_cut[3] == len(tokenizer("a cat")["input_ids"]) + POSITIONS
    scores = [[row["score"] for row in each["data"]] for each in cut[4:]]
    np.testing.assert_allclose(scores[0], vectors @ vectors[0], atol=1e-6)
    np.testing.assert_allclose(scores[1], [1, 1], atol=1e-6)
    assert [each.status_code for each in embedded] == [200, 200, 400]
    assert [each.json().get("prompt_eval_count") for each in embedded[:2]] == [POSITIONS] * 2
    assert [each["param"] for each in wrong] == [
        *("text_2", "text_1", "data_1", "truncate_prompt_tokens")
    ]
    assert answer["usage"]["prompt_tokens"] == sum(
        len(tokenizer(text)["input_ids"]) for text in texts
    )
    assert shown["capabilities"] == ["embedding"] and facts["generates"] is False
    assert refused.status_code == 400 and "is an encoder" in refused.json()["error"]["message"]
    assert sorted(result["index"] for result in results) == [0, 1]
