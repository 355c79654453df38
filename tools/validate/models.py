"""The models of the published runs, built on meta from transformers' configs and counted once each."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    NemotronConfig,
    Qwen3Config,
)

from autotp.search.counts import count
from autotp.search.workload import Workload

LLAMA = {  # hidden, heads, key/value heads, ffn, layers, vocabulary
    "llama3-8b": (4096, 32, 8, 14336, 32, 128256),
    "llama3-70b": (8192, 64, 8, 28672, 80, 128256),
    "llama3-405b": (16384, 128, 8, 53248, 126, 128256),
    "llama2-70b": (8192, 64, 8, 28672, 80, 32000),
    "mistral-7b": (4096, 32, 8, 14336, 32, 32768),
}


class Models:
    """Workloads by description, each counted when first asked for."""

    def __init__(self) -> None:
        self._known: dict[Any, Workload] = {}

    def gpt(
        self, hidden: int, heads: int, layers: int, seq: int, vocab: int = 51200, dropout: float = 0.1
    ) -> Workload:
        config = GPT2Config(
            n_embd=hidden,
            n_head=heads,
            n_layer=layers,
            vocab_size=vocab,
            n_positions=seq,
            attn_pdrop=dropout,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
        )
        return self._count(("gpt", hidden, heads, layers, seq, vocab, dropout), config, seq)

    def llama(self, name: str, seq: int, layers: int | None = None) -> Workload:
        hidden, heads, kv, ffn, depth, vocab = LLAMA[name]
        config = LlamaConfig(
            hidden_size=hidden,
            num_attention_heads=heads,
            num_key_value_heads=kv,
            intermediate_size=ffn,
            num_hidden_layers=layers or depth,
            vocab_size=vocab,
        )
        return self._count((name, seq, layers), config, seq)

    def nemotron(self, hidden: int, heads: int, kv: int, ffn: int, layers: int, seq: int) -> Workload:
        config = NemotronConfig(
            hidden_size=hidden,
            num_attention_heads=heads,
            num_key_value_heads=kv,
            intermediate_size=ffn,
            num_hidden_layers=layers,
            vocab_size=256000,
        )
        return self._count(("nemotron", hidden, layers, seq), config, seq)

    def mixtral(self, seq: int) -> Workload:
        return self._count(("mixtral", seq), MixtralConfig(), seq)

    def qwen3_32b(self, seq: int) -> Workload:
        config = Qwen3Config(
            hidden_size=5120,
            num_attention_heads=64,
            num_key_value_heads=8,
            intermediate_size=25600,
            num_hidden_layers=64,
            vocab_size=151936,
            head_dim=128,
        )
        return self._count(("qwen3-32b", seq), config, seq)

    def _count(self, key: Any, config: Any, seq: int) -> Workload:
        if key not in self._known:
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
            self._known[key] = count(model, seq)
        return self._known[key]
