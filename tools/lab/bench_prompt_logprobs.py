"""Times a prompt that is scored (prompt_logprobs) against one that is not.

One token is drawn. A time is in seconds, the least of some rounds in turn.

    python tools/lab/bench_prompt_logprobs.py --model models/opt-125m --num-tokens 2000
"""

from __future__ import annotations

import argparse
import random
import time

from jaxpage import LLM, SamplingParams


def main() -> None:
    """Prints the times."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="demo", help="directory or name of the model; default: demo"
    )
    parser.add_argument("--num-tokens", type=int, default=2000, help="of the prompt; default: 2000")
    parser.add_argument("--max-num-seqs", type=int, default=16, help="of the engine; default: 16")
    parser.add_argument("--rounds", type=int, default=3, help="default: 3")
    arguments = parser.parse_args()
    drawn = random.Random(0)
    prompt = [drawn.randrange(4, 250) for _ in range(arguments.num_tokens)]
    kinds = {"not scored": None, "prompt_logprobs=0": 0, "prompt_logprobs=5": 5}
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    with LLM(
        model=arguments.model, max_num_seqs=arguments.max_num_seqs, enable_prefix_caching=False
    ) as llm:
        for _ in range(arguments.rounds):
            for name, expected in kinds.items():
                params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=expected)
                began = time.monotonic()
                llm.generate([prompt], params, use_tqdm=False)
                seconds[name].append(time.monotonic() - began)
    minimum = min(seconds["not scored"])
    for name, taken in seconds.items():
        print(f"{name:<20} {min(taken):8.3f} s   x {min(taken) / minimum:.2f}")


if __name__ == "__main__":
    main()
