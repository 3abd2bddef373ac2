"""What the engine process runs first. Imports little: the new process imports this before it is set up."""

from typing import TYPE_CHECKING

from server.cli_log import configure_logging

if TYPE_CHECKING:
    from converters import ModelSource
    from jaxllm.engine.engine import Engine
    from jaxllm.engine_args import EngineArgs


def build_logged_engine(args: "EngineArgs", source: "ModelSource", level: str) -> "Engine":
    """Set up logging in this process, then load and compile.

    Args:
        args: the engine's.
        source: the model, already found by the front end.
        level: of the log.
    """
    configure_logging("engine", level)
    # Only now, so that the log's format holds for whatever these print.
    from jaxllm.build import build_core
    from jaxllm.progress import StartProgress

    return build_core(args, source, StartProgress())
