"""A run as a picture: a bar for each start of each task, faults, commits, resumptions. SVG."""

from __future__ import annotations

from html import escape

from tfdist.measure.drill import Result

_LEFT, _WIDTH, _RIGHT = 110, 840, 20
_ROW, _TOP = 30, 62
_BAR, _FAULT, _COMMIT, _RESUME = "#4477aa", "#cc3311", "#228833", "#aa7700"


def timeline(result: Result) -> str:
    """Returns the run with faults as an `<svg>` element.

    Args:
        result: Of a drill.
    """
    run = result.faulty
    total = max(run.end - run.begin, 0.001)
    tasks = sorted({s.task for s in run.starts}, key=lambda t: (t.split()[0], int(t.split()[1])))
    bottom = _TOP + _ROW * len(tasks)
    height = bottom + 78

    def x(at: float) -> float:
        return _LEFT + _WIDTH * min(max(at - run.begin, 0.0), total) / total

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_LEFT + _WIDTH + _RIGHT} {height}" '
        'role="img" font-family="sans-serif" font-size="12">'
    ]
    for task in tasks:
        y = _TOP + _ROW * tasks.index(task)
        parts.append(f'<text x="{_LEFT - 10}" y="{y + 17}" text-anchor="end">{escape(task)}</text>')
        for start in run.starts:
            if start.task != task:
                continue
            end = run.end if start.end is None else start.end
            width = max(x(end) - x(start.begin), 1.0)
            title = (
                f"{task}, start {start.incarnation}, process {start.pid}: "
                f"{start.begin - run.begin:.1f} s to {end - run.begin:.1f} s"
            )
            parts.append(
                f'<rect x="{x(start.begin):.1f}" y="{y + 4}" width="{width:.1f}" height="20" '
                f'rx="3" fill="{_BAR}"><title>{escape(title)}</title></rect>'
            )
            if width > 14:
                parts.append(
                    f'<text x="{x(start.begin) + 5:.1f}" y="{y + 18}" fill="white">'
                    f"{start.incarnation}</text>"
                )
    for number, each in enumerate(result.struck):
        at = x(each.time)
        level = 14 + 16 * (number % 3)
        anchor = "end" if at > _LEFT + _WIDTH - 120 else "start"
        shift = -4 if anchor == "end" else 4
        title = f"step {each.step}, {each.time - run.begin:.1f} s: {each.detail}"
        parts.append(
            f'<g fill="{_FAULT}"><line x1="{at:.1f}" x2="{at:.1f}" y1="{level - 8}" y2="{bottom}" '
            f'stroke="{_FAULT}" stroke-width="1.5"/><text x="{at + shift:.1f}" y="{level}" '
            f'text-anchor="{anchor}">{escape(each.kind)} @{each.step}</text>'
            f"<title>{escape(title)}</title></g>"
        )
        for task in each.tasks:
            if task in tasks:
                y = _TOP + _ROW * tasks.index(task) + 14
                parts.append(
                    f'<path d="M{at - 5:.1f} {y - 5} l10 10 m0 -10 l-10 10" stroke="{_FAULT}" '
                    'stroke-width="2.5" fill="none"/>'
                )
    for when, step, _ in run.commits:
        parts.append(
            f'<circle cx="{x(when):.1f}" cy="{bottom + 12}" r="3" fill="{_COMMIT}">'
            f"<title>commit of step {step}, {when - run.begin:.1f} s</title></circle>"
        )
    for back in result.resumptions:
        at = x(back.time)
        is_late = at > _LEFT + _WIDTH - 70
        anchor, shift = ("end", -7) if is_late else ("start", 7)
        parts.append(
            f'<g fill="{_RESUME}"><path d="M{at:.1f} {bottom + 22} l-5 10 h10 z"/>'
            f'<text x="{at + shift:.1f}" y="{bottom + 33}" text-anchor="{anchor}">'
            f"from {back.step}</text>"
            f"<title>goes on from step {back.step}, {back.lost} steps are made again</title></g>"
        )
    for row, text, colour in ((12, "commits", _COMMIT), (28, "resumed", _RESUME)):
        parts.append(
            f'<text x="{_LEFT - 10}" y="{bottom + row + 4}" text-anchor="end" fill="{colour}">'
            f"{text}</text>"
        )
    axis = bottom + 46
    parts.append(
        f'<line x1="{_LEFT}" x2="{_LEFT + _WIDTH}" y1="{axis}" y2="{axis}" stroke="#888"/>'
    )
    for second in _ticks(total):
        at = x(run.begin + second)
        parts.append(
            f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{axis}" y2="{axis + 5}" stroke="#888"/>'
            f'<text x="{at:.1f}" y="{axis + 19}" text-anchor="middle">{second:g} s</text>'
        )
    parts.append("</svg>")
    return "\n".join(parts)


def _ticks(total: float) -> list[float]:
    """Returns round numbers from 0 to `total`, ten or so."""
    size = 0.1
    while total / size > 12:
        size *= 2.5 if str(size).lstrip("0.").startswith("2") else 2
    return [size * n for n in range(int(total / size) + 1)]
