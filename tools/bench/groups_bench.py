"""Batches generated at once and in groups over two stages: `python tools/bench/groups_bench.py`.

Two processes over gloo, one thread each, the 111M Llama of `tp_bench.py`; every round times both in turn.
It needs a core for each process; the shortest round is given beside the median, since other work only adds to
one. About a minute and a half with nothing else running.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tp_bench import llama_config

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from launch import launch, say, telling_errors  # noqa: E402

TOKENS = 16
WAYS = ("at once", "in 2 groups")


def worker(checkpoint: str, batches: list[int], rounds: int) -> None:
    """One rank: milliseconds a token, of wall and of this process's CPU, by batch and way."""
    from transformers import LlamaForCausalLM

    import autotp

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    model: Any = autotp.parallelize(LlamaForCausalLM.from_pretrained(checkpoint), tp=1, pp=2).eval()
    found = []
    for batch in batches:
        ids = torch.randint(3, 8000, (batch, 16), generator=torch.Generator().manual_seed(0))
        given = {
            "input_ids": ids, "attention_mask": torch.ones_like(ids), "do_sample": False,
            "max_new_tokens": TOKENS, "pad_token_id": 0, "eos_token_id": None,
        }  # fmt: skip
        times: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
        tokens = {}
        for round_ in range(rounds + 1):  # the first is a warm-up
            for way in WAYS:
                dist.barrier()
                start, used = time.perf_counter(), time.process_time()
                tokens[way] = (
                    model.generate(**given) if way == WAYS[0] else autotp.generate(model, 2, **given)
                )
                ended, used = time.perf_counter(), time.process_time() - used
                if round_:
                    times[way].append((1000 * (ended - start) / TOKENS, 1000 * used / TOKENS))
            say(round=round_)
        if not torch.equal(*tokens.values()):
            raise RuntimeError("other tokens: not worth timing")
        found.append(times)
    dist.barrier()
    dist.destroy_process_group()
    say(result=True, found=found)


def rows(batch: int, ranks: list[dict[str, list[tuple[float, float]]]]) -> list[str]:
    """Of one batch: the two ways, and how many times as fast groups are."""
    wall = {way: [ms for ms, _ in ranks[0][way]] for way in WAYS}
    faster = [f"{of(wall[WAYS[0]]) / of(wall[WAYS[1]]):.2f}×" for of in (statistics.median, min)]
    lines = []
    for way in WAYS:
        used = [f"{statistics.median(cpu for _, cpu in rank[way]):.1f}" for rank in ranks]
        cells = [str(batch), way, f"{statistics.median(wall[way]):.1f}", f"{min(wall[way]):.1f}", *used]
        lines.append(" | ".join([*cells, *(faster if way == WAYS[1] else ("", ""))]))
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--checkpoint", help=argparse.SUPPRESS)  # given to the ranks
    options = parser.parse_args()
    if options.checkpoint:
        with telling_errors():
            worker(options.checkpoint, options.batch, options.rounds)
        return 0
    from rich.progress import Progress
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as checkpoint, Progress() as progress:
        LlamaForCausalLM(llama_config()).save_pretrained(checkpoint)
        task = progress.add_task("rounds", total=len(options.batch) * (options.rounds + 1))

        def show(message: dict[str, Any]) -> None:
            if message["rank"] == 0 and "round" in message:
                progress.update(task, advance=1)

        args = ["--checkpoint", checkpoint, "--rounds", str(options.rounds)]
        args += ["--batch", *map(str, options.batch)]
        ranks = launch(__file__, args, 2, show)
    print("| batch | way | ms a token, median | shortest | CPU of rank 0 | CPU of rank 1 | faster, medians | "
          "shortest |\n|---:|---|---:|---:|---:|---:|---:|---:|")  # fmt: skip
    for i, batch in enumerate(options.batch):
        for line in rows(batch, [rank["found"][i] for rank in ranks]):
            print(f"| {line} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
