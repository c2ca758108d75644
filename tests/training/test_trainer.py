import math
import time

import numpy as np
import pytest
import torch

from envs import EnvironmentCrash
from tdmpc.replay import EmptyReplayError
from tdmpc.seeding import Seeds, Stream
from tdmpc.telemetry.recorder import NonFiniteError
from tdmpc.training.collector import UnexpectedTerminationError
from tdmpc.training.saver import NoSaver
from tdmpc.training.schedule import Every
from tests.training.builders import logged_truth, toy_trainer


def episodes_of(truth, ids):
    """Group the steps that these toys logged by (id, episode), the first entry being the reset."""
    episodes = {}
    for entry in truth:
        if entry["id"] in ids:
            episodes.setdefault((entry["id"], entry["episode"]), []).append(entry)
    return episodes


def training_ids(seed, num_envs):
    seeds = Seeds(seed)
    return [seeds.integer(Stream.TRAIN_EPISODE, env, 0) % 2**20 for env in range(num_envs)]


def stored_rows(replay):
    """Return every row that the replay holds, in the order of writing, one list an environment."""
    size, rows = replay._ring_size, replay._rows
    return [
        [
            (rows["obs"][i].tolist(), rows["action"][i].tolist(), float(rows["reward"][i]), bool(rows["terminated"][i]))
            for i in range(env * size, env * size + int(replay._filled[env]))
        ]
        for env in range(len(replay._filled))
    ]


@pytest.mark.parametrize(
    ("num_envs", "steps_per_update"), [(1, 1), (3, 2), (3, 4), (8, 5), (4, 4), (2, 0.5), (5, 7), (1, 0.3)]
)
def test_updates_are_neither_lost_nor_added(tmp_path, num_envs, steps_per_update):
    with toy_trainer(tmp_path, num_envs=num_envs, steps_per_update=steps_per_update, steps=101) as (trainer, _):
        progress = trainer.train()
    seeding_ended = math.ceil(40 / num_envs) * num_envs
    assert progress.steps == math.ceil(101 / num_envs) * num_envs
    assert progress.pretraining_updates == int(40 / steps_per_update)
    after_seeding = progress.updates - progress.pretraining_updates
    assert after_seeding == math.floor(round((progress.steps - seeding_ended) / steps_per_update, 9))
    assert trainer.agent.lifetime.updates == progress.updates
    assert trainer.agent.lifetime.steps == progress.steps


def test_replay_holds_what_the_environments_did(tmp_path):
    with toy_trainer(tmp_path, num_envs=3, steps_per_update=4, steps=300) as (trainer, _):
        trainer.train()
        stored = stored_rows(trainer.replay)
    ids = training_ids(seed=1, num_envs=3)
    expected = []
    for entry in logged_truth(tmp_path):
        if entry["id"] in ids:
            obs = (entry["id"], entry["episode"], entry["t"])
            expected.append((obs, np.float32(entry.get("reward", 0)).item(), entry.get("terminated", False)))
    flat = [(tuple(obs), reward, terminated) for env in stored for obs, _, reward, terminated in env]
    assert len(flat) == len(set(flat))
    assert sorted(flat) == sorted(expected)


def test_stored_actions_are_those_that_the_environments_got(tmp_path):
    with toy_trainer(tmp_path, num_envs=2, steps=120) as (trainer, _):
        trainer.train()
        stored = stored_rows(trainer.replay)
    # The toys' actions are in [-2, 4], the agent's in [-1, 1].
    got = {(e["id"], e["episode"], e["t"]): e.get("action") for e in logged_truth(tmp_path)}
    for obs, action, _, _ in (row for env in stored for row in env):
        if obs[2] > 0:
            assert np.allclose(got[tuple(obs)], 1 + 3 * np.array(action), atol=1e-5)


def test_logged_returns_and_lengths_are_the_truth(tmp_path):
    with toy_trainer(tmp_path, num_envs=3, steps=400, log_freq=1) as (trainer, sink):
        progress = trainer.train()
    finished = [
        steps
        for steps in episodes_of(logged_truth(tmp_path), training_ids(1, 3)).values()
        if steps[-1].get("terminated") or steps[-1].get("truncated")
    ]
    assert progress.episodes == len(finished) > 20
    rows = [row for row in sink.of("train") if "train/episode_reward" in row]
    # A row is the mean over the episodes that ended in its window, here a single vector step.
    ended_together = {}
    ids = training_ids(1, 3)
    clock = dict.fromkeys(ids, 0)
    for (env_id, _), steps in sorted(episodes_of(logged_truth(tmp_path), ids).items()):
        clock[env_id] += len(steps) - 1
        if steps in finished:
            outcome = (sum(s["reward"] for s in steps[1:]), len(steps) - 1)
            ended_together.setdefault(clock[env_id] * 3, []).append(outcome)
    assert [row["step"] for row in rows] == sorted(ended_together)
    for row in rows:
        returns, lengths = zip(*ended_together[row["step"]], strict=True)
        assert row["train/episode_reward"] == pytest.approx(np.mean(returns), abs=1e-3)
        assert row["train/episode_length"] == pytest.approx(np.mean(lengths))


def test_evaluations_are_at_every_point_once_and_at_the_end(tmp_path):
    with toy_trainer(tmp_path, num_envs=3, steps=50, eval_freq=10) as (trainer, sink):
        trainer.train()
    assert [row["step"] for row in sink.of("eval")] == [0, 12, 21, 30, 42, 51]


def test_an_evaluation_point_at_the_end_is_evaluated_once(tmp_path):
    with toy_trainer(tmp_path, num_envs=2, steps=20, eval_freq=10) as (trainer, sink):
        trainer.train()
    assert [row["step"] for row in sink.of("eval")] == [0, 10, 20]


def weights_after(run, **keys):
    with toy_trainer(run, **({"num_envs": 3, "steps_per_update": 4, "steps": 120} | keys)) as (trainer, _):
        trainer.train()
        return trainer.agent.model.state_dict()


def same(a, b):
    return all(torch.equal(a[key], b[key]) for key in a)


def test_the_same_command_gives_the_same_bits(tmp_path):
    first = weights_after(tmp_path / "a")
    assert same(first, weights_after(tmp_path / "b"))
    assert not same(first, weights_after(tmp_path / "c", seed=2))


def test_evaluating_and_logging_do_not_change_training(tmp_path):
    rarely = weights_after(tmp_path / "a")
    assert same(rarely, weights_after(tmp_path / "b", eval_freq=7, eval_episodes=5, log_freq=3))


def test_environments_in_processes_of_their_own_give_the_same_bits(tmp_path):
    assert same(weights_after(tmp_path / "a", vector="sync"), weights_after(tmp_path / "b", vector="async"))


def test_a_termination_that_the_agent_was_not_told_of_says_what_to_set(tmp_path):
    with (
        toy_trainer(tmp_path, num_envs=2, steps=200, episodic=False) as (trainer, _),
        pytest.raises(UnexpectedTerminationError, match=r"^episodic=false: .* set episodic=true"),
    ):
        trainer.train()


@pytest.mark.parametrize("trouble", ["nan_obs", "nan_reward", "physics"])
def test_a_failed_episode_is_dropped_and_counted_and_training_goes_on(tmp_path, trouble):
    bad = training_ids(1, 3)[1]
    env = {"trouble": trouble, "trouble_at": 2, "trouble_id": bad}
    with toy_trainer(tmp_path, num_envs=3, steps=200, env=env) as (trainer, sink):
        progress = trainer.train()
        stored = stored_rows(trainer.replay)
    assert progress.failed_episodes == 1
    assert progress.steps == 201
    assert not [row for row in stored[1] if row[0][1] == 0]
    assert {row[0][1] for row in stored[0]} >= {0, 1}
    assert all(np.isfinite(list(row.values())[1:]).all() for row in sink.rows)


def test_episodes_shorter_than_a_slice_stop_the_run_with_the_key(tmp_path):
    env = {"min_length": 1, "max_length": 2}
    with (
        toy_trainer(tmp_path, num_envs=2, steps=200, env=env) as (trainer, _),
        pytest.raises(EmptyReplayError, match=r"^horizon=3"),
    ):
        trainer.train()


def test_where_nothing_can_be_sampled_discarded_episodes_are_named_too(tmp_path):
    env = {"min_length": 1, "max_length": 2, "trouble": "physics", "trouble_at": 1}
    with (
        toy_trainer(tmp_path, num_envs=2, steps=200, env=env) as (trainer, _),
        pytest.raises(EmptyReplayError, match=r"^horizon=3.*; 2 episodes were discarded"),
    ):
        trainer.train()


def test_every_environment_of_every_seed_starts_differently(tmp_path):
    starts = []
    for seed in range(4):
        keys = {"num_envs": 4, "steps": 8, "seed": seed, "eval_episodes": 4, "seed_steps": 1000}
        with toy_trainer(tmp_path / str(seed), "gym:Pendulum-v1", **keys) as (trainer, _):
            for envs in (trainer.collector.envs, trainer.evaluator.envs):
                reset = envs.reset
                envs.reset = lambda mask, seeds, reset=reset: starts.append(reset(mask, seeds)) or starts[-1]
            trainer.train()
    # One reset of the training environments, and those of the evaluations at the start and at the end.
    assert [len(obs) for obs in starts] == [4, 4, 4] * 4
    assert len({tuple(obs) for group in starts for obs in group}) == 4 * (4 + 4 + 4)


def test_the_agent_is_told_where_episodes_begin(tmp_path):
    calls = []
    with toy_trainer(tmp_path, num_envs=3, steps=300) as (trainer, _):
        act = trainer.agent.act

        def spy(obs, state, first, explore):
            calls.append((obs.clone(), first.clone(), explore))
            return act(obs, state, first, explore)

        trainer.agent.act = spy
        trainer.train()
    training = [call for call in calls if call[2]]
    assert len(training) > 50
    for obs, first, _ in training:
        assert torch.equal(first, obs[:, 2] == 0)
    assert any(first.any() and not first.all() for _, first, _ in training)


def test_an_update_sees_all_but_the_step_under_way(tmp_path):
    """Also in this process, so that all modes of stepping learn from the same data."""
    seen = []
    with toy_trainer(tmp_path, num_envs=3, steps_per_update=3, steps=90) as (trainer, _):
        trainer.should_evaluate = Every(10**9, start=10**9)
        update, progress = trainer.agent.update, trainer.progress

        def spy(batch):
            begun = int(trainer.collector._episodes_begun.sum())
            seen.append((progress.total.steps, len(trainer.replay) - begun, trainer.collector.envs._stepping))
            return update(batch)

        trainer.agent.update = spy
        trainer.train()
    pretraining, training = seen[:13], seen[13:]
    assert all((steps, stored, stepping) == (42, 42, False) for steps, stored, stepping in pretraining)
    assert [steps for steps, _, _ in training] == list(range(42, 90, 3))
    assert all(stored == steps and stepping for steps, stored, stepping in training)


def test_a_dead_environment_is_noticed_between_updates(tmp_path):
    with toy_trainer(tmp_path, num_envs=2, steps=100, vector="async") as (trainer, _):
        update = trainer.agent.update

        def kill(batch):
            trainer.agent.update = update
            process = trainer.collector.envs._backend._processes[1]
            process.kill()
            process.join()
            return update(batch)

        trainer.agent.update = kill
        with pytest.raises(EnvironmentCrash, match="environment 1: its process was killed by SIGKILL"):
            trainer.train()
        assert trainer.progress.total.updates == 1


def test_a_loss_that_is_not_finite_stops_the_run_before_it_is_saved(tmp_path):
    saved = []

    class EverySixty(NoSaver):
        def due(self, step):
            return step % 60 == 0

        def save(self, trainer):
            saved.append(trainer.step)

    with toy_trainer(tmp_path, num_envs=2, steps=200, log_freq=1000) as (trainer, _):
        trainer.saver = EverySixty()
        update = trainer.agent.update

        def spoil(batch):
            metrics = update(batch)
            if trainer.progress.total.updates == 110:
                metrics["reward_loss"] = torch.tensor(torch.nan)
            return metrics

        trainer.agent.update = spoil
        with pytest.raises(NonFiniteError, match=r"train/reward_loss is nan in the window that ends at step 120"):
            trainer.train()
    assert saved == [60]


def test_a_loss_that_is_not_finite_is_named_also_where_it_breaks_something_else_first(tmp_path):
    with toy_trainer(tmp_path, num_envs=2, steps=200, log_freq=1000) as (trainer, _):
        update = trainer.agent.update

        def spoil(batch):
            metrics = update(batch)
            with torch.no_grad():
                for parameter in trainer.agent.model.parameters():
                    parameter.fill_(torch.nan)
            return metrics

        trainer.agent.update = spoil
        with pytest.raises(NonFiniteError, match=r"train/\w+ is nan"):
            trainer.train()


def test_the_loop_uses_the_seeds_of_these_streams(tmp_path):
    with toy_trainer(tmp_path, num_envs=4, steps=60) as (trainer, _):
        trainer.train()
    resets = {(e["id"], e["episode"]): e["seed"] for e in logged_truth(tmp_path) if "seed" in e}
    for env, env_id in enumerate(training_ids(1, 4)):
        for episode in (0, 1):
            assert resets[env_id, episode] == Seeds(1).integer(Stream.TRAIN_EPISODE, env, episode)


def test_the_seeding_phase_acts_at_random_and_does_not_update(tmp_path):
    with toy_trainer(tmp_path, num_envs=2, steps=40, seed_steps=40) as (trainer, sink):
        progress = trainer.train()
    assert progress.updates == 0
    assert sink.of("pretrain") == []
    actions = np.array([e["action"] for e in logged_truth(tmp_path) if "action" in e and e["id"] in training_ids(1, 2)])
    assert actions.min() < -1.5
    assert actions.max() > 3.5


def test_the_sections_of_a_run_close_its_time_budget(tmp_path):
    with toy_trainer(tmp_path, num_envs=3, steps=300, log_freq=60) as (trainer, sink):
        began = time.perf_counter()
        trainer.train()
        wall = time.perf_counter() - began
        total = trainer.timers.total()
    assert sum(s.self_s for s in total.sections.values()) + total.other_s == pytest.approx(total.wall_s, rel=1e-9)
    assert total.wall_s >= wall
    for row in sink.of("train"):
        shares = {name: value for name, value in row.items() if name.count("/") == 2 and name.endswith("/share")}
        assert sum(shares.values()) == pytest.approx(1, abs=0.01)
    assert {"act", "act/plan", "env/step", "env/wait", "replay/add", "replay/sample", "update/model", "update/policy",
            "update/target", "pretrain", "evaluate", "save", "log"} <= set(total.sections)  # fmt: skip
    elapsed = [row["elapsed_s"] for row in sink.rows]
    assert elapsed == sorted(elapsed)
    last = sink.of("train")[-1]
    assert last["frames"] == last["step"] == 300
    assert last["progress/eta_s"] == 0
    assert last["progress/lifetime_updates"] == last["updates"] == trainer.progress.total.updates


def test_the_eta_is_known_from_the_first_step_after_pretraining_and_0_at_the_end(tmp_path):
    with toy_trainer(tmp_path, num_envs=2, steps=100, log_freq=1000) as (trainer, sink):
        trainer.train()
    etas = [eta for step, eta in zip(sink.steps, sink.etas, strict=True) if step > 40]
    assert all(eta > 0 for eta in etas[:-1])
    assert etas[-1] == 0


def test_the_rows_of_a_run_cover_all_of_its_time_but_the_last_save(tmp_path):
    with toy_trainer(tmp_path, num_envs=3, steps=300, log_freq=60) as (trainer, sink):
        trainer.train()
        total = trainer.timers.total()
    rows = [*sink.of("pretrain"), *sink.of("train")]
    assert [row["step"] for row in sink.of("train")] == [60, 120, 180, 240, 300]
    assert sum(row["time/evaluate/total_s"] for row in rows if "time/evaluate/total_s" in row) == pytest.approx(
        total.sections["evaluate"].total_s
    )
    assert sum(row["time/other/total_s"] for row in rows) == pytest.approx(total.other_s, abs=0.05)
    assert trainer.progress.view().total_elapsed_s == pytest.approx(trainer.timers.total().wall_s, abs=0.05)
    assert rows[-1]["elapsed_s"] == sink.rows[-1]["elapsed_s"]
    assert rows[-1]["elapsed_s"] == pytest.approx(total.wall_s - total.sections["save"].total_s, abs=0.05)
