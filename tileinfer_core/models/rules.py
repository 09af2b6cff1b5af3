"""What the fields of a config.json mean where model types differ. Each model's file has its own ConfigRules.

config.py reads everything that all decoders share. Here is what one can't know without the model type: which
activations its layers have, what a field that is not there stands for (the default of its Transformers class), and
which values of a field are the ones that its layers are written for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

TOP_LEVEL = (
    "tie_word_embeddings",
    "quantization_config",
    "compression_config",
    "tileinfer",
    "eos_token_id",
    "bos_token_id",
    "dtype",
    "torch_dtype",
)
SILU: Mapping[str, str] = MappingProxyType({"silu": "silu", "swish": "silu"})


@dataclass(frozen=True, slots=True)
class ConfigRules:
    """`activations`: hidden_act -> LayerStructure.activation.

    `defaults` stand for fields that are absent; a null stays a null. `fixed`: the values of a field that the layers
    are written for, where these are not "absent or false". `needs_rope_object`: without one, nobody can tell what is
    meant.

    A model of several parts has its text model's fields in `text_config`; those of its own that count are TOP_LEVEL.
    `architectures` it may name beside …ForCausalLM. `cut_head`: output_vocab_size may give the head fewer rows than the
    embedding; only the ids that can be written are then read, too.
    """

    activations: Mapping[str, str] = field(default_factory=lambda: SILU)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    needs_rope_object: bool = False
    text_config: bool = False
    architectures: tuple[str, ...] = ()
    cut_head: bool = False

    def flattened(self, table: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of the text model in one table, with the defaults of those that are absent."""
        fields = {**self.defaults, **table}
        inner = table.get("text_config")
        if self.text_config and isinstance(inner, dict):
            fields = {**self.defaults, **inner, **{name: table[name] for name in TOP_LEVEL if name in table}}
        return fields
