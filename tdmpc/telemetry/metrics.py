"""Every value that is logged, declared once: what it means, its unit, and how it is reduced.

The legend of the console, `docs/metrics.md`, the descriptions in TensorBoard and W&B and the rows themselves come
from these declarations; a value without one cannot be recorded.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Reduce(StrEnum):
    """How several values become one."""

    MEAN = "mean"
    MAX = "max"
    LAST = "last"
    SUM = "sum"


@dataclass(frozen=True)
class Metric:
    """A logged value.

    Attributes:
        name: as in the row; `<section>` in it stands for any path of sections.
        unit: of the value; empty for a plain number.
        sentence: what it means.
        window: how the values of a window become that of the row.
        workers: how the rows of several workers become that of the group.
        short: what the console calls it; empty: not on the console.
        form: how the console writes it.
    """

    name: str
    unit: str
    sentence: str
    window: Reduce = Reduce.MEAN
    workers: Reduce = Reduce.MEAN
    short: str = ""
    form: str = "{:.3g}"


def _last(name: str, unit: str, sentence: str, **rest: str) -> Metric:
    """Declare a counter: the row has its latest value, a group of workers the sum."""
    return Metric(name, unit, sentence, window=Reduce.LAST, workers=Reduce.SUM, **rest)


def _rate(name: str, unit: str, sentence: str, **rest: str) -> Metric:
    return Metric(name, unit, sentence, window=Reduce.LAST, workers=Reduce.SUM, **rest)


def _phase(name: str, what: str) -> Metric:
    sentence = f"Seconds that the run has spent on {what}, over all its resumes."
    return Metric(f"progress/{name}_s", "s", sentence, Reduce.LAST, Reduce.MAX)


ROW = (
    Metric(
        "kind",
        "",
        "What the row is about: pretrain, train (a window of training) or eval (an evaluation).",
        Reduce.LAST,
        Reduce.LAST,
    ),
    _last("step", "steps", "Steps of the run so far, summed over its environments; the x axis of every curve."),
    _last(
        "frames", "frames", "Simulator frames so far: steps times the action repeat, the x axis of published curves."
    ),
    _last("updates", "updates", "Updates of the run so far, those of pretraining included."),
    Metric("time", "s", "Wall-clock time of the row, in seconds since 1970.", Reduce.LAST, Reduce.MAX),
    Metric("elapsed_s", "s", "Seconds that the run has taken so far, over all its resumes.", Reduce.LAST, Reduce.MAX),
)
"""What stands in every row."""

METRICS = (
    Metric(
        "train/episode_reward",
        "",
        "Return of the training episodes that ended in the window.",
        short="R",
        form="{:.1f}",
    ),
    Metric("train/episode_length", "steps", "Length of the training episodes that ended in the window."),
    Metric("train/total_loss", "", "Weighted sum of the losses of world model and Q.", short="loss"),
    Metric("train/consistency_loss", "", "Squared error of predicted latents against encoded ones, weighted by rho^t."),
    Metric("train/reward_loss", "nat", "Cross-entropy of predicted rewards, weighted by rho^t."),
    Metric("train/value_loss", "nat", "Cross-entropy of Q against the TD target, over all heads, weighted by rho^t."),
    Metric("train/termination_loss", "nat", "Binary cross-entropy of predicted terminations (episodic only)."),
    Metric("train/termination_rate", "", "Share of slices in the batch that end in termination (episodic only)."),
    Metric("train/termination_f1", "", "F1 score of predicted terminations at the ends of slices (episodic only)."),
    Metric("train/grad_norm", "", "Norm of the gradient of world model and Q before it is clipped."),
    Metric("train/pi_loss", "", "Loss of the policy prior: minus scaled Q and entropy, weighted by rho^t."),
    Metric("train/pi_grad_norm", "", "Norm of the policy prior's gradient before it is clipped."),
    Metric("train/pi_entropy", "nat", "Entropy of the policy prior, estimated from its samples."),
    Metric("train/pi_scaled_entropy", "nat", "Entropy as the policy loss weighs it, scaled with the action size."),
    Metric("train/pi_scale", "", "Running spread of Q between its 5th and 95th percentile, at least 1."),
    Metric("eval/episode_reward", "", "Mean return of the evaluation's episodes.", short="R", form="{:.1f}"),
    Metric(
        "eval/episode_reward_std", "", "Standard deviation of the returns of the evaluation.", short="±", form="{:.1f}"
    ),
    Metric("eval/episode_reward_min", "", "Lowest return of the evaluation.", workers=Reduce.MEAN),
    Metric("eval/episode_length", "steps", "Mean length of the evaluation's episodes."),
    Metric("eval/episodes", "episodes", "Episodes of the evaluation.", Reduce.SUM, Reduce.SUM, "n", "{:.0f}"),
    Metric("eval/failed_episodes", "episodes", "Episodes of it that a failure cut short.", Reduce.SUM, Reduce.SUM),
    Metric("eval/duration_s", "s", "Time that the evaluation took.", Reduce.SUM, Reduce.MAX, "s", "{:.0f}"),
    _last("progress/vector_steps", "vector steps", "Training steps of all environments together."),
    _last("progress/episodes", "episodes", "Training episodes that ended so far.", short="ep", form="{:.0f}"),
    _last("progress/failed_episodes", "episodes", "Training episodes discarded so far after a failed simulation."),
    _last("progress/pretraining_updates", "updates", "Updates of pretraining."),
    _last("progress/merges", "rounds", "Rounds of merging that changed the weights so far."),
    _last("progress/eval_rounds", "rounds", "Evaluations so far."),
    _last("progress/eval_episodes", "episodes", "Episodes of all evaluations so far."),
    _last("progress/eval_steps", "steps", "Steps of all evaluations so far."),
    _last("progress/lifetime_steps", "steps", "Steps that the weights have seen, over all runs they were part of."),
    _last("progress/lifetime_updates", "updates", "Updates that the weights have seen, over all their runs."),
    _last("progress/lifetime_merges", "rounds", "Rounds of merging that changed the weights, over all their runs."),
    Metric("progress/eta_s", "s", "Estimated time to the end of the run.", Reduce.LAST, Reduce.MAX),
    _phase("setup", "setting up before its first step, loading a checkpoint included"),
    _phase("compiling", "compiling plans and updates"),
    _phase("seeding", "the seeding phase, in which actions are random"),
    _phase("pretraining", "pretraining"),
    _phase("training", "training: acting, stepping, updating, logging"),
    _phase("evaluation", "evaluations"),
    _phase("merging", "rounds of merging"),
    _phase("saving", "saving"),
    _rate(
        "rate/steps_per_s",
        "steps/s",
        "Steps per second of the window, everything included.",
        short="st/s",
        form="{:.1f}",
    ),
    _rate(
        "rate/steady_steps_per_s",
        "steps/s",
        "Steps per second of training alone: without random steps, setup, pretraining, compiling, evaluation, merging, "
        "saving.",
    ),
    _rate("rate/run_steps_per_s", "steps/s", "Steps per second of the whole run, over all its resumes."),
    _rate("rate/updates_per_s", "updates/s", "Updates per second of the window, everything included."),
    _rate("rate/frames_per_s", "frames/s", "Simulator frames per second of the window, everything included."),
    Metric("merge/round", "", "Last round of merging, from 1.", Reduce.LAST, Reduce.MAX, "round", "{:.0f}"),
    Metric("merge/peers", "workers", "Others that were met in a round."),
    Metric(
        "merge/skipped",
        "messages",
        "Messages of others that were missing or could not be used in the rounds of the window.",
        Reduce.SUM,
        Reduce.SUM,
    ),
    Metric("merge/wait_s", "s", "Time that the rounds of the window waited for others.", Reduce.SUM, Reduce.SUM),
    Metric(
        "merge/read_bytes",
        "B",
        "Size of the weights and episodes read in the rounds of the window.",
        Reduce.SUM,
        Reduce.SUM,
    ),
    Metric(
        "merge/episodes_read",
        "episodes",
        "Episodes of others that went into the replay in the rounds of the window.",
        Reduce.SUM,
        Reduce.SUM,
    ),
    Metric("merge/distance", "", "How far a round moved the weights: norm of the change over norm of the weights."),
    Metric(
        "merge/group_steps",
        "steps",
        "Steps of all workers that merge together, each as last heard of.",
        Reduce.LAST,
        Reduce.MAX,
    ),
    Metric(
        "merge/group_updates",
        "updates",
        "Updates of all workers that merge together, each as last heard of.",
        Reduce.LAST,
        Reduce.MAX,
    ),
    Metric("time/<section>/mean_s", "s", "Mean time of a call of the section in the window."),
    Metric("time/<section>/max_s", "s", "Longest call of the section in the window.", Reduce.MAX, Reduce.MAX),
    Metric("time/<section>/total_s", "s", "Time spent in the section in the window.", Reduce.SUM, Reduce.SUM),
    Metric("time/<section>/count", "calls", "Calls of the section that ended in the window.", Reduce.SUM, Reduce.SUM),
    Metric("time/<section>/share", "", "Share of the window's wall-clock time spent in the section."),
    Metric(
        "time/<section>/device_total_s",
        "s",
        "Time between begin and end of the section's calls on the GPU's stream.",
        Reduce.SUM,
        Reduce.SUM,
    ),
    Metric("time/<section>/device_mean_s", "s", "Mean of these times over the calls."),
    Metric("time/<section>/device_max_s", "s", "Longest of these times.", Reduce.MAX, Reduce.MAX),
    Metric("save/bytes", "B", "Bytes written by the checkpoints of the window.", Reduce.SUM, Reduce.SUM),
    Metric("system/rss_bytes", "B", "Resident memory of the process and its children.", Reduce.LAST, Reduce.SUM),
    Metric("system/gpu_peak_bytes", "B", "Most GPU memory that torch has held.", Reduce.LAST, Reduce.SUM),
    Metric(
        "system/replay_bytes",
        "B",
        "Memory reserved for the replay, which it takes when it is full.",
        Reduce.LAST,
        Reduce.SUM,
    ),
    Metric(
        "system/cpu_percent",
        "%",
        "CPU use of the process and its children in the window; 100 is one core.",
        Reduce.LAST,
        Reduce.SUM,
    ),
)
"""All that a row can hold besides."""

_BY_NAME = {metric.name: metric for metric in (*ROW, *METRICS)}


def declaration(name: str) -> Metric:
    """Return the declaration of a logged value.

    Raises:
        KeyError: there is none; declare it above.
    """
    if name in _BY_NAME:
        return _BY_NAME[name]
    if name.startswith("time/") and name.count("/") >= 2:
        statistic = name.rpartition("/")[2]
        return _BY_NAME[f"time/<section>/{statistic}"]
    raise KeyError(f"no metric {name!r} is declared in tdmpc/telemetry/metrics.py")


def legend(names: Iterable[str]) -> str:
    """Explain the short names of these values, for the console; one that several share has the sentences of all."""
    sentences: dict[str, list[str]] = {}
    for name in names:
        sentences.setdefault(_BY_NAME[name].short, []).append(_BY_NAME[name].sentence.rstrip("."))
    return "; ".join(f"{short}: {', or '.join(meanings)}" for short, meanings in sentences.items())


def markdown() -> str:
    """Return `docs/metrics.md`."""
    head = (
        "# Metrics\n\nGenerated from `tdmpc/telemetry/metrics.py` by `make docs`. A row of `metrics.jsonl` covers a "
        "window, the time since the row\nof its kind before; a value that was not updated in the window is absent.\n"
    )
    return f"{head}\n## In every row\n\n{_table(ROW)}\n## Values\n\n{_table(METRICS)}"


COLUMNS = ("name", "unit", "over a window", "over workers", "meaning")
"""What `cells` says of a metric."""


def cells(metric: Metric) -> tuple[str, ...]:
    """Return a metric as a line of a table of metrics."""
    return metric.name, metric.unit, metric.window.value, metric.workers.value, metric.sentence


def _table(metrics: Iterable[Metric]) -> str:
    lines = [COLUMNS, ("---",) * len(COLUMNS)]
    lines += [(f"`{name}`", *rest) for name, *rest in map(cells, metrics)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
