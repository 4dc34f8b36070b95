"""LMCache itself: the one place that imports it to write there. Its telemetry is off."""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Mapping
from typing import Any

from dsv4_tierd.tiering.errors import InvalidRequest, UnsupportedCombination
from dsv4_tierd.tiering.store.lmcache_shelf import Name

NEEDED = "--store lmcache:{…} needs the extra: pip install 'dsv4-tierd[lmcache]' (CPU torch first)"
_ADAPTERS = "lmcache.v1.distributed.l2_adapters"


def quiet_lmcache() -> None:
    """It reports to its makers unless told not to; to be said before the first import."""
    os.environ["LMCACHE_TRACK_USAGE"] = "false"
    os.environ["DO_NOT_TRACK"] = "1"
    os.environ.setdefault("LMCACHE_LOG_LEVEL", "WARNING")


class LMCacheToolkit:
    """Adapters of one specification, and LMCache's types."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        """Raises UnsupportedCombination (no LMCache), InvalidRequest (the specification)."""
        quiet_lmcache()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of packages that it brings
            try:
                import torch

                adapters = importlib.import_module(_ADAPTERS)
                config = importlib.import_module(f"{_ADAPTERS}.config")
                self._api = importlib.import_module("lmcache.v1.distributed.api")
                self._memory = importlib.import_module("lmcache.v1.memory_management")
            except ImportError as error:
                raise UnsupportedCombination(f"{NEEDED}: {error}", param="store") from error
            self._torch: Any = torch
            self._create = adapters.create_l2_adapter
            self._config = self._read(config, dict(spec))

    @staticmethod
    def _read(config: Any, spec: dict[str, Any]) -> Any:
        kind = spec["type"]
        if not kind.isidentifier():
            raise InvalidRequest(f"--store lmcache: no adapter {kind!r}", param="store")
        try:
            # Directly where it can be: the registry's own way imports every adapter before it.
            importlib.import_module(f"{_ADAPTERS}.{kind}_l2_adapter")
        except ModuleNotFoundError as error:
            if error.name != f"{_ADAPTERS}.{kind}_l2_adapter":
                raise UnsupportedCombination(
                    f"--store lmcache: the adapter {kind!r} needs {error.name}", param="store"
                ) from error
        try:
            return config.get_l2_adapter_config_class(kind).from_dict(spec)
        except (ValueError, TypeError, ImportError) as error:
            raise InvalidRequest(f"--store lmcache: {kind!r}: {error}", param="store") from error

    def create(self) -> Any:
        """A fresh adapter."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it imports the adapter's own packages
            return self._create(self._config)

    def key(self, name: Name) -> Any:
        """Its ``ObjectKey``."""
        return self._api.ObjectKey(
            chunk_hash=name.digest,
            model_name=name.space,
            kv_rank=name.rank,
            object_group_id=name.group,
            cache_salt=name.salt,
        )

    def wrap(self, buffer: bytearray) -> Any:
        """A ``TensorMemoryObj`` of uint8 over ``buffer``, without a copy."""
        tensor = self._torch.frombuffer(buffer, dtype=self._torch.uint8)
        meta = self._memory.MemoryObjMetadata(
            shape=self._torch.Size([len(buffer)]),
            dtype=self._torch.uint8,
            address=tensor.data_ptr(),
            phy_size=len(buffer),
            ref_count=1,
            fmt=self._memory.MemoryFormat.BINARY,
        )
        return self._memory.TensorMemoryObj(tensor, meta, None)
