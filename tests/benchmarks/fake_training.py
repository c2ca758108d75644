"""Training that takes no time: processes whose clock is the number of times that they are asked whether they run."""

import json
import shutil
import signal
from pathlib import Path

from tdmpc.training.progress import Phase

SEED_STEPS, PRETRAINING_S, POLL_S, EVAL_STEPS = 100, 5.0, 10.0, 200


def row(kind, step, training_s, *, evaluation_s=0.0, pretrained=True, **more):
    """Return a row of a run that trains for so long; seeding takes a second, pretraining `PRETRAINING_S`."""
    phases = dict.fromkeys(Phase, 0.0) | {
        Phase.SETUP: 1.0,
        Phase.COMPILING: 7.0,
        Phase.SEEDING: 1.0 if step else 0.0,
        Phase.PRETRAINING: PRETRAINING_S if pretrained and step else 0.0,
        Phase.TRAINING: training_s,
        Phase.EVALUATION: evaluation_s,
    }
    named = {f"progress/{phase}_s": seconds for phase, seconds in phases.items()}
    elapsed_s = sum(phases.values())
    return {"kind": kind, "step": step, "updates": step // 2, "elapsed_s": elapsed_s, **named, **more}


def eval_row(step, training_s, value, *, evaluation_s=0.0):
    outcome = {"eval/episode_reward": value, "eval/episodes": 2, "eval/episode_length": 50.0, "eval/duration_s": 4.0}
    return row("eval", step, training_s, evaluation_s=evaluation_s, **outcome)


class FakeTraining:
    """Start fake processes of train.py, which write rows and summaries as real ones would.

    Args:
        steps_per_s: by exp_name.
        fails: names of variants whose processes fail.
        dies_after: polls after which a process is gone without a word, once; None never.
    """

    def __init__(self, steps_per_s=None, fails=(), dies_after=None):
        self.steps_per_s, self.fails, self.dies_after = steps_per_s or {}, set(fails), dies_after
        self.started = []

    def __call__(self, arguments, log):
        keys = dict(text.split("=", 1) for text in arguments if "=" in text)
        self.started.append(keys)
        return FakeProcess(self, keys, log)

    @property
    def order(self):
        """Variant and seed of every process that trained, in the order of their start."""
        return [(keys["exp_name"], int(keys["seed"])) for keys in self.started if "compile" not in keys]


class FakeProcess:
    def __init__(self, training, keys, log):
        self.training, self.keys, self.log = training, keys, log
        self.stopped = False
        task = keys["task"].replace(":", "-")
        directory = Path(keys["run_root"], task, keys["exp_name"], f"seed-{keys['seed']}")
        workers = keys["merge.worker"].split(",") if "merge.worker" in keys else []
        if keys.get("overwrite") == "true":
            shutil.rmtree(directory, ignore_errors=True)
        self.runs = [FakeRun(directory / f"worker-{worker}") for worker in workers] or [FakeRun(directory)]
        self.pace = training.steps_per_s.get(keys["exp_name"], 10)
        log.parent.mkdir(parents=True, exist_ok=True)

    def poll(self):
        if self.keys["exp_name"] in self.training.fails:
            self.log.write_text("loading ...\nerror: num_samples: are too many\nbye\n")
            return 2
        if self.training.dies_after is not None:
            self.training.dies_after -= 1
            if self.training.dies_after < 0:
                self.training.dies_after = None
                self.log.write_text("training\n")
                return 128 + signal.SIGKILL
        if self.stopped:
            for run in self.runs:
                run.end("stopped")
            return 128 + signal.SIGTERM
        steps = int(float(self.keys.get("steps", 1e7)))
        for run in self.runs:
            if run.step < steps:
                run.train(self.pace)
        if all(run.step >= steps for run in self.runs):
            for run in self.runs:
                run.evaluate()
                run.end("finished")
            return 0
        return None

    def stop(self):
        self.stopped = True

    def kill(self):
        pass

    def memory_bytes(self):
        return 2_000_000_000


class FakeRun:
    """A run on disk, whose return is a hundredth of its steps."""

    def __init__(self, directory):
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self.metrics = directory / "metrics.jsonl"
        rows = [json.loads(line) for line in self.metrics.read_text().splitlines()] if self.metrics.exists() else []
        self.step = rows[-1]["step"] if rows else 0
        self.training_s = rows[-1]["progress/training_s"] if rows else 0.0
        self.evaluation_s = rows[-1]["progress/evaluation_s"] if rows else 0.0
        if not rows:
            self.evaluate()

    def train(self, pace):
        if self.step < SEED_STEPS:
            self.step = SEED_STEPS
            self._write(row("pretrain", self.step, 0.0, **{"progress/pretraining_updates": 50}))
        before = self.step
        self.step += int(pace * POLL_S)
        self.training_s += POLL_S
        self._write(row("train", self.step, self.training_s, evaluation_s=self.evaluation_s))
        if self.step // EVAL_STEPS > before // EVAL_STEPS:
            self.evaluate()

    def evaluate(self):
        self.evaluation_s += 4.0
        self._write(eval_row(self.step, self.training_s, self.step / 100, evaluation_s=self.evaluation_s))

    def end(self, ending):
        sections = {"update": {"total_s": self.training_s}, "evaluate": {"total_s": self.evaluation_s}}
        content = {"ending": ending, "counts": {"steps": self.step}, "sections": sections, "other_s": 0.5}
        (self.directory / "summary.json").write_text(json.dumps(content))
        (self.directory / "provenance.json").write_text(json.dumps({"commit": "c0ffee"}))

    def _write(self, values):
        with self.metrics.open("a") as file:
            file.write(json.dumps(values) + "\n")
