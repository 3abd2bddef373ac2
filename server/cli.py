"""`jaxllm`: the command line. Subcommands import what they need when they run, so that --help is quick."""

import argparse
import functools
import logging
import signal
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn, override

import jaxllm
from jaxllm.errors import CheckpointError
from server.cli_argv import normalize
from server.cli_config import read_config, split_config
from server.cli_engine import add_engine_arguments, engine_args
from server.cli_log import configure_logging, log_level
from server.cli_server import add_server_arguments, serve_options
from server.listen import bind, check_certificate

# Not __name__: as `python -m server.cli` that is __main__, which no level is set for.
logger = logging.getLogger("server.cli")

_TEXT = "Serve large language models over OpenAI's HTTP API, and measure them."
_SERVE_TEXT = """\
Serve MODEL over OpenAI's HTTP API. Without MODEL, a small default model is fetched and served.

Flags have vLLM's names; `_` and `-` are the same in them. Sizes may have a unit: 4k is 4000, 4K is 4096.
JSON flags also take single keys: --override-generation-config.temperature 0.5
What is in brackets holds if a flag is not given."""


class Parser(argparse.ArgumentParser):
    """argparse with readable help, whose errors are ValueErrors without the long usage."""

    def __init__(self, **options):
        super().__init__(
            allow_abbrev=False,
            formatter_class=functools.partial(argparse.RawDescriptionHelpFormatter, max_help_position=34, width=110),
            **options,
        )

    @override
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit status: 2 for bad arguments, 1 for anything else that failed.

    Args:
        argv: without the program's name; None takes the process's.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    return _guarded(lambda: _dispatch(words))


def serve_main() -> int:
    """`jaxllm serve` for modules that vLLM's users start with `python -m`."""
    return _guarded(lambda: _serve(sys.argv[1:], is_module=True))


def _guarded(command: Callable[[], int]) -> int:
    """One clear message instead of a traceback for what a user can put right."""
    try:
        configure_logging("server", log_level())
        return command()
    except KeyboardInterrupt:
        logger.info("stopped")
        return 0
    except (CheckpointError, OSError) as error:
        print(f"jaxllm: error: {error}", file=sys.stderr)
        return 1
    except ValueError as error:
        print(f"jaxllm: error: {error}", file=sys.stderr)
        return 2


def _dispatch(words: list[str]) -> int:
    parser = Parser(prog="jaxllm", description=_TEXT, usage="%(prog)s COMMAND ...")
    parser.add_argument("--version", action="version", version=f"jaxllm {jaxllm.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    commands.add_parser("serve", help="start a server", add_help=False)
    commands.add_parser("bench", help="measure an engine without a server", add_help=False)
    if not words:
        parser.print_help()
        return 2
    # Only the command's name: what follows needs normalising first.
    command = parser.parse_args(words[:1]).command
    return _serve(words[1:]) if command == "serve" else _bench(words[1:])


def make_serve_parser() -> Parser:
    """The parser of `jaxllm serve`."""
    parser = Parser(prog="jaxllm serve", description=_SERVE_TEXT, usage="%(prog)s [MODEL] [FLAGS]")
    parser.add_argument("--version", action="version", version=f"jaxllm {jaxllm.__version__}")
    parser.add_argument("--config", metavar="FILE", help="YAML file of flags; the command line has the last word")
    add_engine_arguments(parser)
    add_server_arguments(parser)
    return parser


def parse_serve(words: Sequence[str], *, is_module: bool = False) -> argparse.Namespace:
    """Parse what follows `jaxllm serve`; the model, if any, is in `model_tag`.

    Args:
        words: of the command line.
        is_module: `--model` is the usual spelling, not worth a note.

    Raises:
        ValueError: words that mean nothing, or something that is missing.
    """
    parser = make_serve_parser()
    path, words = split_config(words)
    words = normalize(words, parser)
    configured = argparse.Namespace()
    if path is not None and not {"-h", "--help"} & set(words):
        configured = parser.parse_args(normalize(read_config(path, parser), parser))
    config_model = vars(configured).pop("model", None)
    options = parser.parse_args(words, configured)
    model = vars(options).pop("model", None)
    if options.model_tag is not None and model not in (None, options.model_tag):
        raise ValueError(f"two models are named: {options.model_tag} and --model {model}")
    if model is not None and not is_module:
        logger.warning("--model is the old spelling; write `jaxllm serve %s`", model)
    options.model_tag = options.model_tag or model or config_model
    if options.model_tag is None:
        _check_swallowed_model(parser.parse_args(words))
    return options


def _check_swallowed_model(options: argparse.Namespace) -> None:
    """A flag that takes several words also takes a MODEL behind them."""
    for name in ("served_model_name", "api_key"):
        if len(getattr(options, name) or ()) > 1 or (name == "served_model_name" and options.served_model_name):
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(f"no model is named: put it in front of {flag}, which takes every word behind it")


def _serve(words: Sequence[str], *, is_module: bool = False) -> int:
    options = parse_serve(words, is_module=is_module)
    args = engine_args(options)
    serving = serve_options(options, args.model)
    check_certificate(serving)
    # Until the server has its own handler; asyncio's would leave the exit status to the signal.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with bind(serving) as listener:
        logger.info("jaxllm %s: %s", jaxllm.__version__, args.model or "the default model, as none is named")
        # These take seconds to import, and the address is either free by now or not.
        from server.serve import serve

        return serve(args, serving, listener, log_level())


def _bench(words: Sequence[str]) -> int:
    # Imports jax, as the benchmarks run the engine in this process.
    from server.bench import add_bench_arguments, run_bench

    configure_logging("bench", log_level())

    parser = Parser(prog="jaxllm bench", description="Measure an engine without a server.")
    benches = parser.add_subparsers(title="benchmarks", metavar="BENCH", dest="bench", required=True)
    add_bench_arguments(benches, add_engine_arguments)
    name = [word for word in words[:1] if word in benches.choices]
    options = parser.parse_args([*name, *normalize(words[1:], benches.choices[name[0]])] if name else words)
    run_bench(options, engine_args(options))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
