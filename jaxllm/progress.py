"""Progress bars: on a terminal and in notebooks; lines in the log elsewhere."""

import logging
import sys
import time
import warnings
from typing import Any

with warnings.catch_warnings(action="ignore"):  # a notebook without ipywidgets gets the plain bar
    from tqdm.auto import tqdm

__all__ = ["StartProgress", "is_interactive", "tqdm"]

_LINE_SECONDS = 10.0
# Above it the steps are bytes, of which nobody wants to read the number.
_COUNTABLE = 10_000


def is_interactive() -> bool:
    """Whether somebody watches: stderr is a terminal, or this is a notebook."""
    return sys.stderr.isatty() or "ipykernel" in sys.modules


class StartProgress:
    """Shows how far loading and compiling are: a bar on a terminal, a line now and then elsewhere. Picklable."""

    def __init__(self) -> None:
        self._stage = ""
        self._bar: Any = None
        self._last_line = 0.0

    def __call__(self, what: str, done: int, total: int) -> None:
        """Take note of a step.

        Args:
            what: what is being done; its first word names the stage.
            done, total: steps of the stage.
        """
        if is_interactive():
            self._draw(what, done, total)
        else:
            self._write(what, done, total)

    def _draw(self, what: str, done: int, total: int) -> None:
        stage = what.split()[0]
        if self._bar is None or stage != self._stage:
            if self._bar is not None:
                self._bar.close()
            is_bytes = total > _COUNTABLE
            self._bar, self._stage = (
                tqdm(total=total, unit="B" if is_bytes else " programs", unit_scale=is_bytes),
                stage,
            )
        self._bar.set_description(what[:60], refresh=False)
        self._bar.update(done - self._bar.n)
        if done >= total:
            self._bar.close()
            self._bar = None

    def _write(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        stage = what.split()[0]
        if done >= total or stage != self._stage or now - self._last_line >= _LINE_SECONDS:
            self._stage, self._last_line = stage, now
            shown = f"{done} of {total}" if total <= _COUNTABLE else f"{done / total:.0%}"
            logging.getLogger(__name__).info("%s: %s", what, shown)
