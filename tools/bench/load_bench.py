"""What loading a checkpoint costs each rank: time, peak memory, bytes read; autotp beside transformers, on
the CPU.

`python tools/bench/load_bench.py` writes a random Llama of about 1.2 GB (bfloat16), or takes `--checkpoint
DIR`, and loads it over processes, each contender in fresh processes and in turn: `autotp.load(dir, tp=N)`
for the first time on a machine, when it plans, and again, when it finds the plan that it kept; and
transformers' `from_pretrained(dir, distributed_config=DistributedConfig(tp_size=N))`. Every run starts from
the same imports.

peak: the highest resident memory (VmHWM), beyond what the process had after its imports. read: bytes that the
process asked of files (rchar); of files that are mapped into memory, which rchar does not see, those of their
pages that became resident (RssFile). first logits: loading and a forward of 32 tokens, as what is mapped is
read when it is used. shard: the bytes of the rank's parameters and buffers. Medians over
rounds, the worst rank of each."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from launch import launch, say, telling_errors  # noqa: E402

FIRST, AGAIN, OTHER = "autotp, first time", "autotp, again", "transformers"
CONTENDERS = (FIRST, AGAIN, OTHER)
LIMITS = {"peak": "1.15 x shard + 150 MB", "read": "1.05 x shard"}


def write_checkpoint(path: Path) -> None:
    """A Llama of 0.6 billion parameters, untied, grouped heads."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=2048, num_hidden_layers=12, num_attention_heads=16, num_key_value_heads=8,
        intermediate_size=5632, vocab_size=16384, max_position_embeddings=1024, tie_word_embeddings=False,
        dtype=torch.bfloat16,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path, max_shard_size="500MB")


def as_pickles(path: Path) -> None:
    """The same checkpoint in files of torch.save."""
    import torch
    from safetensors.torch import load_file

    index = json.loads((path / "model.safetensors.index.json").read_text())
    for file in sorted(path.glob("*.safetensors")):
        torch.save(load_file(file), path / f"pytorch_{file.stem}.bin")
        file.unlink()
    places = {n: f"pytorch_{Path(file).stem}.bin" for n, file in index["weight_map"].items()}
    (path / "pytorch_model.bin.index.json").write_text(json.dumps({**index, "weight_map": places}))
    (path / "model.safetensors.index.json").unlink()


# ---------------------------------------------------------------- one rank
def status(key: str) -> int:
    """A size of /proc/self/status, in bytes."""
    line = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{key}:")
    )
    return int(line.split()[1]) * 1024


def asked_of_files() -> int:
    return int(Path("/proc/self/io").read_text().split("rchar:")[1].split()[0])


def rank(contender: str, checkpoint: str, tp: int) -> None:
    import torch
    import torch.distributed as dist
    from transformers import LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    import autotp

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before, mapped, read, start = status("VmRSS"), status("RssFile"), asked_of_files(), time.perf_counter()
    model: Any
    if contender != OTHER:
        model = autotp.load(checkpoint, tp=tp, allow_pickle=True)
    else:
        model = LlamaForCausalLM.from_pretrained(checkpoint, distributed_config=DistributedConfig(tp_size=tp))
    took = time.perf_counter() - start
    peak = status("VmHWM") - before
    read = asked_of_files() - read + max(0, status("RssFile") - mapped)
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}.values()
    shard = sum(_local(t).numel() * t.element_size() for t in tensors)
    ids = torch.arange(3, 35)[None]
    with torch.no_grad():
        logits = model(ids).logits
    ready = time.perf_counter() - start
    logits = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
    dist.barrier()
    say(
        result=True,
        load=took,
        ready=ready,
        peak=peak,
        read=read,
        shard=shard,
        check=logits.float().norm().item(),
    )


def _local(tensor: Any) -> Any:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


# ---------------------------------------------------------------- the table
def forget(checkpoint: str) -> None:
    """Take the files out of the system's cache: the next reader fetches them from the disk."""
    for path in Path(checkpoint).iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def compare(checkpoint: str, tp: int, rounds: int, plans: str, cold: bool) -> dict[str, dict[str, float]]:
    """Medians over the rounds of the worst rank, by contender and figure. The contenders must agree on the
    logits."""
    seen: dict[str, list[dict[str, float]]] = {name: [] for name in CONTENDERS}
    for number in range(rounds):
        os.environ["AUTOTP_PLANS"] = f"{plans}/{number}"
        for name in CONTENDERS:
            if cold:
                forget(checkpoint)
            ranks = launch(__file__, ["--rank", name, checkpoint, "--tp", str(tp)], tp)
            seen[name].append(
                {
                    key: max(r[key] for r in ranks)
                    for key in ("load", "ready", "peak", "read", "shard", "check")
                }
            )
    found = {n: {k: statistics.median(r[k] for r in runs) for k in runs[0]} for n, runs in seen.items()}
    checks = [found[name]["check"] for name in CONTENDERS]
    if max(checks) - min(checks) > 2e-2 * min(checks):
        raise SystemExit(f"the contenders disagree on the logits: {checks}")
    return found


def show(found: dict[str, dict[str, float]], tp: int, cold: bool) -> bool:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"loading over tp={tp}, {'from the disk' if cold else 'files in memory'}, worst rank",
        title_justify="left",
        header_style="bold",
    )
    for column in ("", "load", "first logits", "shard", "peak", "read", "peak limit", "read limit"):
        table.add_column(column, justify="right" if column else "left")
    for name, row in found.items():
        mb = {key: row[key] / 1e6 for key in ("shard", "peak", "read")}
        limits = (f"{1.15 * mb['shard'] + 150:.0f} MB", f"{1.05 * mb['shard']:.0f} MB")
        table.add_row(
            name,
            f"{row['load']:.2f} s",
            f"{row['ready']:.2f} s",
            *(f"{mb[key]:.0f} MB" for key in ("shard", "peak", "read")),
            *limits,
        )
    Console().print(table)
    first, again, other = (found[name] for name in CONTENDERS)
    kept = {
        f"peak <= {LIMITS['peak']}": all(o["peak"] <= 1.15 * o["shard"] + 150e6 for o in (first, again)),
        f"read <= {LIMITS['read']}": all(o["read"] <= 1.05 * o["shard"] for o in (first, again)),
        "first logits not later than transformers', first time": first["ready"] <= other["ready"],
        "first logits not later than transformers', again": again["ready"] <= other["ready"],
    }
    for claim, holds in kept.items():
        print(f"{'ok   ' if holds else 'MISSED'} {claim}")
    return all(kept.values())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", help="a Llama's directory; without it a random one is written")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--bin", action="store_true", help="write the random one as .bin files")
    parser.add_argument(
        "--cold", action="store_true", help="from the disk: files leave the cache before each run"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--rank", nargs=2, metavar=("CONTENDER", "DIR"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        with telling_errors():
            contender, folder = given.rank
            rank(contender, folder, given.tp)
        return
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as plans:
        checkpoint = given.checkpoint or folder
        if not given.checkpoint:
            write_checkpoint(Path(folder))
        if given.bin:
            as_pickles(Path(folder))
        found = compare(checkpoint, given.tp, given.rounds, plans, given.cold)
    if given.json:
        given.json.write_text(json.dumps({"tp": given.tp, **found}, indent=2) + "\n")
    sys.exit(0 if show(found, given.tp, given.cold) else 1)


if __name__ == "__main__":
    main()
