"""What all environments have in common, wherever they come from."""

import math
from typing import Any

import gymnasium
import numpy as np

RESET_ATTEMPTS = 5

# By name: an environment that raises one of these has imported it, all others need not.
_PHYSICS_ERRORS = frozenset({"dm_control.rl.control.PhysicsError", "mujoco.FatalError"})

Step = tuple[np.ndarray, float, bool, bool, dict[str, Any]]


class FailureGuard(gymnasium.Wrapper):
    """End an episode whose simulation failed, instead of passing on what it says.

    A failure is a physics error of dm_control or MuJoCo, or an observation or reward that is not finite.
    The failed step repeats the last valid observation with reward 0, `terminated=False`, `truncated=True` and
    `info={"failed": True, "reason": ...}`; any other step has `"failed": False` in its info. Every other
    exception is a crash and propagates.
    """

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict]:
        """Start an episode; a start state that fails is replaced by that of a seed derived from `seed`.

        Raises:
            RuntimeError: If `RESET_ATTEMPTS` start states in a row fail.
        """
        reason = ""
        for attempt in range(RESET_ATTEMPTS):
            try:
                obs, info = self.env.reset(seed=_derived_seed(seed, attempt), options=options)
            except Exception as error:
                reason = _physics_failure(error)
                continue
            if np.isfinite(obs).all():
                self._last_valid_obs = obs
                return obs, info
            reason = "the observation is not finite"
        raise RuntimeError(f"reset failed {RESET_ATTEMPTS} times from seed {seed}, at last: {reason}")

    def step(self, action: np.ndarray) -> Step:
        """Step the environment; see the class for what a failed step returns."""
        try:
            obs, reward, terminated, truncated, info = self.env.step(action)
        except Exception as error:
            return self._failed(_physics_failure(error))
        reward = float(reward)
        if not math.isfinite(reward):
            return self._failed(f"the reward is {reward}")
        if not np.isfinite(obs).all():
            return self._failed("the observation is not finite")
        self._last_valid_obs = obs
        return obs, reward, terminated, truncated, {**info, "failed": False}

    def _failed(self, reason: str) -> Step:
        return self._last_valid_obs, 0.0, False, True, {"failed": True, "reason": reason}


def _physics_failure(error: Exception) -> str:
    """Describe a physics error; raise any other."""
    names = {f"{cls.__module__}.{cls.__qualname__}" for cls in type(error).__mro__}
    if names.isdisjoint(_PHYSICS_ERRORS):
        raise error
    return f"{type(error).__name__}: {error}"


def _derived_seed(seed: int | None, attempt: int) -> int | None:
    if seed is None or attempt == 0:
        return seed
    return int(np.random.SeedSequence([seed, attempt]).generate_state(1)[0])
