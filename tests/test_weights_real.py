"""SmolLM2 from its own files, straight to 2, 3 and 4 ranks: the same words, and the same files again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("gguf")
import demo  # noqa: E402
from test_weights import QUIET, files, on_ranks  # noqa: E402

import real_models  # noqa: E402
from autotp.save import save  # noqa: E402

HERE = (real_models.CACHE / real_models.SMOLLM2_WHEEL.replace("==", "-")).is_dir()
TOKENS = 8


@QUIET
@pytest.mark.skipif(not HERE, reason="run `make models` first")
def test_smollm2_from_its_files(tmp_path: Path) -> None:
    """9 query heads and 3 key-value heads, tied embeddings: uneven over 2 and 4 ranks."""
    model, tokenizer = real_models.smollm2()
    model.save_pretrained(tmp_path / "in", max_shard_size="200MB")
    ids = torch.tensor([tokenizer(demo.QUESTION)["input_ids"]])
    how: dict[str, Any] = {"max_new_tokens": TOKENS, "do_sample": False, "pad_token_id": 0}
    want = model.generate(ids, **how)

    def use(tp: int, split: Any) -> Any:
        if tp == 3:
            save(split, tmp_path / "out", max_shard_size="200MB")
        return split.generate(ids, **how)

    for tp in (2, 3, 4):
        for tokens in on_ranks(tmp_path / "in", tp, lambda split, tp=tp: use(tp, split)):
            assert torch.equal(tokens, want), tp
    type(model).from_pretrained(tmp_path / "in").save_pretrained(tmp_path / "want", max_shard_size="200MB")
    written, expected = files(tmp_path / "out"), files(tmp_path / "want")
    assert set(written) == set(expected) and [n for n in expected if written[n] != expected[n]] == []
