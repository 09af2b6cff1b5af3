"""Small GGUF files for tests, written with the gguf package's own writer from known weights.

The weights are kept in Transformers' order and names, so that a test can compare what comes out of a conversion with
what went in; `permute` is llama.cpp's row order for q and k, stated independently of the code under test.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quants

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CONTROL, USER_DEFINED, UNUSED = 3, 4, 5
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def byte_letters() -> list[str]:
    """The 256 printable letters that byte-level BPE writes for the bytes 0 to 255 (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters, extra = [], 0
    for byte in range(256):
        letters.append(chr(byte if byte in printable else 256 + extra))
        extra += byte not in printable
    return letters


@dataclass
class TinyModel:
    """A random model and its vocabulary. Change fields before `write`; `edit` sees the writer last."""

    arch: str = "llama"
    layers: int = 2
    hidden: int = 64
    middle: int = 96
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    tied: bool = True
    qtype: GGMLQuantizationType = GGMLQuantizationType.F32
    pre: str | None = "smollm"
    merges: list[str] = field(default_factory=lambda: ["h e", "l l", "he ll", "hell o", "Ġ w", "Ġw o"])
    padding: int = 3  # embedding rows beyond the tokens
    extra: dict[str, Any] = field(default_factory=dict)  # further keys: int, float, bool, str
    drop: tuple[str, ...] = ()
    edit: Callable[[GGUFWriter], None] | None = None

    def tokens(self) -> tuple[list[str], list[int]]:
        normal = byte_letters() + [merge.replace(" ", "") for merge in self.merges]
        special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
        return [*special, *normal, "<think>"], [CONTROL] * 3 + [1] * len(normal) + [USER_DEFINED]

    @property
    def vocab(self) -> int:
        return len(self.tokens()[0]) + self.padding

    def weights(self) -> dict[str, np.ndarray[Any, Any]]:
        """{Transformers' name: float32 values}, the same on every call."""
        rng = np.random.default_rng(7)
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab, self.hidden)}
        for layer in range(self.layers):
            per_layer = {
                "attn_norm": (self.hidden,), "attn_q": (q, self.hidden), "attn_k": (kv, self.hidden),
                "attn_v": (kv, self.hidden), "attn_output": (self.hidden, q), "ffn_norm": (self.hidden,),
                "ffn_gate": (self.middle, self.hidden), "ffn_up": (self.middle, self.hidden),
                "ffn_down": (self.hidden, self.middle),
            }  # fmt: skip
            if self.arch == "qwen3":
                per_layer |= {"attn_q_norm": (self.head_dim,), "attn_k_norm": (self.head_dim,)}
            shapes |= {f"model.layers.{layer}.{IN_LAYER[name]}.weight": shape for name, shape in per_layer.items()}
            if self.arch == "qwen2":
                biased = ("attn_q", "attn_k", "attn_v")
                shapes |= {f"model.layers.{layer}.{IN_LAYER[name]}.bias": per_layer[name][:1] for name in biased}
        shapes["model.norm.weight"] = (self.hidden,)
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocab, self.hidden)
        return {name: rng.normal(0, 0.1, shape).astype(np.float32) for name, shape in shapes.items()}

    def write(self, path: Path) -> Path:
        writer = GGUFWriter(path, self.arch)
        writer.add_name("Tiny")
        self._keys(writer)
        self._vocabulary(writer)
        names = {
            f"model.layers.{layer}.{new}.{kind}": f"blk.{layer}.{old}.{kind}"
            for layer in range(self.layers)
            for old, new in IN_LAYER.items()
            for kind in ("weight", "bias")
        }
        names |= {
            "model.embed_tokens.weight": "token_embd.weight",
            "model.norm.weight": "output_norm.weight",
            "lm_head.weight": "output.weight",
        }
        for new, values in self.weights().items():
            old = names[new]
            if old in self.drop:
                continue
            stored = (
                permute(values, self.heads if "_q." in old else self.kv_heads)
                if self.arch == "llama" and old.endswith(("attn_q.weight", "attn_k.weight"))
                else values
            )
            if values.ndim == 1 or self.qtype == GGMLQuantizationType.F32:
                writer.add_tensor(old, stored)
            elif self.qtype == GGMLQuantizationType.F16:
                writer.add_tensor(old, stored.astype(np.float16))
            else:
                writer.add_tensor(old, quants.quantize(stored, self.qtype), raw_dtype=self.qtype)
        if self.edit:
            self.edit(writer)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def _keys(self, writer: GGUFWriter) -> None:
        keys: dict[str, Any] = {
            "block_count": self.layers, "context_length": 256, "embedding_length": self.hidden,
            "feed_forward_length": self.middle, "attention.head_count": self.heads,
            "attention.head_count_kv": self.kv_heads, "attention.key_length": self.head_dim,
            "attention.value_length": self.head_dim, "attention.layer_norm_rms_epsilon": 1e-5,
            "rope.freq_base": 10000.0,
        }  # fmt: skip
        for key, value in ({f"{self.arch}.{k}": v for k, v in keys.items()} | self.extra).items():
            if key in self.drop:
                continue
            add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
            (writer.add_array if isinstance(value, list) else add[type(value)])(key, value)

    def _vocabulary(self, writer: GGUFWriter) -> None:
        tokens, types = self.tokens()
        writer.add_tokenizer_model("gpt2")
        if self.pre is not None:
            writer.add_tokenizer_pre(self.pre)
        writer.add_token_list(tokens)
        writer.add_token_types(types)
        writer.add_token_merges(self.merges)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_chat_template(TEMPLATE)


def permute(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """llama.cpp's order: row i of a head's first half and row i of its second half become neighbours."""
    out = np.empty_like(rows)
    size = len(rows) // heads
    for head in range(heads):
        for i in range(size // 2):
            out[head * size + 2 * i] = rows[head * size + i]
            out[head * size + 2 * i + 1] = rows[head * size + size // 2 + i]
    return out
