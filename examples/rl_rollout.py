"""A toy of reinforcement learning: the demo model learns to use a letter, with jaxpage for rollouts and optax for the trainer.

    python examples/rl_rollout.py --steps 8

In each step: samples of a few prompts, a reward for each, the gradient of REINFORCE with a baseline per prompt, and new weights for the
engine, without a compile. The table shows how many log probabilities of the rollout `llm.score` gives again with the same bits (all of
them), and by how much the trainer's own forward pass differs (not at all).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import optax

from jaxpage import LLM, SamplingParams
from jaxpage.training import TrainableModel

PROMPTS = [
    "Once upon a time",
    "The old house stood on a hill",
    "In the morning",
    "The king said to the fox",
]
NUM_SAMPLES, NUM_TOKENS, LETTER = 8, 24, "o"


class Rollout(NamedTuple):
    """rewards: of each completion, the share of its tokens with the letter. version: of the weights."""

    prompts: list[list[int]]
    completions: list[list[int]]
    logprobs: list[list[float]]
    rewards: npt.NDArray[np.float64]
    version: int


def rollout(llm: LLM, seed: int) -> Rollout:
    params = SamplingParams(
        n=NUM_SAMPLES,
        temperature=1.0,
        seed=seed,
        max_tokens=NUM_TOKENS,
        ignore_eos=True,
        logprobs=0,
    )
    prompts, completions, logprobs, rewards = [], [], [], []
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    for output in outputs:
        for sample in output.outputs:
            ids = list(sample.token_ids)
            prompts.append(list(output.prompt_token_ids))
            completions.append(ids)
            logprobs.append(
                [entry[id_].logprob for entry, id_ in zip(sample.logprobs or [], ids, strict=True)]
            )
            rewards.append(np.mean([LETTER in llm.tokenizer.decode([id_]) for id_ in ids]))
    return Rollout(prompts, completions, logprobs, np.array(rewards), outputs[0].weights_version)


def batch(found: Rollout) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """Rows of tokens, padded behind, and for each token from the second on its advantage: 0 for prompts and padding."""
    per_prompt = found.rewards.reshape(len(PROMPTS), NUM_SAMPLES)
    spread = per_prompt.std(axis=1, keepdims=True) + 1e-6
    advantages = ((per_prompt - per_prompt.mean(axis=1, keepdims=True)) / spread).ravel()
    num_rows, width = len(found.prompts), max(map(len, found.prompts)) + NUM_TOKENS
    tokens_RC, advantage_RC = (
        np.zeros((num_rows, width), np.int32),
        np.zeros((num_rows, width - 1), np.float32),
    )
    for row, (prompt, completion) in enumerate(zip(found.prompts, found.completions, strict=True)):
        tokens_RC[row, : len(prompt) + NUM_TOKENS] = prompt + completion
        advantage_RC[row, len(prompt) - 1 :][:NUM_TOKENS] = advantages[row]
    return tokens_RC, advantage_RC


def compare(llm: LLM, found: Rollout, own_RC: npt.NDArray[np.float32]) -> tuple[int, int, float]:
    """How many log probabilities `llm.score` gives again, of how many, and the largest difference of the trainer's own."""
    rollout_logprobs = np.array(found.logprobs)
    scored = np.array(llm.score(found.prompts, found.completions))
    own = np.array(
        [own_RC[row, len(prompt) - 1 :][:NUM_TOKENS] for row, prompt in enumerate(found.prompts)]
    )
    num_equal = int((scored == rollout_logprobs).sum())
    return num_equal, scored.size, float(np.abs(own - rollout_logprobs).max())


def main(words: Sequence[str] | None = None) -> list[tuple[float, int, int, float]]:
    """Returns of each step the mean reward and what `compare` found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=8, help="default: 8")
    parser.add_argument(
        "--dtype",
        default="float32",
        help="of both forward passes; the optimizer's weights are float32",
    )
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="of Adam; default: 1e-3")
    arguments = parser.parse_args(words)
    table = []
    with LLM(
        "demo", dtype=arguments.dtype, max_num_seqs=32, max_model_len=64, use_tqdm=False
    ) as llm:
        model, rounded = TrainableModel.load(llm.hf_config, llm.parameters(), dtype=arguments.dtype)
        weights = jax.tree.map(lambda array: array.astype(jnp.float32), rounded)
        optimizer = optax.adam(arguments.learning_rate)
        state = optimizer.init(weights)

        def loss(
            weights: Any, tokens_RC: jax.Array, advantage_RC: jax.Array
        ) -> tuple[jax.Array, jax.Array]:
            weights = jax.tree.map(lambda array, like: array.astype(like.dtype), weights, rounded)
            logprobs_RC = model.log_probabilities(weights, tokens_RC)
            return -jnp.mean(logprobs_RC * advantage_RC), logprobs_RC

        gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))
        print(
            "weights  mean reward  log probabilities with equal bits  the trainer's differ by at most"
        )
        for step in range(arguments.steps):
            found = rollout(llm, seed=step)
            (_, own_RC), gradients = gradient(weights, *batch(found))
            num_equal, num_tokens, difference = compare(llm, found, np.asarray(own_RC))
            table.append((float(found.rewards.mean()), num_equal, num_tokens, difference))
            print(
                f"{found.version:7}  {table[-1][0]:11.3f}  {num_equal:18} of {num_tokens:11}  {difference:.1e}"
            )
            updates, state = optimizer.update(gradients, state, weights)
            weights = optax.apply_updates(weights, updates)
            llm.update_parameters(model.named(weights), check_finite=True)
    return table


if __name__ == "__main__":
    main()
