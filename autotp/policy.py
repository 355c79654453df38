"""Policies: what a user wants split, and how, checked against the dataflow.

A policy names roles, never collectives. It can choose among what the dataflow allows and cannot make a wrong
plan run:

* `replicate` refuses every axis that would shard the module;
* any other role refuses the axes that would shard the weight on another side, and asks that the plan shards
  it on the role's own; a role that the dataflow finds to be another one is an error;
* a stated layout must agree with the axes found;
* what no rule names is left to the planner.

    policy = load("policies/gpt2.yaml")     # or a dict, a tp_plan, or a list of these: later ones win
    bound = policy.bind(index, tp)          # raises PolicyError where it does not fit the model
    choose(index, tp, bound.veto)           # the planner asks it about every axis
    bound.check(plan, index)                # raises PolicyError where the plan is not what was asked
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from os import PathLike
from typing import Any

from .alone import split_alone_in
from .axes import Axis, leaves, show
from .choose import choose
from .errors import PolicyError
from .flow import Flow
from .graph import GraphIndex
from .match import Structure, structure
from .plan import Plan
from .policy_claims import Claim, Problem, describe_model, find_claims, refuse, selects
from .policy_file import OPTIONS, ROLES, PolicyFile, read
from .stated_layout import agrees

Source = str | PathLike[str] | Mapping[str, Any] | PolicyFile
_SIDES = {"out": "output", "in": "input", "lookup": "rows", "any": "weight"}


@dataclass(frozen=True)
class Policy:
    """Policies in the order they were given; the last one that names a module decides about it."""

    files: tuple[PolicyFile, ...] = ()

    def bind(self, index: GraphIndex, tp: int) -> BoundPolicy:
        """Find the modules that the rules name, and check roles and layouts against the dataflow.

        Raises PolicyError, naming file and line, with all that does not fit.
        """
        model = index.captured.skeleton
        selected = [file for file in self.files if selects(file, model)]
        notes = [
            f"{f.match_where or f.name}: not for this model ({describe_model(model)})"
            for f in self.files
            if f not in selected
        ]
        if self.files and not selected:
            raise PolicyError(
                f"{self.files[-1].match_where}: no policy given is for this model: "
                f"it is {describe_model(model)}. Change `match:`; without it, a policy is for any model."
            )
        claims: dict[str, Claim] = {}
        for file in selected:
            own = find_claims(file, model, notes)
            for name, claim in own.items():
                if name in claims:
                    old = claims[name].rule
                    notes.append(
                        f"{name}: {claim.rule.where} ({claim.rule.role}) wins over {old.where} ({old.role})"
                    )
            claims.update(own)
        options: dict[str, tuple[Any, str]] = {key: (values[0], "") for key, values in OPTIONS.items()}
        for file in selected:
            options.update(file.options)
        notes += [note for file in selected for note in file.notes]
        stages = [file.stages for file in selected if file.stages[0] is not None]
        bound = BoundPolicy(
            index,
            tp,
            tuple(dict.fromkeys(claims.values())),
            options,
            tuple(notes),
            structure(index),
            stages[-1] if stages else (None, ""),
        )
        refuse(bound.misfits())
        return bound


def load(source: Source | Policy | Sequence[Source] | None) -> Policy:
    """Read a policy: the path of a YAML file, a dict of that form, a transformers `tp_plan` dict, or several
    of these.

    Raises PolicyError, naming file and line, where one is malformed. None gives the empty policy: all is
    automatic.
    """
    if source is None or isinstance(source, Policy):
        return source or Policy()
    several: list[Any] = list(source) if isinstance(source, (list, tuple)) else [source]
    return Policy(tuple(one if isinstance(one, PolicyFile) else read(one) for one in several))


@dataclass(frozen=True)
class BoundPolicy:
    """A policy on one captured model. `notes`: what won, which files and patterns were passed over, and
    why. `stages`: where pipeline stages begin, if it says, and the place where it does."""

    index: GraphIndex
    tp: int
    claims: tuple[Claim, ...]
    options: Mapping[str, tuple[Any, str]]
    notes: tuple[str, ...]
    structure: Structure = field(repr=False)
    stages: tuple[tuple[str, ...] | None, str] = (None, "")

    @property
    def roles(self) -> Mapping[str, str]:
        """Module path -> role as the dataflow has it."""
        return self.structure.roles

    @property
    def splits_alone(self) -> bool:
        """Whether weights that no axis shards may be split one by one (`alone.py`)."""
        asked = self.options["alone"][0]
        return asked == "allow" or (asked == "auto" and not self.claims)

    @property
    def by_expert(self) -> bool:
        """Whether experts are to be split by expert, each whole on a rank."""
        return self.tp > 1 and self.options["experts"][0] == "whole"

    @cached_property
    def _of_param(self) -> dict[str, list[Claim]]:
        found: dict[str, list[Claim]] = {}
        for claim in self.claims:
            for name in claim.params:
                found.setdefault(name, []).append(claim)
        return found

    @cached_property
    def _sides(self) -> dict[tuple[str, str], dict[str, frozenset[Axis]]]:
        """(module, parameter) -> the leaves on each side of it, as that module uses it."""
        found: dict[tuple[str, str], dict[str, frozenset[Axis]]] = {}
        for use in self.structure.uses:
            sides = found.setdefault(
                (use.module, use.param), dict.fromkeys(("out", "in", "lookup"), frozenset())
            )
            sides["out"] |= use.made
            sides["in"] |= use.taken
            sides["lookup"] |= use.looked_up
            dims = self.index.axes.params[use.param]
            if len(dims) > 2 and use.node.op == "call_function":  # a stack of experts, picked by number
                experts = frozenset(leaves(dims[0]))
                sides["lookup"], sides["out"] = sides["lookup"] | experts, sides["out"] - experts
        return found

    def _side(self, claim: Claim, name: str) -> frozenset[Axis] | None:
        """The leaves that the claim's role wants sharded; None where any will do."""
        side = ROLES[claim.rule.role or "experts"]
        if side == "any" or self._ndim(name) < 2:
            return None
        return self._sides.get((claim.module, name), {}).get(side)

    def _ndim(self, name: str) -> int:
        return self.index.captured.skeleton.get_parameter(name).ndim

    def misfits(self) -> list[Problem]:
        """What the policy says of the model that is not so."""
        found: list[Problem] = []
        wanted, where = self.options["sequence_parallel"]
        if wanted:
            found.append((None, f"{where}: this version splits no sequences. Set sequence_parallel: false."))
        for claim in self.claims:
            rule, seen = claim.rule, self.roles.get(claim.module)
            if seen is not None and not _may_be(seen, rule.role):
                text = f"{claim.module} is {seen} by its dataflow, not {rule.role}."
                found.append((rule, f"{text} Give it that role, or none."))
                continue
            if rule.layout is not None:
                found += [(rule, text) for text in self._contradictions(claim)]
            for name in claim.params if rule.role not in (None, "replicate") else ():
                if self._side(claim, name) == frozenset():
                    side = _SIDES[ROLES[rule.role or ""]]
                    found.append(
                        (rule, f"{claim.module} can't be {rule.role}: {name} has no {side} to split.")
                    )
        return found

    def _contradictions(self, claim: Claim) -> Iterator[str]:
        assert claim.rule.layout is not None
        side = "in" if ROLES[claim.rule.role or "column"] == "in" else "out"
        heads = {axis for attention in self.structure.attentions for axis in attention.heads}
        for name in claim.params:
            ours = self._sides.get((claim.module, name), {}).get(side, frozenset())
            dims = [d for d in self.index.axes.params.get(name, ()) if set(leaves(d)) & ours]
            if self._ndim(name) > 1 and not any(agrees(claim.rule.layout, dim, heads) for dim in dims):
                found = " or ".join(show(dim) for dim in dims) or "no axis that is used"
                yield (
                    f"the {_SIDES[side]} of {name} is not laid out as {claim.rule.layout.text}: the dataflow "
                    f"finds {found} (a number and a letter: one axis; *: major to minor; |: end to end)."
                )

    def veto(self, axis: Axis, flow: Flow) -> str | None:
        """Why the policy refuses to shard `axis` with the consequences `flow`, or None."""
        uneven, where = self.options["uneven"]
        if uneven == "forbid" and axis.size > self.tp and axis.size % self.tp:
            return f"{where} forbids uneven splits, and {axis.size} is no multiple of {self.tp}"
        kv, where = self.options["kv_replicate"]
        if kv == "forbid" and axis.size < self.tp:
            return f"{where} forbids replicated heads, and {axis.size} are fewer than the {self.tp} ranks"
        for name in sorted(flow.params):
            for claim in self._of_param.get(name, ()):
                if claim.rule.role == "replicate":
                    return f"{claim.rule.where} keeps {name} replicated"
                side = self._side(claim, name)
                if claim.rule.role is not None and side is not None and axis not in side:
                    wanted = _SIDES[ROLES[claim.rule.role]]
                    return f"{claim.rule.where} wants the {wanted} of {name} split, not this axis"
        return None

    def check(self, plan: Plan, index: GraphIndex) -> None:
        """Raise PolicyError where `plan`, made under this policy on `index`, is not what was asked."""
        found = [*self._unsplit(plan), *self._halves(plan, index)]
        uneven, where = self.options["uneven"]
        for name, p in plan.params.items() if uneven == "forbid" else ():
            shapes = {p.local_shape(rank) for rank in range(plan.tp)}
            if len(shapes) > 1:
                found.append(
                    (None, f"{where}: uneven splits are forbidden, and {name} would be {_shapes(shapes)}.")
                )
        refuse(found)

    def _unsplit(self, plan: Plan) -> Iterator[Problem]:
        """Weights that should be sharded and are not."""
        for claim in self.claims if plan.tp > 1 else ():
            if claim.rule.role in (None, "replicate"):
                continue
            for name in claim.params:
                side, layout = self._side(claim, name), plan.params[name].layout
                dims = self.index.axes.params.get(name, ())
                split = layout is not None and any(
                    side is None or set(leaves(dims[d])) & side for d in layout.dims if d < len(dims)
                )
                if self._ndim(name) > 1 and not split and not self._single_head(claim):
                    what = _SIDES[ROLES[claim.rule.role or ""]]
                    why = plan.kept.get(name) or "another axis of it is split"
                    yield (
                        claim.rule,
                        f"{claim.module} can't be {claim.rule.role}: its {what} is not split. {why}.",
                    )

    def _single_head(self, claim: Claim) -> bool:
        """Keys or values of one head that all queries share: every rank holds them whole, if that is
        allowed."""
        if self.options["kv_replicate"][0] == "forbid":
            return False
        for attention in self.structure.attentions:
            uses = [u for u in (*attention.k, *attention.v) if u.module == claim.module]
            if uses and all(u.module != claim.module for u in attention.q):
                return not any(u.made & attention.heads for u in uses)
        return False

    def _halves(self, plan: Plan, index: GraphIndex) -> Iterator[Problem]:
        """Weights that no rule replicates and that stay whole only because what they are paired with is
        replicated."""
        replicated = {n: c for n, cs in self._of_param.items() for c in cs if c.rule.role == "replicate"}
        if not replicated or plan.tp < 2:
            return
        for axis, flow in choose(index, plan.tp).flows.items():
            named = [replicated[name] for name in sorted(flow.params) if name in replicated]
            others = sorted(
                n
                for n in flow.params - set(replicated)
                if self._ndim(n) > 1 and plan.params[n].layout is None
            )
            if named and others:
                half, rest = named[0], ", ".join(others)
                text = (
                    f"replicating {half.module} is half of a pair: {rest} would be split along the same axis "
                    f"of {axis.size}, and can't be without it. Replicate these too, or none."
                )
                yield half.rule, text


def _may_be(seen: str, role: str | None) -> bool:
    """May a module that the dataflow has as `seen` be given `role`?"""
    if role in (None, "replicate", "column", "row", "vocab", "expert", seen):
        return True
    if seen == "head":  # so looks the last layer where a block is the whole model
        return role == "mlp_out"
    # An attention without a softmax looks like an MLP: there, the sides must be right.
    return seen in ("mlp_in", "mlp_out") and ROLES[role] == ROLES[seen]


def to_policy(plan: Plan) -> str:
    """A policy as YAML that reproduces `plan`: every weight's module with its role, or `replicate`.

    Roles are those of `plan.roles`, else the side that is split. Layers that repeat are written once, with a
    `*`.
    """
    kinds = {layer.module: layer.kind for layer in plan.layers}
    alone = split_alone_in(plan)  # they follow from the option
    options = ["alone: allow"] if alone else []
    options += ["experts: whole"] if "experts" in {layer.kind for layer in plan.layers} else []
    weights = {w: p for name, p in plan.params.items() if len(p.shape) > 1 for w in (name, *p.also)}
    modules = {written: written.rpartition(".")[0] for written in weights}
    words: dict[str, str] = {}
    for written, module in modules.items():
        whole = weights[written].layout is None
        siblings = [
            w for w in weights if modules[w] == module or w.startswith(f"{module}." if module else "")
        ]
        if whole and any(weights[w].layout is not None for w in siblings):
            # `replicate` is for all that is in a module: beside others that are split, the weight is named.
            words[written] = "replicate"
            continue
        mixed = any(modules[w] == module and (weights[w].layout is None) != whole for w in siblings)
        found = str(plan.roles.get(module))
        role = found if found in ROLES else kinds.get(module, "")
        if module in alone:
            role = ""
        words[written if mixed else module] = "replicate" if whole else role
    rules = [
        # A weight that is split without a role or a layer of its own follows from the others.
        f'  "{pattern}": {role}' if role in ROLES else f'  # "{pattern}" is split and follows'
        for pattern, role in _folded(words).items()
    ]
    head = [
        f"# {plan.model} over {plan.degrees}, as planned (digest {plan.digest}).",
        "schema: 1",
        f"match: {{class: {plan.model}}}",
        *([f"stages: {json.dumps(plan.stages.starts)}"] if plan.stages else []),
        *([f"options: {{{', '.join(options)}}}"] if options else []),
        "modules:" if any(role in ROLES for role in words.values()) else "modules: {}",
    ]
    return "\n".join([*head, *rules]) + "\n"


def _folded(words: Mapping[str, str]) -> dict[str, str]:
    """The same roles with layer numbers replaced by `*` where all the modules that then match have one
    role."""
    groups: dict[str, list[str]] = {}
    for module in words:
        groups.setdefault(re.sub(r"(^|(?<=\.))\d+(?=\.|$)", "*", module), []).append(module)
    folded: dict[str, str] = {}
    for pattern, members in groups.items():
        if len(members) > 1 and len({words[m] for m in members}) == 1:
            folded[pattern] = words[members[0]]
        else:
            folded.update({m: words[m] for m in members})
    return folded


def _shapes(shapes: Iterable[tuple[int, ...]]) -> str:
    return " / ".join("x".join(map(str, shape)) for shape in sorted(shapes))


__all__ = ["BoundPolicy", "Policy", "load", "to_policy"]
