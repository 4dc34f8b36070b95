"""CUDA C++ compiles without a GPU, is kept on disk, and survives a damaged cache."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from dsv4_tierd.kernels import nvrtc

MISSING = nvrtc.missing()
needs_nvrtc = pytest.mark.skipif(MISSING is not None, reason=f"NVRTC is not installed: {MISSING}")
ROW = {"DATA_BYTES": 576, "SCALE_BYTES": 8, "MIRROR_ROWS": 64, "HOT_ROWS": 64}
SOURCES = {path.name: ROW if path.name == "swap_in.cu" else {} for path in nvrtc.CSRC.glob("*.cu")}
# Compiled with other instructions on Blackwell, which GPU tests run on Hopper too.
WITH_PRODUCTS = ["index_scan.cu", "sparse_attention.cu"]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@needs_nvrtc
@pytest.mark.parametrize("architecture", nvrtc.ARCHITECTURES)
@pytest.mark.parametrize("file", sorted(SOURCES))
def test_every_source_compiles(file: str, architecture: str) -> None:
    """Each kernel gives machine code for Hopper and for Blackwell."""
    assert nvrtc.compile_cubin(file, architecture, SOURCES[file])[:4] == b"\x7fELF"


@needs_nvrtc
@pytest.mark.parametrize("file", WITH_PRODUCTS)
def test_hoppers_products_can_be_left_out(file: str) -> None:
    """What Blackwell runs compiles for Hopper as well, and is other code there."""
    portable = nvrtc.compile_cubin(file, "sm_90a", {"PORTABLE": 1})
    assert portable[:4] == b"\x7fELF"
    assert portable != nvrtc.compile_cubin(file, "sm_90a")


@needs_nvrtc
@pytest.mark.parametrize("scale_bytes", [0, 4, 8])
def test_swap_in_compiles_for_every_row_format(scale_bytes: int) -> None:
    """Rows with and without scales, odd pages."""
    defines = {"DATA_BYTES": 256, "SCALE_BYTES": scale_bytes, "MIRROR_ROWS": 61, "HOT_ROWS": 3}
    assert nvrtc.compile_cubin("swap_in.cu", "sm_90a", defines)


@needs_nvrtc
def test_a_source_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second request reads the disk: the same bytes, and no compiler."""
    first = nvrtc.compile_cubin("evict_rows.cu", "sm_90a")

    def fail(*_: object) -> bytes:
        raise AssertionError("compiled again")

    monkeypatch.setattr(nvrtc, "_compile", fail)
    assert nvrtc.compile_cubin("evict_rows.cu", "sm_90a") == first


@needs_nvrtc
def test_what_the_code_depends_on_names_the_file() -> None:
    """Other defines and another architecture are other files."""
    nvrtc.compile_cubin("evict_rows.cu", "sm_90a")
    nvrtc.compile_cubin("evict_rows.cu", "sm_90a", {"ANY": 1})
    nvrtc.compile_cubin("evict_rows.cu", "sm_100a")
    assert len(list(nvrtc.cache_folder().iterdir())) == 3


@needs_nvrtc
@pytest.mark.parametrize("damage", [b"", b"short", b"\0" * 5000])
def test_a_damaged_file_is_compiled_again(damage: bytes) -> None:
    """Truncated or overwritten cache files cost a compilation, never a wrong kernel."""
    first = nvrtc.compile_cubin("evict_rows.cu", "sm_90a")
    (path,) = nvrtc.cache_folder().iterdir()
    path.write_bytes(damage)
    assert nvrtc.compile_cubin("evict_rows.cu", "sm_90a") == first
    (path,) = nvrtc.cache_folder().iterdir()
    assert path.read_bytes()[32:] == first


@needs_nvrtc
def test_a_folder_that_refuses_is_only_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A cache that cannot be written slows the next start; it does not stop this one."""
    (tmp_path / "dsv4-tierd").write_text("a file where the folder should be")
    assert nvrtc.compile_cubin("evict_rows.cu", "sm_90a")
    assert "not kept" in caplog.text


@needs_nvrtc
def test_cache_files_are_written_whole(tmp_path: Path) -> None:
    """No temporary file stays behind, and the kept one is a regular file."""
    nvrtc.compile_cubin("evict_rows.cu", "sm_90a")
    (path,) = nvrtc.cache_folder().iterdir()
    assert path.suffix == ".cubin"
    assert stat.S_ISREG(path.stat().st_mode)
    assert tmp_path in path.parents


@needs_nvrtc
def test_a_broken_source_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler's words reach the caller."""
    (tmp_path / "broken.cu").write_text('extern "C" __global__ void f() { nonsense; }')
    monkeypatch.setattr(nvrtc, "CSRC", tmp_path)
    with pytest.raises(Exception, match="nonsense"):
        nvrtc.compile_cubin("broken.cu", "sm_90a")
