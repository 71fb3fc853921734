"""The Dockerfile, checked without a Docker daemon.

It is parsed, and its steps are run on the disk of this machine: COPY from a context that
`.dockerignore` has filtered, RUN in a clean virtual environment, then the ENTRYPOINT. Absolute
paths are moved below a temporary root. What needs root (the user) is read, not run.

The clean environment sees the packages of this one through a `.pth` file, so that pip resolves
the whole list of dependencies but downloads none of TensorFlow again. The `slow` variant installs
everything from the index: `pytest -m slow tests/trainer/test_dockerfile.py`.
"""

from __future__ import annotations

import configparser
import dataclasses
import email
import fnmatch
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import venv

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SHORT = ("--set", "training.epochs=1", "--set", "training.steps_per_epoch=3")


# --- reading --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction of a Dockerfile, its continuation lines joined."""

    name: str
    rest: str


def parse(text: str) -> list[Instruction]:
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    found = [line.strip().partition(" ") for line in joined.splitlines() if line.strip()]
    return [Instruction(name.upper(), rest.strip()) for name, _, rest in found]


def substitute(text: str, variables: dict[str, str]) -> str:
    """Replaces $NAME and ${NAME}; one that is not defined is a KeyError, not empty as in Docker."""
    return re.sub(r"\$\{(\w+)\}|\$(\w+)", lambda match: variables[match[1] or match[2]], text)


def ignored(path: str, patterns: list[str]) -> bool:
    """Whether `.dockerignore` leaves a file out: the last pattern that matches decides."""
    parts = pathlib.PurePath(path).parts
    above = ["/".join(parts[: end + 1]) for end in range(len(parts))]
    result = False
    for pattern in patterns:
        bare = pattern.removeprefix("!")
        candidates = above
        if bare.startswith("**/"):
            bare, candidates = bare[3:], list(parts)
        if any(fnmatch.fnmatch(candidate, bare) for candidate in candidates):
            result = not pattern.startswith("!")
    return result


@pytest.fixture(scope="module")
def instructions():
    return parse((ROOT / "Dockerfile").read_text())


@pytest.fixture(scope="module")
def context(tmp_path_factory):
    """The files that the builder would receive."""
    folder = tmp_path_factory.mktemp("context")
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    patterns = [line for line in lines if line and not line.startswith("#")]
    for directory, below, files in os.walk(ROOT):
        relative = pathlib.Path(directory).relative_to(ROOT)
        below[:] = [name for name in below if not name.startswith(".")]
        for name in files:
            if not ignored((relative / name).as_posix(), patterns):
                (folder / relative).mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / relative / name, folder / relative / name)
    return folder


def position(instructions, name, pattern):
    """Returns the index of the one instruction of that name that matches."""
    found = [
        index
        for index, instruction in enumerate(instructions)
        if instruction.name == name and re.search(pattern, instruction.rest)
    ]
    assert len(found) == 1, f"{name} {pattern}: {len(found)} times"
    return found[0]


# --- what can be read ------------------------------------------------------------------------


def test_the_base_image_is_an_argument(instructions):
    assert instructions[0] == Instruction("ARG", "BASE_IMAGE=python:3.11-slim")
    assert instructions[1] == Instruction("FROM", "${BASE_IMAGE}")
    assert sum(instruction.name == "FROM" for instruction in instructions) == 1


def test_the_entry_point_is_the_task_in_exec_form(instructions):
    entry = instructions[position(instructions, "ENTRYPOINT", "")]
    assert json.loads(entry.rest) == ["python", "-m", "trainer.task"]
    assert "CMD" not in {instruction.name for instruction in instructions}


def test_it_runs_as_a_user_without_rights_who_is_made_before(instructions):
    user = position(instructions, "USER", "")
    name = instructions[user].rest
    assert name not in ("root", "0")
    assert position(instructions, "RUN", rf"useradd .*\b{name}\b") < user
    after = {instruction.name for instruction in instructions[user + 1 :]}
    assert after == {"ENTRYPOINT"}


def test_dependencies_are_installed_before_any_code_is_copied(instructions):
    dependencies = position(instructions, "RUN", r"pip install \S*\[\$\{EXTRAS\}\]")
    before = [i.rest for i in instructions[:dependencies] if i.name in ("COPY", "ADD")]
    assert before == ["setup.cfg pyproject.toml ./", "tfdist/_version.py tfdist/_version.py"]
    code = position(instructions, "COPY", "^trainer ")
    assert dependencies < code < position(instructions, "RUN", "--no-deps")
    assert code < position(instructions, "COPY", "^configs ")


def test_it_holds_no_secrets(instructions):
    for instruction in instructions:
        if instruction.name in ("ARG", "ENV", "LABEL"):
            assert not re.search(r"(?i)secret|token|passw|credential|api_?key", instruction.rest)


def test_the_context_is_what_is_copied_and_no_more(context):
    found = {path.name for path in context.iterdir()}
    assert found == {
        "README.md",
        "configs",
        "pyproject.toml",
        "setup.cfg",
        "tfdist",
        "trainer",
    }
    assert not [path for path in context.rglob("*") if "__pycache__" in str(path)]


# --- what can be run -------------------------------------------------------------------------


class Build:
    """Runs the steps of a Dockerfile below a directory.

    Attributes:
        root: Stands for "/" in the image.
        site: Where the image's Python keeps packages.
    """

    def __init__(self, folder: pathlib.Path, context: pathlib.Path):
        self.root = folder / "root"
        self.root.mkdir()
        self._context = context
        self._directory = self.root
        environment = folder / "venv"
        venv.create(environment, with_pip=True)
        self._bin = environment / "bin"
        self.site = next((environment / "lib").glob("python*/site-packages"))
        passed = ("PIP_", "SSL_", "REQUESTS_", "HTTP_", "HTTPS_", "NO_PROXY", "https_", "http_")
        self._env = {name: value for name, value in os.environ.items() if name.startswith(passed)}
        self._env["PATH"] = f"{self._bin}:/usr/bin:/bin"
        self._env["HOME"] = str(folder)
        self._entry: list[str] = []
        self._variables: dict[str, str] = {}

    def build(self, instructions: list[Instruction]) -> None:
        """Runs instructions that follow FROM, where the scope of the ARG before it ends."""
        variables = self._variables
        for instruction in instructions:
            name, rest = instruction.name, instruction.rest
            if name == "ARG":
                key, _, value = rest.partition("=")
                variables[key] = value
            elif name == "ENV":
                for setting in shlex.split(substitute(rest, variables)):
                    key, _, value = setting.partition("=")
                    self._env[key] = str(self._place(value)) if value.startswith("/") else value
            elif name == "WORKDIR":
                self._directory = self._place(rest)
                self._directory.mkdir(parents=True, exist_ok=True)
            elif name == "COPY":
                self._copy(*rest.split())
            elif name == "RUN":
                if "useradd" not in rest:  # Needs root, and would change this machine.
                    done = self.run(["/bin/sh", "-euc", rest], **variables)
                    assert done.returncode == 0, f"{rest}\n{done.stdout}\n{done.stderr}"
            elif name == "ENTRYPOINT":
                self._entry = json.loads(rest)
            else:
                assert name in ("LABEL", "USER"), f"do not know how to check {name}"

    def start(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Starts a container of the image."""
        return self.run([*self._entry, *arguments])

    def run(self, command: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
        program = self._bin / command[0]
        return subprocess.run(
            [str(program) if program.exists() else command[0], *command[1:]],
            cwd=self._directory,
            env={**self._env, **variables},
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )

    def requirements(self) -> set[str]:
        """Returns what the installed tfdist says it needs."""
        (metadata,) = self.site.glob("tfdist-*.dist-info/METADATA")
        return set(email.message_from_string(metadata.read_text()).get_all("Requires-Dist") or ())

    def _place(self, path: str) -> pathlib.Path:
        """Returns where a path of the image lies on this machine."""
        if path.startswith("/"):
            return self.root / path.lstrip("/")
        return self._directory / path

    def _copy(self, *paths: str) -> None:
        *sources, target = paths
        place = self._place(target)
        for source in sources:
            found = self._context / source
            if found.is_dir():
                shutil.copytree(found, place, dirs_exist_ok=True)
            else:
                into = place / found.name if target.endswith("/") else place
                into.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(found, into)


def check(build: Build) -> None:
    """Checks what a container of the image does."""
    code = "import tfdist, trainer; print(tfdist.__file__, trainer.__file__)"
    where = build.run(["python", "-c", code]).stdout.split()
    assert [path.startswith(str(build.site)) for path in where] == [True, True], where
    help_text = build.start("--help")
    assert help_text.returncode == 0, help_text.stderr
    assert "--config" in help_text.stdout
    done = build.start("--config", "configs/digits-single.yaml", *SHORT)
    assert done.returncode == 0, done.stderr
    assert "test accuracy 0." in done.stdout
    written = build.root / "workspace" / "runs" / "digits-single" / "model"
    assert (written / "model.keras").exists()
    assert json.loads((written / "metrics.json").read_text())["epochs"] == 1
    assert (build.root / "workspace" / "data" / "digits").is_dir()
    mistake = build.start("--config", "configs/digits-singel.yaml")
    assert mistake.returncode == 2
    assert "did you mean configs/digits-single.yaml" in mistake.stderr


def test_its_steps_give_an_image_that_trains(instructions, context, tmp_path):
    build = Build(tmp_path, context)
    (build.site / "outer.pth").write_text(sysconfig.get_path("purelib") + "\n")
    layer = position(instructions, "RUN", "--no-deps")
    build.build(instructions[2:layer])
    # The layer of dependencies holds no code, and the same list as the finished package.
    assert not (build.site / "tfdist").exists()
    assert not (build.site / "trainer").exists()
    early = build.requirements()
    build.build(instructions[layer:])
    assert build.requirements() == early
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    listed = setup["options"]["install_requires"].split()
    assert {re.split(r"[<>=!~]", line)[0] for line in listed} == {
        re.split(r"[<>=!~;]", line)[0].strip() for line in early if "extra ==" not in line
    }
    check(build)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_its_steps_give_an_image_that_trains_with_every_package_installed_anew(
    instructions, context, tmp_path
):
    build = Build(tmp_path, context)
    build.build(instructions[2:])
    outer = build.run(["python", "-c", "import tensorflow; print(tensorflow.__file__)"])
    assert outer.stdout.startswith(str(build.site))
    assert str(sys.prefix) not in outer.stdout
    check(build)


def test_the_parser_of_this_test_reads_what_docker_reads():
    text = "# head\nARG A=1\nRUN one && \\\n    # why\n    two\nENV B=${A} \\\n    C=$A\n"
    assert parse(text) == [
        Instruction("ARG", "A=1"),
        Instruction("RUN", "one &&      two"),
        Instruction("ENV", "B=${A}      C=$A"),
    ]
    assert substitute("x ${A}-$A", {"A": "1"}) == "x 1-1"
    with pytest.raises(KeyError):
        substitute("${B}", {"A": "1"})
    patterns = ["*", "!src", "!a.txt", "**/__pycache__", "**/*.py[cod]"]
    assert not ignored("src/deep/x.py", patterns)
    assert not ignored("a.txt", patterns)
    assert ignored("b.txt", patterns)
    assert ignored("src/deep/x.pyc", patterns)
    assert ignored("src/__pycache__/x", patterns)
