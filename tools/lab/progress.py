"""Shows a progress bar where tqdm is installed, and plain lines where it is not.

On a bare GPU machine the kernels' tools work without tqdm.
"""

from __future__ import annotations

from typing import Any

tqdm: Any
try:
    from tqdm import tqdm
except ImportError:
    tqdm = None


class Bar:
    """A progress bar, or plain lines without tqdm."""

    def __init__(self, total: int, unit: str) -> None:
        self._bar = tqdm(total=total, unit=unit, disable=None) if tqdm else None

    def write(self, text: str) -> None:
        """Prints a line on standard output, above the bar."""
        if self._bar is not None:
            self._bar.write(text)
        else:
            print(text, flush=True)

    def show(self, text: str) -> None:
        """Shows a text next to the bar."""
        if self._bar is not None:
            self._bar.set_postfix_str(text)

    def step(self, text: str = "") -> None:
        """Advances the bar by one, and shows a text next to it."""
        if self._bar is not None:
            self._bar.set_postfix_str(text)
            self._bar.update()

    def close(self) -> None:
        """Closes the bar."""
        if self._bar is not None:
            self._bar.close()
