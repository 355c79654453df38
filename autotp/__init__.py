"""autotp: automatic model-rewriting parallelism for PyTorch."""

from .api import parallelize as parallelize
from .capture import capture as capture
from .data_parallel import data_rank as data_rank
from .data_parallel import no_sync as no_sync
from .errors import AutotpError as AutotpError
from .initialise import initialise as initialise
from .pipeline.groups import generate as generate
from .plan import Plan as Plan
from .planner import plan as plan
from .resume import load_training as load_training
from .resume import save_training as save_training
from .rules import rule as rule
from .save import save as save
from .search import predict as predict
from .search import search as search  # the function; `autotp.search.cost` and the like stay importable
from .state import full_state_dict as full_state_dict
from .state import weight_norms as weight_norms
from .train import train_step as train_step
from .verify import verify as verify
from .weights import load as load

__all__ = [
    "AutotpError", "Plan", "capture", "data_rank", "full_state_dict", "generate", "initialise", "load",
    "load_training", "no_sync", "parallelize", "plan", "predict", "rule", "save", "save_training", "search",
    "train_step", "verify", "weight_norms",
]
