"""Compiled kernels by what they are made of, so that a later process loads them without building Tile IR again.

cuda-tile's own cache is keyed by the Tile IR of a kernel, which takes it about 0.1 s a kernel to make, in Python,
before it can look, and which names the source's folder. A model needs some 25 kernels, and its first token would wait
3 s for them. Here the key is the kernel's name, hints, signature, sources and the compiler's version, so what was
compiled in one folder, or on a machine without the GPU, is found from another. What is not found goes the ordinary way
and is kept.

Rests on two private names of cuda-tile 1.7: a kernel compiles through its method `_compile`, and the mangled symbol of
a signature tells signatures apart. Without the method, `install` does nothing.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kernels import cache

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kernels.specs import Recorded

_FORMAT = "3"  # a line of JSON that says what it is, then the cubin


class Kept(NamedTuple):
    """`uses_mma` is None where a launch compiled it, which does not look."""

    cubin: bytes
    symbol: str
    uses_mma: bool | None


class CubinStore:
    """Files of one folder: a line of JSON (symbol, arch, compiler, SHA-256 of the cubin, whether its Tile IR has a
    matrix product where that is known), then the cubin. Without a folder nothing is kept.

    `on_compile(symbol)` is called when an installed kernel was not here and had to be compiled or looked up by its
    Tile IR. `seen` has the specialisations that launches of this process have asked for: kernel -> symbols.
    """

    def __init__(self, folder: Path | None, arch: str, on_compile: Callable[[str], None] | None = None) -> None:
        self._folder = folder
        self._arch = arch
        self._base = f"{_FORMAT} {arch} {cache.compiler_version()}"
        self._on_compile = on_compile
        self.seen: dict[str, list[str]] = {}

    @property
    def folder(self) -> Path | None:
        return self._folder

    @classmethod
    def beside_cache(cls, arch: str, on_compile: Callable[[str], None] | None = None) -> CubinStore:
        """In cuda-tile's cache folder; one that keeps nothing when its user has switched the cache off."""
        folder = cache.cache_dir()
        return cls(None if folder is None else folder / cache.OWN_FOLDER, arch, on_compile)

    def holds(self, records: Iterable[Recorded]) -> bool:
        """Whether all of these kernels are there."""
        paths = [self.path(record.kernel, record.signature().symbol) for record in records]
        return all(path is not None and path.exists() for path in paths)

    def path(self, kernel: Any, symbol: str) -> Path | None:
        """Where a kernel with this signature would lie; None where nothing is kept."""
        if self._folder is None:
            return None
        function = kernel._pyfunc  # noqa: SLF001
        options = sorted(vars(kernel._compiler_options).items())  # noqa: SLF001
        what = [self._base, function.__module__, function.__qualname__, repr(options), symbol, _sources(function)]
        return self._folder / (hashlib.sha256("\n".join(what).encode()).hexdigest()[:40] + cache.SUFFIX)

    def keep(self, kernel: Any, symbol: str, cubin: bytes, *, uses_mma: bool | None = None) -> OSError | None:
        """Put a compiled kernel here, where it is not yet. Returns why it can't be, where it can't."""
        path, there = self.path(kernel, symbol), self.find(kernel, symbol)
        if path is None or (there is not None and (uses_mma is None or there.uses_mma == uses_mma)):
            return None
        compiler, digest = cache.short_version(cache.compiler_version()), hashlib.sha256(cubin).hexdigest()
        about = {"symbol": symbol, "arch": self._arch, "compiler": compiler, "sha256": digest, "uses_mma": uses_mma}
        return _write(path, json.dumps(about).encode() + b"\n" + cubin)

    def find(self, kernel: Any, symbol: str) -> Kept | None:
        """None where it is not here, or damaged."""
        path = self.path(kernel, symbol)
        if path is None:
            return None
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            head, _, cubin = path.read_bytes().partition(b"\n")
            about = json.loads(head)
            if about["sha256"] == hashlib.sha256(cubin).hexdigest():
                cache.touch(path)
                return Kept(cubin, str(about["symbol"]), about.get("uses_mma"))
        return None

    def install(self, kernel: Any) -> None:
        """Let `kernel` look here before it compiles; the store that was installed last counts."""
        if hasattr(kernel, "_compile") and vars(kernel).get("_compiles_through") is not self:
            kernel._compile = functools.partial(self._compile, kernel)  # noqa: SLF001
            kernel._compiles_through = self  # noqa: SLF001

    def _compile(self, kernel: Any, signature: Any, *args: Any) -> Any:
        symbol = signature.with_mangled_symbol(kernel._pyfunc.__name__).symbol  # noqa: SLF001
        self.seen.setdefault(kernel._pyfunc.__name__, []).append(symbol)  # noqa: SLF001
        found = self.find(kernel, symbol)
        if found is not None:
            return found.cubin, found.symbol, None, ()
        result = type(kernel)._compile(kernel, signature, *args)  # noqa: SLF001
        cubin, name, host, providers = result
        if self._on_compile is not None:
            self._on_compile(name)
        if host is None and not providers:
            self.keep(kernel, name, bytes(cubin))
        return result


@functools.cache
def _folder_digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.py")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def _sources(function: Any) -> str:
    """A kernel calls helpers of its neighbours, so its sources are its whole folder's."""
    return _folder_digest(Path(function.__code__.co_filename).parent)


def _write(path: Path, content: bytes) -> OSError | None:
    """Whole or not at all. A folder that can't be written costs time, and nothing else."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(content)
        part.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        return error
    return None
