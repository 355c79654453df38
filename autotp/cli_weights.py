"""`autotp shard`: cut a checkpoint into one file per rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape


def register_weights(app: typer.Typer, guarded: Callable[[bool, Callable[[], Any]], Any]) -> None:
    """Add the command to `app`; `guarded(debug, run)` turns errors into messages."""

    @app.command(
        epilog="""[cyan]autotp shard ./Llama-3-8B ./Llama-3-8B-tp8 --tp 8[/cyan]

Then, over 8 processes: [cyan]autotp.load("./Llama-3-8B-tp8", tp=8)[/cyan]"""
    )
    def shard(
        context: typer.Context,
        model: Annotated[
            str,
            typer.Argument(
                metavar="MODEL", help="A checkpoint's directory, or a hub id.", show_default=False
            ),
        ],
        out: Annotated[
            Path, typer.Argument(metavar="OUT", help="A new or empty directory.", show_default=False)
        ],
        tp: Annotated[int, typer.Option("--tp", min=1, help="Tensor-parallel ranks.", show_default=False)],
        ep: Annotated[int, typer.Option("--ep", min=1, help="The same number: experts by expert.")] = 1,
        policy: Annotated[
            Path | None,
            typer.Option("--policy", help="A policy YAML: pins and overrides.", show_default=False),
        ] = None,
        dtype: Annotated[
            str | None,
            typer.Option(
                "--dtype", help="Store in this dtype, as bfloat16; else the checkpoint's.", show_default=False
            ),
        ] = None,
        allow_pickle: Annotated[
            bool, typer.Option("--allow-pickle", help="Read .bin files too (their code is never run).")
        ] = False,
    ) -> None:
        """Cut a checkpoint into one file for each rank, which autotp.load reads from end to end: a fast
        start."""
        guarded(context.obj, lambda: _shard(model, out, tp, ep, policy, dtype, allow_pickle))


def _shard(
    source: str, out: Path, tp: int, ep: int, policy: Path | None, dtype: str | None, allow_pickle: bool
) -> None:
    import torch

    from .errors import CheckpointError
    from .presharded import rank_file, write_shards
    from .show import human_bytes

    wanted = getattr(torch, dtype, None) if dtype else None
    if dtype and not (isinstance(wanted, torch.dtype) and wanted.is_floating_point):
        raise CheckpointError(f"--dtype {dtype}: give a floating one, as bfloat16, float16 or float32.")
    console = Console(stderr=True)
    with console.status(f"cutting {escape(source)} for {tp} ranks") as status:
        chosen = str(policy) if policy else None
        plan = write_shards(
            source,
            out,
            tp,
            ep=ep,
            dtype=wanted,
            policy=chosen,
            allow_pickle=allow_pickle,
            progress=status.update,
        )
    sizes = [(out / rank_file(rank, tp)).stat().st_size for rank in range(tp)]
    Console().print(
        f"{escape(str(out))}: {plan.model} for tp={tp}, {human_bytes(max(sizes))} for the largest rank, "
        f"{plan.sharded_fraction:.1%} of the block weights sharded.\n"
        f'Over {tp} processes: autotp.load("{escape(str(out))}", tp={tp}{f", ep={ep}" if ep > 1 else ""})',
        soft_wrap=True,
    )
