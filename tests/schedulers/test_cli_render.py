"""`tfdist render`: what it writes, where, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tfdist.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
DIGITS = str(ROOT / "configs" / "digits-single.yaml")


def run(capsys, *words: str) -> tuple[int, str, str]:
    code = main(["render", *words])
    told = capsys.readouterr()
    return code, told.out, told.err


def test_every_scheduler_renders_every_config(capsys):
    for path in CONFIGS:
        pools = (yaml.safe_load(path.read_text()).get("vertex") or {}).get("pools", {})
        for scheduler in ("kubernetes", "slurm", "ray"):
            image = ("--set", "kubernetes.image=tfdist:1")
            code, out, err = run(capsys, "--for", scheduler, str(path), *image)
            if scheduler == "ray" and "ps" in pools:
                assert (code, out) == (2, ""), path
                continue
            assert code == 0, err
            assert "trainer.task" in out


def test_kinds_and_formats_of_kubernetes(capsys):
    base = ("--for", "kubernetes", DIGITS, "--set", "kubernetes.image=tfdist:1")
    code, out, _ = run(capsys, *base, "--kind", "tfjob", "--format", "json")
    assert (code, json.loads(out)["kind"]) == (0, "TFJob")
    more = ("--set", "kubernetes.roles.worker.count=2")
    code, out, _ = run(capsys, *base, *more, "--kind", "job")
    assert [document["kind"] for document in yaml.safe_load_all(out)] == ["Service", "Job"]
    code, out, _ = run(capsys, *base, *more)
    assert [document["kind"] for document in yaml.safe_load_all(out)] == ["JobSet"]


def test_a_file_is_not_replaced_unless_that_is_said(capsys, tmp_path):
    path = tmp_path / "job.sh"
    base = ("--for", "slurm", DIGITS, "--output", str(path))
    assert run(capsys, *base)[:2] == (0, "")
    first = path.read_text()
    code, _, err = run(capsys, *base, "--set", "slurm.name=other")
    assert (code, path.read_text()) == (2, first)
    assert "--force" in err
    assert run(capsys, *base, "--set", "slurm.name=other", "--force")[0] == 0
    assert "--job-name=other" in path.read_text()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--for", "pbs", DIGITS), "kubernetes, slurm, ray"),
        (("--for", "slurm", DIGITS, "--kind", "job"), "--kind"),
        (("--for", "slurm", DIGITS, "--format", "yaml"), "--format sh"),
        (("--for", "kubernetes", DIGITS, "--kind", "pod"), "kubernetes.kind"),
        (("--for", "kubernetes", DIGITS), "kubernetes.image"),
        (("--for", "slurm", "nowhere.yaml"), "nowhere.yaml"),
        (("--for", "slurm", DIGITS, "--set", "slurm.partitio=a"), "slurm.partition"),
        (("--for", "slurm", DIGITS, "--set", "training.epochs=0"), "training.epochs"),
        (("--for", "slurm", DIGITS, "--output", "/proc/no/such"), "--output"),
    ],
)
def test_mistakes_are_one_line_and_exit_with_2(capsys, words, told):
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, "")
    assert told in err
    assert err.startswith("tfdist: error: ") and err.count("\n") == 1


def test_without_a_scheduler_it_says_what_is_missing(capsys):
    code, out, err = run(capsys, DIGITS)
    assert (code, out) == (2, "")
    assert "--for" in err


def test_it_does_not_wait_for_tensorflow():
    program = (
        "import sys; from tfdist.cli.main import main; "
        f"code = main(['render', '--for', 'slurm', {DIGITS!r}]); "
        "print('loaded', code, sorted({'tensorflow', 'keras'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.endswith("loaded 0 []\n"), done.stderr
