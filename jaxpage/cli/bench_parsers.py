"""Declares the kinds of `jaxpage bench` and their flags."""

from __future__ import annotations

from jaxpage.cli.flags import add_engine_flags
from jaxpage.cli.parsing import Commands, Parser, add_command, add_model, lazily
from jaxpage.cli.setting_flags import ENGINE_FLAGS

# Other settings need an engine, which `bench kv-dtype` does not build.
_KV_DTYPE_SETTINGS = {
    "model",
    "tokenizer",
    "revision",
    "dtype",
    "quantization",
    "max_model_len",
    "block_size",
    "attention_backend",
}


def add_bench(commands: Commands[Parser]) -> None:
    """Adds the command `bench` with all its kinds."""
    parser = add_command(commands, "bench", "run a benchmark")
    kinds = parser.add_subparsers(title="kinds", metavar="KIND", required=True)
    _add_bench_throughput(kinds)
    _add_bench_latency(kinds)
    _add_bench_serve(kinds)
    _add_bench_startup(kinds)
    _add_bench_roofline(kinds)
    kv_dtype = add_command(
        kinds,
        "kv-dtype",
        "effect of an int8 or fp8 KV cache on the logits, and how many tokens fit",
    )
    add_model(kv_dtype)
    _add_text(kv_dtype)
    add_engine_flags(
        kv_dtype, excluded=tuple({flag.setting for flag in ENGINE_FLAGS} - _KV_DTYPE_SETTINGS)
    )
    _add_output(kv_dtype)
    kv_dtype.set_defaults(run=lazily("commands", "bench_kv_dtype"))
    _add_bench_quantization(kinds)
    _add_bench_speculation(kinds)


def _add_bench_throughput(kinds: Commands[Parser]) -> None:
    parser = add_command(
        kinds, "throughput", "offline throughput of many requests, in tokens per second"
    )
    add_model(parser)
    _add_workload(parser)
    add = parser.add_argument
    add(
        "--baseline",
        metavar="NAME",
        help="transformers: compare with static batches of transformers",
    )
    _add_versus(parser)
    add(
        "--run-batch",
        action="store_true",
        help="compare with jaxpage run-batch on a file of the same requests",
    )
    add(
        "--baseline-batch-size",
        type=int,
        default=16,
        metavar="N",
        help="rows of a static batch; default: 16",
    )
    add("--repeats", type=int, default=1, metavar="N", help="runs; the median is shown; default: 1")
    add(
        "--compare",
        metavar="FILE",
        help="give the ratio to an earlier run, from the file of its --output-json",
    )
    add(
        "--fail-below",
        type=float,
        default=0.0,
        metavar="X",
        help="status 1 if the ratio and its spread are below X",
    )
    add(
        "--record",
        metavar="FILE",
        help="add a row with commit, work, speed and machine to the table of a document",
    )
    add(
        "--plot",
        metavar="FILE",
        help="draw the use of the KV pool over time: .png, .svg or .pdf; needs jaxpage[plot]",
    )
    # `--seed` is that of the workload.
    add_engine_flags(parser, excluded=("seed",))
    _add_output(parser)
    parser.set_defaults(run=lazily("commands", "bench_throughput"))


def _add_output(parser: Parser) -> None:
    add = parser.add_argument
    add(
        "--output-json",
        metavar="FILE",
        help="also write the result to this file, as one JSON object",
    )
    add(
        "--json",
        action="store_true",
        help="print the JSON object on a terminal too; elsewhere it is the last line",
    )


def _add_text(parser: Parser) -> None:
    add = parser.add_argument
    add("--text", metavar="FILE", help="text to compute; default: random token ids")
    add(
        "--num-tokens",
        type=int,
        default=512,
        metavar="N",
        help="most tokens of the text; default: 512",
    )
    add("--seed", type=int, default=0, metavar="N", help="seed of the random token ids; default: 0")


def _add_bench_quantization(kinds: Commands[Parser]) -> None:
    parser = add_command(
        kinds,
        "quantization",
        "effect of weights of few bits on the logits, their size and their speed",
    )
    add_model(parser)
    _add_text(parser)
    add = parser.add_argument
    rows = [1, 8, 32]
    add(
        "--batches",
        type=int,
        nargs="+",
        default=rows,
        metavar="N",
        help="batch sizes, in sequences; default: 1 8 32",
    )
    add_engine_flags(
        parser,
        excluded=tuple(
            {flag.setting for flag in ENGINE_FLAGS} - _KV_DTYPE_SETTINGS | {"quantization"}
        ),
    )
    _add_output(parser)
    parser.set_defaults(run=lazily("commands", "bench_quantization"))


def _add_workload(parser: Parser) -> None:
    add = parser.add_argument
    add("--num-prompts", type=int, default=64, metavar="N", help="number of requests; default: 64")
    add(
        "--dataset",
        default="sharegpt",
        metavar="NAME",
        help="sharegpt, alpaca, random, prefix_repetition, chat, trace or custom; default: sharegpt",
    )
    add(
        "--dataset-path",
        metavar="FILE",
        help="published JSON of sharegpt or alpaca, JSON lines of trace or custom",
    )
    add("--num-prefixes", type=int, metavar="N", help="prefixes, for prefix_repetition; default: 4")
    add(
        "--prefix-len",
        type=int,
        metavar="N",
        help="tokens of each prefix, for prefix_repetition; default: 64",
    )
    add(
        "--num-rounds", type=int, metavar="N", help="rounds of a conversation, for chat; default: 4"
    )
    add(
        "--max-input",
        type=int,
        default=512,
        metavar="N",
        help="longest prompt in tokens; default: 512",
    )
    add(
        "--max-output",
        type=int,
        default=512,
        metavar="N",
        help="longest output in tokens; default: 512",
    )
    add("--seed", type=int, default=0, metavar="N", help="seed of prompts and lengths; default: 0")


def _add_versus(parser: Parser) -> None:
    parser.add_argument(
        "--versus",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="compare with an engine with other settings, separated by commas; repeatable",
    )


def _add_bench_latency(kinds: Commands[Parser]) -> None:
    parser = add_command(kinds, "latency", "time of one batch, from the prompts to the last token")
    add_model(parser)
    add = parser.add_argument
    add("--batch-size", type=int, default=8, metavar="N", help="requests of the batch; default: 8")
    add("--input-len", type=int, default=32, metavar="N", help="tokens of each prompt; default: 32")
    add(
        "--output-len",
        type=int,
        default=128,
        metavar="N",
        help="tokens of each output; default: 128",
    )
    add("--num-iters", type=int, default=10, metavar="N", help="measured batches; default: 10")
    add(
        "--num-iters-warmup",
        type=int,
        default=3,
        metavar="N",
        help="batches of the warm-up; default: 3",
    )
    add("--seed", type=int, default=0, metavar="N", help="seed of the prompts; default: 0")
    add("--baseline", metavar="NAME", help="transformers: compare with transformers")
    _add_versus(parser)
    add(
        "--compare",
        metavar="FILE",
        help="give the ratio to an earlier run, from the file of its --output-json",
    )
    add_engine_flags(parser, excluded=("seed",))
    _add_output(parser)
    parser.set_defaults(run=lazily("commands", "bench_latency"))


def _add_load(parser: Parser) -> None:
    """Adds the flags for the arrival of requests, and for the limits within which they count."""
    add = parser.add_argument
    add(
        "--request-rate",
        type=float,
        nargs="+",
        metavar="X",
        help="requests per second, one run each; default: all at once",
    )
    add(
        "--burstiness",
        type=float,
        default=1.0,
        metavar="X",
        help="1: a Poisson process; below 1: bursts; default: 1",
    )
    add("--max-concurrency", type=int, metavar="N", help="most requests at a time; default: all")
    add(
        "--goodput",
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help="count requests within ttft, tpot and e2el, in ms",
    )


def _add_bench_serve(kinds: Commands[Parser]) -> None:
    parser = add_command(
        kinds, "serve", "latency and throughput of a running server, measured by clients"
    )
    add = parser.add_argument
    add(
        "--base-url",
        default="http://127.0.0.1:8000",
        metavar="URL",
        help="address of the server; default: http://127.0.0.1:8000",
    )
    add("--model", metavar="NAME", help="name of the model; default: the first of the server")
    add(
        "--vocab-size",
        type=int,
        metavar="N",
        help="vocabulary size, if the server does not tell it",
    )
    add(
        "--tokenizer",
        metavar="NAME",
        help="a model directory or hub id whose tokenizer reads the texts of --dataset-path",
    )
    _add_workload(parser)
    _add_load(parser)
    add(
        "--repeats",
        type=int,
        default=1,
        metavar="N",
        help="runs of each rate; the median is shown; default: 1",
    )
    add(
        "--baseline",
        metavar="NAME",
        help="static: compare with static batches, which wait for their longest output",
    )
    add(
        "--baseline-batch-size",
        type=int,
        default=16,
        metavar="N",
        help="requests of a static batch; default: 16",
    )
    add(
        "--compare",
        metavar="FILE",
        help="give the ratios to an earlier run, from the file of its --output-json",
    )
    add(
        "--plot",
        metavar="FILE",
        help="draw latency by rate, batch and KV pool over time; needs jaxpage[plot]",
    )
    _add_output(parser)
    parser.set_defaults(run=lazily("commands", "bench_serve"))


def _add_bench_startup(kinds: Commands[Parser]) -> None:
    parser = add_command(
        kinds, "startup", "seconds from the start of a process to its first token, by phase"
    )
    add_model(parser)
    add = parser.add_argument
    add(
        "--starts",
        type=int,
        default=3,
        metavar="N",
        help="warm starts after the cold one; medians are shown; default: 3",
    )
    add_engine_flags(parser)
    _add_output(parser)
    parser.set_defaults(run=lazily("commands", "bench_startup"))


def _add_bench_roofline(kinds: Commands[Parser]) -> None:
    parser = add_command(
        kinds,
        "roofline",
        "time of a step, compared with what the machine can do, and where it goes",
    )
    add_model(parser)
    add = parser.add_argument
    rows = [1, 8, 64]
    add(
        "--batches",
        type=int,
        nargs="+",
        default=rows,
        metavar="N",
        help="batch sizes, in sequences; default: 1 8 64",
    )
    add(
        "--context",
        type=int,
        default=256,
        metavar="N",
        help="tokens before those that are decoded; default: 256",
    )
    # max_num_seqs follows from --batches. All prompts are equal, so a prefix cache would save the
    # work that is measured.
    add_engine_flags(parser, excluded=("max_num_seqs", "enable_prefix_caching"))
    _add_output(parser)
    parser.set_defaults(run=lazily("commands", "bench_roofline"))


def _add_bench_speculation(kinds: Commands[Parser]) -> None:
    parser = add_command(
        kinds,
        "speculation",
        "tokens per step and per second with and without drafts, by batch size",
    )
    add_model(parser)
    add = parser.add_argument
    batches = [1, 2, 4, 8, 16, 32, 64]
    add(
        "--batches",
        type=int,
        nargs="+",
        default=batches,
        metavar="N",
        help="batch sizes, in sequences; default: 1 2 4 ... 64",
    )
    _add_drafts(parser)
    add(
        "--temperature",
        type=float,
        default=0.0,
        metavar="X",
        help="sampling temperature; default: 0 (greedy)",
    )
    add(
        "--max-output",
        type=int,
        default=128,
        metavar="N",
        help="tokens of each sequence; default: 128",
    )
    add(
        "--starts",
        type=int,
        default=1,
        metavar="N",
        help="how often the engines are started, because equal engines may differ by 2 %%; default: 1",
    )
    add(
        "--repeats",
        type=int,
        default=6,
        metavar="N",
        help="measurements per start, of 512 tokens or more per engine; medians are shown; default: 6",
    )
    add(
        "--plot",
        metavar="FILE",
        help="draw the ratios by task and batch: .png, .svg or .pdf; needs jaxpage[plot]",
    )
    _add_prompts(parser)
    add_engine_flags(parser, excluded=("seed", "max_num_seqs", "enable_prefix_caching"))
    _add_output(parser)
    parser.set_defaults(run=lazily("commands", "bench_speculation"))


def _add_drafts(parser: Parser) -> None:
    add = parser.add_argument
    add(
        "--methods",
        nargs="+",
        default=["ngram"],
        metavar="NAME[=MODEL][+tree]",
        help="methods, with their weights, and +tree for trees of drafts; default: ngram",
    )
    add(
        "--num-speculative-tokens",
        type=int,
        nargs="+",
        default=[3],
        metavar="N",
        help="fixed numbers of drafts; auto is also measured, if the method has it; default: 3",
    )
    add(
        "--oracle",
        action="store_true",
        help="also measure drafts that are always right: the most that any method can reach",
    )


def _add_prompts(parser: Parser) -> None:
    texts = parser.add_mutually_exclusive_group()
    texts.add_argument(
        "--text",
        metavar="FILE",
        help="text to take prompts from; default: the packaged tales, which the demo model and its drafters know",
    )
    texts.add_argument(
        "--tasks",
        nargs="+",
        default=[],
        metavar="NAME",
        help="tasks with twenty prompts each, measured one by one: summarise, edit (code), continue (tables), chat, translate",
    )
    parser.add_argument(
        "--seed",
        type=int,
        metavar="N",
        help="seed of the random token ids that a model without a tokenizer gets; default: 0",
    )
