#!/usr/bin/env bash
# Installs the lowest versions that pyproject.toml admits (tests/lowest.txt) into .venv-lowest, and runs a slice of the tests on them:
# what touches the insides of torch, Ray and transformers. A release needs it; see CONTRIBUTING.md.
# Usage: bash tests/lowest.sh [pytest arguments instead of the slice, e.g. tests/data]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=.venv-lowest
inputs=$(cat pyproject.toml tests/lowest.txt "${BASH_SOURCE[0]}" tests/cuda_stubs.py; pwd)
if [ "$(cat $venv/.raysharding 2>/dev/null || true)" != "$inputs" ]; then
  rm -rf $venv
  "${PYTHON:-python3}" -m venv $venv
  $venv/bin/python -m pip install -qq --disable-pip-version-check uv </dev/null
  # uv, for it installs in parallel, and can leave out what a package requires: PyPI's torch 2.11 for x86-64 requires 2 GB of CUDA.
  for unused in cuda-bindings cuda-toolkit nvidia-cudnn-cu13 nvidia-cusparselt-cu13 nvidia-nccl-cu13 nvidia-nvshmem-cu13 triton; do
    echo "$unused; sys_platform == 'none'"
  done >$venv/without.txt
  $venv/bin/uv pip install -q --python $venv/bin/python --override $venv/without.txt -c tests/lowest.txt \
    -e ".[data,datasets,hf,lora,tensorboard]" accelerate fastsafetensors hypothesis ipython psutil pytest pytest-timeout </dev/null
  # shellcheck disable=SC2086 # the name of Python's folder is the venv's
  [ "$(uname -m)" != x86_64 ] || $venv/bin/python tests/cuda_stubs.py $venv/lib/python3.*/site-packages/torch/lib
  printf '%s\n' "$inputs" >$venv/.raysharding
fi
# shellcheck disable=SC1091
source $venv/bin/activate
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 RAY_USAGE_STATS_ENABLED=0 TOKENIZERS_PARALLELISM=false
slice=(
  tests/test_layering.py
)
[ $# -gt 0 ] || set -- "${slice[@]}"
exec python -m pytest -q -m "not full" -p no:cacheprovider "$@"
