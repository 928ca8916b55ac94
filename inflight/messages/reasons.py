"""Why an actor leaves, and what is counted for the questions that it had in flight then."""

ACTOR_LOST = "actor lost"
"""It was silent for too long, or another process took its name."""
ACTOR_STOPPED = "actor stopped"
"""It was told to end, or could not go on, and said so."""
RUN_FINISHED = "run finished"
"""The trainer needs no more."""
