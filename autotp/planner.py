"""From a model to a `Plan`: capture, propagate, choose, place, realise, solve, and check against a second
capture.

What can't be realised for an axis is a reason not to choose it: then the planner chooses again without it.
It never patches over a doubt. So the loop ends with a plan in which every axis that is sharded is proven,
and a reason for each that is not.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from .agreement import allowed_by, disagreement
from .alone import split_alone_in
from .axes import Axis, leaves
from .capture import CapturedGraph, record, undisturbed
from .choose import Choice, choose
from .coded import adopted
from .data_ways import everywhere
from .errors import AutotpError, CaptureError, PlanError, PolicyError
from .experts import Experts, exchanges, find_experts, set_apart
from .flow import Flow
from .foreign import Hooked, doubts, hooks_of, parts_kept
from .graph import GraphIndex, describe
from .inputs import bind_inputs, improved
from .inputs import example_inputs as make_inputs
from .kinds import layer_kind, parallel_kind
from .lowering import to_plan
from .modalities import elements_used
from .outputs import unasked
from .pipeline.cut import cut
from .pipeline.stages import Stages
from .place import Placement, place
from .plan import Plan, alike_everywhere
from .policy import BoundPolicy, Policy, load
from .propagate import propagate
from .realise import Realised, realise
from .recapture import Checked, check_plan, hollow
from .rules import OwnRules, rules_by_target
from .solve import Solution, solve
from .tp_plan import in_styles
from .ways import Ways, other_ways


@dataclass
class Analysis:
    """Everything the planner found out on the way: for dumps, policies and the curious."""

    captured: CapturedGraph
    index: GraphIndex
    choice: Choice
    placement: Placement
    realised: Realised
    solutions: list[Solution]  # per rank
    policy: BoundPolicy
    experts: tuple[Experts, ...] = ()  # modules of experts that are split by expert
    alone: frozenset[str] | None = None  # the modules to split alone; None: those that are worth it


def analyse(
    model: nn.Module,
    tp: int,
    inputs: Mapping[str, Any] | None = None,
    policy: Policy | None = None,
    hooked: Hooked | None = None,
    rules: OwnRules = None,
) -> Analysis:
    """Choose axes for `model` over `tp` ranks; a policy may refuse some. `hooked`: users' hooks to respect.
    `rules`: the caller's own, see `autotp.rule`.

    Raises CaptureError where the model can't be recorded.
    """
    own = rules_by_target(rules)
    leaves = [target for target in own if isinstance(target, type) and issubclass(target, nn.Module)]
    captured = record(model, inputs if inputs is not None else make_inputs(model), leaves)
    index = GraphIndex(captured, propagate(captured, own))
    return decide(index, tp, (policy or Policy()).bind(index, tp), {}, hooked or Hooked())


def decide(
    index: GraphIndex,
    tp: int,
    policy: BoundPolicy,
    refused: dict[Axis, str],
    hooked: Hooked,
    by_expert: bool = False,
) -> Analysis:
    """Choose axes other than the `refused` ones (which grow by those that turn out to be impossible).

    by_expert: split experts by expert. PlanError where they can't be.
    """
    experts = find_experts(index, tp) if by_expert else ()
    refused.update(set_apart(index, experts))

    def allow(axis: Axis, flow: Flow) -> str | None:
        return refused.get(axis) or policy.veto(axis, flow)

    while True:
        choice = choose(index, tp, allow)
        placement = place(index, choice)
        realised = realise(index, placement)
        solutions = _solve_ranks(index, choice, tp)
        problems = [(why, {axis}) for why, axis in placement.problems]
        problems += [(why, _nearest_axes(choice, node, set(axes))) for why, node, axes in realised.problems]
        problems += [(why, set(axes)) for s in solutions for why, axes in s.problems]
        problems += [(why, set(axes)) for why, axes in _unsupported(index, choice, placement)]
        problems += [(why, set(axes)) for why, axes in doubts(index, choice, placement, realised, hooked)]
        given_up = {
            axis: why
            for why, axes in problems
            for axis in (axes or set(choice.flows))
            if axis in choice.flows
        }
        if not given_up:
            if problems:
                raise PlanError(f"no axis explains these problems: {[why for why, _ in problems][:3]}")
            realised.places += exchanges(experts, placement)
            return Analysis(index.captured, index, choice, placement, realised, solutions, policy, experts)
        refused.update(given_up)


def _axes_in(found: Analysis, module: str) -> set[Axis]:
    """The chosen axes that `module` computes with; its parent's where it has none."""
    while module:
        axes = {
            axis
            for axis, flow in found.choice.flows.items()
            if any(f"{n.meta.get('scope')}.".startswith(f"{module}.") for n in flow.inside)
        }
        if axes:
            return axes
        module = module.rpartition(".")[0]
    chosen = found.choice.flows.items()
    return {axis for axis, flow in chosen if any(n.meta.get("scope") == "" for n in flow.inside)}


def _nearest_axes(choice: Choice, node: fx.Node, axes: set[Axis]) -> set[Axis]:
    """The axes to give up for an arrow without a place: its own, or those of the sharded operations it leads
    to."""
    todo, seen = [node], {node}
    while todo and not axes:
        axes = {a for n in todo for a, flow in choice.flows.items() if n in flow.inside}
        todo = [u for n in todo for u in n.users if u not in seen]
        seen.update(todo)
    return axes


def _solve_ranks(index: GraphIndex, choice: Choice, tp: int) -> list[Solution]:
    """The local numbers of every rank; ranks with the same sizes share one solution."""
    solved: dict[tuple[int, ...], Solution] = {}
    found = []
    for rank in range(tp):
        sizes = tuple(split.size(rank) for split in choice.splits.values())
        if sizes not in solved:
            solved[sizes] = solve(index, choice, rank)
        found.append(solved[sizes])
    return found


def _unsupported(
    index: GraphIndex, choice: Choice, placement: Placement
) -> list[tuple[str, frozenset[Axis]]]:
    """Operations inside sharded regions that no layer or arrow can do."""
    found = []
    for arrow in placement.arrows:
        node = arrow.source
        leaf = node.op == "call_module"
        if arrow.kind in ("norm", "var", "std") and not (leaf and layer_kind(index, node) == "norm"):
            found.append(
                (f"{describe(node)}: its statistics over a sharded axis can't be reduced", arrow.axes)
            )
    for node in sorted(placement.inside, key=index.order.__getitem__):  # alike on all ranks
        if node.op == "call_function" and any(
            c.how == "lookup" and set(leaves(c.axis)) & set(choice.flows)
            for c in index.axes.facts[node].contracts
        ):
            if index.looks_up(node) is None:
                axes = frozenset(
                    a for c in index.axes.facts[node].contracts for a in leaves(c.axis) if a in choice.flows
                )
                found.append((f"{describe(node)}: a look-up outside of an nn.Embedding", axes))
        if node.op == "call_module" and parallel_kind(index, choice, node) == "other":
            kind = type(index.captured.skeleton.get_submodule(str(node.target))).__name__
            axes = frozenset(a for a, flow in choice.flows.items() if node in flow.inside)
            found.append((f"{describe(node)}: no parallel form of {kind}", axes))
    return found


def plan(
    model: nn.Module,
    tp: int,
    policy: Any = None,
    *,
    ep: int = 1,
    pp: int = 1,
    stages: Sequence[str] | None = None,
    example_inputs: Any = None,
    check: bool = True,
    rules: OwnRules = None,
) -> Plan:
    """Plan `model` over `pp` pipeline stages of `tp` tensor-parallel ranks. Needs no process group, no GPU
    and no weights (meta is fine).

    policy: path of a policy YAML, a dict of that form, a transformers `tp_plan`, or a list of these (later
    ones win).
    ep: `tp` to split experts by expert (each rank holds some of them, whole), 1 to split their hidden units.
    stages: the cut by hand, as the paths of the first module of each stage but the first (`pp - 1` of them);
    without it the stages cost alike.
    example_inputs: dict or tuple for `model.forward`; made from its signature and config when not given.
    check: capture the rewritten model too, and compare (`recapture`).
    rules: for operations and modules that autotp does not know, functions with `@autotp.rule(...)` on them.
    Raises CaptureError, PlanError, PolicyError. What stays replicated is in `Plan.kept`, with reasons.
    """
    options: dict[str, Any] = {"ep": ep, "example_inputs": example_inputs, "check": check, "rules": rules}
    return plan_and_analysis(model, tp, policy, pp=pp, stages=stages, **options)[0]


@undisturbed()
def plan_and_analysis(
    model: nn.Module,
    tp: int,
    policy: Any = None,
    *,
    ep: int = 1,
    pp: int = 1,
    stages: Sequence[str] | None = None,
    example_inputs: Any = None,
    check: bool = True,
    rules: OwnRules = None,
) -> tuple[Plan, Analysis]:
    """`plan`, and all that was found out on the way."""
    if not isinstance(tp, int) or tp < 1:
        raise PlanError(f"tp={tp!r}: give a number of ranks of at least 1.")
    if ep not in (1, tp):
        raise PlanError(
            f"ep={ep} with tp={tp}: experts are split over all tensor-parallel ranks, so ep is tp or 1."
        )
    if not isinstance(model, nn.Module):
        given = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise PlanError(f"{given} was given; give the model itself, an instance of torch.nn.Module.")
    model = adopted(model)
    quiet = hollow(model).eval()  # dropout and layer drop would make the graph a matter of chance
    inputs = unasked(quiet, given_inputs(quiet, example_inputs))
    # What trains may change, and inputs may come with gradients: the plan is right for all of it.
    for p in quiet.parameters():
        p.requires_grad_(p.is_floating_point() or p.is_complex())
    hooked = hooks_of(model)
    found = _analyse_fully(quiet, tp, inputs, load(policy), hooked, rules, given=example_inputs is not None)
    staged = _staged(found, pp, stages)
    refused: dict[Axis, str] = {}
    if ep > 1 or found.policy.by_expert:
        found = decide(found.index, tp, found.policy, refused, hooked, by_expert=True)
    while True:
        result = replace(to_plan(model, found, tp), stages=staged)
        found.policy.check(result, found.index)
        if not check or tp == 1:
            return _in_styles(result, found, model), found
        try:
            checked = check_plan(quiet, result, found)
            ways = _check_ways(model, quiet, result, found, hooked, checked)
            unseen = ways.unseen
            unseen += parts_kept(found.index, found.choice, found.placement)
            if checked.unseen is not None:
                unseen.append(f"decoding with a cache: {checked.unseen}")
            result = replace(
                result,
                unexamined=tuple(alike_everywhere(line) for line in unseen),
                assumed=tuple(dict.fromkeys(f"{a.told} at {a.site}" for a in found.captured.assumed)),
                skippable=tuple(everywhere(ways.skipped, found.captured)),
            )
            return _in_styles(result, found, model), found
        except AutotpError as doubt:
            axes = _axes_in(found, doubt.module) if doubt.module is not None else set()
            if split_alone_in(result):
                found = replace(found, alone=frozenset())
                continue
            if not axes:
                raise
            refused.update(dict.fromkeys(axes, str(doubt).splitlines()[0]))
            found = decide(found.index, tp, found.policy, refused, hooked, bool(found.experts))


def _staged(found: Analysis, pp: int, stages: Sequence[str] | None) -> Stages | None:
    """The pipeline's stages, as stated here or in the policy; None for one."""
    if pp == 1 and not stages:
        return None
    stated, where = found.policy.stages
    if stages is not None or stated is None:
        return cut(found.captured, pp, stages=stages)
    try:
        return cut(found.captured, pp, stages=stated)
    except PlanError as error:
        raise PolicyError(f"{where}: {error}") from None


def _in_styles(result: Plan, found: Analysis, model: nn.Module) -> Plan:
    said = in_styles(found, result.params, result.tp, getattr(model, "tp_plan", None))
    return replace(result, styles=said)


def _check_ways(
    model: nn.Module, quiet: nn.Module, result: Plan, found: Analysis, hooked: Hooked, checked: Checked
) -> Ways:
    """Where training or other sizes take another way, the plan made of that must be this plan; else
    PlanError."""
    ways = other_ways(quiet, result, found, checked)
    alone = split_alone_in(result)
    for way in ways.differing:
        where, what = next(iter(way.differs.items()))
        told = f"{where or 'the model'}: {way.when} {what}"
        try:
            refused = allowed_by(result, way.index)
            unbound = Policy().bind(way.index, result.tp)
            decided = decide(way.index, result.tp, unbound, refused, hooked, bool(found.experts))
            other = to_plan(model, replace(decided, alone=alone), result.tp)
            wrong = disagreement(result, other, way.index)
        except AutotpError as error:
            raise PlanError(f"{told}, and no plan for that is found: {error}").at(where) from error
        if wrong is not None:
            raise PlanError(f"{told}, and a plan for that would be another: {wrong}").at(where)
    return ways


def _analyse_fully(
    model: nn.Module,
    tp: int,
    inputs: dict[str, Any],
    policy: Policy,
    hooked: Hooked,
    rules: OwnRules,
    given: bool,
) -> Analysis:
    """`_analyse_masked`; with other inputs, unless they were `given`, where the model can't be recorded with
    these or they leave weights unused."""
    try:
        found = _analyse_masked(model, tp, inputs, policy, hooked, rules)
        reached = elements_used(found.captured)
    except CaptureError:
        better = inputs if given else improved(model, inputs, -1)
        if better is inputs:
            raise
        return _analyse_masked(model, tp, better, policy, hooked, rules)
    whole = sum(p.numel() for p in model.parameters())
    better = inputs if given or reached == whole else improved(model, inputs, reached)
    return found if better is inputs else _analyse_masked(model, tp, better, policy, hooked, rules)


def _analyse_masked(
    model: nn.Module, tp: int, inputs: dict[str, Any], policy: Policy, hooked: Hooked, rules: OwnRules
) -> Analysis:
    """`analyse`, with a padding mask where the model takes one and none is given.

    Attention without a mask may leave out what attention with one does (repeat the key heads, as often as an
    attribute says); what runs with a mask runs without.
    """
    inputs = {k: _with_gradient(v) for k, v in inputs.items()}
    ids = inputs.get("input_ids")
    takes_mask = "attention_mask" in inspect.signature(model.forward).parameters
    has_mask = inputs.get("attention_mask") is not None
    if takes_mask and not has_mask and isinstance(ids, torch.Tensor) and ids.ndim == 2:
        try:
            masked = {**inputs, "attention_mask": torch.ones_like(ids)}
            return analyse(model, tp, masked, policy, hooked, rules)
        except CaptureError:
            pass  # then without
    return analyse(model, tp, inputs, policy, hooked, rules)


def _with_gradient(value: Any) -> Any:
    floating = isinstance(value, torch.Tensor) and value.is_floating_point() and not value.requires_grad
    return value.detach().requires_grad_() if floating else value


def given_inputs(model: nn.Module, given: Any) -> dict[str, Any]:
    """The example inputs as keyword arguments; made from the model where none are given."""
    return make_inputs(model) if given is None else bind_inputs(model, given)


__all__ = [
    "Analysis",
    "analyse",
    "plan",
    "plan_and_analysis",
    "to_plan",
]
