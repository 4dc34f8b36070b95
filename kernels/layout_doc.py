"""Prints docs/LAYOUT.md from kernels/layout.py: ``python -m dsv4_tierd.kernels.layout_doc``."""

from __future__ import annotations

import sys

from dsv4_tierd.kernels.layout import PAGE_TOKENS, PageLayout, RowFormat, RowKind
from dsv4_tierd.kernels.tail_layout import TailLayout

_HEAD = """\
# Byte layouts

Made by `python -m dsv4_tierd.kernels.layout_doc > docs/LAYOUT.md` from `kernels/layout.py` and
`kernels/tail_layout.py`, the only places that know them; a test compares.

A page holds the entries of 256 tokens: per C4 layer 64 rows and 64 index keys, per C128 layer 2
rows. A section is one layer's rows in one page: all data parts, then all scale parts, padded to
16 bytes.

```
| C4 rows, layer by layer | index keys, layer by layer | C128 rows, layer by layer |
|<------------------------------- mirror page -------------------------------------->|
                          |<------------------ device page ------------------------->|
```

Address of position p inside its page: C4 row and index key `p // 4 % 64`, C128 row
`p // 128 % 2`. A tail slot: window rows (`p % window`) of every layer, then the compressor rings,
fp32 (`p % 8` of C4 and of the indexer, `p % 128` of C128). A resume point: the
window rows, and the 4 ring rows before the boundary of each C4 layer, main and index.
"""


def layout_table(name: str, pages: PageLayout, tail: TailLayout) -> str:
    """One model's sizes as a Markdown table."""
    rows = [
        ("one latent row", pages.latent.row_bytes),
        ("one index key", pages.key.row_bytes),
        ("C4 section of a page", pages.c4[0].bytes),
        ("index section of a page", pages.index[0].bytes),
        ("C128 section of a page", pages.c128[0].bytes),
        ("device page", pages.device_bytes),
        ("mirror page", pages.mirror_bytes),
        ("tail slot", tail.slot_bytes),
        ("resume point", tail.resume_bytes),
        ("mirror bytes a token", pages.mirror_bytes // PAGE_TOKENS),
    ]
    lines = [f"## {name}", "", "| what | bytes |", "|---|---|"]
    return "\n".join([*lines, *(f"| {what} | {size:,} |" for what, size in rows), ""])


def v4_layouts(c4: int, c128: int, window_only: int) -> tuple[PageLayout, TailLayout]:
    """Layouts of a released model in FP8 rows; MTP's own window is not in the tail."""
    latent, key = RowFormat(RowKind.FP8, 512, 64), RowFormat(RowKind.KEY_FP8, 128, 64)
    pages = PageLayout(latent, key, tuple(range(c4)), tuple(range(c128)))
    return pages, TailLayout(latent, key, 128, c4 + c128 + window_only, c4, c128)


def layout_page() -> str:
    """The whole of docs/LAYOUT.md."""
    flash = layout_table("DeepSeek-V4-Flash, FP8 rows", *v4_layouts(21, 20, 2))
    pro = layout_table("DeepSeek-V4-Pro, FP8 rows", *v4_layouts(30, 31, 0))
    return f"{_HEAD}\n{flash}\n{pro}"


if __name__ == "__main__":
    sys.stdout.write(layout_page())
