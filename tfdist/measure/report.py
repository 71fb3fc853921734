"""The report of a drill: one page, which needs nothing else, and the same as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable
from html import escape
from pathlib import Path

from tfdist.measure.drill import Result
from tfdist.measure.drill import as_json
from tfdist.measure.timeline import timeline

HTML, JSON = "report.html", "report.json"

_STYLE = """
body { font: 14px/1.4 sans-serif; max-width: 62em; margin: 2em auto; padding: 0 1em; color: #222 }
h1 { font-size: 1.5em } h2 { font-size: 1.1em; margin: 1.4em 0 .4em }
table { border-collapse: collapse; width: 100% }
td, th { text-align: left; padding: .2em .8em .2em 0; border-bottom: 1px solid #ddd;
  vertical-align: top }
td:not(:last-child), th { white-space: nowrap }
.yes { color: #117733; font-weight: bold } .no { color: #cc3311; font-weight: bold }
.info { color: #777 } svg { width: 100% } pre { overflow-x: auto; background: #f6f6f6;
  padding: .6em; font-size: 12px }
"""


def write(result: Result, folder: Path) -> None:
    """Writes `report.html` and `report.json`.

    Args:
        result: Of a drill.
        folder: Where to.
    """
    text = json.dumps(as_json(result), indent=1)
    (folder / JSON).write_text(text + "\n", encoding="utf-8")
    (folder / HTML).write_text(page(result), encoding="utf-8")


def lines(result: Result) -> list[str]:
    """Returns the verdict for a terminal.

    Args:
        result: Of a drill.
    """
    words = [f"{_word(c.ok, c.counts):<8} {c.name:<26} {c.detail}" for c in result.checks]
    verdict = "recovery was exact" if result.is_exact else "recovery was NOT exact"
    return [*words, *result.reasons, verdict]


def page(result: Result) -> str:
    """Returns the report as an HTML page.

    Args:
        result: Of a drill.
    """
    told = as_json(result)
    job, seconds = result.job, told["seconds"]
    verdict = "Recovery was exact" if result.is_exact else "Recovery was not exact"
    style = "yes" if result.is_exact else "no"
    command = " ".join([job.script, *job.args])
    tasks = _several(job.workers, "worker")
    tasks += f", {_several(job.ps, 'parameter server')}" if job.ps else ""
    lost = told["steps_lost"]
    checks = (
        (
            f'<span class="{_class(c.ok, c.counts)}">{_word(c.ok, c.counts)}</span>',
            escape(c.name),
            escape(c.detail),
        )
        for c in result.checks
    )
    struck = (
        (f"{each['time']:.1f} s", str(each["step"]), escape(each["kind"]), escape(each["detail"]))
        for each in told["faults"]
    )
    skipped = (("", "", escape(k), f"left out: {escape(v)}") for k, v in result.skipped.items())
    back = (
        (f"{each['time']:.1f} s", str(each["step"]), str(each["lost"]))
        for each in told["resumptions"]
    )
    rows = ((escape(where), str(mine), str(theirs)) for where, mine, theirs in result.rows)
    said = "\n".join(f"{at:8.1f} s  {text}" for at, text in told["launcher"])
    reasons = "".join(f"<p>{escape(reason)}</p>" for reason in result.reasons)
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>Recovery drill: {escape(command)}</title>
<style>{_STYLE}</style></head><body>
<h1>Recovery drill: <span class="{style}">{verdict}</span></h1>
<p><code>{escape(command)}</code> on {tasks}, {told["date"]}. In peace
{seconds["peace"]:.1f} s; with faults {seconds["faults"]:.1f} s,
{_several(len(result.resumptions), "resumption")}, {_several(lost, "step")} made again.</p>
{reasons}
<h2>What was compared (in peace / with faults)</h2>
{_table(("", "", ""), checks)}
<h2>The run with faults</h2>
{timeline(result)}
<h2>Faults</h2>
{_table(("when", "held at step", "fault", "what was done"), [*struck, *skipped])}
<h2>Resumptions</h2>
{_table(("when", "from step", "steps made again"), back)}
<h2>Rows trained on</h2>
{_table(("", "in peace", "with faults"), rows)}
<h2>What the launcher said, and tasks about commits</h2>
<pre>{escape(said)}</pre>
</body></html>
"""


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    titles = "".join(f"<th>{title}</th>" for title in head)
    body = "".join("<tr>" + "".join(f"<td>{c}</td>" for c in row) + "</tr>" for row in rows)
    top = f"<tr>{titles}</tr>" if any(head) else ""
    return f"<table>{top}{body}</table>" if body else "<p>None.</p>"


def _several(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _word(ok: bool, counts: bool) -> str:
    if ok:
        return "same"
    return "DIFFERS" if counts else "differs"


def _class(ok: bool, counts: bool) -> str:
    if ok:
        return "yes"
    return "no" if counts else "info"
