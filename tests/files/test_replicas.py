"""TorchFT: each replica keeps its own dataloader state, found by its id at the full step."""

import pytest
import torch

from tests.files.toy import Loader, Toy, TrainState
from torchtitan_ckpt import CheckpointManager, folder
from torchtitan_ckpt.errors import ConfigError
from torchtitan_ckpt.replicas import Replica


class Member:
    """One replica: its own loader, the same model."""

    def __init__(self, base, name, participating_rank, **options):
        torch.manual_seed(0)
        self.model = Toy()
        self.loader, self.progress = Loader(), TrainState()
        self.manager = CheckpointManager(
            CheckpointManager.Config(enable=True, interval=2, **options),
            model_parts=[self.model],
            dataloader=self.loader,
            states={"train_state": self.progress},
            base_folder=str(base),
            replica=Replica(name, lambda: participating_rank),
        )

    def run(self, until, taken):
        """Advance to a step; `taken` batches a step, so that replicas differ."""
        saved = []
        while self.progress.step < until:
            self.progress.step += 1
            self.loader.taken += taken
            saved.append(self.manager.save(self.progress.step))
        return saved


@pytest.fixture
def members(tmp_path):
    made = [Member(tmp_path, "a0", 0), Member(tmp_path, "b1", 1)]
    yield tmp_path, made
    for member in made:
        member.manager.close()


def test_only_the_first_replica_saves_the_full_step_and_every_one_its_position(members):
    base, (a, b) = members
    assert a.run(4, taken=1) == [False, True, False, True]
    assert b.run(4, taken=10) == [False] * 4
    steps = base / "checkpoint"
    assert sorted(folder.list_steps(steps)) == [2, 4]
    for name in ("a0", "b1"):
        # Each step was saved; kept are those that a load may still want.
        assert sorted(folder.list_steps(steps / f"ft-replica-{name}")) == [2, 3, 4]


def test_each_replica_finds_its_own_position_at_the_full_steps_number(members):
    base, (a, b) = members
    a.run(2, taken=1)
    b.run(3, taken=10)  # one step further than the newest full checkpoint
    for name, expected in (("a0", 2), ("b1", 20)):
        again = Member(base, name, 0)
        assert again.manager.load()
        assert (again.progress.step, again.loader.taken) == (2, expected)
        again.manager.close()


def test_a_replica_without_a_record_starts_its_data_afresh_and_says_so(members, caplog):
    base, (a, _) = members
    a.run(2, taken=1)
    caplog.set_level("INFO")
    new = Member(base, "c2", 0)
    assert new.manager.load()
    assert (new.progress.step, new.loader.taken) == (2, 0)
    assert "no dataloader state of this replica for step 2" in caplog.text
    new.manager.close()


def test_switched_off_the_full_checkpoint_holds_the_position(tmp_path):
    off = {"enable_ft_dataloader_checkpoints": False}
    member = Member(tmp_path, "a0", 0, **off)
    member.run(2, taken=3)
    member.manager.close()
    assert not (tmp_path / "checkpoint" / "ft-replica-a0").exists()
    again = Member(tmp_path, "b1", 0, **off)
    assert again.manager.load()
    assert again.loader.taken == 6
    again.manager.close()


def test_load_only_saves_no_position_either(tmp_path):
    member = Member(tmp_path, "a0", 0, load_only=True)
    assert member.run(2, taken=1) == [False, False]
    member.manager.close()
    assert not (tmp_path / "checkpoint").exists()


def test_an_id_that_is_no_folder_name_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="replica-id"):
        Member(tmp_path, "../b", 0)
