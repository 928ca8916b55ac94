#!/usr/bin/env bash
# Installs what tests/browser needs: playwright, and Chromium where neither the system nor playwright has one.
set -euo pipefail
cd "$(dirname "$0")/.."

.venv/bin/python -c "import playwright" 2>/dev/null ||
  .venv/bin/python -m pip install -qq --disable-pip-version-check "playwright>=1.45"
if [ -n "${INFLIGHT_CHROMIUM:-}" ] || command -v chromium >/dev/null || command -v chromium-browser >/dev/null; then exit; fi
if .venv/bin/python -m playwright install --with-deps chromium 2>/dev/null; then exit; fi
if command -v apt-get >/dev/null; then
  echo "playwright's Chromium could not be fetched; installing the system's"
  apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core && exit
fi
echo "browser.sh: no Chromium could be installed; set INFLIGHT_CHROMIUM=/path/to/chromium" >&2
exit 1
