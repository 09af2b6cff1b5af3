"""A .gguf file becomes an ordinary model folder; from then on there is one way to load a model.

    container       the file's tables, checked against its size
    metadata        typed access to its keys
    config          config.json, generation_config.json
    pretokenizers   the cutting rules behind tokenizer.ggml.pre
    tokenizer       tokenizer.json, tokenizer_config.json, chat_template.jinja
    tensors         model.safetensors

The folder is made under a temporary name and takes its own in one step, so it is whole or not there.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tileinfer_core.errors import DamagedModelError, DiskError
from tileinfer_core.files import PARTIAL, disk_errors, free_bytes, fresh_folder, publish, remove_tree, write_atomic
from tileinfer_core.gguf_import import tensors
from tileinfer_core.gguf_import.config import generation_config, model_config
from tileinfer_core.gguf_import.container import GgufFile
from tileinfer_core.gguf_import.metadata import Metadata
from tileinfer_core.gguf_import.tokenizer import Vocabulary
from tileinfer_core.manifest import Manifest, record_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tileinfer_core.progress import OnProgress

_REST_BYTES = 64 << 20  # tokenizer.json and the other small files, generously


def convert(
    gguf: Path,
    dest: Path,
    on_progress: OnProgress,
    *,
    name: str | None = None,
    source: Mapping[str, Any] | None = None,
    revision: str | None = None,
    sampling: Mapping[str, Any] | None = None,
) -> None:
    """Write the model of `gguf` to the folder `dest`, replacing one of that name only when the new one is whole.

    Args:
        name, source, revision: what the manifest says of the model; by default the file's own name and path.
        sampling: settings for generation_config.json that the model's authors recommend outside the file.

    Raises:
        DamagedModelError: the file is cut off or contradicts itself.
        UnsupportedModelError: an architecture, tokenizer, rope scaling or tensor type that is not known, by name.
        DiskError: no room, or not writable.
    """
    file = GgufFile.open(gguf)
    metadata = Metadata(gguf, file.metadata)
    texts, targets = _prepare(file, metadata, sampling or {})
    needed = sum(target.bytes for target in targets) + _REST_BYTES
    if needed > (free := free_bytes(dest)):
        raise DiskError(f"{dest}: the converted model needs {needed:,} bytes, the disk has {free:,} free")
    partial = dest.with_name(dest.name + PARTIAL)
    try:
        fresh_folder(partial)
        with disk_errors(partial):
            for file_name, text in texts.items():
                write_atomic(partial / file_name, text)
            notes = tensors.write(file, targets, partial / "model.safetensors", on_progress)
            records = {path.name: record_of(path) for path in sorted(partial.iterdir())}
        where = source or {"kind": "gguf", "path": str(gguf)}
        Manifest(name or gguf.stem, where, revision, records, tuple(notes)).write(partial)
        publish(partial, dest)
    except BaseException:
        remove_tree(partial)
        raise


def _prepare(
    file: GgufFile, metadata: Metadata, sampling: Mapping[str, Any]
) -> tuple[dict[str, str], list[tensors.Target]]:
    """Everything that can be refused is refused here, before a byte is written."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise DamagedModelError(f"{file.path}: no embedding matrix (token_embd.weight)")
    vocabulary = Vocabulary(metadata, rows=embedding.shape[0])
    end_ids, bos_id = vocabulary.end_ids, vocabulary.special_id("bos")
    config = model_config(file, metadata, end_ids, bos_id)
    targets = tensors.plan(file, config)
    texts = {
        "config.json": _json(config),
        "generation_config.json": _json(generation_config(metadata, end_ids, bos_id) | dict(sampling)),
        **vocabulary.files(config["max_position_embeddings"]),
    }
    return texts, targets


def _json(data: Mapping[str, Any]) -> str:
    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"
