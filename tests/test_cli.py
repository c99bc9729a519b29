"""The command line: exit statuses, what goes to which stream, how failures read, and how soon
--help answers.
"""

from __future__ import annotations

import argparse
import ast
import io
import os
import re
import shutil
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

import jaxpage.llm
from jaxpage import __version__, cli
from jaxpage.checkpoints.finding.resolve import DEMO
from jaxpage.checkpoints.tokenizers.stored_tokenizers import open_tokenizer
from jaxpage.cli import doctor
from jaxpage.cli.foreign_commands import ANSWERS
from jaxpage.cli.parsers import make_parser
from jaxpage.cli.wrapping import Wrapper
from jaxpage.errors import CapacityError, CheckpointError, ModelNotFoundError
from jaxpage.models import ENCODERS, FAMILIES
from jaxpage.outputs import CompletionOutput, RequestOutput
from jaxpage.serving.dialects.registry import DIALECTS
from jaxpage.serving.wire.openapi import REQUESTS
from jaxpage.serving.wire.request_fields import ChatCompletionRequest, CompletionRequest
from jaxpage.settings.engine_config import EngineConfig
from jaxpage.settings.from_vllm import answers
from jaxpage.settings.sampling_params import SamplingParams
from tests.support.fake_llm import FakeLLM


def run(*words: str) -> int:
    """Returns the exit status, whether it is returned or raised."""
    try:
        return cli.main(words)
    except SystemExit as error:
        return int(error.code or 0)


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(jaxpage.llm, "LLM", FakeLLM)
    FakeLLM.forget()
    return FakeLLM


def test_generated_text_alone_goes_to_standard_output(fake, capsys):
    assert (
        run(
            "generate",
            "Once",
            "--temperature",
            "0.5",
            "--stop",
            "a",
            "--stop",
            "b",
            "--block-size",
            "8",
        )
        == 0
    )
    out, err = capsys.readouterr()
    assert out == "Hello wörld\n"
    assert "top_k=40" in err and "generation_config.json" in err and "2 tokens" in err
    [(prompt, params)] = fake.calls
    assert prompt == "Once"
    assert params == SamplingParams(temperature=0.5, stop=["a", "b"], top_k=40, max_tokens=200)
    assert fake.settings["block_size"] == 8 and fake.closed


def test_the_prompt_may_be_printed_before_the_text(fake, capsys, monkeypatch):
    assert run("generate", "Once: ", "--echo") == 0
    monkeypatch.setattr(sys, "stdin", io.StringIO("from a pipe "))
    assert run("generate", "-", "--echo") == 0
    assert capsys.readouterr().out == "Once: Hello wörld\nfrom a pipe Hello wörld\n"
    # where a person reads on, unless they do not want it
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert run("generate", "Once: ") == run("generate", "Once: ", "--no-echo") == 0
    assert capsys.readouterr().out == "Once: Hello wörld\nHello wörld\n"


def test_a_prompt_from_standard_input(fake, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("from a pipe"))
    assert run("generate", "-") == 0
    assert fake.calls[0][0] == "from a pipe"


def test_seed_of_generate_is_that_of_the_noise(fake):
    assert run("generate", "x", "--seed", "7") == 0
    assert fake.calls[0][1].seed == 7 and "seed" not in fake.settings


def test_speculation_may_be_the_word_auto(fake):
    assert run("generate", "x", "--speculative-config", "auto") == 0
    config = EngineConfig(speculative_config=fake.settings["speculative_config"])
    assert config.speculative_config is not None and config.speculative_config.method == "auto"


def test_one_request_at_a_time_compiles_for_one(fake, monkeypatch):
    assert run("generate", "x") == 0
    assert fake.settings["max_num_seqs"] == 1
    monkeypatch.setenv("JAXPAGE_MAX_NUM_SEQS", "3")
    assert run("generate", "x") == 0
    assert fake.settings["max_num_seqs"] == 3
    assert run("generate", "x", "--max-num-seqs", "64") == 0
    assert fake.settings["max_num_seqs"] == 64


@pytest.mark.parametrize(
    "words",
    [
        ("generate", "./here", "Once"),
        ("generate", "--model", "./here", "Once"),
        ("generate", "--max-tokens", "3", "./here", "Once", "--seed", "1"),
        ("chat", "./here"),
        ("compile", "./here"),
        ("bench", "throughput", "./here"),
        ("bench", "latency", "--model", "./here"),
        ("bench", "kv-dtype", "./here"),
        ("bench", "speculation", "./here"),
        ("serve", "./here", "--port", "0"),
        ("serve", "--model", "./here", "--port", "0"),
        ("plan", "--model", "./here"),
    ],
    ids=" ".join,
)
def test_the_model_by_position_or_as_a_flag(words, tmp_path, monkeypatch, capsys):
    """Each looks for it there, before anything else."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("jaxpage.serving.metrics.logs.configure", lambda config: None)
    assert run(*words) == 1
    assert "model = './here': there is no such directory" in capsys.readouterr().err


def test_one_word_is_a_prompt_and_two_are_model_and_prompt(fake):
    assert (
        run("generate", "demon")
        == run("generate", "demo", "Once")
        == run("generate", "--model", "demo", "demo")
        == 0
    )
    assert [prompt for prompt, _ in fake.calls] == ["demon", "Once", "demo"]
    assert fake.settings["model"] == "demo"


def test_quiet_and_verbose(fake, capsys):
    for words, expected in (
        ((), (True, False)),
        (("-v",), (True, True)),
        (("--quiet",), (False, False)),
    ):
        assert run("generate", "x", *words) == 0
        out, err = capsys.readouterr()
        assert (
            out == "Hello wörld\n"
            and (fake.settings["use_tqdm"], fake.settings["verbose"]) == expected
        )
        assert ("2 tokens" in err and "top_k=40" in err) == (words != ("--quiet",))
    assert err == ""
    assert run("compile") == 0 and fake.settings["verbose"]
    assert (
        run("compile", "-q") == 0 and not fake.settings["verbose"] and not fake.settings["use_tqdm"]
    )
    assert capsys.readouterr().err.count("All executables") == 1


def test_a_failed_text_is_reported_even_quietly(fake, monkeypatch, capsys):
    def failing(self: FakeLLM) -> Iterator[RequestOutput]:
        output = CompletionOutput(
            index=0, text="a", token_ids=[0], finish_reason="error", stop_reason="no token left"
        )
        yield RequestOutput(
            request_id="0", prompt=None, prompt_token_ids=[1], outputs=[output], finished=True
        )

    monkeypatch.setattr(FakeLLM, "_chunks", failing)
    assert run("generate", "x", "-q") == 1
    assert "finish reason: error, no token left" in capsys.readouterr().err


def test_a_model_without_text_is_reported_before_it_is_loaded(fake, tmp_path, monkeypatch, capsys):
    packaged, mute = Path(jaxpage.__file__).parent / "demo", tmp_path / "mute"
    mute.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(packaged / name, mute)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\n"))
    for command in (("generate", str(mute), "Once"), ("chat", str(mute))):
        assert run(*command) == 2 and not fake.settings
        assert (
            "has no tokenizer, so it cannot read text: set --tokenizer" in capsys.readouterr().err
        )
    assert run("generate", str(mute), "Once", "--tokenizer", str(packaged)) == 0
    shutil.copy(packaged / "tokenizer.json", mute)
    fake.forget()
    assert run("chat", str(mute)) == 2 and not fake.settings
    assert "has no chat template; use jaxpage generate" in capsys.readouterr().err
    assert run("chat", str(tmp_path)) == 1, "of what is no model more is missing than a tokenizer"


def test_compile_reports_what_was_compiled(fake, capsys):
    assert run("compile", "--max-num-seqs", "4") == 0
    assert "All executables are in the compile cache; this took 1.5 s" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ModelNotFoundError("no such model"), 1),
        (CapacityError("needs 3"), 1),
        (CheckpointError("a\nb"), 1),
        (KeyError("x"), 1),
    ],
)
def test_failures_are_lines_and_not_tracebacks(fake, error, status, capsys):
    fake.fails = error
    assert run("generate", "x") == status
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("jaxpage: error: ") and "Traceback" not in err


def test_debug_shows_the_traceback(fake, monkeypatch, capsys):
    fake.fails = KeyError("x")
    monkeypatch.setenv("JAXPAGE_DEBUG", "1")
    assert run("generate", "x") == 1
    assert "Traceback" in capsys.readouterr().err


def test_an_interrupt_is_a_line(fake, monkeypatch, capsys):
    def interrupt(self: FakeLLM) -> Iterator[RequestOutput]:
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(FakeLLM, "_chunks", interrupt)
    assert run("generate", "x") == 1
    assert capsys.readouterr().err.endswith("jaxpage: error: interrupted\n") and fake.closed


WRONG_USE = [
    (("run", "smollm2"), "invalid choice: 'run'; use `jaxpage chat MODEL` for a conversation"),
    (("pull", "llama3"), "'pull'; `jaxpage serve`, `chat` and `generate` download a hub id"),
    (("list",), "'list'; `jaxpage fetch` lists the models that it brings"),
    (("ps",), "'ps'; ask the server: `curl http://127.0.0.1:8000/api/ps`"),
    (("collect-env",), "'collect-env'; use `jaxpage doctor`"),
    (("config", "list"), "invalid choice: 'list'; there are show, validate"),
    (("chatt",), "did you mean 'chat'?"),
    (("generate",), "PROMPT"),
    (
        ("generate", "smollm2"),
        "'smollm2' is a model, and the prompt is missing: jaxpage generate smollm2 PROMPT",
    ),
    (("serve", "demo", "--disable-log-requests"), "requests are logged only with --log-requests"),
    (("serve", "demo", "--disable-ui"), "error: unknown argument '--disable-ui'\n"),
    (
        ("serve", "demo", "--swap-space=4"),
        "unknown argument '--swap-space'; use --swap-space-blocks N",
    ),
    (("plan", "demo", "--prot", "80"), "error: unknown argument '--prot'\n"),
    (("generate", "x", "--max-tokns", "3"), "did you mean '--max-tokens'?"),
    (("generate", "x", "--max-token", "3"), "did you mean '--max-tokens'?"),
    (("generate", "x", "--max-tokens", "many"), "invalid int value: 'many'"),
    (("generate", "x", "--max-tokens", "0"), "max_tokens must be an integer from 1"),
    (
        ("generate", "x", "--temperature", "nan"),
        "temperature must be a finite number from 0 to 2, got nan",
    ),
    (
        ("generate", "x", "--temperature", "3"),
        "temperature must be a finite number from 0 to 2, got 3.0",
    ),
    (("generate", "x", "--stop", ""), "must be a string that is not empty"),
    (("generate", ""), "the prompt is empty"),
    (("generate", "x", "--block-size", "3"), "command line: block_size: must be a power of two"),
    (("generate", "x", "--dtype", "int3"), "command line: dtype: must be 'auto', 'float32'"),
    (("generate", "x", "--config", "missing.yaml"), "there is no configuration file missing.yaml"),
    (("config", "validate", "a.yaml", "--config", "b.yaml"), "two configuration files"),
    (("compile", "--speculative-config", "ngram"), "not a JSON object, nor auto: 'ngram'"),
    (("frobnicate",), "invalid choice: 'frobnicate'; there are generate, chat, serve"),
    (("genrate", "x"), "invalid choice: 'genrate'; did you mean 'generate'?"),
    (("bench", "throughputs"), "invalid choice: 'throughputs'; did you mean 'throughput'?"),
    (("config", "validat"), "invalid choice: 'validat'; did you mean 'validate'?"),
    (
        ("generate", "Once", "upon", "a", "time"),
        "unexpected argument 'a'; a text of several words needs quotes",
    ),
    (
        ("serve", "demo", "extra"),
        "unexpected argument 'extra'; jaxpage serve takes MODEL, and flags",
    ),
    (
        ("convert", "a", "b", "c"),
        "unexpected argument 'c'; jaxpage convert takes SRC and DST, and flags",
    ),
    (("--nope",), "jaxpage: error: unknown argument '--nope'\n"),
    (("--versoin",), "unknown argument '--versoin'; did you mean '--version'?"),
    (("bench", "--nope"), "jaxpage bench: error: unknown argument '--nope'\n"),
    (("chat", "a", "--model", "b"), "the model is given twice: 'a' and 'b'"),
    (("generate", "-q", "-v", "x"), "not allowed with argument"),
    (
        ("compile", "--kv-cache-memory-bytes", "24"),
        "24 without a unit is 24 bytes; write 24GiB or 24MiB",
    ),
    (("serve",), "serve which model? jaxpage serve demo"),
    (("serve", "demo", "--port", "eighty"), "invalid int value: 'eighty'"),
    (
        ("serve", "demo", "--port", "65536"),
        "command line: port: must be less than 65536, got 65536",
    ),
    (("serve", "demo", "--prot", "80"), "unknown argument '--prot'; did you mean '--port'?"),
    (
        ("serve", "demo", "--tool-call-parser", "xml"),
        (
            "command line: tool_parser: must be 'auto', 'none', 'hermes', 'llama3_json', 'lfm2', "
            "'granite' or 'minicpm5'"
        ),
    ),
    (
        ("serve", "demo", "--ui-show-prompts"),
        "command line: ui_show_prompts: cannot be true while ui is false",
    ),
    (("serve", "demo", "--max-body-bytes", "lots"), "not an amount of memory"),
    (("bench",), "required"),
]


@pytest.mark.parametrize(
    ("words", "message"), WRONG_USE, ids=[" ".join(words) for words, _ in WRONG_USE]
)
def test_wrong_use_is_status_2(fake, words, message, capsys):
    assert run(*words) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("generate", "x", "--n", "2"), "n=2 is not supported on the command line"),
        (
            ("generate", "x", "--enable-lora", "--event-log", "y"),
            "event_log: is not supported with enable_lora",
        ),
    ],
)
def test_what_is_not_supported_is_one_line_and_status_2(fake, words, message, capsys):
    assert run(*words) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and err.count("\n") == 1 and not fake.calls


def test_jaxpage_alone_prints_its_help(capsys):
    assert run() == 0
    out, err = capsys.readouterr()
    assert "serve" in out and "generate" in out and err == ""


def test_answers_for_flags_of_vllm_are_true_of_the_parser():
    """Flags that are the same are there, others are not, and flags in the answers exist."""
    listed = options("serve")
    for flag, answer in answers("flags").items():
        assert (flag in listed) == (answer.kind == "same"), flag
        assert set(re.findall(r"--[a-z][a-z-]+", answer.text)) <= listed, answer.text


KINDS = ["same", "other name", "always on", "not needed", "not there"]


@pytest.mark.parametrize("what", ["flags", "fields", "settings", "sampling", "metrics"])
def test_a_name_of_vllm_has_one_answer_of_a_known_kind(what):
    kinds = tomllib.loads(
        resources.files("jaxpage.settings").joinpath("from_vllm.toml").read_text()
    )
    names = [
        name for texts in kinds[what].values() for group in texts.values() for name in group.split()
    ]
    assert [*kinds[what]] == [kind for kind in KINDS if kind in kinds[what]]
    assert sorted(names) == sorted(answers(what)) == sorted(set(names))
    form = r"--[a-z][a-z0-9-]*|-[a-zO]{1,3}" if what == "flags" else r"[a-z][a-z0-9_]*"
    assert all(re.fullmatch(form, name) for name in names)
    assert not any(answer.text.endswith(".") for answer in answers(what).values())


def test_answers_for_fields_of_vllm_are_true_of_the_requests():
    models = [*REQUESTS, *(model for each in DIALECTS for model in each.document.requests)]
    anywhere = {name for model in models for name in model.model_fields}
    generation = {*CompletionRequest.model_fields, *ChatCompletionRequest.model_fields}
    known = answers("fields")
    same = {field for field, answer in known.items() if answer.kind == "same"}
    assert same <= anywhere
    assert not generation & (known.keys() - same)


@pytest.mark.parametrize(
    ("word", "answer"),
    [
        ("--enforce_eager", "every step is an executable"),
        ("--no-async-scheduling", "planning and the device take turns"),
        ("--compilation-config.mode=3", "every step is compiled ahead of time"),
    ],
)
def test_flags_of_vllm_are_answered_in_every_form(word, answer, capsys):
    assert run("serve", "demo", word) == 2
    assert f"; {answer}" in capsys.readouterr().err


def options(command: str) -> set[str]:
    commands = next(
        action
        for action in make_parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    return {word for action in commands.choices[command]._actions for word in action.option_strings}


@pytest.mark.parametrize("cut", [1, 3, 100])
def test_words_are_broken_at_the_edge_of_the_terminal(cut):
    """The oracle is textwrap, for a text in which every word fits.

    Wide characters count two columns.
    """
    text = (
        "Once upon a time there lived a young rabbit in an old town with a crooked tower and "
        "nothing else"
    )
    wrapper = Wrapper(20)
    texts = (
        "".join(wrapper.feed(text[at : at + cut]) for at in range(0, len(text), cut))
        + wrapper.finish()
    )
    assert [line.rstrip() for line in texts.split("\n")] == textwrap.wrap(text, 20)
    wide = Wrapper(6)
    assert wide.feed("日本 日本 x\ny ") + wide.finish() == "日本 \n日本 x\ny "


def test_config_show_prints_values_and_origins(tmp_path, monkeypatch, capsys):
    path = tmp_path / "engine.yaml"
    path.write_text("max_num_seqs: 4\nblock_size: 8\n")
    monkeypatch.setenv("JAXPAGE_BLOCK_SIZE", "32")
    assert run("config", "show", str(path), "--dtype", "float32") == 0
    lines = {
        line.split(":")[0]: " ".join(line.split()) for line in capsys.readouterr().out.splitlines()
    }
    assert lines["max_num_seqs"] == f"max_num_seqs: 4 # {path}:1"
    assert lines["block_size"] == "block_size: 32 # JAXPAGE_BLOCK_SIZE"
    assert lines["dtype"] == "dtype: float32 # command line"
    assert lines["seed"] == "seed: 0 # built-in"


def test_config_validate(tmp_path, capsys):
    path = tmp_path / "engine.yaml"
    path.write_text("max_model_length: 4\n")
    assert run("config", "validate", str(path)) == 2
    assert (
        f"{path}:1: max_model_length: unknown setting; did you mean 'max_model_len'?"
        in capsys.readouterr().err
    )
    path.write_text("max_model_len: 4\n")
    assert run("config", "validate", str(path)) == 0
    out, err = capsys.readouterr()
    assert out == "" and "is valid" in err


def test_each_answer_to_a_foreign_command_names_commands_and_paths_that_exist():
    """They are in the guide too, which is where they are explained."""
    guide = (Path(__file__).parents[1] / "docs" / "guides" / "from-ollama.md").read_text()
    [commands] = [
        action.choices for action in make_parser()._actions if action.metavar == "COMMAND"
    ]
    assert commands is not None
    serve = commands["serve"]._option_string_actions
    for name, answer in ANSWERS.items():
        assert name not in commands
        for command in re.findall(r"`jaxpage ([a-z-]+)", answer):
            assert command in commands or command.startswith("--"), f"{name}: {command}"
        for flag in re.findall(r"--[a-z-]+", answer):
            assert flag in (*serve, "--help"), f"{name}: {flag}"
        if name not in ("help", "complete", "collect-env"):
            assert f"`ollama {name}" in guide, f"the guide lacks {name}"


def test_doctor_reports_and_does_not_fail(capsys):
    assert run("doctor") == 0
    lines = capsys.readouterr().out.splitlines()
    report = dict(line.split(maxsplit=1) for line in lines)
    assert report["jaxpage"] == __version__
    names = [line.split(maxsplit=1)[1] for line in lines if line.startswith("architectures")]
    assert names[0] == f"{len(FAMILIES)}, also listed in docs/reference/models.md:"
    place = names.index(f"and {len(ENCODERS)} encoders, which embed or rank texts:")
    assert " ".join(names[1:place]).split(", ") == [*FAMILIES] and max(map(len, names)) < 80
    assert " ".join(names[place + 1 :]).split(", ") == [*ENCODERS]
    assert {
        "jax",
        "jaxlib",
        "flax",
        "transformers",
        "devices",
        "host",
        "compile",
        "demo",
        "JAX_PLATFORMS",
    } <= set(report)


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("echo 'some c++ 14.2'; echo more", r"\S+cxx --flag: some c\+\+ 14.2"),
        ("echo broken >&2; exit 3", r"\S+cxx --flag, which fails with status 3: broken"),
        (None, r"none \(g\+\+, clang\+\+, c\+\+ or \$CXX\): kernels for CPUs .*"),
    ],
)
def test_doctor_names_the_compiler(tmp_path, monkeypatch, program, expected):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    if program is not None:
        (tmp_path / "cxx").write_text(f"#!/bin/sh\n{program}\n")
        (tmp_path / "cxx").chmod(0o755)
        monkeypatch.setenv("CXX", f"{tmp_path / 'cxx'} --flag")
    [line] = doctor._cpp_compiler()
    assert re.fullmatch(expected, line)


def test_doctor_breaks_long_lines_on_a_terminal(capsys, monkeypatch):
    values = [("short", "one"), ("empty", ""), ("long", "word-of-ten " * 12)]
    monkeypatch.setattr("jaxpage.cli.doctor.report", lambda model: iter(values))
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert run("doctor") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["short", "one"] and lines[1].split() == ["empty"]
    assert len(lines) > 3 and max(map(len, lines)) <= 60
    assert all(line.startswith(" " * 21 + "word-of-ten") for line in lines[3:])


def test_doctor_looks_at_a_model(tmp_path, capsys, monkeypatch):
    def doctor_lines(model: str) -> dict[str, str]:
        assert run("doctor", model) == 0
        lines = capsys.readouterr().out.splitlines()
        return {line[:20].strip(): line[21:] for line in lines}

    demo = doctor_lines("demo")
    assert "config and tensors fit" in demo["model"] and demo["tokenizer"] == "2048 tokens"
    assert demo["chat template"].startswith("makes ") and "pictures" not in demo
    seeing = doctor_lines("demo-vision")
    assert seeing["pictures"] == "processed by Idefics3ImageProcessor; '<image>' stands for one"
    broken = Path(shutil.copytree(Path(jaxpage.__file__).parent / "demo", tmp_path / "broken"))
    (broken / "chat_template.jinja").write_text("{% for x in %}")
    assert "TemplateSyntaxError" in doctor_lines(str(broken))["chat template"]
    (broken / "config.json").write_text("{}")
    assert doctor_lines(str(broken))["model"].startswith("unknown: CheckpointError")
    missing = doctor_lines(str(tmp_path / "missing"))
    assert "missing" in missing["model"] and "tokenizer" not in missing
    monkeypatch.setattr("jaxpage.checkpoints.finding.resolve_model", lambda _: 1 / 0)
    assert "ZeroDivisionError" in doctor_lines("demo")["model"]


def test_doctor_says_what_several_devices_and_hosts_could_do(monkeypatch, capsys):
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("JAXPAGE_HOSTS_SECRET", "nobody may read this")
    assert run("doctor") == 0
    out = capsys.readouterr().out
    assert re.search(
        r"^tensor parallel +1 cpu device\(s\), so tensor_parallel_size can be up to 1$", out, re.M
    )
    assert re.search(
        r"^several hosts +jax.distributed detects no job of Slurm, .*--num-hosts", out, re.M
    )
    assert re.search(r"^JAXPAGE_HOSTS_SECRET +set$", out, re.M)
    job = {
        "JOB_ID": "4095",
        "STEP_NODELIST": "node[007,009]",
        "NTASKS": "2",
        "PROCID": "1",
        "LOCALID": "0",
    }
    for name, value in job.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert run("doctor") == 0
    assert re.search(
        r"^several hosts +process 1 of 2 of a job, process 0 on node007: --coord",
        capsys.readouterr().out,
        re.M,
    )


@pytest.mark.parametrize(
    ("printed", "warning"),
    [
        ("echo 580.95.05; echo 580.95.05", r"580\.95\.05"),
        ("echo 570.00", r"570\.00"),
        (
            "echo 565.57.01",
            (
                r"565\.57\.01 \(warning: steps may hang, .* install r570 or newer, or "
                r"XLA_FLAGS=--xla_gpu"
            ),
        ),
        ("echo NVIDIA-SMI has failed; exit 9", "unknown: nvidia-smi says 'NVIDIA-SMI has failed'"),
        (None, "none found"),
    ],
)
def test_doctor_warns_of_an_old_nvidia_driver(printed, warning, tmp_path, monkeypatch, capsys):
    if printed is not None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{printed}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run("doctor") == 0
    assert re.search(rf"^NVIDIA driver +{warning}", capsys.readouterr().out, re.M)


def test_doctor_reports_a_broken_jax(monkeypatch, capsys):
    import jax

    def fail() -> list[Any]:
        raise RuntimeError("no backend")

    monkeypatch.setattr(jax, "devices", fail)
    assert run("doctor") == 0
    assert "unknown: RuntimeError: no backend" in capsys.readouterr().out


HELPED = ("", "generate", "chat", "serve", "plan", "bench throughput")
HEAVY = {
    *("jax", "flax", "transformers", "torch", "numpy", "orbax", "tokenizers", "psutil"),
    *("safetensors", "pydantic", "prompt_toolkit", "starlette", "uvicorn", "prometheus_client"),
}


def test_help_is_quick_because_it_loads_nothing_heavy():
    """Half a second is the promise.

    What would break it is an import, and that can be told without a clock.
    """
    code = (
        "import sys, contextlib\n"
        "from jaxpage.cli import main\n"
        f"for words in {HELPED}:\n"
        "    with contextlib.suppress(SystemExit): main([*words.split(), '--help'])\n"
        "    print({name.partition('.')[0] for name in sys.modules}, file=sys.stderr)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )
    assert result.stdout.count("usage: jaxpage") == len(HELPED)
    loaded = [ast.literal_eval(line) for line in result.stderr.splitlines()]
    assert len(loaded) == len(HELPED) and not set().union(*loaded) & HEAVY


def parsers_of(words):
    """Returns the parsers of commands by name, as they are made for words."""
    (commands,) = [
        action.choices for action in make_parser(words)._actions if action.metavar == "COMMAND"
    ]
    return commands


def test_a_command_has_the_flags_that_it_has_among_all():
    """A command line needs those of its own command alone."""
    commands = parsers_of(())
    assert len(commands) == 13
    for name, parser in commands.items():
        assert parsers_of([name, "--seed"])[name].format_help() == parser.format_help()
        assert [*parsers_of([name])] == [name] and [*parsers_of(["-q", name])] == [*commands]


def test_help_lists_what_exists_and_nothing_else(capsys):
    assert run("--help") == run("--version") == 0
    text = capsys.readouterr().out
    for command in (
        "generate",
        "chat",
        "serve",
        "convert",
        "plan",
        "compile",
        "config",
        "bench",
        "replay",
        "doctor",
    ):
        assert f"\n    {command} " in text
    assert text.endswith(f"\njaxpage {__version__}\n")


COMPLETIONS = [
    (["se"], "serve"),
    (["serve", "--max-num-s"], "--max-num-seqs"),
    (["bench", "thr"], "throughput"),
    (["serve", "--config", "pyp"], "pyproject.toml"),
    (["serve", "READ"], "README.md"),
]


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_commands_flags_and_files(capsys):
    """The function that bash is told to call completes them."""
    assert run("--print-completion", "bash") == 0
    script = capsys.readouterr().out
    program = script + "\nfunction=$(complete -p jaxpage | sed 's/.*-F \\([^ ]*\\) .*/\\1/')\n"
    for words, _ in COMPLETIONS:
        program += f'COMP_WORDS=(jaxpage {" ".join(words)}) COMP_CWORD={len(words)} COMPREPLY=(); $function; echo "${{COMPREPLY[@]}}"\n'
    result = subprocess.run(
        ["bash", "-c", program],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
        timeout=60,
        check=True,
    )
    assert result.stdout.split() == [expected for _, expected in COMPLETIONS]
    assert run("--print-completion", "zsh") == 0
    assert capsys.readouterr().out.startswith("#compdef jaxpage")


def test_a_reader_that_goes_away_is_no_traceback():
    command = f"{sys.executable} -m jaxpage config show | true"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert "Traceback" not in result.stderr


# A text needs no drafters, adapters, pictures, grammars, beams, receipts and settings of servers.
NOT_FOR_A_TEXT = (
    "assembly.planning.drafters",
    "assembly.receipt_facts",
    "checkpoints.conversion",
    "checkpoints.drafters.eagle_files",
    "checkpoints.in_memory.parameters",
    "checkpoints.lora_files",
    "decoding.beam",
    "decoding.grammars",
    "device.drafters.growing",
    "images.processor",
    "models.drafters.eagle",
    "models.gemma",
    "receipts.receipt",
    "serving.settings.server_config",
    "speculation.methods",
)


def test_the_first_command_of_the_readme():
    """The packaged model runs end to end in a process of its own: what the README quotes is what
    everybody reads.
    """
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    quoted = " ".join(
        line.removeprefix(">").strip() for line in readme.splitlines() if line.startswith(">")
    )
    open_tokenizer(DEMO)  # as an earlier start would, so that this one needs no transformers
    code = (
        "import sys\nfrom jaxpage.cli import main\n"
        "status = main(['generate', 'Once upon a time', '--echo'])\n"
        "print(sorted(sys.modules))\nsys.exit(status)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False
    )
    assert result.returncode == 0, result.stderr
    loaded = set(ast.literal_eval(result.stdout.splitlines()[-1]))
    assert {"jax", "flax.nnx", "tokenizers"} <= loaded
    heavy = ("transformers", "torch", "prompt_toolkit", "jinja2", "orbax.checkpoint")
    later = ("jax.experimental.pallas", "uvicorn", "starlette", "huggingface_hub", "PIL", "gguf")
    assert not loaded & {*heavy, *later, "llguidance"}
    assert not loaded & {f"jaxpage.{name}" for name in NOT_FOR_A_TEXT}
    assert len(quoted) > 100 and " ".join(result.stdout.split()).startswith(quoted)
    assert "200 tokens" in result.stderr and "generation_config.json" in result.stderr
    assert len(result.stderr.splitlines()) == 2, f"no table, no warnings: {result.stderr}"


def test_nobody_hears_that_torch_is_missing():
    """Transformers would say so at its import, where there is none."""
    code = (
        "import importlib.util as util; find = util.find_spec\n"
        "util.find_spec = lambda name, *rest: None if name.partition('.')[0] == 'torch' else find(name, *rest)\n"
        "from jaxpage.checkpoints.tokenizers.tokenizer_files import load_tokenizer\n"
        "from transformers.utils import is_torch_available\n"
        "print(is_torch_available())"
    )
    environment = {
        name: value for name, value in os.environ.items() if name != "TRANSFORMERS_VERBOSITY"
    }
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment
    )
    assert (result.stdout, result.stderr) == ("False\n", "")
