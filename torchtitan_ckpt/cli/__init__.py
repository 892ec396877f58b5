"""The command line `torchtitan-ckpt <verb>`: finds the verb, parses, turns errors into words.

Each verb is one module beside this one with a dataclass `Args` (its options) and `run(args) -> int`
(its exit code); a verb with a grammar of its own offers `parse(argv)` instead of `Args`. Nothing
here imports torch, so that `--help` is quick.

Exit codes: 0 clean, 1 findings, 2 usage, 3 input unreadable or refused, 4 internal error,
5 nothing was checked.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from torchtitan_ckpt import streams
from torchtitan_ckpt.errors import (
    CheckpointError,
    ConfigError,
    DeviceError,
    InputError,
    Problem,
    nearest,
)
from torchtitan_ckpt.refusals import REFUSALS, meaning_of

PROG = "torchtitan-ckpt"
VERBS = {
    "check": "Check an adapter or a manager against the contract.",
    "checks": "List the checks of the contract.",
    "convert": "Convert between DCP, Hugging Face safetensors and .pt.",
    "diff": "Compare two checkpoints of any formats.",
    "explain": "Say what a job would load, and why.",
    "inspect": "Show what a checkpoint holds.",
    "map": "Show what a key corresponds to, and through which operations.",
    "plan": "Say which rank writes and reads which bytes, without the hardware.",
    "verify": "Check a checkpoint for damage and for completeness.",
}

# What a shell gives for a process that SIGPIPE ended: nobody saw what was found.
_PIPE_CLOSED = 141
# And for one that Ctrl-C ended.
_INTERRUPTED = 130


def program() -> int:
    """`main` as a program of its own, which after Ctrl-C is gone at once.

    A thread may then still be inside torch, and the interpreter's end would abort it: with the code
    of a crash instead of an interruption's.
    """
    code = main()
    if code == _INTERRUPTED:
        sys.stderr.flush()
        os._exit(code)
    return code


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit code."""
    streams.settle()
    try:
        code = _main(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader of stdout is gone (`| head`); Python would complain again at its own flush.
        streams.discard(sys.stdout)
        return _PIPE_CLOSED


def _main(args: list[str]) -> int:
    debug = _take(args, "--debug")
    if not args or args[0] in ("-h", "--help"):
        print(usage())
        return 0 if args else 2
    if args[0] == "--version":
        from importlib.metadata import version

        print(f"{PROG} {version('torchtitan-ckpt')}")
        return 0
    verb, rest = args[0], args[1:]
    if verb not in VERBS:
        guess = nearest(verb, VERBS)
        problem = Problem(
            code="cli.unknown-verb",
            what=f"there is no verb {verb}",
            where="the command line",
            expected=f"one of {', '.join(VERBS)}",
            actual=verb,
            fix=f"did you mean {PROG} {guess}?" if guess else f"{PROG} --help describes them",
        )
        _report(ConfigError(problem), as_json="--json" in rest)
        return ConfigError.exit_code
    try:
        return _run(verb, rest)
    except CheckpointError as error:
        if debug:
            traceback.print_exc()
        _report(error, as_json="--json" in rest)
        return error.exit_code
    except BrokenPipeError:
        raise  # no fault of ours: `main` ends quietly
    except OSError as error:
        if error.errno not in REFUSALS:
            return _internal(error, verb, debug, as_json="--json" in rest)
        if debug:
            traceback.print_exc()
        _report(_of_the_system(error), as_json="--json" in rest)
        return InputError.exit_code
    except KeyboardInterrupt:
        print(f"{PROG} {verb}: interrupted", file=sys.stderr)
        return _INTERRUPTED
    except Exception as error:
        return _internal(error, verb, debug, as_json="--json" in rest)


def _internal(error: Exception, verb: str, debug: bool, *, as_json: bool) -> int:
    """Report what nobody foresaw, or that torch or its device cannot be imported."""
    if debug:
        traceback.print_exc()
    from torchtitan_ckpt.device_failures import explain_import_error

    no_torch = explain_import_error(error)
    if no_torch is not None:
        _report(DeviceError(no_torch), as_json=as_json)
        return DeviceError.exit_code
    problem = Problem(
        code="internal",
        what=f"{PROG} {verb} failed: {type(error).__name__}: {error}",
        cause="a fault in torchtitan-ckpt",
        fix="run it again with --debug and report what it prints",
    )
    _report(CheckpointError(problem), as_json=as_json)
    return CheckpointError.exit_code


def _of_the_system(error: OSError) -> InputError:
    """A refusal of the operating system that no reader or writer has put into words of its own."""
    cause, fix = meaning_of(error)
    return InputError(
        Problem(
            code="system.refused",
            what=f"the operating system refused: {error.strerror}",
            where=os.fspath(error.filename) if error.filename is not None else "",
            cause=cause,
            fix=fix,
        )
    )


def usage() -> str:
    """The text of `--help`."""
    width = max(len(name) for name in VERBS)  # `map` is the verb of that name here
    verbs = "\n".join(f"  {name:<{width}}  {text}" for name, text in VERBS.items())
    return (
        f"usage: {PROG} <verb> [options]\n\n"
        "Checkpoints of torchtitan and torchtitan-npu: explain, inspect, verify, compare,\n"
        f"convert, plan, and check adapters against a contract.\n\nverbs\n{verbs}\n\n"
        f"`{PROG} <verb> --help` lists a verb's options. Every verb takes --json (for machines)\n"
        "and --debug (tracebacks).\n\n"
        "exit codes: 0 clean, 1 findings, 2 usage, 3 input unreadable or refused, 4 internal "
        "error,\n5 nothing was checked"
    )


def _take(args: list[str], flag: str) -> bool:
    found = flag in args
    while flag in args:
        args.remove(flag)
    return found


def _run(verb: str, rest: list[str]) -> int:
    module = importlib.import_module(f"torchtitan_ckpt.cli.{verb}")
    return int(module.run(_parse(module, verb, rest)))


def _parse(module: ModuleType, verb: str, rest: list[str]) -> Any:
    if hasattr(module, "parse"):
        return module.parse(rest)
    import tyro

    from torchtitan_ckpt import usage

    return usage.read(
        module.Args,
        rest,
        prog=f"{PROG} {verb}",
        help=f"{PROG} {verb} --help",
        description=VERBS[verb],
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff),
    )


def _report(error: CheckpointError, *, as_json: bool) -> None:
    if as_json:
        from dataclasses import asdict

        problems = [asdict(problem) for problem in error.problems]
        print(json.dumps({"error": type(error).__name__, "problems": problems}, indent=1))
    print(error, file=sys.stderr)
