"""autotp's plans against the `tp_plan`s that transformers ships, parameter by parameter.

`python -m zoo.golden` (from tools/) compares every causal-LM class that has one, and writes docs/tp_plans.md
from the rows. What a shipped plan does to a parameter is asked of transformers: its own code is applied to
the model on the meta device, over ranks that are not there, and the placements are read off. Both plans are
then run, by transformers, over two processes, against the whole model: ours as `Plan.to_tp_plan()`.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import datetime
import json
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import transformers
from torch import nn

import autotp
from autotp.inputs import best_inputs
from autotp.layouts import Layout
from autotp.plan import Plan
from autotp.tp_plan import glob
from autotp.verify import tensors

from . import tiny
from .check import _decisive, portable

RESULTS = Path(__file__).parent / "results" / "tp_plans.jsonl"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "tp_plans.md"
TP = 2
VOCABULARY = 4096  # as in real models, the largest weights are the vocabulary's
LIMIT = 90.0  # seconds for loading and running one plan
Row = dict[str, Any]


def build(cls: str, model_type: str) -> nn.Module:
    """The class, tiny but for its vocabulary (where it can have another one), in float64."""
    failed: Exception | None = None
    for how, vocabulary in (("anew", VOCABULARY), ("set", VOCABULARY), ("anew", None), ("set", None)):
        try:
            config = tiny.config_of(cls, model_type, how)
            if vocabulary is not None:
                config.get_text_config().vocab_size = vocabulary
            torch.manual_seed(0)
            model = tiny.randomise(getattr(transformers, cls)(config).double().eval())
            with contextlib.suppress(ValueError, AttributeError):
                cast(Any, model).set_experts_implementation("batched_mm")  # the default knows no float64
            with torch.no_grad():
                model(**best_inputs(model))
            return model
        except Exception as error:
            failed = error
    assert failed is not None
    raise failed


# --- the comparison -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def absent_ranks(size: int) -> Iterator[Any]:
    """A device mesh of `size` ranks of which this is the first and the others are not there."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    finally:
        dist.destroy_process_group()


def shipped_layouts(model: Any) -> tuple[dict[str, tuple[int, Layout]], dict[str, str]]:
    """What the model's own plan does: parameter -> (dim, ranges per rank), and parameter -> style."""
    from torch.distributed.tensor import DTensor
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    config = copy.deepcopy(model.config)
    config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False  # each name by itself
    with torch.device("meta"):
        hollow = type(model)(config)
    styles = hollow._expand_parallel_plan(dict(hollow.tp_plan))
    found = {}
    with absent_ranks(TP) as mesh:
        for name, style in styles.items():
            apply_tensor_parallelism(hollow, mesh, {name: style})
            param = dict(hollow.named_parameters(remove_duplicate=False)).get(name)
            if isinstance(param, DTensor) and not param.placements[0].is_replicate():
                (placed,) = param.placements
                dim: int = placed.dim % param.ndim  # type: ignore[attr-defined]
                parts = getattr(placed, "split_factor", 1)
                found[name] = (dim, strided(param.shape[dim], parts))
    return found, styles


def strided(size: int, parts: int) -> Layout:
    """`parts` equal parts of a dim, each cut over the ranks in torch's chunks."""
    whole = size // parts
    step = -(-whole // TP)
    cut = [(min(r * step, whole), min((r + 1) * step, whole)) for r in range(TP)]
    return tuple(tuple((p * whole + a, p * whole + b) for p in range(parts)) for a, b in cut)


def compare(model: Any, plan: Plan) -> Row:
    """How many parameters both treat alike, and what differs, one glob together, with the reason."""
    theirs, styles = shipped_layouts(model)
    first = {also: name for name, p in plan.params.items() for also in p.also}
    by_first = {first.get(name, name): value for name, value in theirs.items()}
    names = {glob(n) for n, _ in [*model.named_modules(), *model.named_parameters(remove_duplicate=False)]}
    differ: dict[tuple[str, str, str, str], int] = Counter()
    alike = 0
    for name, param in plan.params.items():
        ours = None
        if param.layout is not None:
            ((dim, ranks), *more) = param.layout.dims.items()
            ours = (dim, tuple(ranks)) if not more else (-1, ())
        if ours == by_first.get(name):
            alike += 1
            continue
        differ[(glob(name), said(by_first.get(name)), said(ours), reason(name, plan, by_first, styles))] += 1
    return {
        "parameters": len(plan.params),
        "alike": alike,
        "differ": [[*key, count] for key, count in differ.items()],
        "unmatched": sorted(set(model.tp_plan) - names),
        "gathered": sorted({glob(n) for n, s in styles.items() if "gather" in s and n not in plan.params}),
        "left_out": sorted({why for why in map(plain, plan.styles.left_out.values())}),
        "sharded": [round(share(plan, by_first), 3), round(plan.sharded_fraction, 3)],
    }


def said(cut: tuple[int, Layout] | None) -> str:
    if cut is None:
        return "whole"
    dim, ranks = cut
    held = ", ".join(f"{a}:{b}" for a, b in ranks[0][:3]) + ("…" if len(ranks[0]) > 3 else "")
    return f"dim {dim}, rank 0 has {held}"


def reason(name: str, plan: Plan, theirs: dict[str, Any], styles: dict[str, str]) -> str:
    """Why one parameter differs, from what both say of it."""
    param = plan.params[name]
    given = {styles[n] for n in (name, *param.also) if n in styles}
    if name not in theirs:
        return f"theirs: {' and '.join(sorted(given))}" if given else "theirs: no rule for it"
    if param.layout is None:
        why = plan.kept.get(name) or next(
            (plan.kept[n] for n in plan.kept if n.rpartition(".")[0] == name.rpartition(".")[0]), "a vector"
        )
        return f"ours: {plain(_decisive(why))}"
    if param.layout.repeats:
        return "ours: heads are held by several ranks"
    return f"theirs: {' and '.join(sorted(given))}"


def plain(why: str) -> str:
    """A reason without layer numbers."""
    return portable(re.sub(r"(?<=\.)\d+(?=[.:, ])", "*", why)).replace("|", "\\|")[:300]


def share(plan: Plan, theirs: dict[str, tuple[int, Layout]]) -> float:
    """Of the block weights, by elements, the share that the shipped plan cuts."""
    block = {n: torch.Size(p.shape).numel() for n, p in plan.params.items() if p.block}
    return sum(size for n, size in block.items() if n in theirs) / max(sum(block.values()), 1)


# --- both plans run by transformers -------------------------------------------------------------------------


def loss(model: nn.Module, inputs: Row) -> tuple[torch.Tensor, list[torch.Tensor]]:
    outputs = [t for t in tensors(model(**inputs)) if t.is_floating_point()]
    weights = [torch.randn(t.shape, generator=torch.Generator().manual_seed(5)) for t in outputs[:1]]
    return (outputs[0] * weights[0].to(outputs[0].dtype)).mean(), outputs[:1]


def _examine(cls: str, model_type: str, folder: Path) -> None:
    """In a process of its own: the comparison, and what the runs need."""
    model: Any = build(cls, model_type)
    inputs = best_inputs(model)
    plan = autotp.plan(model, TP, example_inputs=inputs)
    cut = sum(p.layout is not None for p in plan.params.values())
    left = sorted({plain(why) for why in plan.styles.left_out.values()})
    row = compare(model, plan) if model.tp_plan else {"left_out": left}
    row |= {"cut": cut, "said": cut - sum(glob(n) in plan.styles.left_out for n in plan.params)}
    experts = getattr(model.config, "_experts_implementation", None)
    options = {"dtype": torch.float64, **({"experts_implementation": experts} if experts else {})}
    model.save_pretrained(folder / "model")
    whole = type(model).from_pretrained(folder / "model", **options)  # what comes back is the reference
    value, (logits,) = loss(whole, inputs)
    value.backward()
    grads = {n: p.grad for n, p in whole.named_parameters() if p.grad is not None}
    weights = {n: p.detach() for n, p in whole.named_parameters()}
    kept = (inputs, plan.to_tp_plan(), logits.detach(), grads, weights, options)
    torch.save(kept, folder / "reference.pt")
    (folder / "row.json").write_text(json.dumps(row))


def _run(rank: int, cls: str, shipped: bool, folder: Path) -> None:
    """One of two ranks: the model as transformers loads it under a plan, against the whole one."""
    from torch.distributed.tensor import DTensor
    from transformers.distributed import DistributedConfig

    where = folder / ("theirs" if shipped else "ours")
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(TP), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(TP))
    store = dist.FileStore(f"{where}.store", TP)
    patience = datetime.timedelta(seconds=40)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=TP, timeout=patience)
    kept = torch.load(folder / "reference.pt", weights_only=False)
    inputs, said_plan, logits, grads, weights, options = kept
    config = DistributedConfig(tp_size=TP, tp_plan="auto" if shipped else said_plan)
    model = getattr(transformers, cls).from_pretrained(folder / "model", distributed_config=config, **options)

    def off(value: Any, want: torch.Tensor, scale: float) -> float:
        value = value.full_tensor() if isinstance(value, DTensor) else value
        return float("inf") if value.shape != want.shape else float((value - want).abs().max()) / scale

    verdict = "right"
    with torch.no_grad():
        misread = [n for n, p in model.named_parameters() if n in weights and off(p, weights[n], 1.0) > 0]
        error = off(loss(model, inputs)[1][0], logits, float(logits.abs().max()))
    if misread:
        verdict = f"wrong: {len(misread)} weights are loaded wrongly, such as {glob(misread[0])}"
    elif not error <= 1e-5:
        verdict = f"wrong: the forward is {error:.1e} off"
    else:
        loss(model, inputs)[0].backward()
        scale = max(float(g.abs().max()) for g in grads.values())
        held = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        errors = {n: off(held[n], g, scale) if n in held else 1.0 for n, g in grads.items()}
        worst = max(errors, key=errors.__getitem__)
        if not errors[worst] <= 1e-5:
            count = sum(not e <= 1e-5 for e in errors.values())
            verdict = f"wrong gradients: {count}, most of {glob(worst)}, {errors[worst]:.1e} off"
    Path(f"{where}.{rank}").write_text(verdict)


def _caught(function: Callable[..., None], failure: Path, *args: Any) -> None:
    torch.set_num_threads(1)
    try:
        function(*args)
    except BaseException as error:
        if not failure.exists():
            failure.write_text(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")


def judge(cls: str, model_type: str) -> Row:
    """The row of one class: compared, and both plans run."""
    fork = multiprocessing.get_context("fork")
    folder = Path(tempfile.mkdtemp(prefix="golden-"))

    def alone(function: Callable[..., None], failure: str, *ranks: tuple[Any, ...]) -> str:
        """Run in processes, until all are done or it takes too long; what failed, if anything."""
        jobs = [fork.Process(target=_caught, args=(function, folder / failure, *args)) for args in ranks]
        for job in jobs:
            job.start()
        until = time.monotonic() + LIMIT
        for job in jobs:
            job.join(max(until - time.monotonic(), 0.1))
        late = any(job.is_alive() for job in jobs)
        for job in jobs:
            if job.is_alive():
                job.kill()
        if (folder / failure).exists():
            return (folder / failure).read_text()
        codes = [job.exitcode for job in jobs if job.exitcode]
        return f"not done after {LIMIT:.0f} s" if late else f"exit code {codes[0]}" if codes else ""

    try:
        row: Row = {"class": cls, "model_type": model_type}
        failed = alone(_examine, "examine.failed", (cls, model_type, folder))
        if failed:
            return {**row, "failed": portable(failed)}
        row |= json.loads((folder / "row.json").read_text())
        for plan in ("theirs", "ours") if "alike" in row else ("ours",) if row["said"] else ():
            failed = alone(
                _run, f"{plan}.failed", *((rank, cls, plan == "theirs", folder) for rank in range(TP))
            )
            verdicts = [f.read_text() for r in range(TP) if (f := folder / f"{plan}.{r}").exists()]
            row[plan] = portable(f"fails: {failed}") if failed or not verdicts else max(verdicts)
        return row
    finally:
        shutil.rmtree(folder)


# --- the page -----------------------------------------------------------------------------------------------


def page(rows: list[Row], versions: str) -> str:
    compared = [r for r in rows if "alike" in r]
    without = [r for r in rows if "alike" not in r and r.get("ships") is False]
    rows = [r for r in rows if r not in without]
    same = [r for r in compared if not r["differ"]]
    lines = [
        "# The plans of transformers, and autotp's",
        "",
        "Generated by `python -m zoo.golden` in tools/; do not edit.",
        "",
        "Every causal-LM class of transformers that comes with a `tp_plan`, tiny (a vocabulary of "
        f"{VOCABULARY} where it can),",
        f"planned by autotp at tp={TP} from its dataflow alone, and compared parameter by parameter with",
        "what transformers' own code does to the model under the shipped plan. Both plans then run in",
        "transformers, over two processes, in float64, forward and backward, against the whole model:",
        "*theirs* as shipped, *ours* as `Plan.to_tp_plan()` writes it.",
        "",
        f"{versions}.",
        "",
        f"- {len(compared)} classes compared, {len(same)} with the same placement of every parameter.",
        f"- Run by transformers: theirs right for {_right(compared, 'theirs')}, ours for "
        f"{_right(compared, 'ours')} of {len(compared)}.",
        f"- Share of the block weights that is sharded, the mean: theirs {_mean(compared, 0)}, "
        f"ours {_mean(compared, 1)}.",
        f"- {len(rows) - len(compared)} classes could not be compared: the table says why.",
        f"- {len(without)} classes come with no plan; `Plan.to_tp_plan()` runs right in transformers for "
        f"{_right(without, 'ours')} of the {sum('ours' in r for r in without)} that could be tried.",
        "",
        "| difference | classes | parameters |",
        "|---|---|---|",
    ]
    kinds: dict[str, Counter[str]] = {}
    for row in compared:
        for _, theirs, ours, why, count in row["differ"]:
            kinds.setdefault(_kind(theirs, ours, why), Counter())[row["class"]] += count
    for kind, where in sorted(kinds.items(), key=lambda item: -len(item[1])):
        lines.append(f"| {kind} | {len(where)} | {sum(where.values())} |")
    unmatched = [r for r in compared if r["unmatched"]]
    lines += [
        "",
        f"{len(unmatched)} of the shipped plans have rules that match nothing in the model as built here (a",
        "plan may cover variants of a model). A gathering style (`colwise_gather_output`) shards the weight",
        "and makes the output whole again, so what follows is computed on every rank.",
        "",
        "| class | alike | differ | sharded, theirs / ours | theirs runs | ours runs |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        if "alike" not in row:
            continue
        theirs, ours = row["sharded"]
        lines.append(
            f"| {row['class']} | {row['alike']} | {row['parameters'] - row['alike']} | "
            f"{theirs:.0%} / {ours:.0%} | {row['theirs']} | {row['ours']} |"
        )
    for row in [r for r in rows if "alike" not in r]:
        lines.append(f"| {row['class']} | | | | {row.get('failed', '')[:160].replace('|', '/')} | |")
    if without:
        lines += [
            "",
            "## Classes that come with none",
            "",
            "Of the parameters that autotp shards, how many styles can say; what is left out stays whole.",
            "",
            "| class | sharded | said | runs | left out because |",
            "|---|---|---|---|---|",
        ]
    for row in without:
        why = " / ".join(row.get("left_out", [])[:2]) or row.get("failed", "")[:160].replace("|", "/")
        counts = f"{row.get('cut', '')} | {row.get('said', '')}"
        lines.append(f"| {row['class']} | {counts} | {row.get('ours', '')} | {why} |")
    lines += ["", "## What differs", ""]
    for row in compared:
        if not (row["differ"] or row["unmatched"]):
            continue
        lines += [f"**{row['class']}**", ""]
        grouped: dict[tuple[str, str, str], list[str]] = {}
        for name, theirs, ours, why, _ in row["differ"]:
            grouped.setdefault((theirs, ours, why), []).append(f"`{name}`")
        for (theirs, ours, why), names in grouped.items():
            lines.append(f"- {', '.join(names)}: theirs {theirs}; ours {ours} ({why})")
        if row["gathered"]:
            lines.append(f"- theirs gathers after {', '.join(f'`{n}`' for n in row['gathered'])}")
        if row["unmatched"]:
            lines.append(f"- theirs matches nothing: {', '.join(f'`{n}`' for n in row['unmatched'])}")
        lines += [f"- ours, not in styles: {why}" for why in row["left_out"]]
        lines.append("")
    return "\n".join(lines) + "\n"


def _kind(theirs: str, ours: str, why: str) -> str:
    if theirs == "whole":
        return f"ours shards it, theirs does not ({why})"
    if ours == "whole":
        return f"theirs shards it, ours does not ({re.sub(r'[^ ]*[.][*][^ ]*:', '…:', why)[:140]})"
    return f"both shard it, otherwise ({why})"


def _right(rows: list[Row], whose: str) -> int:
    return sum(row.get(whose) == "right" for row in rows)


def _mean(rows: list[Row], which: int) -> str:
    return f"{sum(row['sharded'][which] for row in rows) / max(len(rows), 1):.0%}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", default="", help="only these classes, comma separated; done again")
    parser.add_argument("--all", action="store_true", help="the classes without a plan of their own as well")
    parser.add_argument("--page", action="store_true", help="only write the page from the rows there are")
    given = parser.parse_args(arguments)
    rows: dict[str, Row] = {}
    if RESULTS.exists():
        rows = {row["class"]: row for row in map(json.loads, RESULTS.read_text().splitlines())}
    only = set(filter(None, given.only.split(",")))
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for cls, model_type in () if given.page else tiny.archs("causal-lm"):
        made = getattr(transformers, cls)
        ships = getattr(made, "_tp_plan", None) or getattr(made.config_class, "base_model_tp_plan", None)
        if (cls in only) if only else (cls not in rows and (ships or given.all)):
            row = rows[cls] = {**judge(cls, model_type), "ships": bool(ships)}
            RESULTS.write_text("".join(json.dumps(rows[c]) + "\n" for c in sorted(rows)))
            print(cls, row.get("alike"), row.get("parameters"), row.get("theirs"), "|", row.get("ours"),
                  row.get("failed", ""), flush=True)  # fmt: skip
    versions = f"torch {torch.__version__.split('+')[0]}, transformers {transformers.__version__}"
    PAGE.write_text(page([rows[c] for c in sorted(rows)], f"{versions}, {datetime.date.today()}"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
