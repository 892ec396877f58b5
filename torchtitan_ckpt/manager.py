"""CheckpointManager: when, what and where a job saves, loads and removes checkpoints.

It has torchtitan's interface and does what the checkpoint guide says. No tensor work is done here:
`job` gathers and restores state, `formats` read and write, `saving` publishes, `loading` compares,
`resolve` decides.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torchtitan_ckpt import config as options
from torchtitan_ckpt import (
    device,
    experts,
    export,
    loading,
    losses,
    owner,
    retention,
    saving,
    survey,
)
from torchtitan_ckpt import folder as folders
from torchtitan_ckpt.adapter import StateDictAdapter
from torchtitan_ckpt.agree import same
from torchtitan_ckpt.collective import Ranks
from torchtitan_ckpt.config import CheckpointConfig, is_remote
from torchtitan_ckpt.decision import LoadDecision, StepKind
from torchtitan_ckpt.errors import InputError
from torchtitan_ckpt.job import JobState
from torchtitan_ckpt.replicas import Replica, ReplicaStates
from torchtitan_ckpt.resolve import resolve
from torchtitan_ckpt.state.staging import Stager

logger = logging.getLogger(__name__)


class CheckpointManager:
    """Saves and loads the checkpoints of one training job.

    Arguments are torchtitan's: `model_parts` are the modules that this rank holds, `optimizers` and
    `lr_schedulers` an iterable each (or torchtitan's containers), `dataloader` and every value of
    `states` have `state_dict` and `load_state_dict`, `sd_adapter` follows torchtitan's protocol.
    `process_group` defaults to all ranks; `replica` is this process's TorchFT replica.

    The constructor raises ConfigError with every contradiction in `config`, before anything is
    read. Methods raise `CheckpointError`s, on every rank together.
    """

    Config = CheckpointConfig

    def __init__(
        self,
        config: CheckpointConfig,
        *,
        model_parts: nn.Module | Iterable[nn.Module],
        optimizers: Any = (),
        lr_schedulers: Any = (),
        dataloader: Any = None,
        states: Mapping[str, Any] | None = None,
        sd_adapter: StateDictAdapter | None = None,
        base_folder: str | os.PathLike[str] = "",
        hf_assets_path: str | None = None,
        process_group: dist.ProcessGroup | None = None,
        replica: Replica | None = None,
    ) -> None:
        self.config = config
        self.enable = config.enable
        self._closed = False
        self._pending: Future[str] | None = None
        self._stager: Stager | None = None
        if not config.enable:
            return
        self._job = JobState(model_parts, optimizers, lr_schedulers, dataloader, states or {})
        self._adapter = sd_adapter
        self._hf_assets_path = hf_assets_path or getattr(sd_adapter, "hf_assets_path", None)
        self._ranks = Ranks.current(process_group)
        base_folder = os.fspath(base_folder or "")
        with self._ranks.together("checking the options"):
            model = self._job.model_state()
            options.validate(
                config,
                states=self._job.names,
                dump_folder=base_folder,
                hf_assets_path=self._hf_assets_path,
                ranks=self._ranks.size,
                adapter=sd_adapter is not None,
                others=self._job.state_problems(model),
            )
        # Ranks with other options would wait for each other in other places, hours from here.
        wanted = {f"checkpoint.{name}": value for name, value in asdict(config).items()}
        same(self._ranks, wanted, code="ranks.options", fix="give all ranks the same options")
        tensor = next(iter(model.values()), None)
        self._device = device.of("cpu" if tensor is None else tensor)
        self.folder = _join(base_folder, config.folder)
        self._in_use: set[int] = set()
        self._full: dict[str, bool] = {}
        self._replica = ReplicaStates(replica, self.folder, self._job, config) if replica else None
        self._background: ThreadPoolExecutor | None = None
        self._background_ranks: Ranks | None = None
        if config.async_mode != "disabled":
            self._stager = self._make_stager()
            self._background = ThreadPoolExecutor(1, thread_name_prefix="ckpt-save")
            self._background_ranks = self._ranks.fork()
        self._claim_folder()
        self._purger = self._start_purger()

    # --- saving

    @torch.no_grad()
    def save(self, step: int, last_step: bool = False) -> bool:
        """Save if `step` is due: every `interval` steps, the last step, the first if so configured.

        Returns whether a checkpoint was written or, in an async mode, staged. A failed background
        save is raised here.
        """
        if not self.enable:
            return False
        step = folders.whole(step)
        if self._replica is not None and self._replica.enabled and not self.config.load_only:
            self._replica.save(step, self._ranks)
        if not self._should_save(step, last_step):
            return False
        if self._closed:
            raise saving.closed(step)
        self.maybe_wait_for_saving()
        said = {"the step to save": step, "whether it is the last": bool(last_step)}
        same(self._ranks, said, code="ranks.step", fix="call save alike on every rank")
        start = time.monotonic()
        if self.config.create_seed_checkpoint:
            self._save_model(step, dtype=None)
        elif last_step and self.config.last_save_in_hf:
            self._save_hf(step)
        elif last_step and self.config.last_save_model_only:
            self._save_model(step, dtype=getattr(torch, self.config.export_dtype))
        else:
            self._save_full(step, wait=last_step)
        verb = "staged" if self._pending else "saved"
        self._log(logging.INFO, f"{verb} step {step} in {time.monotonic() - start:.2f} s")
        return True

    def maybe_wait_for_staging(self) -> None:
        """Wait until the live tensors may change: the copy of the last async save is complete."""
        if self.enable and self._stager is not None:
            self._stager.wait()

    def maybe_wait_for_saving(self) -> None:
        """Wait for a save in the background; raises what made it fail."""
        if self.enable and self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()

    @property
    def pending(self) -> Future[str] | None:
        """The save in the background, if there is one."""
        return self._pending if self.enable else None

    def close(self) -> None:
        """Wait for what runs in the background and release it; raises what made a save fail."""
        if not self.enable or self._closed:
            return
        self._closed = True
        try:
            self.maybe_wait_for_saving()
        finally:
            if self._background is not None:
                self._background.shutdown()
            if self._stager is not None:
                self._stager.close()
            if self._purger is not None:
                self._purger.close()
            if self._heartbeat is not None:
                self._heartbeat.close()
                owner.release(Path(self.folder))

    def _should_save(self, step: int, last_step: bool) -> bool:
        config = self.config
        if config.load_only:
            return False
        if config.create_seed_checkpoint:
            return step == 0
        if step < 1:
            return False
        if self._replica is not None and not self._replica.participates:
            return False
        first = step == 1 and config.enable_first_step_checkpoint
        return first or last_step or step % config.interval == 0

    def _save_full(self, step: int, *, wait: bool) -> None:
        with self._ranks.together(f"collecting the state of step {step}"):
            flat = self._job.collect()
        self._log(logging.WARNING, losses.warning(flat, step, self.config.keep_latest_k))
        if self._stager is None:
            self._finish(step, self._write_dcp(step, flat), full=True)
            return
        assert self._background is not None
        assert self._background_ranks is not None
        ranks, stager = self._background_ranks, self._stager
        with self._ranks.together(f"staging step {step}"):
            staged = stager.snapshot(flat)

        def run() -> str:
            with saving.in_background(ranks, step):
                stager.wait()
                path = saving.write_dcp(
                    ranks, self.folder, step, staged, self.config, watched=False
                )
                self._finish(step, path, full=True)
            return path

        try:
            self._pending = self._background.submit(run)
        except RuntimeError:  # the interpreter is ending and starts no thread any more
            run()
        if wait:
            self.maybe_wait_for_saving()

    def _save_model(self, step: int, dtype: torch.dtype | None) -> None:
        with self._ranks.together(f"collecting the model of step {step}"):
            flat = export.native_model(self._job, dtype)
            if dtype is not None:
                form = self.config.save_expert_format
                flat = experts.in_format(self._adapter, flat, form)
        self._finish(step, self._write_dcp(step, flat), full=False)

    def _save_hf(self, step: int) -> None:
        adapter, config = self._adapter, self.config
        assert adapter is not None
        with self._ranks.together(f"converting the model of step {step}"):
            state = export.hf_model(self._job, adapter, getattr(torch, config.export_dtype))

        def write(path: str) -> None:
            export.save_hf(state, adapter, path, step, self._ranks, config, self._hf_assets_path)

        path = saving.write_step(self._ranks, self.folder, step, write, sync=config.sync_files)
        self._finish(step, path, full=False)

    def _write_dcp(self, step: int, flat: Mapping[str, Any]) -> str:
        return saving.write_dcp(self._ranks, self.folder, step, flat, self.config, watched=True)

    def _finish(self, step: int, path: str, *, full: bool) -> None:
        """What follows a complete save."""
        self._full[path] = full
        if self.config.empty_cache_after_save:
            self._device.empty_cache()
        if self._owns_folder:
            saving.renew(Path(self.folder))
        if self._purger is not None:
            self._purger.request()

    # --- loading

    def decide(self, step: int | None = None) -> LoadDecision:
        """What `load` would do now, without doing it. One decision for all ranks."""
        decision: LoadDecision | None = None
        with self._ranks.together("deciding what to load"):
            if self._ranks.rank == 0:
                wanted = self.config.load_step if step is None else step
                output = survey.look_at_output(
                    self.folder, load_step=wanted, states=self._job.names
                )
                source = survey.look_at_source(self.config, self._hf_assets_path, self._job.names)
                decision = resolve(self.config, output, source, states=self._job.names, step=step)
        decision = self._ranks.broadcast(decision)
        assert decision is not None
        return decision

    @torch.no_grad()
    def load(self, step: int = -1) -> bool:
        """Load what `resolve` decides; returns whether anything was loaded.

        `step` -1 stands for `config.load_step`. Everything is compared before any data is read;
        a mismatch changes nothing. Damage that only reading finds leaves the model's tensors partly
        written and everything else as it was; the error then names an older step to go on from.
        """
        if not self.enable:
            return False
        self.maybe_wait_for_saving()
        step = folders.whole(step)
        decision = self.decide(None if step == -1 else step)
        self._say(decision)
        if not decision.loads:
            return False
        if self._replica is not None and self._replica.enabled:
            # Each replica has read data of its own; the full checkpoint's place is another's.
            kept = tuple(name for name in decision.states if name != options.DATALOADER)
            decision = replace(decision, states=kept)
        start = time.monotonic()
        if decision.step is not None:
            self._in_use.add(decision.step)
        try:
            if decision.format == "hf":
                assert self._adapter is not None
                notes = loading.load_hf(
                    decision, self._job, self._adapter, self.config, self._ranks
                )
            else:
                notes = loading.load_dcp(
                    decision, self._job, self._adapter, self.config, self._ranks
                )
        except InputError as error:
            if decision.step is None:
                raise
            older = survey.older_step(self.folder, decision.step, self._job.names, self._ranks)
            raise type(error)(*error.problems, older) from error
        finally:
            if decision.step is not None:
                self._in_use.discard(decision.step)
        if self._replica is not None and self._replica.enabled and decision.step:
            notes += self._replica.load(decision.step, self._ranks)
        for note in notes:
            self._log(logging.INFO, note)
        self._log(
            logging.INFO,
            f"loaded {', '.join(decision.states)} from {decision.path} "
            f"in {time.monotonic() - start:.2f} s",
        )
        return True

    def _say(self, decision: LoadDecision) -> None:
        self._log(logging.INFO, f"{decision.action}: {decision.reason}")
        for notice in decision.notices:
            self._log(logging.WARNING, notice)
        for ignored in decision.ignored:
            self._log(logging.WARNING, f"{ignored.option} is ignored: {ignored.why}")

    def _log(self, level: int, text: str) -> None:
        if text and self._ranks.rank == 0:
            logger.log(level, "%s", text)

    # --- the folder

    def _claim_folder(self) -> None:
        """Say so when another job saves here; then sign as the owner."""
        self._owns_folder = (
            self._ranks.rank == 0 and not self.config.load_only and not is_remote(self.folder)
        )
        with self._ranks.together("claiming the output folder"):
            if self._owns_folder:
                saving.claim(Path(self.folder))
        self._heartbeat = owner.Heartbeat(Path(self.folder)) if self._owns_folder else None

    def _make_stager(self) -> Stager:
        """Pinned staging runs beside the training; plain staging is complete when it returns."""
        if self.config.async_mode != "async_with_pinned_mem":
            return Stager()
        place = self._device
        if place.pin_refusal():
            self._log(
                logging.WARNING,
                f"async_with_pinned_mem stages in ordinary memory: {place.pin_refusal()}",
            )
            return Stager()
        return Stager(pin=True, device=place)

    def _start_purger(self) -> retention.Purger | None:
        if self._ranks.rank != 0 or self.config.load_only:
            return None
        if not is_remote(self.folder):
            return retention.Purger(self._surplus)
        if self.config.keep_latest_k:
            logger.warning("keep_latest_k does nothing in a remote folder: every step stays")
        return None

    def _surplus(self) -> list[Path]:
        folder = Path(self.folder)
        steps = folders.list_steps(folder)
        newest_full = next(
            (steps[n] for n in sorted(steps, reverse=True) if self._is_full(steps[n])), None
        )
        retention.remove_leftovers(folder, newest_full)
        return retention.surplus(
            folder, self.config.keep_latest_k, in_use=self._in_use, is_full=self._is_full
        )

    def _is_full(self, path: Path) -> bool:
        known = self._full.get(str(path))
        if known is None:
            step = folders.step_number(path.name) or 0
            known = survey.classify(str(path), step, self._job.names).kind is StepKind.FULL
            self._full[str(path)] = known
        return known


def _join(base: str, name: str) -> str:
    if is_remote(name) or not base:
        return name
    return f"{base.rstrip('/')}/{name}" if is_remote(base) else str(Path(base) / name)
