"""Steps with `batch_invariant` leave no sum of floats to XLA, in any bucket, and the setting is
refused where that cannot be.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import Counter
from types import SimpleNamespace

import jax
import pytest

from jaxpage import LLM, SamplingParams
from jaxpage.assembly.planning.described import ModelLayout
from jaxpage.assembly.planning.engine_spec import choose_sharding
from jaxpage.device import executables
from jaxpage.device.batch_invariance import EXACT_OPTIONS, refuse_sums
from jaxpage.device.compiler_options import compiler_options
from jaxpage.device.drafters import growing
from jaxpage.device.hardware.backends import Backend, choose_backend
from jaxpage.errors import ConfigError, UnsupportedError
from jaxpage.models.registry import load_family
from jaxpage.settings.engine_config import EngineConfig
from pallas_kernels.compat import DescribedGPU, DescribedTPU, describe_gpu
from pallas_kernels.triton import backend as triton_backend
from pallas_kernels.triton import matmul_tiles
from tests.support import tensor_core
from tests.support.model_configs import config_json
from tests.support.sweeps import few
from tools.lab.kernel_lab.inspection import compile_for, unavailable
from tools.lab.step_times import random_model
from tools.step_shapes import BUCKETS, LLAMA_3_8B, QWEN3_30B_A3B, step_shapes

EXACT = Backend("triton", batch_invariant=True)
SMALL = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
}
IN_A_BATCH = {
    "attention_backend": "triton",
    "batch_invariant": True,
    "dtype": "bfloat16",
    "max_model_len": 96,
    "num_blocks": 64,
    "max_num_seqs": 4,
    "swap_space_blocks": 0,
    "enable_prefix_caching": False,
}
H200 = DescribedGPU("NVIDIA H200", "9.0")


EXPERTS = {"moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2}
MODELS = {
    "dense": {**LLAMA_3_8B, **SMALL},
    "experts": {**QWEN3_30B_A3B, **SMALL, **EXPERTS},
    "an expert of all tokens": {
        **{**QWEN3_30B_A3B, **SMALL, **EXPERTS},
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "shared_expert_intermediate_size": 128,
    },
    "states": {
        **{**QWEN3_30B_A3B, **SMALL, **EXPERTS},
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "layer_types": ["linear_attention"],
        "shared_expert_intermediate_size": 64,
        **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
        **{"linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4},
    },
    "latents": {
        **{**LLAMA_3_8B, **SMALL, **EXPERTS},
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        **{"kv_lora_rank": 64, "q_lora_rank": 32, "v_head_dim": 32},
        **{"qk_nope_head_dim": 32, "qk_rope_head_dim": 16},
        **{"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 0},
    },
}


def small_step(kind: str, backend: Backend = EXACT, model="dense"):
    config = MODELS[model] if isinstance(model, str) else model
    return step_shapes(BUCKETS[kind], backend=backend, config=config, num_layers=1, num_blocks=1024)


def trace(kind: str, **options):
    with describe_gpu():
        shapes = small_step(kind, **options)
        return shapes.step.trace(*shapes.arguments).jaxpr


@pytest.mark.parametrize(
    ("model", "kind"),
    few(
        itertools.product(MODELS, BUCKETS),
        [("dense", "verify"), ("experts", "decode"), ("latents", "chunk"), ("states", "chunk")],
    ),
)
def test_a_step_leaves_no_sum_of_floats_to_xla(model, kind):
    refuse_sums(trace(kind, model=model))


# Of every family whose layers keep keys and values, or latents.
WITH_EXPERTS = (
    *("mixtral-window", "qwen3-moe-mixed", "olmoe-many", "flex-olmo-norms", "phimoe-biases"),
    *("gpt-oss-windows", "granitemoe-factors", "granitemoeshared-shared", "glm4-moe-groups"),
    *("gemma4-keys-are-values", "dots1-windows", "solar-open-groups", "exaone-moe-windows"),
    *("afmoe-gates", "mimo-v2-flash-windows", "mellum-windows", "minimax-m2-norms"),
    *("ernie4-5-moe-shared", "hunyuan-v1-moe-shared"),
    *("deepseek-v2-groups", "deepseek-v2-greedy", "deepseek-v3-groups", "deepseek-v3-halves"),
    *("glm4-moe-lite-mixed", "mistral3-latents"),
)
# Of every kind of layer with a state.
RECURRENT = (
    *("qwen3-next-mixed", "qwen3-5-mixed", "kimi-linear-mixed", "olmo-hybrid-mixed"),
    *("bamba-mixed", "nemotron-h-mixed", "falcon-h1-first", "granitemoehybrid-mixed"),
    *("jamba-mixed", "falcon-mamba-norms", "mamba2-tied", "zamba2-biases", "lfm2-moe-mixed"),
)


@pytest.mark.parametrize("name", few((*WITH_EXPERTS, *RECURRENT), ["gpt-oss-windows"]))
def test_models_with_experts_or_states_leave_none_either(name):
    with describe_gpu():
        shapes = step_shapes(
            BUCKETS["decode"], backend=EXACT, config=config_json(name), num_blocks=64
        )
        refuse_sums(shapes.step.trace(*shapes.arguments).jaxpr)


def drafting_steps(method: str, monkeypatch: pytest.MonkeyPatch) -> list[jax.core.ClosedJaxpr]:
    """Returns the traces, for a GPU, of the steps of a demo engine that drafts by a model."""
    calls = []

    def note_call(*arguments):
        calls.append(arguments)
        raise InterruptedError("the engine need not start")

    monkeypatch.setattr(executables, "_compile_step", note_call)
    drafts = {"method": method, "model": f"demo/{method.removesuffix('_model')}"}
    with pytest.raises(InterruptedError):
        LLM(
            "demo",
            attention_backend="scan",
            dtype="bfloat16",
            max_model_len=128,
            num_blocks=64,
            max_num_seqs=4,
            speculative_config={**drafts, "num_speculative_tokens": 2},
        )
    jaxprs = []
    for parameters, pages, bucket, options, mesh in calls:
        drafter = options.drafter
        if hasattr(drafter, "backend"):
            drafter = dataclasses.replace(drafter, backend=EXACT)
        options = options._replace(attention_backend=EXACT, sample_by_row=False, drafter=drafter)
        with describe_gpu():
            step, shapes = executables.step_call(parameters, pages, bucket, options, mesh)
            jaxprs.append(step.trace(parameters, pages, *shapes).jaxpr)
    return jaxprs


@pytest.mark.parametrize("method", few(["medusa", "eagle3", "draft_model"], ["draft_model"]))
def test_drafts_by_a_model_leave_none_either(method, monkeypatch):
    """The probabilities of drafts are added up by a kernel; those that XLA adds up are seen."""
    jaxprs = drafting_steps(method, monkeypatch)
    assert jaxprs
    for jaxpr in jaxprs:
        refuse_sums(jaxpr)
    if method != "draft_model":  # heads of Medusa need no probabilities
        return
    monkeypatch.setattr(growing, "log_softmax", jax.nn.log_softmax)
    planted = drafting_steps(method, monkeypatch)
    with pytest.raises(UnsupportedError, match="reduce_sum of float32"):
        refuse_sums(planted[0])


def test_a_sum_that_is_left_to_xla_is_refused():
    with pytest.raises(UnsupportedError, match=r"dot_general of bfloat16 .matmul") as refusal:
        refuse_sums(trace("decode", backend=Backend("triton")))
    assert "reduce_sum of float32" in str(refusal.value)


@pytest.mark.sweep
def test_an_activation_that_has_no_kernel_is_refused():
    config = MODELS["experts"] | {"hidden_act": "gelu", "num_hidden_layers": 1}
    with pytest.raises(UnsupportedError, match="the activation gelu .*without batch_invariant"):
        LLM.from_parameters(config, random_model(config, "bfloat16"), **IN_A_BATCH)


def test_devices_and_kernel_sets_that_cannot_keep_it_are_refused():
    cpu = jax.devices("cpu")[0]
    for name in ("auto", "triton"):
        assert choose_backend(name, H200, batch_invariant=True) == EXACT
    assert choose_backend("auto", cpu, batch_invariant=True) == choose_backend("auto", cpu)
    assert choose_backend("triton", cpu, batch_invariant=True) == EXACT._replace(interpret=True)
    for name, device, reason in (
        ("scan", H200, r"attention_backend 'scan'.* depend on the batch; use auto or triton"),
        ("auto", DescribedTPU("TPU v5e"), "batch_invariant is for GPUs, and the device is a tpu"),
    ):
        with pytest.raises(UnsupportedError, match=reason):
            choose_backend(name, device, batch_invariant=True)


def test_sums_over_devices_have_one_order_or_are_refused():
    spec = load_family(LLAMA_3_8B).Spec.from_config(LLAMA_3_8B)

    def sharding(num_devices, reduction="auto", *, is_cpu=False, **settings):
        return choose_sharding(
            SimpleNamespace(
                config=EngineConfig(tensor_parallel_reduction=reduction, **settings),
                layout=ModelLayout("bfloat16", "auto", num_devices),
                device=SimpleNamespace(is_cpu=is_cpu),
                model=spec,
            )
        )

    for num_devices, is_invariant in ((1, False), (2, True), (4, True)):
        assert sharding(num_devices, batch_invariant=True).invariant is is_invariant
    for num_devices, reduction in ((2, "fast"), (8, "auto")):
        reason = f"tensor_parallel_size {num_devices} and .*'{reduction}'.* use 'invariant', for 2"
        with pytest.raises(ConfigError, match=reason):
            sharding(num_devices, reduction, batch_invariant=True)
        for others in ({}, {"batch_invariant": True, "is_cpu": True}):
            assert not sharding(num_devices, reduction, **others).invariant


def float_work(
    kind: str, backend: Backend, model: str
) -> tuple[list[str], Counter[tuple[str, ...]]]:
    """Returns the sums that XLA computes in a step for an H100, and what each of its fusions does
    with floats.
    """
    shapes = small_step(kind, backend, model)
    options = compiler_options("gpu") | EXACT_OPTIONS
    return work_in(
        compile_for(shapes.step, *shapes.arguments, gpu="h100", options=options).as_text()
    )


def work_in(text: str) -> tuple[list[str], Counter[tuple[str, ...]]]:
    header = r"^(?:ENTRY )?%?([\w.\-$]+) \([^\n]*\{ *$"
    bodies = dict(re.findall(header + r"(.*?)^\}", text, re.M | re.S))
    adding = [name for name, body in bodies.items() if re.search(r"= \w*f\w+\[\]\S* add\(", body)]
    sums = re.findall(r"cublas|__triton_gemm| (?:dot|convolution)\(", text)
    sums += [name for name in adding if re.search(rf"to_apply=%?{re.escape(name)}\b", text)]
    work = Counter(
        # The compiler lists what does not depend on one another in any order.
        tuple(sorted(re.findall(r"= (?:b?f\d+)\[.*?\]\S* ([\w\-]+)\(", body)))
        for name, body in bodies.items()
        if "fused" in name
    )
    arithmetic = ("add", "subtract", "multiply", "divide", "cosine", "sine", "log", "exponential")
    only: Counter[tuple[str, ...]] = Counter()
    for operations, count in work.items():
        only[tuple(each for each in operations if each in arithmetic)] += count
    del only[()]  # of integers, or moves
    return sums, only


@pytest.mark.sweep
@pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
@pytest.mark.parametrize("model", ["dense", "an expert of all tokens", "latents", "states"])
def test_what_the_compiler_makes_of_steps_is_alike_in_every_bucket(model):
    """A chunk scores tokens of the prompt, too, and is left out."""
    assert float_work("decode", Backend("triton"), model)[0]  # it is found where it is
    few_rows, many_rows, chunk = (
        float_work(kind, EXACT, model) for kind in ("decode", "decode of 64", "chunk")
    )
    assert few_rows[0] == many_rows[0] == chunk[0] == []
    assert few_rows[1] == many_rows[1] and few_rows[1].keys() <= chunk[1].keys()


@pytest.mark.sweep
@pytest.mark.parametrize("model", ["dense", "an expert of all tokens", "latents", "states"])
def test_an_engine_answers_the_same_in_every_batch(model, monkeypatch):
    """Log probabilities agree to the bit alone, together, in chunks and with drafts.

    Kernels are interpreted with the sums of a tensor core.
    """
    monkeypatch.setattr(triton_backend, "dot", tensor_core.dot)
    monkeypatch.setattr(matmul_tiles, "MIN_TURNS", 1)  # two segments of 128 inputs
    monkeypatch.setattr(matmul_tiles, "MAX_SEPARATE_ROWS", 16)
    config = MODELS[model] | {"hidden_size": 128, "intermediate_size": 128, "head_dim": 16}
    config |= {"num_hidden_layers": 1, "vocab_size": 128, "num_experts": 4}
    parameters = random_model(config, "bfloat16")
    prompts = [[5, 6, 7] * 15, [9] * 20, list(range(30, 70))]
    sampling = SamplingParams(max_tokens=12, temperature=0.7, seed=3, logprobs=1, ignore_eos=True)

    def answers(batches, **settings):
        outputs = []
        with LLM.from_parameters(
            config,
            parameters,
            **IN_A_BATCH,
            **settings,
        ) as llm:
            for batch in batches:
                outputs += llm.generate(batch, sampling, use_tqdm=False, receipt=True)
        assert all(each.receipt["engine"]["batch_invariant"] for each in outputs)
        return [
            (list(each.outputs[0].token_ids), each.outputs[0].cumulative_logprob)
            for each in outputs
        ]

    drafts = {"method": "ngram", "num_speculative_tokens": 3}
    alone = answers([[prompt] for prompt in prompts], max_num_batched_tokens=64)
    assert answers([prompts], max_num_batched_tokens=32, speculative_config=drafts) == alone
