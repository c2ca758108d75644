import os
import subprocess
import sys
from pathlib import Path
from shutil import copytree

import pytest
from hydra import compose, initialize_config_dir

from tdmpc.command_line import checked_arguments, from_hydra, one_line_errors
from tdmpc.commands import CONFIG_DIRECTORY, EVALUATE, HELP_WIDTH, TRAIN, group_options, help_text
from tdmpc.config import EvaluateConfig, Log, Profile, TrainConfig
from tdmpc.keys import ConfigError, keys_of

EXPERIMENTS = ", ".join(group_options("experiment"))
SCRIPT = f"""
import sys
import hydra
from tdmpc.command_line import from_hydra, one_line_errors, prepare_arguments
from tdmpc.commands import TRAIN
from tdmpc.config import TrainConfig

@hydra.main(config_path={str(CONFIG_DIRECTORY)!r}, config_name="train", version_base="1.3")
@one_line_errors(FileExistsError)
def main(composed):
    config = from_hydra(TrainConfig, composed)
    if config.exp_name == "used":
        raise FileExistsError("the run directory\\nis used")
    print(config.seed, config.steps, dict(config.env))
    assert not {{"torch", "gymnasium", "dm_control"}} & set(sys.modules)

prepare_arguments(TRAIN)
main()
"""


def train_config(*arguments: str) -> TrainConfig:
    overrides = checked_arguments(TRAIN, arguments)
    with initialize_config_dir(str(CONFIG_DIRECTORY), version_base="1.3"):
        return from_hydra(TrainConfig, compose("train", overrides))


def run_script(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    work = tmp_path / "work"
    work.mkdir()
    command = [sys.executable, str(script), *arguments]
    return subprocess.run(command, cwd=work, capture_output=True, text=True, check=False, timeout=60)


def test_without_arguments_the_defaults_are_composed():
    assert train_config() == TrainConfig()


def test_overrides_are_converted():
    config = train_config("steps=1e6", "buffer_size=100_000", "mpc=false", "seed_steps=null", "lr=1e-4")
    assert config == TrainConfig(steps=1_000_000, buffer_size=100_000, mpc=False, lr=1e-4)


def test_keys_of_a_group_are_given_by_their_dotted_names():
    config = train_config("log.console=plain", "profile.at=1e3", "profile.trace=true")
    assert config == TrainConfig(log=Log(console="plain"), profile=Profile(at=1000, trace=True))


@pytest.mark.parametrize(
    "arguments",
    [
        ("env.a=1", "env.b.c=x"),
        ("env={a:1,b:{c:x}}",),
        ("env.a=1", "env={b:{c:x}}"),
        ("+env.a=1", "++env.b.c=x"),
    ],
)
def test_options_of_the_environment_need_no_declaration(arguments):
    assert train_config(*arguments).env == {"a": 1, "b": {"c": "x"}}


def test_the_command_line_wins_over_a_preset():
    preset = train_config("experiment=quickstart")
    assert (preset.task, preset.model_size, preset.num_envs) == ("reacher-easy", 1, 16)
    for order in (("experiment=quickstart", "steps=100"), ("steps=100", "experiment=quickstart")):
        assert train_config(*order).steps == 100


@pytest.mark.parametrize("name", group_options("experiment"))
def test_every_preset_is_valid_and_says_what_it_is(name):
    assert train_config(f"experiment={name}")
    assert group_options("experiment")[name].endswith(".")


@pytest.mark.parametrize(
    ("preset", "message"),
    [
        ("num_env: 2", "num_env: no such key; close to it: num_envs, num_q, num_bins"),
        ("log: {consol: plain}", "log.consol: no such key; close to it: log.console"),
        ("log: {console: bar}", "log.console=bar: must be one of auto, plain"),
        ("log: {console: '${nothing}'}", "log.console: Interpolation key 'nothing' not found"),
        ("log: 3", "log: no such key; close to it: log.console, log.tensorboard"),
        ("log: null", "log: no such key; close to it: log.console, log.tensorboard"),
    ],
)
def test_a_preset_that_is_wrong_is_refused(tmp_path, preset, message):
    copytree(CONFIG_DIRECTORY, tmp_path / "configs")
    (tmp_path / "configs/experiment/wrong.yaml").write_text(f"# @package _global_\n{preset}\n")
    with initialize_config_dir(str(tmp_path / "configs"), version_base="1.3"), pytest.raises(ConfigError) as refusal:
        from_hydra(TrainConfig, compose("train", ["experiment=wrong"]))
    assert str(refusal.value) == message


def test_evaluation_is_composed_from_its_own_keys(tmp_path):
    checkpoint = tmp_path / "agent.pt"
    checkpoint.touch()
    with initialize_config_dir(str(CONFIG_DIRECTORY), version_base="1.3"):
        composed = compose("evaluate", [f"checkpoint='{checkpoint}'", "eval_episodes=3"])
    assert from_hydra(EvaluateConfig, composed) == EvaluateConfig(checkpoint=str(checkpoint), eval_episodes=3)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("num_envs=", "num_envs=: must be a whole number of at least 1"),
        ("num_env=2", "num_env: no such key; close to it: num_envs, num_q, num_bins"),
        ("+num_env=2", "num_env: no such key; close to it: num_envs, num_q, num_bins"),
        ("steps.a=2", "steps.a: no such key; close to it: steps"),
        ("xyzzy=2", "xyzzy: no such key; --help lists all keys"),
        ("experimnt=none", "experimnt: no such key; close to it: experiment"),
        ("experiment=fast", f"experiment=fast: must be one of {EXPERIMENTS}"),
        ("experiment=[none]", f"experiment=['none']: must be one of {EXPERIMENTS}"),
        ("steps", "steps: must be plain key=value"),
        ("~steps", "~steps: must be plain key=value"),
        ("~env.a", "~env.a: must be plain key=value"),
        ("+steps=1", "+steps=1: must be plain key=value"),
        ("+experiment=none", "+experiment=none: must be plain key=value"),
        ("experiment@env=none", "experiment@env=none: must be plain key=value"),
        ("exp_name=a=b", """exp_name=a=b: cannot be read; quote the value, as in 'exp_name="a=b"'"""),
        ("seed=1,2", "seed=1,2: several values need the flag --multirun"),
        ("--fast", "--fast: no such flag; --help lists what there is"),
        ("steps=${nothing}", "steps: Interpolation key 'nothing' not found"),
        ("task=???", "task: Missing mandatory value: task"),
        ("log.consol=x", "log.consol: no such key; close to it: log.console"),
        ("log.console.a=x", "log.console.a: no such key; close to it: log.console"),
        ("log.console=bar", "log.console=bar: must be one of auto, plain"),
        ("log.console=", "log.console=: must be one of auto, plain"),
        ("log.console={a: 1}", "log.console={'a': 1}: must be one of auto, plain"),
        ("log.console=auto,plain", "log.console=auto,plain: several values need the flag --multirun"),
        ("log.console=${nothing}", "log.console: Interpolation key 'nothing' not found"),
        ("log.console=???", "log.console: Missing mandatory value: console"),
        ("+log.console=plain", "+log.console=plain: must be plain key=value"),
        ("+log.new=1", "log.new: no such key; close to it: log.console"),
        ("~log.console", "~log.console: must be plain key=value"),
        ("log/console=plain", "log/console: no such key; close to it: log.console"),
        *(
            (argument, "log: no such key; close to it: log.console, log.tensorboard")
            for argument in ("log=3", "log=null", "log={console: plain}", "+log=3", "~log", "log=")
        ),
        ("profile.at=-1", "profile.at=-1: must be a whole number of at least 0"),
        ("checkpoint=no/where.pt", "checkpoint=no/where.pt: there is no such file or directory"),
    ],
)
def test_a_wrong_argument_is_refused_in_one_line(argument, message):
    with pytest.raises(ConfigError) as refusal:
        train_config(argument)
    assert str(refusal.value) == message


def test_a_wrong_preset_in_a_multirun_is_refused():
    with pytest.raises(ConfigError, match=f"experiment=fast: must be one of {EXPERIMENTS}"):
        checked_arguments(TRAIN, ["-m", "experiment=none,fast"])


def test_evaluation_has_no_presets():
    with pytest.raises(ConfigError, match="experiment: no such key"):
        checked_arguments(EVALUATE, ["experiment=none"])


def test_flags_may_stand_anywhere():
    assert checked_arguments(TRAIN, ["seed=1,2", "-m", "env.a=1"]) == ["-m", "seed=1,2", "env.a=1"]
    assert checked_arguments(TRAIN, ["seed=1", "--cfg", "job"]) == ["--cfg", "job", "seed=1"]


def test_keys_of_hydra_are_left_to_hydra():
    arguments = ["hydra.verbose=true", "hydra/launcher=basic"]
    assert checked_arguments(TRAIN, arguments) == arguments


@pytest.mark.parametrize("command", [TRAIN, EVALUATE])
def test_help_has_every_key_preset_and_example_and_fits_the_terminal(command):
    text = help_text(command)
    for name in keys_of(command.config_class):
        assert f"\n  {name}=" in text
    for group in command.groups:
        for name in group_options(group):
            assert f"\n  {group}={name} " in text
    for example in command.examples:
        assert example in text
    assert max(len(line) for line in text.splitlines()) <= HELP_WIDTH


def test_help_lists_the_keys_of_a_group_under_its_title():
    _, _, group = help_text(TRAIN).partition("\n\nWhere the log goes\n")
    lines = group.split("\n\n")[0].splitlines()
    assert [line.split()[0] for line in lines if line[2] != " "] == ["log.console=auto", "log.tensorboard=true"]


@pytest.mark.parametrize("command", [TRAIN, EVALUATE])
def test_the_examples_in_the_help_are_accepted(command):
    assert len(command.examples) >= 3
    for example in command.examples:
        assert checked_arguments(command, example.split())


def test_a_reader_of_the_help_may_leave_early():
    script = "import sys; from tdmpc.command_line import prepare_arguments; from tdmpc.commands import TRAIN; "
    script += "sys.argv[1:] = ['--help']; prepare_arguments(TRAIN)"
    reading, writing = os.pipe()
    os.close(reading)
    outcome = subprocess.run([sys.executable, "-c", script], stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert (outcome.returncode, outcome.stderr) == (0, "")


def test_help_is_printed_instead_of_running(capsys):
    with pytest.raises(SystemExit) as leaving:
        checked_arguments(TRAIN, ["steps=1", "--help"])
    assert leaving.value.code == 0
    assert capsys.readouterr().out == help_text(TRAIN) + "\n"


def test_only_the_given_errors_become_one_line(capsys):
    with pytest.raises(SystemExit) as leaving, one_line_errors(OSError):
        raise OSError("disk\n  is full")
    assert leaving.value.code == 2
    assert capsys.readouterr().err == "error: disk is full\n"
    with pytest.raises(KeyError), one_line_errors(OSError):
        raise KeyError("a mistake of ours")


@pytest.mark.parametrize(
    ("argument", "line"),
    [
        ("nun_envs=3", "error: nun_envs: no such key; close to it: num_envs, num_bins\n"),
        ("num_envs=0", "error: num_envs=0: must be a whole number of at least 1\n"),
        ("log=3", "error: log: no such key; close to it: log.console, log.tensorboard\n"),
        ("log.console=bar", "error: log.console=bar: must be one of auto, plain\n"),
        ("exp_name=used", "error: the run directory is used\n"),
    ],
)
def test_a_script_refuses_with_one_line_and_leaves_nothing(tmp_path, argument, line):
    process = run_script(tmp_path, argument)
    assert (process.returncode, process.stdout, process.stderr) == (2, "", line)
    assert list((tmp_path / "work").iterdir()) == []


def test_a_script_runs_without_leaving_files_of_hydra(tmp_path):
    process = run_script(tmp_path, "experiment=quickstart", "steps=1e3", "env.a=1")
    assert (process.returncode, process.stdout, process.stderr) == (0, "1 1000 {'a': 1}\n", "")
    assert list((tmp_path / "work").iterdir()) == []


def test_a_script_runs_once_for_each_combination(tmp_path):
    process = run_script(tmp_path, "env.a=1,2", "-m", "seed=1,2", "steps=9", "run_root=kept")
    lines = [f"{seed} 9 {{'a': {option}}}" for option in (1, 2) for seed in (1, 2)]
    assert (process.returncode, process.stdout.splitlines(), process.stderr) == (0, lines, "")
    assert [path.name for path in (tmp_path / "work").rglob("*")] == ["kept", "multirun.yaml"]
