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

from .capture import CapturedGraph, answering, quietly, record
from .captured import ModuleCall, map_nodes
from .comm import ShapeComm
from .compare import compare, compare_arrows
from .errors import AutotpError, CaptureError, PlanError
from .graph import walk
from .ints import plain
from .modalities import MAIN, text_alone
from .rewrite import SiteGuard, rewrite
from .sites import frames_of
from .skeleton import clone

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
    """captures: of the rewritten model, one for each kind of rank. local: the hollow model of the first, in
    which the layers `left_out` compute nothing. unseen: why decoding was not examined."""

    captures: list[CapturedGraph]
    local: nn.Module
    left_out: set[str]
    unseen: str | None


def check_plan(model: nn.Module, plan: Plan, found: Analysis) -> Checked:
    """Put the plan on hollow copies, one for each kind of rank, and capture these.

    Raises PlanError or CaptureError, whose `module` says where, if values have other shapes than planned, an
    arrow does not run, or decoding takes a way through the model's code that the plan does not know.
    """
    captures: list[CapturedGraph] = []
    first, unseen = model, None
    repeated = alike(plan, found)
    left_out = {call.path for call in repeated}
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
        compare(found, plan, again, rank, left_out)
        compare_arrows(found, plan, again, left_out)
        captures.append(again)
        if len(captures) == 1:
            first = local
            unseen = check_decoding(model, local, found, repeated) if _decodes(model) else None
    for call in repeated:  # at other sizes, what has the shape of its input is its input
        first.get_submodule(call.path).forward = Standin(call.output, call)
    return Checked(captures, first, left_out, unseen)


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
