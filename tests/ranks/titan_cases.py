"""torchtitan's own components, driven as its trainer drives them, for tests on rank processes.

Its FlexAttention has no backward on CPU, so gradients are set by hand; model, FSDP2, optimizers,
schedulers, data loader and both managers are real.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import IterableDataset


class Numbers(IterableDataset):
    """Counts; its position is its state."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        while True:
            self.at += 1
            yield self.at

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Progress:
    """What torchtitan's Trainer saves of itself."""

    def __init__(self):
        self.step, self.ntokens_seen = 0, 0

    def state_dict(self):
        return {"step": self.step, "ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state):
        self.step, self.ntokens_seen = state["step"], state["ntokens_seen"]


class TitanJob:
    def __init__(self, whose, folder, seed, **options):
        from torchtitan.components.checkpoint import CheckpointManager as Theirs
        from torchtitan.components.dataloader import ParallelAwareDataloader
        from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
        from torchtitan.components.optimizer.lr_scheduler import LRSchedulersContainer
        from torchtitan.models.qwen3 import Qwen3StateDictAdapter, model_registry

        from torchtitan_ckpt.titan import CheckpointManager as Ours

        torch.manual_seed(seed)
        config = model_registry(
            "debugmodel_moe" if options.pop("moe", False) else "debugmodel"
        ).model
        config.layers = config.layers[:2]
        self.model = config.build()
        with torch.no_grad():
            for p in self.model.parameters():
                p.copy_(torch.randn(p.shape).mul(64).round().div(64))
        if dist.get_world_size() > 1:
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            for layer in self.model.layers.values():
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        self.optimizers = OptimizersContainer.Config(
            param_groups=[
                ParamGroupConfig(
                    pattern="norm", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-2}
                ),
                ParamGroupConfig(
                    pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-3}
                ),
            ],
            implementation="for-loop",
        ).build(model_parts=[self.model])
        self.schedulers = LRSchedulersContainer.Config(warmup_steps=2).build(
            optimizers=self.optimizers, training_steps=20
        )
        self.loader = ParallelAwareDataloader(
            Numbers(), dist.get_rank(), dist.get_world_size(), batch_size=2
        )
        self.progress = Progress()
        manager = {"ours": Ours, "theirs": Theirs}[whose]
        self.manager = manager.Config(enable=True, interval=2, **options).build(
            dataloader=self.loader,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={"train_state": self.progress},
            sd_adapter=Qwen3StateDictAdapter(config, None),
            base_folder=folder,
        )

    def train(self, until, *, last=None):
        data = iter(self.loader)
        while self.progress.step < until:
            self.progress.step += 1
            self.progress.ntokens_seen += int(next(data).sum())
            self.optimizers.zero_grad()
            for n, p in enumerate(self.model.parameters()):
                local = p.to_local() if isinstance(p, DTensor) else p
                grad = torch.full_like(local, (n % 7 - 3) / 8 * self.progress.step)
                p.grad = (
                    DTensor.from_local(
                        grad, p.device_mesh, p.placements, shape=p.shape, stride=p.stride()
                    )
                    if isinstance(p, DTensor)
                    else grad
                )
            self.manager.maybe_wait_for_staging()
            self.optimizers.step()
            self.schedulers.step()
            self.manager.save(self.progress.step, last_step=self.progress.step == last)
        self.manager.maybe_wait_for_saving()

    def snapshot(self):
        """Everything a resume must bring back, as bytes and plain values."""
        out = {}
        parts = {**self.model.state_dict(), **self.optimizers.state_dict()}
        for key, value in parts.items():
            out[key] = bits(value) if isinstance(value, torch.Tensor) else value
        out["scheduler"] = [s.get_last_lr() for s in self.schedulers]
        out["loader"] = next(iter(self.loader)).tolist()
        out["progress"] = self.progress.state_dict()
        return out


def bits(value):
    """Dtype and bytes of this rank's part of a tensor."""
    local = value.to_local() if isinstance(value, DTensor) else value
    flat = local.detach().contiguous().view(-1)
    return str(local.dtype), flat.view(torch.uint8).numpy().tobytes()


def saved_by_one_loaded_by_the_other(folder, writer, reader, mode):
    """Save with one manager, load with the other; the names that differ."""
    first = TitanJob(writer, folder, seed=0, async_mode=mode)
    first.train(2)
    expected = first.snapshot()
    first.manager.close()
    second = TitanJob(reader, folder, seed=1, async_mode="disabled")
    fresh = {key: bits(value) for key, value in second.model.state_dict().items()}
    assert any(fresh[key] != expected[key] for key in fresh), "nothing would show a missing load"
    assert second.manager.load()
    got = second.snapshot()
    second.manager.close()
    return sorted(k for k in expected.keys() | got.keys() if expected.get(k) != got.get(k))


def resumed_equals_uninterrupted(folder):
    """Six steps without a stop against two and four, with ours; the names that differ."""
    whole = TitanJob("ours", f"{folder}/whole", seed=0)
    whole.train(6)
    expected = whole.snapshot()
    first = TitanJob("ours", f"{folder}/cut", seed=0)
    first.train(2)
    first.manager.close()
    second = TitanJob("ours", f"{folder}/cut", seed=1)
    assert second.manager.load()
    second.train(6)
    got = second.snapshot()
    return sorted(k for k in expected if expected[k] != got[k])


def last_save_in_hf(folder):
    """Our manager with torchtitan's own adapter: an HF export, loaded into a fresh model."""
    first = TitanJob("ours", f"{folder}/a", seed=0, last_save_in_hf=True, export_dtype="float32")
    first.train(1, last=1)
    expected = {
        k: v.full_tensor() if isinstance(v, DTensor) else v
        for k, v in first.model.state_dict().items()
    }
    second = TitanJob(
        "ours",
        f"{folder}/b",
        seed=1,
        initial_load_in_hf=True,
        initial_load_path=f"{folder}/a/checkpoint/step-1",
    )
    assert second.manager.load()
    got = {
        k: v.full_tensor() if isinstance(v, DTensor) else v
        for k, v in second.model.state_dict().items()
    }
    return [k for k in expected if not torch.equal(expected[k], got[k])]
