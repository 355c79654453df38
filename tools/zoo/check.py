"""One architecture, checked: whole against split at tp=2 and tp=4. `check` gives a row of the table."""

from __future__ import annotations

import copy
import functools
import math
import re
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import autotp
from autotp.comm import Comm, simulate
from autotp.errors import AutotpError, CaptureError
from autotp.inputs import best_inputs
from autotp.plan import Plan
from autotp.rewrite import rewrite
from autotp.verify import TOLERANCE, relative_error, tensors

from . import tiny

DEGREES = (2, 4)
ENOUGH = 0.9  # of the block weights sharded
Row = dict[str, Any]


def check(cls: str, model_type: str, say: Callable[[str], None] = lambda what: None) -> Row:
    """The row of one class. Its `outcome` is the worst of the degrees':

    ok: all equal, and at least 90 % of the block weights sharded. partly: all equal. refused: an error before
    anything ran. wrong: a figure differs. crash: an error that is not autotp's, or one only the first forward
    shows. baseline: the whole model is not built, or does not run (`why`); nothing is said of autotp then.
    """
    began = time.monotonic()
    say("building")
    row: Row = {"class": cls, "model_type": model_type}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model, inputs, how = built(cls, model_type)
    except Exception as error:
        return {**row, "outcome": "baseline", "why": portable(str(error))[:600], "seconds": since(began)}
    dtype = next(p.dtype for p in model.parameters())
    row |= {
        "parameters": sum(p.numel() for p in model.parameters()),
        "dtype": str(dtype).removeprefix("torch."),
        "built": how,
        "inputs": {k: list(v.shape) for k, v in inputs.items() if isinstance(v, torch.Tensor)},
    }
    masked, why_not = with_padding(model, inputs)
    for tp in DEGREES:
        row[f"tp{tp}"] = degree = _at(
            model, inputs, masked, tp, functools.partial(_prefixed, say, f"tp={tp}: ")
        )
        if why_not and degree["outcome"] in ("ok", "partly"):
            degree["padded"] = why_not
    worst = max((row[f"tp{tp}"] for tp in DEGREES), key=lambda d: ORDER.index(d["outcome"]))
    row |= {"outcome": worst["outcome"], "why": worst.get("why", ""), "seconds": since(began)}
    return row


def portable(text: str) -> str:
    """The text with paths as they are on any machine."""
    return re.sub(r"/[^\s:()]*/(?:site-packages/|tools/|(?=autotp/))", "", text)


def _prefixed(say: Callable[[str], None], prefix: str, what: str) -> None:
    say(prefix + what)


ORDER = ("ok", "partly", "baseline", "refused", "slow", "crash", "hang", "wrong")  # from good to bad


def since(began: float) -> float:
    return round(time.monotonic() - began, 1)


def built(cls: str, model_type: str) -> tuple[nn.Module, Row, str]:
    """The first way to build the class that gives a model whose forward gives finite numbers, the same
    twice."""
    failed: dict[str, str] = {}
    for dtype in (torch.float64, torch.float32):
        for how in ("anew", "set"):
            try:
                model = tiny.build(cls, model_type, how, dtype)
                inputs = best_inputs(model)
                first, second = _outputs(model, inputs), _outputs(model, inputs)
                if not first or not all(torch.isfinite(t).all() for t in first):
                    raise ValueError("its output is not finite")
                if not all(torch.equal(a, b) for a, b in zip(first, second, strict=True)):
                    raise ValueError("its output differs from run to run")
                return model, inputs, how
            except Exception as error:
                failed.setdefault(
                    f"{type(error).__name__}: {str(error)[:250]} at {_last(error)}", f"{how}, {dtype}"
                )
    raise ValueError(" | ".join(f"{why} ({where})" for why, where in failed.items()))


def _outputs(model: nn.Module, inputs: Row) -> list[torch.Tensor]:
    torch.manual_seed(0)
    with torch.no_grad():
        return [t for t in tensors(model(**inputs)) if t.is_floating_point()]


def with_padding(model: nn.Module, inputs: Row) -> tuple[Row | None, str]:
    """The inputs with the first row padded, on the left where the model itself can; else why there are
    none."""
    import inspect

    ids = inputs.get("input_ids")
    if ids is None or "attention_mask" not in inspect.signature(model.forward).parameters:
        return None, "takes no mask of tokens"
    for side in ("left", "right"):
        mask = torch.ones_like(ids)
        mask[0, slice(0, 3) if side == "left" else slice(-3, None)] = 0
        try:
            if all(torch.isfinite(t).all() for t in _outputs(model, {**inputs, "attention_mask": mask})):
                return {**inputs, "attention_mask": mask}, ""
        except Exception:
            continue
    return None, "the model itself gives no finite numbers with padding"


def _at(model: nn.Module, inputs: Row, masked: Row | None, tp: int, say: Callable[[str], None]) -> Row:
    began = time.monotonic()
    phase = ["planning"]

    def progress(what: str) -> None:
        phase[0] = what
        say(what)

    try:
        report = _verified(model, inputs, tp, progress)
    except Exception as error:
        return {**failure(error, phase[0]), "seconds": since(began)}
    plan = report.plan
    errors = {c.name: float(f"{c.error:.2g}") for c in report.checks}
    wrong = [f"{c.name}: {c.error:.1e} (limit {c.limit:.0e}) {c.detail}" for c in report.checks if not c.ok]
    if masked is not None:
        progress("padded")
        try:
            worst, limit = _padded(model, masked, plan)
        except Exception as caught:
            return {
                **failure(caught, "running padded"),
                "captured": True,
                "sharded": round(plan.sharded_fraction, 4),
            }
        errors["padded"] = float(f"{worst:.2g}")
        if worst > limit:
            wrong.append(f"padded: {worst:.1e} (limit {limit:.0e})")
    found: Row = {"captured": True, "sharded": round(plan.sharded_fraction, 4), "errors": errors}
    if wrong:
        found |= {"outcome": "wrong", "why": "; ".join(wrong)}
    elif plan.sharded_fraction < ENOUGH:
        found |= {"outcome": "partly", "why": _reasons(plan)}
    else:
        found["outcome"] = "ok"
    return {**found, "seconds": since(began)}


def _verified(model: nn.Module, inputs: Row, tp: int, progress: Callable[[str], None]) -> Any:
    """The report, with as much as the model itself can do: a step, generation."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        phase = [""]

        def noted(what: str) -> None:
            phase[0] = what
            progress(what)

        steps = 1 if _has_gradients(model, inputs) else 0
        for count in (4, 0):
            try:
                return autotp.verify(
                    model, tp=tp, example_inputs=inputs, progress=noted, steps=steps, new_tokens=count
                )
            except Exception:
                if phase[0] != "running the whole model" or not count:
                    raise


def _has_gradients(model: nn.Module, inputs: Row) -> bool:
    """Whether the whole model trains: some have no backward (in eval mode), or one that gives NaN."""
    trial = copy.deepcopy(model)  # some keep what they computed
    try:
        losses = [t.double().pow(2).mean() for t in tensors(trial(**inputs)) if t.requires_grad]
        torch.stack(losses).sum().backward()
    except Exception:
        return False
    return all(bool(torch.isfinite(p.grad).all()) for p in trial.parameters() if p.grad is not None)


def _padded(model: nn.Module, masked: Row, plan: Plan) -> tuple[float, float]:
    """(the largest error of a forward with padding under a plan made without, its limit)."""
    want = _outputs(model, masked)

    def one(comm: Comm) -> list[torch.Tensor]:
        local = copy.deepcopy(model)
        rewrite(local, plan, comm)
        with torch.no_grad():
            return [t for t in tensors(local(**masked)) if t.is_floating_point()]

    ranks = simulate(plan.tp, one)
    if any(len(rank) != len(want) for rank in ranks):
        return float("inf"), 0.0
    errors = [relative_error(got, t) for rank in ranks for got, t in zip(rank, want, strict=True)]
    return max(errors), TOLERANCE.get(getattr(torch, plan.precision), 1e-5)


def failure(error: BaseException, phase: str) -> Row:
    """refused: autotp's own error before any rank ran a forward. A model that does not generate or train is
    no fault."""
    if phase == "running the whole model":
        return {
            "outcome": "baseline",
            "why": f"{type(error).__name__}: {portable(str(error))[:300]} at {_last(error)}",
        }
    frames = traceback.extract_tb(error.__traceback__)
    running = phase.startswith("running") and not any(f.name == "rewrite" for f in frames)
    refused = isinstance(error, (AutotpError, NotImplementedError)) and not running
    return {
        "outcome": "refused" if refused else "crash",
        "captured": not isinstance(error, CaptureError),
        "why": f"{phase}: {type(error).__name__}: {portable(str(error))[:500]} at {_last(error)}",
    }


def _last(error: BaseException) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{'/'.join(frame.filename.split('/')[-2:])}:{frame.lineno}"


def _reasons(plan: Plan) -> str:
    """Why block weights stayed whole, the reason of most of them first."""
    count: dict[str, int] = {}
    for name, why in plan.kept.items():
        held = plan.params.get(name)
        if held is not None and held.block:
            reason = _decisive(why)
            count[reason] = count.get(reason, 0) + math.prod(held.shape)
    total = sum(count.values()) or 1
    top = sorted(count.items(), key=lambda pair: -pair[1])[:3]
    return " | ".join(f"{size / total:.0%}: {portable(why)[:300]}" for why, size in top) or (
        "parts of the sharded weights are held by every rank"
    )


def _decisive(why: str) -> str:
    """Of the reasons why each axis of a weight is not sharded, those that are not merely its price."""
    parts = re.split(r"; (?=axis of )", why)
    return "; ".join([p for p in parts if " collectives for " not in p] or parts)
