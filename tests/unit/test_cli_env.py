"""The command line, as a user and as a program meets it: in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tfdist import errors
from tfdist.cli import main as cli

ROOT = Path(__file__).parents[2]
TWO = json.dumps({"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}})
KEYS = [
    "environment",
    "task",
    "cluster",
    "is_chief",
    "num_workers",
    "strategy",
    "reasons",
    "warnings",
]


def tfdist(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Runs the command line with nothing but `environ` in its environment."""
    return subprocess.run(
        [sys.executable, "-m", "tfdist.cli.main", *arguments],
        env=environ,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_json_has_the_keys_that_programs_rely_on() -> None:
    done = tfdist("env", "--json", TF_CONFIG=TWO)
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert list(report) == KEYS
    assert report["task"] == {"type": "worker", "index": 1}
    assert report["cluster"] == {"worker": ["a:1", "b:1"]}
    assert report["strategy"] == "multi_worker"
    assert "TF_CONFIG" in report["reasons"][0]


def test_text_is_plain_and_complete() -> None:
    done = tfdist("env", TF_CONFIG=TWO, TFDIST_STRATEGY="multi-worker")
    assert done.returncode == 0
    for part in ("tf_config", "worker 1", "a:1, b:1", "multi_worker", "asked for by name"):
        assert part in done.stdout
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize("arguments", [["env"], ["env", "--json"], ["env", "--json", "--json"]])
def test_a_wrong_environment_is_one_line_and_code_2(arguments: list[str]) -> None:
    done = tfdist(*arguments, TF_CONFIG='{"cluster": }')
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("tfdist: error: ")
    assert done.stderr.count("\n") == 1
    assert "JSON" in done.stderr


def test_an_impossible_strategy_is_code_2() -> None:
    done = tfdist("env", "--json", TF_CONFIG=TWO, TFDIST_STRATEGY="mirrored")
    assert done.returncode == 2
    assert "mirrored" in done.stderr


def test_bytes_that_are_no_text_do_not_break_the_message() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tfdist.cli.main", "env", "--json"],
        env={b"TF_CONFIG": b'{"cluster": {"worker": ["\xff:1"]}, "task": \xfe}'},
        cwd=ROOT,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert b"JSON" in done.stderr
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize("value", ["1", "true", "True"])
def test_legacy_keras_is_a_warning(value: str) -> None:
    done = tfdist("env", "--json", TF_USE_LEGACY_KERAS=value)
    assert "TF_USE_LEGACY_KERAS" in json.loads(done.stdout)["warnings"][0]


@pytest.mark.parametrize("value", ["", "0", "false"])
def test_legacy_keras_that_is_off_is_no_warning(value: str) -> None:
    done = tfdist("env", "--json", TF_USE_LEGACY_KERAS=value)
    assert json.loads(done.stdout)["warnings"] == []


def test_env_is_quick_and_imports_nothing_heavy() -> None:
    code = (
        "import sys; from tfdist.cli.main import main; code = main(['env', '--json']); "
        "heavy = {'tensorflow', 'keras', 'numpy', 'pydantic', 'typer'} & set(sys.modules); "
        "sys.exit(str(heavy) if heavy or code else 0)"
    )
    times = []
    for _ in range(3):
        start = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={"TF_CONFIG": TWO},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        times.append(time.monotonic() - start)
        assert done.returncode == 0, done.stderr
    assert min(times) < 0.5


def test_help_lists_every_verb_on_one_screen() -> None:
    done = tfdist("--help")
    assert done.returncode == 0
    assert all(verb in done.stdout for verb in cli.VERBS)
    assert done.stdout.count("\n") <= 24


def test_help_of_env_needs_one_screen() -> None:
    done = tfdist("env", "--help", TF_CONFIG="{")
    assert done.returncode == 0
    assert "--json" in done.stdout


@pytest.mark.parametrize(
    "arguments", [["evn"], ["env", "--jsn"], ["env", "word"], ["--wrong"], []], ids=str
)
def test_wrong_usage_is_code_2(arguments: list[str]) -> None:
    done = tfdist(*arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_version() -> None:
    done = tfdist("--version")
    assert done.returncode == 0
    assert done.stdout.startswith("tfdist ")


def verb_that(action: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a verb `probe` that calls `action`."""
    import types

    module = types.ModuleType("tfdist.cli.probe")

    def app_register(app: object) -> None:
        app.command("probe")(action)  # type: ignore[attr-defined]

    module.app_register = app_register  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tfdist.cli.probe", module)
    monkeypatch.setitem(cli.VERBS, "probe", "Probe.")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.ConfigError("a", "b", "c"), 2),
        (errors.PeerLostError("a", "b", "c"), 1),
        (errors.RendezvousError("a", "b", "c"), 1),
        (KeyboardInterrupt(), 130),
        (SystemExit(143), 143),
        (SystemExit(), 0),
    ],
    ids=repr,
)
def test_errors_of_a_verb_become_exit_codes(
    error: BaseException,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def probe() -> None:
        raise error

    verb_that(probe, monkeypatch)
    assert cli.main(["probe"]) == code
    shown = capsys.readouterr().err
    assert "Traceback" not in shown
    if isinstance(error, errors.TfdistError):
        assert shown == "tfdist: error: Expected a. Received: b. Fix: c.\n"


def test_a_verb_without_its_file_is_an_error_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(cli.VERBS, "absent", "Not there.")
    assert cli.main(["--help"]) == 0
    assert cli.main(["absent"]) == 2
    assert "absent" in capsys.readouterr().err


def test_a_missing_import_inside_a_verb_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise ModuleNotFoundError("No module named 'other'", name="other")

    monkeypatch.setattr(cli.importlib, "import_module", fail)
    with pytest.raises(ModuleNotFoundError):
        cli.main(["doctor"])
