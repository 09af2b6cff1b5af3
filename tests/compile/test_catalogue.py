"""Every kernel with every shape family, for every target: it compiles, reaches the tensor cores, and does not spill."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernels import catalogue, configs
from kernels.catalogue import FAMILIES, Entry, entries, faults
from kernels.compile import TARGETS, CompileError, compile_all
from kernels.configs import number
from kernels.cubin import nvdisasm
from kernels.shapes import variants
from tests.compile import ahead

KERNELS = Path(catalogue.__file__).parent


def test_every_file_with_a_kernel_is_in_the_catalogue() -> None:
    """A kernel outside the catalogue would be compiled by nobody until a user's first run."""
    found = {f"kernels.{path.stem}" for path in KERNELS.glob("*.py") if "\n@ct.kernel" in path.read_text()}
    assert found == set(FAMILIES)


@pytest.mark.parametrize("arch", TARGETS)
def test_every_model_has_every_family(arch: str) -> None:
    used: dict[str, set[str]] = {}
    for entry in entries(arch):
        used.setdefault(entry.family, set()).update(entry.models)
    names = {name for name, _, _ in variants()}
    assert used == dict.fromkeys(FAMILIES, names)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("arch", TARGETS)
def test_every_kernel_compiles(arch: str, family: str) -> None:
    """One compilation serves every assertion: registers, spills, shared memory and instructions come from one cubin."""
    compile_without_fault(arch, family, list(entries(arch, families=[family])))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("arch", [arch for arch in TARGETS if number(arch) >= 90])
def test_plain_forms_compile_where_dependent_launch_exists(arch: str, family: str) -> None:
    """The engine does not launch them there, so three shapes, in FP16, stand for all: they have every form."""
    models = [variant for variant in variants() if variant[2] == "float16"]
    compile_without_fault(arch, family, list(entries(arch, families=[family], models=models, pdl=False)))


def compile_without_fault(arch: str, family: str, wanted: list[Entry]) -> None:
    assert nvdisasm() is not None, "the test extra installs nvidia-cuda-nvdisasm"
    assert wanted, f"{family} has no kernels for {arch}"
    problems = []
    for result in compile_all([entry.record for entry in wanted], arch, disassemble="needed"):
        if isinstance(result, CompileError):
            problems.append(f"{result} {result.hint or ''}")
        else:
            problems += [f"{result.symbol} {result.hints}: {text}" for text in faults(result, family)]
    assert not problems, "\n".join(problems)


def test_what_is_compiled_beside_the_other_tests_is_the_matrix(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_TILE_CACHE_DIR", str(tmp_path))  # put back afterwards
    monkeypatch.setattr(ahead, "entries", lambda arch, families: [])
    monkeypatch.setattr(ahead, "compile_all", lambda records, arch, workers: [(arch, len(records), workers)])
    assert sorted(ahead.fill(str(tmp_path))) == sorted((arch, family) for arch in TARGETS for family in FAMILIES)


class TestConfigs:
    """The look-up of kernels.configs, on tables of its own."""

    @pytest.fixture
    def folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        rows = """[{"when": {"n": 64}, "config": {"tile": 8}, "us": 1.5, "chosen": "measured"},
                   {"when": {"k": [1, 512]}, "config": {"tile": 4}, "chosen": "rule"},
                   {"when": {}, "config": {"tile": 2}, "chosen": "rule"}]"""
        for arch in ("sm_80", "sm_90", "sm_120"):
            (tmp_path / f"{arch}.json").write_text(f'{{"gpu": "{arch}", "families": {{"linear": {rows}}}}}')
        monkeypatch.setattr(configs, "_FOLDER", tmp_path)
        configs.table.cache_clear()
        yield tmp_path
        configs.table.cache_clear()

    def test_first_row_that_agrees(self, folder: Path) -> None:
        assert configs.config("linear", "sm_90", n=64, k=64) == {"tile": 8}
        assert configs.config("linear", "sm_90", n=65, k=512) == {"tile": 4}
        assert configs.config("linear", "sm_90", n=65, k=513) == {"tile": 2}
        assert configs.table("sm_90").row("linear", n=64).us == 1.5

    @pytest.mark.parametrize(
        ("arch", "source"),
        [("sm_80", "sm_80"), ("sm_86", "sm_80"), ("sm_90", "sm_90"), ("sm_103", "sm_90"), ("sm_121", "sm_120")],
    )
    def test_nearest_older_table(self, folder: Path, arch: str, source: str) -> None:
        found = configs.table(arch)
        assert found.source == source
        assert (found.note is None) == (arch == source)
        if found.note is not None:
            assert arch in found.note
            assert source in found.note

    def test_architecture_specific_names(self, folder: Path) -> None:
        assert configs.table("sm_90a").note is None

    def test_nothing_older(self, folder: Path) -> None:
        with pytest.raises(
            ValueError, match="no kernel configurations for sm_75: the oldest architecture supported is sm_80"
        ):
            configs.table("sm_75")
        with pytest.raises(ValueError, match="'hopper' is no target"):
            configs.table("hopper")

    def test_unknown_family(self, folder: Path) -> None:
        with pytest.raises(KeyError, match="has no family 'norm', only linear"):
            configs.config("norm", "sm_90")
