"""A batch generated at once and in groups over two stages: `python tools/bench/groups_bench.py --batch 8`.

Two processes over gloo, one thread each, the 111M Llama of `tp_bench.py`; every round times both in turn.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from tp_bench import llama_config

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from launch import launch, say, telling_errors  # noqa: E402

TOKENS = 24


def worker(checkpoint: str, batch: int, rounds: int) -> None:
    from transformers import LlamaForCausalLM

    import autotp

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    model = autotp.parallelize(LlamaForCausalLM.from_pretrained(checkpoint), tp=1, pp=2).eval()
    ids = torch.randint(3, 8000, (batch, 16), generator=torch.Generator().manual_seed(0))
    given = {
        "input_ids": ids, "attention_mask": torch.ones_like(ids), "do_sample": False,
        "max_new_tokens": TOKENS, "pad_token_id": 0, "eos_token_id": None,
    }  # fmt: skip
    ways = {
        "at once": lambda: model.generate(**given),  # type: ignore[operator]
        "in 2 groups": lambda: autotp.generate(model, 2, **given),
    }
    wall: dict[str, list[float]] = {name: [] for name in ways}
    cpu: dict[str, list[float]] = {name: [] for name in ways}
    tokens = {}
    for round_ in range(rounds + 1):  # the first is a warm-up
        for name, way in ways.items():
            dist.barrier()
            start, used = time.perf_counter(), time.process_time()
            tokens[name] = way()
            if round_:
                wall[name].append(1000 * (time.perf_counter() - start) / TOKENS)
                cpu[name].append(1000 * (time.process_time() - used) / TOKENS)
    if not torch.equal(*tokens.values()):
        raise RuntimeError("other tokens: not worth timing")
    dist.barrier()
    dist.destroy_process_group()
    say(result=True, wall=wall, cpu=cpu)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--checkpoint", help=argparse.SUPPRESS)  # given to the ranks
    options = parser.parse_args()
    if options.checkpoint:
        with telling_errors():
            worker(options.checkpoint, options.batch, options.rounds)
        return 0
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as checkpoint:
        LlamaForCausalLM(llama_config()).save_pretrained(checkpoint)
        args = ["--checkpoint", checkpoint, "--batch", str(options.batch), "--rounds", str(options.rounds)]
        ranks = launch(__file__, args, 2, lambda message: None)
    print("| way | wall, ms a token | CPU of rank 0 | CPU of rank 1 |\n|---|---:|---:|---:|")
    for name, times in ranks[0]["wall"].items():
        used = " | ".join(f"{statistics.median(rank['cpu'][name]):.1f}" for rank in ranks)
        print(f"| {name} | {statistics.median(times):.1f} | {used} |")
    pairs = zip(*ranks[0]["wall"].values(), strict=True)
    print(f"in groups: {statistics.median(a / b for a, b in pairs):.2f}× as fast")
    return 0


if __name__ == "__main__":
    sys.exit(main())
