"""The best degrees for a cluster, predicted. See docs/search.md."""

from .cluster import Cluster as Cluster
from .cluster import load as load_cluster
from .counts import Workload as Workload
from .counts import count as count
from .predict import Config as Config
from .predict import Prediction as Prediction
from .predict import predict as predict
