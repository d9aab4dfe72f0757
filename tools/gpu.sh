#!/usr/bin/env bash
# Build, test and measure on a bare machine (no network). usage: tools/gpu.sh build | tests [pytest args] | memcheck [pytest args] | bench [args] | layers [args] | probe [args] | budget [args] | size [args] | prediction [args]
#
# Missing Python packages come as wheels in ./.whl (docs/benchmarks/README.md says which). Results go to ${OUT:-out}.
# It works without a GPU too: the CPU backend then does the work, at sizes that suit it (--model tiny).
set -euo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-out}
SITE=${SITE:-/tmp/site}
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
mkdir -p "$OUT"
export PYTHONPATH="$SITE:$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1

importable() { "$PYTHON" -c 'import memferry_ascend._ops, memferry_ascend.topology, memferry_ascend.bench' 2>/dev/null; }

build() {
    # Only where PYTHON is the machine's own: a virtual environment of this tree has what it needs.
    if [ ! -e "$SITE/.done" ] && [ "$PYTHON" != .venv/bin/python ] && compgen -G '.whl/*.whl' >/dev/null; then
        "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$SITE" .whl/*.whl
        touch "$SITE/.done"
    fi
    "$PYTHON" setup.py -q build_ext --inplace
    # The packages that lie elsewhere in the tree get their installed names.
    importable || "$PYTHON" -m pip install -q --no-build-isolation --no-deps --no-index -e . || true
    if ! importable; then
        echo "an editable install did not work here; linking the packages instead" >&2
        ln -sfn ../topology memferry_ascend/topology
        ln -sfn ../tools/bench memferry_ascend/bench
        importable || "$PYTHON" -c 'import memferry_ascend._ops, memferry_ascend.topology, memferry_ascend.bench'
    fi
    "$PYTHON" -m memferry_ascend doctor
}

what=${1:-}
[ $# -gt 0 ] && shift
case $what in
    build) build ;;
    tests) build && "$PYTHON" -m pytest tests/cuda "$@" 2>&1 | tee "$OUT/tests.log" ;;
    bench) build && "$PYTHON" -m memferry_ascend bench --out "$OUT" "$@" 2>&1 | tee -a "$OUT/bench.log" ;;
    memcheck)
        # The suite's core under the memory checker; torch's caching allocator would hide what leaves a tensor.
        build
        PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 9 --log-file "$OUT/memcheck.txt" \
            "$PYTHON" -m pytest -x tests/cuda/test_equality_cuda.py "$@" 2>&1 | tee "$OUT/memcheck.log"
        ;;
    layers) build && "$PYTHON" -m memferry_ascend.bench.layers --json "$OUT/layers-h200.json" "$@" 2>&1 | tee "$OUT/layers.log" ;;
    budget) build && "$PYTHON" -m memferry_ascend.bench.budget --json "$OUT/budget.json" "$@" 2>&1 | tee "$OUT/budget.log" ;;
    size) build && "$PYTHON" -m memferry_ascend.bench.size --json "$OUT/size.json" "$@" 2>&1 | tee "$OUT/size.log" ;;
    prediction) build && "$PYTHON" -m memferry_ascend.bench.prediction --out "$OUT" "$@" 2>&1 | tee "$OUT/prediction.log" ;;
    probe) build && "$PYTHON" -m memferry_ascend.bench.probe_check --json "$OUT/probe-h200.json" "$@" 2>&1 | tee "$OUT/probe.log" ;;
    *) sed -n 2p "$0" | cut -c3- >&2 && exit 2 ;;
esac
