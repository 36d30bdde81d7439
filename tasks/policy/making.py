"""Make, fetch or keep the initial policy, and record what it was made from."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.common.artifacts import Layout
from tasks.common.files import read_json, write_json
from tasks.policy import provenance
from tasks.policy.card import write_external, write_own
from tasks.policy.source import resolve
from tasks.policy.tiny import Tiny, make

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Policy:
    """The section `policy`; `tiny` is used when the source is `tiny`."""

    source: str
    trust_remote_code: bool
    tiny: Tiny


def provide(settings: Policy, raw: dict[str, Any], layout: Layout) -> dict[str, Any]:
    """Bring `policy/`, `policy.json` and `policy_source.json` up to date. Return the card. `raw` is
    the section as it is in params.yaml."""
    now = provenance.made_from(raw, Path(__file__).parent)
    if provenance.only_comments_changed(now, provenance.recorded(layout)):
        logger.info("only comments changed: policy kept")
        card: dict[str, Any] = read_json(layout.policy_card)
    else:
        card = build(settings, layout)
        write_json(layout.policy_card, card)
    write_json(provenance.path(layout), {"made_from": now})
    return card


def build(settings: Policy, layout: Layout) -> dict[str, Any]:
    """Write the tiny policy, or what describes the external one, to the policy's folder. Return its
    card."""
    if settings.source == "tiny":
        return write_own(*make(settings.tiny), layout.policy)
    location = resolve(settings.source, layout.root / "policy_download", settings.trust_remote_code)
    return write_external(settings.source, location, settings.trust_remote_code, layout.policy)
