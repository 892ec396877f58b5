"""The public door, the direction of imports, and a command line that starts without torch."""

import ast
import importlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import torchtitan_ckpt
from torchtitan_ckpt import cli
from torchtitan_ckpt.errors import CheckpointError, Problem, group_keys, list_keys

ROOT = Path(torchtitan_ckpt.__file__).parent


def test_the_door_is_these_names():
    assert sorted(torchtitan_ckpt.__all__) == [
        "CheckpointConfig",
        "CheckpointError",
        "CheckpointManager",
        "LoadDecision",
        "Manifest",
        "MappingAdapter",
        "ParallelDegrees",
        "Problem",
        "StateDictAdapter",
        "resolve",
    ]
    for name in torchtitan_ckpt.__all__:
        assert getattr(torchtitan_ckpt, name) is not None
    with pytest.raises(AttributeError, match="Manger"):
        _ = torchtitan_ckpt.Manger


FLOORS = [
    {"errors", "refusals"},
    {"manifest", "config", "decision", "device", "device_failures", "state", "folder", "owner"}
    | {"published", "collective", "progress", "losses"},
    {"mapping", "formats", "parallel", "agree"},
    {"placement", "families", "hf_storage", "resolve", "strict", "job", "survey", "saving"},
    {"adapter", "retention", "replicas", "assets"},
    {"hf_load", "experts", "export", "loading"},
]


def imports_of(path):
    """Modules of this package that a file imports at its top level or inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torchtitan_ckpt"):
            parts = node.module.split(".")
            if len(parts) > 1:
                yield parts[1]
            else:
                yield from (alias.name for alias in node.names)


def test_the_package_never_imports_the_suite_but_for_two_verbs():
    for path in ROOT.rglob("*.py"):
        if path.parent.name == "cli":
            continue
        assert "conformance" not in {
            (node.module or "").split(".")[0]
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ImportFrom)
        }, path


def test_no_module_imports_from_a_floor_above_its_own():
    floor = {name: n for n, names in enumerate(FLOORS) for name in names}
    wrong = []
    for path in ROOT.rglob("*.py"):
        top = path.relative_to(ROOT).parts[0].removesuffix(".py")
        if top not in floor:
            continue
        for name in imports_of(path):
            target = floor.get(name)
            known = (ROOT / name).is_dir() or (ROOT / f"{name}.py").exists()
            if name != top and known and (target is None or target > floor[top]):
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert wrong == []


def test_no_circle_of_imports():
    graph = {}
    for path in ROOT.rglob("*.py"):
        module = ".".join(path.relative_to(ROOT.parent).with_suffix("").parts)
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
                "torchtitan_ckpt"
            ):
                for alias in node.names:
                    whole = f"{node.module}.{alias.name}".replace(".", "/")
                    is_module = (ROOT.parent / f"{whole}.py").exists()
                    graph.setdefault(module, set()).add(
                        f"{node.module}.{alias.name}" if is_module else node.module
                    )
    state = {}

    def visit(name, trail):
        if state.get(name) == "done" or name.endswith("__init__"):
            return
        assert state.get(name) != "open", " -> ".join([*trail[trail.index(name) :], name])
        state[name] = "open"
        for target in sorted(graph.get(name, ())):
            visit(target, [*trail, name])
        state[name] = "done"

    for name in sorted(graph):
        visit(name, [])


@pytest.mark.parametrize("argv", [["--help"], ["--version"]])
def test_the_command_line_starts_without_torch_in_half_a_second(argv):
    code = (
        "import sys\nfrom torchtitan_ckpt.cli import main\n"
        f"code = main({argv!r})\nassert 'torch' not in sys.modules\nsys.exit(code)"
    )
    best = 10.0
    for _ in range(3):
        start = time.process_time(), time.monotonic()
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        best = min(best, time.monotonic() - start[1])
    assert best < 0.5 or sum(run_seconds(code)) < 0.5


def run_seconds(code):
    """User and system seconds of a run: what it costs when the machine is busy otherwise."""
    import resource

    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime


@pytest.mark.parametrize(
    "argv", [["--help"], ["checks"], ["map", "norm.weight", "--family", "qwen3"]]
)
def test_a_reader_that_has_gone_gets_no_traceback(argv):
    """As under `| head`: the pipe's other end is closed before anything is written."""
    theirs, ours = os.pipe()
    os.close(theirs)
    with os.fdopen(ours, "w") as gone:
        command = [sys.executable, "-m", "torchtitan_ckpt", *argv]
        run = subprocess.run(command, stdout=gone, stderr=subprocess.PIPE, text=True, check=False)
    assert (run.returncode, run.stderr) == (141, "")


def test_every_verb_is_there_and_has_help(capsys):
    for verb in cli.VERBS:
        importlib.import_module(f"torchtitan_ckpt.cli.{verb}")
        with pytest.raises(SystemExit) as stop:
            cli.main([verb, "--help"])
        assert stop.value.code == 0
        assert "--json" in capsys.readouterr().out, verb


def test_an_unknown_verb_gets_the_nearest(capsys):
    assert cli.main(["inspct"]) == 2
    assert "did you mean torchtitan-ckpt inspect?" in capsys.readouterr().err


def test_errors_say_everything_and_carry_the_exit_code(monkeypatch, capsys):
    error = CheckpointError(
        Problem(code="a.b", what="What.", where="here", expected="x", actual="y", fix="do z"),
        Problem(code="c.d", what="More."),
    )
    text = str(error)
    assert text.splitlines()[:2] == ["2 problems", "[a.b] What."]
    for word in ("where    here", "expected x", "actual   y", "fix      do z", "[c.d] More."):
        assert word in text
    monkeypatch.setattr(cli, "_run", lambda *a: (_ for _ in ()).throw(error))
    assert cli.main(["inspect", "x", "--json"]) == 4
    out = capsys.readouterr()
    assert '"code": "a.b"' in out.out
    assert "Traceback" not in out.err


def test_an_internal_error_is_one_sentence_without_debug(monkeypatch, capsys):
    monkeypatch.setattr(cli, "_run", lambda *a: 1 / 0)
    assert cli.main(["inspect", "x"]) == 4
    err = capsys.readouterr().err
    assert "ZeroDivisionError" in err
    assert "Traceback" not in err
    assert cli.main(["inspect", "x", "--debug"]) == 4
    assert "Traceback" in capsys.readouterr().err


def test_keys_are_grouped_for_people():
    keys = [f"layers.{n}.w" for n in (0, 1, 2, 3)] + ["norm", "layers.7.b", "layers.9.b"]
    assert group_keys(keys) == [("layers.{0..3}.w", 4), ("norm", 1), ("layers.{7,9}.b", 2)]
    assert list_keys(keys, limit=1) == "layers.{0..3}.w (4), … and 2 more groups"
