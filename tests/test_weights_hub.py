"""`autotp.load("org/name")`: from a hub that runs here, and from its cache without one."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlparse

import models
import pytest
import torch

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NEEDED = {"config.json", "generation_config.json", "model.safetensors.index.json"}
OTHERS = ("README.md", "pytorch_model.bin", "tf_model.h5", "merged.safetensors", "original/model.safetensors")

LOAD = """
import os, sys, torch
import huggingface_hub.constants as hub
import autotp
from autotp.errors import CheckpointError
path = os.environ["IDS"]
def logits():
    model = autotp.load("someone/tiny", tp=1, progress=False)
    with torch.no_grad():
        return model(torch.load(path)).logits
torch.save(logits(), path + ".online")
hub.HF_HUB_OFFLINE = True
torch.save(logits(), path + ".offline")
for name in ("someone/else", "no name at all"):
    try:
        autotp.load(name, tp=1)
    except CheckpointError as error:
        print(f"refused: {error}")
"""


class Hub(BaseHTTPRequestHandler):
    """The few answers that huggingface_hub asks for, on the files of `root`."""

    root: Path
    asked: set[str]

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        parts = unquote(urlparse(self.path).path).strip("/").split("/")
        files = sorted(str(f.relative_to(self.root)) for f in self.root.rglob("*") if f.is_file())
        headers = {"X-Repo-Commit": COMMIT}
        if parts[:4] == ["api", "models", "someone", "tiny"]:
            if "tree" in parts:
                sizes = {name: (self.root / name).stat().st_size for name in files}
                listed = [{"type": "file", "path": n, "size": s, "oid": _etag(n)} for n, s in sizes.items()]
                data = json.dumps(listed).encode()
            else:
                siblings = [{"rfilename": name} for name in files]
                data = json.dumps({"id": "someone/tiny", "sha": COMMIT, "siblings": siblings}).encode()
        elif parts[:3] == ["someone", "tiny", "resolve"]:
            name = "/".join(parts[4:])
            data = (self.root / name).read_bytes()
            headers["ETag"] = f'"{_etag(name)}"'
            self.asked.add(name)
        else:
            self.send_error(404)
            return
        self.send_response(200)
        for key, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(key, value)
        self.end_headers()
        if body:
            self.wfile.write(data)


def _etag(name: str) -> str:
    return hashlib.sha1(name.encode()).hexdigest()


@contextmanager
def hub(root: Path) -> Iterator[tuple[str, set[str]]]:
    """Its address, and the files that were asked for."""
    handler = type("Here", (Hub,), {"root": root, "asked": set()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", handler.asked  # type: ignore[attr-defined]
    finally:
        server.shutdown()


def test_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is needed is fetched, and nothing else; offline it is found again; what is not there is told."""
    config, cls, settings = models.TEXT["llama_gqa"]
    model, inputs = models.hf(config, cls, dtype=torch.float32, **settings)
    repo = tmp_path / "repo"
    model.save_pretrained(repo, max_shard_size="100KB")
    shards = {file.name for file in repo.glob("*.safetensors")}
    assert len(shards) > 2
    for name in OTHERS:
        (repo / name).parent.mkdir(exist_ok=True)
        (repo / name).write_bytes(b"not to be fetched")
    torch.save(inputs["input_ids"], tmp_path / "ids")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    with hub(repo) as (address, asked):
        for key, value in {
            "HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_OFFLINE": "0", "IDS": str(tmp_path / "ids"),
        }.items():  # fmt: skip
            monkeypatch.setenv(key, value)
        ran = subprocess.run([sys.executable, "-c", LOAD], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert asked == NEEDED | shards
    with torch.no_grad():
        want = model(inputs["input_ids"]).logits
    for where in ("online", "offline"):
        torch.testing.assert_close(torch.load(tmp_path / f"ids.{where}"), want)
    assert "refused: someone/else is no directory, and no hub gave it: " in ran.stdout
    assert "refused: no name at all is no directory, and no hub gave it: " in ran.stdout
