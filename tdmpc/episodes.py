"""The episodes of an evaluation: printed, written to a file, filmed."""

import csv
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from envs import RenderError, VectorEnv, make_vector
from tdmpc.config import EvaluateConfig
from tdmpc.intervals import mean_interval
from tdmpc.keys import refusal, require
from tdmpc.seeding import Seeds, Stream
from tdmpc.telemetry.video import Filming, NoVideos, Videos
from tdmpc.training.evaluation import Evaluation

COLUMNS = ("episode", "seed", "episode_reward", "episode_length", "failed")
USED = "exists already; must be a new file"


def describe_episodes(outcome: Evaluation) -> Iterator[str]:
    """Say what every episode came to, and all of them."""
    returns = outcome.returns
    for number, (value, length, failed) in enumerate(zip(returns, outcome.lengths, outcome.failed, strict=True)):
        yield f"episode {number:>3}  return {value:>9.2f}  steps {length}{'  failed' if failed else ''}"
    interval = mean_interval(returns.tolist())
    within = f"  95 % interval {interval[0]:.2f} to {interval[1]:.2f}" if interval else ""
    yield f"mean {returns.mean():.2f}{within}  std {returns.std():.2f}  episodes {len(returns)}"


def check_new_csv(path: str | None) -> None:
    """Refuse a file that exists, or whose folder cannot be made; otherwise the folder does, after this.

    Raises:
        ConfigError: for the key `csv`.
    """
    if path is None:
        return
    require(not Path(path).exists(), "csv", path, USED)
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise refusal("csv", path, f"must be in a folder that can be made ({error.strerror})") from None


def write_csv(path: str, outcome: Evaluation, seeds: Seeds, round: int) -> None:
    """Write one line an episode, with the seed that its environment was reset with.

    Args:
        path: of the new file.
        outcome: of the evaluation.
        seeds: of the evaluator.
        round: that was evaluated.

    Raises:
        ConfigError: the file exists by now, or cannot be written.
    """
    columns = zip(outcome.returns, outcome.lengths, outcome.failed, strict=True)
    try:
        with Path(path).open("x", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(COLUMNS)
            for number, (value, length, failed) in enumerate(columns):
                seed = seeds.integer(Stream.EVAL_EPISODE, round, number)
                writer.writerow([number, seed, float(value), int(length), int(failed)])
    except FileExistsError:
        raise refusal("csv", path, USED) from None
    except OSError as error:
        raise refusal("csv", path, f"cannot be written ({error.strerror})") from None


def drawable_envs(config: EvaluateConfig, stack: ExitStack) -> VectorEnv | None:
    """Make environments that can be filmed; None where that is not wanted, or, as is printed, not possible here.

    They must be the first of the process, for OpenGL is chosen once.
    """
    if not config.save_video:
        return None
    num_envs = min(config.num_envs, config.eval_episodes)
    try:
        return stack.enter_context(make_vector(config.task, num_envs, "sync", config.env, render=True))
    except RenderError as error:
        print(f"warning: save_video=true: no video will be made: {error}")
        return None


def filming(envs: VectorEnv | None, folder: str, step: int) -> Filming:
    """Return what films the first episode into `<folder>/<step>.mp4`.

    Raises:
        ConfigError: there is such a video.
    """
    if envs is None:
        return NoVideos()
    video = Path(folder) / f"{step}.mp4"
    require(not video.exists(), "video_dir", folder, f"holds {video.name} already; must be another directory")
    return Videos(Path(folder), lambda: envs.render(0), envs.render_fps, _warn, lambda _, path: print(f"video: {path}"))


def _warn(text: str) -> None:
    print(f"warning: {text}")
