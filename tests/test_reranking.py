"""Ranking by yes and no as Qwen3-Reranker's model card does it, and by vectors as Qwen3-Embedding's
does, against transformers.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxpage import AsyncLLM
from jaxpage.checkpoints import read_embedding_files
from jaxpage.engine.texts import (
    ByVectors,
    RerankMethod,
    TextEmbedding,
    YesNo,
    reranker_of,
)
from jaxpage.errors import CheckpointError, ConfigError
from jaxpage.outputs import TokenPooling
from jaxpage.serving.wire.errors import ApiError
from jaxpage.serving.wire.rerank import open_rerank
from tests.support import wire
from tests.support.engines import BLOCKS_OF_16, make_llm

torch = pytest.importorskip("torch", reason="the oracle is transformers on torch")

import tokenizers  # noqa: E402
import transformers  # noqa: E402

from tests.support.hf_models import make_model  # noqa: E402

QUERY = "where is the cat"
DOCUMENTS = ["the cat is here", "a dog", "yes no cat cat", "the cat is here"]
INSTRUCTION = "find a dog"
# as the model card of Qwen3-Reranker has them, written down here once more
PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the"
    ' Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
TASK = "Given a web search query, retrieve relevant passages that answer the query"
WORDS = [
    "yes",
    "no",
    "the",
    "cat",
    "is",
    "here",
    "where",
    "dog",
    "find",
    "Instruct",
    "Query",
    "Document",
]


def small_tokenizer(marks: tuple[str, ...] = ("<|im_start|>", "<|im_end|>")) -> Any:
    """Returns a tokenizer of bytes, some words, and the marks of a chat.

    It ends each text with a token, as Qwen3-Embedding's does.
    """
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    names = [*alphabet, *WORDS, "<|endoftext|>", *marks]
    made = tokenizers.Tokenizer(
        tokenizers.models.WordPiece(
            {name: index for index, name in enumerate(names)},
            unk_token="<|endoftext|>",
            continuing_subword_prefix="",
        )
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A <|endoftext|>",
        special_tokens=[("<|endoftext|>", names.index("<|endoftext|>"))],
    )
    made.decoder = tokenizers.decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<|endoftext|>", additional_special_tokens=list(marks)
    )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Writes two models of one architecture.

    The names of tensors are those of Qwen3-Embedding, without "model.".
    """
    tokenizer = small_tokenizer()
    directory = tmp_path_factory.mktemp("model")
    model = make_model(
        "qwen3-grouped",
        vocab_size=len(tokenizer),
        tie_word_embeddings=True,
        max_position_embeddings=1024,
        head_dim=16,
    )
    model.model.save_pretrained(directory)
    config = {**model.config.to_dict(), "architectures": ["Qwen3ForCausalLM"]}
    (directory / "config.json").write_text(json.dumps(config))
    tokenizer.save_pretrained(directory)
    return directory, model, tokenizer


@pytest.fixture(scope="module")
def llm(checkpoint):
    with make_llm(checkpoint[0], max_model_len=256 * 4) as made:
        yield made


@torch.no_grad()
def by_yes_and_no(model: Any, tokenizer: Any, task: str) -> list[float]:
    """Computes it as the model card does: the softmax of the logits of no and yes at the last
    position.
    """
    no, yes = (tokenizer.convert_tokens_to_ids(word) for word in ("no", "yes"))
    scores = []
    for document in DOCUMENTS:
        text = f"{PREFIX}<Instruct>: {task}\n<Query>: {QUERY}\n<Document>: {document}{SUFFIX}"
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        logits = model(ids).logits[0, -1].double()
        scores.append(float(torch.stack([logits[no], logits[yes]]).softmax(0)[1]))
    return scores


@torch.no_grad()
def by_vectors(model: Any, tokenizer: Any, before: str) -> list[float]:
    """Computes it as Qwen3-Embedding's card does: the last token's state, scaled to length 1."""
    vectors = []
    for text in (before + QUERY, *DOCUMENTS):
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        assert ids[0, -1] == tokenizer.eos_token_id
        vectors.append(model.model(ids).last_hidden_state[0, -1].double().numpy())
    unit = np.stack([vector / np.linalg.norm(vector) for vector in vectors])
    return list(unit[1:] @ unit[0])


def check(results: Any, expected: list[float]) -> None:
    """Checks that the order is that of the scores, and of equal ones that of the documents."""
    order = sorted(range(len(expected)), key=lambda index: (-results_of(results)[index], index))
    assert [each.index for each in results] == order
    assert [each.document for each in results] == [DOCUMENTS[index] for index in order]
    np.testing.assert_allclose(results_of(results), expected, atol=1e-4)
    assert len({round(score, 4) for score in expected}) == 3  # the first document is there twice


def results_of(results: Any) -> list[float]:
    return [each.relevance_score for each in sorted(results, key=lambda each: each.index)]


def reranker_for(tokenizer: Any, directory: Path, method: RerankMethod = "auto") -> Any:
    return reranker_of(TextEmbedding(read_embedding_files(directory), tokenizer), method)


def test_yes_and_no_are_those_of_the_model_card(checkpoint, llm):
    _, model, tokenizer = checkpoint
    assert isinstance(reranker_for(tokenizer, checkpoint[0]), YesNo)
    for instruction in (None, INSTRUCTION):
        expected = by_yes_and_no(model, tokenizer, instruction or TASK)
        results = llm.rerank(QUERY, DOCUMENTS, instruction=instruction)
        check(results, expected)
        assert llm.rerank(QUERY, DOCUMENTS, 2, instruction=instruction) == results[:2]


@pytest.mark.parametrize(
    ("name", "mistake"), [("_AFTER", "<|im_end|>\n"), ("DEFAULT_INSTRUCTION", "Rank")]
)
def test_a_mistake_in_the_template_would_be_seen(checkpoint, llm, monkeypatch, name, mistake):
    monkeypatch.setattr(f"jaxpage.engine.texts.reranking.{name}", mistake)
    with pytest.raises(AssertionError):
        check(llm.rerank(QUERY, DOCUMENTS), by_yes_and_no(checkpoint[1], checkpoint[2], TASK))


def test_vectors_are_those_of_the_model_card(checkpoint, llm):
    _, model, tokenizer = checkpoint
    results = llm.rerank(QUERY, DOCUMENTS, method="embedding")
    check(results, by_vectors(model, tokenizer, ""))
    results = llm.rerank(QUERY, DOCUMENTS, method="embedding", instruction=INSTRUCTION)
    check(results, by_vectors(model, tokenizer, f"Instruct: {INSTRUCTION}\nQuery:"))


def test_an_event_loop_ranks_likewise(checkpoint, llm):
    async def both() -> list[Any]:
        settings = {**BLOCKS_OF_16, "max_model_len": 1024, "preemption_mode": "recompute"}
        async with AsyncLLM(checkpoint[0], **settings) as other:
            return [
                await other.rerank(QUERY, DOCUMENTS, 3, method=method)
                for method in ("yes_no", "embedding")
            ]

    assert asyncio.run(both()) == [
        llm.rerank(QUERY, DOCUMENTS, 3, method=method) for method in ("yes_no", "embedding")
    ]


def write_files(directory: Path, pooling: dict[str, Any], prompts: Any = None) -> None:
    (directory / "1_Pooling").mkdir(exist_ok=True)
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    if prompts is not None:
        file = directory / "config_sentence_transformers.json"
        file.write_text(json.dumps({"prompts": prompts}))


def test_the_files_of_a_model_say_how_it_ranks(tmp_path):
    tokenizer = small_tokenizer()
    assert reranker_for(tokenizer, tmp_path) == YesNo(
        *map(tokenizer.convert_tokens_to_ids, ("yes", "no"))
    )
    plain = reranker_for(small_tokenizer(()), tmp_path)
    assert isinstance(plain, ByVectors)
    assert plain.inputs([("q", "d")]) == (["q", "d"], [TokenPooling(("lasttoken",))] * 2)
    write_files(tmp_path, {"pooling_mode_mean_tokens": True})
    template = reranker_for(tokenizer, tmp_path)
    assert isinstance(template, ByVectors)
    assert template.inputs([("q", "d")])[1] == [TokenPooling(("mean",))] * 2
    pooling = {
        "word_embedding_dimension": 8,
        "pooling_mode_lasttoken": True,
        "include_prompt": True,
    }
    write_files(tmp_path, pooling, {"query": "Instruct: x\nQuery:", "document": ""})
    template = reranker_for(tokenizer, tmp_path)
    assert isinstance(template, ByVectors)
    prompts, poolings = template.inputs([("q", "d"), ("q", "e"), ("p", "d")])
    assert prompts == ["Instruct: x\nQuery:q", "Instruct: x\nQuery:p", "d", "e", "d"]
    assert poolings == [TokenPooling(("lasttoken",))] * 5
    assert isinstance(reranker_for(tokenizer, tmp_path, "yes_no"), YesNo)
    with pytest.raises(ConfigError, match="has no <|im_start|>"):
        reranker_for(small_tokenizer(()), tmp_path, "yes_no")
    write_files(tmp_path, {"pooling_mode_first": True})
    refused = reranker_for(tokenizer, tmp_path)
    with pytest.raises(CheckpointError, match="'pooling_mode_first' is not one of"):
        refused.inputs([("q", "d")])
    assert isinstance(reranker_for(tokenizer, tmp_path, "yes_no"), YesNo)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (("q", []), ValueError, "at least one document"),
        (("q", "text"), TypeError, "documents must be a list of strings"),
        (("q", [1]), TypeError, "must be strings"),
        ((1, ["d"]), TypeError, "must be strings"),
        (("q", ["d"], 0), ValueError, "top_n must be"),
        (("q", ["d"], True), ValueError, "top_n must be"),
    ],
)
def test_what_cannot_be_ranked(arguments, error, text, llm):
    with pytest.raises(error, match=text):
        llm.rerank(*arguments)
    with pytest.raises(ValueError, match="method"):
        llm.rerank("q", ["d"], method="other")  # type: ignore[arg-type]


def test_the_wire_has_the_forms_of_jina_and_cohere():
    context = wire.context()
    requested = {"model": "demo", "query": "a", "documents": ["x", "y", "z"], "top_n": 2}
    answer = open_rerank(requested, context).whole([0.1, 0.5, 0.3], 7)
    assert answer["results"] == [
        {"index": 1, "relevance_score": 0.5, "document": {"text": "y"}},
        {"index": 2, "relevance_score": 0.3, "document": {"text": "z"}},
    ]
    assert answer["usage"] == {"prompt_tokens": 7, "total_tokens": 7} and answer["model"] == "demo"
    cohere = {**requested, "documents": [{"text": "x"}, {"text": "y"}, {"text": "z"}]}
    opened = open_rerank({**cohere, "return_documents": False, "rank_fields": ["text"]}, context)
    assert [each.prompt for each in opened.prompts] == ["a", "x", "y", "z"]
    assert opened.ignored_fields == ()
    assert opened.whole([0.1, 0.5, 0.3], 7)["results"][0] == {"index": 1, "relevance_score": 0.5}
    for changes, param in (
        ({"documents": []}, "documents"),
        ({"documents": ["x"] * 257}, "documents"),
        ({"documents": [{"title": "x"}]}, "documents"),
        ({"query": ""}, "query"),
        ({"top_n": 0}, "top_n"),
        ({"max_tokens_per_doc": 10}, "max_tokens_per_doc"),
        ({"model": "other"}, "model"),
    ):
        with pytest.raises(ApiError) as refused:
            open_rerank({**requested, **changes}, context)
        assert refused.value.param == param
