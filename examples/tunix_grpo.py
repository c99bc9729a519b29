"""GRPO with Tunix: a model learns to use a letter, with jaxpage for rollouts and for the trainer's forward pass.

    pip install google-tunix matplotlib
    python examples/tunix_grpo.py --steps 100 --out grpo

A step draws several completions of each prompt, rewards each by the share of its letters that are
the wanted one, and makes one update. `steps.csv` and `steps.png` in --out show the mean reward, and
how far the trainer's log probabilities are from those of the rollout. The same command goes on
where an earlier one was stopped.
"""

from __future__ import annotations

import argparse
import csv
import functools
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import orbax.checkpoint
from flax import nnx
from tqdm import tqdm
from tunix.rl import common, rl_cluster
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rollout.base_rollout import RolloutConfig, RolloutOutput

from jaxpage import LLM
from jaxpage.integrations.tunix import JaxpageRollout, TrainedModule
from jaxpage.training import TrainableModel

PROMPTS = ["Once upon a time", "The old house stood on a hill", "In the morning", "The king said"]
PROMPT_LENGTH, NUM_TOKENS = 16, 24


class Step(NamedTuple):
    """One row of steps.csv.

    Attributes:
        step: The number of updates before the rollout.
        reward: The mean reward of the rollout.
        difference: The greatest difference of a log probability between rollout and trainer.
        ratio: The ratio of the trainer's probability to the rollout's that is farthest from 1.
        seconds: The time since the step before.
    """

    step: int
    reward: float
    difference: float
    ratio: float
    seconds: float


class ComparedRollout(JaxpageRollout):
    """A rollout engine that compares its log probabilities with those of the trained module."""

    def __init__(self, report: Report, **arguments: Any):
        super().__init__(**arguments)
        self.report = report
        self.actor = arguments["rollout_actor"]

    def generate(
        self, prompts: list[str], rollout_config: RolloutConfig, **kwargs: Any
    ) -> RolloutOutput:
        rollout_config.seed = jax.random.PRNGKey(self.report.next_step * len(prompts))
        output = super().generate(prompts, rollout_config, **kwargs)
        completions = np.full((len(prompts), NUM_TOKENS), self.pad_id(), np.int32)
        for row, tokens in zip(completions, output.tokens, strict=True):
            row[: len(tokens)] = tokens
        graph, state = nnx.split(self.actor)
        prompt_tokens = output.left_padded_prompt_tokens
        computed = common.compute_per_token_logps(
            graph, state, prompt_tokens, completions, self.pad_id(), self.eos_id()
        )
        rows = zip(np.asarray(computed), output.logprobs, strict=True)
        differences = np.concatenate([row[: len(drawn)] - drawn for row, drawn in rows])
        self.report.differences = differences
        return output


class Report:
    """Writes steps.csv and steps.png, and moves the progress bar.

    Attributes:
        differences: The trainer's log probabilities of the last rollout minus the rollout's.
    """

    def __init__(self, directory: Path, letter: str, first_step: int, num_steps: int):
        self.path = directory / "steps.csv"
        self.letter = letter
        self.steps = self._read(first_step)
        self.next_step = first_step
        self.bar = tqdm(total=num_steps, initial=first_step, desc="GRPO", unit="step")
        self.since = time.perf_counter()
        self.differences = np.zeros(0)

    def _read(self, first_step: int) -> list[Step]:
        if not self.path.exists():
            return []
        with self.path.open(newline="") as file:
            rows = list(csv.DictReader(file))
        kinds = Step.__annotations__
        steps = [
            Step(
                **{name: int(text) if name == "step" else float(text) for name, text in row.items()}
            )
            for row in rows
            if row.keys() == kinds.keys()
        ]
        return [step for step in steps if step.step < first_step]

    def reward(
        self, prompts: Sequence[str], completions: Sequence[str], **kwargs: Any
    ) -> list[float]:
        """Returns the share of the letter in each completion, and ends the step's row."""
        rewards = [text.count(self.letter) / max(len(text), 1) for text in completions]
        now = time.perf_counter()
        ratios = np.exp(self.differences)
        self.steps.append(
            Step(
                self.next_step,
                float(np.mean(rewards)),
                float(abs(self.differences).max()),
                float(ratios[abs(ratios - 1).argmax()]),
                now - self.since,
            )
        )
        self.since = now
        self.next_step += 1
        with self.path.open("w", newline="") as file:
            csv.writer(file).writerows([Step._fields, *self.steps])
        last = self.steps[-1]
        self.bar.set_postfix_str(f"reward {last.reward:.3f}, difference {last.difference:.1e}")
        self.bar.update()
        return rewards

    def plot(self) -> None:
        """Draws the rewards and the differences."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        figure, (above, below) = pyplot.subplots(2, sharex=True, figsize=(7, 5), layout="tight")
        numbers = [step.step for step in self.steps]
        above.plot(numbers, [step.reward for step in self.steps])
        above.set_ylabel(f"share of “{self.letter}”")
        below.plot(numbers, [step.difference for step in self.steps], color="tab:red")
        below.set_ylabel("greatest difference\nof a log probability")
        below.set_xlabel("updates")
        figure.savefig(self.path.with_suffix(".png"), dpi=120)


def open_model(path: str, num_experts: int, **settings: Any) -> LLM:
    """Returns the model; with experts, each is a copy of its MLP with small differences, and the router is random."""
    llm = LLM(path, **settings)
    if not num_experts:
        return llm
    rng = np.random.default_rng(0)
    parameters: dict[str, Any] = {}
    for name, array in llm.parameters().items():
        layer, _, rest = name.partition(".mlp.")
        if not rest:
            parameters[name] = array
            continue
        part = {"gate_proj.weight": "w1", "up_proj.weight": "w3", "down_proj.weight": "w2"}[rest]
        for index in range(num_experts):
            noise = 1 + 0.1 * rng.standard_normal(array.shape)
            expert = f"{layer}.block_sparse_moe.experts.{index}.{part}.weight"
            parameters[expert] = (np.asarray(array, np.float32) * noise).astype(array.dtype)
        router = 0.1 * rng.standard_normal((num_experts, llm.hf_config["hidden_size"]))
        parameters[f"{layer}.block_sparse_moe.gate.weight"] = router.astype(array.dtype)
    config = {
        **llm.hf_config,
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": num_experts,
        "num_experts_per_tok": 2,
        "num_nextn_predict_layers": 0,
    }
    with llm:
        return LLM.from_parameters(config, parameters, llm.tokenizer, **settings)


def parse_arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo", help="a model directory; default: demo")
    parser.add_argument(
        "--experts", type=int, default=0, help="make each MLP so many experts; needs a Llama"
    )
    parser.add_argument(
        "--trainer",
        default="exact",
        choices=["exact", "dense"],
        help="values with the engine's bits, or those of a plain forward pass; default: exact",
    )
    parser.add_argument("--steps", type=int, default=100, help="updates; default: 100")
    parser.add_argument("--samples", type=int, default=8, help="of each prompt; default: 8")
    parser.add_argument("--letter", default="o", help="what is rewarded; default: o")
    parser.add_argument("--dtype", default="float32", help="default: float32")
    parser.add_argument("--learning-rate", type=float, default=2e-4, help="default: 2e-4")
    parser.add_argument("--out", type=Path, default=Path("grpo"), help="a directory; default: grpo")
    return parser.parse_args(words)


def open_cluster(
    llm: LLM,
    module: TrainedModule,
    report: Report,
    checkpoints: Path,
    arguments: argparse.Namespace,
) -> rl_cluster.RLCluster:
    """Returns Tunix's trainer and rollout engine; the trainer goes on from the last checkpoint."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    roles = rl_cluster.Role
    training = rl_cluster.RLTrainingConfig(
        actor_optimizer=optax.adam(arguments.learning_rate),
        eval_every_n_steps=arguments.steps + 1,
        max_steps=arguments.steps,
        checkpoint_root_directory=str(checkpoints),
        checkpointing_options=orbax.checkpoint.CheckpointManagerOptions(
            save_interval_steps=10, max_to_keep=2
        ),
        pbar_description=None,
    )
    rollouts = RolloutConfig(
        max_tokens_to_generate=NUM_TOKENS,
        max_prompt_length=PROMPT_LENGTH,
        kv_cache_size=64,
        temperature=1.0,
        return_logprobs=True,
    )
    config = rl_cluster.ClusterConfig(
        role_to_mesh=dict.fromkeys([roles.ACTOR, roles.ROLLOUT, roles.REFERENCE], mesh),
        rollout_engine=functools.partial(ComparedRollout, report, llm=llm, named=module.named),
        training_config=training,
        rollout_config=rollouts,
    )
    cluster = rl_cluster.RLCluster(actor=module, tokenizer=llm.tokenizer, cluster_config=config)
    cluster.rollout.update_params(nnx.state(cluster.actor_trainer.model, nnx.Param))
    return cluster


def main(words: Sequence[str] | None = None) -> list[Step]:
    """Trains, and returns the rows of steps.csv."""
    arguments = parse_arguments(words)
    arguments.out.mkdir(parents=True, exist_ok=True)
    logging.disable(logging.WARNING)  # Tunix warns of what is no TPU
    with open_model(
        arguments.model,
        arguments.experts,
        dtype=arguments.dtype,
        max_model_len=64,
        max_num_seqs=len(PROMPTS) * arguments.samples,
        use_tqdm=False,
    ) as llm:
        is_exact = arguments.trainer == "exact"
        model, parameters = TrainableModel.load(
            llm.hf_config, llm.parameters(), dtype=arguments.dtype, exact=is_exact
        )
        module = TrainedModule(model, parameters)
        if is_exact:
            module.use_log_softmax()
        checkpoints = (arguments.out / "checkpoints").absolute()
        with orbax.checkpoint.CheckpointManager(checkpoints / "actor") as manager:
            first_step = manager.latest_step() or 0
        report = Report(arguments.out, arguments.letter, first_step, arguments.steps)
        learner = GRPOLearner(
            rl_cluster=open_cluster(llm, module, report, checkpoints, arguments),
            reward_fns=report.reward,
            algo_config=GRPOConfig(num_generations=arguments.samples, beta=0.0),
        )
        learner.train([{"prompts": np.array(PROMPTS)}] * arguments.steps)
        report.bar.close()
    report.plot()
    print(f"{report.path} and {report.path.with_suffix('.png')} have {len(report.steps)} steps")
    return report.steps


if __name__ == "__main__":
    main()
