"""A small training job with everything that checkpoints stumble over, for tests of the manager.

Arithmetic is real; sizes are pairwise different; there is a tied pair, a frozen parameter, one that
never gets a gradient, integer, bool and 0-d buffers, and one pinned to float32.
"""

import torch
from torch import nn

from torchtitan_ckpt import CheckpointManager


class Toy(nn.Module):
    fp32_pinned = ("scale_bias",)

    def __init__(self, dtype=torch.float32, layers=12):
        super().__init__()
        self.embed = nn.Embedding(17, 6, dtype=dtype)
        self.layers = nn.ModuleList(nn.Linear(6, 6, dtype=dtype) for _ in range(layers))
        self.up = nn.Linear(6, 10, bias=False, dtype=dtype)
        self.down = nn.Linear(10, 6, bias=False, dtype=dtype)
        self.head = nn.Linear(6, 17, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.randn(3, dtype=dtype), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(5, dtype=dtype))
        self.register_buffer("table", torch.arange(300, 307))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("scalar", torch.tensor(2.5, dtype=dtype))
        self.register_buffer("scale_bias", torch.tensor([1.0000001, 3.3]))

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(self.down(torch.relu(self.up(x))))


class Loader:
    """Numbers its batches; the state is one bytes value a rank and the size, as torchtitan's."""

    def __init__(self, rank=0, size=1):
        self.rank, self.size, self.taken = rank, size, 0

    def __next__(self):
        generator = torch.Generator().manual_seed(1000 * self.taken + self.rank)
        self.taken += 1
        return torch.randint(17, (4, 5), generator=generator)

    def state_dict(self):
        return {f"dp_rank_{self.rank}": str(self.taken).encode(), "world_size": self.size}

    def load_state_dict(self, state):
        self.taken = int(state[f"dp_rank_{self.rank}"])


class TrainState:
    def __init__(self):
        self.step, self.history = 0, []

    def state_dict(self):
        return {"step": self.step, "history": list(self.history)}

    def load_state_dict(self, state):
        self.step, self.history = state["step"], list(state["history"])


class Job:
    """One process training `Toy`; `manager(...)` builds a CheckpointManager over all of it."""

    def __init__(self, folder, seed=0, dtype=torch.float32, model=None, adapter=None, **options):
        torch.manual_seed(seed)
        self.model = model or Toy(dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, foreach=False)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda n: 1 / (n + 1))
        self.loader, self.progress = Loader(), TrainState()
        defaults = {"enable": True, "interval": 2, "keep_latest_k": 0}
        self.manager = CheckpointManager(
            CheckpointManager.Config(**{**defaults, **options}),
            model_parts=[self.model],
            optimizers=[self.optimizer],
            lr_schedulers=[self.scheduler],
            dataloader=self.loader,
            states={"train_state": self.progress},
            sd_adapter=adapter,
            base_folder=str(folder),
        )

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.manager.close()

    def train(self, until, last=None):
        """Train and save; the losses of the steps taken, as exact hexadecimal."""
        losses = []
        while self.progress.step < until:
            self.progress.step += 1
            tokens = next(self.loader)
            loss = self.model(tokens).float().square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.manager.maybe_wait_for_staging()
            self.optimizer.step()
            self.scheduler.step()
            losses.append(loss.item().hex())
            self.progress.history.append(losses[-1])
            self.manager.save(self.progress.step, last_step=self.progress.step == last)
        return losses


def bits(tensor):
    """The bytes of a tensor, for comparisons that NaN and -0.0 cannot escape."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def same_state(a, b):
    """Names in which two jobs differ bitwise: model, moments, scheduler, loader, progress."""
    wrong = []
    theirs = b.model.state_dict()
    for key, value in a.model.state_dict().items():
        if value.dtype != theirs[key].dtype or bits(value) != bits(theirs[key]):
            wrong.append(key)
    for (name, p), q in zip(a.model.named_parameters(), b.model.parameters(), strict=True):
        mine, other = a.optimizer.state.get(p, {}), b.optimizer.state.get(q, {})
        if mine.keys() != other.keys():
            wrong.append(f"optimizer.{name}: {set(mine) ^ set(other)}")
            continue
        for key, value in mine.items():
            if value.dtype != other[key].dtype or bits(value) != bits(other[key]):
                wrong.append(f"optimizer.{name}.{key}")
    groups = [
        [{k: v for k, v in g.items() if k != "params"} for g in job.optimizer.param_groups]
        for job in (a, b)
    ]
    if groups[0] != groups[1]:
        wrong.append("param_groups")
    if a.scheduler.state_dict() | {"lr_lambdas": 0} != b.scheduler.state_dict() | {"lr_lambdas": 0}:
        wrong.append("scheduler")
    if a.loader.taken != b.loader.taken:
        wrong.append("loader")
    if a.progress.state_dict() != b.progress.state_dict():
        wrong.append("progress")
    return wrong
