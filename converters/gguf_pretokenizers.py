"""How byte-level BPE vocabularies split text before merging, by GGUF's `tokenizer.ggml.pre`.

A GGUF file names the splitting rule and does not carry it. The patterns are those of the models' own
tokenizers, in the regular expression dialect of the `tokenizers` library (Oniguruma).
"""

from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers
from tokenizers.pre_tokenizers import PreTokenizer

from jaxllm.errors import CheckpointError

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_NEWLINES = r"\s*[\r\n]+"
_SPACES = r"\s+(?!\S)|\s+"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT = r"\p{N}"
_THREE_DIGITS = r"[0-9][0-9][0-9]"


def _pattern(*alternatives: str) -> str:
    return "|".join(alternatives)


_LLAMA3 = _pattern(_CONTRACTIONS, _WORD, r"\p{N}{1,3}", _PUNCTUATION, _NEWLINES, _SPACES)
_QWEN2 = _pattern(_CONTRACTIONS, _WORD, r"\p{N}", _PUNCTUATION, _NEWLINES, _SPACES)
_QWEN35 = _pattern(
    _CONTRACTIONS,
    r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
    r"\p{N}",
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
    _NEWLINES,
    _SPACES,
)

# A word is cut where its case changes: capitals first, then small letters.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")
_CASED_END = (r" ?[^\s\p{L}\p{N}]+[\r\n/]*", _NEWLINES, _SPACES)
_TEKKEN = _pattern(*_CASED, r"\p{N}", *_CASED_END)
_GPT4O = _pattern(*(f"{word}{_CONTRACTIONS}?" for word in _CASED), r"\p{N}{1,3}", *_CASED_END)

_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    _pattern(
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+",
        r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
        r" ?[\p{P}\p{S}]+[\r\n]*",
        _NEWLINES,
        _SPACES,
    ),
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}")
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_SEED = _pattern(_CONTRACTIONS, _WORD, r"\p{N}", r" ?[^\s\p{L}\p{N}\r\n]+", _NEWLINES, _SPACES)
_BAILING = _pattern(
    r"'(?i:[sdmt]|ll|ve|re)",
    r"[^\r\n\p{L}\p{N}]?+\p{L}+",
    r"\p{N}",
    r" ?[^\s\p{L}\p{N}]++[\r\n]*",
    r"\s*[\r\n]",
    _SPACES,
)


@dataclass(frozen=True)
class PreTokenizerRule:
    """One splitting rule.

    Attributes:
        patterns: applied one after the other; each match is a piece, and so is what lies between.
        ignore_merges: a piece that is a token is taken whole, even if merges would not build it.
        add_bos: whether BOS is put first when the file does not say.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


_RULES: dict[PreTokenizerRule, tuple[str, ...]] = {
    PreTokenizerRule((_GPT2,)): (
        "gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "gigachat", "a.x-4.0",
        "mellum", "exaone4", "modern-bert",
    ),
    PreTokenizerRule((_DIGIT, _GPT2)): (
        "smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2",
    ),
    PreTokenizerRule((_LLAMA3,), ignore_merges=True, add_bos=True): (
        "llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2",
    ),
    PreTokenizerRule((_LLAMA3,)): ("dbrx", "smaug-bpe", "chatglm-bpe", "glm4"),
    PreTokenizerRule((_QWEN2,)): (
        "qwen2", "deepseek-r1-qwen", "kormo", "megrez", "stablelm2", "hunyuan", "solar-open", "grok-2",
    ),
    PreTokenizerRule((_QWEN35,)): ("qwen35",),
    PreTokenizerRule((_TEKKEN,), ignore_merges=True, add_bos=True): ("tekken",),
    PreTokenizerRule((_GPT4O,)): ("gpt-4o", "llama4", "kanana2", "minimax-m2"),
    PreTokenizerRule(_DEEPSEEK3): ("deepseek-v3", "hunyuan-dense", "joyai-llm"),
    PreTokenizerRule(_DEEPSEEK_CODER): ("deepseek-coder",),
    PreTokenizerRule((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, _THREE_DIGITS)): ("falcon",),
    PreTokenizerRule((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", _THREE_DIGITS)): ("default",),
    PreTokenizerRule((_BLOOM,)): ("bloom", "gpt3-finnish", "poro-chat"),
    PreTokenizerRule((_BLOOM, _DIGIT)): ("viking",),
    PreTokenizerRule((r"\p{N}+", r"(?=(\d{3})+(?!\d))")): ("superbpe",),
    PreTokenizerRule((_BAILING,)): ("bailingmoe", "bailingmoe2", "llada-moe"),
    PreTokenizerRule((_SEED,)): ("seed-coder",),
}  # fmt: skip
RULES: dict[str, PreTokenizerRule] = {name: rule for rule, names in _RULES.items() for name in names}


def rule_named(name: str) -> PreTokenizerRule:
    """The rule of a `tokenizer.ggml.pre`; an unknown name is an error that lists the known."""
    if name not in RULES:
        raise CheckpointError(f"tokenizer.ggml.pre {name!r} is not supported; supported: {', '.join(sorted(RULES))}")
    return RULES[name]


def pre_tokenizer(rule: PreTokenizerRule) -> PreTokenizer:
    """The rule as a pre-tokenizer whose pieces are spelled in GPT-2's byte alphabet."""
    steps: list[PreTokenizer] = [pre_tokenizers.Split(Regex(p), behavior="isolated") for p in rule.patterns]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    return pre_tokenizers.Sequence(steps)
