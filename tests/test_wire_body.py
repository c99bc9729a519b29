"""Bodies: only strict JSON objects come in, and whatever else comes is an error of the client's."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpage.serving.wire.body import MAX_BODY_DEPTH, parse_object
from jaxpage.serving.wire.errors import ApiError

REFUSED = [
    (b"", "Request body is empty; expected a JSON object"),
    (b" \n\t ", "Request body is empty; expected a JSON object"),
    (b"[1]", "expected a JSON object"),
    (b"null", "expected a JSON object"),
    (b'"x"', "expected a JSON object"),
    (b"3", "expected a JSON object"),
    ('{"a": 1}'.encode("utf-16"), "not UTF-8"),
    ('{"a": 1}'.encode("utf-16-le"), "not valid JSON"),
    ('{"a": 1}'.encode("utf-32-be"), "not valid JSON"),
    (b'\xef\xbb\xbf{"a": 1}', "not valid JSON"),
    (b'{"a": "\xff"}', "not UTF-8"),
    (b'{"a": "\xed\xa0\x80"}', "not UTF-8"),  # a surrogate, as if UTF-8 had them
    (b'{"a": 1,}', "not valid JSON"),
    (b'{"a": 1} x', "not valid JSON"),
    (b"{'a': 1}", "not valid JSON"),
    (b'{"a": "', "not valid JSON"),
    (b'{"a": "\\', "not valid JSON"),
    (b'{"a": NaN}', "NaN is not a valid JSON number"),
    (b'{"a": [Infinity]}', "Infinity is not a valid JSON number"),
    (b'{"a": -Infinity}', "-Infinity is not a valid JSON number"),
    (b'{"a": 1e400}', "not a valid JSON number"),
    (b'{"a": -1e400}', "not a valid JSON number"),
    (b'{"a": ' + b"9" * 5000 + b"}", "too many digits"),
    (b'{"a": 1, "a": 2}', "the key 'a' twice"),
    (b'{"a": {"b": 1, "b": 1}}', "the key 'b' twice"),
    (b'{"a": ' + b"[" * 900 + b"]" * 900 + b"}", f"nested more than {MAX_BODY_DEPTH} deep"),
    (b"[" * 100_000, f"nested more than {MAX_BODY_DEPTH} deep"),
    (b'{"a":' * 100_000, f"nested more than {MAX_BODY_DEPTH} deep"),
    (b'{"prompt": "\\ud800"}', "'prompt' contains invalid Unicode"),
    (b'{"stop": ["\\uDC00\\ud800"]}', "'stop' contains invalid Unicode"),
    (b'{"\\ud800": 1}', "contains invalid Unicode"),
]


@pytest.mark.parametrize(("raw", "message"), REFUSED, ids=[f"{raw[:20]!r}" for raw, _ in REFUSED])
def test_a_body_that_is_no_json_object_is_refused(raw, message):
    with pytest.raises(ApiError) as caught:
        parse_object(raw)
    assert caught.value.status == 400
    assert message in caught.value.message
    assert caught.value.body()["error"]["type"] == "invalid_request_error"
    assert len(json.dumps(caught.value.body())) < 1500


ACCEPTED = [
    b"{}",
    b' {"a": [1, -0.0, 5e-324, 1e308, true, null, "\\u00e9 \xc3\xa9"]} ',
    b'{"a": "[[[{{{", "b": "\\"[{", "c": "\\\\"}',
    b'{"a": "\\ud83d\\ude00 \\\\ud800"}',  # a pair of surrogates, and no surrogate
    b'{"a": ' + b"[" * (MAX_BODY_DEPTH - 1) + b"]" * (MAX_BODY_DEPTH - 1) + b"}",
    b'{"a": ' + b"[[],{}," * 60 + b"1" + b"]" * 60 + b"}",
    b'{"a": "' + b"[" * 1000 + b'"}',
]


@pytest.mark.parametrize(
    ("item", "what"),
    [
        ("[]", "65536 arrays and objects"),
        ("{}", "65536 arrays and objects"),
        ('""', "262144 strings"),
        ('"a"', "262144 strings"),
    ],
)
def test_what_would_be_many_objects_is_refused_before_it_becomes_any(item, what, monkeypatch):
    number = int(what.split()[0])
    assert (
        len(parse_object(f'{{"a":[{",".join([item] * (number - 2))}]}}'.encode())["a"])
        == number - 2
    )
    monkeypatch.setattr(json, "loads", lambda *_, **__: pytest.fail("it is parsed"))
    with pytest.raises(ApiError, match=f"more than {what}"):
        parse_object(f'{{"a":[{",".join([item] * (number + 1))}]}}'.encode())


def test_brackets_in_a_text_are_text():
    text = json.dumps("[" * 100_000 + "{}" * 100_000 + '"' * 300_000)
    assert parse_object(f'{{"prompt":{text}}}'.encode())["prompt"].count('"') == 300_000


@pytest.mark.parametrize("raw", ACCEPTED, ids=range(len(ACCEPTED)))
def test_a_json_object_is_what_it_says(raw):
    assert parse_object(raw) == json.loads(raw)


@given(
    st.binary(max_size=200)
    | st.text(alphabet='{}[]":,\\ \n01eE+-.uda8tfn', max_size=200).map(str.encode)
)
def test_whatever_comes_is_an_object_or_a_refusal(raw):
    """The parser of the standard library is the oracle of what is JSON."""
    try:
        parsed = parse_object(raw)
    except ApiError as error:
        assert error.status == 400
    else:
        assert parsed == json.loads(raw)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: st.lists(inner),
        max_leaves=5,
    )
)
def test_what_is_written_is_read(value):
    body = {"value": value}
    assert parse_object(json.dumps(body, ensure_ascii=False).encode()) == body
