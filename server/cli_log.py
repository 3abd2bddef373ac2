"""Logging of the command line, for the front end and for the engine process."""

import logging
import os

OWN_LOGGERS = ("jaxllm", "converters", "server", "uvicorn")


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
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"%(levelname)s %(asctime)s [{part}] %(message)s", "%H:%M:%S"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("huggingface_hub").propagate = False  # it writes its lines itself
    for name in OWN_LOGGERS:
        logging.getLogger(name).setLevel(level)
