"""Apertus 1.5: Apertus' layers inside a model that also reads images and sound. TileInfer runs its text.

Images and sound come in as ids of the same vocabulary, from two tokenizers whose weights lie in the same files. These
are not read, nor are the embedding's rows for them: the head has no rows there (output_vocab_size), so that every id
from there on could only be read. "apertus1p5_text", the text model on its own, is an ordinary Apertus.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tileinfer_core.models import apertus

if TYPE_CHECKING:
    from tileinfer_core.config import ModelConfig
    from tileinfer_core.models.structure import LayerStructure, Parameter

CONFIG_RULES = replace(apertus.CONFIG_RULES, text_config=True, architectures=("Apertus1p5ForConditionalGeneration",))
NOT_READ = ("model.vision_tokenizer.", "model.audio_tokenizer.")


def layer_structure(config: ModelConfig) -> LayerStructure:
    return apertus.layer_structure(config)


def parameters(config: ModelConfig, *, tied: bool) -> tuple[Parameter, ...]:
    return apertus.parameters(config, tied=tied, stored_in="model.language_model.")
