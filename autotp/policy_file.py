"""Reading a policy: YAML with its line numbers, a dict of the same form, or a transformers `tp_plan`.

What is read here is only checked against itself: known keys, known roles, well-formed layouts. Whether it
fits a model is `policy.py`'s question.

A YAML file is composed into nodes, not loaded into dicts, so that every rule keeps its line and a key written
twice is seen. A dict has no lines: its rules are found by key.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import yaml

from .errors import PolicyError
from .stated_layout import Layout, parse_layout

ROLES: dict[str, str] = {
    "qkv": "out", "q": "out", "k": "out", "v": "out", "kv": "out", "qk": "out",
    "mlp_in": "out", "head": "out", "column": "out",
    "attn_out": "in", "mlp_out": "in", "row": "in",
    "embed": "lookup", "vocab": "lookup", "expert": "lookup",
    "experts": "any",
    "replicate": "none",
}  # fmt: skip
"""Each role and the side of the weight that it wants sharded: its output, its input, the axis that is looked
up (the vocabulary, the experts), any, or none."""

STYLES: dict[str, str | None] = {
    "colwise": "column", "colwise_rep": "column", "colwise_gather_output": "column",
    "packed_colwise": "column",
    "rowwise": "row", "rowwise_rep": "row", "rowwise_split_input": "row", "packed_rowwise": "row",
    "embedding_rowwise": "vocab", "embedding_colwise": "column",
    "grouped_gemm": "expert",
    "replicate": "replicate", "replicated_with_grad_allreduce": None,
    "mla_kv_a_proj": None, "moe_tp_experts": None, "moe_identity_expert": None, "ep_dispatch_experts": None,
    "all_reduce": None, "local_params": None, "sequence_parallel": None,
}  # fmt: skip
"""transformers' parallel styles (5.23) as roles. None: the style says where a collective goes, which follows
from the dataflow here, so it is noted and nothing is asked. Whether an output is gathered (`_rep`,
`_gather_output`) or an input is cut (`_split_input`) follows too."""

OPTIONS: dict[str, tuple[Any, ...]] = {
    "sequence_parallel": (False, True),
    "uneven": ("allow", "forbid"),
    "kv_replicate": ("allow", "forbid"),
    "alone": ("auto", "allow", "forbid"),  # auto: where the policy names no module
    "experts": ("split", "whole"),  # whole: as `ep=tp` asks
}
_TOP = ("schema", "match", "modules", "options", "stages")
_MATCH = ("model_type", "class")
_RULE = ("role", "layout")


@dataclass(frozen=True)
class Rule:
    """One line of a policy: `role` and `layout` for the modules or parameters whose names `pattern`
    matches."""

    pattern: str
    role: str | None
    layout: Layout | None
    where: str  # file:line, or the key in a dict

    @property
    def regex(self) -> re.Pattern[str]:
        """The pattern as a regex over whole names."""
        return compile_pattern(self.pattern, self.where)


@dataclass(frozen=True)
class PolicyFile:
    """One policy as read. `match`: model_type and class names it is for, any if empty. `options`: value and
    place. `stages`: where each pipeline stage but the first begins, and the place of that.

    `lenient`: a tp_plan, which covers every variant of an architecture: single patterns may match nothing.
    """

    name: str
    rules: tuple[Rule, ...] = ()
    match: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    match_where: str = ""
    options: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    lenient: bool = False
    stages: tuple[tuple[str, ...] | None, str] = (None, "")


def read(source: str | PathLike[str] | Mapping[str, Any]) -> PolicyFile:
    """Read one policy: the path of a YAML file, a dict of that form, or a tp_plan dict (pattern -> style).

    Raises PolicyError with file and line where it is malformed.
    """
    if isinstance(source, Mapping):
        return _policy(_entry(source, ""), "the policy dict")
    if not isinstance(source, (str, PathLike)):
        raise PolicyError(f"a policy is a path, a dict or a list of these, not a {type(source).__name__}.")
    path = Path(fspath(source))
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise PolicyError(f"{path}: the policy is not UTF-8 text ({error.reason}).") from None
    except OSError as error:
        near = [p.name for p in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
        raise PolicyError(
            f"{path}: the policy can't be read ({error.strerror}).{closest(path.name, near)}"
        ) from None
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        entry = _entry(node, str(path)) if node is not None else None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        raise PolicyError(f"{path}{line}: not YAML: {getattr(error, 'problem', None) or error}.") from None
    if entry is None:
        raise PolicyError(
            f"{path}:1: the policy is empty. It needs at least `modules:` with one pattern and its role."
        )
    return _policy(entry, str(path))


def closest(word: str, valid: Iterable[str], always: bool = False) -> str:
    """` Did you mean …?` with the words of `valid` nearest to `word`; with `always`, all of them where none
    is near."""
    words = sorted(set(valid))
    near = difflib.get_close_matches(word, words, n=3, cutoff=0.5)
    if near:
        return f" Did you mean {' or '.join(near)}?"
    return f" It can be: {', '.join(words)}." if always and words else ""


def compile_pattern(pattern: str, where: str) -> re.Pattern[str]:
    """A pattern over dotted names: `*` is one whole segment (or a part of one, without dots), `**` any number
    of segments, `re:…` a regex that must match the whole name. Raises PolicyError for a broken regex."""
    try:
        if pattern.startswith("re:"):
            return re.compile(pattern[3:])
        pieces = []
        for segment in pattern.split("."):
            if segment == "**":
                pieces.append(r"(?:[^.]+\.)*")
            elif segment == "*":
                pieces.append(r"[^.]+\.")
            else:
                pieces.append("[^.]*".join(re.escape(part) for part in segment.split("*")) + r"\.")
        # Every segment ends in a dot: names are matched with one appended.
        return re.compile("".join(pieces))
    except re.error as error:
        raise PolicyError(f"{where}: {pattern!r} is not a regex: {error}.") from None


def matches(rule_regex: re.Pattern[str], pattern: str, name: str) -> bool:
    """Does the compiled `pattern` match the whole of `name`?"""
    return rule_regex.fullmatch(name if pattern.startswith("re:") else f"{name}.") is not None


# --- one shape for YAML nodes and plain values --------------------------------------------------------------


@dataclass(frozen=True)
class _Entry:
    """A value of a policy: its place, and the value, with `_Entry`s in the containers."""

    where: str
    value: Any

    def items(self, what: str) -> Iterator[tuple[str, _Entry]]:
        if not isinstance(self.value, list) or not all(isinstance(pair, tuple) for pair in self.value):
            raise PolicyError(f"{self.where}: {what} must be a mapping, not {self.plain!r}.")
        yield from self.value

    @property
    def plain(self) -> Any:
        if not isinstance(self.value, list):
            return self.value
        if self.value and isinstance(self.value[0], tuple):
            return {key: entry.plain for key, entry in self.value}
        return [entry.plain for entry in self.value]

    @property
    def is_mapping(self) -> bool:
        return isinstance(self.value, list) and all(isinstance(pair, tuple) for pair in self.value)


def _entry(value: Any, file: str, path: str = "the policy dict") -> _Entry:
    """`value`, a YAML node or a plain value, as an `_Entry`; mappings become lists of (key, entry), keys
    unique."""
    if isinstance(value, yaml.Node):
        where = f"{file}:{value.start_mark.line + 1}"
        if isinstance(value, yaml.SequenceNode):
            return _Entry(where, [_entry(item, file) for item in value.value])
        if not isinstance(value, yaml.MappingNode):
            return _Entry(where, _scalar(value))
        pairs: dict[str, _Entry] = {}
        for key_node, item in value.value:
            at = f"{file}:{key_node.start_mark.line + 1}"
            key = str(_scalar(key_node))
            if key in pairs:
                raise PolicyError(
                    f"{at}: {key!r} is already given at {pairs[key].where}. Keep one of the two."
                )
            inner = _entry(item, file)
            pairs[key] = _Entry(at, inner.value)
        return _Entry(where, list(pairs.items()))
    if isinstance(value, Mapping):
        return _Entry(path, [(str(k), _entry(v, file, f"{path}[{str(k)!r}]")) for k, v in value.items()])
    if isinstance(value, (list, tuple)):
        return _Entry(path, [_entry(item, file, f"{path}[{i}]") for i, item in enumerate(value)])
    return _Entry(path, value)


def _scalar(node: yaml.Node) -> Any:
    # The safe constructor turns `false` and `1` into values; nothing else is constructed.
    return (
        yaml.SafeLoader("").construct_object(node) if isinstance(node, yaml.ScalarNode) else str(node.value)
    )


# --- the policy's own grammar -------------------------------------------------------------------------------


def _policy(entry: _Entry, name: str) -> PolicyFile:
    top = dict(entry.items("a policy"))
    if top and not set(top) & set(_TOP) and all(isinstance(item.value, str) for item in top.values()):
        return _tp_plan(top, name)
    _known(top, _TOP, "key")
    if "schema" in top and top["schema"].plain != 1:
        raise PolicyError(
            f"{top['schema'].where}: schema {top['schema'].plain!r} is unknown. This version reads schema 1."
        )
    match: dict[str, tuple[str, ...]] = {}
    if "match" in top:
        selection = dict(top["match"].items("match"))
        _known(selection, _MATCH, "key of match")
        for key, item in selection.items():
            names = item.plain if isinstance(item.plain, list) else [item.plain]
            if not names or not all(isinstance(n, str) for n in names):
                raise PolicyError(
                    f"{item.where}: match.{key} is a name or a list of names, not {item.plain!r}."
                )
            match[key] = tuple(names)
    options: dict[str, tuple[Any, str]] = {}
    for key, item in top["options"].items("options") if "options" in top else ():
        _known({key: item}, tuple(OPTIONS), "option")
        if not any(
            item.plain is valid or item.plain == valid and isinstance(valid, str) for valid in OPTIONS[key]
        ):
            valid = " or ".join(str(v).lower() for v in OPTIONS[key])
            raise PolicyError(f"{item.where}: option {key} is {valid}, not {item.plain!r}.")
        options[key] = (item.plain, item.where)
    rules = tuple(_rule(p, item) for p, item in top["modules"].items("modules")) if "modules" in top else ()
    stages: tuple[tuple[str, ...] | None, str] = (None, "")
    if "stages" in top:
        begun = top["stages"].plain
        if not isinstance(begun, list) or not all(isinstance(path, str) for path in begun):
            raise PolicyError(
                f"{top['stages'].where}: stages is a list of module paths, the first of each stage but the "
                f"first, not {begun!r}."
            )
        stages = tuple(begun), top["stages"].where
    place = top["match"].where if "match" in top else ""
    return PolicyFile(name, rules, match, place, options, stages=stages)


def _rule(pattern: str, item: _Entry) -> Rule:
    role: Any = item.plain
    layout = None
    if item.is_mapping:
        given = dict(item.items("a rule"))
        _known(given, _RULE, "key of a rule")
        if not given:
            raise PolicyError(f"{item.where}: {pattern!r} says nothing: give it a role, a layout, or both.")
        role = given["role"].plain if "role" in given else None
        if "layout" in given:
            layout = parse_layout(given["layout"].plain, given["layout"].where)
        if "role" in given and role is None:
            raise PolicyError(f"{item.where}: the role of {pattern!r} is empty.")
    elif role is None:
        raise PolicyError(f"{item.where}: {pattern!r} has no role.{closest('', ROLES, always=True)}")
    if role is not None and not (isinstance(role, str) and role in ROLES):
        if isinstance(role, str) and role in STYLES:
            hint = (
                f" That is a style of transformers; the role is {STYLES[role] or 'not needed: it follows'}."
            )
        else:
            hint = closest(str(role), ROLES, always=True)
        raise PolicyError(f"{item.where}: {role!r} is not a role.{hint}")
    if role == "replicate" and layout is not None:
        raise PolicyError(
            f"{item.where}: {pattern!r} is replicated, so its layout decides nothing. Give one of the two."
        )
    compile_pattern(pattern, item.where)
    return Rule(pattern, role, layout, item.where)


def _tp_plan(entries: Mapping[str, _Entry], name: str) -> PolicyFile:
    rules, notes = [], []
    for pattern, item in entries.items():
        style = item.value
        if style not in STYLES:
            # A policy whose `modules:` line was forgotten reads like a plan: roles are understood in both.
            if style not in ROLES:
                words = [*STYLES, *ROLES]
                raise PolicyError(
                    f"{item.where}: {style!r} is neither a role nor a parallel style of transformers."
                    f"{closest(style, words, always=True)}"
                )
            rules.append(Rule(pattern, style, None, item.where))
            continue
        role = STYLES[style]
        if role is None:
            notes.append(
                f"{item.where}: {pattern}: {style} asks for no split: what it does follows from the dataflow"
            )
        else:
            rules.append(Rule(pattern, role, None, item.where))
    return PolicyFile(name, tuple(rules), notes=tuple(notes), lenient=True)


def _known(given: Mapping[str, _Entry], valid: tuple[str, ...], what: str) -> None:
    for key, item in given.items():
        if key not in valid:
            raise PolicyError(f"{item.where}: unknown {what} {key!r}.{closest(key, valid, always=True)}")


__all__ = [
    "OPTIONS",
    "ROLES",
    "STYLES",
    "PolicyFile",
    "Rule",
    "closest",
    "compile_pattern",
    "matches",
    "read",
]
