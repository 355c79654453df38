"""The second derivation: capture the rewritten model and compare it with what the plan predicts.

The plan predicts the local shape of every value. Here the plan is put onto a hollow copy of the model (meta
tensors, no data, no peers) and that is captured like any model. A `-1` that swallowed the shrink, an
attribute that two places read differently, a table of the wrong length show as shapes that differ, before
anything of the user's is touched.
"""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from .alone import arrows_around
from .capture import CapturedGraph, answering, quietly, record
from .captured import ModuleCall, map_nodes
from .comm import ShapeComm
from .errors import AutotpError, CaptureError, PlanError
from .graph import describe, walk
from .ints import plain
from .modalities import MAIN, text_alone
from .realise import Where
from .rewrite import SiteGuard, rewrite
from .sites import frames_of
from .skeleton import clone
from .solve import LocalShapes

if TYPE_CHECKING:
    from .plan import Plan
    from .planner import Analysis


def hollow(model: nn.Module) -> nn.Module:
    """A deep copy of `model` with its tensors on meta: structure without data."""
    memo: dict[int, Any] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        if id(tensor) not in memo:
            empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            memo[id(tensor)] = (
                nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
            )
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        kept = [n for n, m in model.named_modules() if any(_is_made(v) for v in vars(m).values())]
        hint = " keeps a tensor that was computed (the old torch.nn.utils.weight_norm does; use that of "
        where = f" {kept[0]}{hint}torch.nn.utils.parametrizations)." if kept else ""
        raise CaptureError(
            f"{type(model).__name__} can't be copied, which planning needs ({type(error).__name__}: "
            f"{str(error).splitlines()[0]}).{where}"
        ) from error


def _is_made(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.grad_fn is not None


@dataclass
class Checked:
    """captures: of the rewritten model, one for each kind of rank. unseen: why decoding was not examined."""

    captures: list[CapturedGraph]
    unseen: str | None


def check_plan(model: nn.Module, plan: Plan, found: Analysis) -> Checked:
    """Put the plan on hollow copies, one for each kind of rank, and capture these.

    Raises PlanError or CaptureError, whose `module` says where, if values have other shapes than planned, an
    arrow does not run, or decoding takes a way through the model's code that the plan does not know.
    """
    captures: list[CapturedGraph] = []
    unseen = None
    repeated = alike(plan, found)
    seen: set[tuple[int, ...]] = set()
    for rank in range(plan.tp):
        sizes = tuple(split.size(rank) for split in found.choice.splits.values())
        if sizes in seen:
            continue
        seen.add(sizes)
        local = hollow(model)
        rewrite(local, plan, ShapeComm(rank, plan.tp))
        for call in repeated:
            layer = local.get_submodule(call.path)
            Standin(call.output).take_over(layer)
            layer._modules = {}  # so that recording does not grow with the depth
        again = record(local, found.captured.inputs, found.captured.leaves)
        compare(found, again, rank)
        compare_arrows(found, plan, again, {call.path for call in repeated})
        captures.append(again)
        if len(captures) == 1 and _decodes(model):
            unseen = check_decoding(model, local, found, repeated)
    return Checked(captures, unseen)


def _decodes(model: nn.Module) -> bool:
    can = getattr(model, "can_generate", None)
    return callable(can) and bool(can())


def check_decoding(
    model: nn.Module, local: nn.Module, found: Analysis, repeated: list[ModuleCall]
) -> str | None:
    """Does decoding with a cache, one token at a time, run on local sizes and past all rewritten calls?

    It takes other ways through the model's code than the captured one, with states of their own. Returns why
    that could not be found out, or None.
    """

    def decode(module: nn.Module) -> bool:
        skeleton = clone(module)
        for call in repeated:
            Standin(call.output, call).take_over(skeleton.module.get_submodule(call.path))
        given = found.captured.inputs
        if set(MAIN.values()) & set(given):  # seen with the first token, not with those that follow
            given = text_alone(found.captured) or given
        with torch.no_grad(), answering(skeleton, given) as inputs:
            first = skeleton.module(**{**inputs, "use_cache": True})
            kept = {k: first[k] for k in ("past_key_values", "cache_params") if first.get(k) is not None}
            fed = "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"
            last = {k: v[:, -1:] for k, v in inputs.items() if k == fed}
            mask = inputs.get("attention_mask")
            if isinstance(mask, torch.Tensor) and "input_ids" in last:  # it grows with the cache
                last["attention_mask"] = torch.cat([mask, mask[:, -1:]], -1)
            if kept and last:
                skeleton.module(**{**inputs, **last, **kept, "use_cache": True})
            return bool(kept and last)

    try:
        with quietly():
            return None if decode(local) else "it gives no cache that autotp knows"
    except Exception as error:
        try:
            with quietly():
                decode(model)
        except Exception as own:  # noqa: BLE001 - it does not decode like this, split or whole
            return f"{type(own).__name__}: {str(own).splitlines()[0] if str(own) else ''}"
        if isinstance(error, AutotpError):
            raise
        modules = found.captured.skeleton.get_submodule
        files = {type(modules(c.path)).forward.__code__: c.path for c in found.captured.calls if not c.leaf}
        inner = [files[f.code] for f in frames_of(error.__traceback__) if f.code in files]
        message = f"the rewritten model does not decode with a cache: {type(error).__name__}: {error}"
        raise PlanError(message).at(inner[-1] if inner else "") from error


def _raise(message: str, node: fx.Node | None = None) -> None:
    where = str(node.meta.get("scope", "")) if node is not None else ""
    raise PlanError(message).at(where) if where else PlanError(message)


class Standin:
    """In place of a layer that is like one before it: gives results of the same shapes, and computes
    nothing."""

    def __init__(self, output: Any, call: ModuleCall | None = None):
        self.output = output
        given = [v for _, v in walk((call.args, call.kwargs)) if isinstance(v, fx.Node)] if call else []
        self.passed = _shape_of(given[0]) if given else None  # what has the shape of its input is its input

    def take_over(self, module: nn.Module) -> None:
        """Be the forward of `module`, which then need not pass by its rewritten calls."""
        module.forward = self
        for key, hook in list(module._forward_hooks.items()):
            if isinstance(getattr(hook, "__self__", hook), SiteGuard):
                del module._forward_hooks[key]

    def __deepcopy__(self, memo: dict[int, Any]) -> Standin:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        first = next((v for _, v in walk((args, kwargs)) if isinstance(v, torch.Tensor)), None)

        def made(node: fx.Node) -> torch.Tensor:
            if first is not None and _shape_of(node) == self.passed:
                return first
            return torch.empty(node.meta["val"].shape, dtype=node.meta["val"].dtype)

        return map_nodes(self.output, made)


def alike(plan: Plan, found: Analysis) -> list[ModuleCall]:
    """The calls of layers that did, and are planned, exactly as an earlier layer of the same list: one of
    each kind is checked, so that the check does not grow with the depth."""
    index = found.index
    lists = {
        f"{name}." for name, m in found.captured.skeleton.named_modules() if isinstance(m, nn.ModuleList)
    }
    counts = Counter(call.path for call in found.captured.calls)
    planned = _planned_by_layer(plan, lists)
    first: set[Any] = set()
    repeated: list[ModuleCall] = []
    for call in found.captured.calls:
        if call.path.startswith(tuple(f"{other.path}." for other in repeated)):
            continue
        prefix = call.path[: call.path.rfind(".") + 1]
        outputs = [v for _, v in walk(call.output) if isinstance(v, fx.Node)]
        if prefix not in lists or counts[call.path] > 1 or any(n in found.placement.sharded for n in outputs):
            continue
        kind = (
            prefix,
            _recorded(index.nodes[call.first : call.last + 1], call.path),
            str(planned.get(call.path)),
        )
        if kind in first:
            repeated.append(call)
        first.add(kind)
    return repeated


def _recorded(nodes: list[fx.Node], path: str) -> Any:
    """What a layer did, in terms of its own values: equal for layers that do the same."""
    number = {node: i for i, node in enumerate(nodes)}
    outside: dict[fx.Node, int] = {}

    def own(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return (
                number[value]
                if value in number
                else ("outside", outside.setdefault(value, len(outside)), _shape_of(value))
            )
        return plain(value) if isinstance(value, (int, float, str, bool, type(None))) else str(value)

    return tuple(
        (
            n.op,
            str(n.target).removeprefix(path),
            _shape_of(n),
            tuple((p, own(v)) for p, v in walk((n.meta["args"], n.meta["kwargs"]))),
        )
        for n in nodes
    )


def _shape_of(node: fx.Node) -> Any:
    value = node.meta.get("val")
    return (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else str(type(value))


def _planned_by_layer(plan: Plan, lists: set[str]) -> dict[str, list[Any]]:
    """Per layer of a list, everything planned inside it, with names relative to it."""
    found: dict[str, list[Any]] = defaultdict(list)

    def add(name: str, what: Any) -> None:
        for prefix in lists:
            if name.startswith(prefix):
                layer = prefix + name[len(prefix) :].split(".")[0]
                found[layer].append((name[len(layer) :], what))

    for name, p in plan.params.items():
        add(name, (p.shape, p.layout, p.gradient, p.once))
    for layer in plan.layers:
        add(layer.module, (layer.kind, layer.options))
    for i in plan.ints:
        add(i.module, (i.name, i.local))
    for a in plan.arguments:
        add(a.where.module, (a.where.path, a.where.site and a.where.site.frames, a.local))
    for c in plan.collectives:
        for w in c.where:
            add(w.module, (c.kind, c.enter, c.dims, w.kind, w.path, w.site and w.site.frames))
    return found


def compare(found: Analysis, again: CapturedGraph, rank: int) -> None:
    """Compare value by value: what each operation of the model's code, and each module, gives on this
    rank."""
    shapes = LocalShapes(found.index, found.choice, rank)
    gathered = {
        a.source
        for a, places in found.realised.places
        for w in places
        if a.kind == "gather" and w.kind in ("layer", "out")
    }
    wrong = []
    apart = {node for e in found.experts for c in e.calls for node in found.index.nodes[c.first : c.last + 1]}
    apart -= {call.output for e in found.experts for call in e.calls}
    planned: dict[Any, list[fx.Node]] = _by_place(found.captured)
    actual = _by_place(again)
    compared = 0
    for key, nodes in planned.items():
        others = actual.get(key, [])
        if len(others) != len(nodes):
            continue  # a branch that local sizes made unnecessary (repeating key heads once)
        for node, other in zip(nodes, others, strict=False):
            if node in gathered or node in apart or not isinstance(node.meta.get("val"), torch.Tensor):
                continue
            compared += 1
            want, got = shapes.shape(node), tuple(other.meta["val"].shape)
            if len(want) != len(got) or any(
                a != b and not found.index.hangs_on_data(axis)
                for a, b, axis in zip(want, got, found.index.axes.of[node], strict=True)
            ):
                wrong.append((f"{describe(node)}: {list(got)} on rank {rank}, planned {list(want)}", node))
    if wrong:
        told = "\n  ".join(why for why, _ in wrong[:6])
        _raise(f"the rewritten model does not compute what was planned:\n  {told}", wrong[0][1])
    if planned and not compared:
        raise PlanError(
            "the rewritten model has nothing in common with the captured one; the model is unchanged"
        )


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
            _raise(
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


def _by_place(captured: CapturedGraph) -> dict[Any, list[fx.Node]]:
    """Values by where they come from: results of module calls, then operations by their place in the
    source."""
    places: dict[Any, list[fx.Node]] = defaultdict(list)
    for call in captured.calls:
        for path, value in walk(call.output):
            if isinstance(value, fx.Node):
                places["call", call.path, path].append(value)
    for node in captured.graph.nodes:
        site = node.meta.get("site")
        if node.op == "call_function" and site is not None and site.frames:
            where = tuple((f.code.co_filename, f.lineno) for f in site.frames)
            places["site", node.meta["scope"], where, str(node.target)].append(node)
    return places
