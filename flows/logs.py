"""Write warnings of all libraries except Prefect to the terminal, even if logging was set up."""

import logging


class Terminal(logging.StreamHandler):  # type: ignore[type-arg]
    """Write warnings to standard error. Prefect's messages are excluded: its server stores them."""

    def __init__(self) -> None:
        super().__init__()
        self.setLevel(logging.WARNING)
        self.addFilter(lambda record: not record.name.startswith("prefect"))


def log_to_terminal() -> None:
    """Make the root logger write warnings, through one handler; set `flows` and `tasks` to INFO.

    Importing Prefect gives the root logger a handler whose level hides the log of every library, so
    that handler is removed. Winnow's loggers also write to the flow run's log
    (`PREFECT_LOGGING_EXTRA_LOGGERS`). Errors in handlers are not printed."""
    root = logging.getLogger()
    for handler in list(root.handlers):
        if isinstance(handler, Terminal) or type(handler).__module__.startswith("prefect"):
            root.removeHandler(handler)
    root.addHandler(Terminal())
    logging.raiseExceptions = False  # else Prefect's handler prints each unsent record
    for name in ("flows", "tasks"):
        logging.getLogger(name).setLevel(logging.INFO)
