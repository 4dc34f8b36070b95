"""Sizes as people write them: ``1GiB``, ``512M``, ``64KiB``. Bytes inside, always."""

from __future__ import annotations

import re

_FACTORS = {
    "": 1, "b": 1,
    "k": 1 << 10, "kib": 1 << 10, "kb": 1000,
    "m": 1 << 20, "mib": 1 << 20, "mb": 1000**2,
    "g": 1 << 30, "gib": 1 << 30, "gb": 1000**3,
    "t": 1 << 40, "tib": 1 << 40, "tb": 1000**4,
}  # fmt: skip
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")


def parse_bytes(text: str | int) -> int:
    """Bytes of ``"1GiB"``, ``"1.5G"``, ``"4096"`` or a plain int.

    K, M, G, T and KiB ... TiB are binary, KB ... TB decimal. Raises ValueError otherwise.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        if text < 0:
            raise ValueError(f"a size cannot be negative: {text}")
        return text
    found = _SIZE.fullmatch(text) if isinstance(text, str) else None
    if found is None or found[2].lower() not in _FACTORS:
        raise ValueError(f"not a size: {text!r} (write 4096, 512MiB, 1.5GiB ...)")
    return int(float(found[1]) * _FACTORS[found[2].lower()])


def format_bytes(size: float) -> str:
    """``1.5 GiB``: the largest binary unit that leaves at least 1."""
    for unit, shift in (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if abs(size) >= 1 << shift:
            return f"{size / (1 << shift):.1f} {unit}"
    return f"{size:.0f} B"
