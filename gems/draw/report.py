"""The page at the end of a run: what came out, how it went, and one step as it was measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape

from gems.draw.curves import Points, curves
from gems.draw.html import html
from gems.plans.plan import Plan
from gems.predict.timeline import Timeline


def report_page(
    title: str,
    timeline: Timeline,
    plan: Plan,
    facts: Mapping[str, str],
    charts: Iterable[tuple[str, Mapping[str, Points]]],
    options: str,
    pictures: Iterable[tuple[str, str]] = (),
) -> str:
    """One file that needs no other.

    facts      what came out, by name
    charts     titles and curves
    options    as they were in force
    pictures   captions and data: URLs
    """
    rows = "".join(
        f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in facts.items()
    )
    drawn = "".join(curves(name, series) for name, series in charts)
    shown = "".join(
        f'<figure><img alt="{escape(caption)}" src="{url}"><figcaption>{escape(caption)}'
        "</figcaption></figure>"
        for caption, url in pictures
    )
    above = (
        f'<table class="facts">{rows}</table>\n<div class="charts">{drawn}</div>\n{shown}'
        f"<details><summary>Options</summary><pre>{escape(options)}</pre></details>\n"
    )
    return html(timeline, title, plan, above=above)
