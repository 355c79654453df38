"""Training checkpoints by `torch.distributed.checkpoint`: saved over so many ranks, resumed over others.

Each rank writes the blocks of whole tensors that it holds (`entries.py`), each reads the blocks that it
needs. Model and optimizer go under the parameters' own names (`optimizer_state.py`), so nothing in a
checkpoint depends on how the model was split: over tp, stages, or copies that share out what they hold. A
checkpoint is written beside its place and moved there when all ranks are done: what a crash leaves behind is
never taken for one.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from .comm import ProcessComm
from .entries import Entry, Reader, Writer
from .errors import CheckpointError, PlanError, RankError
from .optimizer_state import check_groups, merged, model_entries, optimizer_entries, prepare, settings_of
from .quantised import refuse_packed
from .save import everyone, meet

T = TypeVar("T")
SETTINGS = "training.json"
PATIENCE = 60.0  # seconds a rank waits for the others to come to a save or a load


def save_training(
    directory: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    wait: bool = True,
) -> Future[None]:
    """Write model and optimizer, to be resumed by `load_training` over any number of ranks.

    directory: the same on every rank, and of its own: new, empty, or an earlier checkpoint, which is replaced
    as a whole when all of the new one is written. extra: what else to keep (step, epoch, a scheduler's
    state), as JSON. wait: False copies the tensors to the CPU and writes on a thread, while training goes on;
    the future tells when it is done, and what went wrong. One save at a time.

    Every rank must call it. Raises RankError when another rank does not, or names another directory,
    CheckpointError where the directory holds other files, for `extra` that JSON can't hold, for parameters in
    the optimizer that the model lacks, and when writing fails.
    """
    _over_processes(model)
    meet(everyone(model), "autotp.save_training", PATIENCE)
    target = Path(directory).absolute()
    entries: dict[str, Entry] = {}
    claim = ExitStack()  # until all is written

    def collect() -> tuple[str, dict[str, Any]]:
        if _leads():
            claim.enter_context(_claimed(target))
            _make_room(target)
        parts = {**model_entries(model), **optimizer_entries(model, optimizer)}
        entries.update((name, entry.to_write(copy=not wait)) for name, entry in parts.items())
        settings = settings_of(model, optimizer)
        try:
            json.dumps([settings, dict(extra or {})])
        except TypeError as error:
            raise CheckpointError(
                f"extra and the optimizer's settings must be numbers and texts: {error}"
            ) from error
        return str(target), settings

    def write(text: str, group: dist.ProcessGroup | None) -> None:
        with claim:
            _write(target, entries, text, group)

    try:
        told = _told(model, collect)
        _same_place([theirs for theirs, _ in told])
        text = json.dumps({"extra": dict(extra or {}), **merged([settings for _, settings in told])})
        # Its own group: training's collectives go on over the other one, in an order of their own.
        group = dist.new_group(backend="gloo") if dist.is_initialized() and not wait else None
    except BaseException:
        claim.close()
        raise
    if wait:
        write(text, None)
        done: Future[None] = Future()
        done.set_result(None)
        return done
    pool = ThreadPoolExecutor(1, thread_name_prefix="autotp-save")
    future = pool.submit(write, text, group)
    pool.shutdown(wait=False)
    return future


def _same_place(places: list[str]) -> None:
    for rank, place in enumerate(places):
        if place != places[0]:
            raise RankError(
                f"autotp.save_training: rank 0 writes to {places[0]}, rank {rank} to {place}. A checkpoint "
                "has parts of all ranks: give the same directory on every rank, one that all of them see."
            )


def load_training(
    directory: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, Any]:
    """Put a checkpoint of `save_training` into `model` and `optimizer`, split as they are now; gives `extra`.

    Every rank must call it. torch's own format has a pickle in it (.metadata): load only checkpoints you
    trust. Raises CheckpointError where there is no complete checkpoint, or where it lacks what the model or
    the optimizer needs.
    """
    _over_processes(model)
    found: list[Any] = []

    def look() -> dict[str, Any]:
        source, wanted = _complete(Path(directory).absolute()), model_entries(model)
        stored = dcp.FileSystemReader(source).read_metadata().state_dict_metadata
        _fits(wanted, stored, source)
        found[:] = source, json.loads((source / SETTINGS).read_text()), wanted, stored
        return settings_of(model, optimizer)

    told = _told(model, look)
    source, settings, wanted, stored = found
    if optimizer is not None:
        check_groups(merged(told), settings)
        prepare(model, optimizer, stored, settings)
        wanted |= optimizer_entries(model, optimizer)
    files = dcp.FileSystemReader(source)
    with torch.no_grad():
        dcp.load(dict(wanted), storage_reader=files, planner=Reader(), no_dist=not dist.is_initialized())
        for entry in wanted.values():
            entry.finish()
    extra: dict[str, Any] = settings["extra"]
    return extra


def _fits(wanted: Mapping[str, Entry], stored: Mapping[str, Any], source: Path) -> None:
    """CheckpointError where a checkpoint's tensors are not those of the model."""
    missing = sorted(set(wanted) - set(stored))
    if missing:
        raise CheckpointError(f"{source} lacks {len(missing)} tensors of the model: {', '.join(missing[:8])}")
    shapes = [
        f"{n} is {list(stored[n].size)}, the model's {list(wanted[n].shape)}"
        for n in wanted
        if tuple(stored[n].size) != tuple(wanted[n].shape)
    ]
    if shapes:
        raise CheckpointError(f"{source} is of another model: {'; '.join(shapes[:5])}")


def _told(model: nn.Module, make: Callable[[], T]) -> list[T]:
    """What `make` gives on every rank. Where it fails on one, all raise: nobody waits for that rank."""
    own: Any = None
    failure: Exception | None = None
    try:
        own = make()
    except Exception as error:
        failure = error
    said = "" if failure is None else f"{type(failure).__name__}: {failure}"
    told: list[tuple[str, Any]] = everyone(model).exchange((said, own))
    failed = [(rank, said) for rank, (said, _) in enumerate(told) if said]
    if failure is not None:
        raise failure
    if failed:
        raise RankError(f"failed on rank {failed[0][0]} of {len(told)}, which says: {failed[0][1]}")
    return [given for _, given in told]


def _over_processes(model: nn.Module) -> None:
    refuse_packed(model, "training checkpoints", "Keep what is trained (adapters) by its own state_dict.")
    comm = everyone(model)
    if comm.size > 1 and not isinstance(comm, ProcessComm):
        what = "training checkpoints are written by processes of torch.distributed, not by simulated ranks."
        raise PlanError(what)


def _leads() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _beside(target: Path, what: str) -> Path:
    return target.with_name(f".{target.name}.{what}")


@contextmanager
def _claimed(target: Path) -> Iterator[None]:
    """Nobody else writes to `target`: a second save would take away what the first one is writing. The system
    lets go of the claim of a process that ends."""
    lock = _beside(target, "lock")
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        file = lock.open("w")
    except OSError as error:
        raise CheckpointError(f"{target} could not be written: {error}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CheckpointError(
                f"{target} is being written by a save that has not ended. Wait for the future that "
                "save_training(wait=False) gave (.result()), or save to another directory."
            ) from error
        except OSError:  # a file system without locks
            pass
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


def _make_room(target: Path) -> None:
    """Refuse to replace what is no checkpoint, and make the directory in which the new one is written."""
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"{target} is a file; give a directory.")
    try:
        held = sorted(path.name for path in target.iterdir()) if target.exists() else []
        own = (SETTINGS, ".metadata")
        if others := [name for name in held if name not in own and not name.endswith(".distcp")]:
            raise CheckpointError(
                f"{target} holds other files than a checkpoint ({', '.join(others[:3])}), and would be "
                "replaced as a whole. Give a directory of its own, such as one inside of it."
            )
        shutil.rmtree(_beside(target, "part"), ignore_errors=True)
        _beside(target, "part").mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(f"{target} could not be written: {error}") from error


def _write(
    target: Path, entries: Mapping[str, Entry], settings: str, group: dist.ProcessGroup | None
) -> None:
    """Write beside `target`, then put it there. A checkpoint that is replaced stays until the new one is
    whole."""
    alone, leader = not dist.is_initialized(), _leads()
    part, old = _beside(target, "part"), _beside(target, "old")
    try:
        files = dcp.FileSystemWriter(part)
        dcp.save(
            dict(entries),
            storage_writer=files,
            planner=Writer(False, False),
            process_group=group,
            no_dist=alone,
        )
    except dcp.CheckpointException as error:
        raise CheckpointError(f"{target} could not be written: {error}") from error
    except RuntimeError as error:  # another rank is gone
        raise RankError(
            f"{target} was not written to its end, so what was there before stays; a rank is gone: {error}"
        ) from error
    failed: str | None = None
    if leader:
        try:
            (part / SETTINGS).write_text(settings)
            if target.exists():
                shutil.rmtree(old, ignore_errors=True)
                os.rename(target, old)
            os.rename(part, target)
            shutil.rmtree(old, ignore_errors=True)
        except OSError as error:
            failed = str(error)
    told = [failed]
    if not alone:
        dist.broadcast_object_list(told, src=0, group=group)
    if told[0] is not None:
        raise CheckpointError(f"{target} could not be written: {told[0]}")


def _complete(directory: Path) -> Path:
    """Where the checkpoint is: in its place, or beside it, where a crash came between two renames."""
    for place in (directory, _beside(directory, "old")):
        if (place / SETTINGS).is_file() and (place / ".metadata").is_file():
            return place
    raise CheckpointError(f"{directory} holds no complete checkpoint of autotp.save_training.")
