"""One short rule per operation: which dims of operands and results are the same axis, and what is done to
each."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from . import factories, indexing, modules, pointwise, products, reductions, shapes
from .op import (
    Contract,
    Dims,
    Facts,
    Forbid,
    NoRule,
    Op,
    OwnRules,
    Rule,
    Rules,
    everywhere,
    rule,
    rules_by_target,
)

RULES: Mapping[Any, Rule] = MappingProxyType(
    {
        **pointwise.RULES,
        **shapes.RULES,
        **indexing.RULES,
        **products.RULES,
        **reductions.RULES,
        **factories.RULES,
        **modules.RULES,
    }
)
"""The built-in rules, by torch function, `torch.Tensor` method or leaf module class."""

SEES_NUMBERS = frozenset({*pointwise.RULES, *indexing.RULES, *everywhere("split", "split_with_sizes")})
"""Operations whose rules know what it means that one of their numbers was read from a tensor."""

__all__ = [
    "RULES",
    "SEES_NUMBERS",
    "Contract",
    "Dims",
    "Facts",
    "Forbid",
    "NoRule",
    "Op",
    "OwnRules",
    "Rule",
    "Rules",
    "everywhere",
    "rule",
    "rules_by_target",
]
