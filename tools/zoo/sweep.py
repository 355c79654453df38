"""Every class of transformers' auto mappings, tiny, whole against split: `python -m zoo.sweep`.

Resumes where it stopped: rows are JSON lines in `results/TASK.jsonl`, one for each class. Each class runs in
a process of its own with a limit of time and memory, two at a time. `--again wrong` runs those rows again.
`--stages` runs them in pipeline stages instead; the rows are in `results/pp-TASK.jsonl`.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import multiprocessing
import os
import resource
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from . import tiny
from .check import check, portable
from .stages import check_stages

RESULTS = Path(__file__).resolve().parent / "results"
MEMORY = 12 << 30  # bytes of address space
STAGES = "pp-"  # before a task's name: its rows in stages


def rows_of(task: str, folder: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """The rows so far, by class; later lines win."""
    path = folder / f"{task}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return {row["class"]: row for row in map(json.loads, lines)}


def add_row(task: str, row: dict[str, Any], folder: Path = RESULTS) -> None:
    """Add or replace a row; the file is sorted by class, and written whole or not at all."""
    rows = {**rows_of(task, folder), row["class"]: row}
    folder.mkdir(parents=True, exist_ok=True)
    fresh = folder / f"{task}.jsonl.new"
    fresh.write_text("".join(json.dumps(rows[cls]) + "\n" for cls in sorted(rows)))
    fresh.replace(folder / f"{task}.jsonl")


@dataclass
class Running:
    task: str
    cls: str
    model_type: str
    process: BaseProcess
    folder: Path
    began: float
    used: float = 0.0  # seconds of processor time
    busy: float = 0.0  # when it last used some

    def look(self) -> None:
        """Note whether the process computes: one that only waits hangs, however long another takes."""
        try:
            fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return
        used = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        if used > self.used:
            self.used, self.busy = used, time.monotonic()

    def stage(self) -> str:
        path = self.folder / "stage"
        return path.read_text() if path.exists() else "starting"


def _child(task: str, cls: str, model_type: str, folder: str, limit: float) -> None:
    """Runs in the forked process: the row goes to a file, all output nowhere."""
    with open(f"{folder}/log", "w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        faulthandler.dump_traceback_later(limit, exit=True, file=log)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        torch.set_num_threads(1)  # renews what the fork broke, before several threads ask for it at once
        checked = check_stages if task.startswith(STAGES) else check
        row = checked(cls, model_type, lambda stage: _write(f"{folder}/stage", stage))
        _write(f"{folder}/row", json.dumps(row))
        os._exit(0)  # no destructors of half the libraries in the world


def _write(path: str, text: str) -> None:
    Path(path + ".new").write_text(text)
    os.replace(path + ".new", path)


def _finished(job: Running, limit: float) -> dict[str, Any]:
    path = job.folder / "row"
    if path.exists():
        return json.loads(path.read_text())
    log, stage = (job.folder / "log").read_text(errors="replace"), job.stage()
    late = time.monotonic() - job.began >= limit
    where = [portable(line.strip()) for line in log.splitlines() if line.strip().startswith("File ")]
    why = f"{stage}: " + (
        f"not done after {limit:.0f} s, at {' < '.join(where[:3])}" if late else portable(log)[-400:]
    )
    late_outcome = "hang" if time.monotonic() - job.busy > 20 else "slow"
    ran = ": " in stage
    outcome = "baseline" if not ran else late_outcome if late else "crash"
    return {
        "class": job.cls, "model_type": job.model_type, "outcome": outcome, "why": why,
        "seconds": round(time.monotonic() - job.began, 1),
    }  # fmt: skip


def sweep(todo: list[tuple[str, str, str]], jobs: int, limit: float, console: Console) -> None:
    """Run (task, class, model type) one after another, `jobs` at a time."""
    # The libraries are loaded once; a fork has them at once. Nothing in this process may have threads.
    torch.set_num_threads(1)
    os.environ["AUTOTP_PLANS"] = ""  # every model is planned by the engine as it is
    transformers.logging.set_verbosity_error()
    tiny.build("BertForMaskedLM", "bert", "anew", torch.float32)  # what is imported late, for all forks
    fork = multiprocessing.get_context("fork")
    running: list[Running] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, auto_refresh=False) as progress:
        shown = progress.add_task("", total=len(todo))
        waiting = list(todo)
        while waiting or running:
            while waiting and len(running) < jobs:
                task, cls, model_type = waiting.pop(0)
                folder = Path(tempfile.mkdtemp(prefix="zoo-"))
                args = (task, cls, model_type, str(folder), limit)
                process = fork.Process(target=_child, args=args, daemon=True)
                process.start()
                running.append(Running(task, cls, model_type, process, folder, time.monotonic()))
            time.sleep(0.1)
            for job in list(running):
                job.look()
                if job.process.is_alive() and time.monotonic() - job.began < limit + 10:
                    continue
                job.process.kill()
                job.process.join()
                running.remove(job)
                row = _finished(job, limit)
                add_row(job.task, row)
                for file in job.folder.iterdir():
                    file.unlink()
                job.folder.rmdir()
                console.print(
                    f"{row['outcome']:8} {row['class']} {row['seconds']} s {row.get('why', '')[:160]}",
                    markup=False,
                )
                progress.advance(shown)
            progress.update(shown, description=", ".join(f"{j.cls} ({j.stage()})" for j in running))
            progress.refresh()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tasks", default=",".join(tiny.TASKS), help="which mappings, comma separated")
    parser.add_argument("--only", default="", help="only these classes, comma separated; done again")
    parser.add_argument("--again", default="", help="do rows with these outcomes again, comma separated")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--limit", type=float, default=180, help="seconds for one class")
    parser.add_argument("--stages", action="store_true", help="in pipeline stages")
    given = parser.parse_args(arguments)
    prefix = STAGES if given.stages else ""
    only, again = set(filter(None, given.only.split(","))), set(filter(None, given.again.split(",")))
    todo, seen = [], set()
    for task in tiny.TASKS:
        rows = rows_of(prefix + task)
        for cls, model_type in tiny.archs(task):
            if cls in seen:
                continue  # a class of several mappings is in the table of the first
            seen.add(cls)
            if task not in given.tasks.split(","):
                continue
            known = rows.get(cls)
            if cls in only if only else (known is None or known["outcome"] in again):
                todo.append((prefix + task, cls, model_type))
    sweep(todo, given.jobs, given.limit, Console())
    return 0


if __name__ == "__main__":
    sys.exit(main())
