"""What would help where something stays whole: in the warning and in `--why`."""

import re
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autotp
from autotp.advice import HELP, NEEDED_WHOLE, advice, warn_replicated
from autotp.explain import why
from autotp.planner import plan_and_analysis

SOURCES = [p for p in Path(autotp.__file__).parent.rglob("*.py") if p.name != "advice.py"]


@pytest.mark.parametrize("words", [words for words, _ in HELP])
def test_the_words_are_those_of_a_reason(words: str) -> None:
    # Strings may be broken over lines: compared without quotes, line ends and what is filled in.
    joined = [re.sub(r'"\s*\n\s*f?"', "", p.read_text()) for p in SOURCES]
    assert any(words in text for text in joined), words


def strange(x: torch.Tensor) -> torch.Tensor:
    return torch.cumulative_trapezoid(x, dim=-1)  # has no rule


class Odd(nn.Module):
    def __init__(self, hidden: int = 32) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, hidden), nn.Linear(hidden, 8)
        self.odd = nn.Parameter(torch.randn(8, 9))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.down(torch.relu(self.up(x))), strange(self.odd))


INPUTS = {"x": torch.randn(3, 8)}


def test_why_says_where_what_and_what_would_help() -> None:
    plan, found = plan_and_analysis(Odd(), 2, example_inputs=INPUTS)
    text = why(found, plan, "odd").plain
    line = strange.__code__.co_firstlineno + 1
    assert f"cumulative_trapezoid (test_advice.py:{line})" in text  # the model's own line and the operation
    assert "what would help: a rule for the operation" in text and "autotp.rule" in text
    plan, found = plan_and_analysis(Odd(4), 8, example_inputs=INPUTS)
    assert "what would help: a smaller tp" in why(found, plan, "up.weight").plain


def test_the_line_is_the_models_own_where_it_calls_torchs_modules() -> None:
    class Shifted(nn.Embedding):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return super().forward(ids + 1) + self.weight.sum()

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.out = Shifted(64, 8), nn.Linear(8, 4)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.out(self.table(ids))

    ids = torch.zeros(2, 3, dtype=torch.long)
    plan, found = plan_and_analysis(Table(), 2, example_inputs={"ids": ids})
    text = why(found, plan, "table.weight").plain
    assert "sparse.py" not in text and "test_advice.py:" in text


def test_the_warning_says_what_would_help() -> None:
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Odd()])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.blocks[0](x)

    plan = autotp.plan(Stack(), 2, example_inputs=INPUTS)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        warn_replicated(plan, strict=False)
    assert "What would help: a rule for the operation" in str(told[0].message)


def test_an_operation_that_needs_it_whole() -> None:
    assert advice("axis of 8: router: softmax (m.py:3): softmax runs over it") == NEEDED_WHOLE
