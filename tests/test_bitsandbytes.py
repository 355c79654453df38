"""bitsandbytes' 4-bit and 8-bit linears over ranks against the whole quantised model."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from torch import nn

import autotp
from autotp.coded import CodedWeight, adopted
from autotp.comm import Comm, simulate
from autotp.errors import PlanError
from autotp.quantised import Packed

bnb: Any = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
if bnb.functional.has_avx512bf16():
    # Open fault: with bitsandbytes' other kernels (bfloat16, packed anew) cuts that are right differ by up to
    # 2.5 % and one that is wrong was let through by its trial.
    pytest.skip("bitsandbytes uses other 4-bit kernels on CPUs with AVX512-BF16", allow_module_level=True)
QUIET = pytest.mark.filterwarnings("ignore:.*stay whole")
ROW, COLUMN = "RowParallelLinear", "ColumnParallelLinear"


def quantised(path: Path, family: str = "llama_gqa", **how: Any) -> tuple[Any, dict]:
    import transformers

    config, cls, settings = models.TEXT[family]
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1}
    sizes |= {"head_dim": 32} if family == "llama_gqa" else {}
    model, inputs = models.hf(config, cls, dtype=torch.float32, **{**settings, **sizes})
    model.save_pretrained(path)
    told = transformers.BitsAndBytesConfig(**how)
    kind = transformers.AutoModelForCausalLM
    return kind.from_pretrained(path, quantization_config=told, dtype=torch.float32), inputs


def outputs(model: Any, inputs: dict) -> torch.Tensor:
    with torch.no_grad():
        return model(**inputs).logits


@QUIET
@pytest.mark.parametrize(
    ("how", "family", "down_proj"),
    [
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "phi3", ROW),
        # 256 scales have one: half of a row's scales would lie under another
        ({"load_in_4bit": True, "bnb_4bit_use_double_quant": True}, "llama_gqa", COLUMN),
        ({"load_in_8bit": True}, "llama_gqa", COLUMN),  # activations are quantised by the row
    ],
)
def test_as_the_whole_model(how: dict, family: str, down_proj: str, tmp_path: Path) -> None:
    """Logits, state and files are the whole model's, bytes and all; what is held stays packed."""
    whole, inputs = quantised(tmp_path / "plain", family, **how)
    state = {name: tensor.clone() for name, tensor in whole.state_dict().items()}
    whole.save_pretrained(tmp_path / "whole", max_shard_size="50KB")
    want = outputs(copy.deepcopy(whole), inputs)
    before = [type(module) for module in whole.modules()]
    autotp.plan(whole, 2)
    assert [type(module) for module in whole.modules()] == before

    def one(comm: Comm) -> Any:
        local: Any = autotp.parallelize(copy.deepcopy(whole), comm=comm)
        full = autotp.full_state_dict(local)
        assert full.keys() == state.keys()
        assert all(torch.equal(full[name], state[name]) for name in state)
        local.save_pretrained(tmp_path / "ranks", max_shard_size="50KB")
        logits = outputs(local, inputs)
        local.load_state_dict({name: tensor.clone() for name, tensor in state.items()})
        assert torch.equal(outputs(local, inputs), logits)
        return logits, local

    for logits, local in simulate(2, one):
        assert float((logits - want).abs().max() / want.abs().max()) < 1e-5
        down = local.model.layers[0].mlp.down_proj
        assert type(down).__name__ == down_proj and isinstance(down.weight, CodedWeight)
        assert down.weight.parts["weight"].numel() * 2 == state["model.layers.0.mlp.down_proj.weight"].numel()
        assert not any(p.requires_grad for p in local.parameters() if isinstance(p, CodedWeight))
    names = sorted(file.name for file in (tmp_path / "whole").iterdir())
    assert names == sorted(file.name for file in (tmp_path / "ranks").iterdir())
    assert all((tmp_path / "whole" / n).read_bytes() == (tmp_path / "ranks" / n).read_bytes() for n in names)


@QUIET
def test_training_beside_it(tmp_path: Path) -> None:
    """What is not quantised trains, through the weights that are; and generation."""
    whole, _ = quantised(tmp_path, load_in_4bit=True, bnb_4bit_quant_type="nf4")
    assert autotp.verify(whole, tp=2, steps=1).raise_if_wrong()


def why(rows: int, columns: int, dim: int, *bounds: int, **how: Any) -> str | None:
    linear = nn.Sequential(bnb.nn.Linear4bit(columns, rows, bias=False, **how)).to("cpu")
    layout = tuple(((a, b),) for a, b in zip(bounds, bounds[1:], strict=False))
    return Packed.of(adopted(linear)).unfit("0.weight", {dim: layout})


def test_blocks() -> None:
    """Cuts at the ends of blocks are right, others are not."""
    plain = {"compress_statistics": False, "quant_type": "nf4"}
    assert why(48, 128, 0, 0, 5, 48, **plain) is None
    assert why(48, 128, 1, 0, 64, 128, **plain) is None
    assert "one entry of weight.absmax" in (why(48, 128, 1, 0, 32, 128, **plain) or "")
    assert why(48, 32, 0, 0, 16, 48, **plain) is None  # two rows to a block
    assert "one entry of weight.absmax" in (why(48, 32, 0, 0, 15, 48, **plain) or "")
    assert why(48, 32, 1, 0, 16, 32, **plain) is not None
    nested = {"compress_statistics": True, "quant_type": "nf4"}
    assert why(256, 128, 0, 0, 128, 256, **nested) is None  # 128 rows to a scale of scales
    assert "one entry of weight.nested_absmax" in (why(256, 128, 0, 0, 64, 256, **nested) or "")
    assert "give other products" in (why(256, 128, 1, 0, 64, 128, **nested) or "")
    assert "give other products" in (why(192, 128, 0, 0, 96, 192, **nested) or "")  # not filled to the end


def test_refused_by_name() -> None:
    packed = nn.Sequential(bnb.nn.Linear4bit(64, 32, bias=False)).to("cpu")
    packed[0].weight.quant_state.packing_format_for_cpu = True
    with pytest.raises(PlanError, match="0 was packed anew for this CPU"):
        autotp.plan(packed, 2, example_inputs={"input": torch.randn(2, 64)})
    odd = nn.Sequential(bnb.nn.Linear4bit(64, 32, bias=False, quant_storage=torch.bfloat16)).to("cpu")
    with pytest.raises(PlanError, match="0 is quantised by bitsandbytes .* torch.bfloat16"):
        autotp.plan(odd, 2, example_inputs={"input": torch.randn(2, 64)})
