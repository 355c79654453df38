"""One tensor of a training checkpoint, as blocks of the whole: which of them a rank writes, and reads."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from .comm import Comm
from .layouts import DimLayout, ParamLayout, pieces
from .state import Held, part_of_copies

Block = tuple[tuple[int, ...], Tensor]  # where in the whole it begins, its values


@dataclass(frozen=True)
class Entry:
    """This rank's part of a tensor, for torch.distributed.checkpoint: which blocks of the whole it writes,
    or reads."""

    local: Tensor
    held: Held | None
    comm: Comm
    writing: bool = False
    rows: tuple[int, int] | None = None  # where copies share out what tp left: this one's first row, of all

    @classmethod
    def of(cls, tensor: Tensor, held: Held | None, comm: Comm) -> Entry:
        local, start = part_of_copies(tensor)
        cut = (start, tensor.shape[0]) if local is not tensor else None
        return cls(local.detach(), held, comm, rows=cut)

    @property
    def layout(self) -> ParamLayout | None:
        return None if self.held is None else self.held.layout

    @property
    def shape(self) -> tuple[int, ...]:
        if self.layout is not None:
            return tuple(self.layout.shape)
        return tuple(self.local.shape if self.rows is None else (self.rows[1], *self.local.shape[1:]))

    @property
    def elsewhere(self) -> bool:
        """Whether only rank 0, and not this one, has the values: they are added up over the ranks."""
        return self.comm.rank > 0 and self.held is not None and self.held.once

    def to_write(self, copy: bool) -> Entry:
        """The same, to be written; with a copy of the values on the CPU where training goes on meanwhile."""
        local = self.local.detach()
        return Entry(local.to("cpu", copy=True) if copy else local, self.held, self.comm, True, self.rows)

    def finish(self) -> None:
        """After reading."""
        if self.elsewhere:
            self.local.zero_()

    def blocks(self) -> list[Block]:
        """What this rank reads; or writes: of rows that several ranks hold, the first of them."""
        ranges = [[(0, 0, n)] for n in self.shape]
        if self.layout is not None:
            for d, ranks in self.layout.dims.items():
                if self.writing and len(self.layout.dims) == 1:
                    first = [piece for piece in pieces(ranks) if piece[0] == self.comm.rank]
                    ranges[d] = [(at, start, start + length) for _, at, start, length in first]
                else:
                    ranges[d] = list(_placed(ranks[self.comm.rank]))
        if self.rows is not None:
            ranges[0] = list(_within(ranges[0], self.rows[0], self.local.shape[0]))
        found = []
        for choice in itertools.product(*ranges):
            view = self.local
            for d, (at, start, stop) in enumerate(choice):
                view = view.narrow(d, at, stop - start)
            found.append((tuple(start for _, start, _ in choice), view))
        return found

    def chunks(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(start), block.shape) for start, block in self.blocks()]

    def block(self, index: MetadataIndex) -> Tensor:
        """The values of one of the blocks."""
        blocks, start = self.blocks(), tuple(index.offset or ())
        if index.index is not None and index.index < len(blocks) and blocks[index.index][0] == start:
            return blocks[index.index][1]  # of rows held twice, the one that is meant
        return next(block for at, block in blocks if at == start)


class Writer(DefaultSavePlanner):
    """Writes entries block by block. Blocks that several ranks propose are written by one of them."""

    def create_local_plan(self) -> SavePlan:
        items = []
        for name, entry in self.state_dict.items():
            properties = TensorProperties.create_from_tensor(entry.local)
            for chunk in () if entry.elsewhere else entry.chunks():
                data = TensorWriteData(chunk, properties, torch.Size(entry.shape))
                items.append(
                    WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data)
                )
        self.plan = SavePlan(items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        entry: Entry = self.state_dict[index.fqn]
        return entry.block(index)


class Reader(DefaultLoadPlanner):
    """Reads what entries need, from whichever blocks there are."""

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        items: list[Any] = []
        for name, entry in self.state_dict.items():
            stored: Any = self.metadata.state_dict_metadata[name]  # type: ignore[union-attr]
            items += create_read_items_for_chunk_list(name, stored, entry.chunks())
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        entry: Entry = self.state_dict[index.fqn]
        return entry.block(index)


def _placed(ranges: DimLayout) -> Iterator[tuple[int, int, int]]:
    """(where on the rank, start, stop) of each range."""
    at = 0
    for start, stop in ranges:
        yield at, start, stop
        at += stop - start


def _within(placed: Any, first: int, count: int) -> Iterator[tuple[int, int, int]]:
    """What of `placed` ranges lies in the rows `first`, ... of the rank, placed from there."""
    for at, start, stop in placed:
        low, high = max(at, first), min(at + stop - start, first + count)
        if low < high:
            yield low - first, start + low - at, start + high - at
