import importlib.util
from pathlib import Path

import pytest

from tdmpc.agent.agent import TDMPC2
from tdmpc.agent.compiler_cache import remove_torn_libraries
from tests.agent.test_compute import COMPILED, using

LIBRARY = Path(importlib.util.find_spec("_ctypes").origin).read_bytes()


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("tdmpc.agent.compiler_cache.IN_PROGRESS_S", 0.0)
    (tmp_path / "cache/oz").mkdir(parents=True)
    return tmp_path / "cache/oz"


@pytest.mark.parametrize(
    "content",
    [b"", b"\0" * 4096, LIBRARY[:10], LIBRARY[: len(LIBRARY) // 2], LIBRARY[:-1]],
    ids=["empty", "not begun", "ten bytes", "half", "all but one byte"],
)
def test_a_library_without_its_end_is_removed(cache, content):
    (cache / "torn.main.so").write_bytes(content)
    (cache / "whole.main.so").write_bytes(LIBRARY)
    (cache / "kernel.cpp").write_bytes(b"")
    assert remove_torn_libraries() == 1
    assert sorted(path.name for path in cache.iterdir()) == ["kernel.cpp", "whole.main.so"]


def test_a_library_that_may_still_be_written_stays(cache, monkeypatch):
    monkeypatch.setattr("tdmpc.agent.compiler_cache.IN_PROGRESS_S", 60.0)
    (cache / "new.main.so").write_bytes(b"")
    assert remove_torn_libraries() == 0
    assert (cache / "new.main.so").exists()


def test_where_nothing_was_ever_compiled_there_is_nothing_to_remove(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "nowhere"))
    assert remove_torn_libraries() == 0


def test_compiling_that_fails_on_a_torn_library_is_tried_again_without_it(cache, monkeypatch):
    torn, tries = cache / "torn.main.so", []

    def load(self, num_envs, batch_size):
        tries.append(torn.exists())
        if torn.exists():
            raise ImportError(f"{torn}: file too short")

    torn.write_bytes(b"")
    monkeypatch.setattr(TDMPC2, "_compile", load)
    agent = using(COMPILED)
    assert agent.compile([2], 16) is None
    assert agent.compute == COMPILED
    assert tries == [True, False]
