"""What `explain` calls distinct is what compiles: counted in the compiler's cache, and on a GPU in the JIT."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cuda.tile as ct
import numpy as np
import pytest

from kernels import cache
from kernels.compile import CompileError, compile_all
from kernels.cubin_store import CubinStore
from kernels.lab.explain import LaunchTextError, changed, differences, nearest, refused, specialisation
from kernels.launch import launch, with_hints
from kernels.specs import ArraySpec, Recorded

if TYPE_CHECKING:
    from pathlib import Path

GRID = (1, 1, 1)


@ct.kernel
def sum_kernel(x, y, scale, N: ct.Constant[int]):
    """y[0] = scale · Σ x over the first tile."""
    if x.ndim == 1:
        tile = ct.load(x, index=(0,), shape=(N,), padding_mode=ct.PaddingMode.ZERO)
    else:
        tile = ct.load(x, index=(0, 0), shape=(1, N), padding_mode=ct.PaddingMode.ZERO).reshape((N,))
    ct.store(y, index=(0,), tile=ct.sum(tile.astype(ct.float32), axis=0, keepdims=True) * scale)


# (shape, dtype, bytes from an aligned start, strides in elements or None), scale, N, hints; and what the launch shows.
Y = ((16,), "float32", 0, None)
CASES: list[tuple[str, Any, Any, int, dict[str, int]]] = [
    ("base", ((64,), "float32", 0, None), 1.0, 32, {}),
    ("another length divisible by 16", ((96,), "float32", 0, None), 1.0, 32, {}),
    ("a length not divisible by 16", ((63,), "float32", 0, None), 1.0, 32, {}),
    ("another of those", ((7,), "float32", 0, None), 1.0, 32, {}),
    ("a length of 1", ((1,), "float32", 0, None), 1.0, 32, {}),
    ("aligned to 4 bytes", ((64,), "float32", 4, None), 1.0, 32, {}),
    ("aligned to 16 bytes, not to 256", ((64,), "float32", 16, None), 1.0, 32, {}),
    ("another type", ((64,), "int32", 0, None), 1.0, 32, {}),
    ("another rank", ((4, 64), "float32", 0, None), 1.0, 32, {}),
    ("rows not divisible by 16 bytes", ((4, 64), "float32", 0, (65, 1)), 1.0, 32, {}),
    ("every second number", ((64,), "float32", 0, (2,)), 1.0, 32, {}),
    ("every fourth number", ((64,), "float32", 0, (4,)), 1.0, 32, {}),
    ("another scalar", ((64,), "float32", 0, None), 2.5, 32, {}),
    ("a scalar of another type", ((64,), "float32", 0, None), 2, 32, {}),
    ("another constant", ((64,), "float32", 0, None), 1.0, 64, {}),
    ("a hint", ((64,), "float32", 0, None), 1.0, 32, {"occupancy": 2}),
    ("another hint", ((64,), "float32", 0, None), 1.0, 32, {"occupancy": 4}),
]
SAME_AS_BASE = {"base", "another length divisible by 16", "aligned to 16 bytes, not to 256", "another scalar"}
DISTINCT = 13


def record(x: Any, y: Any, case: Any) -> Recorded:
    _, _, scale, n, hints = case
    return Recorded(with_hints(sum_kernel, **hints), GRID, (x, y, scale, n))


def spec(shape: Any, dtype: str, offset: int, steps: Any) -> ArraySpec:
    strides = None if steps is None else tuple(4 * step for step in steps)
    return ArraySpec(shape, dtype, strides, offset)


def predicted() -> list[Recorded]:
    return [record(spec(*case[1]), spec(*Y), case) for case in CASES]


def test_what_is_distinct() -> None:
    found = {case[0]: specialisation(each) for case, each in zip(CASES, predicted(), strict=True)}
    base = found["base"]
    assert {name for name, each in found.items() if each.identity == base.identity} == SAME_AS_BASE
    assert len({each.identity for each in found.values()}) == DISTINCT
    for each in found.values():
        for other in found.values():
            assert (differences(each, other) == []) == (each.identity == other.identity)
    assert differences(found["a length of 1"], base) == ["x: length of axis 0 1 (constant), there divisible by 16"]
    assert differences(found["aligned to 4 bytes"], base) == [
        "x: address not divisible by 16 bytes, there divisible by 16 bytes"
    ]
    assert differences(found["a scalar of another type"], base) == ["scale: scalar of type int32, there float32"]
    assert differences(found["a hint"], base) == ["hints: occupancy 2, there none"]
    assert base.parameters == 3 + 3 + 1


def test_the_compiler_makes_as_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """New entries of cuda-tile's cache, whose keys are its own: as many as are predicted, once and no more."""
    pytest.importorskip("cuda.tile._compile")
    monkeypatch.setenv("CUDA_TILE_CACHE_DIR", str(tmp_path))
    for wanted in (DISTINCT, DISTINCT):
        results = list(compile_all(predicted(), "sm_90"))
        assert [result for result in results if isinstance(result, CompileError)] == []
        kept = [entry for entry in cache.entries(tmp_path) if entry.store == "cuda-tile"]
        assert len(kept) == wanted
    symbols = {specialisation(each).symbol for each in predicted()}
    assert {entry.symbol for entry in kept} == symbols


@pytest.mark.gpu
def test_the_jit_makes_as_many() -> None:
    """Counts how often cuda-tile's own dispatcher asks for a compilation, for arrays of real memory."""
    cupy = pytest.importorskip("cupy")
    arch = f"sm_{cupy.cuda.Device(0).compute_capability}"
    told: list[str] = []
    store = CubinStore(None, arch, told.append)
    stream = cupy.cuda.Stream(non_blocking=True)
    y = cupy.zeros(16, np.float32)
    launched = []
    for case in CASES:
        shape, dtype, offset, steps = case[1]
        memory = cupy.ones(1024, dtype)[offset // 4 :]
        if steps is None:
            x = memory[: int(np.prod(shape))].reshape(shape)
        else:
            x = cupy.lib.stride_tricks.as_strided(memory, shape, tuple(4 * step for step in steps))
        launched.append(record(x, y, case))
    cupy.cuda.Device().synchronize()
    for _ in range(2):
        for each in launched:
            store.install(each.kernel)
            launch(each.kernel, GRID, each.args, stream=stream.ptr, arch=arch)
    stream.synchronize()
    assert len(told) == DISTINCT
    assert set(told) == {specialisation(each).symbol for each in launched}
    assert [specialisation(each).symbol for each in launched] == [specialisation(each).symbol for each in predicted()]
    other = cupy.cuda.Stream(non_blocking=True)
    base = launched[0]
    launch(base.kernel, (2, 1, 1), base.args, stream=other.ptr, arch=arch, dependent=True)  # grid, stream and kind
    other.synchronize()
    assert len(told) == DISTINCT


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x=float32[17]", ["x: length of axis 0 not divisible by 16, there divisible by 16"]),
        ("x=float32[64]@8  N=32", ["x: address not divisible by 16 bytes, there divisible by 16 bytes"]),
        ("x=float32[4, 64]:(260, 4)", None),
        ("N=64", ["N: constant 64, there 32"]),
        ("scale=3.5", []),
        ("occupancy=2", ["hints: occupancy 2, there none"]),
    ],
)
def test_launches_in_words(text: str, says: list[str] | None) -> None:
    base = predicted()[0]
    found = specialisation(changed(base, text))
    if says is not None:
        assert differences(found, specialisation(base)) == says
    known = [specialisation(each) for each in predicted()]
    closest = nearest(found, known)
    assert closest is not None
    assert len(differences(found, known[closest])) <= len(differences(found, known[0]))
    assert nearest(found, []) is None


@ct.kernel
def wide_kernel(x: ct.IndexedWithInt64, y):
    ct.store(y, index=(0,), tile=ct.load(x, index=(0, 0), shape=(1, 16)).reshape((16,)))


@pytest.mark.parametrize(
    ("shape", "strides", "says"),
    [
        ((2**31, 4), None, "x has a length of 2,147,483,648; from 2³¹ on it needs the annotation IndexedWithInt64"),
        ((2, 2**31), None, "x has a length of 2,147,483,648"),
        ((2, 4), (2**33, 4), "x has a stride of 2,147,483,648"),
        ((2**31 - 1, 2), None, None),
        ((2**20, 2**20), None, None),
    ],
)
def test_arrays_that_need_long_indices_are_refused(shape: Any, strides: Any, says: str | None) -> None:
    """As cuda-tile refuses them at launch, with OverflowError; arrays of more elements than that are none."""
    x = ArraySpec(shape, "float32", strides)
    found = refused(Recorded(sum_kernel, GRID, (x, ArraySpec((16,), "float32"), 1.0, 32)))
    assert found is None if says is None else str(found).startswith(says)
    assert refused(Recorded(wide_kernel, GRID, (x, ArraySpec((16,), "float32")))) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("z=float32[17]", "'z=float32.17.' is no argument of sum_kernel; known: x, y, scale, N, occupancy"),
        ("x=floaty[17]", "x: unknown data type 'floaty'"),
        ("x=7", "x is an array, such as x=float32"),
        ("N=many", "N is a whole number, found 'many'"),
        ("scale=much", "scale is a number, found 'much'"),
        ("occupancy=x", "occupancy is a whole number, found 'x'"),
        ("x=float32[4,4]:(16)", "x: 2 lengths and 1 strides"),
        ("nothing", "'nothing' is no argument"),
    ],
)
def test_launches_that_are_none(text: str, message: str) -> None:
    with pytest.raises(LaunchTextError, match=message):
        changed(predicted()[0], text)
