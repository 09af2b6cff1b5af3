"""What can be said of a model's folder before it runs: one finding for each thing looked at, troubles with their cure.

Config, generation defaults, weight files (headers, index, shapes, tied head, types), rotary positions, tokenizer
against embedding rows, end-of-sequence ids, chat template, the weights' values, memory. A check that can't be made
because another failed is left out; nothing raises on a damaged folder, whatever is damaged.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tileinfer_core.config import ModelConfig
from tileinfer_core.errors import TileinferError
from tileinfer_core.estimates import Weights, kv_bytes_per_token, total_bytes, weight_bytes, weight_count
from tileinfer_core.findings import Finding
from tileinfer_core.generation_config import FILE_NAME, GenerationConfig
from tileinfer_core.models.define import define_from_files, define_model
from tileinfer_core.progress import OnProgress, silent
from tileinfer_core.prompting import PromptEncoder
from tileinfer_core.template_lint import Linter
from tileinfer_core.units import bytes_text
from tileinfer_core.weight_values import bad_values
from tileinfer_core.weights import WeightFiles

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tileinfer_core.models.decoder import ModelDefinition
    from tileinfer_core.tokenizer import Tokenizer

MAX_NAMED = 4  # tensors that are named one by one
ROUND_TRIP = "Hello, world. 12 + 3 = 15"


def diagnose_model(
    folder: Path, *, pull: str | None = None, values: bool = True, on_progress: OnProgress = silent
) -> list[Finding]:
    """All findings. `pull`: the command that fetches this model again, where there is one.

    `values` False leaves out the one check that reads all of the weights.
    """
    return list(_Doctor(folder, pull).findings(values=values, on_progress=on_progress))


@dataclass
class _Doctor:
    """Each method looks at one thing and keeps what later ones need."""

    folder: Path
    pull: str | None
    config: ModelConfig | None = None
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    files: WeightFiles | None = None
    encoder: PromptEncoder | None = None

    def findings(self, *, values: bool, on_progress: OnProgress) -> Iterator[Finding]:
        for name, check in (
            ("config", self.look_at_config),
            ("generation", self.look_at_generation),
            ("weight files", self.look_at_files),
            ("weights", self.look_at_weights),
            ("positions", self.look_at_positions),
            ("tokenizer", self.look_at_tokenizer),
            ("end of sequence", self.look_at_ends),
            ("chat template", self.look_at_template),
        ):
            yield from self._guarded(name, check)
        if values:
            yield from self._guarded("values", lambda: self.look_at_values(on_progress))
        yield from self._guarded("memory", self.look_at_memory)

    def _guarded(self, name: str, check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
        try:
            yield from check()
        except TileinferError as error:
            yield Finding(name, "problem", str(error), error.hint or self.pull)
        except OSError as error:
            yield Finding(name, "problem", f"{error.filename or self.folder}: {error.strerror or error}", self.pull)

    def look_at_config(self) -> Iterator[Finding]:
        c = self.config = ModelConfig.load(self.folder)
        heads = f"{c.num_attention_heads} heads of {c.head_dim}, {c.num_key_value_heads} for keys and values"
        shape = f"{c.num_hidden_layers} layers, hidden {c.hidden_size:,}, feed-forward {c.intermediate_size:,}"
        yield Finding("config", "ok", f"{c.model_type}: {shape}, {heads}, {c.vocab_size:,} rows of vocabulary")
        if c.unread:
            yield Finding("config", "info", f"fields that change nothing here: {', '.join(c.unread)}")

    def look_at_generation(self) -> Iterator[Finding]:
        self.generation = GenerationConfig.load(self.folder)
        if not (self.folder / FILE_NAME).exists():
            yield Finding("generation", "info", f"no {FILE_NAME}: TileInfer's own defaults apply")
            return
        named = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        pairs = [(name, getattr(self.generation, name)) for name in named]
        said = ", ".join(f"{name} {value:g}" for name, value in pairs if value is not None)
        yield Finding("generation", "ok", f"{FILE_NAME}: {said or 'no sampling settings'}")

    def look_at_files(self) -> Iterator[Finding]:
        self.files = WeightFiles.open(self.folder)
        used = {self.files.info(name).file for name in self.files.names}
        count = f"{len(used)} file{'s' if len(used) > 1 else ''}, {len(self.files.names):,} tensors"
        yield Finding(
            "weight files", "ok", f"{count}, {self.files.total_bytes:,} bytes, every range as its header says"
        )
        spare = sorted(path.name for path in self.folder.glob("*.safetensors") if path not in used)
        if spare:
            yield Finding("weight files", "info", f"not read, for the index does not name them: {', '.join(spare)}")

    def look_at_weights(self) -> Iterator[Finding]:
        if self.config is None or self.files is None:
            return
        model, warnings = define_from_files(self.config, self.files)
        tied = "the head is the embedding" if model.tied else "embedding and head are two matrices"
        yield Finding("weights", "ok", f"{weight_count(model):,} numbers, names and shapes as config.json says; {tied}")
        for warning in warnings:
            yield Finding("weights", "warning", warning, "set tie_word_embeddings to false, or remove the stored head")
        infos = [self.files.info(name) for name in self.files.names]
        dtypes = sorted({info.dtype for info in infos})
        if any(info.dtype == "float32" and len(info.shape) == 2 for info in infos):
            detail = f"stored as {', '.join(dtypes)}; float32 is rounded to bfloat16 on a GPU, and kept on the CPU"
            yield Finding("types", "info", detail)
        else:
            yield Finding("types", "ok", f"stored as {', '.join(dtypes)}")

    def look_at_positions(self) -> Iterator[Finding]:
        if self.config is None:
            return
        rope, longest = self.config.rope, self.config.max_context
        scaled = "unscaled" if rope.type == "default" else f"{rope.type}, factor {rope.factor:g}"
        yield Finding("positions", "ok", f"base {rope.theta:,.0f}, {scaled}; context {longest:,} tokens")
        if self.config.sliding_window == longest:
            detail = f"a sliding window ends the context: beyond {longest:,} tokens it would hide the oldest"
            yield Finding("positions", "info", detail)
        original, after = rope.original_max_position_embeddings, self.config.max_position_embeddings
        if rope.type == "llama3" and rope.factor > 1 and original >= after:
            detail = f"scaled by {rope.factor:g}, but from {original:,} tokens (original_max_position_embeddings)"
            detail += f" to {after:,}"
            yield Finding("positions", "warning", detail, "compare config.json with the original model's")

    def look_at_tokenizer(self) -> Iterator[Finding]:
        if self.config is None:
            return
        self.encoder = PromptEncoder.load(self.folder, self.config)
        tokenizer, rows = self.encoder.tokenizer, self.config.vocab_size
        tokens, stored = int(tokenizer.valid_ids_mask.sum()), self.config.embedding_rows
        beyond = _tokens_beyond(tokenizer, stored)
        if media := len(tokenizer.ids_beyond(rows)) - len(beyond):
            detail = f"{media:,} tokens beyond row {rows:,} can only be read (images, sound): TileInfer leaves them out"
            yield Finding("tokenizer", "info", detail)
        if beyond:
            detail = f"{len(beyond)} tokens have ids beyond the {stored:,} rows of the embedding: {_some(beyond)}"
            yield Finding("tokenizer", "problem", detail, self.pull or "take the tokenizer of this very model")
        else:
            spare = f", {rows - tokens:,} rows more than tokens, never sampled" if rows > tokens else ""
            yield Finding("tokenizer", "ok", f"{tokens:,} tokens for {rows:,} rows{spare}")
        back = tokenizer.decode(tokenizer.encode(ROUND_TRIP, special=False, add_bos=False))
        if back != ROUND_TRIP:
            yield Finding("tokenizer", "warning", f"{ROUND_TRIP!r} comes back as {back!r:.80}", self.pull)

    def look_at_ends(self) -> Iterator[Finding]:
        """Which ids end an answer, and who says so."""
        if self.config is None or self.encoder is None:
            return
        tokenizer = self.encoder.tokenizer
        named = {
            FILE_NAME: self.generation.eos_token_ids,
            "config.json": self.config.eos_token_ids,
            "the tokenizer": tuple(tokenizer.eos_token_ids),
        }
        if not any(named.values()):
            cure = f"name the model's end token as eos_token_id in {FILE_NAME}"
            yield Finding("end of sequence", "warning", "no end-of-sequence id: an answer ends only at its limit", cure)
            return
        for where, ids in named.items():
            bad = [i for i in ids if not (i < self.config.vocab_size and tokenizer.valid_ids_mask[i])]
            if bad:
                detail = f"{where} names {', '.join(map(str, bad))}, which is no token"
                yield Finding("end of sequence", "warning", detail, f"correct eos_token_id in {where}")
            ordinary = [i for i in ids if i not in bad and i not in tokenizer.control_ids]
            if ordinary:
                detail = (
                    f"{where} names {', '.join(f'{i} {tokenizer.piece(i)!r}' for i in ordinary)}, an ordinary token: "
                )
                detail += "an answer stops wherever it would write it"
                yield Finding("end of sequence", "warning", detail, f"correct eos_token_id in {where}")
        union = sorted({i for found in named.values() for i in found})
        said = ", ".join(f"{i} {tokenizer.piece(i)}" for i in union)
        yield Finding("end of sequence", "ok", f"{said} (from {', '.join(w for w, found in named.items() if found)})")

    def look_at_template(self) -> Iterator[Finding]:
        if self.config is None or self.encoder is None:
            return
        ends = {*self.generation.eos_token_ids, *self.config.eos_token_ids, *self.encoder.tokenizer.eos_token_ids}
        yield from Linter(self.encoder, frozenset(ends)).findings()

    def look_at_values(self, on_progress: OnProgress) -> Iterator[Finding]:
        if self.files is None:
            return
        bad = list(bad_values(self.files, on_progress))
        broken = [item for item in bad if item.nonfinite]
        for item in broken[:MAX_NAMED]:
            detail = f"{item.name} has {item.nonfinite:,} that are NaN or infinite, the first at {list(item.first)}"
            yield Finding("values", "problem", detail, self.pull or "convert or train the model again")
        if len(broken) > MAX_NAMED:
            yield Finding(
                "values", "problem", f"and {len(broken) - MAX_NAMED} more tensors with such values", self.pull
            )
        zero = [item.name for item in bad if item.zero]
        if zero:
            yield Finding("values", "warning", f"{len(zero)} matrices hold only zeros: {_some(zero)}", self.pull)
        if not broken:
            yield Finding("values", "ok", "every weight is a finite number")

    def look_at_memory(self) -> Iterator[Finding]:
        if self.config is None:
            return
        model = define_model(self.config, tied=self.config.tie_word_embeddings)
        kinds: dict[Weights, str] = {"bf16": "GPU, BF16", "int8": "GPU, INT8 weights", "float32": "CPU, float32"}
        if self.config.quantization is not None:
            del kinds["bf16"]
        for weights, place in kinds.items():
            yield Finding("memory", "info", memory_line(model, weights, place))


def memory_line(model: ModelDefinition, weights: Weights, place: str) -> str:
    per_token, context = kv_bytes_per_token(model, weights), model.config.max_context
    short = min(4096, context)
    total = f"{bytes_text(total_bytes(model, weights, short))} with {short:,} tokens"
    if context > short:
        total += f", {bytes_text(total_bytes(model, weights, context))} with all {context:,}"
    return f"{place}: weights {bytes_text(weight_bytes(model, weights))}, {per_token:,} bytes a token; {total}"


def _tokens_beyond(tokenizer: Tokenizer, rows: int) -> list[str]:
    return [tokenizer.piece(token_id) for token_id in tokenizer.ids_beyond(rows)]


def _some(names: list[str]) -> str:
    shown = [name if name.isprintable() else repr(name) for name in names[:MAX_NAMED]]
    return ", ".join(shown) + (f", and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else "")
