"""Plans and recommendations as text: what the command line prints."""

from __future__ import annotations

import io

from rich.console import Console

from toolkit.planning.plan import Plan
from toolkit.planning.recommend import Recommendation
from toolkit.planning.render.plans import show_plan
from toolkit.planning.render.recommendations import recommendation_lines


def as_text(answer: Plan | Recommendation) -> str:
    """Return the lines of `toolkit plan` or `toolkit recommend`, without colours."""
    if isinstance(answer, Recommendation):
        return "\n".join(recommendation_lines(answer))
    page = io.StringIO()
    # In a notebook, rich would otherwise display the page in place of writing it.
    show_plan(answer, Console(file=page, color_system=None, force_jupyter=False))
    return page.getvalue().rstrip("\n")
