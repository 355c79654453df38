"""The outside judge: autotp's plans against those that transformers ships (tools/zoo/golden.py)."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

from zoo import golden, tiny  # noqa: E402

import autotp  # noqa: E402
from autotp.inputs import best_inputs  # noqa: E402

TYPES = dict(tiny.archs("causal-lm"))


def compared(model: Any) -> dict[str, Any]:
    inputs = best_inputs(model)
    return golden.compare(model, autotp.plan(model, 2, example_inputs=inputs))


ALIKE = ["LlamaForCausalLM", "Gemma2ForCausalLM", "Qwen3MoeForCausalLM", "OlmoForCausalLM"]


@pytest.mark.parametrize("cls", ALIKE)
def test_the_same_placement_of_every_parameter(cls: str) -> None:
    row = compared(golden.build(cls, TYPES[cls]))
    assert row["differ"] == [] and row["alike"] == row["parameters"] > 10
    assert row["sharded"][0] == row["sharded"][1] > 0.9


def test_what_differs_has_its_reason() -> None:
    row = compared(golden.build("Phi3ForCausalLM", "phi3"))
    differ = {name: (theirs, ours, why) for name, theirs, ours, why, _ in row["differ"]}
    assert differ == {  # theirs cuts fused weights as one and gathers what comes out; ours cuts each part
        "model.layers.*.self_attn.qkv_proj.weight": (
            "dim 0, rank 0 has 0:96",
            "dim 0, rank 0 has 0:32, 64:96, 128:160",
            "theirs: colwise_gather_output",
        ),
        "model.layers.*.mlp.gate_up_proj.weight": (
            "dim 0, rank 0 has 0:128",
            "dim 0, rank 0 has 0:64, 128:192",
            "theirs: colwise_gather_output",
        ),
    }
    assert "model.layers.*.self_attn.qkv_proj" in row["gathered"]


def test_the_judge_sees_what_a_plan_leaves_out_and_what_matches_nothing() -> None:
    model = golden.build("LlamaForCausalLM", "llama")
    plan = dict(model.config.base_model_tp_plan)
    plan["layers.*.mlp.up"] = plan.pop("layers.*.mlp.up_proj")
    plan["layers.*.input_layernorm.weight"] = "colwise"
    model.config.base_model_tp_plan = plan
    model.model.init_parallel_plans()
    model.init_parallel_plans()
    row = compared(model)
    assert row["unmatched"] == ["model.layers.*.mlp.up"]
    differ = {name: why for name, _, _, why, _ in row["differ"]}
    assert differ["model.layers.*.mlp.up_proj.weight"] == "theirs: no rule for it"
    assert differ["model.layers.*.input_layernorm.weight"].startswith("ours: ")
    assert set(differ) == {"model.layers.*.mlp.up_proj.weight", "model.layers.*.input_layernorm.weight"}


def test_the_page_is_made_of_the_rows() -> None:
    rows = [json.loads(line) for line in golden.RESULTS.read_text().splitlines()]
    assert len(rows) > 100
    assert not [r["class"] for r in rows if r.get("ours", "right").startswith(("wrong: the", "wrong grad"))]
    head, *_ = golden.PAGE.read_text().split("\n## What differs")
    for row in rows:
        assert f"| {row['class']} |" in head
    assert head.count("\n") == golden.page(rows, "").split("\n## What differs")[0].count("\n")
