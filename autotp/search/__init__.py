"""The best degrees for a cluster, predicted. See docs/search.md."""

from .cluster import Cluster as Cluster
from .cluster import load as load_cluster
from .counts import count as count
from .find import choose_degrees as choose_degrees
from .find import search as search
from .predict import Config as Config
from .predict import Prediction as Prediction
from .predict import predict as predict
from .result import SearchResult as SearchResult
from .workload import Workload as Workload

__all__ = [
    "Cluster",
    "Config",
    "Prediction",
    "SearchResult",
    "Workload",
    "choose_degrees",
    "count",
    "load_cluster",
    "predict",
    "search",
]
