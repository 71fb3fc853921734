"""The table, the ratios that the project is measured by, and the picture."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from sync_contenders.contenders import CONTENDERS
from sync_contenders.workloads import TITLES

#: Model to contender to the measurements of all rounds, or a line that says why there are none.
Results = Mapping[str, Mapping[str, "list[dict[str, Any]] | str"]]

_ALL, _LARGE = tuple(TITLES), ("mlp_large",)
#: What is asked of the project: name, contender, beside which other, of which models.
PAIRS = (
    ("tfdist / PyTorch DDP", "tfdist", "torch", _ALL),
    ("tfdist / PyTorch DDP, both with memory kept", "tfdist", "torch_tuned", _ALL),
    ("tfdist / one worker", "tfdist", "one_device_best", _ALL),
    ("tfdist / one worker, both with memory kept", "tfdist", "one_device_tuned", _ALL),
    ("tfdist / stock as installed", "tfdist", "stock", _LARGE),
    ("tfdist / stock with the same kernels", "tfdist", "stock_best", _LARGE),
    ("ring with bfloat16 / PyTorch DDP", "tfdist_ring_bfloat16", "torch", _LARGE),
    (
        "ring with bfloat16 / PyTorch DDP with bfloat16",
        "tfdist_ring_bfloat16",
        "torch_bfloat16",
        _LARGE,
    ),
    ("accumulation 4 / one worker", "tfdist_accumulate", "one_device_best", _LARGE),
    ("accumulation 4 / one worker with it", "tfdist_accumulate", "one_device_accumulate", _LARGE),
    ("tfdist / Keras on JAX", "tfdist", "jax", _LARGE),
)


def rate(results: Results, model: str, contender: str) -> float | None:
    """Returns the median of the rounds' examples per second, or None where there are none."""
    return _median(results, model, contender, "examples_per_second")


def _one(results: Results, model: str) -> float | None:
    """Returns the rate of one TensorFlow process, which the others are set beside."""
    return rate(results, model, "one_device_best") or rate(results, model, "one_device")


def _median(results: Results, model: str, contender: str, key: str) -> float | None:
    rounds = results.get(model, {}).get(contender)
    if not rounds or isinstance(rounds, str):
        return None
    return statistics.median(one[key] for one in rounds)


def table(results: Results) -> str:
    """Returns a Markdown table for each model."""
    lines = []
    for model, contenders in results.items():
        lines += [
            "",
            f"### {TITLES[model]}{_parameters(contenders)}",
            "",
            "| | examples/s | lowest to highest | / one device | CPU ms a step | end of fit s |"
            " settings |",
            "|---|---:|---:|---:|---:|---:|---|",
        ]
        one = _one(results, model)
        for name, rounds in contenders.items():
            contender = CONTENDERS[name]
            if isinstance(rounds, str):
                lines.append(f"| {contender.title} | {rounds} | | | | | |")
                continue
            rates = [r["examples_per_second"] for r in rounds]
            own = statistics.median(rates)
            relative = f"{own / one:.2f}" if one else ""
            cpu = _median(results, model, name, "cpu_ms_per_step")
            ends = [r["end_seconds"] for r in rounds]
            lines.append(
                f"| {contender.title} | {own:.0f} | {min(rates):.0f} to {max(rates):.0f} "
                f"| {relative} | {cpu:.1f} "
                f"| {statistics.median(ends):.2f}, at most {max(ends):.2f} "
                f"| {contender.described(model)} |"
            )
    return "\n".join(lines)


def _parameters(contenders: Mapping[str, Any]) -> str:
    counts = {
        r["parameters"]
        for rounds in contenders.values()
        if not isinstance(rounds, str)
        for r in rounds
    }
    text = ", ".join(f"{count:,}" for count in sorted(counts))
    warning = "  WARNING: they differ" if len(counts) > 1 else ""
    return f" ({text} parameters{warning})" if counts else ""


def ratios(results: Results) -> dict[str, float]:
    """Returns the ratios that were measured, by name."""
    rates = {
        f"{name}, {TITLES[model]}": (rate(results, model, ours), rate(results, model, other))
        for name, ours, other, models in PAIRS
        for model in models
    }
    found = {name: ours / other for name, (ours, other) in rates.items() if ours and other}
    for model in results:
        end = _median(results, model, "tfdist", "end_seconds")
        if end is not None:
            found[f"end of fit in seconds, tfdist, {TITLES[model]}"] = end
    return found


def picture(results: Results, file: str) -> None:
    """Draws examples per second relative to one device, a panel for each model."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        1, len(results), figsize=(1 + 4.6 * len(results), 5), squeeze=False, layout="constrained"
    )
    colours = {
        "keras": "#9aa0a6",
        "tfdist": "#1a73e8",
        "tf_keras": "#f29900",
        "torch": "#d93025",
        "jax": "#188038",
    }
    for index, (panel, model) in enumerate(zip(panels[0], results, strict=True)):
        one = _one(results, model)
        names = [n for n, rounds in results[model].items() if not isinstance(rounds, str)]
        for row, name in enumerate(names):
            own = (rate(results, model, name) or 0.0) / (one or 1.0)
            panel.barh(row, own, color=colours[CONTENDERS[name].stack])
            panel.text(own, row, f" {own:.2f}", va="center", fontsize=8)
        panel.set_yticks(
            range(len(names)), [CONTENDERS[n].title for n in names] if not index else []
        )
        panel.invert_yaxis()
        panel.margins(x=0.15)
        panel.axvline(1, color="black", linewidth=0.5)
        panel.set_title(TITLES[model])
        panel.set_xlabel("examples/s" + (", one TensorFlow process = 1" if one else ""))
    figure.savefig(file, dpi=110)
