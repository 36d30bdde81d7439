"""Make or fetch the initial policy."""

import math
from typing import Any

from tasks.common.layout import Layout
from tasks.common.sealed import write_sealed
from tasks.policy.card import write_copy, write_external, write_own
from tasks.policy.settings import Policy
from tasks.policy.source import resolve
from tasks.policy.tiny import make


def provide(
    settings: Policy, layout: Layout, *, copy: bool = False, every_seconds: float = math.inf
) -> dict[str, Any]:
    """Train the tiny policy, or find the external one, into `policy/`, and write its card,
    `policy.json`; returns the card. With `copy` the external one's weights are there, too. What a
    killed training had after so many seconds is gone on with, and deleted when it is done."""
    card = build(settings, layout, copy=copy, every_seconds=every_seconds)
    write_sealed(layout.policy_card, card)
    layout.unfinished_policy.unlink(missing_ok=True)
    return card


def build(settings: Policy, layout: Layout, *, copy: bool, every_seconds: float) -> dict[str, Any]:
    """Write the tiny policy, or what describes the external one, to the policy's folder. Return its
    card."""
    if settings.source == "tiny":
        made = make(settings.tiny, layout.unfinished_policy, every_seconds)
        return write_own(*made, layout.policy)
    location = resolve(settings.source, layout.root / "policy_download", settings.trust_remote_code)
    write = write_copy if copy else write_external
    return write(settings.source, location, settings.trust_remote_code, layout.policy)
