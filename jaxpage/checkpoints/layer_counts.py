"""Finds that a config has another number of layers than the checkpoint.

One sentence then takes the place of a list of all tensors of the layers that are too many.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from jaxpage.checkpoints.problems import Problems, quote
from jaxpage.models.parameters import Weight

_LAYER = re.compile(r"([A-Za-z_.]+\.)(\d{1,5})\.")


def layers_beyond(
    stored: Iterable[str], weights: Sequence[Weight], problems: Problems
) -> Callable[[Iterable[str]], bool]:
    """Returns a function that finds names of layers which the model or the checkpoint lacks.

    A difference of their numbers of layers is added to `problems`.

    Args:
        stored: The names of the tensors that are not ignored.
        weights: The parameters of the model.
        problems: The list that errors are added to.
    """
    needed = _layers(name for weight in weights for name in weight.tensor_names)
    layers = _layers(stored)
    common_counts: dict[str, int] = {}
    for stem in needed.keys() & layers.keys():
        model, checkpoint = (1 + max(numbers[stem]) for numbers in (needed, layers))
        # Where a number is missing in between, tensors are missing and no layers.
        if model != checkpoint and (len(needed[stem]), len(layers[stem])) == (model, checkpoint):
            common_counts[stem] = min(model, checkpoint)
            problems.add(
                f"the number of layers is {model} in config.json and {checkpoint} in the tensors "
                f"({quote(f'{stem}0')} to "
                f"{quote(f'{stem}{checkpoint - 1}')}): one of the two is of another model"
            )
    return lambda names: any(
        (match := _LAYER.match(name)) is not None
        and int(match[2]) >= common_counts.get(match[1], 1 << 20)
        for name in names
    )


def _layers(names: Iterable[str]) -> dict[str, set[int]]:
    """Returns the numbers of layers, by the text before them in names."""
    numbers: dict[str, set[int]] = {}
    for match in filter(None, map(_LAYER.match, names)):
        numbers.setdefault(match[1], set()).add(int(match[2]))
    return numbers
