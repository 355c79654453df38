"""The front doors: `parallelize` and what goes with it."""

from __future__ import annotations

import hashlib
import warnings
from typing import Any

import torch
from torch import nn

from .comm import Comm, agree
from .errors import AutotpError, CaptureError, LaunchError, PlanError
from .generation import refuse_resize, synchronise_generation, synchronise_rng
from .mesh import attach
from .plan import Plan
from .planner import plan as make_plan
from .planner import warn_replicated
from .rewrite import rewrite
from .save import install_save
from .state import refuse_partial_saves


def parallelize(
    model: nn.Module,
    tp: int | None = None,
    pp: int = 1,
    dp: int = 1,
    *,
    policy: Any = None,
    strict: bool = False,
    example_inputs: Any = None,
    comm: Comm | None = None,
) -> nn.Module:
    """Rewrite `model` in place to run over `tp` processes, and return it: the same object, split.

    model: any nn.Module, the same on every rank. tp: number of tensor-parallel ranks (None: all processes).
    policy: path of a policy YAML, a dict of that form, or a transformers `tp_plan`; none is needed.
    strict: raise instead of warning where block weights stay replicated.
    example_inputs: dict or tuple for `model.forward`; made from its signature and config when not given.
    comm: the ranks, when they are not the processes of torch.distributed (tests, simulations).

    Uses the running process group, else starts one from torchrun's environment (NCCL with GPUs, gloo
    without). Every rank must call it. Nothing is changed unless every rank made the same plan.

    Raises LaunchError (not under torchrun, tp does not fit), CaptureError, PlanError, PolicyError, and
    RankError where another rank failed or the ranks' models differ.
    """
    if pp != 1 or dp != 1:
        raise PlanError(f"pp={pp}, dp={dp}: this version splits tensors only; use pp=1 and dp=1.")
    if tp is not None and tp < 1:
        raise LaunchError(f"tp={tp}: give the number of processes to split over, at least 1; None takes all.")
    if not isinstance(model, nn.Module) or isinstance(model, torch.jit.ScriptModule):
        kind = type(model).__name__
        raise CaptureError(f"{kind} is no torch.nn.Module with a forward in Python: give the model itself.")
    ranks = comm if comm is not None else attach(tp).tp
    if tp is not None and ranks.size != tp:
        raise PlanError(f"tp={tp}, but there are {ranks.size} ranks.")
    if getattr(model, "autotp", None) is not None:
        raise PlanError("this model is parallelized already: build it anew to split it differently.")
    outcome: str | BaseException
    decided = None
    try:
        decided = make_plan(model, ranks.size, policy, example_inputs=example_inputs)
        if ranks.size > 1 and not any(p.layout for p in decided.params.values()):
            raise PlanError(_nothing_split(decided))
        if ranks.size > 1 and (ranks.rank == 0 or strict):
            warn_replicated(decided, strict)
        outcome = _for_comparison(decided)
    except Exception as error:  # of any kind: the other ranks must hear of it
        outcome = error
    if ranks.size == 1 and isinstance(outcome, BaseException):
        raise outcome
    try:
        agree(ranks, outcome)
    except AutotpError as error:
        raise (outcome if isinstance(outcome, BaseException) else error) from None
    assert decided is not None
    same_weights(model, ranks)
    outcome = "rewritten"
    try:
        rewrite(model, decided, ranks)
    except Exception as error:  # out of memory, say: the others must not wait for this rank
        outcome = error
    try:
        agree(ranks, outcome)
    except AutotpError as error:
        raise (outcome if isinstance(outcome, BaseException) else error) from None
    if ranks.size > 1:
        synchronise_generation(model, ranks)
        synchronise_rng(model, ranks)
        refuse_resize(model)
        refuse_partial_saves(model)
        install_save(model)
    return model


def _for_comparison(plan: Plan) -> str:
    """The plan as lines of which the first that differs tells most, for `agree`."""
    params = [f"{name} {list(p.shape)}, {p.placement}" for name, p in plan.params.items()]
    return "\n".join([plan.model, f"tp={plan.tp}", *params, f"a plan of digest {plan.digest}"])


def _nothing_split(plan: Plan) -> str:
    reasons = [f"  {name}: {why}" for name, why in list(plan.kept.items())[:8]]
    smaller = "; a smaller tp may" if plan.tp > 2 else ""
    return f"tp={plan.tp} splits nothing of {plan.model}{smaller}. Why:\n" + "\n".join(reasons)


def same_weights(model: nn.Module, comm: Comm) -> None:
    """Give every rank rank 0's values where the ranks' models differ (heads initialised with different
    seeds), and say so."""
    if comm.size == 1:
        return
    tensors = {
        n: t for n, t in [*model.named_parameters(), *model.named_buffers()] if t.device.type != "meta"
    }
    told = comm.exchange({name: _fingerprint(t) for name, t in tensors.items()})
    differing = [name for name in tensors if len({prints.get(name) for prints in told}) > 1]
    for name in differing:
        tensor = tensors[name].detach()
        tensor.copy_(comm.broadcast(tensor, 0))
    if differing and comm.rank == 0:
        warnings.warn(
            f"{len(differing)} tensors differed between the ranks (first: {differing[0]}); all ranks now "
            "have rank 0's. "
            "Seed the ranks alike, or load the same checkpoint, to avoid this.",
            stacklevel=3,
        )


def _fingerprint(tensor: torch.Tensor) -> str:
    values = tensor.detach()
    if values.is_floating_point() or values.is_complex():
        # Two sums that depend on values and places: enough to see differently seeded tensors, without moving
        # them.
        flat = torch.view_as_real(values).flatten() if values.is_complex() else values.flatten()
        weights = torch.arange(flat.numel(), device=flat.device) % 8191
        sums = [flat.double().sum(), (flat.double() * weights).sum()]
        return f"{tuple(values.shape)} {values.dtype} {[float(s) for s in sums]}"
    digest = hashlib.sha256(values.cpu().contiguous().numpy().tobytes()).hexdigest()
    return f"{tuple(values.shape)} {values.dtype} {digest[:16]}"
