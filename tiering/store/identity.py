"""What stored bytes depend on. Objects of one identity are invisible to every other.

The digest decides; the fields are kept beside it so that a person can be told *which* of them
differs when a folder holds nothing for the model that was just started.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

from blake3 import blake3

_CONTEXT = "dsv4-tierd 2026-01 prefix store identity v1"


@dataclass(frozen=True, slots=True)
class StoreIdentity:
    """Everything but the tenant that decides whether stored bytes may be used.

    Digests are hex; formats and dtypes are names (``fp8``, ``float32``). ``layout_version`` is
    that of the oldest layout which reads and writes the same bytes of a page, a point and a tail:
    it is raised when bytes from before can no longer be used. What wraps them (records, index,
    catalogue rows, log objects, bundles) has versions of its own, and older ones are read.
    """

    weights_digest: str
    model_config_digest: str
    row_format: str
    key_format: str
    compute_dtype: str
    state_dtype: str
    layout_version: int
    page_tokens: int

    @property
    def digest(self) -> bytes:
        """32 bytes, the same in every process and on every machine."""
        hasher = blake3(derive_key_context=_CONTEXT)
        for name, value in self.as_dict().items():
            # Lengths first, so that no two lists of fields give the same bytes.
            for part in (name.encode(), str(value).encode()):
                hasher.update(len(part).to_bytes(4, "little"))
                hasher.update(part)
        return hasher.digest()

    def as_dict(self) -> dict[str, str | int]:
        """The fields by name, in the order in which they are hashed."""
        return asdict(self)


FIELD_NAMES = tuple(field.name for field in fields(StoreIdentity))


def differences(there: Mapping[str, object], here: Mapping[str, object]) -> list[str]:
    """One phrase for each field that differs, naming it and both values."""
    names = [*FIELD_NAMES, *sorted(set(there) - set(FIELD_NAMES))]
    return [
        f"{name}: {there.get(name)!r} there, {here.get(name)!r} here"
        for name in names
        if there.get(name) != here.get(name)
    ]
