"""Plans kept on disk, so that the same model is planned once on a machine and not at every start.

A file holds one plan as JSON under the digest of all that it hangs on (`plan_key.py`). A plan names places
in the model's code; in a file they are the names of functions, found again among those of the model at hand.
What is not found, or can't be read, is planned anew. Where: the folder that the environment's AUTOTP_PLANS
names (empty: nowhere), else `autotp/plans` in the user's cache (XDG_CACHE_HOME, or ~/.cache)."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import CodeType
from typing import Any

from . import plan as plans
from .layouts import ParamLayout
from .pipeline.stages import Crossing, Stages, UnitCall
from .plan import Plan
from .plan_key import PlanKey, code_name
from .realise import Where
from .sites import Frame, Site

FORMAT = 1
_CLASSES: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        Plan, plans.ParamPlan, plans.LayerPlan, plans.SliceDim, plans.Collective, plans.LocalInt,
        plans.LocalArgument, plans.Region, plans.TpPlan, ParamLayout, Where, Site, Stages, UnitCall, Crossing,
    )
}  # fmt: skip
_PLAIN = (type(None), bool, int, float, str)


def folder() -> Path | None:
    """Where plans are kept; None for nowhere."""
    stated = os.environ.get("AUTOTP_PLANS")
    if stated is not None:
        return Path(stated) if stated else None
    cache = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(cache) if cache else Path.home() / ".cache") / "autotp" / "plans"
    except RuntimeError:  # a user without a home
        return None


def recall(key: PlanKey | None) -> Plan | None:
    """The plan that is kept under `key`; None where there is none, or none that can be read."""
    where = folder()
    if key is None or where is None:
        return None
    try:
        told = json.loads((where / f"{key.digest}.json").read_text())
        found = decoded(told["plan"], key.codes) if told["format"] == FORMAT else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return found if isinstance(found, Plan) else None


def keep(key: PlanKey | None, plan: Plan) -> None:
    """Put the plan where `recall` finds it, if it can be kept: not where one of its places in the code has no
    name of its own, nor where the folder can't be written."""
    where = folder()
    if key is None or where is None:
        return
    try:
        text = json.dumps({"format": FORMAT, "model": plan.model, "plan": encoded(plan, key.codes)})
        if decoded(json.loads(text)["plan"], key.codes) != plan:
            return
    except (TypeError, KeyError):
        return
    with contextlib.suppress(OSError):
        where.mkdir(parents=True, exist_ok=True)
        handle, part = tempfile.mkstemp(dir=where, suffix=".part")
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.replace(part, where / f"{key.digest}.json")


def encoded(value: Any, codes: Mapping[str, CodeType | None]) -> Any:
    """A plan as lists, numbers and strings. TypeError for a value of a kind that no file holds, KeyError for
    a place in the code without a name of its own."""
    if isinstance(value, _PLAIN):
        if type(value) not in _PLAIN:
            raise TypeError(f"a {type(value).__name__} can't be kept")
        return value
    if isinstance(value, Frame):
        name = code_name(value.code)
        if codes[name] is not value.code:
            raise KeyError(name)
        return ["Frame", name, value.lasti, value.lineno]
    if type(value) in (tuple, list, frozenset):
        parts = sorted(value, key=repr) if isinstance(value, frozenset) else value
        return [type(value).__name__, *(encoded(part, codes) for part in parts)]
    if isinstance(value, Mapping):
        return ["dict", *([encoded(k, codes), encoded(v, codes)] for k, v in value.items())]
    if is_dataclass(value) and _CLASSES.get(type(value).__name__) is type(value):
        return [type(value).__name__, *(encoded(getattr(value, f.name), codes) for f in fields(value))]
    raise TypeError(f"a {type(value).__name__} can't be kept")


def decoded(told: Any, codes: Mapping[str, CodeType | None]) -> Any:
    """What `encoded` was made of. ValueError, TypeError or KeyError where it was not."""
    if not isinstance(told, list):
        return told
    kind, *rest = told
    if kind == "Frame":
        name, lasti, lineno = rest
        code = codes[name]
        if code is None:
            raise KeyError(name)
        return Frame(code, lasti, lineno)
    if kind == "dict":
        return {decoded(k, codes): decoded(v, codes) for k, v in rest}
    parts = [decoded(part, codes) for part in rest]
    if kind in ("tuple", "list", "frozenset"):
        return {"tuple": tuple, "list": list, "frozenset": frozenset}[kind](parts)
    return _CLASSES[kind](*parts)
