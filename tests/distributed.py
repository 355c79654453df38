"""Run a function over N gloo processes: `run(2, check, arg)` gives the results of `check(rank, arg)`."""
from __future__ import annotations

import multiprocessing
import os
import pickle
import queue
import socket
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def _worker(
    rank: int, size: int, port: int, out: Any, fn: Callable[..., Any], args: tuple, stays: bool
) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size),
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo")
        out.put((rank, True, pickle.dumps(fn(rank, *args))))   # bytes: no shared memory that dies with us
        if stays:                                # until `run` has heard of all
            time.sleep(600)
        dist.barrier()                           # rank 0 keeps the store: it leaves last, or all at once
    except BaseException as error:
        out.put((rank, False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
    finally:
        # Without destroy_process_group, which can wait for a rank that has failed.
        out.close()
        out.join_thread()
        os._exit(0)


def run(
    size: int, fn: Callable[..., Any], *args: Any, timeout: float = 120.0, lost: tuple[int, ...] = ()
) -> list[Any]:
    """`fn(rank, *args)` (a module-level function) on `size` gloo processes; results in rank order. lost:
    ranks that die and have no result.

    Raises RuntimeError with rank and traceback of the first that fails, TimeoutError after `timeout` s.
    """
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    out = context.Queue()
    kept = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"          # inherited: torch reads it when it is imported
    try:
        given = (size, port, out, fn, args, bool(lost))
        processes = [context.Process(target=_worker, args=(r, *given), daemon=True) for r in range(size)]
        for process in processes:
            process.start()
    finally:
        if kept is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = kept
    results: dict[int, Any] = {}
    deadline = time.monotonic() + timeout
    try:
        while len(results) < size - len(lost):
            try:
                rank, ok, value = out.get(timeout=0.2)
            except queue.Empty:
                codes = {r: p.exitcode for r, p in enumerate(processes)
                         if r not in (*results, *lost) and p.exitcode}
                for rank, code in codes.items():
                    raise RuntimeError(f"rank {rank} died with exit code {code}") from None
                if time.monotonic() > deadline:
                    waiting = sorted(set(range(size)) - set(results) - set(lost))
                    raise TimeoutError(f"ranks {waiting} did not answer within {timeout} s") from None
                continue
            if not ok:
                raise RuntimeError(f"rank {rank} of {size}: {value}")
            results[rank] = pickle.loads(value)
    finally:
        for process in processes:
            if process.is_alive() and len(results) < size:
                process.terminate()
            process.join(5)
            if process.is_alive():
                process.kill()
    return [results[r] for r in range(size) if r not in lost]
