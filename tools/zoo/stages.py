"""One architecture, checked in stages: whole against pp=2 and tp=2 x pp=2, over simulated ranks."""

from __future__ import annotations

import copy
import functools
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import autotp
from autotp.comm import Comm, simulate
from autotp.errors import AbsentError
from autotp.mesh import Mesh
from autotp.pipeline.absent import QuietComm, is_missing
from autotp.pipeline.channel import channel
from autotp.pipeline.install import install
from autotp.plan import Plan
from autotp.rewrite import rewrite
from autotp.verify import TOLERANCE, relative_error, tensors

from .check import ORDER, Row, built, failure, portable, since, with_padding

MESHES = {"pp2": (1, 2), "tp2pp2": (2, 2)}  # how a row calls it: tp, pp
TOKENS = 4
NOT_GENERATED_WITH = ("decoder_input_ids", "encoder_hidden_states", "use_cache", "labels")


def check_stages(cls: str, model_type: str, say: Callable[[str], None] = lambda what: None) -> Row:
    """The row of one class in stages; its `outcome` is the worst of its meshes':

    ok: outputs, those of a padded batch, and the tokens that it generates are the whole model's on every
    rank. refused: autotp says that there is no such cut or plan, or that a value it would have to read is on
    another stage (`when`: planning or running). wrong, crash, baseline: as in `check`.
    """
    began = time.monotonic()
    say("building")
    row: Row = {"class": cls, "model_type": model_type}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model, inputs, how = built(cls, model_type)
            row["built"] = how
            padded, _ = with_padding(model, inputs)
            _refuse_random(model, inputs)
            generates = _generates(model, inputs)
            want = outcomes(copy.deepcopy(model), inputs, padded, generates)
    except Exception as error:
        return {**row, "outcome": "baseline", "why": portable(str(error))[:600], "seconds": since(began)}
    row["compared"] = list(want)
    for name, (tp, pp) in MESHES.items():
        row[name] = _at(model, inputs, padded, want, tp, pp, functools.partial(_prefixed, say, f"{name}: "))
    worst = max((row[name] for name in MESHES), key=lambda found: ORDER.index(found["outcome"]))
    return {**row, "outcome": worst["outcome"], "why": worst.get("why", ""), "seconds": since(began)}


def _refuse_random(model: nn.Module, inputs: Row) -> None:
    """Ranks simulated in one process share torch's random numbers, which processes have each for themselves:
    ValueError for a model whose outputs hang on them."""
    seen = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        with torch.no_grad():
            seen.append([t for t in tensors(model(**inputs)) if t.is_floating_point()])
    if not all(torch.equal(a, b) for a, b in zip(*seen, strict=True)):
        raise ValueError("its forward draws random numbers, which simulated ranks share")


def _prefixed(say: Callable[[str], None], prefix: str, what: str) -> None:
    say(prefix + what)


def outcomes(model: nn.Module, inputs: Row, padded: Row | None, generates: bool) -> dict[str, Any]:
    """By what was done, its tensors."""
    with torch.no_grad():
        found: dict[str, Any] = {"output": [t.clone() for t in tensors(model(**inputs))]}
        if padded is not None:
            found["padded"] = [t.clone() for t in tensors(model(**padded))]
    if generates:
        found["tokens"] = [_tokens(model, inputs)]
    return found


def _tokens(model: Any, inputs: Row) -> torch.Tensor:
    given = {k: v for k, v in inputs.items() if k not in NOT_GENERATED_WITH}
    return model.generate(**given, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False)


def _generates(model: Any, inputs: Row) -> bool:
    """Whether the whole model generates from its inputs: no such method, or an error, is no fault of ours."""
    try:
        return bool(model.can_generate()) and isinstance(_tokens(copy.deepcopy(model), inputs), torch.Tensor)
    except Exception:
        return False


def _at(
    model: nn.Module, inputs: Row, padded: Row | None, want: Row, tp: int, pp: int, say: Callable[[str], None]
) -> Row:
    began = time.monotonic()
    phase = ["planning"]

    def progress(what: str) -> None:
        phase[0] = what
        say(what)

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            progress("planning")
            plan = autotp.plan(model, tp, pp=pp, example_inputs=inputs)
            progress(f"running over {tp} x {pp} ranks")

            def one(comm: Comm) -> dict[str, Any]:
                return outcomes(_split(model, plan, comm, tp, pp), inputs, padded, "tokens" in want)

            ranks = simulate(tp * pp, one)
    except Exception as error:
        found = failure(error, phase[0])
        if isinstance(error, AbsentError):
            found["outcome"] = "refused"  # before a number came out
        return {**found, "seconds": since(began)}
    assert plan.stages is not None
    limit = TOLERANCE.get(getattr(torch, plan.precision), 1e-5)
    wrong = [f"rank {r}, {said}" for r, got in enumerate(ranks) for said in differences(got, want, limit)]
    outcome = {"outcome": "wrong", "why": "; ".join(wrong)[:500]} if wrong else {"outcome": "ok"}
    shared = {"sharded": round(plan.sharded_fraction, 4)} if tp > 1 else {}
    return {**outcome, **shared, "starts": list(plan.stages.starts), "seconds": since(began)}


def _split(model: nn.Module, plan: Plan, comm: Comm, tp: int, pp: int) -> nn.Module:
    """What `parallelize` makes on one rank, without planning once for each."""
    local = copy.deepcopy(model)
    mesh = Mesh.split(comm, tp, pp)  # type: ignore[arg-type]
    rewrite(local, plan, QuietComm(mesh.tp) if tp > 1 else mesh.tp)
    assert plan.stages is not None
    pipeline = install(local, plan.stages, mesh.pp.rank, pp, channel(mesh.pp), str(mesh))
    local.autotp.mesh, local.autotp.pipeline = mesh, pipeline  # type: ignore[union-attr]
    return local


def differences(got: dict[str, Any], want: dict[str, Any], limit: float) -> list[str]:
    """What differs between a rank's outcomes and the whole model's."""
    found = []
    for name, theirs in want.items():
        ours = got[name]
        if any(map(is_missing, ours)):
            found.append(f"{name}: a tensor is not here")
        elif len(ours) != len(theirs):
            found.append(f"{name}: {len(ours)} tensors, not {len(theirs)}")
        else:
            for a, b in zip(ours, theirs, strict=True):
                error = relative_error(a, b) if b.is_floating_point() else float(not torch.equal(a, b))
                if not error <= limit:
                    found.append(f"{name}: off by {error:.1e}")
                    break
    return found
