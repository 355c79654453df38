"""Shards written once, for a fast start: a directory from which each rank reads one file from end to end.

    config.json and the like      as in the checkpoint
    rank-00001-of-00004.safetensors   what rank 1 of 4 holds, under the model's own names
    autotp-shards.json            how many ranks, how they are laid out, and which entries the checkpoint had

The layout is compared with the plan made when it is loaded: other versions may split a model otherwise.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .checkpoint import Checkpoint, locate, open_checkpoint
from .errors import CheckpointError
from .lazy import LazyTensor, lazy, read_in_blocks
from .plan import Plan
from .planner import plan as make_plan
from .pretrained import build_unloaded, put_packed, recipes, tie, untied
from .quantised import refuse_packed
from .tensorfiles import FileWriter, Region, read_header, whole_region

MANIFEST = "autotp-shards.json"
FORMAT = 1
WEIGHTS = (
    ".safetensors",
    ".bin",
    ".safetensors.index.json",
    ".bin.index.json",
    ".pt",
    ".pth",
    ".gguf",
    ".h5",
    ".msgpack",
)


@dataclass(frozen=True)
class Shards:
    """What a directory of shards says of itself. `apart`: names the config ties, with values of their own."""

    path: Path
    tp: int
    ep: int
    layouts: str
    source: str
    apart: list[str]
    checkpoint: Checkpoint  # of the entries there were: their values are not to be had

    def of_rank(self, rank: int, tp: int) -> dict[str, LazyTensor]:
        """Rank `rank`'s tensors, by the model's names. CheckpointError for another tp, or a damaged file."""
        if tp != self.tp:
            raise CheckpointError(
                f"{self.path} holds shards for tp={self.tp}, not tp={tp}. Make others: "
                f"autotp shard {self.source} OUT --tp {tp}"
            )
        file = self.path / rank_file(rank, tp)
        if not file.is_file():
            raise CheckpointError(f"{file} is missing. Make it again: {self.command}")
        tensors, _, wrong = read_header(file, self.checkpoint.counter)
        if wrong:
            raise CheckpointError(f"{wrong[0]}. Make it again: {self.command}")
        return {name: lazy(tensor.shape, tensor.dtype, tensor) for name, tensor in tensors.items()}

    def check(self, plan: Plan) -> None:
        """Refuse a plan by which these files were not cut."""
        if fingerprint(plan) != self.layouts:
            raise CheckpointError(
                f"{self.path} was cut by another plan (ep={self.ep}; another policy, other inputs, or other "
                f"versions of autotp or transformers). Load it so, or make it again: {self.command}"
            )

    @property
    def command(self) -> str:
        by_expert = f" --ep {self.ep}" if self.ep > 1 else ""
        return f"autotp shard {self.source} {self.path} --tp {self.tp}{by_expert}"


@dataclass(frozen=True)
class _Absent:
    """The values of an entry of which only shape and dtype were kept."""

    name: str
    dtype: torch.dtype

    def fill(self, dest: Tensor, region: Region) -> None:
        raise CheckpointError(f"{self.name} is only to be had as a shard.")


def rank_file(rank: int, tp: int) -> str:
    return f"rank-{rank:05d}-of-{tp:05d}.safetensors"


def fingerprint(plan: Plan) -> str:
    """The same for plans that lay the parameters out alike."""
    laid = {
        name: [p.shape, None if p.layout is None else sorted(p.layout.dims.items()), p.once]
        for name, p in plan.params.items()
    }
    return hashlib.sha256(json.dumps([plan.tp, laid], sort_keys=True).encode()).hexdigest()[:16]


def find_shards(path: Path) -> Shards | None:
    """What the directory says of its shards; None where it holds none. CheckpointError for a damaged
    manifest."""
    if not (path / MANIFEST).is_file():
        return None
    try:
        told = json.loads((path / MANIFEST).read_text())
        if told["format"] != FORMAT:
            raise CheckpointError(f"{path}: shards of format {told['format']}, this version reads {FORMAT}.")
        entries = {
            name: lazy(tuple(shape), getattr(torch, dtype), _Absent(name, getattr(torch, dtype)))
            for name, (dtype, shape) in told["entries"].items()
        }
        ep, checkpoint = told.get("ep", 1), Checkpoint(path, entries)
        return Shards(path, told["tp"], ep, told["layouts"], told["source"], told["apart"], checkpoint)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path / MANIFEST} is damaged: {error}. Make the shards again.") from error


def write_shards(
    source: str | Path,
    out: str | Path,
    tp: int,
    *,
    ep: int = 1,
    dtype: torch.dtype | None = None,
    policy: Any = None,
    example_inputs: Any = None,
    allow_pickle: bool = False,
    progress: Callable[[str], None] = lambda what: None,
) -> Plan:
    """Cut the checkpoint `source` into one file for each of `tp` ranks, in `out`; gives the plan it was cut
    by. ep: `tp` for experts cut by expert.

    In one process, streaming: of the model no more than a block of rows is held. The manifest is written
    last: what a crash leaves behind is not taken for shards. Raises what `autotp.load` and `autotp.plan`
    raise, and CheckpointError where `out` holds other files."""
    root, target = locate(source, allow_pickle), Path(out)
    if target.exists() and any(target.iterdir()) and not (target / MANIFEST).exists():
        raise CheckpointError(f"{target} holds other files; give an empty or a new directory.")
    progress("planning")
    checkpoint = open_checkpoint(root, allow_pickle)
    floating = next((t.dtype for t in checkpoint.tensors.values() if t.is_floating_point()), None)
    model = build_unloaded(root, dtype, floating)
    found = recipes(model, checkpoint, allow_missing=False, allow_unexpected=False)
    put_packed(model, found)
    refuse_packed(model, "autotp shard", "autotp.load reads only a rank's slices of the checkpoint itself.")
    apart = untied(model, found)
    tie(model, found, apart)
    plan = make_plan(model, tp, policy, ep=ep, example_inputs=example_inputs)
    target.mkdir(parents=True, exist_ok=True)
    (target / MANIFEST).unlink(missing_ok=True)
    for file in root.iterdir():
        if file.is_file() and not file.name.endswith(WEIGHTS) and file.resolve().parent != target.resolve():
            shutil.copyfile(file, target / file.name)
    mine = _own_names(model, found)
    for rank in range(tp):
        progress(f"writing rank {rank} of {tp}")
        _write_rank(target / rank_file(rank, tp), mine, found, plan, rank)
    manifest = {
        "format": FORMAT,
        "tp": tp,
        "ep": ep,
        "layouts": fingerprint(plan),
        "source": str(source),
        "apart": apart,
        "entries": {
            n: [str(t.dtype).removeprefix("torch."), list(t.shape)] for n, t in checkpoint.tensors.items()
        },
    }
    (target / f"{MANIFEST}.part").write_text(json.dumps(manifest) + "\n")
    os.replace(target / f"{MANIFEST}.part", target / MANIFEST)
    return plan


def _own_names(model: Any, found: Mapping[str, Tensor]) -> dict[str, str]:
    """First names of the tensors that are stored -> the name under which the checkpoint has them."""
    names: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
    stored = {mine[0]: next((n for n in mine if n in found), "") for mine in names.values()}
    return {name: source for name, source in stored.items() if source}


def _write_rank(
    path: Path, mine: Mapping[str, str], found: Mapping[str, Tensor], plan: Plan, rank: int
) -> None:
    layouts = {name: p.layout for name, p in plan.params.items()}
    shapes = {}
    for name, source in mine.items():
        layout = layouts.get(name)
        shape = tuple(found[source].shape) if layout is None else layout.local_shape(rank)
        shapes[name] = (found[source].dtype, shape)
    writer = FileWriter(path, shapes, {"format": "pt"})
    for name in writer.names:
        region: list[Any] = list(whole_region(found[mine[name]].shape))
        layout = layouts.get(name)
        for dim, ranks in (layout.dims if layout is not None else {}).items():
            region[dim] = ranks[rank]
        empty = rank > 0 and name in plan.params and plan.params[name].once
        for block in read_in_blocks(found[mine[name]], tuple(region)):
            writer.write(torch.zeros_like(block) if empty else block)
    writer.close()
