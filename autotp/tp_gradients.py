"""The gradients of a model under a `tp_plan`: which are partial, and which style sums each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import fx

from .axes import Axis
from .captured import ModuleCall
from .graph import describe
from .place import wants_grad
from .skeleton import linear_kind

if TYPE_CHECKING:
    from .tp_plan import Said, Translation

SUMMED = "replicated_with_grad_allreduce"


@dataclass
class Extra:
    """What gradients ask for, and the axes whose gradients nothing makes whole."""

    styles: dict[str, tuple[str, Axis]] = field(default_factory=dict)  # module -> style, for which axis
    refused: dict[Axis, str] = field(default_factory=dict)


class Gradients:
    """Whether every gradient is whole again.

    A linear layer's style sums its input's, the experts' style those of its inputs. Every other replicated
    value that meets a sharded one has a partial gradient, which must end in parameters of modules that have
    nothing else (`replicated_with_grad_allreduce`), or in the rotary part of a latent (`mla_kv_a_proj`).
    """

    def __init__(self, of: Translation, said: dict[Axis, Said]):
        self.of, self.index = of, of.index
        flows = {axis: of.found.choice.flows[axis] for axis in said}
        self.inside: dict[fx.Node, Axis] = {}
        self.sharded: set[fx.Node] = set()
        self.partial: set[fx.Node] = set()
        self.params: set[str] = set()
        for axis, flow in flows.items():
            self.inside.update(dict.fromkeys(flow.inside, axis))
            self.sharded |= flow.sharded
            self.partial |= flow.partial
            self.params |= flow.params
        self.reduced = {e.source for f in flows.values() for e in f.edges if e.kind == "reduce"}
        self.experts = [c for one in said.values() for m in sorted(one.experts) for c in of.calls[m]]
        self.region: dict[fx.Node, Axis] = {}  # replicated values with a partial gradient
        self.summed: dict[fx.Node, Axis] = {}  # where a style sums it
        self.needs: dict[str, Axis] = {}  # parameters with one
        self.extra = Extra()

    def styles(self) -> Extra:
        for node, axis in self.inside.items():
            own = self.index.module_params.get(node, {})
            sums_input = any(name in self.params for name in own.values())
            for part, name in own.items():
                if name not in self.params and self.index.is_parameter(name):
                    if not (node in self.reduced and part == "bias"):  # added to the sum
                        self.needs[name] = axis
            if not sums_input:
                for source in self._with_gradient(node):
                    if not self._sharded(source):
                        self._climb(source, node, axis)
        for node, axis in [*self.region.items(), *self.summed.items()]:
            strays = [u for u, _ in self.index.uses[node] if not self._partial_use(u, node)]
            if strays:
                why = f"{describe(strays[0])}: the gradient of {describe(node)} is whole here, else partial"
                self.extra.refused.setdefault(axis, why)
        for name, axis in self.needs.items():
            self._sum_parameter(name, axis)
        return self.extra

    def _sharded(self, node: fx.Node) -> bool:
        return node in self.sharded or (node in self.partial and node not in self.reduced)

    def _with_gradient(self, node: fx.Node) -> Iterator[fx.Node]:
        return (op.node for op in self.index.operands[node] if wants_grad(op.node))

    def _call(self, node: fx.Node) -> ModuleCall | None:
        return next((c for c in self.experts if self.of.within(c, node)), None)

    def _partial_use(self, user: fx.Node, node: fx.Node) -> bool:
        """Is this use no use for gradients, or one that gives a partial one?"""
        if user.op != "output" and not wants_grad(user):
            return True
        call = next((c for c in self.experts if node in (c.args[0], c.args[2])), None)
        if call is not None and not self.of.within(call, user):
            return True  # of the experts' inputs, only the uses inside count
        own = self.index.module_params.get(user, {}).values()
        return user in self.region or (user in self.inside and not any(n in self.params for n in own))

    def _climb(self, node: fx.Node, user: fx.Node, axis: Axis) -> None:
        todo = [node]
        call = self._call(user)
        while todo:
            value = todo.pop()
            if value in self.region or value in self.summed:
                continue
            if value.op == "get_attr":
                self.needs.setdefault(str(value.target), axis)
            elif (call is not None and value in (call.args[0], call.args[2])) or self._rotary(value, axis):
                self.summed[value] = axis
            elif value.op not in ("call_function", "call_module") or value in self.reduced:
                why = f"{describe(user)}: no style sums the partial gradient of {describe(value)}"
                self.extra.refused.setdefault(axis, why)
            else:
                self.region[value] = axis
                for name in self.index.module_params.get(value, {}).values():
                    if self.index.is_parameter(name):
                        self.needs.setdefault(name, axis)
                todo += self._with_gradient(value)

    def _rotary(self, node: fx.Node, axis: Axis) -> bool:
        """Is it the second part of a replicated linear layer's output, of the width that `mla_kv_a_proj` asks
        of the config?"""
        if getattr(node.target, "__name__", "") not in ("getitem", "__getitem__") or node.args[1] != 1:
            return False
        (pieces,) = (op.node for op in self.index.operands[node])
        sources = self.index.operands[pieces]
        linear = sources[0].node if len(sources) == 1 else node
        value = pieces.meta["val"]
        width = self._rotary_width()
        if not isinstance(value, tuple) or len(value) != 2 or linear.op != "call_module" or width is None:
            return False
        module = self.of.skeleton.get_submodule(str(linear.target))
        if linear_kind(module) != "linear" or linear in self.inside:
            return False
        if value[1].shape[-1] != width or value[0].shape[-1] + width != linear.meta["val"].shape[-1]:
            return False
        self.extra.styles[str(linear.target)] = ("mla_kv_a_proj", axis)
        return True

    def _rotary_width(self) -> int | None:
        config: Any = getattr(self.of.skeleton, "config", None)
        try:
            return config.get_text_config().qk_rope_head_dim
        except Exception:  # none, or one of each layer: a config may raise what it likes
            return None

    def _sum_parameter(self, name: str, axis: Axis) -> None:
        owner = name.rpartition(".")[0]
        direct = {f"{owner}.{own}".lstrip(".") for own in self.of.skeleton.get_submodule(owner)._parameters}
        direct = {n for n in direct if n in self.index.used_params}
        users = [n for n, _ in self.of.leaf_users[name]]
        users += [u for n in self.of.attr_nodes[name] for u, _ in self.index.uses[n] if wants_grad(u)]
        whole = [u for u in users if u not in self.inside and u not in self.region]
        if whole:
            self.extra.refused.setdefault(axis, f"{describe(whole[0])}: {name} is used with whole values too")
        elif not direct <= set(self.needs) or not self.of.calls[owner]:
            why = f"{name} is whole and used with sharded values: nothing sums its gradient alone"
            self.extra.refused.setdefault(axis, why)
        else:
            self.extra.styles[owner] = (SUMMED, axis)


__all__ = ["Extra", "Gradients"]
