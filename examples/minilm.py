"""A real BERT over several processes: `python examples/minilm.py --tp 2 3 4`.

all-MiniLM-L6-v2 (12 heads, a vocabulary of 30522) turns sentences into vectors, in one process and over `tp`
processes with `autotp.parallelize`. The exit code is 1 if any vector differs by more than 1e-5.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

import real_models
from launch import launch, say, telling_errors

SENTENCES = [
    "A lighthouse keeper writes letters to the sea.",
    "The man who tends the lighthouse sends messages to the ocean.",
    "Interest rates rose by a quarter of a percent.",
    "Yes.",
]
TOLERANCE = 1e-5  # of unit vectors in float32


@torch.no_grad()
def embed(model: Any, tokenizer: Any, sentences: list[str] = SENTENCES) -> torch.Tensor:
    """Unit vectors [sentence, hidden]: the mean over a sentence's tokens, as the model was trained for."""
    batch = tokenizer(sentences, padding=True, return_tensors="pt")
    hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1).to(hidden.dtype)
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


def embed_sharded(tp: int) -> list[torch.Tensor]:
    """Each rank's vectors from a run over `tp` processes. Raises launch.LaunchError when a rank fails."""
    ranks = launch(__file__, ["--worker", "--tp", str(tp)], tp)
    return [torch.tensor(rank["vectors"]) for rank in ranks]


def worker(tp: int) -> None:
    import autotp

    model, tokenizer = real_models.minilm()
    autotp.parallelize(model, tp=tp)
    say(result=True, vectors=embed(model, tokenizer).tolist())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tp", type=int, nargs="+", default=[2, 3, 4], help="degrees (default 2 3 4)")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.worker:
        with telling_errors():
            worker(options.tp[0])
        return 0

    console = Console()
    table = Table("tp", "largest difference", "", title="all-MiniLM-L6-v2, sharded against whole")
    all_equal = True
    try:
        with console.status("single process") as status:
            truth = embed(*real_models.minilm())
            for tp in options.tp:
                status.update(f"tp={tp}")
                difference = max((vectors - truth).abs().max().item() for vectors in embed_sharded(tp))
                equal = difference <= TOLERANCE
                all_equal &= equal
                table.add_row(
                    str(tp), f"{difference:.1e}", "[green]equal[/]" if equal else "[red]different[/]"
                )
    except RuntimeError as error:  # LaunchError among them
        console.print(Text(str(error)))
        return 1
    console.print(table)
    alike, unlike = (truth[0] @ truth[1]).item(), (truth[0] @ truth[2]).item()
    console.print(f"it works: the paraphrases are {alike:.2f} alike, the unrelated sentences {unlike:.2f}")
    return 0 if all_equal else 1


if __name__ == "__main__":
    sys.exit(main())
