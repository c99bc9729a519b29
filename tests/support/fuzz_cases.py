"""Cases of the fuzzer of engines: settings, requests, and events at numbered turns of the engine.

A case is drawn by a seed, is written as a program, and is shrunk to what still fails.
"""

from __future__ import annotations

import dataclasses
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxpage import BeamSearchParams, SamplingParams
from tests.support.engines import BLOCKS_OF_1, BLOCKS_OF_4, BLOCKS_OF_16
from tests.support.fuzz_models import MODELS

# A device's shapes depend on these settings, so that cases share them in groups.
GEOMETRIES: tuple[dict[str, Any], ...] = (
    BLOCKS_OF_16,
    BLOCKS_OF_4,
    BLOCKS_OF_1,
    {**BLOCKS_OF_16, "block_size": 2},
    {**BLOCKS_OF_16, "block_size": 8},
    {**BLOCKS_OF_16, "block_size": 32},
)
_EAGLE = {"method": "eagle3", "model": "demo/eagle3"}
_DRAFT_MODEL = {"method": "draft_model", "model": "demo/draft"}
DRAFTING: tuple[dict[str, Any] | str | None, ...] = (
    *(None, None, None, None),
    "auto",
    {"method": "ngram", "num_speculative_tokens": 3},
    {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": "auto"},
    {"method": "suffix", "num_speculative_tokens": 4},
    {"method": "suffix", "num_speculative_tokens": 7, "tree": True},
    {"method": "lookahead", "num_speculative_tokens": 3},
    {"method": "token_recycling", "num_speculative_tokens": 3},
    {**_DRAFT_MODEL, "num_speculative_tokens": 3},
    {**_DRAFT_MODEL, "num_speculative_tokens": 7, "tree": True},
    {"method": "medusa", "model": "demo/medusa", "num_speculative_tokens": 3},
    {**_EAGLE, "num_speculative_tokens": 3},
    {**_EAGLE, "num_speculative_tokens": 7, "tree": True},
    {"method": "mtp", "num_speculative_tokens": 3},
    {"method": "mtp", "num_speculative_tokens": "auto"},
    {"method": "mtp", "num_speculative_tokens": 7, "tree": True},
)
# The pool is in the shapes of the steps of these methods.
ON_DEVICE = ("draft_model", "medusa", "eagle3", "mtp", "auto")
SHARED_SIZES = (1, 4, 16)  # blocks of these sizes are in pages that are as large as the geometry's
# The settings that an engine and the plain engine that it is compared with have in common.
SHARED = (
    "max_model_len",
    "dtype",
    "kv_cache_dtype",
    "quantization",
    "enable_lora",
    "max_lora_rank",
    "max_loras",
    "tensor_parallel_reduction",
    "enable_prompt_embeds",
)
# Settings without which an engine would have other shapes, and take longer to compile.
NEEDED = ("dtype", "block_size", "num_blocks", "max_num_seqs", *SHARED)
MAX_WITH_PICTURES = 76  # tokens of a prompt; a picture fills 16 of them at most
LENGTHS = (96, 96, 96, 96, 80, 128)  # tokens of the longest request; a small pool still holds one
NUM_SETS = 3  # sets of weights: the model's own, and others
_DIRECTORY = "a new directory"


@dataclass(frozen=True)
class Ask:
    """One request: token ids, and the arguments of its parameters.

    Attributes:
        prompt: The token ids.
        params: The arguments of `SamplingParams`, or of `BeamSearchParams` if `beams`.
        beams: Whether it is a beam search.
        adapter: The number of a LoRA adapter, from 1 on; 0 for none.
        is_vectors: Whether vectors take the place of the tokens, one for each kind of token.
        pictures: The pictures among the tokens, each with the number of tokens before it, a seed
            and a size.
    """

    prompt: tuple[int, ...]
    params: dict[str, Any] = field(hash=False)
    beams: bool = False
    adapter: int = 0
    is_vectors: bool = False
    pictures: tuple[tuple[int, int, int], ...] = ()

    def given(self, config: dict[str, Any]) -> Any:
        """Returns the prompt for a model of this config.json."""
        if self.pictures:
            return self._with_pictures(config)
        if not self.is_vectors:
            return list(self.prompt)
        shape = config["vocab_size"], config["hidden_size"]
        table = np.random.default_rng(0).standard_normal(shape, np.float32)
        return {"prompt_embeds": 0.1 * table[list(self.prompt)]}

    def _with_pictures(self, config: dict[str, Any]) -> dict[str, Any]:
        from tests.support import seeing_models as seeing  # which needs torch

        (architecture,) = config["architectures"]
        name = next(n for n, model in seeing.SEEING.items() if model.architecture == architecture)
        ready = [seeing.ready(name, seed, size) for _, seed, size in self.pictures]
        ids: list[int] = []
        begin = 0
        for (place, _, _), picture in zip(self.pictures, ready, strict=True):
            ids += [*self.prompt[begin:place], *[seeing.IMAGE] * picture.picture.num_rows]
            begin = place
        ids += self.prompt[begin:]
        return {"prompt_token_ids": ids, "multi_modal_data": {"image": ready}}

    def made(self) -> SamplingParams | BeamSearchParams:
        """Returns the parameters of the request."""
        return BeamSearchParams(**self.params) if self.beams else SamplingParams(**self.params)

    def alone(self) -> Ask:
        """Returns the request without what concerns its place among others, which changes no
        result.
        """
        params = {
            name: value
            for name, value in self.params.items()
            if name not in ("priority", "user", "cache_salt")
        }
        return dataclasses.replace(self, params=params)

    @property
    def key(self) -> str:
        """Returns what decides the result of the request."""
        return json.dumps(
            [
                *(self.prompt, self.pictures, self.alone().params),
                *(self.beams, self.adapter, self.is_vectors),
            ],
            sort_keys=True,
        )

    @property
    def depends_on_tokens_alone(self) -> bool:
        """Returns whether the next token does not depend on where the prompt ends."""
        parameters = (
            *("temperature", "seed", "top_p", "top_k", "min_p", "n", "repetition_penalty"),
            *("logit_bias", "allowed_token_ids", "ignore_eos", "logprobs", "max_tokens"),
            *("stop_token_ids", "priority", "user", "cache_salt", "prompt_logprobs"),
        )
        return not self.beams and not self.is_vectors and not self.params.keys() - {*parameters}

    def after(self, token_ids: Sequence[int], max_tokens: int) -> Ask:
        """Returns the request that begins with some of its tokens, and asks for so many others."""
        params = {name: value for name, value in self.params.items() if name != "prompt_logprobs"}
        params |= {"max_tokens": max_tokens}
        return dataclasses.replace(self, prompt=(*self.prompt, *token_ids), params=params)

    @property
    def is_streamable(self) -> bool:
        """Returns whether a stream takes the request."""
        return not self.beams and self.params.get("best_of") is None


@dataclass(frozen=True)
class Event:
    """A call that begins before a turn of the engine.

    Attributes:
        at: The number of the turn.
        name: The kind of call; see `Performance`.
        asks: The indices of the requests that it is about.
        details: Arguments that depend on the kind of call.
        engine: The index of the engine.
        interrupted_after: The turns after which the call is interrupted if it still waits.
        aborted_after: The turns after which its request is aborted by its id.
    """

    at: int
    name: str
    asks: tuple[int, ...] = ()
    details: tuple[Any, ...] = ()
    engine: int = 0
    interrupted_after: int | None = None
    aborted_after: int | None = None


@dataclass(frozen=True)
class Case:
    """Settings of engines of a model, requests, and events.

    Attributes:
        settings: The settings.
        asks: The requests.
        events: The events.
        model: The name of the model; see `MODELS`.
        is_async: True for `AsyncLLM`, False for `LLM`.
        num_engines: The number of engines, which share a directory of prefixes if there is one.
        in_threads: True runs each call on a thread, in real time. Such a case may pass and fail.
    """

    settings: dict[str, Any]
    asks: tuple[Ask, ...]
    events: tuple[Event, ...]
    model: str = "demo"
    is_async: bool = False
    num_engines: int = 1
    in_threads: bool = False

    def program(self) -> str:
        """Returns the case as a program for a checkout of this repository, and what it does in
        words.
        """
        lines = ["from tools.fuzz_engine import run_cases", ""]
        lines += [f"# {line}" for line in self.story()]
        lines += ["with run_cases() as failure:"]
        lines += ["    from tests.support.fuzz_cases import Ask, Case, Event", ""]
        names = [
            each.name for each in dataclasses.fields(Case) if each.name not in ("asks", "events")
        ]
        lines += [
            "    case = Case(",
            *(f"        {name}={getattr(self, name)!r}," for name in names),
        ]
        for name, items in (("asks", self.asks), ("events", self.events)):
            lines += [
                f"        {name}=(",
                *(f"            {item!r}," for item in items),
                "        ),",
            ]
        return "\n".join([*lines, "    )", "    print(failure(case))"])

    def story(self) -> Iterator[str]:
        """Yields what the case does, a sentence for each event."""
        kind = "AsyncLLM" if self.is_async else "LLM"
        yield f"{self.num_engines} x {kind}({self.model!r}); turns are counted from 0"
        if self.in_threads:
            yield "each call on a thread of its own, in real time: a turn stands for 3 ms"
        for event in sorted(self.events, key=lambda event: event.at):
            what = f"{event.name}{event.details or ''}"
            asks = f" of {', '.join(f'asks[{index}]' for index in event.asks)}" * bool(event.asks)
            line = f"before turn {event.at}: {what}{asks}"
            if self.num_engines > 1:
                line += f" on engine {event.engine}"
            if event.interrupted_after is not None:
                line += f", interrupted {event.interrupted_after} turns later"
            if event.aborted_after is not None:
                line += f", aborted by its id {event.aborted_after} turns later"
            yield line


def random_shapes(rng: random.Random, models: Sequence[str] = ()) -> tuple[str, dict[str, Any]]:
    """Returns a model and settings on which the shapes of steps depend.

    Most are of the packaged model. The others have few geometries, since each is compiled anew.

    Args:
        rng: Draws them.
        models: The names of the models; empty for all.
    """
    others = [name for name in MODELS if name != "demo"]
    model = rng.choice(others) if rng.random() < 0.2 else "demo"
    if models:
        model = rng.choice(models)
    settings: dict[str, Any] = {"dtype": "float32", **MODELS[model].settings}
    if model != "demo":
        geometry = rng.choice((BLOCKS_OF_16, BLOCKS_OF_16, BLOCKS_OF_4))
        settings |= {**geometry, "max_model_len": LENGTHS[0], "max_num_batched_tokens": 32}
        if (drafting := rng.choice(MODELS[model].drafting)) is not None:
            settings["speculative_config"] = drafting
        return model, settings
    settings |= rng.choice(GEOMETRIES)
    settings["max_model_len"] = rng.choice(LENGTHS)
    settings["max_num_batched_tokens"] = max(rng.choice((16, 32, 64)), settings["block_size"])
    settings["num_scheduler_steps"] = rng.choice((1, 1, "auto", 2, 4))
    drafting = rng.choice(DRAFTING)
    if drafting is not None and settings["num_scheduler_steps"] in (1, "auto"):
        settings["speculative_config"] = drafting
    settings["kv_cache_dtype"] = rng.choice(("auto", "auto", "auto", "int8", "fp8"))
    if rng.random() < 0.15:
        settings |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": 4}
    if rng.random() < 0.15:
        settings["enable_prompt_embeds"] = True
    if rng.random() < 0.08:
        settings |= {"tensor_parallel_size": 2, "tensor_parallel_reduction": "invariant"}
    if has_pool_in_shapes(settings):
        settings["num_blocks"] = random_pool(rng, settings)
    return model, settings


def has_pool_in_shapes(settings: dict[str, Any]) -> bool:
    """Returns whether engines with pools of other sizes share nothing that is compiled; see
    `make_llm`.
    """
    drafting = settings.get("speculative_config", {})
    method = drafting if isinstance(drafting, str) else drafting.get("method")
    return method in ON_DEVICE or settings["block_size"] not in SHARED_SIZES


def random_pool(rng: random.Random, settings: dict[str, Any]) -> int:
    """Returns a number of blocks, from room for a single request on."""
    max_blocks = -(-settings["max_model_len"] // settings["block_size"])
    return 1 + rng.randint(max_blocks, 3 * max_blocks)


def random_case(rng: random.Random, model: str, shapes: dict[str, Any]) -> Case:
    """Returns a case for engines of a model and of these shapes."""
    settings = dict(shapes)
    max_blocks = -(-settings["max_model_len"] // settings["block_size"])
    if not has_pool_in_shapes(settings):
        settings["num_blocks"] = random_pool(rng, settings)
    settings["preemption_mode"] = rng.choice(("auto", "swap", "recompute"))
    if settings["preemption_mode"] == "swap" and rng.random() < 0.4:
        settings["swap_space_blocks"] = rng.randint(1, 2 * max_blocks)
    settings["scheduling_policy"] = rng.choice(("fcfs", "fcfs", "priority", "fair"))
    if settings["scheduling_policy"] != "priority":
        settings["new_requests_wait_until"] = rng.choice(("readmitted", "completed"))
    settings["enable_prefix_caching"] = rng.random() < 0.7
    settings["enable_mixed_steps"] = rng.choice((None, True, False))
    if MODELS[model].sees:
        settings["encoder_cache_bytes"] = rng.choice((2**20, 2**20, 5000, 1000))
    num_engines = 1
    if rng.random() < 0.15 and settings["enable_prefix_caching"]:
        settings["prefix_cache_directory"] = _DIRECTORY
        num_engines = rng.choice((1, 2))
    asks = tuple(random_asks(rng, model, settings))
    is_async = rng.random() < 0.4
    in_threads = not is_async and num_engines == 1 and rng.random() < 0.15
    events = tuple(random_events(rng, asks, num_engines, is_async))
    if in_threads:
        events = tuple(event for event in events if event.name not in ("hold", "drain"))
    return Case(settings, asks, events, model, is_async, num_engines, in_threads)


def random_asks(rng: random.Random, model: str, settings: dict[str, Any]) -> Iterator[Ask]:
    """Yields a few requests, many of which begin alike."""
    size = settings["block_size"]
    num_tokens = MODELS[model].num_tokens
    stems = [[rng.randrange(2, num_tokens) for _ in range(64)] for _ in range(2)]
    album = random_pictures(rng) if MODELS[model].sees else ()
    for _ in range(rng.randint(2, 6)):
        # The lengths at which a prefix hit leaves one token, or a block is just full, come up
        # often.
        length = rng.choice((1, 2, size, size + 1, 2 * size + 1, 33, rng.randint(1, 60)))
        prompt = rng.choice(stems)[: min(length, 60)]
        if rng.random() < 0.3:
            prompt = [*prompt[:-1], rng.randrange(2, num_tokens)]
        adapter = rng.choice((0, 1, 2)) if settings.get("enable_lora") else 0
        pictures = random_changes(rng, album, len(prompt))
        prompt = prompt[: MAX_WITH_PICTURES - 16 * len(pictures)] if pictures else prompt
        if rng.random() < 0.12 and not adapter:
            params = random_beams(rng)
            yield Ask(tuple(prompt), params, beams=True, pictures=pictures)
        else:
            params = random_sampling(rng, num_tokens, has_text=MODELS[model].has_text)
            if settings["scheduling_policy"] != "priority":
                params.pop("priority", None)
            # Penalties count the tokens of a prompt, and a vector has no log probability.
            has_tokens = {"prompt_logprobs", "repetition_penalty"} & params.keys()
            is_vectors = bool(settings.get("enable_prompt_embeds")) and not has_tokens
            is_vectors = is_vectors and rng.random() < 0.6
            if "prompt_logprobs" in params:
                pictures = ()
            yield Ask(
                tuple(prompt), params, adapter=adapter, is_vectors=is_vectors, pictures=pictures
            )


def random_pictures(rng: random.Random) -> tuple[tuple[int, int, int], ...]:
    """Returns three pictures at places of a prompt."""
    places = sorted(rng.choice((0, 1, 4, 15, 16, rng.randint(0, 30))) for _ in range(3))
    return tuple((place, rng.randint(1, 3), rng.randint(1, 3)) for place in places)


def random_changes(
    rng: random.Random, album: tuple[tuple[int, int, int], ...], length: int
) -> tuple[tuple[int, int, int], ...]:
    """Returns the first pictures of an album for a prompt of this length, now and then others."""
    album = album[: rng.choice((0, 1, 1, 2, 3))]
    seeds = [seed if rng.random() < 0.8 else rng.randint(1, 3) for _, seed, _ in album]
    return tuple(
        (min(place, length), seed, size)
        for (place, _, size), seed in zip(album, seeds, strict=True)
    )


def random_beams(rng: random.Random) -> dict[str, Any]:
    """Returns arguments of `BeamSearchParams`."""
    beam_width = rng.randint(2, 4)
    params = {
        "beam_width": beam_width,
        "max_tokens": rng.randint(1, 16),
        "length_penalty": rng.choice((0.0, 1.0, 1.5)),
        "early_stopping": rng.choice((False, True)),
    }
    if rng.random() < 0.3:
        params["n"] = rng.randint(1, beam_width)
    return params


def random_sampling(rng: random.Random, num_tokens: int, *, has_text: bool) -> dict[str, Any]:
    """Returns arguments of `SamplingParams`, each of which is given now and then."""
    params: dict[str, Any] = {
        # the last one asks for more than fits
        "max_tokens": rng.choice((rng.randint(1, 24), rng.randint(1, 24), 4, 200)),
        "temperature": rng.choice((0.0, 0.8, 1.5)),
        "seed": rng.choice((rng.randrange(2**40), -rng.randrange(2, 2**40))),
    }
    if params["max_tokens"] == 200 and rng.random() < 0.7:
        params["max_tokens"] = 24
    choices: dict[str, Callable[[], Any]] = {
        "n": lambda: rng.randint(2, 3),
        "top_p": lambda: rng.choice((1e-9, 0.2, 0.9)),
        "top_k": lambda: rng.choice((1, 5, 200)),
        "min_p": lambda: 0.05,
        "presence_penalty": lambda: 0.7,
        "frequency_penalty": lambda: -0.5,
        "repetition_penalty": lambda: 1.3,
        "logit_bias": lambda: {rng.randrange(num_tokens): rng.choice((8.0, -8.0, -100.0))},
        "allowed_token_ids": lambda: rng.sample(range(2, num_tokens), 3),
        "stop_token_ids": lambda: [rng.randrange(2, min(num_tokens, 300))],
        "min_tokens": lambda: rng.randint(1, min(params["max_tokens"], 16)),
        "ignore_eos": lambda: True,
        "logprobs": lambda: rng.randint(0, 3),
        "logprobs_mode": lambda: "processed",
        "prompt_logprobs": lambda: 1,
        "priority": lambda: rng.randint(-1, 1),
        "user": lambda: rng.choice("ab"),
        "cache_salt": lambda: rng.choice("xy"),
    }
    if has_text:
        choices |= {
            "bad_words": lambda: [" the"],
            "stop": lambda: rng.choice((["e"], [" a", "."])),
            "structured_outputs": lambda: {"regex": "[a-z ]{2,30}"},
            "include_stop_str_in_output": lambda: True,
            "thinking_token_budget": lambda: rng.randint(0, 9),
        }
    for name, value in choices.items():
        if rng.random() < 0.12:
            params[name] = value()
    if "thinking_token_budget" in params:
        params["thinking_markers"] = rng.choice(
            (("", "so"), ("", "</think>"), ("a", ".", True), ("e", "o"))
        )
        params.pop("allowed_token_ids", None)
    if rng.random() < 0.05:
        params |= {"n": 1, "best_of": 3}
    if "allowed_token_ids" in params or "structured_outputs" in params:
        params.pop("bad_words", None)
    if "structured_outputs" in params:
        params.pop("allowed_token_ids", None)
        params.pop("min_tokens", None)
    return params


def random_events(
    rng: random.Random, asks: Sequence[Ask], num_engines: int, is_async: bool
) -> Iterator[Event]:
    """Yields events in which every request takes part, some of them twice.

    Many are at the same turn, or one after the other, as calls that meet are.
    """
    waiting = [*range(len(asks)), *(index for index in range(len(asks)) if rng.random() < 0.5)]
    rng.shuffle(waiting)
    # Half of the cases are about requests alone, since most of what is done to weights ends them.
    lives = rng.random() < 0.5
    at = 0
    while waiting or rng.random() < 0.4:
        at += rng.choice((0, 0, 1, 1, 2, 5, 12))
        engine = rng.randrange(num_engines)
        if waiting and rng.random() < (0.55 if lives else 0.85):
            yield _random_request(rng, asks, waiting, at, engine, is_async)
        else:
            act = _random_act(rng, asks, at, engine, lives=lives)
            yield act
            if act.name in ("update", "sleep", "pause") and rng.random() < 0.3:
                # as a program does that has given up, or asks twice
                yield dataclasses.replace(act, interrupted_after=None)
    if lives and rng.random() < 0.25:
        timeout = rng.choice((None, 60.0, 60.0, 0.0))
        yield Event(max(0, at - rng.randint(0, 5)), "drain", (), (timeout,))


def _random_request(
    rng: random.Random,
    asks: Sequence[Ask],
    waiting: list[int],
    at: int,
    engine: int,
    is_async: bool,
) -> Event:
    aborted = rng.choice((0, 0, 1, 2, 8)) if is_async and rng.random() < 0.2 else None
    interrupted = rng.choice((0, 0, 1, 2, 8)) if rng.random() < 0.12 else None
    after: dict[str, Any] = {
        "engine": engine,
        "interrupted_after": interrupted,
        "aborted_after": aborted,
    }
    if asks[waiting[-1]].is_streamable and rng.random() < 0.5:
        end = rng.choice(("whole", "whole", "close", "drop"))
        details = (rng.randint(1, 6), rng.choice((0, 0, 1, 3, 10)), end)
        return Event(at, "stream", (waiting.pop(),), details, **after)
    number = 1 if is_async else rng.choice((0, 1, 1, 2, 3, 4))
    batch = tuple(waiting.pop() for _ in range(min(len(waiting), number)))
    return Event(at, "generate", batch, **after)


def _random_act(
    rng: random.Random, asks: Sequence[Ask], at: int, engine: int, *, lives: bool
) -> Event:
    """Returns an event other than a request; `lives` adds those that wait for other weights."""
    interrupted = rng.choice((0, 0, 1, 2, 8)) if rng.random() < 0.3 else None
    after: dict[str, Any] = {"engine": engine, "interrupted_after": interrupted}
    index = rng.randrange(len(asks))
    names = ["pin", "pin", "reset", "score", "embed"]
    if lives:
        names += ("update", "update", "update", "sleep", "sleep", "pause", "hold")
    match rng.choice(names):
        case "pin":
            return Event(at, "pin", (index,), (rng.randint(0, 12),), **after)
        case "score":
            return Event(at, "score", (index, rng.randrange(len(asks))), **after)
        case "embed":
            pooling = rng.choice(("last", "mean"))
            number = rng.randint(1, 3)
            prompts = tuple(rng.randrange(len(asks)) for _ in range(number))
            return Event(at, "embed", prompts, (pooling,), **after)
        case "update":
            mode = rng.choice(("wait", "abort", "keep", "recompute", "recompute"))
            form = rng.choice(("numpy", "jax", "held"))
            return Event(at, "update", (), (rng.randrange(NUM_SETS), form, mode), **after)
        case "pause":
            return Event(at, "pause", (), (rng.choice((0, 1, 3, 8)),), **after)
        case "sleep":
            level = rng.choice((1, 2))
            return Event(at, "sleep", (), (level, rng.choice((0, 1, 3))), **after)
        case name:
            return Event(at, name, **after)


def shrunk(case: Case, fails: Callable[[Case], str], *, seconds: float) -> Case:
    """Returns the smallest case found in this time that still fails, by leaving out one thing after
    the other.
    """
    end = time.monotonic() + seconds
    progress = True
    while progress:
        progress = False
        for smaller in smaller_cases(case):
            if time.monotonic() > end:
                return case
            if fails(smaller):
                case, progress = smaller, True
                break
    return case


def smaller_cases(case: Case) -> Iterator[Case]:
    """Yields cases with fewer events, engines, requests of a batch, settings or tokens."""
    if case.is_async or case.in_threads:
        yield dataclasses.replace(case, is_async=False, in_threads=False)
    half = len(case.events) // 2
    if half > 1:
        for events in (case.events[:half], case.events[half:]):
            yield with_used_asks(dataclasses.replace(case, events=events))
    for index in range(len(case.events)):
        events = (*case.events[:index], *case.events[index + 1 :])
        yield with_used_asks(dataclasses.replace(case, events=events))
    if case.num_engines > 1:
        on_first = tuple(dataclasses.replace(event, engine=0) for event in case.events)
        yield dataclasses.replace(case, events=on_first, num_engines=1)
    if (first := min((event.at for event in case.events), default=0)) > 0:
        events = tuple(dataclasses.replace(event, at=event.at - first) for event in case.events)
        yield dataclasses.replace(case, events=events)
    for index, event in enumerate(case.events):
        for smaller in _smaller_events(event):
            events = (*case.events[:index], smaller, *case.events[index + 1 :])
            yield with_used_asks(dataclasses.replace(case, events=events))
    for name in case.settings:
        if name not in NEEDED:
            settings = {other: value for other, value in case.settings.items() if other != name}
            yield dataclasses.replace(case, settings=settings)
    for index, ask in enumerate(case.asks):
        for smaller_ask in _smaller_asks(ask):
            asks = (*case.asks[:index], smaller_ask, *case.asks[index + 1 :])
            yield dataclasses.replace(case, asks=asks)


def _smaller_events(event: Event) -> Iterator[Event]:
    for index in range(len(event.asks) if event.name in ("generate", "embed") else 0):
        if len(event.asks) > 1:
            asks = (*event.asks[:index], *event.asks[index + 1 :])
            yield dataclasses.replace(event, asks=asks)
    if event.interrupted_after is not None:
        yield dataclasses.replace(event, interrupted_after=None)
    if event.aborted_after is not None:
        yield dataclasses.replace(event, aborted_after=None)
    for at in dict.fromkeys((0, event.at // 2)):
        if at < event.at:
            yield dataclasses.replace(event, at=at)


def _smaller_asks(ask: Ask) -> Iterator[Ask]:
    others = [name for name in ask.params if name not in ("seed", "max_tokens", "beam_width")]
    if len(others) > 1:
        params = {name: value for name, value in ask.params.items() if name not in others}
        yield dataclasses.replace(ask, params=params)
    for name in others:
        params = {other: value for other, value in ask.params.items() if other != name}
        yield dataclasses.replace(ask, params=params)
    if ask.adapter:
        yield dataclasses.replace(ask, adapter=0)
    for index in range(len(ask.pictures)):
        pictures = (*ask.pictures[:index], *ask.pictures[index + 1 :])
        yield dataclasses.replace(ask, pictures=pictures)
    if len(ask.prompt) > 1:
        half = len(ask.prompt) // 2
        pictures = tuple((min(place, half), *other) for place, *other in ask.pictures)
        yield dataclasses.replace(ask, prompt=ask.prompt[:half], pictures=pictures)


def with_used_asks(case: Case) -> Case:
    """Returns the case without the requests that no event names."""
    used = sorted({index for event in case.events for index in event.asks})
    place = {index: number for number, index in enumerate(used)}
    events = tuple(
        dataclasses.replace(event, asks=tuple(place[index] for index in event.asks))
        for event in case.events
    )
    asks = tuple(case.asks[index] for index in used)
    return dataclasses.replace(case, asks=asks, events=events)
