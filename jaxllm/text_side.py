"""What a front end needs of a model: where it is, its tokenizer and sampling defaults. No weights, no device."""

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from converters.source import ModelSource, resolve_model
from jaxllm.engine_args import EngineArgs
from jaxllm.errors import CheckpointError
from jaxllm.generation_config import GENERATION_KEYS, default_sampling_params, token_ids_of
from jaxllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxllm.text.tokenizer import Tokenizer


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TextSide:
    """What the front end needs of a model: no weights, no device.

    Attributes:
        tokenizer: None if the engine takes and gives token ids only.
        generation_config: sampling defaults and EOS ids.
        eos_token_ids: of the model's configuration.
        source: where the model is.
    """

    tokenizer: "Tokenizer | None"
    generation_config: dict[str, Any]
    eos_token_ids: list[int]
    source: ModelSource


def find_model(args: EngineArgs) -> ModelSource:
    """Resolve, and download if need be, the model of these arguments."""
    return resolve_model(
        args.model,
        revision=args.revision,
        download_dir=args.download_dir,
        token=args.hf_token,
        load_format=args.load_format,
        tokenizer=args.tokenizer,
        tokenizer_revision=args.tokenizer_revision,
    )


def build_text_side(args: EngineArgs, source: ModelSource) -> TextSide:
    """Tokenizer and sampling defaults.

    Raises:
        CheckpointError: no tokenizer where one is needed.
    """
    tokenizer = None
    path = source.tokenizer_path
    if not args.skip_tokenizer_init:
        # Imported here: seconds, which an engine without text need not pay.
        from converters.gguf_tokenizer import tokenizer_from_gguf
        from jaxllm.text.tokenizer import Tokenizer, load_tokenizer

        if path.is_file():
            tokenizer = Tokenizer(tokenizer_from_gguf(path))
        elif _has_tokenizer(path):
            tokenizer = load_tokenizer(path, mode=args.tokenizer_mode, trust_remote_code=args.trust_remote_code)
        elif args.load_format != "dummy":
            raise CheckpointError(
                f"{path} holds no tokenizer (tokenizer.json, tokenizer.model, vocab.json); name one with tokenizer, "
                "or set skip_tokenizer_init to work with token ids"
            )
        else:
            logger.warning("%s holds no tokenizer: prompts must be token ids", path)
    config = _generation_config(args, source)
    _check_defaults(config)
    try:
        eos = token_ids_of(source.hf_config.get("eos_token_id"))
    except ValueError as error:
        raise CheckpointError(f"{source.path}/config.json: {error}") from None
    return TextSide(tokenizer, config, eos, source)


def _check_defaults(config: dict[str, Any]) -> None:
    """Now, or every request that leaves them alone would be refused."""
    try:
        SamplingParams.from_optional(**default_sampling_params(config))
        token_ids_of(config.get("eos_token_id"))
    except ValueError as error:
        raise CheckpointError(
            f"the sampling defaults (generation_config, override_generation_config): {error}"
        ) from None


def _has_tokenizer(folder: Path) -> bool:
    names = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt", "spiece.model")
    return any((folder / name).exists() for name in names)


def _generation_config(args: EngineArgs, source: ModelSource) -> dict[str, Any]:
    config = dict(source.generation_config)
    if args.generation_config == "vllm":
        # Neutral sampling, but what ends a text is a fact of the model.
        config = {key: value for key, value in config.items() if key == "eos_token_id"}
    elif args.generation_config != "auto":
        folder = Path(args.generation_config)
        path = folder / "generation_config.json" if folder.is_dir() else folder
        if not path.is_file():
            raise CheckpointError(
                f"generation_config {args.generation_config!r} is neither auto, vllm nor a folder with one"
            )
        config = json.loads(path.read_text())
    override = args.override_generation_config or {}
    unknown = sorted(set(override) - set(GENERATION_KEYS))
    if unknown:
        raise ValueError(
            f"override_generation_config has no effect with {unknown}; known: {', '.join(GENERATION_KEYS)}"
        )
    return config | override
