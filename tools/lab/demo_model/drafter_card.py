"""Writes the card of the demo model's drafters: their training and how often they are right."""

import json
import os
from pathlib import Path
from typing import Any

import jax

from tools.lab.demo_model.eagle_head import UNROLLED

CARD, FACTS = "DRAFTERS.md", "training.json"
TITLES = {
    "draft": "a draft model: a Llama, 128 wide, 2 layers",
    "medusa": "four Medusa-1 heads of two blocks with one table over 1,024 tokens, in vLLM's format",
    "eagle3": "an EAGLE-3 head over 1,024 tokens, in the format of its authors and SpecForge",
    "mtp": "an MTP head, in the model's own file with DeepSeek's names: `model.layers.4.*`",
}
TEMPLATE = """# What drafts for the demo model

{drafters}

`LLM(model="demo", speculative_config={{"method": "medusa", "model": "demo/medusa"}})` drafts with the Medusa heads. \
For a local directory of such a name say `./demo/medusa`.

## How they were trained

`python tools/train_demo_model.py --drafters` makes all of them again, from `model.safetensors` and nothing else: no \
text was read. The demo model wrote {text_tokens:,} tokens itself (openings of tales, beginnings of texts and pieces \
of its own writing, each with 16 tokens at temperature 1 and then 0.2, 0.7 or 1), and each drafter learned the \
model's distribution at temperature 1 on it: the draft model that of the next token, each head that of the token it \
guesses, the EAGLE-3 and the MTP head that of {unrolled} tokens in a row, going on from their own outputs \
(training-time test). The MTP head read the first {mtp_tokens:,} tokens alone. A \
guess one place further on counts 0.8 times as much. Steps are of {tokens_per_step:,} tokens, in float32 with jax \
{jax_version} on {cores} CPU cores that other work shared; the last bits of the weights depend on the machine.

| | steps | minutes | parameters | bytes, bfloat16 |
|---|---|---|---|---|
{training}

## How often they are right

On text that the model wrote from other prompts and seeds: at most {rows} rows of each kind, up to {length} tokens \
each. "Novels" are eight prompts in their manner; greedy text of a prompt counts once. The loop of speculation is \
replayed outside jaxpage: a step accepts the drafts after a known token up to the first that the model did not \
draw, and the model's own draw follows them. "Draft 1" is the share of steps whose first draft was \
accepted, "draft 4" of those that had all four. Tokens per step count the model's own. The tree has 15 guesses of \
fixed ranks, searched from the measured accuracies.

| drafter | text | draft 1 | draft 2 | draft 3 | draft 4 | tokens per step, chain of 4 | tree of 15 | 4-grams that are new |
|---|---|---|---|---|---|---|---|---|
{acceptance}

Drafts are the most likely guesses here. A draft drawn from the draft model's own distribution q would be accepted by \
rejection sampling in sum(min(p, q)) of all cases: {overlap}.

Greedy text of so small a model repeats itself, and drafters are right about repetitions; the last column says how \
much of a text is not one.

## Licence

The weights are under Apache-2.0, as jaxpage and the demo model are.
"""


def write_card(
    directory: Path, text_tokens: int, mtp_tokens: int, tokens_per_step: int, rows: int, length: int
) -> None:
    """Writes the card from each drafter's facts; drafters that were not trained have no lines."""
    trained = [name for name in TITLES if (directory / name / FACTS).exists()]
    facts = {name: json.loads((directory / name / FACTS).read_text()) for name in trained}
    overlap = facts.get("draft", {}).get("overlap", {})
    text = TEMPLATE.format(
        drafters="\n".join(
            f"- `{'demo' if name == 'mtp' else f'demo/{name}'}`: {TITLES[name]}" for name in facts
        ),
        text_tokens=text_tokens,
        mtp_tokens=mtp_tokens,
        tokens_per_step=tokens_per_step,
        jax_version=jax.__version__,
        cores=os.cpu_count(),
        training="\n".join(_training(directory / name, facts[name]) for name in facts),
        unrolled=UNROLLED,
        rows=rows,
        length=length,
        acceptance="\n".join(line for name in facts for line in _acceptance(name, facts[name])),
        overlap=", ".join(f"{share} ({name})" for name, share in overlap.items()),
    )
    (directory / CARD).write_text(text, "utf-8")


def _training(directory: Path, facts: dict[str, Any]) -> str:
    weights = directory / "model.safetensors"  # the MTP head has no file of its own
    size = weights.stat().st_size if weights.exists() else 2 * facts["parameters"]
    return f"| {directory.name} | {facts['steps']:,} | {facts['minutes']} | {facts['parameters']:,} | {size:,} |"


def _acceptance(name: str, facts: dict[str, Any]) -> list[str]:
    lines = []
    for sample, row in facts["acceptance"].items():
        cells = [
            name,
            sample,
            *row["positions"],
            row["tokens_per_step"],
            row["tokens_per_step_tree"],
            row["new"],
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines
