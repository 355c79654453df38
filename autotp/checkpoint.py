"""A checkpoint's files as lazy tensors by name: nothing is read but headers, and what is wrong is told by
name."""

from __future__ import annotations

import json
import pickle
import warnings
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from .errors import CheckpointError
from .layouts import take_dim
from .lazy import LazyTensor, lazy, origin, read_in_blocks
from .tensorfiles import FileTensor, ReadCounter, Region, read_header, whole_region

SAFE_INDEX, SAFE_FILE = "model.safetensors.index.json", "model.safetensors"
PICKLE_INDEX, PICKLE_FILE = "pytorch_model.bin.index.json", "pytorch_model.bin"
SHOWN = 12  # names an error lists of each kind


@dataclass
class Checkpoint:
    """`tensors`: by the names of the files. `counter`: the bytes that reading them has taken so far.
    `metadata`: what safetensors files say beside them."""

    path: Path
    tensors: dict[str, LazyTensor]
    counter: ReadCounter = field(default_factory=ReadCounter)
    metadata: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class InMemory:
    """A tensor that torch.load has given."""

    tensor: Tensor
    counter: ReadCounter

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def fill(self, dest: Tensor, region: Region) -> None:
        part = self.tensor
        for dim, ranges in enumerate(region):
            part = take_dim(part, dim, ranges)
        dest.copy_(part)
        self.counter.bytes += part.numel() * part.element_size()


def locate(source: str | Path, allow_pickle: bool = False) -> Path:
    """The directory of `source`: itself, or where the hub's files of that id are. What is not here yet is
    fetched: configs, tokenizer, and of the weights the files that `open_checkpoint` would read.

    Raises CheckpointError where it is neither.
    """
    path = Path(source)
    if path.exists():
        return path
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise CheckpointError(
            f"{source} is no directory; to fetch it from a hub: pip install huggingface_hub."
        ) from error

    def fetch(wanted: list[str], commit: str | None = None) -> Path:
        # Folders hold the same in other formats.
        options: Any = {"revision": commit, "allow_patterns": wanted, "ignore_patterns": ["*/*"]}
        return Path(snapshot_download(str(source), **options))

    try:
        here = fetch(["*.json", "*.jinja", "*.txt", "*.model"])
        for index, file in ((SAFE_INDEX, SAFE_FILE), (PICKLE_INDEX, PICKLE_FILE)):
            fetch(sorted(_indexed(here / index)) if (here / index).is_file() else [file], here.name)
            if (here / index).is_file() or (here / file).is_file() or not allow_pickle:
                break
        return here
    except CheckpointError:
        raise
    except Exception as error:  # of the hub, the network or the name: there is no such checkpoint here
        first = str(error).strip().splitlines()[:1]
        raise CheckpointError(f"{source} is no directory, and no hub gave it: {''.join(first)}") from error


def open_checkpoint(path: Path, allow_pickle: bool = False) -> Checkpoint:
    """The tensors of a directory in Hugging Face's layout, or of one .safetensors file.

    allow_pickle: also read pytorch_model.bin, with torch's `weights_only`, which runs none of its code.
    Raises CheckpointError, with all that is wrong, by name: files that are missing, cut off or damaged,
    entries of the index that no file has."""
    if path.is_file():
        return _open_safetensors(path.parent, {path.name: None})
    if not path.is_dir():
        raise CheckpointError(f"{path} is no directory.")
    if (path / SAFE_INDEX).is_file():
        return _open_safetensors(path, _indexed(path / SAFE_INDEX))
    if (path / SAFE_FILE).is_file():
        return _open_safetensors(path, {SAFE_FILE: None})
    pickles = [name for name in (PICKLE_INDEX, PICKLE_FILE) if (path / name).is_file()]
    if not pickles:
        raise CheckpointError(f"{path} holds no weights: neither {SAFE_FILE} nor {SAFE_INDEX}.")
    if not allow_pickle:
        raise CheckpointError(
            f"{path} holds its weights in {pickles[0]} only, a pickle. Trusted? allow_pickle=True (it "
            "is read with weights_only, which runs none of its code), or convert it: from_pretrained and "
            "save_pretrained."
        )
    return _open_pickles(
        path, _indexed(path / PICKLE_INDEX) if pickles[0] == PICKLE_INDEX else {PICKLE_FILE: None}
    )


def _indexed(index: Path) -> dict[str, set[str] | None]:
    """Which names each file must hold."""
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
        files: dict[str, set[str] | None] = {file: set() for file in sorted(set(weight_map.values()))}
        for name, file in weight_map.items():
            files[file].add(name)  # type: ignore[union-attr]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is damaged: {error}. Fetch it again.") from error
    outside = [file for file in files if Path(file).name != file]
    if outside:
        raise CheckpointError(f"{index} names files outside of its directory: {outside[0]}")
    return files


def _open_safetensors(path: Path, files: Mapping[str, set[str] | None]) -> Checkpoint:
    found, wrong = Checkpoint(path, {}), []
    for file, expected in files.items():
        if not (path / file).is_file():
            wrong.append(f"{file}: missing ({len(expected or ())} tensors)")
            continue
        tensors, metadata, faults = read_header(path / file, found.counter)
        wrong += faults
        found.metadata |= metadata
        if not faults:
            wrong += [
                f"{file}: the index says it holds {name}, it does not"
                for name in sorted((expected or set()) - set(tensors))
            ]
        for name, tensor in tensors.items():
            if expected is None or name in expected:
                found.tensors[name] = lazy(tensor.shape, tensor.dtype, tensor)
    _raise(path, wrong)
    return found


def _open_pickles(path: Path, files: Mapping[str, set[str] | None]) -> Checkpoint:
    found, wrong, held = Checkpoint(path, {}), [], []
    for file in files:
        if not (path / file).is_file():
            wrong.append(f"{file}: missing")
            continue
        try:
            if zipfile.is_zipfile(path / file):
                found.tensors |= _in_pickle(path / file, found.counter)
                continue
            held.append(file)  # of before torch 1.6
            state = torch.load(path / file, map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
            said = (str(error) or type(error).__name__).splitlines()[0]
            wrong.append(f"{file}: damaged, or no weights alone ({said})")
            continue
        for name, tensor in state.items():
            if isinstance(tensor, Tensor):
                found.tensors[name] = lazy(tuple(tensor.shape), tensor.dtype, InMemory(tensor, found.counter))
    _raise(path, wrong)
    warnings.warn(
        f"{path}: reading .bin files. "
        + (f"Every rank holds the whole of {', '.join(held)} meanwhile. " if held else "")
        + "Convert them to safetensors (from_pretrained, save_pretrained): a damaged file then shows before "
        "anything is read, and no pickle is opened.",
        stacklevel=4,
    )
    return found


def _in_pickle(file: Path, counter: ReadCounter) -> dict[str, LazyTensor]:
    """The tensors of a file of torch.save, which is a zip archive with the bytes of each storage as they are:
    where they begin is all that is asked of torch here."""
    with FakeTensorMode():
        state = torch.load(file, map_location="cpu", weights_only=True)
    found, length = {}, file.stat().st_size
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor):
            continue
        storage: Any = tensor.untyped_storage()
        begin, width = storage._checkpoint_offset, tensor.dtype.itemsize
        if begin + storage.nbytes() > length:
            raise RuntimeError(f"cut off inside of {name}")
        if tensor.is_contiguous():
            at, shape = begin + tensor.storage_offset() * width, tuple(tensor.shape)
            found[name] = lazy(shape, tensor.dtype, FileTensor(file, name, tensor.dtype, shape, at, counter))
        else:
            all_of_it = (storage.nbytes() // width,)
            source = FileTensor(file, name, tensor.dtype, all_of_it, begin, counter)
            view: Any = lazy(all_of_it, tensor.dtype, source)
            found[name] = view.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return found


def _raise(path: Path, wrong: list[str]) -> None:
    if wrong:
        raise CheckpointError(
            f"{path} can't be loaded:\n" + "\n".join(f"  {line}" for line in shortened(wrong))
        )


def shortened(lines: list[str]) -> list[str]:
    """The first of many lines, and how many more there are."""
    return lines if len(lines) <= SHOWN else [*lines[:SHOWN], f"and {len(lines) - SHOWN} more"]


def same_values(a: Tensor, b: Tensor) -> bool:
    """Whether two lazy tensors hold the same, read a block of rows at a time."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    here, there = origin(a), origin(b)
    if isinstance(here, FileTensor) and isinstance(there, FileTensor):
        if (here.path, here.offset) == (there.path, there.offset):  # tied, in one storage
            return True
    whole = whole_region(a.shape)
    return all(map(torch.equal, read_in_blocks(a, whole), read_in_blocks(b, whole)))
