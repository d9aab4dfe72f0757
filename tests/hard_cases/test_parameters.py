"""What users do with parameters, against plain PyTorch's numbers, in every mode and with slow workers and copies."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memferry_ascend as mf
from memferry_ascend import runtime
from memferry_ascend.errors import FerryError
from memferry_ascend.planner import Mode

from .helpers import SlowUpdates, adamw, both, branches, close_to, ferry, some_steps, tokens


def test_shared_modules_keep_both_names(mode: Mode | str) -> None:
    torch.manual_seed(0)
    model = branches()
    model.parts[2] = model.parts[0]
    fresh = copy.deepcopy(model)

    plain = copy.deepcopy(model)
    want = some_steps(plain, adamw(plain.parameters()), tokens(4))
    with ferry(model, mode) as engine:
        assert some_steps(engine.model, engine.optimizer, tokens(4)) == pytest.approx(want, rel=2e-6)
        fresh.load_state_dict(engine.state_dict()["model"])
    close_to(fresh, plain)


class Lora(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.down, self.up = base, nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


@pytest.mark.pairwise
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_frozen_then_lora(mode: Mode | str, precision: str) -> None:
    torch.manual_seed(0)
    model = branches()
    with ferry(model, mode) as engine:  # trained whole first, and closed
        engine.model(tokens(1)[0]).backward()
        engine.optimizer.step()
    model.requires_grad_(False)
    for i in range(4):
        model.parts[i] = Lora(model.parts[i])
    frozen = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    if precision == "fp32":

        def loop(model: nn.Module, opt: torch.optim.Optimizer) -> list[float]:
            for x in tokens(4):
                model(x).backward()
                opt.step()
                opt.zero_grad()
            return []

        both(model, mode, loop, optimizer=lambda ps: adamw([p for p in ps if p.requires_grad]))
    else:
        config = mf.Config(precision="bf16")
        engine = ferry(model, mode, config, lambda ps: adamw([p for p in ps if p.requires_grad]))
        with engine:
            for x in tokens(4):
                engine.model(x).backward()
                engine.optimizer.step()
            kinds = {what for _, what, _ in engine.memory_report()}
            assert "parameters" in kinds
    for name, p in model.named_parameters():
        if name in frozen:
            want = frozen[name] if precision == "fp32" else frozen[name].bfloat16().float()
            assert torch.equal(p.detach(), want), name


def test_reads_right_after_step_see_the_new_values(mode: Mode | str, cpu: runtime.Runtime) -> None:
    cpu.backend.disturb = SlowUpdates()

    def loop(model: nn.Module, opt: torch.optim.Optimizer) -> list[float]:
        ema = [p.detach().clone() for p in model.parameters()]
        seen = []
        for x in tokens(3):
            model(x).backward()
            opt.step()
            for e, p in zip(ema, model.parameters(), strict=True):
                e.lerp_(p.detach(), 0.3)
            opt.zero_grad()
            model(x, (1,)).backward()
            opt.step()
            with torch.no_grad():
                seen.append(float(torch.stack([p.norm() for p in model.parameters()]).norm()))
                seen += [p.mean().item() for p in model.parameters()]
            opt.zero_grad()
            model(x).backward()
            opt.step()
            with torch.no_grad():
                torch._foreach_lerp_(ema, list(model.parameters()), 0.3)
            model(x, (3,))  # a pass that needs little: what it has not waited for must still be waited for
            seen += [p.data.sum().item() for p in model.parameters()]
            opt.zero_grad()
        return seen + [float(e.sum()) for e in ema]

    both(branches(), mode, lambda m, o: torch.tensor(loop(m, o)).tolist())


def test_deepcopy_while_updates_are_in_flight(mode: Mode | str, cpu: runtime.Runtime) -> None:
    cpu.backend.disturb = SlowUpdates()
    model = branches()
    plain = copy.deepcopy(model)
    opt = adamw(plain.parameters())
    plain(tokens(1)[0]).backward()
    opt.step()
    with ferry(model, mode) as engine:
        engine.model(tokens(1)[0]).backward()
        engine.optimizer.step()
        twin = copy.deepcopy(engine.model)
        close_to(twin, plain)
        want = {k: v.clone() for k, v in twin.state_dict().items()}
        engine.model(tokens(1)[0]).backward()
        engine.optimizer.step()
        engine.synchronize()
        assert all(torch.equal(v, want[k]) for k, v in twin.state_dict().items())
        twin(tokens(1)[0]).backward()  # a plain model of its own
        adamw(twin.parameters()).step()
        twin.load_state_dict(want)
    close_to(twin, plain)


def test_model_state_dict_and_load_state_dict(mode: Mode | str, cpu: runtime.Runtime) -> None:
    cpu.backend.disturb = SlowUpdates()
    other = branches()
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(0.5)

    def loop(model: nn.Module, opt: torch.optim.Optimizer) -> list[float]:
        model(tokens(1)[0]).backward()
        opt.step()
        saved = copy.deepcopy(model.state_dict())
        opt.zero_grad()
        model(tokens(1)[0]).backward()
        model.load_state_dict(other.state_dict())
        opt.step()
        model.load_state_dict(saved)
        opt.zero_grad()
        loss = model(tokens(1)[0])
        loss.backward()
        opt.step()
        with pytest.raises(RuntimeError, match="Missing key"):
            model.load_state_dict({})
        with pytest.raises(RuntimeError, match="size mismatch"):
            model.load_state_dict(saved | {"head.bias": torch.zeros(3)})
        return [float(loss.detach())]

    both(branches(), mode, loop)


def test_edit(mode: Mode | str) -> None:
    model = branches()
    plain = copy.deepcopy(model)
    opt = adamw(plain.parameters())

    def change(m: nn.Module) -> None:
        with torch.no_grad():
            m.head.weight[0] = 0.25
            m.parts[1].bias.zero_()
            m.parts[2].weight.data = torch.full((8, 8), 0.125)
            nn.init.constant_(m.embed.weight, 0.5)

    plain(tokens(1)[0]).backward()
    opt.step()
    change(plain)
    opt.zero_grad()
    plain(tokens(1)[0]).backward()
    opt.step()
    with ferry(model, mode) as engine:
        engine.model(tokens(1)[0]).backward()
        engine.optimizer.step()
        with engine.edit() as m:
            change(m)
        engine.model(tokens(1)[0]).backward()
        engine.optimizer.step()
        with pytest.raises(KeyError), engine.edit():
            raise KeyError("in the middle")
    close_to(model, plain)


def test_edit_keeps_the_low_half_of_what_it_does_not_touch(mode: Mode | str) -> None:
    model = branches()
    with ferry(model, mode, mf.Config(precision="bf16")) as engine:
        before = engine.state_dict()["model"]
        with engine.edit() as m, torch.no_grad():
            m.head.weight[0] = 0.3
        after = engine.state_dict()["model"]
    assert torch.equal(after["head.weight"][0], torch.full((8,), 0.3).bfloat16().float())
    after["head.weight"][0] = before["head.weight"][0]
    assert all(torch.equal(after[k], before[k]) for k in before)


def test_edits_outside_edit_are_noticed(mode: Mode | str) -> None:
    with ferry(branches(), mode) as engine:
        with torch.no_grad():
            engine.model.head.weight.zero_()
        with pytest.raises(FerryError, match=r"'head.weight' was edited in place outside engine.edit"):
            engine.model(tokens(1)[0])
        with engine.edit():
            pass
        engine.model(tokens(1)[0]).backward()
        with torch.no_grad():
            nn.init.ones_(engine.model.head.weight)
        with pytest.raises(FerryError, match="edited in place"):
            engine.optimizer.step()
        with engine.edit():
            pass
        engine.model.half()
        with pytest.raises(FerryError, match="other storage"):
            engine.model(tokens(1)[0])


class MixedTypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.norm = nn.Embedding(11, 8), nn.Linear(8, 8), nn.LayerNorm(8)
        self.head = nn.Linear(8, 11)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(self.embed(x))
        h = self.norm(h.to(self.norm.weight.dtype)).to(self.head.weight.dtype)
        return F.cross_entropy(self.head(h).flatten(0, 1).float(), x.flatten())


@pytest.mark.pairwise
@pytest.mark.parametrize("pattern", ["norm", "LayerNorm", "*"])
def test_mixed_dtypes(mode: Mode | str, pattern: str) -> None:
    torch.manual_seed(0)
    model = MixedTypes()
    model.up.bfloat16()  # a bf16 parameter in an fp32 model: fp32 masters all the same
    plain = copy.deepcopy(model).float()
    with ferry(model, mode, mf.Config(keep_fp32=(pattern,))) as engine:
        kept = {n for n, p in engine.model.named_parameters() if p.dtype is torch.float32}
        everything = {n for n, _ in model.named_parameters()}
        assert kept == (everything if pattern == "*" else {"norm.weight", "norm.bias"})
        opt = adamw(plain.parameters())
        for x in tokens(5):
            loss = engine.model(x)
            loss.backward()
            engine.optimizer.step()
            engine.optimizer.zero_grad()
            want = plain(x)
            want.backward()
            opt.step()
            opt.zero_grad()
            tolerance = 1e-5 if pattern == "*" else 0.03
            assert float(loss.detach()) == pytest.approx(float(want.detach()), rel=tolerance)
    assert model.up.weight.dtype is torch.bfloat16 and model.head.weight.dtype is torch.float32


def test_a_second_thread_may_read_a_snapshot(mode: Mode | str) -> None:
    """`state_dict` from another thread, as a logger does, is of one moment per parameter."""
    with ferry(branches(), mode) as engine:
        out: list[Any] = []
        for x in tokens(3):
            engine.model(x).backward()
            engine.optimizer.step()
            thread = threading.Thread(target=lambda: out.append(engine.model.state_dict()))
            thread.start()
            thread.join()
        engine.synchronize()
        want = engine.model.state_dict()
    assert all(torch.equal(v, want[k]) for k, v in out[-1].items())
