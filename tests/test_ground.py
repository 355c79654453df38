"""The ground the project stands on: imports, packaging, the tools and the examples' own parts."""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import launch
import real_models

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tools" / "bench")]

import check_size  # noqa: E402
import tp_bench  # noqa: E402

IMPORT_EVERYTHING = """
import importlib, pkgutil, sys
import autotp
for module in pkgutil.walk_packages(autotp.__path__, "autotp."):
    if not module.name.endswith("__main__"):  # which runs the command line
        importlib.import_module(module.name)
print([name for name in sys.modules if name.split(".")[0] == "transformers"])
"""


def test_no_module_of_autotp_imports_transformers() -> None:
    run = subprocess.run([sys.executable, "-c", IMPORT_EVERYTHING], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "[]"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib came with Python 3.11")
def test_every_direct_dependency_is_pinned() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]

    def name(requirement: str) -> str:
        return re.split(r"[^\w.-]", requirement)[0].lower().replace("_", "-")

    pinned = {name(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line}
    assert {name(r) for group in groups for r in group} - {"autotp"} <= pinned
    assert "torch==2.13.0" in (ROOT / "constraints.txt").read_text().splitlines()


def test_make_help_names_every_target() -> None:
    shown = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for target in ("test", "demo", "lint", "check", "clean", "bench"):
        assert f"make {target} " in shown


def test_check_size_finds_the_long_file(tmp_path: Path) -> None:
    (tmp_path / "short.py").write_text("x = 1\n" * 400)
    (tmp_path / "long.py").write_text("x = 1\n" * 401)
    assert check_size.too_long(tmp_path) == [(tmp_path / "long.py", 401)]


def test_gguf_rows_turn_interleaved_rotation_into_halves() -> None:
    """Attention scores with neighbours rotated (GGUF) equal those with halves rotated, rows reordered."""
    heads, head_dim, hidden, positions = 3, 8, 10, 5
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(positions, hidden, generator=generator, dtype=torch.float64)
    weights = [torch.randn(heads * head_dim, hidden, generator=generator, dtype=torch.float64) for _ in "qk"]
    frequency = 100.0 ** -torch.linspace(0, 1, head_dim // 2, dtype=torch.float64)
    angle = torch.arange(positions)[:, None] * frequency
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]

    def interleaved(weight: torch.Tensor) -> torch.Tensor:
        a, b = (x @ weight.T).view(positions, heads, head_dim // 2, 2).unbind(-1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

    def halves(weight: torch.Tensor) -> torch.Tensor:
        a, b = (x @ weight.T).view(positions, heads, head_dim).chunk(2, -1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

    expected = torch.einsum("qhd,khd->hqk", *(interleaved(w) for w in weights))
    got = torch.einsum("qhd,khd->hqk", *(halves(real_models._halves_rotate(w, heads)) for w in weights))
    torch.testing.assert_close(got, expected)


RANKS = """
import os, sys, time
from launch import say, telling_errors
print("noise")
with telling_errors():
    say(step=1)
    if os.environ["RANK"] == sys.argv[1]:
        raise ValueError("this rank is broken")
    if sys.argv[1] == "sleep":
        time.sleep(600)
    say(result=True, square=int(os.environ["RANK"]) ** 2)
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "examples"))
    (tmp_path / "ranks.py").write_text(RANKS)
    return str(tmp_path / "ranks.py")


def test_launch_returns_results_by_rank_and_passes_messages(script: str) -> None:
    heard: list[dict] = []
    results = launch.launch(script, ["none"], 3, heard.append)
    assert [result["square"] for result in results] == [0, 1, 4]
    assert sorted(message["rank"] for message in heard if "step" in message) == [0, 1, 2]


def test_launch_raises_what_the_broken_rank_raised(script: str) -> None:
    with pytest.raises(launch.LaunchError, match="rank 1: (?s:.*)ValueError: this rank is broken"):
        launch.launch(script, ["1"], 2)


def test_launch_ends_what_takes_too_long(script: str) -> None:
    start = time.monotonic()
    with pytest.raises(launch.LaunchError, match="took more than 8 s"):
        launch.launch(script, ["sleep"], 2, timeout=8)
    assert time.monotonic() - start < 30


def test_bench_table_shows_medians_and_ratios() -> None:
    timings = {"prefill": {"single process": [9.0, 30.0, 10.0], "autotp": [5.0, 4.0, 99.0]}}
    assert tp_bench.table(timings).splitlines()[-1] == "| prefill, 256 tokens | 10.0 | 5.0 | 2.00× |"
