"""Whole runs of small agents on toy environments."""

import json
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tdmpc.compose import build_trainer
from tdmpc.config import TrainConfig
from tdmpc.telemetry.recorder import Recorder

TINY = {
    "enc_dim": 16,
    "mlp_dim": 16,
    "latent_dim": 16,
    "num_q": 2,
    "num_bins": 21,
    "iterations": 2,
    "num_samples": 16,
    "num_elites": 4,
    "num_pi_trajs": 2,
    "batch_size": 8,
    "buffer_size": 10_000,
    "threads": 1,
    "device": "cpu",
}


class ListSink:
    """Keep everything it is given."""

    def __init__(self):
        self.rows, self.texts, self.steps, self.etas, self.videos = [], [], [], [], []

    def write(self, row):
        self.rows.append(dict(row))

    def announce(self, text):
        self.texts.append(text)

    def advance(self, step, eta_s, doing=""):
        self.steps.append(step)
        self.etas.append(eta_s)

    def add_video(self, step, path):
        self.videos.append((step, path))

    def close(self):
        pass

    def of(self, kind):
        return [row for row in self.rows if row["kind"] == kind]


@contextmanager
def toy_trainer(run: Path, task="gym:tests.toys:Toy-v0", *, env=None, should_stop=lambda: False, **keys):
    """Build a trainer on toys whose log is in `run/truth`; yield it and the sink that it writes to."""
    truth = run / "truth"
    truth.mkdir(parents=True)
    options = {"log_dir": str(truth), **(env or {})} if "Toy-v0" in task else (env or {})
    defaults = {"vector": "sync", "episodic": True, "seed_steps": 40, "eval_episodes": 2, "eval_freq": 10**6, **TINY}
    config = TrainConfig(task=task, env=options, **(defaults | keys))
    sink = ListSink()
    with ExitStack() as stack:
        trainer = build_trainer(config, run, Recorder([sink]), stack, should_stop)
        yield trainer, sink


def logged_truth(run: Path) -> list[dict]:
    """Return what the toys of a run wrote about themselves."""
    files = sorted((run / "truth").glob("*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]
