"""The front doors: `parallelize` and what goes with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .advice import warn_replicated, warn_unexamined
from .coded import adopted
from .comm import Comm, ThreadComm
from .data_parallel import keep_copies_alike
from .degrees import Degree, chosen
from .errors import AutotpError, CaptureError, PlanError
from .generation import refuse_resize, synchronise_generation, synchronise_rng
from .kept_plans import folder, keep, recall
from .mesh import Mesh, attach
from .pipeline.absent import QuietComm
from .pipeline.channel import channel
from .pipeline.install import install
from .pipeline.units import find_units
from .plan import Plan
from .plan_key import plan_key
from .planner import plan_and_analysis
from .rewrite import rewrite
from .rules import OwnRules
from .same import SameBatch, agree, same_weights
from .save import install_save
from .state import ShardState, refuse_ddp, refuse_partial_saves


def parallelize(
    model: nn.Module,
    tp: Degree | None = None,
    pp: Degree = 1,
    dp: Degree = 1,
    ep: int = 1,
    *,
    stages: Sequence[str] | int | None = None,
    zero: int = 0,
    policy: Any = None,
    strict: bool = False,
    workload: Mapping[str, Any] | None = None,
    example_inputs: Any = None,
    rules: OwnRules = None,
    comm: Comm | Mesh | None = None,
) -> nn.Module:
    """Rewrite `model` in place to run over `dp * pp * tp` processes, and return it: the same object, split.

    model: any nn.Module, the same on every rank. tp: number of tensor-parallel ranks (None: all processes
    that pp and dp leave). pp: number of pipeline stages; each rank holds its stage's parameters and caches
    only. Call the model, or its `generate`, on every rank without gradients, with the same inputs: every
    rank gets the whole output. Train with `train_step`. stages: the first unit of every stage but the first,
    as module paths (None: stages that cost alike); or the number of stages, several for each rank.
    dp: number of copies that train on different data (`data_rank` tells which). After `loss.backward()` every
    copy has the mean of their gradients, each copy's loss counting alike, as under torch's
    DistributedDataParallel; `no_sync` puts the exchange off while gradients accumulate. zero: what the copies
    share out instead of each holding all of it, by FSDP2: 1 the optimizer's states, 2 the gradients too, 3
    the parameters too. `p` and `p.grad` are then DTensors outside of forward and backward.
    ep: `tp` to split experts by expert: each rank computes the choices that fell on its own, and the results
    are summed. 1 splits every expert's hidden units.
    "auto" for tp, pp or dp: what `autotp.search` finds best for the processes there are. workload: what it
    goes by, as {"batch": 512, "seq": 4096, "mode": "train", "cluster": "dgx-h100"}; all have defaults.
    policy: path of a policy YAML, a dict of that form, or a transformers `tp_plan`; none is needed.
    strict: raise instead of warning where block weights stay replicated.
    example_inputs: dict or tuple for `model.forward`; made from its signature and config when not given.
    rules: for operations and modules that autotp does not know, functions with `@autotp.rule(...)` on them.
    comm: the tensor-parallel ranks, or the whole mesh, when they are not the processes of torch.distributed
    (tests, simulations).

    Uses the running process group, else starts one from torchrun's environment (NCCL with GPUs, gloo
    without). Every rank must call it. Nothing is changed unless every rank made the same plan.

    Raises LaunchError (not under torchrun, tp does not fit), CaptureError, PlanError, PolicyError, and
    RankError where another rank failed or the ranks' models differ.
    """
    if not isinstance(model, nn.Module) or isinstance(model, torch.jit.ScriptModule):
        kind = type(model).__name__
        raise CaptureError(f"{kind} is no torch.nn.Module with a forward in Python: give the model itself.")
    if "auto" in (tp, pp, dp):
        everyone = comm if isinstance(comm, Comm) else comm.world if comm is not None else attach().world
        best = chosen(model, {"tp": tp, "pp": pp, "dp": dp}, everyone, workload)
        tp, pp, dp = best["tp"], best["pp"], best["dp"]
    elif workload is not None:
        raise PlanError('workload is what "auto" degrees are chosen by, and none is: give tp="auto".')
    mesh = mesh_over(comm, tp, pp, dp)  # type: ignore[arg-type]  # no "auto" is left
    blocks = split_model(
        model,
        mesh,
        ep,
        stages=stages,
        zero=zero,
        policy=policy,
        strict=strict,
        example_inputs=example_inputs,
        rules=rules,
    )
    if mesh.dp.size > 1:
        keep_copies_alike(model, mesh, zero, blocks)
    return model


def split_model(
    model: nn.Module,
    mesh: Mesh,
    ep: int = 1,
    *,
    stages: Sequence[str] | int | None = None,
    zero: int = 0,
    policy: Any = None,
    strict: bool = False,
    example_inputs: Any = None,
    rules: OwnRules = None,
) -> list[str]:
    """`parallelize` on `mesh`, but for what keeps copies of the model alike, which takes real tensors
    (`keep_copies_alike`, afterwards). Returns the modules that copies share out as a whole under `zero`."""
    ranks: Comm = mesh.tp if mesh.pp.size == 1 or mesh.tp.size == 1 else QuietComm(mesh.tp)
    count, cuts = _stage_count(mesh.pp.size, stages)
    if zero not in range(4) or (zero and mesh.dp.size == 1):
        raise PlanError(f"zero={zero} with dp={mesh.dp.size}: zero is 0, 1, 2 or 3, and shares out what "
                        "copies of the model hold; it needs dp of 2 or more.")
    if getattr(model, "autotp", None) is not None:
        raise PlanError("this model is parallelized already: build it anew to split it differently.")
    outcome: str | BaseException
    decided = None
    try:
        # With zero, the blocks are wanted too; what a caller gives may be anything: no key is made of it.
        plain = not zero and policy is None and example_inputs is None and rules is None
        asked = {"tp": ranks.size, "ep": ep, "pp": count, "stages": cuts}
        key = plan_key(adopted(model), **asked) if plain and folder() is not None else None
        decided = recall(key)
        blocks = []
        if decided is None:
            given: dict[str, Any] = {"example_inputs": example_inputs, "rules": rules}
            decided, found = plan_and_analysis(
                model, ranks.size, policy, ep=ep, pp=count, stages=cuts, **given
            )
            blocks = [unit.path for unit in find_units(found.captured)[0]] if zero else []
            del found
            keep(key, decided)
        if ranks.size > 1 and not any(p.layout for p in decided.params.values()):
            raise PlanError(_nothing_split(decided))
        if ranks.size > 1 and (mesh.world.rank == 0 or strict):
            warn_replicated(decided, strict)
            warn_unexamined(decided)
        outcome = _for_comparison(decided)
    except Exception as error:  # of any kind: the other ranks must hear of it
        outcome = error
    if mesh.world.size == 1 and isinstance(outcome, BaseException):
        raise outcome
    try:
        agree(mesh.world, outcome)
    except AutotpError as error:
        raise (outcome if isinstance(outcome, BaseException) else error) from None
    assert decided is not None
    same_weights(model, mesh.world)
    line = channel(mesh.pp) if mesh.pp.size > 1 else None
    outcome = "rewritten"
    try:
        rewrite(model, decided, ranks)
        state: ShardState = model.autotp  # type: ignore[assignment]
        state.mesh = mesh
        if decided.stages is not None and line is not None:
            state.pipeline = install(model, decided.stages, mesh.pp.rank, mesh.pp.size, line, str(mesh))
    except Exception as error:  # out of memory, say: the others must not wait for this rank
        outcome = error
    try:
        agree(mesh.world, outcome)
    except AutotpError as error:
        raise (outcome if isinstance(outcome, BaseException) else error) from None
    if mesh.copy.size > 1 or zero:
        refuse_partial_saves(model)
        install_save(model)
    if ranks.size > 1:
        model.register_forward_pre_hook(SameBatch(ranks), with_kwargs=True)
        synchronise_rng(model, ranks)
    if mesh.copy.size > 1:
        synchronise_generation(model, mesh.copy)
        refuse_resize(model)
        refuse_ddp(model)
    return blocks


def mesh_over(comm: Comm | Mesh | None, tp: int | None, pp: int, dp: int) -> Mesh:
    """The mesh to work on: the given one, one over the given ranks, or that of this process."""
    if comm is None:
        return attach(tp, pp, dp)
    mesh = comm if isinstance(comm, Mesh) else None
    if mesh is None and isinstance(comm, ThreadComm) and pp * dp > 1:
        mesh = Mesh.split(comm, tp or comm.size // (pp * dp), pp, dp)
    mesh = mesh or Mesh.of(comm)  # type: ignore[arg-type]
    if tp is not None and mesh.tp.size != tp:
        raise PlanError(f"tp={tp}, but there are {mesh.tp.size} ranks.")
    if pp not in (1, mesh.pp.size):
        raise PlanError(f"pp={pp}, but there are {mesh.pp.size} stages in the mesh.")
    if dp not in (1, mesh.dp.size):
        raise PlanError(f"dp={dp}, but there are {mesh.dp.size} copies in the mesh.")
    return mesh


def _stage_count(pp: int, stages: Sequence[str] | int | None) -> tuple[int, Sequence[str] | None]:
    """How many stages there are, and where they are cut if that is stated."""
    if stages is None:
        return pp, None
    if not isinstance(stages, (int, str, list, tuple)) or isinstance(stages, bool):
        raise PlanError(
            f"stages={stages!r}: give a number of stages, or the names of the units with which stages 2, 3, "
            "and so on begin (`autotp dump --pp 2` lists them)."
        )
    count = stages if isinstance(stages, int) else pp if isinstance(stages, str) else len(stages) + 1
    if count % pp or count < pp:
        given = f"{count} stages" if isinstance(stages, int) else f"the {count - 1} cuts in stages"
        raise PlanError(
            f"pp={pp} with {given}: every rank takes the same number of stages; state {pp - 1} cuts."
        )
    return count, None if isinstance(stages, int) else stages


def _for_comparison(plan: Plan) -> str:
    """The plan as lines of which the first that differs tells most, for `agree`."""
    params = [f"{name} {list(p.shape)}, {p.placement}" for name, p in plan.params.items()]
    cuts = plan.stages.lines() if plan.stages is not None else []
    return "\n".join([plan.model, f"tp={plan.tp}", *params, *cuts, f"a plan of digest {plan.digest}"])


def _nothing_split(plan: Plan) -> str:
    reasons = [f"  {name}: {why}" for name, why in list(plan.kept.items())[:8]]
    smaller = "; a smaller tp may" if plan.tp > 2 else ""
    return f"tp={plan.tp} splits nothing of {plan.model}{smaller}. Why:\n" + "\n".join(reasons)
