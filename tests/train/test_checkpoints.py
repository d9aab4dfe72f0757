"""A checkpoint is complete or invisible, whenever the process is killed."""

import os
import signal
import sys

import pytest
import torch

from memferry_ascend.errors import ConfigError, FerryError
from memferry_ascend.train import checkpoints


def save(folder, step, keep=2):
    return checkpoints.save(folder, step, {"x": torch.full((3,), float(step))}, {"options": {}}, keep=keep)


def test_newest_complete_is_found_and_old_ones_go(tmp_path):
    assert checkpoints.latest(tmp_path / "none") is None
    for step in (9, 10, 1_000_000):
        save(tmp_path, step)
    (tmp_path / "step-9999999.txt").write_text("not a folder")
    (tmp_path / ".tmp-step-9999999").mkdir()
    assert [c.name for c in checkpoints.complete(tmp_path)] == ["step-000010", "step-1000000"]
    state, meta = checkpoints.load(checkpoints.latest(tmp_path))
    assert state["x"].tolist() == [1e6] * 3
    assert meta["step"] == 1_000_000
    save(tmp_path, 2_000_000, keep=0)
    assert len(checkpoints.complete(tmp_path)) == 3
    assert not (tmp_path / ".tmp-step-9999999").exists()


def test_resume_argument_may_be_run_checkpoints_or_one_step(tmp_path):
    folder = tmp_path / "checkpoints"
    old, new = save(folder, 1), save(folder, 2)
    assert checkpoints.find(tmp_path) == checkpoints.find(folder) == checkpoints.find(new) == new
    assert checkpoints.find(old) == old
    for nothing in (tmp_path / "missing", old / "state.pt"):
        with pytest.raises(ConfigError, match="nothing to resume"):
            checkpoints.find(nothing)


def test_setting_aside_keeps_the_data_and_hides_it(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step, keep=0)
    for _ in range(2):
        checkpoints.set_aside_after(tmp_path, 1)
        assert [c.name for c in checkpoints.complete(tmp_path)] == ["step-000001"]
        assert checkpoints.load(tmp_path / "superseded-step-000003")[0]["x"].tolist() == [3.0] * 3
        save(tmp_path, 3)


@pytest.mark.parametrize("name", ["state.pt", "meta.json"])
@pytest.mark.parametrize("damage", ["missing", "empty", "cut"])
def test_damage_is_a_sentence(tmp_path, name, damage):
    file = save(tmp_path, 1) / name
    content = file.read_bytes()
    file.unlink()
    if damage != "missing":
        file.write_bytes(content[: len(content) // 2 if damage == "cut" else 0])
    with pytest.raises(FerryError, match=r"cannot read checkpoint .*resume from an older one"):
        checkpoints.load(tmp_path / "step-000001")


def test_code_in_a_checkpoint_is_not_run(tmp_path):
    checkpoint = save(tmp_path, 1)
    torch.save({"x": os.system}, checkpoint / "state.pt")
    with pytest.raises(FerryError, match="cannot read"):
        checkpoints.load(checkpoint)


def _child_killed_at(event, work):
    """Runs `work` in a forked child that SIGKILLs itself at its `event`-th audited call; True if it got that far."""
    pid = os.fork()
    if pid == 0:
        left = event

        def count(name, _args):
            nonlocal left
            if name == "open" or name.startswith(("os.", "shutil.")):
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        try:
            sys.addaudithook(count)
            work()
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.waitstatus_to_exitcode(status) == 0
    return False


def test_kill_at_any_system_call_leaves_a_readable_newest(tmp_path):
    seen = set()
    event = 0
    while True:
        event += 1
        folder = tmp_path / str(event)
        save(folder, 1, keep=1)

        def work(folder=folder):
            save(folder, 2, keep=1)
            save(folder, 3, keep=1)

        killed = _child_killed_at(event, work)
        newest = checkpoints.latest(folder)
        state, meta = checkpoints.load(newest)
        assert state["x"].tolist() == [float(meta["step"])] * 3
        assert newest.name == f"step-{meta['step']:06d}"
        seen.add(meta["step"])
        assert checkpoints.load(save(folder, 4, keep=1))[1]["step"] == 4  # leftovers are no obstacle
        assert sorted(f.name for f in folder.iterdir()) == ["step-000004"]
        if not killed:
            break
    assert seen == {1, 2, 3}
    assert event > 30
