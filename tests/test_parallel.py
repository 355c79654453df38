"""Every tiny model over simulated ranks, against itself whole: output, tokens, weights after AdamW steps."""

import pytest
import torch
from models import MODELS

import autotp


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_parallel_equals_whole(name: str, tp: int) -> None:
    torch.manual_seed(0)
    model, inputs = MODELS[name](dtype=torch.float64)
    report = autotp.verify(model, tp=tp, example_inputs=inputs, steps=3, new_tokens=6)
    print(report)
    assert report.ok, str(report)
    assert report.plan.sharded_fraction >= 0.9, report.plan.kept
