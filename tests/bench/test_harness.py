"""The benchmark harness on the CPU backend: the systems train alike, and a run leaves the records it promises."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from memferry_ascend.bench import bound, command, layers, measure, models, plot, processes
from memferry_ascend.bench.measure import Timing
from memferry_ascend.bench.systems import Setup
from memferry_ascend.bench.txl import TransformerXL, TxlConfig

from memferry_ascend.errors import ConfigError

OFFLOAD = ("native-offload", "memferry-step", "memferry-backward")
SHORT = Timing(warmup=2, iterations=6)
LONG = Timing(warmup=2, iterations=10)
NOISE = 3e-4
"""Of a bf16 model's loss around 4.5: parameters that round the other way."""
FIELDS = {
    "model", "system", "batch", "seq", "clip", "accumulate", "tokens", "status", "reason", "iter_ms", "peak_device_gib",
    "host_gib", "busy_share", "versions",
}  # fmt: skip

pytestmark = pytest.mark.usefixtures("less_work")


def setup(**fields: Any) -> Setup:
    return Setup(batch=2, seq=8, backend="cpu", threads=1, **fields)


@pytest.mark.parametrize(("clip", "accumulate"), [(None, 1), (0.05, 1), (0.05, 2)])
def test_systems_train_alike(clip: float | None, accumulate: int) -> None:
    """Same weights, batches, hyperparameters and fp32 masters: the losses of plain training, to bf16 noise."""
    plain = measure.row("tiny", "plain", setup(clip=clip, accumulate=accumulate), LONG)
    assert plain["status"] == "ok", plain["reason"]
    assert plain["losses"][-4] < plain["losses"][0] - 0.05  # batches come in turns of four
    if clip is not None:  # a system that ignored it would stand out
        free = measure.row("tiny", "plain", setup(accumulate=accumulate), LONG)
        assert max(abs(a - b) for a, b in zip(plain["losses"], free["losses"], strict=True)) > 3 * NOISE
    for system in OFFLOAD:
        row = measure.row("tiny", system, setup(clip=clip, accumulate=accumulate), LONG)
        assert row["status"] == "ok", (system, row["reason"])
        assert row["losses"] == pytest.approx(plain["losses"], abs=NOISE), system


def test_plain_is_torchs_adamw() -> None:
    """The reference of all rows against torch.optim.AdamW on fp32 masters, written out."""
    model = models.build("tiny")
    masters = [torch.nn.Parameter(p.detach().float()) for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-4)
    pool = models.batches(model, measure.POOL, 2, 8, torch.device("cpu"))
    expected = []
    for i in range(8):
        loss = model(**pool[i % measure.POOL]).loss
        loss.backward()
        for master, p in zip(masters, model.parameters(), strict=True):
            assert p.grad is not None
            master.grad, p.grad = p.grad.float(), None
        torch.nn.utils.clip_grad_norm_(masters, 0.05)
        optimizer.step()
        with torch.no_grad():
            for master, p in zip(masters, model.parameters(), strict=True):
                p.copy_(master)
        expected.append(float(loss.detach()))
    row = measure.row("tiny", "plain", setup(clip=0.05), SHORT)
    assert row["losses"] == pytest.approx(expected, abs=1e-4)


def test_weights_and_batches_are_the_same_every_time_and_bf16() -> None:
    first, second, other = models.build("tiny", 1), models.build("tiny", 1), models.build("tiny", 2)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert a.dtype is torch.bfloat16 and torch.equal(a, b)
    assert not torch.equal(first.embed.weight, other.embed.weight)  # type: ignore[union-attr, arg-type]
    assert 0.015 < float(first.embed.weight.detach().float().std()) < 0.025  # type: ignore[union-attr, operator]
    assert bool((first.norm.weight == 1).all()) and not first.norm.bias.any()  # type: ignore[union-attr, operator, arg-type]
    a, b = (models.batches(first, 2, 2, 8, torch.device("cpu"), seed=3)[1]["input_ids"] for _ in range(2))
    assert torch.equal(a, b) and int(a.min()) >= 5


def test_transformer_xl_sees_its_memory_and_not_the_future() -> None:
    """Splitting a text into two segments gives what one segment gives, because the memory holds the first."""
    torch.manual_seed(0)
    config = TxlConfig(vocab=32, hidden=16, layers=1, heads=2, memory=6)
    model = TransformerXL(config)
    text = torch.randint(0, 32, (3, 12))
    whole, parts = _hidden(model, [text]), _hidden(model, [text[:, :6], text[:, 6:]])
    torch.testing.assert_close(whole, parts)
    changed = text.clone()
    changed[:, 8:] = 0
    torch.testing.assert_close(whole[:, :8], _hidden(model, [changed])[:, :8])
    assert not torch.allclose(whole[:, 8:], _hidden(model, [changed])[:, 8:])


def _hidden(model: TransformerXL, segments: list[torch.Tensor]) -> torch.Tensor:
    model._memory = None
    seen: list[torch.Tensor] = []
    handle = model.norm.register_forward_hook(lambda _m, _i, out: seen.append(out))
    for segment in segments:
        model(segment, segment)
    handle.remove()
    return torch.cat(seen, 1)


def test_relative_scores_are_those_of_the_definition() -> None:
    """Attention with every term written out: content and position scores, each with its bias (Dai et al., eq. 3.3)."""
    torch.manual_seed(0)
    model = TransformerXL(TxlConfig(vocab=8, hidden=8, layers=1, heads=2, memory=4))
    attention = model.layers[0].attention
    torch.nn.init.normal_(attention.content_bias)
    torch.nn.init.normal_(attention.position_bias)
    x, context = torch.randn(1, 3, 8), torch.randn(1, 5, 8)
    distances = model._distances(5, x)
    q, p = attention.query(x)[0], attention.position(distances)
    k, v = attention.key_value(context)[0].chunk(2, -1)
    out = torch.zeros(3, 8)
    for h in range(2):
        part = slice(4 * h, 4 * h + 4)
        for i in range(3):
            visible = range(2 + i + 1)
            scores = [
                (q[i, part] + attention.content_bias[h, 0]) @ k[j, part]
                + (q[i, part] + attention.position_bias[h, 0]) @ p[4 - (2 + i - j), part]
                for j in visible
            ]
            weights = (torch.stack(scores) / 2).softmax(0)
            out[i, part] = sum(w * v[j, part] for w, j in zip(weights, visible, strict=True))
    torch.testing.assert_close(attention(x, context, distances)[0], attention.out(out))


def test_rows_say_how_they_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    ok = measure.row("tiny", "memferry-backward", setup(), SHORT)
    assert ok.keys() >= FIELDS and ok["status"] == "ok" and ok["host_how"] == "arena"
    assert len(ok["iters_ms"]) == 6 and len(ok["losses"]) == 8 and ok["iter_ms"] > 0
    for system in ("deepspeed-z2", "deepspeed-z3", "torchao", "fsdp2"):
        row = measure.row("tiny", system, setup(), SHORT)
        assert row["status"] == "unavailable" and "CUDA" in row["reason"] and row["iter_ms"] is None

    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory: asked for 3 GiB")

    monkeypatch.setitem(measure.SYSTEMS, "plain", full)
    row = measure.row("tiny", "plain", setup(), SHORT)
    assert row["status"] == "does not fit" and "3 GiB" in row["reason"]
    monkeypatch.setitem(measure.SYSTEMS, "plain", lambda *_: 1 / 0)
    assert measure.row("tiny", "plain", setup(), SHORT)["status"] == "failed"


def test_the_bound_is_the_largest_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bound, "MOST", 4096)
    monkeypatch.setattr(bound, "UNIT", 3000)
    found = bound.bound("tiny", setup(), SHORT)
    parts = [found[k] for k in ("forward_backward_ms", "adamw_with_copies_ms", "h2d_ms", "d2h_ms")]
    assert found["bound_ms"] == max(parts) == found[found["bound_by"]]
    assert found["parameters"] == sum(p.numel() for p in models.build("tiny").parameters())
    assert found["parameters_measured"] == 4096 and min(parts) > 0 and not found["missing"]


def test_union_of_intervals() -> None:
    assert measure.union([(5, 7), (0, 2), (1, 3), (1, 2)]) == 5
    assert measure.union([]) == 0


def _arguments(words: list[str]) -> tuple[Any, argparse.Namespace]:
    parser = argparse.ArgumentParser()
    run = command.register(parser)
    return run, parser.parse_args(words)


def test_the_command_writes_one_document_a_model_and_the_figures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    words = (
        f"--model tiny --system memferry-backward --backend cpu --threads 1 --warmup 2 --iterations 3 --no-bound "
        f"--clip none 1.0 --out {tmp_path}"
    )
    run, arguments = _arguments(words.split())
    code, result = run(arguments)
    document = json.loads((tmp_path / "tiny.json").read_text())
    assert code == 0 and document == result["models"]["tiny"]
    assert [(r["system"], r["clip"]) for r in document["records"]] == [
        ("memferry-backward", None),
        ("memferry-backward", 1.0),
    ]
    assert all(r.keys() >= FIELDS | {"bound_ms"} and r["status"] == "ok" for r in document["records"])
    for name in ("iteration-time", "losses"):
        assert (tmp_path / f"{name}.png").stat().st_size > 5000
    assert not (tmp_path / "share-of-plain.png").exists()


def test_the_curve_compares_with_plain_at_every_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Larger batches and accumulation of the own batch, clipped; a second call with --merge keeps the first one's rows."""

    def here(
        name: str, system: str, setups: list[Setup], timing: Timing, _timeout: float
    ) -> list[dict[str, Any]]:
        return [measure.row(name, system, s, timing) for s in setups]

    monkeypatch.setattr(command, "spawn", here)
    monkeypatch.setattr(command, "CURVE_TOKENS", (16, 32))
    common = f"--model tiny --backend cpu --threads 1 --warmup 1 --iterations 2 --curve --no-figures --out {tmp_path}"
    for words in (f"{common} --system plain", f"{common} --system memferry-backward --merge"):
        run, arguments = _arguments(words.split())
        assert run(arguments)[0] == 0
    records = json.loads((tmp_path / "tiny-curve.json").read_text())["records"]
    shapes = [(r["system"], r["batch"], r["accumulate"], r["tokens"], r["clip"]) for r in records]
    assert shapes == [
        (system, batch, accumulate, tokens, 1.0)
        for system in ("plain", "memferry-backward")
        for batch, accumulate, tokens in ((2, 1, 16), (4, 1, 32), (2, 2, 32))
    ]
    plain = {(r["tokens"], r["batch"]): r["iter_ms"] for r in records if r["system"] == "plain"}
    for r in records:
        assert r["share_of_plain"] == plain[r["tokens"], r["batch"]] / r["iter_ms"]


def test_a_process_that_ends_early_leaves_a_row_for_every_setting() -> None:
    rows = processes.spawn("gpt2-xxl", "bound", [setup(), setup(clip=1.0)], SHORT, 60)
    assert [r["status"] for r in rows] == ["failed", "failed"]
    assert "exit code 1" in rows[0]["reason"] and "gpt2-xxl" in rows[0]["reason"]


def test_a_process_that_does_not_end_is_ended() -> None:
    begin = time.monotonic()
    rows = processes.spawn("tiny", "plain", [setup()], Timing(1, 10**9), 3)
    assert rows[0]["status"] == "timeout" and time.monotonic() - begin < 30


def test_ranks_train_together_and_one_alone_says_so() -> None:
    rows = processes.spawn("tiny", "memferry-backward", [setup(ranks=2)], SHORT, 90)
    assert rows[0]["status"] == "ok", rows[0]["reason"]
    assert (rows[0]["ranks"], rows[0]["tokens"]) == (2, 2 * 2 * 8)
    (alone,) = processes.spawn("tiny", "memferry-backward", [setup()], SHORT, 90)
    assert rows[0]["losses"][0] == alone["losses"][0]  # rank 0's own batch
    assert rows[0]["losses"][-1] != alone["losses"][-1]  # the other's gradients count
    (plain,) = processes.spawn("tiny", "plain", [setup(ranks=2)], SHORT, 90)
    assert plain["status"] == "unavailable" and "one device" in plain["reason"]


def test_a_rank_that_fails_ends_the_others() -> None:
    rows = processes.spawn("gpt2-xxl", "bound", [setup(ranks=2)], SHORT, 90)
    assert rows[0]["status"] == "failed" and rows[0]["ranks"] == 2


def test_an_assisted_row_and_its_trace(tmp_path: Path) -> None:
    assisted = setup(assist=(8,), topology="cm384", trace=str(tmp_path))
    (row,) = processes.spawn("tiny", "memferry-backward", [assisted], SHORT, 90)
    assert row["status"] == "ok", row["reason"]
    assert row["assist"] == [8] and row["recorded"]["busy"]
    assert (tmp_path / "trace.json").exists()


def test_unknown_names_are_refused_before_anything_runs(tmp_path: Path) -> None:
    for words in (["--model", "gpt2-xxl"], ["--system", "deepspede"], ["--clip", "often", "--model", "tiny"]):
        run, arguments = _arguments([*words, "--out", str(tmp_path / "never")])
        with pytest.raises(ConfigError):
            run(arguments)
    assert not (tmp_path / "never").exists()


def test_figures_of_the_paper(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    records = []
    for system, slower in (("plain", 1.0), ("memferry-backward", 1.25)):
        for k, model in enumerate(("txl-0.7b", "txl-1.0b")):
            for batch, accumulate in ((4, 1), (8, 1), (4, 4)):
                time_ms = 10.0 * (k + 1) * batch * accumulate * slower
                records.append(
                    {
                        "model": model, "system": system, "batch": batch, "seq": 512, "clip": None, "status": "ok",
                        "accumulate": accumulate, "tokens": 512 * batch * accumulate, "iter_ms": time_ms,
                        "peak_device_gib": 1.0, "busy_share": 0.5, "losses": [3.0, 2.0], "parameters": 7e8 * (k + 1),
                        "share_of_plain": 1 / slower,
                    }
                )  # fmt: skip
    (tmp_path / "made-up.json").write_text(json.dumps({"records": records}))
    lines = plot.draw(tmp_path)
    names = [
        "iteration-time",
        "memory",
        "utilization",
        "scaling-batch",
        "scaling-model",
        "losses",
        "share-of-plain",
    ]
    assert [Path(line).stem for line in lines] == names
    assert all(Path(line).stat().st_size > 5000 for line in lines)


def test_layers_table(tmp_path: Path) -> None:
    document = layers.main(
        ["--small", "--backend", "cpu", "--repeats", "1", "--json", str(tmp_path / "l.json")]
    )
    assert json.loads((tmp_path / "l.json").read_text()) == document
    kinds = {r["layer"]: r for r in document["rows"]}
    assert kinds.keys() == {"Embedding", "LayerNorm", "Linear"}
    assert kinds["Linear"]["same_bits"] and kinds["Linear"]["streamed"] > 0
