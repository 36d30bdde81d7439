"""Warnings of every library reach the terminal, also where logging was set up before."""

import logging

FORMAT = "%(message)s"


class Terminal(logging.StreamHandler):  # type: ignore[type-arg]
    """Warnings on standard error. What Prefect has to say, its server keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.setLevel(logging.WARNING)
        self.setFormatter(logging.Formatter(FORMAT))
        self.addFilter(lambda record: not record.name.startswith("prefect"))


def speak() -> None:
    """Have the root logger write warnings, through one handler of ours.

    Importing Prefect puts a handler of its own on the root logger, at the level that hides its log
    from the terminal, and with it everybody else's. Our loggers also go to the log of the flow run
    (`PREFECT_LOGGING_EXTRA_LOGGERS`)."""
    root = logging.getLogger()
    for handler in list(root.handlers):
        if isinstance(handler, Terminal) or type(handler).__module__.startswith("prefect"):
            root.removeHandler(handler)
    root.addHandler(Terminal())
    logging.raiseExceptions = False  # Prefect's handler would print each log that it cannot send
    for name in ("flows", "tasks"):
        logging.getLogger(name).setLevel(logging.INFO)
