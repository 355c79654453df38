"""Puts a plan onto a model, in place.

Leaf modules become parallel layers, parameters get their local slices (the Parameter objects stay),
attributes their local values, module boundaries their arrows, and where an arrow or a size must sit inside a
forward, that one module's forward is rewritten at that call. `print(model)` shows the layers; `model.autotp`
holds what was done.
"""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from . import collectives, layers
from .coded import adopt
from .comm import Comm
from .errors import AutotpError, PlanError
from .generation import ParallelDropout, RegionRng, has_dropout
from .layers import shard_parameter
from .layouts import Layout, ParamLayout, local_size, shrink, split
from .outputs import LookedAt, Request, ShowWhole
from .patch import SitePatch, patch_forward
from .plan import Collective, LayerPlan, Plan
from .realise import ArgPath
from .sites import Site
from .state import ShardState


def rewrite(model: nn.Module, plan: Plan, comm: Comm) -> None:
    """Make `model` rank `comm.rank`'s part of `plan`. The plan is trusted: `plan()` has checked it on a
    hollow copy."""
    if comm.size != plan.tp:
        raise PlanError(f"the plan is for {plan.tp} ranks, there are {comm.size}")
    adopt(model)
    state = ShardState.prepare(model, plan, comm)
    trials = [
        layers.Trial.of(layer.module, model.get_submodule(layer.module), layer.options, comm)
        for layer in plan.layers
        if layer.kind == "experts"
    ]
    for layer in plan.layers:
        try:
            _make_layer(model, plan, layer, comm)
        except AutotpError as error:  # the planner gives up what this layer would have been split by
            raise error.at(error.module or layer.module) from None
    for name, p in plan.params.items():
        param = model.get_parameter(name)
        if p.layout is not None:
            shard_parameter(param, p.layout, comm.rank)
        elif p.once and comm.rank > 0:
            param.data = torch.zeros_like(param)
    for local in plan.ints:
        set_attribute(model.get_submodule(local.module), local.name, local.local[comm.rank])
    for trial in trials:
        trial.check()
    at_results: list[tuple[str, ResultHook]] = []
    for region in plan.regions:
        if region.owner is None or has_dropout(model.get_submodule(region.owner)):
            RegionRng.install(model.get_submodule(region.first), model.get_submodule(region.last), comm)
    patches: dict[str, dict[Site, _Patch]] = defaultdict(lambda: defaultdict(_Patch))
    for argument in plan.arguments:
        assert argument.where.site is not None
        patches[argument.where.module][argument.where.site].ints[argument.where.path] = argument.local[
            comm.rank
        ]
    for collective in plan.collectives:
        convert = Conversion(collective, comm)
        for where in collective.where:
            if where.kind == "in":
                ArgumentHook.on(model.get_submodule(where.module), where.path, convert)
            elif where.kind == "out":
                at_results.append((where.module, ResultHook(where.path, convert)))
            elif where.kind == "before":
                assert where.site is not None
                patches[where.module][where.site].before[where.path] = convert
            elif where.kind == "after":
                assert where.site is not None
                patches[where.module][where.site].after = convert
    request = Request()
    for seen in plan.observed:
        for where in seen.where:
            show = ShowWhole(Conversion(seen, comm), len(seen.shape))
            at_results.append(
                (where.module, ResultHook(where.path, show, LookedAt(where.kind == "new", request)))
            )
    for module, hook in reversed(
        at_results
    ):  # before the hooks that are there: those see whole values, as ever
        model.get_submodule(module).register_forward_hook(hook, prepend=True)
    if plan.observed:
        request.watch(model)
    for module, sites in patches.items():
        guard = SiteGuard(module, plan.skippable)
        owner = model.get_submodule(module)
        patch_forward(owner, {site: guard.watch(site, patch) for site, patch in sites.items()})
        owner.register_forward_hook(guard)
    state.finish(model)


@dataclass
class _Patch:
    ints: dict[ArgPath, int] = field(default_factory=dict)
    before: dict[ArgPath, Callable[[Any], Any]] = field(default_factory=dict)
    after: Callable[[Any], Any] | None = None


class SiteGuard:
    """Sees that a module whose forward is rewritten at some calls makes all of them.

    A branch that was not taken when the model was captured would run unchanged code on shards, perhaps with
    the right shapes. That must not pass in silence. skippable: calls past which another way goes that was
    examined as well.
    """

    def __init__(self, module: str, skippable: tuple[Site, ...] = ()):
        self.module = module
        self.skippable = {site.frames[-1] for site in skippable if site.module == module}
        self.seen: set[Any] = set()
        self._watchers: dict[Any, Callable[[Any], Any]] = {}

    def watch(self, site: Site, patch: _Patch) -> SitePatch:
        """The patch, noting that the site ran. Equal patches of one expression, reached on several ways, are
        one."""
        after = patch.after
        key = (site.frames[-1], *patch.ints.items(), *patch.before.items(), after)

        def noted(result: Any) -> Any:
            if not torch.compiler.is_compiling():
                self.seen.add(key)
            return result if after is None else after(result)

        noted.__name__ = getattr(after, "__name__", "nothing")
        return SitePatch(patch.ints, patch.before, self._watchers.setdefault(key, noted))

    def __call__(self, module: nn.Module, args: Any, result: Any) -> None:
        if torch.compiler.is_compiling():
            return
        missed = [k[0] for k in self._watchers if k not in self.seen and k[0] not in self.skippable]
        self.seen.clear()
        if missed:
            raise AutotpError(
                f"{self.module}: this call took another way through the model's code than the captured one, "
                f"past {missed[0]}, where a size or a collective had been put. Parallelize with "
                "example_inputs like the real ones (mask, cache), or keep the module whole with a policy: "
                "`replicate`."
            ).at(self.module)

    def __deepcopy__(self, memo: dict[int, Any]) -> SiteGuard:
        return self  # a copied forward still tells this one


def _make_layer(model: nn.Module, plan: Plan, layer: LayerPlan, comm: Comm) -> None:
    module = model.get_submodule(layer.module)

    def layout(own: str, dim: int) -> Layout:
        name = f"{layer.module}.{own}" if layer.module else own
        found = plan.params.get(name) or next(p for p in plan.params.values() if name in p.also)
        assert found.layout is not None
        return found.layout.dims[dim]

    options = layer.options
    dense = isinstance(module, layers.CONVOLUTIONS)
    if layer.kind == "column":
        out_dim = 1 if layers.is_transposed(module) else 0
        make = layers.make_conv_column if dense else layers.make_column
        whole, enter, partial = (bool(options.get(o)) for o in ("gather", "enter", "partial"))
        make(module, layout("weight", out_dim), comm, gather_output=whole, enter=enter, partial=partial)
    elif layer.kind == "row":
        in_dim = 0 if layers.is_transposed(module) else 1
        how = None if "reduce" not in options else "reduce_enter" if options["reduce"] else "reduce"
        row = layers.make_conv_row if dense else layers.make_row
        row(module, layout("weight", in_dim), comm, reduce=how)
    elif layer.kind == "vocab":
        how = "reduce_enter" if options.get("reduce") else "reduce"
        layers.make_vocab_embedding(module, layout("weight", 0), comm, reduce=how)
    elif layer.kind == "embedding":
        layers.make_feature_embedding(module, layout("weight", 1), comm)
    elif layer.kind == "norm":
        layers.make_norm(module, layout("weight", 0), comm)
    elif layer.kind == "batch norm":
        layers.make_batch_norm(module, layout("weight", 0), comm)
    elif layer.kind == "grouped":
        layers.make_grouped_channels(module, layout("weight", 0), comm)
    elif layer.kind == "attention":
        how = None if "reduce" not in options else "reduce_enter" if options["reduce"] else "reduce"
        if getattr(module, "in_proj_weight", None) is not None:
            heads = layout("in_proj_weight", 0)
        else:  # keys and values of their own widths
            assert isinstance(module, nn.MultiheadAttention)
            heads = shrink(layout("q_proj_weight", 0), module.head_dim, "the heads of nn.MultiheadAttention")
        layers.make_attention(module, heads, comm, reduce=how, enter=False)
    elif layer.kind == "experts":
        layers.make_experts(module, split(options["experts"], comm.size), comm)
    elif layer.kind == "dropout":
        ParallelDropout.swap(module, comm)
    else:
        raise PlanError(f"{layer.module}: no layer of kind {layer.kind!r}")


def set_attribute(module: nn.Module, name: str, value: int) -> None:
    """Set an int attribute, dotted ones (`config.num_heads`) on a copy of the config that only this module
    has."""
    owner: Any = module
    *configs, last = name.split(".")
    for part in configs:
        local = copy.copy(getattr(owner, part))
        vars(owner)[part] = local
        owner = local
    if configs:
        vars(owner)[last] = value
    else:
        setattr(module, last, value)


class Conversion:
    """One collective as a function of a tensor."""

    def __init__(self, collective: Collective, comm: Comm):
        self.kind, self.enter, self.comm = collective.kind, collective.enter, comm
        self.dims, self.shares = collective.dims, collective.shares
        self._layouts: dict[tuple[int, int], Layout] = {}

    @property
    def __name__(self) -> str:
        return self.kind + ("_enter" if self.enter else "")

    def __call__(self, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x  # an optional argument that was left out
        if self.kind == "enter":
            return collectives.enter(x, self.comm)
        if self.kind == "reduce":
            return (collectives.reduce_enter if self.enter else collectives.reduce)(x, self.comm)
        if self.kind == "mean":
            local, whole = self.shares[self.comm.rank]
            return collectives.reduce_mean(x, local, whole, self.comm, enter=self.enter)
        if self.kind in ("max", "min"):
            return collectives.reduce_max(x, self.comm, op=self.kind, enter=self.enter)
        for i, d in enumerate(self.dims):
            convert = collectives.slice_ if self.kind == "slice" else collectives.gather
            x = convert(x, d.dim, self._layout(i, x.shape[d.dim]), self.comm)
        return x

    def fits(self, x: Tensor) -> bool:
        """Whether `x` has this rank's sizes of what is gathered."""
        return all(x.shape[d.dim] % local_size(d.layout[self.comm.rank]) == 0 for d in self.dims)

    def _layout(self, i: int, size: int) -> Layout:
        """The layout of a dim of `size`: a whole number of units, each laid out alike."""
        if (i, size) not in self._layouts:
            d = self.dims[i]
            per_unit = d.unit if self.kind == "slice" else local_size(d.layout[self.comm.rank])
            units, rest = divmod(size, per_unit)
            if rest:
                raise AutotpError(
                    f"a {self.kind} expected a dim of a multiple of {per_unit}, got {size}: the model took "
                    "another way than the one that was captured; give example_inputs like the real ones."
                )
            self._layouts[i, size] = tuple(
                tuple((u * d.unit + a, u * d.unit + b) for u in range(units) for a, b in ranges)
                for ranges in d.layout
            )
        return self._layouts[i, size]


@dataclass
class ArgumentHook:
    """Converts one argument of a module's forward, given by position or by name."""

    path: ArgPath
    name: str | None
    position: int | None
    convert: Conversion

    @classmethod
    def on(cls, module: nn.Module, path: ArgPath, convert: Conversion) -> None:
        names = list(inspect.signature(module.forward).parameters)
        head = path[0]
        if isinstance(head, int):
            hook = cls(path[1:], names[head] if head < len(names) else None, head, convert)
        else:
            hook = cls(path[1:], str(head), names.index(str(head)) if head in names else None, convert)
        module.register_forward_pre_hook(hook, with_kwargs=True)

    def __call__(
        self, module: nn.Module, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]] | None:
        if self.position is not None and self.position < len(args):
            i = self.position
            return (*args[:i], edited(args[i], self.path, self.convert), *args[i + 1 :]), kwargs
        if self.name in kwargs:
            return args, {**kwargs, self.name: edited(kwargs[self.name], self.path, self.convert)}
        return None


@dataclass
class ResultHook:
    """Converts one part of a module's result, every time or `when` that says so."""

    path: ArgPath
    convert: Callable[[Any], Any]
    when: Callable[[nn.Module, Any], bool] | None = None

    def __call__(self, module: nn.Module, args: tuple, result: Any) -> Any:
        if self.when is not None and not self.when(module, result):
            return result
        return edited(result, self.path, self.convert)


def edited(value: Any, path: ArgPath, change: Callable[[Any], Any]) -> Any:
    """`value` with the part at `path` changed; containers are copied, a part that is not there is left
    out."""
    if not path:
        return change(value)
    if value is None:
        return None
    head, rest = path[0], path[1:]
    if isinstance(value, tuple):
        if int(head) >= len(value):
            return value
        parts = [edited(v, rest, change) if i == head else v for i, v in enumerate(value)]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, list):
        return [edited(v, rest, change) if i == head else v for i, v in enumerate(value)]
    if hasattr(value, "items"):
        if head not in value:
            return value
        other = copy.copy(value)
        other[head] = edited(value[head], rest, change)
        return other
    raise AutotpError(f"a result of type {type(value).__name__} has no part {head!r}")


__all__ = ["Conversion", "ParamLayout", "rewrite", "set_attribute"]
