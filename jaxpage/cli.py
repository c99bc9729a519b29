"""The command `jaxpage`: parses the command line and turns every failure into one line and an exit status.

Generated text and reports go to standard output, everything else to standard error. Status 0: done, 1: failed, 2: wrong use.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn

from jaxpage import __version__
from jaxpage.argument_checks import close_names
from jaxpage.cli_flags import (
    ENGINE_FLAGS,
    PLAN_SETTINGS,
    UsageError,
    add_engine_flags,
    add_sampling_flags,
    add_server_flags,
    byte_size,
)
from jaxpage.errors import ConfigError, JaxpageError, UnsupportedError


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """As argparse, with the nearest flag when one is unknown."""
        prefix = "unrecognized arguments: "
        if message.startswith(prefix):
            unknown = message.removeprefix(prefix).split()[0].split("=")[0]
            others = [option for option in self.known_options() if option != unknown]  # which another command may take
            close = close_names(unknown, others) if len(others) == len(self.known_options()) else []
            message = f"unknown argument {unknown!r}" + (f"; did you mean {close[0]!r}?" if close else "")
        super().error(message)

    def known_options(self) -> list[str]:
        """All flags of this command, or of every command below it."""
        options: list[str] = []
        for action in self._actions:
            options += action.option_strings
            if isinstance(action, argparse._SubParsersAction):
                options += [option for parser in action.choices.values() for option in parser.known_options()]
        return options


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it would report on standard error that torch is missing
    try:
        arguments = _parser().parse_args(words)
        status: int = arguments.run(arguments) or 0
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader of our output went away
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return _fail("interrupted", 1)
    except (ConfigError, UnsupportedError, UsageError) as error:  # asked for what cannot be had: wrong use
        return _fail(str(error), 2)
    except JaxpageError as error:
        return _fail(str(error), 1)
    except Exception as error:
        hint = "" if os.environ.get("JAXPAGE_DEBUG") else " (JAXPAGE_DEBUG=1 shows where)"
        return _fail(f"{type(error).__name__}: {error}{hint}", 1)


def _fail(message: str, status: int) -> int:
    if os.environ.get("JAXPAGE_DEBUG"):
        traceback.print_exc()
    print(f"jaxpage: error: {message}", file=sys.stderr)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="jaxpage",
        description="An LLM inference engine in JAX with a paged KV cache.",
        epilog="Settings also come from JAXPAGE_* variables and from --config FILE. 'jaxpage COMMAND --help' has the flags.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"jaxpage {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_generate(commands)
    _add_chat(commands)
    _add_serve(commands)
    _add_convert(commands)
    _add_plan(commands)
    _add_compile(commands)
    _add_config(commands)
    _add_bench(commands)
    _add_replay(commands)
    doctor = _command(commands, "doctor", "report versions, devices, memory and caches; needs no GPU")
    doctor.set_defaults(run=_lazily("doctor"))
    return parser


_Commands = argparse._SubParsersAction


def _command(commands: _Commands[_Parser], name: str, purpose: str) -> _Parser:
    return commands.add_parser(
        name, help=purpose, description=purpose[0].upper() + purpose[1:] + ".", allow_abbrev=False
    )


def _lazily(name: str) -> Callable[[argparse.Namespace], int | None]:
    """The function `name` of `cli_commands`, imported when it runs: parsing and `--help` must not wait for jax."""

    def run(arguments: argparse.Namespace) -> int | None:
        from jaxpage import cli_commands

        function: Callable[[argparse.Namespace], int | None] = getattr(cli_commands, name)
        return function(arguments)

    return run


def _add_generate(commands: _Commands[_Parser]) -> None:
    parser = _command(commands, "generate", "continue a text; it streams to standard output")
    parser.add_argument("prompt", metavar="PROMPT", help="the text to continue; - reads it from standard input")
    parser.add_argument("--echo", action="store_true", help="print the prompt before the text")
    add_sampling_flags(parser)
    add_engine_flags(parser, without=("seed",))
    parser.set_defaults(run=_lazily("generate"))


def _add_chat(commands: _Commands[_Parser]) -> None:
    parser = _command(commands, "chat", "talk with a model that has a chat template")
    parser.add_argument("--system", metavar="TEXT", help="a system message to begin with")
    add_sampling_flags(parser)
    add_engine_flags(parser, without=("seed",))
    parser.set_defaults(run=_lazily("chat"))


def _add_serve(commands: _Commands[_Parser]) -> None:
    parser = _command(commands, "serve", "answer OpenAI clients over HTTP")
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", default=argparse.SUPPRESS, help="directory, hub id or demo"
    )
    add_server_flags(parser)
    add_engine_flags(parser, without=("model",))
    parser.set_defaults(run=_lazily("serve"))


def _add_convert(commands: _Commands[_Parser]) -> None:
    parser = _command(commands, "convert", "convert a checkpoint: Hugging Face safetensors to Orbax, or back")
    parser.add_argument("source", metavar="SRC", help="model directory, hub id or demo")
    parser.add_argument("destination", metavar="DST", help="new directory")
    parser.set_defaults(run=_lazily("convert"))


def _add_plan(commands: _Commands[_Parser]) -> None:
    parser = _command(commands, "plan", "what fits in how much memory, by a model's config.json alone")
    add = parser.add_argument
    add("model", metavar="MODEL", nargs="?", default=argparse.SUPPRESS, help="directory, config.json, hub id or demo")
    add(
        "--memory",
        type=byte_size,
        metavar="SIZE",
        help="of each device: 24GiB, 40GB, bytes; default: of this machine's",
    )
    add("--json", action="store_true", help="one JSON object in place of the tables")
    add_engine_flags(parser, without=tuple(flag.setting for flag in ENGINE_FLAGS if flag.setting not in PLAN_SETTINGS))
    parser.set_defaults(run=_lazily("plan"))


def _add_compile(commands: _Commands[_Parser]) -> None:
    parser = _command(commands, "compile", "compile every shape of a configuration into the persistent cache")
    add_engine_flags(parser)
    parser.set_defaults(run=_lazily("compile_menu"))


def _add_config(commands: _Commands[_Parser]) -> None:
    parser = _command(commands, "config", "show or validate a configuration")
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    for name, purpose in (
        ("show", "print the effective settings and where each comes from"),
        ("validate", "check a configuration without loading anything"),
    ):
        action = _command(actions, name, purpose)
        action.add_argument("file", metavar="FILE", nargs="?", help="YAML file; the same as --config FILE")
        add_engine_flags(action)
        add_server_flags(action)
        action.set_defaults(run=_lazily(f"config_{name}"))


_KV_DTYPE_SETTINGS = {"model", "tokenizer", "revision", "dtype", "max_model_len", "block_size", "attention_backend"}


def _add_bench(commands: _Commands[_Parser]) -> None:
    parser = _command(commands, "bench", "measure this engine")
    kinds = parser.add_subparsers(title="kinds", metavar="KIND", required=True)
    throughput = _command(kinds, "throughput", "offline throughput of many requests, in tokens per second")
    _add_workload(throughput)
    add = throughput.add_argument
    add("--baseline", metavar="NAME", help="transformers: the same work by static batches of transformers, beside it")
    _add_versus(throughput)
    add("--baseline-batch-size", type=int, default=16, metavar="N", help="rows of a static batch; default: 16")
    add("--output-json", metavar="FILE", help="write the JSON line there as well")
    add("--plot", metavar="FILE", help="draw what the KV pool held over time: .png, .svg or .pdf; needs jaxpage[plot]")
    add_engine_flags(throughput, without=("seed",))
    throughput.set_defaults(run=_lazily("bench_throughput"))
    _add_bench_latency(kinds)
    _add_bench_serve(kinds)
    kv_dtype = _command(kinds, "kv-dtype", "what keys and values in int8 and fp8 change in the logits, and what fits")
    add = kv_dtype.add_argument
    add("--text", metavar="FILE", help="the text to look at; default: random token ids")
    add("--num-tokens", type=int, default=512, metavar="N", help="of the text, at most; default: 512")
    add("--seed", type=int, default=0, metavar="N", help="of random token ids; default: 0")
    add_engine_flags(kv_dtype, without=tuple({flag.setting for flag in ENGINE_FLAGS} - _KV_DTYPE_SETTINGS))
    kv_dtype.set_defaults(run=_lazily("bench_kv_dtype"))
    _add_bench_speculation(kinds)


def _add_workload(parser: _Parser) -> None:
    add = parser.add_argument
    add("--num-prompts", type=int, default=64, metavar="N", help="requests; default: 64")
    add("--dataset", default="sharegpt", metavar="NAME", help="lengths: sharegpt, alpaca or random; default: sharegpt")
    add("--max-input", type=int, default=512, metavar="N", help="longest prompt, in tokens; default: 512")
    add("--max-output", type=int, default=512, metavar="N", help="longest output, in tokens; default: 512")
    add("--seed", type=int, default=0, metavar="N", help="of prompts and lengths; default: 0")


def _add_versus(parser: _Parser) -> None:
    parser.add_argument(
        "--versus",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="the same work by an engine with other settings, beside it; several with commas; repeatable",
    )


def _add_bench_latency(kinds: _Commands[_Parser]) -> None:
    parser = _command(kinds, "latency", "seconds of one batch, from its prompts to its last token")
    add = parser.add_argument
    add("--batch-size", type=int, default=8, metavar="N", help="requests of the batch; default: 8")
    add("--input-len", type=int, default=32, metavar="N", help="tokens of each prompt; default: 32")
    add("--output-len", type=int, default=128, metavar="N", help="tokens of each output; default: 128")
    add("--num-iters", type=int, default=10, metavar="N", help="batches that count; default: 10")
    add("--num-iters-warmup", type=int, default=3, metavar="N", help="batches before them; default: 3")
    add("--seed", type=int, default=0, metavar="N", help="of the prompts; default: 0")
    add("--baseline", metavar="NAME", help="transformers: the same batches by transformers, beside it")
    _add_versus(parser)
    add("--output-json", metavar="FILE", help="write the JSON line there as well")
    add_engine_flags(parser, without=("seed",))
    parser.set_defaults(run=_lazily("bench_latency"))


def _add_bench_serve(kinds: _Commands[_Parser]) -> None:
    parser = _command(kinds, "serve", "latencies and throughput of a running server, as its clients see them")
    add = parser.add_argument
    add("--base-url", default="http://127.0.0.1:8000", metavar="URL", help="default: http://127.0.0.1:8000")
    add("--model", metavar="NAME", help="default: the first that the server has")
    add("--vocab-size", type=int, metavar="N", help="of a server without /v1/capabilities")
    _add_workload(parser)
    add("--request-rate", type=float, default=float("inf"), metavar="X", help="per second; default: inf, all at once")
    add("--burstiness", type=float, default=1.0, metavar="X", help="1: a Poisson process; less: in bursts; default: 1")
    add("--max-concurrency", type=int, metavar="N", help="requests at a time; default: all")
    add("--baseline", metavar="NAME", help="static: the same requests in batches that wait for their last, beside it")
    add("--baseline-batch-size", type=int, default=16, metavar="N", help="requests of a static batch; default: 16")
    add("--output-json", metavar="FILE", help="write the JSON line there as well")
    parser.set_defaults(run=_lazily("bench_serve"))


def _add_bench_speculation(kinds: _Commands[_Parser]) -> None:
    parser = _command(kinds, "speculation", "tokens per step and per second with drafts, by batch, beside none")
    add = parser.add_argument
    batches = [1, 2, 4, 8, 16, 32, 64]
    add("--batches", type=int, nargs="+", default=batches, metavar="N", help="sequences at once; default: 1 2 4 ... 64")
    add(
        "--methods",
        nargs="+",
        default=["ngram"],
        metavar="NAME[=MODEL][+tree]",
        help="how drafts are made, with whose weights, and whether they branch; default: ngram",
    )
    add(
        "--num-speculative-tokens",
        type=int,
        nargs="+",
        default=[3],
        metavar="N",
        help="fixed numbers of drafts, beside auto where the method has it; default: 3",
    )
    add("--temperature", type=float, default=0.0, metavar="X", help="default: 0, greedy")
    add("--max-output", type=int, default=128, metavar="N", help="tokens of each sequence; default: 128")
    add(
        "--starts",
        type=int,
        default=1,
        metavar="N",
        help="engines are begun anew so often, since two of the same kind may differ by 2 %%; default: 1",
    )
    add(
        "--repeats",
        type=int,
        default=6,
        metavar="N",
        help="turns in every start, of 512 tokens or more of each engine; medians are told; default: 6",
    )
    add("--text", metavar="FILE", help="prompts are parts of it; default: random token ids")
    add("--seed", type=int, default=0, metavar="N", help="of random token ids; default: 0")
    add_engine_flags(parser, without=("seed", "max_num_seqs", "enable_prefix_caching"))
    parser.set_defaults(run=_lazily("bench_speculation"))


def _add_replay(commands: _Commands[_Parser]) -> None:
    parser = _command(commands, "replay", "run an event log again and report the first difference")
    parser.add_argument("log", metavar="LOG", help="file that --event-log wrote")
    parser.add_argument("--model", metavar="NAME", help="where the model is now; default: where the log says")
    parser.add_argument("--force", action="store_true", help="go on with other weights, settings or shapes than logged")
    parser.set_defaults(run=_lazily("replay"))


if __name__ == "__main__":
    sys.exit(main())
