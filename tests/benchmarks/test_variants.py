import shlex

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from tdmpc.benchmarks.plan import make_plan
from tdmpc.benchmarks.suites import WallclockConfig
from tdmpc.benchmarks.variants import differences, read_variant, train_arguments
from tdmpc.config import TrainConfig
from tdmpc.keys import ConfigError

PRESETS = ("default", "vectorized", "fewer_iterations", "plan_every", "policy_only", "merge4")


def plan(*base, cores=2, **keys):
    return make_plan(WallclockConfig(**keys), base, cores)


def test_the_presets_say_what_they_change():
    changed = {name: differences([read_variant(name, []), read_variant("plain=[]", [])]) for name in PRESETS}
    assert changed["default"] == {}
    assert {key: now for key, (now, _) in changed["vectorized"].items()} == {"num_envs": 4, "steps_per_update": 4}
    assert changed["plan_every"] == {"plan_every": [2, 1]}
    assert changed["policy_only"] == {"mpc": [False, True]}
    assert changed["fewer_iterations"].keys() == {"iterations", "num_samples", "num_elites", "num_pi_trajs"}
    assert {key for key in changed["merge4"] if not key.startswith("merge.")} == set()


def test_a_group_of_workers_is_known_by_its_members():
    merged = read_variant("merge4", [])
    assert (merged.workers, merged.members) == (4, [0, 1, 2, 3])
    controlled = read_variant("trio=[merge=mean,merge.workers=3]", [])
    assert (controlled.workers, controlled.members) == (3, [1, 2])
    assert (read_variant("default", []).workers, read_variant("default", []).members) == (1, [None])


def test_what_holds_for_all_gives_way_to_what_a_variant_sets():
    base = ["num_envs=2", "model_size=1", "merge.every=7"]
    assert read_variant("vectorized", base).config == TrainConfig(
        num_envs=4,
        steps_per_update=4,
        model_size=1,
        merge={"every": 7},  # pyright: ignore[reportArgumentType]
    )
    assert read_variant("merge4", base).config.merge.every == 1000
    assert read_variant("often=[experiment=merge4,merge.every=9]", base).config.merge.every == 9
    arguments = train_arguments(read_variant("vectorized", base), base, {"seed": 3})
    assert arguments == ["model_size=1", "merge.every=7", "experiment=vectorized", "seed=3"]


def test_a_group_is_started_as_a_user_would():
    arguments = train_arguments(read_variant("merge4", []), ["model_size=1"], {"seed": 3})
    assert arguments[:2] == ["-m", "hydra/launcher=joblib"]
    assert arguments[2:] == ["model_size=1", "experiment=merge4", "seed=3", "merge.worker=0,1,2,3"]


def test_values_that_hydra_would_not_take_for_text_are_quoted():
    (argument,) = train_arguments(read_variant("plain=[]", []), [], {"run_root": "/a b/c,d's"})
    assert OverridesParser.create().parse_override(argument).value() == "/a b/c,d's"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fst", "variants=fst: must be one of default, fewer_iterations, "),
        ("wide=num_envs=4", "variants=wide=num_envs=4: must be one of "),
        ("1e3=[num_envs=4]", "variants=1e3=[num_envs=4]: its name must be of letters"),
        ("true=[num_envs=4]", "variants=true=[num_envs=4]: its name must be of letters"),
        ("../up=[num_envs=4]", "variants=../up=[num_envs=4]: its name must be of letters"),
        ("a=[num_env=4]", "variants=a=[num_env=4]: num_env: no such key; close to it: num_envs"),
        ("a=[num_envs=0]", "variants=a=[num_envs=0]: num_envs=0: must be a whole number of at least 1"),
        ("a=[seed=2]", "variants=a=[seed=2]: seed: belongs to the suite; see seeds"),
        ("a=[task=cup-catch]", "variants=a=[task=cup-catch]: task: belongs to the suite"),
        ("a=[merge=mean]", "variants=a=[merge=mean]: merge.workers: must be given"),
        (
            "a=[merge=mean,merge.workers=1]",
            "variants=a=[merge=mean,merge.workers=1]: merge.workers: must be",
        ),
    ],
)
def test_a_wrong_variant_is_refused_in_one_line(text, message):
    with pytest.raises(ConfigError) as refusal:
        read_variant(text, [])
    assert str(refusal.value).startswith(message)
    assert len(str(refusal.value).splitlines()) == 1


def test_the_runs_are_interleaved_over_seeds():
    order = [(job.variant, job.seed) for job in plan(variants=("default", "vectorized"), seeds=(5, 2)).jobs]
    assert order == [("default", 5), ("vectorized", 5), ("default", 2), ("vectorized", 2)]


def test_threads_are_stated_and_divided_among_workers():
    variants = ("default", "merge4", "slow=[threads=1]")
    default, merged, slow = plan(variants=variants, seeds=(1,), cores=8).jobs
    assert [argument for argument in default.arguments if "threads" in argument] == ["threads=8"]
    assert [argument for argument in merged.arguments if "threads" in argument] == ["threads=2"]
    assert [argument for argument in slow.arguments if "threads" in argument] == ["threads=1"]
    (few,) = plan(variants="merge4", seeds=(1,), cores=2).jobs
    assert "threads=1" in few.arguments


def test_jobs_know_where_their_runs_are():
    alone, group = plan(variants=("default", "trio=[merge=mean,merge.workers=3]"), seeds=(7,), out="o").jobs
    assert [str(run) for run in alone.runs] == ["o/runs/walker-walk/default/seed-7"]
    root = "o/runs/walker-walk/trio/seed-7"
    assert [str(run) for run in group.runs] == [f"{root}/worker-1", f"{root}/worker-2"]
    assert str(group.log) == "o/logs/trio-seed-7.log"


def test_frequent_rows_are_the_default_and_can_be_changed():
    (usual,) = plan(variants="default", seeds=1).jobs
    (changed,) = plan("log_freq=5", variants="default", seeds=1).jobs
    assert "log_freq=100" in usual.arguments
    assert [argument for argument in changed.arguments if argument.startswith("log_freq")] == ["log_freq=5"]


def test_the_end_of_a_run_is_the_same_command_with_other_steps():
    (job,) = plan("steps=9", "compile=auto", variants="default", seeds=1).jobs
    ending = job.ending_at(1234, compiled=True)
    kept = [text for text in job.arguments if text not in ("steps=9", "compile=auto")]
    assert list(ending) == [*kept, "steps=1234", "compile=true"]
    assert job.ending_at(1, compiled=False)[-1] == "compile=false"


def test_commands_can_be_pasted_into_a_shell():
    (job,) = plan(variants="wide=[num_envs=4]", seeds=1, out="a b").jobs
    assert shlex.split(job.command) == ["python", "scripts/train.py", *job.arguments]


def test_two_variants_of_one_name_are_refused():
    with pytest.raises(ConfigError, match="variants=default: is the name of 2 variants; must be that of one"):
        plan(variants=("default", "default=[num_envs=4]"))
