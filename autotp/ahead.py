"""Files asked for ahead: the disk works while the model is planned."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

PIECE = 32 << 20  # bytes asked for at a time: where the disk is behind, asking waits


@contextmanager
def fetched_ahead(files: Sequence[Path], rank: int, ranks: int) -> Iterator[None]:
    """Within it the system fetches every `ranks`-th piece of `files`, from piece `rank` on, into its cache.

    All ranks of a machine together fetch all of it, once. Nothing is read into this process. Left out where
    the files would take more than half of the memory that is free for a cache, and where the system can't do
    it.
    """
    pieces = [(f, at) for f in files for at in range(0, f.stat().st_size, PIECE)][rank::ranks]
    if not hasattr(os, "posix_fadvise") or sum(f.stat().st_size for f in files) > _free_memory() // 2:
        pieces = []
    done = threading.Event()
    worker = threading.Thread(target=_fetch, args=(pieces, done), daemon=True)
    worker.start()
    try:
        yield
    finally:
        done.set()
        worker.join()


def _fetch(pieces: Sequence[tuple[Path, int]], done: threading.Event) -> None:
    for path, at in pieces:
        if done.is_set():
            return
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except OSError:
            return  # whoever reads it will say so
        try:
            os.posix_fadvise(descriptor, at, PIECE, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(descriptor)


def _free_memory() -> int:
    """Bytes that the system could give to a cache; 0 where it does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), 0)
