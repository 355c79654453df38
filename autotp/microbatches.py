"""A batch in equal parts along its rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .errors import TrainError
from .nested import map_tensors


def split_batch(
    batch: Mapping[str, Any], count: int, dims: Mapping[str, int | None] | None = None
) -> list[dict[str, Any]]:
    """`count` micro-batches of a batch: the arguments of the model by name.

    A tensor is cut along dim 0, or where that has another size than the batch (position ids of [3, batch,
    length]), along its only dim that has; dims states it by name, and must where the first two of more than
    two dims have it, or None for what has no rows (positions of [1, length]). That, numbers, None and tensors
    without dims go to every micro-batch as they are.

    Raises TrainError where the rows can't be divided, or it is not clear which dim they are.
    """
    if not isinstance(batch, Mapping) and not hasattr(batch, "keys"):
        raise TrainError(f"the batch is a {type(batch).__name__}: give a dict of the model's arguments.")
    if not isinstance(count, int) or isinstance(count, bool):
        raise TrainError(f"microbatches={count!r}: give a whole number.")
    values = {name: batch[name] for name in batch.keys()}
    rows = _rows(values)
    if count < 1 or rows % count:
        raise TrainError(f"a batch of {rows} rows does not make {count} equal micro-batches. Choose "
                         f"microbatches that divide {rows} (a loader's drop_last=True keeps batches whole).")
    parts: list[dict[str, Any]] = [{} for _ in range(count)]
    stated = dims or {}
    for name, value in values.items():
        for i, part in enumerate(parts):
            dim = stated.get(name, _GUESSED)
            part[name] = value if dim is None else map_tensors(value, _Cut(name, rows, i, count, dim))
    return parts


def _rows(values: Mapping[str, Any]) -> int:
    """The size of most tensors' dim 0."""
    sizes: Counter[int] = Counter()

    def note(tensor: Tensor) -> Tensor:
        if tensor.dim():
            sizes[tensor.shape[0]] += 1
        return tensor

    for value in values.values():
        map_tensors(value, note)
    if not sizes:
        raise TrainError("the batch has no tensor with rows.")
    best = max(sizes.values())
    first = [n for n, times in sizes.items() if times == best]
    return first[0]


_GUESSED = "guessed"


class _Cut:
    def __init__(self, name: str, rows: int, part: int, count: int, dim: int | str) -> None:
        self.name, self.rows, self.part, self.count, self.dim = name, rows, part, count, dim

    def __call__(self, tensor: Tensor) -> Tensor:
        if tensor.dim() == 0:
            return tensor
        dim = self.dim
        if isinstance(dim, str):
            fitting = [d for d, n in enumerate(tensor.shape) if n == self.rows]
            # [3, 3, length] may be position ids of three kinds for three rows: rows are not guessed there.
            guessed = tensor.dim() > 2 and fitting[:2] == [0, 1]
            if len(fitting) == 1 or (fitting[:1] == [0] and not guessed):
                dim = fitting[0]
            else:
                found = "more than one dim" if fitting else "no dim"
                raise TrainError(
                    f"{self.name}, of shape {list(tensor.shape)}, has {found} of the batch's {self.rows} "
                    f'rows: say which it is with batch_dims={{"{self.name}": …}}: None, if it has none and '
                    "goes whole to every micro-batch."
                )
        return torch.chunk(tensor, self.count, dim)[self.part]
