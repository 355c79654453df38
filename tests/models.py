"""Tiny randomly initialised models for the tests: 2 layers, hidden 64, vocabulary 256, float64 by default.

Biases are non-zero and norm weights are not one, so a bias added twice or a norm weight sliced wrongly shows.
transformers is imported inside the builders only.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Inputs = dict[str, Any]
Built = tuple[nn.Module, Inputs]

BATCH, SEQ = 2, 12


def randomise(model: nn.Module, seed: int = 1) -> nn.Module:
    """Random values: weights of size ~1/sqrt(fan in), biases ~0.2, norm weights around their own."""
    generator = torch.Generator().manual_seed(seed)

    def noise(p: torch.Tensor) -> torch.Tensor:
        return torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)

    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("bias"):
                p.copy_(0.2 * noise(p))
            elif p.ndim >= 2:
                p.copy_(0.8 * noise(p) / math.sqrt(p.shape[-1]))
            else:
                p.add_(0.1 * noise(p))
    return model


def token_ids(vocab: int = 250, seed: int = 3, seq: int = SEQ) -> torch.Tensor:
    return torch.randint(4, vocab, (BATCH, seq), generator=torch.Generator().manual_seed(seed))


def hf(
    config_class: str, model_class: str, *, dtype: torch.dtype, seed: int = 0, seq: int = SEQ, **config: Any
) -> Built:
    """A model and its inputs from transformers' own config and model classes."""
    import transformers

    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    cfg = getattr(transformers, config_class)(**{**tokens, **config})
    torch.manual_seed(seed)
    model = randomise(getattr(transformers, model_class)(cfg).to(dtype).eval(), seed + 1)
    if dtype == torch.float64 and hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("batched_mm")  # the default, grouped_mm, knows no float64
    inputs: Inputs = {"input_ids": token_ids(seq=seq)}
    if getattr(cfg, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = token_ids(seed=4, seq=seq - 4)
    if hasattr(cfg, "use_cache"):
        inputs["use_cache"] = False
    return model, inputs


# --- families of transformers -------------------------------------------------------------------------------

DECODER = dict(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    max_position_embeddings=128,
    tie_word_embeddings=False,
)
GQA = {**DECODER, "num_key_value_heads": 2}
GPT = dict(vocab_size=256, n_embd=64, n_layer=2, n_head=4, n_positions=128)

# name -> (config class, model class, config); "head_dim" is given where a default would not fit
TEXT: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama_mha": ("LlamaConfig", "LlamaForCausalLM", DECODER),
    "llama_gqa": ("LlamaConfig", "LlamaForCausalLM", GQA),
    "llama_mqa": ("LlamaConfig", "LlamaForCausalLM", {**DECODER, "num_key_value_heads": 1}),
    "llama_tied": ("LlamaConfig", "LlamaForCausalLM", {**GQA, "tie_word_embeddings": True}),
    "llama_bias": ("LlamaConfig", "LlamaForCausalLM", {**GQA, "attention_bias": True, "mlp_bias": True}),
    "llama_3heads": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {**DECODER, "hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 3},
    ),
    "llama_25heads": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {**DECODER, "hidden_size": 200, "num_attention_heads": 25, "num_key_value_heads": 25, "head_dim": 8},
    ),
    "llama_9_3": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {**DECODER, "hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8},
    ),
    "llama_vocab257": ("LlamaConfig", "LlamaForCausalLM", {**GQA, "vocab_size": 257}),
    "llama_ffn130": ("LlamaConfig", "LlamaForCausalLM", {**GQA, "intermediate_size": 130}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {**GQA, "sliding_window": 8}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", GQA),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {**GQA, "head_dim": 16}),
    "gemma2": (
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {
            **GQA,
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 8,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {
            **GQA,
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 8,
            "tie_word_embeddings": True,
        },
    ),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", GQA),
    "cohere": ("CohereConfig", "CohereForCausalLM", {**GQA, "tie_word_embeddings": True}),
    "stablelm": ("StableLmConfig", "StableLmForCausalLM", {**GQA, "use_qkv_bias": True}),
    "stablelm_qknorm": ("StableLmConfig", "StableLmForCausalLM", {**GQA, "qk_layernorm": True}),
    "phi": ("PhiConfig", "PhiForCausalLM", DECODER),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", GQA),
    "glm": ("GlmConfig", "GlmForCausalLM", {**GQA, "head_dim": 16, "attention_bias": True}),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", GPT),
    "gpt_neox": (
        "GPTNeoXConfig",
        "GPTNeoXForCausalLM",
        {k: v for k, v in DECODER.items() if k != "num_key_value_heads"},
    ),
    "gptj": ("GPTJConfig", "GPTJForCausalLM", {**GPT, "rotary_dim": 8, "tie_word_embeddings": False}),
    # codegen splits its fused weight over 4 "mp" groups of heads, so 8 heads make it interesting
    "codegen": (
        "CodeGenConfig",
        "CodeGenForCausalLM",
        {**GPT, "n_head": 8, "rotary_dim": 4, "n_ctx": 128, "tie_word_embeddings": False},
    ),
    "bloom": ("BloomConfig", "BloomForCausalLM", dict(vocab_size=256, hidden_size=64, n_layer=2, n_head=4)),
    "falcon_old": (
        "FalconConfig",
        "FalconForCausalLM",
        dict(
            vocab_size=256,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            multi_query=False,
            new_decoder_architecture=False,
            parallel_attn=False,
            bias=True,
        ),
    ),
    "falcon_mqa": (
        "FalconConfig",
        "FalconForCausalLM",
        dict(
            vocab_size=256,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            multi_query=True,
            new_decoder_architecture=False,
        ),
    ),
    "falcon_new": (
        "FalconConfig",
        "FalconForCausalLM",
        dict(
            vocab_size=256,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_kv_heads=2,
            new_decoder_architecture=True,
        ),
    ),
    "falcon_alibi": (
        "FalconConfig",
        "FalconForCausalLM",
        dict(
            vocab_size=256,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            multi_query=False,
            alibi=True,
            new_decoder_architecture=False,
            parallel_attn=False,
            bias=True,
        ),
    ),
    "mpt": (
        "MptConfig",
        "MptForCausalLM",
        dict(vocab_size=256, d_model=64, n_layers=2, n_heads=4, max_seq_len=128),
    ),
    "opt": (
        "OPTConfig",
        "OPTForCausalLM",
        dict(
            vocab_size=256,
            hidden_size=64,
            ffn_dim=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            word_embed_proj_dim=64,
            max_position_embeddings=128,
        ),
    ),
    "gpt_bigcode": ("GPTBigCodeConfig", "GPTBigCodeForCausalLM", {**GPT, "multi_query": True}),
    "starcoder2": ("Starcoder2Config", "Starcoder2ForCausalLM", {**GQA, "use_bias": True}),
    "mixtral": (
        "MixtralConfig",
        "MixtralForCausalLM",
        {**GQA, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {**GQA, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    "gpt_oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        {**GQA, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {
            **DECODER,
            "q_lora_rank": 24,
            "kv_lora_rank": 24,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
        },
    ),
    "mamba": (
        "MambaConfig",
        "MambaForCausalLM",
        dict(vocab_size=256, hidden_size=64, num_hidden_layers=2, state_size=8, use_bias=True),
    ),
    "t5": (
        "T5Config",
        "T5ForConditionalGeneration",
        dict(
            vocab_size=256, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, decoder_start_token_id=0
        ),
    ),
    "bart": (
        "BartConfig",
        "BartForConditionalGeneration",
        dict(
            vocab_size=256,
            d_model=64,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=128,
            decoder_ffn_dim=128,
            max_position_embeddings=128,
            decoder_start_token_id=2,
        ),
    ),
    "bert": (
        "BertConfig",
        "BertForMaskedLM",
        {k: v for k, v in DECODER.items() if k != "num_key_value_heads"},
    ),
    "roberta": (
        "RobertaConfig",
        "RobertaForMaskedLM",
        {k: v for k, v in DECODER.items() if k != "num_key_value_heads"},
    ),
}
NOT_GENERATING = {"bert", "roberta", "vit", "nanogpt", "torch_encoder"}
# These take the softmax of float64 scores in float32, where the mask's lowest value is -inf: a query that
# sees nothing becomes NaN.
NAN_WHEN_LEFT_PADDED = {"gemma2", "bloom", "mpt"}


def vit(dtype: torch.dtype) -> Built:
    model, _ = hf(
        "ViTConfig",
        "ViTForImageClassification",
        dtype=dtype,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        image_size=16,
        patch_size=4,
        num_labels=8,
    )
    return model, {
        "pixel_values": torch.randn(BATCH, 3, 16, 16, generator=torch.Generator().manual_seed(3)).to(dtype)
    }


def whisper(dtype: torch.dtype) -> Built:
    model, inputs = hf(
        "WhisperConfig",
        "WhisperForConditionalGeneration",
        dtype=dtype,
        vocab_size=256,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        num_mel_bins=16,
        max_source_positions=10,
        max_target_positions=64,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    del inputs["input_ids"]
    features = torch.randn(BATCH, 16, 20, generator=torch.Generator().manual_seed(3)).to(dtype)
    return model, {"input_features": features, **inputs}


# --- models that are not from transformers ------------------------------------------------------------------


class CausalSelfAttention(nn.Module):
    """As in Karpathy's nanoGPT: one fused linear for query, key and value, split by width."""

    bias: torch.Tensor

    def __init__(self, n_embd: int, n_head: int, block_size: int):
        super().__init__()
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)
        self.attn_dropout = nn.Dropout(0.1)
        self.resid_dropout = nn.Dropout(0.1)
        self.n_head = n_head
        self.n_embd = n_embd
        mask = torch.tril(torch.ones(block_size, block_size)).view(1, 1, block_size, block_size)
        self.register_buffer("bias", mask, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        att = F.softmax(att, dim=-1)
        att = self.attn_dropout(att)
        y = att @ v
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class NanoBlock(nn.Module):
    def __init__(self, n_embd: int, n_head: int, block_size: int):
        super().__init__()
        self.ln_1 = nn.LayerNorm(n_embd)
        self.attn = CausalSelfAttention(n_embd, n_head, block_size)
        self.ln_2 = nn.LayerNorm(n_embd)
        self.mlp = nn.Sequential(
            nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd), nn.Dropout(0.1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    """A GPT in plain torch, input and output embeddings tied."""

    def __init__(
        self, vocab: int = 256, n_embd: int = 64, n_head: int = 4, n_layer: int = 2, block_size: int = 32
    ):
        super().__init__()
        self.wte = nn.Embedding(vocab, n_embd)
        self.wpe = nn.Embedding(block_size, n_embd)
        self.h = nn.ModuleList([NanoBlock(n_embd, n_head, block_size) for _ in range(n_layer)])
        self.ln_f = nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, vocab, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(
        self, idx: torch.Tensor, targets: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        pos = torch.arange(0, idx.size(1), dtype=torch.long, device=idx.device)
        x = self.wte(idx) + self.wpe(pos)
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


class TorchEncoder(nn.Module):
    """torch's own encoder layers and an output linear."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, dim_feedforward=128, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.encoder(x))


def nanogpt(dtype: torch.dtype) -> Built:
    torch.manual_seed(0)
    return randomise(NanoGPT().to(dtype).eval()), {"idx": token_ids()}


def torch_encoder(dtype: torch.dtype) -> Built:
    torch.manual_seed(0)
    model = randomise(TorchEncoder().to(dtype).eval())
    return model, {"x": torch.randn(BATCH, SEQ, 64, generator=torch.Generator().manual_seed(3)).to(dtype)}


# --- the table ----------------------------------------------------------------------------------------------


def _text(name: str, dtype: torch.dtype = torch.float64) -> Built:
    config_class, model_class, config = TEXT[name]
    return hf(config_class, model_class, dtype=dtype, **config)


def _other(builder: Callable[[torch.dtype], Built], dtype: torch.dtype = torch.float64) -> Built:
    return builder(dtype)


MODELS: dict[str, Callable[..., Built]] = {
    **{name: functools.partial(_text, name) for name in TEXT},
    **{b.__name__: functools.partial(_other, b) for b in (vit, whisper, nanogpt, torch_encoder)},
}
"""`MODELS[name](dtype=torch.float64) -> (model in eval mode, its inputs)`; the same numbers every time."""


def hard_inputs(name: str, inputs: Inputs) -> Inputs:
    """The inputs with row 0 left-padded (right for `NAN_WHEN_LEFT_PADDED`); unchanged without a mask."""
    if name not in TEXT or name == "mamba":
        return inputs
    mask = torch.ones_like(inputs["input_ids"])
    mask[0, -3:] = 0
    if name not in NAN_WHEN_LEFT_PADDED:
        mask = mask.flip(1)
    return {**inputs, "attention_mask": mask}


def generating(name: str) -> bool:
    """Does this model have a `generate` of its own?"""
    return name not in NOT_GENERATING
