"""The Triton kernels of the index scan: for cards without the CUDA C++ one, and CI."""

# Kernel arguments are what Triton makes of them: they carry no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# ruff: noqa: ANN201

from __future__ import annotations

from dsv4_tierd.kernels.triton_rows import tl, triton


@triton.jit
def encode_queries_kernel(
    q_ptr,
    q_token,
    q_head,
    g_ptr,
    g_token,
    codes_ptr,
    gates_ptr,
    heads,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
):
    """Heads of a query to e4m3, their scales into the gates."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = head < heads
    value = tl.arange(0, DIM)[None, :]
    source = q_ptr + token * q_token + head[:, None] * q_head + value
    q = tl.load(source, mask=here[:, None], other=0.0).to(tl.float32)
    factor = tl.div_rn(tl.maximum(tl.max(tl.abs(q), 1), 1e-4), 448.0)
    bounded = tl.minimum(tl.maximum(tl.div_rn(q, factor[:, None]), -448.0), 448.0)
    codes = bounded.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    tl.store(codes_ptr + (token * heads + head[:, None]) * DIM + value, codes, mask=here[:, None])
    gate = tl.load(g_ptr + token * g_token + head, mask=here, other=0.0)
    tl.store(gates_ptr + token * heads + head, gate * factor, mask=here)


@triton.jit
def _load_keys(
    data_ptr,
    scale_ptr,
    data_page,
    scale_page,
    row_count,
    page,
    slot,
    DIM: tl.constexpr,
    PAGE_ROWS: tl.constexpr,
):
    """Keys [N, DIM] e4m3 and scales [N] fp32 of page ids [N]; zeros where the page is absent."""
    there = (page >= 0) & (page < row_count // PAGE_ROWS)
    page = tl.where(there, page, 0).to(tl.int64)
    data = data_ptr + tl.multiple_of(page * data_page, 16)[:, None]
    data += slot[:, None] * DIM + tl.arange(0, DIM)[None, :]
    codes = tl.load(data, mask=there[:, None], other=0)
    scale = (scale_ptr + tl.multiple_of(page * scale_page, 4)).to(tl.pointer_type(tl.float32))
    scales = tl.load(scale + slot, mask=there, other=0.0)
    return codes.to(tl.float8e4nv, bitcast=True), scales


@triton.jit
def _score(
    q_ptr,
    g_ptr,
    keys,
    scales,
    rows,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """Scores [BLOCK_KEYS, TOGETHER] of queries ``rows`` [TOGETHER] int64 against a tile of keys."""
    flat = tl.arange(0, HEADS)[None, :] + rows[:, None] * HEADS
    flat = tl.reshape(flat, (TOGETHER * HEADS,))
    codes = tl.load(q_ptr + flat[:, None] * DIM + tl.arange(0, DIM)[None, :])
    gates = tl.load(g_ptr + flat)
    heads = tl.dot(keys, tl.trans(codes.to(tl.float8e4nv, bitcast=True)))
    wanted = tl.maximum(heads, 0.0) * gates[None, :]
    wanted = tl.sum(tl.reshape(wanted, (BLOCK_KEYS, TOGETHER, HEADS)), 2)
    return wanted * scales[:, None]


@triton.jit
def _store_scores(scores, rows, entry, inside, visible_ptr, out_ptr, out_row):
    """Scores [N, M] of a tile's entries [N] for queries ``rows`` [M]: -inf beyond what each sees.

    Nothing is written to a query that sees nothing of the tile, nor outside its pages.
    """
    limit = tl.load(visible_ptr + rows)
    scores = tl.where(entry[:, None] < limit[None, :], scores, float("-inf"))
    kept = inside[:, None] & (tl.min(entry, 0) < limit)[None, :]
    tl.store(out_ptr + rows[None, :] * out_row + entry[:, None], scores, mask=kept)


@triton.jit
def scan_queries_kernel(
    q_ptr,
    g_ptr,
    data_ptr,
    scale_ptr,
    data_page,
    scale_page,
    row_count,
    visible_ptr,
    out_ptr,
    out_row,
    page_ids,
    pages,
    tokens,
    QUERY_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """A tile of keys past a block of one session's queries."""
    begin = tl.program_id(0) * QUERY_BLOCK
    end = tl.minimum(tokens, begin + QUERY_BLOCK)
    query = begin + tl.arange(0, QUERY_BLOCK)
    most = tl.max(tl.load(visible_ptr + query, mask=query < tokens, other=0), 0)
    first = tl.program_id(1) * BLOCK_KEYS
    if first < most:
        entry = first + tl.arange(0, BLOCK_KEYS)
        column = entry // PAGE_ROWS
        page = tl.load(page_ids + column, mask=(column < pages) & (entry < most), other=-1)
        keys, scales = _load_keys(
            data_ptr,
            scale_ptr,
            data_page,
            scale_page,
            row_count,
            page,
            entry % PAGE_ROWS,
            DIM,
            PAGE_ROWS,
        )
        lane = tl.arange(0, TOGETHER)
        for start in range(begin, end, TOGETHER):
            row = tl.minimum(start + lane, end - 1).to(tl.int64)
            scores = _score(q_ptr, g_ptr, keys, scales, row, HEADS, DIM, BLOCK_KEYS, TOGETHER)
            _store_scores(scores, row, entry, column < pages, visible_ptr, out_ptr, out_row)


@triton.jit
def scan_sessions_kernel(
    q_ptr,
    g_ptr,
    data_ptr,
    scale_ptr,
    data_page,
    scale_page,
    row_count,
    visible_ptr,
    out_ptr,
    out_row,
    page_table,
    table_row,
    pages,
    tiles,
    batch,
    segments_ptr,
    tile_ends_ptr,
    members_ptr,
    PLAN: tl.constexpr,
    SEGMENTS: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """Tiles of keys past every session that reads them, in turn."""
    total = tiles * batch
    if PLAN:
        segment = tl.arange(0, SEGMENTS)
        ends = tl.load(tile_ends_ptr + segment, mask=segment < 2 * batch, other=0)
        total = tl.max(ends, 0)
    for item in range(tl.program_id(0), total, tl.num_programs(0)):
        if PLAN:
            before = tl.where((ends <= item) & (segment < 2 * batch), 1, 0)
            which = tl.sum(before, 0)
            tile = item - tl.max(tl.where(before > 0, ends, 0), 0)
            first_page = tl.load(segments_ptr + which * 4)
            end_page = tl.load(segments_ptr + which * 4 + 1)
            begin = tl.load(segments_ptr + which * 4 + 2)
            end = tl.load(segments_ptr + which * 4 + 3)
            leader = tl.load(members_ptr + begin)
        else:
            leader = item // tiles
            tile = item % tiles
            first_page = 0
            end_page = pages
            begin = leader
            end = leader + 1
        entry = first_page * PAGE_ROWS + tile * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
        column = entry // PAGE_ROWS
        inside = column < end_page
        # The leader's own limit does not bound the others', so a group reads whole pages.
        wanted = inside
        if not PLAN:
            wanted = inside & (entry < tl.load(visible_ptr + leader))
        table = page_table + leader.to(tl.int64) * table_row
        page = tl.load(table + column, mask=wanted, other=-1)
        keys, scales = _load_keys(
            data_ptr,
            scale_ptr,
            data_page,
            scale_page,
            row_count,
            page,
            entry % PAGE_ROWS,
            DIM,
            PAGE_ROWS,
        )
        lane = tl.arange(0, TOGETHER)
        for start in range(begin, end, TOGETHER):
            member = tl.minimum(start + lane, end - 1)
            row = member.to(tl.int64)
            if PLAN:
                row = tl.load(members_ptr + member).to(tl.int64)
            scores = _score(q_ptr, g_ptr, keys, scales, row, HEADS, DIM, BLOCK_KEYS, TOGETHER)
            _store_scores(scores, row, entry, inside, visible_ptr, out_ptr, out_row)
