"""Shards: which elements of a unit this rank downloads, updates and uploads, and the memory that holds them.

A unit's byte range (its layout in the device dtype) is cut into as many equal chunks as there are ranks, at multiples
of the 512-byte alignment. Chunk boundaries therefore fall on parameter starts or inside a parameter, never in a gap,
and laying out the *pieces* of one chunk gives the same offsets as the unit's own layout less the chunk's start. Chunks
at the end may be short or empty: a unit may have fewer parameters, even fewer aligned blocks, than there are ranks.

A piece is a parameter in miniature, so arena layouts and host updates need not know that they see only a part.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from memferry_ascend import arming, limits
from memferry_ascend.arena import Arena, Layout, UnitMemory
from memferry_ascend.backends.base import ALIGNMENT, align
from memferry_ascend.layers import Param, Unit
from memferry_ascend.planner.plan import Mode


@dataclass(eq=False)
class Piece(Param):
    """The elements `start` to `start + count` of a parameter, flat. Keeps the parameter's index, group and dtype."""

    start: int = 0
    count: int = 0

    @property
    def numel(self) -> int:
        return self.count

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.count,))


def _piece(p: Param, start: int, count: int) -> Piece:
    return Piece(p.index, p.name, p.param, p.dtype, p.trainable, p.aliases, p.group, start, count)


@dataclass(frozen=True)
class Run:
    """Bytes that lie together in the exchange (`packed`) and in a chunk (`placed`), of one dtype."""

    packed: int
    placed: int
    nbytes: int
    dtype: torch.dtype


class Cut:
    """A unit cut into `size` chunks of `chunk` bytes (the last ones may be short or empty). Pure arithmetic.

    `pieces[r]` are rank r's parts of the unit's parameters. Gradients travel *packed*: of each chunk only trainable
    pieces, each 512-byte aligned; `packed[r]` is the size of rank r's chunk then, and `sends[index]` lists where a
    parameter's elements go: (byte offset in the buffer of all packed chunks, first element, elements).
    """

    def __init__(self, unit: Unit, size: int) -> None:
        layout = Layout(unit)
        self.nbytes = layout.nbytes
        self.size = size
        self.chunk = align(-(-layout.nbytes // size)) or ALIGNMENT
        self.pieces: list[list[Piece]] = []
        self.packed: list[int] = []
        self.runs: list[list[Run]] = []
        self.sends: dict[int, list[tuple[int, int, int]]] = {}
        base = 0
        for r in range(size):
            first, last = r * self.chunk, (r + 1) * self.chunk
            pieces, runs, at = [], [], 0
            for p in unit.params:
                offset = layout.places[p.index].offset
                low, high = max(offset, first), min(offset + p.nbytes, last)
                if low >= high:
                    continue
                item = p.dtype.itemsize
                piece = _piece(p, (low - offset) // item, (high - low) // item)
                pieces.append(piece)
                if p.trainable:
                    room = align(piece.nbytes)
                    runs.append(Run(at, low - first, min(room, last - low), p.dtype))
                    self.sends.setdefault(p.index, []).append((base + at, piece.start, piece.count))
                    at += room
            self.pieces.append(pieces)
            self.packed.append(at)
            self.runs.append(_merged(runs))
            base += at
        self.total = base
        """Bytes of the buffer of all packed chunks."""

    def bounds(self, r: int) -> tuple[int, int]:
        """First and last byte of rank r's chunk inside the unit."""
        return min(r * self.chunk, self.nbytes), min((r + 1) * self.chunk, self.nbytes)


def _merged(runs: list[Run]) -> list[Run]:
    out: list[Run] = []
    for run in runs:
        last = out[-1] if out else None
        if (
            last is not None
            and last.dtype == run.dtype
            and last.packed + last.nbytes == run.packed
            and last.placed + last.nbytes == run.placed
        ):
            out[-1] = Run(last.packed, last.placed, last.nbytes + run.nbytes, run.dtype)
        else:
            out.append(run)
    return out


class ShardMemory(UnitMemory):
    """One rank's chunk of a unit in the arena. Accessors take a parameter or its piece and give the piece, flat;
    of a parameter that lies wholly in other chunks they give an empty tensor."""

    def __init__(self, unit: Unit, cut: Cut, rank: int) -> None:
        self.cut = cut
        self.rank = rank
        self.pieces = cut.pieces[rank]
        self.of = {p.index: p for p in self.pieces}
        self.first, self.last = cut.bounds(rank)
        super().__init__(Unit(unit.index, unit.layers, unit.plan, list(self.pieces), unit.aliased))

    def host_param(self, p: Param) -> torch.Tensor:
        q = self.of.get(p.index)
        return torch.empty(0, dtype=p.dtype) if q is None else super().host_param(q)

    def host_grad(self, p: Param) -> torch.Tensor:
        q = self.of.get(p.index)
        return torch.empty(0, dtype=p.dtype) if q is None else super().host_grad(q)

    def host_state(self, kind: str, p: Param) -> torch.Tensor:
        q = self.of.get(p.index)
        if q is None:
            return torch.empty(0, dtype=torch.int16 if kind == "lo" else torch.float32)
        return super().host_state(kind, q)

    def master(self, p: Param) -> torch.Tensor:
        """A copy of the piece's master, flat: fp32 for trainable parameters, the stored dtype for frozen ones."""
        q = self.of.get(p.index)
        if q is None:
            return torch.empty(0, dtype=torch.float32 if p.trainable else p.dtype)
        return arming.get_master(self, q).view(-1)

    def set_master(self, p: Param, value: torch.Tensor) -> None:
        """Take this rank's piece out of a whole parameter's value (any float dtype, CPU)."""
        q = self.of.get(p.index)
        if q is not None:
            flat = value.detach().reshape(-1)[q.start : q.start + q.count]
            arming.set_master(self, q, flat)


def regions(unit: Unit, mine: ShardMemory, native: bool) -> list[tuple[str, int, bool]]:
    """What a rank takes for a unit, in order: (kind, bytes, mapped). `shared` is one memory for all of its node."""
    layout = mine.layout
    gathered = unit.plan.mode is Mode.GFGB
    out = [("param", layout.nbytes, True) if gathered else ("shared", mine.cut.nbytes, True)]
    if layout.elements:
        out.append(("grad", layout.nbytes, True))
        if any(p.trainable and p.dtype is torch.bfloat16 for p in mine.pieces):
            out.append(("lo", layout.elements * 2, False))
        if native:
            out += [("m", layout.elements * 4, False), ("v", layout.elements * 4, False)]
    return out


def _expected(all_regions: list[list[tuple[str, int, bool]]]) -> dict[str, int]:
    need: dict[str, int] = {}
    for some in all_regions:
        for kind, nbytes, _ in some:
            need[kind] = need.get(kind, 0) + max(align(nbytes), ALIGNMENT)
    return need


def arena_bytes(
    units: list[Unit], cuts: list[Cut], rank: int, native: bool, accumulate: int
) -> dict[str, int]:
    """Bytes this rank's slabs will take, by kind: the arena itself lays them out, over nothing."""
    memories = [ShardMemory(u, c, rank) for u, c in zip(units, cuts, strict=True)]
    wanted = [regions(u, m, native) for u, m in zip(units, memories, strict=True)]
    arena, left = Arena(limits.Counting()), _expected(wanted)  # type: ignore[arg-type]
    for some in wanted:
        for kind, nbytes, mapped in some:
            arena.region(kind, nbytes, mapped=mapped, expect=left[kind])
            left[kind] -= max(align(nbytes), ALIGNMENT)
    if accumulate > 1:
        sizes = [
            m.layout.elements * 4
            for u, m in zip(units, memories, strict=True)
            if any(p.trainable for p in u.params)
        ]
        total = sum(sizes)
        for nbytes in sizes:
            arena.region("acc", nbytes, mapped=True, expect=total)
            total -= nbytes
    return arena.bytes_by_kind


def fill(
    units: list[Unit], cuts: list[Cut], rank: int, arena: Arena, native: bool
) -> list[tuple[UnitMemory, ShardMemory]]:
    """Allocate this rank's chunks and move its part of the model's values in. Units that are read where they are get
    one region for the whole node. Parameters are left without memory of their own until they are bound."""
    memories = [(UnitMemory(u), ShardMemory(u, c, rank)) for u, c in zip(units, cuts, strict=True)]
    left = _expected([regions(u, mine, native) for u, (_, mine) in zip(units, memories, strict=True)])
    for unit, (whole, mine) in zip(units, memories, strict=True):
        for kind, nbytes, mapped in regions(unit, mine, native):
            region = arena.region(kind, nbytes, mapped=mapped, expect=left[kind])
            left[kind] -= max(align(nbytes), ALIGNMENT)
            if kind == "param":
                mine.param = region
            elif kind == "shared":
                whole.param = region
                mine.param = region.part(mine.first, mine.last)
            elif kind == "grad":
                mine.grad = region
            else:
                mine.state[kind] = region
        for p in unit.params:
            mine.set_master(p, p.param.detach())
            shape = p.shape
            p.param.grad = None
            p.param.data = torch.empty(1, dtype=p.dtype).expand(shape) if p.numel else torch.empty(shape)
    return memories
