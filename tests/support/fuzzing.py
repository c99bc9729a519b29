"""Random engines and requests, compared with a plain engine that computes one request at a time.

A case is a few settings, a few requests, and a program of calls on one `LLM`: batches, streams that
are read a part at a time, left or dropped, pins, threads. What a request gives must not depend on any
of it (path independence), so the same request alone on a plain engine is the oracle. After every step
the invariants of the scheduler, the block tables and the pools are checked. A case that fails is
shrunk and printed as a program.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxpage import LLM, BeamSearchParams, LoRARequest, SamplingParams
from jaxpage.checkpoints.resolve import DEMO
from jaxpage.engine.engine import Engine
from jaxpage.errors import CapacityError, ConfigError, UnsupportedError
from jaxpage.outputs import Logprob, RequestOutput
from tests.support.engines import BLOCKS_OF_1, BLOCKS_OF_4, BLOCKS_OF_16, make_llm

Logprobs = Sequence[dict[int, Logprob] | None] | None
Call = tuple[Any, ...]  # the name of a call and its arguments; requests are named by their index

# A device's shapes depend on these settings, so that cases share them in groups.
GEOMETRIES: tuple[dict[str, Any], ...] = (
    BLOCKS_OF_16,
    BLOCKS_OF_4,
    BLOCKS_OF_1,
    {**BLOCKS_OF_16, "block_size": 2, "num_blocks": 200},
    {**BLOCKS_OF_16, "block_size": 8, "num_blocks": 60},
    {**BLOCKS_OF_16, "block_size": 32, "num_blocks": 14},
)
DRAFTING: tuple[dict[str, Any] | None, ...] = (
    *(None, None, None),
    {"method": "ngram", "num_speculative_tokens": 3},
    {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": "auto"},
    {"method": "suffix", "num_speculative_tokens": 4},
    {"method": "lookahead", "num_speculative_tokens": 3},
    {"method": "token_recycling", "num_speculative_tokens": 3},
    {"method": "draft_model", "model": "demo/draft", "num_speculative_tokens": 3},
    {"method": "draft_model", "model": "demo/draft", "num_speculative_tokens": 7, "tree": True},
    {"method": "medusa", "model": "demo/medusa", "num_speculative_tokens": 3},
    {"method": "eagle3", "model": "demo/eagle3", "num_speculative_tokens": 3},
    {"method": "mtp", "num_speculative_tokens": 3},
    {"method": "mtp", "num_speculative_tokens": "auto"},
)
ON_DEVICE = ("draft_model", "medusa", "eagle3", "mtp")  # the pool is in the shapes of their steps
SHARED = (
    "dtype",
    "kv_cache_dtype",
    "enable_lora",
    "max_lora_rank",
    "max_loras",
    "tensor_parallel_reduction",
)
MAX_LENGTH = 96  # tokens of the longest request, so that a small pool still holds one
PLAIN = {"max_model_len": MAX_LENGTH, "enable_prefix_caching": False, "enable_mixed_steps": False}


@dataclass(frozen=True)
class Ask:
    """One request: token ids, and the arguments of its parameters.

    Attributes:
        prompt: The token ids.
        params: The arguments of `SamplingParams`, or of `BeamSearchParams` if `beams`.
        beams: Whether it is a beam search.
        adapter: The number of a LoRA adapter, from 1 on; 0 for none.
    """

    prompt: tuple[int, ...]
    params: dict[str, Any] = field(hash=False)
    beams: bool = False
    adapter: int = 0

    def made(self) -> SamplingParams | BeamSearchParams:
        """Returns the parameters of the request."""
        return BeamSearchParams(**self.params) if self.beams else SamplingParams(**self.params)

    def alone(self) -> Ask:
        """Returns the request without what concerns its place among others, which changes no result."""
        kept = {
            name: value
            for name, value in self.params.items()
            if name not in ("priority", "user", "cache_salt")
        }
        return dataclasses.replace(self, params=kept)

    @property
    def key(self) -> str:
        """Returns what decides the result of the request."""
        return json.dumps(
            [self.prompt, self.alone().params, self.beams, self.adapter], sort_keys=True
        )

    @property
    def streamable(self) -> bool:
        """Returns whether `LLM.stream` takes the request."""
        return not self.beams and self.params.get("best_of") is None


@dataclass(frozen=True)
class Case:
    """Settings of an engine, requests, and calls with them."""

    settings: dict[str, Any]
    asks: tuple[Ask, ...]
    calls: tuple[Call, ...]

    def program(self) -> str:
        """Returns the case as a program that users can run."""
        lines = ["from jaxpage import LLM, BeamSearchParams, LoRARequest, SamplingParams", ""]
        lines += [f"llm = LLM('demo', **{self.settings!r})"]
        for index, ask in enumerate(self.asks):
            kind = "BeamSearchParams" if ask.beams else "SamplingParams"
            values = ", ".join(f"{name}={value!r}" for name, value in ask.params.items())
            adapter = f"  # with LoRA adapter {ask.adapter}" if ask.adapter else ""
            lines.append(f"ask{index} = {list(ask.prompt)!r}, {kind}({values}){adapter}")
        for name, *arguments in self.calls:
            named = (
                [f"ask{one}" for one in np.ravel(arguments[0])]
                if name not in ("pin", "unpin", "reset")
                else []
            )
            match name:
                case "generate":
                    prompts = ", ".join(f"{one}[0]" for one in named)
                    params = ", ".join(f"{one}[1]" for one in named)
                    lines.append(f"print(llm.generate([{prompts}], [{params}], use_tqdm=False))")
                case "threads":
                    lines.append(
                        f"# each of {', '.join(named)} by llm.generate in a thread of its own"
                    )
                case "open":
                    lines.append(f"stream{arguments[0]} = llm.stream(*{named[0]})")
                case "read":
                    lines.append(
                        f"for _, chunk in zip(range({arguments[1]}), stream{arguments[0]}): print(chunk)"
                    )
                case "drop":
                    lines.append(
                        f"del stream{arguments[0]}"
                        if arguments[1]
                        else f"stream{arguments[0]}.close()"
                    )
                case "pin":
                    lines.append(f"pin = llm.pin_prefix({list(arguments[0])!r})")
                case "unpin":
                    lines.append("pin.release()")
                case "reset":
                    lines.append("llm.reset_prefix_cache()")
        return "\n".join(lines)


def random_settings(chance: random.Random) -> dict[str, Any]:
    """Returns settings on which the shapes of steps depend."""
    settings: dict[str, Any] = {
        **chance.choice(GEOMETRIES),
        "dtype": "float32",
        "max_model_len": MAX_LENGTH,
    }
    settings["max_num_batched_tokens"] = chance.choice((16, 32, 64))
    settings["num_scheduler_steps"] = chance.choice((1, 2, 4))
    drafting = chance.choice(DRAFTING)
    if drafting is not None and settings["num_scheduler_steps"] == 1:
        settings["speculative_config"] = drafting
    settings["kv_cache_dtype"] = chance.choice(("auto", "auto", "auto", "int8", "fp8"))
    if drafting is None and chance.random() < 0.2:
        settings |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": 4}
    if drafting is None and chance.random() < 0.1:
        settings |= {"tensor_parallel_size": 2, "tensor_parallel_reduction": "invariant"}
    return settings


def random_case(chance: random.Random, shapes: dict[str, Any]) -> Case:
    """Returns a case for an engine of these shapes."""
    settings = dict(shapes)
    longest = -(-MAX_LENGTH // settings["block_size"])
    method = settings.get("speculative_config", {}).get("method")
    if settings["num_blocks"] > 2 * longest and method not in ON_DEVICE:
        # from room for a single request on
        settings["num_blocks"] = 1 + chance.randint(longest, 3 * longest)
    settings["preemption_mode"] = chance.choice(("auto", "swap", "recompute"))
    settings["scheduling_policy"] = chance.choice(("fcfs", "fcfs", "priority", "fair"))
    if settings["scheduling_policy"] != "priority":
        settings["new_requests_wait_until"] = chance.choice(("readmitted", "completed"))
    settings["enable_prefix_caching"] = chance.random() < 0.7
    settings["enable_mixed_steps"] = chance.choice((None, True, False))
    if chance.random() < 0.15 and settings["enable_prefix_caching"]:
        settings["prefix_cache_directory"] = "a new directory"
    asks = tuple(random_asks(chance, settings))
    return Case(settings, asks, tuple(random_calls(chance, asks, settings)))


def random_asks(chance: random.Random, settings: dict[str, Any]) -> Iterator[Ask]:
    """Yields a few requests, many of which begin alike."""
    size = settings["block_size"]
    stems = [[chance.randrange(2, 2048) for _ in range(64)] for _ in range(2)]
    for _ in range(chance.randint(2, 7)):
        # The lengths at which a prefix hit leaves one token, or a block is just full, come up
        # often.
        length = chance.choice((1, 2, size, size + 1, 2 * size + 1, 33, chance.randint(1, 60)))
        prompt = chance.choice(stems)[: min(length, 60)]
        if chance.random() < 0.3:
            prompt = [*prompt[:-1], chance.randrange(2, 2048)]
        adapter = chance.choice((0, 1, 2)) if settings.get("enable_lora") else 0
        if chance.random() < 0.12 and not adapter:
            yield Ask(tuple(prompt), random_beams(chance), beams=True)
        else:
            params = random_sampling(chance)
            if settings["scheduling_policy"] != "priority":
                params.pop("priority", None)
            yield Ask(tuple(prompt), params, adapter=adapter)


def random_beams(chance: random.Random) -> dict[str, Any]:
    """Returns arguments of `BeamSearchParams`."""
    return {
        "beam_width": chance.randint(2, 4),
        "max_tokens": chance.randint(1, 16),
        "length_penalty": chance.choice((0.0, 1.0, 1.5)),
        "early_stopping": chance.choice((False, True)),
    }


def random_sampling(chance: random.Random) -> dict[str, Any]:
    """Returns arguments of `SamplingParams`, each of which is given now and then."""
    params: dict[str, Any] = {
        "max_tokens": chance.randint(1, 24),
        "temperature": chance.choice((0.0, 0.8, 1.5)),
    }
    params["seed"] = chance.randrange(2**40)
    choices: dict[str, Callable[[], Any]] = {
        "n": lambda: chance.randint(2, 3),
        "top_p": lambda: chance.choice((0.2, 0.9)),
        "top_k": lambda: chance.choice((1, 5, 200)),
        "min_p": lambda: 0.05,
        "presence_penalty": lambda: 0.7,
        "frequency_penalty": lambda: -0.5,
        "repetition_penalty": lambda: 1.3,
        "logit_bias": lambda: {chance.randrange(2048): 8.0},
        "allowed_token_ids": lambda: chance.sample(range(2, 2048), 3),
        "bad_words": lambda: [" the"],
        "stop": lambda: chance.choice((["e"], [" a", "."])),
        "stop_token_ids": lambda: [chance.randrange(2, 300)],
        "min_tokens": lambda: chance.randint(1, params["max_tokens"]),
        "ignore_eos": lambda: True,
        "logprobs": lambda: chance.randint(0, 3),
        "prompt_logprobs": lambda: 1,
        "structured_outputs": lambda: {"regex": "[a-z ]{2,30}"},
        "include_stop_str_in_output": lambda: True,
        "priority": lambda: chance.randint(-1, 1),
        "user": lambda: chance.choice("ab"),
        "cache_salt": lambda: chance.choice("xy"),
    }
    for name, value in choices.items():
        if chance.random() < 0.12:
            params[name] = value()
    if chance.random() < 0.05:
        params |= {"n": 1, "best_of": 3}
    if "allowed_token_ids" in params or "structured_outputs" in params:
        params.pop("bad_words", None)
    if "structured_outputs" in params:
        params.pop("allowed_token_ids", None)
        params.pop("min_tokens", None)
    return params


def random_calls(
    chance: random.Random, asks: Sequence[Ask], settings: dict[str, Any]
) -> Iterator[Call]:
    """Yields calls in which every request takes part, some of them twice."""
    waiting = [*range(len(asks)), *(index for index in range(len(asks)) if chance.random() < 0.5)]
    chance.shuffle(waiting)
    opened: list[int] = []
    is_pinned = False
    while waiting or opened:
        kind = chance.random()
        if waiting and kind < 0.35:
            batch = [waiting.pop() for _ in range(min(len(waiting), chance.randint(1, 5)))]
            yield (chance.choice(("generate", "generate", "generate", "threads")), tuple(batch))
        elif waiting and kind < 0.6 and asks[waiting[-1]].streamable and waiting[-1] not in opened:
            opened.append(waiting.pop())
            yield ("open", opened[-1])
        elif opened and kind < 0.8:
            yield ("read", chance.choice(opened), chance.randint(1, 5))
        elif opened and kind < 0.9:
            one = opened.pop(chance.randrange(len(opened)))
            yield chance.choice((("drop", one, False), ("drop", one, True), ("read", one, 10**6)))
        elif kind < 0.93:
            yield (
                ("unpin",)
                if is_pinned
                else ("pin", tuple(chance.choice(asks).prompt[: settings["block_size"] + 3]))
            )
            is_pinned = not is_pinned
        elif kind < 0.95:
            yield ("reset",)


@dataclass
class _Run:
    """What a case has opened so far: streams by the index of their request, their chunks, and pins."""

    llm: LLM
    streams: dict[int, Any] = field(default_factory=dict)
    chunks: dict[int, list[RequestOutput]] = field(default_factory=dict)
    pins: list[Any] = field(default_factory=list)


class Fuzzer:
    """Runs cases, each compared with a plain engine; keeps what plain engines gave."""

    def __init__(self, directory: Path, *, tolerance: float) -> None:
        """Makes LoRA adapters for the demo model.

        Args:
            directory: An empty directory for files of the cases.
            tolerance: How far a log probability may be from the plain engine's.
        """
        self.directory = directory
        self.tolerance = tolerance
        self._plain: dict[str, LLM] = {}
        self._expected: dict[tuple[str, str], RequestOutput] = {}
        self._num_directories = 0
        self.num_requests = 0
        # by the reason why settings or a request cannot be honoured
        self.refused: Counter[str] = Counter()
        self.adapters = [
            LoRARequest(f"adapter{n}", n, str(write_adapter(directory, n))) for n in (1, 2)
        ]

    def failure(self, case: Case) -> str:
        """Runs a case and returns what is wrong; "" if nothing is."""
        settings = dict(case.settings)
        if "prefix_cache_directory" in settings:
            self._num_directories += 1
            settings["prefix_cache_directory"] = str(
                self.directory / f"prefixes{self._num_directories}"
            )
        try:
            # Without threads a case does the same each time, so that it can be shrunk.
            start = any(name == "threads" for name, *_ in case.calls)
            with checked_steps(), make_llm("demo", start=start, **settings) as llm:
                return self._compared(case, llm)
        except (ConfigError, UnsupportedError, CapacityError) as refusal:
            self.refused[str(refusal)] += 1
            return ""
        except Exception as error:
            lines = str(error).splitlines() or [""]
            return f"{type(error).__name__}: {lines[0][:300]}"

    def _compared(self, case: Case, llm: LLM) -> str:
        run = _Run(llm)
        for name, *arguments in case.calls:
            try:
                found = self._called(case, run, name, arguments)
            except (UnsupportedError, CapacityError) as refusal:
                self.refused[str(refusal)] += 1
                continue
            for index, output in found:
                if problem := self._differs(case, index, output):
                    return problem
            for index, chunks in run.chunks.items():
                if problem := self._part_differs(case, index, chunks):
                    return problem
        return ""

    def _called(
        self, case: Case, run: _Run, name: str, arguments: list[Any]
    ) -> list[tuple[int, RequestOutput]]:
        """Does one call and returns the outputs that it gives at once."""
        match name:
            case "generate":
                return list(
                    zip(arguments[0], self._generated(case, run.llm, arguments[0]), strict=True)
                )
            case "threads":
                return self._in_threads(case, run.llm, arguments[0])
            case "open":
                ask = case.asks[arguments[0]]
                stream = run.llm.stream(
                    list(ask.prompt), ask.made(), lora_request=self._adapter(ask)
                )
                run.streams[arguments[0]] = stream
                run.chunks[arguments[0]] = []
            case "read" if arguments[0] in run.streams:
                parts = itertools.islice(run.streams[arguments[0]], arguments[1])
                run.chunks[arguments[0]] += parts
            case "drop" if arguments[0] in run.streams:
                stream = run.streams.pop(arguments[0])
                del run.chunks[arguments[0]]
                if not arguments[1]:
                    stream.close()
            case "pin":
                run.pins.append(run.llm.pin_prefix(list(arguments[0])))
            case "unpin" if run.pins:
                run.pins.pop().release()
            case "reset":
                run.llm.reset_prefix_cache()
        return []

    def _adapter(self, ask: Ask) -> LoRARequest | None:
        return self.adapters[ask.adapter - 1] if ask.adapter else None

    def _generated(self, case: Case, llm: LLM, indices: Sequence[int]) -> list[RequestOutput]:
        asks = [case.asks[index] for index in indices]
        adapters = [self._adapter(ask) for ask in asks]
        lora = {"lora_request": adapters} if any(adapters) else {}
        self.num_requests += len(asks)
        return llm.generate(
            [list(ask.prompt) for ask in asks], [ask.made() for ask in asks], use_tqdm=False, **lora
        )

    def _in_threads(
        self, case: Case, llm: LLM, indices: Sequence[int]
    ) -> list[tuple[int, RequestOutput]]:
        found: list[tuple[int, RequestOutput]] = []
        errors: list[Exception] = []

        def one(index: int) -> None:
            try:
                found.append((index, self._generated(case, llm, [index])[0]))
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=one, args=(index,)) for index in indices]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return found

    def expected(self, case: Case, index: int) -> RequestOutput:
        """Returns what a plain engine gives for a request alone."""
        shared = {name: case.settings[name] for name in SHARED if name in case.settings}
        name, ask = json.dumps(shared, sort_keys=True), case.asks[index]
        if (name, ask.key) not in self._expected:
            if name not in self._plain:
                self._plain[name] = make_llm("demo", **PLAIN, **shared)
            one = Case({}, (ask.alone(),), ())
            self._expected[name, ask.key] = self._generated(one, self._plain[name], [0])[0]
        return self._expected[name, ask.key]

    def _differs(self, case: Case, index: int, output: RequestOutput) -> str:
        expected = self.expected(case, index)
        for got, wanted in zip(output.outputs, expected.outputs, strict=True):
            for name in ("token_ids", "text", "finish_reason", "stop_reason"):
                one, other = getattr(got, name), getattr(wanted, name)
                if one != other:
                    return f"ask{index}: {name} is {one!r}, and alone on a plain engine {other!r}"
            if problem := self._logprobs_differ(got.logprobs, wanted.logprobs):
                return f"ask{index}: {problem}"
        if problem := self._logprobs_differ(output.prompt_logprobs, expected.prompt_logprobs):
            return f"ask{index}, its prompt: {problem}"
        return ""

    def _logprobs_differ(self, got: Logprobs, wanted: Logprobs) -> str:
        """Compares the log probabilities of tokens that both have: candidates that are as likely may change places."""
        for place, (ours, theirs) in enumerate(zip(got or (), wanted or (), strict=True)):
            for token, one in (ours or {}).items():
                other = (theirs or {}).get(token, one)
                if abs(one.logprob - other.logprob) > self.tolerance:
                    return f"log probability {place} of token {token} is {one.logprob!r}, and alone {other.logprob!r}"
        return ""

    def _part_differs(self, case: Case, index: int, chunks: Sequence[RequestOutput]) -> str:
        """Compares the beginning of a stream that may be left before its end."""
        for wanted in self.expected(case, index).outputs:
            parts = [one for chunk in chunks for one in chunk.outputs if one.index == wanted.index]
            tokens = [token for part in parts for token in part.token_ids]
            text = "".join(part.text for part in parts)
            if tokens != list(wanted.token_ids)[: len(tokens)] or not wanted.text.startswith(text):
                return f"ask{index}: its stream has {tokens!r} {text!r}, and alone it gives {wanted.token_ids!r} {wanted.text!r}"
            reasons = [part.finish_reason for part in parts if part.finish_reason]
            if reasons and (reasons[-1], text) != (wanted.finish_reason, wanted.text):
                return f"ask{index}: its stream ends with {reasons[-1]!r}, and alone with {wanted.finish_reason!r}"
        return ""


class checked_steps:
    """A context in which every step of every engine is followed by a check of the invariants."""

    def __enter__(self) -> None:
        """Wraps `Engine.step`."""
        self._patch = pytest.MonkeyPatch()
        step = Engine.step

        def checked(engine: Engine) -> Any:
            groups = step(engine)
            engine.scheduler.check()
            return groups

        self._patch.setattr(Engine, "step", checked)

    def __exit__(self, *_: object) -> None:
        """Puts `Engine.step` back."""
        self._patch.undo()


def write_adapter(directory: Path, number: int) -> Path:
    """Writes a random LoRA adapter for the demo model in PEFT's form and returns its directory."""
    config = json.loads((DEMO / "config.json").read_text())
    width = config["hidden_size"]
    rng = np.random.default_rng(number)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.self_attn.o_proj"
        tensors[f"{name}.lora_A.weight"] = rng.standard_normal((4, width), np.float32) * 0.1
        tensors[f"{name}.lora_B.weight"] = rng.standard_normal((width, 4), np.float32) * 0.1
    path = directory / f"adapter{number}"
    path.mkdir()
    save_file(tensors, path / "adapter_model.safetensors")
    adapter = {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["o_proj"],
        "task_type": "CAUSAL_LM",
    }
    (path / "adapter_config.json").write_text(json.dumps(adapter))
    return path


def shrunk(case: Case, fails: Callable[[Case], str], *, seconds: float) -> Case:
    """Returns the smallest case found in this time that still fails, by leaving out one thing after the other."""
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
    """Yields cases with less: calls, requests of a batch, settings, parameters, tokens."""
    for place in range(len(case.calls)):
        calls = (*case.calls[:place], *case.calls[place + 1 :])
        if is_whole(calls):
            yield with_used_asks(dataclasses.replace(case, calls=calls))
    for place, call in enumerate(case.calls):
        if call[0] in ("generate", "threads") and len(call[1]) > 1:
            for index in range(len(call[1])):
                batch = (call[0], (*call[1][:index], *call[1][index + 1 :]))
                calls = (*case.calls[:place], batch, *case.calls[place + 1 :])
                yield with_used_asks(dataclasses.replace(case, calls=calls))
    for name in case.settings:
        if name not in (
            "dtype",
            "block_size",
            "num_blocks",
            "max_num_seqs",
            "max_model_len",
            *SHARED,
        ):
            settings = {other: value for other, value in case.settings.items() if other != name}
            yield dataclasses.replace(case, settings=settings)
    for place, ask in enumerate(case.asks):
        smaller = [
            dataclasses.replace(ask, params=without(ask.params, name)) for name in ask.params
        ]
        if len(ask.prompt) > 1:
            smaller.append(dataclasses.replace(ask, prompt=ask.prompt[: len(ask.prompt) // 2]))
        for one in smaller:
            yield dataclasses.replace(case, asks=(*case.asks[:place], one, *case.asks[place + 1 :]))


def without(params: dict[str, Any], name: str) -> dict[str, Any]:
    """Returns parameters with one left out; a needed one stays."""
    needed = ("seed", "max_tokens", "beam_width")
    return {other: value for other, value in params.items() if other != name or name in needed}


def is_whole(calls: Sequence[Call]) -> bool:
    """Returns whether every stream that is read was opened, and every pin released that is left."""
    opened: set[int] = set()
    pins = 0
    for name, *arguments in calls:
        if name == "open":
            opened.add(arguments[0])
        if name in ("read", "drop") and arguments[0] not in opened:
            return False
        pins += (name == "pin") - (name == "unpin")
        if pins < 0:
            return False
    return True


def with_used_asks(case: Case) -> Case:
    """Returns the case without the requests that no call names."""
    used = sorted(
        {
            one
            for name, *rest in case.calls
            if name not in ("pin", "unpin", "reset")
            for one in np.ravel(rest[0])
        }
    )
    place = {int(index): number for number, index in enumerate(used)}
    calls = []
    for name, *arguments in case.calls:
        if name in ("generate", "threads"):
            arguments = [tuple(place[one] for one in arguments[0])]
        elif name in ("open", "read", "drop"):
            arguments = [place[arguments[0]], *arguments[1:]]
        calls.append((name, *arguments))
    return Case(case.settings, tuple(case.asks[index] for index in used), tuple(calls))


def fuzz(minutes: float, seed: int, *, tolerance: float, tell: Callable[[str], None]) -> int:
    """Runs random cases for some minutes and returns how many failed, which is at most one.

    Args:
        minutes: The time for new cases; shrinking takes as long again at most.
        seed: The seed of the cases.
        tolerance: See `Fuzzer`.
        tell: Takes lines for the person who runs it.
    """
    end = time.monotonic() + 60 * minutes
    chance = random.Random(seed)
    num_cases = 0
    with tempfile.TemporaryDirectory(prefix="jaxpage-fuzz-") as directory:
        fuzzer = Fuzzer(Path(directory), tolerance=tolerance)
        while time.monotonic() < end:
            shapes = random_settings(chance)
            for _ in range(6):
                case = random_case(chance, shapes)
                num_cases += 1
                if problem := fuzzer.failure(case):
                    tell(f"case {num_cases}: {problem}\nshrinking it")
                    # each try would log the same failed step again
                    logging.disable(logging.CRITICAL)
                    small = shrunk(case, fuzzer.failure, seconds=60 * minutes)
                    tell(f"\n{fuzzer.failure(small) or problem}\n\n{small.program()}")
                    logging.disable(logging.NOTSET)
                    return 1
                if time.monotonic() > end:
                    break
        tell(
            f"{num_cases} engines, {fuzzer.num_requests} requests, no difference; "
            f"{fuzzer.refused.total()} engines refused what was asked (seed {seed})"
        )
        for reason, count in fuzzer.refused.most_common():
            tell(f"  {count} x {reason.splitlines()[0][:200]}")
    return 0
