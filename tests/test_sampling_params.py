"""SamplingParams and BeamSearchParams: what is accepted, in which form it is kept, and what is
refused by name and value.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
import pickle
import re
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpage.settings import field_table, parameters
from jaxpage.settings.sampling_params import BeamSearchParams, SamplingParams

NAN, INF = math.nan, math.inf

REFUSED: list[tuple[str, object]] = [
    *[("n", value) for value in (0, -1, 16385, 10**9, 10**5000, 1.0, True, "1", None)],
    *[("best_of", value) for value in (0, 16385, True, 1.0)],
    *[
        ("temperature", value)
        for value in (-0.1, 2.01, NAN, INF, -INF, "0.5", True, None, 10**400, 1j)
    ],
    *[("top_p", value) for value in (0.0, -0.1, 1.01, NAN, True, None)],
    *[("top_k", value) for value in (-2, 1.5, 2**40, True, None)],
    *[("min_p", value) for value in (-0.1, 1.1, NAN, None)],
    *[("presence_penalty", value) for value in (-2.1, 2.1, NAN)],
    *[("frequency_penalty", value) for value in (-2.1, 2.1, INF)],
    *[("repetition_penalty", value) for value in (0, -1.0, NAN, INF, 10**400)],
    *[
        ("logit_bias", value)
        for value in ({-1: 1.0}, {1: NAN}, {1: 101}, {1: "1"}, {"1": 1.0}, {1: True}, 5, "ab", [1])
    ],
    *[("allowed_token_ids", value) for value in ([], [-1], [True], "12", 3)],
    *[
        ("bad_words", value)
        for value in ("word", [""], [1], 0, ["word"] * 1025, ["a" * 257], ["a" * 256] * 257)
    ],
    *[("seed", value) for value in (-(2**63) - 1, 2**64, 1.5, "a", True)],
    *[("stop", value) for value in ("", [""], [1], 5, b"x", ["a", None], "\ud800", {"a": 1})],
    *[("stop_token_ids", value) for value in ([-1], [2**31], [1.0], [True], "1", 7)],
    *[("ignore_eos", value) for value in (1, "yes", None)],
    *[("thinking_token_budget", value) for value in (-1, 2**31, 1.0, True, "1")],
    *[
        ("thinking_markers", value)
        for value in (
            *(
                "</think>",
                ("a",),
                ("a", "b", False, 1),
                {"a": "b"},
                ("a", ""),
                ("a", 1),
                (None, "b"),
            ),
            *(
                (" ", "b"),
                ("a", "\n"),
                ("a", "\ud800"),
                ("a" * 257, "b"),
                ("a", "b", 1),
                ("", "b", True),
            ),
        )
    ],
    *[("max_tokens", value) for value in (0, -1, 1.5, 2**63, "5", True)],
    *[("min_tokens", value) for value in (-1, 17, 1.0, None)],
    *[("logprobs", value) for value in (-1, 21, 10**6, True, 1.0)],
    *[("prompt_logprobs", value) for value in (-1, 21, True)],
    *[("include_stop_str_in_output", value) for value in (0, None)],
    *[("skip_special_tokens", value) for value in (0, None)],
    *[
        ("structured_outputs", value)
        for value in (
            {},
            {"json": {}, "regex": "a"},
            {"xml": "a"},
            "json",
            {"json": {1, 2}},
            {"json": NAN},
            ("json", 1),
        )
    ],
    *[("priority", value) for value in (1.0, True, 2**31)],
    *[("cache_salt", value) for value in ("", "a\0b", "x" * 257, 5)],
]


def _test_id(value: object) -> str:
    return "number" if isinstance(value, int | float) else ascii(value)[:24]


@pytest.mark.parametrize(("name", "value"), REFUSED, ids=_test_id)
def test_a_bad_value_is_refused_by_name_and_value(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"^{name}\b.* must be .*, got .") as error:
        SamplingParams(**{name: value})
    if isinstance(value, int | float) and abs(value) < 10**20:
        assert str(error.value).endswith(f"got {value!r}")


@pytest.mark.parametrize("value", [0, True, 16385, 1.0, None, "4"])
def test_a_bad_beam_width_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="beam_width must be"):
        BeamSearchParams(value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("length_penalty", NAN),
        ("early_stopping", "always"),
        ("early_stopping", 1),
        ("n", 5),
        ("n", 0),
    ],
)
def test_bad_beam_parameters_are_refused(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be"):
        BeamSearchParams(4, **{name: value})  # type: ignore[arg-type]


def test_parameters_and_defaults_are_those_of_the_interface() -> None:
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(SamplingParams).parameters.items()
    }
    expected = dict(
        n=1, best_of=None, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, presence_penalty=0.0,
        frequency_penalty=0.0,
        repetition_penalty=1.0, logit_bias=None, allowed_token_ids=None, bad_words=None, seed=None,
        stop=None,
        stop_token_ids=None, ignore_eos=False, max_tokens=16, min_tokens=0, logprobs=None,
        prompt_logprobs=None,
        include_stop_str_in_output=False, skip_special_tokens=True, structured_outputs=None,
        priority=0, cache_salt=None,
        user=None, thinking_token_budget=None, thinking_markers=None,
        logprobs_mode="raw", return_sampling_mask=False, return_routed_experts=False,
        return_hidden_states=False,
    )  # fmt: skip
    assert {name: defaults[name] for name in expected} == expected
    beam = {
        name: parameter.default
        for name, parameter in inspect.signature(BeamSearchParams).parameters.items()
    }
    assert beam.pop("beam_width") is inspect.Parameter.empty
    assert beam == dict(
        max_tokens=16,
        length_penalty=1.0,
        early_stopping=False,
        n=None,
        ignore_eos=False,
        stop_token_ids=None,
    )


def test_a_line_of_the_table_needs_its_field_and_a_field_its_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    line = field_table.Field("planted", field_table.Float(0, 1))
    monkeypatch.setattr(parameters, "PARAMETERS", (*field_table.PARAMETERS, line))
    with pytest.raises(TypeError, match="has planted, which is no field of SamplingParams"):
        parameters.require_fields(SamplingParams)
    with pytest.raises(TypeError, match=r"^Planted\.max_q has no check"):

        @parameters.checks_parameters
        @dataclasses.dataclass(frozen=True)
        class Planted(parameters.CheckedParameters):
            planted: float = parameters.parameter(0.0, "checked", lambda value: value)
            max_q: float = parameters.parameter(0.0, "neither a line nor a check")


def test_values_are_kept_in_one_form() -> None:
    params = SamplingParams(
        temperature=1, top_k=-1, seed=-1, stop="end", stop_token_ids=[3, 4],
        logit_bias={7: -1, 2: 0.5}, bad_words=["a"],
        allowed_token_ids=range(3), max_tokens=None, min_tokens=10**6,
        structured_outputs={"json": {"type": "object"}, "regex": None},
    )  # fmt: skip
    assert params.temperature == 1.0 and isinstance(params.temperature, float)
    assert (params.top_k, params.seed, params.stop, params.stop_token_ids) == (
        0,
        None,
        ("end",),
        (3, 4),
    )
    assert params.logit_bias == ((2, 0.5), (7, -1.0))
    assert (params.allowed_token_ids, params.bad_words) == ((0, 1, 2), ("a",))
    assert params.structured_outputs == ("json", '{"type": "object"}')
    assert SamplingParams(thinking_markers=["<t>\n", "\n</t>"]).thinking_markers == (
        "<t>",
        "</t>",
        False,
    )
    assert SamplingParams().stop == () and SamplingParams().stop_token_ids == ()
    assert SamplingParams(
        stop_token_ids=[7, 3, 7] * 1000, allowed_token_ids=[1] * 9
    ).stop_token_ids == (7, 3)


def test_a_value_is_shown_shortly_however_long_it_is() -> None:
    class Counted(int):
        shown = 0

        def __repr__(self) -> str:
            Counted.shown += 1
            return "1"

    with pytest.raises(ValueError, match="stop_token_ids") as caught:
        SamplingParams(stop_token_ids={"a": [Counted()] * 100_000})  # type: ignore[arg-type]
    assert len(str(caught.value)) < 200 and Counted.shown < 100


@pytest.mark.parametrize("temperature", [0, 0.0, -0.0, 5e-324, 1e-7, 9.9e-6])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    params = SamplingParams(temperature=temperature)
    assert params.greedy and params.temperature == 0.0
    assert not SamplingParams(temperature=1e-5).greedy


def test_numpy_numbers_are_numbers() -> None:
    params = SamplingParams(
        n=np.int64(2), temperature=np.float32(0.5), stop_token_ids=np.array([1, 2])
    )
    assert (params.n, params.temperature, params.stop_token_ids) == (2, 0.5, (1, 2))
    assert type(params.n) is int and type(params.stop_token_ids[0]) is int


@pytest.mark.parametrize(
    ("seed", "expected"),
    [
        (0, 0),
        (2**63 - 1, 2**63 - 1),
        (2**64 - 1, 2**64 - 1),
        (-2, 2**64 - 2),
        (-(2**63), 2**63),
        (-1, None),
    ],
)
def test_seeds(seed: int, expected: int | None) -> None:
    assert SamplingParams(seed=seed).seed == expected


def test_params_are_immutable_hashable_and_copyable() -> None:
    params = SamplingParams(
        seed=-5, stop=["a", "b"], logit_bias={3: 1.0}, structured_outputs={"regex": "a+"}, top_k=-1
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 2  # type: ignore[misc]
    for other in (
        copy.deepcopy(params),
        pickle.loads(pickle.dumps(params)),
        dataclasses.replace(params),
    ):
        assert other == params and hash(other) == hash(params)
    assert dataclasses.replace(params, temperature=0.0) != params
    beams = BeamSearchParams(4, early_stopping="never", stop_token_ids=[2])
    assert beams == dataclasses.replace(beams) and beams.stop_token_ids == (2,)


def test_a_list_given_is_not_shared() -> None:
    stop = ["a"]
    params = SamplingParams(stop=stop)
    stop.append("b")
    assert params.stop == ("a",)


@given(st.floats(allow_nan=True, allow_infinity=True))
def test_no_float_slips_through(value: float) -> None:
    """Comparisons with NaN are false, so a bound written the wrong way round lets it pass."""
    for name, low, high in (("temperature", 0.0, 2.0), ("top_p", 5e-324, 1.0), ("min_p", 0.0, 1.0)):
        if low <= value <= high:
            assert math.isfinite(getattr(SamplingParams(**{name: value}), name))
        else:
            with pytest.raises(ValueError, match=name):
                SamplingParams(**{name: value})


def test_a_refusal_is_short_whatever_the_value() -> None:
    with pytest.raises(ValueError) as error:
        SamplingParams(stop=5 * [""] + ["x" * 10**6])
    with pytest.raises(ValueError) as salt_error:
        SamplingParams(cache_salt="x" * 10**6)
    assert len(str(error.value)) < 200 and len(str(salt_error.value)) < 200


def test_checks_hold_under_python_optimised() -> None:
    program = """
from jaxpage.settings.sampling_params import BeamSearchParams, SamplingParams
assert False, "asserts are on: this run shows nothing"
"""
    checks = [
        "SamplingParams(n=0)",
        "SamplingParams(temperature=float('nan'))",
        "SamplingParams(stop=[''])",
        "SamplingParams(min_tokens=17)",
        "SamplingParams(logit_bias={-1: 0})",
        "SamplingParams(stop_token_ids=[-1])",
        "BeamSearchParams(0)",
    ]
    for check in checks:
        program += f"try:\n    {check}\nexcept ValueError:\n    print('refused')\n"
    result = subprocess.run(
        [sys.executable, "-O", "-c", program], capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == ["refused"] * len(checks)


def test_the_module_needs_no_jax() -> None:
    program = (
        "import sys, jaxpage.settings.sampling_params, jaxpage.support; print(sorted({'jax', "
        "'flax', 'numpy'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("kind", "fields", "hint"),
    [
        (
            SamplingParams,
            {"max_token": 3},
            "SamplingParams has no parameter 'max_token'; did you mean 'max_tokens'?",
        ),
        (
            BeamSearchParams,
            {"beam_width": 2, "beams": 2},
            "BeamSearchParams has no parameter 'beams'; parameters are beam_",
        ),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(
    kind: type, fields: dict[str, int], hint: str
) -> None:
    with pytest.raises(TypeError, match=re.escape(hint)):
        kind(**fields)
