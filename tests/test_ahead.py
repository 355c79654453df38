"""Files asked for ahead: every piece once over the ranks, nothing where memory is short."""

import os
import threading
from pathlib import Path

import pytest

from autotp import ahead
from autotp.ahead import fetched_ahead

pytestmark = pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the system has no posix_fadvise")


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    made = [tmp_path / name for name in ("a", "b")]
    for path, size in zip(made, (ahead.PIECE * 3 + 5, 7), strict=True):
        with path.open("wb") as file:
            file.truncate(size)
    return made


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    seen: list[tuple[str, int]] = []

    def advise(descriptor: int, at: int, length: int, how: int) -> None:
        assert how == os.POSIX_FADV_WILLNEED and length == ahead.PIECE
        seen.append((Path(f"/proc/self/fd/{descriptor}").resolve().name, at))

    monkeypatch.setattr(os, "posix_fadvise", advise)
    return seen


def wait_for_all(asked: list[tuple[str, int]], count: int) -> None:
    ticks = threading.Event()
    for _ in range(500):
        if len(asked) >= count:
            return
        ticks.wait(0.01)


def test_the_ranks_ask_for_every_piece_once(files: list[Path], asked: list[tuple[str, int]]) -> None:
    for rank, share in enumerate((2, 2, 1)):
        before = len(asked)
        with fetched_ahead(files, rank, 3):
            wait_for_all(asked, before + share)
        assert len(asked) == before + share
    assert sorted(asked) == [("a", i * ahead.PIECE) for i in range(4)] + [("b", 0)]


def test_nothing_is_asked_for_where_memory_is_short(
    files: list[Path], asked: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "_free_memory", lambda: ahead.PIECE * 6)
    with fetched_ahead(files, 0, 1):
        pass
    assert asked == []


def test_it_stops_when_the_files_are_read(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    asked, done = [], threading.Event()

    def advise(descriptor: int, at: int, length: int, how: int) -> None:
        asked.append(at)
        done.set()

    monkeypatch.setattr(os, "posix_fadvise", advise)
    ahead._fetch([(files[0], 0), (files[0], ahead.PIECE)], done)
    assert asked == [0]


def test_a_file_that_is_gone_is_left_to_its_reader(files: list[Path]) -> None:
    with fetched_ahead(files, 0, 1):
        files[1].unlink()
