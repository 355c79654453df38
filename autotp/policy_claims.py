"""Which modules and parameters of a model the rules of a policy name."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from .errors import PolicyError
from .graph import canonical_names
from .policy_file import PolicyFile, Rule, closest, matches

Problem = tuple[Rule | None, str]


@dataclass(frozen=True)
class Claim:
    """What a rule asks of one module: `params`, by the model's own first names, are the module's."""

    rule: Rule
    module: str
    params: tuple[str, ...]


def selects(file: PolicyFile, model: nn.Module) -> bool:
    """Is the policy for this model? Its class, or a base of it, and its config's model_type decide."""
    config = getattr(model, "config", None)
    classes = {cls.__name__ for cls in type(model).__mro__}
    types = {str(getattr(config, "model_type", ""))}
    return all(set(names) & (classes if key == "class" else types) for key, names in file.match.items())


def describe_model(model: nn.Module) -> str:
    """The model as `match:` sees it."""
    kind = getattr(getattr(model, "config", None), "model_type", None)
    return f"a {type(model).__name__}" + (f" of model_type {kind}" if kind else "")


def find_claims(file: PolicyFile, model: nn.Module, notes: list[str]) -> dict[str, Claim]:
    """The file's claims by parameter, under the name it is reached by. Raises PolicyError with all patterns
    that fail."""
    first = canonical_names(model)
    params = dict(model.named_parameters(remove_duplicate=False))
    owners = {name.rpartition(".")[0] for name in params}
    modules = [name for name, _ in model.named_modules(remove_duplicate=False)]
    names = [*modules, *params]
    prefixes = _prefixes(model) if file.lenient else ("",)
    found: list[Problem] = []
    claims: dict[str, Claim] = {}
    unmatched = []
    for rule in file.rules:
        regex = rule.regex
        hits = [
            n
            for n in names
            for p in prefixes
            if n.startswith(p) and matches(regex, rule.pattern, n[len(p) :])
        ]
        if not hits:
            unmatched.append(rule)
            continue
        targets: dict[str, list[str]] = {}  # module -> its parameters
        for hit in hits:
            if hit in params:
                targets.setdefault(hit.rpartition(".")[0], []).append(hit)
            elif rule.role == "replicate":
                for owner in owners:
                    if owner == hit or owner.startswith(f"{hit}." if hit else ""):
                        targets.setdefault(owner, []).extend(_own(params, owner))
            elif any(params[n].ndim > 1 for n in _own(params, hit)):
                targets.setdefault(hit, []).extend(_own(params, hit))
        if not targets:
            inner = [o for o in sorted(owners) if o.startswith(f"{hits[0]}.")]
            hint = f" Name what holds one: {', '.join(inner[:4])}." if inner else ""
            found.append((rule, f"{hits[0]} has no weight of its own to be {rule.role or 'laid out'}.{hint}"))
        for module, own in targets.items():
            claim = Claim(rule, module, tuple(dict.fromkeys(first[id(params[n])] for n in own)))
            for name in dict.fromkeys(own):
                other = claims.get(name)
                if other is not None and other.rule is not rule:
                    place, pattern = other.rule.where, other.rule.pattern
                    found.append(
                        (rule, f"{module} already has a rule at {place} ({pattern!r}). Keep one of the two.")
                    )
                    break
                claims[name] = claim
    if file.lenient and len(unmatched) < len(file.rules):
        notes += [f"{rule.where}: matches nothing in this model" for rule in unmatched]
    else:
        words = {re.sub(r"(^|(?<=\.))\d+(?=\.|$)", "*", name) for name in (*owners, *params)} | set(owners)
        found += [
            (
                rule,
                f"{rule.pattern!r} matches no module or parameter of {type(model).__name__}."
                f"{closest(rule.pattern, words)}",
            )
            for rule in unmatched
        ]
    refuse(found)
    return claims


def _own(params: Mapping[str, nn.Parameter], module: str) -> list[str]:
    return [name for name in params if name.rpartition(".")[0] == module]


def _prefixes(model: nn.Module) -> tuple[str, ...]:
    """Where a tp_plan's names may begin: at the model, or at the base model in it, as its class says."""
    found = {""}
    for path, module in model.named_modules():
        base = getattr(type(module), "base_model_prefix", "")
        if base and isinstance(getattr(module, base, None), nn.Module):
            found.add(f"{path}.{base}." if path else f"{base}.")
    return tuple(sorted(found))


def refuse(found: Sequence[Problem]) -> None:
    """Raise one PolicyError for all of `found`: one line for each rule, the first of its failures in full."""
    by_rule: dict[str, list[str]] = {}
    for rule, text in found:
        by_rule.setdefault(f"{rule.where}: " if rule else text, []).append(text)
    lines = []
    for where, texts in by_rule.items():
        more = f" (and {len(texts) - 1} more like it)" if len(texts) > 1 else ""
        lines.append((where + texts[0] if where != texts[0] else where) + more)
    if lines:
        raise PolicyError("\n".join(lines))


__all__ = ["Claim", "Problem", "describe_model", "find_claims", "refuse", "selects"]
