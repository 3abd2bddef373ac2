"""The door: prompt and sampling parameters become an EngineRequest, or a RequestError naming the field."""

import operator
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from jaxllm.engine.protocol import EngineRequest, ModelInfo
from jaxllm.errors import RequestError
from jaxllm.generation_config import default_sampling_params, token_ids_of
from jaxllm.sampling_params import SamplingParams
from jaxllm.text.tokenizer import Tokenizer

MAX_BAD_WORDS = 1024
MAX_BAD_WORD_CHARACTERS = 256
_NORMALISER_SLACK = 4
"""Text may shrink this much in a tokenizer's normaliser before its tokens are counted."""


class PromptDict(TypedDict, total=False):
    """A prompt as a dict: `prompt` (text) or `prompt_token_ids`, and optionally `cache_salt`."""

    prompt: str
    prompt_token_ids: list[int]
    cache_salt: str


Prompt = str | Sequence[int] | PromptDict


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request that passed the door.

    Attributes:
        engine_request: what the engine gets: limits resolved, n sequences to generate.
        sampling: what the caller asked for.
        prompt: the prompt's text, None when it came as token ids.
    """

    engine_request: EngineRequest
    sampling: SamplingParams
    prompt: str | None


class InputProcessor:
    """Checks and tokenises prompts for one model. Safe to use from several threads.

    Args:
        tokenizer: None leaves prompts of token ids only.
        model_info: the engine's limits.
        generation_config: the model's generation_config.json; its sampling values are the defaults, its
            eos_token_id ends sequences. Empty or None: no defaults of the model's.
        eos_token_ids: ids that end a sequence, besides the tokenizer's and the configuration's.

    Attributes:
        default_sampling_params: the model's own defaults, under SamplingParams' names.
        eos_token_ids: every id that ends a sequence.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        model_info: ModelInfo,
        *,
        generation_config: Mapping[str, Any] | None = None,
        eos_token_ids: Sequence[int] = (),
    ):
        config = dict(generation_config or {})
        self.tokenizer = tokenizer
        self.model_info = model_info
        self.default_sampling_params = default_sampling_params(config)
        ids = [*token_ids_of(config.get("eos_token_id")), *eos_token_ids]
        if tokenizer is not None and tokenizer.eos_token_id is not None:
            ids.insert(0, tokenizer.eos_token_id)
        self.eos_token_ids = [i for i in dict.fromkeys(ids) if 0 <= i < model_info.vocab_size]
        self._longest_token: int | None = None

    def sampling_params(self, **given: Any) -> SamplingParams:
        """Sampling parameters from what a caller gave (None: not given), over the model's defaults."""
        chosen = {k: v for k, v in given.items() if v is not None or k == "max_tokens"}
        return SamplingParams.from_optional(**(self.default_sampling_params | chosen))

    def prepare(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        add_special_tokens: bool = True,
        arrival_time: float | None = None,
        strict: bool = False,
    ) -> PreparedRequest:
        """Check everything and make the engine's request.

        Args:
            prompt: text, token ids, or a dict of either.
            sampling: None takes the model's defaults.
            request_id: None makes one up.
            priority: lower runs first.
            cache_salt: requests share cached prefixes only with the same salt.
            add_special_tokens: let the tokenizer add BOS; False for text from a chat template.
            arrival_time: time.time() at the door; None is now.
            strict: refuse an empty text and a max_tokens above the model's context instead of adding BOS
                and cutting; what the HTTP interface does.

        Raises:
            RequestError: naming the field at fault.
        """
        sampling = self.sampling_params() if sampling is None else sampling
        text, tokens, salt = self._split(prompt, strict)
        if tokens is None:
            tokens = self._encode(text or "", sampling, add_special_tokens)
        elif (keep := self._truncation(sampling)) is not None:
            tokens = tokens[-keep:]
        salt = cache_salt if cache_salt is not None else salt
        if salt == "":
            raise RequestError("cache_salt must be a non-empty string.", "cache_salt")
        self._check_tokens(tokens)
        self._check_sampling(sampling)
        bad_words = self._bad_word_tokens(sampling.bad_words)
        self._check_something_is_left(sampling, bad_words)
        request = EngineRequest(
            request_id=request_id or uuid.uuid4().hex,
            prompt_tokens=tokens,
            sampling=self._resolve(sampling, len(tokens), strict),
            arrival_time=time.time() if arrival_time is None else arrival_time,
            priority=priority,
            cache_salt=salt,
            eos_token_ids=self.eos_token_ids,
            bad_word_tokens=bad_words,
        )
        return PreparedRequest(request, sampling, text)

    def _split(self, prompt: Any, strict: bool) -> tuple[str | None, list[int] | None, str | None]:
        """A prompt in any form -> (text, token ids, cache salt)."""
        salt = None
        if isinstance(prompt, Mapping):
            unknown = sorted(set(prompt) - {"prompt", "prompt_token_ids", "cache_salt"})
            if unknown:
                raise RequestError(
                    f"prompt keys {unknown} are not supported; known: prompt, prompt_token_ids, cache_salt.",
                    "prompt",
                )
            salt = prompt.get("cache_salt")
            tokens, text = prompt.get("prompt_token_ids"), prompt.get("prompt")
        elif isinstance(prompt, str):
            text, tokens = prompt, None
        else:
            text, tokens = None, prompt
        if text is not None and not isinstance(text, str):
            raise RequestError(f"the prompt's text must be a string, got {type(text).__name__}.", "prompt")
        if tokens is not None:
            return text, _as_token_list(tokens), salt
        if text is None or (strict and not text):
            raise RequestError("the prompt must not be empty.", "prompt")
        return text, None, salt

    def _encode(self, text: str, sampling: SamplingParams, add_special_tokens: bool) -> list[int]:
        if self.tokenizer is None:
            raise RequestError(
                "this engine has no tokenizer: give the prompt as token ids (prompt_token_ids).", "prompt"
            )
        keep = self._truncation(sampling)
        limit = self.model_info.max_model_len
        if keep is None and len(text) > limit:
            # A text that cannot fit is not worth minutes of tokenising.
            if self._longest_token is None:
                self._longest_token = self.tokenizer.longest_token()
            most = limit * self._longest_token * _NORMALISER_SLACK
            if len(text) > most:
                raise RequestError(
                    f"This model's maximum context length is {limit} tokens. However, your prompt has "
                    f"{len(text)} characters, more than {most}. Please reduce the length of the prompt.",
                    "input_tokens",
                )
        return self.tokenizer.encode(text, add_special_tokens, keep)

    def _truncation(self, sampling: SamplingParams) -> int | None:
        keep, limit = sampling.truncate_prompt_tokens, self.model_info.max_model_len
        if keep == -1:
            return max(1, limit - (sampling.max_tokens or 1))
        if keep is not None and keep > limit:
            raise RequestError(
                f"truncate_prompt_tokens value ({keep}) is greater than max_model_len ({limit}). "
                "Please request a smaller truncation size.",
                "truncate_prompt_tokens",
            )
        return keep

    def _check_tokens(self, tokens: list[int]) -> None:
        if not tokens:
            raise RequestError("the prompt must not be empty.", "prompt")
        lowest, highest, size = min(tokens), max(tokens), self.model_info.vocab_size
        if lowest < 0 or highest >= size:
            bad = lowest if lowest < 0 else highest
            raise RequestError(f"Token id {bad} is out of vocabulary: ids are 0 to {size - 1}.", "prompt_token_ids")

    def _check_sampling(self, sampling: SamplingParams) -> None:
        size, most = self.model_info.vocab_size, self.model_info.max_logprobs
        for name, kind in (("logprobs", "sample"), ("prompt_logprobs", "prompt")):
            count = getattr(sampling, name)
            count = size if count == -1 else count
            if count is not None and count > most:
                raise RequestError(
                    f"Requested {kind} logprobs of {count}, which is greater than max allowed: {most}", name
                )
        for name in ("logit_bias", "allowed_token_ids"):
            unknown = [token for token in getattr(sampling, name) or () if not 0 <= token < size]
            if unknown:
                raise RequestError(
                    f"token_id(s) {unknown[:10]} in {name} contain out-of-vocab token ids. Vocabulary size: {size}",
                    name,
                )

    def _check_something_is_left(self, sampling: SamplingParams, bad_words: list[list[int]]) -> None:
        """Refuse constraints that may leave no token to sample."""
        banned = {word[-1] for word in bad_words}
        if sampling.allowed_token_ids is None:
            if len(banned) >= self.model_info.vocab_size:
                raise RequestError("bad_words may leave no token at all.", "bad_words")
            return
        allowed = set(sampling.allowed_token_ids) - banned
        if not allowed:
            raise RequestError("bad_words may leave none of allowed_token_ids.", "bad_words")
        if sampling.min_tokens > 0 and not allowed.difference(sampling.stop_token_ids, self.eos_token_ids):
            raise RequestError(
                "allowed_token_ids holds only tokens that end the output, which min_tokens forbids.",
                "allowed_token_ids",
            )

    def _resolve(self, sampling: SamplingParams, num_prompt: int, strict: bool) -> SamplingParams:
        """The engine's sampling parameters: max_tokens a number that fits, best_of spelled as n."""
        max_tokens = self._max_tokens(sampling.max_tokens, num_prompt, strict)
        size = self.model_info.vocab_size
        logprobs = size if sampling.logprobs == -1 else sampling.logprobs
        if logprobs is None and sampling.num_sequences > sampling.n:
            logprobs = 0  # best_of ranks by the sampled tokens' log-probabilities
        return sampling.clone(
            n=sampling.num_sequences,
            best_of=None,
            max_tokens=max_tokens,
            min_tokens=min(sampling.min_tokens, max_tokens),
            logprobs=logprobs,
            prompt_logprobs=size if sampling.prompt_logprobs == -1 else sampling.prompt_logprobs,
            # An id outside the vocabulary never comes, so it need not be watched for.
            stop_token_ids=[token for token in sampling.stop_token_ids if 0 <= token < size],
        )

    def _max_tokens(self, asked: int | None, num_prompt: int, strict: bool) -> int:
        limit, capacity = self.model_info.max_model_len, self.model_info.kv_capacity_tokens
        if num_prompt > limit:
            raise RequestError(
                f"This model's maximum context length is {limit} tokens. However, your request has "
                f"{num_prompt} input tokens. Please reduce the length of the input messages.",
                "input_tokens",
            )
        if strict and asked is not None and asked > limit:
            raise RequestError(
                f"max_tokens={asked} cannot be greater than max_model_len={limit}: "
                f"this model's maximum context length is {limit} tokens.",
                "max_tokens",
            )
        if num_prompt == limit:
            raise RequestError(
                f"This model's maximum context length is {limit} tokens. However, your request has {limit} "
                "input tokens, which leaves no room for output: max_tokens must be at least 1, got 0.",
                "max_tokens",
            )
        room = limit - num_prompt
        needed = num_prompt + (1 if asked is None else min(asked, room))
        if needed > capacity:
            raise RequestError(
                f"This request needs a KV cache of {needed} tokens (prompt and max_tokens), and the whole "
                f"cache holds {capacity}. Reduce the prompt or max_tokens, or give the engine more memory.",
                "input_tokens" if num_prompt >= capacity else "max_tokens",
            )
        return min(room, capacity - num_prompt) if asked is None else min(asked, room)

    def _bad_word_tokens(self, words: list[str]) -> list[list[int]]:
        if not words:
            return []
        if self.tokenizer is None:
            raise RequestError("bad_words need a tokenizer, and this engine has none.", "bad_words")
        if len(words) > MAX_BAD_WORDS or max(map(len, words)) > MAX_BAD_WORD_CHARACTERS:
            raise RequestError(
                f"bad_words may be {MAX_BAD_WORDS} words of {MAX_BAD_WORD_CHARACTERS} characters, got {len(words)} "
                f"words, the longest of {max(map(len, words))} characters.",
                "bad_words",
            )
        size = self.model_info.vocab_size
        return [ids for ids in self.tokenizer.bad_word_token_ids(words) if max(ids) < size]


def _as_token_list(tokens: Any) -> list[int]:
    """Token ids as Python's integers; numpy's are taken, too."""
    if isinstance(tokens, (bytes, bytearray)) or not hasattr(tokens, "__iter__"):
        raise RequestError(f"the prompt must be a string, token ids or a dict, got {type(tokens).__name__}.", "prompt")
    ids = list(tokens)
    if all(type(token) is int for token in ids):
        return ids
    for position, token in enumerate(ids):
        if isinstance(token, bool) or not hasattr(token, "__index__"):
            raise RequestError(f"token ids must be integers, got {token!r}.", "prompt_token_ids")
        ids[position] = operator.index(token)
    return ids
