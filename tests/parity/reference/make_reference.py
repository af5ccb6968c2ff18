"""Make `smollm2_greedy.json`: greedy continuations of the parity prompts by transformers, float32.

    python tests/parity/reference/make_reference.py MODEL.gguf [--tokens 32]

The weights are those of the GGUF file, dequantised by transformers itself, so that nothing of edgellm
takes part.  For every step the margin between the two best log-probabilities is kept: a later
disagreement is rounding only where that margin is tiny.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import transformers
from prompts import PROMPTS
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def encode(tokenizer, prompt) -> list[int]:
    if isinstance(prompt, str):
        return tokenizer(prompt)["input_ids"]
    text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@torch.inference_mode()
def continue_greedily(model, ids: list[int], count: int) -> tuple[list[int], list[float]]:
    tokens, margins = [], []
    out = model(torch.tensor([ids]), use_cache=True, logits_to_keep=1)
    for _ in range(count):
        best = torch.log_softmax(out.logits[0, -1].double(), dim=-1).topk(2)
        tokens.append(int(best.indices[0]))
        margins.append(round(float(best.values[0] - best.values[1]), 5))
        out = model(torch.tensor([[tokens[-1]]]), past_key_values=out.past_key_values, use_cache=True)
    return tokens, margins


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("smollm2_greedy.json"))
    args = parser.parse_args()

    folder, name = str(args.gguf.parent), args.gguf.name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    ).eval()
    cases = []
    for number, prompt in enumerate(PROMPTS):
        ids = encode(tokenizer, prompt)
        tokens, margins = continue_greedily(model, ids, args.tokens)
        cases.append({"prompt": number, "prompt_token_ids": ids, "token_ids": tokens, "margins": margins})
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    rows = ",\n".join(json.dumps(case) for case in cases)
    args.out.write_text(f'{{"versions": {json.dumps(versions)}, "model": "{name}", "cases": [\n{rows}\n]}}\n')


if __name__ == "__main__":
    main()
