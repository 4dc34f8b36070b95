"""Copy bytes of pages between pools."""

from __future__ import annotations

from torch import Tensor


def copy_pages(
    dst: Tensor, dst_ids: Tensor, src: Tensor, src_ids: Tensor, columns: slice = slice(None)
) -> None:
    """Copy ``columns`` of pages ``src_ids`` of src to the same columns of pages ``dst_ids`` of dst.

    dst, src: [*, bytes] uint8, any pitch and device (a device page is a view of the tail of a
    mirror page); dst_ids: [n] int, distinct; src_ids: [n] int. n may be 0.
    """
    assert dst_ids.shape == src_ids.shape, (dst_ids.shape, src_ids.shape)
    if dst_ids.numel():
        dst[dst_ids.long(), columns] = src[src_ids.long(), columns].to(dst.device)
