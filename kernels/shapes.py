"""Shapes of the models that kernels are configured, compiled and tested for, as their config.json files give them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ModelShape:
    """What a decoder's kernels depend on.

    Attributes:
        hidden: length of the residual stream.
        ffn: length between the feed-forward products.
        activation: "swiglu" has gate and up products, "xielu" one up product.
        qk_norm: RMSNorm over each query and key head.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    activation: Literal["swiglu", "xielu"] = "swiglu"
    qk_norm: bool = False

    @property
    def qkv_rows(self) -> int:
        """Rows of the fused Q, K and V product."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def attention_width(self) -> int:
        """Columns of the O product."""
        return self.heads * self.head_dim

    @property
    def up_rows(self) -> int:
        """Rows of the first feed-forward product: gate and up together for SwiGLU."""
        return self.ffn * (2 if self.activation == "swiglu" else 1)

    @property
    def products(self) -> dict[str, tuple[int, int]]:
        """Rows and columns (N, K) of each weight product of a decode step."""
        return {
            "qkv": (self.qkv_rows, self.hidden),
            "o": (self.hidden, self.attention_width),
            "up": (self.up_rows, self.hidden),
            "down": (self.hidden, self.ffn),
            "lm_head": (self.vocab, self.hidden),
        }


MODELS: dict[str, ModelShape] = {
    "SmolLM2-135M": ModelShape(576, 30, 9, 3, 64, 1536, 49152),
    "SmolLM2-360M": ModelShape(960, 32, 15, 5, 64, 2560, 49152),
    "SmolLM2-1.7B": ModelShape(2048, 24, 32, 32, 64, 8192, 49152),
    "Qwen3-0.6B": ModelShape(1024, 28, 16, 8, 128, 3072, 151936, qk_norm=True),
    "Qwen3-1.7B": ModelShape(2048, 28, 16, 8, 128, 6144, 151936, qk_norm=True),
    "Qwen3-4B": ModelShape(2560, 36, 32, 8, 128, 9728, 151936, qk_norm=True),
    "Qwen3-8B": ModelShape(4096, 36, 32, 8, 128, 12288, 151936, qk_norm=True),
    "Qwen3-14B": ModelShape(5120, 40, 40, 8, 128, 17408, 151936, qk_norm=True),
    "Llama-3.2-1B": ModelShape(2048, 16, 32, 8, 64, 8192, 128256),
    "Llama-3.2-3B": ModelShape(3072, 28, 24, 8, 128, 8192, 128256),
    "Llama-3.1-8B": ModelShape(4096, 32, 32, 8, 128, 14336, 128256),
    "Apertus-8B": ModelShape(4096, 32, 32, 8, 128, 21504, 131072, activation="xielu", qk_norm=True),
}
