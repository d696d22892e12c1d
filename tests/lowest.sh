#!/usr/bin/env bash
# Runs a slice of the tests on the lowest versions that pyproject.toml admits (tests/lowest.txt): imports, and what touches the
# insides of torch, Ray and transformers. A release needs it; see CONTRIBUTING.md. `tests/run.sh --all` runs the short slice.
# It makes .venv-lowest-3.11: 1.9 GB, in 40 s where the index is near.
# Usage: bash tests/lowest.sh [--short, or pytest arguments in place of the slice, e.g. tests/data]
# Another Python, with the versions of the other tests: PYTHON=python3.13 CONSTRAINTS=tests/constraints.txt bash tests/lowest.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3} constraints=${CONSTRAINTS:-tests/lowest.txt}
venv=.venv-$(basename "$constraints" .txt)-$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
inputs=$(cat pyproject.toml "$constraints" tests/lowest.sh tests/cuda_stubs.py; pwd)
if [ "$(cat "$venv/.raysharding" 2>/dev/null || true)" != "$inputs" ]; then
  "$python" -m venv --clear "$venv"
  "$venv/bin/python" -m pip install -qq --disable-pip-version-check uv </dev/null
  # uv, because it can leave out what a package requires: PyPI's torch for x86-64 requires 2 GB of CUDA.
  for unused in cuda-bindings cuda-toolkit nvidia-{cudnn,cusparselt,nccl,nvshmem}-cu13 triton; do
    echo "$unused; sys_platform == 'none'"
  done >"$venv/without.txt"
  "$venv/bin/uv" pip install -q --python "$venv/bin/python" --override "$venv/without.txt" -c "$constraints" \
    -e ".[data,datasets,hf,lora,tensorboard]" accelerate fastsafetensors hypothesis ipython psutil pytest pytest-timeout </dev/null
  [ "$(uname -m)" != x86_64 ] || "$venv/bin/python" tests/cuda_stubs.py "$venv"/lib/python3.*/site-packages/torch/lib
  printf '%s\n' "$inputs" >"$venv/.raysharding"
fi
# shellcheck disable=SC1091
source "$venv/bin/activate"
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 RAY_USAGE_STATS_ENABLED=0 TOKENIZERS_PARALLELISM=false
short=(
  tests/test_public_api.py # imports each module
  tests/distributed/saving/test_saved_files.py::test_packed_models_are_saved_as_transformers_saves_them
  tests/distributed/saving/test_saved_files.py::test_what_a_store_is_sent_comes_in_the_order_of_the_file
  tests/distributed/saving/test_merging.py::test_weights_are_accelerates
  tests/group/test_group.py::test_training_saving_and_reopening
  tests/group/launch/test_restart.py::test_a_rank_that_fails_alone_breaks_the_group_until_a_restart
  tests/group/test_transformers.py::test_a_model_equals_one_process
  tests/group/test_adapters.py::test_training_equals_peft_in_one_process
  tests/group/test_copy_to.py::test_adapters_go_alone_or_merged
)
slice=(
  tests/test_public_api.py
  tests/models
  tests/distributed/fully_shard/test_layout.py
  tests/distributed/fully_shard/test_sharding_gradients.py
  tests/distributed/saving
  tests/distributed/training
  # Where a rank is outside of a new group, torch 2.11 calls what only NCCL's backend has, not the simulated device's.
  --deselect "tests/distributed/training/test_accumulation.py::test_parts_and_calls_equal_one_process_on_all_rows[sim-4]"
  tests/group/test_group.py
  tests/group/test_transformers.py
  tests/group/test_training_calls.py
  tests/group/test_adapters.py
  tests/group/test_copy_to.py
  tests/group/test_weights.py
  tests/distributed/weights
  tests/group/fit/test_fit.py
  tests/group/fit/test_predict.py
  tests/group/launch/test_hub_groups.py
  tests/group/launch/test_restart.py
  tests/group/controller/test_errors_on_some_ranks.py
)
case ${1:-} in
  --short) set -- "${short[@]}" ;;
  "") set -- "${slice[@]}" ;;
esac
exec python -m pytest -q -m "not full" -p no:cacheprovider "$@"
