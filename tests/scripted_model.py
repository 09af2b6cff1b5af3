"""A real model folder whose weights make the model say a given text, token for token.

One Llama layer of zeros lets the residual stream pass: the final norm sees the embedding of the last token, a unit
vector, and the output matrix sends it to the successor written in the script. So every part of the program runs, and
a test knows what must come out. The tokenizer is byte-level BPE over all 256 bytes without merges.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import save_file

from tests.gguf_files import byte_letters

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

EOS = "<|im_end|>"
SPECIAL = ["<|endoftext|>", "<|im_start|>", EOS]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
HIDDEN, HEAD_DIM, MIDDLE = 512, 8, 8


def write_scripted_model(
    folder: Path,
    script: Sequence[str | bytes],
    *,
    forever: bool = False,
    context: int = 4096,
    template: str | None = CHATML,
    thinking: bool = False,
) -> Path:
    """A model that answers every prompt with `script`, whose pieces must all be different; `forever` repeats it."""
    folder.mkdir(parents=True)
    markers = ["<think>", "</think>"] if thinking else []
    letters = byte_letters()
    pieces = [_spelled(piece, letters) for piece in script]
    tokens = [*SPECIAL, *markers, *letters]
    tokens += [piece for piece in dict.fromkeys(pieces) if piece not in tokens]
    _write_tokenizer(folder, tokens, [*SPECIAL, *markers], template)
    _write_config(folder, len(tokens), context)
    _write_weights(folder, _successors(tokens, pieces, forever=forever))
    return folder


def _spelled(piece: str | bytes, letters: list[str]) -> str:
    """A piece as byte-level BPE writes it; the thinking markers stay as they are."""
    if piece in ("<think>", "</think>"):
        return str(piece)
    raw = piece.encode() if isinstance(piece, str) else piece
    return "".join(letters[byte] for byte in raw)


def _successors(tokens: list[str], pieces: list[str], *, forever: bool) -> list[int]:
    """For every token the one that follows it: the script's first piece after anything that is not in the script."""
    assert len(set(pieces)) == len(pieces), "a piece of the script occurs twice: its successor would be ambiguous"
    index = {token: number for number, token in enumerate(tokens)}
    follows = [index[pieces[0]]] * len(tokens)
    last = pieces[0] if forever else EOS
    for piece, successor in zip(pieces, [*pieces[1:], last], strict=True):
        follows[index[piece]] = index[successor]
    return follows


def _write_tokenizer(folder: Path, tokens: list[str], special: list[str], template: str | None) -> None:
    added = [
        {"id": tokens.index(token), "content": token, "special": token in SPECIAL}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for token in special
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    vocab = {token: number for number, token in enumerate(tokens)}
    document: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab, "merges": [], "byte_fallback": False, "ignore_merges": False},
    }
    (folder / "tokenizer.json").write_text(json.dumps(document))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOS, "bos_token": "<|im_start|>"}))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)


def _write_config(folder: Path, vocab_size: int, context: int) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": HIDDEN,
        "intermediate_size": MIDDLE,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": context,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "eos_token_id": 2,
        "bos_token_id": 1,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2], "temperature": 0.6, "top_k": 20}))


def _write_weights(folder: Path, follows: list[int]) -> None:
    vocab = len(follows)
    assert vocab <= HIDDEN, "every token needs an axis of its own"
    head = np.zeros((vocab, HIDDEN), np.float32)
    for token, successor in enumerate(follows):
        head[successor, token] = 1
    layer = {
        "input_layernorm": np.ones(HIDDEN),
        "post_attention_layernorm": np.ones(HIDDEN),
        "self_attn.q_proj": np.zeros((HEAD_DIM, HIDDEN)),
        "self_attn.k_proj": np.zeros((HEAD_DIM, HIDDEN)),
        "self_attn.v_proj": np.zeros((HEAD_DIM, HIDDEN)),
        "self_attn.o_proj": np.zeros((HIDDEN, HEAD_DIM)),
        "mlp.gate_proj": np.zeros((MIDDLE, HIDDEN)),
        "mlp.up_proj": np.zeros((MIDDLE, HIDDEN)),
        "mlp.down_proj": np.zeros((HIDDEN, MIDDLE)),
    }
    tensors = {f"model.layers.0.{name}.weight": values.astype(np.float32) for name, values in layer.items()}
    tensors["model.embed_tokens.weight"] = np.eye(vocab, HIDDEN, dtype=np.float32)
    tensors["model.norm.weight"] = np.ones(HIDDEN, np.float32)
    tensors["lm_head.weight"] = head
    save_file(tensors, folder / "model.safetensors")
