"""Build the emulated CANN into build/emulator, for the torch_npu wheel in build/ascend-site.

    python tests/emulator/build.py [--wheel]

Compiles runtime/ into libascendcl.so, operators/ into libopapi.so, collectives/ into libhccl.so, and the empty
libraries that torch_npu names at load. Nothing is done when no source, compiler or torch changed. `--wheel` first
installs torch_npu (without its dependencies, and away from the main environment: torch would load it on import
and fail where CANN is missing).
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
OUT = ROOT / "build" / "emulator"
OBJECTS = ROOT / "build" / "emulator-objects"
SITE = ROOT / "build" / "ascend-site"
WHEEL = "torch_npu==2.13.0"

# Libraries that torch_npu is linked against and whose symbols libascendcl.so provides here.
ALIASES = ["libacl_op_compiler", "libge_runner", "libgraph", "libacl_tdt_channel", "libruntime"]
# Folders of a CANN installation that torch_npu looks for when ASCEND_HOME_PATH is set.
TOOLKIT = ["opp", "runtime", "compiler"]
# Where torch_npu's undefined symbols are looked for.
USERS = ["lib/libtorch_npu.so", "lib/libtensorpipe.so", "lib/libnpu_profiler.so"]
# Not optimised: the arithmetic is in torch's own kernels, and compiling takes most of the time.
FLAGS = ["-std=c++20", "-O0", "-fPIC", "-w", "-pthread"]


def torch_folder() -> Path:
    """Where torch is installed, found without importing it."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        raise SystemExit("torch is not installed in this environment: run `make install` first")
    return Path(spec.origin).parent


def install_wheel() -> None:
    """Put the unmodified wheel into build/ascend-site, once."""
    if (SITE / "torch_npu" / "version.py").exists():
        return
    staging = Path(tempfile.mkdtemp(dir=ROOT / "build", prefix="ascend-site-"))
    command = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*command, "--target", str(staging), WHEEL], check=True)
    shutil.rmtree(SITE, ignore_errors=True)
    staging.rename(SITE)


def machinery() -> str:
    """What is given here: changes with the compiler, torch and torch_npu."""
    versions = [
        path.read_text() for path in (torch_folder() / "version.py", SITE / "torch_npu" / "version.py")
    ]
    return "\n".join([run(["g++", "--version"]), str(torch_folder()), *versions])


def fingerprint() -> str:
    """Changes whenever the libraries must be built again."""
    digest = hashlib.sha256(machinery().encode())
    for path in sorted([*HERE.glob("*/*.cpp"), *HERE.glob("*/*.h"), HERE / "build.py"]):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def run(command: list[str]) -> str:
    """Run a tool; on failure show what it said and stop."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


def symbols(path: Path, kind: str) -> set[str]:
    """The dynamic symbols of a library, `--undefined-only` or `--defined-only`."""
    lines = run(["nm", "-D", kind, str(path)]).splitlines()
    return {line.split()[-1].split("@")[0] for line in lines if line.strip()}


def missing_calls(provided: set[str]) -> list[str]:
    """CANN functions that torch_npu is linked against and that nothing here emulates."""
    package = SITE / "torch_npu"
    users = [package / name for name in USERS] + list(package.glob("_C*.so"))
    wanted = set().union(*(symbols(user, "--undefined-only") for user in users))
    cann = {name for name in wanted if name.startswith(("acl", "Msprof")) or name[:3] in {"rtG", "rtK"}}
    cann |= wanted & {"rtDevBinaryRegister", "rtFunctionRegister"}
    return sorted(cann - provided)


def missing_collectives(provided: set[str]) -> list[str]:
    """HCCL functions that are declared and that nothing here emulates. torch_npu looks them up by name."""
    header = SITE / "torch_npu" / "include" / "third_party" / "hccl" / "inc" / "hccl" / "hccl.h"
    declared = set(re.findall(r"^extern HcclResult (Hccl\w+)\(", header.read_text(), re.MULTILINE))
    return sorted(declared - provided)


def stub_source(names: list[str], code: int = 100024) -> str:
    """A function each that says once that it is not emulated, and fails with `code`.

    Functions that return a handle or ask about one return null or 0 in its place.
    """
    lines = ["#include <stdio.h>"]
    for name in names:
        handle = name.startswith(("aclCreate", "aclopCreate", "aclGetTensorDesc"))
        lines.append(
            f"long {name}(void) {{ static int said; "
            f'if (!said++) fprintf(stderr, "[emulator] {name} is not emulated\\n"); '
            f"return {0 if handle else code}; }}"
        )
    return "\n".join(lines) + "\n"


def cached(name: str, ingredients: list[str | bytes], make: Callable[[Path], object]) -> Path:
    """A file in build/emulator-objects that is made again only when what it is made from changed."""
    digest = hashlib.sha256()
    for part in ingredients:
        digest.update(part if isinstance(part, bytes) else part.encode())
    stem, suffix = name.split(".", 1)
    path = OBJECTS / f"{stem}-{digest.hexdigest()[:16]}.{suffix}"
    if not path.exists():
        for old in OBJECTS.glob(f"{stem}-{'[0-9a-f]' * 16}.{suffix}"):
            old.unlink()
        partial = path.with_name(f"partial-{path.name}")
        make(partial)
        partial.rename(path)
    return path


def build(jobs: int, machine: str) -> None:
    """Compile what changed, link everything into a fresh folder and put it in place."""
    OBJECTS.mkdir(parents=True, exist_ok=True)
    torch = torch_folder()
    acl = ["-I", str(SITE / "torch_npu" / "include")]
    aten = [*acl, "-isystem", str(torch / "include")]
    # ATen's headers take ten times as long as an operator file: parse them once.
    header = OBJECTS / "parsed.h"
    header.write_text("#include <ATen/ATen.h>\n#include <ATen/Parallel.h>\n")
    headers = b"".join(path.read_bytes() for path in sorted(HERE.glob("*/*.h")))

    def precompile(target: Path) -> None:
        run(["g++", *FLAGS, *aten, "-x", "c++-header", str(header), "-o", str(target)])

    def compile_file(source: Path) -> str:
        flags = acl
        if source.parent.name == "operators":
            flags = ["-include", str(header), *aten]
        name = f"{source.parent.name}_{source.stem}.o"
        made = cached(
            name,
            [machine, *FLAGS, *flags, headers, source.read_bytes()],
            lambda target: run(["g++", *FLAGS, *flags, "-c", str(source), "-o", str(target)]),
        )
        return str(made)

    parsed = Path(f"{header}.gch")
    with ThreadPoolExecutor(jobs) as pool:
        prepared = pool.submit(cached, "aten.gch", [machine, *FLAGS, header.read_bytes()], precompile)
        runtime = list(pool.map(compile_file, sorted(HERE.glob("runtime/*.cpp"))))
        parsed.unlink(missing_ok=True)
        parsed.hardlink_to(prepared.result())
        operators = list(pool.map(compile_file, sorted(HERE.glob("operators/*.cpp"))))
        collectives = list(pool.map(compile_file, sorted(HERE.glob("collectives/*.cpp"))))

    folder = Path(tempfile.mkdtemp(dir=OUT.parent, prefix="emulator-"))
    acl_library = folder / "libascendcl.so"
    link = ["g++", "-shared", "-pthread"]
    run([*link, "-Wl,-soname,libascendcl.so", "-o", str(acl_library), *runtime])
    stubs = folder / "stubs.c"

    def with_stubs(library: Path, parts: list[str], source: str) -> None:
        stubs.write_text(source)
        run(["gcc", "-fPIC", "-w", "-c", str(stubs), "-o", str(folder / "stubs.o")])
        run([*link, f"-Wl,-soname,{library.name}", "-o", str(library), *parts, str(folder / "stubs.o")])

    with_stubs(acl_library, runtime, stub_source(missing_calls(symbols(acl_library, "--defined-only"))))
    here = ["-L", str(folder), "-lascendcl", "-Wl,-rpath,$ORIGIN"]
    hccl_library = folder / "libhccl.so"
    run([*link, "-Wl,-soname,libhccl.so", "-o", str(hccl_library), *collectives, *here])
    missing = missing_collectives(symbols(hccl_library, "--defined-only"))
    with_stubs(hccl_library, [*collectives, *here], stub_source(missing, code=5))
    for name in ALIASES:
        run(
            [
                "gcc",
                "-shared",
                f"-Wl,-soname,{name}.so",
                "-Wl,--no-as-needed",
                "-o",
                str(folder / f"{name}.so"),
                *here,
            ]
        )
    torch_libraries = ["-L", str(torch / "lib"), "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{torch / 'lib'}"]
    run(
        [
            *link,
            "-Wl,-soname,libopapi.so",
            "-o",
            str(folder / "libopapi.so"),
            *operators,
            *here,
            *torch_libraries,
        ]
    )
    (folder / "stubs.o").unlink()
    for part in TOOLKIT:
        (folder / part).mkdir()
    shutil.rmtree(OUT, ignore_errors=True)
    folder.rename(OUT)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--wheel", action="store_true", help=f"install {WHEEL} into build/ascend-site when missing"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compilers at a time")
    options = parser.parse_args()
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        print("no emulated NPUs here: torch_npu's wheel is for Linux x86_64; tests/ascend will be skipped")
        return
    (ROOT / "build").mkdir(exist_ok=True)
    if options.wheel:
        install_wheel()
    stamp, wanted = OUT / ".fingerprint", fingerprint()
    if stamp.exists() and stamp.read_text() == wanted:
        return
    build(options.jobs, machinery())
    stamp.write_text(wanted)


if __name__ == "__main__":
    main()
