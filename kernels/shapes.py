"""Shapes of the models that kernels are configured, compiled and tested for, as their config.json files give them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class ModelShape:
    """What a decoder's kernels depend on.

    Attributes:
        hidden: length of the residual stream.
        ffn: length between the feed-forward products.
        activation: "swiglu" has gate and up products, "xielu" one up product.
        qk_norm: RMSNorm over each query and key head.
        eps: ε of the norms, a compile-time constant of the kernels that have one in them.
        qkv_bias, o_bias, mlp_bias: which products add a bias.
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
    eps: float = 1e-5
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False

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
    "Qwen3-0.6B": ModelShape(1024, 28, 16, 8, 128, 3072, 151936, qk_norm=True, eps=1e-6),
    "Qwen3-1.7B": ModelShape(2048, 28, 16, 8, 128, 6144, 151936, qk_norm=True, eps=1e-6),
    "Qwen3-4B": ModelShape(2560, 36, 32, 8, 128, 9728, 151936, qk_norm=True, eps=1e-6),
    "Qwen3-8B": ModelShape(4096, 36, 32, 8, 128, 12288, 151936, qk_norm=True, eps=1e-6),
    "Qwen3-14B": ModelShape(5120, 40, 40, 8, 128, 17408, 151936, qk_norm=True, eps=1e-6),
    "Llama-3.2-1B": ModelShape(2048, 16, 32, 8, 64, 8192, 128256),
    "Llama-3.2-3B": ModelShape(3072, 28, 24, 8, 128, 8192, 128256),
    "Llama-3.1-8B": ModelShape(4096, 32, 32, 8, 128, 14336, 128256),
    "Apertus-8B": ModelShape(4096, 32, 32, 8, 128, 21504, 131072, activation="xielu", qk_norm=True),
}

# Shapes compiled in FP16 too: between them they have every form of a kernel (heads of 64 and 128, head norms or none,
# tiles that overhang or not, both activations). The demo model, converted from a quantised file, is the first of them.
IN_FLOAT16 = ("SmolLM2-135M", "Qwen3-0.6B", "Apertus-8B")


def variants() -> list[tuple[str, ModelShape, str]]:
    """Name, shape and type of weights of all that is compiled for every architecture."""
    biased = replace(MODELS["SmolLM2-135M"], qkv_bias=True, o_bias=True, mlp_bias=True)  # others have them
    return [
        *((name, shape, "bfloat16") for name, shape in MODELS.items()),
        *((name, MODELS[name], "float16") for name in IN_FLOAT16),
        ("SmolLM2-135M with biases", biased, "bfloat16"),
    ]
