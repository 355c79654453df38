"""Degrees that are left to the search: `parallelize(model, tp="auto", pp="auto")`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from torch import nn

from .comm import Comm
from .errors import AutotpError, LaunchError
from .same import agree
from .search.find import choose_degrees

Degree = int | Literal["auto"]


def chosen(
    model: nn.Module, asked: Mapping[str, Degree | None], world: Comm, workload: Mapping[str, Any] | None
) -> dict[str, int]:
    """The degrees of `asked` (tp, pp, dp), those that are "auto" as the search finds them best for `world`'s
    ranks. The given ones are kept.

    workload: what the search goes by: cluster, batch, seq, mode; see `autotp.search`. Collective: all ranks
    get the same, or RankError; SearchError where nothing fits.
    """
    for name, degree in asked.items():
        if degree is not None and degree != "auto" and not isinstance(degree, int):
            raise LaunchError(f'{name}={degree!r}: give a number of ranks, or "auto".')
    held = {name: degree for name, degree in asked.items() if isinstance(degree, int)}
    outcome: str | BaseException
    found: dict[str, int] = {}
    try:
        found = choose_degrees(model, world.size, **{**(workload or {}), **held})
        outcome = f"the degrees {found}"
    except Exception as error:  # of any kind: the other ranks must hear of it
        outcome = error
    try:
        agree(world, outcome)
    except AutotpError as error:
        raise (outcome if isinstance(outcome, BaseException) else error) from None
    return found
