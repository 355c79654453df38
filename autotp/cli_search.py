"""`autotp search`, `autotp predict` and `autotp calibrate` on the command line."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from .errors import SearchError

WIDE = 180  # columns of a table that goes to a file or a pipe

ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        show_default=False,
        help="A directory with a config.json, a config file, or package.module:function that builds a model.",
    ),
]
ClusterOption = Annotated[
    str,
    typer.Option(
        "--cluster",
        help="A shipped cluster or a YAML file; dgx-h100:8 means eight nodes.",
        show_default=False,
    ),
]
BatchOption = Annotated[
    int, typer.Option("--batch", min=1, help="Sequences of a step, over all GPUs.", show_default=False)
]
SeqOption = Annotated[int, typer.Option("--seq", min=1, help="Tokens of a sequence.")]
ModeOption = Annotated[str, typer.Option("--mode", help="train or generate.")]
DtypeOption = Annotated[
    str, typer.Option("--dtype", help="Of the matrix products: bf16, fp16, fp8, fp4, fp32.")
]
LayersOption = Annotated[
    int | None,
    typer.Option("--layers", min=1, help="Shorten the model to so many layers.", show_default=False),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def register(app: typer.Typer, guarded: Callable[[bool, Callable[[], Any]], Any]) -> None:
    """Add the commands to `app`. guarded: runs a function, with errors shown as the app shows them."""

    @app.command(
        epilog="[cyan]autotp search ./Llama-3-70B --cluster dgx-h100:8 --batch 512 --seq 4096[/cyan]"
    )
    def search(
        context: typer.Context,
        model: ModelArgument,
        cluster: ClusterOption,
        batch: BatchOption,
        seq: SeqOption = 4096,
        mode: ModeOption = "train",
        dtype: DtypeOption = "bf16",
        top: Annotated[int, typer.Option("--top", min=1, help="How many plans to show.")] = 10,
        fix: Annotated[
            list[str] | None,
            typer.Option("--fix", help="Hold a choice, as in tp=8 or zero=1; repeat it.", show_default=False),
        ] = None,
        why: Annotated[
            tuple[int, int] | None,
            typer.Option("--why", help="Compare two plans by number.", show_default=False),
        ] = None,
        rejected: Annotated[
            int, typer.Option("--rejected", min=0, help="Show so many of the rejected, with reasons.")
        ] = 0,
        figures: Annotated[
            Path | None,
            typer.Option(
                "--figures", help="Write figures and a Perfetto trace to this directory.", show_default=False
            ),
        ] = None,
        layers: LayersOption = None,
        as_json: JsonOption = False,
    ) -> None:
        """Find the best degrees for a cluster: every configuration timed and weighed. Needs no weights and no
        GPU.
        """
        guarded(
            context.obj,
            lambda: _search(
                model,
                cluster,
                batch,
                seq,
                mode,
                dtype,
                top,
                fix or [],
                why,
                rejected,
                figures,
                layers,
                as_json,
            ),
        )

    @app.command(
        epilog="[cyan]autotp predict ./Llama-3-70B --cluster dgx-h100:8 --tp 8 --pp 4 --batch 512[/cyan]"
    )
    def predict(
        context: typer.Context,
        model: ModelArgument,
        cluster: ClusterOption,
        batch: BatchOption,
        tp: int = 1,
        pp: int = 1,
        dp: int = 1,
        cp: int = 1,
        ep: int = 1,
        micro_batch: int = 1,
        seq: SeqOption = 4096,
        recompute: Annotated[str, typer.Option(help="none, selective or full.")] = "none",
        zero: Annotated[int, typer.Option(help="ZeRO stage, 0 to 3.")] = 0,
        virtual_stages: int = 1,
        sequence_parallel: bool = False,
        schedule: Annotated[str, typer.Option(help="gpipe, 1f1b, interleaved or zero-bubble.")] = "1f1b",
        mode: ModeOption = "train",
        dtype: DtypeOption = "bf16",
        layers: LayersOption = None,
        as_json: JsonOption = False,
    ) -> None:
        """Predict the time and memory of one configuration."""
        options = dict(
            tp=tp,
            pp=pp,
            dp=dp,
            cp=cp,
            ep=ep,
            batch=batch,
            micro_batch=micro_batch,
            seq=seq,
            recompute=recompute,
            zero=zero,
            virtual_stages=virtual_stages,
            sequence_parallel=sequence_parallel,
            schedule=schedule,
            mode=mode,
            dtype=dtype,
        )
        guarded(context.obj, lambda: _predict(model, cluster, layers, as_json, options))

    @app.command(
        epilog="[cyan]autotp calibrate --out mine.yaml[/cyan]   then  [cyan]--cluster mine.yaml:2[/cyan]"
    )
    def calibrate(
        context: typer.Context,
        out: Annotated[Path, typer.Option("--out", "-o", help="The cluster file to write.")] = Path(
            "cluster.yaml"
        ),
        seconds: Annotated[
            float, typer.Option("--seconds", min=1.0, help="How long to measure, about.")
        ] = 60.0,
    ) -> None:
        """Measure this machine: matrix products by shape, memory, launches, collectives. Writes a cluster
        file.
        """
        guarded(context.obj, lambda: _calibrate(out, seconds))


def _search(
    source: str,
    cluster: str,
    batch: int,
    seq: int,
    mode: str,
    dtype: str,
    top: int,
    fix: list[str],
    why: tuple[int, int] | None,
    rejected: int,
    figures: Path | None,
    layers: int | None,
    as_json: bool,
) -> None:
    from .model_source import build_model
    from .search import search
    from .search.report import plans_table, summary

    model = build_model(source, layers=layers)
    result = search(
        model,
        cluster,
        batch=batch,
        seq=seq,
        mode=mode,
        dtype=dtype,
        top=max(top, *(why or (1,))),
        fixed=_fixed(fix),
    )
    if as_json:
        print(json.dumps(result.to_dict(), indent=2, default=float))
        return
    console = Console(width=None if sys.stdout.isatty() else WIDE)  # in a pipe nothing is cut to a terminal
    best = result.best  # raises where nothing fits
    console.print(plans_table(result.plans[:top], summary(result)))
    if why is not None:
        if max(why) > len(result.plans) or min(why) < 1:
            raise SearchError(f"--why {why[0]} {why[1]}: there are plans 1 to {len(result.plans)}.")
        console.print(result.why(result.plans[why[0] - 1], result.plans[why[1] - 1]), highlight=False)
    for turned_down, _ in zip(result.rejected(), range(rejected), strict=False):
        console.print(f"{turned_down.config}: {turned_down.reason}", highlight=False)
    if rejected:
        for rule in result.coarse:
            console.print(f"not looked at: {rule}", highlight=False)
    if figures is not None:
        _draw(result, best, figures)
        console.print(f"wrote {figures}")


def _draw(result: Any, best: Any, folder: Path) -> None:
    from .search import figures as draw
    from .search.report import trace

    folder.mkdir(parents=True, exist_ok=True)
    title = f"{result.workload.name} on {result.cluster.gpus} x {result.cluster.gpu.name}"
    made = {"pareto": draw.pareto(result), "breakdown": draw.breakdown(result.plans, title)}
    if best.timeline is not None:
        made |= {"pipeline": draw.pipeline(best), "memory": draw.memory(best)}
        (folder / "pipeline.trace.json").write_text(trace(best))
    for name, figure in made.items():
        figure.savefig(folder / f"{name}.svg")
        figure.savefig(folder / f"{name}.png", dpi=150)


def _fixed(pairs: list[str]) -> dict[str, Any]:
    held: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise SearchError(f"--fix {pair}: write name=value, as in tp=8.")
        held[name.replace("-", "_")] = (
            int(value) if value.isdigit() else {"true": True, "false": False}.get(value, value)
        )
    return held


def _predict(source: str, cluster: str, layers: int | None, as_json: bool, options: dict[str, Any]) -> None:
    from .model_source import build_model
    from .search import predict
    from .search.report import prediction_table

    found = predict(build_model(source, layers=layers), cluster, **options)
    if as_json:
        print(json.dumps(found.to_dict(), indent=2, default=float))
    else:
        Console().print(prediction_table(found))


def _calibrate(out: Path, seconds: float) -> None:
    from .search.calibrate import calibrate, to_yaml

    console = Console(stderr=True)
    with console.status("measuring") as status:
        cluster = calibrate(seconds, progress=status.update)
    out.write_text(to_yaml(cluster))
    console.print(
        f"wrote {out}: {cluster.gpu.name}, {max(cluster.gpu.peak.values()):.3g} TFLOP/s, "
        f"{cluster.gpu.bandwidth:.0f} GB/s"
    )
