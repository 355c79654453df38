"""Plans on disk: found again for the same model, never for another."""

import functools
import json
import os
import subprocess
import sys
from collections import deque
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from models import MODELS
from torch import nn

import autotp
from autotp import kept_plans
from autotp.comm import simulate
from autotp.kept_plans import decoded, encoded, keep, recall
from autotp.plan_key import plan_key

SCALE = 3
REGISTRY = {"gelu": F.gelu}
SETTINGS, ARGUMENTS = {"heads": 4}, SimpleNamespace(heads=4)  # as a command line may fill them


def activation(x: torch.Tensor) -> torch.Tensor:
    return REGISTRY["gelu"](x) * SCALE


def other_activation(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x)


class Block(nn.Module):
    hidden = 32

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, self.hidden), nn.Linear(self.hidden, 16)
        self.chunks = [4, 4]
        self.act = functools.partial(activation)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(activation(self.up(x)))


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AUTOTP_PLANS", str(tmp_path))
    return tmp_path


def digest(model: nn.Module, tp: int = 2) -> str:
    key = plan_key(model, tp=tp)
    assert key is not None
    return key.digest


@pytest.mark.parametrize("name", ["llama_gqa", "olmo2", "nanogpt", "codegen"])
def test_a_plan_comes_back_as_it_was(name: str, kept: Path) -> None:
    model, inputs = MODELS[name]()
    made = autotp.plan(model, tp=2, example_inputs=inputs)
    key = plan_key(model, tp=2)
    keep(key, made)
    again = recall(plan_key(MODELS[name]()[0], tp=2))
    assert again == made and again.digest == made.digest
    sites = [w.site for c in again.collectives for w in c.where if w.site] + [
        a.where.site for a in again.arguments if a.where.site
    ]
    assert bool(sites) == (name in ("olmo2", "nanogpt", "codegen"))
    assert all(s.frames[0].code in key.codes.values() for s in sites if key is not None)


@pytest.mark.parametrize("name", ["olmo2", "codegen"])
def test_split_by_a_kept_plan_it_gives_the_wholes_logits(
    name: str, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, inputs = MODELS[name]()
    expected = whole(**inputs).logits

    def run(comm: Any) -> torch.Tensor:
        model = autotp.parallelize(MODELS[name]()[0], tp=2, comm=comm)
        return model(**inputs).logits

    simulate(2, run)
    assert len(list(kept.glob("*.json"))) == 1

    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("it was planned again")

    monkeypatch.setattr("autotp.api.plan_and_analysis", never)
    for logits in simulate(2, run):
        torch.testing.assert_close(logits, expected, rtol=0, atol=2e-6)  # norms in float32


def test_the_key_is_the_same_in_another_process(tmp_path: Path) -> None:
    code = (
        "from models import MODELS; from autotp.plan_key import plan_key;"
        "print(plan_key(MODELS['gpt2']()[0], tp=2).digest)"
    )
    told = [
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(__file__).parent,
            env={**os.environ, "PYTHONPATH": str(Path(autotp.__file__).parents[1]), "PYTHONHASHSEED": seed},
        ).stdout.split()[-1]
        for seed in ("1", "2")
    ]
    assert told[0] == told[1]


CHANGES: dict[str, Any] = {
    "another size": lambda m, p: setattr(m, "chunks", [2, 6]),
    "an attribute more": lambda m, p: setattr(m, "heads", 4),
    "a forward of its own": lambda m, p: setattr(m, "forward", MethodType(lambda self, x: self.up(x), m)),
    "a hook": lambda m, p: m.up.register_forward_hook(lambda *a: None),
    "a hook on a gradient": lambda m, p: m.up.weight.register_hook(lambda g: g * 2),
    "another shape": lambda m, p: setattr(m, "up", nn.Linear(16, 48)),
    "another dtype": lambda m, p: m.down.double(),
    "a tied weight": lambda m, p: setattr(m.down, "bias", m.up.bias),
    "training": lambda m, p: m.train(not m.training),
    "the class's forward": lambda m, p: p.setattr(Block, "forward", lambda self, x: self.up(x)),
    "the class's number": lambda m, p: p.setattr(Block, "hidden", 64),
    "a function of the file": lambda m, p: p.setattr(f"{__name__}.activation", other_activation),
    "a number of the file": lambda m, p: p.setattr(f"{__name__}.SCALE", 4),
    "what a registry holds": lambda m, p: p.setitem(REGISTRY, "gelu", other_activation),
    "a dict of the file": lambda m, p: p.setitem(SETTINGS, "heads", 8),
    "an object of the file": lambda m, p: p.setattr(ARGUMENTS, "heads", 8),
    "torch's linear": lambda m, p: p.setattr(F, "linear", lambda x, w, b=None: x @ w.T),
    "a tensor's method": lambda m, p: p.setattr(torch.Tensor, "relu", other_activation),
    "nn.Linear's forward": lambda m, p: p.setattr(nn.Linear, "forward", lambda self, x: x @ self.weight.T),
    "what a partial holds": lambda m, p: setattr(m, "act", functools.partial(activation, SCALE)),
    "what a closure holds": lambda m, p: setattr(m, "act", (lambda n: lambda x: x * n)([5])),
    "the default dtype": lambda m, p: _default_dtype(p),
}


def _default_dtype(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch, "get_default_dtype", lambda: torch.float64)


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_a_plan_hangs_on_changes_the_key(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Block()
    before = digest(model)
    assert digest(Block()) == before
    CHANGES[change](model, monkeypatch)
    assert digest(model) != before


def test_a_closure_s_values_are_told_apart() -> None:
    def with_factor(n: list[int]) -> nn.Module:
        model = Block()
        model.act = lambda x: x * n[0]
        return model

    assert digest(with_factor([5])) == digest(with_factor([5])) != digest(with_factor([6]))


class Slotted:
    __slots__ = ("heads",)

    def __init__(self, heads: int):
        self.heads = heads


@pytest.mark.parametrize(
    "make",
    [
        lambda n: SimpleNamespace(heads=n, act=F.gelu),
        lambda n: deque([n, object]),
        lambda n: Slotted(n),
        lambda n: np.array([n] * 5000 + [1]),
        lambda n: {"of": [{"heads": n}]},
        lambda n: nn.ParameterList([torch.zeros(n)]),
        lambda n: slice(0, n),
    ],
    ids=["namespace", "deque", "slots", "array", "nested", "parameters", "slice"],
)
def test_what_an_attribute_holds_is_told_apart(make: Any) -> None:
    def with_attribute(n: int) -> nn.Module:
        model = Block()
        model.held = make(n)
        return model

    assert digest(with_attribute(4)) == digest(with_attribute(4)) != digest(with_attribute(8))


def test_what_is_asked_changes_the_key() -> None:
    assert digest(Block(), tp=2) != digest(Block(), tp=4)


def test_transformers_patched_in_memory_changes_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.models.llama import modeling_llama

    model, _ = MODELS["llama_gqa"]()
    before = digest(model)
    with monkeypatch.context() as patch:
        patch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda q, k, *a, **k_: (q, k))
        assert digest(model) != before
    assert digest(model) == before
    with monkeypatch.context() as patch:
        patch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", other_activation)
        assert digest(model) != before
    with monkeypatch.context() as patch:
        patch.setattr(model.config, "attention_dropout", 0.5)
        assert digest(model) != before
    assert digest(model) == before


def test_a_file_that_changed_changes_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "modeling_mine.py"
    source = "from torch import nn\nclass Mine(nn.Linear):\n    def forward(self, x): return x * {}\n"
    file.write_text(source.format(2))
    monkeypatch.syspath_prepend(tmp_path)
    import modeling_mine  # type: ignore[import-not-found]

    model = modeling_mine.Mine(4, 4)
    before = digest(model)
    file.write_text(source.format(20))
    assert digest(model) != before


def test_files_that_cannot_be_read_are_planned_anew(kept: Path) -> None:
    model, _ = MODELS["gpt2"]()
    key = plan_key(model, tp=2)
    made = autotp.plan(model, tp=2)
    keep(key, made)
    (file,) = kept.glob("*.json")
    told = json.loads(file.read_text())
    for damaged in (
        "",
        "{",
        "[]",
        json.dumps({**told, "format": 0}),
        json.dumps({**told, "plan": ["Site"]}),
        json.dumps({**told, "plan": ["Unknown", 1]}),
        json.dumps({**told, "plan": 3}),
    ):
        file.write_text(damaged)
        assert recall(key) is None
    file.write_text(json.dumps(told))
    assert recall(key) == made


def test_a_place_in_code_of_which_there_are_two_is_not_kept(kept: Path) -> None:
    model, inputs = MODELS["nanogpt"]()
    made = autotp.plan(model, tp=2, example_inputs=inputs)
    key = plan_key(model, tp=2)
    assert key is not None and made.arguments
    ambiguous = dict.fromkeys(key.codes)
    with pytest.raises(KeyError):
        encoded(made, ambiguous)
    told = encoded(made, key.codes)
    with pytest.raises(KeyError):
        decoded(told, ambiguous)


def test_nothing_is_kept_where_it_is_turned_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOTP_PLANS", "")
    assert kept_plans.folder() is None
    monkeypatch.delenv("AUTOTP_PLANS")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert kept_plans.folder() == tmp_path / "autotp" / "plans"


def test_a_folder_that_can_t_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("AUTOTP_PLANS", str(tmp_path / "file" / "plans"))
    model, inputs = MODELS["gpt2"]()
    simulate(2, lambda comm: autotp.parallelize(MODELS["gpt2"]()[0], tp=2, comm=comm)(**inputs))


def test_what_a_caller_gives_is_planned_each_time(kept: Path) -> None:
    _, inputs = MODELS["gpt2"]()
    for given in ({"example_inputs": inputs}, {"policy": {"modules": {"transformer.h.*.mlp": "replicate"}}}):
        simulate(2, lambda comm, g=given: autotp.parallelize(MODELS["gpt2"]()[0], tp=2, comm=comm, **g))
    assert not list(kept.glob("*.json"))
