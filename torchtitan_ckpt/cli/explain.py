"""`explain`: what a job with this command line would load from this disk, and why; loads nothing.

    torchtitan-ckpt explain NGPU=16 bash scripts/run_train.sh --dump_folder ./outputs/x \\
        --checkpoint.enable --checkpoint.initial_load_path ./outputs/y/checkpoint/step-500
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from torchtitan_ckpt.config import (
    DATALOADER,
    OPTIMIZER,
    TRAINING_STATES,
    CheckpointConfig,
    is_remote,
    validate,
)
from torchtitan_ckpt.decision import KIND_WORDS, LoadDecision, OutputView
from torchtitan_ckpt.errors import CheckpointError
from torchtitan_ckpt.resolve import resolve

HELP = """usage: torchtitan-ckpt explain [--json] <a job's command line, or its flags>

Say what a job would load, and why, without loading anything. The command line is the guide's:
  torchtitan-ckpt explain --dump_folder ./outputs/x --checkpoint.enable
  torchtitan-ckpt explain MODULE=my.registry CONFIG=my_config bash scripts/run_train.sh \\
      --checkpoint.enable --checkpoint.initial_load_path ./outputs/y/checkpoint/step-500

options
  --json            the decision as JSON
  --module M        the registry module (default: that of the reference job)
  --config C        the registry's function
  -h, --help        this text; `bash scripts/run_train.sh --help` lists the job's flags"""


@dataclass(frozen=True)
class Args:
    """The job's options and how to print."""

    checkpoint: CheckpointConfig
    dump_folder: str
    hf_assets_path: str | None
    json: bool = False


def parse(argv: Sequence[str]) -> Args:
    """Read a job's command line; the verb's own flags may stand anywhere in it."""
    words = list(argv)
    if not words or "-h" in words or "--help" in words:
        print(HELP)
        raise SystemExit(0 if words else 2)
    as_json = "--json" in words
    from torchtitan_ckpt.train.cli_args import parse_job

    job = parse_job([word for word in words if word != "--json"])
    return Args(job.checkpoint, job.dump_folder, job.hf_assets_path, as_json)


def run(args: Args) -> int:
    """Print the decision; an impossible command is the error that the job would raise."""
    from torchtitan_ckpt import survey

    config = args.checkpoint
    validate(
        config,
        states=TRAINING_STATES,
        dump_folder=args.dump_folder,
        hf_assets_path=args.hf_assets_path,
    )
    folder = config.folder if is_remote(config.folder) else f"{args.dump_folder}/{config.folder}"
    output = survey.look_at_output(folder, load_step=config.load_step)
    try:
        source = survey.look_at_source(config, args.hf_assets_path)
        decision = resolve(config, output, source, states=TRAINING_STATES)
    except CheckpointError:
        if not args.json:
            print(_steps(output), file=sys.stderr)
        raise
    if args.json:
        print(json.dumps(decision.to_dict(), indent=1))
    else:
        print("\n\n".join(part for part in _parts(config, decision, output) if part))
    return 0


def _parts(config: CheckpointConfig, decision: LoadDecision, output: OutputView) -> list[str]:
    return [
        _decision(decision),
        _steps(output),
        _list("ignored", [f"{i.option}: {i.why}" for i in decision.ignored]),
        _list("notices", decision.notices),
        _list("this job would save", _saves(config)),
        _list("questions", _questions(config, decision)),
    ]


def _decision(decision: LoadDecision) -> str:
    head = {
        "disabled": "nothing is loaded",
        "fresh": "nothing is loaded: a fresh start",
        "resume": f"resume from step {decision.step}",
        "initial": "start from other weights",
    }[decision.action]
    lines = [head, f"  why      {decision.reason}"]
    if decision.loads:
        lines.append(f"  path     {decision.path}")
        lines.append(f"  format   {decision.format}{' (quantized)' if decision.quantized else ''}")
        lines.append(f"  states   {', '.join(decision.states)}")
    return "\n".join(lines)


def _steps(output: OutputView) -> str:
    if not output.exists:
        return f"output folder {output.path}: does not exist"
    rows = [
        f"step-{s.step:<8} {KIND_WORDS[s.kind]}{f' ({s.why})' if s.why else ''}"
        for s in sorted(output.steps, key=lambda s: -s.step)
    ]
    rows += [f"{name:<13} only resembles a step and is left alone" for name in output.others]
    return _list(f"output folder {output.path}", rows or ["holds no step"])


def _saves(config: CheckpointConfig) -> list[str]:
    if not config.enable:
        return ["nothing: checkpoint.enable is off"]
    if config.load_only:
        return ["nothing: checkpoint.load_only is on"]
    if config.create_seed_checkpoint:
        return ["step-0, a seed: the model only; then it stops"]
    rows = ["step-1, full (enable_first_step_checkpoint)"] * config.enable_first_step_checkpoint
    rows.append(f"every {config.interval} steps a full DCP checkpoint, which can be resumed")
    if not config.last_save_model_only:
        rows.append("the last step full, in its own dtypes, which can be resumed")
    else:
        form = "Hugging Face safetensors" if config.last_save_in_hf else "DCP"
        rows.append(
            f"the last step as {form}, the model only in {config.export_dtype}: "
            "it cannot be resumed"
        )
    keep = config.keep_latest_k
    rows.append(f"the newest {keep} are kept" if keep else "every step is kept")
    return rows


def _questions(config: CheckpointConfig, decision: LoadDecision) -> list[str]:
    """The guide's FAQ, answered for this command and this disk."""
    rows = []
    unused = [i for i in decision.ignored if i.option == "checkpoint.initial_load_path"]
    if unused:
        rows.append(f"Why is initial_load_path not loaded? {unused[0].why}.")
        if decision.action == "resume":
            rows[-1] += " Use a new dump_folder to start from other weights."
    if config.last_save_model_only and config.enable and not config.load_only:
        rows.append(
            "Why can the last checkpoint not be resumed? last_save_model_only is on; "
            "--checkpoint.no-last_save_model_only keeps it full."
        )
    rows.append(
        "DCP or HF? DCP to resume and to change parallel degrees; HF to start from open weights "
        "and to export. HF files hold no optimizer, scheduler or step."
    )
    if OPTIMIZER in decision.states or decision.action in ("fresh", "initial"):
        rows.append(
            "SwapOptimizer and NotImplementedError (NoneType)? torch's flattening refuses None; "
            "this manager saves and loads such states, nothing needs to be excluded. For a job "
            "that uses torchtitan's own manager: save model only, and load with "
            f"--checkpoint.exclude_from_loading {OPTIMIZER},lr_scheduler,{DATALOADER},train_state."
        )
    return rows


def _list(title: str, rows: Sequence[str]) -> str:
    return "\n".join([title, *(f"  {row}" for row in rows)]) if rows else ""
