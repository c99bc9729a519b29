"""Random checkpoints, loaded by transformers and by jaxpage, whose logits must be the same.

jaxpage may refuse a checkpoint with an error that names a field. A difference is shrunk to the
fewest changed fields and printed as a program.
"""

from __future__ import annotations

import copy
import json
import logging
import random
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from safetensors.numpy import load_file, save_file

from jaxpage import SamplingParams
from jaxpage.checkpoints import load_weights, open_model
from jaxpage.errors import JaxpageError
from tests.support.checkpoint_cases import Case, Config, class_fields, random_cases, smaller_cases
from tests.support.config_defaults import difference
from tests.support.dense import logits_of
from tests.support.engines import make_llm
from tests.support.hf_models import randomise, stated_time_steps, torch, without_timm

# Reading a config takes a hundredth of the time of compiling a model: of so many cases one is
# compiled, and of the others only the defaults are compared.
READ = 20
LENGTH = 40  # beyond the windows and the original lengths of the cases
MAX_PARAMETERS = 3_000_000
# Each weight is moved by about this share, two roundings of float32, to see how far logits move.
MOVED = 2.0**-22
# jaxpage adds in another order, which moved logits by at most 1.6 such moves in 156 checkpoints. A
# field that is read wrongly moves them by a thousand.
MOVES = 5
MINIMUM = 2e-6  # the tolerance as a share of the largest logit, where a move moves nothing


class NotTaken(Exception):
    """Says why transformers gives no logits to compare with."""


@without_timm()
def write_checkpoint(case: Case, directory: Path) -> torch.nn.Module:
    """Writes the checkpoint and returns the model of transformers that was loaded from it.

    Raises:
        NotTaken: transformers makes no model of it.
    """
    mark = "\ufeff" if "mark" in case.files else ""
    text = mark + json.dumps(case.config, indent=1)
    try:
        kind = getattr(transformers, case.config["architectures"][0])
        (directory / "config.json").write_text(text.removeprefix(mark))
        config = kind.config_class.from_pretrained(directory)
        with torch.device("meta"):
            count = sum(each.numel() for each in kind(copy.deepcopy(config)).parameters())
        if count > MAX_PARAMETERS:
            raise NotTaken("too many parameters")
        model = kind(config).eval()
        rng = torch.Generator().manual_seed(case.seed)
        # As small as those of published models, where an epsilon matters, or large.
        randomise(model, rng, embedding=(0.02, 0.2)[case.seed % 2])
        more: dict[str, Any] = {"max_shard_size": "20KB"} if "shards" in case.files else {}
        saved = model
        # Without its prefix the decoder is saved, and its head is not, unless that is its table.
        if "prefixless" in case.files and config.get_text_config().tie_word_embeddings:
            saved = getattr(model, model.base_model_prefix, model)
        saved.save_pretrained(directory, save_original_format="stacked" not in case.files, **more)
        _arrange(case, directory, model)
        (directory / "config.json").write_text(text.removeprefix(mark))
        loaded, reported = kind.from_pretrained(
            directory, dtype=torch.float32, output_loading_info=True
        )
        (directory / "config.json").write_text(text, encoding="utf-8")
    except NotTaken:
        raise
    except Exception as error:
        raise NotTaken(f"{type(error).__name__}: {error}") from error
    if reported["missing_keys"] or reported["mismatched_keys"]:
        raise NotTaken(f"it does not load what it saved: {reported}")
    return stated_time_steps(loaded.eval())


def _arrange(case: Case, directory: Path, model: Any) -> None:
    """Arranges the files otherwise: another name, or a head that is saved although it is tied."""
    path = directory / "model.safetensors"
    if not path.is_file():
        return
    if "head" in case.files and "prefixless" not in case.files:
        tensors = load_file(path)
        head = model.get_output_embeddings().weight.detach().numpy()
        save_file({"lm_head.weight": head, **tensors}, path, {"format": "pt"})
    if "numbered" in case.files:
        name = "model.safetensors-00001-of-00001.safetensors"
        where = dict.fromkeys(load_file(path), name)
        path.rename(directory / name)
        index = {"metadata": {"total_size": 1}, "weight_map": where}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def _logits(model: Any, token_ids: torch.Tensor) -> np.ndarray:
    try:
        with torch.no_grad():
            logits: np.ndarray = model(token_ids[None]).logits[0].float().numpy()
    except Exception as error:
        raise NotTaken(f"{type(error).__name__}: {error}") from error
    if not np.isfinite(logits).all():
        raise NotTaken("its logits are not finite")
    return logits


def _tolerance(model: Any, token_ids: torch.Tensor, logits: np.ndarray, seed: int) -> float:
    """Returns how far off logits may be: some times what the last bits of the weights move."""
    rng = torch.Generator().manual_seed(seed)
    moved = copy.deepcopy(model)
    for each in moved.parameters():
        each.data.mul_(1 + MOVED * torch.randn(each.shape, generator=rng))
    change = np.abs(_logits(moved, token_ids) - logits).max()
    return float(MOVES * change + MINIMUM * np.abs(logits).max())


def failure(
    case: Case, directory: Path, reported: Counter[str] | None = None, *, is_compiled: bool = True
) -> str:
    """Returns how jaxpage and transformers differ on a case; "" if they do not.

    Args:
        case: The case.
        directory: An empty directory.
        told: Counts what was compared, what was refused, and what transformers does not take.
        is_compiled: Whether logits are compared, or only the defaults of what is left out.
    """
    reported = Counter() if reported is None else reported
    if text := difference(case.config):
        return f"a config that is read otherwise than with all defaults of its class:\n{text}"
    if not is_compiled:
        return ""
    try:
        model = write_checkpoint(case, directory)
        rng = torch.Generator().manual_seed(case.seed)
        size = model.config.get_text_config().vocab_size
        token_ids = torch.randint(size, (LENGTH,), generator=rng)
        return _compared(case, directory, model, token_ids, reported)
    except NotTaken as reason:
        reported[f"not taken by transformers: {kind_of(str(reason))}"] += 1
        return ""


def _compared(
    case: Case, directory: Path, model: Any, token_ids: torch.Tensor, reported: Counter[str]
) -> str:
    try:
        files = open_model(directory)
        token_ids = token_ids[: files.spec.max_position_embeddings]
        expected = _logits(model, token_ids)
        parameters = load_weights(files.plan, "float32", np.asarray)
        ours = logits_of(files.family, files.spec, parameters, token_ids.numpy(), rule=files.rule)
        distance = float(np.abs(ours - expected).max())
        allowed = _tolerance(model, token_ids, expected, 0)
        if not distance <= allowed:
            # Where two experts are nearly as likely, one move need not exchange them.
            allowed = max(_tolerance(model, token_ids, expected, seed) for seed in range(6))
        if not distance <= allowed:
            largest = np.abs(expected).max()
            return f"logits differ by {distance:.2g} of {largest:.2g}, and {allowed:.2g} is allowed"
        if case.in_engine and len(token_ids) > 2:
            if problem := _in_engine(directory, model, token_ids[:-2].tolist(), allowed):
                return problem
            reported["equal in an engine"] += 1
    except NotTaken:
        raise
    except JaxpageError as error:
        _logits(model, token_ids)  # a refusal counts where transformers gives logits
        return _refused(case, directory, str(error), reported)
    except Exception as error:
        return f"{type(error).__name__} of jaxpage: {str(error)[:300]}"
    reported["equal"] += 1
    return ""


def _refused(case: Case, directory: Path, text: str, reported: Counter[str]) -> str:
    text = text.replace(str(directory), "DIRECTORY")
    named = {*re.findall(r"\w+", text)}
    fields = {*_names(case.config), *class_fields(case.config["model_type"])}
    if not named & fields:
        return f"jaxpage refuses it and names no field: {text[:300]}"
    reported[f"refused: {kind_of(text)}"] += 1
    return ""


def _names(config: Config) -> set[str]:
    inner = [_names(value) for value in config.values() if isinstance(value, dict)]
    return {*config}.union(*inner)


def _in_engine(directory: Path, model: Any, prompt: list[int], allowed: float) -> str:
    """Compares the log probabilities of two tokens, of which the engine decodes one from its cache.

    The engine has kernels of its own, so that these may be four times as far apart as logits. Of
    transformers it is one pass: in another one with a cache Mamba 2 has no limits of time steps,
    and Bamba begins with position 0.
    """
    params = SamplingParams(max_tokens=2, temperature=0, logprobs=3, ignore_eos=True)
    with make_llm(directory, dtype="float32", max_model_len=None) as llm:
        output = llm.generate([prompt], params, use_tqdm=False)[0].outputs[0]
    with torch.no_grad():
        both = model(torch.tensor([[*prompt, *output.token_ids[:1]]])).logits[0, -2:]
    for index, (logits, candidates) in enumerate(zip(both, output.logprobs or (), strict=True)):
        expected = torch.log_softmax(logits.float(), -1)
        for token_id, candidate in (candidates or {}).items():
            if abs(candidate.logprob - float(expected[token_id])) > 4 * allowed:
                return (
                    f"log probability {index} of token {token_id} in an engine is {candidate.logprob}, "
                    f"and {float(expected[token_id])} of transformers"
                )
    return ""


def kind_of(text: str) -> str:
    """Returns the first sentence of an error without its numbers and values."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    line = next((line for line in lines if "DIRECTORY" not in line), lines[0] if lines else "")
    line = re.sub(r"'[^']*'|\[.*\]|\{.*\}", "…", line)
    return re.sub(r"\d[\d.e-]*", "N", line)[:160]


def fuzz(minutes: float, seed: int, *, family: str | None, report: Callable[[str], None]) -> int:
    """Runs random cases for some minutes and returns how many failed, which is at most one.

    Args:
        minutes: The time for new cases; shrinking takes as long again at most.
        seed: The seed of the cases.
        family: A module of `jaxpage.models` or an architecture; None for all.
        report: Takes lines for the person who runs it.
    """
    transformers.utils.logging.disable_progress_bar()
    end = time.monotonic() + 60 * minutes
    reported: Counter[str] = Counter()

    def fails(case: Case, is_compiled: bool) -> str:
        with tempfile.TemporaryDirectory(prefix="jaxpage-fuzz-") as directory:
            return failure(case, Path(directory), reported, is_compiled=is_compiled)

    num_cases = 0
    logging.disable(logging.CRITICAL)  # each checkpoint would log the same lines again
    try:
        for case in random_cases(random.Random(seed), family):
            if time.monotonic() > end:
                break
            num_cases += 1
            if problem := fails(case, num_cases % READ == 0):
                report(f"case {num_cases}: {problem}\nshrinking it")
                small, problem = _min(case, fails, seconds=60 * minutes)
                report(f"\n{problem}\n\n{small.program()}")
                return 1
    finally:
        logging.disable(logging.NOTSET)
    report(
        f"{num_cases} configs, 1 of {READ} of them written as a checkpoint, no difference "
        f"(seed {seed})"
    )
    for reason, count in sorted(reported.items(), key=lambda item: (-item[1], item[0])):
        report(f"  {count} x {reason}")
    return 0


def _min(case: Case, fails: Callable[[Case, bool], str], *, seconds: float) -> tuple[Case, str]:
    """Returns the smallest case found in this time that still fails, and what is wrong with it."""
    end = time.monotonic() + seconds
    is_compiled = difference(case.config) is None  # else nothing needs to be
    progress = True
    while progress:
        progress = False
        for smaller in smaller_cases(case):
            if time.monotonic() > end:
                break
            if fails(smaller, is_compiled):
                case, progress = smaller, True
                break
    return case, fails(case, is_compiled)
