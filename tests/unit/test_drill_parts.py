"""Faults, evidence and the report of a drill, without running one."""

from __future__ import annotations

import json
from html.parser import HTMLParser

import numpy as np
import pytest

from tfdist.errors import ConfigError
from tfdist.errors import TfdistError
from tfdist.measure import evidence
from tfdist.measure import faults
from tfdist.measure import report
from tfdist.measure.drill import Result
from tfdist.measure.drill import Resumption
from tfdist.measure.drill import check_peace
from tfdist.measure.faults import Fault
from tfdist.measure.faults import Strike
from tfdist.measure.injector import Struck
from tfdist.measure.notes import Notes
from tfdist.measure.notes import Reader
from tfdist.measure.runs import Job
from tfdist.measure.runs import Run
from tfdist.measure.runs import Start


def test_faults_are_spread_over_the_run_and_those_with_a_step_keep_it():
    asked = faults.parse("kill-worker,damage@30,kill-all")
    assert asked == (Fault("kill-worker"), Fault("damage", 30), Fault("kill-all"))
    assert faults.plan(asked, 40, 4) == (
        Strike("kill-worker", 10),
        Strike("damage", 30),
        Strike("kill-all", 30),
    )


def test_a_full_disk_is_freed_after_a_commit_was_due_and_before_the_next_fault():
    found = faults.plan(faults.parse("full-disk,kill-chief"), 36, 4)
    assert found == (
        Strike("full-disk", 12),
        Strike(faults.FREE_DISK, 20),
        Strike("kill-chief", 24),
    )
    short = faults.plan(faults.parse("full-disk,kill-chief"), 9, 100)
    assert [s.step for s in short] == [3, 5, 6]


@pytest.mark.parametrize("text", ["kill-everybody", "", "kill-worker@", "kill-worker@0", "damage,"])
def test_faults_that_nobody_knows_are_refused(text):
    with pytest.raises(ConfigError, match="--faults"):
        faults.parse(text)


def test_faults_beyond_the_run_are_refused():
    with pytest.raises(ConfigError, match="kill-all@36"):
        faults.plan(faults.parse("kill-all@36"), 36, 4)
    with pytest.raises(ConfigError, match="2 steps"):
        faults.plan(faults.parse("kill-all,damage"), 2, 1)


def test_a_reader_returns_each_whole_line_once(tmp_path):
    notes = Notes(tmp_path, "worker 1", 2)
    notes.add("step", progress=3)
    reader = Reader(tmp_path)
    assert [(n["task"], n["incarnation"], n["progress"]) for n in reader.fresh()] == [
        ("worker 1", 2, 3)
    ]
    with open(tmp_path / "worker-1.notes.jsonl", "ab") as file:
        file.write(b'{"time": 1, "kind"')
        file.flush()
        assert reader.fresh() == []
        file.write(b': "end"}\n')
    assert reader.fresh() == [{"time": 1, "kind": "end"}]


def _evidence(folder, *, weight=1.0, loss=0.5, batches=((0, "a"), (0, "b")), start="w", **more):
    """Leaves a run of one fit behind; `batches` are incarnations and digests, two an epoch."""
    folder.mkdir()
    updates, is_asynchronous = more.get("updates", 4), more.get("is_asynchronous", False)
    arrays = {
        "model/0/kernel": np.array([weight, 2.0]),
        "optimizer/0.0/0/iteration": np.array(updates),
    }
    names = sorted(arrays)
    np.savez(folder / "fit-1.npz", **{f"a{n}": arrays[name] for n, name in enumerate(names)})
    told = {"steps": 2, "epochs": [0], "history": {"loss": [loss]}, "names": names}
    (folder / "fit-1.json").write_text(json.dumps(told))
    opened = {"kind": "open", "is_chief": True, "fit": 1, "progress": 0, "weights": start}
    opened["is_asynchronous"] = is_asynchronous
    notes = [{**opened, "is_seeded": True, "is_deterministic": True}]
    for number, (incarnation, digest) in enumerate(batches):
        place = {"fit": 1, "task": "worker 0", "epoch": 0, "batch": number % 2}
        note = {"kind": "batch", **place, "incarnation": incarnation, "rows": 8}
        notes.append({**note, "digest": digest})
    return evidence.gather(folder, notes)


def test_a_lost_update_is_a_difference_where_weights_are_not(tmp_path):
    peace = _evidence(tmp_path / "peace", is_asynchronous=True)
    other = _evidence(tmp_path / "faults", is_asynchronous=True, weight=9.0, loss=1.0)
    assert _failed(evidence.compare(peace, other)) == {}
    lost = _evidence(tmp_path / "lost", is_asynchronous=True, updates=3)
    assert _failed(evidence.compare(peace, lost)) == {"updates": "[4] / [3]"}


def _failed(checks):
    return {check.name: check.detail for check in checks if check.counts and not check.ok}


def test_batches_that_were_read_again_are_no_difference(tmp_path):
    peace = _evidence(tmp_path / "peace")
    other = _evidence(tmp_path / "faults", batches=((0, "a"), (0, "b"), (1, "a"), (1, "b")))
    checks = evidence.compare(peace, other)
    assert _failed(checks) == {}
    assert "2 were read again" in checks[-1].detail
    assert evidence.rows_by_epoch(other) == {(1, 0): 16}


def test_one_bit_of_a_weight_is_a_difference(tmp_path):
    peace = _evidence(tmp_path / "peace")
    other = _evidence(tmp_path / "faults", weight=np.nextafter(1.0, 2.0))
    failed = _failed(evidence.compare(peace, other))
    assert list(failed) == ["weights"]
    assert "1 of 1 arrays differ, by 2.22e-16" in failed["weights"]


def test_other_history_and_other_examples_are_differences(tmp_path):
    peace = _evidence(tmp_path / "peace")
    other = _evidence(tmp_path / "faults", loss=0.25, batches=((0, "a"), (0, "b"), (1, "c")))
    failed = _failed(evidence.compare(peace, other))
    assert failed["history"] == "loss of epoch 1: 0.5 / 0.25"
    assert "1 of 2 batches" in failed["contents of batches"]
    assert "batch 1 of epoch 1 on worker 0" in failed["contents of batches"]


def test_examples_that_were_left_out_are_counted(tmp_path):
    peace = _evidence(tmp_path / "peace")
    other = _evidence(tmp_path / "faults", batches=((0, "a"),))
    assert _failed(evidence.compare(peace, other))["examples"] == "epoch 1: 16 / 8 rows"


def test_a_run_without_an_end_is_not_exact(tmp_path):
    peace = _evidence(tmp_path / "peace")
    (tmp_path / "faults").mkdir()
    other = evidence.gather(tmp_path / "faults", [])
    assert (
        "no fit that came to its end" in _failed(evidence.compare(peace, other))["steps and epochs"]
    )


def test_a_script_that_is_not_seeded_is_told_so(tmp_path):
    peace = _evidence(tmp_path / "peace", start="one")
    other = _evidence(tmp_path / "faults", start="other", weight=3.0)
    again = _evidence(tmp_path / "again", start="third", weight=4.0)
    differs = [c for c in evidence.compare(peace, other) if not c.ok]
    reasons = evidence.why(peace, other, again, differs)
    assert "set_random_seed" in reasons[0]
    assert "says nothing about recovery" in reasons[1]
    same = _evidence(tmp_path / "same", start="one")
    (reason,) = evidence.why(peace, peace, same, differs)
    assert "the recovery is what made the difference: weights" in reason


class _Page(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.tags, self.links = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_report_is_one_page_that_needs_nothing_else(tmp_path):
    peace, other = _evidence(tmp_path / "p"), _evidence(tmp_path / "f", weight=3.0)
    runs = []
    for name in ("peace", "faults"):
        run = Run(Job("a<b.py", workers=2), tmp_path / name)
        run.begin, run.end, run.code = 100.0, 140.0, 0
        runs.append(run)
    for number, (begin, end) in enumerate([(100.5, 120.0), (122.0, None)]):
        for worker in (0, 1):
            runs[1].starts.append(Start(f"worker {worker}", number, 50 + number, begin, end))
    runs[1].commits.append((115.0, 4, tmp_path))
    result = Result(
        runs[0].job,
        *runs,
        struck=(Struck("kill-worker", 6, 119.0, ("worker 1",), "SIGKILL to worker 1"),),
        skipped={"full-disk": "it needs the right to mount"},
        resumptions=(Resumption(125.0, 1, 4, 2),),
        checks=tuple(evidence.compare(peace, other)),
        reasons=("Because.",),
        rows=(("fit 1, epoch 1", 16, 16),),
    )
    assert not result.is_exact
    report.write(result, tmp_path)
    page = _Page()
    page.feed((tmp_path / report.HTML).read_text())
    assert page.open == [] and page.links == []
    assert page.tags.count("rect") == 4 and page.tags.count("circle") == 1
    text = (tmp_path / report.HTML).read_text()
    assert "Recovery was not exact" in text and "a&lt;b.py" in text and "from 4" in text
    told = json.loads((tmp_path / report.JSON).read_text())
    assert told["exact"] is False and told["steps_lost"] == 2
    assert told["faults"][0]["time"] == 19.0
    assert [s["end"] for s in told["starts"]] == [20.0, 20.0, None, None]


def test_a_job_that_is_no_use_to_drill_is_refused(tmp_path):
    run = Run(Job("train.py", timeout=7.0), tmp_path)
    run.notes.append({"kind": "fit", "has_backup": False})
    with pytest.raises(TfdistError, match="within 7 s") as late:
        check_peace(run)
    assert late.value.exit_code == 1
    for code, expected in ((3, 1), (2, 2), (0, 2)):
        run.code = code
        with pytest.raises(TfdistError) as refused:
            check_peace(run)
        assert refused.value.exit_code == expected
    assert "write model.fit(..., callbacks=[tfdist.callbacks.BackupAndRestore('" in str(
        refused.value
    )
    run.notes.append({"kind": "fit", "has_backup": True})
    check_peace(run)
