"""Compares engines of random settings with a plain one that runs one request at a time: every token and number must be the same.

    python tools/fuzz_engine.py --minutes 3 --seed 1

Requests come and go at random steps, and the scheduler's invariants are checked after every step. Where an answer differs, settings and
requests are left out one by one as long as it still does; what is left is printed as a program, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import os
import pprint
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

# Most of the time would go into compiling. Both engines are compiled alike, so that their bits may be compared.
os.environ["XLA_FLAGS"] = f"--xla_backend_optimization_level=0 {os.environ.get('XLA_FLAGS', '')}"

from jaxpage import LLM, BeamSearchParams, SamplingParams

LONGEST = 96  # tokens of a sequence
COMMON: dict[str, Any] = {"model": "demo", "dtype": "float32", "use_tqdm": False, "max_model_len": LONGEST}
PLAIN: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "enable_prefix_caching": False}
SETTINGS: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "block_size": 16, "num_blocks": 33}
CHANGES_BITS = ("kv_cache_dtype",)  # settings that the plain engine has to have as well
MOST_STEPS = 4000


@dataclass(frozen=True)
class Ask:
    """One request. at_step: when it comes. num_steps: after how many further steps its client leaves; None: it stays."""

    prompt: tuple[int, ...]
    params: dict[str, Any]
    at_step: int = 0
    num_steps: int | None = None

    @property
    def checked(self) -> SamplingParams | BeamSearchParams:
        return (BeamSearchParams if "beam_width" in self.params else SamplingParams)(**self.params)


@dataclass(frozen=True)
class Case:
    settings: dict[str, Any]
    asks: tuple[Ask, ...] = field(default=())


def random_settings(chance: random.Random) -> dict[str, Any]:
    """Beyond `COMMON` and `SETTINGS`."""
    settings: dict[str, Any] = {}
    if chance.random() < 0.6:
        settings["block_size"] = chance.choice((1, 2, 4, 8, 32))
    # From a pool that holds one of the longest sequences to one that holds all.
    longest = -(-LONGEST // settings.get("block_size", 16))
    settings["num_blocks"] = 2 + int(longest * chance.choice((1.0, 1.0, 1.5, 2.5, 4.0)))
    if chance.random() < 0.5:
        settings["preemption_mode"] = chance.choice(("swap", "recompute"))
    if chance.random() < 0.5:
        settings["enable_mixed_steps"] = True
    if chance.random() < 0.3:
        settings["enable_prefix_caching"] = False
    if chance.random() < 0.3:
        settings["scheduling_policy"] = chance.choice(("priority", "fair"))
    if chance.random() < 0.2:
        settings["kv_cache_dtype"] = "int8"
    kind = chance.choice(("plain", "several", "several", "drafts", "drafts"))
    if kind == "several":
        settings["num_scheduler_steps"] = chance.choice((2, 3, 8))
    elif kind == "drafts":
        method = chance.choice(("ngram", "suffix", "token_recycling", "draft_model"))
        drafting: dict[str, Any] = {"method": method, "num_speculative_tokens": chance.choice((1, 3, 7))}
        if method == "draft_model":
            drafting["model"] = "demo/draft"
        if method == "suffix":
            drafting["tree"] = chance.random() < 0.5
        settings["speculative_config"] = drafting
    return settings


def random_asks(chance: random.Random, *, has_priorities: bool) -> Iterator[Ask]:
    shared = [chance.randrange(2, 2000) for _ in range(64)]
    at_step = 0
    for _ in range(chance.randint(2, 12)):
        length = chance.choice((1, 1, 2, 17, 33, 33, chance.randint(3, 60)))
        own = [chance.randrange(2, 2000) for _ in range(length)]
        prompt = shared[:length] if chance.random() < 0.5 else own
        params = random_params(chance)
        if has_priorities and "beam_width" not in params:
            params["priority"] = chance.randrange(3)
        leaves = chance.randrange(12) if chance.random() < 0.15 else None
        yield Ask(tuple(prompt), params, at_step, leaves)
        at_step += chance.choice((0, 0, 1, 3, 9))


def random_params(chance: random.Random) -> dict[str, Any]:
    num_tokens = chance.choice((1, 2, 5, 12, 30))
    if chance.random() < 0.12:
        return {"beam_width": chance.randint(2, 4), "max_tokens": num_tokens}
    params: dict[str, Any] = {"max_tokens": num_tokens, "temperature": chance.choice((0.0, 0.8, 1.3)), "logprobs": 1}
    params["seed"] = chance.randrange(2**40)
    if chance.random() < 0.5:
        params["ignore_eos"] = True
    some = chance.sample(range(2000), 3)
    parts: tuple[dict[str, Any], ...] = (
        {"n": chance.randint(2, 3)},
        {"n": 1, "best_of": 3},
        {"allowed_token_ids": some},
        {"logit_bias": dict.fromkeys(some, chance.choice((-100.0, 5.0)))},
        {"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.3},
        {"bad_words": ["the", "a", "said the"]},
        {"min_tokens": num_tokens - 1, "stop_token_ids": some},
        {"structured_outputs": {"regex": "(ab|c){2,9}"}},
        {"stop": ["e", "the "]},
        {"prompt_logprobs": 1},
        {"top_k": 5, "top_p": 0.9, "min_p": 0.01},
    )
    for part in chance.sample(parts, chance.choice((0, 0, 1, 1, 2))):
        params |= part
    return params


class Engines:
    """The engines of the last settings, and the plain ones."""

    def __init__(self) -> None:
        self._plain: dict[str, LLM] = {}
        self._last: tuple[dict[str, Any], LLM] | None = None

    def plain(self, settings: dict[str, Any]) -> LLM:
        own = {name: settings[name] for name in CHANGES_BITS if name in settings}
        if str(own) not in self._plain:
            self._plain[str(own)] = LLM(**{**COMMON, **PLAIN, **own})
        return self._plain[str(own)]

    def other(self, settings: dict[str, Any]) -> LLM:
        """A new one for each case: what a case does may depend on nothing that was before it."""
        if self._last is not None and self._last[0] == settings:
            llm = self._last[1]
            llm.reset_prefix_cache()
            return llm
        if self._last is not None:
            self._last[1].shutdown()
        self._last = settings, LLM(**{**COMMON, **SETTINGS, **settings})
        return self._last[1]


def essence(output: Any) -> Any:
    """What must not depend on the engine: all but times."""
    return [
        (one.token_ids, one.text, one.finish_reason, one.logprobs, one.cumulative_logprob) for one in output.outputs
    ]


def difference(case: Case, engines: Engines) -> str | None:
    """What is wrong with the answers of an engine of these settings, or with what it leaves behind."""
    want = [
        essence(engines.plain(case.settings).generate(list(ask.prompt), ask.checked, use_tqdm=False)[0])
        for ask in case.asks
    ]
    llm = engines.other(case.settings)
    engine: Any = llm._engine
    reporters: dict[int, Any] = {}
    for step in range(MOST_STEPS):
        for number, ask in enumerate(case.asks):
            if ask.at_step == step:
                reporters[number] = engine.add(f"{number}", engine.prepare(None, list(ask.prompt), ask.checked))
            elif ask.num_steps is not None and ask.at_step + ask.num_steps == step:
                engine.abort(f"{number}")
        try:
            engine.step()
            engine.scheduler.check()
        except Exception as error:
            engine.abort_all()
            engine.rebuild_pages()
            return f"step {step}: {type(error).__name__}: {error}"
        if len(reporters) == len(case.asks) and not engine.has_unfinished:
            break
    else:
        engine.abort_all()
        return f"requests have not ended after {MOST_STEPS} steps"
    for number, ask in enumerate(case.asks):
        got = reporters[number].whole()
        if ask.num_steps is None and essence(got) != want[number]:
            return f"request {number} is\n{pprint.pformat(essence(got))}\nand not\n{pprint.pformat(want[number])}"
    stats = llm.stats()
    if stats["num_blocks_free"] != stats["num_blocks_total"]:
        return f"{stats['num_blocks_total'] - stats['num_blocks_free']} blocks are lost"
    return None


def smaller(case: Case) -> Iterator[Case]:
    """The case with something left out."""
    for number in range(len(case.asks)):
        yield replace(case, asks=case.asks[:number] + case.asks[number + 1 :])
    for number, ask in enumerate(case.asks):
        simpler = [replace(ask, params={k: v for k, v in ask.params.items() if k != name}) for name in ask.params]
        simpler = [
            one
            for one in simpler
            if "max_tokens" in one.params and ("beam_width" in ask.params) == ("beam_width" in one.params)
        ]
        if ask.num_steps is not None:
            simpler.append(replace(ask, num_steps=None))
        for one in simpler:
            yield replace(case, asks=(*case.asks[:number], one, *case.asks[number + 1 :]))
    for name in case.settings:
        yield replace(case, settings={k: v for k, v in case.settings.items() if k != name})


def shrunk(case: Case, engines: Engines, until: float) -> Case:
    """The smallest case that was found in which something still differs."""
    goes_on = True
    while goes_on and time.monotonic() < until:
        goes_on = False
        for one in smaller(case):
            if time.monotonic() > until:
                break
            try:
                found = difference(one, engines)
            except (TypeError, ValueError):  # parameters or settings that do not go together
                continue
            if found is not None:
                case, goes_on = one, True
                break
    return case


PROGRAM = """from tools.fuzz_engine import Ask, Case, Engines, difference

case = {case}
print(difference(case, Engines()))
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--minutes", type=float, default=3.0, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=int(time.strftime("%Y%m%d")), help="default: the day, %(default)s")
    parser.add_argument("--cases-each", type=int, default=8, help="cases of the same settings; default: %(default)s")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    chance, engines = random.Random(arguments.seed), Engines()
    until = time.monotonic() + 60 * arguments.minutes
    num_cases = num_requests = num_settings = num_refused = 0
    while time.monotonic() < until:
        settings = random_settings(chance)
        num_settings += 1
        for _ in range(arguments.cases_each):
            has_priorities = settings.get("scheduling_policy") == "priority"
            case = Case(settings, tuple(random_asks(chance, has_priorities=has_priorities)))
            try:
                found = difference(case, engines)
            except (TypeError, ValueError) as error:
                num_refused += 1
                print(f"refused: {type(error).__name__}: {error}", flush=True)
                continue
            num_cases += 1
            num_requests += len(case.asks)
            if found is not None:
                print(f"DIFFERENT, of {settings}: {found}\nshrinking", flush=True)
                case = shrunk(case, engines, time.monotonic() + 60 * arguments.minutes)
                print(PROGRAM.format(case=pprint.pformat(case, width=110)))
                print(f"# {difference(case, engines)}")
                return 1
            if time.monotonic() > until:
                break
    print(
        f"{num_settings} engines, {num_cases} cases, {num_requests} requests, {num_refused} refused: all as the plain engine"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
