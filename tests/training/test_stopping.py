import os
import signal

import pytest

from tdmpc.training.stopping import STOP_FILE, StopRequest


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 138)])
def test_a_signal_asks_to_stop_and_names_the_exit_code(number, code):
    stop = StopRequest()
    with stop.listening():
        assert not stop()
        os.kill(os.getpid(), number)
        assert stop()
    assert stop.exit_code == code


def test_a_second_ctrl_c_does_not_wait():
    stop = StopRequest()
    with stop.listening():
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert stop.signal == signal.SIGTERM


def test_what_need_not_be_ended_is_broken_off_at_once():
    stop, came_far = StopRequest(), []
    with stop.listening():
        with stop.breaking_off():
            os.kill(os.getpid(), signal.SIGTERM)
            came_far.append("beyond the signal")
        assert (stop.signal, came_far) == (signal.SIGTERM, [])
        os.kill(os.getpid(), signal.SIGTERM)  # which is too late to break off anything


def test_what_the_signals_did_before_comes_back():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
    with StopRequest().listening():
        pass
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)] == before


def test_a_file_asks_to_stop_as_sigterm_does(monkeypatch, tmp_path):
    monkeypatch.setenv(STOP_FILE, str(tmp_path / "stop"))
    stop = StopRequest()
    assert not stop()
    (tmp_path / "stop").touch()
    assert stop()
    assert stop.exit_code == 143
