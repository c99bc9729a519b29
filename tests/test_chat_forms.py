"""Forms of tool calls and reasoning that are derived from chat templates: what transformers renders
is read back, however it is cut.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpage.chat_forms import ChatFormat, Derived, derive, grammar_of
from jaxpage.chat_forms.deriving_text import _header
from jaxpage.chat_forms.markers import PLACEHOLDER, before_placeholder
from jaxpage.chat_forms.probes import Call, Prober
from jaxpage.chat_forms.text_buffer import TextBuffer
from jaxpage.decoding import json_rule
from jaxpage.decoding.grammars import matcher_of, problem_of, source_of, tokenizer_of
from jaxpage.serving.wire.derived_forms import derive_form
from jaxpage.serving.wire.template_worker import render_template
from jaxpage.serving.wire.thinking import Wish, budget_values
from jaxpage.settings.sampling_params import SamplingParams
from tests.support.chat_templates import (
    HINTED,
    NO_TOOLS,
    REPORTED,
    REPORTED_OTHERWISE,
    REPORTED_TO_THINK,
    STRAY,
    TEMPLATES,
    THOUGHT,
    UNCLEAR,
    UNTOLD,
)
from tests.support.reported_calls import REPORTS
from tests.support.sweeps import examples
from tests.support.wire import context, tokenizer, with_template

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
PROPERTIES = {
    "city": {"type": "string"},
    "note": {"type": ["string", "null"]},
    "days": {"type": "integer"},
    "share": {"anyOf": [{"type": "number"}, {"type": "null"}]},
    "metric": {"type": "boolean"},
    "nothing": {"type": "null"},
    "tags": {"type": "array", "items": {"type": "string"}},
    "deep": {"$ref": "#/$defs/deep"},
}
PARAMETERS = {
    "type": "object",
    "properties": PROPERTIES,
    "$defs": {"deep": {"type": "object", "properties": {"k": {"type": "integer"}}}},
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": PARAMETERS}}
    for name in ("get_weather", "look-up2")
]
ARGUMENTS: list[dict[str, Any]] = [
    {"city": "São Paulo", "days": 3, "metric": True},
    {"city": "3", "note": "true", "days": -7},
    {"share": 0.25, "metric": False, "nothing": None, "city": "x"},
    {"tags": ["a b", "c,d"], "city": "it's [1]"},
    {"deep": {"k": 1, "l": {"m": "n"}}, "city": "y"},
    {"city": 'two\nlines, "quoted" and \\ and it\'s & so on', "days": 0},
    {"city": "a </parameter> and <tool_call> {\"name\": \"x\"} in prose", "note": "]"},
    {},
]  # fmt: skip
# Templates that do not render what is asked, or not so that it can be told apart.
DROPS_CONTENT = {"object without a tag, one only", "array, channels and an open end"}
KEEPS_CONTENT_AS_REASONING = {"channels"}
SINGLE = {"object without a tag, one only", "channels"}
NO_REASONING_RENDERED = {
    name
    for name in TEMPLATES
    if "reasoning_content" not in TEMPLATES[name] and "p.thinking" not in TEMPLATES[name]
}


def render(
    source: str,
    messages: Sequence[dict[str, Any]],
    tools: Sequence[dict[str, Any]] | None = TOOLS,
    *,
    generates: bool = False,
    **variables: Any,
) -> str:
    """Returns the text of transformers."""
    requested = {"template": source, "special_tokens": SPECIAL, "messages": list(messages)}
    requested |= {"tools": tools and list(tools), "add_generation_prompt": generates}
    return render_template({**requested, "continue_final_message": False, "variables": variables})


@functools.cache
def derive_form_of(source: str) -> Derived:
    def renders(messages: Any, tools: Any, generates: bool, variables: Any) -> str:
        try:
            return render(source, messages, tools, generates=generates, **variables)
        except Exception as error:
            raise ValueError(str(error)) from None

    return derive(renders, source)


def answer(
    name: str,
    calls: Sequence[tuple[str, dict[str, Any]]] = (),
    *,
    content: str = "",
    reasoning: str = "",
) -> tuple[str, str]:
    """Returns the prompt and the answer that a template renders."""
    source, requested = TEMPLATES[name], {"role": "user", "content": "Hi"}
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning and name == "name, mark, JSON":
        message["content"] = [
            {"type": "thinking", "thinking": reasoning},
            {"type": "text", "text": content},
        ]
    elif reasoning:
        message["reasoning_content"] = reasoning
    as_text = name == "a fenced block"
    if calls:
        message["tool_calls"] = [
            {
                "id": f"functions.{tool}:{index}" if "id in place" in name else f"abc12345{index}",
                "type": "function",
                "function": {
                    "name": tool,
                    "arguments": json.dumps(arguments) if as_text else arguments,
                },
            }
            for index, (tool, arguments) in enumerate(calls)
        ]
    whole, prompt = (
        render(source, [requested, message]),
        render(source, [requested], generates=True),
    )
    if whole.startswith(prompt):
        return prompt, whole[len(prompt) :]
    end = next(index for index in range(len(prompt)) if whole[index] != prompt[index])
    while whole[end - 1] not in ">]\n":
        end -= 1
    return whole[:end], whole[end:]


def read(form: ChatFormat, texts: Sequence[str], prompt: str, tools: Any = TOOLS) -> dict[str, Any]:
    """Returns the message, and checks that the deltas say the same once."""
    reader = form.reader(tools, prompt)
    deltas = [delta for text in texts for delta in reader.feed(text)]
    message = reader.finish()
    for field in ("content", "reasoning_content"):
        assert message[field].startswith("".join(delta.get(field, "") for delta in deltas))
    said = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert [call["index"] for call in said] == list(range(len(said)))
    assert [{"name": call["name"], "arguments": call["arguments"]} for call in said] == message[
        "tool_calls"
    ][: len(said)]
    # The reader knows where the reasoning is; messages of reasoning are on lines of their own.
    places, text = reader._parser.reasoning, "".join(texts)
    thoughts = [text[begin:end] for begin, end in zip(places.begins, places.ends, strict=True)]
    joint = "" if form.headers is None else "\n"
    assert joint.join(filter(None, thoughts)).strip() == message["reasoning_content"].strip()
    return message


def calls_of(message: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [(call["name"], json.loads(call["arguments"])) for call in message["tool_calls"]]


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_a_template_renders_is_read_back(name):
    form, problem = derive_form_of(TEMPLATES[name])
    assert problem is None and form.tool_form
    for arguments in ARGUMENTS:
        prompt, text = answer(name, [("look-up2", arguments)])
        message = read(form, [text], prompt)
        assert calls_of(message) == [("look-up2", arguments)], text
        assert (message["content"], message["reasoning_content"]) == ("", "")
        assert read(form, text, prompt) == message
    two = [("get_weather", ARGUMENTS[0]), ("look-up2", ARGUMENTS[1])]
    if name not in SINGLE:
        prompt, text = answer(name, two)
        assert calls_of(read(form, text, prompt)) == two, text
    if name not in DROPS_CONTENT | KEEPS_CONTENT_AS_REASONING:
        prompt, text = answer(name, two, content="I look. 1 < 2 [a] {b}")
        message = read(form, text, prompt)
        assert (message["content"], calls_of(message)) == ("I look. 1 < 2 [a] {b}", two), text
    prompt, text = answer(name, content="No <tool_call> here:\n\nnothing {}.")
    message = read(form, text, prompt)
    assert (message["content"], message["tool_calls"]) == (
        "No <tool_call> here:\n\nnothing {}.",
        [],
    ), text


@pytest.mark.parametrize("name", sorted(set(TEMPLATES) - NO_REASONING_RENDERED))
def test_reasoning_is_read_back(name):
    form, _ = derive_form_of(TEMPLATES[name])
    call = [("get_weather", ARGUMENTS[1])]
    for calls, content in (((), "So: 4."), (call, "")):
        if not calls and name in DROPS_CONTENT:
            continue
        prompt, text = answer(name, calls, content=content, reasoning="Two and two.\nIs <x> four?")
        message = read(form, text, prompt)
        expected = {"content": content, "reasoning_content": "Two and two.\nIs <x> four?"}
        assert {field: message[field] for field in expected} == expected, text
        assert calls_of(message) == list(calls)


def cut(text: str, data: st.DataObject) -> list[str]:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=9)))
    return [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**6), 10**6)
    | st.text("ab<>\"'\\{}[],:= \n\té", max_size=12),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text("kl", min_size=1, max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)
WRITES_ANY_JSON = [
    name
    for name in TEMPLATES
    if derive_form_of(TEMPLATES[name]).form.tools.payload != "items"  # type: ignore[union-attr]  # each has one
    and name not in ("object of Python", "a fenced block")
]


@pytest.mark.parametrize("name", WRITES_ANY_JSON)
@examples(4)
@given(value=JSON_VALUES, data=st.data())
def test_any_json_is_read_back_however_it_is_cut(name, value, data):
    form = derive_form_of(TEMPLATES[name]).form
    prompt, text = answer(name, [("get_weather", {"x": value})])
    message = read(form, cut(text, data), prompt, None)
    assert calls_of(message) == [("get_weather", {"x": value})]


@pytest.mark.parametrize("name", TEMPLATES)
@examples(5)
@given(data=st.data())
def test_what_does_not_fit_is_content_however_it_is_cut(name, data):
    """The markers of the form come in any order, with calls among them."""
    form = derive_form_of(TEMPLATES[name]).form
    assert form.tools is not None
    _, call = answer(name, [("look-up2", {"city": "x", "days": 1})])
    markers = [marker for marker in form.tools.markers if not PLACEHOLDER.search(marker)]
    bits = st.sampled_from(
        [
            *markers,
            *(marker[:3] for marker in markers),
            call,
            "look-up2",
            "{",
            '"',
            "}",
            " ",
            "\n",
            "x",
        ]
    )
    text = "a" + "".join(data.draw(st.lists(bits, max_size=9)))
    whole = read(form, [text], "")
    assert read(form, cut(text, data), "") == whole
    if not whole["tool_calls"]:
        remaining = text
        for marker in sorted((*form.content.tails, *form.content.closes), key=len, reverse=True):
            remaining = remaining.removesuffix(marker.rstrip()).removesuffix(marker.strip())
        assert "".join(whole["content"].split()).startswith("".join(remaining.split())[:1])
        if not form.content.tails and not form.content.closes:
            assert whole["content"] == text


@pytest.mark.parametrize(
    ("name", "begin", "unit"),
    [
        (
            "parameters on lines",
            "",
            "<tool_call>\n<function=look-up2>\n<parameter=k>\n</parameter>x",
        ),
        ("quotes of its own", "<|tool_call>call:look-up2{a:", "["),
        ("name, mark, JSON", '[TOOL_CALLS]look-up2[ARGS]{"a":', "["),
        ("code", "", '<|tool_call_start|>[look-up2(a="'),
    ],
)
@pytest.mark.timeout(30)  # a reader that is not linear takes longer
def test_a_long_text_of_markers_is_content_in_little_time(name, begin, unit):
    form, text = derive_form_of(TEMPLATES[name]).form, begin + unit * (40_000 // len(unit))
    message = read(form, [text[index : index + 7] for index in range(0, len(text), 7)], "")
    assert (message["content"], message["tool_calls"]) == (text, [])
    assert read(form, [text], "") == message


def test_a_template_without_a_form_says_so():
    form, problem = derive_form_of(UNCLEAR)
    assert form.tool_form is None and form.has_tools and problem
    form, problem = derive_form_of(NO_TOOLS)
    assert form.tool_form is None and not form.has_tools and problem is None


def test_a_template_that_cannot_show_some_schemas_has_a_form():
    """Hermes' own macro for types fails where a tool has an array."""
    fails = "{% for t in tools or [] %}{% if 'array' in t | tojson %}{{ raise_exception('no arrays') }}{% endif %}{% endfor %}"
    form, problem = derive_form_of(fails + TEMPLATES["object in tags"])
    assert problem is None and form == derive_form_of(TEMPLATES["object in tags"]).form


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("answer in tags", "<response>\nSo it is.\n</response>\n<|im_end|>\n"),
        ("answer in tags", "<response>\nSo it is.\n</response>\n"),
        ("keys and values", "\nSo it is."),
    ],
)
def test_content_has_no_mark_where_the_prompt_skips_the_reasoning(name, text):
    form = derive_form_of(TEMPLATES[name]).form
    requested = [{"role": "user", "content": "Hi"}]
    prompt = render(TEMPLATES[name], requested, generates=True, enable_thinking=False)
    message = read(form, text, prompt)
    assert message == {"content": "So it is.", "reasoning_content": "", "tool_calls": []}
    assert read(form, [text], prompt) == message


@pytest.mark.parametrize("variables", [{}, {"enable_thinking": True}])
def test_reasoning_that_only_a_prompt_opens_is_read(variables):
    """Such templates render an earlier answer as it is, and have no marker after reasoning."""
    opened = "{% if enable_thinking %}<think>\n{% endif %}" if variables else "<think>"
    source = TEMPLATES["object in tags"].replace(THOUGHT, "")
    source = source.removesuffix("{% endif %}") + opened + "{% endif %}"
    form, requested = derive_form_of(source).form, [{"role": "user", "content": "Hi"}]
    message = read(
        form, "Hm.\n</think>\n\nYes.", render(source, requested, generates=True, **variables)
    )
    assert (message["reasoning_content"].strip(), message["content"].strip()) == ("Hm.", "Yes.")
    assert read(form, "Yes.", render(source, requested))["content"] == "Yes."


def test_a_form_shows_one_call():
    lines = "<tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>\n</tool_call>"
    shown = {
        "parameters on lines": lines,
        "name, id, JSON": "[TOOL_CALLS]NAME[CALL_ID]ID[ARGS]{...}",
    }
    for name, example in shown.items():
        assert derive_form_of(TEMPLATES[name]).form.tools.example.strip() == example  # type: ignore[union-attr]


def test_a_plan_before_calls_is_reasoning():
    source = TEMPLATES["array, channels and an open end"]
    plans = source.replace("reasoning_content", "tool_plan")
    form = derive_form_of(plans).form
    assert form.sent.name == "tool_plan"
    assert replace(form, sent=derive_form_of(source).form.sent) == derive_form_of(source).form


def test_the_schema_decides_what_a_bare_value_is():
    form = derive_form_of(TEMPLATES["parameters on lines"]).form
    arguments = {
        "city": "3",
        "days": "3",
        "metric": "True",
        "deep": "{'k': 1}",
        "tags": '["a"]',
        "note": "None",
    }
    prompt, text = answer("parameters on lines", [("get_weather", arguments)])
    expected = {
        "city": "3",
        "days": 3,
        "metric": True,
        "deep": {"k": 1},
        "tags": ["a"],
        "note": None,
    }
    assert calls_of(read(form, text, prompt)) == [("get_weather", expected)]
    ((_, without),) = calls_of(read(form, text, prompt, None))
    assert without == {**expected, "city": 3}, (
        "what reads as JSON is JSON where no schema says more"
    )


def parameters_of(name: str, **properties: Any) -> list[dict[str, Any]]:
    """Returns a tool with these properties, as the only one of a request."""
    schema = {"type": "object", "properties": properties}
    return [{"type": "function", "function": {"name": name, "parameters": schema}}]


ITEMS = "{% for k, v in f.arguments.items() %}"
EACH = "{% for m in messages %}{% if m.role == 'user' %}<u>{{ m.content }}</u>{% else %}<a>{{ m.content }}{% for c in m.tool_calls or [] %}{% set f = c.function %}"  # noqa: E501
END = "{% endfor %}</a>{% endif %}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
NOT_READABLE = {
    "values without markers": f"Action: {{{{ f.name }}}}\n{ITEMS}{{{{ k }}}}: {{{{ v }}}}\n{{% endfor %}}",
    "no marker at all": f"{{{{ f.name }}}}{ITEMS}{{{{ k }}}}{{{{ v }}}}{{% endfor %}}",
    "a call for each argument": "{% for k, v in (f.arguments or {'': 0}).items() %}"
    "<call>{{ {'name': f.name, 'arguments': {k: v}} | tojson }}</call>{% endfor %}",
}


@pytest.mark.parametrize("name", NOT_READABLE)
def test_a_template_whose_calls_cannot_be_read_has_a_problem(name):
    form, problem = derive_form_of(EACH + NOT_READABLE[name] + END)
    assert form.tool_form is None and form.has_tools and problem


def test_a_template_that_always_raises_has_no_form():
    assert derive_form_of("{{ raise_exception('no') }}") == Derived(ChatFormat(), None)


def test_the_marker_of_the_content_may_be_what_ends_the_reasoning():
    source = TEMPLATES["object in tags"].replace("</think>\n\n", "").replace("</think>", "")
    source = source.replace(
        "{{ m.content }}" + "{% if m.tool_calls %}",
        "<answer>{{ m.content }}</answer>{% if m.tool_calls %}",
    )
    form = derive_form_of(source).form
    assert form.tools is not None and form.reasoning is not None
    for text in ("<think>\nHm.\n<answer>So.</answer><|im_end|>\n", "<answer>So.</answer>"):
        message = read(form, [text], "")
        assert message["content"] == "So.", text
        assert message["reasoning_content"] == ("Hm." if "Hm" in text else ""), text
        assert read(form, text, "") == message


@pytest.mark.timeout(60)  # a reader or a grammar of exponential time takes longer
def test_nested_schemas_are_followed_in_little_time():
    """References to each other, and arrays in arrays that never end."""
    refers = [{"$ref": "#/properties/city"}] * 40
    (tool,) = tools = parameters_of("look-up2", city={"anyOf": [*refers, {"type": "integer"}]})
    form = derive_form_of(TEMPLATES["parameters on lines"]).form
    prompt, text = answer("parameters on lines", [("look-up2", {"city": "3"})])
    assert calls_of(read(form, [text], prompt, tools)) == [("look-up2", {"city": 3})]
    schemas = {"look-up2": tool["function"]["parameters"]}
    assert "city" in grammar_of(
        form,
        schemas,
        lambda schema: json_rule(json.dumps(schema)),
        several=False,
        is_open=False,
        special_tokens={},
    )
    schema: dict[str, Any] = {}
    for _ in range(26):
        schema = {"type": "array", "items": schema}
    text = "<|tool_call>call:look-up2{a:" + "[" * 30
    form = derive_form_of(TEMPLATES["quotes of its own"]).form
    assert read(form, [text], "", parameters_of("look-up2", a=schema))["content"] == text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("name, mark, JSON", f"[TOOL_CALLS]{'f' * 300}[ARGS]{{}}"),
        ("channels", f"<|channel|>analysis {'x' * 600}<|message|>Hm."),
    ],
)
def test_a_name_or_a_header_that_is_too_long_is_content_however_it_is_cut(name, text):
    form = derive_form_of(TEMPLATES[name]).form
    message = read(form, [text], "", None)
    assert message == {"content": text, "reasoning_content": "", "tool_calls": []}
    assert read(form, text, "", None) == message


@pytest.mark.parametrize("name", ["name, mark, JSON", "function tag around JSON", "object in tags"])
def test_the_name_of_a_tool_may_have_spaces(name):
    form = derive_form_of(TEMPLATES[name]).form
    prompt, text = answer(name, [("look up", {"city": "x"})])
    tools = parameters_of("look up", city={"type": "string"})
    assert calls_of(read(form, text, prompt, tools)) == [("look up", {"city": "x"})]


@pytest.mark.parametrize("text", ["1, 2", "3 # three", "'a', 'b'", "[1] # one"])
def test_a_text_that_only_python_reads_as_a_literal_is_a_string(text):
    form = derive_form_of(TEMPLATES["parameters on lines"]).form
    prompt, written = answer("parameters on lines", [("look-up2", {"city": text})])
    assert calls_of(read(form, [written], prompt, None)) == [("look-up2", {"city": text})]


@pytest.mark.parametrize("num_letters", [3, 30, 60])
def test_a_call_that_is_cut_off_is_content(num_letters):
    for name in ("object in tags", "parameters on lines", "code", "name, mark, JSON"):
        form = derive_form_of(TEMPLATES[name]).form
        _, text = answer(name, [("look-up2", {"city": "a long name of a city", "days": 1})])
        text = text[text.index(form.tools.trigger) :]  # type: ignore[union-attr]
        message = read(form, text[:num_letters], "")
        assert (message["content"], message["tool_calls"]) == (text[:num_letters], [])


def test_a_template_that_changes_values_has_no_form():
    """Long strings are written backwards, so that probes are read and round trips are not."""
    reverses = "{{ (v | reverse if v | length > 8 else v) if v is string"
    form, problem = derive_form_of(
        TEMPLATES["parameters on lines"].replace("{{ v if v is string", reverses)
    )
    assert form.tool_form is None and problem and "look_up" in problem and "yadnoM" in problem


def test_a_mistake_in_the_reader_is_found_by_the_round_trips(monkeypatch):
    monkeypatch.setattr("jaxpage.chat_forms.calls.value_of", lambda text, form, allowed: text[:-1])
    derive_form_of.cache_clear()
    try:
        form, problem = derive_form_of(TEMPLATES["parameters on lines"])
    finally:
        derive_form_of.cache_clear()
    assert form.tool_form is None and problem


THINKS = "<|channel|>analysis<|message|>Hm, {}.<|end|><|start|>assistant"
SAYS = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
GIVEN = '<|message|>{"city": "Oslo"}'
SEARCH = '<|channel|>analysis to=browser.search code<|message|>{"query": "x"}'
CALLED = [("look-up2", {"city": "Oslo"})]


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "calls"),
    [
        # The recipient in the channel's part or the role's; with the type of the arguments or not.
        (f"{THINKS}<|channel|>commentary to=functions.look-up2 <|constrain|>json{GIVEN}<|call|>",
         "Hm, {}.", "", CALLED),
        (f"{THINKS}<|channel|>commentary to=functions.look-up2{GIVEN}<|call|>", "Hm, {}.", "",
         CALLED),
        (f" to=functions.look-up2<|channel|>commentary <|constrain|>json{GIVEN}<|call|>", "", "",
         CALLED),
        (f"{THINKS} to=functions.look-up2<|channel|>analysis code{GIVEN}", "Hm, {}.", "", CALLED),
        # A word to the user before a call, reasoning around it, and calls one after the other.
        (f"{THINKS}{SAYS}<|channel|>commentary to=functions.look-up2 json{GIVEN}<|call|>",
         "Hm, {}.", "I look.", CALLED),
        (f"{SAYS}{THINKS} to=functions.look-up2<|channel|>commentary json{GIVEN}<|call|>",
         "Hm, {}.", "I look.", CALLED),
        (f"{THINKS}{SAYS}{THINKS}<|channel|>final<|message|>So.\n<|return|>", "Hm, {}.\nHm, {}.",
         "I look.\nSo.\n", []),
        (f"<|channel|>commentary to=functions.look-up2{GIVEN}<|call|><|start|>assistant to=functions.look-up2<|channel|>commentary{GIVEN}<|call|>", "", "", CALLED * 2),  # noqa: E501
        ("<|channel|>final <|constrain|>json<|message|>{}<|return|>", "", "{}", []),
        # Messages for others than the request's tools, and calls that are none.
        (f"{THINKS}{SEARCH}<|call|>", "Hm, {}.", SEARCH, []),
        (f"{THINKS}<|channel|>analysis to=python code<|message|>print(1)<|call|>", "Hm, {}.",
         "<|channel|>analysis to=python code<|message|>print(1)", []),
        (f" to=functions.other<|channel|>commentary json{GIVEN}<|call|>", "",
         f"to=functions.other<|channel|>commentary json{GIVEN}", []),
        (f"<|channel|>commentary to=functions.look-up2{GIVEN[:-3]}", "",
         f"<|channel|>commentary to=functions.look-up2{GIVEN[:-3]}", []),
        (f"<|channel|>commentary to=functions.look-up2{GIVEN} and so on", "",
         f"<|channel|>commentary to=functions.look-up2{GIVEN} and so on", []),
        # Cut off, quoted and missing headers.
        (f"{THINKS}<|channel|>fin", "Hm, {}.", "", []),
        (f"{THINKS}<|channel|>commentary to=functions.lo", "Hm, {}.",
         "<|start|>assistant<|channel|>commentary to=functions.lo", []),
        ("<|channel|>final<|message|>It ends with <|end|> or <|start|>assistant, <|channel|>x.", "",
         "It ends with <|end|> or <|start|>assistant, <|channel|>x.", []),
        ("Hello to=you.", "", "Hello to=you.", []),
    ],
)  # fmt: skip
@examples(3)
@given(data=st.data())
def test_headers_are_read_in_the_order_of_the_model(text, reasoning, content, calls, data):
    """The published description of harmony has several ways; the template renders one."""
    form = derive_form_of(TEMPLATES["channels"]).form
    prompt = render(TEMPLATES["channels"], [{"role": "user", "content": "Hi"}], generates=True)
    message = read(form, [text], prompt)
    assert (message["reasoning_content"], message["content"]) == (reasoning, content)
    assert calls_of(message) == calls
    assert read(form, text, prompt) == read(form, cut(text, data), prompt) == message


@pytest.mark.timeout(60)  # a reader that is not linear takes longer
def test_many_headers_without_calls_are_read_in_little_time():
    form = derive_form_of(TEMPLATES["channels"]).form
    for header in (' to=functions.look-up2<|message|>{"a": [', "<|channel|>"):
        text = ("<|end|><|start|>assistant" + header) * (40_000 // (25 + len(header)))
        message = read(form, [text[index : index + 7] for index in range(0, len(text), 7)], "")
        assert read(form, [text], "") == message and message["tool_calls"] == []


def test_a_prompt_may_begin_a_message():
    form = derive_form_of(TEMPLATES["channels"]).form
    prompt = "<|start|>user<|message|>Hi<|end|><|start|>assistant"
    thought = "<|channel|>analysis<|message|>Hm"
    for begun, field in (
        (thought, "reasoning_content"),
        ("<|channel|>final<|message|>", "content"),
    ):
        message = read(form, ["So.", "<|end|>"], prompt + begun)
        assert message[field] == "So." and sum(map(len, message.values())) == 3


def test_parts_of_an_answer_that_are_not_read_are_content():
    form = derive_form_of(TEMPLATES["channels"]).form
    call = f" to=functions.look-up2<|channel|>commentary json{GIVEN}"
    pieces = [*(reader := form.parser(None, "")).push(THINKS + call), *reader.finish()]
    assert [tuple(piece)[:2] for piece in pieces][-1][0] == "content"
    assert "".join(piece.text for piece in pieces if piece.kind == "content") == call.strip()
    silent = replace(form, reasoning=None)
    assert read(silent, THINKS + call, "")["content"] == THINKS.partition("<|end|>")[0]
    assert calls_of(read(silent, THINKS + call, "")) == CALLED


CALLS_A_TOOL = "<|tool_call>call:look-up2{city:<|q|>x<|q|>}<tool_call|>"
RESPONDS = "response:look-up2{value:3}"


@pytest.mark.parametrize(
    ("text", "content", "num_calls"),
    [
        (f"{CALLS_A_TOOL}<|tool_response>", "", 1),
        (f"{CALLS_A_TOOL}\n<|tool_response>\n", "", 1),
        (f"{CALLS_A_TOOL}Wait.<|tool_response>", "Wait.", 1),
        (f"{CALLS_A_TOOL}<|tool_response><turn|>\n", "", 1),
        ("Let me see.<|tool_response>", "Let me see.", 0),
        (f"{CALLS_A_TOOL}<|tool_response>{RESPONDS}<tool_response|>It is 3.<turn|>",
         f"{RESPONDS}It is 3.", 1),
        (f"{CALLS_A_TOOL}<|tool_response>{RESPONDS}<tool_response|>{CALLS_A_TOOL}<|tool_response>",
         RESPONDS, 2),
        (f"{CALLS_A_TOOL}<|tool_response>{{}} <|tool_res", "{} <|tool_res", 1),
        ("A <|tool_response> is a mark, <tool_response|> too.",
         "A <|tool_response> is a mark, <tool_response|> too.", 0),
    ],
)  # fmt: skip
@examples(3)
@given(data=st.data())
def test_the_marker_of_a_response_is_no_content_and_what_follows_is(text, content, num_calls, data):
    """A model stops with the marker, or goes on as if it were the tool."""
    form = derive_form_of(TEMPLATES["a response in the same answer"]).form
    message = read(form, [text], "")
    assert message["content"] == content
    assert calls_of(message) == [("look-up2", {"city": "x"})] * num_calls
    assert read(form, text, "") == read(form, cut(text, data), "") == message


def test_the_marker_of_a_response_is_found_where_an_answer_has_no_end():
    form = derive_form_of(TEMPLATES["keys and values"]).form
    prompt, text = answer("keys and values", [("look-up2", {"city": "x"})])
    message = read(form, [text, "<|observation|>"], prompt)
    assert (message["content"], calls_of(message)) == ("", [("look-up2", {"city": "x"})])


@pytest.mark.parametrize("name", REPORTED)
def test_calls_are_read_as_a_template_tells_to_write_them(name):
    """The template passes over the calls of a message."""
    source, call = REPORTED[name]
    form, problem = derive_form_of(source)
    assert problem is None and form.has_tools
    requested = [{"role": "user", "content": "Hi"}]
    prompt = render(source, requested, generates=True, enable_thinking=False)
    called = [("look-up2", {"city": "it's {x}", "days": 3})]
    for text, content in ((call, ""), (f"I look.\n{call}\n{call}<|im_end|>\n", "I look.")):
        message = read(form, [text], prompt)
        assert message["content"] == content and message["reasoning_content"] == ""
        assert calls_of(message) == called * text.count(call)
        assert read(form, text, prompt) == message
    message = read(form, f"<think>Hm.</think>{call}", render(source, requested, generates=True))
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "")
    assert calls_of(message) == called
    may_write = writer_of(form)
    assert may_write(call) and not may_write(call.replace("3", '"3"'))


@pytest.mark.parametrize("name", UNTOLD)
def test_what_a_template_tells_unclearly_is_no_form(name):
    form, problem = derive_form_of(UNTOLD[name])
    assert (form.tool_form, form.has_tools, problem) == (None, False, None)


def test_what_a_template_renders_goes_before_what_it_tells():
    form = derive_form_of(REPORTED_OTHERWISE).form
    assert form.tools is not None and form.tools.trigger == "<call>"


RESPONSE_TEMPLATE = {
    "start_anchor": "<|assistant|>",
    "defaults": {"role": "assistant"},
    "fields": {
        "content": {},
        "thinking": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open": "<<<",
            "close": ">>>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
    },
}


def test_a_declared_response_template_is_read_where_no_form_is_derived():
    """Transformers' own parser reads it; what that cannot read is content."""
    declares = with_template(NO_TOOLS)
    declares.response_template = RESPONSE_TEMPLATE
    form, problem = derive_form(declares)
    assert (form.tool_form, problem) == ("response_template", None)
    text = '<think>Hm.</think>Well <<<{"name": "look-up2", "arguments": {"city": "x"}}>>>'
    message = read(form, text, "<|assistant|>")
    assert (message["reasoning_content"], message["content"].strip()) == ("Hm.", "Well")
    assert calls_of(message) == [("look-up2", {"city": "x"})]
    assert "{no}" in read(form, "Well <<<{no}>>> then", "<|assistant|>")["content"]
    for region in ("3", '{"name": 3}', '{"name": "other"}', '"look-up2"', '[{"arguments": {}}]'):
        message = read(form, f"Well <<<{region}>>>", "<|assistant|>")
        assert message["content"] == f"Well {region}" and message["tool_calls"] == []
    call = '<<<{"name": "look-up2", "arguments": {}}>>>'
    message = read(form, [call, "<<<{no}>>>"], "<|assistant|>")
    assert message["content"] == "<<<{no}>>>" and calls_of(message) == [("look-up2", {})]


def test_the_text_of_a_declared_call_is_no_content():
    """Here a region is the name of a tool, which the parser gives out as it comes."""
    calls = {**RESPONSE_TEMPLATE["fields"]["tool_calls"], "content": "text"}
    calls["transform"] = {"type": "function", "function": {"name": "{content}", "arguments": {}}}
    fields = {**RESPONSE_TEMPLATE["fields"], "tool_calls": calls}
    declares = with_template(NO_TOOLS)
    declares.response_template = {**RESPONSE_TEMPLATE, "fields": fields}
    form, _ = derive_form(declares)
    for text in ("Well <<<look-up2>>>", [*"Well <<<look-up2>>>"]):
        message = read(form, text, "<|assistant|>")
        assert message["content"].strip() == "Well" and calls_of(message) == [("look-up2", {})]


HELD = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "deep": {"type": "object", "properties": {"k": {"type": "integer"}}, "required": ["k"]},
    },
    "required": ["city"],
}
# Their grammars write JSON where the template writes Python, or there is none.
OTHERWISE = {"object of Python", "values of Python", "code", "code without a mark", "attributes"}
NO_GRAMMAR = "arguments as text in an object"


def writer_of(form: ChatFormat) -> Callable[[str], bool]:
    """Returns a function that is true of a text that the grammar of required calls allows.

    One tool has a schema, and one has none.
    """
    known, end_id = tokenizer_of(tokenizer().backend_tokenizer.to_str())
    grammar = grammar_of(
        form,
        {"look-up2": HELD, "get_weather": {"type": "object", "properties": {}}},
        lambda schema: json_rule(json.dumps(schema)),
        several=True,
        is_open=False,
        special_tokens={},
    )
    source = source_of("grammar", json.dumps(grammar))
    assert problem_of(matcher_of(known, source), end_id) is None

    def may_write(text: str) -> bool:
        tokens, matcher = known.tokenize_str(text), matcher_of(known, source)
        return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())

    return may_write


@pytest.mark.parametrize("name", sorted(set(TEMPLATES) - OTHERWISE - {NO_GRAMMAR}))
def test_required_calls_are_held_to_the_form_and_the_schema(name):
    form = derive_form_of(TEMPLATES[name]).form
    tools = form.tools
    assert tools is not None
    allows = writer_of(form)

    def may_write(*calls: tuple[str, dict[str, Any]]) -> bool:
        _, text = answer(name, calls)
        for tail in (*form.content.tails, *form.content.responses):
            text = text.removesuffix(tail)
        opened = tools.begin + tools.open if tools.first is None else tools.first
        text = text[text.index(before_placeholder(opened).strip()) :]
        text = opened[: len(opened) - len(opened.lstrip())] + text.lstrip()
        return allows(text)

    everything = {"city": "it's (x)", "days": 3, "tags": ["a", "b"], "deep": {"k": 1}}
    assert may_write(("look-up2", {"city": "x y"})) and may_write(("look-up2", everything))
    assert may_write(("get_weather", {}))
    if name not in SINGLE:
        assert may_write(("look-up2", {"city": "x"}), ("get_weather", {}))
    assert not may_write(("look-up2", {"city": "x", "days": "no"}))
    assert not may_write(("look-up2", {"days": 1}))
    assert not may_write(("another", {"city": "x"}))


def test_required_calls_of_messages_with_headers_may_be_written_as_the_model_does():
    form = derive_form_of(TEMPLATES["channels"]).form
    may_write = writer_of(form)
    opened = "<|channel|>commentary to=functions.look-up2"
    for before in ("", THINKS, THINKS * 2):
        for kind in ("", " json", " <|constrain|>json"):
            text = f"{before}{opened}{kind}{GIVEN}<|call|>"
            assert may_write(text) and may_write(text.removesuffix("<|call|>"))
            assert calls_of(read(form, [text], "")) == CALLED
        assert may_write(f"{before} to=functions.look-up2<|channel|>commentary json{GIVEN}<|call|>")
    assert not may_write(f"{SAYS}{opened}{GIVEN}<|call|>")
    assert not may_write(opened.replace("look", "other") + f"{GIVEN}<|call|>")
    assert not may_write(f"{opened}<|message|>{{}}<|call|>")


def test_a_form_that_no_grammar_can_hold_is_refused():
    with pytest.raises(ValueError, match="as text"):
        grammar_of(
            derive_form_of(TEMPLATES[NO_GRAMMAR]).form,
            {"f": HELD},
            lambda schema: json_rule(json.dumps(schema)),
            several=False,
            is_open=False,
            special_tokens={},
        )


def thinking_prompt(source: str) -> str:
    """Returns a prompt that opens the reasoning, where the template has one."""
    return render(source, [{"role": "user", "content": "Hi"}], generates=True, enable_thinking=True)


OSLO = [("look-up2", {"city": "Oslo", "days": 3})]
BERN = [("get_weather", {"city": "Bern"})]
WRITES_OBJECTS = [
    name
    for name in TEMPLATES
    if derive_form_of(TEMPLATES[name]).form.tools.payload == "object"  # type: ignore[union-attr]  # each has one
    and name != "array with names as keys"
]


def same_however_cut(form: ChatFormat, text: str, prompt: str, data: st.DataObject) -> Any:
    message = read(form, [text], prompt)
    assert read(form, text, prompt) == read(form, cut(text, data), prompt) == message
    return message


@pytest.mark.parametrize("name", WRITES_OBJECTS)
@examples(2)
@given(data=st.data())
def test_arguments_may_have_the_other_usual_key(name, data):
    form = derive_form_of(TEMPLATES[name]).form
    prompt, text = answer(name, OSLO)
    key = form.tools.arguments_path[-1]  # type: ignore[union-attr]
    other = {"arguments": "parameters", "parameters": "arguments"}[key]
    assert key in text
    message = same_however_cut(form, text.replace(key, other), prompt, data)
    assert (calls_of(message), message["content"]) == (OSLO, "")


@pytest.mark.parametrize("name", WRITES_OBJECTS)
def test_an_object_may_be_that_of_a_request(name):
    form = derive_form_of(TEMPLATES[name]).form
    prompt, text = answer(name, [("look-up2", {})])
    begin, end = text.index("{"), text.rindex("}") + 1
    whole = {
        "type": "function",
        "function": {"name": "look-up2", "arguments": {"city": "Oslo", "days": 3}},
    }
    if form.tools.name_path == ("name",) and not form.tools.arguments_as_text:  # type: ignore[union-attr]
        assert calls_of(read(form, text[:begin] + json.dumps(whole) + text[end:], prompt)) == OSLO


@pytest.mark.parametrize("quote", ["'", '"'])
@pytest.mark.parametrize("city", ["Oslo", "a, b) ]", "3", "", "Sao\\nPaulo"])
@examples(2)
@given(data=st.data())
def test_code_may_have_other_quotes_than_the_template(quote, city, data):
    """LFM2.5's template puts texts between single quotes as they are."""
    source = TEMPLATES["code"].replace("{{ v | tojson }}", '{{ "\'" + v + "\'" }}', 1)
    form, problem = derive_form_of(source)
    assert problem is None
    text = f"<|tool_call_start|>[look-up2(city={quote}{city}{quote}, days=3)]<|tool_call_end|>"
    (call,) = calls_of(same_however_cut(form, text, "", data))
    assert call[1]["days"] == 3 and call[1]["city"].replace("\n", "\\n") == city
    two = text.replace(")]", f"), get_weather(city={quote}Bern{quote})]")
    assert calls_of(read(form, two, ""))[1:] == BERN


HAS_OUTER_TAG = [
    name
    for name in TEMPLATES
    if derive_form_of(TEMPLATES[name]).form.tools.bare  # type: ignore[union-attr]  # each has one
    and name != "types and numbered calls"  # whose first tag is that of all parts
]


def without_outer_tag(name: str, calls: Any) -> str:
    """Returns what a template renders of calls, without the first tag."""
    form = derive_form_of(TEMPLATES[name]).form.tools
    _, text = answer(name, calls)
    return text[text.index(form.trigger) + len(form.trigger) :].lstrip()  # type: ignore[union-attr]


@pytest.mark.parametrize("name", HAS_OUTER_TAG)
@examples(2)
@given(data=st.data())
def test_a_call_may_lack_its_opening_tag(name, data):
    """It is on a line of its own.

    Of two calls none is lost, and the orphan closing tag is no content.
    """
    form = derive_form_of(TEMPLATES[name]).form
    bare = form.tools.bare  # type: ignore[union-attr]
    assert bare is not None
    prompt = answer(name, OSLO)[0]
    if form.is_open(prompt):
        prompt += "Hm." + form.reasoning.close  # type: ignore[union-attr]
    for calls in (OSLO, OSLO + BERN):
        for before, content in (("", ""), ("I look.\n\n", "I look.")):
            if before and not bare.has_tag and (not bare.marker or len(calls) > 1):
                continue  # without a tag of its own such a call is the whole answer
            text = before + without_outer_tag(name, calls)
            message = same_however_cut(form, text, prompt, data)
            assert (message["content"], calls_of(message)) == (content, calls), text


def test_qwen_may_lack_the_tag_of_one_call_and_not_of_the_other():
    form, prompt = derive_form_of(TEMPLATES["parameters on lines"]).form, "<think>\n\n</think>\n\n"
    bare = "<function=look-up2>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>"
    other = "<tool_call>\n<function=get_weather>\n<parameter=city>\nBern\n</parameter>\n</function>\n</tool_call>"
    texts = {
        f"{bare}\n</tool_call>\n{other}": OSLO + BERN,
        f"{bare}\n{other}": OSLO + BERN,
        f"{other}\n{bare}": BERN + OSLO,
        f"{other}\n{bare}\n</tool_call>\n{bare}": BERN + OSLO * 2,
        f"{bare}<|im_end|>\n": OSLO,
        f"So: {bare}\n</tool_call>": OSLO,
    }
    for text, calls in texts.items():
        message = read(form, [text], prompt)
        assert (calls_of(message), message["content"]) == (calls, "So:" if "So" in text else "")
        assert read(form, text, prompt) == message
    quoted = [
        f"One writes {bare}",  # in a line
        f"For instance:\n{bare}\nThat is all.",
        f"For instance:\n```\n{bare}\n```",
        bare.replace("look-up2", "another"),
        bare.replace("</function>", ""),
        "Write <function=look-up2> and then <parameter=city>.",
    ]
    for text in quoted:
        message = read(form, [text], prompt)
        assert (message["content"], message["tool_calls"]) == (text, [])
        assert read(form, text, prompt) == message


WITH_REASONING = [
    name for name in sorted(TEMPLATES) if derive_form_of(TEMPLATES[name]).form.reasoning
]


@pytest.mark.parametrize("name", WITH_REASONING)
def test_the_markers_of_a_budget_are_those_of_the_reasoning(name):
    """A text between them is read as reasoning, and a text after them as content."""
    form, prompt = derive_form_of(TEMPLATES[name]).form, thinking_prompt(TEMPLATES[name])
    known = context(chat_format=form)
    values, ignored = budget_values(Wish(3, "x"), known, can_reason=True, prompt=prompt)
    markers = SamplingParams(**values).thinking_markers
    assert markers is not None and ignored == ()
    opened, closed, again = markers
    assert again is (form.headers is not None) and (opened == "") is form.is_open(prompt)
    final = "" if form.headers is None else f"{form.headers.channel}final{form.headers.body}"
    message = read(form, [f"{opened}abc{closed}{final}ok"], prompt)
    assert (message["reasoning_content"], message["content"].strip()) == ("abc", "ok")


THINKS_AND_CALLS = [
    name
    for name in sorted(set(TEMPLATES) - {"channels"})
    if (form := derive_form_of(TEMPLATES[name]).form).reasoning
    and form.tools
    and form.tools.trigger
]


@pytest.mark.parametrize("name", THINKS_AND_CALLS)
@examples(2)
@given(data=st.data())
def test_calls_at_the_end_of_reasoning_are_calls(name, data):
    """A model forgets to end its reasoning.

    If it goes on after a call, it only thinks of calling.
    """
    form = derive_form_of(TEMPLATES[name]).form
    assert form.tools is not None and form.reasoning is not None
    prompt, text = thinking_prompt(TEMPLATES[name]), answer(name, OSLO + BERN)[1]
    opened = "" if form.is_open(prompt) else form.reasoning.open
    calls = text[text.index(before_placeholder(form.tools.opening).strip().partition("\n")[0]) :]
    for tail in (*form.content.tails, *form.content.closes):
        calls = calls.removesuffix(tail)
    for after in ("", "\n", form.reasoning.close):
        message = same_however_cut(form, f"{opened}I look.\n{calls}{after}", prompt, data)
        expected = ("I look.", "", OSLO + BERN)
        assert (
            message["reasoning_content"].strip(),
            message["content"],
            calls_of(message),
        ) == expected
    thought = f"I could write {calls} or not."
    message = same_however_cut(form, opened + thought + form.reasoning.close + "So.", prompt, data)
    assert message["reasoning_content"].strip() == thought and not message["tool_calls"]
    message = same_however_cut(form, opened + thought + form.reasoning.close + calls, prompt, data)
    assert message["reasoning_content"].strip() == thought and calls_of(message) == OSLO + BERN


@pytest.mark.parametrize("between", ["; ", ";\n", ", ", "\n", ""])
@pytest.mark.parametrize(
    "name",
    ["object without a tag, one only", "object in tags", "objects in one tag", "name, mark, JSON"],
)
def test_calls_in_json_may_have_other_signs_between_them(name, between):
    form, (prompt, text) = derive_form_of(TEMPLATES[name]).form, answer(name, OSLO)
    tools = form.tools
    assert tools is not None
    for tail in (*form.content.tails, tools.end.strip()):
        text = text.removesuffix(tail)
    other = answer(name, BERN)[1].removeprefix(tools.begin)
    message = read(form, [text + between + other.lstrip("\n")], prompt)
    assert (calls_of(message), message["content"]) == (OSLO + BERN, "")
    assert read(form, text + between + other.lstrip("\n"), prompt) == message


@pytest.mark.parametrize("name", HINTED)
@examples(2)
@given(data=st.data())
def test_forms_by_name_are_those_of_models_whose_templates_render_no_calls(name, data):
    source, call = HINTED[name]
    form, problem = derive_form_of(source)
    assert (form.tool_form, form.has_tools, problem) == (name, True, None)
    called = [("look-up2", {"city": "it's {x}", "days": 3})]
    for text, content in ((call, ""), (f"I look.\n{call}", "I look.")):
        message = same_however_cut(form, text, "", data)
        assert (message["content"], calls_of(message)) == (content, called)
    may_write, written = writer_of(form), call.replace("\n", "")
    assert may_write(written) and not may_write(written.replace("3", "three"))
    quoted = f"One writes {call.replace('look-up2', 'another')} so."
    assert read(form, quoted, "")["content"] == quoted


def test_a_prompt_tells_what_stands_around_reasoning_and_answer():
    """Granite 3.3's does so if it is asked for reasoning."""
    form = derive_form_of(REPORTED_TO_THINK).form
    requested = [{"role": "user", "content": "Hi"}]
    prompt = render(REPORTED_TO_THINK, requested, generates=True, thinking=True)
    text = "<think>Hm.</think>\n<response>So.</response>"
    message = read(form, [text], prompt)
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "So.")
    assert read(form, text, prompt) == message
    for said in ("The <think> tag opens it, <response> the answer.", "So."):
        assert (
            read(form, said, render(REPORTED_TO_THINK, requested, generates=True))["content"]
            == said
        )


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("It is 3.<channel|>", "It is 3."),
        ("It is 3.<channel|><turn|>\n", "It is 3."),
        (f"I look.<channel|>{CALLS_A_TOOL}", "I look."),
        ("The <channel|> mark, or <|channel>.", "The <channel|> mark, or <|channel>."),
    ],
)
@examples(2)
@given(data=st.data())
def test_a_stray_mark_after_an_answer_is_no_content_where_the_template_drops_it(
    text, content, data
):
    form, problem = derive_form_of(STRAY)
    assert problem is None
    prompt = render(STRAY, [{"role": "user", "content": "Hi"}], generates=True)
    message = same_however_cut(form, text, prompt, data)
    assert (message["content"], message["reasoning_content"]) == (content, "")
    assert len(message["tool_calls"]) == text.count("tool_call>call")


@pytest.mark.parametrize("earlier", [None, "an answer that is folded away"])
def test_a_header_is_that_of_the_prompt_where_no_earlier_answer_shows_another(earlier):
    prober = Prober(lambda _: earlier)
    assert _header(prober, 0, "<assistant>text", "<assistant>") == "<assistant>"


def test_a_result_belongs_to_the_first_call():
    rendered_ones: list[str] = []
    calls = [Call("look_up", {}), Call("add", {"a": 1})]
    Prober(lambda text: rendered_ones.append(text)).answer(calls, result="3")
    _, answer, result = json.loads(rendered_ones[0])[0]
    first = answer["tool_calls"][0]
    assert result["tool_call_id"] == first["id"] != answer["tool_calls"][1]["id"]
    assert result["name"] == first["function"]["name"] == "look_up"


@pytest.mark.parametrize("name", WRITES_OBJECTS)
def test_the_definition_of_a_tool_is_no_call(name):
    """A model that lists its tools quotes what the prompt shows of them."""
    form = derive_form_of(TEMPLATES[name]).form
    tools = form.tools
    assert tools is not None
    for shown in (TOOLS[1], TOOLS[1]["function"]):
        text = f"{tools.opening}{json.dumps(shown)}{tools.close}{tools.end}".strip()
        if tools.arguments_path[-1] != "parameters" or shown is TOOLS[1]:
            message = read(form, [text], "")
            assert (message["content"], message["tool_calls"]) == (text, [])


@pytest.mark.parametrize("name", THINKS_AND_CALLS)
@examples(4)
@given(data=st.data())
def test_reasoning_and_calls_in_any_order_are_the_same_however_they_are_cut(name, data):
    """They are whole calls, calls without their first tag, and markers, within the reasoning and
    after it.
    """
    form = derive_form_of(TEMPLATES[name]).form
    assert form.tools is not None and form.reasoning is not None
    prompt, call = thinking_prompt(TEMPLATES[name]), answer(name, OSLO)[1]
    bits = [form.reasoning.open, form.reasoning.close, call, *form.content.tails]
    bits += [call.replace(form.tools.trigger, "", 1), form.tools.trigger, "Hm. ", "\n"]
    text = "".join(data.draw(st.lists(st.sampled_from(bits), max_size=7)))
    message = same_however_cut(form, text, prompt, data)
    assert calls_of(message) == OSLO * len(message["tool_calls"])


@pytest.mark.timeout(60)  # a reader that is not linear takes longer
@pytest.mark.parametrize("after", ["", "x"])
def test_many_calls_in_reasoning_are_read_in_little_time(after):
    form = derive_form_of(TEMPLATES["object in tags, always thought"]).form
    call = '<call>{"name": "look-up2", "arguments": {}}</call>'
    text = (call + after) * (40_000 // len(call)) + "x"
    message = read(form, [text[index : index + 7] for index in range(0, len(text), 7)], "<think>\n")
    assert (message["reasoning_content"], message["tool_calls"]) == (text, [])


@pytest.mark.parametrize(
    ("marker", "left"), [("<end>", " \n\nx"), ("<end>\n", "x"), ("<end> ", "x"), ("<end> \n", "x")]
)
def test_white_space_after_a_marker_belongs_to_one_that_ends_with_some(marker, left):
    buffer = TextBuffer("<end> \n\nx", has_ended=True)
    assert not list(buffer.literal(marker)) and buffer.text[buffer.position :] == left


@pytest.mark.parametrize("report", REPORTS)
@examples(1)
@given(data=st.data())
def test_what_models_wrote_in_public_reports_is_read(report, data):
    name, text, reasoning, content, calls = REPORTS[report]
    form = derive_form_of(TEMPLATES[name]).form
    prompt = thinking_prompt(TEMPLATES[name])
    if form.is_open(prompt):
        # The reasoning is over where the text does not begin with it.
        prompt, text = (
            (prompt, text.removeprefix("<think>\n"))
            if reasoning
            else (prompt + "Hm." + form.reasoning.close, text)  # type: ignore[union-attr]
        )
    message = same_however_cut(form, text, prompt, data)
    assert (message["reasoning_content"].strip(), message["content"]) == (reasoning, content)
    assert calls_of(message) == calls


@pytest.mark.parametrize("name", sorted(set(TEMPLATES) - {"types and numbered calls"}))
@examples(2)
@given(data=st.data())
def test_a_quoted_call_that_a_text_goes_on_after_is_no_call(name, data):
    """It is quoted in a block of code or in a sentence, and its first tag may be missing."""
    form = derive_form_of(TEMPLATES[name]).form
    assert form.tools is not None
    prompt, call = answer(name, OSLO)
    if form.is_open(prompt):
        prompt += "Hm." + form.reasoning.close  # type: ignore[union-attr]
    for tail in (*form.content.tails, *form.content.closes):
        call = call.removesuffix(tail)
    call = call[max(call.find(form.tools.trigger), 0) :]
    inner = call.removeprefix(form.tools.trigger).strip() if form.tools.trigger else call
    for quoted in (inner, call.replace("look-up2", "another")):
        for text in (f"One writes {quoted} and goes on.", f"As in\n```\n{quoted}\n```\nit is so."):
            message = same_however_cut(form, text, prompt, data)
            assert not message["tool_calls"], text
            assert "".join(message["content"].split()) == "".join(text.split())
