"""Jobs that are killed and disturbed: small ones, whose state after each step is known beforehand.

`record` runs a job that nobody disturbs and gives a digest of the whole state after each step, and
of the model alone. These functions run in processes of the lab; they return plain values.
"""

import hashlib
import importlib
import os

import torch

from tests.faults import lab
from tests.files.toy import Job, Toy, bits


def warm_up():
    """What would cost each child anew: torch imports its compiler with the first optimizer."""
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    importlib.import_module("fsspec.implementations.local")


class Small(Toy):
    """Toy with two layers: a fault at each call of a save is affordable, as each item has one."""

    def __init__(self):
        super().__init__(layers=2)


class Wide(Small):
    """Small with a tensor above 1 MiB, which torch's own zip writer streams into the file."""

    def __init__(self):
        super().__init__()
        self.register_buffer("wide", torch.arange(300_007, dtype=torch.float32))


class Adapter:
    """Hugging Face names for Toy: a prefix, and the tied copy left out."""

    hf_assets_path = None
    fqn_to_index_mapping = None

    def to_hf(self, state):
        return {f"model.{key}": value for key, value in state.items() if key != "head.weight"}

    def from_hf(self, state):
        native = {key.removeprefix("model."): value for key, value in state.items()}
        return {**native, "head.weight": native["embed.weight"]}


def job(folder, seed=0, wide=False, **options):
    """A toy job whose manager saves every step into `folder`/checkpoint."""
    torch.manual_seed(seed)
    defaults = {"interval": 1, "keep_latest_k": 2}
    model = Wide() if wide else Small()
    return Job(folder, seed, model=model, adapter=Adapter(), **{**defaults, **options})


def digest(job):
    """A hash of everything that a full step holds."""
    total = hashlib.sha256(model_digest(job.model.state_dict()).encode())
    for name, parameter in job.model.named_parameters():
        for key, value in sorted(job.optimizer.state.get(parameter, {}).items()):
            total.update(f"{name}.{key} {value.dtype}".encode() + bits(value))
    groups = [
        sorted((k, v) for k, v in group.items() if k != "params")
        for group in job.optimizer.param_groups
    ]
    scheduler = {k: v for k, v in job.scheduler.state_dict().items() if k != "lr_lambdas"}
    rest = (groups, sorted(scheduler.items()), job.loader.taken, job.progress.state_dict())
    total.update(repr(rest).encode())
    return total.hexdigest()


def model_digest(state):
    """A hash of the model alone, under native names; the tied copy does not count."""
    total = hashlib.sha256()
    for key, value in sorted(state.items()):
        if key != "head.weight":
            total.update(f"{key} {value.dtype} {tuple(value.shape)}".encode() + bits(value))
    return total.hexdigest()


def record(folder, until, wide=False):
    """(digest of the full state, digest of the model) by step, from a job that saves nothing."""
    with job(folder, wide=wide, enable=False) as quiet:
        truth = [(digest(quiet), model_digest(quiet.model.state_dict()))]
        for step in range(1, until + 1):
            quiet.train(step)
            truth.append((digest(quiet), model_digest(quiet.model.state_dict())))
    return truth


def live(folder, until, load_step=-1, last=False, **options):
    """Load and train on, saving every step, and say what is certain to be on disk."""
    with job(folder, seed=3, **options) as running:
        lab.say(("start", os.getpid()))
        loaded = running.manager.load(load_step)
        if not loaded:
            start_as_recorded(running)
        lab.say(("loaded", running.progress.step if loaded else 0, digest(running)))
        waits = options.get("async_mode", "disabled") != "disabled"
        while (step := running.progress.step + 1) <= until:
            ends = last and step == until
            running.train(step, last=until if last else None)
            # A save that is asked for while another runs waits for that other one first.
            done = step - 1 if waits and not ends else step
            lab.say(("saved", done, "export" if ends else "full"))
    lab.say(("closed", until))


def start_as_recorded(fresh):
    """Give a job that found nothing the weights that the recorded one began with."""
    torch.manual_seed(0)
    fresh.model.load_state_dict(type(fresh.model)().state_dict())


def prepare(folder, steps, wide=False):
    """A folder in which a job has saved `steps` steps and closed."""
    with job(folder, wide=wide, keep_latest_k=0) as first:
        first.train(steps)
