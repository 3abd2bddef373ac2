"""Files of a model repository on the hub, downloaded into the cache once and found there afterwards."""

import fnmatch
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from jaxllm.errors import CheckpointError

_log = logging.getLogger(__name__)

# The base of all errors of whichever HTTP library this version of huggingface_hub uses.
_HTTPError: type[Exception] = next(base for base in HfHubHTTPError.__mro__ if base.__name__ == "HTTPError")

# What describes a model and its tokenizer; weights are added by format.
DESCRIPTION_PATTERNS = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
WEIGHT_PATTERNS = {"safetensors": ("*.safetensors",), "pt": ("*.bin", "*.pt"), "dummy": ()}
# Sub-folders hold exports for other engines; consolidated files are a second copy of the weights.
IGNORED_PATTERNS = ("*/*", "consolidated*", "training_args.bin", "optimizer.*")
_REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


@dataclass(frozen=True)
class Hub:
    """One repository at one revision, and how it may be reached.

    Attributes:
        repo_id: "org/name" (or a bare "name").
        revision: branch, tag or commit; None is the default branch.
        cache_dir: where downloads are kept; None is the hub library's own cache.
        token: access token; None uses the one the user has logged in with.
        offline: True never connects; None connects unless the hub library is set to offline mode.
    """

    repo_id: str
    revision: str | None = None
    cache_dir: str | None = None
    token: str | bool | None = None
    offline: bool | None = None

    @property
    def is_offline(self) -> bool:
        """Whether only the cache may be used."""
        return constants.HF_HUB_OFFLINE if self.offline is None else self.offline

    def files(self) -> tuple[list[str], bool]:
        """Paths of all files of the repository, and False; without connection those in the cache, and True.

        Raises:
            CheckpointError: no such repository or revision, no access, or no connection and nothing cached.
        """
        if not self.is_offline:
            try:
                return HfApi(token=self.token).list_repo_files(self.repo_id, revision=self.revision), False
            except HfHubHTTPError as error:
                if error.response.status_code < 500:
                    raise self._explain(error) from error
                _log.warning("the model hub answers %s; looking in the cache", error.response.status_code)
            except (HFValidationError, LocalTokenNotFoundError) as error:
                raise self._explain(error) from error
            except (_HTTPError, OfflineModeIsEnabled) as error:
                _log.warning("the model hub is not reachable (%s); looking for %s in the cache", error, self.repo_id)
        folder = self._snapshot((), local_only=True)
        return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()), True

    def download(self, patterns: Sequence[str], ignored: Sequence[str] = ()) -> Path:
        """Bring the files that match into the cache; returns the folder that holds them.

        Raises:
            CheckpointError: as `files`; also when some of them are missing and there is no connection.
        """
        return self._snapshot(patterns, ignored, local_only=self.is_offline)

    def _snapshot(self, patterns: Sequence[str], ignored: Sequence[str] = (), *, local_only: bool) -> Path:
        try:
            return Path(
                snapshot_download(
                    self.repo_id,
                    revision=self.revision,
                    cache_dir=self.cache_dir,
                    token=self.token,
                    local_files_only=local_only,
                    allow_patterns=list(patterns),
                    ignore_patterns=list(ignored),
                )
            )
        except (HfHubHTTPError, HFValidationError, EntryNotFoundError, OSError, _HTTPError) as error:
            raise self._explain(error) from error

    def _explain(self, error: Exception) -> CheckpointError:
        """The error in words that say what to do."""
        what = f"{self.repo_id!r}" + (f" at revision {self.revision!r}" if self.revision else "")
        token = "the token given has no access" if self.token else "no token was given"
        if isinstance(error, GatedRepoError):
            return CheckpointError(
                f"{what} is gated: ask for access on its page, then give a token that has it ({token})"
            )
        if isinstance(error, RevisionNotFoundError):
            return CheckpointError(f"model {self.repo_id!r} has no revision {self.revision!r}")
        if isinstance(error, RepositoryNotFoundError):
            return CheckpointError(
                f"{what} is neither a folder or file here nor a repository on the hub; "
                f"if it is a private one, give a token ({token})"
            )
        if isinstance(error, LocalEntryNotFoundError):
            why = "offline mode is on" if self.is_offline else "the model hub is not reachable"
            where = self.cache_dir or constants.HF_HUB_CACHE
            return CheckpointError(f"{what} is not (wholly) in the cache {where} and {why}")
        if isinstance(error, HFValidationError):
            return CheckpointError(f"{self.repo_id!r} is neither a folder or file here nor a repository id (org/name)")
        if isinstance(error, HfHubHTTPError) and error.response.status_code in (401, 403):
            return CheckpointError(f"the hub refuses access to {what} ({token})")
        return CheckpointError(f"downloading {what} failed: {error}")


def is_repo_id(name: str) -> bool:
    """Whether a name could be a repository's: "org/name" or a bare "name"."""
    return _REPO_ID.fullmatch(name) is not None and ".." not in name and not name.endswith((".gguf", "/"))


def weight_format(files: Sequence[str], load_format: str) -> str | None:
    """The key of WEIGHT_PATTERNS to download, or None if the files hold no such weights.

    "auto" prefers safetensors; another format is itself.
    """
    top = [f for f in files if "/" not in f]
    candidates = ("safetensors", "pt") if load_format == "auto" else (load_format,)
    for name in candidates:
        patterns = WEIGHT_PATTERNS[name]
        if not patterns or any(fnmatch.fnmatch(f, p) for f in top for p in patterns):
            return name
    return None


def select_gguf(files: Sequence[str], quantization: str | None) -> list[str]:
    """The files of one GGUF model among many: one, or all shards in order; empty if none matches.

    Args:
        files: paths of a repository or folder.
        quantization: such as "Q4_K_M", found in the file or folder name in any case; None takes any.

    Raises:
        CheckpointError: several models match; they are named.
    """
    found = [f for f in files if f.endswith(".gguf") and not PurePosixPath(f).name.lower().startswith("mmproj")]
    if quantization is not None:
        mark = re.compile(rf"(?i)(?:^|[-._/]){re.escape(quantization)}(?=[-./]|$)")
        found = [f for f in found if mark.search(f)]
    models: dict[str, list[str]] = {}
    for path in sorted(found):
        models.setdefault(re.sub(r"-\d{5}-of-\d{5}\.gguf$", ".gguf", path), []).append(path)
    if len(models) > 1:
        raise CheckpointError(f"choose one of the GGUF models: {', '.join(models)}")
    return next(iter(models.values()), [])
