"""Pipeline parallelism: a model cut into stages by its dataflow."""

from .cut import cut
from .stages import Crossing, Stages, UnitCall

__all__ = ["Crossing", "Stages", "UnitCall", "cut"]
