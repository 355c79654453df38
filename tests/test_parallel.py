"""Every tiny model over simulated ranks, against itself whole: output, tokens, weights after AdamW steps."""

import pytest
import torch
from models import MODELS

import autotp

# Less than 0.9 of the block weights sharded, and why.
PARTLY = {
    ("llama_3heads", 4): "3 heads are fewer than 4 ranks: queries and keys stay whole, values split by width",
    ("olmo2", 4): "its norm runs over all key heads, and 2 key heads over 4 ranks would be counted twice",
    ("stablelm_qknorm", 2): "a norm of its own for every head, called one by one in Python",
    ("stablelm_qknorm", 4): "a norm of its own for every head, called one by one in Python",
}


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_parallel_equals_whole(name: str, tp: int) -> None:
    torch.manual_seed(0)
    model, inputs = MODELS[name](dtype=torch.float64)
    report = autotp.verify(model, tp=tp, example_inputs=inputs, steps=3, new_tokens=6)
    print(report)
    assert report.ok, str(report)
    whole = report.plan.sharded_fraction >= 0.9
    assert whole != ((name, tp) in PARTLY), (report.plan.sharded_fraction, report.plan.kept)
