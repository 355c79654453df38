"""Architectures beyond `models.py`, chosen to differ: what `tools/zoo` does to all of them, as a test."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

from zoo import table, tiny  # noqa: E402
from zoo.check import check, portable  # noqa: E402
from zoo.sweep import add_row, rows_of  # noqa: E402

OK = {  # class -> what is special about it
    "AfmoeForCausalLM": "gated attention, experts with a shared one",
    "ApertusForCausalLM": "an activation with parameters",
    "AriaTextForCausalLM": "experts as grouped matmuls of its own",
    "BertGenerationDecoder": "a decoder made of BERT",
    "BigBirdForCausalLM": "block sparse attention",
    "CTRLLMHeadModel": "sinusoids, q/k/v of its own",
    "CohereCompassForCausalLM": "layers without rotary",
    "Data2VecTextForCausalLM": "positions counted from the padding",
    "DebertaV2ForMaskedLM": "disentangled relative positions",
    "EsmForMaskedLM": "rotary on a masked language model",
    "FNetForMaskedLM": "Fourier transforms for attention",
    "GPTNeoForCausalLM": "local and global attention",
    "IBertForMaskedLM": "linears with integers in mind",
    "MegatronBertForCausalLM": "norms before",
    "M2M100ForConditionalGeneration": "sinusoids kept in a buffer, cross attention",
    "LlavaForConditionalGeneration": "image features scattered into the text",
    "LongT5ForConditionalGeneration": "local attention in blocks, relative positions",
    "NanoChatForCausalLM": "norms without weights, squared relu",
    "NemotronForCausalLM": "norms with one added",
    "OlmoForCausalLM": "norms without weights, clipped q/k/v",
    "PersimmonForCausalLM": "q/k norms, partial rotary",
    "PhimoeForCausalLM": "experts behind a router with jitter",
    "SeedOssForCausalLM": "biases in the attention only",
    "XGLMForCausalLM": "sinusoids made anew",
    "XLMRobertaXLForCausalLM": "norms before, in BERT's shape",
}
TYPES = {cls: model_type for task in tiny.TASKS for cls, model_type in tiny.archs(task)}


@pytest.mark.parametrize("cls", OK)
def test_architecture_is_split_and_equal(cls: str) -> None:
    row = check(cls, TYPES[cls])
    assert row["outcome"] == "ok", row


def test_what_does_not_run_whole_says_nothing_of_autotp() -> None:
    missing = check("ThereIsNoSuchModel", "llama")
    assert missing["outcome"] == "baseline" and "ThereIsNoSuchModel" in missing["why"]


def test_rows_are_kept_once_and_sorted(tmp_path: Path) -> None:
    for cls, outcome in (("B", "crash"), ("A", "ok"), ("B", "ok")):
        add_row("causal-lm", {"class": cls, "outcome": outcome}, tmp_path)
    assert list(rows_of("causal-lm", tmp_path).items()) == [
        ("A", {"class": "A", "outcome": "ok"}),
        ("B", {"class": "B", "outcome": "ok"}),
    ]


def test_the_page_counts_what_runs() -> None:
    degree = {"captured": True, "sharded": 1.0, "errors": {"output": 1e-15, "norm": 0.0}, "outcome": "ok"}
    rows = {
        "A": {"class": "A", "outcome": "ok", "tp2": degree, "tp4": degree, "seconds": 1.0, "why": ""},
        "B": {
            "class": "B",
            "outcome": "wrong",
            "tp2": degree,
            "tp4": {**degree, "outcome": "wrong"},
            "seconds": 1.0,
        },
        "C": {"class": "C", "outcome": "baseline", "seconds": 0.1, "why": "a|b"},
    }
    page = table.page({"causal-lm": rows}, "today")
    assert "Of the 2 that run whole: 100.0% are captured, 50.0% run equal" in page
    assert "| causal-lm | 3 | 1 |" in page and "a\\|b" in page


def test_paths_in_reasons_are_those_of_any_machine() -> None:
    text = "at (/somebody/venv/lib/python3.11/site-packages/transformers/x.py:3 in forward)"
    assert portable(text) == "at (transformers/x.py:3 in forward)"
