"""autotp beside a single process and transformers' own parallelism, in one interleaved run on the CPU.

`python tools/bench/tp_bench.py` starts two processes over gloo, one thread each, and times a 111M Llama three
ways: the whole model on rank 0 while the other rank waits; the model after `autotp.parallelize`; the model
loaded with transformers' `DistributedConfig(tp_size=2)`. Every round times each contender once, in turn, so
that a machine that slows down slows all of them; the table shows medians. The three must agree on the logits
before anything is timed. `--tp 1 --pp 2` times pipeline stages instead (transformers' `pp_size=2`):
prefill and decode.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from launch import launch, say, telling_errors  # noqa: E402

PREFILL_TOKENS = 256
DECODE_TOKENS = 16  # one after another, behind the prefill's cache
TRAIN_TOKENS = 256
SINGLE, AUTOTP, TRANSFORMERS = "single process", "autotp", "transformers"
UNITS = {
    "prefill": f"{PREFILL_TOKENS} tokens",
    "decode": "1 token",
    "forward+backward": f"{TRAIN_TOKENS} tokens",
}
TASKS = tuple(UNITS)

Timings = dict[str, dict[str, list[float]]]  # task -> contender -> milliseconds, one per round


def llama_config() -> Any:
    """A Llama of 111M parameters, untied."""
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=1024, num_hidden_layers=8, num_attention_heads=16, num_key_value_heads=8,
        intermediate_size=2816, vocab_size=8192, max_position_embeddings=1024, tie_word_embeddings=False,
    )  # fmt: skip


def contenders(checkpoint: str, tp: int, pp: int, names: list[str]) -> dict[str, Any]:
    """The same weights three ways; the single process's model only on rank 0 (None elsewhere)."""
    from transformers import LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    models: dict[str, Any] = {}
    if SINGLE in names:
        models[SINGLE] = LlamaForCausalLM.from_pretrained(checkpoint) if dist.get_rank() == 0 else None
    if AUTOTP in names:
        import autotp

        models[AUTOTP] = autotp.parallelize(LlamaForCausalLM.from_pretrained(checkpoint), tp=tp, pp=pp)
    if TRANSFORMERS in names:
        config = DistributedConfig(tp_size=tp, pp_size=pp)
        models[TRANSFORMERS] = LlamaForCausalLM.from_pretrained(checkpoint, distributed_config=config)
    return {name: model if model is None else model.eval() for name, model in models.items()}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def prefill(model: Any, ids: torch.Tensor) -> Callable[[], Any]:
    @torch.no_grad()
    def step() -> Any:
        return model(ids, use_cache=True)

    return step


def decode(model: Any, ids: torch.Tensor) -> Callable[[], Any]:
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
    token = ids[:, -1:]

    @torch.no_grad()
    def step() -> None:
        for _ in range(DECODE_TOKENS):
            model(token, past_key_values=cache, use_cache=True)
        cache.crop(-DECODE_TOKENS)  # so that every round starts from the same length

    return step


def forward_backward(model: Any, ids: torch.Tensor) -> Callable[[], Any]:
    def step() -> None:
        model.zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()

    return step


def check_agreement(models: dict[str, Any], ids: torch.Tensor) -> None:
    """Raise unless every contender gives rank 0 the single process's logits (relative error 1e-4)."""
    with torch.no_grad():
        logits = {name: whole(model(ids).logits) for name, model in models.items() if model is not None}
    if dist.get_rank() == 0 and SINGLE in logits:
        truth = logits[SINGLE]
        for name, given in logits.items():
            error = ((given - truth).abs().max() / truth.abs().max()).item()
            if not error < 1e-4:
                raise RuntimeError(f"{name} is off by {error:.1e} of the largest logit: not worth timing")


def worker(checkpoint: str, tp: int, pp: int, rounds: int, names: list[str]) -> None:
    """One rank: `rounds` rounds of every task by every contender; rank 0 tells its timings."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    torch.set_num_threads(1)
    models = contenders(checkpoint, tp, pp, names)
    ids = torch.arange(PREFILL_TOKENS).mul(37).remainder(8192)[None]
    check_agreement(models, ids)
    makers = {task: make for task, make in zip(TASKS, (prefill, decode, forward_backward), strict=True)
              if task in tasks(pp)}  # fmt: skip
    timings: Timings = {task: {name: [] for name in models} for task in makers}
    for task, make in makers.items():
        steps = {name: model and make(model, ids[:, :TRAIN_TOKENS]) for name, model in models.items()}
        for round_ in range(rounds + 1):  # the first is a warm-up
            for name, step in steps.items():
                dist.barrier()
                start = time.perf_counter()
                if step is not None:
                    step()
                if round_:
                    timings[task][name].append(1000 * (time.perf_counter() - start))
            say(round=round_, task=task)
    dist.barrier()
    dist.destroy_process_group()
    say(result=True, timings=timings)


def tasks(pp: int) -> tuple[str, ...]:
    """What is timed: stages train by schedules, not by one call."""
    return TASKS if pp == 1 else TASKS[:2]


def table(timings: Timings) -> str:
    """Markdown: medians in ms, and how many times as fast as each other contender autotp is."""
    names = list(next(iter(timings.values())))
    lead = AUTOTP if AUTOTP in names else names[-1]
    others = [name for name in names if name != lead]
    head = ["task", *(f"{name} (ms)" for name in names), *(f"{lead} ÷ {name} speed" for name in others)]
    rows = [head, ["---"] + ["---:"] * (len(head) - 1)]
    for task, by_name in timings.items():
        median = {name: statistics.median(values) for name, values in by_name.items()}
        per = DECODE_TOKENS if task == "decode" else 1
        rows.append(
            [f"{task}, {UNITS[task]}"]
            + [f"{median[name] / per:.1f}" for name in names]
            + [f"{median[name] / median[lead]:.2f}×" for name in others]
        )
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--contenders", nargs="+", default=[SINGLE, AUTOTP, TRANSFORMERS])
    parser.add_argument("--checkpoint", help=argparse.SUPPRESS)  # given to the ranks
    options = parser.parse_args()
    if options.checkpoint:
        with telling_errors():
            worker(options.checkpoint, options.tp, options.pp, options.rounds, options.contenders)
        return 0

    from rich.progress import Progress
    from transformers import LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as checkpoint, Progress() as progress:
        LlamaForCausalLM(llama_config()).save_pretrained(checkpoint)
        task = progress.add_task("loading", total=len(tasks(options.pp)) * (options.rounds + 1))

        def show(message: dict[str, Any]) -> None:
            if message["rank"] == 0 and "round" in message:
                progress.update(task, advance=1, description=message["task"])

        sizes = {"--tp": options.tp, "--pp": options.pp, "--rounds": options.rounds}
        args = ["--checkpoint", checkpoint, *(str(word) for pair in sizes.items() for word in pair)]
        processes = options.tp * options.pp
        ranks = launch(__file__, [*args, "--contenders", *options.contenders], processes, show)
    print(table(ranks[0]["timings"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
