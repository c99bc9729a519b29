"""Reads by which axis of a position each pair of a head turns (mrope).

Pictures have positions on three axes: time, height and width. Sections of the pairs turn by each:

    chunked       t t t h h h w w w    Qwen2-VL and Qwen2.5-VL
    interleaved   t h w t h w t h w    Qwen3-VL and Qwen3.5
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxpage.models.config.fields import text_part

NUM_AXES = 3


@dataclass(frozen=True)
class Sections:
    """Describes the sections of a family.

    Attributes:
        default: The number of pairs of each section, for a config that does not say.
        interleaved: True if the pairs of the axes take turns.
    """

    default: tuple[int, ...]
    interleaved: bool = False

    def read(self, config: Mapping[str, Any]) -> Any:
        """Returns `mrope_section` of a config.json, which may be of any form."""
        text = text_part(config)
        parameters = text.get("rope_scaling") or text.get("rope_parameters")
        stated = parameters if isinstance(parameters, dict) else {}
        return stated.get("mrope_section", self.default)

    def axes(self, config: Mapping[str, Any], num_pairs: int) -> tuple[int, ...]:
        """Returns the axis of each pair; nothing where the sections do not fit the pairs."""
        sections = self.read(config)
        is_list = isinstance(sections, list | tuple) and all(type(each) is int for each in sections)
        if not is_list or len(sections) < NUM_AXES or min(sections) < 0:
            return ()
        if self.interleaved:
            return tuple(
                # The longer section of time has what is left after the other two are used up.
                axis if number < NUM_AXES * sections[axis] else 0
                for number in range(num_pairs)
                for axis in [number % NUM_AXES]
            )
        sections_of_axes = ([index % NUM_AXES] * size for index, size in enumerate(sections))
        axes = tuple(itertools.chain.from_iterable(sections_of_axes))
        return axes if len(axes) == num_pairs else ()


QWEN2_VL = Sections((16, 24, 24))
QWEN3_VL = Sections((24, 20, 20), interleaved=True)
QWEN3_5 = Sections((11, 11, 10), interleaved=True)
