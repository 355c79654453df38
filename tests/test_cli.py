"""The command line on tiny configs: every format read back, errors as messages, verify's exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml
from typer.testing import CliRunner

import autotp
from autotp.cli import app
from autotp.errors import ModelSourceError
from autotp.model_source import build_model, randomise

pytest.importorskip("transformers")

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 64,
}
GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "vocab_size": 97,
    "n_positions": 64,
}
CONFIGS = {"llama": LLAMA, "gpt2": GPT2}


def run(*args: object, code: int = 0):
    result = CliRunner().invoke(app, [str(a) for a in args])
    assert result.exit_code == code, result.output + result.stderr
    return result


def flat(text: str) -> str:
    """Without the line breaks of a terminal's width."""
    return " ".join(text.split())


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    where = tmp_path_factory.mktemp("models")
    for name, config in CONFIGS.items():
        (where / name).mkdir()
        (where / name / "config.json").write_text(json.dumps(config))
    return {name: where / name for name in CONFIGS}


def parameters(source: Path) -> dict[str, list[int]]:
    return {name: list(p.shape) for name, p in build_model(str(source)).named_parameters()}


# ---------------------------------------------------------------- dump
@pytest.mark.parametrize("name", CONFIGS)
def test_yaml_is_a_policy_that_gives_the_plan_again(models, name, tmp_path):
    policy = tmp_path / "again.yaml"
    run("dump", models[name], "--tp", 2, "--format", "yaml", "--out", policy)
    plans = [
        json.loads(run("dump", models[name], "--tp", 2, "--format", "json", *more).output)
        for more in ([], ["--policy", policy])
    ]
    assert yaml.safe_load(policy.read_text())["modules"]
    assert plans[0]["parameters"] == plans[1]["parameters"]
    assert plans[0]["collectives"] == plans[1]["collectives"]


@pytest.mark.parametrize("name", CONFIGS)
def test_json_reads_back(models, name):
    data = json.loads(run("dump", models[name], "--tp", 2, "--format", "json").output)
    assert data["tp"] == 2
    assert {n: p["shape"] for n, p in data["parameters"].items()} == parameters(models[name])
    assert data["sharded_fraction"] == 1.0
    assert data["collectives"] and all(c["bytes"] > 0 for c in data["collectives"])


def test_text_shows_local_shapes_once_for_alike_layers(models):
    output = run("dump", models["llama"], "--tp", 2).output
    assert "layers.0 … layers.2" in output and "× 3 alike" in output
    assert output.count("q_proj = ") == 1  # two of the three layers are folded away
    assert "[32, 32] → [16, 32]" in output  # q: 4 heads of 8, half of them
    assert "[16, 32] → [8, 32]" in output  # k: 2 heads of 8
    assert "[32, 56] → [32, 28]" in output  # down: its input split
    assert "◆ reduce" in output and "◆ gather" in output


def test_rank_shows_that_ranks_own_shapes(tmp_path):
    """97 rows over 2 ranks: 49 on the first, 48 on the second."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"vocab_size": 97}))
    first = run("dump", tmp_path, "--tp", 2, "--layers", 1, "-f", "table").output
    second = run("dump", tmp_path, "--tp", 2, "--layers", 1, "-f", "table", "--rank", 1).output
    assert "[49, 32]" in first and "[48, 32]" not in first
    assert "[48, 32]" in second and "[49, 32]" not in second


def test_table_has_every_part(models):
    output = run("dump", models["gpt2"], "--tp", 2, "-f", "table").output
    assert "transformer.h.*.attn.c_attn.weight" in output and "× 2" in output
    for title in ("Parameters", "Collectives", "memory per rank", "block weights sharded"):
        assert title in output
    assert "lm_head.weight" in output  # tied to the embedding


def test_svg_is_xml_and_shows_every_sharded_module(models):
    root = ElementTree.fromstring(run("dump", models["llama"], "--tp", 2, "-f", "svg").output)
    shown = {e.text for e in root.iter("{http://www.w3.org/2000/svg}text")}
    modules = [
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
        "embed_tokens",
        "lm_head",
    ]
    assert set(modules) <= shown
    looks = {e.get("class") for e in root.iter("{http://www.w3.org/2000/svg}rect")}
    assert {"column", "row", "vocab", "replicate"} <= looks
    assert "layers.0 … layers.2" in shown and "× 3" in shown


def test_html_names_every_parameter_and_escapes(models):
    output = run("dump", models["gpt2"], "--tp", 2, "-f", "html").output
    for name in parameters(models["gpt2"]):
        assert f'data-param="{name}"' in output
    details = output.split("const DETAILS=")[1].split("};", 1)[0] + "}"
    assert any("c_attn" in d["title"] for d in json.loads(details.replace("<\\/", "</")).values())
    assert "http-equiv" not in output and "src=" not in output  # nothing is fetched


def test_dot_declares_what_it_connects(models):
    lines = run("dump", models["llama"], "--tp", 2, "-f", "dot").output.splitlines()
    declared = {line.split(" [label")[0].strip() for line in lines if " [label=" in line}
    edges = [line.strip().rstrip(";").split(" -> ") for line in lines if " -> " in line]
    assert len(edges) > 10
    assert {end for edge in edges for end in edge} <= declared
    assert lines[0].startswith("digraph") and sum(line.count("{") - line.count("}") for line in lines) == 0


def test_stages_are_shown_with_what_crosses_in_every_format(models, tmp_path):
    shown = {
        format: run("dump", models["llama"], "--pp", 2, "--tp", 2, "-f", format).output
        for format in ("text", "table", "json", "yaml", "html", "dot", "svg")
    }
    assert all("pp=2 × tp=2" in shown[format] for format in shown if format != "json")
    text = shown["text"]
    assert "# stage 0: model.embed_tokens, model.layers.0 … model.layers.1\n" in text
    pipeline = json.loads(shown["json"])["pipeline"]
    (crossing,) = pipeline["crossings"][0]
    batch, sequence, hidden = crossing["shape"]
    assert hidden == LLAMA["hidden_size"] and crossing["bytes"] == 4 * batch * sequence * hidden
    shape = f"float32 {batch}x{sequence}x{hidden}"
    assert f"sends model.layers.1: {shape} for model.layers.2\n" in text
    assert f"{crossing['bytes'] / 1024:.1f} KiB to stage 1" in text
    assert "layers.0 … layers.1: LlamaDecoderLayer   × 2 alike   # stage 0" in text
    assert "layers.2: LlamaDecoderLayer   # stage 1" in text
    assert "Pipeline stages" in shown["table"] and "Pipeline stages" in shown["html"]
    assert "stage 1" in shown["svg"] and "stage 1" in shown["dot"]
    assert pipeline["starts"] == yaml.safe_load(shown["yaml"])["stages"] == ["model.layers.2"]
    assert crossing["from"] == "model.layers.1"


def test_a_stated_cut_and_no_degree_at_all(models):
    output = run("dump", models["llama"], "--pp", 3, "--stages", "model.layers.1, lm_head").output
    assert "# stage 1: model.layers.1 … model.layers.2, model.norm\n" in output
    assert "over pp=3 × tp=1" in output
    wrong = run("dump", models["llama"], "--pp", 2, "--stages", "model.layers.1.mlp", code=2)
    assert "inside 'model.layers.1'" in flat(wrong.stderr)
    many = run("dump", models["llama"], "--pp", 9, code=2)
    assert "into 6 stages at most" in flat(many.stderr)
    assert "give --tp, --pp, or both" in flat(run("dump", models["llama"], code=2).stderr)


def test_out_writes_the_file(models, tmp_path):
    for format in ("text", "table", "svg"):
        file = tmp_path / f"plan.{format}"
        result = run("dump", models["llama"], "--tp", 2, "-f", format, "--out", file)
        assert result.output.startswith("wrote")
        assert "q_proj" in file.read_text(encoding="utf-8")


def test_why_names_the_axis_and_who_shares_it(models):
    name = "model.layers.1.self_attn.q_proj.weight"
    output = flat(run("dump", models["llama"], "--tp", 2, "--why", name).output)
    assert "is sharded: 1 of 2 a rank" in output  # the key/value heads
    assert "model.layers.*.self_attn.o_proj.weight" in output
    assert "◆ reduce" in output
    assert "stays whole" in output  # dim 1, the residual stream


def test_why_of_an_unknown_parameter_suggests(models):
    result = run("dump", models["llama"], "--tp", 2, "--why", "model.layers.1.self_attn.q.weight", code=2)
    assert "model.layers.1.self_attn.q_proj.weight" in flat(result.stderr)


@pytest.mark.parametrize("format", ["text", "json"])
def test_a_policy_decides_in_every_format(models, tmp_path, format):
    policy = tmp_path / "policy.yaml"
    policy.write_text("schema: 1\nmodules:\n  lm_head: replicate\n")
    whole = "[96, 32]  Replicate" if format == "text" else '"lm_head.weight": "'
    plain = run("dump", models["llama"], "--tp", 2, "-f", format).output
    decided = run("dump", models["llama"], "--tp", 2, "-f", format, "--policy", policy).output
    assert whole in decided and whole not in plain


def test_a_bad_policy_is_a_message(models, tmp_path):
    policy = tmp_path / "policy.yaml"
    policy.write_text("schema: 1\nmodules:\n  no.such.module: replicate\n")
    result = run("dump", models["llama"], "--tp", 2, "--policy", policy, code=2)
    assert "policy.yaml" in flat(result.stderr) and "no.such.module" in flat(result.stderr)


def test_layers_shortens(models):
    data = json.loads(run("dump", models["llama"], "--tp", 2, "--layers", 1, "-f", "json").output)
    assert "model.layers.0.mlp.up_proj.weight" in data["parameters"]
    assert "model.layers.1.mlp.up_proj.weight" not in data["parameters"]


def test_a_model_larger_than_memory_is_planned_on_meta(tmp_path):
    """Twelve layers of Llama-3-70B's shapes: 23 GiB if any of it were made."""
    config = LLAMA | {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 12,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    output = run("dump", tmp_path, "--tp", 8).output
    assert "layers.0 … layers.11" in output and "[8192, 8192] → [1024, 8192]" in output
    # 12 layers of 855,638,016 weights and two vocabulary matrices, an eighth of them a rank, at 2 bytes; the
    # norms (16,384 a layer, 8,192 at the end) on every rank.
    whole = 2 * (12 * (855_638_016 + 16_384) + 2 * 128_256 * 8192 + 8192)
    mine = 2 * (12 * (855_638_016 // 8 + 16_384) + 2 * 128_256 * 8192 // 8 + 8192)
    assert f"{mine / 2**30:.1f} GiB of {whole / 2**30:.1f} GiB" in output


# ---------------------------------------------------------------- errors
@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "is no file or directory"),
        ("not json", "is no model config"),
        ("[1]", "is no model config"),
        (json.dumps(LLAMA | {"architectures": ["NoSuchModel"]}), "NoSuchModel"),
        (json.dumps({"model_type": "no-such-type"}), "can't read it"),
        (json.dumps(LLAMA | {"hidden_act": "no-such-activation"}), "LlamaForCausalLM could not be built"),
    ],
)
def test_a_bad_config_is_a_message_and_not_a_traceback(tmp_path, content, says):
    file = tmp_path / "config.json"
    if content is not None:
        file.write_text(content)
    result = run("dump", file, "--tp", 2, code=2)
    assert says in flat(result.stderr) and "Traceback" not in result.output + result.stderr


def test_a_directory_without_config(tmp_path):
    assert "has no config.json" in flat(run("dump", tmp_path, "--tp", 2, code=2).stderr)


def test_debug_raises(tmp_path):
    result = CliRunner().invoke(app, ["--debug", "dump", str(tmp_path / "none"), "--tp", "2"])
    assert isinstance(result.exception, ModelSourceError)


def test_rank_beyond_tp(models):
    assert "ranks are 0 to 1" in flat(run("dump", models["llama"], "--tp", 2, "--rank", 2, code=2).stderr)


def test_more_ranks_than_heads_keeps_the_heads_whole_with_a_reason(models):
    """4 heads over 5 ranks: no rank may be left without one."""
    data = json.loads(run("dump", models["llama"], "--tp", 5, "--format", "json").output)
    query = data["parameters"]["model.layers.0.self_attn.q_proj.weight"]
    assert query["placement"] == "Replicate"
    assert "below the 5 ranks" in data["replicated"]["model.layers.0.self_attn.q_proj.weight"]
    assert data["parameters"]["model.layers.0.mlp.up_proj.weight"]["placement"] == "Shard(0)"


# ---------------------------------------------------------------- functions
FUNCTIONS = """
import torch
from torch import nn

def build():
    return nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 40), nn.GELU(), nn.Linear(40, 16))

def wrong():
    return 3

def breaks():
    return nn.Linear(3, "four")
"""


@pytest.fixture
def functions(tmp_path, monkeypatch):
    (tmp_path / "cli_test_models.py").write_text(FUNCTIONS)
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("cli_test_models", None)


def test_a_function_builds_the_model(functions):
    data = json.loads(run("dump", "cli_test_models:build", "--tp", 2, "-f", "json").output)
    assert data["parameters"]["1.weight"]["placement"] == "Shard(0)"
    assert data["parameters"]["3.weight"]["placement"] == "Shard(1)"


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("cli_test_models:missing", "has no function 'missing'. It has: build, wrong, breaks"),
        ("cli_test_models:breaks", "breaks() raised TypeError"),
        ("cli_test_models:breaks", "cli_test_models.py:12 in breaks"),
        ("cli_test_models:wrong", "gave a int"),
        ("no_such_package.models:build", "importing 'no_such_package.models' failed"),
    ],
)
def test_a_bad_function_is_a_message(functions, source, says):
    assert says in flat(run("dump", source, "--tp", 2, code=2).stderr)


def test_layers_is_for_configs(functions):
    assert "--layers shortens" in flat(
        run("dump", "cli_test_models:build", "--tp", 2, "--layers", 1, code=2).stderr
    )


# ---------------------------------------------------------------- verify
def test_verify_passes_on_a_right_plan(models):
    output = run("verify", models["llama"], "--tp", 2, "--layers", 1).output
    assert "output" in output and "step" in output and "WRONG" not in output


def test_verify_leaves_with_1_on_a_wrong_number(models, monkeypatch):
    module = sys.modules["autotp.verify"]

    def wrong(model, tp, policy, **options):
        return module.Report(autotp.plan(model, tp), [module.Check("output", 0.5, 1e-5)])

    monkeypatch.setattr(module, "verify", wrong)
    result = run("verify", models["llama"], "--tp", 2, "--layers", 1, code=1)
    assert "WRONG" in result.output


def test_verify_refuses_what_does_not_fit(models):
    result = run("verify", models["llama"], "--tp", 2, "--memory", 0.0001, code=2)
    assert "--layers 2" in flat(result.stderr)


def test_random_weights_leave_no_bias_zero_and_no_norm_one(models):
    model = build_model(str(models["gpt2"]), device="cpu")
    randomise(model)
    for name, p in model.named_parameters():
        assert not (p == 0).any() and not (p == 1).any(), name


# ---------------------------------------------------------------- the command itself
def test_help_shows_examples_and_version_prints():
    assert "autotp dump ./Llama-3-8B --tp 8" in run("--help").output
    assert run("--version").output.startswith("autotp ")


def test_python_dash_m_and_no_transformers_for_a_plain_model(functions, tmp_path):
    """The module runs as a program, and a model without a config never imports transformers."""
    (tmp_path / "transformers.py").write_text("raise ImportError('not here')")
    root = Path(__file__).parent.parent
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(root)]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "autotp", "dump", "cli_test_models:build", "--tp", "2", "-f", "json"]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["tp"] == 2
