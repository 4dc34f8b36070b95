"""The tensors of a checkpoint folder, by their official names.

Official names are the vocabulary; the spellings that transformers' save_pretrained writes are
mapped to them. Files are mapped into memory, so one tensor at a time goes to the device.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

INDEX_FILE = "model.safetensors.index.json"
# Copies of embed and head that the base models ship beside the MTP block.
_IGNORED = re.compile(r"mtp\.0\.(emb\.tok_emb|head)\.weight$")
_RENAMES = (
    (re.compile(r"^model\."), ""),
    (re.compile(r"^embed_tokens\.weight$"), "embed.weight"),
    (re.compile(r"^lm_head\.weight$"), "head.weight"),
    (re.compile(r"^hc_head\.hc_(fn|base|scale)$"), r"hc_head_\1"),
    (re.compile(r"\.attn\.norm\.weight$"), ".attn.kv_norm.weight"),
    (re.compile(r"\.weight_scale_inv$"), ".scale"),
)


class WeightsError(ValueError):
    """A checkpoint whose tensors are not the model's; the message names the tensor."""


def safetensor_files(folder: Path) -> list[Path]:
    """The checkpoint's files, sorted: those of its index, or all. Raises WeightsError."""
    index = folder / INDEX_FILE
    if index.exists():
        try:
            names: Iterable[str] = set(json.loads(index.read_bytes())["weight_map"].values())
        except (ValueError, KeyError, AttributeError) as error:
            raise WeightsError(f"{index} is not an index of tensors: {error!r}") from None
        files = [folder / name for name in sorted(names)]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise WeightsError(f"{folder} holds no .safetensors file")
    if missing := [file for file in files if not file.exists()]:
        raise WeightsError(f"{missing[0]} is in the index but does not exist")
    return files


class Folder:
    """Tensors of a folder by official name; remembers which were taken."""

    def __init__(self, folder: str | Path, device: torch.device) -> None:
        self.folder, self.device = Path(folder), device
        self._where: dict[str, tuple[Any, str]] = {}
        self._taken: set[str] = set()
        for path in safetensor_files(self.folder):
            try:
                file = safe_open(path, "pt")
            except SafetensorError as error:
                raise WeightsError(f"{path} cannot be read: {error}") from None
            for stored in _names(file):
                name = _official_name(stored)
                if name in self._where:
                    raise WeightsError(f"tensor {name} is there twice, again as {stored} in {path}")
                self._where[name] = (file, stored)

    @property
    def has_mtp(self) -> bool:
        """Whether a config that names an MTP block finds it here.

        transformers keeps the block out of what it saves, but not out of the config.
        """
        from_transformers = any(stored.startswith("model.") for _, stored in self._where.values())
        return not from_transformers or any(name.startswith("mtp.") for name in self._where)

    def read(self, name: str, shape: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
        """The tensor as stored, and its scale if it has one, on the device. Raises WeightsError.

        shape: what the model will ask of it; a folder has what it has.
        """
        tensor, scale_name = self._get(name), name.removesuffix("weight") + "scale"
        has_scale = name.endswith("weight") and scale_name in self._where
        return tensor, self._get(scale_name) if has_scale else None

    def finish(self) -> None:
        """Every tensor was taken, or is known to be superfluous. Raises WeightsError."""
        left = self._where.keys() - self._taken
        extra = sorted(name for name in left if not _IGNORED.match(name))
        if extra:
            more = f" (and {len(extra) - 1} more)" if len(extra) > 1 else ""
            raise WeightsError(f"tensor {extra[0]}{more} is not part of this model")

    def _get(self, name: str) -> Tensor:
        if name not in self._where:
            raise WeightsError(f"tensor {name} is missing from {self.folder}")
        self._taken.add(name)
        file, stored = self._where[name]
        tensor: Tensor = file.get_tensor(stored)
        return tensor.to(self.device)


def _names(file: Any) -> list[str]:
    return list(file.keys())


def _official_name(stored: str) -> str:
    for pattern, name in _RENAMES:
        stored = pattern.sub(name, stored)
    return stored
