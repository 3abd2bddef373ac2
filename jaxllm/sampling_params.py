"""SamplingParams: how one request samples, validated once; the same names and rules as vLLM's.

Pure Python: the front end fills it, the engine reads it, msgspec carries it between processes.
"""

import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any, Self

from jaxllm.errors import RequestError

GREEDY_BELOW = 1e-5
"""A temperature under this is greedy decoding."""
MIN_TEMPERATURE = 0.01
"""Sampling temperatures under this are raised to it: logits divided by less overflow."""
MAX_SEQUENCES = 16384
"""The most sequences one request may ask for with `n` or `best_of`."""
MAX_LOGIT_BIAS = 100.0


class RequestOutputKind(Enum):
    """What each RequestOutput of a request holds.

    CUMULATIVE: everything so far. DELTA: what is new since the last one. FINAL_ONLY: one output
    at the end.
    """

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one request.

    Invalid values raise RequestError with `param` set. Values are normalised on construction: `stop`
    becomes a list, seed -1 None, top_k -1 0, a temperature below 1e-5 exactly 0.0 with top_p,
    top_k and min_p switched off.

    Attributes:
        n: sequences returned for the prompt.
        best_of: sequences generated, of which the n with the highest cumulative log-probability
            are returned; None means n.
        presence_penalty: -2..2, subtracted once from tokens that occurred in the output.
        frequency_penalty: -2..2, subtracted per occurrence in the output.
        repetition_penalty: > 0; logits of tokens in prompt or output are divided (positive) or
            multiplied (negative) by it.
        temperature: >= 0; 0 is greedy.
        top_p: (0, 1]; the smallest set of tokens with that probability mass is kept.
        top_k: the k most probable tokens are kept; 0 or -1 keeps all.
        min_p: 0..1; tokens below min_p times the highest probability are dropped.
        seed: makes the request reproducible; sequence i uses seed + i. None or -1: unseeded.
        stop: strings that end a sequence; not part of the text unless include_stop_str_in_output.
        stop_token_ids: token ids that end a sequence, besides EOS.
        include_stop_str_in_output: keep the stop string (or the stop token's text) in the text.
        ignore_eos: go on after EOS.
        max_tokens: most output tokens of a sequence; None goes to the context's end.
        min_tokens: EOS, stop tokens and stop strings do not end a sequence before.
        logprobs: log-probabilities of the k most probable tokens and of the sampled one, per output
            token; 0 gives the sampled one only, -1 the whole vocabulary.
        prompt_logprobs: the same for each prompt token.
        detokenize: make text; without it outputs have token ids only.
        skip_special_tokens: leave special tokens out of the text.
        spaces_between_special_tokens: keep the spaces a tokenizer puts between special tokens.
        output_kind: what each RequestOutput holds.
        logit_bias: token id -> value added to its logit, clamped to -100..100.
        allowed_token_ids: only these may be generated.
        bad_words: words that are not generated, with and without a leading space.
        truncate_prompt_tokens: keep the last k prompt tokens; -1 keeps as many as fit.
    """

    n: int = 1
    best_of: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] = field(default_factory=list)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] = field(default_factory=list)
    truncate_prompt_tokens: int | None = None

    def __post_init__(self):
        self._normalise()
        self._check_counts()
        self._check_numbers()
        self._check_lengths()
        self._check_stops()
        self._check_token_lists()
        if self.is_greedy:
            for name, value in (("temperature", 0.0), ("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
                object.__setattr__(self, name, value)
            if self.n > 1:
                raise RequestError(f"n must be 1 when using greedy sampling, got {self.n}.", "n")
        elif self.temperature < MIN_TEMPERATURE:
            object.__setattr__(self, "temperature", MIN_TEMPERATURE)

    @property
    def is_greedy(self) -> bool:
        """True when the most probable token is always taken."""
        return self.temperature < GREEDY_BELOW

    @property
    def stop_strings(self) -> list[str]:
        """`stop` as the list it was normalised to."""
        return self.stop if isinstance(self.stop, list) else []

    @property
    def num_sequences(self) -> int:
        """Sequences to generate: best_of or n. Greedy ones are all equal, so one serves for best_of."""
        return self.n if self.best_of is None or self.is_greedy else self.best_of

    @classmethod
    def from_optional(cls, **values: Any) -> Self:
        """Build from values that may be None, where None means the default.

        `max_tokens=None` keeps its own meaning (to the context's end). An unknown name is a TypeError.
        """
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise TypeError(f"unknown sampling parameters {unknown}; known: {sorted(known)}")
        given: dict[str, Any] = {k: v for k, v in values.items() if v is not None or k == "max_tokens"}
        return cls(**given)

    def clone(self, **changes: Any) -> Self:
        """A copy with `changes`, validated again; lists and dicts are not shared with the original."""
        copies = {
            f.name: value.copy() for f in fields(self) if isinstance(value := getattr(self, f.name), (list, dict))
        }
        return replace(self, **(copies | changes))

    def _normalise(self) -> None:
        put = object.__setattr__
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be true or false, got {getattr(self, name)!r}.", name)
        if not isinstance(self.output_kind, RequestOutputKind):
            raise RequestError(f"output_kind must be a RequestOutputKind, got {self.output_kind!r}.", "output_kind")
        # None is what callers of vLLM pass for "no list".
        put(self, "stop", [self.stop] if isinstance(self.stop, str) else _list("stop", self.stop))
        put(self, "bad_words", _list("bad_words", self.bad_words))
        ids = [_integer("stop_token_ids", token) for token in _list("stop_token_ids", self.stop_token_ids)]
        put(self, "stop_token_ids", list(dict.fromkeys(ids)))
        if self.allowed_token_ids is not None:
            allowed = _list("allowed_token_ids", self.allowed_token_ids)
            put(self, "allowed_token_ids", [_integer("allowed_token_ids", token) for token in allowed])
        if self.seed == -1:
            put(self, "seed", None)
        if self.top_k == -1:
            put(self, "top_k", 0)
        for name in ("logprobs", "prompt_logprobs"):
            if isinstance(getattr(self, name), bool):
                put(self, name, 1 if getattr(self, name) else None)
        if self.logit_bias is not None:
            put(self, "logit_bias", _clean_logit_bias(self.logit_bias))

    def _check_counts(self) -> None:
        put = object.__setattr__
        for name in ("n", "top_k", "min_tokens"):
            put(self, name, _integer(name, getattr(self, name)))
        optional = ("best_of", "seed", "max_tokens", "logprobs", "prompt_logprobs", "truncate_prompt_tokens")
        for name in optional:
            if getattr(self, name) is not None:
                put(self, name, _integer(name, getattr(self, name)))
        for name in ("n", "best_of"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise RequestError(f"{name} must be at least 1, got {value}.", name)
            if value is not None and value > MAX_SEQUENCES:
                raise RequestError(f"{name} must be at most {MAX_SEQUENCES}, got {value}.", name)
        if self.best_of is not None and self.best_of < self.n:
            raise RequestError(f"best_of must be at least n={self.n}, got {self.best_of}.", "best_of")
        if self.top_k < 0:
            raise RequestError(f"top_k must be 0 (disable), or at least 1, got {self.top_k}.", "top_k")
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise RequestError(f"seed must fit into 64 bits, got {self.seed}.", "seed")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and value < -1:
                raise RequestError(f"{name} must be non-negative or -1, got {value}.", name)

    def _check_numbers(self) -> None:
        penalties = ("presence_penalty", "frequency_penalty", "repetition_penalty")
        for name in (*penalties, "temperature", "top_p", "min_p"):
            value = _number(name, getattr(self, name))
            if not math.isfinite(value):
                raise RequestError(f"{name} must be finite, got {value}.", name)
            object.__setattr__(self, name, value)
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2.0 <= getattr(self, name) <= 2.0:
                raise RequestError(f"{name} must be in [-2, 2], got {getattr(self, name)}.", name)
        if self.repetition_penalty <= 0.0:
            raise RequestError(
                f"repetition_penalty must be greater than zero, got {self.repetition_penalty}.",
                "repetition_penalty",
            )
        if self.temperature < 0.0:
            raise RequestError(f"temperature must be non-negative, got {self.temperature}.", "temperature")
        if not 0.0 < self.top_p <= 1.0:
            raise RequestError(f"top_p must be in (0, 1], got {self.top_p}.", "top_p")
        if not 0.0 <= self.min_p <= 1.0:
            raise RequestError(f"min_p must be in [0, 1], got {self.min_p}.", "min_p")

    def _check_lengths(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise RequestError(f"max_tokens must be at least 1, got {self.max_tokens}.", "max_tokens")
        if self.min_tokens < 0:
            raise RequestError(f"min_tokens must be greater than or equal to 0, got {self.min_tokens}.", "min_tokens")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens must be less than or equal to max_tokens={self.max_tokens}, got {self.min_tokens}.",
                "min_tokens",
            )
        keep = self.truncate_prompt_tokens
        if keep is not None and keep != -1 and keep < 1:
            raise RequestError(
                f"truncate_prompt_tokens must be -1 or at least 1, got {keep}.", "truncate_prompt_tokens"
            )

    def _check_stops(self) -> None:
        for text in self.stop_strings:
            if not isinstance(text, str):
                raise RequestError(f"stop must be a string or strings, got {text!r} among them.", "stop")
            if not text:
                raise RequestError("stop cannot contain an empty string.", "stop")
        if self.stop and not self.detokenize:
            raise RequestError(
                "stop strings are only supported when detokenize is True. Set detokenize=True to use stop.",
                "stop",
            )
        for word in self.bad_words:
            if not isinstance(word, str) or not word:
                raise RequestError(f"bad_words must be non-empty strings, got {word!r} among them.", "bad_words")

    def _check_token_lists(self) -> None:
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError("allowed_token_ids must not be empty.", "allowed_token_ids")


_FLAGS = (
    "include_stop_str_in_output",
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
)


def _integer(name: str, value: Any) -> int:
    """As Python's own; numpy's integers are taken, too."""
    if type(value) is int:
        return value
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise RequestError(f"{name} must be an integer, got {value!r}.", name)
    return operator.index(value)


def _number(name: str, value: Any) -> float:
    """As Python's own; numpy's numbers are taken, too. Too large a one is infinite."""
    if isinstance(value, (bool, str, bytes)) or not hasattr(value, "__float__"):
        raise RequestError(f"{name} must be a number, got {value!r}.", name)
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _list(name: str, value: Any) -> list[Any]:
    if value is None:
        return []
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise RequestError(f"{name} must be a list, got {value!r}.", name)
    return list(value)


def _clean_logit_bias(bias: Any) -> dict[int, float]:
    """Keys to int (JSON objects have string keys), values clamped to -100..100."""
    if not isinstance(bias, Mapping):
        raise RequestError(f"logit_bias must map token ids to numbers, got {bias!r}.", "logit_bias")
    clean = {}
    for key, given in bias.items():
        try:
            token = int(key) if isinstance(key, str) else _integer("logit_bias", key)
        except ValueError:
            raise RequestError(f"logit_bias keys must be token ids (integers), got {key!r}.", "logit_bias") from None
        value = _number("logit_bias", given)
        if math.isnan(value):
            raise RequestError(f"logit_bias of token {token} must be a number, got {given!r}.", "logit_bias")
        clean[token] = min(MAX_LOGIT_BIAS, max(-MAX_LOGIT_BIAS, value))
    return clean
