"""One module instance's own `forward`, rewritten at single call sites, everything else of its Python kept.

A *site* is one expression in the source of a model, reached through the functions that led to it: `x.view(b,
s, h)` in `forward`, or in a function that `forward` calls. Rewriting it means: parse the file the function
comes from, replace that one node by a call of a helper, compile, and take the one code object out of the
result. Nothing of the file is run. The helper reaches the new code as a closure variable, so the function
keeps the globals of its own module: what is replaced there later is seen. Functions between `forward` and
the site are copied the same way and swapped in at the one call that leads there; no class, no module and no
other instance is touched.
"""

from __future__ import annotations

import ast
import copy
import difflib
import functools
import operator
import sys
import threading
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from autotp.errors import PatchError
from autotp.sitecall import Index, SitePatch, call_helper, method_helper, operator_helper, plain_helper
from autotp.source import codes_in, definition_of, where

if TYPE_CHECKING:
    from autotp.sites import Frame, Site


class _Swap:
    """Stands around the callee of one call: gives the patched copy of the function recorded there."""

    def __init__(self, variants: list[_Rewritten], where: str):
        self.variants = variants
        self.where = where
        # The last callee and its patched copy. torch.compile cannot make the copy: first call it eagerly.
        self.known: Any = None

    def __str__(self) -> str:
        return "the patched " + " or ".join(v.old.co_name for v in self.variants)

    def __call__(self, callee: Any) -> Any:
        function = callee.__func__ if isinstance(callee, types.MethodType) else callee
        known = self.known
        if known is None or known[0] is not function:
            known = self.known = (function, self._patched(function))
        if isinstance(callee, types.MethodType):
            return functools.partial(known[1], callee.__self__)  # torch.compile follows it, not a MethodType
        return known[1]

    def _patched(self, callee: Any) -> Any:
        for rewritten in self.variants:
            new = _replace(callee, rewritten)
            if new is not None:
                return new
        names = ", ".join(r.old.co_name for r in self.variants)
        raise PatchError(
            f"{self.where}: calls {getattr(callee, '__qualname__', callee)}, but {names} was called here "
            "when the model was recorded. Was the attention implementation changed? Set it before."
        )


# --- functions with new code --------------------------------------------------------------------------------


@dataclass
class _Rewritten:
    """One function's code, rewritten; `helpers`: what the new code finds in its closure by these names."""

    old: types.CodeType
    new: types.CodeType
    helpers: dict[str, Any]
    diff: list[str]  # lines of a unified diff, those of the functions it calls included

    def function(self, original: types.FunctionType) -> types.FunctionType:
        cells = dict(zip(self.old.co_freevars, original.__closure__ or (), strict=True))
        closure = tuple(
            cells[name] if name in cells else types.CellType(self.helpers[name])
            for name in self.new.co_freevars
        )
        return _with_code(original, self.new, closure)


def _with_code(f: types.FunctionType, code: types.CodeType, closure: tuple[Any, ...]) -> types.FunctionType:
    new = types.FunctionType(code, f.__globals__, f.__name__, f.__defaults__, closure)
    new.__kwdefaults__ = f.__kwdefaults__
    new.__qualname__, new.__doc__, new.__module__ = f.__qualname__, f.__doc__, f.__module__
    new.__annotations__ = f.__annotations__
    new.__dict__.update(f.__dict__)
    return new


def _replace(f: Any, rewritten: _Rewritten, seen: frozenset[int] = frozenset()) -> Any:
    """A copy of `f` with the function that `rewritten` is made from replaced; None where it is not in `f`.

    Looks through bound methods, partials and the closures of decorators. Nothing is changed in place.
    """
    if id(f) in seen:
        return None
    seen |= {id(f)}
    if isinstance(f, types.FunctionType):
        if f.__code__ is rewritten.old:
            return rewritten.function(f)
        for i, cell in enumerate(f.__closure__ or ()):
            try:
                content = cell.cell_contents
            except ValueError:  # an empty cell
                continue
            inner = _replace(content, rewritten, seen) if _may_hold(content) else None
            if inner is not None:
                closure = f.__closure__ or ()
                new = _with_code(f, f.__code__, (*closure[:i], types.CellType(inner), *closure[i + 1 :]))
                if new.__dict__.get("__wrapped__") is content:
                    new.__dict__["__wrapped__"] = inner
                return new
    elif isinstance(f, types.MethodType):
        inner = _replace(f.__func__, rewritten, seen)
        return None if inner is None else types.MethodType(inner, f.__self__)
    elif isinstance(f, functools.partial):
        inner = _replace(f.func, rewritten, seen)
        return None if inner is None else functools.partial(inner, *f.args, **f.keywords)
    elif not isinstance(f, type):  # an object with a `__call__` of its own
        inner = _replace(vars(type(f)).get("__call__"), rewritten, seen)
        return None if inner is None else types.MethodType(inner, f)
    return None


def _may_hold(value: Any) -> bool:
    return isinstance(value, (types.FunctionType, types.MethodType, functools.partial))


# --- editing ------------------------------------------------------------------------------------------------

_OPERATORS: dict[type[ast.AST], tuple[Callable[..., Any], Callable[..., Any] | None]] = {
    ast.Add: (operator.add, operator.iadd),
    ast.Sub: (operator.sub, operator.isub),
    ast.Mult: (operator.mul, operator.imul),
    ast.Div: (operator.truediv, operator.itruediv),
    ast.FloorDiv: (operator.floordiv, operator.ifloordiv),
    ast.Mod: (operator.mod, operator.imod),
    ast.Pow: (operator.pow, operator.ipow),
    ast.MatMult: (operator.matmul, operator.imatmul),
    ast.BitAnd: (operator.and_, operator.iand),
    ast.BitOr: (operator.or_, operator.ior),
    ast.BitXor: (operator.xor, operator.ixor),
    ast.LShift: (operator.lshift, operator.ilshift),
    ast.RShift: (operator.rshift, operator.irshift),
    ast.Eq: (operator.eq, None),
    ast.NotEq: (operator.ne, None),
    ast.Lt: (operator.lt, None),
    ast.LtE: (operator.le, None),
    ast.Gt: (operator.gt, None),
    ast.GtE: (operator.ge, None),
    ast.USub: (operator.neg, None),
    ast.UAdd: (operator.pos, None),
    ast.Invert: (operator.invert, None),
}


class _Editor(ast.NodeTransformer):
    """Replaces the nodes of `patches` (by identity) by calls of helpers, innermost first."""

    def __init__(self, patches: Mapping[ast.AST, SitePatch | _Swap], taken: set[str], file: str):
        self.patches = patches
        self.file = file
        self.taken = taken
        self.helpers: dict[str, Any] = {}
        self.meaning: dict[str, str] = {}

    def visit(self, node: ast.AST) -> Any:
        patch = self.patches.get(node)
        store = self._stored_to(node)
        node = self.generic_visit(node)
        if store is not None:
            return self._store(node, store)  # type: ignore[arg-type]
        if patch is None or (isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)):
            return node
        if isinstance(patch, _Swap):
            if not isinstance(node, ast.Call):
                raise self._refused(
                    node, "a function that is patched is entered by something that is not a call"
                )
            node.func = ast.copy_location(self._call(patch, patch, node.func, at=node.func), node.func)
            return node
        return self._replaced(node, patch)

    def _stored_to(self, node: ast.AST) -> SitePatch | None:
        """The patch of the one target of `x[i] = value`; PatchError where a target is one of several."""
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        inside = [t for target in targets if target is not None for t in ast.walk(target)]
        stored = [t for t in inside if t in self.patches and isinstance(getattr(t, "ctx", None), ast.Store)]
        if not stored:
            return None
        patch = self.patches[stored[0]]
        if not isinstance(node, ast.Assign) or len(targets) != 1 or stored[0] is not targets[0]:
            raise self._refused(
                node, "an item is stored among several targets, or by an augmented assignment"
            )
        if isinstance(patch, _Swap):
            raise self._refused(node, "a function that is patched is entered by something that is not a call")
        return patch

    def _call(
        self,
        helper: Any,
        patch: SitePatch | _Swap,
        *args: ast.expr,
        at: ast.AST,
        keywords: Sequence[ast.keyword] = (),
    ) -> ast.Call:
        name = next(n for i in range(sys.maxsize) if (n := f"_autotp_{i}") not in self.taken)
        self.taken.add(name)
        self.helpers[name] = helper
        self.meaning[name] = str(patch)
        call = ast.Call(ast.Name(name, ast.Load()), list(args), list(keywords))
        ast.copy_location(call, at)
        ast.fix_missing_locations(call)
        return call

    def _index(self, index: ast.expr) -> ast.expr:
        self.helpers["_autotp_index"] = Index()
        return ast.Subscript(ast.Name("_autotp_index", ast.Load()), index, ast.Load())

    def _store(self, node: ast.Assign, patch: SitePatch) -> ast.stmt:
        target = node.targets[0]
        assert isinstance(target, ast.Subscript)
        helper = plain_helper(patch, operator.setitem, (1, 2, 0))  # Python evaluates the value first
        call = self._call(helper, patch, node.value, target.value, self._index(target.slice), at=target)
        return ast.copy_location(ast.Expr(call), node)

    def _replaced(self, node: Any, patch: SitePatch) -> ast.AST:
        if isinstance(node, ast.Call):
            f = node.func
            if isinstance(f, ast.Attribute) and not (f.attr.startswith("__") and not f.attr.endswith("__")):
                args = [f.value, ast.Constant(f.attr), *node.args]
                return self._call(method_helper(patch), patch, *args, at=node, keywords=node.keywords)
            return self._call(call_helper(patch), patch, f, *node.args, at=node, keywords=node.keywords)
        if isinstance(node, ast.Subscript):
            helper = plain_helper(patch, operator.getitem, (0, 1))
            return self._call(helper, patch, node.value, self._index(node.slice), at=node)
        if isinstance(node, ast.Attribute):
            return self._call(
                plain_helper(patch, operator.attrgetter(node.attr), (0,)), patch, node.value, at=node
            )
        kind: ast.AST
        if isinstance(node, ast.Compare):
            operands, kind = [node.left, *node.comparators], node.ops[0]
        elif isinstance(node, ast.UnaryOp):
            operands, kind = [node.operand], node.op
        elif isinstance(node, ast.BinOp):
            operands, kind = [node.left, node.right], node.op
        else:
            assert isinstance(node, ast.AugAssign)
            operands, kind = [self._loaded(node.target), node.value], node.op
        if type(kind) not in _OPERATORS or len(operands) > 2:
            raise self._refused(node, "not an operation on tensors that can be replaced")
        function, in_place = _OPERATORS[type(kind)]
        if isinstance(node, ast.AugAssign) and in_place is not None:
            call = self._call(operator_helper(patch, in_place), patch, *operands, at=node)
            return ast.copy_location(ast.Assign([node.target], call), node)
        return self._call(operator_helper(patch, function), patch, *operands, at=node)

    def _loaded(self, target: ast.expr) -> ast.expr:
        """The target of an augmented assignment as a value: evaluated twice, so it must not call anything."""
        if any(isinstance(n, (ast.Call, ast.NamedExpr, ast.Await)) for n in ast.walk(target)):
            raise self._refused(target, "would be evaluated twice")
        value = copy.deepcopy(target)
        value.ctx = ast.Load()  # type: ignore[attr-defined]
        return value

    def _refused(self, node: Any, why: str) -> PatchError:
        return PatchError(f"{self.file}:{node.lineno}: `{ast.unparse(node)}`: {why}")


def _rewrite(code: types.CodeType, entries: list[tuple[tuple[Frame, ...], SitePatch]]) -> _Rewritten:
    """`code` with every entry's site patched; an entry's frames lead from `code` to its site."""
    here = codes_in(code)
    patches: dict[tuple[types.CodeType, int], SitePatch] = {}
    calls: dict[
        tuple[types.CodeType, int], dict[types.CodeType, list[tuple[tuple[Frame, ...], SitePatch]]]
    ] = {}
    for frames, patch in entries:
        if sum(f.code is code for f in frames) != 1:
            raise PatchError(
                f"{code.co_name} calls itself on the way to the site" if frames else "the site is empty"
            )
        last = max(i for i, f in enumerate(frames) if any(f.code is c for c in here))
        place = (frames[last].code, frames[last].lasti)
        if last == len(frames) - 1:
            if patches.setdefault(place, patch) != patch:
                raise PatchError(
                    f"{where(*place)}: one call site needs two patches ({patches[place]}; {patch}), as in "
                    "a loop whose rounds differ"
                )
        else:
            calls.setdefault(place, {}).setdefault(frames[last + 1].code, []).append(
                (frames[last + 1 :], patch)
            )

    definition = definition_of(code)
    original = ast.unparse(definition.statement)
    diff: list[str] = []
    edits: dict[ast.AST, SitePatch | _Swap] = {}
    for place in [*patches, *calls]:
        try:
            node = definition.node_at(*place)
        except PatchError as error:
            raise PatchError(f"{where(*place)}: {error}") from error
        if node in edits:
            raise PatchError(
                f"{where(*place)}: `{ast.unparse(node)}` is an operation and calls a function that is patched"
            )
        if place in patches:
            edits[node] = patches[place]
        else:
            variants = [_rewrite(callee, group) for callee, group in calls[place].items()]
            diff += [line for v in variants for line in v.diff]
            edits[node] = _Swap(variants, where(*place))
    editor = _Editor(
        edits, {n.id for n in ast.walk(definition.statement) if isinstance(n, ast.Name)}, code.co_filename
    )
    statement = editor.visit(definition.statement)
    new = definition.compiled(statement, sorted(editor.helpers))
    header = f"{code.co_filename}:{code.co_firstlineno} {code.co_name}"
    lines = list(
        difflib.unified_diff(original.splitlines(), ast.unparse(statement).splitlines(), n=0, lineterm="")
    )
    notes = [f"# {name}: {editor.meaning[name]}" for name in sorted(editor.meaning)]
    own = [
        f"--- {header}",
        f"+++ {header} (patched)",
        *[x for x in lines[2:] if not x.startswith("@@")],
        *notes,
    ]
    return _Rewritten(code, new, editor.helpers, own + diff)


# --- the front ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Record:
    """Kept on a patched module: what was changed, and the guard against losing it without a word."""

    diff: tuple[str, ...]

    def __deepcopy__(self, memo: dict[int, Any]) -> _Record:
        return self

    def __reduce__(self) -> Any:
        raise PatchError(
            "a patched module cannot be pickled: its forward would be lost. Save its state_dict (or use "
            "autotp.save), and parallelize a fresh model when loading."
        )


_PARSING = threading.Lock()  # CPython's ast is not safe to use from several threads


def patch_forward(
    module: nn.Module, patches: Mapping[Site, SitePatch] | Iterable[tuple[Site, SitePatch]]
) -> Callable[..., Any]:
    """Give `module` a forward of its own in which every site's operation is changed as its patch says.

    patches: all patches of this module at once; every site's frames begin at its forward. A site may come
    twice with equal patches. The class and other instances stay as they are; a deep copy of the module is
    patched too, and bound to itself. A patched module cannot be pickled. Returns the new `module.forward`.
    Raises PatchError, before anything is changed: no source, an expression that cannot be replaced, a site
    with two patches, a forward that is patched. And when the model takes another way than the recorded one.
    """
    pairs = list(patches.items() if isinstance(patches, Mapping) else patches)
    name = next((site.module for site, _ in pairs if site.module), type(module).__name__)
    if "_autotp_patch" in vars(module):
        raise PatchError(f"{name}: is patched already; give all patches of a module in one call")
    codes = {site.frames[0].code if site.frames else None: None for site, _ in pairs}
    if len(codes) != 1 or None in codes:
        raise PatchError(f"{name}: the sites do not all begin in one forward of known source")
    try:
        with _PARSING:
            rewritten = _rewrite(pairs[0][0].frames[0].code, [(site.frames, patch) for site, patch in pairs])
    except PatchError as error:
        raise PatchError(f"{name}: {error}") from error
    forward = _replace(module.forward, rewritten)
    if forward is None:
        raise PatchError(f"{name}: its forward is not the {rewritten.old.co_name} that was recorded").at(name)
    module.forward = forward
    module._autotp_patch = _Record(tuple(rewritten.diff))  # type: ignore[assignment]
    return forward


def patched_source(module: nn.Module) -> str:
    """What `patch_forward` changed in a module and below: a unified diff of the changed lines, or ""."""
    records = [vars(m).get("_autotp_patch") for m in module.modules()]
    return "\n".join(line for record in records if record for line in record.diff)
