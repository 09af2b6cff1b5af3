"""Ahead-of-time compilation of recorded launches, for any target, on any machine with tileiras. No GPU needed.

    launcher = RecordingLauncher("sm_90", pdl=True)
    rms_norm(launcher, ArraySpec((1, 4096), "bfloat16"), …)           # a wrapper records instead of launching
    for result in compile_all(launcher.records, "sm_90", workers=2): ...

Compiled code goes into cuda-tile's own cache (`CUDA_TILE_CACHE_DIR`, else ~/.cache/cutile-python), where a later launch
finds it. cuda-tile keys an entry by the Tile IR bytecode, and the bytecode holds the source file's path and line
numbers. So a launch skips the compiler only if all of these are the same: kernel source and its path, cuda-tile and
tileiras versions, target, hints, and the signature (types, ranks, which lengths and strides are 1 or divisible by 16,
constants). It also goes into this project's store (cubin_store.py), whose key has the sources' contents in place of
their path: the engine looks there first, so what `tileinfer kernels compile` made is found from any folder.

Tile IR is made under cuda-tile's lock, some 20 to 150 ms a kernel; tileiras then runs in parallel.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from cutile_cache._cache import MetadataV1, cache_key, cache_lookup, cache_store

from kernels.cache import UnreadableCacheError, cache_dir, compiler_version, forget, size_limit, trim
from kernels.cubin import TENSOR_CORE, Resources, resources
from kernels.cubin_store import CubinStore
from kernels.processes import end_tree
from kernels.specs import ArraySpec, Recorded, RecordingLauncher
from kernels.without_torch import without_torch

with without_torch():
    from cuda.tile import TileCompilerExecutionError, TileCompilerTimeoutError
    from cuda.tile._compile import (
        _bytecode_to_mlir_text,
        _find_compiler_bin,
        _get_compiler_version_string,
        _parse_tileir_stderr,
        _tileiras_effective_opt_and_device_debug,
        compile_tile,
    )

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Generator, Iterable, Sequence

__all__ = [
    "ArraySpec",
    "CompileError",
    "CompileTimeoutError",
    "Compiled",
    "Recorded",
    "RecordingLauncher",
    "cache_dir",
    "compile_all",
    "compile_one",
    "compiler_version",
]

TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
Disassemble = Literal["never", "needed", "always"]


class CompileError(Exception):
    """The compiler refused a kernel, ran out of time, or was not found. `hint` says what to do about it."""

    def __init__(
        self, kernel: str, arch: str, message: str, hint: str | None = None, record: Recorded | None = None
    ) -> None:
        super().__init__(f"{kernel} for {arch}: {message}")
        self.kernel = kernel
        self.arch = arch
        self.message = message
        self.hint = hint
        self.record = record


class CompileTimeoutError(CompileError):
    """The compiler was ended because it ran longer than allowed."""


@dataclass(frozen=True)
class Compiled:
    """One kernel for one target.

    `record` is what was compiled; `cached` is True where tileiras did not have to run; `uses_mma` whether the Tile IR
    has a matrix product. `unkept` says why it could not be put into the store, where it could not.
    """

    record: Recorded
    arch: str
    symbol: str
    seconds: float
    cached: bool
    uses_mma: bool
    resources: Resources
    cubin_bytes: int
    unkept: str | None = None

    @property
    def kernel(self) -> str:
        return self.record.name

    @property
    def hints(self) -> tuple[tuple[str, Any], ...]:
        return self.record.hints


@dataclass(frozen=True)
class _Job:
    record: Recorded
    arch: str
    symbol: str
    bytecode: bytes
    key: str
    uses_mma: bool


def _job(record: Recorded, arch: str) -> _Job:
    """Tile IR and cache key, as cuda.tile's compile_tile makes them."""
    kernel = record.kernel
    try:
        signature = record.signature()
        options = kernel._compiler_options  # noqa: SLF001
        result = compile_tile(
            kernel._annotated_function,  # noqa: SLF001
            (signature,),
            arch,
            options,
            return_final_ir=True,
            return_bytecode=True,
            return_cubin=False,
        )
        uses_mma = any(type(op).__name__.startswith("TileMma") for op in result.final_ir[0].traverse())
        opt_level, debug = _tileiras_effective_opt_and_device_debug(options, arch)
        version = _get_compiler_version_string()
        bytecode = bytes(result.bytecode)
        key = cache_key(version, arch, opt_level, bytecode, debug)
        return _Job(record, arch, signature.symbol, bytecode, key, uses_mma)
    except Exception as error:
        raise _explain(record, arch, error) from error


def _explain(record: Recorded, arch: str, error: Exception) -> CompileError:
    """The compiler's message with the way out, where there is a known one."""
    text = str(error) or type(error).__name__
    hint = None
    if isinstance(error, TileCompilerTimeoutError):
        return CompileTimeoutError(record.name, arch, text, None, record)
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if isinstance(error, FileNotFoundError) and "tileiras" in text:
        hint = "install the compiler: pip install 'cuda-tile[tileiras]'"
    elif home and "Return code 5" in text and _find_compiler_bin().pass_cuda_home_var:
        hint = f"unset CUDA_HOME: it names {home}, whose toolkit may be older than tileiras"
    return CompileError(record.name, arch, text, hint, record)


def _tileiras(job: _Job, timeout: float | None) -> bytes:
    with tempfile.TemporaryDirectory(prefix="tileinfer-") as folder:
        source = Path(folder) / "kernel.bytecode"
        source.write_bytes(job.bytecode)
        cubin = source.with_suffix(".cubin")
        _run_tileiras([str(source), "-o", str(cubin)], _flags(job), timeout)
        return cubin.read_bytes()


def _flags(job: _Job) -> list[str]:
    """As cuda.tile's compile_cubin has them: its cache's keys stand for them."""
    level, debug = _tileiras_effective_opt_and_device_debug(job.record.kernel._compiler_options, job.arch)  # noqa: SLF001
    return ["--gpu-name", job.arch, f"-O{level}", "--device-debug" if debug else "--lineinfo"]


def _run_tileiras(args: list[str], flags: list[str], timeout: float | None) -> None:
    """cuda.tile's own way to run it, but for the end of its time: ptxas, which tileiras runs, must end with it."""
    binary = _find_compiler_bin()
    environ = {**os.environ, "LD_LIBRARY_PATH": binary.ld_path, "PATH": binary.bin_path}
    if not binary.pass_cuda_home_var:
        environ = {name: value for name, value in environ.items() if name not in ("CUDA_HOME", "CUDA_PATH")}
    command = [binary.path, *args, *flags]
    with subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:  # noqa: S603
        try:
            _, said = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            end_tree(process.pid, signal.SIGKILL)
            process.communicate()
            message = f"the compiler exceeded its timeout of {timeout:g} s"
            raise TileCompilerTimeoutError(message, " ".join(flags), _get_compiler_version_string()) from None
        except BaseException:
            end_tree(process.pid)
            raise
    if process.returncode:
        message, where = _parse_tileir_stderr(said.decode(errors="replace"))
        version = _get_compiler_version_string()
        raise TileCompilerExecutionError(process.returncode, message, where, " ".join(flags), version)


def _resources(uses_mma: bool, cubin: bytes, disassemble: Disassemble) -> Resources:
    """ "needed" is a matrix product in which no tensor-core instruction is known by its opcode."""
    found = resources(cubin, disassemble=disassemble == "always")
    if disassemble == "needed" and uses_mma and not found.by_opcode.keys() & set(TENSOR_CORE):
        return resources(cubin)
    return found


def _unless(cancelled: threading.Event | None, record: Recorded, arch: str) -> None:
    """Raises CompileError once the work is cancelled: Python's exit waits for what a pool has begun."""
    if cancelled is not None and cancelled.is_set():
        raise CompileError(record.name, arch, "cancelled")


def _compile(
    record: Recorded,
    arch: str,
    folder: Path | None,
    *,
    timeout: float | None,
    disassemble: Disassemble,
    cancelled: threading.Event | None = None,
) -> Compiled:
    start = time.perf_counter()
    _unless(cancelled, record, arch)
    symbol = _symbol(record, arch)
    kept = CubinStore.beside_cache(arch).find(record.kernel, symbol)
    if kept is not None and kept.uses_mma is not None:  # found without making Tile IR
        try:
            needs = _resources(kept.uses_mma, kept.cubin, disassemble)
        except ValueError as error:
            raise _explain(record, arch, error) from error
        seconds = time.perf_counter() - start
        return Compiled(record, arch, symbol, seconds, True, kept.uses_mma, needs, len(kept.cubin))
    options: dict[str, Any] = {"timeout": timeout, "disassemble": disassemble, "cancelled": cancelled}
    return _compile_with_code(record, arch, folder, **options)[0]


def _symbol(record: Recorded, arch: str) -> str:
    try:
        return str(record.signature().symbol)
    except Exception as error:
        raise _explain(record, arch, error) from error


def _looked_up(folder: Path, key: str) -> bytes | None:
    """What cuda-tile's cache has; an entry that is no cubin is taken out, for another would not replace it."""
    cubin = cache_lookup(str(folder), key)
    if cubin is None:
        return None
    try:
        resources(cubin, disassemble=False)
    except (ValueError, TypeError):
        forget(folder, key)
        return None
    return cubin


def _compile_with_code(
    record: Recorded,
    arch: str,
    folder: Path | None,
    *,
    timeout: float | None,
    disassemble: Disassemble,
    cancelled: threading.Event | None = None,
) -> tuple[Compiled, bytes, bytes]:
    """What it compiled to, its Tile IR bytecode and its cubin."""
    start = time.perf_counter()
    _unless(cancelled, record, arch)
    job = _job(record, arch)
    _unless(cancelled, record, arch)
    store = CubinStore.beside_cache(arch)
    cubin = None if folder is None else _looked_up(folder, job.key)
    cached = cubin is not None
    try:
        if cubin is None:
            cubin = _tileiras(job, timeout)
            if folder is not None:
                metadata = MetadataV1(
                    kernel_names=[job.symbol],
                    compiler_version=(_get_compiler_version_string() or "").strip(),
                    compilation_timestamp=time.time(),
                    compilation_time_seconds=time.perf_counter() - start,
                )
                cache_store(str(folder), job.key, cubin, metadata.to_dict())
        refused = store.keep(record.kernel, job.symbol, cubin, uses_mma=job.uses_mma)
        found = _resources(job.uses_mma, cubin, disassemble)
    except Exception as error:
        raise _explain(record, arch, error) from error
    seconds = time.perf_counter() - start
    unkept = None if refused is None else refused.strerror or str(refused)
    compiled = Compiled(record, arch, job.symbol, seconds, cached, job.uses_mma, found, len(cubin), unkept)
    return compiled, job.bytecode, cubin


def compile_one(
    record: Recorded, arch: str, *, timeout: float | None = 300, disassemble: Disassemble = "always"
) -> Compiled:
    """Compile one recorded launch for `arch` ("sm_90").

    `disassemble` says for which kernels nvdisasm counts all instructions, a fifth of a second each: "needed" are those
    with a matrix product and no tensor-core instruction that is known by its opcode.

    Raises:
        CompileError: the kernel does not compile, tileiras is missing, or `timeout` seconds have passed.
    """
    return _compile(record, arch, cache_dir(), timeout=timeout, disassemble=disassemble)


def compile_with_code(
    record: Recorded, arch: str, *, timeout: float | None = 300, disassemble: Disassemble = "always"
) -> tuple[Compiled, bytes, bytes]:
    """As `compile_one`, with the Tile IR bytecode and the cubin."""
    return _compile_with_code(record, arch, cache_dir(), timeout=timeout, disassemble=disassemble)


def tile_ir(bytecode: bytes) -> str | None:
    """Tile IR as text; None without the disassembler that comes with tileiras."""
    try:
        return str(_bytecode_to_mlir_text(bytecode))
    except FileNotFoundError:
        return None


def distinct(records: Iterable[Recorded]) -> list[Recorded]:
    """Records that compile to different code: kernel, hints and signature."""
    seen: dict[Any, Recorded] = {}
    for record in records:
        seen.setdefault(record.identity(), record)
    return list(seen.values())


def compile_all(
    records: Sequence[Recorded],
    arch: str,
    *,
    workers: int = 2,
    timeout: float | None = 300,
    disassemble: Disassemble = "never",
    on_progress: Callable[[int, int, Compiled | CompileError], None] | None = None,
    cancelled: threading.Event | None = None,
) -> Generator[Compiled | CompileError]:
    """Compile every distinct record for `arch`, `workers` compilers at a time, yielding results as they come.

    A kernel that fails is yielded as its CompileError, and the others go on. `on_progress(done, total, result)` is
    called in the caller's thread. Once `cancelled` is set no compiler starts any more; those that run are not ended.
    """
    jobs = distinct(records)
    folder = cache_dir()
    with ThreadPoolExecutor(max_workers=workers) as pool:
        futures = [
            pool.submit(_compile, record, arch, folder, timeout=timeout, disassemble=disassemble, cancelled=cancelled)
            for record in jobs
        ]
        try:
            for done, future in enumerate(as_completed(futures), 1):
                error = future.exception()
                if error is not None and not isinstance(error, CompileError):
                    raise error
                result = error if error is not None else future.result()
                if on_progress is not None:
                    on_progress(done, len(jobs), result)
                yield result
        finally:
            pool.shutdown(cancel_futures=True)
            if folder is not None:
                _hold_size_limit(folder)


def _hold_size_limit(folder: Path) -> None:
    """Entries used longest ago make room. A cache that can't be trimmed is no reason to stop."""
    with contextlib.suppress(OSError, UnreadableCacheError):
        trim(folder, size_limit())
