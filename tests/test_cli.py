"""The command line: lazy commands, one-sentence errors, exit codes, and doctor."""

import importlib
import json
import subprocess
import sys
import types

import pytest

from memferry_ascend import __version__, cli, doctor, sizes
from memferry_ascend.errors import FerryError


def run(capsys, *words):
    code = cli.main(list(words))
    out, err = capsys.readouterr()
    return code, out, err


def command(monkeypatch, function):
    """Puts a command `fake` into the table whose run is `function`."""
    module = types.ModuleType("fake_command")
    module.register = lambda parser: function
    monkeypatch.setitem(sys.modules, "fake_command", module)
    monkeypatch.setitem(cli.COMMANDS, "fake", ("fake_command:register", "fakes"))


def test_help_lists_every_command_without_importing_one(capsys):
    code, out, _ = run(capsys, "--help")
    assert code == 0
    for name, (_, what) in cli.COMMANDS.items():
        assert name in out
        assert what in out
    assert run(capsys, "--version") == (0, f"memferry {__version__}\n", "")
    modules = [module.partition(":")[0] for module, _ in cli.COMMANDS.values()]
    script = "import sys, memferry_ascend.cli as c; c.main(['--help']); "
    script += f"sys.exit(any(m in sys.modules for m in {modules}))"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True).returncode == 0


def test_no_command_is_help_and_a_wrong_one_names_the_nearest(capsys):
    code, out, err = run(capsys)
    assert (code, out) == (2, "")
    assert "commands:" in err
    code, out, err = run(capsys, "docter")
    assert (code, out) == (2, "")
    assert err.startswith("memferry: unknown command 'docter': did you mean 'doctor'?")
    assert err.count("\n") == 1


@pytest.mark.parametrize("words", [["--nonsense"], ["train", "--nonsense"], ["train", "--step", "3"]])
def test_wrong_flags_are_one_sentence(capsys, words):
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, "")
    assert "--help)" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("name", ["train", "doctor"])
def test_commands_explain_themselves(capsys, name):
    code, out, _ = run(capsys, name, "--help")
    assert code == 0
    assert "--json" in out


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("memferry_ascend.no_such:register", "is not part of this installation"),
        ("memferry_ascend.no.such:register", "is not part of this installation"),
    ],
)
def test_a_missing_module_is_a_sentence(capsys, monkeypatch, module, message):
    monkeypatch.setitem(cli.COMMANDS, "bench", (module, "later"))
    code, out, err = run(capsys, "bench")
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_a_missing_dependency_is_named(capsys, monkeypatch, tmp_path):
    (tmp_path / "needy.py").write_text("import no_such_dependency")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    monkeypatch.setitem(cli.COMMANDS, "bench", ("needy:register", "later"))
    assert "needs the module no_such_dependency" in run(capsys, "bench")[2]


def test_errors_are_sentences_and_bugs_are_tracebacks(capsys, monkeypatch):
    def fail(_):
        raise errors.pop()

    errors = [FerryError("too big: use less"), FileNotFoundError(2, "No such file or directory", "/x/y")]
    command(monkeypatch, fail)
    assert run(capsys, "fake") == (2, "", "memferry: /x/y: No such file or directory\n")
    assert run(capsys, "fake") == (2, "", "memferry: too big: use less\n")
    errors.append(ZeroDivisionError("a bug"))
    with pytest.raises(ZeroDivisionError):
        cli.main(["fake"])
    errors.append(KeyboardInterrupt())
    assert run(capsys, "fake") == (130, "", "memferry: interrupted\n")
    errors.append(FerryError("shown in full"))
    monkeypatch.setenv("MEMFERRY_DEBUG", "1")
    with pytest.raises(FerryError):
        cli.main(["fake"])


def test_json_is_one_object_and_the_code_is_passed_on(capsys, monkeypatch):
    command(monkeypatch, lambda _: (3, {"a": 1}))
    assert run(capsys, "fake", "--json") == (3, '{"a": 1}\n', "")
    assert run(capsys, "fake") == (3, "", "")


def test_module_and_script_are_the_same():
    done = subprocess.run([sys.executable, "-m", "memferry_ascend", "nope"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("memferry: unknown command")


def test_doctor_reports_the_machine(capsys):
    code, out, _ = run(capsys, "doctor", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["threads_in_affinity"] >= 1
    assert 0 < found["ram_available_bytes"] <= found["ram_bytes"]
    code, out, _ = run(capsys, "doctor")
    assert code == 0
    assert sizes.fmt(found["ram_bytes"]) in out


@pytest.mark.parametrize(
    ("lines", "limits", "expected"),
    [
        ("0::/a/b\n", {"memory.max": "max", "a/memory.max": "4096", "a/b/memory.max": "8192"}, 4096),
        ("0::/host/path\n", {"memory.max": "5000"}, 5000),  # in a container
        ("0::/\n", {"memory.max": "max"}, None),
        ("3:cpu,memory:/a\n0::/\n", {"memory/a/memory.limit_in_bytes": "7000"}, 7000),
        ("3:memory:/\n", {"memory/memory.limit_in_bytes": "9223372036854771712"}, None),
        ("1:cpu:/\n", {}, None),
    ],
)
def test_cgroup_limit_is_the_tightest(tmp_path, lines, limits, expected):
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text(lines)
    for name, value in limits.items():
        (tmp_path / "fs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "fs" / name).write_text(value + "\n")
    assert doctor.cgroup_limit(tmp_path, tmp_path / "fs") == expected


def test_doctor_says_when_the_native_part_is_missing(monkeypatch):
    module = types.ModuleType("memferry_ascend.hostmath")
    module.simd_level = lambda: "torch"
    monkeypatch.setitem(sys.modules, "memferry_ascend.hostmath", module)
    assert "C++17 compiler" in doctor.examine()["host_arithmetic"]
    module.simd_level, module.threads = lambda: "avx2", lambda: 4
    assert doctor.examine()["host_arithmetic"] == "native, avx2, 4 threads"
    monkeypatch.setitem(sys.modules, "memferry_ascend.hostmath", None)
    assert doctor.examine()["host_arithmetic"].startswith("missing")
