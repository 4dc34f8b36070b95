"""CUDA C++ kernels: compiled by NVRTC at first use, kept on disk, launched on torch's stream.

A cubin is cached by everything it depends on (source with its includes, options, architecture,
NVRTC's version) under ``$XDG_CACHE_HOME/dsv4-tierd/cubin``; a damaged file is compiled again.
Kernels take only pointers and 64-bit integers, so that a launch needs no types. Launches do not
allocate or synchronise, so they can be captured in a CUDA graph; the first call of an op compiles
and loads, and belongs before the capture. Importing needs no GPU and no
CUDA package; compiling needs cuda-core and NVRTC; launching needs a GPU.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsv4_tierd.kernels.layout import PAGE_TOKENS

CSRC = Path(__file__).parent / "csrc"
ARCHITECTURES = ("sm_90a", "sm_100a")  # compiled in CI; what the kernels are written for
C4_ROWS_PER_PAGE = PAGE_TOKENS // 4
_OPTIONS_VERSION = "1"

log = logging.getLogger(__name__)

Defines = Mapping[str, int]
Argument = Tensor | int | None


@dataclass(frozen=True, slots=True)
class Shape:
    """How a kernel is launched: blocks in all, threads a block, blocks a cluster, dynamic bytes.

    ``early``: it may start while the kernel before it still runs, and waits in the kernel itself
    (griddepcontrol.wait) before it reads what that one writes.
    """

    blocks: int
    threads: int
    cluster: int = 1
    shared_bytes: int = 0
    early: bool = False


def layout_defines() -> dict[str, int]:
    """The layout's constants, for every source: one fact, one place (kernels/layout.py)."""
    return {"ROWS_PER_PAGE": C4_ROWS_PER_PAGE}


def compiles_for(capability: tuple[int, int]) -> bool:
    """Whether the kernels are written for such a card; others run their Triton twins."""
    return capability == (9, 0) or capability[0] == 10


def missing() -> str | None:
    """What compiling needs and is not installed, in words; None when nothing is missing."""
    try:
        from cuda.bindings import nvrtc
        from cuda.core import Program  # noqa: F401
    except ImportError as error:
        return f"cuda-core and cuda-bindings: {error}"
    try:
        nvrtc.nvrtcVersion()
    except Exception as error:  # noqa: BLE001 - the loader's own types differ between versions
        return f"the NVRTC library: {error}"
    return None


def cache_folder() -> Path:
    """Where compiled kernels are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "dsv4-tierd" / "cubin"


def compile_cubin(file: str, architecture: str, defines: Defines | None = None) -> bytes:
    """Machine code of ``kernels/csrc/<file>`` for ``architecture`` ("sm_90a"), from disk or NVRTC.

    Raises what NVRTC raises (with its log) when the source does not compile.
    """
    macros = sorted({**layout_defines(), **(defines or {})}.items())
    source = (CSRC / file).read_text()
    path = (
        cache_folder()
        / f"{Path(file).stem}-{architecture}-{_digest(source, architecture, macros)}.cubin"
    )
    cubin = _read(path)
    if cubin is None:
        cubin = _compile(source, file, architecture, macros)
        _write(path, cubin)
    return cubin


class LoadedKernel:
    """One kernel on one device, ready to launch. Made by ``load``."""

    def __init__(self, file: str, name: str, device_index: int, defines: Defines) -> None:
        from cuda.core import Device, ObjectCode

        Device(device_index).set_current()
        major, minor = torch.cuda.get_device_capability(device_index)
        if major < 9:
            raise RuntimeError(
                f"{file} needs compute capability 9.0 or higher, this is {major}.{minor}"
            )
        code = compile_cubin(file, f"sm_{major}{minor}a", defines)
        self._object = ObjectCode.from_cubin(code, name=file)
        self._kernel = self._object.get_kernel(name)
        self._device_index = device_index
        self._configs: dict[Shape, Any] = {}
        self._shared_bytes_max = 0

    def launch(self, shape: Shape, *arguments: Argument) -> None:
        """Launch on torch's current stream of the device. Tensors go as pointers, None as null."""
        from cuda.core import launch

        config = self._configs.get(shape) or self._configure(shape)
        handle = torch.cuda.current_stream(self._device_index).cuda_stream
        values = [_value(argument) for argument in arguments]
        launch(_stream(handle), config, self._kernel, *values)

    def clusters_at_once(self, shape: Shape) -> int:
        """How many clusters of this shape the whole card runs at the same time."""
        config = self._configs.get(shape) or self._configure(shape)
        stream = _stream(torch.cuda.current_stream(self._device_index).cuda_stream)
        return int(self._kernel.occupancy.max_active_clusters(config, stream=stream))

    def _configure(self, shape: Shape) -> Any:
        from cuda.bindings import driver
        from cuda.core import LaunchConfig

        assert shape.blocks % shape.cluster == 0, shape
        attribute = driver.CUfunction_attribute
        # The limit is the kernel's: a smaller shape must not lower it for a larger one.
        self._shared_bytes_max = max(self._shared_bytes_max, shape.shared_bytes)
        self._set(attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, self._shared_bytes_max)
        if shape.cluster > 8:
            self._set(attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)
        # cuda.core counts the grid in clusters once a cluster is given.
        grid = {"grid": shape.blocks // shape.cluster, "cluster": shape.cluster}
        config = LaunchConfig(
            **grid,
            block=shape.threads,
            shmem_size=shape.shared_bytes,
            programmatic_stream_serialization=shape.early,
        )
        self._configs[shape] = config
        return config

    def _set(self, attribute: Any, value: int) -> None:
        from cuda.bindings import driver

        handle = driver.CUkernel(int(self._kernel.handle))
        (result,) = driver.cuKernelSetAttribute(attribute, value, handle, self._device_index)
        if result != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{attribute} = {value}: {result}")


def load(file: str, name: str, device: torch.device, **defines: int) -> LoadedKernel:
    """The kernel ``name`` of ``kernels/csrc/<file>`` on ``device``; compiled and loaded once."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return _load(file, name, index, tuple(sorted(defines.items())))


@cache
def _load(file: str, name: str, index: int, defines: tuple[tuple[str, int], ...]) -> LoadedKernel:
    return LoadedKernel(file, name, index, dict(defines))


@cache
def _stream(handle: int) -> Any:
    from cuda.core import LEGACY_DEFAULT_STREAM, Stream

    return Stream.from_handle(handle) if handle else LEGACY_DEFAULT_STREAM


def _value(argument: Argument) -> int:
    if isinstance(argument, Tensor):
        return argument.data_ptr()
    return 0 if argument is None else argument


def _compile(source: str, file: str, architecture: str, macros: list[tuple[str, int]]) -> bytes:
    from cuda.core import Program, ProgramOptions

    options = ProgramOptions(
        name=file,
        std="c++17",
        arch=architecture,
        include_path=[str(CSRC)],
        define_macro=[(name, str(value)) for name, value in macros],
    )
    code = Program(source, "c++", options).compile("cubin").code
    assert isinstance(code, bytes | bytearray)
    return bytes(code)


def _digest(source: str, architecture: str, macros: list[tuple[str, int]]) -> str:
    from cuda.bindings import nvrtc

    headers = [path.read_text() for path in sorted(CSRC.glob("*.cuh"))]
    parts = [
        _OPTIONS_VERSION,
        str(nvrtc.nvrtcVersion()),
        architecture,
        str(macros),
        source,
        *headers,
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _read(path: Path) -> bytes | None:
    """The cached cubin, or None when it is absent or damaged."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    checksum, cubin = content[:32], content[32:]
    return cubin if cubin and hashlib.sha256(cubin).digest() == checksum else None


def _write(path: Path, cubin: bytes) -> None:
    """Keep the cubin; readers see all of it or nothing. A folder that refuses is only logged."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(hashlib.sha256(cubin).digest() + cubin)
        Path(file.name).replace(path)
    except OSError as error:
        log.warning("compiled kernel not kept: path=%s error=%s", path, error)
