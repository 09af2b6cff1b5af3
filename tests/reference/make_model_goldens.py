"""Makes model_goldens.npz: what Transformers computes for the models of tiny_models.py, in float32 on the CPU.

    python tests/reference/make_model_goldens.py        needs torch and transformers

Made with transformers 5.24.0 and torch 2.13.0. Per variant: logits after each of the last LOGIT_ROWS prompt tokens;
64 greedy tokens, each from a forward pass over the whole sequence without a cache, and the smallest lead of a winner;
cos and sin of the rotary embedding at ROPE_POSITIONS. The long variants have logits only, at positions past 12,000.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from tiny_models import (
    EXAMPLES,
    GREEDY_STEPS,
    LONG,
    LONG_TOKENS,
    ROPE_POSITIONS,
    VARIANTS,
    other_rope_form,
    prompt,
    tensors,
    text_config,
)
from transformers import AutoConfig, AutoModelForCausalLM

LOGIT_ROWS = 4
PROMPT_TOKENS = 70
MIN_DIFFERENT = 12
MIN_LEAD = 2e-3  # ten times the tolerance on logits: a winner by less would be a coin toss


def build(name: str, config: dict) -> torch.nn.Module:
    """Of a model of several parts, the text model, which is the same in Transformers."""
    state = {tensor.replace(".language_model.", "."): values for tensor, values in tensors(name).items()}
    config = text_config(config)
    config = {key: value for key, value in config.items() if key != "architectures"}
    hf = AutoConfig.for_model(config.pop("model_type"), **config)
    model = AutoModelForCausalLM.from_config(hf, attn_implementation="eager", dtype=torch.float32).eval()
    state = {k: torch.from_numpy(values) for k, values in state.items() if not k.startswith("model.vision_tokenizer.")}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected, unexpected
    assert set(missing) <= {"lm_head.weight"}, missing
    model.tie_weights()
    return model


def last_logits(model: torch.nn.Module, ids: list[int], rows: int) -> np.ndarray:
    return model(torch.tensor([ids]), use_cache=False, logits_to_keep=rows).logits[0].numpy()


def greedy(model: torch.nn.Module, ids: list[int]) -> tuple[list[int], float]:
    ids, lead = list(ids), np.inf
    start = len(ids)
    for _ in range(GREEDY_STEPS):
        row = last_logits(model, ids, 1)[0]
        second, first = np.sort(row)[-2:]
        lead = min(lead, float(first - second))
        ids.append(int(row.argmax()))
    return ids[start:], lead


def rope_tables(model: torch.nn.Module) -> np.ndarray:
    end = model.config.max_position_embeddings  # from there on "dynamic" changes with the sequence's length
    positions = [p for p in ROPE_POSITIONS if p < end or model.model.rotary_emb.rope_type != "dynamic"]
    x = torch.zeros(1, 1, 1)
    tables = [model.model.rotary_emb(x, torch.tensor([[p]])) for p in positions]
    half = tables[0][0].shape[-1] // 2
    return np.stack([np.stack([t[0, 0, :half].numpy() for t in table]) for table in tables])  # [P, 2, d/2]


def goldens(name: str) -> dict[str, np.ndarray]:
    config = (VARIANTS | EXAMPLES)[name]
    model, twin = build(name, config), build(name, other_rope_form(config))
    probe = prompt(name, PROMPT_TOKENS)
    assert np.array_equal(last_logits(twin, probe, 1), last_logits(model, probe, 1)), name
    found = {f"{name}/rope": rope_tables(twin)}
    if name in LONG:
        return found | {f"{name}/logits": last_logits(model, prompt(name, LONG_TOKENS), LOGIT_ROWS)}
    salt, tokens, lead = clear_greedy(name, model)
    print(f"{name}: prompt {salt}, smallest lead {lead:.1e}, {len(set(tokens))} different tokens")
    found[f"{name}/logits"] = last_logits(model, prompt(name, PROMPT_TOKENS, salt), LOGIT_ROWS)
    print(f"{name}: largest logit {np.abs(found[f'{name}/logits']).max():.2f}")
    return found | {f"{name}/greedy": np.array(tokens, np.int16), f"{name}/salt": np.array(salt)}


def clear_greedy(name: str, model: torch.nn.Module) -> tuple[int, list[int], float]:
    """The first prompt whose greedy tokens are varied and never win by a hair."""
    for salt in range(40):
        tokens, lead = greedy(model, prompt(name, PROMPT_TOKENS, salt))
        if lead > MIN_LEAD and len(set(tokens)) >= MIN_DIFFERENT:
            return salt, tokens, lead
    raise AssertionError(f"{name}: no prompt gives {MIN_DIFFERENT} different tokens with a lead of {MIN_LEAD}")


def main() -> None:
    torch.set_num_threads(1)
    found: dict[str, np.ndarray] = {}
    with torch.no_grad():
        for name in VARIANTS | EXAMPLES:
            found |= goldens(name)
    np.savez_compressed(Path(__file__).with_name("model_goldens.npz"), **found)


if __name__ == "__main__":
    main()
