import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from envs import EnvironmentCrash, make_vector

TOY = "gym:tests.toys:Toy-v0"
PROCESS = "gym:tests.toys:ToyProcess-v0"
STEP = np.zeros((2, 2), np.float32)
ALL = np.ones(2, bool)


def started(mode, **options):
    vector = make_vector(TOY, 2, mode, {"trouble_id": 11, **options})
    vector.reset(ALL, [10, 11])
    vector.step(STEP)
    return vector


def process_of(number):
    return next(child for child in multiprocessing.active_children() if child.name.endswith(f"-{number}"))


def assert_closed(vector):
    assert multiprocessing.active_children() == []
    vector.close()
    with pytest.raises(RuntimeError, match="closed"):
        vector.step(STEP)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_an_exception_is_a_crash_with_its_traceback(mode):
    vector = started(mode, trouble="raise")
    with pytest.raises(EnvironmentCrash, match=r"(?s)environment 1 crashed:.*toys\.py.*KeyError: 'toy trouble'"):
        vector.step(STEP)
    assert_closed(vector)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_an_exception_while_an_environment_is_built_is_a_crash(mode, tmp_path):
    needed = tmp_path / "needed"
    needed.touch()
    vector = make_vector(TOY, 2, mode, {"needs_file": str(needed)})
    needed.unlink()
    with pytest.raises(EnvironmentCrash, match=r"(?s)environment 0 crashed:.*FileNotFoundError"):
        vector.reset(ALL, [0, 1])
    assert_closed(vector)


def test_a_process_that_exits_is_a_crash_with_its_exit_code():
    vector = started("async", trouble="exit")
    with pytest.raises(EnvironmentCrash, match="environment 1: its process ended with exit code 3"):
        vector.step(STEP)
    assert_closed(vector)


def test_a_process_killed_during_a_step_is_noticed_at_once_though_others_hang():
    vector = started("async", trouble="hang", trouble_id=None)
    victim = process_of(1)
    threading.Timer(0.3, victim.kill).start()
    start = time.monotonic()
    with pytest.raises(EnvironmentCrash, match="environment 1: its process was killed by SIGKILL"):
        vector.step(STEP)
    assert time.monotonic() - start < 10
    assert_closed(vector)


def test_a_process_killed_between_steps_is_noticed_at_the_next():
    vector = started("async")
    victim = process_of(0)
    victim.kill()
    victim.join()
    with pytest.raises(EnvironmentCrash, match="environment 0: its process was killed by SIGKILL"):
        vector.step(STEP)
    assert_closed(vector)


def test_an_environment_that_does_not_close_is_killed(monkeypatch):
    monkeypatch.setattr("envs.vector._CLOSE_PATIENCE_S", 0.2)
    vector = started("async", trouble="hang", trouble_id=None)
    vector.step_async(STEP)
    vector.close()
    assert_closed(vector)


def test_children_ignore_the_signals_that_stop_a_run_and_have_one_thread():
    threads = os.environ.get("OMP_NUM_THREADS")
    with make_vector(PROCESS, 2, "async") as vector:
        obs = vector.reset(ALL, [0, 0])
        np.testing.assert_array_equal(obs[:, :2], [[1, 3], [1, 3]])
        assert (obs[:, 2] != os.getpid()).all()
    assert os.environ.get("OMP_NUM_THREADS") == threads
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, [])


SCRIPT = """
import time
from pathlib import Path
import numpy as np
from envs import make_vector
print("main module runs", flush=True)
vector = make_vector("gym:tests.toys:ToyProcess-v0", 2, "async")
try:
    print(*vector.reset(np.ones(2, bool), [0, 1])[:, 2].astype(int), flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    vector.close()
"""


def run_script(tmp_path):
    """Start a script without `if __name__ == "__main__"`; return it and the ids of its children."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, path],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "main module runs\n"
    return process, [int(pid) for pid in process.stdout.readline().split()]


def assert_gone(pids):
    deadline = time.monotonic() + 10
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except FileNotFoundError:
        return False


def test_children_end_when_their_parent_is_killed(tmp_path):
    process, children = run_script(tmp_path)
    process.kill()
    process.communicate()
    assert_gone(children)


def test_the_first_children_of_a_process_ignore_the_signals_that_stop_a_run_too(tmp_path):
    process, children = run_script(tmp_path)
    stopping = sum(1 << (number - 1) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1))
    for pid in children:
        blocked = int(Path(f"/proc/{pid}/status").read_text().partition("SigBlk:")[2].split()[0], 16)
        assert blocked & stopping == stopping
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=30)
    assert_gone(children)


def test_ctrl_c_is_the_parents_alone(tmp_path):
    process, children = run_script(tmp_path)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (0, "", "")
    assert_gone(children)
