"""The rewritten model against the plan: what it computes, with which numbers, and which arrows ran.

Both were captured (`recapture.py`): the whole model, and the one with the plan put on it, at a rank's sizes.
Each operation is found again by its place in the model's code. Its shapes must be those that the plan
predicts; and its numbers, too: Python reads an int in ways that nobody can follow (`math.log(n)`, `TABLE[n]`,
`range(n)`, `if n > 3:`), and where such an int became local, another number or another branch shows it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from .alone import arrows_around
from .captured import CapturedGraph
from .errors import PlanError
from .graph import describe, walk
from .ints import Expr, TrackedFloat, TrackedInt, dims_of, evaluate, plain, reads_of
from .realise import Where
from .sites import Site
from .solve import LocalShapes, given_for

if TYPE_CHECKING:
    from .plan import Plan
    from .planner import Analysis

# What moves no number, and may be left out or done once more where local sizes make it nothing: key heads
# that are repeated once.
_NOTHING = {"expand", "repeat", "repeat_interleave", "reshape", "view", "unsqueeze", "squeeze", "flatten"}
_NOTHING |= {"__getitem__", "getitem", "contiguous", "clone", "size", "split_dim"}


def compare(found: Analysis, plan: Plan, again: CapturedGraph, rank: int, left_out: set[str]) -> None:
    """Compare value by value: what each operation of the model's code, and each module, gives on this rank,
    and the numbers that it was given. `left_out`: layers not run again.

    Raises PlanError, whose `module` says where."""
    shapes = LocalShapes(found.index, found.choice, rank)
    gathered = {
        a.source
        for a, places in found.realised.places
        for w in places
        if a.kind == "gather" and w.kind in ("layer", "out")
    }
    wrong: list[tuple[str, fx.Node]] = []
    compared = 0
    for node, other in _met(found, plan, found.captured, again, left_out, wrong):
        if node.op == other.op and str(node.target) == str(other.target):
            wrong += [(f"{describe(node)}: {why}", node) for why in _numbers(found, shapes, node, other)]
        if node in gathered or not isinstance(node.meta.get("val"), torch.Tensor):
            continue
        compared += 1
        want, got = shapes.shape(node), tuple(other.meta["val"].shape)
        if len(want) != len(got) or any(
            a != b and not found.index.hangs_on_data(axis)
            for a, b, axis in zip(want, got, found.index.axes.of[node], strict=True)
        ):
            wrong.append((f"{describe(node)}: it gives {list(got)}, planned {list(want)}", node))
    _raise_if(wrong, f"on rank {rank}")
    if not compared and any(n.op == "call_function" for n in found.captured.graph.nodes):
        raise PlanError(
            "the rewritten model has nothing in common with the captured one; the model is unchanged"
        )


def compare_way(
    found: Analysis, plan: Plan, whole: CapturedGraph, again: CapturedGraph, when: str, left_out: set[str]
) -> None:
    """The same for another way through the model's code (`ways.py`), in which the whole model was captured as
    `whole` and the rewritten one as `again`: the same operations must run, with the same plain numbers.

    Raises PlanError, whose `module` says where."""
    wrong: list[tuple[str, fx.Node]] = []
    local = {(i.module, i.name): i.local[0] for i in plan.ints}  # `again` is the first rank's
    stated = {_place(a.where.module, a.where.site) for a in plan.arguments if a.where.site is not None}
    for node, other in _met(found, plan, whole, again, left_out, wrong):
        same = node.op == other.op and str(node.target) == str(other.target)
        site = node.meta.get("site")
        if not same or (site is not None and _place(node.meta["scope"], site) in stated):
            continue
        mine, theirs = _arguments(node), _arguments(other)
        for path in dict.fromkeys((*mine, *theirs)):
            want, got = mine.get(path), plain(theirs.get(path))
            if isinstance(want, (TrackedInt, TrackedFloat)):
                if dims_of(want.expr) or reads_of(want.expr):
                    continue  # of this way nobody knows which sizes are a rank's
                want = evaluate(want.expr, {**whole.attributes, **local})
            if _differ(want, got):
                wrong.append((f"{describe(node)}: it is given {got}, planned {want}", node))
    _raise_if(wrong, when)


def _met(
    found: Analysis,
    plan: Plan,
    whole: CapturedGraph,
    again: CapturedGraph,
    left_out: set[str],
    wrong: list[tuple[str, fx.Node]],
) -> Iterator[tuple[fx.Node, fx.Node]]:
    """The values of both captures that come from the same place. What runs in only one goes to `wrong`."""
    apart = {n for e in found.experts for c in e.calls for n in found.index.nodes[c.first : c.last + 1]}
    apart -= {call.output for e in found.experts for call in e.calls}
    planned, actual = _by_place(whole, left_out), _by_place(again, left_out)
    modules = [one.module for one in found.experts] + [layer.module for layer in plan.layers]
    parallel = tuple(f"{module}." for module in modules)  # these run code of ours
    patched = {_place(w.module, w.site) for c in plan.collectives for w in c.where if w.site is not None}

    def may_differ(node: fx.Node) -> bool:
        return _is_nothing(node) or node in apart or f"{node.meta['scope']}.".startswith(parallel)

    for key, nodes in planned.items():
        others = actual.get(key, [])
        if len(others) == len(nodes):
            yield from ((n, o) for n, o in zip(nodes, others, strict=True) if n not in apart)
        elif not may_differ(nodes[0]):
            told = f"{describe(nodes[0])}: it runs {len(nodes)} times in the whole model, here {len(others)}"
            wrong.append((told, nodes[0]))
    for key, nodes in actual.items():
        if key not in planned and key[1:3] not in patched and not all(map(may_differ, nodes)):
            wrong.append((f"{describe(nodes[0])}: it does not run in the whole model", nodes[0]))


def _is_nothing(node: fx.Node) -> bool:
    """Does it move no number, so that local sizes may make it needless?"""
    name = getattr(node.target, "__name__", "").partition(".")[0]  # `expand.default`
    if name == "__getitem__" and len(node.meta["args"]) > 1:
        index = node.meta["args"][1]
        parts = index if isinstance(index, tuple) else (index,)
        return all(isinstance(p, (int, slice, type(None), type(...))) for p in parts)
    return name in _NOTHING


def _differ(want: Any, got: Any) -> bool:
    """Are they numbers, or a number and something else, and not the same?"""
    numbers = isinstance(want, (int, float)) or isinstance(got, (int, float))
    return numbers and want != got and not (want != want and got != got)


def _is_arrows(node: fx.Node) -> bool:
    call = node.meta.get("custom_grad")
    return call is not None and call.function.__name__ in _RUN_AS


def _numbers(found: Analysis, shapes: LocalShapes, node: fx.Node, other: fx.Node) -> Iterator[str]:
    """The numbers among the arguments that are not what the plan says."""
    mine, theirs = _arguments(node), _arguments(other)
    solution = found.solutions[shapes.rank]
    for path in dict.fromkeys((*mine, *theirs)):
        want, got = mine.get(path), plain(theirs.get(path))
        if isinstance(want, (TrackedInt, TrackedFloat)) and _hangs(found, want.expr):
            continue
        wanted = solution.patches.get((node, path), given_for(want, solution.attrs, shapes))
        if _differ(wanted, got):
            yield f"it is given {got}, planned {wanted}"


def _arguments(node: fx.Node) -> dict[tuple[int | str, ...], Any]:
    return dict(walk({**dict(enumerate(node.meta["args"])), **node.meta["kwargs"]}))


def _hangs(found: Analysis, expr: Expr) -> bool:
    """May another run give another number, for the data's sake?"""
    sizes = [(found.index.axes.of.get(dim.node), dim.index) for dim in dims_of(expr)]
    return bool(reads_of(expr)) or any(dims and found.index.hangs_on_data(dims[i]) for dims, i in sizes)


def _raise_if(wrong: list[tuple[str, fx.Node]], when: str) -> None:
    if wrong:
        told = "\n  ".join(why for why, _ in wrong[:6])
        message = f"the rewritten model does not compute what was planned, {when}:\n  {told}"
        raise PlanError(message).at(str(wrong[0][1].meta.get("scope", "")))


def compare_arrows(found: Analysis, plan: Plan, again: CapturedGraph, left_out: set[str]) -> None:
    """Every arrow of the plan must have run, as often as planned: no more, no fewer. `left_out`: layers not
    run again."""

    def counted(where: Where) -> bool:
        boundary = where.module in left_out and where.kind in (
            "in",
            "out",
        )  # hooks of a layer that is not run still run
        return boundary or not any(f"{where.module}.".startswith(f"{path}.") for path in left_out)

    calls = Counter[Any](call.path for call in found.captured.calls)
    calls.update(n.meta["site"] for n in found.index.nodes if n.op == "call_function" and n.meta.get("site"))
    hidden = {  # modules that (also) run without gradients
        call.path
        for call in found.captured.calls
        for node in (found.index.nodes[call.first : call.last + 1] if not call.leaf else [call.node])
        if node is not None and not node.meta.get("grad_enabled", True)
    }
    placed = {
        (
            arrow.kind,
            arrow.enter,
            where,
            arrow.source.meta.get("grad_enabled", True) and where.module not in hidden,
        )
        for arrow, places in found.realised.places
        for where in filter(counted, places)
    }
    placed |= {  # those of layers that are split alone
        (kind, enter, where, where.module not in hidden)
        for layer in plan.layers
        for kind, enter in arrows_around(layer)
        if counted(where := Where("layer", layer.module))
    }
    planned: Counter[str] = Counter()
    unseen: Counter[str] = Counter()  # without gradients an arrow may leave no trace
    for kind, enter, where, seen in placed:
        runs = calls[where.module if where.site is None else where.site]
        for part in _parts(kind, enter, found.captured.skeleton.get_submodule(where.module)):
            (planned if seen else unseen)[part] += runs
    functions = {id(f): f.function.__name__ for n in again.graph.nodes if (f := n.meta.get("custom_grad"))}
    actual = Counter(part for name in functions.values() for part in _RUN_AS.get(name, ()))
    for part, told in _TOLD.items():
        if not planned[part] <= actual[part] <= planned[part] + unseen[part]:
            raise PlanError(
                f"the rewritten model was tried, and {actual[part]} {told} ran where {planned[part]} were "
                "planned: its code goes past one, or by one more often than when it was recorded"
            )


def _parts(kind: str, enter: bool, module: nn.Module) -> tuple[str, ...]:
    """What runs for an arrow of this kind, in the words of `_TOLD`."""
    if kind == "norm":  # the layer's statistics: mean and variance, or the mean square
        return ("reduce", "enter") * (2 if isinstance(module, nn.LayerNorm) else 1)
    if kind in ("max", "min"):
        return ("extreme",)
    return ("reduce" if kind == "mean" else kind, *(("enter",) if enter else ()))


_TOLD = {
    "enter": "all-reduces of gradients",
    "reduce": "all-reduces",
    "gather": "gathers",
    "slice": "slices",
    "extreme": "reductions of a maximum or minimum",
}
_RUN_AS = {  # collectives.py's functions
    "_Enter": ("enter",),
    "_Reduce": ("reduce",),
    "_ReduceEnter": ("reduce", "enter"),
    "_Gather": ("gather",),
    "_GatherEnter": ("gather", "enter"),
    "_Slice": ("slice",),
    "_Extreme": ("extreme",),
}


def _by_place(captured: CapturedGraph, left_out: set[str]) -> dict[Any, list[fx.Node]]:
    """Values by where they come from: results of module calls, then operations by their place in the
    source. `left_out`: but for what these modules do, also in modules that others share with them."""
    places: dict[Any, list[fx.Node]] = defaultdict(list)
    order = {node: i for i, node in enumerate(captured.graph.nodes)}
    skipped = [(call.first, call.last) for call in captured.calls if call.path in left_out]

    def out(node: fx.Node) -> bool:
        return any(first <= order[node] <= last for first, last in skipped)

    for call in captured.calls:
        if any(f"{call.path}.".startswith(f"{path}.") for path in left_out):
            continue
        for path, value in walk(call.output):
            if isinstance(value, fx.Node) and not out(value):
                places["call", call.path, path].append(value)
    for node in captured.graph.nodes:
        site = node.meta.get("site")
        placed = node.op == "call_function" and site is not None and site.frames
        if placed and not _is_arrows(node) and not out(node):
            module, lines = _place(node.meta["scope"], site)
            places["site", module, lines, str(node.target)].append(node)
    return places


def _place(module: str, site: Site) -> tuple[str, tuple[tuple[str, int], ...]]:
    """A place in the code that stays the same when calls in the function are rewritten."""
    return module, tuple((f.code.co_filename, f.lineno) for f in site.frames)
