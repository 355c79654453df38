"""One thread per test process: the models are tiny, and several processes may share the machine."""

import os

import pytest
import torch

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["AUTOTP_PLANS"] = ""  # every test plans for itself
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _fresh_seed() -> None:
    """Every test starts from the same random state, whatever ran before it."""
    torch.manual_seed(0)
