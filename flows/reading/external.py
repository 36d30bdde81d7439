"""Results of other trainers, in the report."""

from collections.abc import Mapping
from typing import Any

from tasks.common import params
from tasks.common.layout import Layout
from tasks.report.external import write_external
from tasks.report.settings import ReportSettings


def show(layout: Layout, values: Mapping[str, Any]) -> str:
    """Add the imports to the report's page, if there is one, and return where they are shown.
    Raise ArtifactError for a damaged import."""
    page = layout.report / "index.html"
    if not page.exists():
        return "the report of the next `winnow run` shows it"
    write_external(layout, params.section(values, "report", ReportSettings).num_bootstrap)
    return f"the report shows it: {page}"
