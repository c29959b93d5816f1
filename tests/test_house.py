"""The rules of the house, read from the source: who may import whom, where a thing may appear, how files look."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from manyhands import config, errors

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "manyhands"
SOURCES = sorted(PACKAGE.rglob("*.py"))
DOOR = "__init__"

# Top to bottom: a module may import from its own folder and from any line below, never from a sibling or from above.
STACK = [
    {"__main__"},
    {"cli"},
    {"commands"},
    {DOOR},
    {"recipes", "estimators", "infer", "plan", "web"},
    {"train"},
    {"sync", "layout"},
    {"server"},
    {"comm", "engine", "data"},
    {"core"},
    {"observe"},
    {"errors", "types", "config"},
]
LEVEL = {name: level for level, names in enumerate(STACK) for name in names}
BASE = STACK[-1]

# What may appear only in certain files: a dotted name, and the paths (or folders) below src/manyhands that own it.
OWNERS = {
    "os.environ": ["config.py", "engine/"],
    "os.environb": ["config.py", "engine/"],
    "os.getenv": ["config.py", "engine/"],
    "os.putenv": ["config.py", "engine/"],
    "pickle": ["comm/ship.py", "engine/"],
    "cloudpickle": ["comm/ship.py", "engine/"],
    "dill": [],
    "joblib": [],
    "shelve": [],
    "torch.load": [],
    "torch.save": [],
    "torch.distributed": [],
    "ray": [],
    "zmq": ["comm/links.py"],
}
# The decisions are pure: no tensors, no sockets, no clock, no processes of their own.
FORBIDDEN_IN_CORE = ["torch", "socket", "zmq", "asyncio", "time", "datetime", "threading", "subprocess"]


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def place(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def unit(path: Path) -> str:
    """The word of ``STACK`` that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Every imported name in full, with its line; also inside functions and behind TYPE_CHECKING."""
    package = ["manyhands", *path.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{module}.{alias.name}"


def uses(path: Path, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Imports, and attribute chains such as ``os.environ`` with the aliases of imports resolved."""
    yield from imports(path, tree)
    aliases = {
        alias.asname: alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.asname
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            first, _, rest = ast.unparse(node).partition(".")
            yield node.lineno, f"{aliases.get(first, first)}.{rest}"


def is_or_is_in(name: str, owner: str) -> bool:
    return name == owner or name.startswith(owner + ".")


def imported_unit(name: str) -> str | None:
    """The word of ``STACK`` that an imported name belongs to; None for what is not ours."""
    parts = name.split(".")
    if parts[0] != "manyhands":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in LEVEL else DOOR


def test_every_file_has_a_place_in_the_stack() -> None:
    assert {unit(path) for path in SOURCES} <= LEVEL.keys()


@pytest.mark.parametrize("path", SOURCES, ids=place)
def test_imports_point_down(path: Path) -> None:
    here = unit(path)
    wrong = []
    for line, name in imports(path, parse(path)):
        there = imported_unit(name)
        allowed = there is None or there == here or {here, there} <= BASE or LEVEL[here] < LEVEL[there]
        if not allowed:
            wrong.append(f"{place(path)}:{line} imports {name}, but {here} is not above {there}")
    assert not wrong


@pytest.mark.parametrize("path", SOURCES, ids=place)
def test_a_thing_appears_only_where_it_is_owned(path: Path) -> None:
    wrong = [
        f"{place(path)}:{line} uses {name}, which belongs to {owners or 'no file'}"
        for line, name in uses(path, parse(path))
        for thing, owners in OWNERS.items()
        if is_or_is_in(name, thing) and not place(path).startswith(tuple(owners))
    ]
    assert not wrong


@pytest.mark.parametrize("path", [path for path in SOURCES if unit(path) == "core"], ids=place)
def test_core_is_pure(path: Path) -> None:
    wrong = [
        f"{place(path)}:{line} imports {name}"
        for line, name in imports(path, parse(path))
        for thing in FORBIDDEN_IN_CORE
        if is_or_is_in(name, thing)
    ]
    assert not wrong


@pytest.mark.parametrize("path", SOURCES, ids=place)
def test_a_module_says_what_it_owns_and_stays_short(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert ast.get_docstring(ast.parse(text)), f"{place(path)} opens without a docstring"
    assert len(text.splitlines()) <= 400, f"{place(path)} is too long to read in one go"
    assert not {"utils", "helpers", "common", "misc"} & set(place(path).removesuffix(".py").split("/"))


def test_no_marks_of_unfinished_work() -> None:
    mark = re.compile(r"\b(" + "|".join(["TO" + "DO", "FIX" + "ME", "X" + "XX", "HA" + "CK"]) + r")\b")
    folders = ["src", "tests", "examples", "benchmarks", "docs", "scripts"]
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    texts = {path: path.read_text(encoding="utf-8") for path in files if path.suffix in {".py", ".md", ".sh", ""}}
    assert [str(path) for path, text in texts.items() if mark.search(text)] == []


def test_the_door_is_sorted_and_every_name_is_behind_it() -> None:
    door = importlib.import_module("manyhands")
    assert door.__file__, "the package has no __init__.py"
    assert door.__all__ == sorted(set(door.__all__))
    assert [name for name in door.__all__ if not hasattr(door, name)] == []
    assert door.__version__ == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def drawn_tree() -> dict[str, tuple[str | None, set[str]]]:
    """Name → (parent, bases from Python) as drawn at the top of errors.py."""
    tree: dict[str, tuple[str | None, set[str]]] = {}
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"(?P<branch>[│├└─ ]*)(?P<name>[A-Z]\w+)(?: \((?P<bases>[\w, ]+)\))?(?:\s{2,}|$)", line)
        if not match:
            continue
        depth = len(match["branch"]) // 4
        path[depth:] = [match["name"]]
        bases = set(match["bases"].split(", ")) if match["bases"] else set()
        tree[match["name"]] = (path[depth - 1] if depth else None, bases)
    return tree


def real_tree() -> dict[str, tuple[str | None, set[str]]]:
    tree: dict[str, tuple[str | None, set[str]]] = {}
    for name, thing in vars(errors).items():
        if isinstance(thing, type) and issubclass(thing, errors.ManyhandsError):
            ours = [base.__name__ for base in thing.__bases__ if issubclass(base, errors.ManyhandsError)]
            builtin = {base.__name__ for base in thing.__bases__ if base.__module__ == "builtins"} - {"Exception"}
            tree[name] = (ours[0] if ours else None, builtin)
    return tree


def test_the_drawn_error_tree_is_the_real_one() -> None:
    assert drawn_tree() == real_tree()


def test_every_error_is_public_and_documented() -> None:
    kinds = {name: thing for name, thing in vars(errors).items() if isinstance(thing, type)}
    classes = {name: thing for name, thing in kinds.items() if issubclass(thing, Exception)}
    assert classes.keys() <= set(errors.__all__)
    assert errors.__all__ == sorted(errors.__all__)
    assert [name for name, thing in classes.items() if not vars(thing).get("__doc__")] == []


def test_errors_are_defined_in_one_file() -> None:
    ours = set(real_tree())
    elsewhere = [
        f"{place(path)}:{node.lineno} {node.name}"
        for path in SOURCES
        if path.name != "errors.py"
        for node in ast.walk(parse(path))
        if isinstance(node, ast.ClassDef) and ours & {ast.unparse(base).rpartition(".")[2] for base in node.bases}
    ]
    assert elsewhere == []


def test_the_table_of_variables_is_complete() -> None:
    documented = set(re.findall(rf"^{config.PREFIX}(\w+)", config.__doc__ or "", flags=re.MULTILINE))
    assert documented == set(config.VARIABLES)


def test_the_police_catches_what_a_test_leaves_behind(tmp_path: Path) -> None:
    """Runs tests that each leave one thing behind, under the same conftest with less patience."""
    conftest = (ROOT / "tests" / "conftest.py").read_text(encoding="utf-8")
    (tmp_path / "conftest.py").write_text(re.sub(r"^GRACE_S = .*$", "GRACE_S = 0.3", conftest, flags=re.MULTILINE))
    (tmp_path / "test_untidy.py").write_text(
        """
import os, pathlib, signal, socket, subprocess, sys, threading, time
kept = []
def test_child():
    kept.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(9)"]))
def test_orphan():
    subprocess.run(["sh", "-c", "sleep 9 >/dev/null 2>&1 &"], check=True)
def test_thread():
    threading.Thread(target=time.sleep, args=(1.0,)).start()
def test_sockets():
    kept.extend(socket.socket() for _ in range(9))
def test_memory():
    pathlib.Path(f"/dev/shm/manyhands-test-{os.getpid()}").touch()
def test_environment():
    os.environ["LEFT_BEHIND"] = "1"
def test_directory(tmp_path):
    os.chdir(tmp_path)
def test_signal():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
def test_tidy(run_root, monkeypatch):
    monkeypatch.setenv("LEFT_BEHIND", "2")
    assert os.environ["MANYHANDS_RUNS"] == str(run_root)
    assert not run_root.exists()
    pathlib.Path(f"/dev/shm/manyhands-test-{os.getpid()}").unlink()
"""
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={tmp_path}", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    caught = re.findall(r"ERROR at teardown of test_(\w+) _+\nthe test left behind\n  ([\w ]+):", result.stdout)
    assert dict(caught) == {
        "child": "processes",
        "orphan": "processes",
        "thread": "threads",
        "sockets": "descriptors",
        "memory": "shared memory",
        "environment": "environment variables",
        "directory": "working directory",
        "signal": "signal handlers",
    }, result.stdout
    assert "9 passed, 8 errors" in result.stdout
