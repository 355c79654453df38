"""Real weights: a Llama that must go on speaking, a BERT that must go on embedding, whole and sharded."""

import re
from functools import cache
from typing import Any

import pytest
import torch

pytest.importorskip("gguf")
pytest.importorskip("transformers")
import demo  # noqa: E402
import minilm  # noqa: E402

import real_models  # noqa: E402
from launch import launch  # noqa: E402

ANSWER = "The sky is blue because of a process called Rayleigh scattering."


def fetched(wheel: str) -> bool:
    return (real_models.CACHE / wheel.replace("==", "-")).is_dir()


needs_smollm2 = pytest.mark.skipif(not fetched(real_models.SMOLLM2_WHEEL), reason="run `make models` first")
needs_minilm = pytest.mark.skipif(not fetched(real_models.MINILM_WHEEL), reason="run `make models` first")


@cache
def single_answer() -> tuple[list[int], str]:
    model, tokenizer = real_models.smollm2()
    ids, _ = demo.answer(model, tokenizer, demo.QUESTION, on_token=lambda: None)
    return ids, tokenizer.decode(ids)


@cache
def single_vectors() -> torch.Tensor:
    return minilm.embed(*real_models.minilm())


@needs_smollm2
def test_smollm2_speaks() -> None:
    ids, text = single_answer()
    assert len(ids) == demo.TOKENS
    assert text.startswith(ANSWER)
    assert len(re.findall(r"[a-z]+", text)) > 40


@needs_smollm2
def test_smollm2_tokenizer_round_trips_and_splits_digits() -> None:
    (file,) = real_models.fetch(real_models.SMOLLM2_WHEEL).rglob("*.gguf")
    from gguf import GGUFReader

    reader = GGUFReader(file)
    tokenizer = real_models._tokenizer({name: field.contents() for name, field in reader.fields.items()})
    text = "Ærø costs 1234 kr.,\n\n  naïve  😀 don't"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.convert_ids_to_tokens(tokenizer("1234")["input_ids"]) == ["1", "2", "3", "4"]
    assert tokenizer("<|im_end|>")["input_ids"] == [tokenizer.eos_token_id]


@needs_minilm
def test_minilm_knows_a_paraphrase() -> None:
    vectors = single_vectors()
    assert vectors.shape == (len(minilm.SENTENCES), 384)
    assert vectors[0] @ vectors[1] > 0.6 > 0.2 > vectors[0] @ vectors[2]


@needs_smollm2
@pytest.mark.parametrize("tp", [2, 3, 4])
def test_smollm2_says_the_same_sharded(tp: int) -> None:
    ranks: list[dict[str, Any]] = launch(demo.__file__, ["--worker", "--tp", str(tp)], tp, timeout=280)
    expected, _ = single_answer()
    assert [rank["ids"] for rank in ranks] == [expected] * tp
    whole = ranks[0]["whole"]
    matrices = [name for name, shape in whole.items() if len(shape) == 2]
    assert all(any(rank["local"][name] != whole[name] for rank in ranks) for name in matrices)


@needs_minilm
@pytest.mark.parametrize("tp", [2, 3, 4])
def test_minilm_embeds_the_same_sharded(tp: int) -> None:
    for vectors in minilm.embed_sharded(tp):
        torch.testing.assert_close(vectors, single_vectors(), atol=minilm.TOLERANCE, rtol=0)
