"""Progress bars with rate and remaining time, on the terminal or, without one, as a line every few
seconds."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm


@contextmanager
def progress(total: float | None, label: str, unit: str) -> Iterator["tqdm[None]"]:
    """Yield a progress bar up to `total`, counted in `unit`; log lines are printed above it.
    Without a terminal, print the bar every ten seconds."""
    interactive = sys.stderr.isatty()
    counts = f"{{n_fmt}}/{{total_fmt}} {unit.strip()} [{{elapsed}}<{{remaining}}, {{rate_fmt}}"
    with (
        logging_redirect_tqdm(),
        tqdm(
            total=total,
            desc=label,
            unit=unit,
            unit_scale=True,
            bar_format=f"{{l_bar}}{{bar}}| {counts}{{postfix}}]" if total else None,
            dynamic_ncols=True,
            mininterval=0.2 if interactive else 10.0,
            maxinterval=1.0 if interactive else 20.0,
            leave=True,
            disable=os.environ.get("RANK", "0") != "0",  # only rank 0 shows it
        ) as bar,
    ):
        yield bar
