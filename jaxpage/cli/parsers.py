"""Declares the commands of `jaxpage` and their flags.

Nothing heavy is imported before the command line is parsed.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from jaxpage import __version__
from jaxpage.cli.bench_parsers import add_bench
from jaxpage.cli.flag import byte_size
from jaxpage.cli.flags import (
    BATCH_SETTINGS,
    PLAN_SETTINGS,
    RECEIPT_SETTINGS,
    add_engine_flags,
    add_sampling_flags,
    add_server_flags,
)
from jaxpage.cli.parsing import (
    COMMAND,
    Commands,
    Parser,
    PrintCompletion,
    add_command,
    add_model,
    add_verbosity,
    lazily,
)
from jaxpage.cli.setting_flags import ENGINE_FLAGS


def make_parser(words: Sequence[str] = ()) -> Parser:
    """Returns the parser of the command line.

    Args:
        words: The words to be parsed. If the first one is a command, the parser knows no other:
            those of all commands are made in 13 ms.
    """
    parser = Parser(
        prog="jaxpage",
        description="An LLM inference engine in JAX with a paged KV cache.",
        epilog=(
            "Settings also come from JAXPAGE_* variables and from --config FILE. 'jaxpage COMMAND "
            "--help' has the flags."
        ),
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"jaxpage {__version__}")
    parser.add_argument(
        "--print-completion",
        action=PrintCompletion,
        choices=("bash", "zsh"),
        help='print a completion script: eval "$(jaxpage --print-completion bash)"',
    )
    commands = parser.add_subparsers(title="commands", metavar=COMMAND, required=True)
    adders = {
        "generate": _add_generate,
        "chat": _add_chat,
        "serve": _add_serve,
        "run-batch": _add_run_batch,
        "fetch": _add_fetch,
        "convert": _add_convert,
        "plan": _add_plan,
        "compile": _add_compile,
        "config": _add_config,
        "bench": add_bench,
        "replay": _add_replay,
        "verify": _add_verify,
        "doctor": _add_doctor,
    }
    for name in words[:1] if {*words[:1]} & adders.keys() else adders:
        adders[name](commands)
    return parser


def _add_doctor(commands: Commands[Parser]) -> None:
    doctor = add_command(
        commands, "doctor", "report versions, devices, memory and caches; needs no GPU"
    )
    doctor.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help="also look at the files of this model, without its weights",
    )
    doctor.set_defaults(run=lazily("commands", "doctor"))


def _add_generate(commands: Commands[Parser]) -> None:
    parser = add_command(commands, "generate", "continue a text, streamed to standard output")
    add_model(
        parser,
        '"demo" (packaged, the default), a directory, a GGUF file, or a hub id; before the prompt',
    )
    add = parser.add_argument
    add("prompt", metavar="PROMPT", help="the text to continue; - reads it from standard input")
    add(
        "--echo",
        action=argparse.BooleanOptionalAction,
        help="print the prompt first; default: on a terminal",
    )
    add(
        "--receipt",
        metavar="FILE",
        help="write a receipt to a new file, with which others can verify the answer",
    )
    add_verbosity(parser, "how memory is divided, and what was compiled")
    add_sampling_flags(parser)
    add_engine_flags(parser, excluded=("seed",))
    parser.set_defaults(run=lazily("generate", "generate"))


def _add_chat(commands: Commands[Parser]) -> None:
    parser = add_command(commands, "chat", "chat with a model that has a chat template")
    add_model(parser)
    parser.add_argument("--system", metavar="TEXT", help="a system message to begin with")
    parser.add_argument(
        "--image",
        metavar="FILE",
        type=Path,
        action="append",
        help="a picture that the first question is about; again for another one",
    )
    add_verbosity(parser, "how memory is divided, and what was compiled")
    add_sampling_flags(parser)
    add_engine_flags(parser, excluded=("seed",))
    parser.set_defaults(run=lazily("chat", "chat"))


def _add_serve(commands: Commands[Parser]) -> None:
    parser = add_command(commands, "serve", "start the OpenAI-compatible HTTP server")
    add_model(parser)
    add_server_flags(parser)
    add_engine_flags(parser)
    parser.epilog = (
        "A flag of 'vllm serve' that is not here is refused with what to do in its place."
    )
    parser.set_defaults(run=lazily("commands", "serve"))


def _add_run_batch(commands: Commands[Parser]) -> None:
    parser = add_command(
        commands,
        "run-batch",
        "answer a file of requests in OpenAI's batch format, or go on with it",
    )
    _add_file(parser, "input", "FILE", "-i", "JSON lines with custom_id, method, url and body")
    _add_file(
        parser,
        "output",
        "OUTPUT",
        "-o",
        "file of the answers, in the order in which they are ready; lines that it has are not "
        "asked again",
    )
    parser.add_argument(
        "--sort-window",
        type=int,
        default=4096,
        metavar="N",
        help=(
            "most lines that are sorted by their prompts, for hits in the prefix cache; 1: the "
            "order of the file; default: 4096"
        ),
    )
    add_verbosity(parser)
    add_server_flags(parser, only=BATCH_SETTINGS)
    add_engine_flags(parser)
    parser.set_defaults(run=lazily("commands", "run_batch"))


def _add_file(parser: Parser, name: str, metavar: str, short: str, help: str) -> None:
    """Adds a file that is given by its position, or by a flag as for `vllm run-batch`."""
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument(name, metavar=metavar, nargs="?", default=argparse.SUPPRESS, help=help)
    group.add_argument(
        short,
        f"--{name}-file",
        dest=name,
        metavar=metavar,
        default=argparse.SUPPRESS,
        help=f"the same as {metavar}",
    )


def _add_fetch(commands: Commands[Parser]) -> None:
    parser = add_command(
        commands, "fetch", "download a small model by name, or list those that can be had"
    )
    parser.add_argument(
        "name",
        metavar="NAME",
        nargs="?",
        help="name of the model, such as smollm2; default: list the names",
    )
    add_verbosity(parser)
    parser.set_defaults(run=lazily("fetch", "fetch"))


def _add_convert(commands: Commands[Parser]) -> None:
    parser = add_command(
        commands,
        "convert",
        "convert a checkpoint: Hugging Face safetensors to Orbax, or back; GGUF to Hugging Face; "
        "Orbax of MaxText, Tunix or gemma",
    )
    parser.add_argument("source", metavar="SRC", help="model directory, GGUF file, hub id or demo")
    parser.add_argument("destination", metavar="DST", help="new directory")
    parser.set_defaults(run=lazily("commands", "convert"))


def _add_plan(commands: Commands[Parser]) -> None:
    parser = add_command(
        commands,
        "plan",
        "how many KV blocks and users fit in memory; needs only config.json, and with --slo a "
        "device; reads no tensors",
    )
    add_model(parser, '"demo" (packaged), a directory, a config.json, a GGUF file, or a hub id')
    add = parser.add_argument
    add(
        "--memory",
        type=byte_size,
        metavar="SIZE",
        help="memory of each device, such as 24GiB or 40GB; default: of this machine",
    )
    add(
        "--device",
        metavar="NAME",
        help="plan for such devices, with the memory that their makers name: v5e, v6e, v7x, h100, "
        "rtx4090, ... (a wrong name lists all)",
    )
    add(
        "--devices",
        type=int,
        metavar="N",
        help="also show how so many devices can be divided into replicas",
    )
    add("--json", action="store_true", help="print one JSON object instead of tables")
    add(
        "--slo",
        metavar="ttft=MS,tpot=MS",
        help="find the highest request rate that keeps this, by simulation",
    )
    add(
        "--rate",
        type=float,
        metavar="X",
        help="with --slo: say whether so many requests per second are sustained",
    )
    add(
        "--costs",
        metavar="FILE",
        help="with --slo: what steps cost; default: measured on this machine",
    )
    add("--dataset", metavar="NAME", help="with --slo: lengths of the requests; default: sharegpt")
    add("--max-input", type=int, metavar="N", help="with --slo: longest prompt; default: 512")
    add("--max-output", type=int, metavar="N", help="with --slo: longest output; default: 512")
    settings = ("model", *PLAN_SETTINGS)
    add_engine_flags(
        parser,
        excluded=tuple(flag.setting for flag in ENGINE_FLAGS if flag.setting not in settings),
    )
    parser.set_defaults(run=lazily("commands", "plan"))


def _add_compile(commands: Commands[Parser]) -> None:
    parser = add_command(
        commands, "compile", "compile every shape of a configuration into the persistent cache"
    )
    add_model(parser)
    add_verbosity(parser)
    add_engine_flags(parser)
    parser.set_defaults(run=lazily("commands", "compile_menu"))


def _add_config(commands: Commands[Parser]) -> None:
    parser = add_command(commands, "config", "show or validate a configuration")
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    for name, purpose in (
        ("show", "print the effective settings and where each comes from"),
        ("validate", "check a configuration without loading anything"),
    ):
        action = add_command(actions, name, purpose)
        action.add_argument(
            "file", metavar="FILE", nargs="?", help="YAML file; the same as --config FILE"
        )
        add_engine_flags(action)
        add_server_flags(action)
        action.set_defaults(run=lazily("commands", f"config_{name}"))


def _add_replay(commands: Commands[Parser]) -> None:
    parser = add_command(
        commands, "replay", "run an event log again and report the first difference"
    )
    parser.add_argument("log", metavar="LOG", help="event log, written by --event-log")
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="path of the model, with the tokenizer whose texts are shown; default: as in the log",
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="continue with other weights, settings or shapes than logged",
    )
    parser.add_argument(
        "--until", type=int, metavar="STEP", help="stop after this step, and print what was there"
    )
    parser.add_argument(
        "--weights",
        metavar="DIRECTORY",
        action="append",
        default=[],
        help="directory with the weights of an update that are not kept next to the log; may be "
        "given several times",
    )
    looking = parser.add_mutually_exclusive_group()
    looking.add_argument(
        "--request", metavar="ID", help="run nothing; print the steps of this request"
    )
    looking.add_argument(
        "--texts",
        metavar="FILE",
        help="run nothing; copy the log, with the texts of its tokens",
    )
    looking.add_argument(
        "--snapshots",
        metavar="FILE",
        help="run the log, and write what the web page shows of it to a new file",
    )
    looking.add_argument(
        "--diff", metavar="LOG", help="run nothing; print the first step in which two logs differ"
    )
    looking.add_argument(
        "--state",
        action="store_true",
        help="run nothing; print what is there at the end, or at --until",
    )
    parser.set_defaults(run=lazily("commands", "replay"))


def _add_verify(commands: Commands[Parser]) -> None:
    parser = add_command(
        commands,
        "verify",
        "compute the answer of a receipt again, and compare all bits; the exit status is 0 if they "
        "are equal, 1 if not, 3 if this machine cannot tell, and 2 after wrong use",
    )
    parser.add_argument(
        "file", metavar="FILE", help="receipt, written by generate --receipt or from an answer"
    )
    add_model(parser, "the model, if it is not on this machine under the name in the receipt")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_verbosity(parser, "how memory is divided, and what was compiled")
    add_engine_flags(parser, excluded=RECEIPT_SETTINGS)
    parser.set_defaults(run=lazily("verify", "verify"))
