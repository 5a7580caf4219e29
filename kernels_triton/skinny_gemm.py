"""Triton kernels of the skinny product: y[M, N] = x[M, K] @ W[N, K]^T, bf16 in and out, sums in fp32.

A program owns `ROWS` rows of W and walks K in blocks of `BLOCK_K`. Sizes are compile-time constants, so whole blocks
need no mask and short loops are unrolled. Why the kernels are as they are:

* A launch waits for weights. The first block is loaded before anything else; with dependent launch also before the wait
  for the launch in front, since weights never depend on it and activations do.
* That first block is the last one along K, the only one that can be short. The others need no mask.
* `VECTOR` neighbouring products are added at once by the thread that loaded them, and sums cross threads one time, at
  the end. A tile of single sums would take eight times the registers.
* bf16 becomes fp32 right after its load. Nothing but the matrix unit computes in bf16.
* With `SPLIT_K` > 1 each program writes its sums to `partials`, and the last one of a row block to end adds them in a
  fixed order, so the result does not depend on which program that was. It leaves `counters` at zero.
"""

# Triton reads these functions, Python does not run them: types are those of the launch, and tuples grow by `+`.
# mypy: disable-error-code="assignment, no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: RUF005

from __future__ import annotations

import triton
import triton.language as tl

# Loops up to this many blocks and multiplications a thread are unrolled. More would only grow the code.
_UNROLLED_BLOCKS = tl.constexpr(8)
_UNROLLED_PRODUCTS = tl.constexpr(1024)
# Weights of one block that a thread can hold while it works on the block before.
_HELD_AHEAD = tl.constexpr(128)


@triton.jit
def _weights(base, row, k, rows_left, K: tl.constexpr, BOUND_K: tl.constexpr, BOUND_N: tl.constexpr,
             EVICT: tl.constexpr, MODIFIER: tl.constexpr):  # fmt: skip
    """Weights of one block, zero outside of W. The only place that reads weights."""
    inside = None
    other = None
    if BOUND_K:
        inside = k < K
        other = 0.0
    if BOUND_N:
        other = 0.0
        if BOUND_K:
            inside = inside & (row < rows_left)
        else:
            inside = row < rows_left
    return tl.load(base + (row * K + k), mask=inside, other=other, eviction_policy=EVICT, cache_modifier=MODIFIER)


@triton.jit
def _activations(activation, m, k, M, K: tl.constexpr, BOUND_K: tl.constexpr, BOUND_M: tl.constexpr):
    """Activations of one block, zero outside of x."""
    inside = None
    other = None
    if BOUND_K:
        inside = k < K
        other = 0.0
    if BOUND_M:
        other = 0.0
        if BOUND_K:
            inside = inside & (m < M)
        else:
            inside = (k >= 0) & (m < M)  # a tile, also where m is one row
    return tl.load(activation + (m * K + k), mask=inside, other=other)


@triton.jit
def _add(sums, w, activation, k, M, K: tl.constexpr, COLUMNS: tl.constexpr, BOUND_K: tl.constexpr,
         BOUND_M: tl.constexpr, VECTOR: tl.constexpr):  # fmt: skip
    """Add the products of one block to `sums`, a tuple of one (ROWS, BLOCK_K / VECTOR) tile for each activation row."""
    ROWS: tl.constexpr = w.shape[0]
    GROUPS: tl.constexpr = w.shape[1] // VECTOR
    wide = w.to(tl.float32)
    added = ()
    for m in tl.static_range(COLUMNS):
        product = wide * _activations(activation, m, k, M, K, BOUND_K, BOUND_M).to(tl.float32)
        added = added + (sums[m] + tl.sum(tl.reshape(product, (ROWS, GROUPS, VECTOR)), axis=2),)
    return added


@triton.jit
def _across_threads(sums, COLUMNS: tl.constexpr):
    """One reduction for all tiles; gives (ROWS, columns), columns rounded up to a power of two."""
    ROWS: tl.constexpr = sums[0].shape[0]
    LEVELS: tl.constexpr = (COLUMNS > 1) + (COLUMNS > 2) + (COLUMNS > 4)
    tiles = sums
    for _ in tl.static_range((1 << LEVELS) - COLUMNS):
        tiles = tiles + (tl.zeros(sums[0].shape, tl.float32),)
    for level in tl.static_range(LEVELS):
        joined = ()
        for i in tl.static_range(1 << (LEVELS - 1 - level)):
            joined = joined + (tl.join(tiles[i], tiles[i + (1 << (LEVELS - 1 - level))]),)
        tiles = joined
    return tl.reshape(tl.sum(tiles[0], axis=1), (ROWS, 1 << LEVELS))


@triton.jit
def _finish(y, output, partials, counters, M, N: tl.constexpr, SPLIT_K: tl.constexpr, EXCHANGE: tl.constexpr,
            BOUND: tl.constexpr):  # fmt: skip
    """Store (ROWS, columns) sums as bf16; with split_k, the last program of the row block first adds all parts."""
    ROWS: tl.constexpr = y.shape[0]
    COLUMNS: tl.constexpr = y.shape[1]
    block = tl.program_id(0)
    first = block.to(tl.int64) * ROWS
    row = tl.arange(0, ROWS)[:, None]
    m = tl.arange(0, COLUMNS)[None, :]
    at = first + (m.to(tl.int64) * N + row)
    inside = None
    other = None
    if BOUND:
        inside = (row < N - first) & (m < M)
        other = 0.0
    if SPLIT_K == 1:
        tl.store(output + at, y.to(tl.bfloat16), mask=inside)
    else:
        part = tl.program_id(1).to(tl.int64) * N * M
        # The parts of all threads must lie in memory before one thread counts this program as done. On AMD the barrier
        # does not wait for the stores of other waves (LLVM's CU mode); an exchange that acquires is waited for.
        if EXCHANGE:
            words = (partials + (at + part)).to(tl.pointer_type(tl.int32), bitcast=True)
            tl.atomic_xchg(words, y.to(tl.int32, bitcast=True), mask=inside, sem="acq_rel", scope="gpu")
        else:
            tl.store(partials + (at + part), y, mask=inside)
        tl.debug_barrier()
        done_before = tl.atomic_add(counters + block, 1, sem="acq_rel", scope="gpu")
        if done_before == SPLIT_K - 1:
            total = tl.zeros((ROWS, COLUMNS), tl.float32)
            for s in tl.static_range(SPLIT_K):
                # .cg reads from the cache that all programs share.
                total += tl.load(partials + (at + s * N * M), mask=inside, other=other, cache_modifier=".cg")
            tl.store(output + at, total.to(tl.bfloat16), mask=inside)
            tl.store(counters + block, 0)


@triton.jit
def _in_registers(activation, weight, M, K: tl.constexpr, N: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
                  BLOCK_K: tl.constexpr, SHARE: tl.constexpr, VECTOR: tl.constexpr, SPLIT_K: tl.constexpr,
                  STAGES: tl.constexpr, EVICT: tl.constexpr, MODIFIER: tl.constexpr, PDL: tl.constexpr,
                  BOUND_M: tl.constexpr):  # fmt: skip
    """Sums of one program, (ROWS, columns), by multiply and add in the threads that load the weights."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    # Every program walks PART blocks. Blocks behind K are wholly masked; they exist only with split_k.
    PART: tl.constexpr = (K + BLOCK_K * SPLIT_K - 1) // (BLOCK_K * SPLIT_K)
    BOUND_K: tl.constexpr = K != PART * BLOCK_K * SPLIT_K
    BOUND_REST: tl.constexpr = BOUND_K and SPLIT_K > 1
    BOUND_N: tl.constexpr = N % ROWS != 0
    start = tl.program_id(0).to(tl.int64) * ROWS
    base = weight + start * K
    row = tl.arange(0, ROWS)[:, None]
    k = tl.arange(0, BLOCK_K)[None, :]
    if (ROWS + COLUMNS) * K + PART * BLOCK_K * SPLIT_K >= 2**31:
        row = row.to(tl.int64)
        k = k.to(tl.int64)
    if SPLIT_K > 1:
        k += tl.program_id(1).to(k.dtype) * (PART * BLOCK_K)
    # Blocks are walked in the order last, first, second, ...
    last = k + (PART - 1) * BLOCK_K
    SMALL: tl.constexpr = PART <= _UNROLLED_BLOCKS and PART * SHARE * COLUMNS <= _UNROLLED_PRODUCTS
    UNROLL: tl.constexpr = SMALL and (STAGES == 1 or PDL)
    BEFORE_WAIT: tl.constexpr = min(STAGES, PART) if UNROLL else 1
    tiles = (_weights(base, row, last, N - start, K, BOUND_K, BOUND_N, EVICT, MODIFIER),)
    for s in tl.static_range(1, BEFORE_WAIT):
        here = k + (s - 1) * BLOCK_K
        tiles = tiles + (_weights(base, row, here, N - start, K, BOUND_REST, BOUND_N, EVICT, MODIFIER),)
    if PDL:
        tl.extra.cuda.gdc_wait()
    sums = ()
    for _ in tl.static_range(COLUMNS):
        sums = sums + (tl.zeros((ROWS, BLOCK_K // VECTOR), tl.float32),)
    if UNROLL:
        # In registers, as many blocks ahead as were loaded before the wait.
        for s in tl.static_range(PART):
            if s + BEFORE_WAIT < PART:
                here = k + (s + BEFORE_WAIT - 1) * BLOCK_K
                tiles = tiles + (_weights(base, row, here, N - start, K, BOUND_REST, BOUND_N, EVICT, MODIFIER),)
            at = last if s == 0 else k + (s - 1) * BLOCK_K
            sums = _add(sums, tiles[s], activation, at, M, K, COLUMNS, BOUND_K, BOUND_M, VECTOR)
    elif STAGES == 1 and SHARE > _HELD_AHEAD:
        # A block is enough in flight.
        sums = _add(sums, tiles[0], activation, last, M, K, COLUMNS, BOUND_K, BOUND_M, VECTOR)
        for j in tl.range(PART - 1, num_stages=1):
            here = k + j * BLOCK_K
            w = _weights(base, row, here, N - start, K, BOUND_REST, BOUND_N, EVICT, MODIFIER)
            sums = _add(sums, w, activation, here, M, K, COLUMNS, BOUND_REST, BOUND_M, VECTOR)
    elif STAGES == 1:
        # In registers, one block ahead.
        w = tiles[0]
        at = last
        for j in tl.range(PART - 1, num_stages=1):
            here = k + j * BLOCK_K
            ahead = _weights(base, row, here, N - start, K, BOUND_REST, BOUND_N, EVICT, MODIFIER)
            sums = _add(sums, w, activation, at, M, K, COLUMNS, BOUND_K, BOUND_M, VECTOR)
            w = ahead
            at = here
        sums = _add(sums, w, activation, at, M, K, COLUMNS, BOUND_K, BOUND_M, VECTOR)
    else:
        # Triton's pipeline: copies to shared memory that run ahead (NVIDIA), or loads that do (AMD).
        for j in tl.range(PART - 1, num_stages=STAGES):
            here = k + j * BLOCK_K
            w = _weights(base, row, here, N - start, K, BOUND_REST, BOUND_N, EVICT, MODIFIER)
            sums = _add(sums, w, activation, here, M, K, COLUMNS, BOUND_REST, BOUND_M, VECTOR)
        sums = _add(sums, tiles[0], activation, last, M, K, COLUMNS, BOUND_K, BOUND_M, VECTOR)
    return _across_threads(sums, COLUMNS)


@triton.jit
def _in_matrix_unit(activation, weight, M, K: tl.constexpr, N: tl.constexpr, COLUMNS: tl.constexpr,
                    ROWS: tl.constexpr, BLOCK_K: tl.constexpr, WARPS: tl.constexpr, SPLIT_K: tl.constexpr,
                    STAGES: tl.constexpr, EVICT: tl.constexpr, MODIFIER: tl.constexpr,
                    PDL: tl.constexpr):  # fmt: skip
    """Sums of one program, (ROWS, COLUMNS), by matrix instructions.

    ROWS x COLUMNS is one tile of the instruction, too little to share between warps. So each warp takes its own piece
    of K as one entry of a batched product, and the pieces are added at the end.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    PART: tl.constexpr = (K + BLOCK_K * SPLIT_K - 1) // (BLOCK_K * SPLIT_K)
    BOUND_K: tl.constexpr = K != PART * BLOCK_K * SPLIT_K
    BOUND_N: tl.constexpr = N % ROWS != 0
    PIECE: tl.constexpr = BLOCK_K // WARPS
    start = tl.program_id(0).to(tl.int64) * ROWS
    base = weight + start * K
    row = tl.arange(0, ROWS)[None, :, None]
    m = tl.arange(0, COLUMNS)[None, None, :]
    warp = tl.arange(0, WARPS)[:, None, None] * PIECE
    if (ROWS + COLUMNS) * K + PART * BLOCK_K * SPLIT_K >= 2**31:
        row = row.to(tl.int64)
        m = m.to(tl.int64)
        warp = warp.to(tl.int64)
    if SPLIT_K > 1:
        warp += tl.program_id(1).to(warp.dtype) * (PART * BLOCK_K)
    kw = warp + tl.arange(0, PIECE)[None, None, :]
    kx = warp + tl.arange(0, PIECE)[None, :, None]
    end = (PART - 1) * BLOCK_K
    if PDL:
        w = _weights(base, row, kw + end, N - start, K, BOUND_K, BOUND_N, EVICT, MODIFIER)
        tl.extra.cuda.gdc_wait()
    sums = tl.zeros((WARPS, ROWS, COLUMNS), tl.float32)
    for j in tl.range(PART - PDL, num_stages=STAGES):
        v = _weights(base, row, kw + j * BLOCK_K, N - start, K, BOUND_K, BOUND_N, EVICT, MODIFIER)
        x = _activations(activation, m, kx + j * BLOCK_K, M, K, BOUND_K, True)
        sums = tl.dot(v, x, sums)
    if PDL:
        x = _activations(activation, m, kx + end, M, K, BOUND_K, True)
        sums = tl.dot(w, x, sums)
    return tl.sum(sums, axis=0)


@triton.jit
def skinny_gemm_m1(activation, weight, output, partials, counters, K: tl.constexpr, N: tl.constexpr,
                   ROWS: tl.constexpr, BLOCK_K: tl.constexpr, SHARE: tl.constexpr, VECTOR: tl.constexpr,
                   SPLIT_K: tl.constexpr, EXCHANGE: tl.constexpr, STAGES: tl.constexpr, EVICT: tl.constexpr,
                   MODIFIER: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """The product for M = 1. Grid: (row blocks, SPLIT_K)."""
    y = _in_registers(activation, weight, 1, K, N, 1, ROWS, BLOCK_K, SHARE, VECTOR, SPLIT_K, STAGES, EVICT, MODIFIER,
                      PDL, False)  # fmt: skip
    _finish(y, output, partials, counters, 1, N, SPLIT_K, EXCHANGE, N % ROWS != 0)


@triton.jit
def skinny_gemm(activation, weight, output, partials, counters, M, COLUMNS: tl.constexpr, K: tl.constexpr,
                N: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, SHARE: tl.constexpr,
                VECTOR: tl.constexpr, WARPS: tl.constexpr, MATRIX_UNIT: tl.constexpr, BOUND_M: tl.constexpr,
                SPLIT_K: tl.constexpr, EXCHANGE: tl.constexpr, STAGES: tl.constexpr, EVICT: tl.constexpr,
                MODIFIER: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """The product for M <= 8. Grid: (row blocks, SPLIT_K).

    COLUMNS activation rows are computed: M, where M is a constant; or 8, with BOUND_M, where the launch gives M; or as
    many as the matrix instruction has.
    """
    if MATRIX_UNIT:
        y = _in_matrix_unit(activation, weight, M, K, N, COLUMNS, ROWS, BLOCK_K, WARPS, SPLIT_K, STAGES, EVICT,
                            MODIFIER, PDL)  # fmt: skip
        _finish(y, output, partials, counters, M, N, SPLIT_K, EXCHANGE, True)
    else:
        y = _in_registers(activation, weight, M, K, N, COLUMNS, ROWS, BLOCK_K, SHARE, VECTOR, SPLIT_K, STAGES,
                          EVICT, MODIFIER, PDL, BOUND_M)  # fmt: skip
        # Three columns, for example, are four in the tile.
        _finish(y, output, partials, counters, M, N, SPLIT_K, EXCHANGE, True)
