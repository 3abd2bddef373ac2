"""From the words of a command line to those the parser knows: spellings, JSON keys, old and missing flags."""

import argparse
import difflib
import json
import logging
from collections.abc import Sequence
from typing import Any

from jaxllm.engine_args import parse_json_object
from server.cli_flags import IGNORED, REFUSED, RENAMED, SHORT

logger = logging.getLogger(__name__)

JSON_FLAGS = ("--override-generation-config", "--default-chat-template-kwargs")
_BOOLEANS = ("true", "false")


def normalize(words: Sequence[str], parser: argparse.ArgumentParser) -> list[str]:
    """The same command line in the parser's own spelling.

    `_` becomes `-` in names, `--json-flag.key value` a part of one JSON object, flags of old versions
    become today's or nothing (with a warning each).

    Args:
        words: of a subcommand.
        parser: of the subcommand.

    Raises:
        ValueError: a flag of a feature that is missing, an unknown one, JSON that is none.
    """
    result: list[str] = []
    objects: dict[str, dict[str, Any]] = {}
    unknown: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word == "--":
            result += [word, *rest]
            break
        if not is_flag(word):
            result.append(word)
            continue
        name, equals, value = _split(word)
        base, _, key = name.partition(".")
        if base in JSON_FLAGS:
            values = [value] if equals else _take(rest, 1)
            if not values:
                raise ValueError(f"{name} needs a value")
            _merge(objects, base, key, values[0])
        elif name in flag_names(parser):
            result.append(name + equals + value)
        elif (replaced := _replace(base, value if equals else None, rest)) is not None:
            result += replaced
        else:
            unknown.append(word)
    if unknown:
        raise ValueError("; ".join(_explain_unknown(word, parser) for word in unknown))
    return [*(f"{name}={json.dumps(value)}" for name, value in objects.items()), *result]


def is_flag(word: str) -> bool:
    """Whether argparse would take a word for a flag rather than a value."""
    return word.startswith("-") and len(word) > 1 and not word[1].isdigit() and " " not in word.partition("=")[0]


def flag_names(parser: argparse.ArgumentParser) -> set[str]:
    """Every spelling of every flag of a parser."""
    return set(parser._option_string_actions)


def is_known(name: str, parser: argparse.ArgumentParser) -> bool:
    """Whether `normalize` has an answer to `--name`, be it a refusal."""
    plain = name.removeprefix("no-")
    base = plain.partition(".")[0]
    return f"--{base}" in flag_names(parser) or any(key in table for key in (name, base) for table in _TABLES)


_TABLES = (RENAMED, IGNORED, REFUSED)


def _split(word: str) -> tuple[str, str, str]:
    """(name in our spelling, "=" or nothing, value)."""
    name, equals, value = word.partition("=")
    base, dot, key = name.partition(".")
    if base.startswith("--"):
        base = base.replace("_", "-")
    elif base.startswith("-O") and base[2:].isdigit():
        base = "-O"
    return base + dot + key, equals, value


def _take(rest: list[str], count: int) -> list[str]:
    """Up to `count` values from the front of `rest`, which loses them."""
    taken: list[str] = []
    while len(taken) < count and rest and not is_flag(rest[0]):
        taken.append(rest.pop(0))
    return taken


def _merge(objects: dict[str, dict[str, Any]], flag: str, key: str, value: str) -> None:
    """Add `--flag JSON` (no key) or `--flag.key value` to what was given before; later wins."""
    try:
        if not key:
            objects[flag] = parse_json_object(value)
            return
        *path, last = key.split(".")
        target = objects.setdefault(flag, {})
        for part in path:
            target = target.setdefault(part, {})
            if not isinstance(target, dict):
                raise ValueError(f"{part!r} was given a value of its own before")
    except ValueError as error:
        raise ValueError(f"{flag}{'.' + key if key else ''}: {error}") from None
    try:
        target[last] = json.loads(value)
    except json.JSONDecodeError:
        target[last] = value


def _replace(name: str, value: str | None, rest: list[str]) -> list[str] | None:
    """What stands for a flag of another version; None if it is in no table.

    Raises:
        ValueError: it is refused.
    """
    flag = SHORT.get(name, name.removeprefix("--"))
    plain = flag.removeprefix("no-")
    if flag in RENAMED:
        logger.warning("%s is an old spelling; use --%s", name, RENAMED[flag])
        return [f"--{RENAMED[flag]}" + ("" if value is None else f"={value}")]
    if plain in IGNORED and flag not in REFUSED:
        ignored = IGNORED[plain]
        if value is None:
            value = "".join(_take(rest, ignored.num_values)) or _take_boolean(rest)
        if value.lower() == "false" and f"no-{plain}" in REFUSED:
            return _replace(f"--no-{plain}", None, [])
        logger.warning("%s does nothing: %s", name, ignored.why)
        return []
    refused = REFUSED.get(flag) or REFUSED.get(plain)
    if refused is None:
        return None
    is_off = flag != plain and flag not in REFUSED
    if value is None and refused.harmless:
        value = "".join(_take(rest, 1)) if rest and rest[0].lower() in refused.harmless else None
    if is_off or (value is not None and value.lower() in refused.harmless):
        return []
    raise ValueError(f"{name} is not supported: {refused.why}")


def _take_boolean(rest: list[str]) -> str:
    return rest.pop(0) if rest and rest[0].lower() in _BOOLEANS else ""


def _explain_unknown(word: str, parser: argparse.ArgumentParser) -> str:
    name = _split(word)[0]
    candidates = sorted(flag_names(parser) | {f"--{old}" for old in RENAMED})
    close = difflib.get_close_matches(name, candidates, n=3, cutoff=0.7)
    return f"unknown flag {name}" + (f"; did you mean {' or '.join(close)}?" if close else "; --help lists all")
