"""Where a model comes from: a folder, a GGUF file or a hub repository, made local, its configuration read."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from converters.gguf import GGUFCheckpoint
from converters.gguf_config import generation_config_from_gguf, hf_config_from_gguf
from converters.hub import (
    DESCRIPTION_PATTERNS,
    IGNORED_PATTERNS,
    WEIGHT_PATTERNS,
    Hub,
    is_repo_id,
    select_gguf,
    weight_format,
)
from jaxllm.errors import CheckpointError

LOAD_FORMATS = ("auto", "safetensors", "pt", "gguf", "dummy")
_OpenHub = Callable[[str, str | None], Hub]


@dataclass(frozen=True)
class ModelSource:
    """A model on this machine.

    Attributes:
        path: the folder, or the GGUF file (of a split model, its first shard).
        kind: which of the two.
        name: as the user wrote it.
        tokenizer_path: folder or GGUF file the tokenizer is loaded from.
        hf_config: Hugging Face's `config.json`; for GGUF, made of the file's metadata.
        generation_config: `generation_config.json` likewise; empty if there is none.
    """

    path: Path
    kind: Literal["folder", "gguf"]
    name: str
    tokenizer_path: Path
    hf_config: dict[str, Any] = field(repr=False)
    generation_config: dict[str, Any] = field(repr=False)


def resolve_model(
    model: str,
    *,
    revision: str | None = None,
    download_dir: str | None = None,
    token: str | bool | None = None,
    offline: bool | None = None,
    load_format: str = "auto",
    tokenizer: str | None = None,
    tokenizer_revision: str | None = None,
) -> ModelSource:
    """Find a model, download it if need be, and read its configuration.

    Args:
        model: a folder with config.json; a .gguf file; "org/name" on the hub; "org/name:Q4_K_M" or
            "org/name/file.gguf" for one GGUF model of a repository (a local folder takes ":Q4_K_M", too).
        revision: branch, tag or commit on the hub.
        download_dir: where downloads are kept; None is the hub library's cache.
        token: hub access token; None uses the one the user has logged in with.
        offline: True never connects; None connects unless the hub library is set to offline mode.
        load_format: "auto" (safetensors, else pt, else GGUF), one of these, or "dummy" for no weights.
        tokenizer: folder, GGUF file or repository with the tokenizer; None takes the model's own.
        tokenizer_revision: of the tokenizer's repository; None takes `revision`.

    Raises:
        CheckpointError: nothing usable found; the message says what was looked for and what is there.
        ValueError: an unknown load_format.
    """
    load_format = load_format.lower()
    if load_format not in LOAD_FORMATS:
        raise ValueError(f"load_format must be one of {', '.join(LOAD_FORMATS)}, got {load_format!r}")

    def hub(repo_id: str, at: str | None) -> Hub:
        return Hub(repo_id, at, download_dir, token, offline)

    if not model:
        raise CheckpointError("the model's name is empty; give a folder, a .gguf file or a repository (org/name)")
    local = _local(model, load_format)
    path = local or _from_hub(model, hub, revision, load_format)
    tokenizer_path = path
    if tokenizer is not None and tokenizer != model:
        tokenizer_path = _tokenizer_path(tokenizer, hub, tokenizer_revision or revision)
    return _read(path, model, tokenizer_path)


def _local(model: str, load_format: str) -> Path | None:
    """A folder or file on this machine, or None if the name is not one."""
    path = Path(model).expanduser()
    if path.is_file():
        return path
    quantization = None
    if not path.exists() and ":" in model:
        folder, _, quantization = model.rpartition(":")
        path = Path(folder).expanduser()
    if not path.is_dir():
        if _looks_local(model):
            raise CheckpointError(f"{model}: no such folder or file")
        return None
    if quantization is None and load_format != "gguf" and (path / "config.json").is_file():
        return path
    files = [p.relative_to(path).as_posix() for p in path.rglob("*.gguf")]
    chosen = select_gguf(files, quantization)
    if chosen:
        return path / chosen[0]
    wanted = "config.json" if load_format != "gguf" else ".gguf file"
    if quantization is not None:
        wanted = f"GGUF file with {quantization!r} in its name"
    raise CheckpointError(f"{path} has no {wanted}; it holds {_listing(path)}")


def _looks_local(model: str) -> bool:
    return model.startswith(("/", ".", "~")) or "\\" in model or (model.endswith(".gguf") and model.count("/") < 2)


def _listing(folder: Path, limit: int = 12) -> str:
    names = sorted(p.name + ("/" if p.is_dir() else "") for p in folder.iterdir())
    shown = ", ".join(names[:limit]) or "nothing"
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def _from_hub(model: str, hub: _OpenHub, revision: str | None, load_format: str) -> Path:
    """Download a hub model; returns the folder or the GGUF file."""
    repo_id, file, quantization = _split_repo(model)
    repo = hub(repo_id, revision)
    files, is_cached = repo.files()
    if file is None and quantization is None and load_format != "gguf":
        weights = weight_format(files, load_format) if "config.json" in files else None
        if weights is not None:
            patterns = (*DESCRIPTION_PATTERNS, *WEIGHT_PATTERNS[weights])
            return repo.download(patterns, IGNORED_PATTERNS)
    if file is not None:
        chosen = select_gguf([f for f in files if _same_model(f, file)], None)
    else:
        chosen = select_gguf(files, quantization)
    if not chosen or load_format in ("safetensors", "pt"):
        raise CheckpointError(_nothing_found(model, files, load_format, is_cached))
    return repo.download(chosen) / chosen[0]


def _split_repo(model: str) -> tuple[str, str | None, str | None]:
    """(repository, GGUF file, quantisation) of a hub name."""
    repo_id, _, quantization = model.partition(":")
    file = None
    if repo_id.endswith(".gguf") and repo_id.count("/") >= 2 and not quantization:
        org, name, file = repo_id.split("/", 2)
        repo_id = f"{org}/{name}"
    if not is_repo_id(repo_id):
        raise CheckpointError(
            f"{model!r} is neither a folder or file here nor a repository id (org/name, org/name:QUANT)"
        )
    return repo_id, file, quantization or None


def _same_model(path: str, wanted: str) -> bool:
    """Whether a file is the wanted one or another shard of it."""
    if "-of-" not in wanted:
        return path == wanted
    return path.rpartition("-of-")[0][:-5] == wanted.rpartition("-of-")[0][:-5] and path[-9:] == wanted[-9:]


def _nothing_found(model: str, files: list[str], load_format: str, is_cached: bool) -> str:
    what = {"auto": "config.json with weights, nor a GGUF file", "gguf": "matching GGUF file"}.get(
        load_format, f"config.json with {load_format} weights"
    )
    shown = ", ".join(sorted(files)[:12]) or "nothing"
    more = f" and {len(files) - 12} more" if len(files) > 12 else ""
    where = " in the cache, and there is no connection" if is_cached else ""
    return f"{model!r} has no {what}{where}; it holds {shown}{more}"


def _tokenizer_path(tokenizer: str, hub: _OpenHub, revision: str | None) -> Path:
    """The folder or GGUF file of a tokenizer given apart from its model."""
    path = Path(tokenizer).expanduser()
    if path.exists():
        return path
    if _looks_local(tokenizer):
        raise CheckpointError(f"tokenizer {tokenizer}: no such folder or file")
    repo_id, file, quantization = _split_repo(tokenizer)
    if file is not None or quantization is not None:
        return _from_hub(tokenizer, hub, revision, "gguf")
    return hub(repo_id, revision).download(DESCRIPTION_PATTERNS, IGNORED_PATTERNS)


def _read(path: Path, name: str, tokenizer_path: Path) -> ModelSource:
    if path.is_file():
        checkpoint = GGUFCheckpoint(path)
        return ModelSource(
            path=checkpoint.path,
            kind="gguf",
            name=name,
            tokenizer_path=checkpoint.path if tokenizer_path == path else tokenizer_path,
            hf_config=hf_config_from_gguf(checkpoint),
            generation_config=generation_config_from_gguf(checkpoint),
        )
    generation = path / "generation_config.json"
    return ModelSource(
        path=path,
        kind="folder",
        name=name,
        tokenizer_path=tokenizer_path,
        hf_config=_read_config(path / "config.json"),
        generation_config=_read_json(generation) if generation.is_file() else {},
    )


def _read_config(path: Path) -> dict[str, Any]:
    config = _read_json(path)
    architectures = config.get("architectures")
    if architectures is not None and not (
        isinstance(architectures, list) and all(isinstance(name, str) for name in architectures)
    ):
        raise CheckpointError(f"{path}: architectures must be a list of names, not {architectures!r}")
    return config


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise CheckpointError(f"{path.parent} has no {path.name}; it holds {_listing(path.parent)}")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value
