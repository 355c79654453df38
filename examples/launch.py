"""Start a script of ours over N processes and hear from them: torchrun with progress and results.

The ranks speak to the launcher on stdout, in JSON behind a mark; all else they print is kept, and shown when
a run fails. They share one pipe, which keeps a write together up to 4096 bytes: longer messages go in pieces.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import traceback
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_MARK = "@rank "
_PIECE = 3000  # characters of a message in one line, well below what a pipe keeps together


class LaunchError(RuntimeError):
    """A rank failed or took too long; the message carries tracebacks, or the last that ranks printed."""


def say(**message: Any) -> None:
    """From a rank to the launcher: a JSON-able message. `launch` returns those with `result=True`."""
    rank = int(os.environ.get("RANK", "0"))
    text = json.dumps({"rank": rank, **message})
    for start in range(0, len(text), _PIECE):
        more = "+" if start + _PIECE < len(text) else "."
        # A line of its own, whatever was printed before without an end; in one write.
        sys.stdout.write(f"\n{_MARK}{rank} {more}{text[start:start + _PIECE]}\n")
        sys.stdout.flush()


@contextmanager
def telling_errors() -> Iterator[None]:
    """Around a rank's work: an exception reaches the launcher with its traceback before the rank ends."""
    try:
        yield
    except BaseException:
        say(error=traceback.format_exc())
        raise


def launch(
    script: str,
    args: list[str],
    processes: int,
    on_message: Callable[[dict[str, Any]], None] = lambda message: None,
    timeout: float = 900,
) -> list[dict[str, Any]]:
    """Run `script args…` under torchrun in `processes` processes; their results, by rank.

    Each message of a rank goes to `on_message` as it comes. Raises LaunchError when a rank fails, when one
    gives no result, or after `timeout` seconds; no process is left running then.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    process = subprocess.Popen(
        [*command, script, *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={"OMP_NUM_THREADS": "1", **os.environ},
    )
    late = threading.Event()

    def end_late() -> None:
        late.set()
        _end(process)

    timer = threading.Timer(timeout, end_late)
    timer.start()
    results: dict[int, dict[str, Any]] = {}
    begun: dict[str, str] = defaultdict(str)  # by rank, the pieces so far of a message
    errors: list[str] = []
    printed: deque[str] = deque(maxlen=60)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if not line.startswith(_MARK):
                if line.strip():
                    printed.append(line)
                continue
            rank, _, piece = line[len(_MARK) :].rstrip("\n").partition(" ")
            begun[rank] += piece[1:]
            if piece.startswith("+"):
                continue
            message = json.loads(begun.pop(rank))
            if message.get("result"):
                results[message["rank"]] = message
            if "error" in message:
                errors.append(f"rank {message['rank']}: {message['error']}")
            on_message(message)
        process.wait()
    finally:
        timer.cancel()
        _end(process)
    if late.is_set() or process.returncode or len(results) != processes:
        why = (
            f"took more than {timeout:.0f} s"
            if late.is_set()
            else f"ended with exit code {process.returncode}"
        )
        raise LaunchError(
            f"{os.path.basename(script)} over {processes} processes {why}\n{''.join(errors or printed)}"
        )
    return [results[rank] for rank in range(processes)]


def _end(process: subprocess.Popen[str]) -> None:
    """End torchrun and its ranks: they are sessions of their own, which only torchrun ends, when asked."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=60)  # torchrun itself gives its ranks 30 s before it kills them
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
