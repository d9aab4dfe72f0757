"""What is missing or broken ends in one sentence or in a documented degradation, never in wrong numbers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import emulator
import pytest
from emulator import LIBRARIES, ROOT, SITE

HERE = Path(__file__).parent
PRELUDE = """
import torch, memferry_ascend as mf
from memferry_ascend import selftest, runtime
from memferry_ascend.planner import LayerPlan, Mode, Plan
from memferry_ascend.train import models
torch.set_num_threads(1)
def make():
    torch.manual_seed(0)
    model = selftest.SmallModel()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)
def ferry(plan=None, **config):
    model, optimizer = make()
    return mf.ferry(model, optimizer, config=mf.Config(precision="fp32", **config), plan=plan)
def every(mode, grad="stage"):
    return Plan(tuple(LayerPlan(n, mode, grad) for n, m in make()[0].named_modules() if m._parameters))
def steps(engine, n=3):
    g = torch.Generator().manual_seed(1)
    for _ in range(n):
        engine.model(torch.randint(0, 32, (4, 9), generator=g).to(runtime.current().backend.device)).backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    state = engine.state_dict()["model"]
    engine.close()
    return state
def refused(call):
    try:
        call()
    except mf.FerryError as error:
        return str(error)
    raise AssertionError("expected a FerryError")
def raised_by_us(error):
    "The line that raised is one of the package. Watched torch functions are the user's own."
    import pathlib, traceback
    last = traceback.extract_tb(error.__traceback__)[-1]
    where, ours = pathlib.Path(last.filename), pathlib.Path(mf.__file__).parent
    return ours in where.parents and last.name != "__torch_function__" and where.name not in ("selftest.py", "models.py")
"""


@pytest.fixture(autouse=True)
def _emulator_runs_here() -> None:
    if emulator.why_not():
        pytest.skip(emulator.why_not() or "")


def script(body: str, check: bool = True, environ: dict[str, str] | None = None, **settings: Any) -> Any:
    """Run a few lines on emulated NPUs."""
    return emulator.run(
        ["-c", PRELUDE + textwrap.dedent(body)], check=check, environ=environ or {}, **settings
    )


def probing(body: str, cache: Path, **settings: Any) -> None:
    """`script` with an empty cache, so that the device is asked what it can do; the children that ask are forked."""
    fork = f"import sys; sys.path.insert(0, {str(HERE)!r}); import forked_probe; forked_probe.install()"
    program = f"{PRELUDE}{fork}\n{textwrap.dedent(body)}"
    emulator.run(["-c", program], environ={"MEMFERRY_CACHE": str(cache)}, **settings)


# -- nothing to run on -------------------------------------------------------------------------------------------------
def sentence(path: list[Path], libraries: list[Path]) -> tuple[str, str]:
    """What `init` and `doctor` say with this Python path and these library folders, and nothing else of CANN."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("EMU_", "ASCEND_", "LD_", "TORCH_"))}
    environ["PYTHONPATH"] = os.pathsep.join(map(str, [*path, ROOT]))
    environ["LD_LIBRARY_PATH"] = os.pathsep.join(map(str, libraries))
    code = """
import sys, memferry_ascend as mf
from memferry_ascend import cli
try:
    mf.init(backend="ascend")
except mf.FerryError as error:
    print(error)
sys.exit(cli.main(["doctor", "--json"]))
"""
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *said, found = done.stdout.strip().splitlines()
    assert len(said) == 1, said
    return said[0], json.loads(found)["ascend"]


def test_without_torch_npu() -> None:
    init, doctor = sentence([], [])
    assert init == (
        "backend 'ascend': torch_npu is not installed; pip install 'memferry_ascend[ascend]', or use backend='cpu'"
    )
    assert init.endswith(doctor)


def test_without_cann() -> None:
    init, doctor = sentence([SITE], [])
    assert "CANN is not installed or not on the library path (lib" in init
    assert init.endswith("install CANN 8.5 or newer and source its set_env.sh")
    assert init.endswith(doctor)


def test_with_a_torch_npu_for_another_torch(tmp_path: Path) -> None:
    (tmp_path / "torch_npu").mkdir()
    (tmp_path / "torch_npu" / "__init__.py").write_text("raise SystemExit('imported')")
    info = tmp_path / "torch_npu-2.7.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_npu\nVersion: 2.7.1\n")
    init, doctor = sentence([tmp_path], [LIBRARIES])
    assert "torch_npu 2.7.1 is for another torch than 2.13.0" in init
    assert "install torch_npu 2.13.*" in init
    assert init.endswith(doctor)


def test_with_a_cann_that_lacks_what_torch_npu_needs(tmp_path: Path) -> None:
    for library in LIBRARIES.glob("*.so"):
        empty = ["gcc", "-shared", "-x", "c", "/dev/null", f"-Wl,-soname,{library.name}"]
        subprocess.run([*empty, "-o", str(tmp_path / library.name)], check=True)
    init, doctor = sentence([SITE], [tmp_path])
    assert "this CANN is too old for torch_npu 2.13.0: it has no " in init
    assert init.endswith(doctor)


def test_with_a_cann_that_maps_no_host_memory() -> None:
    said = script(
        "print(refused(lambda: mf.init(backend='ascend')))",
        fail="aclrtHostRegisterV2:1+:207000",
    ).stdout
    assert "this CANN cannot map host memory into the NPU's address space; expected CANN 8.5 or newer" in said
    for route in ("unified", "registered", "locked"):
        assert f"{route}: host memory: 4.00 KiB: aclrtHostRegisterV2 failed with ACL error 207000" in said


def test_without_a_device() -> None:
    said = script("print(refused(lambda: mf.init(backend='ascend')))", devices=0).stdout
    assert said.startswith("backend 'ascend': ")
    assert len(said.strip().splitlines()) == 1


# -- routes ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("settings", "route"),
    [
        ({}, "unified"),
        ({"unified": False}, "registered"),
        ({"unified": False, "old_kernel": True}, "locked"),
    ],
)
def test_the_route_is_chosen_by_what_works(settings: dict[str, Any], route: str) -> None:
    script(
        f"""
        b = mf.init(backend="ascend").backend
        assert b.route == {route!r}, (b.route, b.routes_refused)
        near, far = steps(ferry(every(Mode.GFGB))), steps(ferry(every(Mode.DHA)))
        assert all(torch.equal(near[k], far[k]) for k in near)
        """,
        **settings,
    )


# -- coherence and direct host access ----------------------------------------------------------------------------------
def test_a_device_that_does_not_see_the_hosts_writes_runs_gfgb_only() -> None:
    script(
        """
        b = mf.init(backend="ascend").backend
        can = b.capabilities()
        assert not can.coherent and not can.dha_kinds and not can.direct_kinds
        assert any("the device did not see what the host had written" in n for n in can.notes), can.notes
        for mode in (Mode.DHA, Mode.DFGB, Mode.STREAM):
            assert "only GFGB layers run here" in refused(lambda: ferry(every(mode), update="backward"))
        said = refused(lambda: ferry(every(Mode.GFGB, "direct"), update="backward"))
        assert "has grad 'direct', but no kernel of Embedding may write host memory on ascend" in said, said
        assert 'use Config(update="backward")' in refused(lambda: ferry())
        engine = ferry(update="backward")
        assert {l.mode for l in engine.plan.layers} == {Mode.GFGB}
        there = steps(engine)
        runtime.reset()
        mf.init(backend="cpu")
        here = steps(ferry(every(Mode.GFGB), update="backward"))
        for k in here:
            torch.testing.assert_close(there[k], here[k], rtol=1e-5, atol=1e-6)
        """,
        stale=True,
    )


def test_a_kind_whose_kernel_fails_on_host_memory_is_not_read_there(tmp_path: Path) -> None:
    """One kernel ends the process, one computes something else, one reports an error."""
    probing(
        """
        b = mf.init(backend="ascend").backend
        can = b.capabilities()
        assert not {"LayerNorm", "RMSNorm", "Conv1d"} & can.dha_kinds, can
        assert {"Embedding", "Linear"} <= can.dha_kinds, can
        why = {n.split(": ")[0].rsplit(" ", 1)[1]: n for n in can.notes if n.startswith("no direct host access for ")}
        assert "it ended the process (signal 6)" in why["LayerNorm"], why
        assert "differs in float32" in why["Conv1d"], why
        assert "it failed" in why["RMSNorm"], why
        assert "LayerNorm has no direct host access" in refused(lambda: ferry(every(Mode.DHA)))
        engine = ferry()
        modes = {l.kind: l.mode for l in engine.plan.layers}
        assert modes["Embedding"] is Mode.DHA and modes["LayerNorm"] is Mode.GFGB, modes
        near = steps(engine)
        far = steps(ferry(every(Mode.STREAM)))
        assert all(torch.equal(near[k], far[k]) for k in near)
        """,
        tmp_path,
        operators="aclnnLayerNorm:crash@mapped,aclnnConvolution:wrong@mapped,aclnnMul:error@mapped",
    )


def test_a_kind_whose_gradient_kernel_fails_on_host_memory_does_not_write_there(tmp_path: Path) -> None:
    """The bias's sum ends the process, the table's rows come out wrong; the norms use neither."""
    probing(
        """
        from memferry_ascend import placement
        b = mf.init(backend="ascend").backend
        can = b.capabilities()
        assert can.direct_kinds == {"LayerNorm", "RMSNorm"}, can
        assert {"Linear", "LayerNorm"} <= can.dha_kinds, can
        why = {n.split(": ")[0].rsplit(" ", 1)[1]: n for n in can.notes if n.startswith("no direct gradients for ")}
        assert set(why) == {"Linear", "Conv1D", "Embedding"}, why
        assert "it ended the process (signal 6)" in why["Conv1D"], why
        assert "the gradient of weight differs in float32" in why["Embedding"], why
        assert "it ended the process (signal 6)" in why["Linear"], why
        said = refused(lambda: ferry(every(Mode.GFGB, "direct")))
        assert "has grad 'direct', but no kernel of Embedding may write host memory on ascend" in said, said
        near = steps(ferry(every(Mode.STREAM)))
        engine = ferry(reserve=0.0)  # what cannot be written is staged
        grads = {l.kind: str(l.grad) for l in engine.plan.layers}
        assert grads == {"Embedding": "stage", "LayerNorm": "direct", "Linear": "stage"}, grads
        far = steps(engine)
        assert all(torch.equal(near[k], far[k]) for k in near)
        """,
        tmp_path,
        operators="aclnnReduceSum:crash@mapped,aclnnIndexPutImpl:wrong@mapped",
    )


@pytest.mark.parametrize("fault", ["error", "wrong"])
def test_a_product_that_cannot_write_host_memory_is_staged(fault: str, tmp_path: Path) -> None:
    """It costs the kinds that are products, and their gradients only."""
    probing(
        f"""
        can = mf.init(backend="ascend").backend.capabilities()
        assert not {{"Linear", "Conv1D"}} & can.direct_kinds and "Embedding" in can.direct_kinds, can
        notes = [n for n in can.notes if n.startswith("no direct gradients for Linear")]
        assert len(notes) == 1 and {"it failed" if fault == "error" else "differs"!r} in notes[0], notes
        """,
        tmp_path,
        operators=f"aclnnMm:{fault}@mapped",
    )


def test_findings_are_kept_for_the_stack_they_were_made_on(tmp_path: Path) -> None:
    body = """
        from memferry_ascend.backends import ascend_probe
        ran = []
        ascend_probe.probe = lambda index, kinds: ran.append(1) or {k: "right" for k in kinds if k != "Conv2d"} | {
            "Conv2d": "wrong"}
        kinds = mf.init(backend="ascend").backend.capabilities().dha_kinds
        print(len(ran), sorted(kinds))
        """
    environ = {"MEMFERRY_CACHE": str(tmp_path)}
    first = script(body, environ=environ).stdout
    again = script(body, environ=environ).stdout
    newer = script(body, environ=environ, cann="8.6.0").stdout
    assert (first[0], again[0], newer[0]) == ("1", "0", "1")
    assert first[1:] == again[1:]
    assert "Linear" in first and "Conv2d" not in first


# -- faults while it runs ----------------------------------------------------------------------------------------------
def test_a_device_without_room_is_refused_before_anything_is_done() -> None:
    script(
        """
        mf.init(backend="ascend")
        model = torch.nn.Linear(4096, 4096)
        optimizer = torch.optim.AdamW(model.parameters())
        plan = Plan((LayerPlan("", Mode.GFGB),))
        said = refused(lambda: mf.ferry(model, optimizer, plan=plan, config=mf.Config(precision="fp32")))
        assert said.startswith("device memory: this plan keeps 64."), said
        assert model.weight.device.type == "cpu"
        """,
        hbm=32 << 20,
    )


def test_a_failed_copy_is_an_error_and_leaves_the_model_whole() -> None:
    script(
        """
        mf.init(backend="ascend")
        engine = ferry(every(Mode.STREAM))
        model = engine.model
        try:
            steps(engine, 40)
        except RuntimeError as error:
            # torch_npu's queue raises in whichever call comes next: ours has our name, an operator of the model has torch's.
            assert isinstance(error, mf.FerryError) or not raised_by_us(error), repr(error)
            assert "507899" in str(error), error
        else:
            raise AssertionError("expected an error")
        try:
            engine.close()
        except RuntimeError as error:
            assert isinstance(error, mf.FerryError), repr(error)
        assert all(p.device.type == "cpu" and torch.isfinite(p).all() for p in model.parameters())
        """,
        fail="aclrtMemcpyAsync:30+:507899",
    )


def test_a_lost_device_is_an_error() -> None:
    done = script(
        """
        mf.init(backend="ascend")
        steps(ferry(every(Mode.GFGB)), 500)
        """,
        check=False,
        lost="0:3000",
    )
    assert done.returncode != 0
    assert "507010" in done.stderr or "lost" in done.stderr


# -- peers -------------------------------------------------------------------------------------------------------------
PEERS = """
import ctypes, warnings
from memferry_ascend import assist, transfers
from memferry_ascend.topology import Measured, MeasuredPath
from memferry_ascend.topology.measured import Figures
acl = ctypes.CDLL("libascendcl.so")
figures = Figures(0.0, 5e10)
paths = Measured("host", (MeasuredPath("direct", "host", "npu:0", None, figures, figures),
                          MeasuredPath("via npu:1", "host", "npu:0", "npu:1", figures, figures)))
both = {d: paths.paths("npu:0", direction=d) for d in ("h2d", "d2h")}
made = []
def for_engine(rt, config):
    if not config.assist_devices:
        return None
    made.append(transfers.Transfers(rt.backend, both, peers={"npu:1": 1}, chunk=512))
    made[-1].install()
    return made[-1]
assist.for_engine = for_engine
b = mf.init(backend="ascend").backend
want = steps(ferry(every(Mode.STREAM)))
said = []
warnings.showwarning = lambda message, *_: said.append(str(message))
warnings.simplefilter("always")
"""


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"peers": "none"}, "cannot open their memory to each other"),
        ({"devices": 1}, "device 1 is absent"),
        ({"fail": "aclrtDeviceEnablePeerAccess:2:207000"}, "cannot open their memory to each other"),
        ({"hbm": 64 << 20}, "207001"),
    ],
    ids=["no access", "absent", "one way only", "no memory there"],
)
def test_a_peer_that_cannot_relay_is_left_out_and_named_once(settings: dict[str, Any], why: str) -> None:
    """The whole copy takes the direct path."""
    big = "made_chunk, transfers.LEAST_SHARE = 32 << 20, 0" if "hbm" in settings else "made_chunk = 512"
    script(
        PEERS.replace("chunk=512", "chunk=made_chunk")
        + f"""
{big}
got = steps(ferry(every(Mode.STREAM), assist_devices=(1,)))
assert all(torch.equal(got[k], want[k]) for k in want)
assert len(said) == 1 and {why!r} in said[0], said
assert set(made[0].moved) == {{"direct"}}, made[0].moved
""",
        **settings,
    )


def test_training_goes_on_without_a_peer_that_is_lost_between_copies() -> None:
    script(
        PEERS
        + """
engine = ferry(every(Mode.STREAM), assist_devices=(1,))
g = torch.Generator().manual_seed(1)
for k in range(3):
    engine.model(torch.randint(0, 32, (4, 9), generator=g).to(b.device)).backward()
    engine.optimizer.step()
    engine.optimizer.zero_grad()
    engine.synchronize()
    if k == 0:
        assert made[0].moved["via npu:1"] > 0
        acl.emuLoseDevice(1)
        before = made[0].moved["via npu:1"]
got = engine.state_dict()["model"]
engine.close()
assert all(torch.equal(got[k], want[k]) for k in want)
assert len(said) == 1 and "507010" in said[0], said
assert made[0].moved["via npu:1"] == before
""",
    )


def test_bytes_that_a_lost_peer_had_taken_are_an_error() -> None:
    """Another path cannot mend that: nothing says which chunks came."""
    script(
        PEERS
        + """
from memferry_ascend.backends.base import BytesLost
n = 4096
slab, device = b.alloc_host(n, mapped=True), b.alloc_device(n)
up = b.stream("upload")
b.relay(up, device, slab.host, peer=1, chunk=512)
b.synchronize()
relay = b.relays._made["upload", 1, True][2]
acl.aclrtSetDevice(1)
acl.emuHoldStream(ctypes.c_void_p(relay._first), 1)
acl.aclrtSetDevice(0)
b.relay(up, device, slab.host, peer=1, chunk=512)
b.relays_done(up)
acl.emuLoseDevice(1)
acl.emuReleaseAll()
for call in (b.synchronize, up.synchronize):
    try:
        call()
    except BytesLost as error:
        assert "through device 1" in str(error) and "507010" in str(error) and "checkpoint" in str(error), error
    else:
        raise AssertionError("expected BytesLost")
""",
    )


# -- the self-test -----------------------------------------------------------------------------------------------------
def test_selftest_on_the_emulator(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    arguments = ["-m", "memferry_ascend", "doctor", "--selftest", "--backend", "ascend", "--out", report]
    said = emulator.run(arguments).stdout
    found = json.loads(report.read_text())
    assert found["selftest"]["ok"]
    assert found["selftest"]["device"] == "npu:0"
    assert len(found["selftest"]["tests"]) == 13
    assert found["selftest"]["direct_kinds"] == ["Conv1D", "Embedding", "LayerNorm", "Linear", "RMSNorm"]
    assert "host memory: route unified" in found["ascend"]
    assert "FAIL" not in said


def test_selftest_fails_on_a_broken_device(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    arguments = ["-m", "memferry_ascend", "doctor", "--selftest", "--backend", "ascend", "--out", report]
    environ = {"MEMFERRY_CACHE": str(tmp_path)}
    done = emulator.run(arguments, check=False, environ=environ, stale=True)
    assert done.returncode == 1
    found = json.loads(report.read_text())["selftest"]
    assert not found["coherent"]
    assert not found["tests"]["coherence"]["ok"]
    assert found["tests"]["fp32 DHA"]["ok"]  # GFGB in its place
