"""Ahead-of-time compilation: what it reports, what it caches, and how it fails."""

from __future__ import annotations

import dataclasses
import re
from typing import Annotated, Any

import cuda.tile as ct
import pytest
from cuda.tile import _compile
from cuda.tile._cext import default_tile_context

from kernels import cubin
from kernels.catalogue import SHARED_LIMIT, faults
from kernels.compile import (
    TARGETS,
    ArraySpec,
    Compiled,
    CompileError,
    RecordingLauncher,
    cache_dir,
    compile_all,
    compile_one,
)
from kernels.cubin import nvdisasm, resources
from kernels.lab.probe import find, spec_arrays
from kernels.specs import Recorded, signature

I = ct.Constant[int]  # noqa: E741
needs_nvdisasm = pytest.mark.skipif(nvdisasm() is None, reason="nvdisasm is not installed")


@ct.kernel
def product_kernel(x, w, y, M: I, N: I, K: I):
    acc = ct.zeros((M, N), dtype=ct.float32)
    for k in range(ct.num_tiles(x, 1, (M, K))):
        tile = ct.load(x, index=(0, k), shape=(M, K), check_bounds=False)
        acc = ct.mma(tile, ct.load(w, index=(k, 0), shape=(K, N), check_bounds=False), acc)
    ct.store(y, index=(0, 0), tile=acc)


@ct.kernel
def int8_product_kernel(x, w, y):
    a, b = ct.load(x, index=(0, 0), shape=(64, 64)), ct.load(w, index=(0, 0), shape=(64, 64))
    ct.store(y, index=(0, 0), tile=ct.mma(a, b, ct.zeros((64, 64), dtype=ct.int32)))


@ct.kernel
def scale_kernel(x, y, factor):
    tile = ct.load(x, index=(ct.bid(0), 0), shape=(1, 1024), allow_tma=False)
    ct.store(y, index=(ct.bid(0), 0), tile=tile * factor, allow_tma=False)


@ct.kernel
def row_kernel(x, at, y, GATHER: I):
    row = ct.load(at, index=(0,), shape=(), check_bounds=False).item()
    if GATHER:
        tile = ct.gather(x, (row, ct.arange(128, dtype=ct.int32)), check_bounds=False).reshape((1, 128))
    else:
        tile = ct.load(x, index=(row, 0), shape=(1, 128), allow_tma=False, check_bounds=False)
    ct.store(y, index=(0, 0), tile=tile)


@ct.kernel
def ill_typed_kernel(x, y):
    ct.store(y, index=(0,), tile=ct.load(x, index=(0,), shape=(4,)))


@ct.kernel
def signature_kernel(x, y, n, N: I):
    pass


@ct.kernel
def tuple_kernel(x, both, N: I):
    pass


@ct.kernel
def annotated_kernel(
    x: Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(0,))],
    y: Annotated[ct.Array, ct.ArrayAnnotation(static_stride_dims=(0, -1))],
    z: ct.IndexedWithInt64,
    n: ct.ScalarInt64,
):
    pass


def product(m: int, n: int = 8, k: int = 64) -> Recorded:
    args = (ArraySpec((m, 1024), "bfloat16"), ArraySpec((1024, n), "bfloat16"), ArraySpec((m, n), "float32"), m, n, k)
    return Recorded(product_kernel, (1, 1, 1), args)


def scale(rows: int = 16) -> Recorded:
    spec = ArraySpec((rows, 1024), "float32")
    return Recorded(scale_kernel, (rows, 1, 1), (spec, spec, 2.0))


@needs_nvdisasm
@pytest.mark.parametrize(("arch", "instruction"), [("sm_80", "HMMA"), ("sm_90", "HGMMA"), ("sm_120", "HMMA")])
def test_products_reach_the_tensor_cores(arch: str, instruction: str) -> None:
    found = compile_one(product(64), arch)
    assert found.uses_mma
    assert list(found.resources.tensor_core) == [instruction]
    assert 0 < found.resources.registers <= 255
    assert 0 < found.resources.shared_bytes <= SHARED_LIMIT[int(arch[3:])]
    assert found.resources.threads >= 128
    assert faults(found, "kernels.launch") == []


@needs_nvdisasm
def test_a_product_too_small_for_the_tensor_cores_is_a_fault() -> None:
    """Below M·N = 512 the compiler makes scalar code, without a word."""
    found = compile_one(product(32), "sm_90")
    assert "has an mma but no tensor-core instruction" in faults(found, "kernels.launch")


@needs_nvdisasm
@pytest.mark.parametrize("arch", TARGETS)
def test_opcodes_are_nvdisasm_s(arch: str) -> None:
    """Tensor cores in BF16 and INT8, and local memory: what is counted by opcode is what nvdisasm counts."""
    int8 = ArraySpec((64, 64), "int8")
    [padding] = find(["padding"])
    variants = {each.name: each for each in padding.variants(small=False)}
    spilling = variants["R=8 on M"].record(spec_arrays(padding))
    int8_product = Recorded(int8_product_kernel, (1, 1, 1), (int8, int8, ArraySpec((64, 64), "int32")))
    records = [product(64), int8_product, scale()]
    seen: set[str] = set()
    for record in (*records, *spilling):
        found = compile_one(record, arch).resources
        assert found.instructions is not None
        for name in (*cubin.TENSOR_CORE, "LDL", "STL"):
            if name in found.by_opcode or arch != "sm_100" or not name.startswith("UTC"):
                assert found.by_opcode.get(name, 0) == found.count(name), (record.name, name)
            seen |= {name} if found.count(name) else set()
    assert {"LDL", "STL"} < seen
    assert len(seen & set(cubin.TENSOR_CORE)) == 2


@needs_nvdisasm
def test_nvdisasm_is_asked_where_no_opcode_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    real = cubin.sass
    monkeypatch.setattr(cubin, "sass", lambda code: asked.append(len(code)) or real(code))
    cases = ((product(64), "sm_90", 0), (product(32), "sm_90", 1), (product(64), "sm_100", 1), (scale(), "sm_90", 0))
    for record, arch, times in cases:
        compile_one(record, arch, disassemble="never")
        asked.clear()
        found = compile_one(record, arch, disassemble="needed")
        assert found.cached
        assert len(asked) == times


@needs_nvdisasm
def test_loads_of_sixteen_bytes_and_no_spills() -> None:
    found = compile_one(scale(), "sm_90").resources
    assert found.wide_loads >= 1
    assert found.spills == 0
    assert found.tensor_core == {}


@needs_nvdisasm
@pytest.mark.parametrize("gather", [0, 1])
def test_a_row_times_its_stride_has_64_bits(gather: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A KV pool or a table may have more than 2³¹ elements: rows are 32-bit numbers, addresses are not."""
    texts: list[str] = []
    real = cubin.sass
    monkeypatch.setattr(cubin, "sass", lambda code: texts.append(text := real(code)) or text)
    arrays = (ArraySpec((2**24, 4096), "bfloat16"), ArraySpec(1, "int32"), ArraySpec((1, 128), "bfloat16"))
    compile_one(Recorded(row_kernel, (1, 1, 1), (*arrays, gather)), "sm_90")
    row = re.search(r"LDG\.E (R\d+),", texts[0])
    assert row is not None
    assert re.search(rf"IMAD\.WIDE(?:\.U32)? R\d+, {row[1]}, UR\d+", texts[0]), texts[0]


def test_the_second_compilation_is_a_look_up(monkeypatch: pytest.MonkeyPatch) -> None:
    first = compile_one(scale(48), "sm_89", disassemble="never")

    def never(*_: Any) -> None:
        raise AssertionError("tileiras ran again")

    monkeypatch.setattr("kernels.compile._tileiras", never)
    second = compile_one(scale(48), "sm_89", disassemble="never")
    assert second.cached
    assert second.symbol == first.symbol
    assert second.cubin_bytes == first.cubin_bytes


def test_cuda_tile_finds_what_was_compiled_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path a launch takes: cuda.tile compiles the signature that its dispatcher derived."""
    record = scale(80)
    compile_one(record, "sm_90", disassemble="never")
    monkeypatch.setattr(default_tile_context.config, "cache_dir", str(cache_dir()))
    monkeypatch.setattr(_compile, "compile_cubin", lambda *_, **__: pytest.fail("cuda.tile missed the cache"))
    result = _compile.compile_tile(
        scale_kernel._annotated_function, (record.signature(),), "sm_90", scale_kernel._compiler_options
    )
    assert result.cubin[:4] == b"\x7fELF"


def test_each_distinct_kernel_once_with_progress() -> None:
    launcher = RecordingLauncher("sm_90", pdl=True)
    for rows in (16, 32, 16, 7):  # 16 and 32 are one specialisation, 7 is another
        spec = ArraySpec((rows, 1024), "float32")
        launcher(scale_kernel, (rows, 1, 1), (spec, spec, 2.0))
    seen: list[tuple[int, int]] = []
    found = list(compile_all(launcher.records, "sm_90", on_progress=lambda done, total, _: seen.append((done, total))))
    assert seen == [(1, 2), (2, 2)]
    assert all(isinstance(result, Compiled) for result in found)


def test_a_failure_names_the_kernel_and_the_others_go_on() -> None:
    wrong = Recorded(ill_typed_kernel, (1, 1, 1), (ArraySpec(4, "float32"), ArraySpec(4, "float16")))
    found = list(compile_all([wrong, scale()], "sm_80"))
    [error] = [result for result in found if isinstance(result, CompileError)]
    assert "ill_typed_kernel for sm_80" in str(error)
    assert "incompatible" in str(error)
    assert len(found) == 2


def test_time_limit() -> None:
    with pytest.raises(CompileError, match=r"product_kernel for sm_90: .*timeout of 0.001 s"):
        compile_one(product(128, 64), "sm_90", timeout=0.001, disassemble="never")


def test_hints_name_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any) -> None:
        raise FileNotFoundError("'tileiras' compiler not found, make sure it is available")

    def older(*_: Any) -> None:
        raise ct.TileCompilerExecutionError(5, "failed to compile Tile IR program", _compile.Loc.unknown(), "", None)

    monkeypatch.setattr("kernels.compile._tileiras", missing)
    with pytest.raises(CompileError) as caught:
        compile_one(scale(97), "sm_86", disassemble="never")
    assert caught.value.hint == "install the compiler: pip install 'cuda-tile[tileiras]'"
    monkeypatch.setattr("kernels.compile._tileiras", older)
    with pytest.raises(CompileError) as caught:
        compile_one(scale(97), "sm_86", disassemble="never")
    assert caught.value.hint is None
    monkeypatch.setenv("CUDA_HOME", "/opt/cuda-12")
    found = dataclasses.replace(_compile._find_compiler_bin(), pass_cuda_home_var=False)
    monkeypatch.setattr("kernels.compile._find_compiler_bin", lambda: found)  # a compiler that never sees CUDA_HOME
    with pytest.raises(CompileError) as caught:
        compile_one(scale(97), "sm_86", disassemble="never")
    assert caught.value.hint is None
    found = dataclasses.replace(found, pass_cuda_home_var=True)
    with pytest.raises(CompileError) as caught:
        compile_one(scale(97), "sm_86", disassemble="never")
    assert "unset CUDA_HOME: it names /opt/cuda-12" in str(caught.value.hint)


def test_a_file_that_is_no_cubin() -> None:
    with pytest.raises(ValueError, match="starts with an ELF header"):
        resources(b"not a cubin")


# What cuda-tile 1.7.0's own dispatcher called these launches; a symbol spells the whole signature.
SYMBOLS: list[tuple[Any, tuple[Any, ...], str]] = [
    (
        signature_kernel,
        (ArraySpec((16, 128), "float32"), ArraySpec((16, 128), "float32"), 3, 7),
        "Kt1_A2f32_1v4l0_2t1_3i16_p16_A2f32_1v4l0_2t1_3i16_p16_Si32_I7",
    ),
    (
        signature_kernel,
        (ArraySpec((1, 130), "float16", offset=4), ArraySpec(5, "float16", offset=8), 1.5, True),
        "Kt2_A2f16_1s1l0_2t1_A1f16_1t1_Sf32_B1",
    ),
    (
        signature_kernel,
        (ArraySpec((4, 8), "float16", (64, 2)), ArraySpec((), "float32"), True, -1),
        "Kt1_A2f16_1v8l0_2t1_p16_A0f32_p16_Sb8_I_1",
    ),
    (
        signature_kernel,
        (ArraySpec((4, 8), "float32", (0, 4)), ArraySpec((4, 8), "float32", (4, 16)), 3, 7),
        "Kt1_A2f32_1v4l0_2t1_p16i_A2f32_1t1_2v4l0_p16_Si32_I7",
    ),
    (
        signature_kernel,
        (ArraySpec((16, 1), "int32", (4, 4)), ArraySpec((1, 1, 1), "int8"), 3, 7),
        "Kt2_A2i32_1i16_2s1_3t1_p16_A3i8_7s1t1_p16_Si32_I7",
    ),
    (
        tuple_kernel,
        (ArraySpec((16, 128), "float32"), (ArraySpec(32, "int32"), 3), 0.5),
        "Kt2_A2f32_1v4l0_2t1_3i16_p16_T2A1i32_1i16t1_p16Si32_F3fe0000000000000",
    ),
    (
        annotated_kernel,
        (*(ArraySpec((16, 128), "float32"),) * 2, ArraySpec((2**20, 2**12), "float32"), 3),
        "Kt2_A2f32_1s16v4l0_2i16t1_p16_A2f32_1t128_2t1_3i16_p16_A2f32_1v4l0_2t1_3i16_p16w_Si64",
    ),
]


@pytest.mark.parametrize(("kernel", "args", "symbol"), SYMBOLS)
def test_signature_is_the_dispatcher_s(kernel: Any, args: tuple[Any, ...], symbol: str) -> None:
    assert signature(kernel, args).symbol == f"{kernel._pyfunc.__name__}_{symbol}"


@pytest.mark.gpu
def test_signature_is_the_dispatcher_s_on_this_gpu() -> None:
    cupy = pytest.importorskip("cupy")
    import ml_dtypes
    from cuda.tile.compilation import KernelSignature

    arrays = [
        cupy.zeros((16, 128), dtype=ml_dtypes.bfloat16),
        cupy.zeros((1, 130), dtype=cupy.float32),
        cupy.zeros((64, 64), dtype=cupy.float16)[:, 3:40],
        cupy.zeros(7, dtype=cupy.int8)[1:],
        cupy.zeros((), dtype=cupy.int32),
    ]
    for x in arrays:
        for y in arrays:
            mine = signature(signature_kernel, (x, y, 3, 7))
            theirs = KernelSignature.from_kernel_args(signature_kernel, (x, y, 3, 7), mine.calling_convention)
            assert mine == theirs


def test_targets_are_known() -> None:
    assert all(int(arch[3:]) in SHARED_LIMIT for arch in TARGETS)
