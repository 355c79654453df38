"""Other ways through the model's code than the one the plan was made of: training, no images, other sizes.

A plan is made of one run, in eval mode and at one batch size and length. `if self.training:` and
`if x.shape[1] > 7:` take other ways, which no rule has seen. So the model is captured in those ways too.
Where a module that computes with sharded values does something else there, a plan is made of that, sharded on
the same dims; what the two do not agree on is a reason to keep the module whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._subclasses import fake_tensor

from .assumed import Answers
from .axes import Axis, factors, leaves, segments
from .capture import CapturedGraph, record, unchanged
from .compare import compare_way
from .data_ways import data_ways
from .errors import AutotpError, CaptureError, PlanError
from .graph import GraphIndex
from .ints import COMPARISONS, Comparison, Dim, dims_of, evaluate
from .modalities import text_alone
from .nested import map_parts, tensors_in
from .plan import Plan
from .propagate import propagate
from .recapture import Checked, Standin, alike
from .sites import Site

if TYPE_CHECKING:
    from .planner import Analysis

MOST = 8  # captures at other sizes
MOST_OF_DATA = 16  # captures in which data decide otherwise
Place = tuple[tuple[tuple[str, int], ...], str]  # lines of the calls that lead there, and what is called


@dataclass
class Way:
    """when: `in training`, `with a size of 1, not 12`. index: the model going that way. differs: the modules
    with sharded values that do something else then, and what."""

    when: str
    index: GraphIndex
    differs: dict[str, str]


@dataclass
class Ways:
    """`differing`: those in which a module with sharded values does something else. `unseen`: those that
    could not be recorded."""

    differing: list[Way] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)
    skipped: set[Site] = field(default_factory=set)


def other_ways(model: nn.Module, plan: Plan, found: Analysis, checked: Checked) -> Ways:
    """Capture `model` (hollow, in eval mode, as it was captured) in training and at other sizes.

    checked: holds the rewritten model, which is captured in the same ways. PlanError where it does something
    else there than the whole one, or with other numbers."""
    run = _Runner(model, alike(plan, found), found.captured.leaves, plan, found, checked)
    result = Ways()
    try:
        again, skipped = run("in training", found.captured.inputs, training=True)
    except PlanError:
        raise
    except AutotpError as error:
        result.unseen.append(f"in training: it can't be recorded so ({first_line(error)})")
    else:
        result.differing += _differing("in training", found, again, skipped)
    fewer = text_alone(found.captured)
    if fewer is not None:
        when = f"without {', '.join(n for n in found.captured.inputs if n not in fewer)}"
        try:
            again, skipped = run(when, fewer)
        except CaptureError as error:  # or the model itself takes no text alone
            if isinstance(error.__cause__, _READS_DATA):
                result.unseen.append(f"{when}: it can't be recorded so ({first_line(error)})")
        else:
            result.differing += _differing(when, found, again, skipped)
    _ways_of_data(run, found, result)
    sizes = Sizes(found.index)
    todo = [(sizes, changed) for changed in (*sizes.all_larger(), *sizes.turning())]
    done = {_shapes(found.captured.inputs)}
    while todo:
        sizes, changed = todo.pop(0)
        inputs = sizes.inputs(changed)
        if _shapes(inputs) in done:
            continue
        if len(done) > MOST:
            result.unseen.append("at more sizes: its code compares its inputs' sizes with too many numbers")
            break
        done.add(_shapes(inputs))
        when = "with a size of " + " and ".join(f"{new}, not {old.size}" for old, new in changed.items())
        try:
            again, skipped = run(when, inputs)
        except CaptureError as error:
            if isinstance(error.__cause__, _READS_DATA):
                result.unseen.append(f"{when}: it can't be recorded so ({first_line(error)})")
            elif len(changed) > 1:
                todo += [(sizes, {leaf: new}) for leaf, new in changed.items()]
            continue  # the model itself refuses such sizes
        for way in _differing(when, found, again, skipped):
            result.differing.append(way)
            todo += [(there, changed) for there in (Sizes(way.index),) for changed in there.turning()]
    return result


def _ways_of_data(run: _Runner, found: Analysis, result: Ways) -> None:
    sites = {n.meta.get("site") for n in found.index.nodes if n.op == "call_function"}
    for number, way in enumerate(data_ways(found.index)):
        if number == MOST_OF_DATA:
            result.unseen.append("on other data: its code asks for values at too many places")
            break
        try:
            again, skipped = run(way.when, found.captured.inputs, answers=way.answers)
        except PlanError:
            raise
        except AutotpError as error:
            own = error.__cause__ is None or isinstance(error.__cause__, _READS_DATA)
            if own and way.only_assumed:
                told = f"{way.when}: it can't be recorded so, and nothing is known of the values"
                raise PlanError(f"{told} ({first_line(error)})").at(
                    getattr(error, "module", None) or ""
                ) from error
            if own:
                result.unseen.append(f"{way.when}: it can't be recorded so ({first_line(error)})")
            continue  # else the model itself refuses such data
        result.differing += _differing(way.when, found, again, skipped)
        came_by = {n.meta.get("site") for n in again.graph.nodes if n.op == "call_function"}
        result.skipped |= {
            site
            for site in sites - came_by
            if site is not None and not f"{site.module}.".startswith(tuple(f"{path}." for path in skipped))
        }


_READS_DATA = (fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException)


def _shapes(inputs: dict[str, Any]) -> tuple[torch.Size, ...]:
    return tuple(tensor.shape for _, tensor in tensors_in(inputs))


def first_line(error: BaseException) -> str:
    return str(error).splitlines()[0]


class _Runner:
    """Captures the model, layers that are like an earlier one left out where that is possible, and compares
    the rewritten model with it."""

    def __init__(
        self,
        model: nn.Module,
        repeated: list[Any],
        leaves: tuple[type[nn.Module], ...],
        plan: Plan,
        found: Analysis,
        checked: Checked,
    ):
        self.model, self.leaves = model, leaves
        self.plan, self.found, self.checked = plan, found, checked
        self.standins = [(model.get_submodule(call.path), call) for call in repeated]

    def __call__(
        self, when: str, inputs: dict[str, Any], training: bool = False, answers: Answers | None = None
    ) -> tuple[CapturedGraph, tuple[str, ...]]:
        """The capture, and the paths of the layers left out. Raises what recording the model raises, and
        PlanError where the rewritten one does something else."""
        whole, skipped = self._whole(inputs, training, answers)
        if answers is not None:  # they go by places in code, which rewritten functions have others of
            return whole, skipped
        try:
            again = self._captured(self.checked.local, inputs, training, None)
        except AutotpError:
            return whole, skipped  # so it raises when it is run, too
        compare_way(self.found, self.plan, whole, again, when, self.checked.left_out)
        return whole, skipped

    def _whole(
        self, inputs: dict[str, Any], training: bool, answers: Answers | None
    ) -> tuple[CapturedGraph, tuple[str, ...]]:
        held = [module._modules for module, _ in self.standins]
        try:
            for module, call in self.standins:
                module.forward, module._modules = Standin(call.output, call), {}
            left_out = tuple(call.path for _, call in self.standins)
            return self._captured(self.model, inputs, training, answers), left_out
        except AutotpError:
            if not held:
                raise
        finally:
            for (module, _), parts in zip(self.standins, held, strict=True):
                module._modules = parts
                del module.forward
        return self._captured(self.model, inputs, training, answers), ()  # its layers can't be left out

    def _captured(
        self, model: nn.Module, inputs: dict[str, Any], training: bool, answers: Answers | None
    ) -> CapturedGraph:
        with unchanged(model):
            return record(model.train(training), inputs, self.leaves, answers)


def _differing(when: str, found: Analysis, again: CapturedGraph, skipped: tuple[str, ...]) -> Iterator[Way]:
    before, now = _places(found.captured), _places(again)
    scopes = {str(n.meta.get("scope")) for flow in found.choice.flows.values() for n in flow.inside}
    scopes |= {one.module for one in found.experts}
    called = {"", *(call.path for call in again.calls)}

    def not_told(name: str) -> bool:  # of dropout in training everybody knows, `lowering._regions` too
        return when != "in training" or "dropout" not in name

    differs: dict[str, str] = {}
    for scope in sorted(scopes & called):
        if scope in skipped:
            continue
        for places, others, does in ((now, before, "also does"), (before, now, "does no")):
            only = [(at, name) for at, name in sorted(places[scope] - others[scope]) if not_told(name)]
            if only:
                line = only[0][0][-1][1]
                names = ", ".join(dict.fromkeys(name for at, name in only if at[-1][1] == line))
                differs.setdefault(scope, f"it {does} {names} (line {line})")
    if differs:
        yield Way(when, GraphIndex(again, propagate(again, found.index.axes.rules)), differs)


def _places(captured: CapturedGraph) -> dict[str, set[Place]]:
    """By module, the places in its code where operations and modules are called."""
    found: dict[str, set[Place]] = defaultdict(set)
    calls = [
        (n.meta["site"], getattr(n.target, "__name__", str(n.target)))
        for n in captured.graph.nodes
        if n.op == "call_function" and n.meta.get("site")
    ]
    for site, name in [*calls, *((call.site, call.path.rpartition(".")[2]) for call in captured.calls)]:
        if site.frames:
            found[site.module].add((tuple((f.code.co_filename, f.lineno) for f in site.frames), name))
    return found


# --- sizes --------------------------------------------------------------------------------------------------


class Sizes:
    """The sizes of a graph's inputs that may change from call to call: leaves of the inputs' dims that no
    weight has."""

    def __init__(self, index: GraphIndex):
        self.index = index
        fixed = {
            leaf
            for dims in index.axes.params.values()
            for dim in dims
            if dim.find().kind != "concat"  # a table of which the first rows are taken
            for leaf in leaves(dim)
        }
        self.free: dict[Axis, None] = {}
        for node in index.nodes:
            if node.op == "placeholder":
                own = [leaf for dim in index.axes.of.get(node) or [] for leaf in leaves(dim)]
                self.free.update(dict.fromkeys(leaf for leaf in own if leaf not in fixed and leaf.size > 0))

    def all_larger(self) -> list[dict[Axis, int]]:
        return [{leaf: 2 * leaf.size + 1 for leaf in self.free}] if self.free else []

    def turning(self) -> Iterator[dict[Axis, int]]:
        """Sizes at which each comparison comes out the other way, where there are such."""
        chosen: list[dict[Axis, int]] = []
        for comparison in self.index.captured.comparisons:
            turns = [c for c in chosen if self._outcome(comparison, c) != self._outcome(comparison, {})]
            if turns or not {*dims_of(comparison.left), *dims_of(comparison.right)}:
                continue
            other = next(self._turned(comparison), None)
            if other is not None:
                chosen.append(other)
                yield other

    def _turned(self, comparison: Comparison) -> Iterator[dict[Axis, int]]:
        known = [value for side in (comparison.left, comparison.right) if (value := self._value(side, {}))]
        dims = (*dims_of(comparison.left), *dims_of(comparison.right))
        asked = {leaf for dim in dims for leaf in self._leaves(dim)}
        for leaf in self.free:
            if leaf not in asked:
                continue
            guesses = {int(v) for v in known} | {int(leaf.size * a / b) for a in known for b in known}
            near = {n + d for n in {*guesses, leaf.size} for d in (-1, 0, 1)} | {2, 3, 2 * leaf.size + 1}
            # One is a size apart: it stretches over any other. It comes last, and then alone.
            for new in sorted(n for n in near if 2 <= n <= 1 << 22) + [1]:
                if self._outcome(comparison, {leaf: new}) != self._outcome(comparison, {}):
                    yield {leaf: new}

    def _outcome(self, comparison: Comparison, changed: dict[Axis, int]) -> bool | None:
        left, right = self._value(comparison.left, changed), self._value(comparison.right, changed)
        return None if left is None or right is None else COMPARISONS[comparison.op](left, right)

    def _value(self, expr: Any, changed: dict[Axis, int]) -> Any:
        try:
            return evaluate(expr, self.index.captured.attributes, lambda d: self._dim(d, changed))
        except (KeyError, ZeroDivisionError):
            return None

    def _leaves(self, dim: Dim) -> set[Axis]:
        dims = self.index.axes.of.get(dim.node)
        return set(leaves(dims[dim.index])) if dims else set()

    def _dim(self, dim: Dim, changed: dict[Axis, int]) -> int:
        dims = self.index.axes.of.get(dim.node)
        if not dims:
            return dim.node.meta["val"].shape[dim.index]
        return resized(dims[dim.index], changed)

    def inputs(self, changed: dict[Axis, int]) -> dict[str, Any]:
        """The captured inputs at these sizes: rows are repeated, sequences go on as they end. Of tensors of
        fractions only shape, dtype and requires_grad are kept."""
        given = self.index.captured.inputs
        nodes = {str(n.target): n for n in self.index.nodes if n.op == "placeholder"}
        made: dict[int, torch.Tensor] = {}
        for name, tensor in tensors_in(given):
            dims = self.index.axes.of.get(nodes[name]) if name in nodes else None
            shape = tuple(resized(dim, changed) for dim in dims) if dims else tuple(tensor.shape)
            if shape != tuple(tensor.shape):
                made[id(tensor)] = _at_shape(tensor, shape)

        def changed_in(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return made.get(id(value), value)
            return map_parts(value, changed_in) if isinstance(value, (dict, list, tuple)) else value

        return changed_in(given)


def _at_shape(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    other = tensor.detach()
    if tensor.is_floating_point() or tensor.is_complex() or 0 in tensor.shape:
        return other.new_empty(shape, device="meta").requires_grad_(tensor.requires_grad)
    for dim, size in enumerate(shape):
        places = torch.arange(size, device=tensor.device)
        last = tensor.shape[dim] - 1
        other = other.index_select(dim, places % (last + 1) if dim == 0 else places.clamp(max=last))
    return other


def resized(dim: Axis, changed: dict[Axis, int]) -> int:
    """The size of `dim` with some leaves' sizes changed."""
    dim = dim.find()
    if dim.kind == "leaf":
        return changed.get(dim, dim.size)
    if dim.kind == "concat":
        return sum(resized(part, changed) for part in segments(dim))
    total = 1
    for part in factors(dim):
        total *= resized(part, changed)
    return total


__all__ = ["Sizes", "Way", "Ways", "other_ways", "resized"]
