"""Cases for ranks on emulated NPUs: torch.distributed's collectives over hccl against torch's own arithmetic."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import torch
import torch.distributed as dist

from memferry_ascend import runtime

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8)
SIZES = (1, 4097)
LARGE = 300_001
"""Elements that do not fit into what a rank shows at a time (1 MiB)."""


def numbers(rank: int, size: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """What a rank puts in: all ranks can compute everybody's."""
    g = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype.is_floating_point:
        return (torch.randn(size, generator=g) * 10).to(dtype)
    return torch.randint(0, 20, (size,), generator=g).to(dtype)


def summed(rows: list[torch.Tensor]) -> torch.Tensor:
    """The sum in rank order, 16-bit floats in fp32 and rounded once."""
    wide = torch.float32 if rows[0].dtype.is_floating_point else rows[0].dtype
    total = rows[0].to(wide)
    for row in rows[1:]:
        total = total + row.to(wide)
    return total.to(rows[0].dtype)


def equal(got: torch.Tensor, want: torch.Tensor, what: object) -> None:
    assert got.dtype == want.dtype and torch.equal(got.cpu(), want), what


def world() -> tuple[int, int, torch.device]:
    rt = runtime.current()
    return rt.rank, rt.world, rt.backend.device


def reductions() -> str:
    """all_reduce, reduce, reduce_scatter: sum, max, min; even and uneven."""
    import torch_npu

    rank, size, device = world()
    ops = {
        dist.ReduceOp.SUM: summed,
        dist.ReduceOp.MAX: _fold(torch.maximum),
        dist.ReduceOp.MIN: _fold(torch.minimum),
    }
    large = [(torch.float32, LARGE, (dist.ReduceOp.SUM, summed))]
    for dtype, n, (op, apply) in [*_each(DTYPES[:-1], SIZES, ops.items()), *large]:
        want = apply([numbers(r, n, dtype) for r in range(size)])
        mine = numbers(rank, n, dtype).to(device)
        dist.all_reduce(mine, op)
        equal(mine, want, ("all_reduce", dtype, n, op))
        root = n % size
        mine = numbers(rank, n, dtype).to(device)
        dist.reduce(mine, root, op)
        equal(mine, want if rank == root else numbers(rank, n, dtype), ("reduce", dtype, n, op))
        rows = [numbers(r, n * size, dtype, 1).view(size, n)[rank] for r in range(size)]
        out = torch.empty(n, dtype=dtype, device=device)
        dist.reduce_scatter_tensor(out, numbers(rank, n * size, dtype, 1).to(device), op)
        equal(out, apply(rows), ("reduce_scatter", dtype, n, op))
    counts = [3 * r + 1 for r in range(size)]
    first = sum(counts[:rank])
    rows = [numbers(r, sum(counts), torch.float32, 2)[first : first + counts[rank]] for r in range(size)]
    out = torch.empty(counts[rank], device=device)
    mine = numbers(rank, sum(counts), torch.float32, 2).to(device)
    torch_npu.distributed.reduce_scatter_tensor_uneven(out, mine, counts)
    equal(out, summed(rows), "reduce_scatter_tensor_uneven")
    return "right"


def moves() -> str:
    """broadcast, scatter, all_gather, all_to_all, send and receive: even and uneven, in place, nothing at all."""
    import torch_npu

    rank, size, device = world()
    for dtype, n in [*_each(DTYPES, SIZES), (torch.bfloat16, 2 * LARGE)]:
        rows = [numbers(r, n, dtype) for r in range(size)]
        root = n % size
        mine = rows[rank].to(device)
        dist.broadcast(mine, root)
        equal(mine, rows[root], ("broadcast", dtype, n))
        out = torch.empty(n, dtype=dtype, device=device)
        parts = [row.to(device) for row in rows] if rank == root else None
        dist.scatter(out, parts, root)
        equal(out, rows[rank], ("scatter", dtype, n))
        out = torch.empty(size * n, dtype=dtype, device=device)
        out[rank * n : (rank + 1) * n] = rows[rank].to(device)
        dist.all_gather_single(out, out[rank * n : (rank + 1) * n])  # in place, as parameters are gathered
        equal(out, torch.cat(rows), ("all_gather", dtype, n))
        grids = [numbers(r, n * size, dtype, 1).view(size, n) for r in range(size)]
        out = torch.empty(size * n, dtype=dtype, device=device)
        dist.all_to_all_single(out, grids[rank].flatten().to(device))
        equal(out, torch.cat([grid[rank] for grid in grids]), ("all_to_all", dtype, n))
        ahead, behind = (rank + 1) % size, (rank - 1) % size
        out = torch.empty(n, dtype=dtype, device=device)
        for step in range(size):  # one sends at a time: a ring in which all send first would wait for ever
            if step == rank:
                dist.send(rows[rank].to(device), ahead)
            elif step == behind:
                dist.recv(out, behind)
        equal(out, rows[behind], ("send and recv", dtype, n))
    counts = [[(3 * r + 5 * peer) % 4 for peer in range(size)] for r in range(size)]  # zeros among them
    mine = numbers(rank, sum(counts[rank]), torch.int32, 3).to(device)
    received = [counts[r][rank] for r in range(size)]
    out = torch.empty(sum(received), dtype=torch.int32, device=device)
    dist.all_to_all_single(out, mine, received, counts[rank])
    everything = [numbers(r, sum(counts[r]), torch.int32, 3).split(counts[r]) for r in range(size)]
    equal(out, torch.cat([everything[r][rank] for r in range(size)]), "uneven all_to_all")
    lengths = [5 * r for r in range(size)]
    out = torch.empty(sum(lengths), device=device)
    mine = numbers(rank, lengths[rank], torch.float32, 4).to(device)
    torch_npu.distributed.all_gather_into_tensor_uneven(out, mine, lengths)
    equal(
        out, torch.cat([numbers(r, lengths[r], torch.float32, 4) for r in range(size)]), "uneven all_gather"
    )
    dist.barrier()
    return "right"


def in_stream_order() -> str:
    """A collective runs behind what its stream has before it, and what waits for it behind it; the host waits for nothing.
    Rank 0's stream is held: nobody's result is there before it is let go."""
    rank, size, device = world()
    acl = ctypes.CDLL("libascendcl.so")
    x = torch.zeros(1000, device=device)
    dist.all_reduce(x)  # communicators are made at the first call
    torch.npu.synchronize()
    stream = torch.npu.Stream()
    handle = ctypes.c_void_p(stream.npu_stream)
    with torch.npu.stream(stream):
        if rank == 0:
            assert acl.emuHoldStream(handle, 1) == 0
        x.fill_(rank + 1.0)
        work = dist.all_reduce(x, async_op=True)
        work.wait()
        y = x * 2
        done = torch.npu.Event()
        done.record()
    main = runtime.current().ranks
    assert main is not None
    main.barrier()  # all ranks have queued theirs
    assert not done.query()
    main.barrier()
    if rank == 0:
        assert acl.emuHoldStream(handle, 0) == 0
    done.synchronize()
    equal(y, torch.full((1000,), float(size * (size + 1))), "a collective in a stream")
    return "right"


def _fold(op):  # type: ignore[no-untyped-def]
    def apply(rows: list[torch.Tensor]) -> torch.Tensor:
        out = rows[0]
        for row in rows[1:]:
            out = op(out, row)
        return out

    return apply


def _each(*lists) -> Iterator[tuple]:  # type: ignore[no-untyped-def]
    import itertools

    return itertools.product(*lists)
