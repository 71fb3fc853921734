"""Rules of what is run: command, arguments, module."""

from __future__ import annotations

import re

from tfdist.vertex.checks.rules import Findings
from tfdist.vertex.checks.rules import Job
from tfdist.vertex.checks.rules import doubt
from tfdist.vertex.checks.rules import problem
from tfdist.vertex.checks.rules import rule
from tfdist.vertex.config import TRAINER

#: Linux takes no longer word in a command line: MAX_ARG_STRLEN, with its ending NUL.
LONGEST_WORD = 131_071

_SEVERAL = re.compile(r"--?[A-Za-z][\w-]*\s+\S.*", re.DOTALL)
_REFERENCE = re.compile(r"(?<!\$)\$\([A-Za-z_][A-Za-z0-9_]*\)")
_VARIABLE = re.compile(r"(?:^|=)\$\{?[A-Za-z_]")
_MODULE = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")
_SHELLS = ("sh", "bash", "dash", "zsh")
_OPERATORS = ("|", "||", "&&", ";", ">", ">>", "<", "2>&1")
#: Flags of trainer.task beside --config.
_TRAINER_FLAGS = {"--set", "--model-dir", "--checkpoint-dir", "--log-dir"}
_QUOTES = ("'", '"')


@rule("arguments")
def arguments(job: Job) -> Findings:
    """Each word of command and arguments reaches the program as it is written."""
    spec = job.spec
    shell = bool(spec.command) and spec.command[0].rpartition("/")[2] in _SHELLS
    for field, words in (("command", spec.command), ("args", spec.args)):
        for index, word in enumerate(words):
            where = f"vertex.{field}[{index}]"
            if "\0" in word:
                yield problem("no NUL in an argument", where, f"correct {where}")
            size = len(word.encode(errors="surrogatepass"))
            if size > LONGEST_WORD:
                yield problem(
                    f"arguments of at most {LONGEST_WORD} bytes, more than which Linux takes not",
                    f"{size} bytes in {where}",
                    "put it into a file, in the image or in Cloud Storage",
                )
            elif not shell:
                yield from _as_written(where, word)


def _as_written(where: str, word: str) -> Findings:
    """Yields doubts about a word that looks as if a shell were to read it."""
    shown = word if len(word) < 60 else f"{word[:57]}..."
    if word.startswith("{"):
        return  # A config by value.
    if _SEVERAL.fullmatch(word) and "=" not in word.split()[0]:
        first, rest = word.split(None, 1)
        yield doubt(
            "one word in each argument; no shell splits them",
            f"{where}={shown!r}",
            f"write two: {first!r}, {rest!r}",
        )
    elif len(word) > 1 and word[0] == word[-1] and word[0] in _QUOTES:
        yield doubt(
            "an argument without quotes of its own; no shell takes them away",
            f"{where}={shown}",
            f"write {word[1:-1]!r}",
        )
    elif word in _OPERATORS:
        yield doubt(
            "words for a program; no shell reads them",
            f"{where}={shown!r}",
            'write command: ["bash", "-c", "..."]',
        )
    elif _REFERENCE.search(word):
        yield doubt(
            "text that stays as it is; $(NAME) may be replaced by a variable",
            f"{where}={shown!r}",
            "write $$( if it shall stay",
        )
    elif _VARIABLE.search(word):
        yield doubt(
            "text; no shell replaces variables in it",
            f"{where}={shown!r}",
            'write command: ["bash", "-c", "..."] if a variable is meant',
        )


@rule("trainer-config")
def trainer_config(job: Job) -> Findings:
    """The trainer is given a config."""
    spec = job.spec
    names = {word.partition("=")[0].replace("_", "-") for word in spec.args}
    if spec.command or spec.module != TRAINER or names.isdisjoint(_TRAINER_FLAGS):
        return
    if "--config" not in names:
        yield doubt(
            "--config among the arguments of the trainer: vertex.args replaces what tfdist passes",
            f"args={list(spec.args)}",
            "leave vertex.args out and write the changes into the config, or pass them with --set "
            "to tfdist vertex",
        )


@rule("command")
def command(job: Job) -> Findings:
    """The first word of the command is a program."""
    spec = job.spec
    if not spec.command:
        return
    first = spec.command[0]
    if not first.strip():
        yield problem("a program as the first word of the command", repr(first), "name a program")
    elif any(character.isspace() for character in first):
        words = ", ".join(repr(word) for word in first.split())
        yield problem(
            "a program as the first word of the command, each argument as a word of its own",
            f"command[0]={first!r}",
            f"write command: [{words}]",
        )
    if spec.code == "package":
        yield problem(
            "vertex.module and vertex.args for a package, which python -m runs",
            f"command={list(spec.command)}",
            "leave vertex.command out, or set vertex.code to image",
        )


@rule("module")
def module(job: Job) -> Findings:
    """The module is a name that python -m takes."""
    given = job.spec.module
    if not _MODULE.fullmatch(given):
        fix = "write for example trainer.task"
        plain = given.removesuffix(".py").replace("/", ".")
        if _MODULE.fullmatch(plain):
            fix = f"write {plain}"
        yield problem("the name of a Python module", f"module={given!r}", fix)
    elif given != TRAINER and job.spec.code == "image" and not job.spec.command:
        yield doubt(
            "vertex.module with vertex.code: package; an image runs its entry point",
            f"module={given!r}",
            f'write command: ["python", "-m", "{given}"]',
        )
