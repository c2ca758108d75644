import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tdmpc.benchmarks.suites import COMMANDS, REGRESS, WALLCLOCK, RegressConfig, WallclockConfig, parse, suite_of
from tdmpc.commands import HELP_WIDTH, help_text
from tdmpc.keys import ConfigError, keys_of

REPOSITORY = Path(__file__).parents[2]


def run_script(*arguments, cwd):
    command = [sys.executable, str(REPOSITORY / "scripts/benchmark.py"), *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=cwd, env=environment)


def test_the_suite_is_the_one_named_last_and_ops_where_none_is():
    assert suite_of([]) == "ops"
    assert suite_of(["task=walker-walk", "suite=ops", "suite=regress"]) == "regress"
    with pytest.raises(ConfigError, match="suite=all: must be one of ops, wallclock, regress"):
        suite_of(["suite=all"])


def test_keys_of_the_suite_are_read_and_those_of_training_are_passed_on_as_written():
    arguments = ["suite=wallclock", "model_size=1", "seeds=[3,1]", "env.a=[1,2]", "steps=1e6", "budget_minutes=2"]
    config, base = parse("wallclock", arguments)
    assert config == WallclockConfig(seeds=(3, 1), budget_minutes=2)
    assert base == ("model_size=1", "env.a=[1,2]", "steps=1e6")


def test_variants_are_a_list_of_names_and_of_quoted_texts():
    config, _ = parse("wallclock", ["variants=[default,'wide=[num_envs=8,env.a=[1,2]]']"])
    assert isinstance(config, WallclockConfig)
    assert config.variants == ("default", "wide=[num_envs=8,env.a=[1,2]]")
    config, _ = parse("wallclock", ["variants=vectorized", "seeds=4"])
    assert isinstance(config, WallclockConfig)
    assert (config.variants, config.seeds) == (("vectorized",), (4,))


def test_dry_is_a_flag_and_a_key():
    for arguments in (["--dry"], ["dry=true"]):
        assert parse("wallclock", arguments).config.dry
        assert parse("regress", arguments).config.dry
    assert not parse("regress", []).config.dry


@pytest.mark.parametrize(
    ("suite", "argument", "message"),
    [
        ("wallclock", "budget_minuts=3", "budget_minuts: no such key; close to it: budget_minutes, save_minutes"),
        ("wallclock", "num_env=3", "num_env: no such key; close to it: num_envs"),
        ("wallclock", "budget_minutes=0", "budget_minutes=0: must be a finite number above 0"),
        ("wallclock", "seeds=[1,-2]", "seeds=-2: must be a whole number of at least 0"),
        (
            "wallclock",
            "seeds=1,2",
            "seeds=1,2: must be one value, or a list in brackets where the key takes one",
        ),
        ("wallclock", "variants=[]", "variants=[]: must not be empty"),
        ("wallclock", "variants=[a", "variants=[a: cannot be read"),
        ("wallclock", "seed=3", "seed=3: belongs to the suite; see seeds"),
        ("wallclock", "exp_name=a", "exp_name=a: belongs to the suite"),
        ("wallclock", "experiment=default", "experiment=default: is what a variant is; name it in variants"),
        ("wallclock", "merge=mean", "merge=mean: belongs to a variant"),
        ("wallclock", "~steps", "~steps: must be plain key=value"),
        ("wallclock", "--multirun", "--multirun: no such flag; --help lists what there is"),
        ("regress", "num_envs=3", "num_envs: no such key"),
        ("regress", "slower=1", "slower=1: must be a finite number above 1"),
    ],
)
def test_a_wrong_argument_is_refused_in_one_line(suite, argument, message):
    with pytest.raises(ConfigError) as refusal:
        parse(suite, [argument])
    assert str(refusal.value).startswith(message)
    assert len(str(refusal.value).splitlines()) == 1


@pytest.mark.parametrize("command", [WALLCLOCK, REGRESS])
def test_help_has_every_key_and_example_and_fits_the_terminal(command, capsys):
    with pytest.raises(SystemExit) as leaving:
        parse(command.config_class().suite, ["--help"])
    assert leaving.value.code == 0
    text = capsys.readouterr().out
    assert text == help_text(command) + "\n"
    assert all(f"\n  {name}=" in text for name in keys_of(command.config_class))
    assert "\n  --dry " in text
    assert max(len(line) for line in text.splitlines()) <= HELP_WIDTH


@pytest.mark.parametrize("suite", COMMANDS)
def test_the_examples_are_right_as_a_shell_reads_them(suite):
    for example in COMMANDS[suite].examples:
        assert parse(suite, shlex.split(example)).config.suite == suite


def test_the_regression_set_has_no_settings_but_of_the_comparison():
    assert parse("regress", ["suite=regress", "update_reference=true"]) == (RegressConfig(update_reference=True), ())


def test_the_script_prints_a_plan_from_a_shell_and_leaves_nothing(tmp_path):
    variants = "variants=[default,'wide=[num_envs=4,steps_per_update=4]',merge4]"
    result = run_script("suite=wallclock", "task=gym:Pendulum-v1", "seeds=[1,2]", variants, "--dry", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].startswith("6 runs of gym:Pendulum-v1, 10 minutes of training each")
    numbered = [line.strip() for line in lines if line.lstrip()[:2] in ("1.", "2.", "3.", "4.", "5.", "6.")]
    assert [line.partition(". ")[2] for line in numbered] == [
        *("default, seed 1", "wide, seed 1", "merge4, seed 1"),
        *("default, seed 2", "wide, seed 2", "merge4, seed 2"),
    ]
    assert "merge.worker=0,1,2,3" in result.stdout
    assert lines[-1].startswith("6 of 6 runs are left: 1:00:00 of training, in all about 1:30:00")
    assert list(tmp_path.iterdir()) == []


def test_the_script_refuses_with_one_line_and_leaves_nothing(tmp_path):
    result = run_script("suite=wallclock", "variants=fst", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("error: variants=fst: must be one of ")
    assert len(result.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
