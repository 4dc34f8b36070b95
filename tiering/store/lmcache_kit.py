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
_SECRET_WORDS = ("password", "secret", "token", "credential", "key", "auth")
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
            self._secrets = secrets_of(spec)
            self._config = self._read(config, dict(spec))

    def _read(self, config: Any, spec: dict[str, Any]) -> Any:
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
            why = self._hidden(str(error))
            raise InvalidRequest(f"--store lmcache: {kind!r}: {why}", param="store") from None

    def create(self) -> Any:
        """A fresh adapter. Raises whatever it likes, but says no secret of the specification."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it imports the adapter's own packages
            try:
                return self._create(self._config)
            except ImportError:
                raise
            except Exception as error:
                why = self._hidden(str(error))
                if why == str(error):
                    raise
                raise RuntimeError(why) from None

    def _hidden(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text

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


def secrets_of(value: Any, name: str = "") -> list[str]:
    """Strings of a specification that stand under a name like ``password``, longest first."""
    found: list[str] = []
    if isinstance(value, Mapping):
        for own, inner in value.items():
            found += secrets_of(inner, str(own))
    elif isinstance(value, list):
        for inner in value:
            found += secrets_of(inner, name)
    elif isinstance(value, str) and value and any(w in name.lower() for w in _SECRET_WORDS):
        found.append(value)
    return sorted(found, key=len, reverse=True)
