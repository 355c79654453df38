"""What each module is for, found by what its weights' axes pass through; never by its name.

A *use* is an operation that contracts values with a weight: a linear, an embedding, a product with a bare
parameter. It *takes* the axes that it sums over and *makes* the ones that the weight brings into the result.
Between uses, values pass through operations without weights (views, activations, norms). On that:

* attention: the softmax of a product of two values (queries, keys), multiplied with a third (values), or the
  fused operation. The uses that make its operands are `q`, `k`, `v`, or jointly `qkv`, `kv`; the use that
  takes its result is `attn_out`.
* `mlp_in`, `mlp_out`: uses that make and take one axis, with pointwise operations between. A residual
  addition, of a value to something computed from it, ends the way: that axis is the stream's, not an inner
  one.
* `embed` looks its weight's rows up; `head` makes an axis that reaches the model's output; `experts` own a
  weight of three dims; `norm` takes statistics.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch.nn.functional as F
from torch import fx, nn

from .axes import Axis, leaves
from .graph import GraphIndex
from .rules.op import Contract
from .solve import node_ndim as ndim

SUM, LOOKUP = "sum", "lookup"


@dataclass(frozen=True)
class Use:
    """One operation with one weight: `made` and `taken` are leaves, `looked_up` those of a table's rows."""

    node: fx.Node
    module: str
    param: str
    made: frozenset[Axis]
    taken: frozenset[Axis]
    looked_up: frozenset[Axis]


@dataclass(frozen=True)
class Attention:
    """One attention: the operation that gives its result, and the uses around it by role.

    heads: the leaves of the scores that its `out` takes; for grouped queries, the groups and those within
    one.
    """

    node: fx.Node
    q: tuple[Use, ...]
    k: tuple[Use, ...]
    v: tuple[Use, ...]
    out: tuple[Use, ...]
    heads: frozenset[Axis]


@dataclass
class Structure:
    """A graph's uses and attentions, and the role of every module that has one."""

    uses: list[Use]
    attentions: list[Attention]
    roles: dict[str, str] = field(default_factory=dict)


def roles(index: GraphIndex) -> dict[str, str]:
    """Module path -> role: q k v (and fused: qkv kv qk) attn_out mlp_in mlp_out experts embed head norm."""
    return structure(index).roles


def structure(index: GraphIndex) -> Structure:
    """The uses, attentions and roles of a captured graph."""
    walk = _Walk(index)
    # Where no weight makes the queries, a softmax mixes what is there (layers, say): no projections to split.
    found = Structure(walk.uses, [a for a in walk.attentions() if a.q and a.out])
    named = found.roles
    feeds: dict[str, set[str]] = defaultdict(set)
    for attention in found.attentions:
        for operand in "qkv":
            for use in getattr(attention, operand):
                feeds[use.module].add(operand)
    named.update({module: "".join(o for o in "qkv" if o in fed) for module, fed in feeds.items()})
    for attention in found.attentions:
        for use in attention.out:
            named.setdefault(use.module, "attn_out")
    for path in walk.fused_attentions():
        named[path] = "qkv"
        named[f"{path}.out_proj"] = "attn_out"
    for use in walk.uses:
        if _is_stack(index, use):
            named.setdefault(use.module, "experts")
        elif use.looked_up:
            named.setdefault(use.module, "embed")
    for use in walk.uses:
        if use.module not in named and any(walk.reaches(use, axis)[1] for axis in use.made):
            named[use.module] = "head"
    for axis in sorted(index.holders, key=lambda a: -_held(index, a)):
        pairs: dict[str, str] = {}
        for use in walk.uses:
            if axis in use.made and use.module not in named:
                takers = {u.module for u in walk.reaches(use, axis)[0]} - set(named) - {use.module}
                if takers:
                    pairs.update({use.module: "mlp_in", **dict.fromkeys(takers, "mlp_out")})
        named.update(pairs)
    for path in _norms(index):
        named.setdefault(path, "norm")
    return found


def _held(index: GraphIndex, axis: Axis) -> int:
    return sum(index.captured.skeleton.get_parameter(name).numel() for name in index.holders[axis])


def _is_stack(index: GraphIndex, use: Use) -> bool:
    """Is the weight a stack of matrices: three dims, and no convolution's kernel?"""
    shape = index.captured.skeleton.get_parameter(use.param).shape
    return use.node.op == "call_function" and len(shape) >= 3 and all(size > 1 for size in shape)


def _norms(index: GraphIndex) -> Iterator[str]:
    """Leaf modules that take statistics over an axis, and modules without children whose own code does."""
    for node in index.nodes:
        contracts = _contracts(index, node)
        if node.op == "call_module" and any(c.how == "norm" for c in contracts):
            yield str(node.target)
        elif node.op == "call_function" and any(c.how in ("mean", "norm") for c in contracts):
            path = str(node.meta.get("scope") or "")
            if path and not list(index.captured.skeleton.get_submodule(path).children()):
                yield path


def _contracts(index: GraphIndex, node: fx.Node) -> list[Contract]:
    facts = index.facts(node)
    return facts.contracts if facts else []


class _Walk:
    """A graph as uses and the ways between them."""

    def __init__(self, index: GraphIndex):
        self.index = index
        self.weight_of = self._weights()
        self.uses: list[Use] = []
        self.use_at: dict[fx.Node, list[Use]] = defaultdict(list)
        for node in index.nodes:
            for use in self._uses_of(node):
                self.uses.append(use)
                self.use_at[node].append(use)

    def _weights(self) -> dict[fx.Node, str]:
        """Values that are a weight of two or more dims, or a view, cast or choice of experts of one."""
        found: dict[fx.Node, str] = {}
        for node in self.index.nodes:
            if node.op == "get_attr" and self.index.is_parameter(str(node.target)):
                if self.index.captured.skeleton.get_parameter(str(node.target)).ndim > 1:
                    found[node] = str(node.target)
            elif node.op == "call_function":
                operands = self.index.operands[node]
                if (
                    operands
                    and operands[0].node in found
                    and all(
                        not op.node.meta["val"].is_floating_point() and ndim(operands[0].node) > 2
                        for op in operands[1:]
                    )
                ):
                    found[node] = found[operands[0].node]
        return found

    def _uses_of(self, node: fx.Node) -> Iterator[Use]:
        index = self.index
        if node in self.weight_of or _is_fused_attention(index, node):
            return
        if node.op == "call_module":
            skeleton = index.captured.skeleton
            params = [
                (str(node.target), name)
                for name in index.module_params[node].values()
                if index.is_parameter(name) and skeleton.get_parameter(name).ndim > 1
            ]
        else:
            names = [self.weight_of[op.node] for op in index.operands[node] if op.node in self.weight_of]
            params = [(name.rpartition(".")[0], name) for name in names]
        contracts = _contracts(index, node)
        for module, param in params:
            own = index.param_leaves.get(param, frozenset())
            taken = own & {leaf for c in contracts if c.how == SUM for leaf in leaves(c.axis)}
            looked_up = own & {leaf for c in contracts if c.how == LOOKUP for leaf in leaves(c.axis)}
            if taken or looked_up:
                made = (own & index.carried[node]) - taken - looked_up
                yield Use(node, module, param, made, taken, looked_up)

    def fused_attentions(self) -> Iterator[str]:
        """Paths of torch's own attention modules, which are recorded whole."""
        for node in self.index.nodes:
            if _is_fused_attention(self.index, node):
                yield str(node.target)

    def attentions(self) -> Iterator[Attention]:
        for node in self.index.nodes:
            if node.target is F.scaled_dot_product_attention:
                args = {**dict(enumerate(node.meta["args"])), **node.meta["kwargs"]}
                q, k, v = (
                    args[i] if i in args else args[name] for i, name in enumerate(("query", "key", "value"))
                )
                yield self._attention(node, q, [q], [k], [v])
            elif _is_softmax(self.index, node):
                products = [n for n in self._back([node]) if self._multiplies(n)]
                for result in self._forward_products(node) if products else ():
                    probabilities, values = (op.node for op in self._factors(result)[:2])
                    if node not in self._upstream(probabilities):
                        probabilities, values = values, probabilities
                    q, k = zip(*([op.node for op in self._factors(p)[:2]] for p in products), strict=True)
                    yield self._attention(result, probabilities, q, k, [values])

    def _attention(
        self,
        node: fx.Node,
        queries: fx.Node,
        q: Iterable[fx.Node],
        k: Iterable[fx.Node],
        v: Iterable[fx.Node],
    ) -> Attention:
        """`queries`: queries or scores. They have the heads, and in the last dim what is none: widths or
        keys."""
        carried = self.index.carried[node]
        takers = [u for n in self._forward(node) for u in self.use_at[n] if u.taken & carried]
        taken = frozenset(leaf for use in takers for leaf in use.taken & carried)
        heads = (taken & self.index.carried[queries]) - frozenset(leaves(self.index.axes.of[queries][-1]))
        q_uses, k_uses, v_uses = (self._makers(values, heads) for values in (q, k, v))
        return Attention(node, q_uses, k_uses, v_uses, tuple(takers), heads)

    def _makers(self, values: Iterable[fx.Node], heads: frozenset[Axis]) -> tuple[Use, ...]:
        """The uses that make these values; of several, those that bring the heads (a rotary part may come
        from another)."""
        found = [u for n in self._back(values) for u in self.use_at[n] if u.taken]
        return tuple([u for u in found if u.made & heads] or found)

    def _back(self, values: Iterable[fx.Node]) -> list[fx.Node]:
        """The nearest uses and products of two values at or before `values`, through everything else."""
        todo = list(values)
        ends, seen = [], set(todo)
        while todo:
            node = todo.pop()
            if self.use_at[node] or self._multiplies(node):
                ends.append(node)
                continue
            for op in self.index.operands[node]:
                if op.node not in seen and op.node not in self.weight_of:
                    seen.add(op.node)
                    todo.append(op.node)
        return ends

    def _forward(self, start: fx.Node) -> list[fx.Node]:
        """The first uses after `start`, through everything else."""
        ends, seen, todo = [], {start}, [start]
        while todo:
            for user, _ in self.index.uses[todo.pop()]:
                if user in seen or user.op == "output":
                    continue
                seen.add(user)
                if self.use_at[user]:
                    ends.append(user)
                else:
                    todo.append(user)
        return ends

    def _forward_products(self, softmax: fx.Node) -> list[fx.Node]:
        """The first products after a softmax in which its result meets other values, summed over the
        softmax's axis."""
        facts = self.index.facts(softmax)
        keys = {leaf for f in (facts.forbids if facts else ()) for leaf in leaves(f.axis)}
        ends, seen, todo = [], {softmax}, [softmax]
        while todo:
            for user, _ in self.index.uses[todo.pop()]:
                if user in seen or self.use_at[user] or user.op == "output":
                    continue
                seen.add(user)
                summed = {
                    leaf for c in _contracts(self.index, user) if c.how == SUM for leaf in leaves(c.axis)
                }
                if self._multiplies(user) and (summed & keys or not keys):
                    ends.append(user)
                else:
                    todo.append(user)
        return ends

    def _upstream(self, node: fx.Node) -> set[fx.Node]:
        """What `node` is computed from, uses and products excluded."""
        seen, todo = {node}, [node]
        while todo:
            current = todo.pop()
            if self.use_at[current] or self._multiplies(current):
                continue
            for op in self.index.operands[current]:
                if op.node not in seen:
                    seen.add(op.node)
                    todo.append(op.node)
        return seen

    def _factors(self, node: fx.Node):
        """The operands of a product of values; of a `baddbmm`, without what is added."""
        facts = self.index.facts(node)
        added = facts.addends if facts else ()
        return [
            op
            for op in self.index.operands[node]
            if op.path[0] not in added and op.node not in self.weight_of
        ]

    def _multiplies(self, node: fx.Node) -> bool:
        """Does it contract two values, neither of them a weight?"""
        summed = any(c.how == SUM for c in _contracts(self.index, node))
        return (
            summed and node.op == "call_function" and not self.use_at[node] and len(self._factors(node)) == 2
        )

    def reaches(self, use: Use, axis: Axis) -> tuple[list[Use], bool]:
        """The uses that take `axis` as `use` made it, through pointwise operations and changes of shape; and
        whether it reaches the model's output."""
        index, found, output = self.index, [], False
        seen = {use.node}
        queue = [(index.order[user], user) for user, _ in index.uses[use.node]]
        heapq.heapify(queue)
        while queue:
            _, node = heapq.heappop(queue)
            if node in seen:
                continue
            if node.op == "output":
                output = True
                continue
            takers = [u for u in self.use_at[node] if axis in u.taken]
            found += takers
            if takers or axis not in index.carried[node] or self._stops(node, axis, seen, use.node):
                continue
            seen.add(node)
            for user, _ in index.uses[node]:
                heapq.heappush(queue, (index.order[user], user))
        return found, output

    def _stops(self, node: fx.Node, axis: Axis, seen: set[fx.Node], start: fx.Node) -> bool:
        facts = self.index.facts(node)
        if facts is None or self._multiplies(node):
            return True
        if any(
            axis in leaves(a) for a in [c.axis for c in facts.contracts] + [f.axis for f in facts.forbids]
        ):
            return True
        others = [op.node for op in self.index.operands[node] if op.node not in seen]
        return any(
            self._shares_origin(other, axis, start) for other in others if axis in self.index.carried[other]
        )

    def _shares_origin(self, other: fx.Node, axis: Axis, start: fx.Node) -> bool:
        """Is `other` a value that `start` was computed from, or made from one without a weight? Then they
        meet in a residual addition."""
        seen, todo = {other}, [other]
        while todo:
            node = todo.pop()
            if self._depends(start, node):
                return True
            if self.use_at[node]:
                continue
            for op in self.index.operands[node]:
                if op.node not in seen and axis in self.index.carried[op.node] and op.node.op != "get_attr":
                    seen.add(op.node)
                    todo.append(op.node)
        return False

    def _depends(self, node: fx.Node, origin: fx.Node) -> bool:
        order = self.index.order
        seen, todo = {node}, [node]
        while todo:
            current = todo.pop()
            if current is origin:
                return True
            for op in self.index.operands[current]:
                if op.node not in seen and order[op.node] >= order[origin]:
                    seen.add(op.node)
                    todo.append(op.node)
        return False


def _is_fused_attention(index: GraphIndex, node: fx.Node) -> bool:
    if node.op != "call_module":
        return False
    return isinstance(index.captured.skeleton.get_submodule(str(node.target)), nn.MultiheadAttention)


def _is_softmax(index: GraphIndex, node: fx.Node) -> bool:
    if node.op != "call_module":
        return node.op == "call_function" and getattr(node.target, "__name__", "") == "softmax"
    return isinstance(index.captured.skeleton.get_submodule(str(node.target)), nn.Softmax)
