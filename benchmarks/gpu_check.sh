#!/usr/bin/env bash
# Everything that needs a GPU, in one go: the tests marked gpu, then the quick benchmark.
#
#     benchmarks/gpu_check.sh [folder for the results]
#
# Needs torch, triton and pytest, and nothing installed: it runs from the checkout. The folder is
# $OUT if that is set. PYTHON chooses the interpreter. Set COMMIT where the checkout has no .git.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:-${OUT:-benchmarks/results}}
python=${PYTHON:-python3}
export PYTHONPATH=$PWD OMP_NUM_THREADS=1
unset TRITON_INTERPRET
mkdir -p "$out"

"$python" - <<'PYTHON'
import platform
import torch, triton
gpu = torch.cuda.is_available()
print("device", torch.cuda.get_device_name() if gpu else "none: tests will skip, sizes are tiny")
print("python", platform.python_version(), "torch", torch.__version__, "triton", triton.__version__)
PYTHON
command -v nvidia-smi > /dev/null && nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv

# Warnings of other versions of torch and triton are not this project's faults.
"$python" -m pytest -m gpu tests/kernels/test_gpu.py -o filterwarnings= -p no:cacheprovider \
  --durations=10 2>&1 | tee "$out/gpu_tests.txt"
tests=$?

"$python" benchmarks/quick.py --json "$out/quick.json" 2>&1 | tee "$out/quick.txt"
quick=$?
echo "tests: exit code $tests; benchmark: exit code $quick; results in $out"
exit $((tests | quick))
