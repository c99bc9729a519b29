"""Trains the small Llama that ships in jaxpage/demo.

It has real weights for `jaxpage generate`, the tests and the speculation work. The program reads
public-domain novels from Debian packages (it names the apt-get command when one is missing) and a
seeded synthetic slice; see tools/lab/demo_model/corpus.py for the list and the licences. Two CPU
cores and most of an hour are enough.

    python tools/train_demo_model.py --minutes 45   # as many steps as fit; the card records them
    python tools/train_demo_model.py --steps 1500   # the same batches and learning rates each time
    python tools/train_demo_model.py --resume       # go on from the last checkpoint in --scratch
    python tools/train_demo_model.py --drafters     # the drafters for the model in --output

tools/lab/demo_model/drafters.py trains the drafters.
"""

import argparse
import dataclasses
import functools
import os
import sys
from pathlib import Path

import jax
import numpy as np
from tokenizers import Tokenizer

# Lets the program run where only jaxpage is installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.lab.demo_model import card, corpus, drafters, evaluation, exporting, tokenizer, training
from tools.lab.demo_model.model import ModelSpec, init_params, next_token_loss

ROOT = Path(__file__).resolve().parents[1]
DEFAULT_MINUTES = 45.0


@dataclasses.dataclass(frozen=True)
class Data:
    """Holds the corpus as tokens, with the tokenizer made from it."""

    tokenizer: Tokenizer
    train: np.ndarray
    human_validation: np.ndarray
    synthetic_validation: np.ndarray
    bytes_per_token: dict[str, float]
    manifest: dict[str, object]


def parse_arguments() -> argparse.Namespace:
    """Returns the arguments of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument(
        "--minutes", type=float, help="wall time to aim at (default 45); of each drafter"
    )
    length.add_argument(
        "--steps", type=int, help="exact number of steps: the reproducible form; of each drafter"
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of the corpus, the first weights and the batches (default 0)",
    )
    parser.add_argument(
        "--output", type=Path, default=ROOT / "jaxpage" / "demo", help="the model's directory"
    )
    parser.add_argument(
        "--scratch",
        type=Path,
        default=Path("/tmp") / f"jaxpage-demo-{os.getuid()}",
        help="for checkpoints",
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on from the checkpoint in --scratch"
    )
    parser.add_argument(
        "--prepare-only",
        action="store_true",
        help="write the tokenizer and the manifest, do not train",
    )
    parser.add_argument(
        "--export-only",
        action="store_true",
        help="write the model from the checkpoint in --scratch",
    )
    parser.add_argument(
        "--drafters",
        nargs="*",
        choices=drafters.RECIPES,
        help="train these for the model in --output, which stays as it is (default: all, each with as many steps as shipped)",
    )
    return parser.parse_args()


def prepare(seed: int) -> Data:
    """Builds the corpus, trains the tokenizer on its training part, and encodes everything."""
    texts = corpus.build_corpus(seed)
    made = tokenizer.train_tokenizer(texts.human_train + texts.synthetic_train)
    streams = {
        "train": tokenizer.encode_stream(made, texts.human_train + texts.synthetic_train),
        "human": tokenizer.encode_stream(made, texts.human_validation),
        "synthetic": tokenizer.encode_stream(made, texts.synthetic_validation),
    }
    sizes = {"human": texts.human_validation, "synthetic": texts.synthetic_validation}
    ratio = {
        name: sum(len(d.encode()) for d in documents) / len(streams[name])
        for name, documents in sizes.items()
    }
    counts = {name: len(stream) for name, stream in streams.items()}
    manifest = {**texts.manifest, "tokens": counts}
    print(f"tokens: {counts}", flush=True)
    return Data(made, streams["train"], streams["human"], streams["synthetic"], ratio, manifest)


def progress(spec: ModelSpec, data: Data, run: training.Run) -> str:
    """Returns the text printed with every checkpoint: a quick validation loss and a sample."""
    loss = evaluation.mean_loss(spec, run.params, data.human_validation, max_tokens=16_384)
    prompt = data.tokenizer.encode("Once upon a time").ids
    text = data.tokenizer.decode(
        evaluation.sample_text(spec, run.params, prompt, 60, 0.7, seed=run.step)
    )
    return f"step {run.step}: {loss:.3f} nats/token on held-out novels\n{text}\n"


def train_or_resume(
    spec: ModelSpec, data: Data, options: argparse.Namespace
) -> tuple[training.Plan, training.Run]:
    """Does what the command line asks for, up to the finished run."""
    checkpoint, max_length = options.scratch / "run.npz", spec.max_positions
    objective = functools.partial(next_token_loss, spec)
    params = init_params(spec, jax.random.key(options.seed))
    if options.resume or options.export_only:
        plan, run = training.load_run(checkpoint, params, options.steps)
        if plan.seed != options.seed:
            sys.exit(
                f"{checkpoint} was trained with --seed {plan.seed}, and --seed is {options.seed}"
            )
    else:
        plan = training.Plan(options.steps or 1, options.seed)
        if options.steps is None:
            minutes = DEFAULT_MINUTES if options.minutes is None else options.minutes
            steps = training.steps_for_minutes(
                objective, params, plan, data.train, max_length, minutes
            )
            plan = dataclasses.replace(plan, steps=steps)
        run = training.start_run(params, plan)
    if not options.export_only:
        print(
            f"to repeat: python tools/train_demo_model.py --steps {plan.steps} --seed {plan.seed}",
            flush=True,
        )
        report = functools.partial(progress, spec, data)
        batches = training.window_batches(data.train, max_length, plan)
        run = training.train(objective, plan, run, batches, checkpoint, report)
    return plan, run


def main() -> None:
    """Does what the command line asks for."""
    options = parse_arguments()
    if options.drafters is not None:
        train_drafters(options)
    else:
        train_model(options)


def train_drafters(options: argparse.Namespace) -> None:
    """Trains all drafters, or those that are named."""
    options.scratch.mkdir(parents=True, exist_ok=True, mode=0o700)
    drafters.train_drafters(
        options.output,
        options.scratch,
        options.drafters or tuple(drafters.RECIPES),
        steps=options.steps,
        minutes=options.minutes,
        seed=options.seed,
        resume=options.resume,
    )


def train_model(options: argparse.Namespace) -> None:
    """Prepares the data, trains the model and exports it."""
    try:
        data = prepare(options.seed)
    except corpus.MissingSource as error:
        sys.exit(str(error))
    spec = ModelSpec(vocabulary=data.tokenizer.get_vocab_size())
    options.output.mkdir(parents=True, exist_ok=True)
    options.scratch.mkdir(parents=True, exist_ok=True, mode=0o700)
    tokenizer.save_tokenizer(data.tokenizer, options.output, spec.max_positions)
    exporting.write_json(options.output / "corpus_manifest.json", data.manifest)
    if options.prepare_only:
        return
    plan, run = train_or_resume(spec, data, options)
    params = exporting.round_to_bfloat16(run.params)
    exporting.export_model(spec, params, options.output)
    losses = {
        "human": evaluation.mean_loss(spec, params, data.human_validation),
        "synthetic": evaluation.mean_loss(spec, params, data.synthetic_validation),
    }
    samples = card.draw_samples(spec, params, data.tokenizer)
    facts = card.Facts(spec, plan, run, losses, data.bytes_per_token, data.manifest, samples)
    (options.output / "README.md").write_text(card.model_card(facts), "utf-8")
    print(f"wrote {options.output}: {losses} nats/token", flush=True)


if __name__ == "__main__":
    main()
