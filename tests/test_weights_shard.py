"""Shards written ahead: each rank's file from end to end, and refused where they do not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_weights import QUIET, edited, files, on_ranks, saved
from typer.testing import CliRunner

from autotp.cli import app
from autotp.errors import AutotpError, CheckpointError
from autotp.presharded import MANIFEST, rank_file, write_shards
from autotp.save import save
from autotp.state import full_state_dict


@QUIET
@pytest.mark.parametrize("name", ["llama_tied", "mixtral", "t5", "gpt2"])
def test_shards_load_and_save_like_the_checkpoint(name: str, tmp_path: Path) -> None:
    whole, inputs = saved(name, tmp_path / "in")
    (tmp_path / "in" / "tokenizer.json").write_text("{}")
    write_shards(tmp_path / "in", tmp_path / "shards", 2)
    assert (tmp_path / "shards" / "tokenizer.json").exists()
    assert not (tmp_path / "shards" / "model.safetensors").exists()
    size = (tmp_path / "in" / "model.safetensors").stat().st_size
    assert all((tmp_path / "shards" / rank_file(r, 2)).stat().st_size < 0.8 * size for r in range(2))

    def use(model: Any) -> Any:
        save(model, tmp_path / "out")
        with torch.no_grad():
            return full_state_dict(model), model(**inputs).logits

    want = whole.state_dict()
    with torch.no_grad():
        logits = whole(**inputs).logits
    for state, got in on_ranks(tmp_path / "shards", 2, use):
        assert set(state) == set(want) and all(torch.equal(state[n], t) for n, t in want.items())
        assert float((got - logits).abs().max()) <= 1e-9 * float(logits.abs().max())
    type(whole).from_pretrained(tmp_path / "in").save_pretrained(tmp_path / "want")
    assert files(tmp_path / "out") == files(tmp_path / "want")


@QUIET
def test_experts_by_expert(tmp_path: Path) -> None:
    """From the checkpoint and from shards; shards that were cut so are refused otherwise."""
    whole, inputs = saved("mixtral", tmp_path / "in")
    write_shards(tmp_path / "in", tmp_path / "shards", 2, ep=2)

    def use(model: Any) -> Any:
        experts = model.model.layers[0].mlp.experts
        with torch.no_grad():
            return full_state_dict(model), model(**inputs).logits, experts.down_proj.shape[0]

    with torch.no_grad():
        logits = whole(**inputs).logits
    for path in ("in", "shards"):
        for state, got, held in on_ranks(tmp_path / path, 2, use, ep=2):
            assert held == whole.config.num_local_experts // 2
            assert all(torch.equal(state[n], t) for n, t in whole.state_dict().items())
            assert float((got - logits).abs().max()) <= 1e-9 * float(logits.abs().max())
    with pytest.raises(CheckpointError, match=r"\(ep=2;.*--tp 2 --ep 2"):
        on_ranks(tmp_path / "shards", 2, use)


@QUIET
def test_ties_that_the_checkpoint_breaks_stay_broken(tmp_path: Path) -> None:
    saved("llama_tied", tmp_path / "in")
    embed = "model.embed_tokens.weight"
    edited(tmp_path / "in", lambda t: {**t, "lm_head.weight": t[embed] + 1})
    write_shards(tmp_path / "in", tmp_path / "shards", 2)
    for state in on_ranks(tmp_path / "shards", 2, full_state_dict):
        assert torch.equal(state["lm_head.weight"], state[embed] + 1)


@QUIET
def test_refusals(tmp_path: Path) -> None:
    saved("llama_gqa", tmp_path / "in")
    out = tmp_path / "shards"
    write_shards(tmp_path / "in", out, 2)
    with pytest.raises(
        CheckpointError, match=r"shards for tp=2, not tp=4(.|\n)*autotp shard .*in OUT --tp 4"
    ):
        on_ranks(out, 4, full_state_dict)
    with pytest.raises(CheckpointError, match="another plan"):
        on_ranks(out, 2, full_state_dict, policy={"schema": 1, "modules": {"lm_head": "replicate"}})
    data = (out / rank_file(1, 2)).read_bytes()
    (out / rank_file(1, 2)).write_bytes(data[:-8])
    with pytest.raises(AutotpError, match="truncated"):
        on_ranks(out, 2, full_state_dict)
    (out / rank_file(1, 2)).unlink()
    with pytest.raises(AutotpError, match=r"rank-00001-of-00002.safetensors is missing"):
        on_ranks(out, 2, full_state_dict)
    (out / MANIFEST).write_text("{")
    with pytest.raises(CheckpointError, match="damaged"):
        on_ranks(out, 2, full_state_dict)
    with pytest.raises(CheckpointError, match="holds other files"):
        write_shards(tmp_path / "in", tmp_path / "in", 2)


@QUIET
def test_a_crash_leaves_no_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written again over good ones: after a crash in the middle, nothing is taken for shards."""
    saved("llama_gqa", tmp_path / "in")
    write_shards(tmp_path / "in", tmp_path / "shards", 2)
    import autotp.presharded as presharded

    real = presharded._write_rank

    def crash(path: Path, *args: Any) -> None:
        if path.name == rank_file(1, 2):
            raise KeyboardInterrupt
        real(path, *args)

    monkeypatch.setattr(presharded, "_write_rank", crash)
    with pytest.raises(KeyboardInterrupt):
        write_shards(tmp_path / "in", tmp_path / "shards", 2)
    with pytest.raises(CheckpointError, match="holds no weights"):
        on_ranks(tmp_path / "shards", 2, full_state_dict)


@QUIET
def test_the_command(tmp_path: Path) -> None:
    saved("llama_gqa", tmp_path / "in")
    source, out = str(tmp_path / "in"), str(tmp_path / "shards")
    run = CliRunner().invoke(app, ["shard", source, out, "--tp", "2", "--dtype", "float32"])
    assert run.exit_code == 0, run.output
    assert "LlamaForCausalLM for tp=2" in run.output and "autotp.load(" in run.output
    dtypes = on_ranks(
        tmp_path / "shards", 2, lambda m: {p.dtype for p in m.parameters()}, dtype=torch.float32
    )
    assert dtypes == [{torch.float32}] * 2
    bad = CliRunner().invoke(app, ["shard", source, out, "--tp", "2", "--dtype", "int8"])
    assert bad.exit_code == 2
    assert CliRunner().invoke(app, ["shard", str(tmp_path / "nowhere"), out, "--tp", "2"]).exit_code == 2
