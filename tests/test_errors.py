"""Bad input gives an error that says what happened, where, and what to do next; on every rank."""

import copy
import io
import os
import re
from collections.abc import Callable
from typing import Any

import distributed
import pytest
import torch
from models import MODELS
from torch import nn
from torch.nn import functional as F

import autotp
from autotp.comm import Comm, simulate
from autotp.errors import (
    AutotpError,
    CaptureError,
    CheckpointError,
    LaunchError,
    PlanError,
    RankError,
    TrainError,
)
from autotp.weights import stated_device

X = torch.ones(2, 8)


class Mlp(nn.Module):
    def __init__(self, hidden: int = 16):
        super().__init__()
        self.up, self.down = nn.Linear(8, hidden), nn.Linear(hidden, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


class Branches(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        if h.sum() > 0:  # this line
            h = h * 2
        return self.down(h)


class LeavesTorch(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tensor(self.up(x).detach().numpy()))  # this line


def line_of(cls: type) -> int:
    """The number of the line marked `# this line` in a class above."""
    import inspect

    lines, start = inspect.getsourcelines(cls)
    return start + next(i for i, line in enumerate(lines) if "# this line" in line)


def on_two(model: nn.Module, **options: Any) -> list[nn.Module]:
    options = {"example_inputs": {"x": X}, **options}
    return simulate(2, lambda comm: autotp.parallelize(copy.deepcopy(model), comm=comm, **options))


# --- starting


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("alone")
def test_not_under_torchrun() -> None:
    with pytest.raises(LaunchError, match="torchrun --nproc-per-node 2 ") as error:
        autotp.parallelize(Mlp(), tp=2, example_inputs={"x": X})
    assert "autotp.verify" in str(error.value)  # the way to try it in one process


@pytest.mark.usefixtures("alone")
def test_one_process_needs_no_launcher() -> None:
    model = Mlp()
    want = model(X)
    assert torch.equal(autotp.parallelize(model, tp=1, example_inputs={"x": X})(X), want)


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"tp": 0}, LaunchError, "tp=0: give a number of processes"),
        ({"tp": -3}, LaunchError, "tp=-3: give a number of processes"),
        ({"tp": True}, LaunchError, "tp=True: give a number of processes"),
        ({"tp": 1, "dp": "2"}, LaunchError, "dp='2': give a number of processes"),
        ({"tp": 1, "stages": 1.5}, PlanError, r"stages=1\.5: give a number of stages, or the names"),
        ({"tp": 1, "pp": 2}, LaunchError, "tp=1 x pp=2 needs several processes"),
    ],
)
def test_degrees_that_make_no_sense(options: dict[str, Any], error: type, said: str) -> None:
    with pytest.raises(error, match=said):
        autotp.parallelize(Mlp(), example_inputs={"x": X}, **options)


def test_other_degree_than_ranks() -> None:
    with pytest.raises(PlanError, match="tp=4, but there are 2 ranks"):
        on_two(Mlp(), tp=4)


@pytest.mark.parametrize("model", [Mlp.forward, "gpt2", torch.jit.script(Mlp())])
def test_what_is_no_model(model: Any) -> None:
    with pytest.raises(CaptureError, match="no torch.nn.Module with a forward in Python"):
        autotp.parallelize(model, tp=1)


# --- capturing


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (Branches(), "needs the values of a tensor"),
        (LeavesTorch(), r"\.numpy\(\)"),
    ],
)
def test_a_model_that_cannot_be_captured_names_the_line_and_why(model: nn.Module, why: str) -> None:
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(CaptureError, match=why) as error:
        on_two(model)
    assert f"test_errors.py:{line_of(type(model))} in forward" in str(error.value)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ({"y": X}, r"do not fit Mlp.forward\(x.*'x'.*dict by argument name"),
        ({}, "missing a required argument: 'x'"),
        (3, "are of type int: give a dict by argument name"),
        ("x", "are of type str: give a dict by argument name"),
        ((X, X), "too many positional arguments"),
        ({"x": torch.ones(2, 9)}, r"2, 9\] X \[8, 16.*others as example inputs"),
    ],
)
def test_inputs_that_do_not_fit(inputs: Any, said: str) -> None:
    with pytest.raises(CaptureError, match=said):
        on_two(Mlp(), example_inputs=inputs)


# --- planning


def test_a_degree_that_splits_nothing_says_why_for_each_weight() -> None:
    with pytest.raises(PlanError, match=r"tp=7 splits nothing of Mlp; a smaller tp may") as error:
        model = Mlp(hidden=6)
        model.up, model.down = nn.Linear(5, 6), nn.Linear(6, 5)
        simulate(
            7,
            lambda comm: autotp.parallelize(
                copy.deepcopy(model), comm=comm, example_inputs={"x": torch.ones(2, 5)}
            ),
        )
    for name in ("up.weight", "down.weight"):
        assert re.search(rf"{name}: .*its size 6 is below the 7 ranks", str(error.value))


def test_strict_names_what_stays_whole() -> None:
    class Sums(Mlp):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + torch.cumsum(F.linear(x, self.extra[0].weight), -1)

    model = Sums()
    model.extra = nn.ModuleList([nn.Linear(8, 8)])
    with pytest.raises(PlanError, match=r"extra.0.weight: (?s:.*)strict=False"):
        on_two(model, strict=True)
    with pytest.warns(UserWarning, match=r"extra.0.weight: axis of 8: .*") as told:
        on_two(model)
    assert told[0].filename == __file__  # where parallelize was called


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
def test_a_model_that_cannot_be_copied_names_the_module() -> None:
    model = Mlp()
    model.up = nn.utils.weight_norm(model.up)
    with pytest.raises(CaptureError, match="Mlp can't be copied.* up keeps a tensor that was computed"):
        autotp.plan(model, 2, example_inputs={"x": X})


def test_a_quantised_weight_is_refused() -> None:
    model = Mlp()
    model.up.weight = nn.Parameter(torch.ones(16, 8, dtype=torch.int8), requires_grad=False)
    with pytest.raises(PlanError, match=r"up\.weight is quantised \(torch\.int8 \[16, 8\], in a Linear"):
        on_two(model)


def test_twice_is_refused() -> None:
    def twice(comm: Comm) -> None:
        model = autotp.parallelize(Mlp(), comm=comm, example_inputs={"x": X})
        autotp.parallelize(model, comm=comm, example_inputs={"x": X})

    with pytest.raises(PlanError, match="parallelized already"):
        simulate(2, twice)


# --- ranks that differ


def caught(call: Callable[[], Any]) -> tuple[str, str]:
    try:
        call()
    except AutotpError as error:
        return type(error).__name__, str(error)
    return "", ""


class OneRankFails(Mlp):
    """Fails in its own Python on one rank only, with an error that is none of autotp's."""

    def __init__(self, rank: int):
        super().__init__()
        self.rank = rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.rank == 1:
            raise KeyError("a file only rank 0 has")
        return super().forward(x)


def _differing(rank: int) -> dict[str, tuple[str, str]]:
    example = {"x": X}
    seen = {
        "more than processes": caught(lambda: autotp.parallelize(Mlp(), tp=4, example_inputs=example)),
        "sizes": caught(lambda: autotp.parallelize(Mlp(16 + 4 * rank), example_inputs=example)),
        "policy": caught(
            lambda: autotp.parallelize(
                Mlp(),
                policy={"schema": 1, "modules": {"up": "replicate", "down": "replicate"}} if rank else None,
                example_inputs=example,
            )
        ),
        "one fails": caught(lambda: autotp.parallelize(OneRankFails(rank), example_inputs=example)),
    }
    model = Mlp()
    autotp.parallelize(model, tp=2, example_inputs=example)  # nothing is left hanging: this still works
    assert model(X).shape == X.shape
    return seen


def test_processes_that_differ_all_raise() -> None:
    """Real processes: every rank raises, with the same cause, and the next call works."""
    ranks = distributed.run(2, _differing, timeout=90)
    for seen in ranks:
        kind, said = seen["more than processes"]
        assert kind == "LaunchError" and "tp=4 does not divide the world size 2" in said
        assert "torchrun --nproc-per-node" in said
        kind, said = seen["sizes"]
        assert kind == "RankError" and "up.weight [16, 8]" in said and "up.weight [20, 8]" in said
        assert "same model" in said
        assert all(seen["policy"]) and all(seen["one fails"])
        assert "a file only rank 0 has" in seen["one fails"][1]
    assert ranks[0]["one fails"][0] == "RankError" and "failed on rank 1 of 2" in ranks[0]["one fails"][1]


# --- while it runs


def test_another_way_through_the_code_than_the_captured_one() -> None:
    """A call that passes by what was put into a forward is an error, not other numbers."""
    model, inputs = MODELS["llama_gqa"](dtype=torch.float64)

    def use(comm: Comm) -> Any:
        split = autotp.parallelize(copy.deepcopy(model), comm=comm, example_inputs=inputs)
        with pytest.raises((RuntimeError, IndexError)):
            split(input_ids=torch.full((1, 3), 256), use_cache=False)  # no such token: on every rank
        return split(**inputs).logits.detach()

    for logits in simulate(2, use):
        torch.testing.assert_close(logits, model(**inputs).logits.detach())


def test_a_split_model_is_not_pickled() -> None:
    def pickled(comm: Comm) -> None:
        torch.save(autotp.parallelize(Mlp(), comm=comm, example_inputs=(X,)), io.BytesIO())

    with pytest.raises(AutotpError, match=r"can't be pickled.*\n?.*autotp.save"):
        simulate(2, pickled)


@pytest.mark.parametrize("count", [2.0, "2", True])
def test_micro_batches_are_whole_numbers(count: Any) -> None:
    model = autotp.parallelize(Mlp(), tp=1, example_inputs={"x": X})
    with pytest.raises(TrainError, match="microbatches=.*: give a whole number"):
        autotp.train_step(model, {"x": X}, count)


def test_a_place_that_cannot_be_written(tmp_path: Any) -> None:
    model = autotp.parallelize(Mlp(), tp=1, example_inputs={"x": X})
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="could not be saved"):
        autotp.save(model, tmp_path / "file" / "below")


@pytest.mark.parametrize("device", ["cuda:99", "gpu0", 3.5])
def test_a_device_that_is_not_there(device: Any) -> None:
    with pytest.raises(PlanError, match="this process can't use it"):
        stated_device(device)


def _alone_in_full_state_dict(rank: int) -> str:
    model = autotp.parallelize(Mlp(), 2, example_inputs={"x": X})
    if rank == 1:
        os._exit(0)
    with pytest.raises(RankError, match=r"full_state_dict: tp rank 0 of 2 waited") as told:
        autotp.full_state_dict(model)
    return str(told.value)


def test_a_rank_alone_in_full_state_dict() -> None:
    assert "has ended or did not call it" in distributed.run(2, _alone_in_full_state_dict, lost=(1,))[0]
