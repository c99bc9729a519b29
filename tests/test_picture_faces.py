"""Pictures come in through every API, in the shapes that its clients send, and what is wrong is
refused with its path.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import numpy as np
import ollama
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from safetensors.numpy import save

from jaxpage import SamplingParams
from jaxpage.assembly import build_engine
from jaxpage.errors import UnsupportedError
from jaxpage.images import LastUsed, load_picture, picture_in, takes_parts_alone
from jaxpage.serving.dialects.messages import count_tokens, open_message
from jaxpage.serving.dialects.ollama import open_ollama_chat, open_ollama_generate, show_ollama
from jaxpage.serving.dialects.responses import open_response
from jaxpage.serving.http.answers import make_refusal
from jaxpage.serving.wire import pictures as wire_pictures
from jaxpage.serving.wire.context import ModelContext, RequestLimits
from jaxpage.serving.wire.errors import ApiError
from jaxpage.serving.wire.exchange import Exchange, open_chat, open_completion, tokenize
from jaxpage.serving.wire.strict_turns import order_strictly
from jaxpage.serving.wire.vectors import read_vectors
from jaxpage.settings.engine_config import EngineConfig
from tests.support.engines import make_llm
from tests.support.executables import when_used
from tests.support.picture_models import (
    BOTH_TEMPLATE,
    PARTS_TEMPLATE,
    encoded,
    oracle_of,
    picture,
    processor_of,
    save_seeing_model,
    tokenizer_of,
)
from tests.support.running import serving
from tests.support.sweeps import examples
from tests.support.wire import MODEL, context

SMALL, TALL = encoded(picture(40, 40)), encoded(picture(16, 90, 1), "JPEG")

pytestmark = pytest.mark.usefixtures("decode_as_chunks")


def text_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def url_of(data: bytes) -> str:
    return f"data:image/png;base64,{text_of(data)}"


def seeing(name: str = "qwen3_vl", template: str = BOTH_TEMPLATE, **changes: Any) -> ModelContext:
    tokenizer = tokenizer_of(name)
    tokenizer.chat_template = template
    return context(
        **{
            "tokenizer": tokenizer,
            "pictures": processor_of(name),
            "vocab_size": len(tokenizer),
            **changes,
        }
    )


def image(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url_of(data), "detail": "auto"}}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def chat(*messages: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": list(messages)}


def user_message(content: Any, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": content}


def files(exchange: Exchange) -> list[bytes]:
    """Returns the files of the pictures of the one prompt, in order."""
    (prompt,) = exchange.prompts
    if prompt.pictures is None:
        return []
    return [base64.b64decode(sent.base64) for sent in prompt.pictures.pictures]


CHAT = chat(
    user_message("Look.", "system"),
    user_message([text("a"), image(SMALL), text("b"), image(TALL)]),
    user_message("Two pictures.", "assistant"),
    user_message([image(SMALL)]),
)
PROMPT = "[system]Look.[user]a{0}b{0}[assistant]Two pictures.[user]{0}[assistant]".format(
    "<|vision_start|><|image_pad|><|vision_end|>"
)


def messages_body() -> dict[str, Any]:
    def block(data: bytes, kind: str) -> dict[str, Any]:
        source = {"type": "base64", "media_type": kind, "data": text_of(data)}
        return {"type": "image", "source": source}

    return {
        "model": MODEL,
        "max_tokens": 5,
        "system": "Look.",
        "messages": [
            user_message(
                [text("a"), block(SMALL, "image/png"), text("b"), block(TALL, "image/jpeg")]
            ),
            user_message("Two pictures.", "assistant"),
            user_message([block(SMALL, "image/png")]),
        ],
    }


def responses_body() -> dict[str, Any]:
    def part(value: str) -> dict[str, Any]:
        return {"type": "input_text", "text": value}

    def picture_part(data: bytes) -> dict[str, Any]:
        return {"type": "input_image", "image_url": url_of(data), "detail": "auto"}

    return {
        "model": MODEL,
        "instructions": "Look.",
        "input": [
            user_message([part("a"), picture_part(SMALL), part("b"), picture_part(TALL)]),
            {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "Two pictures.", "annotations": []}],
            },
            user_message([picture_part(SMALL)]),
        ],
    }


def ollama_body() -> dict[str, Any]:
    return {
        "model": MODEL,
        "messages": [
            user_message("Look.", "system"),
            {**user_message("ab"), "images": [text_of(SMALL), url_of(TALL)]},
            user_message("Two pictures.", "assistant"),
            {**user_message(""), "images": [text_of(SMALL)]},
        ],
    }


def test_every_dialect_has_the_same_prompt_and_pictures() -> None:
    served = seeing()
    for opens, body in (
        (open_chat, CHAT),
        (open_message, messages_body()),
        (open_response, responses_body()),
    ):
        exchange = opens(body, served)
        assert exchange.prompts[0].prompt == PROMPT
        assert files(exchange) == [SMALL, TALL, SMALL]
        assert exchange.ignored_fields == () or opens is open_response
    exchange = open_ollama_chat(ollama_body(), served)
    assert files(exchange) == [SMALL, TALL, SMALL]
    two = "<|vision_start|><|image_pad|><|vision_end|>" * 2
    assert f"[user]{two}ab[assistant]" in str(exchange.prompts[0].prompt)
    body = {"model": MODEL, "prompt": "a", "system": "Look.", "images": [text_of(SMALL)]}
    exchange = open_ollama_generate(body, served)
    assert files(exchange) == [SMALL] and "[system]Look.[user]<|vision" in str(
        exchange.prompts[0].prompt
    )


def test_a_url_may_stand_alone_and_detail_is_named() -> None:
    served = seeing()
    alone = {"type": "image_url", "image_url": url_of(SMALL)}
    assert files(open_chat(chat(user_message([alone])), served)) == [SMALL]
    detailed = {"type": "image_url", "image_url": {"url": url_of(SMALL), "detail": "low"}}
    exchange = open_chat(chat(user_message([detailed])), served)
    assert exchange.ignored_fields == ("messages[0].content[0].image_url.detail",)


def test_results_of_tools_may_have_pictures() -> None:
    served = seeing()
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        user_message("Go."),
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [text("seen"), image(TALL)]},
    ]
    exchange = open_chat(chat(*messages), served)
    assert files(exchange) == [TALL]
    source = {"type": "base64", "media_type": "image/jpeg", "data": text_of(TALL)}
    result = {
        "type": "tool_result",
        "tool_use_id": "c1",
        "is_error": True,
        "content": [{"type": "image", "source": source}, text("seen")],
    }
    body = {
        "model": MODEL,
        "max_tokens": 5,
        "messages": [
            user_message("Go."),
            user_message([{"type": "tool_use", "id": "c1", "name": "f", "input": {}}], "assistant"),
            user_message([result]),
        ],
    }
    exchange = open_message(body, served)
    assert files(exchange) == [TALL] and "Error" in str(exchange.prompts[0].prompt)
    output = [{"type": "input_image", "image_url": url_of(TALL)}]
    items = [
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": output},
    ]
    assert files(open_response({"model": MODEL, "input": items}, served)) == [TALL]


def refusal_of(opens: Any, body: dict[str, Any], served: ModelContext) -> ApiError:
    with pytest.raises(ApiError) as caught:
        exchange = opens(body, served)
        for prompt in exchange.prompts:
            try:
                prompt.pictures.process()
            except ApiError as error:
                raise asyncio.run(make_refusal(error, exchange.refusal)) from None
    assert caught.value.status == 400
    return caught.value


def test_a_text_model_refuses_pictures_with_their_paths() -> None:
    plain = context()
    for opens, body, path in (
        (
            open_chat,
            chat(user_message("x"), user_message([text("a"), image(SMALL)])),
            "messages[1].content[1]",
        ),
        (open_message, messages_body(), "messages[0].content[1]"),
        (open_response, responses_body(), "input[0].content[1]"),
        (open_ollama_chat, ollama_body(), "messages[1].images[0]"),
        (open_ollama_generate, {"model": MODEL, "prompt": "a", "images": ["AA=="]}, "images[0]"),
    ):
        error = refusal_of(opens, body, plain)
        assert error.param == path
        assert error.message == f"{path} is a picture, and this model takes text alone"


BROKEN = [
    (b"no picture", "is no PNG, JPEG, WebP or GIF file"),
    (SMALL[: len(SMALL) // 2], "is cut off or damaged"),
    (b"", "is empty"),
    (encoded(picture(300, 1)), "cannot be processed for this model"),
]


@pytest.mark.parametrize(("data", "message"), BROKEN)
def test_a_wrong_picture_is_refused_with_its_path(data: bytes, message: str) -> None:
    served = seeing()
    body = messages_body()
    body["messages"][0]["content"][1]["source"]["data"] = text_of(data)
    items = responses_body()
    items["input"][0]["content"][1]["image_url"] = url_of(data)
    theirs = ollama_body()
    theirs["messages"][1]["images"][0] = text_of(data)
    generate = {"model": MODEL, "prompt": "a", "images": [text_of(SMALL), text_of(data)]}
    for opens, request, path in (
        (open_chat, chat(user_message([image(data)])), "messages[0].content[0].image_url.url"),
        (open_message, body, "messages[0].content[1].source.data"),
        (open_response, items, "input[0].content[1].image_url"),
        (open_ollama_chat, theirs, "messages[1].images[0]"),
        (open_ollama_generate, generate, "images[1]"),
    ):
        error = refusal_of(opens, request, served)
        assert error.param == path and error.message.startswith(f"{path}: ")
        assert message in error.message


@pytest.mark.parametrize("url", ["http://localhost/x.png", "https://e.com/x", "file:///etc/passwd"])
def test_nothing_is_fetched(url: str) -> None:
    served = seeing()
    body = messages_body()
    body["messages"][0]["content"][1]["source"] = {"type": "url", "url": url}
    items = responses_body()
    items["input"][0]["content"][1]["image_url"] = url
    part = {"type": "image_url", "image_url": {"url": url}}
    for opens, request, path in (
        (open_chat, chat(user_message([part])), "messages[0].content[0].image_url.url"),
        (open_message, body, "messages[0].content[1].source.url"),
        (open_response, items, "input[0].content[1].image_url"),
    ):
        error = refusal_of(opens, request, served)
        assert error.param == path
        assert error.message.startswith(f"{path} must be a data URL with base64")
        assert "nothing is fetched, so send the picture itself" in error.message


@pytest.mark.parametrize(
    ("opens", "body", "param"),
    [
        (open_chat, chat(user_message([{"type": "image_url"}])), "messages[0].content"),
        (
            open_chat,
            chat(user_message([{"type": "image_url", "image_url": 3}])),
            "messages[0].content",
        ),
        (open_chat, chat(user_message([image(SMALL)], "system")), "messages[0].content"),
        (open_chat, chat(user_message([image(SMALL)], "assistant")), "messages[0].content"),
        (open_chat, chat(user_message([{"type": "video_url"}])), "messages[0].content"),
        (
            open_message,
            {
                "model": MODEL,
                "max_tokens": 5,
                "messages": [user_message([{"type": "image", "source": {}}])],
            },
            "messages[0].content[0].source.type",
        ),
        (
            open_response,
            {"model": MODEL, "input": [user_message([{"type": "input_image", "file_id": "f"}])]},
            "input[0].content[0]",
        ),
        (
            open_ollama_chat,
            {"model": MODEL, "messages": [{**user_message("x", "assistant"), "images": ["AA=="]}]},
            "messages[0].images",
        ),
        (
            open_ollama_generate,
            {"model": MODEL, "prompt": "x", "raw": True, "images": ["AA=="]},
            "images",
        ),
    ],
)
def test_what_is_no_picture_is_refused(opens: Any, body: dict[str, Any], param: str) -> None:
    assert refusal_of(opens, body, seeing()).param == param


def test_there_are_as_many_pictures_as_places() -> None:
    served = seeing()
    error = refusal_of(open_chat, chat(user_message("What is <|image_pad|>?")), served)
    assert (error.param, error.message) == (
        "messages",
        "messages: The prompt has 1 place ('<|image_pad|>') for 0 pictures; each picture takes one",
    )
    error = refusal_of(open_completion, {"model": MODEL, "prompt": "<|image_pad|>"}, served)
    assert error.param == "prompt" and "1 place (" in error.message
    # A template that does not know pictures leaves them out.
    blind = seeing(template="{% for m in messages %}{{ m.content }}{% endfor %}")
    error = refusal_of(open_chat, chat(user_message([image(SMALL)])), blind)
    assert "has 0 places ('<|image_pad|>') for 1 picture" in error.message


def test_there_are_not_too_many_pictures() -> None:
    few = seeing(limits=RequestLimits(max_pictures=2))
    error = refusal_of(open_chat, chat(user_message([image(SMALL)] * 3)), few)
    assert error.param == "messages[0].content[2]"
    assert error.message == "messages[0].content[2]: at most 2 pictures are allowed"
    # A template without borders, so that the text itself is short enough.
    bare = "{% for m in messages %}{% for p in m.content %}<|image_pad|>{% endfor %}{% endfor %}"
    short = seeing(template=bare, max_model_len=20)
    large = encoded(picture(96, 96, 3))
    error = refusal_of(open_chat, chat(user_message([image(large)] * 8)), short)
    assert (error.code, error.param) == (
        "context_length_exceeded",
        "messages[0].content[2].image_url.url",
    )
    assert "the first 3 pictures of the 8 fill 27 tokens, and max_model_len is 20" in error.message


def test_usage_counts_the_tokens_of_pictures() -> None:
    served = seeing()
    processor = processor_of("qwen3_vl")
    ready = processor.process([SMALL, TALL, SMALL])
    token_ids, _ = processor.expand(PROMPT, ready, add_special_tokens=False)
    num_rows = sum(each.picture.num_rows for each in ready)
    assert token_ids.count(processor.token_id) == num_rows > 3
    body = {name: value for name, value in messages_body().items() if name != "max_tokens"}
    assert count_tokens(body, served).body == {"input_tokens": len(token_ids)}
    assert tokenize(CHAT, served).body["tokens"] == token_ids
    long = responses_body()
    long["input"][:0] = [user_message("x " * 40), user_message("y", "assistant")] * 3
    cut = open_response({**long, "truncation": "auto"}, seeing(max_model_len=len(token_ids) + 40))
    assert files(cut) == [SMALL, TALL, SMALL] or files(cut) == [SMALL]
    assert "input[0]" in cut.ignored_fields


def test_capabilities_say_so() -> None:
    for served, sees in ((seeing(), True), (context(), False)):
        abilities = show_ollama({"model": MODEL}, served).body["capabilities"]
        assert ("vision" in abilities) == sees


def test_templates_get_parts_where_they_want_them() -> None:
    """A template that goes over the letters of a text gets parts only."""
    assert takes_parts_alone(PARTS_TEMPLATE) and not takes_parts_alone(BOTH_TEMPLATE)
    assert not takes_parts_alone("{% for m in messages %}{{ m.content }}{% endfor %}")
    served = seeing("smolvlm", PARTS_TEMPLATE)
    exchange = open_chat(
        chat(
            user_message("Hi"),
            user_message("Ho", "assistant"),
            user_message([image(SMALL), text("What?")]),
        ),
        served,
    )
    assert exchange.prompts[0].prompt == (
        "<|im_start|>User: Hi<end_of_utterance>\nAssistant: Ho<end_of_utterance>\n"
        "User:<image>What?<end_of_utterance>\nAssistant:"
    )


def test_messages_in_strict_order_keep_their_pictures() -> None:
    parts = [{"type": "image"}]
    ordered = order_strictly(
        [
            user_message("a"),
            user_message(parts),
            user_message("", "user"),
            user_message("b", "assistant"),
        ]
    )
    assert ordered == [user_message([text("a"), *parts]), user_message("b", "assistant")]


def test_the_same_picture_is_processed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    known: LastUsed[Any] = LastUsed(100_000)
    monkeypatch.setattr(wire_pictures, "_KNOWN", known)
    made = []

    def arrays_of(processor: Any, data: str) -> dict[str, np.ndarray]:
        made.append(data)
        return {
            "pixel_values": np.zeros((16, 1000), np.float32),
            "image_grid_thw": np.array([[1, 4, 4]]),
        }

    monkeypatch.setattr(wire_pictures, "_arrays_of", arrays_of)
    processor = processor_of("qwen3_vl")
    other = processor_of("qwen2_5_vl")
    process = wire_pictures._process
    picture = process(processor, "one")
    assert process(processor, "one") is picture and made == ["one"]
    assert process(other, "one").key != picture.key and made == ["one"] * 2
    process(processor, "two")  # there is room for one
    process(processor, "one")
    assert made == ["one", "one", "two", "one"] and 0 < known.num_bytes <= 100_000


def test_processing_has_limits_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    served = seeing("smolvlm", PARTS_TEMPLATE)
    large = encoded(picture(1500, 1500, 9), "JPEG")
    refusal_of(
        open_chat, chat(user_message([image(b"warm")])), served
    )  # what it imports does not count
    monkeypatch.setattr(wire_pictures, "PICTURE_SECONDS", 0.001)
    error = refusal_of(open_chat, chat(user_message([image(large)])), served)
    assert error.message.endswith("cannot be processed: it took longer than 0.001 s")
    monkeypatch.setattr(wire_pictures, "PICTURE_SECONDS", 20.0)
    monkeypatch.setattr(wire_pictures, "PICTURE_BYTES", 1 << 20)
    error = refusal_of(open_chat, chat(user_message([image(large)])), served)
    assert "memory" in error.message


def npy_of(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


VECTORS = np.arange(12, dtype=np.float32).reshape(3, 4)


@pytest.mark.parametrize(
    "data",
    [
        npy_of(VECTORS),
        npy_of(np.asfortranarray(VECTORS)),
        npy_of(VECTORS.astype(np.float16)),
        save({"prompt_embeds": VECTORS}),
    ],
)
def test_a_completion_takes_vectors(data: bytes) -> None:
    for value, number in ((text_of(data), 1), ([text_of(data)] * 2, 2)):
        body = {"model": MODEL, "prompt_embeds": value, "max_tokens": 3}
        for more in ({}, {"prompt": ""}, {"prompt": None}):
            exchange = open_completion({**body, **more}, context())
            assert len(exchange.prompts) == number
            for prompt in exchange.prompts:
                assert prompt.prompt == () and np.array_equal(prompt.vectors, VECTORS)


def header_of(text: str) -> bytes:
    body = text.encode().ljust(118) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(body).to_bytes(2, "little") + body


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"prompt_embeds": "?"}, "prompt_embeds", "is no base64"),
        ({"prompt_embeds": ""}, "prompt_embeds", "is empty"),
        ({"prompt_embeds": 3}, "prompt_embeds", "must be a string or a list of strings"),
        ({"prompt_embeds": []}, "prompt_embeds", "at least one array"),
        ({"prompt_embeds": ["AAAA"]}, "prompt_embeds[0]", "safetensors or .npy"),
        ({"prompt_embeds": text_of(b"PK\x03\x04zip")}, "prompt_embeds", "torch.save"),
        ({"prompt_embeds": text_of(save({"a": VECTORS, "b": VECTORS}))}, "prompt_embeds", "not 2"),
        ({"prompt_embeds": text_of(npy_of(VECTORS)[:-1])}, "prompt_embeds", "47 bytes"),
        (
            {
                "prompt_embeds": text_of(
                    header_of("{'descr': '<f4', 'fortran_order': False, 'shape': (1<<40,)}")
                )
            },
            "prompt_embeds",
            "header",
        ),
        (
            {
                "prompt_embeds": text_of(
                    header_of("{'descr': '<f4', 'fortran_order': False, 'shape': (9999999999,)}")
                )
            },
            "prompt_embeds",
            "0 bytes, and its header says",
        ),
        (
            {
                "prompt_embeds": text_of(
                    header_of("{'descr': '|O', 'fortran_order': False, 'shape': (0,)}")
                )
            },
            "prompt_embeds",
            "header",
        ),
        ({"prompt_embeds": text_of(npy_of(VECTORS)), "prompt": "a"}, "prompt_embeds", "exclude"),
        ({"prompt_embeds": text_of(npy_of(VECTORS)), "echo": True}, "echo", "needs text"),
        ({}, "prompt", "is required"),
    ],
)
def test_wrong_vectors_are_refused(fields: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(ApiError) as caught:
        open_completion({"model": MODEL, "max_tokens": 3, **fields}, context())
    assert (caught.value.status, caught.value.param) == (400, param)
    assert message in caught.value.message


@examples(50)
@given(data=st.data())
def test_damaged_vectors_are_arrays_or_refused(data: st.DataObject) -> None:
    file = bytearray(
        data.draw(st.sampled_from([npy_of(VECTORS), save({"a": VECTORS}), b"\x93NUMPY\x01\x00"]))
    )
    for _ in range(data.draw(st.integers(0, 3))):
        file[data.draw(st.integers(0, len(file) - 1))] = data.draw(st.integers(0, 255))
    try:
        array = read_vectors(text_of(bytes(file[: data.draw(st.integers(0, len(file)))])), "v")
    except ApiError as error:
        assert error.param == "v"
    else:
        assert array.nbytes <= len(file)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "image": SMALL},
        {"type": "image", "url": url_of(SMALL)},
        {"type": "image", "base64": text_of(SMALL)},
        {"type": "image_url", "image_url": url_of(SMALL)},
        {"type": "image_url", "image_url": {"url": url_of(SMALL)}},
        {"type": "image_pil", "image_pil": picture(40, 40)},
    ],
)
def test_parts_in_python(part: dict[str, Any]) -> None:
    processor = processor_of("qwen3_vl")
    (expected,) = processor.process([SMALL])
    assert processor.process([picture_in(part)])[0].key == expected.key


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image"},
        {"type": "image", "image": SMALL, "url": url_of(SMALL)},
        {"type": "image_url", "image_url": {"url": "https://e.com/x.png"}},
        {"type": "image_url", "image_url": {}},
        {"type": "image_url"},
    ],
)
def test_wrong_parts_in_python(part: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="give the picture itself|must have one picture"):
        picture_in(part)


def test_bodies_are_json() -> None:
    """Clients can send what the tests send."""
    for body in (CHAT, messages_body(), responses_body(), ollama_body()):
        assert json.loads(json.dumps(body)) == body


class Seeing:
    """A SmolVLM with random weights, in Python and on a server, and the model of transformers."""

    def __init__(self, directory: Path) -> None:
        self.theirs = save_seeing_model(directory)
        self.directory = directory
        settings = {"enable_prompt_embeds": True, "max_model_len": 512}
        self.llm = make_llm(directory, max_num_batched_tokens=64, **settings)

    def their_logprobs(self, text: str, pictures: list[Image.Image]) -> np.ndarray:
        """Returns the log probabilities of the first token, by transformers' own processor and
        model.
        """
        torch = pytest.importorskip("torch")
        token_ids, arrays = oracle_of("smolvlm")(text, pictures)
        inputs = {
            name: torch.from_numpy(np.asarray(arrays[name]))
            for name in ("pixel_values", "pixel_attention_mask")
        }
        with torch.no_grad():
            logits = self.theirs(input_ids=torch.tensor([token_ids]), **inputs).logits[0, -1]
        return torch.log_softmax(logits.double(), dim=-1).numpy()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seeing]:
    made = Seeing(tmp_path_factory.mktemp("smolvlm"))
    yield made
    made.llm.shutdown()


GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=5)
QUESTION = [{"type": "image", "image": SMALL}, text("What?"), {"type": "image", "image": TALL}]
REQUESTED = "<|im_start|>User:<image>What?<image><end_of_utterance>\nAssistant:"


def ids_of(output: Any) -> list[int]:
    return list(output.outputs[0].token_ids)


def test_python_gives_what_transformers_gives(model: Seeing) -> None:
    llm = model.llm
    (first,) = llm.chat([user_message(QUESTION)], GREEDY, use_tqdm=False)
    pictures = [load_picture(SMALL), load_picture(TALL)]
    expected = model.their_logprobs(REQUESTED, pictures)
    for token_id, entry in first.outputs[0].logprobs[0].items():
        assert abs(entry.logprob - expected[token_id]) < 1e-4
    token_ids, _ = oracle_of("smolvlm")(REQUESTED, pictures)
    assert list(first.prompt_token_ids) == token_ids
    pixels = [np.asarray(each) for each in pictures]
    prompts = [
        {"prompt": REQUESTED, "multi_modal_data": {"image": sources}}
        for sources in (pictures, pixels, [SMALL, url_of(TALL)])
    ]
    prompts.append({"prompt_token_ids": token_ids, "multi_modal_data": {"image": pixels}})
    prompts.append(llm.chat_prompt([user_message(QUESTION)]))
    for output in llm.generate(prompts, GREEDY, use_tqdm=False):
        assert ids_of(output) == ids_of(first)
        assert list(output.prompt_token_ids) == token_ids
    (rotated,) = llm.generate(
        {"prompt": REQUESTED, "multi_modal_data": {"image": [TALL, SMALL]}}, GREEDY, use_tqdm=False
    )
    assert rotated.outputs[0].logprobs != first.outputs[0].logprobs


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        ({"prompt": "a", "multi_modal_data": {"image": SMALL}}, ValueError, "0 places .* 1 pict"),
        ({"prompt": "<image>", "multi_modal_data": {"image": []}}, ValueError, "1 place .* 0 pict"),
        ("<image>", ValueError, "1 place .* 0 pictures"),
        ({"prompt": "<image>", "multi_modal_data": {"video": 1}}, UnsupportedError, "'video'"),
        ({"prompt": "<image>", "multi_modal_data": [SMALL]}, TypeError, "multi_modal_data must"),
        ({"prompt": "<image>", "multi_modal_data": {"image": 3}}, TypeError, "a picture must be"),
        (
            {"prompt": "<image>", "multi_modal_data": {"image": "/no/file"}},
            ValueError,
            "is no file",
        ),
        (
            {"prompt": "<image>", "multi_modal_data": {"image": "https://e.com/x"}},
            ValueError,
            "nothing is fetched",
        ),
    ],
)
def test_python_refuses(prompt: Any, error: type[Exception], message: str, model: Seeing) -> None:
    with pytest.raises(error, match=message):
        model.llm.generate(prompt, GREEDY, use_tqdm=False)


def test_a_text_model_refuses_pictures_in_python(model: Seeing) -> None:
    with make_llm(model.directory, limit_images=0, max_model_len=512) as llm:
        for call in (
            lambda: llm.chat([user_message(QUESTION)], GREEDY, use_tqdm=False),
            lambda: llm.generate(
                {"prompt": REQUESTED, "multi_modal_data": {"image": [SMALL, TALL]}}, GREEDY
            ),
        ):
            with pytest.raises(UnsupportedError, match="takes no pictures"):
                call()
    with pytest.raises(UnsupportedError, match="no pictures"):
        model.llm.embed({"prompt": REQUESTED, "multi_modal_data": {"image": [SMALL, TALL]}})


def test_the_clients_of_all_apis_get_the_answer_of_python(model: Seeing) -> None:
    config = EngineConfig(
        model=str(model.directory),
        dtype="float32",
        max_model_len=512,
        max_num_batched_tokens=64,
        num_blocks=129,
        enable_prompt_embeds=True,
    )
    with when_used():
        built = build_engine(config)
    (expected,) = model.llm.chat([user_message(QUESTION)], GREEDY, use_tqdm=False)
    answer = expected.outputs[0].text
    num_tokens = len(expected.prompt_token_ids)
    with serving(built, engine=config, served_model_name=("smol",)) as server:
        with openai.OpenAI(base_url=f"{server.address}/v1", api_key="x") as client:
            parts: Any = [image(SMALL), text("What?"), image(TALL)]
            common: Any = {"temperature": 0, "extra_body": {"ignore_eos": True}}
            whole = client.chat.completions.create(
                model="smol", messages=[user_message(parts)], max_tokens=4, **common
            )
            assert whole.choices[0].message.content == answer
            assert whole.usage is not None and whole.usage.prompt_tokens == num_tokens
            items: Any = [
                {"type": "input_image", "image_url": url_of(SMALL), "detail": "auto"},
                {"type": "input_text", "text": "What?"},
                {"type": "input_image", "image_url": url_of(TALL), "detail": "auto"},
            ]
            response = client.responses.create(
                model="smol", input=[user_message(items)], max_output_tokens=4, **common
            )
            assert response.output_text == answer
            later = client.responses.create(
                model="smol",
                input="And?",
                previous_response_id=response.id,
                max_output_tokens=2,
                **common,
            )
            assert later.usage is not None and later.usage.input_tokens > num_tokens
            models = client.models.list().data
            assert (models[0].model_extra or {})["capabilities"] == {"vision": True}
            with pytest.raises(openai.BadRequestError) as caught:
                broken: Any = [image(SMALL[:50])]
                client.chat.completions.create(model="smol", messages=[user_message(broken)])
            assert caught.value.param == "messages[0].content[0].image_url.url"
            rows = np.random.default_rng(1).standard_normal((5, 64), np.float32)
            (of_vectors,) = model.llm.generate({"prompt_embeds": rows}, GREEDY, use_tqdm=False)
            extra = {"prompt_embeds": text_of(npy_of(rows)), "ignore_eos": True}
            completion = client.completions.create(
                model="smol", prompt="", max_tokens=4, temperature=0, extra_body=extra
            )
            assert completion.choices[0].text == of_vectors.outputs[0].text
            extra["prompt_embeds"] = text_of(npy_of(rows[:, :3]))
            with pytest.raises(openai.BadRequestError) as caught:
                client.completions.create(model="smol", prompt="", extra_body=extra)
            assert caught.value.param == "prompt_embeds" and "(5, 3)" in caught.value.message
        with anthropic.Anthropic(base_url=server.address, api_key="x") as claude:

            def block(data: bytes) -> Any:
                source = {"type": "base64", "media_type": "image/png", "data": text_of(data)}
                return {"type": "image", "source": source}

            turns: Any = [user_message([block(SMALL), text("What?"), block(TALL)])]
            message = claude.messages.create(
                model="smol",
                max_tokens=4,
                messages=turns,
                extra_body={"ignore_eos": True, "temperature": 0},
            )
            assert message.content[0].text == answer  # type: ignore[union-attr]
            counted = claude.messages.count_tokens(model="smol", messages=turns)
            assert counted.input_tokens == num_tokens
        with ollama.Client(host=server.address) as theirs:
            options = {"temperature": 0, "num_predict": 2}
            shown = theirs.chat(
                model="smol",
                messages=[{"role": "user", "content": "What?", "images": [SMALL, TALL]}],
                options=options,
            )
            assert shown.prompt_eval_count == num_tokens and shown.message.content is not None
            made = theirs.generate(model="smol", prompt="What?", images=[SMALL], options=options)
            assert made.prompt_eval_count is not None and made.prompt_eval_count < num_tokens
            assert "vision" in (theirs.show("smol").capabilities or [])
