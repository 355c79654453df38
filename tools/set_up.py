"""Make the project's virtual environment: `python3 tools/set_up.py VENV [pip options…]`.

Standard library only, since it runs before anything is installed. Idempotent: an environment that exists is
brought up to date.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from urllib.parse import urljoin

ROOT = Path(__file__).resolve().parent.parent
PIP_RELEASE = "https://pypi.org/pypi/pip/json"
CPU_WHEELS = "https://download.pytorch.org/whl/cpu"


def cpu_wheel_options() -> list[str]:
    """pip options that make torch the CPU build, or none where its index cannot be reached.

    The default index carries the CUDA build (gigabytes, runs on a CPU too). Machines behind a mirror often
    cannot reach the CPU index, and pip would retry it for minutes: so it is asked once, briefly.
    """
    try:
        with urllib.request.urlopen(f"{CPU_WHEELS}/torch/", timeout=5):
            return ["--extra-index-url", CPU_WHEELS]
    except OSError:  # URLError is one
        return []


def make_environment(venv: Path) -> None:
    """A virtual environment with pip in it, also where Python comes without ensurepip (Debian)."""
    make = [sys.executable, "-m", "venv", "--clear", str(venv)]
    if subprocess.run(make, capture_output=True).returncode == 0:
        return
    subprocess.run([*make, "--without-pip"], check=True)
    with urllib.request.urlopen(PIP_RELEASE, timeout=60) as answer:
        wheel = next(f for f in json.load(answer)["urls"] if f["packagetype"] == "bdist_wheel")
    wheel_file = venv / wheel["filename"]
    with urllib.request.urlopen(urljoin(PIP_RELEASE, wheel["url"]), timeout=60) as answer:
        wheel_file.write_bytes(answer.read())
    # A wheel is a zip that Python can import from: this pip installs itself.
    run_wheel = [str(venv / "bin" / "python"), f"{wheel_file}/pip", "install", "--quiet", str(wheel_file)]
    subprocess.run(run_wheel, check=True)


def main(argv: list[str]) -> int:
    venv, pip_options = Path(argv[0]), argv[1:]
    python = venv / "bin" / "python"
    if not (venv / "bin" / "pip").exists():
        make_environment(venv)
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command += ["--constraint", str(ROOT / "constraints.txt"), *(pip_options or cpu_wheel_options())]
    command += ["--editable", f"{ROOT}[dev]"]
    print("setting up", venv, "(a few minutes the first time) …", flush=True)
    return subprocess.run(command, env={**os.environ, "PIP_NO_INPUT": "1"}).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
