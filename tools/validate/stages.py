"""Tiny models in pipeline stages against themselves whole: outputs and the tokens of `generate`.

    torchrun --standalone --nproc-per-node 2 tools/validate/stages.py --pp 2
    torchrun --standalone --nproc-per-node 4 tools/validate/stages.py --tp 2 --pp 2 llama_gqa t5

Names are those of tests/models.py; without any, the models that issue 6 lists. Prints a line for each.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from models import MODELS, NAN_WHEN_LEFT_PADDED, NOT_GENERATING, hf  # noqa: E402
from whole import EXACT, FLOAT32, logits_of  # noqa: E402

import autotp  # noqa: E402
from autotp.same import agree  # noqa: E402
from autotp.verify import relative_error  # noqa: E402

NAMES = (
    "llama_gqa gpt2 gpt_neox phi granite gemma2 gemma3 olmo2 bloom mpt falcon_old falcon_new qwen3 mixtral "
    "deepseek_v3 t5 bart bert vit whisper"
).split()
ROUTES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "padded": {},
    "beam": dict(num_beams=3),
    "static": dict(cache_implementation="static"),
    "sampled": dict(do_sample=True),
}


def build(name: str) -> tuple[nn.Module, dict[str, Any]]:
    if name != "granite":
        model, inputs = MODELS[name](dtype=torch.float64)
    else:
        model, inputs = hf(
            "GraniteConfig", "GraniteForCausalLM", dtype=torch.float64, vocab_size=256, hidden_size=64,
            intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            embedding_multiplier=3.0, attention_multiplier=0.3, residual_multiplier=0.5, logits_scaling=2.0,
        )  # fmt: skip
    if hasattr(model, "generation_config"):
        model.generation_config.eos_token_id = None
    return model, inputs


def outcomes(model: Any, inputs: dict[str, Any], name: str) -> dict[str, Any]:
    """By what was done, a tensor, or the error's text."""
    with torch.no_grad():
        found = {"forward": logits_of(model(**inputs)).clone()}
    given = {k: v for k, v in inputs.items() if k not in ("decoder_input_ids", "use_cache")}
    for route, options in ROUTES.items() if name not in NOT_GENERATING else ():
        mask = {}
        if route == "padded" and (name in NAN_WHEN_LEFT_PADDED or "input_ids" not in given):
            continue
        if "input_ids" in given:
            mask = {"attention_mask": torch.ones_like(given["input_ids"])}
            mask["attention_mask"][0, :3] = route != "padded"
        torch.manual_seed(7)
        try:
            how = {"do_sample": False, "max_new_tokens": 6, **options}
            found[route] = model.generate(**given, **mask, **how)
        except Exception as error:  # some models have no such cache: then the whole one says so, too
            found[route] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return found


def difference(got: Any, want: Any, limit: float) -> str:
    """What is wrong with an outcome, or ""."""
    if isinstance(want, str):
        return "" if isinstance(got, str) else "no error, where one process has one"
    if isinstance(got, str):
        return got
    if want.is_floating_point():
        error = relative_error(got, want)
        return "" if error < limit else f"off by {error:.1e}"
    return "" if torch.equal(got, want) else "other tokens"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", default=NAMES)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in options.names:
        began = time.monotonic()
        whole, inputs = build(name)
        want = outcomes(whole, inputs, name)
        model, _ = build(name)
        told: Any
        try:
            autotp.parallelize(model, options.tp, options.pp, example_inputs=inputs)
            got = outcomes(model, inputs, name)
            # Some models take norms or softmaxes in float32, whatever their dtype.
            limit = EXACT if model.autotp.plan.precision == "float64" else FLOAT32  # type: ignore[union-attr]
            wrong = {k: said for k, w in want.items() if (said := difference(got[k], w, limit))}
            told = "right" if not wrong else "; ".join(f"{k}: {v}" for k, v in wrong.items())
        except Exception as error:
            told = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        mesh: Any = getattr(getattr(model, "autotp", None), "mesh", None)
        if mesh is None:
            print(f"{name:12} {told}", flush=True)
            continue
        try:
            agree(mesh.world, told)
        except autotp.AutotpError as error:
            told = str(error)
        if mesh.world.rank == 0:
            same = ", ".join(k for k, v in want.items() if isinstance(v, str))
            note = f" (refused by one process as well: {same})" if same else ""
            print(f"{name:12} {told}{note}  {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
