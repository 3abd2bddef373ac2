"""64 greedy tokens of the small real models on 20 prompts, against transformers in float32.

Where the two differ, the reference's two best logits must be a tie (under 1e-4 apart): it is printed.
"""

import os
from pathlib import Path

import pytest
import torch
import transformers

from converters.default_model import FILE_NAME, default_model_path
from jaxllm import LLM, SamplingParams

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n",
    "Q: What is 12 times 12?\nA:",
    "The three laws of thermodynamics are",
    "Dear Sir or Madam,\n\nI am writing to",
    "Ingredients: flour, sugar, eggs, butter.\nMethod:",
    "import numpy as np\n\nx = np.",
    "In 1969, Neil Armstrong",
    "Die Hauptstadt von Deutschland ist",
    "Water boils at",
    "SELECT name, age FROM users WHERE",
    "The quick brown fox",
    "To be, or not to be, that is",
    "1, 1, 2, 3, 5, 8,",
    "Photosynthesis is the process by which",
    "My favourite book is",
    "<html>\n<head>\n",
    "The president of the United States lives in",
    "Roses are red, violets are",
]
NUM_TOKENS = 64
TIE = 1e-4


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [FILE_NAME, "gemma-3-270m-q4_k_m.gguf"])
def test_greedy_tokens_equal_transformers(name):
    pytest.importorskip("accelerate", reason="transformers reads GGUF files with it")
    folder = Path(os.environ.get("JAXLLM_TEST_MODELS") or default_model_path().parent)
    if not (folder / name).is_file():
        pytest.skip(f"{name} is not in {folder}")
    llm = LLM(str(folder / name), dtype="float32", max_model_len=512, max_num_seqs=8, kv_cache_memory_bytes=1 << 28)
    try:
        params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    finally:
        llm.shutdown()
    reference = transformers.AutoModelForCausalLM.from_pretrained(str(folder), gguf_file=name, dtype=torch.float32)
    reference.eval()
    ties = []
    for output in outputs:
        assert output.prompt_token_ids is not None
        ours, prompt = list(output.outputs[0].token_ids), list(output.prompt_token_ids)
        assert len(ours) == NUM_TOKENS
        # Teacher forcing: our token at each place against the reference's choice after the same tokens.
        with torch.no_grad():
            logits = reference(torch.tensor([prompt + ours[:-1]])).logits[0, len(prompt) - 1 :]
        for place, (row, token) in enumerate(zip(logits, ours, strict=True)):
            best = int(row.argmax())
            if token != best:
                gap = float(row[best] - row[token])
                assert gap < TIE, f"{output.prompt!r} at {place}: {token} instead of {best}, {gap} below it"
                ties.append((output.prompt, place, token, best, gap))
    print(f"{name}: {len(outputs)} prompts x {NUM_TOKENS} tokens equal, ties: {ties}")
