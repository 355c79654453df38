"""Run the model against every published table: `python -m tools.validate [--rows] [TABLE ...]`, Markdown on
stdout.

TABLE: words that the table's name must have. --rows: every row, too. Needs transformers, for the models'
configs.
"""

from __future__ import annotations

import sys
from collections import defaultdict

from .models import Models
from .report import Outcome, line, outcomes
from .tables import Case, serving, training


def main(arguments: list[str]) -> None:
    """Print the report."""
    words = [a.lower() for a in arguments if not a.startswith("--")]
    tables: dict[str, list[Case]] = defaultdict(list)
    models = Models()
    for case in [*training(models), *serving(models)]:
        if all(w in case.table.lower() for w in words):
            tables[case.table].append(case)
    print("| table | rows | n | mean error | median | worst | bias | regret (worst) | Spearman |")
    print("|---|---|--:|--:|--:|--:|--:|--:|--:|")
    details: list[str] = []
    for table, cases in tables.items():
        found = outcomes(cases)
        fitted = [o for o in found if o.case.fit]
        print(line(table, [o for o in found if not o.case.fit], "held out"))
        print(line(table, fitted, "fitted to"))
        print(line(table, found, "all"), flush=True)
        details += [detail(o) for o in found]
    if "--rows" in arguments:
        print("\n".join(["", *details]))


def detail(o: Outcome) -> str:
    """One case in one line."""
    scale, unit = (2**30, "GiB") if o.case.what == "memory" else (1.0, "s")
    return (
        f"{o.error:+7.1%}  {o.case.measured / scale:10.3f} {unit} measured, "
        f"{o.predicted / scale:10.3f} predicted  "
        f"{'fit' if o.case.fit else 'out'}  {o.case.table}: {o.case.name}"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
