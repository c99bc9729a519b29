"""A few requests, greedy and sampled, whose bits must not depend on how an engine runs them; and
the model that they are for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from jaxpage import SamplingParams
from tests.support.engines import LLAMA, make_llm, tokens_of

CONFIG = {
    **LLAMA,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
PROMPTS = [np.random.default_rng(0).integers(1, 257, length).tolist() for length in (5, 61, 33, 90)]
PARAMS = [
    SamplingParams(temperature=t, seed=3, max_tokens=24, ignore_eos=True, logprobs=2)
    for t in (0.0, 1.0, 0.7, 0.0)
]


def texts(model: Path, **settings: Any) -> list[Any]:
    """Returns what an engine with these settings gives, as `tokens_of` has it."""
    with make_llm(model, **{"largest_shapes": True, **settings}) as llm:
        return tokens_of(llm.generate(PROMPTS, PARAMS, use_tqdm=False))
