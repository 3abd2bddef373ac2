"""`--config FILE`: flags from a YAML file, below those of the command line."""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from server.cli_argv import is_known


def split_config(words: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Take `--config FILE` out of a command line.

    Raises:
        ValueError: it comes without a file, or twice.
    """
    rest: list[str] = []
    files: list[str] = []
    words = list(words)
    while words:
        word = words.pop(0)
        if word == "--config" and words:
            files.append(words.pop(0))
        elif word.startswith("--config="):
            files.append(word.partition("=")[2])
        elif word == "--config":
            raise ValueError("--config needs a file")
        else:
            rest.append(word)
    if len(files) > 1:
        raise ValueError("--config may be given once")
    return (Path(files[0]) if files else None), rest


def read_config(path: Path, parser: argparse.ArgumentParser) -> list[str]:
    """The words that say on a command line what a YAML file says; for `normalize`.

    Args:
        path: a mapping from flags without dashes in front to values.
        parser: knows the flags.

    Raises:
        ValueError: no such file, no such YAML, or keys that are no flags; all of them are named.
    """
    import yaml  # only here: most command lines have no file

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"--config {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"--config {path} is no YAML: {error}") from error
    if content is None:
        return []
    if not isinstance(content, Mapping):
        raise ValueError(f"--config {path} must hold `flag: value` lines")
    values = {str(key).replace("_", "-"): value for key, value in content.items()}
    unknown = [key for key in values if not is_known(key, parser)]
    if unknown:
        raise ValueError(f"--config {path} has keys that are no flags: {', '.join(unknown)}")
    return [word for key, value in values.items() for word in _words(key, value, path)]


def _words(key: str, value: Any, path: Path) -> list[str]:
    if value is None:
        return []
    if isinstance(value, bool):
        if value:
            return [f"--{key}"]
        return [f"--{key.removeprefix('no-')}" if key.startswith("no-") else f"--no-{key}"]
    if isinstance(value, Mapping):
        return [f"--{key}={json.dumps(value)}"]
    if isinstance(value, list):
        if key.startswith("allowed-"):
            return [f"--{key}={json.dumps(value)}"]
        if not value or not all(isinstance(item, str | int | float) for item in value):
            raise ValueError(f"--config {path}: {key} must be a list of values")
        return [f"--{key}", *map(str, value)]
    return [f"--{key}={value}"]
