"""Many runs from one command: workers that merge, or a sweep, each a job of Hydra's multirun.

Hydra's own launcher runs jobs in this process, one after the other; others run them side by side, in processes of
their own. A job that fails ends with a `JobFailed`, which Hydra collects, so that the others go on.

A launcher that a signal interrupts kills its jobs, and one whose idle process dies kills the others. So of the signals
that ask to stop, none interrupts the process of the command, which asks all jobs by a file instead, on whatever machine
they are; none reaches processes that a launcher puts between, which inherit a blocked signal; and those of jobs ignore
them before and after their run.
"""

import atexit
import contextlib
import importlib.util
import multiprocessing
import os
import shlex
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn
from uuid import uuid4

import psutil
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import CompactHydraException
from hydra.types import RunMode

from tdmpc.config import Merge
from tdmpc.keys import ConfigError
from tdmpc.training.stopping import SIGNALS, STOP_FILE

LAUNCHER, WORKER, WORKERS, N_JOBS = "hydra/launcher", "merge.worker", "merge.workers", "hydra.launcher.n_jobs"
SWEPT = "TDMPC_SWEPT"
"""The environment variable that tells a job the names of those keys that jobs differ in."""
STOPPED = 128
"""From this exit code on a signal has ended a program; less this, it is the signal."""
_PLUGINS = {
    "joblib": ("hydra_joblib_launcher", "hydra-joblib-launcher"),
    "submitit_local": ("hydra_submitit_launcher", "-e '.[slurm]'"),
    "submitit_slurm": ("hydra_submitit_launcher", "-e '.[slurm]'"),
}


class JobFailed(CompactHydraException):
    """A job that did not end well; Hydra prints the message alone."""


def completed(overrides: Sequence[Override], script: str) -> list[str]:
    """Return the arguments that a multirun is to have besides, so that all workers of a group run at the same time.

    Args:
        overrides: as given.
        script: name of the script, for an example.

    Raises:
        ConfigError: they could not, or the launcher is not installed.
    """
    given = {override.key_or_group: override for override in overrides}
    launcher = _launcher(given)
    if WORKER not in given or not given[WORKER].is_sweep_override():
        return []
    numbers = _numbers(given[WORKER])
    if launcher == "basic" and len(numbers) > 1:
        raise ConfigError(
            f"{_text(given[WORKER])}: workers must run at the same time, and Hydra's own launcher runs one after the "
            f"other; use: {_side_by_side(overrides, script)}"
        )
    more = [] if WORKERS in given else [f"{WORKERS}={max(numbers) + 1}"]
    return [*more, *(_n_jobs(given, len(numbers)) if launcher == "joblib" else [])]


def _launcher(given: dict[str, Override]) -> str:
    name = str(given[LAUNCHER].value()) if LAUNCHER in given else "basic"
    module, package = _PLUGINS.get(name, ("", ""))
    if module and importlib.util.find_spec(f"hydra_plugins.{module}") is None:
        raise ConfigError(f"{LAUNCHER}={name}: is not installed; pip install {package}")
    return name


def _numbers(worker: Override) -> set[int]:
    values = list(worker.sweep_string_iterator())
    if not all(value.isdigit() for value in values):
        raise ConfigError(f"{_text(worker)}: must be whole numbers of at least 0")
    return {int(value) for value in values}


def _n_jobs(given: dict[str, Override], workers: int) -> list[str]:
    if N_JOBS not in given:
        jobs = 1
        for override in given.values():
            jobs *= len(list(override.sweep_string_iterator())) if override.is_sweep_override() else 1
        return [f"{N_JOBS}={jobs}"]
    n_jobs = given[N_JOBS].value()
    if isinstance(n_jobs, int) and 0 <= n_jobs < workers:
        raise ConfigError(f"{_text(given[N_JOBS])}: must be at least {workers}, for workers run at the same time")
    return []


def _side_by_side(overrides: Sequence[Override], script: str) -> str:
    rest = [_text(override) for override in overrides if override.key_or_group != LAUNCHER]
    return shlex.join(["python", f"scripts/{script}.py", "-m", f"{LAUNCHER}=joblib", *rest])


def _text(override: Override) -> str:
    return str(override.input_line)


def run_job(script: Callable[[], None]) -> None:
    """Do what a script does inside Hydra's main function.

    In a multirun, whatever ends it but success becomes a `JobFailed`, after it was printed. A stop of all jobs is no
    failure. A signal that stops a run in this very process ends the multirun with it.
    """
    if not _in_multirun():
        script()
        return
    if runs_beside_others():
        for number in SIGNALS:
            signal.signal(number, _ignore)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    code = _code_of_child(script) if _launcher_of_job() == "joblib" else _code_of(script)
    if code > STOPPED and not runs_beside_others():
        raise SystemExit(code)
    if code < 0:
        raise _failure(f"was killed by {signal.Signals(-code).name}")
    if code > STOPPED and not _all_stop(code):
        raise _failure(f"was stopped by {signal.Signals(code - STOPPED).name}")
    if 0 < code < STOPPED:
        raise _failure(f"failed with code {code}")


def _code_of(script: Callable[[], None]) -> int:
    """Return the exit code that a process would have, after printing an error as it would."""
    try:
        script()
    except SystemExit as ending:
        return ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def _code_of_child(script: Callable[[], None]) -> int:
    """Return the exit code of a process that is forked for a script; minus a signal, if one has killed it.

    Joblib kills all jobs when a process of its own is gone, as one is that had no memory left.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            multiprocessing.set_start_method("spawn", force=True)  # joblib's own is unknown to children of a job
            code = _code_of(script)
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)  # into nothing that joblib does next
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def runs_beside_others() -> bool:
    """Tell whether this is a job of a multirun that runs its jobs side by side."""
    return _in_multirun() and _launcher_of_job() != "basic"


def _launcher_of_job() -> str:
    return str(HydraConfig.get().runtime.choices[LAUNCHER])


def label(merge: Merge, environ: Mapping[str, str] = os.environ) -> str:
    """Return what sets the lines of a run apart from those of others that may share its console; empty if none do."""
    if not runs_beside_others() and int(environ.get("LOCAL_WORLD_SIZE", 1)) == 1:
        return ""
    return f"worker {merge.worker}" if merge.merges else f"job {HydraConfig.get().job.num}"


def _in_multirun() -> bool:
    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


def _all_stop(code: int) -> bool:
    """Tell whether a run that a signal has stopped is one of all; Ctrl-C goes to all at once."""
    return code == STOPPED + signal.SIGINT or Path(os.environ[STOP_FILE]).exists()


def _failure(how: str) -> JobFailed:
    hydra, swept = HydraConfig.get(), os.environ.get(SWEPT, "").split()
    own = [text for text in hydra.overrides.task if text.partition("=")[0] in swept]
    failure = f"job {hydra.job.num} ({' '.join(own)}) {how}"
    print(failure, file=sys.stderr)
    return JobFailed(failure)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Do nothing; unlike `SIG_IGN` this is not passed on to programs that a job starts."""


class _Stopper:
    """Ask all jobs to stop when a signal asks this process to; a second one does not wait for them."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.received: signal.Signals | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            _kill_all(number)
        self.received = signal.Signals(number)
        print("stopping: all jobs save first; once more, and nothing is waited for", file=sys.stderr)
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.touch()


def _kill_all(number: int) -> NoReturn:
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            process.kill()
    os._exit(STOPPED + number)


@contextmanager
def watched(arguments: Sequence[str]) -> Iterator[None]:
    """Bracket Hydra's main function: stop all jobs of a multirun that run side by side when this process is to stop.

    Args:
        arguments: of the command, less the name of the script.

    Raises:
        SystemExit: with the code that a shell reports of a program that the signal ended, once all have stopped.
    """
    options = get_args_parser().parse_args(arguments)
    given = {
        override.key_or_group: override for override in OverridesParser.create().parse_overrides(options.overrides)
    }
    os.environ[SWEPT] = " ".join(name for name, override in given.items() if override.is_sweep_override())
    if not options.multirun or _launcher(given) == "basic":
        yield
        return
    root = str(given["run_root"].value()) if "run_root" in given else "runs"  # which jobs on other machines see too
    stopper = _Stopper(Path(root).resolve() / f".stop-{uuid4().hex}")
    os.environ[STOP_FILE] = str(stopper.file)
    before = {number: signal.signal(number, stopper) for number in SIGNALS}
    try:
        with _blocked_for_children():
            yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        stopper.file.unlink(missing_ok=True)
        if stopper.received is not None:
            raise SystemExit(STOPPED + stopper.received)


@contextmanager
def _blocked_for_children() -> Iterator[None]:
    """Block the signals for processes started from here, while another thread goes on receiving them for this one."""
    over = threading.Event()
    receiver = threading.Thread(target=over.wait, daemon=True)
    receiver.start()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        over.set()
        receiver.join()
