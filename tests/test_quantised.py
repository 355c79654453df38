"""Quantised models over ranks against themselves whole; what can't be cut is named."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from torch import nn

import autotp
from autotp.comm import Comm, simulate
from autotp.errors import CheckpointError, PlanError
from autotp.mesh import Mesh
from autotp.quantised import Packed, components, is_packed

QUIET = pytest.mark.filterwarnings("ignore:.*stay whole")


@pytest.fixture(scope="module")
def ao() -> Any:
    return pytest.importorskip("torchao.quantization", reason="torchao is not installed")


def scheme(ao: Any, name: str) -> Any:
    granularity = pytest.importorskip("torchao.quantization.granularity")
    return {
        "int8": lambda: ao.Int8WeightOnlyConfig(),
        "int8 groups": lambda: ao.Int8WeightOnlyConfig(granularity=granularity.PerGroup(16)),
        "int8 wide groups": lambda: ao.Int8WeightOnlyConfig(granularity=granularity.PerGroup(48)),
        "int8 activations": lambda: ao.Int8DynamicActivationInt8WeightConfig(),
        "int4 groups": lambda: ao.IntxWeightOnlyConfig(
            weight_dtype=torch.int4, granularity=granularity.PerGroup(32)
        ),
        "float8": lambda: ao.Float8WeightOnlyConfig(),
    }[name]()


def llama(dtype: torch.dtype = torch.float32, family: str = "llama_gqa", **more: Any) -> tuple[Any, dict]:
    config, cls, settings = models.TEXT[family]
    return models.hf(config, cls, dtype=dtype, **{**settings, **more})


def bits(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    return components(tensor) if is_packed(tensor) else {"": tensor}


def held(model: nn.Module) -> int:
    """Bytes of the parameters."""
    return sum(t.numel() * t.element_size() for p in model.parameters() for t in bits(p).values())


def split(model: nn.Module, inputs: Any, tp: int = 2) -> list[tuple[torch.Tensor, nn.Module, dict]]:
    def one(comm: Comm) -> Any:
        local = autotp.parallelize(copy.deepcopy(model), comm=comm)
        with torch.no_grad():
            return local(**inputs).logits, local, autotp.full_state_dict(local)

    return simulate(tp, one)


# What down_proj becomes: its inputs cut where its scales allow it, else its outputs, gathered.
ROW, COLUMN = "RowParallelLinear", "ColumnParallelLinear"


@QUIET
@pytest.mark.parametrize(
    ("name", "family", "kind"),
    [
        ("int8", "phi3", ROW),  # q, k, v in one weight: a rank's rows are of three ranges
        ("int8 wide groups", "llama_gqa", COLUMN),  # a half of 144 inputs ends inside of a group of 48
        ("int8 activations", "llama_gqa", COLUMN),  # one scale for a whole row of activations
        ("float8", "llama_gqa", ROW),
    ],
)
def test_torchao(ao: Any, name: str, family: str, kind: str) -> None:
    """Logits of the whole quantised model; weights still quantised, cut, and the same when put together."""
    dtype = torch.bfloat16 if name == "float8" else torch.float32
    wide = name == "int8 wide groups"
    sizes = {"intermediate_size": 144, "hidden_size": 96} if wide else {}
    model, inputs = llama(dtype, family, **sizes)
    ao.quantize_(model, scheme(ao, name))
    with torch.no_grad():
        want = model(**inputs).logits
    for logits, local, full in split(model, inputs):
        down = local.model.layers[0].mlp.down_proj
        assert type(down).__name__ == kind and type(down.weight) is type(
            model.model.layers[0].mlp.down_proj.weight
        )
        assert not any(p.requires_grad for p in local.parameters() if is_packed(p))
        assert held(local) < 0.6 * held(model)
        limit = 3e-2 if dtype == torch.bfloat16 else 1e-5
        assert float((logits - want).abs().max() / want.abs().max()) < limit
        for key, value in model.state_dict().items():
            assert type(full[key]) is type(value)
            mine, theirs = bits(full[key]), bits(value)
            assert mine.keys() == theirs.keys() and all(torch.equal(mine[k], theirs[k]) for k in mine), key


@QUIET
def test_verify_and_generation(ao: Any) -> None:
    model, _ = llama()
    ao.quantize_(model, scheme(ao, "int8 groups"))
    assert autotp.verify(model, tp=2, steps=0).raise_if_wrong()


def test_parts_are_tried(ao: Any) -> None:
    """A cut at the groups' ends is right; one inside of a group, or a scale for what a rank lacks, is not."""

    def why(scheme_name: str, dim: int, *bounds: int) -> str | None:
        linear = nn.Linear(64, 64, bias=False)
        ao.quantize_(linear, scheme(ao, scheme_name))
        layout = tuple(((a, b),) for a, b in zip(bounds, bounds[1:], strict=False))
        return Packed.of(linear).unfit("weight", {dim: layout})

    assert why("int8 groups", 1, 0, 32, 64) is None and why("int8 groups", 0, 0, 3, 64) is None
    assert "24 to be divisible by block_size" in (why("int8 groups", 1, 0, 24, 64) or "")  # torchao's words
    assert why("int8 activations", 0, 0, 32, 64) is None
    assert "activations are quantised" in (why("int8 activations", 1, 0, 32, 64) or "")


@QUIET
@pytest.mark.parametrize("name", ["int8", "int4 groups"])
def test_load(ao: Any, name: str, tmp_path: Path) -> None:
    """A checkpoint that transformers wrote, read by the slice; over stages too."""
    import transformers

    whole, inputs = llama()
    whole.save_pretrained(tmp_path / "plain")
    quantised = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "plain",
        quantization_config=transformers.TorchAoConfig(scheme(ao, name)),
        dtype=torch.float32,
    )
    quantised.save_pretrained(tmp_path / "q", max_shard_size="100KB")
    with torch.no_grad():
        want = quantised(**inputs).logits

    def one(comm: Comm) -> Any:
        model: Any = autotp.load(tmp_path / "q", comm=comm, progress=False)
        for limit in ("50GB", "100KB"):
            autotp.save(model, tmp_path / f"saved-{limit}", max_shard_size=limit)
        with pytest.raises(CheckpointError, match="quantised weights .* leave state_dict out"):
            model.save_pretrained(tmp_path / "out", state_dict=autotp.full_state_dict(model))
        with pytest.raises(CheckpointError, match="training checkpoints can't handle quantised"):
            autotp.save_training(tmp_path / "out", model)
        with torch.no_grad():
            return model(**inputs).logits, model, autotp.full_state_dict(model)

    for logits, model, full in simulate(2, one):
        assert float((logits - want).abs().max() / want.abs().max()) < 1e-5
        assert held(model) < 0.6 * held(quantised)
        for key, value in quantised.state_dict().items():
            mine, theirs = bits(full[key]), bits(value)
            assert all(torch.equal(mine[k], theirs[k]) for k in theirs), key

    quantised.save_pretrained(tmp_path / "whole-50GB")
    quantised.save_pretrained(tmp_path / "whole-100KB", max_shard_size="100KB")
    for limit in ("50GB", "100KB"):
        assert stored(tmp_path / f"saved-{limit}") == stored(tmp_path / f"whole-{limit}")

    def staged(comm: Comm) -> torch.Tensor:
        model: Any = autotp.load(tmp_path / "q", comm=Mesh.split(comm, tp=1, pp=2), progress=False)
        autotp.save(model, tmp_path / "staged")
        with torch.no_grad():
            return model(**inputs).logits

    assert all(torch.equal(logits, want) for logits in simulate(2, staged))
    assert stored(tmp_path / "staged") == stored(tmp_path / "whole-50GB")
    with pytest.raises(CheckpointError, match="autotp shard can't handle quantised weights"):
        from autotp.presharded import write_shards

        write_shards(tmp_path / "q", tmp_path / "shards", 2)


def stored(path: Path) -> dict[str, Any]:
    """What a directory holds: files' bytes; of tensors' the header, whose metadata come in any order."""
    found: dict[str, Any] = {}
    for file in path.iterdir():
        data = file.read_bytes()
        if file.suffix == ".safetensors":
            length = int.from_bytes(data[:8], "little")
            found[file.name] = json.loads(data[8 : 8 + length]), data[8 + length :]
        else:
            found[file.name] = data
    return found


class Int8Linear(nn.Module):
    """As other packages keep them: plain ints, and scales beside."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16, 16, dtype=torch.int8), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype)) * self.scale


def test_other_forms_are_refused_by_name(tmp_path: Path) -> None:
    model, _ = llama()
    model.model.layers[1].mlp.up_proj = Int8Linear()
    told = r"layers\.1\.mlp\.up_proj\.weight is quantised \(torch\.int8 \[16, 16\], in a Int8Linear of "
    with pytest.raises(PlanError, match=told):
        autotp.plan(model, 2)
    model, _ = llama()
    model.register_buffer("qweight", torch.ones(4, 4, dtype=torch.int32))  # ints that are no weights
    autotp.plan(model, 2)
    model.config.quantization_config = {"quant_method": "gptq"}
    with pytest.raises(PlanError, match=r"qweight is quantised \(by gptq, torch\.int32"):
        autotp.plan(model, 2)

    whole, _ = llama()
    whole.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "quark"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"quantised \(quark\).*dequantise it first"):
        autotp.load(tmp_path, 1)
