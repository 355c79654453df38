"""The published tables as cases: a configuration, and what was measured.

Each row belongs to the fit part or to the held-out part, by a hash of its text: only fit rows may decide a
constant.
"""

from __future__ import annotations

import csv
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from autotp.search.cluster import Cluster
from autotp.search.regions import Traffic
from autotp.search.workload import Shares, Workload

from .models import Models

DATA = Path(__file__).parent / "data"


@dataclass(frozen=True)
class Case:
    """measured: seconds, or bytes where `what` is `memory`. group: rows to rank among each other."""

    table: str
    name: str
    measured: float
    workload: Workload
    cluster: str | Cluster
    options: dict[str, Any]
    fit: bool
    what: str = "time"
    group: tuple[Any, ...] = ()
    notes: dict[str, Any] = field(default_factory=dict)


def rows(name: str, *ranked: str) -> Iterator[tuple[dict[str, str], bool]]:
    """The rows of a CSV, each with whether it is of the fit part: by a hash of the row, or of the columns
    `ranked`, so that runs that are alike in them, to be ranked among each other, are of one part."""
    with open(DATA / f"{name}.csv") as file:
        for row in csv.DictReader(line for line in file if not line.startswith("#")):
            key = {k: row[k] for k in ranked} or row
            yield row, zlib.crc32(repr(sorted(key.items(), key=lambda kv: str(kv[0]))).encode()) % 2 == 0


GROUP = ("gpus", "gbs", "hidden", "layers")  # of vTrain's runs


def vtrain(models: Models, part: str) -> Iterator[Case]:
    """Megatron-DeepSpeed on A100, full recomputation, 1F1B. part: `multi` or `single`."""
    for row, fit in rows(f"vtrain_ground_truth_{part}", *GROUP):
        r = {k: int(v) for k, v in row.items() if k not in ("iter_ms", "params_b")}
        nodes = max(1, r["gpus"] // 8)
        yield Case(
            f"vTrain {part}-node",
            str(r),
            float(row["iter_ms"]) / 1e3,
            models.gpt(r["hidden"], r["heads"], r["layers"], r["seq"]),
            f"dgx-a100-4nic:{nodes}",
            dict(tp=r["tp"], pp=r["pp"], dp=r["dp"], batch=r["gbs"], micro_batch=r["mbs"], recompute="full"),
            fit,
            group=tuple(r[k] for k in GROUP),
        )


def sc21(models: Models) -> Iterator[Case]:
    """SC21 table 1: the time that its FLOP/s mean, recomputation counted."""
    for r, fit in rows("sc21_table1_weak_scaling"):
        h, layers, batch, gpus = (int(r[k]) for k in ("hidden", "layers", "global_batch", "gpus"))
        flops = 96 * batch * 2048 * layers * h**2 * (1 + 2048 / (6 * h) + 51200 / (16 * layers * h))
        pp = int(r["pp"])
        virtual = (
            layers // pp // int(r["layers_per_virtual_stage"]) if r["layers_per_virtual_stage"] != "-" else 1
        )
        yield Case(
            "SC21 table 1",
            f"{r['params_b']}B",
            flops / gpus / float(r["tflops_per_gpu"]) / 1e12,
            models.gpt(h, int(r["heads"]), layers, 2048),
            f"dgx-a100:{gpus // 8}",
            dict(
                tp=int(r["tp"]),
                pp=pp,
                dp=int(r["dp"]),
                batch=batch,
                micro_batch=int(r["micro_batch"]),
                recompute="full",
                virtual_stages=virtual,
            ),
            fit,
        )


def crossover(models: Models) -> Iterator[Case]:
    """SC21 table 2: ZeRO-3 without model parallelism against TP + PP."""
    shapes = {"174.6": (12288, 96, 96), "529.6": (20480, 128, 105)}
    for r, fit in rows("sc21_table2_zero3_vs_ptd"):
        h, heads, layers = shapes[r["params_b"]]
        gpus, batch = int(r["gpus"]), int(r["global_batch"])
        flops = 96 * batch * 2048 * layers * h**2 * (1 + 2048 / (6 * h) + 51200 / (16 * layers * h))
        if r["scheme"].startswith("ZeRO"):
            options = dict(dp=gpus, zero=3)
        else:
            pp = int(r["model_parallel"]) // 8
            options = dict(tp=8, pp=pp, dp=gpus // 8 // pp)
        yield Case(
            "SC21 table 2",
            f"{r['scheme']} {r['params_b']}B {gpus} GPUs",
            flops / gpus / float(r["tflops_per_gpu"]) / 1e12,
            models.gpt(h, heads, layers, 2048),
            f"dgx-a100:{gpus // 8}",
            dict(**options, batch=batch, micro_batch=int(r["micro_batch"]), recompute="full"),
            fit,
            group=(r["params_b"],),
            notes={"scheme": r["scheme"]},
        )


def korthikanti(models: Models) -> Iterator[Case]:
    """Korthikanti et al.: table 5's iteration times, figure 1's memory."""
    configs = {r["model"]: r for r, _ in rows("korthikanti_table3_configs")}

    def options(r: dict[str, str]) -> tuple[Workload, str, dict[str, Any]]:
        gpus, tp, pp = int(r["gpus"]), int(r["tp"]), int(r["pp"])
        return (
            models.gpt(int(r["hidden"]), int(r["heads"]), int(r["layers"]), 2048),
            f"dgx-a100:{max(1, gpus // 8)}",
            dict(
                tp=tp,
                pp=pp,
                dp=gpus // tp // pp,
                batch=int(r["global_batch"]),
                micro_batch=int(r["micro_batch"]),
                virtual_stages=int(r["interleave_m"]),
            ),
        )

    for r, fit in rows("korthikanti_table5_iteration"):
        workload, cluster, o = options(configs[r["model"]])
        yield Case(
            "Korthikanti table 5",
            f"{r['model']} full",
            float(r["iter_full_recompute_s"]),
            workload,
            cluster,
            dict(**o, recompute="full"),
            fit,
        )
        yield Case(
            "Korthikanti table 5",
            f"{r['model']} selective + SP",
            float(r["iter_present_work_s"]),
            workload,
            cluster,
            dict(**o, recompute="selective", sequence_parallel=True),
            fit,
        )
    # The figure counts the layers alone: 18 bytes of 12 h^2 parameters each, and what they keep. So it is
    # compared with that, column by column, and the first stage as it is with both columns' sum.
    names = {"megatron-22B": "22B", "gpt3-175B": "175B", "turing-530B": "530B", "megatron-1T": "1T"}
    for r, fit in rows("korthikanti_fig1_memory"):
        workload, cluster, o = options(configs[names[r["model"]]])
        layers, state = _layers_only(workload), float(r["param_opt_gib"])
        kept, short = float(r["act_gib_no_recompute"]), float(r["act_gib_seq_plus_selective"])
        selective = dict(recompute="selective", sequence_parallel=True)
        activations = ("activations",)
        for part, gib, counted, extra, kinds in (
            ("state", state, layers, {}, ("weights", "gradients", "optimizer")),
            ("activations", kept, layers, {}, activations),
            ("activations", short, layers, selective, activations),
            ("whole stage", state + kept, workload, {}, ()),
            ("whole stage", state + short, workload, selective, ()),
        ):
            yield Case(
                f"Korthikanti figure 1, {part}",
                f"{r['model']}{' selective + SP' if extra else ''}",
                gib * 2**30,
                counted,
                cluster,
                {**o, **extra},
                fit,
                "memory",
                notes={"kinds": kinds},
            )


def _layers_only(workload: Workload) -> Workload:
    units = [u if u.layer else replace(u, params=Shares(), traffic=Traffic()) for u in workload.units]
    return replace(workload, units=tuple(units), tied=Shares())


def megatron_h100(models: Models) -> Iterator[Case]:
    """Megatron-Core's weak scaling on H100. Its micro-batch and interleaving are not stated: 1, and a layer a
    stage.
    """
    for r, fit in rows("megatron_readme_h100"):
        h, layers, gpus, batch, tp, pp = (
            int(r[k]) for k in ("hidden", "layers", "gpus", "global_batch", "tp", "pp")
        )
        flops = 72 * batch * 4096 * layers * h**2 * (1 + 4096 / (6 * h) + 131072 / (12 * layers * h))
        yield Case(
            "Megatron H100",
            r["params"],
            flops / gpus / float(r["tflops_per_gpu"]) / 1e12,
            models.gpt(h, int(r["heads"]), layers, 4096, 131072),
            f"dgx-h100:{gpus // 8}",
            dict(
                tp=tp,
                pp=pp,
                dp=int(r["dp"]),
                batch=batch,
                micro_batch=1,
                zero=1,
                sequence_parallel=tp > 1,
                virtual_stages=layers // pp if pp > 1 else 1,
            ),
            fit,
        )


def dgxc(models: Models, precision: str = "BF16") -> Iterator[Case]:
    """NVIDIA's DGX Cloud benchmarks on H100 (NeMo)."""
    for r, fit in rows("dgxc_benchmarking_step_times"):
        if r["precision"] != precision or "FSDP" in r["model"] or r["gpu"] != "H100":
            continue
        seq, tp, pp, cp, gpus, layers = (int(r[k]) for k in ("seq", "tp", "pp", "cp", "gpus", "layers"))
        # The v25.04 recipe prints no interleaving for nemotron-340b; 7/16 of bubble could not give 50 % MFU.
        virtual = int(r["vp"]) if r["vp"] else (12 if "340b" in r["model"] else 1)
        if r["model"].startswith("llama3.1"):
            workload = models.llama("llama3" + r["model"][8:].replace("-proxy", ""), seq, layers)
        elif r["model"].startswith("nemotron4-340b"):
            workload = models.nemotron(18432, 96, 8, 73728, layers, seq)
        elif r["model"].startswith("nemotron4-15b"):
            workload = models.nemotron(6144, 48, 8, 24576, layers, seq)
        else:
            workload = models.gpt(12288, 96, layers, seq)
        yield Case(
            f"DGX Cloud H100 {precision}",
            f"{r['model']} {gpus} GPUs",
            float(r["step_s"]),
            workload,
            f"dgx-h100:{gpus // 8}",
            dict(
                tp=tp,
                pp=pp,
                cp=cp,
                dp=gpus // (tp * pp * cp),
                batch=int(r["gbs"]),
                micro_batch=int(r["mbs"] or 1),
                zero=1,
                virtual_stages=virtual,
                sequence_parallel=tp > 1,
                dtype=precision.lower(),
            ),
            fit,
        )


SERVED = {
    "LLaMA-3.1-8B": "llama3-8b", "LLaMA-3.1-70B": "llama3-70b", "LLaMA-3.1-405B": "llama3-405b",
    "Mistral-7B": "mistral-7b",
}  # fmt: skip
MACHINES = {"H100": "dgx-h100", "H200": "hgx-h200", "A100-80": "dgx-a100", "L40S": "l40s"}


def tensorrt(models: Models) -> Iterator[Case]:
    """TensorRT-LLM's output tokens/s, with all requests queued at once."""
    for r, fit in rows("tensorrtllm_v017_tp_sweep"):
        if r["model"] not in SERVED or r["gpu"] not in MACHINES:
            continue
        prompt, output = (int(v) for v in r["isl_osl"].split("/"))
        yield Case(
            "TensorRT-LLM tokens/s",
            f"{r['model']} {r['gpu']} tp={r['tp']} {r['isl_osl']}",
            float(r["tok_s"]),
            models.llama(SERVED[r["model"]], _rounded(prompt + output // 2)),
            MACHINES[r["gpu"]],
            dict(tp=int(r["tp"]), dtype=r["precision"].lower()),
            fit,
            "rate",
            (r["model"], r["gpu"], r["isl_osl"]),
            {"prompt": models.llama(SERVED[r["model"]], _rounded(prompt)), "output": output},
        )


def aiconfigurator(models: Models) -> Iterator[Case]:
    """Measured serving points: milliseconds a token at a concurrency."""
    machines = {"h100_sxm": "dgx-h100", "h200_sxm": "hgx-h200", "b200_sxm": "dgx-b200"}
    machines["gb200"] = "gb200-nvl72"
    for r, fit in rows("aiconfigurator_silicon_dense"):
        prompt, output = int(r["isl"]), int(r["osl"])

        def build(seq: int, name: str = r["model_path"]) -> Workload:
            if "Qwen3-32B" in name:
                return models.qwen3_32b(_rounded(seq))
            return models.llama("llama3-8b" if "8B" in name else "llama3-70b", _rounded(seq))

        yield Case(
            "aiconfigurator s/token",
            f"{r['model_path']} {r['system']} {r['precision']} tp={r['tp_size']} b={r['batch_size']} "
            f"{prompt}/{output}",
            float(r["silicon_tpot_ms"]) / 1e3,
            build(prompt + output // 2),
            machines[r["system"]],
            dict(
                tp=int(float(r["tp_size"])),
                batch=int(float(r["batch_size"])),
                dtype=r["precision"] if r["precision"] in ("fp8", "fp4") else "bf16",
            ),
            fit,
            "token",
            (),
            {"prompt": build(prompt), "output": output},
        )


def _rounded(seq: int) -> int:
    """To a multiple of 64: fewer models to count."""
    return max(64, round(seq / 64) * 64)


def serving(models: Models) -> list[Case]:
    """All cases of generation."""
    return [*tensorrt(models), *aiconfigurator(models)]


def simumax(models: Models) -> Iterator[Case]:
    """SimuMax's runs of Llama layers on B200 (Megatron): time, and peak of the allocator."""
    for r, fit in rows("simumax_b200"):
        if not r["case"].startswith("llama3"):
            continue
        found = re.findall(r"_(l|tp|pp|dp|cp|mbc|seq)(\d+)", r["case"])
        n = {"tp": 1, "pp": 1, "dp": 1, "cp": 1, "seq": 4096} | {k: int(v) for k, v in found}
        workload = models.llama("llama3-70b" if "70b" in r["case"] else "llama3-405b", n["seq"], n["l"])
        options = {k: n[k] for k in ("tp", "pp", "dp", "cp")}
        options |= dict(batch=n["mbc"] * n["dp"], zero=1, sequence_parallel=n["tp"] > 1)
        args = (workload, "dgx-b200:1", options, fit)
        yield Case("SimuMax B200", r["case"], float(r["real_ms"]) / 1e3, *args)
        yield Case("SimuMax B200 memory", r["case"], float(r["real_alloc_GiB"]) * 2**30, *args, "memory")


def training(models: Models) -> list[Case]:
    """All cases of training."""
    return [
        *vtrain(models, "multi"),
        *vtrain(models, "single"),
        *sc21(models),
        *crossover(models),
        *korthikanti(models),
        *megatron_h100(models),
        *dgxc(models),
        *simumax(models),
    ]
