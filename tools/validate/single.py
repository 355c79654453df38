"""What vTrain's single-node table is made of, and how well it can be ranked.

    python -m tools.validate.single

Its times are `a + b L + m (c + d L)`, to the last digit without data parallelism, for L layers and m
micro-batches of one width, tp and micro-batch: they were put together from measured pieces. So d, the
milliseconds of a layer, can be solved for. Then the runs are ranked by times in which pieces are not, or not
quite, known.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

from .report import spearman
from .tables import GROUP, rows

Row = dict[str, Any]
Piece = tuple[int, int, int]  # hidden, tp, micro-batch
LAUNCHED = 3.7  # milliseconds: layers that take less are bound by the host, at tp < 8


def table() -> list[Row]:
    """The rows as numbers; m: micro-batches of a rank."""
    found: list[Row] = []
    for row, fit in rows("vtrain_ground_truth_single", *GROUP):
        r: Row = {k: float(v) if k == "iter_ms" else int(v) for k, v in row.items()}
        found.append(r | {"fit": fit, "m": r["gbs"] // r["dp"] // r["mbs"]})
    return found


def pieces(found: list[Row]) -> tuple[dict[Piece, float], list[tuple[int, int, float]]]:
    """Milliseconds of a layer by (hidden, tp, micro-batch); and of each group of at least six runs without a
    pipeline its dp, size and worst relative residual."""
    groups: dict[tuple[int, ...], list[Row]] = defaultdict(list)
    for r in found:
        if r["pp"] == 1:
            groups[r["hidden"], r["tp"], r["mbs"], r["dp"]].append(r)
    layers: dict[Piece, list[float]] = defaultdict(list)
    residuals: list[tuple[int, int, float]] = []
    for (hidden, tp, mbs, dp), some in groups.items():
        a = np.array([[1, r["layers"], r["m"], r["m"] * r["layers"]] for r in some], float)
        if len(some) < 6 or np.linalg.matrix_rank(a) < 4:
            continue
        times = np.array([r["iter_ms"] for r in some])
        x = np.linalg.lstsq(a, times, rcond=None)[0]
        layers[hidden, tp, mbs].append(float(x[3]))
        residuals.append((dp, len(some), float(np.abs(a @ x / times - 1).max())))
    return {k: float(np.median(v)) for k, v in sorted(layers.items())}, residuals


def ranked(found: list[Row], guess: dict[Piece, float], known: dict[Piece, float]) -> str:
    """Regret and rank correlation where a layer is thought to take `guess` instead of what it took."""
    parts = []
    for name, some in (("held out", [r for r in found if not r["fit"]]), ("all", found)):
        groups: dict[tuple[int, ...], list[tuple[float, float]]] = defaultdict(list)
        for r in some:
            piece = r["hidden"], r["tp"], r["mbs"]
            off = guess.get(piece, 0.0) - known[piece] if piece in guess else 0.0
            time = r["iter_ms"] + off * r["layers"] / r["pp"] * (r["m"] + r["pp"] - 1)
            groups[tuple(r[k] for k in GROUP)].append((time, r["iter_ms"]))
        pairs = [np.array(v) for v in groups.values() if len(v) >= 3]
        regret = np.mean([t[t[:, 0].argmin(), 1] / t[:, 1].min() - 1 for t in pairs])
        order = np.mean([spearman(t[:, 0], t[:, 1]) for t in pairs])
        parts.append(f"{name}: regret {regret:.1%}, Spearman {order:.3f}")
    return "; ".join(parts)


def main() -> None:
    """Print all of it."""
    found = table()
    known, residuals = pieces(found)
    for name, copies in (("dp=1", False), ("dp>1", True)):
        some = [r for r in residuals if (r[0] > 1) == copies]
        runs, worst = sum(size for _, size, _ in some), [w for _, _, w in some]
        print(
            f"{name}: {runs} runs are a + b L + m (c + d L); residual of the median group "
            f"{np.median(worst):.0e}, of the worst {max(worst):.0e}"
        )
    print("milliseconds of a layer, by hidden, tp and micro-batch:")
    print("  " + ", ".join(f"{h}/{tp}/{mb}: {ms:.2f}" for (h, tp, mb), ms in known.items()))
    floor = {k: ms for k, ms in known.items() if ms < LAUNCHED and k[1] < 8}
    values = np.array(list(floor.values()))
    spread = values.std() / values.mean()
    print(f"launch-bound at tp < 8: {len(values)} pieces, {values.mean():.2f} ms on average, +- {spread:.0%}")
    same = dict.fromkeys(floor, float(values.mean()))
    print(f"one launch floor, all else known: {ranked(found, same, known)}")
    for seed in range(3):
        noise = np.random.default_rng(seed).normal(0, 0.1, len(known))
        print(f"10% error a piece ({seed}): {ranked(found, guessed(known, noise), known)}")


def guessed(known: dict[Piece, float], errors: np.ndarray) -> dict[Piece, float]:
    """The pieces with an error each."""
    return {k: ms * float(np.exp(e)) for (k, ms), e in zip(known.items(), errors, strict=True)}


if __name__ == "__main__":
    main()
