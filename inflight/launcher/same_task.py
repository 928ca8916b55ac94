"""Whether a resumed run has the same questions as before."""

from __future__ import annotations

from inflight.config import ConfigError, RunConfig


def require_same_task(before: RunConfig, now: RunConfig) -> None:
    """Raises ConfigError that names the difference: the task, one of its options, or the content of a file.

    An option that names files is compared by their content (TaskConfig.contents), so that files may have moved.
    """
    was = before.task
    task = now.task
    began = f"the run in {now.path} began with"
    for name in ("name", "epochs"):
        if getattr(task, name) != getattr(was, name):
            raise ConfigError(f"task.{name}={getattr(task, name)!r} is not allowed: {began} {getattr(was, name)!r}")
    of_files = was.contents.keys() & task.contents.keys()
    for option in sorted(was.options.keys() | task.options.keys()):
        name = f"task.options.{option}"
        if name not in of_files and task.options.get(option) != was.options.get(option):
            values = [repr(each[option]) if option in each else "its default" for each in (task.options, was.options)]
            raise ConfigError(f"{name}={values[0]} is not allowed: {began} {values[1]}")
    for name in sorted(of_files):
        if task.contents[name] != was.contents[name]:
            given = task.options.get(name.removeprefix("task.options."))
            named = name if given is None else f"{name}={given!r}"
            held = was.contents[name]
            holds = task.contents[name]
            raise ConfigError(f"{named} does not hold what it held: {began} {held}, now it is {holds}")
