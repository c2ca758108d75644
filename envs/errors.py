"""What can go wrong with an environment, told apart by who has to act."""


class TaskError(ValueError):
    """A task that cannot be used as it was named; the message is one line for whoever typed it."""


class RenderError(RuntimeError):
    """No frame could be drawn; the message is one line that says why, and what to install if that would help."""


class EnvironmentCrash(RuntimeError):
    """An environment raised an exception or its process died; the message has its number and the reason."""
