"""Safetensors files read by the slice and written as a stream.

The format (https://github.com/huggingface/safetensors, "Format"): 8 bytes with the header's length, the
header in JSON (`{name: {dtype, shape, data_offsets}}`), the tensors' bytes. Here a part of a tensor goes from
the file straight into the memory where it will live, with nothing mapped, and a file is written tensor by
tensor without any being held whole."""

from __future__ import annotations

import ctypes
import functools
import itertools
import json
import math
import mmap
import os
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .errors import CheckpointError
from .layouts import DimLayout, local_size, take_dim

Region = tuple[DimLayout, ...]
"""A part of a tensor: for each dim the ranges wanted, in order."""

CHUNK = 16 << 20  # bytes that are on the way at a time
SHORT_RUN = (
    256  # bytes; shorter runs are cheaper to read with what lies between them: the disk gives pages anyway
)
_POPULATED = 1 << 20  # bytes; smaller tensors come from memory that is in use already
_MADV_POPULATE_WRITE = 23  # of Linux's mman-common.h; the mmap module does not name it

# In the order in which safetensors puts them into a file (Dtype in its tensor.rs), last first.
_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, dtype)
    for name, dtype in {
        "BOOL": "bool", "U8": "uint8", "I8": "int8", "F8_E5M2": "float8_e5m2", "F8_E4M3": "float8_e4m3fn",
        "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz", "I16": "int16", "U16": "uint16",
        "F16": "float16", "BF16": "bfloat16", "I32": "int32", "U32": "uint32", "F32": "float32",
        "C64": "complex64", "F64": "float64", "I64": "int64", "U64": "uint64",
    }.items()
    if hasattr(torch, dtype)
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_ORDER = {name: i for i, name in enumerate(_DTYPES)}
_LARGEST_HEADER = 100 << 20  # what the format allows


@dataclass
class ReadCounter:
    """Bytes asked of the files, for whoever wants to know."""

    bytes: int = 0


@dataclass(frozen=True)
class FileTensor:
    """A tensor in a safetensors file: `offset` is where its bytes begin in the file."""

    path: Path
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    counter: ReadCounter = field(default_factory=ReadCounter, compare=False, repr=False)

    def fill(self, dest: Tensor, region: Region) -> None:
        """Read the part `region` into `dest`, of that shape; dest's dtype and device may be others.

        Raises CheckpointError where the file ends early.
        """
        if dest.numel() == 0:
            return
        shape = self.shape
        if not shape:
            region, dest, shape = (((0, 1),),), dest.view(1), (1,)
        with _Reader(self) as reader:
            if dest.device.type == "cpu" and dest.dtype == self.dtype and dest.is_contiguous():
                if self._run_bytes(region, shape) >= SHORT_RUN or region[1:] == whole_region(shape)[1:]:
                    reader.read(_memory(dest), self._runs(region, shape))
                    return
            row = math.prod(dest.shape[1:]) * self.dtype.itemsize
            for at, rows in row_blocks(region[0], max(1, CHUNK // max(row, 1))):
                part = dest.narrow(0, at, local_size(rows))
                part.copy_(self._load(reader, (rows, *region[1:]), shape))

    def _load(self, reader: _Reader, region: Region, shape: tuple[int, ...]) -> Tensor:
        """The part in a tensor of its own."""
        if self._run_bytes(region, shape) < SHORT_RUN:
            wide = (region[0], *whole_region(shape)[1:])
            read = torch.empty([local_size(region[0]), *shape[1:]], dtype=self.dtype)
            reader.read(_memory(read), self._runs(wide, shape))
            for dim in range(1, len(shape)):
                read = take_dim(read, dim, region[dim])
            return read
        read = torch.empty([local_size(ranges) for ranges in region], dtype=self.dtype)
        reader.read(_memory(read), self._runs(region, shape))
        return read

    def _run_bytes(self, region: Region, shape: tuple[int, ...]) -> int:
        """The length of the shortest run of bytes that lie side by side."""
        last = _last_cut(region, shape)
        return min(b - a for a, b in region[last]) * math.prod(shape[last + 1 :]) * self.dtype.itemsize

    def _runs(self, region: Region, shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
        """(where in the file, how many bytes) of each run, in the order of the region's own elements."""
        last = _last_cut(region, shape)
        inner = math.prod(shape[last + 1 :]) * self.dtype.itemsize
        strides = [math.prod(shape[d + 1 :]) * self.dtype.itemsize for d in range(last)]
        indices = [[i for a, b in region[d] for i in range(a, b)] for d in range(last)]
        tail = [(a * inner, (b - a) * inner) for a, b in region[last]]
        for outer in itertools.product(*indices):
            base = self.offset + sum(i * stride for i, stride in zip(outer, strides, strict=True))
            for start, length in tail:
                yield base + start, length


def whole_region(shape: Sequence[int]) -> Region:
    """All of a tensor."""
    return tuple(((0, n),) for n in shape)


def _last_cut(region: Region, shape: Sequence[int]) -> int:
    """The last dim of which not all is wanted: what lies behind it lies side by side."""
    return max(
        (d for d, (ranges, n) in enumerate(zip(region, shape, strict=True)) if ranges != ((0, n),)), default=0
    )


def row_blocks(ranges: DimLayout, most: int) -> Iterator[tuple[int, DimLayout]]:
    """`ranges` in blocks of at most `most` indices, each with its place in the result."""
    at = 0
    for start, stop in ranges:
        for low in range(start, stop, most):
            high = min(low + most, stop)
            yield at, ((low, high),)
            at += high - low


def _memory(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, writable."""
    size = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")


def populated(tensor: Tensor) -> Tensor:
    """`tensor`, new and on its way to be filled: where it is in the CPU's memory, Linux gives it all its
    pages at once rather than one by one as they are written. Before Linux 5.14 nothing follows.

    Pages of 2 MB (MADV_HUGEPAGE) took three times as long to get on a virtual machine."""
    size = tensor.numel() * tensor.element_size()
    if sys.platform == "linux" and tensor.device.type == "cpu" and size >= _POPULATED:
        start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (tensor.data_ptr() + size) // mmap.PAGESIZE * mmap.PAGESIZE - start
        _libc().madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _MADV_POPULATE_WRITE)
    return tensor


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


class _Reader:
    """One open file."""

    def __init__(self, tensor: FileTensor) -> None:
        self.tensor = tensor

    def __enter__(self) -> _Reader:
        self.fd = os.open(self.tensor.path, os.O_RDONLY)
        return self

    def __exit__(self, *exc: Any) -> None:
        os.close(self.fd)

    def read(self, into: memoryview, runs: Iterator[tuple[int, int]]) -> None:
        """Fill `into` with the runs, one after another."""
        at, fd, preadv = 0, self.fd, os.preadv
        for offset, length in runs:
            got = preadv(fd, [into[at : at + length]], offset)
            while got < length:  # a read may give less than asked: at 2 GB, or at the end of the file
                more = preadv(fd, [into[at + got : at + length]], offset + got)
                if more == 0:
                    raise CheckpointError(
                        f"{self.tensor.path} ends inside {self.tensor.name}: fetch it again."
                    )
                got += more
            at += length
        self.tensor.counter.bytes += at


# ---------------------------------------------------------------- what is in a file
def read_header(path: Path, counter: ReadCounter) -> tuple[dict[str, FileTensor], dict[str, str], list[str]]:
    """The tensors of a file by name, its metadata, and what is wrong with it (nothing: an empty list).

    No tensor is read. That a file is truncated shows in its size.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if not 2 <= length <= min(_LARGEST_HEADER, size - 8):
            return {}, {}, [f"{path.name}: no safetensors file, or cut off inside its header ({size} bytes)"]
        try:
            header = json.loads(file.read(length))
            metadata = header.pop("__metadata__", {})
        except (ValueError, AttributeError):
            return {}, {}, [f"{path.name}: its header is damaged"]
    tensors, wrong, end = {}, [], 0
    for name, entry in header.items():
        try:
            kind, shape = entry["dtype"], tuple(int(n) for n in entry["shape"])
            start, stop = entry["data_offsets"]
        except (KeyError, TypeError, ValueError):
            wrong.append(f"{path.name}: the header's entry of {name} is damaged")
            continue
        if kind not in _DTYPES:
            wrong.append(f"{path.name}: {name} has dtype {kind}, which this version of autotp can't read")
            continue
        if stop - start != math.prod(shape) * _DTYPES[kind].itemsize or start < 0:
            wrong.append(
                f"{path.name}: {name} has {stop - start} bytes, a {kind} of shape {list(shape)} has others"
            )
            continue
        end = max(end, stop)
        tensors[name] = FileTensor(path, name, _DTYPES[kind], shape, 8 + length + start, counter)
    if size < 8 + length + end:
        cut = [n for n, t in tensors.items() if t.offset + math.prod(t.shape) * t.dtype.itemsize > size]
        wrong.append(
            f"{path.name}: truncated, {size} of {8 + length + end} bytes; {len(cut)} tensors are cut off "
            f"(first: {cut[0]})"
        )
    return tensors, metadata, wrong


# ---------------------------------------------------------------- writing
class FileWriter:
    """Writes one safetensors file, byte for byte what safetensors' own `save_file` writes, a piece at a time.

    The tensors come in the order of `names`, each in any number of pieces.
    """

    def __init__(
        self,
        path: Path,
        tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]],
        metadata: Mapping[str, str],
    ):
        self.names = in_file_order({name: dtype for name, (dtype, _) in tensors.items()})
        header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
        at = 0
        for name in self.names:
            dtype, shape = tensors[name]
            stop = at + math.prod(shape) * dtype.itemsize
            header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [at, stop]}
            at = stop
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        self.size = 8 + len(text) + at
        self.file = path.open("wb")
        self.file.write(struct.pack("<Q", len(text)) + text)

    def write(self, piece: Tensor) -> None:
        """Append a contiguous CPU tensor."""
        if piece.numel():
            self.file.write(_memory(piece))

    def close(self) -> None:
        """Finish; CheckpointError when pieces are missing."""
        written = self.file.tell()
        self.file.close()
        if written != self.size:
            raise CheckpointError(f"{self.file.name} was left incomplete: {written} of {self.size} bytes.")


def in_file_order(dtypes: Mapping[str, torch.dtype]) -> list[str]:
    """Names in the order in which safetensors stores them: wide dtypes first, then by name.

    Raises CheckpointError for a dtype that safetensors doesn't know.
    """
    unknown = [f"{name} ({dtype})" for name, dtype in dtypes.items() if dtype not in _NAMES]
    if unknown:
        raise CheckpointError(
            f"safetensors has no dtype for {', '.join(unknown[:5])}; convert them before saving."
        )
    return sorted(dtypes, key=lambda name: (-_ORDER[_NAMES[dtypes[name]]], name.encode()))
