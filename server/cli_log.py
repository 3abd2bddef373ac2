"""Logging and progress of the command line, for the front end and for the engine process."""

import logging
import os
import sys
import time

from tqdm import tqdm

OWN_LOGGERS = ("jaxllm", "converters", "server", "uvicorn")
_LINE_SECONDS = 10.0
# Above it the steps are bytes, of which nobody wants to read the number.
_COUNTABLE = 10_000


def log_level() -> str:
    """The level that JAXLLM_LOGGING_LEVEL or VLLM_LOGGING_LEVEL asks for; INFO without them.

    Raises:
        ValueError: no such level.
    """
    for variable in ("JAXLLM_LOGGING_LEVEL", "VLLM_LOGGING_LEVEL"):
        if value := os.environ.get(variable):
            if value.upper() not in logging.getLevelNamesMapping():
                raise ValueError(f"{variable}={value} is no level; use DEBUG, INFO, WARNING or ERROR")
            return value.upper()
    return "INFO"


def configure_logging(part: str, level: str) -> None:
    """Log to stderr as `INFO 12:01:02 [part] message`; other libraries only from WARNING on.

    Args:
        part: which process this is.
        level: of our own messages.
    """
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # torch is not needed here
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"%(levelname)s %(asctime)s [{part}] %(message)s", "%H:%M:%S"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    for name in OWN_LOGGERS:
        logging.getLogger(name).setLevel(level)


class StartProgress:
    """Shows how far loading and compiling are: a bar on a terminal, a line now and then elsewhere. Picklable."""

    def __init__(self) -> None:
        self._stage = ""
        self._bar: tqdm | None = None
        self._last_line = 0.0

    def __call__(self, what: str, done: int, total: int) -> None:
        """Take note of a step.

        Args:
            what: what is being done; its first word names the stage.
            done, total: steps of the stage.
        """
        if sys.stderr.isatty():
            self._draw(what, done, total)
        else:
            self._write(what, done, total)

    def _draw(self, what: str, done: int, total: int) -> None:
        stage = what.split()[0]
        if self._bar is None or stage != self._stage:
            if self._bar is not None:
                self._bar.close()
            self._bar, self._stage = tqdm(total=total, unit_scale=total > _COUNTABLE), stage
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
