"""The command line: `autotp dump` shows what a plan does to a model, `autotp verify` proves it."""

from __future__ import annotations

import difflib
import enum
import io
import json
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from .cli_search import register as register_search
from .cli_weights import register_weights
from .errors import AutotpError, ModelSourceError, PlanError

if TYPE_CHECKING:
    from torch import nn

    from .plan import Plan
    from .planner import Analysis
    from .verify import Report

MODEL_HELP = "A directory with a config.json, a config file, or package.module:function that builds a model."

app = typer.Typer(
    name="autotp",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Automatic tensor parallelism for any PyTorch model: captured, planned, rewritten.",
    epilog="""[bold]Examples[/bold]

[cyan]autotp dump ./Llama-3-8B --tp 8[/cyan]   the sharded model, printed like code

[cyan]autotp dump ./Llama-3-8B --tp 8 --format html --out plan.html[/cyan]   a page to look at

[cyan]autotp dump ./Llama-3-8B --pp 4 --tp 2[/cyan]   pipeline stages, and what goes between them

[cyan]autotp dump my_package.model:build --tp 4 --why layers.0.qkv.weight[/cyan]   why a weight is there

[cyan]autotp verify ./gpt2 --tp 2 --layers 2[/cyan]   split against whole, number by number""",
)


class Format(str, enum.Enum):
    """What `dump` can write."""

    text = "text"
    table = "table"
    yaml = "yaml"
    json = "json"
    tp_plan = "tp_plan"
    dot = "dot"
    svg = "svg"
    html = "html"


GRAPHS = (
    Format.text,
    Format.dot,
    Format.svg,
    Format.html,
)  # they show the model's operations, not the plan alone
WIDE = 200  # columns of a table that goes to a file or a pipe

ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP, show_default=False)]
TpOption = Annotated[
    int, typer.Option("--tp", min=1, help="Tensor-parallel ranks to split over.", show_default=False)
]
PolicyOption = Annotated[
    Path | None, typer.Option("--policy", help="A policy YAML: pins and overrides.", show_default=False)
]
EpOption = Annotated[
    int, typer.Option("--ep", min=1, help="As many as --tp: split experts by expert, not by hidden units.")
]
LayersOption = Annotated[
    int | None,
    typer.Option(
        "--layers", min=1, help="Shorten a model made from a config to so many layers.", show_default=False
    ),
]


def _version(asked: bool) -> None:
    if asked:
        try:
            print(f"autotp {metadata.version('autotp')}")
        except metadata.PackageNotFoundError:
            print("autotp (not installed)")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    context.obj = debug


@app.command(
    epilog="""[cyan]autotp dump config.json --tp 8 --format table[/cyan]

[cyan]autotp dump ./gpt2 --tp 2 --format svg --out gpt2.svg[/cyan]

[cyan]autotp dump ./gpt2 --tp 2 --format dot | dot -Tpdf > gpt2.pdf[/cyan]"""
)
def dump(
    context: typer.Context,
    model: ModelArgument,
    tp: Annotated[
        int | None,
        typer.Option("--tp", min=1, help="Tensor-parallel ranks to split over.", show_default=False),
    ] = None,
    pp: Annotated[int, typer.Option("--pp", min=1, help="Pipeline stages to cut into.")] = 1,
    stages: Annotated[
        str | None,
        typer.Option(
            "--stages",
            help="The cut by hand: the first module of each stage but the first, with commas between.",
            show_default=False,
        ),
    ] = None,
    format: Annotated[Format, typer.Option("--format", "-f", help="How to show it.")] = Format.text,
    policy: PolicyOption = None,
    ep: EpOption = 1,
    rank: Annotated[int, typer.Option("--rank", min=0, help="Whose local shapes are shown.")] = 0,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write to this file.", show_default=False)
    ] = None,
    why: Annotated[
        str | None,
        typer.Option(
            "--why", help="Explain one parameter instead: what decides each of its axes.", show_default=False
        ),
    ] = None,
    layers: LayersOption = None,
) -> None:
    """Show the sharded model: shapes on each rank, every collective, and the reasons. Needs no weights and no
    GPU."""
    if tp is None and pp == 1:
        raise typer.BadParameter("give --tp, --pp, or both", context, param_hint="--tp")
    starts = [name.strip() for name in stages.split(",")] if stages else None
    degrees = {"tp": tp or 1, "ep": ep, "pp": pp, "stages": starts}
    _guarded(context.obj, lambda: _dump(model, degrees, format, policy, rank, out, why, layers))


@app.command(
    epilog="""[cyan]autotp verify ./Llama-3-8B --tp 4 --layers 2[/cyan]

[cyan]autotp verify my_package.model:build --tp 2 --steps 3[/cyan]"""
)
def verify(
    context: typer.Context,
    model: ModelArgument,
    tp: TpOption = 2,
    steps: Annotated[
        int, typer.Option("--steps", min=0, help="AdamW steps to compare; 0 compares the forward only.")
    ] = 1,
    policy: PolicyOption = None,
    ep: EpOption = 1,
    layers: LayersOption = None,
    memory: Annotated[
        float, typer.Option("--memory", help="GiB that may be used; a larger model is refused.")
    ] = 8.0,
) -> None:
    """Prove a plan on the model itself: random weights, whole against split, output, generation and training
    steps.

    The ranks are simulated in this process. Leaves with 1 if a number is wrong, with 2 if it could not run.
    """
    wrong = _guarded(context.obj, lambda: not _verify(model, tp, ep, steps, policy, layers, memory).ok)
    raise typer.Exit(int(bool(wrong)))


register_search(app, lambda debug, run: _guarded(debug, run))
register_weights(app, lambda debug, run: _guarded(debug, run))


def main() -> None:
    """The `autotp` command."""
    app()


def _guarded(debug: bool, run: Callable[[], Any]) -> Any:
    """Errors meant for the user become one red message and exit code 2; under --debug everything is shown."""
    try:
        return run()
    except (AutotpError, OSError) as error:
        if debug:
            raise
        Console(stderr=True).print(
            Text.assemble(("error: ", "bold red"), (str(error), "red")), soft_wrap=True
        )
        raise typer.Exit(2) from error


# ---------------------------------------------------------------- dump
def _dump(
    source: str,
    degrees: dict[str, Any],
    format: Format,
    policy: Path | None,
    rank: int,
    out: Path | None,
    why: str | None,
    layers: int | None,
) -> None:
    from .model_source import build_model
    from .planner import plan_and_analysis

    tp = degrees["tp"]
    if rank >= tp:
        raise PlanError(f"--rank {rank}: with --tp {tp} the ranks are 0 to {tp - 1}.")
    console = Console(stderr=True)
    with console.status(f"planning {escape(source)} over {tp * degrees['pp']} ranks"):
        model = build_model(source, layers=layers)
        plan, found = plan_and_analysis(model, policy=str(policy) if policy else None, **degrees)
        if why:
            rendered = _explain(found, plan, why)
        elif format in GRAPHS:
            rendered = _draw(found, plan, format, rank, _itemsize(model))
        else:
            rendered = _list(plan, format, rank, _itemsize(model))
    if out is None:
        _print(rendered)
    else:
        out.write_text(_plain(rendered), encoding="utf-8")
        console.print(f"wrote {out}")


def _itemsize(model: nn.Module) -> int:
    """Bytes of an element of the weights, by the type most of them have."""
    sizes: dict[int, int] = {}
    for p in model.parameters():
        sizes[p.element_size()] = sizes.get(p.element_size(), 0) + p.numel()
    return max(sizes, key=sizes.__getitem__, default=4)


def _list(plan: Plan, format: Format, rank: int, itemsize: int) -> Any:
    """What needs the plan alone."""
    if format is Format.json:
        return json.dumps(plan.to_dict(), indent=2) + "\n"
    if format is Format.yaml:
        return plan.to_yaml()
    if format is Format.tp_plan:
        return _tp_plan(plan)
    from .show import tables

    return tables(plan, itemsize, rank)


def _tp_plan(plan: Plan) -> str:
    """A transformers `tp_plan` as YAML; what no style can say as comments."""
    use = f"# {plan.model}: DistributedConfig(tp_size={plan.tp}, tp_plan=yaml.safe_load(open(…)))"
    lines = [use, *(f"{pattern}: {style}" for pattern, style in plan.styles.styles.items())]
    if not plan.styles.styles:
        lines.append("{}")
    by_reason: dict[str, list[str]] = {}
    for pattern, why in plan.styles.left_out.items():
        by_reason.setdefault(why, []).append(pattern)
    for why, patterns in by_reason.items():
        lines += [f"# left out: {why}", *(f"#   {pattern}" for pattern in patterns)]
    return "\n".join(lines) + "\n"


def _draw(found: Analysis, plan: Plan, format: Format, rank: int, itemsize: int) -> Any:
    """What shows the model's operations."""
    from .draw import dot, svg
    from .outlining import outline
    from .page import html
    from .show import text

    shown = outline(found, plan, rank)
    if format is Format.dot:
        return dot(plan, shown)
    return {Format.text: text, Format.svg: svg, Format.html: html}[format](plan, shown, itemsize)


def _explain(found: Analysis, plan: Plan, name: str) -> Text:
    from .explain import why

    known = [n for p in plan.params.values() for n in (p.name, *p.also)]
    if name not in known:
        near = difflib.get_close_matches(name, known, 3, 0.3) or known[:3]
        raise PlanError(
            f"--why {name}: {plan.model} has no parameter of that name. Near it: {', '.join(near)}"
        )
    return why(found, plan, name)


def _print(rendered: Any) -> None:
    if isinstance(rendered, str):
        sys.stdout.write(rendered)
    else:
        # In a pipe nothing is to be cut to a terminal's width.
        console = Console(width=None if sys.stdout.isatty() else WIDE)
        console.print(rendered, soft_wrap=isinstance(rendered, Text))


def _plain(rendered: Any) -> str:
    if isinstance(rendered, str):
        return rendered
    if isinstance(rendered, Text):
        return rendered.plain
    console = Console(width=WIDE, file=io.StringIO(), record=True)
    console.print(rendered)
    return console.export_text()


# ---------------------------------------------------------------- verify
def _verify(
    source: str, tp: int, ep: int, steps: int, policy: Path | None, layers: int | None, memory: float
) -> Report:
    import torch

    from .model_source import build_model, quiet, randomise
    from .show import human_bytes
    from .verify import verify as run

    console = Console()
    with console.status(f"building {escape(source)}") as status:
        hollow = build_model(source, layers=layers, dtype=torch.float32)
        parameters = sum(p.numel() for p in hollow.parameters())
        # The model, the one run whole, a copy a rank while it is cut; gradients and moments of what steps.
        needed = 4 * parameters * (2 + tp + (6 if steps else 0))
        if needed > memory * 2**30:
            raise ModelSourceError(
                f"Verifying {source} needs about {human_bytes(needed)} and --memory is {memory:g} GiB. "
                "Its layers are alike: --layers 2 proves the same on a shorter model. Or raise --memory."
            )
        torch.manual_seed(0)
        model = build_model(source, device="cpu", layers=layers, dtype=torch.float32)
        randomise(model)
        with quiet():
            given = str(policy) if policy else None
            report = run(model, tp, given, ep=ep, steps=steps, progress=status.update)
    console.print(_report(report))
    return report


def _report(report: Report) -> Table:
    plan = report.plan
    title = f"{plan.model} over {plan.tp} ranks, {plan.sharded_fraction:.1%} of the block weights sharded"
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        header_style="bold",
        border_style="bright_black",
    )
    for column in ("check", "", "error", "limit", "of what"):
        table.add_column(column, justify="right" if column in ("error", "limit") else "left")
    for check in report.checks:
        mark = Text("ok", "green") if check.ok else Text("WRONG", "bold red")
        table.add_row(check.name, mark, f"{check.error:.1e}", f"{check.limit:.0e}", check.detail)
    return table
