"""`jaxpage bench roofline`: what a step must do, counted by hand and by torch.

Whose time an operation is; the command end to end.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from jaxpage import cli
from jaxpage.bench.studies.roofline import MatmulWeights, Work, matmul_weights, work_of
from jaxpage.bench.studies.step_profile import scopes_of, seconds_by_scope
from jaxpage.models.base import KVSpec
from jaxpage.models.registry import load_family
from tests.support.engines import LLAMA

GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "vocab_size": 96,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
}


@pytest.mark.parametrize(
    "changes", [{}, {"tie_word_embeddings": True}, GPT2], ids=["untied", "tied", "gpt2"]
)
def test_weights_of_products_are_those_of_torchs_linear_layers(changes: dict) -> None:
    torch = pytest.importorskip("torch", reason="the oracle is transformers on torch")
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.pytorch_utils import Conv1D

    config = {**({} if changes is GPT2 else LLAMA), **changes}
    kind = config.pop("model_type", None) or "llama"
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **config))
    layers = [module for module in model.modules() if isinstance(module, (torch.nn.Linear, Conv1D))]
    family = load_family(config)
    number = sum(each.weight.numel() for each in layers)
    assert matmul_weights(family, family.Spec.from_config(config), "bfloat16") == (
        number,
        2 * number,
    )


def test_what_a_step_must_do_by_hand() -> None:
    kv = KVSpec(num_layers=2, num_kv_heads=2, head_dim=8, sliding_windows=(None, 10))
    spec = SimpleNamespace(kv=kv, num_query_heads=4)
    decode = work_of(
        spec, MatmulWeights(1000, 2000), "float32", num_rows=3, num_tokens=1, context=19
    )
    positions = 20 + 10
    assert decode.num_bytes == 1000 * 2 + 3 * positions * (2 * 2 * 8 * 4)
    assert decode.num_operations == 3 * (2 * 1000 + 4 * 4 * 8 * 20 * 2)
    chunk = work_of(spec, MatmulWeights(1000, 4000), "float32", num_rows=1, num_tokens=4, context=0)
    assert chunk.num_operations == 4 * 2 * 1000 + (1 + 2 + 3 + 4) * 4 * 4 * 8 * 2
    assert (
        Work(100.0, 30.0).seconds(50.0, 10.0) == 3.0
        and Work(100.0, 10.0).seconds(50.0, 10.0) == 2.0
    )


CODE = """HloModule jit_step, entry_computation_layout={(f32[2]{0})->f32[2]{0}}
%inner (p: f32[2]) -> f32[2] {
  ROOT %dot.1 = f32[2,3]{1,0} dot(%a, %b), metadata={op_name="jit(step)/matmul/TI,OI->TO/dot_general" source_line=1}
}
ENTRY %main (p: f32[2]) -> f32[2] {
  %ffi_call.2 = (f32[2]{0}, f32[4]{0}) custom-call(%x), custom_call_target="a", metadata={op_name="jit(step)/attention/ffi_call"}
  %gather.3 = f32[2]{0} gather(%x, %y), offset_dims={1}, metadata={op_name="jit(step)/attention/gather/gather"}
  fusion = f32[2]{0} fusion(%y), kind=kLoop, calls=%inner, metadata={op_name="jit(step)/sampling/cond/productive"}
  %conditional = s32[] conditional(%y, %z), metadata={op_name="jit(step)/sampling/cond"}
  ROOT %add.9 = f32[2]{0} add(%y, %z)
}"""


def test_an_operation_belongs_to_the_scope_that_it_was_traced_in() -> None:
    scopes = scopes_of(CODE)
    named = {
        "dot.1": "matmul",
        "gather.3": "gather",
        "ffi_call.2": "attention",
        "fusion": "sampling",
        "add.9": "other",
    }
    assert scopes == named
    events = [
        ("dot.1", 5, {}),
        ("dot.1", 6, {}),
        ("conditional", 90, {}),
        ("end: dot.1", 70, {}),
        ("k", 3, {"hlo_op": "add.9"}),
    ]
    line = SimpleNamespace(
        events=[
            SimpleNamespace(name=name, duration_ns=time, stats=stats.items())
            for name, time, stats in events
        ]
    )
    seconds = seconds_by_scope(
        SimpleNamespace(planes=[SimpleNamespace(lines=[line, line])]), scopes
    )
    assert seconds == pytest.approx(
        {"matmul": 22e-9, "gather": 0, "attention": 0, "sampling": 0, "other": 6e-9}
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--batches", "0"], "--batches and --context must be at least 1"),
        (
            ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2}'],
            "has no use for speculative_config",
        ),
        (["--num-scheduler-steps", "2"], "measures single steps: num_scheduler_steps is 2; use 1"),
        (["--output-json", "/no/such/x"], "--output-json /no/such/x: there is no such directory"),
    ],
)
def test_flags_that_make_no_sense(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "roofline", *words]) == 2
    assert message in capsys.readouterr().err
