"""The scripts as the command line presents them: keys, presets, examples, help."""

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tdmpc.config import BenchmarkConfig, EvaluateConfig, TrainConfig
from tdmpc.keys import Key, Section, sections, shown

CONFIG_DIRECTORY = Path(__file__).resolve().parents[1] / "configs"
HELP_WIDTH = 100
HELP_INDENT = 30
FLAGS = {
    "-m, --multirun": "Run once for every combination of the comma-separated values.",
    "--cfg job": "Print the keys as given and preset, instead of running.",
    "-h, --help": "Print this text.",
    "--hydra-help": "Print the other flags, which are Hydra's.",
}


@dataclass(frozen=True)
class Command:
    """A script: its keys, the groups from which presets are chosen, examples of its arguments, and its flags."""

    name: str
    purpose: str
    config_class: type[Section]
    groups: tuple[str, ...]
    examples: tuple[str, ...]
    flags: Mapping[str, str] = field(default_factory=FLAGS.copy)


TRAIN = Command(
    name="train",
    purpose="Train a TD-MPC2 agent.",
    config_class=TrainConfig,
    groups=("merge", "experiment"),
    examples=(
        "experiment=quickstart",
        "task=cheetah-run num_envs=4 steps_per_update=4 steps=5e5",
        "-m task=walker-walk,walker-run seed=1,2,3",
        "-m hydra/launcher=joblib merge=mean merge.worker=0,1,2,3,4 exp_name=merged",
    ),
)
EVALUATE = Command(
    name="evaluate",
    purpose="Evaluate a saved TD-MPC2 agent.",
    config_class=EvaluateConfig,
    groups=(),
    examples=(
        "task=walker-walk checkpoint=agent.pt",
        "task=walker-walk checkpoint=agent.pt eval_episodes=100 num_envs=10",
        "task=walker-walk checkpoint=agent.pt csv=episodes.csv save_video=true",
        "-m task=walker-walk checkpoint=agent.pt mpc=true,false",
    ),
)

BENCHMARK = Command(
    name="benchmark",
    purpose=(
        "Measure how fast the operations of training are. Two other suites have keys of their own, which\n"
        "`suite=wallclock --help` and `suite=regress --help` list: whole runs of variants against wall-clock\n"
        "time, and a fixed set of runs against a stored reference."
    ),
    config_class=BenchmarkConfig,
    groups=(),
    examples=(
        "suite=ops task=walker-walk",
        "ops=[plan,update] model_sizes=[1,5,19] num_envs=4 baseline=before.json",
        "task=humanoid-walk ops=[env_step,overlap] num_envs=[1,4,16]",
    ),
)


def group_options(group: str) -> dict[str, str]:
    """Return the presets of a group with what the comment at the top of their files says."""
    files = sorted((CONFIG_DIRECTORY / group).glob("*.yaml"))
    return {file.stem: _comment(file) for file in files}


def help_text(command: Command) -> str:
    """Return what `--help` prints: every key with its default and its sentence."""
    script = f"python scripts/{command.name}.py"
    return "\n\n".join(
        [
            f"{command.purpose}\n\n{script} [flags] [key=value ...]",
            *_key_blocks(command),
            *_group_blocks(command),
            _block("Flags", command.flags),
            "\n".join(["Examples", *(f"  {script} {example}" for example in command.examples)]),
        ]
    )


def _key_blocks(command: Command) -> Iterator[str]:
    for title, keys in sections(command.config_class).items():
        yield _block(title, {_with_default(key): key.sentence for key in keys})


def _group_blocks(command: Command) -> Iterator[str]:
    for group in command.groups:
        options = group_options(group).items()
        yield _block(f"Presets ({group})", {f"{group}={name}": purpose for name, purpose in options})


def _block(title: str, entries: Mapping[str, str]) -> str:
    return "\n".join([title, *(_entry(name, sentence) for name, sentence in entries.items())])


def _entry(name: str, sentence: str) -> str:
    lines = textwrap.wrap(sentence, HELP_WIDTH - HELP_INDENT)
    return "\n".join(
        f"  {left:<{HELP_INDENT - 3}} {line}" for left, line in zip([name] + [""] * len(lines), lines, strict=False)
    )


def _with_default(key: Key) -> str:
    return f"{key.name}={'...' if key.required else shown(key.default)}"


def _comment(file: Path) -> str:
    lines = file.read_text(encoding="utf-8").splitlines()
    comments = [line.removeprefix("#").strip() for line in lines if line.startswith("#")]
    return " ".join(comment for comment in comments if not comment.startswith("@package"))
