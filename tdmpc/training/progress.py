"""The one record of how far a run is."""

from dataclasses import dataclass


@dataclass
class Progress:
    """Counters of a run. The trainer alone advances them; everyone else reads.

    Attributes:
        steps: steps, summed over all environments.
        vector_steps: steps of all environments together.
        episodes: training episodes that ended, by termination or truncation.
        failed_episodes: training episodes that were discarded, after a physics error or a value that is not finite.
        updates: updates, those of pretraining included.
        pretraining_updates: updates between the seeding phase and the first planned step.
        eval_rounds: evaluations.
        eval_episodes: episodes of all evaluations.
    """

    steps: int = 0
    vector_steps: int = 0
    episodes: int = 0
    failed_episodes: int = 0
    updates: int = 0
    pretraining_updates: int = 0
    eval_rounds: int = 0
    eval_episodes: int = 0
