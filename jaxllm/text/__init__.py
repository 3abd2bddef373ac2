"""Text in, token ids out, and back: tokenizers, chat templates, incremental detokenising."""
