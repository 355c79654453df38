"""From a place in running code to the node of its source, and from an edited source back to code.

A code object is compiled from a definition somewhere in a file. `definition_of` cuts that definition out (a
class keeps the one member, so that names, closures and `super()` come out the same), compiles it and takes
the code object that is equal to the one that runs; where there is none, the source is not what runs.
"""

from __future__ import annotations
import __future__

import ast
import copy
import dis
import functools
import inspect
import sys
import threading
import types
from collections.abc import Sequence
from dataclasses import dataclass

from autotp.errors import PatchError

_EXPRESSIONS = (ast.Call, ast.BinOp, ast.AugAssign, ast.Compare, ast.UnaryOp, ast.Subscript, ast.Attribute)


# CPython 3.11's parser and compiler keep their depth of recursion for all threads together, and fail when two
# work at once.
PARSER = threading.Lock()


@functools.lru_cache(maxsize=16)
def _parse(source: str) -> ast.Module:
    with PARSER:
        return ast.parse(source)


def codes_in(code: types.CodeType) -> list[types.CodeType]:
    """The code object and all that are defined inside it, in a fixed order."""
    nested = [c for const in code.co_consts if isinstance(const, types.CodeType) for c in codes_in(const)]
    return [code, *nested]


def _statement(body: Sequence[ast.stmt], line: int) -> ast.stmt:
    """The definition around a line without its neighbours: a class keeps one member, `if` and `try` go."""
    for node in body:
        first = min([node.lineno, *[d.lineno for d in getattr(node, "decorator_list", [])]])
        if not first <= line <= (node.end_lineno or first):
            continue
        if isinstance(node, ast.ClassDef):
            member = _statement(node.body, line)
            fields = {name: value for name, value in ast.iter_fields(node) if name != "type_params"}
            fields.update(body=[member], bases=[], keywords=[], decorator_list=[])
            if sys.version_info >= (3, 12):
                fields["type_params"] = node.type_params
            return ast.copy_location(ast.ClassDef(**fields), node)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return copy.deepcopy(node)
        inner = _inside(node)
        return _statement(inner, line) if inner else copy.deepcopy(node)
    raise PatchError(f"line {line} is not in the source that is on disk")


def _imports(body: Sequence[ast.stmt]) -> list[ast.stmt]:
    """The imports of a file's top level: calls on an imported name compile otherwise than method calls."""
    found: list[ast.stmt] = []
    for node in body:
        if isinstance(node, ast.Import) or (isinstance(node, ast.ImportFrom) and node.module != "__future__"):
            found.append(node)
        elif not isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            found += _imports(_inside(node))
    return found


def _inside(node: ast.stmt) -> list[ast.stmt]:
    """The statements of a compound statement (`if`, `try`, `with`, ...)."""
    parts = [part for name in ("body", "orelse", "finalbody", "handlers") for part in getattr(node, name, [])]
    return [s for part in parts for s in (part.body if isinstance(part, ast.ExceptHandler) else [part])]


def _compile(body: Sequence[ast.stmt], code: types.CodeType) -> list[types.CodeType]:
    flags = code.co_flags & __future__.annotations.compiler_flag
    module = ast.Module(list(body), [])
    with PARSER:
        compiled = compile(module, code.co_filename, "exec", flags=flags, dont_inherit=True)
    return codes_in(compiled)


def _steps(code: types.CodeType) -> list[dis.Instruction]:
    """The instructions that compute. Which jumps and fillers stand between them depends on line numbers."""
    jumps = {*dis.hasjrel, *dis.hasjabs, dis.opmap["NOP"], dis.opmap.get("EXTENDED_ARG", -1)}
    return [i for i in dis.get_instructions(code) if i.opcode not in jumps]


@dataclass(frozen=True)
class Definition:
    """The source of `code`: the top-level `statement` it is defined in, below the file's `imports`."""

    code: types.CodeType
    imports: list[ast.stmt]
    statement: ast.stmt
    index: int  # which of the code objects that come out of the statement

    def node_at(self, code: types.CodeType, lasti: int) -> ast.AST:
        """The node of `statement` whose value an instruction computes.

        code: the code itself or one defined inside it (a comprehension); lasti: as `frame.f_lasti`, in bytes.
        Raises PatchError where that is not one expression on values: iteration, unpacking, `with`.
        """
        opname = dis.opname[code.co_code[lasti]]
        if sys.version_info >= (3, 11):
            found = self._nodes_at_columns(code, lasti)
        else:
            found = self._nodes_by_recompiling(code, lasti)
        found = [node for node in found if isinstance(node, _EXPRESSIONS)]
        store = opname.startswith("STORE")
        found = [node for node in found if isinstance(getattr(node, "ctx", None), ast.Store) == store]
        if len(found) != 1:
            raise PatchError(f"the operation ({opname}) is not one expression that can be replaced")
        return found[0]

    def _nodes_at_columns(self, code: types.CodeType, lasti: int) -> list[ast.AST]:
        line, end_line, column, end_column = list(code.co_positions())[lasti // 2]
        found: list[ast.AST] = []
        for node in ast.walk(self.statement):
            if not isinstance(node, (ast.expr, ast.stmt)):
                continue
            starts = [(node.lineno, node.col_offset)]
            # in a chain over several lines the interpreter places a method call where the method's name is
            name = node.func if isinstance(node, ast.Call) else node
            if isinstance(name, ast.Attribute):
                starts.append((name.end_lineno or 0, (name.end_col_offset or 0) - len(name.attr.encode())))
            if (line, column) in starts and (node.end_lineno, node.end_col_offset) == (end_line, end_column):
                found.append(node)
        return found

    def _nodes_by_recompiling(self, code: types.CodeType, lasti: int) -> list[ast.AST]:
        """Python 3.10 knows only lines: compile with each node on a line of its own, and look it up."""
        nodes = [node for node in ast.walk(self.statement) if hasattr(node, "lineno")]
        marked = copy.deepcopy(self.statement)
        copies = [node for node in ast.walk(marked) if hasattr(node, "lineno")]
        for number, node in enumerate(copies, start=1):
            node.lineno = node.end_lineno = number  # type: ignore[attr-defined]
            node.col_offset = node.end_col_offset = 0  # type: ignore[attr-defined]
        for node in copies:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                node.func.lineno = node.func.end_lineno = node.lineno  # where a method call is placed
        inner = next(i for i, c in enumerate(codes_in(self.code)) if c is code)
        again = _compile([*self.imports, marked], self.code)[self.index + inner]
        mine, theirs = _steps(code), _steps(again)
        step = next((i for i, instruction in enumerate(mine) if instruction.offset == lasti), None)
        if step is None:  # a jump, which asks whether a value is true
            return []
        if [(i.opcode, i.arg) for i in mine] != [(i.opcode, i.arg) for i in theirs]:
            raise PatchError("the expression is not determined by its line; Python 3.11 or later knows it")
        offset = theirs[step].offset
        lines = [line for start, end, line in again.co_lines() if start <= offset < end]
        return [nodes[line - 1] for line in lines if line]

    def compiled(self, statement: ast.stmt, helpers: Sequence[str]) -> types.CodeType:
        """The code that the edited statement gives; it takes the names in `helpers` from its closure."""
        own = [n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
        if isinstance(statement, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            own = [statement.name]
        with PARSER:
            scope = ast.parse(f"def _autotp_scope({', '.join(helpers)}):\n    pass").body[0]
        assert isinstance(scope, ast.FunctionDef)
        # what the file defines at its top level stays global
        scope.body = [*([ast.Global(sorted(set(own)))] if own else []), statement]
        ast.fix_missing_locations(scope)
        return _compile([*self.imports, scope], self.code)[self.index + 1]


def definition_of(code: types.CodeType) -> Definition:
    """The source of a code object. Raises PatchError where there is none, or where it gives other code."""
    try:
        lines, _ = inspect.findsource(code)
        body = _parse("".join(lines)).body
        imports, statement = _imports(body), _statement(body, code.co_firstlineno)
        codes = _compile([*imports, statement], code)
    except (OSError, SyntaxError) as error:
        raise PatchError(f"no source for {code.co_name} ({code.co_filename}): {error}") from error
    for index, candidate in enumerate(codes):
        if candidate == code:
            return Definition(code, imports, statement, index)
    raise PatchError(
        f"the source of {code.co_name} at {code.co_filename}:{code.co_firstlineno} is not what runs: it was "
        "edited since it was imported, is patched already, or is rewritten by an import hook"
    )


def where(code: types.CodeType, lasti: int) -> str:
    """For messages: the function, file and line of an instruction."""
    line = next((n for start, end, n in code.co_lines() if start <= lasti < end), None)
    return f"{code.co_name} at {code.co_filename}:{line or code.co_firstlineno}"
