"""What the variants of a probe compile to, for any target: resources, instructions, and the code itself on disk.

    <folder>/<variant>/<kernel>.tileir, .sass, .cubin     to be compared with any diff
    <folder>/report.py                                    the probe with a runner: what a bug report can carry

Two variants have one `ir` letter when their Tile IR is the same but for the kernel's name, and one `letter` when their
instructions are, register for register. tileiras 13.4 can make two codes of one Tile IR, so the first is the firm one.
"""

from __future__ import annotations

import hashlib
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernels import cubin
from kernels.compile import CompileError, compile_with_code, distinct, tile_ir
from kernels.lab.probe import spec_arrays
from kernels.launch import supports_pdl

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernels.lab.probe import Probe, Variant
    from kernels.specs import Recorded

RUNNER = Path(__file__).parent / "standalone.txt"
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(.*?);", re.MULTILINE)
_ENTRY = re.compile(r"entry @\w+")
_OWN_SYMBOL = re.compile(r"`\([A-Za-z_]\w*\)")  # a return names its own kernel


@dataclass(frozen=True)
class Code:
    """One variant on one target. Registers, shared memory and stack are those of its largest kernel; the rest are sums.

    Attributes:
        kernels: specialisations that its launches need.
        parameters: of the launch with the most.
        tensor_core: instructions by name; None where nvdisasm is missing, as `instructions` and the local ones.
        ir, letter: equal for variants with the same Tile IR, and with the same instructions.
        error: the compiler's words where it did not compile; the numbers are 0 then.
    """

    variant: str
    kernels: int = 0
    registers: int = 0
    shared_bytes: int = 0
    stack_bytes: int = 0
    local_loads: int | None = None
    local_stores: int | None = None
    threads: int = 0
    parameters: int = 0
    parameter_bytes: int = 0
    tensor_core: dict[str, int] | None = None
    instructions: int | None = None
    cubin_bytes: int = 0
    compile_s: float = 0.0
    ir: str = ""
    letter: str = ""
    error: str | None = None
    digest: str = field(default="", repr=False)
    ir_digest: str = field(default="", repr=False)


def compile_probe(
    probe: Probe,
    arch: str,
    *,
    folder: Path | None = None,
    workers: int = 2,
    timeout: float = 300,
    on_done: Callable[[], None] = lambda: None,
) -> list[Code]:
    """Compile every variant that the target has and, with `folder`, save its code there.

    Raises:
        OSError: the folder can't be written.
    """
    arrays = spec_arrays(probe)
    wanted = [variant for variant in probe.variants(small=False) if not variant.pdl or supports_pdl(arch)]

    def one(variant: Variant) -> Code:
        found = _compile(variant, arrays, arch, folder, timeout)
        on_done()
        return found

    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "report.py").write_text(report(probe), encoding="utf-8")
    with ThreadPoolExecutor(max_workers=workers) as pool:
        return _with_letters(list(pool.map(one, wanted)))


def report(probe: Probe) -> str:
    """The probe's file with a runner at its end that needs cuda-tile and CuPy alone."""
    return probe.path.read_text(encoding="utf-8") + "\n\n" + RUNNER.read_text(encoding="utf-8")


def file_name(text: str) -> str:
    """Letters, digits and dashes: safe in any file system."""
    return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-") or "variant"


def _compile(variant: Variant, arrays: dict[str, Any], arch: str, folder: Path | None, timeout: float) -> Code:
    records = distinct(variant.record(arrays))
    try:
        parts = [compile_with_code(record, arch, timeout=timeout, disassemble="never") for record in records]
    except CompileError as error:
        return Code(variant.name, len(records), error=error.message)
    texts = [_sass(code) for _, _, code in parts]
    irs = [tile_ir(bytecode) for _, bytecode, _ in parts]
    if folder is not None:
        _save(folder / file_name(variant.name), records, [code for _, _, code in parts], texts, irs)
    found = [cubin.resources(code, disassemble=False) for _, _, code in parts]
    counts = [None if text is None else cubin.count_instructions(text) for text in texts]
    known = [count for count in counts if count is not None]
    counted = cubin.merged(known) if len(known) == len(counts) else None
    return Code(
        variant.name,
        kernels=len(records),
        registers=max(each.registers for each in found),
        shared_bytes=max(each.shared_bytes for each in found),
        stack_bytes=max(each.stack_bytes for each in found),
        local_loads=_count(counted, "LDL"),
        local_stores=_count(counted, "STL"),
        threads=max(each.threads for each in found),
        parameters=max(each.parameters for each in found),
        parameter_bytes=max(each.parameter_bytes for each in found),
        tensor_core=None
        if counted is None
        else {name: n for name in cubin.TENSOR_CORE if (n := _count(counted, name) or 0)},
        instructions=None if counted is None else sum(counted.values()),
        cubin_bytes=sum(len(code) for _, _, code in parts),
        compile_s=sum(compiled.seconds for compiled, _, _ in parts if not compiled.cached),
        digest=_digest(texts, [code for _, _, code in parts]),
        ir_digest=_ir_digest(irs),
    )


def _sass(code: bytes) -> str | None:
    """None also where nvdisasm does not know an instruction that tileiras has made: 13.4 has one in INT8 products."""
    try:
        return cubin.sass(code)
    except ValueError:
        return None


def _count(counted: dict[str, int] | None, prefix: str) -> int | None:
    if counted is None:
        return None
    return sum(n for name, n in counted.items() if name == prefix or name.startswith(prefix + "."))


def _digest(texts: list[str | None], codes: list[bytes]) -> str:
    """Of the instructions alone: names of kernels, addresses and line numbers do not count."""
    digest = hashlib.sha256()
    for text, code in zip(texts, codes, strict=True):
        found = code if text is None else _OWN_SYMBOL.sub("", "\n".join(_INSTRUCTION.findall(text))).encode()
        digest.update(found)
    return digest.hexdigest()


def _ir_digest(irs: list[str | None]) -> str:
    """ "" without the disassembler of Tile IR."""
    if None in irs:
        return ""
    return hashlib.sha256("\n".join(_ENTRY.sub("entry", ir or "") for ir in irs).encode()).hexdigest()


def _with_letters(codes: list[Code]) -> list[Code]:
    letters: dict[str, str] = {}
    irs: dict[str, str] = {"": ""}
    return [
        code
        if code.error
        else replace(
            code,
            letter=letters.setdefault(code.digest, _letter(len(letters))),
            ir=irs.setdefault(code.ir_digest, _letter(len(irs) - 1)),
        )
        for code in codes
    ]


def _letter(number: int) -> str:
    """A … Z, AA, AB, …"""
    return (_letter(number // 26 - 1) if number >= 26 else "") + chr(ord("A") + number % 26)


def _save(
    folder: Path, records: list[Recorded], codes: list[bytes], texts: list[str | None], irs: list[str | None]
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, (record, code, text, ir) in enumerate(zip(records, codes, texts, irs, strict=True)):
        name = record.name if len(records) == 1 else f"{number}-{record.name}"
        (folder / f"{name}.cubin").write_bytes(code)
        for suffix, content in ((".sass", text), (".tileir", ir)):
            if content is not None:
                (folder / f"{name}{suffix}").write_text(content, encoding="utf-8")
