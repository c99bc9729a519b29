"""The scenes of the PagedAttention paper as event logs of the demo model, for `jaxpage replay`.

    python examples/scenes.py scenes/        # writes scenes/*.jsonl, a few seconds each

`jaxpage replay LOG --snapshots FILE` makes of one what the web page opens.
Each is a run of its own in blocks of 4, as in the paper's figures. docs/walkthrough.md explains what is seen.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from jaxpage import LLM, BeamSearchParams, SamplingParams

PREFIX = "Once upon a time there lived a young rabbit in an old town. "
GREEDY = SamplingParams(temperature=0.0, max_tokens=16)
# Of each scene: the prompts, the parameters of each, and settings of the engine.
SCENES: dict[str, tuple[list[str], list[Any], dict[str, Any]]] = {
    "two requests (figures 5 to 7)": (
        ["Once upon a time", "It was the best of times"],
        [GREEDY, GREEDY],
        {},
    ),
    "parallel sampling (figure 8)": (
        ["Four score and seven years ago our"],
        [SamplingParams(n=2, seed=1, max_tokens=12)],
        {},
    ),
    "beam search (figure 9)": (
        ["Once upon a time"],
        [BeamSearchParams(beam_width=4, max_tokens=12)],
        {},
    ),
    "shared prefix (figure 10)": (
        [PREFIX + "One day", PREFIX + "At night"],
        [GREEDY, GREEDY],
        {"max_num_seqs": 1},
    ),
    "mixed decoding": (
        ["Once upon a time", "The old house", "In the morning"],
        [
            GREEDY,
            SamplingParams(n=2, seed=1, max_tokens=12),
            BeamSearchParams(beam_width=2, max_tokens=12),
        ],
        {},
    ),
    "preemption": (
        [PREFIX, "The old house stood on a hill", "In the morning"],
        [SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)] * 3,
        {"preemption_mode": "swap"},
    ),
}


def record(name: str, path: Path) -> None:
    prompts, params, settings = SCENES[name]
    sizes = {
        "block_size": 4,
        "num_blocks": 31,
        "max_model_len": 96,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
    }
    with LLM("demo", use_tqdm=False, event_log=str(path), **{**sizes, **settings}) as llm:
        llm.generate(prompts, params, use_tqdm=False)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "directory", type=Path, help="where the logs are written; made if it is not there"
    )
    directory: Path = parser.parse_args().directory
    directory.mkdir(parents=True, exist_ok=True)
    paths = {
        name: directory / f"{name.partition(' (')[0].replace(' ', '-')}.jsonl" for name in SCENES
    }
    if there := [str(path) for path in paths.values() if path.exists()]:
        parser.error(
            f"{', '.join(there)}: there already, and a log is never overwritten; remove them or name another directory"
        )
    for name, path in paths.items():
        record(name, path)
        print(f"{name}: {path}")


if __name__ == "__main__":
    main()
