"""How long planning takes and how much memory: Llama-3-70B and 405B on the meta device, 8 ranks.

`python tools/bench/plan_bench.py` plans each in a process of its own, since a peak of memory is a process's.
"plan" is `autotp.plan`; "parallelize" is the whole of it, as one rank without peers would run it, so what it
takes beyond the plan is the rewriting of the model.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from typing import Any

import torch

# hidden size, layers, query heads, key-value heads, hidden units of the MLP
SHAPES = {"llama-3-70b": (8192, 80, 64, 8, 28672), "llama-3-405b": (16384, 126, 128, 8, 53248)}
BAR_PLAN_S, BAR_REST_S, BAR_MEMORY_MB = 10.0, 3.0, 2000


def build(name: str) -> Any:
    """The model on the meta device: shapes without memory."""
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, layers, heads, key_value_heads, intermediate = SHAPES[name]
    config = LlamaConfig(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, vocab_size=128256,
        num_key_value_heads=key_value_heads, intermediate_size=intermediate, max_position_embeddings=8192,
    )  # fmt: skip
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(name: str, tp: int) -> dict[str, Any]:
    """Seconds (on the wall, and of this process's CPU) and peak MB of this process."""
    import autotp
    from autotp.comm import ShapeComm

    model = build(name)
    before = peak_mb()
    wall, cpu = time.perf_counter(), time.process_time()
    plan = autotp.plan(model, tp=tp)
    found = {"plan_s": time.perf_counter() - wall, "plan_cpu_s": time.process_time() - cpu}
    found |= {"peak_mb": peak_mb(), "before_mb": before, "sharded": plan.sharded_fraction}
    wall, cpu = time.perf_counter(), time.process_time()
    autotp.parallelize(model, tp=tp, comm=ShapeComm(0, tp))
    found |= {"parallelize_s": time.perf_counter() - wall, "parallelize_cpu_s": time.process_time() - cpu}
    return found


def table(results: dict[str, dict[str, Any]]) -> str:
    """Markdown. CPU seconds beside the wall's: on a busy machine only the former say anything."""
    head = ["model", "plan (s)", "its CPU (s)", "parallelize adds (CPU s)", "peak memory (MB)", "sharded"]
    rows = [head, ["---"] + ["---:"] * (len(head) - 1)]
    for name, r in results.items():
        rest = max(r["parallelize_cpu_s"] - r["plan_cpu_s"], 0.0)
        numbers = [f"{r['plan_s']:.1f}", f"{r['plan_cpu_s']:.1f}", f"{rest:.1f}", f"{r['peak_mb']:.0f}"]
        rows.append([name, *numbers, f"{100 * r['sharded']:.1f} %"])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--models", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)  # measure here, print JSON
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.models[0], options.tp)))
        return 0
    results = {}
    for name in options.models:
        command = [sys.executable, __file__, "--one", "--tp", str(options.tp), "--models", name]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=os.environ)
        results[name] = json.loads(done.stdout.splitlines()[-1])
    print(table(results))
    over = [
        name
        for name, r in results.items()
        if r["plan_cpu_s"] > BAR_PLAN_S
        or r["parallelize_cpu_s"] - r["plan_cpu_s"] > BAR_REST_S
        or r["peak_mb"] > BAR_MEMORY_MB
    ]
    for name in over:
        print(f"{name}: over the bar of {BAR_PLAN_S:.0f} s, {BAR_REST_S:.0f} s more, {BAR_MEMORY_MB} MB")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
