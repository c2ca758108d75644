"""The online loop: act, step the environments, update, merge, evaluate."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tdmpc.replay import EmptyReplayError
from tdmpc.training.collector import Collector, Ended
from tdmpc.training.evaluation import Evaluation, Evaluator
from tdmpc.training.progress import Counts, Phase, Progress, ProgressView
from tdmpc.training.schedule import Every, Ratio

if TYPE_CHECKING:
    from tensordict import TensorDict

    from tdmpc.agent.agent import TDMPC2
    from tdmpc.merging.merger import NoMerge
    from tdmpc.replay import ReplayBuffer
    from tdmpc.telemetry.recorder import Recorder
    from tdmpc.telemetry.timers import Timers
    from tdmpc.telemetry.video import Filming
    from tdmpc.training.saver import NoSaver, Saver


class Stopped(Exception):
    """The run was asked to stop, and its state is saved."""


class UnsavedError(RuntimeError):
    """The run has done all its steps, and what it came to could not be written."""


@dataclass(frozen=True)
class TrainerSettings:
    """When things happen; all in steps over all environments."""

    steps: int
    seed_steps: int
    steps_per_update: float
    batch_size: int
    eval_freq: int
    eval_episodes: int
    log_freq: int


class Trainer:
    """Train an agent online on vectorised environments whose episodes end independently.

    The trainer drives the objects it is handed and owns none of them. Random actions fill the replay first
    (seeding phase), then the updates that these steps have earned are made up (pretraining), then acting and
    updating alternate. Updates run while the environments step, so the newest transition they can see is the one
    before; this holds for environments in this process too, which makes all modes of stepping identical.

    Args:
        agent: whom to train.
        collector: steps the training environments into the replay.
        replay: what is learned from.
        evaluator: evaluates the agent elsewhere.
        recorder: takes what is worth logging.
        timers: measures where the time goes.
        settings: when things happen.
        videos: films evaluations.
        saver: knows when to save the run, and how.
        merger: knows when to merge with other workers, and how.
        system: returns metrics of the machine for a row.
        trace: called with the number of updates done before every update.
        should_stop: asked after every iteration.
        breaking_off: a context that a stop ends at once, for what leaves nothing behind.
        progress: where it counts, begun with the run; by default one that begins here.
    """

    def __init__(
        self,
        agent: "TDMPC2",
        collector: Collector,
        replay: "ReplayBuffer",
        evaluator: Evaluator,
        recorder: "Recorder",
        timers: "Timers",
        settings: TrainerSettings,
        videos: "Filming",
        saver: "Saver | NoSaver",
        merger: "NoMerge",
        system: Callable[[], dict[str, float]] = dict,
        trace: Callable[[int], None] = lambda update: None,
        should_stop: Callable[[], bool] = lambda: False,
        breaking_off: Callable[[], AbstractContextManager[None]] = nullcontext,
        progress: Progress | None = None,
    ) -> None:
        self.agent, self.collector, self.replay, self.evaluator = agent, collector, replay, evaluator
        self.recorder, self.timers, self.settings, self.videos = recorder, timers, settings, videos
        self.saver, self.merger, self.system, self.trace, self.should_stop = saver, merger, system, trace, should_stop
        self.breaking_off = breaking_off
        self.progress = progress or Progress()
        self.last_evaluation: Evaluation | None = None
        self.should_log = Every(settings.log_freq, start=settings.log_freq)
        self.should_evaluate = Every(settings.eval_freq, start=0)
        self.updates_due = Ratio(settings.steps_per_update)
        self._seeding_ended: int | None = None  # the step at which it did
        self._evaluated_at: int | None = None  # the step of the last evaluation
        self._window_began = self.progress.view()

    @property
    def step(self) -> int:
        """Steps done."""
        return self.progress.total.steps

    @property
    def finished(self) -> bool:
        """Whether all steps are done."""
        return self.step >= self.settings.steps

    def train(self) -> Counts:
        """Train until `steps` are done and return how far it came.

        Raises:
            Stopped: it was asked to stop; the state is saved.
            UnexpectedTerminationError: an episode terminated and `episodic` is false.
            EmptyReplayError: no episode of the seeding phase was as long as a slice.
            EnvironmentCrash: an environment failed in a way that is not part of the task.
            NonFiniteError: a loss or a gradient is not a finite number.
            UnsavedError: the disk is full, and only an earlier step is saved.
            ExchangeError: workers that can only merge all together have lost one; the round is still due.
        """
        try:
            self._train()
        except Exception:
            # Weights that are not finite break something else before the window ends: say why.
            self.recorder.check_finite(self.step)
            raise
        return self.progress.total

    def _train(self) -> None:
        self._compile()
        if self.merger.due(self.step):
            self._end_iteration()  # which a stop has broken off
        while not self.finished:
            self.progress.enter(self._phase)
            if self.should_evaluate.due(self.step):
                self.evaluate()
            if self._phase == Phase.PRETRAINING:
                self.pretrain()
            self.collector.begin_step(random=self._phase == Phase.SEEDING)
            self._update()
            self._advance(self.collector.end_step())
            self._end_iteration()
        if self._evaluated_at != self.step:
            self.evaluate()
            self._end_last_window()
        saved = self.save()
        self.merger.finish(**self._totals())
        if not saved:
            raise UnsavedError(f"the end of the run, step {self.step:,}, is not saved; make room and start it again")

    def _end_iteration(self) -> None:
        """Merge, log and save, each when due: the one point where a run stops and continues.

        A stop leaves a round that is due for later, and with it the row in which it will stand. Workers that can only
        merge all together save after every round, so that they continue in the same one.
        """
        due = self.merger.due(self.step)
        over = not due or self._merge()
        if over and not self.finished and self.should_log(self.step):
            self._log("train")
        self._save_if_due(needed=due and over and self.merger.collective)

    def _end_last_window(self) -> None:
        """Log what the last window did, in which the last evaluation is, as others have theirs in them."""
        self.should_log(self.step)
        self._log("train")

    def _merge(self) -> bool:
        """Merge with the other workers; tell whether it came to an end, which a stop does not wait for."""
        if self.should_stop():
            return False
        self.recorder.check_finite(self.step)
        with self.progress.during(Phase.MERGING), self.timers("merge"):
            merged = self.merger.merge(self.step, self.progress.total.updates, self.should_stop)
        if merged is None:
            return False
        for name, value in merged.metrics.items():
            self.recorder.record(name, value)
        if merged.changed:
            self.agent.lifetime.merges += 1
            self.progress.advance(merges=1)
        self.merger.report(**self._totals())
        return True

    def _totals(self) -> dict[str, float | None]:
        """Return how far the run is, for the other workers of its group."""
        view, outcome = self.progress.view(), self.last_evaluation
        return {
            "steps": view.total.steps,
            "updates": view.total.updates,
            "merges": view.total.merges,
            "last_return": None if outcome is None else float(outcome.returns.mean()),
            "elapsed_s": view.total_elapsed_s,
        }

    def _compile(self) -> None:
        """Compile what the run will call, so that this does not fall into the time of anything else."""
        if not self.agent.compute.compile or self.finished:
            return
        self.recorder.announce("compiling plan and update; the next start finds them on disk ...")
        num_envs = {self.collector.envs.num_envs, self.evaluator.envs.num_envs}
        failure = None
        with self.progress.during(Phase.COMPILING), self.timers("compile"):
            began = self.progress.view()
            with self.breaking_off():
                failure = self.agent.compile(sorted(num_envs), self.settings.batch_size)
            seconds = self.progress.view().total_elapsed_s - began.total_elapsed_s
        if self.should_stop():  # and Ctrl-C in a terminal stops the compiler too, which then has failed
            self._save_if_due()
        outcome = f"compiled in {seconds:.0f} s"
        self.recorder.announce(f"warning: compile: going on without it: {failure}" if failure else outcome)

    def evaluate(self) -> None:
        """Evaluate the agent as it is and record the outcome.

        A stop does not wait for the end: the evaluation is abandoned and made when the run continues. Nothing is lost,
        for its episodes depend on its round alone.
        """
        episodes, round = self.settings.eval_episodes, self.progress.total.eval_rounds
        self.recorder.announce(f"evaluating {episodes} episode{'s' if episodes > 1 else ''} ...")
        with (
            self.progress.during(Phase.EVALUATION),
            self.timers("evaluate"),
            self.videos.film(self.step) as take_picture,
        ):
            outcome = self.evaluator.evaluate(episodes, round, take_picture, self._watch)
        self.last_evaluation, self._evaluated_at = outcome, self.step
        self.should_evaluate(self.step)
        self.progress.advance(eval_rounds=1, eval_episodes=episodes, eval_steps=int(outcome.lengths.sum()))
        view = self.progress.view()
        self.recorder.write("eval", self._x_axes(view), **view.phases(), **outcome.metrics())

    def _watch(self) -> None:
        """Look after what must not wait for the end of an evaluation."""
        self.collector.envs.check_alive()
        if self.should_stop():
            self._save_if_due()

    def _save_if_due(self, needed: bool = False) -> None:
        """Save the run when it is time or needed; a stop saves it too.

        Raises:
            Stopped: the run is to stop, and is saved.
        """
        stop = self.should_stop()
        if self.saver.due(self.step) or stop or needed:
            self.save()
        if stop:
            self.merger.report(**self._totals())
            raise Stopped

    def save(self) -> bool:
        """Save all that continues the run exactly; tell whether that, if it is wanted, was possible.

        Raises:
            NonFiniteError: a loss or gradient since the last row is not finite; the last checkpoint stays.
        """
        with self.progress.during(Phase.SAVING), self.timers("save"):
            self.recorder.check_finite(self.step)
            return self.saver.save(self)

    def state_dict(self) -> dict[str, Any]:
        """Return all that continues the run exactly besides agent and replay, between two iterations."""
        schedules = (self.should_log, self.should_evaluate, self.updates_due)
        return {
            "collector": self.collector.state_dict(),
            "progress": self.progress.state_dict(),
            "recorder": self.recorder.state_dict(),
            "merger": self.merger.state_dict(),
            "timers": self.timers.state_dict(),
            "schedules": [schedule.state_dict() for schedule in schedules],
            "seeding_ended": self._seeding_ended,
            "evaluated_at": self._evaluated_at,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; agent and replay are loaded by then."""
        schedules = (self.should_log, self.should_evaluate, self.updates_due)
        for schedule, saved in zip(schedules, state["schedules"], strict=True):
            schedule.load_state_dict(saved)
        self._seeding_ended, self._evaluated_at = state["seeding_ended"], state["evaluated_at"]
        self.progress.load_state_dict(state["progress"])
        self.recorder.load_state_dict(state["recorder"], self.agent.device)
        self.merger.load_state_dict(state.get("merger", {}))  # runs that began before there was merging have none
        self.timers.load_state_dict(state["timers"])
        for env in self.collector.load_state_dict(state["collector"]):
            self.recorder.announce(
                f"environment {env} has randomness of its own and did not come back to where it was: its episode "
                "counts as truncated there"
            )
        self._window_began = self.progress.view()

    def pretrain(self) -> None:
        """Make the updates that the steps of the seeding phase have earned; it can stop and continue in between."""
        total, done = self._pretraining_updates, self.progress.total.pretraining_updates
        self.recorder.announce(f"pretraining: {total - done:,} updates on {self.step:,} random steps ...")
        with self.timers("pretrain"):
            for update in range(done + 1, total + 1):
                self._run_updates(1)
                self.progress.advance(pretraining_updates=1)
                self.recorder.advance(self.step, None, f"pretraining {update:,}/{total:,}")
                self._save_if_due()
        self._seeding_ended = self.step
        self._log("pretrain")
        self.progress.enter(Phase.TRAINING)

    @property
    def _pretraining_updates(self) -> int:
        return Ratio(self.settings.steps_per_update)(self.settings.seed_steps)

    @property
    def _phase(self) -> Phase:
        """The phase that the next step belongs to."""
        if self._seeding_ended is not None:
            return Phase.TRAINING
        return Phase.SEEDING if self.step < self.settings.seed_steps else Phase.PRETRAINING

    def _update(self) -> None:
        """Make the updates due once the step under way has ended."""
        if self._seeding_ended is not None:
            steps = self.step + self.collector.envs.num_envs - self._seeding_ended
            self._run_updates(self.updates_due(steps))

    def _run_updates(self, count: int) -> None:
        for _ in range(count):
            self.collector.envs.check_alive()
            self.trace(self.progress.total.updates)
            with self.timers("replay"), self.timers("sample"):
                batch = self._sample()
            with self.timers("update"):
                self.recorder.record_update(self.agent.update(batch))
            self.progress.advance(updates=1)

    def _sample(self) -> "TensorDict":
        try:
            return self.replay.sample(self.settings.batch_size)
        except EmptyReplayError as error:
            failed = self.progress.total.failed_episodes
            if not failed:
                raise
            lost = f"{failed} episodes were discarded because their simulation failed"
            raise EmptyReplayError(f"{error}; {lost}") from None

    def _advance(self, ended: Ended) -> None:
        """Take note of a step; the one place where it counts."""
        self.progress.advance(
            steps=self.collector.envs.num_envs,
            vector_steps=1,
            episodes=len(ended.returns),
            failed_episodes=ended.failed,
        )
        for value, length in zip(ended.returns, ended.lengths, strict=True):
            self.recorder.record("train/episode_reward", value)
            self.recorder.record("train/episode_length", length)
        self.merger.observe(ended.returns)
        self.recorder.advance(self.step, self.progress.view().eta_s(self.settings.steps))

    def _log(self, kind: str) -> None:
        """End the window."""
        with self.timers("log"):
            view = self.progress.view()
            values = self._progress_metrics(view) | view.rates(self._window_began) | self.system()
            if "rate/steps_per_s" in values:
                values["rate/frames_per_s"] = values["rate/steps_per_s"] * self.collector.envs.frames_per_step
            self._window_began = view
            self.recorder.end_window(kind, self._x_axes(view), **values, **self.timers.window().row())

    def _x_axes(self, view: ProgressView) -> dict[str, float]:
        frames = view.total.steps * self.collector.envs.frames_per_step
        elapsed = view.total_elapsed_s
        return {"step": view.total.steps, "frames": frames, "updates": view.total.updates, "elapsed_s": elapsed}

    def _progress_metrics(self, view: ProgressView) -> dict[str, float]:
        logged = ("vector_steps", "episodes", "failed_episodes", "pretraining_updates", "merges", "eval_rounds")
        logged = (*logged, "eval_episodes", "eval_steps")
        values: dict[str, float] = {f"progress/{name}": getattr(view.total, name) for name in logged}
        values |= {f"progress/lifetime_{name}": count for name, count in vars(self.agent.lifetime).items()}
        values |= view.phases()
        eta = view.eta_s(self.settings.steps)
        return values if eta is None else values | {"progress/eta_s": eta}
