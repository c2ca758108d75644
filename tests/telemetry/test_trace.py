import json

import torch
from torch.profiler import profile

from tdmpc.telemetry.trace import Trace


def test_a_trace_covers_the_updates_asked_for(tmp_path):
    said = []
    trace = Trace(tmp_path / "trace.json", at=2, updates=3, announce=said.append)
    for update in range(8):
        trace(update)
        torch.full((4 + update, 4), 1.0) @ torch.ones(4, 3)
    assert len(said) == 1
    assert "aten::mm" in said[0]
    assert said[0].endswith(f"trace: {tmp_path / 'trace.json'}")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert sum(event.get("name") == "aten::mm" for event in events) == 3


def test_a_run_that_ends_before_leaves_what_there_is(tmp_path):
    said = []
    trace = Trace(tmp_path / "trace.json", at=0, updates=100, announce=said.append)
    trace(0)
    torch.ones(3, 3) @ torch.ones(3, 3)
    trace.close()
    trace.close()
    assert len(said) == 1
    assert (tmp_path / "trace.json").exists()


def test_a_trace_that_cannot_be_written_is_a_warning(tmp_path, monkeypatch):
    def full(*_):
        raise OSError("No space left on device")

    said = []
    monkeypatch.setattr(profile, "export_chrome_trace", full)
    trace = Trace(tmp_path / "trace.json", at=0, updates=1, announce=said.append)
    trace(0)
    torch.ones(3, 3) @ torch.ones(3, 3)
    trace(1)
    assert said == [f"warning: no trace {tmp_path / 'trace.json'}: No space left on device"]


def test_a_run_that_never_gets_there_leaves_nothing(tmp_path):
    trace = Trace(tmp_path / "trace.json", at=50, updates=5, announce=lambda text: None)
    trace(3)
    trace.close()
    assert list(tmp_path.iterdir()) == []
