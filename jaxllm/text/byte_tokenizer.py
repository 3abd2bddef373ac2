"""ByteTokenizer: bytes as tokens, for tests and for models of random weights."""

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as RustTokenizer
from transformers import PreTrainedTokenizerFast

from jaxllm.text.pieces import byte_level_alphabet
from jaxllm.text.tokenizer import Tokenizer

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class ByteTokenizer(Tokenizer):
    """A tokenizer whose token ids 0..255 are the bytes of the text; it needs no file.

    Ids from 256 on are special: <|im_end|> (EOS), <|im_start|>, <|endoftext|>.
    """

    EOS = 256

    def __init__(self, chat_template: str | None = CHAT_TEMPLATE):
        backend = RustTokenizer(models.BPE(vocab=byte_level_alphabet(), merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        names = ("<|im_end|>", "<|im_start|>", "<|endoftext|>")
        backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
        hf = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
        hf.chat_template = chat_template
        super().__init__(hf)
