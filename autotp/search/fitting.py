"""Minimisation without derivatives, for constants that are fitted to measurements."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Vector = np.ndarray


def nelder_mead(f: Callable[[Vector], float], x: Vector, step: float, steps: int) -> tuple[Vector, float]:
    """Minimise `f` from `x` by the simplex of Nelder and Mead (1965). Gives the best point and its value."""
    points = [x, *(x + step * row for row in np.eye(len(x)))]
    values = [f(p) for p in points]
    for _ in range(steps):
        order = np.argsort(values)
        points, values = [points[i] for i in order], [values[i] for i in order]
        centre = np.mean(points[:-1], axis=0)
        reflected = 2 * centre - points[-1]
        value = f(reflected)
        if value < values[0]:
            far = 3 * centre - 2 * points[-1]
            far_value = f(far)
            points[-1], values[-1] = (far, far_value) if far_value < value else (reflected, value)
        elif value < values[-2]:
            points[-1], values[-1] = reflected, value
        else:
            near = (centre + points[-1]) / 2
            near_value = f(near)
            if near_value < values[-1]:
                points[-1], values[-1] = near, near_value
            else:
                points = [points[0], *((points[0] + p) / 2 for p in points[1:])]
                values = [values[0], *(f(p) for p in points[1:])]
    best = int(np.argmin(values))
    return points[best], values[best]
