"""Trains the small Idefics 3 in jaxpage/demo_vision, which answers questions about drawings.

It draws its data itself; nothing is read or downloaded. One thread is enough (taskset -c 0 keeps
to one): a step takes half a second of a CPU. It needs the extra [test] of jaxpage.

    python tools/train_vision_demo.py                   # as shipped
    python tools/train_vision_demo.py --steps 300       # less well
    python tools/train_vision_demo.py --resume          # go on from the checkpoint in --scratch
    python tools/train_vision_demo.py --pictures-only   # draw the example pictures, train nothing

tools/lab/demo_model/drawings.py has the drawings and the questions.
"""

import argparse
import functools
import os
import sys
from pathlib import Path

import jax
import numpy as np
from tokenizers import Tokenizer

# Lets the program run where only jaxpage is installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.lab.demo_model import exporting, picture_talk, seeing_accuracy, seeing_files, training
from tools.lab.demo_model.model import ModelSpec, Params
from tools.lab.demo_model.seeing_card import Facts, model_card
from tools.lab.demo_model.seeing_examples import draw_examples, record_answers
from tools.lab.demo_model.seeing_model import SeeingSpec, cells_loss, init_seeing, seeing_loss

ROOT = Path(__file__).resolve().parents[1]
# The vision transformer learns alone at first, which is cheap, and then together with the Llama.
VISION_STEPS, VISION_BATCH = 300, 64
STEPS, BATCH = 700, 16
# Questions in the card, and in the reports of the training; multiples of the eight kinds.
MEASURED, REPORTED = 800, 144


def parse_arguments() -> argparse.Namespace:
    """Returns the arguments of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps", type=int, default=STEPS, help=f"number of steps (default {STEPS}, as shipped)"
    )
    parser.add_argument(
        "--vision-steps",
        type=int,
        default=VISION_STEPS,
        help=f"steps of the vision transformer alone, before them (default {VISION_STEPS})",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of the first weights and the drawings (default 0)"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=ROOT / "jaxpage" / "demo_vision",
        help="the model's directory",
    )
    parser.add_argument(
        "--pictures",
        type=Path,
        default=ROOT / "examples" / "pictures",
        help="the directory of the example pictures and the answers about them",
    )
    parser.add_argument(
        "--scratch",
        type=Path,
        default=Path("/tmp") / f"jaxpage-demo-vision-{os.getuid()}",
        help="for checkpoints",
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on from the checkpoint in --scratch"
    )
    parser.add_argument(
        "--pictures-only", action="store_true", help="draw the example pictures, train nothing"
    )
    return parser.parse_args()


def make_spec(tokenizer: Tokenizer) -> SeeingSpec:
    """Returns the sizes of the shipped model."""
    text = ModelSpec(
        vocabulary=tokenizer.get_vocab_size(),
        width=128,
        layers=4,
        heads=2,
        kv_heads=1,
        feed_forward=256,
    )
    return SeeingSpec(text, layers=3, feed_forward=384)


def train_vision(
    spec: SeeingSpec, params: Params, maker: picture_talk.RowMaker, options: argparse.Namespace
) -> Params:
    """Returns the parameters after the vision transformer has learnt what its cells show."""
    vision = {name: value for name, value in params.items() if not name.startswith("text.")}
    plan = training.Plan(options.vision_steps, options.seed)
    held_out = maker.pictures(np.random.default_rng((plan.seed, 8)), VISION_BATCH)
    loss = jax.jit(functools.partial(cells_loss, spec))
    run = training.train(
        functools.partial(cells_loss, spec),
        plan,
        training.start_run(vision, plan),
        lambda step: maker.pictures(np.random.default_rng((plan.seed, 7, step)), VISION_BATCH),
        options.scratch / "vision.npz",
        lambda run: f"step {run.step}: {loss(run.params, held_out):.3f} nats a cell",
    )
    return params | run.params


def train(
    spec: SeeingSpec, maker: picture_talk.RowMaker, options: argparse.Namespace
) -> tuple[training.Plan, training.Run]:
    """Trains from the beginning or from the checkpoint, to the end of the plan."""
    checkpoint = options.scratch / "run.npz"
    params = init_seeing(spec, jax.random.key(options.seed))
    plan = training.Plan(options.steps, options.seed)
    if options.resume and checkpoint.exists():
        plan, run = training.load_run(checkpoint, params, options.steps)
    else:
        run = training.start_run(train_vision(spec, params, maker, options), plan)
    rng = np.random.default_rng((plan.seed, 3))
    questions = seeing_accuracy.make_questions(rng, REPORTED)

    def report(run: training.Run) -> str:
        rng = np.random.default_rng((plan.seed, 4))
        accuracy = seeing_accuracy.measure(spec, run.params, maker, questions, rng)
        shares = " ".join(f"{kind} {accuracy.share(kind):.0%}" for kind in seeing_accuracy.KINDS)
        return f"step {run.step}: {accuracy.share():.1%} of {REPORTED} answers are right: {shares}"

    return plan, training.train(
        functools.partial(seeing_loss, spec),
        plan,
        run,
        lambda step: maker.batch(np.random.default_rng((plan.seed, 2, step)), BATCH),
        checkpoint,
        report,
    )


def main() -> None:
    """Draws the examples, trains, and writes the model, its answers and its card."""
    options = parse_arguments()
    draw_examples(options.pictures)
    if options.pictures_only:
        return
    options.output.mkdir(parents=True, exist_ok=True)
    options.scratch.mkdir(parents=True, exist_ok=True, mode=0o700)
    tokenizer = picture_talk.train_tokenizer(options.seed)
    spec = make_spec(tokenizer)
    maker = picture_talk.RowMaker(tokenizer, spec)
    plan, run = train(spec, maker, options)
    picture_talk.save_tokenizer(tokenizer, spec, options.output)
    params = exporting.round_to_bfloat16(run.params)
    seeing_files.export_seeing(spec, params, tokenizer, options.output)
    rng = np.random.default_rng((plan.seed, 5))
    questions = seeing_accuracy.make_questions(rng, MEASURED)
    accuracy = seeing_accuracy.measure(spec, params, maker, questions, rng)
    answers = record_answers(spec, params, tokenizer, options.pictures)
    facts = Facts(
        spec,
        plan,
        run,
        seeing_files.export(params),
        BATCH,
        picture_talk.ROW_LENGTH,
        accuracy,
        answers,
    )
    (options.output / "README.md").write_text(model_card(facts), "utf-8")
    right = f"{accuracy.share():.1%} of {MEASURED} answers are right"
    print(f"wrote {options.output}: {right}", flush=True)


if __name__ == "__main__":
    main()
