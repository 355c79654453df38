"""The simulated schedules against the action tables of torch.distributed.pipelining, action by action."""

import pytest
from torch.distributed.pipelining import schedules as theirs
from torch.distributed.pipelining.stage import _PipelineStageBase

from autotp.search.schedule import orders, simulate


class Stage(_PipelineStageBase):
    """What a schedule asks of a stage before it runs: where it stands."""

    def __init__(self, stage, ranks, stages):
        self.group_rank, self.group_size, self.stage_index, self.num_stages = 0, ranks, stage, stages
        self.submod, self.has_backward, self.group, self.device = None, True, None, None
        self.stage_index_to_group_rank = {i: i % ranks for i in range(stages)}


Stage.__abstractmethods__ = frozenset()  # what runs it is not asked of it here


def torchs(name, ranks, microbatches, virtual):
    """Each rank's (kind, stage, micro-batch), in torch's order; what is not computation is left out."""
    kind = theirs.get_schedule_class(name)
    stages = [Stage(i * ranks, ranks, ranks * virtual) for i in range(virtual)]
    many = issubclass(kind, theirs.PipelineScheduleMulti)
    schedule = kind(stages if many else stages[0], microbatches, loss_fn=lambda *_: 0)
    if not many and not hasattr(schedule, "_get_pipeline_order"):
        pytest.skip("this torch shows no action table of schedules of one stage a rank")
    table = schedule.pipeline_order if many else schedule._get_pipeline_order()
    kinds = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "B", "BACKWARD_WEIGHT": "W"}
    return [
        [
            (kinds[a.computation_type.name], a.stage_index, a.microbatch_index)
            for a in table[rank]
            if a is not None and a.microbatch_index is not None
        ]
        for rank in range(ranks)
    ]


@pytest.mark.parametrize("microbatches", [4, 8])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("name", "ours", "virtual"),
    [("GPipe", "gpipe", 1), ("1F1B", "1f1b", 1), ("Interleaved1F1B", "interleaved", 2),
     ("Interleaved1F1B", "interleaved", 4), ("InterleavedZeroBubble", "zero-bubble", 1)],
)  # fmt: skip
def test_actions_are_torchs(name, ours, virtual, ranks, microbatches):
    found = orders(ours, ranks, microbatches, virtual)
    mine = [[(a.kind, a.stage, a.microbatch) for a in rank] for rank in found]
    expected = torchs(name, ranks, microbatches, virtual)
    if name == "1F1B" and expected[-1][0] == ("F", ranks - 1, 1):
        # torch 2.13 numbers the last rank's forwards from 1 in this table, and its backwards from 0
        expected[-1] = [(kind, stage, i - (kind == "F")) for kind, stage, i in expected[-1]]
    assert mine == expected


@pytest.mark.parametrize("microbatches", [4, 8])
@pytest.mark.parametrize(
    ("schedule", "virtual"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero-bubble", 1)]
)
def test_bubbles_are_the_known_ones(schedule, virtual, microbatches):
    """(p-1)/v of a micro-batch's forward and backward; zero-bubble H1 (Qi et al., 2023): a third of 1F1B's,
    where a forward, the backward of inputs and that of weights each take as long."""
    ranks = 4
    stages = ranks * virtual
    run = simulate(schedule, [1.0] * stages, [2.0] * stages, microbatches, ranks=ranks)
    bubble = run.length - 3.0 * microbatches * virtual
    expected = (ranks - 1) * 3.0 / (3 if schedule == "zero-bubble" else 1)
    assert bubble == pytest.approx(expected)
