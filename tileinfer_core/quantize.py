"""Makes an INT8 model folder from an unquantised one, tensor by tensor, in the layout that quantization.py reads.

Memory stays below two of the largest tensor, whatever the model's size: plain rounding takes some rows at a time, while
one thread reads the next and another writes the last. Calibration (calibrate.py) holds one layer and the sums over its
inputs besides.

The folder is made under a temporary name and takes its own in one step, its manifest written last: a run that is killed
leaves nothing that a command would load, and the next one starts clean.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from tileinfer_core.backends.select import choose_backend
from tileinfer_core.calibrate import Calibration
from tileinfer_core.compensate import round_compensated
from tileinfer_core.config import ModelConfig
from tileinfer_core.errors import DamagedModelError, DiskError, ModelError, UnsupportedModelError, UsageError
from tileinfer_core.files import PARTIAL, disk_errors, free_bytes, fresh_folder, publish, remove_tree, write_atomic
from tileinfer_core.int8 import from_int8, scales_of, to_int8
from tileinfer_core.jsonfile import read_json_object
from tileinfer_core.manifest import MANIFEST_NAME, Manifest, record_of
from tileinfer_core.models.decoder import EMBEDDING, LM_HEAD
from tileinfer_core.models.define import define_from_files
from tileinfer_core.models.structure import scale_name
from tileinfer_core.packed_int8 import PACKED, PACKING, SHAPE, flip
from tileinfer_core.progress import OnProgress, ProgressEvent
from tileinfer_core.pull_plan import exclusive
from tileinfer_core.quantize_recipe import HEAD, quantization_config
from tileinfer_core.receipt import RECEIPT_NAME, Receipt, TensorError, measure_quality
from tileinfer_core.safetensors_writer import SHARD_BYTES, ShardWriter, Target
from tileinfer_core.tensor_pieces import pieces_of
from tileinfer_core.weights import WeightFiles

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from concurrent.futures import Executor
    from pathlib import Path

    from tileinfer_core.manifest import FileRecord
    from tileinfer_core.models.decoder import ModelDefinition
    from tileinfer_core.quantize_recipe import ModelRecipe, Recipe, Stored
    from tileinfer_core.receipt import Quality, QualityOptions
    from tileinfer_core.store import ModelFolder
    from tileinfer_core.tensor_pieces import Float32Array
    from tileinfer_core.weights import TensorInfo

TASK = "quantize"
_REST_BYTES = 64 << 20  # tokenizer.json and the other small files, generously
_COPIED = ("*.json", "*.jinja", "*.model", "*.txt", "*.md", "LICENSE*")
_SOURCE_KIND = "int8"
ROOM = "free some space, or name a folder on another disk: tileinfer quantize MODEL DEST"


@dataclass(frozen=True, slots=True)
class _Part:
    """One stored tensor of the source, and what becomes of it."""

    name: str
    info: TensorInfo
    parameter: str
    stored: Stored | None
    tied: bool

    @property
    def module(self) -> str:
        return self.name.removesuffix(".weight")

    def targets(self) -> list[Target]:
        """What is written. A tied head has no weights of its own, but Transformers wants its scales by its name."""
        if self.stored is None:
            return [Target(self.name, self.info.dtype, self.info.shape)]
        rows, columns = self.info.shape
        scales = Target(scale_name(self.name), "bfloat16", (rows, self.stored.int8.groups(columns)))
        if self.stored.packed:
            words = Target(f"{self.module}.{PACKED}", "int32", (rows, columns // PACKING))
            return [words, scales, Target(f"{self.module}.{SHAPE}", "int64", (2,))]
        again = [replace(scales, name=scale_name(LM_HEAD))] if self.tied else []
        return [Target(self.name, "int8", self.info.shape), scales, *again]


@dataclass(frozen=True, slots=True)
class QuantizePlan:
    """All of a run, before it starts. `complete`: the target is there already, made of this source by this recipe."""

    source: ModelFolder
    target: Path
    name: str
    recipe: ModelRecipe
    model: ModelDefinition
    parts: tuple[_Part, ...]
    bytes_before: int
    bytes_after: int
    free_bytes: int
    calibration: str | None
    kv: str | None
    complete: bool

    @property
    def disk_bytes(self) -> int:
        return 0 if self.complete else self.bytes_after + _REST_BYTES

    def check_room(self) -> None:
        """Raises DiskError with both numbers."""
        if self.disk_bytes > self.free_bytes:
            raise DiskError(
                f"{self.name} needs {self.disk_bytes:,} bytes in {self.target.parent}, free are {self.free_bytes:,}",
                hint=ROOM,
            )


def plan_quantize(
    source: ModelFolder,
    target: Path,
    name: str,
    recipe: Recipe,
    *,
    calibration: str | None = None,
    kv: str | None = None,
    force: bool = False,
) -> QuantizePlan:
    """What a run would do. Everything that can be refused without reading weights is refused here.

    `calibration` is a text: weights are then rounded so that errors on its inputs cancel (compensate.py). With `kv`
    "int8" the folder asks for INT8 keys and values, which the user's own setting overrides.

    Raises:
        UnsupportedModelError: a model that is quantised already, or that TileInfer does not run.
        ModelError: tensors missing, unknown, or of another shape than the config says, by name.
        UsageError: a group size that does not divide, or a folder at `target` that this command has not made.
    """
    config = load_unquantised(source)
    files = WeightFiles.open(source.path)
    model, _ = define_from_files(config, files)
    columns = math.gcd(*(spec.shape[1] for p in model.parameters for spec in p.parts if len(spec.shape) == 2))
    mine = recipe.for_model(tied=model.tied, columns=columns)
    parts = tuple(_parts(model, files, mine))
    return QuantizePlan(
        source=source,
        target=target,
        name=name,
        recipe=mine,
        model=model,
        parts=parts,
        bytes_before=sum(part.info.bytes for part in parts),
        bytes_after=sum(tensor.bytes for part in parts for tensor in part.targets()),
        free_bytes=free_bytes(target),
        calibration=calibration,
        kv=kv,
        complete=_is_made(target, _origin(source, mine, calibration, kv), force=force),
    )


def load_unquantised(source: ModelFolder) -> ModelConfig:
    """The config of a model that can be quantised.

    Raises:
        UnsupportedModelError: it is quantised already, or TileInfer does not run it.
    """
    config = ModelConfig.load(source.path)
    if config.quantization is not None:
        formats = sorted({str(int8) for _, int8 in config.quantization.rules})
        raise UnsupportedModelError(
            f"{source.name} is quantised already: INT8, {' and '.join(formats)}",
            hint="quantise the model that it was made of",
        )
    return config


def _parts(model: ModelDefinition, files: WeightFiles, recipe: ModelRecipe) -> Iterator[_Part]:
    """In the order in which they are written: the layers first, since calibration knows the head's inputs last."""
    for parameter in sorted(model.parameters, key=lambda parameter: ".layers." not in parameter.name):
        for spec in parameter.parts:
            if spec.optional and spec.name not in files.names:
                continue
            info = files.info(spec.name)
            is_matrix = len(info.shape) == 2
            stored = recipe.of(spec.name.removesuffix(".weight"), info.shape[1]) if is_matrix else None
            yield _Part(spec.name, info, parameter.name, stored, model.tied and parameter.name == EMBEDDING)


def _origin(source: ModelFolder, recipe: ModelRecipe, calibration: str | None, kv: str | None) -> dict[str, Any]:
    """The manifest's `source`. The weights of the same files by the same recipe are the same."""
    manifest = Manifest.load(source.path)
    weights = (
        {path: r.sha256 for path, r in manifest.files.items() if path.endswith("safetensors")} if manifest else None
    )
    return {
        "kind": _SOURCE_KIND,
        "model": source.name,
        "weights": weights,
        "recipe": recipe.name,
        "calibration": hashlib.sha256(calibration.encode()).hexdigest() if calibration is not None else None,
        "kv": kv,
    }


def _is_made(target: Path, origin: dict[str, Any], *, force: bool) -> bool:
    """Whether `target` is what the run would make. Raises UsageError where it must not be replaced."""
    if not target.exists() and not target.is_symlink():
        return False
    try:
        manifest = Manifest.load(target)
    except ModelError:
        manifest = None
    if manifest is None and not target.is_symlink() and target.is_dir() and not any(target.iterdir()):
        return False  # nothing is lost
    if manifest is None or manifest.source.get("kind") != _SOURCE_KIND:
        raise UsageError(f"{target} exists and is not a model that `quantize` has made; name another folder")
    same = dict(manifest.source) == origin and origin["weights"] is not None
    if same and not force:
        return True
    if not force:
        raise UsageError(f"{target} exists, made by: {_said(manifest.source)}", hint="--force makes it again")
    return False


def _said(origin: Mapping[str, Any]) -> str:
    """What a manifest says of how its folder was made: all that can tell it from another run."""
    calibrated = "calibrated" if origin.get("calibration") else None
    kv = f"{origin['kv']} keys and values" if origin.get("kv") else None
    return ", ".join(filter(None, [str(origin.get("recipe")), calibrated, kv, f"of {origin.get('model')}"]))


def execute_quantize(plan: QuantizePlan, quality: QualityOptions | None, on_progress: OnProgress) -> Receipt:
    """Write the folder, measure it (unless `quality` is None), give it its name.

    Raises:
        DamagedModelError: weights that are not finite, by tensor; a source that shrinks while it is read.
        DiskError: no room, not writable.
        BackendUnavailableError: the backend to measure on, if it was asked for by name.
        TileinferError: another process works on the same folder.
    """
    plan.check_room()
    if quality is not None:
        choose_backend(quality.backend)  # one that was asked for and is not there is said before the work
    try:
        return _execute(plan, quality, on_progress)
    except DiskError as error:
        raise DiskError(str(error), hint=ROOM) from error


def _execute(plan: QuantizePlan, quality: QualityOptions | None, on_progress: OnProgress) -> Receipt:
    with exclusive(plan.target, plan.name):
        partial = plan.target.with_name(plan.target.name + PARTIAL)
        try:
            fresh_folder(partial)
            with disk_errors(partial):
                _copy_small_files(plan, partial)
                errors, records = _write_weights(plan, partial, on_progress)
                define_from_files(ModelConfig.load(partial), WeightFiles.open(partial))
            receipt = _receipt(plan, errors, measure_quality(plan.source.path, partial, quality, on_progress))
            write_atomic(partial / RECEIPT_NAME, json.dumps(receipt.as_dict(), indent=2, ensure_ascii=False) + "\n")
            with disk_errors(partial):
                records |= {path.name: record_of(path) for path in partial.iterdir() if path.name not in records}
            origin = _origin(plan.source, plan.recipe, plan.calibration, plan.kv)
            Manifest(plan.name, origin, plan.source.revision, records).write(partial)
            publish(partial, plan.target)
        except BaseException:
            remove_tree(partial)
            raise
    return receipt


def _copy_small_files(plan: QuantizePlan, partial: Path) -> None:
    """Tokenizer, template and generation settings as they are; config.json with what is quantised."""
    left_out = {MANIFEST_NAME, RECEIPT_NAME, "config.json", "model.safetensors.index.json"}
    for pattern in _COPIED:
        for path in sorted(plan.source.path.glob(pattern)):
            if path.is_file() and path.name not in left_out:
                shutil.copyfile(path, partial / path.name)
    config = read_json_object(plan.source.path / "config.json")
    config.setdefault("dtype", config.get("torch_dtype", "bfloat16"))
    modules = {part.module: part.stored for part in plan.parts if len(part.info.shape) == 2}
    if plan.model.tied:
        modules[HEAD] = next(part.stored for part in plan.parts if part.tied)
    config["quantization_config"] = quantization_config(modules)
    config["tie_word_embeddings"] = plan.model.tied
    if plan.kv:
        config["tileinfer"] = {"kv": plan.kv}
    write_atomic(partial / "config.json", json.dumps(config, indent=2, ensure_ascii=False) + "\n")


def _write_weights(
    plan: QuantizePlan, partial: Path, on_progress: OnProgress
) -> tuple[list[TensorError], dict[str, FileRecord]]:
    """Every tensor's error, and the manifest's entries for the weight files."""
    calibration = None
    if plan.calibration is not None:
        calibration = Calibration(plan.source.path, plan.model, plan.calibration)
    errors, done = [], 0
    writer = ShardWriter(partial, [t for part in plan.parts for t in part.targets()], SHARD_BYTES)
    with ThreadPoolExecutor(1, "read-pieces") as reader, writer:
        on_progress(ProgressEvent(TASK, 0, plan.bytes_before, "bytes"))
        for part in plan.parts:
            for error, count in _write_part(part, reader, writer, calibration):
                if error:
                    errors.append(error)
                done += count
                on_progress(ProgressEvent(TASK, done, plan.bytes_before, "bytes"))
    return errors, writer.records


def _write_part(
    part: _Part, reader: Executor, writer: ShardWriter, calibration: Calibration | None
) -> Iterator[tuple[TensorError | None, int]]:
    """Writes one tensor; yields its error at the end, and the bytes read as it goes."""
    if part.stored is None:
        for raw, values in pieces_of(part.info, reader):
            if not np.isfinite(values.max()) or not np.isfinite(values.min()):
                raise _not_finite(part)
            writer.write(raw)
            yield None, raw.nbytes
        return
    factor = calibration.factor(part.parameter) if calibration else None
    scales, squares, wrong = [], 0.0, 0.0
    for raw, values in pieces_of(part.info, reader, whole=factor is not None):
        scale = scales_of(values, part.stored.int8.group_size)
        if not np.isfinite(scale.astype(np.float32)).all():
            raise _not_finite(part)
        q = round_compensated(values, scale, factor) if factor else to_int8(values, scale)
        scales.append(scale)
        squares += _square(values)
        difference = from_int8(q, scale)
        difference -= values
        wrong += _square(difference)
        if part.stored.packed:
            flip(q)
        writer.write(q)
        yield None, raw.nbytes
    for scale in scales * (2 if part.tied else 1):
        writer.write(scale)
    if part.stored.packed:
        writer.write(np.array(part.info.shape, np.int64))
    yield TensorError(part.name, str(part.stored.int8), (wrong / squares) ** 0.5 if squares else 0.0), 0


def _square(values: Float32Array) -> float:
    """The sum of squares; in float64 where float32 is too small for it."""
    total = float(np.vdot(values, values))
    return total if math.isfinite(total) else float(np.square(values, dtype=np.float64).sum())


def _not_finite(part: _Part) -> DamagedModelError:
    return DamagedModelError(f"{part.info.file}: the tensor {part.name} has values that are not finite")


def _receipt(plan: QuantizePlan, errors: list[TensorError], quality: Quality | str) -> Receipt:
    weights = sum(int(np.prod(part.info.shape)) for part in plan.parts)
    return Receipt(
        model=plan.source.name,
        revision=plan.source.revision,
        recipe=plan.recipe.name,
        calibrated=plan.calibration is not None,
        bytes_before=plan.bytes_before,
        bytes_after=plan.bytes_after,
        bytes_per_weight=plan.bytes_after / weights,
        worst=tuple(sorted(errors, key=lambda error: -error.relative_error)[:8]),
        quality=None if isinstance(quality, str) else quality,
        not_measured=quality if isinstance(quality, str) else None,
    )
