"""Random engines, requests and lives of engines, compared with a plain engine that computes one
request at a time.

A case is a few settings, a few requests, and calls that begin at numbered turns of one or two
engines (`fuzz_cases`): requests, streams that are left, pins, updates of the weights, sleep,
drains, aborts and interrupts. What a request gives must not depend on any of it (path
independence), so the same request alone on a plain engine with the same weights is the oracle.
After every step the invariants of the scheduler, the block tables and the pools are checked, and at
the end nothing may be left. A case that fails is shrunk and printed as a program.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import logging
import random
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxpage import LLM, AsyncLLM, LoRARequest
from jaxpage.checkpoints.finding.resolve import DEMO
from jaxpage.errors import CapacityError, ConfigError, UnsupportedError
from jaxpage.outputs import CompletionOutput, Logprob, RequestOutput
from jaxpage.scheduling import running_set
from tests.support.engines import make_kind, make_llm
from tests.support.fuzz_cases import SHARED, Ask, Case, random_case, random_shapes, shrunk
from tests.support.fuzz_models import MODELS, Weights, other_weights
from tests.support.performance import (
    MAX_SCORED,
    MAX_SECONDS,
    Actor,
    Performance,
    PlayedEngine,
    WrongBehaviour,
)
from tests.support.stage import RealTime, Stage

Logprobs = Sequence[dict[int, Logprob] | None] | None

PLAIN = {"enable_prefix_caching": False, "enable_mixed_steps": False}
CASES_OF_SHAPES = 6  # cases that share what is compiled, one after the other
# Of so many groups of cases one has new shapes; the others have shapes that are compiled. Compiling
# takes as long as 8 cases.
GROUPS_OF_SHAPES = 3
NUM_SHAPES = 8  # the newest ones, which are drawn again


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
        self._plain: dict[str, PlainEngine] = {}
        self._steps_of_embedders: dict[str, dict[int, Any]] = {}
        self._num_directories = 0
        self.num_requests = 0
        self.events: Counter[str] = Counter()
        # by the reason why settings or a request cannot be honoured
        self.refused: Counter[str] = Counter()
        self.adapters = [
            LoRARequest(f"adapter{n}", n, str(write_adapter(directory, n))) for n in (1, 2)
        ]

    def close(self) -> None:
        """Frees the plain engines."""
        for plain in self._plain.values():
            plain.llm.shutdown()

    def failure(self, case: Case) -> str:
        """Runs a case and returns what is wrong; "" if nothing is."""
        settings = dict(case.settings)
        if "prefix_cache_directory" in settings:
            self._num_directories += 1
            settings["prefix_cache_directory"] = str(
                self.directory / f"prefixes{self._num_directories}"
            )
        self.events.update(event.name for event in case.events)
        stage: Stage | RealTime = RealTime() if case.in_threads else Stage()
        opened = contextlib.nullcontext() if isinstance(stage, RealTime) else stage.open()
        try:
            with opened, contextlib.ExitStack() as stack:
                patch = stack.enter_context(pytest.MonkeyPatch.context())
                # Texts are short, so "auto" takes several steps sooner.
                patch.setattr(running_set, "STEPS_FOR_ONE_MORE", 2)
                engines = [
                    stack.enter_context(self._engine(case, settings, stage))
                    for _ in range(case.num_engines)
                ]
                performance = Performance(case, stage, engines, self.adapters)
                if isinstance(stage, Stage):
                    stage.drivers = [engine.llm._driver for engine in engines]
                    performance.play()
                else:
                    performance.play_in_threads()
                return self._judged(performance) or _left_over(performance)
        except (ConfigError, UnsupportedError, CapacityError) as refusal:
            self.refused[str(refusal)] += 1
            return ""
        except WrongBehaviour as wrong:
            return str(wrong)
        except Exception as error:
            lines = str(error).splitlines() or [""]
            return f"{type(error).__name__}: {lines[0][:300]}"

    @contextlib.contextmanager
    def _engine(
        self, case: Case, settings: dict[str, Any], stage: Stage | RealTime
    ) -> Iterator[PlayedEngine]:
        path = MODELS[case.model].path(self.directory, case.model)
        if case.is_async:
            llm = make_kind(AsyncLLM, path, **settings)
        else:
            llm = make_llm(path, start=case.in_threads, **settings)
        try:
            self._complete(case, llm)
            yield PlayedEngine(llm, stage, own_weights(case, llm))
        finally:
            llm._driver.stop()

    def _complete(self, case: Case, llm: Any) -> None:
        """Gives an engine what embeds, compiled for others of its kind, and what takes pictures."""
        if sees := MODELS[case.model].sees:
            from tests.support import seeing_models  # which needs torch

            llm._pictures = seeing_models.processor_of(sees)
        names = (*SHARED, "block_size", "tensor_parallel_size")
        key = json.dumps([case.model, {name: case.settings.get(name) for name in names}])
        llm._embedder._steps = self._steps_of_embedders.setdefault(key, {})

    def _judged(self, performance: Performance) -> str:
        """Returns what is wrong with what the calls gave; "" if nothing is."""
        for actor in performance.actors:
            assert actor.task is not None
            where = f"{actor.event.name} of turn {actor.started}"
            error = None if actor.task.cancelled() else actor.task.exception()
            if error is not None and performance.is_refusal(error):
                self.refused[str(error)] += 1
                continue
            if error is not None and not performance.may_raise(actor, error):
                lines = str(error).splitlines() or [""]
                return f"{where}: {type(error).__name__}: {lines[0][:300]}"
            if problem := self._call_differs(performance, actor):
                return f"{where}: {problem}"
        return ""

    def _call_differs(self, performance: Performance, actor: Actor) -> str:
        case, event = performance.case, actor.event
        plain = self.plain(case)
        asks = [case.asks[index] for index in event.asks]
        for index, output in actor.outputs:
            self.num_requests += 1
            if problem := self._differs(performance, actor, case.asks[index], output):
                return f"asks[{index}]: {problem}"
        if event.name == "stream" and actor.chunks:
            self.num_requests += 1
            return self._stream_differs(performance, actor, asks[0])
        is_update = event.name == "update" and actor.result is not None
        if is_update and actor.result not in actor.engine.weights:
            return f"version {actor.result} was never in use"
        if event.name in ("score", "embed") and actor.result is not None:
            versions = range(actor.first_version, actor.last_version + 1)
            sets = {actor.engine.weights[version] for version in versions}
            alone = [plain.numbers(event.name, asks, event.details, each) for each in sets]
            if not any(_are_close(actor.result, each, self.tolerance) for each in alone):
                return f"{actor.result!r}, and alone {alone!r}"
        return ""

    def plain(self, case: Case) -> PlainEngine:
        """Returns the engine that a case is compared with."""
        shared = {name: case.settings[name] for name in SHARED if name in case.settings}
        name = json.dumps([case.model, shared], sort_keys=True)
        if name not in self._plain:
            path = MODELS[case.model].path(self.directory, case.model)
            llm = make_llm(path, **PLAIN, **shared)
            self._complete(Case({**shared, "block_size": 16}, (), (), case.model), llm)
            self._plain[name] = PlainEngine(llm, self.adapters)
        return self._plain[name]

    def _differs(
        self, performance: Performance, actor: Actor, ask: Ask, output: RequestOutput
    ) -> str:
        """Compares a whole output, or what an aborted request has."""
        version = output.weights_version
        if not actor.first_version <= version <= actor.last_version:
            return (
                f"weights_version is {version}, and it ran with {actor.first_version} to "
                f"{actor.last_version}"
            )
        if _updates_met(actor, version):
            return self._continued_differs(performance, actor, ask, output)
        if any({*each.weights_versions} - {version} for each in output.outputs):
            return f"tokens of other versions than {version}"
        expected = self.plain(performance.case).output(ask, actor.engine.weights[version])
        aborted = [each for each in output.outputs if each.finish_reason == "abort"]
        if aborted and not performance.is_aborted(actor):
            return "it was aborted, and nobody asked for that"
        if actor.must_abort and not aborted:
            return f"it was aborted by its id, and ends with {output.outputs[0].finish_reason!r}"
        if aborted and not ask.is_streamable:
            return ""  # the order of beams and of the best is known at the end
        # Before the prompt is computed, a request of several samples has one sequence.
        if len(output.outputs) != len(expected.outputs) and not aborted:
            return f"{len(output.outputs)} outputs, and alone {len(expected.outputs)}"
        for actual, alone in zip(output.outputs, expected.outputs, strict=False):
            if actual.finish_reason == "abort":
                problem = self._beginning_differs(actual, alone)
            else:
                problem = self._whole_differs(actual, alone)
            if problem:
                return problem
        if problem := self._logprobs_differ(output.prompt_logprobs, expected.prompt_logprobs):
            return "" if aborted and not output.prompt_logprobs else f"its prompt: {problem}"
        return ""

    def _continued_differs(
        self, performance: Performance, actor: Actor, ask: Ask, output: RequestOutput
    ) -> str:
        """Compares what a request gave whose weights were replaced while it ran.

        Its tokens of the first weights are those that it gives alone. Those of later ones are those
        of a request that begins with the tokens before, if all was computed anew each time.
        """
        plain, sets = self.plain(performance.case), actor.engine.weights
        for sample in output.outputs:
            versions = sample.weights_versions
            if versions != sorted(versions) or len(versions) != len(sample.token_ids):
                return f"weights_versions are {versions!r} for {len(sample.token_ids)} tokens"
            for version in sorted({*versions}) if ask.is_streamable else ():
                start, stop = versions.index(version), len(versions) - versions[::-1].index(version)
                if "keep" in _updates_met(actor, version):
                    break
                if start and not (sample.index == 0 and ask.depends_on_tokens_alone):
                    break
                part = dataclasses.replace(
                    sample,
                    token_ids=sample.token_ids[start:stop],
                    logprobs=sample.logprobs and sample.logprobs[start:stop],
                )
                whole = ask.after(sample.token_ids[:start], stop - start) if start else ask
                alone = plain.output(whole, sets[version]).outputs[sample.index]
                if problem := self._beginning_differs(part, alone):
                    return f"tokens {start} to {stop} of version {version}: {problem}"
        return ""

    def _whole_differs(self, actual: CompletionOutput, alone: CompletionOutput) -> str:
        for name in ("token_ids", "text", "finish_reason", "stop_reason"):
            ours, theirs = getattr(actual, name), getattr(alone, name)
            if ours != theirs:
                return f"{name} is {ours!r}, and alone on a plain engine {theirs!r}"
        for name in ("cumulative_logprob", "score"):
            ours, theirs = getattr(actual, name), getattr(alone, name)
            tolerance = self.tolerance * max(1, len(actual.token_ids))
            if (ours is None) != (theirs is None) or abs((ours or 0) - (theirs or 0)) > tolerance:
                return f"{name} is {ours!r}, and alone {theirs!r}"
        return self._logprobs_differ(actual.logprobs, alone.logprobs)

    def _beginning_differs(self, actual: CompletionOutput, alone: CompletionOutput) -> str:
        tokens = list(actual.token_ids)
        if tokens != list(alone.token_ids)[: len(tokens)]:
            return (
                f"aborted with {tokens!r}, and alone on a plain engine it gives {alone.token_ids!r}"
            )
        return self._logprobs_differ(actual.logprobs, (alone.logprobs or [])[: len(tokens)])

    def _logprobs_differ(self, actual: Logprobs, alone: Logprobs) -> str:
        """Compares the log probabilities of tokens that both have: candidates that are as likely
        may change places.
        """
        if len(actual or ()) != len(alone or ()):
            return f"{len(actual or ())} log probabilities, and alone {len(alone or ())}"
        for index, (ours, theirs) in enumerate(zip(actual or (), alone or (), strict=True)):
            for token, logprob in (ours or {}).items():
                other = (theirs or {}).get(token, logprob)
                if abs(logprob.logprob - other.logprob) > self.tolerance:
                    return f"log probability {index} of token {token} is {logprob.logprob!r}, and alone {other.logprob!r}"
                if not self._ranks_agree(logprob.rank, other.rank):
                    return (
                        f"rank {index} of token {token} is {logprob.rank}, and alone {other.rank}"
                    )
        return ""

    def _ranks_agree(self, ours: int, theirs: int) -> bool:
        """Returns whether ranks are equal, or near each other where the last bits may differ.

        Tokens far from the likeliest lie so near each other that these bits change their places.
        """
        maximum = 1 + theirs // 50 if self.tolerance else 0
        return abs(ours - theirs) <= maximum

    def _stream_differs(self, performance: Performance, actor: Actor, ask: Ask) -> str:
        """Compares a stream, or the beginning of one that is left before its end."""
        chunks = actor.chunks
        if chunks[-1].finished:
            return self._differs(performance, actor, ask, _joined(chunks))
        version = chunks[-1].weights_version
        if _updates_met(actor, version):
            return self._continued_differs(performance, actor, ask, _joined(chunks))
        expected = self.plain(performance.case).output(ask, actor.engine.weights[version])
        for actual, alone in zip(_joined(chunks).outputs, expected.outputs, strict=False):
            if not alone.text.startswith(actual.text):
                return f"its stream has {actual.text!r}, and alone it gives {alone.text!r}"
            if problem := self._beginning_differs(actual, alone):
                return f"its stream: {problem}"
        return ""


class PlainEngine:
    """Computes one request at a time, with any set of weights; keeps what it gave.

    Attributes:
        llm: The engine.
    """

    def __init__(self, llm: LLM, adapters: Sequence[LoRARequest]) -> None:
        self.llm = llm
        self._adapters = adapters
        self._own: Weights | None = None
        self._set = 0
        self._outputs: dict[tuple[str, int], RequestOutput] = {}

    def _use(self, number: int) -> None:
        if number == self._set:
            return
        if self._own is None:
            self._own = {name: np.array(each) for name, each in self.llm.parameters().items()}
        self.llm.update_parameters(other_weights(self._own, number))
        self._set = number

    def output(self, ask: Ask, number: int) -> RequestOutput:
        """Returns what a request gives alone, with a set of weights."""
        key = ask.key, number
        if key not in self._outputs:
            self._use(number)
            alone = ask.alone()
            lora = {"lora_request": self._adapters[ask.adapter - 1]} if ask.adapter else {}
            (self._outputs[key],) = self.llm.generate(
                alone.given(self.llm.hf_config), alone.made(), use_tqdm=False, **lora
            )
        return self._outputs[key]

    def numbers(
        self, name: str, asks: Sequence[Ask], details: tuple[Any, ...], number: int
    ) -> np.ndarray:
        """Returns the scores, or the vectors, of prompts with a set of weights."""
        self._use(number)
        prompts = [list(ask.prompt) for ask in asks]
        if name == "score":
            prompt, continuation = prompts
            return np.array(self.llm.score(prompt, continuation[:MAX_SCORED]))
        return np.array(self.llm.embed(prompts, pooling=details[0], use_tqdm=False))


def own_weights(case: Case, llm: Any) -> Weights:
    """Returns the model's own weights, if a case changes them and they can be."""
    if not any(event.name == "update" for event in case.events):
        return {}
    try:
        named = llm._by_checkpoint_name(llm._engine.runner.parameters)
    except UnsupportedError:
        return {}
    return {name: np.array(value) for name, value in named.items()}


def _left_over(performance: Performance) -> str:
    """Ends a case and returns what is left of it; "" if nothing is."""
    for engine in performance.engines:
        llm = engine.llm
        if llm.is_sleeping:
            performance.wake(engine)
        for pin in list(engine.pins):
            performance.finish(performance.release(engine, pin), "release of a pin")
        if performance.finish(engine.call("drain", MAX_SECONDS), "drain") is not True:
            return "drain returned False at the end, when nobody waits for a request"
        engine.watch()
        stats = llm._engine.stats()
        llm._engine.scheduler.check()
        turns = llm._driver.turns
        left = {
            "live requests": len(turns.live),
            "pinned blocks": stats["num_blocks_pinned"],
            "running requests": stats["num_requests_running"],
            "waiting requests": stats["num_requests_waiting"],
            "blocks that are not free": stats["num_blocks_total"] - stats["num_blocks_free"],
            "strategies": len(llm._engine._strategies),
            "requests in the metrics": len(llm._engine.metrics.requests),
        }
        if any(left.values()):
            return (
                f"at the end there are {', '.join(f'{n} {what}' for what, n in left.items() if n)}"
            )
    return ""


def _updates_met(actor: Actor, version: int) -> list[str]:
    """Returns the modes of the updates up to a version that a request went on after."""
    modes = [
        actor.engine.modes.get(each, "") for each in range(actor.first_version + 1, version + 1)
    ]
    return [mode for mode in modes if mode in ("keep", "recompute")]


def _joined(chunks: Sequence[RequestOutput]) -> RequestOutput:
    """Returns the output that chunks are the parts of."""
    outputs = []
    for last in chunks[-1].outputs:
        parts = [each for chunk in chunks for each in chunk.outputs if each.index == last.index]
        logprobs = [each for part in parts for each in part.logprobs or ()]
        reasons = [part for part in parts if part.finish_reason]
        outputs.append(
            CompletionOutput(
                index=last.index,
                text="".join(part.text for part in parts),
                token_ids=[token for part in parts for token in part.token_ids],
                cumulative_logprob=parts[-1].cumulative_logprob,
                logprobs=logprobs,
                finish_reason=reasons[-1].finish_reason if reasons else None,
                stop_reason=reasons[-1].stop_reason if reasons else None,
                weights_versions=[version for part in parts for version in part.weights_versions],
            )
        )
    prompts = [chunk.prompt_logprobs for chunk in chunks if chunk.prompt_logprobs]
    return RequestOutput(
        request_id=chunks[-1].request_id,
        prompt=None,
        prompt_token_ids=[],
        outputs=outputs,
        finished=chunks[-1].finished,
        prompt_logprobs=prompts[0] if prompts else None,
        weights_version=chunks[-1].weights_version,
    )


def _are_close(ours: Any, theirs: np.ndarray, tolerance: float) -> bool:
    return np.shape(ours) == theirs.shape and bool(np.all(np.abs(ours - theirs) <= tolerance))


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


class CompileTime:
    """Counts the seconds in which XLA compiles."""

    def __init__(self) -> None:
        self.seconds = 0.0
        jax.monitoring.register_event_duration_secs_listener(self._happened)

    def _happened(self, event: str, duration_secs: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            self.seconds += duration_secs


def fuzz(
    minutes: float,
    seed: int,
    *,
    tolerance: float,
    report: Callable[[str], None],
    models: Sequence[str] = (),
) -> int:
    """Runs random cases for some minutes and returns how many failed, which is at most one.

    Args:
        minutes: The time for new cases; shrinking takes as long again at most.
        seed: The seed of the cases.
        tolerance: See `Fuzzer`.
        report: Takes lines for the person who runs it.
        models: The names of the models; empty for all.
    """
    start = time.monotonic()
    end = start + 60 * minutes
    rng = random.Random(seed)
    compiling = CompileTime()
    compiled: list[tuple[str, dict[str, Any]]] = []
    num_cases = 0
    with tempfile.TemporaryDirectory(prefix="jaxpage-fuzz-") as directory:
        fuzzer = Fuzzer(Path(directory), tolerance=tolerance)
        for number in itertools.count():
            if time.monotonic() > end:
                break
            if number % GROUPS_OF_SHAPES == 0:
                compiled.append(random_shapes(rng, models))
            model, shapes = compiled[-1]
            if number % GROUPS_OF_SHAPES:
                model, shapes = rng.choice(compiled[-NUM_SHAPES:])
            for _ in range(CASES_OF_SHAPES):
                case = random_case(rng, model, shapes)
                num_cases += 1
                if problem := fuzzer.failure(case):
                    return _reported(fuzzer, case, problem, num_cases, 60 * minutes, report)
                if time.monotonic() > end:
                    break
        share = compiling.seconds / (time.monotonic() - start)
        report(
            f"{num_cases} cases with {len(compiled)} shapes, {fuzzer.num_requests} requests, no "
            "difference; "
            f"{fuzzer.refused.total()} times an engine refused what was asked; {share:.0%} of the "
            "time "
            f"went into compiling (seed {seed})"
        )
        report("  " + ", ".join(f"{count} x {name}" for name, count in fuzzer.events.most_common()))
        for reason, count in fuzzer.refused.most_common():
            report(f"  {count} x {reason.splitlines()[0][:200]}")
    return 0


def _reported(
    fuzzer: Fuzzer,
    case: Case,
    problem: str,
    number: int,
    seconds: float,
    report: Callable[[str], None],
) -> int:
    """Shrinks a case that fails, prints it, and returns 1."""
    report(f"case {number}: {problem}\nshrinking it")
    logging.disable(logging.CRITICAL)  # each try would log the same failed step again
    kind = _kind(problem)

    def fails(smaller: Case) -> str:
        failure = fuzzer.failure(smaller)
        return failure if _kind(failure) == kind else ""

    small = shrunk(case, fails, seconds=seconds)
    report(f"\n{fuzzer.failure(small) or problem}\n\n{small.program()}")
    logging.disable(logging.NOTSET)
    return 1


def _kind(problem: str) -> str:
    """Returns the words of a problem without its numbers, so that one is not shrunk to another."""
    return re.sub(r"[\d.\-\[\]']+", "", problem)[:40]
