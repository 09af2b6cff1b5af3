"""What a compiled kernel needs, read from its cubin: registers, shared memory, stack, and instruction counts.

Registers, memory and threads come from the ELF file itself, and so do the instructions that matter most, by their
opcodes: those of the tensor cores and those of local memory. All others come from nvdisasm (the package
nvidia-cuda-nvdisasm, or a CUDA toolkit on PATH), a fifth of a second a kernel; without it their counts are None.
"""

from __future__ import annotations

import collections
import functools
import importlib.util
import os
import re
import shutil
import struct
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

TENSOR_CORE = ("HGMMA", "HMMA", "IGMMA", "IMMA", "UTCHMMA", "UTCIMMA", "UTCQMMA", "UTCOMMA", "QGMMA", "QMMA", "DMMA")
# The low 12 bits of a 16-byte instruction, sm_80 to sm_120; a test holds them against nvdisasm. sm_100's tensor cores
# have one opcode for several names, which nvdisasm tells apart.
_OPCODES = {0x23C: "HMMA", 0x237: "IMMA", 0x9F0: "HGMMA", 0xDF0: "HGMMA", 0x9F1: "IGMMA", 0x983: "LDL", 0x387: "STL"}
_REGISTERS, _FRAME, _THREADS = 0x2F, 0x11, 0x10  # attributes of .nv.info
_PARAMETER, _PARAMETER_BYTES = (0x17, 0x45), 0x19  # two forms of KPARAM_INFO
_OPCODE = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P[0-9T]+\s+)?([A-Z][A-Za-z0-9_.]*)")


@dataclass(frozen=True)
class Resources:
    """One kernel on one target.

    `stack_bytes` is local memory per thread; LDL and STL instructions are its traffic. A kernel spills when one of the
    three is above zero. `parameters` are those of the launch: 1 + 2 rank of each array, less what is constant.
    `by_opcode` has what _OPCODES names; `instructions` is None where nvdisasm was not asked.
    """

    registers: int
    shared_bytes: int
    stack_bytes: int
    threads: int
    instructions: dict[str, int] | None
    parameters: int = 0
    parameter_bytes: int = 0
    by_opcode: dict[str, int] = field(default_factory=dict)

    def count(self, prefix: str) -> int:
        """Instructions whose name starts so: "HGMMA", "LDG.E.128", "LDL"."""
        if self.instructions is None:
            raise RuntimeError(
                "instructions were not counted: nvdisasm was not found (pip install nvidia-cuda-nvdisasm)"
            )
        return sum(
            number for name, number in self.instructions.items() if name == prefix or name.startswith(prefix + ".")
        )

    @property
    def tensor_core(self) -> dict[str, int]:
        """Tensor-core instructions by name; empty when the kernel reaches no tensor core.

        Raises:
            RuntimeError: there is none by its opcode, and nvdisasm was not asked.
        """
        known = {name: number for name in TENSOR_CORE if (number := self.by_opcode.get(name, 0))}
        return known or {name: number for name in TENSOR_CORE if (number := self.count(name))}

    @property
    def wide_loads(self) -> int:
        """Global loads of 16 bytes a thread."""
        found = self.instructions or {}
        return sum(number for name, number in found.items() if name.startswith("LDG.") and ".128" in name)

    @property
    def spills(self) -> int:
        """Local memory of any kind; without a stack frame there can be no LDL and no STL."""
        return self.stack_bytes + self.by_opcode.get("LDL", 0) + self.by_opcode.get("STL", 0)


def _sections(cubin: bytes) -> Iterator[tuple[str, int, int]]:
    """Name, offset and size of each ELF section."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    entry, number, names_at = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + i * entry) for i in range(number)]
    names = headers[names_at][4]
    for header in headers:
        start = names + header[0]
        yield cubin[start : cubin.index(b"\0", start)].decode(), header[4], header[5]


def _attributes(data: bytes) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Entries of an .nv.info section: format 4 carries a payload, the others a 16-bit value."""
    at = 0
    while at + 4 <= len(data):
        form, attribute = data[at], data[at + 1]
        (value,) = struct.unpack_from("<H", data, at + 2)
        at += 4
        if form == 4:
            yield attribute, struct.unpack_from(f"<{value // 4}I", data, at)
            at += value
        else:
            yield attribute, (value,)


def target(cubin: bytes) -> str:
    """The architecture in the ELF header's flags, "sm_90". The first 64 bytes are enough.

    Raises:
        ValueError: not an ELF file.
    """
    if cubin[:4] != b"\x7fELF" or len(cubin) < 0x34:
        raise ValueError(f"a cubin starts with an ELF header, this file with {cubin[:4]!r}")
    (flags,) = struct.unpack_from("<I", cubin, 0x30)
    return f"sm_{flags >> 8 & 0xFF}"  # as CUDA 13's tools write it


def resources(cubin: bytes, *, disassemble: bool = True) -> Resources:
    """Read one kernel's cubin. nvdisasm takes a quarter of a second: `disassemble=False` leaves the instructions None.

    Raises:
        ValueError: not an ELF file, a damaged one, or one without kernel information.
    """
    if cubin[:4] != b"\x7fELF":
        raise ValueError(f"a cubin starts with an ELF header, this file with {cubin[:4]!r}")
    try:
        found, shared = _needs(cubin)
    except (struct.error, OverflowError, IndexError) as error:
        raise ValueError(f"the cubin is damaged: {error}") from error
    if not found["registers"]:
        raise ValueError("the cubin holds no kernel")
    return Resources(
        found["registers"],
        shared,
        found["stack"],
        found["threads"],
        instruction_counts(cubin) if disassemble else None,
        found["parameters"],
        found["parameter_bytes"],
        _by_opcode(cubin),
    )


def _by_opcode(cubin: bytes) -> dict[str, int]:
    """Counts of the instructions that _OPCODES names."""
    counts: collections.Counter[int] = collections.Counter()
    for name, start, size in _sections(cubin):
        if name.startswith(".text."):
            halves = memoryview(cubin)[start : start + size // 16 * 16].cast("H")
            counts.update(half & 0xFFF for half in halves[::8].tolist())
    found: dict[str, int] = {}
    for opcode in _OPCODES.keys() & counts.keys():
        found[_OPCODES[opcode]] = found.get(_OPCODES[opcode], 0) + counts[opcode]
    return dict(sorted(found.items()))


def _needs(cubin: bytes) -> tuple[dict[str, int], int]:
    """What .nv.info says, and the bytes of shared memory."""
    found: dict[str, int] = dict.fromkeys(("registers", "stack", "threads", "parameters", "parameter_bytes"), 0)
    shared = 0
    for name, start, size in _sections(cubin):
        if name.startswith(".nv.shared.") and not name.startswith(".nv.shared.reserved"):
            shared = max(shared, size)
        if name != ".nv.info" and not name.startswith(".nv.info."):
            continue
        for attribute, values in _attributes(cubin[start : start + size]):
            _note(found, attribute, values, of_file=name == ".nv.info")
    return found, shared


def _note(found: dict[str, int], attribute: int, values: tuple[int, ...], *, of_file: bool) -> None:
    """One attribute: registers and stack are in the file's section, the rest in the kernel's."""
    if of_file and attribute == _REGISTERS:
        found["registers"] = max(found["registers"], values[1])
    elif of_file and attribute == _FRAME:
        found["stack"] = max(found["stack"], values[1])
    elif not of_file and attribute == _THREADS:
        found["threads"] = values[0]
    elif not of_file and attribute in _PARAMETER:
        found["parameters"] += 1
    elif not of_file and attribute == _PARAMETER_BYTES:
        found["parameter_bytes"] = values[0]


@functools.cache
def nvdisasm() -> str | None:
    """The disassembler: beside tileiras in the nvidia packages, else on PATH."""
    try:
        found = importlib.util.find_spec("nvidia.cu13")
    except ModuleNotFoundError:
        found = None
    beside = [str(Path(root) / "bin") for root in (found.submodule_search_locations or [])] if found else []
    return shutil.which("nvdisasm", path=os.pathsep.join(beside)) or shutil.which("nvdisasm")


def sass(cubin: bytes) -> str | None:
    """The disassembly, or None without nvdisasm."""
    tool = nvdisasm()
    if tool is None:
        return None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        run = subprocess.run([tool, "-ndf", "-c", file.name], capture_output=True, text=True, check=False)  # noqa: S603
    if run.returncode:
        raise ValueError(f"nvdisasm: {run.stderr.strip()}")
    return run.stdout


def instruction_counts(cubin: bytes) -> dict[str, int] | None:
    text = sass(cubin)
    return None if text is None else count_instructions(text)


def count_instructions(text: str) -> dict[str, int]:
    """Instructions of a disassembly by name, in the order of names."""
    found = (match.group(1) for line in text.splitlines() if (match := _OPCODE.match(line)))
    return dict(sorted(collections.Counter(found).items()))


def merged(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    """Sums over several kernels."""
    total: collections.Counter[str] = collections.Counter()
    for each in counts:
        total.update(each)
    return dict(sorted(total.items()))
